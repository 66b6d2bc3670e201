"""Measures of curves, compared with the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from fedjax_mm.metrics import (
    estimate,
    fairness,
    final,
    first_round_below,
    gain,
    log_gap,
    standard_error,
)
from tests.oracles import multi_model as reference


def test_first_round_below_agrees_with_the_oracle():
    rng = np.random.default_rng(0)
    errors = rng.normal(size=(50, 8))
    found = first_round_below(errors, np.arange(8), -1.0)
    expected = [reference.first_round_below(row, -1.0) for row in errors]
    np.testing.assert_array_equal(found, expected)
    assert np.isnan(found).any()
    assert not np.isnan(found).all()


def test_thresholds_may_differ_and_rounds_may_be_sparse():
    found = first_round_below([[3.0, 1.0], [3.0, 1.0]], [0, 50], [3.0, 0.5])
    np.testing.assert_array_equal(found, [0, np.nan])


@pytest.mark.parametrize(("t1", "tm", "expected"), [(50, 117, 3.846), (50, 126, 3.571)])
def test_gain_equals_that_of_table_4(t1, tm, expected):
    assert gain(9, t1, tm) == pytest.approx(expected, abs=5e-4)
    assert gain(9, t1, tm) == pytest.approx(reference.gain(9, t1, tm), rel=1e-15)


def test_an_unreached_target_has_no_gain():
    assert np.isnan(gain(9, 50, np.nan))


def test_log_gap_and_standard_error():
    np.testing.assert_allclose(log_gap([100.0, 1e-4, 0.0]), [2, -4, -np.inf])
    samples = np.random.default_rng(0).normal(size=(30, 2))
    np.testing.assert_allclose(
        standard_error(samples), samples.std(axis=0, ddof=1) / np.sqrt(30), rtol=1e-12
    )
    assert np.isnan(standard_error(samples[:1])).all()


ACCURACIES = np.array([0.2, 0.4, 0.5, 0.6, 0.6, 0.7, 0.8, 0.8, 0.9, 1])
EXAMPLES = np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 11])


def test_fairness_has_the_numbers_computed_by_hand():
    even, uneven = fairness(ACCURACIES), fairness(ACCURACIES, weights=EXAMPLES)
    assert even.mean == pytest.approx(0.65)
    assert uneven.mean == pytest.approx(0.825)
    assert np.sqrt(even.variance) == pytest.approx(0.229129, abs=1e-6)
    assert uneven.variance == pytest.approx(0.056875)
    assert even.jain == pytest.approx(0.889474, abs=1e-6)
    assert even.entropy == pytest.approx(2.233263, abs=1e-6)
    assert even.evenness == pytest.approx(2.233263 / np.log(10), abs=1e-6)
    assert (even.worst, even.best) == pytest.approx((0.2, 1.0))
    assert uneven.worst == pytest.approx(0.3), "two of twenty examples"
    assert fairness(ACCURACIES, share=0.25).worst == pytest.approx(1.1 / 3), "three of ten clients"


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("larger", [True, False])
def test_weights_count_a_client_as_so_many(share, larger):
    """Equal numbers in any order, from NumPy and inside `jax.jit`."""
    rng, how = np.random.default_rng(0), {"share": share, "larger_is_better": larger}
    values, counts = rng.uniform(size=(2, 3, 7)), rng.integers(1, 5, 7)
    order = rng.permutation(counts.sum())
    expected = fairness(np.repeat(values, counts, axis=-1)[..., order], **how)
    found = fairness(values, weights=counts, **how)
    exact = share * counts.sum() % 1 == 0  # otherwise clients are not divided
    for name, a, b in zip(found._fields, found, expected, strict=True):
        if exact or name not in ("worst", "best"):
            np.testing.assert_allclose(a, b, rtol=1e-12, err_msg=name)
    same = jax.jit(lambda x, w: fairness(x, weights=w, **how))(values, counts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), same, found)


def test_the_worst_thirty_clients_of_many_are_exactly_a_share():
    """0.1 * 30 exceeds 3 in floating point."""
    for n in (10, 30, 70, 1000, 3000):
        x = np.arange(float(n))
        assert fairness(x).worst == pytest.approx(np.arange(n // 10).mean())
        assert fairness(jnp.asarray(x)).worst == pytest.approx(np.arange(n // 10).mean(), rel=1e-4)


def test_clients_without_a_number_are_left_out():
    x, w = np.append(ACCURACIES, np.nan), np.append(EXAMPLES, 7)
    for weights, alone in (
        (None, fairness(ACCURACIES)),
        (w, fairness(ACCURACIES, weights=EXAMPLES)),
    ):
        np.testing.assert_allclose(fairness(x, weights=weights), alone, rtol=1e-12)
    assert np.isnan(fairness(np.full(3, np.nan))).all()


def test_equal_values_are_fair_and_zeros_have_no_index():
    equal, zero = fairness(np.full(5, 0.3)), fairness(np.zeros(5))
    assert (equal.variance, equal.jain, equal.evenness) == pytest.approx((0, 1, 1))
    assert (zero.mean, zero.worst, zero.variance) == (0, 0, 0)
    assert np.isnan([zero.jain, zero.entropy, zero.evenness]).all()
    for negative in ([1.0, -0.5], [-0.2, -0.4]):
        assert np.isnan(fairness(np.array(negative)).entropy)


def paired_result():
    """Losses of two methods, whose seeds differ more than the methods."""
    loss = np.array([10.0, 20, 40]) + np.array([[0.0, 0, 0], [-1, -0.7, -1.3]])
    loss = np.broadcast_to(loss[..., None, None], (2, 3, 2, 2)).copy()
    loss[:, :, 0] = np.nan  # only the last record counts
    dims = ("algorithm", "seed", "round", "model")
    return xr.Dataset({"loss": (dims, loss)}, {"algorithm": ["A", "B"], "round": [0, 10]})


def test_final_values_are_paired_by_seed():
    end = final(paired_result())
    mean, error = estimate(end.sel(algorithm="B") - end.sel(algorithm="A"))
    assert (mean.item(), error.item()) == pytest.approx((-1.0, 0.3 / np.sqrt(3)))


def test_a_diverged_model_takes_its_run_and_an_unused_one_does_not():
    result = paired_result()
    result.loss[0, 1, :, 1] = np.nan
    is_known = np.isfinite(final(result)).values.tolist()
    assert is_known == [
        [True, False, True],
        [True, True, True],
    ]  # no name or attribute identifies it
    diverged = xr.full_like(result.loss.isel(round=0, drop=True), -1)
    unused = result.assign(diverged=diverged)
    assert np.isfinite(final(unused)).all()
    diverged[0, 1, 1] = 5
    ended = result.assign(diverged=diverged, loss=result.loss.fillna(7.0))
    assert np.isfinite(final(ended)).values.tolist() == is_known


def test_clients_models_are_compared_if_there_are_any():
    result = paired_result().assign(personal_loss=2 * paired_result().loss)
    np.testing.assert_allclose(final(result), 2 * final(paired_result(), "loss"))
    result = result.assign(personal_accuracy=0 * result.loss)
    np.testing.assert_allclose(final(result), 0.0)
    with pytest.raises(ValueError, match="no 'lss', but loss"):
        final(result, "lss")
