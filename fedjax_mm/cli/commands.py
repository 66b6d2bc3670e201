"""The commands behind the command line: each computes, writes its files and prints.

Wrong input is a `RefusedError`, raised before anything is computed or written. Drawing and timing
are imported by the commands that need them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import xarray as xr
from rich.text import Text

from fedjax_mm.base import Params
from fedjax_mm.cli.results import show_last
from fedjax_mm.cli.terminal import (
    notes,
    say,
    show_end,
    show_findings,
    show_plan,
    shown_progress,
)
from fedjax_mm.experiments import run as runs
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.fields import Config, Seeded
from fedjax_mm.experiments.overrides import load, validate
from fedjax_mm.files import plain, prepare_directory, wanted_for_results
from fedjax_mm.interrupts import tidy_interrupts
from fedjax_mm.papers import ALL, BOUNDS, ITEMS, Findings, Item
from fedjax_mm.papers.sequential import Budget, decide
from fedjax_mm.results.dataset import manifest, open_result, save_dataset
from fedjax_mm.results.finished import RESULT, find_finished, read_about, save_about
from fedjax_mm.results.params import save_params
from fedjax_mm.sweeps.callbacks import Callback, progress
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.errors import DivergenceError, refusing
from fedjax_mm.sweeps.execution import Execution

PARAMS = "params.npz"
"""The file with the models' final parameters, in the directory of a result."""

Existing = Literal["keep", "resume", "overwrite"]
"""Treatment of earlier work in a directory: a finished result of another run is kept unless it is
to be overwritten, and an unfinished run is kept unless it is to be resumed."""


def existing(resume: bool, overwrite: bool) -> Existing:
    """Returns the treatment of a directory's earlier work, from the options."""
    with refusing():
        if resume and overwrite:
            raise ValueError(
                "--resume keeps a finished result and --overwrite gives it up; give one of them"
            )
    return "resume" if resume else "overwrite" if overwrite else "keep"


def execution(memory: float | None, split: Any, save_every: float = 30.0) -> Execution:
    """Returns the execution of a run, from the options, with the memory in GiB."""
    with refusing():
        if memory is not None and not memory > 0:
            raise ValueError(f"--memory is {memory:g}; it must be positive")
        if not save_every >= 0:
            raise ValueError(f"--save-every is {save_every:g}; it must not be negative")
    limit = None if memory is None else memory * 2**30
    return Execution(save_every=save_every, split=split, memory=limit)


def budget_of(is_auto: bool, max_seeds: int | None, max_minutes: float | None) -> Budget | None:
    """Returns the budget for adding seeds, or None without `--seeds auto`."""
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
    before: Existing,
    how: Execution,
    budget: Budget | None,
) -> bool:
    """Makes items, and returns whether no statement is contradicted.

    Args:
      ids: of the items.
      overrides: settings that win over the items' own.
      scale: clients and dataset, if given.
      data: the folder of the real data.
      out: the directory in which each item has a folder.
      before: the treatment of earlier work.
      how: the execution of the runs.
      budget: of seeds and time, if seeds are added until all statements are settled.
    """
    with refusing():
        items = [_find(ITEMS, name, "experiment") for name in dict.fromkeys(ids)]
        each = [[*_scaled(item, data=data, **scale), *overrides] for item in items]
        configs = [_configure(item, mine) for item, mine in zip(items, each, strict=True)]
        for item, config in zip(items, configs, strict=True):
            if budget and isinstance(config, Seeded):
                budget.seeds(item, config)
    return _make(items, configs, out, before, how, budget)


def bounds(
    paper: str, overrides: Sequence[str], out: Path, before: Existing, how: Execution
) -> bool:
    """Makes the item with a paper's bounds, and returns whether all of its claims hold."""
    with refusing():
        item = _find(BOUNDS, paper, "paper")
        config = _configure(item, overrides)
    return _make([item], [config], out, before, how, None)


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
    before: Existing,
    how: Execution,
    budget: Budget | None,
) -> bool:
    """Makes items one after the other, and returns whether no statement is contradicted."""
    folders, verdicts = [out / item.id for item in items], list[str]()
    results: dict[str, xr.Dataset] = {}  # figures of the same runs share them

    def result_of(item: Item, config: Config, saving: Execution) -> xr.Dataset:
        first = config.first_seed if isinstance(config, Seeded) else 0
        key = f"{item.run} {config.model_dump_json()} {first}"
        if key not in results:
            results[key] = item.make(config, saving)
        return results[key]

    # Look at all directories before making an item, so that a refusal costs no work.
    found = [
        _finished(folder / "summary.json", config, before, seeds_too=budget is None)
        for config, folder in zip(configs, folders, strict=True)
    ]
    with _made(folders):
        for item, config, folder, done in zip(items, configs, folders, found, strict=True):
            if done and not _goes_on(done, item, config, budget):
                _leave_alone(folder)
                verdicts += [each["verdict"] for each in done["statements"]]
                continue
            make, remedy = partial(result_of, item), "--seeds auto adds seeds"
            with _saving(folder, before, how) as saving:
                if budget and isinstance(config, Seeded):
                    begun = folder / "result.nc" if done else None
                    config, dataset = decide(item, config, saving, budget, make, _tell, begun)
                    remedy = "more seeds may settle it"
                else:
                    if budget:
                        say(f"--seeds auto: {item.id} has no seeds to add", notes)
                    dataset = make(config, saving)
                findings = _write(item, config, dataset, folder, remedy)
                verdicts += [each.verdict for each in findings.statements]
    return "contradicted" not in verdicts


def judge(directory: Path) -> bool:
    """Judges finished results again and returns whether no statement is contradicted.

    The rules, tables and figures are those of this version. The data and the manifest stay
    unchanged, because nothing is computed.
    """
    with refusing():
        folders = [
            path.parent
            for path in sorted(directory.rglob(RESULT))
            if _item_of(path.parent) in ALL and not Checkpoints(path.parent).has_work
        ]
        if not folders:
            raise ValueError(f"{directory} holds no finished result of an item; make one")
        opened = [open_result(folder) for folder in folders]
        items = [ALL[_item_of(folder)] for folder in folders]
        settings = [result.attrs["manifest"]["config"] for result in opened]
        configs = [
            validate(type(item.settings), config)
            for item, config in zip(items, settings, strict=True)
        ]
    verdicts = list[str]()
    for item, config, result, folder in zip(items, configs, opened, folders, strict=True):
        findings = _write(item, config, result, folder, "--seeds auto adds seeds")
        verdicts += [each.verdict for each in findings.statements]
    return "contradicted" not in verdicts


def _item_of(folder: Path) -> str:
    """Returns the id of the item whose result a folder holds, from its summary or its name."""
    return str(read_about(folder / "summary.json").content.get("id", folder.name))


def _tell(text: str) -> None:
    say(f"  {text}", notes, "dim")


def _finished(
    path: Path,
    config: Config,
    before: Existing,
    *,
    seeds_too: bool = True,
    files: Sequence[str] = (),
) -> Mapping[str, Any] | None:
    """Returns this run's finished result if it is to be left alone, else None.

    Args:
      path: of a result's summary or manifest.
      config: all settings of the run.
      before: the treatment of earlier work.
      seeds_too: whether a result with another number of seeds counts as another result.
      files: the files that the result must have in addition to its Dataset.
    """
    # Unfinished work over a finished result means that `--overwrite` was given when it began.
    with refusing(), wanted_for_results(path.parent):  # its name may be too long
        if before == "overwrite" or Checkpoints(path.parent).has_work:
            return None
        now = plain(manifest(config.model_dump(mode="json"), seed=0, data=""))
        free = () if seeds_too or before != "resume" else ("num_seeds",)
        found = find_finished(path, now, free)
    if found is None or before != "resume":
        return None
    missing = [f"{name} is missing" for name in files if name not in found.content.get("files", ())]
    if found.damage or missing:
        say(f"{path.parent}: {found.damage or missing[0]}; made again", notes)
        return None
    return found.content


def _leave_alone(directory: Path) -> None:
    say(f"{directory} is complete; nothing to resume")


def _goes_on(done: Mapping[str, Any], item: Item, config: Config, budget: Budget | None) -> bool:
    """Returns whether seeds are added to a complete result."""
    if not (budget and isinstance(config, Seeded)):
        return False
    is_open = any(each["verdict"] == "not settled" for each in done["statements"])
    return is_open and done["manifest"]["config"]["num_seeds"] < budget.seeds(item, config)


def _write(
    item: Item, config: Config, dataset: xr.Dataset, directory: Path, remedy: str
) -> Findings:
    """Writes and prints a reproduction, in the first process only."""
    from fedjax_mm import plots

    if jax.process_index() > 0:
        return item.findings(dataset, config)
    # Save in a thread, because compression releases the interpreter for judging and drawing.
    with ThreadPoolExecutor(1) as thread:
        saved = thread.submit(save_dataset, dataset, directory / "result.nc")
        try:
            findings = item.findings(dataset, config)
            figure = item.figure(dataset, findings.measured, config)
            plots.save_figure(figure, directory / "figure.png")
        finally:
            saved.result()  # raises an error of saving, if any
    about = item.summary(dataset, findings)
    save_about(directory / "summary.json", about, ("result.nc", "figure.png"))
    changed = "" if config == item.settings else ", with other settings"
    show_findings(f"{item.id}: {item.title}{changed}", findings, remedy)
    show_end(dataset, directory, "figure.png, result.nc, summary.json")
    return findings


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
    if _finished(directory / "manifest.json", experiment, before, files=more):
        _leave_alone(directory)
        return
    with _saving(directory, before, how) as saving:
        dataset = _run_and_save(experiment, directory, saving, with_params)
    show_last(dataset)
    show_end(dataset, directory, ", ".join([*more, "result.nc", "manifest.json"]))


def sweep(
    path: Path, overrides: Sequence[str], out: Path, before: Existing, how: Execution
) -> None:
    """Runs the experiment in a file at all points of its axes."""
    experiment, directory = _read(path, overrides, is_sweep=True), out / path.stem
    if _finished(directory / "manifest.json", experiment, before):
        _leave_alone(directory)
        return
    with _saving(directory, before, how) as saving:
        plan = Callback(on_start=show_plan)
        saving = saving._replace(callbacks=[plan, *saving.callbacks])
        dataset = _run_and_save(experiment, directory, saving)
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
        show_plan(runs.outline(experiment, how))


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
            dataset, params = runs.run(experiment, how, keep="params")
            save(dataset, params)
        else:
            save(dataset := runs.run(experiment, how))
    except DivergenceError as error:
        save(error.partial)
        raise
    return dataset


def _draw_overview(dataset: xr.Dataset, path: Path) -> None:
    from fedjax_mm import plots

    plots.save_figure(plots.sweep_overview(dataset), path)


@contextmanager
def _made(directories: Sequence[Path]) -> Iterator[None]:
    """Makes writable directories, and removes empty ones at the end."""
    parents = {parent for directory in directories for parent in (directory, *directory.parents)}
    with refusing(), wanted_for_results(directories[0]):
        new = sorted((path for path in parents if not path.exists()), reverse=True)
    with tidy_interrupts():
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
def _saving(directory: Path, before: Existing, how: Execution) -> Iterator[Execution]:
    """Adds a progress bar, and checkpoints that are discarded when all is written."""
    try:
        with _checkpointed(directory, before, how) as saving:
            yield saving
    except KeyboardInterrupt:
        kept, nothing = (
            "--resume continues what was saved",
            "there is nothing for --resume to continue",
        )
        say(f"interrupted; {kept if Checkpoints(directory).has_work else nothing}", notes)
        raise


@contextmanager
def _checkpointed(directory: Path, before: Existing, how: Execution) -> Iterator[Execution]:
    with _made([directory]):
        with refusing():
            checkpoints = Checkpoints(directory, resume=before == "resume").open()
        with checkpoints:
            with shown_progress() as report:
                try:
                    yield how._replace(callbacks=[progress(report)], checkpoints=checkpoints)
                except DivergenceError:  # the run is over, because it would diverge again
                    checkpoints.discard()
                    raise
            checkpoints.discard()
