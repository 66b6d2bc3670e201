"""Results: labelled counts, round trips through files, and atomic writes."""

import copy
import dataclasses
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import fedavg, full_participation, mfa_rand, mfa_rr, sequential, simulate, to_dataset
from fedjax_mm.base import Contribution
from fedjax_mm.cli.results import show
from fedjax_mm.results.dataset import join_seeds, save_dataset
from fedjax_mm.results.finished import open_result
from fedjax_mm.results.manifest import manifest, read_about, save_about
from fedjax_mm.results.tracked import Tracked
from fedjax_mm.simulator.record import Trace
from fedjax_mm.tasks import quadratic
from fedjax_mm.tools.files import prepare_directory, save_json, sealed, write_aside

COUNTS = ("client_updates", "gradients", "parameters_up", "parameters_down")
DIM = 6 * 2 + 1  # of the quadratic in `simulated`


def simulated(assignment, num_rounds, record_every):
    task, algorithm = quadratic(6, 2, mu=0.1), fedavg(0.1, local_steps=3)
    return simulate(
        jax.random.key(0), task, algorithm, assignment, num_rounds, record_every=record_every
    )[1]


def files(directory):
    return sorted(path.name for path in directory.iterdir())


# Datasets


@pytest.mark.parametrize(
    ("assignment", "num_rounds", "record_every", "updates", "idle"),
    [
        # Four of six clients a round, two for each model.
        (mfa_rand(6, 2, cohort_size=4), 6, 2, [[0, 0], [4, 4], [8, 8], [12, 12]], [[0, 0]] * 4),
        (mfa_rand(6, 1, cohort_size=4), 3, 1, [[0], [4], [8], [12]], [[0]] * 4),
        # Six clients train the first model for three rounds, then the second.
        (
            sequential(6, 2, rounds_per_model=3),
            6,
            2,
            [[0, 0], [12, 0], [18, 6], [18, 18]],
            [[0, 0], [0, 2], [1, 3], [3, 3]],
        ),
    ],
)
def test_counts_are_exact_and_cumulative(assignment, num_rounds, record_every, updates, idle):
    dataset = to_dataset(simulated(assignment, num_rounds, record_every))
    expected = dict(zip(COUNTS, (np.array(updates) * n for n in (1, 3, DIM, DIM)), strict=True))
    expected["idle_rounds"] = np.array(idle)
    for name, values in expected.items():
        assert dataset[name].dtype == np.int64
        np.testing.assert_array_equal(dataset[name], values)
    assert dataset["round"].values.tolist() == list(range(0, num_rounds + 1, record_every))


def test_unequal_groups_add_up_to_the_cohort():
    """Each round assigns 3 of five clients to one of two models, and 2 to the other."""
    updates = to_dataset(simulated(mfa_rand(6, 2, cohort_size=5), 8, 1)).client_updates
    np.testing.assert_array_equal(updates.sum("model"), 5 * np.arange(9))
    per_round = np.diff(updates, axis=0)
    assert set(np.unique(per_round)) == {2, 3}


def trace(updates, *, upload_size=1, download_size=1):
    """A trace with 32-bit counts ``[..., records, models]`` since the last record."""
    updates = np.asarray(updates, np.int32)
    *lead, records, _ = updates.shape
    rounds = np.broadcast_to(10 * np.arange(records, dtype=np.int32), (*lead, records))
    metrics = {"loss": updates / 2, "accuracy": -updates / 4}
    return Trace(rounds, metrics, updates, updates, updates, upload_size, download_size)


def test_counts_do_not_overflow_32_bits():
    many = 2_000_000_000
    dataset = to_dataset(trace([[0], [many], [many]], upload_size=1000, download_size=7))
    expected = {"client_updates": 1, "gradients": 1, "parameters_up": 1000, "parameters_down": 7}
    for name, factor in expected.items():
        assert dataset[name].values[:, 0].tolist() == [0, factor * many, factor * 2 * many]


@pytest.mark.parametrize(("rounds", "fits"), [(2, True), (3, False)])
def test_an_overflowing_counter_is_an_error(rounds, fits):
    """A round has 2^30 gradients, and there are two or three rounds between records."""

    def client(local, server_state, client_state):
        many = jnp.int32(2**30 - 2**10)
        return Contribution(local.params, jnp.float32(1), many), client_state

    algorithm = fedavg(0.1, local_steps=1)._replace(client=client)
    task, everybody = quadratic(1, 1, mu=1.0), full_participation(1)
    _, trace = simulate(jax.random.key(0), task, algorithm, everybody, rounds, record_every=rounds)
    if fits:
        assert to_dataset(trace).gradients.values[-1, 0] == rounds * (2**30 - 2**10)
    else:
        with pytest.raises(OverflowError, match=r"gradients between .*record_every"):
            to_dataset(trace)


def test_dimensions_and_coordinates_are_named():
    updates = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    dataset = to_dataset(trace(updates), ("rate", "seed"))
    assert set(dataset.data_vars) == {"loss", "accuracy", "idle_rounds", "diverged", *COUNTS}
    assert dataset.diverged.dims == ("rate", "seed", "model")
    for variable in dataset.drop_vars("diverged").data_vars.values():
        assert variable.dims == ("rate", "seed", "round", "model")
        assert variable.attrs["long_name"]
    assert dataset["round"].values.tolist() == [0, 10, 20, 30]
    assert dataset.model.values.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(dataset.loss, updates / 2)
    np.testing.assert_array_equal(dataset.accuracy, -updates / 4)
    np.testing.assert_array_equal(dataset.gradients, updates.cumsum(axis=2))
    assert dataset.gradients.sel(round=20, model=4, rate=1, seed=2) == updates[1, 2, :3, 3].sum()


def batched(**coords):
    """Traces of two rates and three seeds."""
    return to_dataset(trace(np.zeros((2, 3, 1, 2), int)), **coords)


def test_coordinates_of_leading_axes_may_be_given():
    seeds = jax.random.split(jax.random.key(0), 3)
    result = batched(dims={"rate": jnp.array([0.1, 0.2]), "seed": seeds})
    assert result.loss.dims == ("rate", "seed", "round", "model")
    assert result.seed.values.tolist() == [0, 1, 2], "keys are numbered"
    assert result.sel(rate=0.1).rate.item() == np.float32(0.1)
    named = batched(dims={"rule": ["MFA-RR", "MFA-Rand"], "seed": range(7, 10)})
    chosen = named.sel(rule="MFA-RR")
    assert chosen.seed.values.tolist() == [7, 8, 9]
    assert chosen.loss.dims == ("seed", "round", "model")
    assert set(batched(dims=("rate", "seed")).coords) == {"round", "model"}


def test_leading_axes_without_names_are_refused():
    for dims, message in [
        (
            (),
            r"has 2 leading axes, of sizes \(2, 3\), and dims are not given; name .* range\(3",
        ),
        (("method", "seed"), "an axis is called 'method', like an argument of sel and isel"),
        (("seed",), r"2 leading axes, of sizes \(2, 3\), and dims are 'seed'; name each"),
        ("ab", r"and dims are 'ab'; name each"),
        (
            {"seed": range(3), "rate": range(2)},
            r"dims\['seed'\] has shape \(3,\), but .* has 2 ent",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            batched(dims=dims)


# Files


def labelled():
    """A Dataset with int64, both precisions, NaN, labels and a manifest."""
    dataset = to_dataset(trace([[[0, 0], [2_000_000_000, 1], [2_000_000_000, 3]]]), ("algorithm",))
    dataset = dataset.assign(short=dataset.loss.astype("float32") / 3)
    dataset["loss"][0, 1, 0] = np.nan
    dataset["loss"][0, 2, 0] = np.inf
    about = manifest({"task": {"mu": 0.1}, "sizes": (1, 2)}, seed=3, data="synthetic")
    return dataset.assign_coords(algorithm=["MFA-Rand, η = 0.1"]).assign_attrs(
        manifest=about, note="by hand"
    )


def idle_trace(updates, idle):
    """A trace of three runs of one model in two rounds."""
    counts = [np.array(x, np.int32)[..., None] for x in (updates, np.zeros((3, 3)), idle)]
    rounds = np.tile(np.arange(3), (3, 1))
    return Trace(rounds, {}, *counts, upload_size=(1,), download_size=(1,))


def test_runs_without_any_training_give_a_warning():
    """Runs without rounds, or with a single training, are not counted."""
    none, one, all_idle = [0, 0, 0], [0, 0, 1], [0, 1, 1]
    told = idle_trace([one, none, none], [[0, 1, 0], none, all_idle])
    words = (
        r"nobody trained in any round of 1 of 3 runs, first in seed = 12: the assignment chose no"
    )
    with pytest.warns(UserWarning, match=words):
        to_dataset(told, {"seed": [10, 11, 12]})
    with pytest.warns(UserWarning, match="of 1 of 3 runs: the assignment chose no client"):
        to_dataset(told, ["seed"])
    to_dataset(idle_trace([one, none, one], [none] * 3), ["seed"])


def test_a_run_that_diverges_is_marked():
    """The mark is the round of the first record with an infinite loss."""
    one = simulated(mfa_rand(6, 2), 4, 2)
    assert to_dataset(one).diverged.values.tolist() == [-1, -1]
    loss = one.metrics["loss"].at[1:, 1].set(jnp.inf)
    diverged = dataclasses.replace(one, metrics=one.metrics | {"loss": loss})
    words = (
        "the run diverged: the loss of model 2 is not finite in round 2; lower the learning rate"
    )
    with pytest.warns(UserWarning, match=words) as warned:
        marked = to_dataset(diverged).diverged
    assert warned[0].filename == __file__
    to_dataset(jax.tree.map(lambda x: x[None], diverged), ["seed"])  # of many runs some may diverge
    assert marked.dims == ("model",)
    assert marked.values.tolist() == [-1, 2]


def test_traces_with_different_rounds_are_refused():
    trace = idle_trace([[0, 1, 1]] * 3, [[0, 0, 0]] * 3)
    later = dataclasses.replace(trace, round=trace.round + np.arange(3)[:, None])
    with pytest.raises(ValueError, match=r"rounds, of shape .* alike in all runs"):
        to_dataset(later, ["seed"])


def test_netcdf_reads_back_equal(tmp_path):
    dataset = labelled()
    save_dataset(dataset, tmp_path / "result.nc")
    assert files(tmp_path) == ["result.nc"]
    with xr.open_dataset(tmp_path / "result.nc") as read:
        attrs = dict(read.attrs)
        xr.testing.assert_identical(read.drop_attrs(deep=False), dataset.drop_attrs(deep=False))
        assert {name: x.dtype for name, x in read.data_vars.items()} == {
            name: x.dtype for name, x in dataset.data_vars.items()
        }
    about = json.loads(attrs["manifest"])
    assert about["config"] == {"task": {"mu": 0.1}, "sizes": [1, 2]}
    assert (about["seed"], about["data"], about["prng"]) == (3, "synthetic", "threefry2x32")
    assert about["versions"]["jax"] == jax.__version__
    assert attrs["note"] == "by hand"


def test_results_survive_xarrays_own_files(tmp_path):
    """The manifest is a string in files and a mapping in Python."""
    dataset = labelled()
    dataset.to_netcdf(tmp_path / "result.nc")
    for given in (tmp_path, tmp_path / "result.nc", str(tmp_path)):
        read = open_result(given)
        assert read.attrs["manifest"] == dataset.attrs["manifest"]
    about = read.attrs["manifest"]
    assert about["config"] == {"task": {"mu": 0.1}, "sizes": [1, 2]}
    assert dict(about)["seed"] == about.get("seed") == 3
    assert ("seed" in about, "nothing" in about) == (True, False)
    assert json.loads(str(about)) == json.loads(about) == dict(about)
    assert copy.deepcopy(about) == pickle.loads(pickle.dumps(about)) == about
    more = about | {"draws": 2}
    assert (more["draws"], more["seed"], "draws" in about) == (2, 3, False)
    # Reduce the result and save it again.
    read.mean("algorithm").assign_attrs(manifest=more).to_netcdf(tmp_path / "mean.nc")
    assert open_result(tmp_path / "mean.nc").attrs["manifest"] == more
    save_json(about, tmp_path / "manifest.json")
    assert json.loads((tmp_path / "manifest.json").read_text()) == dict(about)


def test_a_custom_file_needs_no_manifest(tmp_path):
    dataset = to_dataset(simulated(mfa_rr(6, 2), 4, 2))
    dataset.to_netcdf(tmp_path / "mine.nc")
    xr.testing.assert_identical(open_result(tmp_path / "mine.nc"), dataset)


def test_a_missing_result_is_named(tmp_path):
    for given in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(FileNotFoundError, match=rf"{given}/result.nc does not exist; give a"):
            open_result(given)


@pytest.mark.parametrize("about", ["manifest.json", "summary.json"])
def test_a_changed_result_is_refused(tmp_path, about):
    """A flipped bit could change a coordinate."""
    save_dataset(labelled(), tmp_path / "result.nc")
    save_about(tmp_path / about, labelled().attrs["manifest"], ["result.nc"])
    xr.testing.assert_identical(open_result(tmp_path), labelled())
    for name in ("result.nc", about):
        path, content = tmp_path / name, (tmp_path / name).read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :])
        refused = pytest.raises(ValueError, match=f"{name} is damaged; make the result again with")
        for read in (open_result, Tracked.read, show):
            with refused:
                read(tmp_path)
            with refused:
                read(tmp_path / "result.nc")
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", ""])
def test_a_manifest_that_names_files_elsewhere_is_damaged(tmp_path, name):
    save_json(sealed({"config": {}, "files": {name: "0"}}), tmp_path / "manifest.json")
    assert read_about(tmp_path / "manifest.json").damage == "manifest.json is damaged"


def test_a_manifest_without_digests_is_not_compared(tmp_path):
    save_dataset(labelled(), tmp_path / "result.nc")
    save_json(labelled().attrs["manifest"], tmp_path / "manifest.json")
    xr.testing.assert_identical(open_result(tmp_path), labelled())


def test_real_runs_read_back_equal(tmp_path):
    dataset = to_dataset(simulated(mfa_rr(6, 2), 4, 2))
    save_dataset(dataset, tmp_path / "result.nc")
    with xr.open_dataset(tmp_path / "result.nc") as read:
        xr.testing.assert_identical(read, dataset)


@pytest.mark.parametrize("old", [None, "old"])
def test_a_file_is_replaced_atomically(tmp_path, old):
    path = tmp_path / "result.txt"
    if old:
        path.write_text(old)

    def fails_half_way(aside):
        aside.write_text("ne")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_aside(path, fails_half_way)
    assert files(tmp_path) == (["result.txt"] if old else [])
    assert not old or path.read_text() == old

    def succeeds(aside):
        assert aside.parent == path.parent  # renaming is atomic within a directory
        aside.write_text("ne")
        assert not path.exists() or path.read_text() == old
        aside.write_text("new")

    write_aside(path, succeeds)
    assert files(tmp_path) == ["result.txt"]
    assert path.read_text() == "new"


def test_json_replaces_nan_and_numpy(tmp_path):
    content = {
        "nan": float("nan"),
        "nested": {"infinite": [-np.inf, np.float32(0.5), (np.nan, 1)]},
        "array": np.array([[1.0, np.nan], [np.inf, 2.0]]),
        "numbers": {3: np.int64(2**40), "truth": np.bool_(True)},
        "words": ["a", None, True],
    }
    save_json(content, tmp_path / "summary.json")
    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text) == {
        "nan": None,
        "nested": {"infinite": [None, 0.5, [None, 1]]},
        "array": [[1.0, None], [None, 2.0]],
        "numbers": {"3": 2**40, "truth": True},
        "words": ["a", None, True],
    }
    assert text.endswith("}\n")
    assert files(tmp_path) == ["summary.json"]


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "summary.json"
    save_json({"a": 1}, path)
    with pytest.raises(TypeError):
        save_json({"a": object()}, path)
    assert json.loads(path.read_text()) == {"a": 1}


def test_preparing_a_directory_leaves_no_files(tmp_path):
    directory = tmp_path / "deep" / "results"
    for _ in range(2):
        prepare_directory(directory)
        assert files(directory) == []


@pytest.mark.parametrize("path", ["file", "file/results", "file/deep/results"])
def test_a_directory_that_cannot_be_written_is_refused(tmp_path, path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=rf"cannot write to .*{path}: .*--out"):
        prepare_directory(tmp_path / path)
    assert files(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


# The revision


def test_joined_seeds_are_in_order_and_counted():
    about = {"wall_seconds": {"run": 1.0}, "config": {"num_seeds": 2}, "data": "real"}
    first, second = (
        xr.Dataset({"loss": ("seed", [10.0 * k for k in seeds])}, {"seed": seeds}).assign_attrs(
            manifest=about
        )
        for seeds in ([0, 1], [2, 3])
    )
    both = join_seeds(first, second)
    assert both.seed.values.tolist() == [0, 1, 2, 3]
    assert both.loss.values.tolist() == [0.0, 10.0, 20.0, 30.0]
    assert both.attrs["manifest"]["config"] == {"num_seeds": 4}
    assert both.attrs["manifest"]["wall_seconds"] == {"run": 2.0}
