"""Saves and finds the parts of a run on disk, written by `--part` and joined by `merge`."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from fedjax_mm.cli.directories import Existing, leave_alone, saving
from fedjax_mm.cli.terminal import notes, say
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.run import given, gridded
from fedjax_mm.results.manifest import manifest
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.cluster import Part, changes_of, compute_part, listed, load_part, save_part
from fedjax_mm.sweeps.errors import RefusedError
from fedjax_mm.sweeps.execution import Callback, Execution


def _folder(directory: Path, first_seed: int) -> Path:
    return directory / (f"parts-of-seed-{first_seed}" if first_seed else "parts")


def run_part(
    experiment: Experiment,
    directory: Path,
    part: Part,
    before: Existing,
    how: Execution,
    callbacks: Sequence[Callback],
    with_params: bool,
) -> None:
    """Computes a part of an experiment's runs and saves it for `merge`, unless it exists.

    Raises:
      RefusedError: if the part's file is from another run, or other parts have a different N.
    """
    place = _folder(directory, experiment.first_seed) / f"{part.number}-of-{part.of}"
    path = place.with_suffix(".npz")
    others = {of for _, of in _found(place.parent) if of != part.of}
    if others and before != "overwrite":
        raise RefusedError(
            f"{place.parent} has parts of {listed(sorted(others))}; give --part K/N with that N, "
            "or delete them"
        )
    # Unfinished work next to an existing part must have been started with `--overwrite`.
    is_begun = Checkpoints(place).has_work
    if not is_begun and before != "overwrite" and _has(path, experiment, with_params):
        leave_alone(path)
        return
    with saving(place, before, how) as how:
        keep: Any = "params" if with_params else None
        how = how._replace(callbacks=[*callbacks, *how.callbacks])
        say(f"part {part}", notes)
        with gridded(experiment, how.memory, keep) as grid:
            saved = compute_part(grid, part, how, on_divergence=experiment.on_divergence)
        if jax.process_index() == 0:
            about = {**saved.about, "settings": given(experiment)}
            save_part(saved._replace(about=about), path)
    with suppress(OSError):
        place.rmdir()
    more = f" --first-seed {experiment.first_seed}" * (experiment.first_seed > 0)
    say(f"part {part} is in {path}; when all parts are there: fedjax-mm merge {directory}{more}")


def _has(path: Path, experiment: Experiment, with_params: bool) -> bool:
    """Whether a file holds an intact part of this experiment."""
    if not path.exists():
        return False
    try:
        saved = load_part(path)
    except ValueError as error:
        say(f"{error}: made again", notes)
        return False
    made = manifest({}, seed=experiment.seed, data="")
    wanted = {
        "config": experiment.model_dump(),
        "keep": "params" if with_params else None,
        "first_seed": experiment.first_seed,
        "versions": made["versions"],
        "revision": made["git_revision"],
    }
    if changes := changes_of(saved, wanted):
        raise RefusedError(
            f"{path} is a part of another run: {changes}; choose another directory with --out, or "
            "replace it with --overwrite"
        )
    return True


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
    return f"{parts} {what} with --part {numbers[0]}/{of} --resume"


def parts_in(directory: Path, first_seed: int) -> list[Path]:
    """Lists the files of all parts of a run, in order.

    Raises:
      ValueError: if parts are missing, or are from runs with different numbers of parts.
    """
    folder = _folder(directory, first_seed)
    found = _found(folder)
    if not found:
        raise ValueError(f"{folder} has no parts; compute them with --part K/N")
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
