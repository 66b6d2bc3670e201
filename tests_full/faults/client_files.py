"""Kills runs whose states of clients are in files, and resumes them.

`python -m tests_full.faults.client_files DIRECTORY KILLS` prints a line for each kill and each end,
and how many ends had the bits of a run in memory. Children are forked before JAX has a backend.
"""

import hashlib
import importlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from fedjax_mm import local_sgd, mfa_rand, scaffold, sweep
from fedjax_mm.availability import dropping
from fedjax_mm.sweeps import Callback, Checkpoints, Execution, Setup
from fedjax_mm.tasks import quadratic

CLIENTS, ROUNDS = 40, 30


def digest(how: Execution) -> str:
    """Runs SCAFFOLD on two models, and gives a digest of its records and final parameters."""
    assignment = dropping(mfa_rand(CLIENTS, 2, cohort_size=16), 0.2)
    setup = Setup(quadratic(CLIENTS, 20, mu=0.05), scaffold(local_sgd(0.1, steps=2)), assignment)
    dataset, params = sweep(setup, execution=how, num_rounds=ROUNDS, keep="params")
    arrays = [dataset[name].values for name in sorted(dataset.data_vars)]
    content = [np.asarray(x).tobytes() for x in (*arrays, *jax.tree.leaves(params))]
    return hashlib.sha256(b"".join(content)).hexdigest()


def in_files(directory: Path, told: int) -> str:
    """Starts or resumes a run that saves after each round, and prints a line for each."""
    importlib.import_module("fedjax_mm.sweeps.execute")._SEGMENT_SECONDS = 0
    callbacks = [Callback(on_segment=lambda _: os.write(told, b".") and None)]
    with Checkpoints(directory / "out", resume=True) as saved:
        how = Execution(callbacks, saved, 0.0, directory / "states")
        found = digest(how)
        saved.discard()
    return found


def child(work: Callable[[int], str], after: int | None = None, seconds: float = 0.0) -> str:
    """Output of a forked child, or "" if it was killed after some rounds."""
    reading, told = os.pipe()
    number = os.fork()
    if not number:
        os.close(reading)
        code = 1
        try:
            os.write(told, b"=" + work(told).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(told)
    text = b""
    while more := os.read(reading, 1 if after is not None else 4096):
        text += more
        if after is not None and text.count(b".") >= after and b"=" not in text:
            time.sleep(seconds)
            os.kill(number, signal.SIGKILL)
            after = None
    os.close(reading)
    _, status = os.waitpid(number, 0)
    found = text.decode().partition("=")[2]
    if not found and not os.WIFSIGNALED(status):
        raise SystemExit(f"a child failed after {text.decode()}")
    return found


def main(directory: Path, kills: int) -> None:
    jax.config.update("jax_compilation_cache_dir", str(directory / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    draws, done, ends = random.Random(0), 0, list[bool]()
    expected = child(lambda _: digest(Execution()))
    while done < kills:
        place, found = directory / str(len(ends)), ""
        for _ in range(draws.randint(1, 3)):
            after, seconds = draws.randint(1, ROUNDS - 1), draws.choice([0, draws.uniform(0, 0.1)])
            found = child(lambda told, place=place: in_files(place, told), after, seconds)
            if found:
                break
            done += 1
            print(f"killed {seconds:.3f} s after {after} more rounds", flush=True)
        found = found or child(lambda told, place=place: in_files(place, told))
        ends.append(found == expected and not [*(place / "states").iterdir()])
        print("ended", "alike" if ends[-1] else "otherwise", flush=True)
    print(f"{done} kills; {sum(ends)} of {len(ends)} ends alike", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
