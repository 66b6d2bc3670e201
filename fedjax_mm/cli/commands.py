"""The commands behind the command line: each computes, writes its files and prints.

Wrong input is a `RefusedError`, raised before anything is computed or written. Drawing and timing
are imported by the commands that need them.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import xarray as xr
from rich import box
from rich.markup import escape

from fedjax_mm.cli.results import show_last
from fedjax_mm.cli.terminal import (
    notes,
    progress,
    say,
    show_end,
    show_findings,
    show_plan,
    show_table,
)
from fedjax_mm.experiments import run as runs
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.fields import Config, Seeded
from fedjax_mm.experiments.overrides import load, validate
from fedjax_mm.files import prepare_directory, save_json
from fedjax_mm.papers import BOUNDS, ITEMS, Findings, Item
from fedjax_mm.papers.sequential import Budget, decide
from fedjax_mm.results.dataset import save_dataset
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.errors import DivergenceError, refusing
from fedjax_mm.sweeps.execute import Execution


def execution(memory: float | None, split: Any, save_every: float = 30.0) -> Execution:
    """Returns how the options say to carry a run out, the memory in GiB."""
    with refusing():
        if memory is not None and not memory > 0:
            raise ValueError(f"--memory is {memory:g}; it must be positive")
        if not save_every >= 0:
            raise ValueError(f"--save-every is {save_every:g}; it must not be negative")
    limit = None if memory is None else memory * 2**30
    return Execution(save_every=save_every, split=split, memory=limit)


def budget_of(is_auto: bool, max_seeds: int | None, max_minutes: float | None) -> Budget | None:
    """Returns what may be spent on adding seeds; None if none are added."""
    with refusing():
        for name, value in {"--max-seeds": max_seeds, "--max-minutes": max_minutes}.items():
            if value is not None and not is_auto:
                raise ValueError(f"{name} is for --seeds auto, which adds seeds; give both")
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value:g}; it must be positive")
    return Budget(max_seeds, max_minutes) if is_auto else None


def reproduce(
    ids: Sequence[str],
    overrides: Sequence[str],
    scale: Mapping[str, str | None],
    data: Path | None,
    out: Path,
    resume: bool,
    how: Execution,
    budget: Budget | None,
) -> bool:
    """Makes items, and returns whether none of their claims fails.

    Args:
      ids: of the items.
      overrides: settings that win over the items' own.
      scale: clients and dataset, where they are given.
      data: the folder of the real data.
      out: where each item has a folder.
      resume: whether to continue.
      how: to carry the runs out.
      budget: of seeds and time, if seeds are added until all claims are decided.
    """
    with refusing():
        items = [_find(ITEMS, name, "experiment") for name in dict.fromkeys(ids)]
        each = [[*_scaled(item, data=data, **scale), *overrides] for item in items]
        configs = [_configure(item, mine) for item, mine in zip(items, each, strict=True)]
        for item, config in zip(items, configs, strict=True):
            if budget and isinstance(config, Seeded):
                budget.seeds(item, config)
    return _make(items, configs, out, resume, how, budget)


def bounds(paper: str, overrides: Sequence[str], out: Path, resume: bool, how: Execution) -> bool:
    """Makes the item with a paper's bounds, and returns whether none of its claims fails."""
    with refusing():
        item = _find(BOUNDS, paper, "paper")
        config = _configure(item, overrides)
    return _make([item], [config], out, resume, how, None)


def _find(items: Mapping[str, Item], name: str, kind: str) -> Item:
    if name not in items:
        raise ValueError(f"unknown {kind} {name!r}; choose from {', '.join(items)}")
    return items[name]


def _scaled(item: Item, clients: str | None, data: Path | None, dataset: str | None) -> list[str]:
    """Returns an item's overrides for its clients and its data."""
    known, settings = type(item.settings).model_fields, []
    if dataset is not None:
        if "dataset" not in known:
            raise ValueError(f"{item.id}: it has one data set; leave out --dataset")
        settings.append(f"dataset={dataset}")
    if clients is not None:
        key = "num_clients" if "num_clients" in known else "task.num_clients"
        settings.append(f"{key}={clients}")
    if data is not None:
        if "directory" not in known:
            raise ValueError(f"{item.id}: it uses no files; leave out --data")
        if not data.is_dir():
            raise ValueError(f"--data {data}: there is no such directory")
        settings.append(f"directory={json.dumps(str(data))}")
    return settings


def _configure(item: Item, overrides: Sequence[str]) -> Config:
    try:
        return validate(type(item.settings), item.settings.model_dump(), overrides)
    except ValueError as error:
        raise ValueError(f"{item.id}: {error}") from error


def _make(
    items: Sequence[Item],
    configs: Sequence[Config],
    out: Path,
    resume: bool,
    how: Execution,
    budget: Budget | None,
) -> bool:
    """Makes items one after the other, and returns whether none of their claims fails."""
    folders, verdicts = [out / item.id for item in items], list[str]()
    results: dict[str, xr.Dataset] = {}  # figures of the same runs share them

    def result_of(item: Item, config: Config, saving: Execution) -> xr.Dataset:
        first = config.first_seed if isinstance(config, Seeded) else 0
        key = f"{item.run} {config.model_dump_json()} {first}"
        if key not in results:
            results[key] = item.make(config, saving)
        return results[key]

    with _made(folders):
        for item, config, folder in zip(items, configs, folders, strict=True):
            done = _finished(folder, config, budget) if resume else None
            if done and not _goes_on(done, item, config, budget):
                say(f"{folder} is complete; nothing to resume")
                verdicts += [claim["verdict"] for claim in done["claims"]]
                continue
            make, remedy = partial(result_of, item), "--seeds auto decides"
            with _saving(folder, resume, how) as saving:
                if budget and isinstance(config, Seeded):
                    begun = folder / "result.nc" if done else None
                    config, dataset = decide(item, config, saving, budget, make, _tell, begun)
                    remedy = "more may decide"
                else:
                    if budget:
                        say(f"--seeds auto: {item.id} has no seeds to add", notes)
                    dataset = make(config, saving)
                findings = _write(item, config, dataset, folder, remedy)
                verdicts += [claim.verdict for claim in findings.claims]
    return "fails" not in verdicts


def _tell(text: str) -> None:
    say(f"  {escape(text)}", notes, "dim")


def _finished(folder: Path, config: Config, budget: Budget | None) -> dict[str, Any] | None:
    """Returns the summary of a complete result, or None; with a budget of any number of seeds."""
    path = folder / "summary.json"
    if budget and isinstance(config, Seeded) and path.exists():
        seeds = json.loads(path.read_text())["manifest"]["config"].get("num_seeds")
        config = config.with_seeds(0, seeds or config.num_seeds)
    return runs.finished(path, config)


def _goes_on(done: Mapping[str, Any], item: Item, config: Config, budget: Budget | None) -> bool:
    """Returns whether seeds are added to a complete result."""
    if not (budget and isinstance(config, Seeded)):
        return False
    is_open = any(claim["verdict"] == "open" for claim in done["claims"])
    return is_open and done["manifest"]["config"]["num_seeds"] < budget.seeds(item, config)


def _write(
    item: Item, config: Config, dataset: xr.Dataset, directory: Path, remedy: str
) -> Findings:
    """Writes and prints a reproduction; one of several processes does."""
    from fedjax_mm.results import plots

    is_first = jax.process_index() == 0
    if is_first:
        save_dataset(dataset, directory / "result.nc")
    findings = item.judge(dataset, config)
    if is_first:
        figure = item.figure(dataset, findings.measured, config)
        plots.save_figure(figure, directory / "figure.png")
        save_json(item.summary(dataset, findings), directory / "summary.json")
        changed = "" if config == item.settings else ", with other settings"
        show_findings(f"{item.id}: {item.title}{changed}", findings, remedy)
        show_end(dataset, directory, "figure.png, result.nc, summary.json")
    return findings


def run(
    path: Path, overrides: Sequence[str], out: Path, resume: bool, how: Execution, is_dry: bool
) -> None:
    """Runs the experiment in a file, which has no axes; a dry run only shows the plan."""
    experiment, directory = _read(path, overrides, out)
    with refusing():
        if experiment.axes:
            raise ValueError(f"{path}: it has axes; run it with `fedjax-mm sweep`")
    if is_dry:
        _show_outline(experiment, how)
        return
    if resume and _done_already(directory / "manifest.json", experiment):
        return
    with _saving(directory, resume, how) as saving:
        dataset = _run_and_save(experiment, directory, saving)
    show_last(dataset)
    show_end(dataset, directory, "result.nc, manifest.json")


def sweep(
    path: Path, overrides: Sequence[str], out: Path, resume: bool, how: Execution, is_dry: bool
) -> None:
    """Runs the experiment in a file at all points of its axes; a dry run only shows the plan."""
    from fedjax_mm.results import plots

    experiment, directory = _read(path, overrides, out)
    with refusing():
        if not experiment.axes:
            raise ValueError(f"{path}: axes: missing; give at least 1, or use `fedjax-mm run`")
    if is_dry:
        _show_outline(experiment, how)
        return
    if resume and _done_already(directory / "manifest.json", experiment):
        return
    with _saving(directory, resume, how) as saving:
        dataset = _run_and_save(experiment, directory, saving._replace(announce=show_plan))
        if jax.process_index() == 0:
            plots.save_figure(plots.sweep_overview(dataset), directory / "figure.png")
    show_last(dataset)
    diverged = (dataset.diverged >= 0).any("model")
    if count := int(diverged.sum()):
        say(f"  [red]diverged:[/] {count} of {diverged.size:,} runs; see the variable diverged")
    show_end(dataset, directory, "figure.png, result.nc, manifest.json")


def _show_outline(experiment: Experiment, how: Execution) -> None:
    """Prints what would be computed, as far as it is known before anything is compiled."""
    with refusing(), progress() as report:
        outline = runs.outline(experiment, how._replace(progress=report))
    show_plan(outline)


def _read(path: Path, overrides: Sequence[str], out: Path) -> tuple[Experiment, Path]:
    """Returns the experiment in a file and the directory for its result."""
    with refusing():
        return load(path, Experiment, overrides), out / path.stem


def _run_and_save(experiment: Experiment, directory: Path, how: Execution) -> xr.Dataset:
    """Returns the result, saved; if a model diverged and that is the end, what came before it."""

    def save(dataset: xr.Dataset) -> None:
        if jax.process_index() == 0:
            save_dataset(dataset, directory / "result.nc")
            save_json(dataset.attrs["manifest"], directory / "manifest.json")

    try:
        dataset = runs.run(experiment, how)
    except DivergenceError as error:
        save(error.partial)
        raise
    save(dataset)
    return dataset


def _done_already(path: Path, config: Config) -> dict[str, Any] | None:
    """Returns the content of a finished result's file and says so; None if it is to be made."""
    content = runs.finished(path, config)
    if content:
        say(f"{path.parent} is complete; nothing to resume")
    return content


@contextmanager
def _made(directories: Sequence[Path]) -> Iterator[None]:
    """Makes directories that can be written to; those that stay empty are removed at the end."""
    parents = {parent for directory in directories for parent in (directory, *directory.parents)}
    new = sorted((path for path in parents if not path.exists()), reverse=True)
    try:
        with refusing():
            for directory in directories:
                prepare_directory(directory)
        yield
    finally:
        for path in new:
            with suppress(OSError):  # it holds results, or was never made
                path.rmdir()


@contextmanager
def _saving(directory: Path, resume: bool, how: Execution) -> Iterator[Execution]:
    """Adds checkpoints in a directory, discarded when all is written, and a progress bar."""
    with _made([directory]):
        with refusing():
            checkpoints = Checkpoints(directory, resume=resume).open()
        with checkpoints:
            with progress() as report:
                try:
                    yield how._replace(progress=report, checkpoints=checkpoints)
                except DivergenceError:  # the run is over: it would end so again
                    checkpoints.discard()
                    raise
            checkpoints.discard()


def bench(names: Sequence[str], repeats: int) -> None:
    """Times workloads, all if none is named, and prints a table of each kind."""
    from fedjax_mm import bench as benchmarks
    from fedjax_mm import workloads

    known = workloads.WORKLOADS
    with refusing():
        if repeats < 1:
            raise ValueError(f"--repeats is {repeats}; it must be at least 1")
        for name in names:
            if name not in known:
                raise ValueError(f"unknown workload {name!r}; choose from {', '.join(known)}")
    points = [(known[name], label) for name in names or known for label in known[name].labels]
    quadratic, learning, peak = list[list[str]](), list[list[str]](), math.nan
    with progress() as report:
        if any(isinstance(each, workloads.LearningWorkload) for each, _ in points):
            report("matrix products", 0, len(points))
            peak = max(benchmarks.gemm_peak().values())
        for number, (workload, label) in enumerate(points):
            report(f"{workload.name} {label}", number, len(points))
            program = benchmarks.build(workload, label)
            seconds = benchmarks.median_seconds(program, repeats)
            speed = workload.client_updates / seconds
            times = [f"{program.compile_seconds:.2f}", f"{seconds:.3f}"]
            memory = f"{program.mebibytes:.0f}"
            if isinstance(workload, workloads.LearningWorkload):
                gflops = workload.flops * speed / 1e9
                rounds = f"{workload.num_rounds / seconds:,.1f}"
                updates = f"{speed:,.1f}" if speed < 100 else f"{speed:,.0f}"
                cells = [rounds, updates, f"{gflops:.1f}", f"{gflops / peak:.1%}"]
                learning.append([workload.name, *times, *cells, f"{program.steps:.2f}", memory])
            else:
                cells = [f"{1e3 * seconds / workload.num_rounds:.3f}", f"{speed:,.0f}"]
                quadratic.append([workload.name, label, *times, *cells, memory])
    title = f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}"
    if quadratic:
        names = ("workload", "algorithm", "compile s", "run s", "ms a round", "updates/s", "MiB")
        show_table(names, quadratic, title=title, box=box.HEAVY_HEAD)
    if learning:
        names = ("work", "compile s", "run s", "rounds/s", "updates/s", "GFLOP/s", "peak", "steps")
        title = f"{title}, peak {peak:,.0f} GFLOP/s"
        show_table((*names, "MiB"), learning, title=title, box=None)
