"""Commands in child processes that tests kill, and the files that they leave."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import jax
import xarray as xr

from fedjax_mm.tools.files import is_sealed
from tests.test_cli import call

_ALGORITHMS = """
[algorithms.MFA-RR]
assignment.name = "mfa_rr"
learning_rate = 0.1
local_steps = 2

[algorithms.MFA-Rand]
assignment = { name = "mfa_rand", cohort_size = 4 }
learning_rate = 0.2
local_steps = 3
"""
_SETTINGS = """
num_models = 2
num_rounds = 12
num_seeds = 5
task = { name = "quadratic", num_clients = 5, block_size = 2, mu = 0.05 }
"""
FILES = {
    "small": _SETTINGS + _ALGORITHMS,
    "grid": _SETTINGS + _ALGORITHMS + "[axes]\ntask.mu = [0.01, 0.05]\n",
}
_FIGURE = ["reproduce", "mfa-fig3", "--rounds", "12", "--clients", "6"]
_FIGURE += ["--set", "num_models=3", "--set", "task.block_size=2"]
COMMANDS = {
    "sweep": ("grid", ["sweep", "grid.toml"]),
    "run": ("small", ["run", "small.toml", "--save-params"]),
    "reproduce": ("mfa-fig3", [*_FIGURE, "--seeds", "5"]),
    "reproduce, seeds added": (
        "mfa-fig3",
        [*_FIGURE, "--until-settled", "--max-seeds", "8", "--set", "num_seeds=2"],
    ),
}
"""Directory of the result, and command to run in a directory with `FILES`, by name."""

_CHILD = """\
import signal
import sys
from fedjax_mm.tools.interrupts import die_of_interrupts

# A shell's jobs in the background are started with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
die_of_interrupts()
print("tells begun", file=sys.stderr, flush=True)
import importlib
from fedjax_mm import cli
from fedjax_mm.cli import terminal
from fedjax_mm.sweeps import plan

plan._CACHE_BYTES = 1
importlib.import_module("fedjax_mm.sweeps.execute")._SEGMENT_SECONDS = 0

def tell(label, done, total):
    print("tells", label, done, total, file=sys.stderr, flush=True)

terminal.log_lines = lambda: tell
cli.main(sys.argv[1:])
"""
"""Runs one replica per device and one record at a time, and prints a line for each."""


def write_files(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in FILES.items():
        (directory / f"{name}.toml").write_text(content)


def arguments(name: str, directory: Path, *more: object) -> list[str]:
    """The arguments of a command whose files and results are in a directory."""
    command = [str(directory / x) if x.endswith(".toml") else x for x in COMMANDS[name][1]]
    return [*command, "--out", str(directory / "results"), *map(str, more)]


def start(name: str, directory: Path, *more: object, cached: bool = True) -> subprocess.Popen:
    """Starts the command in a child process with the same number of devices."""
    command = ["--devices", str(jax.device_count()), *arguments(name, directory, *more)]
    environment = {key: x for key, x in os.environ.items() if cached or "CACHE" not in key}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _CHILD]
        + (command if cached else ["--no-cache", *command]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload([__name__, "dask.array", "matplotlib.pyplot", "netCDF4"])


def _run(stderr: Connection, words: list[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(stderr.fileno(), 2)
    warnings.simplefilter("ignore")
    sys.argv[1:] = words
    exec(_CHILD, {})


class Forked:
    """A command in a child that is forked after all imports, with the methods of a `Popen`."""

    def __init__(self, words: list[str]) -> None:
        reader, writer = _SERVER.Pipe(duplex=False)
        self._process = _SERVER.Process(target=_run, args=(writer, words))
        self._process.start()
        writer.close()
        self.stderr = os.fdopen(os.dup(reader.fileno()))

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.join()
        self.stderr.close()

    def send_signal(self, number: int) -> None:
        if self._process.is_alive():
            os.kill(self._process.pid, number)

    @property
    def returncode(self) -> int:
        return self._process.exitcode


def fork(name: str, directory: Path, *more: object) -> Forked:
    """As `start`, without the imports."""
    return Forked(["--devices", str(jax.device_count()), *arguments(name, directory, *more)])


class Ended(NamedTuple):
    """Exit code, progress lines and other output of a child."""

    code: int
    told: list[str]
    said: str


def end(process: subprocess.Popen, strikes=(), after: int = 0, seconds: float = 0.0) -> Ended:
    """Sends signals some seconds after `after` progress lines, and waits for the child."""
    told, said = [], []
    with process:
        for line in process.stderr:
            if not line.startswith("tells "):
                said.append(line)
                continue
            told.append(line)
            if len(told) == after + 1:
                time.sleep(seconds)
                for number in strikes:
                    process.send_signal(number)
    return Ended(process.returncode, told, "".join(said))


def finish(name: str, directory: Path, *more: object) -> tuple[int, str]:
    """Resumes the command in this process, and returns its exit code and stderr."""
    code, _, said = call(*arguments(name, directory, "--resume", *more))
    return code, said


def outcome(name: str, directory: Path) -> dict[str, object]:
    """Contents of all files of a finished result, except times and paths."""
    found = {}
    for path in sorted((directory / "results" / COMMANDS[name][0]).iterdir()):
        if path.suffix == ".nc":
            with xr.open_dataset(path) as result:
                values = result.load().drop_attrs(deep=False)
            found[path.name] = {
                str(key): (x.dims, str(x.dtype), x.values.tobytes())
                for key, x in values.variables.items()
                if x.dtype != object
            }
        elif path.suffix == ".json":
            content = json.loads(path.read_text())
            content |= {"digest": is_sealed(content), "files": sorted(content["files"])}
            content.get("manifest", content).pop("wall_seconds")
            found[path.name] = content
        else:
            found[path.name] = path.read_bytes()
    return found
