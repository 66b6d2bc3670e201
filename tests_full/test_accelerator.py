"""`python -m benchmarks.accelerator` resumes after a kill and computes no row twice."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks import accelerator, timeline
from benchmarks.accelerator import TINY, Row
from benchmarks.accelerator_report import derived, write_report
from benchmarks.programs import Made
from fedjax_mm.cli.speed import Program

ROOT = Path(__file__).parent.parent
COMMAND = (sys.executable, "-m", "benchmarks.accelerator", "--tiny", "--out")


def times_of_rows(out):
    """Modification times of the files of rows."""
    return {path.name: path.stat().st_mtime_ns for path in (out / "rows").glob("*.json")}


def test_a_killed_run_resumes_and_a_finished_one_computes_nothing(tmp_path, capfd):
    child = subprocess.Popen(
        [*COMMAND, tmp_path], stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    lines = iter(child.stdout.readline, "")
    names = [next(lines).split()[1], next(lines).split()[1]]  # the first row is finished by then
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    first = times_of_rows(tmp_path)
    assert f"{names[0]}.json" in first

    accelerator.main(["--tiny", "--out", str(tmp_path)])
    said, second = capfd.readouterr().out, times_of_rows(tmp_path)
    for name in (*names, *(row.name for row in accelerator.rows(TINY))):
        assert (f"begin {name}\n" in said) != (f"{name}.json" in first)
    assert second.items() >= first.items()
    assert len(second) == len(list(accelerator.rows(TINY)))
    assert "0 left" in said

    report = json.loads((tmp_path / "accelerator.json").read_text())
    assert report["ceilings"]["GB/s"] > 0
    assert [row.get("error") for row in report["rows"]] == [None] * (len(second) - 1)
    for row in report["rows"]:
        assert row["kernels"] > 0
        assert row["microseconds a round"] > 0
    compared = [row for row in report["rows"] if row["checksums"]]
    plain = {row["work"]: row["checksums"] for row in compared if row["variant"] == "as it is"}
    assert {row["variant"] for row in compared} == accelerator.ALL_HOW.keys()
    for row in compared:
        expected = pytest.approx(plain[row["work"]], rel=0, abs=3e-5)
        assert row["checksums"] == expected, row["name"]
    text = (tmp_path / "accelerator.md").read_text()
    assert "| W2 | " in text
    assert "## Table 1" in text
    for name in ("growth", "variants", "launches"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000

    accelerator.main(["--tiny", "--out", str(tmp_path)])
    assert "begin" not in capfd.readouterr().out
    assert times_of_rows(tmp_path) == second


def rows_from(*makes):
    return [Row("workloads", f"W{i}", make) for i, make in enumerate(makes)]


def test_a_failing_row_does_not_stop_the_others(tmp_path):
    def fail(_):
        raise MemoryError("RESOURCE_EXHAUSTED: out of memory")

    accelerator.prepare_directory(tmp_path / "rows")
    todo = rows_from(fail, fail)
    accelerator.work(todo, TINY, tmp_path, 100, time.time() + 100)
    found = [json.loads(accelerator.path_of(row, tmp_path).read_text()) for row in todo]
    assert [row["error"] for row in found] == ["MemoryError: RESOURCE_EXHAUSTED: out of memory"] * 2
    write_report(found, tmp_path)
    assert "out of memory" in (tmp_path / "accelerator.md").read_text()


def test_no_row_starts_after_the_deadline(tmp_path):
    accelerator.work(rows_from(None), TINY, tmp_path, 100, time.time() - 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "reason"), [("SIGKILL", "ended with -9"), ("SIGALRM", "longer than 7 seconds")]
)
def test_the_row_of_a_killed_worker_is_recorded(tmp_path, number, reason):
    """Its error names the reason, and the next worker skips it."""
    accelerator.prepare_directory(tmp_path / "rows")
    (row,) = given = rows_from(None)
    script = f"import os, signal; print('begin {row.name}', flush=True)"
    command = [sys.executable, "-c", f"{script}; os.kill(os.getpid(), signal.{number})"]
    asyncio.run(accelerator.supervise(command, given, tmp_path, 7))
    assert reason in json.loads(accelerator.path_of(row, tmp_path).read_text())["error"]


def test_a_worker_that_fails_outside_of_rows_raises(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match="ended with 3 outside of its rows"):
        asyncio.run(accelerator.supervise(command, rows_from(None), tmp_path, 7))


def test_a_process_measures_alone(tmp_path):
    (tmp_path / "rows").mkdir()
    entered = []

    def enter(*, alone):
        with accelerator.device_of(tmp_path, alone=alone):
            entered.append(alone)

    def started(*, alone):
        thread = threading.Thread(target=enter, kwargs={"alone": alone})
        thread.start()
        return thread

    with accelerator.device_of(tmp_path, alone=False):
        started(alone=False).join()  # processes may compile at the same time
        first = started(alone=True)
        time.sleep(0.2)
        second = started(alone=False)
        time.sleep(0.2)
        assert entered == [False]
    first.join()
    second.join()
    assert entered == [False, True, False]  # the later ones have waited


def test_a_timeline_counts_kernels():
    compiled = jax.jit(lambda x: lax.fori_loop(0, 50, lambda _, x: jnp.sin(x @ x), x))

    def run():
        return compiled(jnp.ones((64, 64))).block_until_ready()

    found = timeline.profiled(Made(Program(run, 0.0, 0.0), num_rounds=50, updates=0))
    assert max(found.times.values()) >= 50
    assert 0 < found.busy <= found.span


def test_fractions_of_the_peaks():
    row = {
        "seconds": 2.0,
        "num_rounds": 1000,
        "updates": 4000,
        "flops": 6e9,
        "kernels": 50,
        "round_bytes": 8e6,
        "variant": "",
        "is_batched": False,
    }
    found = derived(row, {"float32 GFLOP/s": 30.0, "bfloat16 GFLOP/s": 60.0, "GB/s": 40.0})
    assert found == pytest.approx(
        {
            "microseconds a round": 2000,
            "microseconds a kernel": 40,
            "updates/s": 2000,
            "GFLOP/s": 3,
            "of matrix peak": 0.1,
            "GB/s": 4,
            "of bandwidth": 0.1,
        }
    )


def test_names_of_rows_are_unique():
    for sizes in (TINY, accelerator.FULL):
        names = [row.name for row in accelerator.rows(sizes)]
        assert len(set(names)) == len(names)
