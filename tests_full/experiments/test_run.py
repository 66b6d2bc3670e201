"""Runs equal a loop over seeds, for any length of segments."""

import jax
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import Experiment, run, simulate, to_dataset
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.experiments.overrides import load
from fedjax_mm.sweeps import DivergenceError
from fedjax_mm.sweeps.errors import RefusedError
from fedjax_mm.sweeps.execution import Execution, progress
from fedjax_mm.sweeps.program import Program
from tests.helpers import share_grids

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
    """Two models and five clients, so that cohorts are unequal."""
    config = {
        "task": {"num_clients": 5, "block_size": 2, "mu": 0.05, "start": "normal"},
        "num_models": 2,
        "num_rounds": 12,
        "num_seeds": 3,
        "seed": 4,
        "algorithms": {label: ALGORITHMS[label] for label in labels or ALGORITHMS},
    }
    return Experiment.model_validate(config | changes)


@pytest.fixture(autouse=True, scope="module")
def shared_grids():
    with pytest.MonkeyPatch.context() as patch:
        share_grids(patch)
        yield


@pytest.fixture(scope="module")
def result():
    """The result of the experiment, and its progress reports."""
    reports = []
    dataset = run(experiment(), Execution([progress(lambda *report: reports.append(report))]))
    return dataset, reports


def check_close(actual, expected):
    """Checks counts exactly, and metrics to 1e-6 of their largest value."""
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
    loop = [to_dataset(one_run(key)) for key in seed_keys(config.seed, range(config.num_seeds))]
    dataset, _ = result
    actual = dataset.sel(algorithm=label, drop=True)
    assert np.all(actual.diverged == -1)
    check_close(actual, xr.concat(loop, dataset.seed))


def test_seeds_algorithms_and_models_differ(result):
    """Otherwise the comparisons in this module could not distinguish them."""
    final = result[0].distance.isel(round=-1).values.ravel()
    assert len(np.unique(final)) == final.size == 2 * 3 * 2


@pytest.mark.parametrize("kept", [1, 4, 12])
def test_segments_do_not_change_results(monkeypatch, result, kept):
    """Segments have one record, or grow to 4 records, or grow without limit."""
    monkeypatch.setattr(Program, "records_kept", kept)
    reports = []
    dataset = run(experiment("RR"), Execution([progress(lambda *report: reports.append(report))]))
    check_close(dataset, result[0].sel(algorithm=["RR"]))
    assert dataset["round"].values.tolist() == list(range(13))
    updates = [done for label, done, _ in reports if label == "RR"]
    rounds = np.diff(updates) / (3 * 5)  # seeds x clients
    assert sum(rounds) == 12
    assert rounds[0] == 1
    assert max(rounds) <= kept


def test_record_every_selects_rounds(result):
    """Recording every third round gives the values of a full record, counts included."""
    third = run(experiment("RR", record_every=3))
    assert third["round"].values.tolist() == [0, 3, 6, 9, 12]
    check_close(third, result[0].sel({"algorithm": ["RR"], "round": third["round"]}))


def test_progress_increases_to_the_end(result):
    """Reports cover compilation, and then the local trainings of each algorithm."""
    _, reports = result
    labels = list(dict.fromkeys(label for label, _, _ in reports))
    compiled = [f"compiled {number} of 2 programs" for number in (1, 2)]
    assert labels == ["compiling 2 programs", *compiled, "RR", "Rand"]
    reports = [report for report in reports if not report[0].startswith("compil")]
    # Seeds x clients x rounds. A cohort of 3 is padded to 4 for 2 models.
    half, rest = 3 * 5 * 12, 3 * 4 * 12
    assert {total for _, _, total in reports} == {half + rest}
    every = [done for _, done, _ in reports]
    assert every == sorted(every)
    for name, start, end in (("RR", 0, half), ("Rand", half, half + rest)):
        done = [done for label, done, _ in reports if label == name]
        assert (done[0], done[-1]) == (start, end)
        assert len(done) > 2


def test_labels_and_manifest(result):
    dataset, _ = result
    assert dict(dataset.sizes) == {"algorithm": 2, "seed": 3, "round": 13, "model": 2}
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
    expected = config.build().metrics(jax.random.key(0), config.initial_params())["distance"]
    np.testing.assert_allclose(start, np.full(start.shape, expected), rtol=1e-6)


@pytest.mark.parametrize("num_seeds", [5, pytest.param(2, marks=pytest.mark.slow)])
def test_a_replica_does_not_depend_on_the_number_of_replicas(result, num_seeds):
    dataset = run(experiment("Rand", num_seeds=num_seeds))
    both = slice(min(num_seeds, 3))
    check_close(dataset.isel(seed=both), result[0].sel(algorithm=["Rand"]).isel(seed=both))


def test_float64_runs_keep_the_precision_of_the_process(result):
    before = jax.config.jax_enable_x64
    dataset = run(experiment(precision="float64"))
    assert jax.config.jax_enable_x64 == before
    assert jax.numpy.zeros(()).dtype == (np.float64 if before else np.float32)
    for name in ("loss", "excess_loss", "distance"):
        single, double = result[0][name], dataset[name]
        assert (single.dtype, double.dtype) == (np.float32, np.float64)
        # The same clients were drawn, so only rounding differs. The second check is for new digits.
        np.testing.assert_allclose(single, double, rtol=1e-4)
        assert np.any(double != double.astype(np.float32))
    check_close(dataset[["gradients"]], result[0][["gradients"]])


def test_the_precision_is_restored_after_an_error():
    before = jax.config.jax_enable_x64

    def interrupt(label, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment(precision="float64"), Execution([progress(interrupt)]))
    assert jax.config.jax_enable_x64 == before


@pytest.mark.parametrize("record_every", [1, 4])
def test_divergence_stops_the_run_with_an_error(record_every):
    diverging = {"assignment": {"name": "mfa_rr"}, "learning_rate": 50.0, "local_steps": 5}
    config = experiment(num_rounds=80, record_every=record_every, algorithms={"Hot": diverging})
    with pytest.raises(DivergenceError, match=r"Hot diverged: .* model \d, seed \d, is not finite"):
        run(config)


DIGITS = """\
num_models = 1
num_rounds = 10
num_seeds = 2
record_every = 5

[task]
name = "digits"
num_clients = 20
partition = { name = "dirichlet", alpha = 1.0 }

[algorithms.FedAvg]
assignment = { name = "mfa_rand", cohort_size = 10 }
learning_rate = 0.5
epochs = 2
batch_size = 10
"""


def test_digits_from_a_file_are_learned(tmp_path):
    path = tmp_path / "digits.toml"
    path.write_text(DIGITS)
    config = load(path, Experiment)
    dataset = run(config)
    assert dataset.attrs["manifest"]["data"] == "real"
    data = config.task.data()
    majority = np.bincount(np.asarray(data.test.examples[1])).max() / data.test.num_examples
    accuracy = dataset.test_accuracy.mean(("algorithm", "seed", "model"))
    assert accuracy.isel(round=0) < 2 * majority
    assert accuracy.isel(round=-1) > 0.8 > 2 * majority
    # Each of 20 clients has about 72 images, so that 10 clients take about 154 steps per round.
    assert 1400 < dataset.gradients.isel(round=-1).mean() < 1700


def test_a_sweep_on_synthetic_data_equals_single_runs():
    settings = {
        "task": {"name": "synthetic", "num_clients": 6, "dim": 10, "data_seed": 3},
        "num_models": 2,
        "num_rounds": 3,
        "num_seeds": 2,
        "algorithms": {
            "A": {"assignment": {"name": "mfa_rr"}, "learning_rate": 0.1, "local_steps": 4}
            | {"batch_size": 5}
        },
    }
    rates = [0.05, 0.1]
    swept = run(Experiment.model_validate(settings | {"axes": {"learning_rate": rates}}))
    assert swept.attrs["manifest"]["data"] == "synthetic"
    single = run(Experiment.model_validate(settings))
    check_close(swept.sel(learning_rate=0.1, drop=True), single)
    assert np.all(swept.loss.isel(round=-1) < swept.loss.isel(round=0))


def test_an_impossible_partition_is_refused_in_one_line():
    partition = {"name": "dirichlet", "alpha": 0.01, "min_examples": 60}
    config = Experiment.model_validate(
        {
            "task": {"name": "digits", "num_clients": 20, "partition": partition},
            "num_models": 1,
            "num_rounds": 1,
            "algorithms": {"A": ALGORITHMS["Rand"]},
        }
    )
    with pytest.raises(RefusedError, match=r"^[^\n]*raise alpha[^\n]*$"):
        run(config)
