"""Parts of a sweep in files, one for each, which `merge` joins."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import jax
import xarray as xr

from fedjax_mm.base import Params
from fedjax_mm.sweeps.checkpoint import KEEP_STATE, Checkpoints, KeptState, Saved, as_long
from fedjax_mm.sweeps.cluster import (
    Part,
    alike,
    all_programs,
    changes_of,
    compute_part,
    join_parts,
    listed,
    load_part,
    save_part,
    store_parts,
)
from fedjax_mm.sweeps.errors import DivergenceError, RefusedError, refusing
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.program import Program
from fedjax_mm.tools.screen import Report


def _folder(directory: Path, first_seed: int) -> Path:
    return directory / (f"parts-of-seed-{first_seed}" if first_seed else "parts")


def file_of(directory: Path, part: Part, first_seed: int, *, overwrite: bool = False) -> Path:
    """The file of a part, whose name without ".npz" is the directory of its unfinished work.

    Raises:
      RefusedError: if other parts have a different N, unless they may be overwritten.
    """
    folder = _folder(directory, first_seed)
    others = {of for _, of in _found(folder) if of != part.of}
    if others and not overwrite:
        raise RefusedError(
            f"{folder} has parts of {listed(sorted(others))}; give part K/N with that N, or delete "
            "them"
        )
    return folder / f"{part.number}-of-{part.of}.npz"


def is_complete(
    path: Path,
    wanted: Mapping[str, Any],
    tell: Callable[[str], None] = warnings.warn,
    *,
    resume: bool = True,
) -> bool:
    """Whether a file holds an intact part of this run, which nobody has begun to replace.

    With `resume`, a part with fewer rounds whose state was kept is not complete, but continued.

    Raises:
      RefusedError: if the part is from another run.
    """
    # Unfinished work next to an existing part must have been started with `--overwrite`.
    unfinished = path.with_suffix("")
    if not path.exists() or Checkpoints(unfinished).has_work:
        return False
    try:
        saved = load_part(path)
    except ValueError as error:
        tell(f"{error}: made again")
        return False
    if not (changes := changes_of(saved, wanted)):
        return True
    is_longer = not changes_of(saved, as_long(wanted, saved.rounds))
    if is_longer and resume and KeptState(unfinished).exists:
        return False  # going on from the state, which refuses fewer rounds
    hint = f"; {KEEP_STATE}" * is_longer
    raise RefusedError(
        f"{path} is a part of another run: {changes}; choose another directory with --out, or "
        f"replace it with --overwrite; in Python choose another `out`, or delete it{hint}"
    )


def compute_into(
    path: Path,
    grid: Grid,
    part: Part,
    how: Execution,
    on_divergence: Literal["mark", "stop"],
    *,
    programs: Sequence[Program] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Computes a part of a grid into its file, with the settings of an experiment if given."""
    saved = compute_part(grid, part, how, on_divergence=on_divergence, programs=programs)
    if jax.process_index() == 0:
        about = saved.about if settings is None else {**saved.about, "settings": settings}
        save_part(saved._replace(about=about), path)


def sweep_part(
    grid: Grid, part: Part, out: Path, how: Execution, on_divergence: Literal["mark", "stop"]
) -> Path:
    """Computes a part into its file in a directory, or continues it, unless it is complete.

    Raises:
      RefusedError: if the directory has parts of another run or with a different N.
    """
    path = file_of(out, part, grid.first_seed)
    with refusing():
        programs = all_programs(grid, how.memory)
        if is_complete(path, alike(grid, programs)):
            return path
        unfinished = Checkpoints(path.with_suffix(""), resume=True).open()
    with unfinished:
        how = how._replace(checkpoints=unfinished)
        try:
            compute_into(path, grid, part, how, on_divergence, programs=programs)
        except DivergenceError:  # do not resume, because the run would diverge again
            unfinished.discard()
            raise
        unfinished.discard()
    with suppress(OSError):
        unfinished.directory.rmdir()
    return path


def _found(folder: Path) -> dict[tuple[int, int], Path]:
    """The files of parts, by part number and number of parts."""
    return {
        (int(each[1]), int(each[2])): path
        for path in folder.glob("*-of-*.npz")
        if (each := re.fullmatch(r"(\d+)-of-(\d+)\.npz", path.name))
    }


def _in_words(numbers: Sequence[int], of: int, what: str) -> str:
    """Describes some parts and how to complete the first one."""
    many = len(numbers) > 1
    parts = f"part{'s' * many} number {listed(numbers)} of {of} {'are' if many else 'is'}"
    first = f"{numbers[0]}/{of}"
    return f'{parts} {what} with --part {first} --resume, or part="{first}" in Python'


def parts_in(directory: Path, first_seed: int) -> list[Path]:
    """Lists the files of all parts of a run, in order.

    Raises:
      ValueError: if parts are missing, or are from runs with different numbers of parts.
    """
    folder = _folder(directory, first_seed)
    found = _found(folder)
    if not found:
        raise ValueError(f"{folder} has no parts; compute them with part K/N")
    numbers = sorted({of for _, of in found})
    if len(numbers) > 1:
        raise ValueError(
            f"{folder} has parts of {' and of '.join(map(str, numbers))}; delete the unwanted ones"
        )
    (of,) = numbers
    missing = [number for number in range(1, of + 1) if (number, of) not in found]
    if missing:
        begun = [number for number in missing if Checkpoints(folder / f"{number}-of-{of}").has_work]
        rest = [number for number in missing if number not in begun]
        kinds = {"missing: compute": rest, "unfinished: continue": begun}
        raise ValueError(
            "; ".join(_in_words(each, of, what) for what, each in kinds.items() if each)
        )
    return [found[each] for each in sorted(found)]


def join_files(
    grid: Grid,
    paths: Sequence[Path],
    to: Path | None = None,
    before: xr.Dataset | None = None,
    report: Report = lambda *_: None,
) -> tuple[xr.Dataset, list[Params] | None]:
    """Joins the parts in some files, one at a time: in memory, or in the file `to`.

    See `join_parts` and `store_parts`.
    """

    def loaded(number: int, path: Path) -> Saved:
        report(f"joining {path.name}", number, len(paths))
        return load_part(path)

    parts = map(loaded, range(len(paths)), paths)
    return join_parts(grid, parts) if to is None else store_parts(grid, parts, to, before)
