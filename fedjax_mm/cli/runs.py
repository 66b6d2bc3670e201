"""The commands `run`, `sweep` and `merge`: each writes the result of a file, and prints it.

Wrong input is a `RefusedError`, raised before anything is computed or written.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import xarray as xr
from rich.text import Text

from fedjax_mm.base import Params
from fedjax_mm.cli.results import show_end, show_last
from fedjax_mm.cli.saving import Existing, finished, leave_alone, saving
from fedjax_mm.cli.terminal import notes, say, show_table, shown_progress
from fedjax_mm.experiments import run as experiments
from fedjax_mm.experiments.executors import EXECUTORS
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.overrides import load, validate
from fedjax_mm.files import plain
from fedjax_mm.results.dataset import join_seeds, manifest, open_result, save_dataset
from fedjax_mm.results.finished import differences, find_finished, save_about
from fedjax_mm.results.params import save_params
from fedjax_mm.sweeps.callbacks import Callback
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.errors import DivergenceError, RefusedError, refusing
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.parts import Piece, listed, load_piece, save_piece
from fedjax_mm.sweeps.plan import Plan
from fedjax_mm.sweeps.structures import Part

PARAMS = "params.npz"
"""The file with the models' final parameters, in the directory of a result."""

PARTS = "parts"
"""The folder of parts that were computed apart, in the directory of a result."""

_FILES = ("figure.png", PARAMS, "result.nc")


class Which(NamedTuple):
    """The runs of a file that a command computes, and by which workers.

    Attributes:
      part: of all runs, which are computed apart.
      first_seed: the number of the first seed; a finished result has those before it.
      executor: the name of the executor that computes parts of the runs.
    """

    part: Part | None = None
    first_seed: int = 0
    executor: str | None = None


def run(
    path: Path,
    overrides: Sequence[str],
    which: Which,
    out: Path,
    before: Existing,
    how: Execution,
    *,
    with_params: bool = False,
) -> None:
    """Runs the experiment in a file, which has no axes, or some of its runs."""
    experiment = _read(path, overrides, which, is_sweep=False)
    _compute(experiment, out / path.stem, before, how, which, with_params=with_params)


def sweep(
    path: Path,
    overrides: Sequence[str],
    which: Which,
    out: Path,
    before: Existing,
    how: Execution,
) -> None:
    """Runs the experiment in a file at all points of its axes, or some of these runs."""
    experiment = _read(path, overrides, which, is_sweep=True)
    _compute(experiment, out / path.stem, before, how, which)


def _compute(
    experiment: Experiment,
    directory: Path,
    before: Existing,
    how: Execution,
    which: Which,
    *,
    with_params: bool = False,
) -> None:
    if _is_there(experiment, directory, before, with_params=with_params):
        leave_alone(directory)
    elif which.part:
        _compute_part(experiment, directory, which.part, before, how, with_params)
    else:
        with saving(directory, before, how) as how, by(which.executor, experiment, how) as how:
            plan = [Callback(on_start=show_plan)] * bool(experiment.axes)
            how = how._replace(callbacks=[*plan, *how.callbacks])
            dataset = _run_and_save(experiment, directory, how, with_params)
        _show(dataset, directory)


@contextmanager
def by(name: str | None, experiment: Experiment, how: Execution) -> Iterator[Execution]:
    """Yields how an experiment is carried out by the executor of a name, if there is one."""
    if name is None:
        yield how
        return
    with ExitStack() as stack:
        with refusing():
            if name not in EXECUTORS:
                raise ValueError(f"--executor is {name!r}; choose from {', '.join(EXECUTORS)}")
            given = experiment.executor
            if given and given.name != name:
                raise ValueError(
                    f"--executor is {name!r}, but the file has executor.name = {given.name!r}"
                )
            how = stack.enter_context((given or EXECUTORS[name]()).opened(how))
        yield how


def _is_there(
    experiment: Experiment, directory: Path, before: Existing, *, with_params: bool = False
) -> bool:
    """Returns whether a directory has the result of an experiment, to be left alone.

    Raises:
      RefusedError: if it has that of another run, or lacks the seeds before the first.
    """
    path, first = directory / "manifest.json", experiment.first_seed
    if not first:
        more = [PARAMS] if with_params else []
        return finished(path, experiment, before, files=more) is not None
    with refusing():
        if with_params:
            raise ValueError("--save-params is for all seeds at once; leave out --first-seed")
        now = plain(manifest(experiment.model_dump(mode="json"), seed=0, data=""))
        found = find_finished(path, now, ("num_seeds",))
        if found is None or found.damage:
            raise ValueError(
                f"--first-seed {first} adds seeds to a finished result, but {directory} has "
                f"{'none' if found is None else found.damage}; run the seeds before it at first"
            )
        have = found.content["config"]["num_seeds"]
        if have not in (first, first + experiment.num_seeds):
            raise ValueError(f"{directory} has {have} seeds; give --first-seed {have}")
    return bool(have > first)


def _compute_part(
    experiment: Experiment,
    directory: Path,
    part: Part,
    before: Existing,
    how: Execution,
    with_params: bool = False,
) -> None:
    """Computes a part of an experiment's runs, unless it is there, and saves it for `merge`."""
    place = directory / PARTS / f"{part.number}-of-{part.of}"
    path = place.with_suffix(".npz")
    if before != "overwrite" and _has(path, experiment, with_params):
        leave_alone(path)
        return
    with saving(place, before, how) as how:
        keep: Any = "params" if with_params else None
        piece = experiments.run_part(experiment, part, how, keep=keep)
        if jax.process_index() == 0:
            save_piece(piece, path)
    with suppress(OSError):
        place.rmdir()
    say(f"part {part} is in {path}; when all parts are there: fedjax-mm merge {directory}")


def _has(path: Path, experiment: Experiment, with_params: bool) -> bool:
    """Returns whether a file has a part of this experiment, undamaged.

    Raises:
      RefusedError: if it is a part of another run.
    """
    if not path.exists():
        return False
    try:
        piece = load_piece(path)
    except ValueError as error:
        say(f"{error}: made again", notes)
        return False
    wanted = {
        "config": experiment.model_dump(),
        "keep": "params" if with_params else None,
        "first_seed": experiment.first_seed,
    }
    found = {name: piece.about[name] for name in wanted}
    if changes := "; ".join([*differences(found, plain(wanted))][:3]):
        raise RefusedError(
            f"{path} is a part of another run: {changes}; choose another directory with --out, or "
            "give it up with --overwrite"
        )
    return True


def merge(directory: Path, before: Existing) -> None:
    """Joins the parts in a directory to the result that one machine would have written."""
    with refusing():
        paths = _parts_in(directory)
        about = load_piece(paths[0]).about
        experiment = validate(Experiment, about["config"])
        experiment = experiment.with_seeds(about["first_seed"], experiment.num_seeds)
    if _is_there(experiment, directory, before):
        leave_alone(directory)
        return
    with refusing(), shown_progress() as report:

        def loaded(number: int, path: Path) -> Piece:
            report(f"joining {path.name}", number, len(paths))
            return load_piece(path)

        pieces = map(loaded, range(len(paths)), paths)
        dataset, params = experiments.join(experiment, pieces, about["keep"])
    _show(_save(experiment, directory, dataset, params), directory)


def _parts_in(directory: Path) -> list[Path]:
    """Returns the files of all parts of a run, in their order.

    Raises:
      ValueError: if some are missing, or if there are those of several numbers of parts.
    """
    folder = directory / PARTS
    found = {
        (int(each[2]), int(each[1])): folder / each[0]
        for path in folder.glob("*-of-*.npz")
        if (each := re.fullmatch(r"(\d+)-of-(\d+)\.npz", path.name))
    }
    if not found:
        raise ValueError(f"there are no parts in {folder}; compute them with --part K/N")
    numbers = sorted({of for of, _ in found})
    if len(numbers) > 1:
        raise ValueError(
            f"{folder} has parts of {' and of '.join(map(str, numbers))}; delete those that you do "
            "not want"
        )
    (of,) = numbers
    missing = [number for number in range(1, of + 1) if (of, number) not in found]
    if missing:
        begun = [number for number in missing if Checkpoints(folder / f"{number}-of-{of}").has_work]
        words = f"; {listed(begun)} are unfinished: continue with --resume" if begun else ""
        raise ValueError(f"parts {listed(missing)} of {of} are missing{words}")
    return [found[each] for each in sorted(found)]


def outline(
    path: Path,
    overrides: Sequence[str],
    which: Which,
    how: Execution,
    *,
    is_sweep: bool = False,
) -> None:
    """Prints the plan of an experiment, with the numbers that are known before compilation."""
    experiment = _read(path, overrides, which, is_sweep=is_sweep)
    with refusing(), shown_progress():
        show_plan(experiments.outline(experiment, how, which.part))


def show_plan(plan: Plan) -> None:
    """Prints programs, batches, memory and work, before they begin."""
    rows = [
        (
            each.program.label,
            f"{len(each.program):,}",
            f"{each.num_batches} x {each.batch_size:,}",
            str(each.program.num_models),
            f"{each.num_bytes / 2**20:,.0f}",
        )
        for each in plan.compiled
    ]
    least = "" if plan.is_compiled else ", at least"
    header = ("program", "runs", "batches", "models", f"MiB a batch{least}")
    show_table(header, rows, notes, box=None, title="Plan")
    for line in plan.lines:
        say(f"  {line}", notes, "dim")


def _read(path: Path, overrides: Sequence[str], which: Which, *, is_sweep: bool) -> Experiment:
    """Returns the experiment in a file, which has axes if it is a sweep."""
    with refusing():
        if path.stem in (".", ".."):  # results with this name would lie outside of OUT
            raise ValueError(f"{path}: results have the file's name; give it one with letters")
        experiment = load(path, Experiment, overrides)
        if experiment.axes and not is_sweep:
            raise ValueError(f"{path}: it has axes; run it with `fedjax-mm sweep`")
        if is_sweep and not experiment.axes:
            raise ValueError(f"{path}: axes: missing; give at least 1, or use `fedjax-mm run`")
    return experiment.with_seeds(which.first_seed, experiment.num_seeds)


def _run_and_save(
    experiment: Experiment, directory: Path, how: Execution, with_params: bool = False
) -> xr.Dataset:
    """Returns the result after saving it, and saves the partial result if divergence ends the run.

    Raises:
      DivergenceError: if a model diverged and that ends the run.
    """
    try:
        if with_params:
            dataset, params = experiments.run(experiment, how, keep="params")
            return _save(experiment, directory, dataset, params)
        return _save(experiment, directory, experiments.run(experiment, how))
    except DivergenceError as error:
        if experiment.first_seed == 0:  # else there is a result, which is whole
            _save(experiment, directory, error.partial)
        raise


def _save(
    experiment: Experiment, directory: Path, dataset: xr.Dataset, params: list[Params] | None = None
) -> xr.Dataset:
    """Returns the result, with earlier seeds if there are any, after the first process saved it."""
    if experiment.first_seed:
        dataset = join_seeds(open_result(directory), dataset)
    if jax.process_index() > 0:
        return dataset
    save_dataset(dataset, directory / "result.nc")
    # Remove an earlier run's parameters, which would seem to belong to this result.
    (directory / PARAMS).unlink(missing_ok=True)
    if params is not None:
        save_params(params, dataset, directory / PARAMS)
    if experiment.axes:
        _draw_overview(dataset, directory / "figure.png")
    made = [name for name in _FILES if (directory / name).exists()]
    save_about(directory / "manifest.json", dataset.attrs["manifest"], made)
    return dataset


def _show(dataset: xr.Dataset, directory: Path) -> None:
    """Prints the last values of a result, the runs that diverged, and its files."""
    show_last(dataset)
    diverged = (dataset.diverged >= 0).any("model")
    if count := int(diverged.sum()):
        words = f" {count} of {diverged.size:,} runs; see the variable diverged"
        say(Text.assemble("  ", ("diverged:", "red"), words))
    files = [name for name in (*_FILES, "manifest.json") if (directory / name).exists()]
    show_end(dataset, directory, ", ".join(files))


def _draw_overview(dataset: xr.Dataset, path: Path) -> None:
    from fedjax_mm import plots

    plots.save_figure(plots.sweep_overview(dataset), path)
