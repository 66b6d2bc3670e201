"""The commands `reproduce`, `bounds` and `judge`, which make, write and print items.

Invalid input raises `RefusedError` before anything is computed or written.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import xarray as xr
from rich.text import Text

from fedjax_mm import plots
from fedjax_mm.cli.directories import Existing, finished, leave_alone, made, saving
from fedjax_mm.cli.results import show_end
from fedjax_mm.cli.terminal import notes, say, show_table
from fedjax_mm.experiments.errors import closest
from fedjax_mm.experiments.executors import by, executor_of, split_off
from fedjax_mm.experiments.fields import FINISHED, Config, Seeded
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ALL, BOUNDS, ITEMS
from fedjax_mm.papers.item import Findings, Item
from fedjax_mm.papers.sequential import Budget, decide
from fedjax_mm.results.dataset import save_dataset
from fedjax_mm.results.finished import RESULT, open_result
from fedjax_mm.results.manifest import read_about, save_about
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.errors import refusing
from fedjax_mm.sweeps.execution import Execution

_STYLES = {
    "supported": "green",
    "contradicted": "bold red",
    "slip in print": "magenta",
    "not reproduced": "magenta",
    "not settled": "yellow",
    "not tested": "dim",
    "agrees": "green",
    "differs": "magenta",
    "too noisy": "yellow",
    "not run": "dim",
    "passed": "green",
    "defect": "bold red",
    "holds": "green",
    "does not hold": "magenta",
    "ahead": "green",
    "level": "cyan",
    "behind": "magenta",
    "undecided": "yellow",
}
_WIDTH = max(map(len, _STYLES))


def reproduce(
    ids: Sequence[str],
    overrides: Sequence[str],
    scale: Mapping[str, str | None],
    data: Path | None,
    out: Path,
    before: Existing,
    how: Execution,
    budget: Budget | None,
    executor: str | None,
    kind: str = "png",
) -> bool:
    """Makes items, and returns whether no statement is contradicted.

    Args:
      ids: the ids of the items.
      overrides: settings that override the items' defaults.
      scale: the number of clients and the dataset, if given.
      data: the directory of the real data.
      out: the directory that gets one subdirectory per item.
      before: how to treat earlier work.
      how: how to execute the runs.
      budget: the limits of seeds and time, if seeds are added until all statements are settled.
      executor: the name of the executor that computes parts of the runs.
      kind: the format in which figures are written, too.
    """
    with refusing():
        mine, overrides = split_off(overrides)
        workers = executor_of(executor, None, mine)
        items = [_find(ITEMS, name, "experiment") for name in dict.fromkeys(ids)]
        each = [[*_scaled(item, data=data, **scale), *overrides] for item in items]
        configs = [_configure(item, mine) for item, mine in zip(items, each, strict=True)]
        for item, config in zip(items, configs, strict=True):
            if budget and isinstance(config, Seeded):
                budget.seeds(item, config)
    with by(workers, how) as how:
        return _make(items, configs, out, before, how, budget, kind)


def bounds(
    paper: str, overrides: Sequence[str], out: Path, before: Existing, how: Execution
) -> bool:
    """Makes the item of a paper's bounds, and returns whether all of its claims hold."""
    with refusing():
        item = _find(BOUNDS, paper, "paper")
        config = _configure(item, overrides)
    return _make([item], [config], out, before, how, None)


def judge(directory: Path) -> bool:
    """Rejudges finished results and returns whether no statement is contradicted.

    This version's rules, tables and figures apply. Data and manifests do not change, because
    nothing is computed.
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
            validate(type(item.settings), config, context=FINISHED)
            for item, config in zip(items, settings, strict=True)
        ]
    verdicts = list[str]()
    for item, config, result, folder in zip(items, configs, opened, folders, strict=True):
        findings = _write(item, config, result, folder, "--until-settled adds seeds")
        verdicts += [each.verdict for each in findings.statements]
    return "contradicted" not in verdicts


def budget_of(
    until_settled: bool, max_seeds: int | None, max_minutes: float | None
) -> Budget | None:
    """Makes the budget for adding seeds, or None without `--until-settled`."""
    with refusing():
        for name, value in {"--max-seeds": max_seeds, "--max-minutes": max_minutes}.items():
            if value is not None and not until_settled:
                raise ValueError(f"{name} is for --until-settled, which adds seeds; give both")
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value:g}; it must be positive")
    return Budget(max_seeds, max_minutes) if until_settled else None


def _find(items: Mapping[str, Item], name: str, kind: str) -> Item:
    if name not in items:
        close = closest(name, [*items])
        hint = f"did you mean {close[0]}? Or choose from" if close else "choose from"
        raise ValueError(f"unknown {kind} {name!r}; {hint} {', '.join(items)}")
    return items[name]


def _scaled(item: Item, clients: str | None, data: Path | None, dataset: str | None) -> list[str]:
    """An item's overrides for the clients and the data."""
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
            raise ValueError(f"--data: directory {data} does not exist")
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
    kind: str = "png",
) -> bool:
    """Makes items one by one, and returns whether no statement is contradicted."""
    folders, verdicts = [out / item.id for item in items], list[str]()
    results: dict[str, xr.Dataset] = {}  # shared by figures of the same runs

    def result_of(item: Item, config: Config, saving: Execution) -> xr.Dataset:
        first = config.first_seed if isinstance(config, Seeded) else 0
        key = f"{item.run} {config.model_dump_json()} {first}"
        if key not in results:
            results[key] = item.make(config, saving)
        return results[key]

    # Check all directories before making an item, so that no work is lost to an error.
    found = [
        finished(folder / "summary.json", config, before, seeds_too=budget is None)
        for config, folder in zip(configs, folders, strict=True)
    ]
    with made(folders):
        for item, config, folder, done in zip(items, configs, folders, found, strict=True):
            if done and not _goes_on(done, item, config, budget):
                leave_alone(folder)
                verdicts += [each["verdict"] for each in done["statements"]]
                continue
            make, remedy = partial(result_of, item), "--until-settled adds seeds"
            with saving(folder, before, how) as watched:
                if budget and isinstance(config, Seeded):
                    begun = folder / "result.nc" if done else None
                    config, dataset = decide(item, config, watched, budget, make, _tell, begun)
                    remedy = "more seeds may settle it"
                else:
                    if budget:
                        say(f"--until-settled: {item.id} has no seeds to add", notes)
                    dataset = make(config, watched)
                findings = _write(item, config, dataset, folder, remedy, kind)
                verdicts += [each.verdict for each in findings.statements]
    return "contradicted" not in verdicts


def _item_of(folder: Path) -> str:
    """The id of the item in a folder, from its summary or its name."""
    return str(read_about(folder / "summary.json").content.get("id", folder.name))


def _tell(text: str) -> None:
    say(f"  {text}", notes, "dim")


def _goes_on(done: Mapping[str, Any], item: Item, config: Config, budget: Budget | None) -> bool:
    """Whether seeds should be added to a complete result."""
    if not (budget and isinstance(config, Seeded)):
        return False
    is_open = any(each["verdict"] == "not settled" for each in done["statements"])
    return is_open and done["manifest"]["config"]["num_seeds"] < budget.seeds(item, config)


def _write(
    item: Item,
    config: Config,
    dataset: xr.Dataset,
    directory: Path,
    remedy: str,
    kind: str = "png",
) -> Findings:
    """Writes and prints a reproduction, in the first process only."""
    if jax.process_index() > 0:
        return item.findings(dataset, config)
    # Save in a thread, because compression releases the GIL and lets judging and drawing proceed.
    with ThreadPoolExecutor(1) as thread:
        saved = thread.submit(save_dataset, dataset, directory / "result.nc")
        try:
            findings = item.findings(dataset, config)
            figure = item.figure(dataset, findings.measured, config)
            for suffix in dict.fromkeys(("png", kind)):
                plots.save_figure(figure, directory / f"figure.{suffix}")
        finally:
            saved.result()  # raises any error from saving
    about = item.summary(dataset, findings)
    save_about(directory / "summary.json", about, ("result.nc", "figure.png"))
    changed = "" if config == item.settings else ", with other settings"
    show_findings(f"{item.id}: {item.title}{changed}", findings, remedy)
    show_end(dataset, directory, "figure.png, result.nc, summary.json")
    return findings


def show_findings(title: str, findings: Findings, remedy: str) -> None:
    """Prints an item's tables, the verdicts on its paper's statements, and further checks.

    Args:
      title: the title for a table without one.
      findings: the findings of the item.
      remedy: explains how to settle a statement.
    """
    for each in findings.tables:
        heading = each.title or title
        show_table(each.header, each.rows, title=heading, title_justify="left", title_style="bold")
    for statement in findings.statements + findings.numbers:
        _show_verdict(
            statement.verdict, f"{statement.where}: “{statement.quote}”".removesuffix(": “”")
        )
        for part in statement.parts:
            words = f"{part.name}: {part.evidence} {statement.unit}".removeprefix(": ").strip()
            words += f" ({part.margin})" if part.margin else ""
            seeds = f", {part.seeds} seeds" if part.seeds else ""
            many = len(statement.parts) > 1
            say(
                f"{'':{_WIDTH + 6}}{f'{part.verdict}: ' if many else ''}{words}{seeds}", style="dim"
            )
        needs = f"it would take {statement.remains}" if statement.remains else ""
        needs += f"; {remedy}" if statement.verdict == "not settled" else ""
        for line in filter(None, (statement.about, needs)):
            say(f"{'':{_WIDTH + 6}}{line}", style="dim")
    for check in findings.checks:
        _show_verdict(check.outcome, f"{check.text}: {check.evidence}".removesuffix(": "))


def _show_verdict(verdict: str, text: str) -> None:
    say(Text.assemble("  ", (f"{verdict:{_WIDTH}}", _STYLES[verdict]), f"  {text}"))
