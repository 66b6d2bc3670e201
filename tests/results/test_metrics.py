"""Measures of curves, compared with the oracle."""

import numpy as np
import pytest
import xarray as xr

from fedjax_mm.metrics import compare, first_round_below, gain, log_gap, standard_error
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


def paired_result():
    """Losses of two methods and two rates, whose seeds differ more than the methods."""
    method = np.array([[0.0, 0, 0], [-1, -0.7, -1.3]])
    loss = np.array([10.0, 20, 40]) + method[:, None]
    loss = np.broadcast_to(loss[..., None, None], (2, 2, 3, 2, 2))
    dims = ("algorithm", "rate", "seed", "round", "model")
    coords = {"algorithm": ["A", "B"], "rate": [0.1, 0.2], "round": [0, 10]}
    return xr.Dataset({"loss": (dims, loss)}, coords)


def test_methods_are_compared_seed_by_seed():
    found = compare(paired_result(), "algorithm")
    assert found.difference.dims == ("algorithm", "rate")
    np.testing.assert_allclose(found.difference.sel(algorithm="B"), -1.0)
    np.testing.assert_allclose(found.standard_error, 0.3 / np.sqrt(3))
    other = compare(paired_result(), "algorithm", baseline="B")
    np.testing.assert_allclose(other.difference.sel(algorithm="A"), 1.0)
    two = compare(paired_result().isel(seed=[0, 1]), "algorithm")
    assert np.isnan(two.standard_error).all()


@pytest.mark.parametrize(
    ("axis", "how", "message"),
    [
        ("method", {}, "no axis 'method', but algorithm, rate"),
        ("seed", {}, "no axis 'seed'"),
        ("algorithm", {"metric": "lss"}, "no 'lss', but loss"),
        ("algorithm", {"baseline": "C"}, "baseline is 'C', and algorithm has A, B"),
    ],
)
def test_unknown_comparisons_are_refused(axis, how, message):
    with pytest.raises(ValueError, match=message):
        compare(paired_result(), axis, **how)
