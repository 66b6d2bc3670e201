"""Runs that were killed, stopped, damaged or out of disk space resume to the same result."""

import contextlib
import dataclasses
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, mfa_rand, sweep
from fedjax_mm.sweeps import Setup
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.errors import InterruptedRunError
from fedjax_mm.sweeps.execution import Execution, progress
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.plan import make_plan
from tests.helpers import Towards
from tests.sweeps.test_checkpoint import (
    change_record,
    check_equal,
    check_finished,
    check_refused,
    contents,
    cut,
    lines_of,
    saved,
    short_segments,  # noqa: F401
    signalling,
    small,  # noqa: F401
    small_disk,
    some_arrays,
    sweep_of,
    sweeps,
    unfinished,  # noqa: F401
    wander,
    write_config,
)
from tests.test_cli import Outcome, call, files

TELLING = """\
import functools
import importlib
import json
import sys
from fedjax_mm import cli
from fedjax_mm.cli import terminal
from fedjax_mm.sweeps import plan

plan._CACHE_BYTES = 1
plan._lower = functools.cache(plan._lower)
plan.programs_of = functools.cache(plan.programs_of)
importlib.import_module("fedjax_mm.sweeps.execute")._SEGMENT_SECONDS = 0
run = importlib.import_module("fedjax_mm.experiments.run")
grids, grid_of = [], run.grid_of

def shared(*of):
    grids[:] = grids or [grid_of(*of)]
    return grids[0]

run.grid_of = shared

def tell(label, done, total):
    print("progress", done, total, file=sys.stderr, flush=True)
    sys.stdin.readline()

terminal.log_lines = lambda: tell
for command in json.loads(sys.argv[1]):
    try:
        cli.main(command)
    except SystemExit as end:
        code = end.code
        print("code", code, file=sys.stderr, flush=True)
sys.exit(code)
"""


def work_of(process):
    """Yields the finished and the total work that a process reports."""
    for line in process.stderr:
        word, *numbers = line.split() or [""]
        if word == "progress":
            yield tuple(map(int, numbers))


def without_progress(errors):
    lines = errors.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("progress ", "code ")))


def wait_for(process, share):
    """Reads reports until more than `share` of the work is done, or to the end."""
    for done, total in work_of(process):
        if total > 1 and done > share * total:
            return


def start(config, directory, *options, stdin=subprocess.DEVNULL, times=1):
    """Starts the sweep in a subprocess with the same number of devices as this process."""
    command = ["--devices", str(jax.device_count()), "sweep", str(config)]
    command += ["--out", str(directory), *map(str, options)]
    return subprocess.Popen(
        [sys.executable, "-c", TELLING, json.dumps([command] * times)],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def let_go_on(process):
    """Answers reports until the sweep has advanced, and leaves the last one unanswered."""
    earlier = None
    for done, total in work_of(process):
        if total > 1:
            earlier = done if earlier is None else earlier
            if done > earlier:
                return
        process.stdin.write("go on\n")


def let_end(process):
    """Answers reports until the command ends, and returns its other output and its exit code."""
    process.stdin.write("go on\n")
    said = []
    for line in process.stderr:
        word, *rest = line.split() or [""]
        if word == "code" and rest[0].isdigit():
            return "".join(said), int(rest[0])
        if word == "progress":
            process.stdin.write("go on\n")
        else:
            said.append(line)
    raise AssertionError("".join(said))


def check_stopped(number, code, errors):
    assert code == 128 + number
    *_, notice, last = errors.splitlines()
    assert notice == "saving after this segment; once more stops at once"
    assert last.startswith(f"fedjax-mm: {number.name}: stopped at ")
    assert "continue with --resume" in errors


def test_a_sweep_stopped_twice_and_then_killed_resumes(small, tmp_path):
    """While the process runs, no other one may use its directory."""
    options, before = ("--save-every", 1000, "--resume"), {}
    command = ("sweep", small.config, "--out", tmp_path, "--resume")
    with start(small.config, tmp_path, *options, stdin=subprocess.PIPE, times=3) as process:
        for number in (signal.SIGTERM, signal.SIGINT):
            let_go_on(process)
            process.send_signal(number)
            errors, code = let_end(process)
            check_stopped(number, code, errors)
            assert saved(tmp_path) != before
            before = saved(tmp_path)
        let_go_on(process)
        held = contents(tmp_path)
        check_refused(tmp_path, call(*command), "another process", "--out", before=held)
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "grid" / "unfinished").exists()
    assert call(*command).code == 0
    check_finished(tmp_path, small.expected)


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "seed"), [(1, 7), (3, 3), (20, 20)])
def test_a_sweep_killed_repeatedly_ends_with_the_same_result(small, tmp_path, kills, seed):
    """Kills come at random moments, and a sweep that finishes before one starts over."""
    killed = finished = hits = advances = 0
    moments = random.Random(seed)
    while killed < kills:
        before = saved(tmp_path)
        process = start(small.config, tmp_path, "--save-every", 0, "--resume")
        wait_for(process, moments.uniform(0, 1.1))
        process.kill()
        process.communicate()
        if process.returncode:
            assert process.returncode == -signal.SIGKILL
            killed += 1
            hits += (tmp_path / "grid" / "unfinished").exists()
            advances += saved(tmp_path) != before
        else:
            check_finished(tmp_path, small.expected)
            shutil.rmtree(tmp_path / "grid")
            finished += 1
    print(f"seed {seed}: {hits} kills left an unfinished run, {advances} came after new saves")
    print(f"{finished + 1} runs ended, all of them alike")
    assert hits >= kills / 2
    if kills >= 20:  # a few kills may all come before a new save
        assert advances >= kills / 4
    assert call("sweep", small.config, "--out", tmp_path, "--resume").code == 0
    check_finished(tmp_path, small.expected)


@pytest.mark.slow
def test_a_stopped_sweep_saves_and_resumes(small, tmp_path):
    options, before = ("--save-every", 1000, "--resume"), {}
    for number in (signal.SIGTERM, signal.SIGINT):
        with start(small.config, tmp_path, *options, stdin=subprocess.PIPE) as process:
            let_go_on(process)
            process.send_signal(number)
            _, errors = process.communicate()  # closes stdin, so that the sweep goes on
        check_stopped(number, process.returncode, without_progress(errors))
        assert saved(tmp_path) != before
        before = saved(tmp_path)
    assert call("sweep", small.config, "--out", tmp_path, *options).code == 0
    check_finished(tmp_path, small.expected)


def test_a_complete_run_is_left_alone(small, tmp_path):
    command = ("sweep", small.config, "--out", tmp_path, "--resume")
    shutil.copytree(small.config.parent / "whole", tmp_path, dirs_exist_ok=True)
    before = contents(tmp_path)
    again = call(*command)
    assert again.code == 0
    assert "is complete; nothing to resume" in again.out
    assert contents(tmp_path) == before


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_other_closed_over_data_are_refused(tmp_path, jit):
    def build(data):
        pull = jit(lambda client: jnp.take(data, client))

        @jax.tree_util.register_dataclass
        @dataclasses.dataclass(frozen=True)
        class Pulled(Towards):
            def batch(self, rng_key, client, step, how):
                return pull(client)

        setup = Pulled(jnp.zeros(4)), fedavg(0.1, local_steps=1), mfa_rand(4, 2)
        return lambda: Setup(*setup)

    ones, twos = np.ones(4, np.float32), np.full(4, 2, np.float32)
    how = Execution([progress(signalling(signal.SIGTERM, 0.3, []))])
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(InterruptedRunError):
        sweep(Grid(build(ones), {}, num_rounds=9), execution=how._replace(checkpoints=checkpoints))
    for data, expected in (
        (twos, pytest.raises(ValueError, match=r"program run was .*, is ")),
        (ones, contextlib.nullcontext()),
    ):
        with Checkpoints(tmp_path, resume=True) as checkpoints, expected:
            sweep(Grid(build(data), {}, num_rounds=9), execution=Execution(checkpoints=checkpoints))


EDITED = '{"identity": [], "choices": {"batch_sizes": "x"}, "digest": "0"}'


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[]", '{"identity": {}}', "[" * 9999, EDITED, None]
)
def test_a_run_without_its_record_is_refused(small, unfinished, text):
    path = unfinished / "grid" / "unfinished" / "run.json"
    path.unlink() if text is None else path.write_text(text)
    before = contents(unfinished)
    outcome = call("sweep", small.config, "--out", unfinished, "--resume")
    check_refused(unfinished, outcome, "run.json is damaged", "delete", before=before)


RESUMING = """\
import sys
from fedjax_mm import cli

for directory in sys.argv[2:]:
    try:
        cli.main(["--devices", "1", "sweep", sys.argv[1], "--out", directory, "--resume"])
    except SystemExit as end:
        print(end.code)
"""


@pytest.mark.slow
def test_a_second_process_and_another_number_of_devices_are_refused(small, unfinished, tmp_path):
    free = shutil.copytree(unfinished, tmp_path / "free")
    with Checkpoints(unfinished / "grid", resume=True):
        before = contents(unfinished), contents(free)
        command = [sys.executable, "-c", RESUMING, small.config, unfinished, free]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        second, fewer = done.stderr.splitlines(keepends=True)
        assert done.stdout.split() == ["2", "2"]
        outcome = Outcome(2, "", second)
        check_refused(unfinished, outcome, "another process", "--out", before=before[0])
    outcome = Outcome(2, "", fewer)
    check_refused(free, outcome, "--devices was 8, is 1", before=before[1])


def empty(checkpoint):
    os.truncate(checkpoint, 0)


def flip(path, place=None):
    content = bytearray(path.read_bytes())
    content[content.index(b"digest") if place is None else place] ^= 0xFF
    path.write_bytes(content)


def lose_an_array(checkpoint):
    with np.load(checkpoint) as file:
        *some, _ = file.values()
    with checkpoint.open("wb") as file:
        np.savez(file, *some)


def lose_all_arrays(checkpoint):
    with checkpoint.open("wb") as file:
        np.savez(file)


DAMAGE = (cut, empty, flip, lose_all_arrays, lose_an_array)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(small, unfinished, damage):
    part = unfinished / "grid" / "unfinished" / "part-0002"
    newest = part / f"{small.saves['part-0002'][-1]}.npz"
    damage(newest)
    with pytest.warns(UserWarning, match=f"{newest} is damaged and was skipped: .") as warned:
        outcome = call("sweep", small.config, "--out", unfinished, "--resume")
    assert outcome.code == 0
    assert len(warned) == 1
    check_finished(unfinished, small.expected)


def test_a_temporarily_unreadable_checkpoint_is_kept(small, unfinished, monkeypatch):
    """An error of the file system is not taken for damage."""
    part = unfinished / "grid" / "unfinished" / "part-0002"
    newest = part / f"{small.saves['part-0002'][-1]}.npz"
    before, opened = contents(unfinished), Path.open

    def fail(path, *arguments, **how):
        if path == newest:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(path, *arguments, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        outcome = call("sweep", small.config, "--out", unfinished, "--resume")
    assert outcome.code == 1
    for words in (f"cannot read {newest}", "Input/output error", "is kept", "--resume"):
        assert words in outcome.err
    assert contents(unfinished) == before
    assert call("sweep", small.config, "--out", unfinished, "--resume").code == 0
    check_finished(unfinished, small.expected)


@pytest.mark.parametrize(
    "change",
    [lambda x: x[:-1], lambda x: [*x, x[-1]], lambda x: [y[:-1] for y in x]],
    ids=["too few", "too many", "too short"],
)
def test_a_finished_batch_without_all_its_records_is_damaged(small, unfinished, change):
    """The digest is valid, as if another program had saved the batch."""
    with Checkpoints(unfinished / "grid", resume=True) as checkpoints:
        saved = checkpoints.load(0)
        checkpoints.save(0, saved.rounds, change(saved.arrays))
    with pytest.warns(UserWarning, match="part-0000/.* is damaged and was skipped: .") as warned:
        outcome = call("sweep", small.config, "--out", unfinished, "--resume")
    assert (outcome.code, len(warned)) == (0, 1)
    check_finished(unfinished, small.expected)


def test_a_flipped_byte_never_changes_the_loaded_arrays(tmp_path):
    arrays = {rounds: some_arrays(rounds)[:5:2] for rounds in (1, 2)}  # one of them is empty
    with Checkpoints(tmp_path / "good") as checkpoints:
        for rounds in arrays:
            checkpoints.save(0, rounds, arrays[rounds])
        part = tmp_path / "good" / "unfinished" / "part-0000"
        whole, passed_over = {path: path.read_bytes() for path in part.iterdir()}, 0
        size = len(whole[part / "2.npz"])
        for place in range(0, size, 3):
            flip(part / "2.npz", place)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                loaded = checkpoints.load(0)
            assert len(warned) == 2 - loaded.rounds, place
            check_equal(loaded.arrays, arrays[loaded.rounds])
            passed_over += len(warned)
            for path, content in whole.items():
                path.write_bytes(content)
    assert passed_over > size / 3 / 2  # some bytes, such as a date, do not matter


def test_a_sweep_stopped_by_a_full_disk_resumes_after_making_room(small, tmp_path, caplog):
    disk = tmp_path / "disk"
    with small_disk(disk, "40k") as resize:
        command = ("sweep", small.config, "--out", disk)
        full = call(*command, "--save-every", 0)
        assert full.code == 1
        (line,) = lines_of(full)
        assert f"cannot save to {disk}" in line
        assert "no space left" in line
        assert "make room and continue with --resume" in line
        assert full.err.endswith(f"{line}\n")
        assert "Traceback" not in full.err
        assert not caplog.records
        assert any(saved(disk).values())
        assert not list(disk.rglob("*.part"))
        copy = shutil.copytree(disk, tmp_path / "copy")

        resize("20m")
        assert call(*command, "--resume").code == 0
        check_finished(disk, small.expected)
    assert call("sweep", small.config, "--out", copy, "--resume").code == 0
    check_finished(copy, small.expected)


def test_a_diverged_run_leaves_nothing_to_resume(tmp_path):
    config = write_config(
        tmp_path, num_models=2, num_rounds=12, num_seeds=1, num_clients=5, block_size=2
    )
    config.write_text(config.read_text().partition("[algorithms.MFA-Rand]")[0])
    hot = ("--set", "algorithms.MFA-RR.learning_rate=1e6")
    outcome = call("run", config, "--out", tmp_path, "--save-every", 0, *hot)
    assert outcome.code == 1
    assert "diverged" in outcome.err
    assert files(tmp_path / "grid") == ["figure.png", "manifest.json", "result.nc"]


def test_a_second_signal_is_obeyed_at_once(tmp_path):
    def twice(label, done, total):
        for _ in range(2 * (done > 0)):
            signal.raise_signal(signal.SIGINT)

    # A shell starts its background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Checkpoints(tmp_path) as checkpoints:
            sweep_of(wander(), Execution([progress(twice)], checkpoints))
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_batches_are_refused(small, unfinished, monkeypatch):
    """Batches are smaller if less memory is free than when the run began."""
    change_record(
        unfinished, lambda record: record["choices"].update(blocks=[[16, 1, 0, False]] * 2)
    )
    before = contents(unfinished)
    monkeypatch.setattr(sweeps, "make_plan", lambda grid, blocks, **how: make_plan(grid, **how))
    outcome = call("sweep", small.config, "--out", unfinished, "--resume")
    check_refused(
        unfinished, outcome, "of 16 runs, 16 runs", "now 8 runs, 8 runs", "memory", before=before
    )
