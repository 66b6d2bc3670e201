"""Commands that are killed at random can be resumed, with bitwise equal results."""

import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from functools import cache

import pytest
import xarray as xr

from fedjax_mm import open_result
from tests.test_cli import call
from tests_full.faults.children import (
    COMMANDS,
    Forked,
    end,
    finish,
    fork,
    outcome,
    start,
    write_files,
)

KILLS = int(os.environ.get("FEDJAX_MM_KILLS", "100"))
SIGNALS = {
    "SIGKILL": ((signal.SIGKILL,), {-signal.SIGKILL}),
    "SIGTERM": ((signal.SIGTERM,), {-signal.SIGTERM, 143}),
    "SIGINT": ((signal.SIGINT,), {-signal.SIGINT, 130}),
    "SIGINT twice": ((signal.SIGINT, signal.SIGINT), {-signal.SIGINT, 130}),
}
"""Signals, and exit codes of processes that they ended, by name."""
MOMENTS = ("in the first seconds", "while compiling", "while working")


@cache
def whole(name, place):
    """Exit code, index of the first compilation, number of lines and files without a kill."""
    directory = place / name
    write_files(directory)
    code, told, said = end(start(name, directory))
    assert code in (0, 3), said
    first = next(i for i, line in enumerate(told) if "compiling" in line)
    return code, first, len(told), outcome(name, directory)


def strike(name, directory, place, how, moment, moments):
    """Starts or resumes a command, ends it by signals, and returns its end."""
    _, compiling, count, _ = whole(name, place)
    after, seconds, cached = 0, 0.0, True
    if moment == "in the first seconds":
        seconds = moments.uniform(0, 2)
    elif moment == "while compiling":
        after, seconds, cached = compiling, moments.uniform(0, 0.5), False
    else:
        after = moments.randrange(compiling + 1, count)
    process = start(name, directory, "--resume", "--save-every", 0, cached=cached)
    return end(process, SIGNALS[how][0], after, seconds)


def check_whole(name, directory, place, code):
    assert (code, outcome(name, directory)) == whole(name, place)[::3]


def kill_and_continue(name, place, how, moment, moments, counts):
    """Kills a command once more, and resumes a copy of its directory to the end."""
    directory, copy = place / f"{name} killed", place / "copy"
    write_files(directory)
    folder = directory / "results" / COMMANDS[name][0]
    lock = folder / ".unfinished.lock"
    is_left = lock.exists()  # from an earlier kill
    code, _, said = strike(name, directory, place, how, moment, moments)
    # Python reports a Ctrl-C inside a library's callback as ignored (see how-to/resuming.md).
    said = re.sub(r"Exception ignored in.*?\nKeyboardInterrupt: *\n", "", said, flags=re.DOTALL)
    assert "Traceback" not in said, (how, moment, said)
    done = whole(name, place)[0]
    if code == done:  # it finished before the signal
        check_whole(name, directory, place, code)
        counts["finished before their kill, and alike"] += 1
    else:
        assert code in SIGNALS[how][1], (how, moment, code, said)
        if how in ("SIGINT", "SIGTERM"):
            assert is_left or not lock.exists()
        counts["kills"] += 1
        counts[how] += 1
        counts[moment] += 1
        counts["kills that left saved work"] += any(folder.glob("unfinished/**/*.npz"))
    shutil.copytree(directory, copy)
    code, said = finish(name, copy)
    assert "Traceback" not in said
    if "is complete" not in said:
        assert code == done, said
    check_whole(name, copy, place, done)
    counts["resumes, bit by bit alike"] += 1
    shutil.rmtree(copy)
    if code == done and moments.random() < 0.3:
        shutil.rmtree(directory)


@pytest.mark.slow
def test_commands_that_are_killed_repeatedly_give_the_same_results(tmp_path, record_property):
    """FEDJAX_MM_KILLS is the number of kills (default 100). With -s each is printed."""
    moments, counts, clock = random.Random(18), Counter(), time.monotonic()
    names, signals = list(COMMANDS), list(SIGNALS)
    while counts["kills"] < KILLS:
        name, how, moment = map(moments.choice, (names, signals, MOMENTS))
        kill_and_continue(name, tmp_path, how, moment, moments, counts)
        print(f"{counts['kills']} kills, {counts['resumes, bit by bit alike']} resumes", flush=True)
    for each in counts.items():
        record_property(f"faults: {each[0]}", each[1])
    record_property("faults: seconds", round(time.monotonic() - clock))
    assert counts["kills that left saved work"] >= KILLS / 5


def read(directory):
    return open_result(directory / "results/grid").drop_attrs(deep=False)


@pytest.mark.slow
def test_lengthened_runs_that_are_killed_equal_the_whole_one(tmp_path, record_property):
    """Kills hit each moment of a run that goes on from a kept state."""
    longer = ("--set", "num_rounds=24")
    for name, words in {"whole": longer, "short": ("--keep-state",)}.items():
        write_files(tmp_path / name)
        ended = end(fork("sweep", tmp_path / name, *words))
        assert ended.code == 0, ended.said
    whole, counts, moments = read(tmp_path / "whole"), Counter(), random.Random(5)
    while counts["kills"] < KILLS // 4:
        if not (tmp_path / "now").exists():
            shutil.copytree(tmp_path / "short", tmp_path / "now")
        after, seconds = moments.randrange(len(ended.told)), moments.uniform(0, 0.3)
        words = (*longer, "--resume", "--save-every", 0)
        child = fork("sweep", tmp_path / "now", *words)
        code, _, said = end(child, (signal.SIGKILL,), after, seconds)
        assert "Traceback" not in said, said
        counts["kills" if code == -signal.SIGKILL else "ended"] += 1
        assert (tmp_path / "now/results/grid/state/run.json").exists() or any(
            (tmp_path / "now/results/grid/unfinished").glob("part-*/24.npz")
        )
        if code == 0 or counts["kills"] == KILLS // 4:
            code, said = finish("sweep", tmp_path / "now", *longer)
            assert code == 0, said
            xr.testing.assert_identical(read(tmp_path / "now"), whole)
            counts["bit by bit alike"] += 1
            shutil.rmtree(tmp_path / "now")
    for each in counts.items():
        record_property(f"faults: {each[0]}", each[1])


@pytest.mark.slow
def test_merges_that_are_killed_leave_nothing_half_written(tmp_path, record_property):
    write_files(tmp_path)
    for part in ("1/2", "2/2"):
        ended = end(fork("sweep", tmp_path, "--part", part))
        assert ended.code == 0, ended.said
    folder, moments, counts = tmp_path / "results/grid", random.Random(7), Counter()
    command, clock = ["merge", str(folder)], time.monotonic()
    assert end(Forked(command)).code == 0
    seconds, whole = time.monotonic() - clock, read(tmp_path)
    while counts["kills"] < KILLS // 4:
        for name in ("result.nc", "manifest.json", "figure.png"):
            (folder / name).unlink(missing_ok=True)
        code, *_ = end(Forked(command), (signal.SIGKILL,), 0, moments.uniform(0, seconds))
        counts["kills" if code else "ended"] += 1
        if (folder / "result.nc").exists():
            xr.testing.assert_identical(read(tmp_path), whole)
            counts["killed with the whole result in place"] += code != 0
    assert call("merge", folder).code == 0
    xr.testing.assert_identical(read(tmp_path), whole)
    assert not list(folder.glob(".*.part"))
    for each in counts.items():
        record_property(f"faults: {each[0]}", each[1])
