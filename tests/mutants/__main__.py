"""Says which tests find which faults: `python -m tests.mutants [NAME ...] [--pytest "ARGS"]`.

Every patch in this directory is a fault in the package, and its name says which one. The command
applies each to a copy of the tree, runs the tests there, and prints the first test that fails, or
SURVIVED if all pass. It runs the tests without a fault first, because tests that fail anyway would
find every fault. The exit code is 1 if a patch does not apply or the tests do not run.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PATCHES = Path(__file__).parent
ROOT = PATCHES.parents[1]
DEFAULT = "-x -q -n 2 --dist worksteal"
"""The arguments of pytest that run the default tier."""
_MOST_SECONDS = 3600  # for a fault that makes the tests wait forever


class BrokenError(Exception):
    """A patch that does not apply, or tests that do not run."""


class Outcome(NamedTuple):
    """Outcome of the tests of a tree.

    Attributes:
      killed_by: the first test that failed, or empty if all passed.
      seconds: how long the tests took.
    """

    killed_by: str
    seconds: float


def names() -> list[str]:
    """Returns the names of all faults."""
    return sorted(path.stem for path in PATCHES.glob("*.patch"))


def apply(name: str, tree: Path, *, check: bool = False) -> None:
    """Applies a patch to a tree, or only checks that it applies.

    Raises:
      BrokenError: if it does not apply.
    """
    command = ["git", "apply", *["--check"] * check, str(PATCHES / f"{name}.patch")]
    # Let git find no repository above the tree, because it would skip files outside of it.
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(command, cwd=tree, env=alone, capture_output=True, text=True)
    if done.returncode:
        raise BrokenError(f"it does not apply: {done.stderr.strip()}")


def copy_tree(target: Path) -> None:
    """Copies the files of the working tree that git tracks."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # a deleted file is tracked until the next commit
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(name: str | None, pytest: str) -> Outcome:
    """Runs the tests on a copy of the tree, with one fault or none.

    Raises:
      BrokenError: if the patch does not apply, or the tests do not run.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        tree = Path(directory).resolve() / "tree"
        copy_tree(tree)
        if name is not None:
            apply(name, tree)
        command = [sys.executable, "-m", "pytest", *shlex.split(pytest), "-p", "no:cacheprovider"]
        there = os.environ | {"PYTHONPATH": str(tree)}
        clock = time.perf_counter()
        try:
            done = subprocess.run(
                command, cwd=tree, env=there, capture_output=True, text=True, timeout=_MOST_SECONDS
            )
        except subprocess.TimeoutExpired:
            return Outcome(f"more than {_MOST_SECONDS} seconds", _MOST_SECONDS)
        seconds = time.perf_counter() - clock
    if done.returncode == 0:
        return Outcome("", seconds)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if not failed:
        last = (done.stdout + done.stderr).strip().splitlines()[-3:]
        raise BrokenError(f"pytest ended with {done.returncode}: {' / '.join(last)}")
    return Outcome(failed[1], seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints which test finds each fault, and returns the exit code."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault; all if none is given")
    parser.add_argument("--pytest", default=DEFAULT, metavar="ARGS", help=f"default: {DEFAULT}")
    given = parser.parse_args(arguments)
    if unknown := sorted({*given.names} - {*names()}):
        parser.error(f"there is no {unknown[0]}; choose from {', '.join(names())}")
    wanted = given.names or names()
    width, num_killed, num_broken = max(map(len, wanted)), 0, 0
    for name in (None, *wanted):
        label = f"{name or '(no fault)':{width}}"
        try:
            found = run_tests(name, given.pytest)
            if name is None and found.killed_by:
                raise BrokenError(f"the tests fail without a fault: {found.killed_by}")
        except BrokenError as error:
            print(f"{label}  BROKEN: {error}", flush=True)
            if name is None:
                return 1
            num_broken += 1
            continue
        num_killed += bool(found.killed_by)
        verdict = found.killed_by or ("passed" if name is None else "SURVIVED")
        print(f"{label}  {verdict}  {found.seconds:.0f} s", flush=True)
    print(f"killed {num_killed} of {len(wanted)}")
    return 1 if num_broken else 0


if __name__ == "__main__":
    sys.exit(main())
