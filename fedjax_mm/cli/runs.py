"""The commands `run` and `sweep`: each computes what a file describes, writes its files and prints.

Wrong input is a `RefusedError`, raised before anything is computed or written.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import xarray as xr
from rich.text import Text

from fedjax_mm.base import Params
from fedjax_mm.cli.results import show_end, show_last
from fedjax_mm.cli.saving import Existing, finished, leave_alone, saving
from fedjax_mm.cli.terminal import notes, say, show_table, shown_progress
from fedjax_mm.experiments import run as experiments
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.overrides import load
from fedjax_mm.results.dataset import save_dataset
from fedjax_mm.results.finished import save_about
from fedjax_mm.results.params import save_params
from fedjax_mm.sweeps.callbacks import Callback
from fedjax_mm.sweeps.errors import DivergenceError, refusing
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.plan import Plan

PARAMS = "params.npz"
"""The file with the models' final parameters, in the directory of a result."""


def run(
    path: Path,
    overrides: Sequence[str],
    out: Path,
    before: Existing,
    how: Execution,
    with_params: bool,
) -> None:
    """Runs the experiment in a file, which has no axes."""
    experiment, directory = _read(path, overrides, is_sweep=False), out / path.stem
    more = [PARAMS] if with_params else []
    if finished(directory / "manifest.json", experiment, before, files=more):
        leave_alone(directory)
        return
    with saving(directory, before, how) as how:
        dataset = _run_and_save(experiment, directory, how, with_params)
    show_last(dataset)
    show_end(dataset, directory, ", ".join([*more, "result.nc", "manifest.json"]))


def sweep(
    path: Path, overrides: Sequence[str], out: Path, before: Existing, how: Execution
) -> None:
    """Runs the experiment in a file at all points of its axes."""
    experiment, directory = _read(path, overrides, is_sweep=True), out / path.stem
    if finished(directory / "manifest.json", experiment, before):
        leave_alone(directory)
        return
    with saving(directory, before, how) as how:
        plan = Callback(on_start=show_plan)
        how = how._replace(callbacks=[plan, *how.callbacks])
        dataset = _run_and_save(experiment, directory, how)
    show_last(dataset)
    diverged = (dataset.diverged >= 0).any("model")
    if count := int(diverged.sum()):
        words = f" {count} of {diverged.size:,} runs; see the variable diverged"
        say(Text.assemble("  ", ("diverged:", "red"), words))
    show_end(dataset, directory, "figure.png, result.nc, manifest.json")


def outline(path: Path, overrides: Sequence[str], how: Execution, is_sweep: bool = False) -> None:
    """Prints the plan of an experiment, with the numbers that are known before compilation."""
    experiment = _read(path, overrides, is_sweep=is_sweep)
    with refusing(), shown_progress():
        show_plan(experiments.outline(experiment, how))


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


def _read(path: Path, overrides: Sequence[str], *, is_sweep: bool) -> Experiment:
    """Returns the experiment in a file, which has axes if it is a sweep."""
    with refusing():
        if path.stem in (".", ".."):  # results with this name would lie outside of OUT
            raise ValueError(f"{path}: results have the file's name; give it one with letters")
        experiment = load(path, Experiment, overrides)
        if experiment.axes and not is_sweep:
            raise ValueError(f"{path}: it has axes; run it with `fedjax-mm sweep`")
        if is_sweep and not experiment.axes:
            raise ValueError(f"{path}: axes: missing; give at least 1, or use `fedjax-mm run`")
    return experiment


def _run_and_save(
    experiment: Experiment, directory: Path, how: Execution, with_params: bool = False
) -> xr.Dataset:
    """Returns the result after saving it, and saves the partial result if divergence ends the run.

    Raises:
      DivergenceError: if a model diverged and that ends the run.
    """

    def save(dataset: xr.Dataset, params: list[Params] | None = None) -> None:
        if jax.process_index() > 0:
            return
        save_dataset(dataset, directory / "result.nc")
        # Remove an earlier run's parameters, which would seem to belong to this result.
        (directory / PARAMS).unlink(missing_ok=True)
        if params is not None:
            save_params(params, dataset, directory / PARAMS)
        if experiment.axes:
            _draw_overview(dataset, directory / "figure.png")
        files = ("result.nc", PARAMS, "figure.png")
        about = dataset.attrs["manifest"]
        made = [name for name in files if (directory / name).exists()]
        save_about(directory / "manifest.json", about, made)

    try:
        if with_params:
            dataset, params = experiments.run(experiment, how, keep="params")
            save(dataset, params)
        else:
            save(dataset := experiments.run(experiment, how))
    except DivergenceError as error:
        save(error.partial)
        raise
    return dataset


def _draw_overview(dataset: xr.Dataset, path: Path) -> None:
    from fedjax_mm import plots

    plots.save_figure(plots.sweep_overview(dataset), path)
