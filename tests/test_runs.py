"""Runs: the same numbers as a loop over seeds, however they are cut into segments."""

import jax
import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from fedjax_mm import Experiment, Trace, run, runs, simulate, to_dataset
from fedjax_mm.runs import seed_keys

ALGORITHMS = {
    "RR": {
        "assignment": {"name": "mfa_rr"},
        "learning_rate": {"beta": 3, "gamma": 20, "per": "frame"},
        "local_steps": 2,
    },
    "Rand": {
        "assignment": {"name": "mfa_rand", "cohort_size": 3},
        "learning_rate": 0.1,
        "local_steps": 3,
    },
}


def experiment(*labels, **changes):
    """Two models, five clients: unequal groups, a rate by frames, a cohort for one algorithm."""
    config = {
        "task": {"num_clients": 5, "block_size": 2, "mu": 0.05, "start": "normal"},
        "num_models": 2,
        "num_rounds": 11,
        "num_seeds": 3,
        "seed": 4,
        "algorithms": {label: ALGORITHMS[label] for label in labels or ALGORITHMS},
    }
    return Experiment.model_validate(config | changes)


@pytest.fixture(scope="module")
def result():
    """The experiment as it stands, and the progress that was reported."""
    reports = []
    dataset = run(experiment(), lambda *report: reports.append(report))
    return dataset, reports


def check_close(actual, expected):
    """Counts equal; metrics to 1e-6 of their largest value, the order of summation being free."""
    assert set(actual.data_vars) == set(expected.data_vars)
    for name in actual.data_vars:
        one, other = xr.broadcast(actual[name], expected[name].transpose(*actual[name].dims))
        scale = np.abs(other).max().item() if other.dtype.kind == "f" else 0
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * scale, err_msg=str(name))


@pytest.mark.parametrize("label", ["RR", "Rand"])
def test_run_equals_a_loop_over_seeds(result, label):
    config = experiment()
    algorithm = config.algorithms[label]
    built = (
        config.task.build(),
        algorithm.build(config.num_models),
        algorithm.assignment.build(config.task.num_clients, config.num_models),
    )
    start = config.task.initial_params()
    one_run = jax.jit(lambda key: simulate(key, *built, config.num_rounds, params=start)[1])
    loop = [to_dataset(one_run(key)) for key in seed_keys(config.seed, config.num_seeds)]
    dataset, _ = result
    check_close(dataset.sel(algorithm=label, drop=True), xr.concat(loop, dataset.seed))


def test_seeds_algorithms_and_models_differ(result):
    """Or the comparisons here could not tell them apart."""
    final = result[0].distance.isel(round=-1).values.ravel()
    assert len(np.unique(final)) == final.size == 2 * 3 * 2


@pytest.mark.parametrize("num_segments", [1, 3, 7])
def test_segments_do_not_change_results(monkeypatch, result, num_segments):
    """11 rounds: in one, in 4 + 4 + 3, in 2 + ... + 2 + 1."""
    monkeypatch.setattr(runs, "_NUM_SEGMENTS", num_segments)
    reports = []
    dataset = run(experiment("RR"), lambda *report: reports.append(report))
    check_close(dataset, result[0].sel(algorithm=["RR"]))
    assert dataset["round"].values.tolist() == list(range(12))
    lengths = {1: [11], 3: [4, 4, 3], 7: [2, 2, 2, 2, 2, 1]}[num_segments]
    done = [done for label, done, _ in reports if label == "RR"]
    assert done == [0, *np.cumsum(lengths)]


@pytest.mark.parametrize("num_segments", [1, 3])
def test_records_are_thinned_out(monkeypatch, num_segments):
    """Every third of 12 rounds is what recording all of them has there, counts included."""
    monkeypatch.setattr(runs, "_NUM_SEGMENTS", num_segments)
    every, third = (run(experiment("RR", num_rounds=12, record_every=step)) for step in (1, 3))
    assert third["round"].values.tolist() == [0, 3, 6, 9, 12]
    check_close(third, every.sel({"round": third["round"]}))


@given(st.integers(1, 500), st.integers(1, 12))
def test_segments_are_whole_records_of_at_most_two_lengths(num_records, record_every):
    """Two lengths are two compilations."""
    segments = runs._segments(num_records * record_every, record_every)
    assert sum(segments) == num_records * record_every
    assert all(length > 0 and length % record_every == 0 for length in segments)
    assert len(segments) <= runs._NUM_SEGMENTS
    assert len(set(segments[:-1])) <= 1
    assert segments[-1] <= segments[0]


def test_progress_goes_forward_to_the_end(result):
    """Algorithm by algorithm: compiling, then the rounds, counted over both."""
    _, reports = result
    assert list(dict.fromkeys(label for label, _, _ in reports)) == [
        *("RR: compiling", "RR"),
        *("Rand: compiling", "Rand"),
    ]
    assert {total for _, _, total in reports} == {22}
    every = [done for _, done, _ in reports]
    assert every == sorted(every)
    for name, start in (("RR", 0), ("Rand", 11)):
        done = [done for label, done, _ in reports if label.startswith(name)]
        assert done[0] == start
        assert done[-1] == start + 11
        assert len(done) > 3


def test_labels_and_manifest(result):
    dataset, _ = result
    assert dict(dataset.sizes) == {"algorithm": 2, "seed": 3, "round": 12, "model": 2}
    assert dataset.algorithm.values.tolist() == ["RR", "Rand"]
    assert dataset.seed.values.tolist() == [0, 1, 2]
    about = dataset.attrs["manifest"]
    assert Experiment.model_validate(about["config"]) == experiment()
    assert (about["seed"], about["data"]) == (4, "synthetic")
    assert set(about["wall_seconds"]) == {"compile", "run"}
    assert all(seconds > 0 for seconds in about["wall_seconds"].values())


def test_all_replicas_start_at_the_same_point(result):
    start = result[0].distance.sel(round=0)
    config = experiment().task
    expected = config.build().metrics(config.initial_params())["distance"]
    np.testing.assert_allclose(start, np.full(start.shape, expected), rtol=1e-6)


def test_a_replica_does_not_depend_on_how_many_there_are(result):
    for num_seeds in (2, 5):
        dataset = run(experiment("Rand", num_seeds=num_seeds))
        both = slice(min(num_seeds, 3))
        check_close(dataset.isel(seed=both), result[0].sel(algorithm=["Rand"]).isel(seed=both))


def test_float64_is_float64_and_leaves_the_precision_of_the_process_alone(result):
    before = jax.config.jax_enable_x64
    dataset = run(experiment(precision="float64"))
    assert jax.config.jax_enable_x64 == before
    assert jax.numpy.zeros(()).dtype == (np.float64 if before else np.float32)
    for name in ("loss", "excess_loss", "distance"):
        single, double = result[0][name], dataset[name]
        assert (single.dtype, double.dtype) == (np.float32, np.float64)
        # The same clients were drawn, so that only rounding differs; and digits were gained.
        np.testing.assert_allclose(single, double, rtol=1e-4)
        assert np.any(double != double.astype(np.float32))
    check_close(dataset[["gradients"]], result[0][["gradients"]])


def test_the_precision_is_left_alone_after_an_error():
    before = jax.config.jax_enable_x64

    def interrupt(label, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment(precision="float64"), interrupt)
    assert jax.config.jax_enable_x64 == before


@pytest.mark.parametrize("record_every", [1, 4])
def test_divergence_stops_the_run_and_is_named(record_every):
    diverging = {"assignment": {"name": "mfa_rr"}, "learning_rate": 50.0, "local_steps": 5}
    config = experiment(num_rounds=80, record_every=record_every, algorithms={"Hot": diverging})
    with pytest.raises(
        FloatingPointError, match=r"Hot diverged: .* model \d, seed \d, is not finite"
    ):
        run(config)


def test_the_first_divergence_is_the_one_that_is_named():
    """Of several seeds, models and rounds; rounds are those recorded."""
    loss = np.zeros((3, 4, 2))  # seeds, records, models
    loss[0, 3, 0] = np.inf
    loss[1, 2, 1] = np.nan
    loss[2, 3, 0] = np.nan
    rounds = np.tile([10, 15, 20, 25], (3, 1))
    trace = Trace(rounds, {"loss": loss}, None, None, 1, 1)
    with pytest.raises(
        FloatingPointError, match=r"^A diverged: loss of model 2, seed 1, .* round 20;"
    ):
        runs._check_finite(trace, "A")
