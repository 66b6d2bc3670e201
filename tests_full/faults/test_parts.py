"""Parts whose processes and workers are killed at random are neither lost nor merged wrongly."""

import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import distributed
import numpy as np
import pytest
import submitit

from fedjax_mm import open_result
from fedjax_mm.sweeps import Saved
from fedjax_mm.sweeps.cluster import TRIES, Part, compute_parts, load_part
from tests.test_cli import call
from tests_full.faults.children import end, start, write_files

KILLS = int(os.environ.get("FEDJAX_MM_KILLS", "60"))
PARTS = 4
pytestmark = pytest.mark.slow


def told(counts, record_property):
    print(f"\n{dict(counts)}")
    for name, value in counts.items():
        record_property(f"faults: {name}", value)


def test_parts_that_are_killed_repeatedly_make_up_the_sweep(tmp_path, record_property):
    """Kills hit startup, compilation, computation and writing. Merges are refused until the end."""
    write_files(tmp_path)
    code, lines, said = end(start("sweep", tmp_path, "--part", f"1/{PARTS}"))
    assert code == 0, said
    parts = tmp_path / "results/grid/parts"
    moments, counts = random.Random(5), Counter()
    while counts["kills"] < KILLS:
        number = moments.randint(1, PARTS)
        path = parts / f"{number}-of-{PARTS}.npz"
        if path.exists():  # so that some part is always unfinished
            path.unlink()
            counts["finished parts, made again"] += 1
        words = ("--part", f"{number}/{PARTS}", "--resume", "--save-every", 0)
        after = moments.randrange(len(lines))
        killed = end(
            start("sweep", tmp_path, *words), (signal.SIGKILL,), after, moments.uniform(0, 0.3)
        )
        assert "Traceback" not in killed.said, killed.said
        counts["kills" if killed.code == -signal.SIGKILL else "finished before"] += 1
        if path.exists():
            assert load_part(path).about["part"] == [number, PARTS]
        if not all((parts / f"{each}-of-{PARTS}.npz").exists() for each in range(1, PARTS + 1)):
            assert call("merge", tmp_path / "results/grid").code == 2
            counts["merges refused"] += 1
    for number in range(1, PARTS + 1):
        code, _, said = end(start("sweep", tmp_path, "--part", f"{number}/{PARTS}", "--resume"))
        assert code == 0, said
    assert call("merge", tmp_path / "results/grid").code == 0
    check_alike(open_result(tmp_path / "results/grid"), tmp_path / "whole")
    told(counts, record_property)


EXECUTOR = """
[executor]
name = "submitit"
cluster = "local"
num_parts = 4
folder = "{folder}"
"""


def test_an_executor_whose_parent_is_killed_can_be_resumed(tmp_path, record_property, monkeypatch):
    """Finished parts are not computed again, and jobs of a killed parent do no harm."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    write_files(tmp_path)
    with (tmp_path / "grid.toml").open("a") as file:
        file.write(EXECUTOR.format(folder=tmp_path / "jobs"))
    words = ("--executor", "submitit", "--resume")
    moments, counts = random.Random(7), Counter()
    for _ in range(max(1, KILLS // 10)):
        shutil.rmtree(tmp_path / "results", ignore_errors=True)
        for _ in range(2):
            seconds = moments.uniform(0, 14)
            killed = end(start("sweep", tmp_path, *words), (signal.SIGKILL,), 0, seconds)
            assert "Traceback" not in killed.said, killed.said
            counts["kills" if killed.code == -signal.SIGKILL else "finished before"] += 1
            saved = list((tmp_path / "results/grid/unfinished").glob("part-*/*.npz"))
            counts["parts that were saved then"] += len(saved)
        code, _, said = end(start("sweep", tmp_path, *words))
        assert code == 0, said
        counts["resumed to the end"] += 1
    check_alike(open_result(tmp_path / "results/grid"), tmp_path / "whole")
    told(counts, record_property)


def test_only_one_of_two_processes_computes_a_part(tmp_path, record_property):
    counts = Counter()
    for _ in range(max(1, KILLS // 10)):
        shutil.rmtree(tmp_path, ignore_errors=True)
        write_files(tmp_path)
        both = [start("sweep", tmp_path, "--part", "1/1") for _ in range(2)]
        ended = [end(each) for each in both]
        codes = sorted(each.code for each in ended)
        # The later one is refused, or finds the part of the earlier one and leaves it alone.
        assert codes in ([0, 2], [0, 0]), ended
        counts[f"ended with {codes}"] += 1
        assert call("merge", tmp_path / "results/grid").code == 0
    told(counts, record_property)


def test_damaged_parts_are_never_joined(tmp_path, record_property):
    """Parts are truncated, flipped, swapped or removed at random."""
    write_files(tmp_path)
    for number in range(1, PARTS + 1):
        assert end(start("sweep", tmp_path, "--part", f"{number}/{PARTS}")).code == 0
    folder = tmp_path / "results/grid/parts"
    paths = sorted(folder.iterdir())
    whole = {path: path.read_bytes() for path in paths}
    moments, counts = random.Random(11), Counter()

    def spoil(path, kind):
        content = bytearray(whole[path])
        place = moments.randrange(len(content))
        if kind == "truncated":
            path.write_bytes(content[:place])
        elif kind == "flipped":
            content[place] ^= 1 << moments.randrange(8)
            path.write_bytes(content)
        elif kind == "swapped":
            path.write_bytes(whole[moments.choice([each for each in paths if each != path])])
        else:
            path.unlink()

    for number in range(4 * KILLS):
        path, kind = (
            moments.choice(paths),
            ("truncated", "flipped", "swapped", "removed")[number % 4],
        )
        spoil(path, kind)
        code, _, said = call("merge", tmp_path / "results/grid")
        if code == 0:  # some bytes of a zip file have no meaning
            assert kind == "flipped"
            check_alike(open_result(tmp_path / "results/grid"), tmp_path / "whole")
            for name in ("result.nc", "manifest.json", "figure.png"):
                (tmp_path / "results/grid" / name).unlink()
        else:
            assert code == 2
            assert path.name in said or "missing" in said, said
        counts[f"{kind}: {'joined rightly' if code == 0 else 'refused'}"] += 1
        path.write_bytes(whole[path])
    told(counts, record_property)


def check_alike(found, place):
    """The result equals that of the whole sweep, which is computed once in `place`."""
    if not (place / "results").exists():
        write_files(place)
        assert end(start("sweep", place)).code == 0
    for name, expected in open_result(place / "results/grid").items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-6)


def slowly(part):
    time.sleep(1)
    return Saved(0, [], {"part": tuple(part)})


class Watched:
    """An executor that records its jobs by part."""

    def __init__(self, executor):
        self.executor, self.jobs = executor, {}

    def submit(self, fn, sent, part, *more):
        job = self.jobs[part] = self.executor.submit(fn, sent, part, *more)
        return job


@contextmanager
def killing(victims, seconds):
    """Repeatedly kills one of the processes from `victims` in a background thread."""
    moments, killed, is_over = random.Random(3), Counter(), threading.Event()

    def work():
        while not is_over.wait(moments.uniform(*seconds)):
            name, number = moments.choice(sorted(victims(killed).items()) or [(None, None)])
            if number:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
                    killed[name] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield killed
    finally:
        is_over.set()
        thread.join()


def check_all(pieces, number):
    assert sorted(Part(*saved.about["part"]) for saved in pieces) == [
        Part(k, number) for k in range(1, number + 1)
    ]


def test_killed_jobs_of_submitit_are_repeated(tmp_path, record_property, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    executor = submitit.AutoExecutor(folder=tmp_path, cluster="local")
    executor.update_parameters(timeout_min=5)
    watched, number = Watched(executor), max(4, KILLS // 4)

    def victims(killed):
        """Running jobs of parts whose workers may still die once more."""
        return {
            part: int(job.job_id)
            for part, job in list(watched.jobs.items())
            if not job.done() and killed[part] < TRIES - 1
        }

    with killing(victims, (0.5, 2)) as killed:
        parts = [Part(k, number) for k in range(1, number + 1)]
        check_all(list(compute_parts(slowly, parts, watched, at_once=2)), number)
    assert killed
    told({"submitit: parts": number, "submitit: kills": killed.total()}, record_property)


def test_killed_workers_of_dask_are_replaced(record_property, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    number = max(4, KILLS // 2)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as here,
        distributed.Client(here) as client,
    ):

        def victims(killed):
            return {each.name: each.process.pid for each in here.workers.values() if each.process}

        with killing(victims, (2, 5)) as killed:
            parts = [Part(k, number) for k in range(1, number + 1)]
            check_all(list(compute_parts(slowly, parts, client, at_once=4)), number)
    told({"dask: parts": number, "dask: kills": killed.total()}, record_property)
