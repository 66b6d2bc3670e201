"""Seconds from the shell to the result, compared with hand-written scripts for the same work.

`python -m benchmarks.shell [REPEATS]` runs `fedjax-mm reproduce mfa-fig3` and `fedjax-mm run` on
a grid of 20 points, and the scripts of `benchmarks/by_hand`, one after the other in processes of
their own, and prints medians. Cold: nothing is in the cache of compiled programs; warm: all is.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

BY_HAND = Path(__file__).parent / "by_hand"
OURS = (sys.executable, "-W", "ignore", "-m", "fedjax_mm")
COMMANDS = {
    ("Figure 3", "fedjax_mm"): (*OURS, "reproduce", "mfa-fig3", "--overwrite", "--out", "{out}"),
    ("Figure 3", "by hand"): (
        sys.executable,
        str(BY_HAND / "figure_3.py"),
        "{out}/result.npz",
        "{out}/figure.png",
    ),
    ("20 rates", "fedjax_mm"): (
        *OURS,
        "sweep",
        str(BY_HAND / "grid.toml"),
        "--overwrite",
        "--out",
        "{out}",
    ),
    ("20 rates", "by hand"): (
        sys.executable,
        str(BY_HAND / "grid.py"),
        "{out}/result.npz",
        "{out}/figure.png",
    ),
}


def seconds(command: tuple[str, ...], cache: Path, out: Path) -> float:
    """Times one process with a cache of compiled programs in a folder.

    Raises:
      RuntimeError: if the command fails, with what it wrote; code 3, a claim that fails, is none.
    """
    places = {
        "XDG_CACHE_HOME": str(cache),
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    words = [word.format(out=out) for word in command]
    start = time.perf_counter()
    done = subprocess.run(words, env=os.environ | places, capture_output=True, text=True)
    taken = time.perf_counter() - start
    if done.returncode not in (0, 3):
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr}")
    return taken


def main() -> None:
    """Times all commands in turn and prints the medians."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    found: dict[tuple[str, ...], list[float]] = {}
    for _ in range(repeats):
        for row, command in COMMANDS.items():
            with tempfile.TemporaryDirectory() as folder:
                cache, out = Path(folder, "cache"), Path(folder, "out")
                out.mkdir()
                for state in ("cold", "warm"):
                    found.setdefault((*row, state), []).append(seconds(command, cache, out))
    table = Table("work", "program", "cold s", "warm s", box=None)
    for row in COMMANDS:
        both = (statistics.median(found[*row, state]) for state in ("cold", "warm"))
        table.add_row(*row, *(f"{x:.1f}" for x in both))
    Console(width=80).print(table)


if __name__ == "__main__":
    main()
