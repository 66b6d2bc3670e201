"""Runs that were killed, stopped, damaged or out of disk space resume to the same result."""

import contextlib
import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import fedavg, local_sgd, mfa_rand, mfa_rr, plots, scaffold
from fedjax_mm.availability import dropping
from fedjax_mm.base import Assignment, Cohort
from fedjax_mm.cli import terminal
from fedjax_mm.data import synthetic
from fedjax_mm.results.dataset import save_dataset
from fedjax_mm.sweeps import Setup, layout, plan
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.errors import InterruptedRunError, RefusedError
from fedjax_mm.sweeps.execute import carry_out, plan_for
from fedjax_mm.sweeps.execution import Execution, progress
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.tasks import LogisticRegression, classification
from fedjax_mm.tools.files import sealed
from tests.helpers import Towards, once_for_each_grid, share_grids
from tests.test_cli import call, files

sweeps = importlib.import_module("fedjax_mm.sweeps.execute")


CONFIG = """\
num_models = {num_models}
num_rounds = {num_rounds}
num_seeds = {num_seeds}
seed = 4

[task]
num_clients = {num_clients}
block_size = {block_size}
start = "normal"

[algorithms.MFA-RR]
assignment = {{ name = "mfa_rr" }}
learning_rate = 0.1
local_steps = 2

[algorithms.MFA-Rand]
assignment = {{ name = "mfa_rand", cohort_size = 4 }}
learning_rate = {{ beta = 3, gamma = 20, per = "frame" }}
local_steps = 3

[axes]
task.mu = [0.01, 0.05]
"""


def write_config(directory, **sizes):
    path = directory / "grid.toml"
    path.write_text(CONFIG.format(**sizes))
    return path


def read_result(directory):
    """The data of a finished sweep, without the manifest because it contains wall times."""
    with xr.open_dataset(directory / "grid" / "result.nc") as result:
        return result.load().drop_attrs(deep=False)


def check_finished(directory, expected):
    """Checks that the result is bit for bit as expected, and that no other files are left."""
    assert files(directory / "grid") == ["figure.png", "manifest.json", "result.nc"]
    result = read_result(directory)
    assert {name: x.dtype for name, x in result.items()} == {
        name: x.dtype for name, x in expected.items()
    }
    xr.testing.assert_identical(result, expected)


def saved(directory):
    """The rounds at which each part was saved."""
    parts = sorted((directory / "grid" / "unfinished").glob("part-*"))
    return {part.name: sorted(int(path.stem) for path in part.glob("[0-9]*.npz")) for part in parts}


"""Runs commands on one experiment in turn, with one replica per device and one record per segment.

The experiment is traced once. Every record is reported, and the command then waits for a line if
its input is a pipe.
"""


@pytest.fixture(autouse=True, scope="module")
def short_segments():
    """Puts one replica on each device, ends segments at records, and traces experiments once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_CACHE_BYTES", 1)
        patch.setattr(plan, "_lower", functools.cache(plan._lower))
        patch.setattr(plan, "programs_of", once_for_each_grid(plan.programs_of))
        patch.setattr(sweeps, "_SEGMENT_SECONDS", 0)
        share_grids(patch)
        yield


class Small(NamedTuple):
    """A sweep of two programs with two batches each, stopped in its third batch."""

    config: Path
    expected: xr.Dataset
    unfinished: Path
    saves: dict[str, list[int]]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    directory = tmp_path_factory.mktemp("small")
    config = write_config(
        directory, num_models=2, num_rounds=12, num_seeds=5, num_clients=5, block_size=2
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps, "_SEGMENT_SECONDS", 1)
        assert call("sweep", config, "--out", directory / "whole").code == 0
    assert (directory / "whole" / "grid" / "figure.png").stat().st_size > 1000
    expected, out = read_result(directory / "whole"), directory / "stopped"
    with stopping(signal.SIGTERM, 0.7):
        outcome = call("sweep", config, "--out", out, "--save-every", 0)
    assert outcome.code == 143
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "sweep_overview", lambda dataset: None)
        patch.setattr(plots, "save_figure", lambda figure, path: path.touch())
        yield Small(config, expected, out, saved(out))


@pytest.fixture
def unfinished(small, tmp_path):
    """A copy of the stopped sweep."""
    return shutil.copytree(small.unfinished, tmp_path / "copy")


@contextlib.contextmanager
def stopping(number, share):
    """Sends the command line a signal when `share` of its work is done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "log_lines", lambda: signalling(number, share, []))
        yield


def signalling(number, share, reports):
    """A progress function that appends to `reports`, and signals once at `share` of the work."""

    def report(label, done, total):
        reports.append((label, done))
        if total > 1 and done >= share * total and number not in reports:
            reports.append(number)
            signal.raise_signal(number)

    return report


def check_goes_on(before, after):
    """Checks that the resumed run repeats no report, except the last one before the signal."""
    *done, end, _ = [report for report in before if not isinstance(report, tuple) or report[1]]
    assert len(done) > 5
    assert end in after
    assert not set(done) & set(after)


def contents(directory):
    """Maps every path to the bytes of the file."""
    return {path: path.is_file() and path.read_bytes() for path in sorted(directory.rglob("*"))}


def lines_of(outcome):
    return [line for line in outcome.err.splitlines() if line.startswith("fedjax-mm: ")]


def test_finished_batches_and_two_states_of_the_current_one_are_kept(small):
    (first, second, third), states = small.saves, list(small.saves.values())
    assert (first, second, third) == ("part-0000", "part-0001", "part-0002")
    assert states[:2] == [[11, 12], [11, 12]]
    under_way = states[2][-1]
    assert 1 < under_way < 12
    assert states[2] == [under_way - 1, under_way]


def one_program(directory, config):
    """Writes the sweep with its first algorithm only."""
    head, _, tail = config.read_text().partition("[algorithms.MFA-Rand]")
    path = directory / config.name
    path.write_text(f"{head}[axes]{tail.partition('[axes]')[2]}")
    return path


@pytest.mark.parametrize(
    ("number", "precision"), [(signal.SIGTERM, "float32"), (signal.SIGINT, "float64")]
)
def test_nothing_is_computed_twice(small, tmp_path, monkeypatch, number, precision):
    """The signal makes the run save, even long before the next regular save."""
    config, share = small.config, 0.7
    if precision == "float64":
        config, share = one_program(tmp_path, config), 0.9
    command = ("sweep", config, "--out", tmp_path, "--set", f"precision={precision}")
    before, after = [], []
    monkeypatch.setattr(terminal, "log_lines", lambda: signalling(number, share, before))
    stopped = call(*command, "--save-every", 1000)
    assert stopped.code == 128 + number
    (line,) = lines_of(stopped)
    assert f"stopped at {10 * share:.0f}" in line
    assert "continue with --resume" in line
    assert files(tmp_path / "grid") == ["unfinished"]
    parts = 3 if precision == "float32" else 2  # stopped in the last part but one, or in the last
    assert [len(rounds) for rounds in saved(tmp_path).values()] == [1] * parts

    monkeypatch.setattr(terminal, "log_lines", lambda: signalling(None, 2, after))
    assert call(*command, "--resume").code == 0
    check_goes_on(before, after)
    if precision == "float32":
        check_finished(tmp_path, small.expected)
    else:
        whole = tmp_path / "whole"
        command = ("sweep", config, "--out", whole, "--set", f"precision={precision}")
        assert call(*command).code == 0
        check_finished(tmp_path, read_result(whole))
        assert read_result(whole).loss.dtype == np.float64


def test_resume_without_an_unfinished_run_starts_one_and_restores_signal_handlers(small, tmp_path):
    usual = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    traced = plan._lower.cache_info().misses
    assert call("sweep", small.config, "--out", tmp_path, "--resume").code == 0
    # Otherwise every test here would trace it again.
    assert plan._lower.cache_info().misses == traced
    check_finished(tmp_path, small.expected)
    assert usual == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


OTHER_RUNS = {
    "not asked for": ((), ("unfinished run", "--resume", "delete")),
    "rate": (
        ("--resume", "--set", "algorithms.MFA-RR.learning_rate=0.2"),
        ("algorithms.MFA-RR.learning_rate was 0.1, is 0.2",),
    ),
    "points": (
        ("--resume", "--set", "axes.task.mu=[0.01, 0.06]"),
        ("[0.01, 0.05], is [0.01, 0.06]",),
    ),
    "seeds": (("--resume", "--set", "num_seeds=6"), ("num_seeds was 5, is 6",)),
    "seed": (("--resume", "--set", "seed=5"), ("seed was 4, is 5",)),
    "rounds": (("--resume", "--set", "num_rounds=13"), ("num_rounds was 12, is 13",)),
    "records": (("--resume", "--set", "record_every=2"), ("record_every was 1, is 2",)),
    "precision": (("--resume", "--set", "precision=float64"), ("float32", "float64")),
    "split": (("--resume", "--split", "clients"), ('split was null, is "clients"',)),
}


"""Maps a name to further options and to fragments of the error line."""


def check_refused(directory, outcome, *fragments, before):
    code, _, err = outcome
    assert code == 2
    assert err.startswith("fedjax-mm: ")
    assert err.count("\n") == 1
    for fragment in fragments:
        assert fragment in err
    assert contents(directory) == before


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_another_run_is_refused(small, unfinished, name):
    options, fragments = OTHER_RUNS[name]
    before = contents(unfinished)
    outcome = call("sweep", small.config, "--out", unfinished, *options)
    check_refused(unfinished, outcome, *fragments, before=before)


def change_record(unfinished, change):
    path = unfinished / "grid" / "unfinished" / "run.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(sealed(record)))


def test_another_program_is_refused(small, unfinished):
    """The settings are equal, but the code has changed."""
    change_record(unfinished, lambda record: record["identity"].update({"program MFA-RR": "old"}))
    before = contents(unfinished)
    outcome = call("sweep", small.config, "--out", unfinished, "--resume")
    check_refused(unfinished, outcome, 'program MFA-RR was "old"', before=before)


def sweep_of(grid, how=None):
    """Does the same as `sweep`, but traces a grid only once."""
    how = how or Execution()
    return carry_out(plan_for(grid, how), how)[0]


def test_a_run_stopped_between_two_records_resumes(tmp_path):
    """The only record comes after nine rounds, so a checkpoint has to hold the counts."""

    def build():
        return Setup(
            Towards(jnp.arange(4.0)), fedavg(0.1, local_steps=2), mfa_rr(4, 2, redraw="frame")
        )

    grid = Grid(build, {}, num_rounds=9, record_every=9, num_seeds=2)
    whole = sweep_of(grid)
    how = Execution([progress(signalling(signal.SIGTERM, 0.3, []))])
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(InterruptedRunError):
        sweep_of(grid, how._replace(checkpoints=checkpoints))
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        saved = checkpoints.load(0)
        assert 0 < saved.rounds < 9
        assert 0 < saved.about["seconds"] < 1000
        checkpoints.save(0, saved.rounds, saved.arrays, {"seconds": 1000.0})
        rest = sweep_of(grid, Execution(checkpoints=checkpoints))
    assert 1000 < rest.attrs["manifest"]["wall_seconds"]["run"] < 2000
    assert whole.gradients.isel(round=-1).sum("model").values.tolist() == [72, 72]
    xr.testing.assert_identical(whole.drop_attrs(), rest.drop_attrs())


def test_a_run_whose_clients_are_split_resumes_on_other_devices(tmp_path, monkeypatch):
    """8 devices hold 13 clients, and only 4 of these train a model in a round."""

    def build():
        assignment = dropping(mfa_rand(13, 3), 0.3)
        task = classification(synthetic(13, dim=2, num_classes=3), LogisticRegression(3))
        return Setup(task, scaffold(local_sgd(0.1, steps=2)), assignment)

    def on(count, checkpoints=None, callbacks=()):
        monkeypatch.setattr(plan, "layout", lambda n, axis: layout(n, jax.devices()[:count], axis))
        return sweep_of(grid, Execution(callbacks, checkpoints, split="clients"))

    grid = Grid(build, {}, num_rounds=9)
    whole = on(1)
    stop = progress(signalling(signal.SIGTERM, 0.3, []))
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(InterruptedRunError):
        on(8, checkpoints, [stop])
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        assert (1, 3, 13, 3, 2) in [x.shape for x in checkpoints.load(0).arrays]
        with pytest.warns(UserWarning, match="the number of devices was 8 and is 2"):
            rest = on(2, checkpoints)
    xr.testing.assert_allclose(whole, rest, rtol=1e-5)


"""Resumes the run of every directory, and prints the exit codes."""


def test_another_number_of_devices_is_refused(small, unfinished):
    """The record is edited as if the run had begun on one device."""
    change_record(unfinished, lambda record: record["identity"].update({"--devices": 1}))
    before = contents(unfinished)
    outcome = call("sweep", small.config, "--out", unfinished, "--resume")
    check_refused(unfinished, outcome, "--devices was 1, is 8", before=before)


def cut(checkpoint):
    os.truncate(checkpoint, checkpoint.stat().st_size // 2)


def test_a_part_whose_checkpoints_are_all_damaged_starts_over(small, unfinished):
    damaged = [
        unfinished / "grid" / "unfinished" / name / f"{rounds}.npz"
        for name in ("part-0000", "part-0002")
        for rounds in reversed(small.saves[name])
    ]
    for path in damaged:
        cut(path)
    with pytest.warns(UserWarning, match="is damaged") as warned:
        outcome = call("sweep", small.config, "--out", unfinished, "--resume")
    assert outcome.code == 0
    assert [str(warning.message).split()[2] for warning in warned] == [str(p) for p in damaged]
    check_finished(unfinished, small.expected)


def test_arrays_of_one_shape_are_not_swapped_by_a_flipped_bit(tmp_path):
    """The directory of a zip file names the arrays but has no checksum."""
    arrays = [np.full(3, i, np.float32) for i in range(8)]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, 1, arrays)
        path = tmp_path / "unfinished" / "part-0000" / "1.npz"
        whole = path.read_bytes()
        names = [i for i in range(len(whole)) if whole[i : i + 4] == b"arr_"]
        for place in [i + 4 for i in names[len(names) // 2 :]]:  # the digit, in the directory
            changed = bytearray(whole)
            changed[place] ^= 1
            path.write_bytes(changed)
            with pytest.warns(UserWarning, match="is damaged"):
                assert checkpoints.load(0) is None
        path.with_name("2.npz").write_bytes(whole)  # of another round
        with pytest.warns(UserWarning, match="digest"):
            assert checkpoints.load(0) is None


@contextlib.contextmanager
def small_disk(directory, size):
    """Mounts a file system in memory, and yields a function that resizes it."""

    def mount(options, *arguments):
        command = ["mount", "-t", "tmpfs", "-o", options, *arguments, "tmpfs", str(directory)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    directory.mkdir()
    mounted = shutil.which("mount") and mount(f"size={size}")
    if not mounted or mounted.returncode:
        pytest.skip(f"cannot mount a file system: {mounted.stderr if mounted else 'no mount'}")
    try:
        yield lambda size: mount(f"remount,size={size}").check_returncode()
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_a_result_that_does_not_fit_on_disk_is_an_error(small, tmp_path):
    with small_disk(tmp_path / "disk", "8k"):
        many = xr.Dataset({"loss": ("round", np.random.default_rng(0).random(10_000))})
        with pytest.raises(OSError, match=r"cannot write .*result.nc: .*room"):
            save_dataset(many, tmp_path / "disk" / "result.nc")
        assert files(tmp_path / "disk") == []


def some_arrays(rounds):
    return [
        np.arange(rounds * 6, dtype=np.float32).reshape(3, -1) / 7,
        np.float64(np.pi),
        np.array([True, False]),
        np.int32(-3),
        np.array([], np.float32),
        np.zeros((2, 0, 3), np.uint8),
        np.array([[np.nan, np.inf, -0.0]]),
        np.asarray(jnp.arange(3, dtype=jnp.bfloat16)),
        np.arange(4, dtype=np.uint32)[::2],
    ]


def check_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        other = np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("arrays", [some_arrays(4), [], [np.zeros(0)], [jnp.ones(3)]])
def test_arrays_are_loaded_as_they_were_saved(tmp_path, arrays):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, 5, arrays, {"of": [1, 2.5, "x"]})
        rounds, loaded, about = checkpoints.load(3)
    assert (rounds, about) == (5, {"of": [1, 2.5, "x"]})
    check_equal(loaded, arrays)


def test_the_last_two_states_of_a_part_are_kept(tmp_path):
    with Checkpoints(tmp_path / "grid") as checkpoints:
        for rounds in (1, 3, 7, 8):
            checkpoints.save(0, rounds, some_arrays(rounds))
        checkpoints.save(1, 2, [])
        assert checkpoints.load(0).rounds == 8
        assert checkpoints.load(2) is None
    assert saved(tmp_path) == {"part-0000": [7, 8], "part-0001": [2]}


def test_half_written_files_of_a_killed_process_are_removed(tmp_path):
    with Checkpoints(tmp_path / "grid") as checkpoints:
        checkpoints.save(0, 1, some_arrays(1))
    part = tmp_path / "grid" / "unfinished" / "part-0000"
    for number in (2, 3):
        (part / f".{number}.npz.part").write_bytes((part / "1.npz").read_bytes()[:99])
    with Checkpoints(tmp_path / "grid", resume=True) as checkpoints:
        assert checkpoints.load(0).rounds == 1
        checkpoints.save(0, 2, some_arrays(2))
        assert checkpoints.load(0).rounds == 2
    assert files(part) == ["1.npz", "2.npz"]


def test_a_directory_in_which_nothing_was_saved_is_left_empty(tmp_path):
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.claim({"seed": 1}) is None
        checkpoints.begin({})
    assert files(tmp_path / "new") == []
    with Checkpoints(tmp_path / "new") as checkpoints:
        checkpoints.save(0, 1, [])
        checkpoints.discard()
    assert files(tmp_path / "new") == []


def test_a_directory_is_locked_while_it_is_open(tmp_path):
    checkpoints = Checkpoints(tmp_path, resume=True)
    for _ in range(2):
        with checkpoints:
            for _ in range(2):
                with pytest.raises(ValueError, match="another process"):
                    Checkpoints(tmp_path, resume=True).open()
        with Checkpoints(tmp_path):
            pass


def test_differences_are_named(tmp_path):
    identity = {"seed": 1, "axes": {"rate": [0.1, 0.2]}, "code": {"A": "x" * 99}, "old": (1, 2)}
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.claim(identity) is None
        checkpoints.begin({"sizes": [3]})
        assert checkpoints.claim(identity) == {"sizes": [3]}
        for change, words in (
            ({"seed": 2}, "a different one: seed was 1, is 2; run it"),
            ({"axes": {"rate": [0.1]}}, r"axes.rate was \[0.1, 0.2\], is \[0.1\]; run"),
            ({"axes": {"rate": [0.1, 0.2], "mu": []}}, r"axes.mu was null, is \[\]; run"),
            ({"code": {"A": "y"}}, r'code.A was "x{56}\.\.\., is "y"; run'),
            ({"old": None}, r"old was \[1, 2\], is null; run"),
        ):
            with pytest.raises(ValueError, match=words):
                checkpoints.claim(identity | change)


def wandering(num_clients, num_models):
    """An assignment whose state is a random key, which it splits in every round."""

    def assign(rng_key, t, key, look):
        key, draw = jax.random.split(key)
        groups = jax.random.permutation(draw, num_clients).reshape(num_models, -1)
        return Cohort.of_rows(groups.astype(jnp.int32)), key

    return Assignment(num_clients, num_models, lambda rng_key, look: rng_key, assign)


@functools.cache
def wander(second=1.0):
    """A sweep whose points share data, in which `second` is the second target."""
    targets = np.array([0, second, 2, 3], np.float32)

    def build(learning_rate):
        return Setup(Towards(targets), fedavg(learning_rate, local_steps=2), wandering(4, 2))

    return Grid(build, {"learning_rate": [0.1, 0.2]}, 9, num_seeds=3)


def test_runs_with_shared_data_and_random_keys_in_their_states_resume(tmp_path):
    before, after = [], []
    report = progress(signalling(signal.SIGINT, 0.6, before))
    with (
        pytest.raises(InterruptedRunError, match="continue with --resume"),
        Checkpoints(tmp_path) as checkpoints,
    ):
        sweep_of(wander(), Execution([report], checkpoints))
    with (
        pytest.raises(RefusedError, match="data of run was"),
        Checkpoints(tmp_path, resume=True) as checkpoints,
    ):
        sweep_of(wander(7.0), Execution(checkpoints=checkpoints))
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        report = progress(signalling(None, 2, after))
        continued = sweep_of(wander(), Execution([report], checkpoints))
        checkpoints.discard()
    assert files(tmp_path) == []
    check_goes_on(before, after)
    whole = sweep_of(wander())
    xr.testing.assert_identical(continued.drop_attrs(deep=False), whole.drop_attrs(deep=False))
    assert len(np.unique(whole.norm.isel(round=-1))) == whole.norm.isel(round=-1).size
