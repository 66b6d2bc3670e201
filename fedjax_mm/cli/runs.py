"""The commands `run` and `merge`, which write and print the result of a file.

Invalid input raises `RefusedError` before anything is computed or written.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import xarray as xr
from rich.text import Text

from fedjax_mm.base import Params
from fedjax_mm.claims.judging import Claim, Verdicts, judge
from fedjax_mm.cli.directories import Existing, alone, finished, leave_alone, saving
from fedjax_mm.cli.results import show_end, show_last
from fedjax_mm.cli.terminal import notes, say, show_table, shown_progress
from fedjax_mm.experiments.executors import AnyExecutor, by, executor_of, split_off
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.overrides import load, validate
from fedjax_mm.experiments.own import allowing_code
from fedjax_mm.experiments.run import given, gridded
from fedjax_mm.experiments.run import run as run_experiment
from fedjax_mm.papers.sequential import Budget
from fedjax_mm.results.dataset import join_seeds, load_dataset, save_dataset
from fedjax_mm.results.finished import RESULT, find_finished, open_result
from fedjax_mm.results.manifest import differences, manifest, read_about, save_about
from fedjax_mm.results.params import save_params
from fedjax_mm.sweeps.checkpoint import KEEP_STATE, Checkpoints, KeptState, as_long
from fedjax_mm.sweeps.cluster import Part, all_programs, load_part, programs_in
from fedjax_mm.sweeps.errors import DivergenceError, RefusedError, refusing
from fedjax_mm.sweeps.execution import Callback, Execution
from fedjax_mm.sweeps.part_files import compute_into, file_of, is_complete, join_files, parts_in
from fedjax_mm.sweeps.plan import Plan, make_plan
from fedjax_mm.sweeps.settle import add_seeds
from fedjax_mm.tools.files import plain, save_json

PARAMS = "params.npz"
"""The name of the file with the models' final parameters, in a result's directory."""

_FILES = ("figure.png", PARAMS, RESULT)


class Which(NamedTuple):
    """Selects the runs of a file to compute, and the workers that compute them.

    Attributes:
      part: the part of all runs to compute.
      first_seed: the number of the first seed. A finished result must contain all seeds before it.
      executor: the name of the executor that computes parts of the runs.
      allow_code: whether the file may name functions of one's own.
    """

    part: Part | None = None
    first_seed: int = 0
    executor: str | None = None
    allow_code: bool = False


def run(
    path: Path,
    overrides: Sequence[str],
    which: Which,
    out: Path,
    before: Existing,
    how: Execution,
    budget: Budget | None = None,
    *,
    with_params: bool = False,
    kind: str = "png",
) -> None:
    """Computes all or some runs of an experiment file."""
    experiment, workers = _read(path, overrides, which)
    if budget:
        _check_budget(experiment, which, budget, with_params=with_params)
    directory = out / path.stem
    with refusing():
        goes_on = before == "resume" and _goes_on(experiment, directory, which)
        _check_seeds(experiment, directory, with_params or how.keep_state)
    if not goes_on and _is_there(experiment, directory, before, with_params=with_params):
        leave_alone(directory)
        return
    plan = [Callback(on_start=show_plan)] * bool(experiment.axes)
    if which.part:
        _run_part(experiment, directory, which.part, before, how, plan, with_params)
    else:
        with saving(directory, before, how) as how, by(workers, how) as how:
            if budget:
                dataset, verdicts = _run_until(experiment, directory, how, budget)
            else:
                how = how._replace(callbacks=[*plan, *how.callbacks])
                dataset, verdicts = _run_and_save(experiment, directory, how, with_params), None
        if kind != "png" and jax.process_index() == 0:
            _draw(dataset, experiment, directory / f"figure.{kind}")
        _show_claims(experiment, dataset, directory, verdicts)
        _show(dataset, directory)


def _goes_on(experiment: Experiment, directory: Path, which: Which) -> bool:
    """Whether a run goes on from a finished one with fewer rounds and the same other settings.

    Raises:
      ValueError: if the finished run has more rounds or other seeds, or its state was not kept.
    """
    config = read_about(directory / "manifest.json").content.get("config", {})
    now, have = plain(experiment.model_dump(mode="json")), config.get("num_rounds")
    others = list(differences(as_long({"config": config}, 0), as_long({"config": now}, 0)))
    if have in (None, experiment.num_rounds) or Checkpoints(directory).has_work:
        return False
    if [each for each in others if not each.startswith("config.num_seeds ")]:
        return False
    if experiment.num_rounds < have:
        raise ValueError(
            f"{directory} has {have:,} rounds, and num_rounds is {experiment.num_rounds:,}; select "
            "the first rounds of its result, or choose another directory with --out"
        )
    if others or experiment.first_seed:
        raise ValueError(
            f"{directory} has {config['num_seeds']} seeds from 0 on; a run with more rounds needs "
            "the same"
        )
    if which.part is None and not KeptState(directory).exists:
        raise ValueError(
            f"{directory} has {have:,} rounds, but their final state was not kept; {KEEP_STATE}; "
            "to compute all rounds again, choose another directory with --out, or give --overwrite"
        )
    return True


def _check_seeds(experiment: Experiment, directory: Path, keeps: bool) -> None:
    """Raises `ValueError` if seeds would be added to parameters or to a state."""
    if not experiment.first_seed:
        return
    for name, option in ((PARAMS, "--save-params"), ("state", "--keep-state")):
        if keeps or (directory / name).exists():
            raise ValueError(
                f"--first-seed {experiment.first_seed} adds to no parameters and to no state, but "
                f"{directory / name} or {option} has those of some seeds; leave them out"
            )


def _check_budget(
    experiment: Experiment, which: Which, budget: Budget, *, with_params: bool
) -> None:
    """Raises `RefusedError` if no seeds can be added until claims are decided."""
    with refusing():
        if not experiment.claims:
            raise ValueError("--until-settled decides claims, and the file has no table of claims")
        if which.part or which.first_seed or with_params:
            raise ValueError(
                "--until-settled adds all seeds itself; leave out --part, --first-seed and "
                "--save-params"
            )
        if budget.max_seeds is not None and budget.max_seeds < experiment.num_seeds:
            raise ValueError(
                f"--max-seeds is {budget.max_seeds}, and a block has num_seeds = "
                f"{experiment.num_seeds}; raise the limit, or take --set num_seeds=16"
            )


def _run_until(
    experiment: Experiment, directory: Path, how: Execution, budget: Budget
) -> tuple[xr.Dataset, Verdicts]:
    """Adds seeds at all points until the claims are decided, and saves the result."""
    block = experiment.num_seeds

    def some(first: int, _: Any) -> xr.Dataset:
        with how.stage(f"seeds-{first}") as saving:
            return run_experiment(experiment.with_seeds(first, block), saving)

    def tell(verdicts: Verdicts) -> None:
        parts = [part for claim in verdicts.claims for part in claim.parts]
        still = sum(part.verdict == "not settled" for part in parts)
        seeds = max(part.seeds or 0 for part in parts)
        say(f"  {seeds} seeds, {still} of {len(parts)} comparisons not settled", notes, "dim")

    seconds = None if budget.max_minutes is None else 60 * budget.max_minutes
    most = budget.max_seeds or max(512, block)
    limits: Any = {"max_seeds": most, "max_seconds": seconds, "block": block}
    dataset, verdicts = add_seeds(some, _claims_of(experiment), (), **limits, on_look=tell)
    return _save(experiment, directory, dataset), verdicts


def _claims_of(experiment: Experiment) -> list[Claim]:
    return [claim.named(name) for name, claim in experiment.claims.items()]


def _show_claims(
    experiment: Experiment, dataset: xr.Dataset, directory: Path, verdicts: Verdicts | None = None
) -> None:
    """Prints the verdicts on a file's claims, and writes them and their figure for `report`."""
    from fedjax_mm import plots

    if not experiment.claims or jax.process_index() > 0:
        return
    verdicts = verdicts or judge(dataset, _claims_of(experiment))
    header, *rows = verdicts.rows
    show_table(header, rows)
    for sentence in verdicts.sentences:
        say(f"  {sentence}")
    about = {"header": header, "rows": rows, "sentences": verdicts.sentences}
    save_json(about, directory / "claims.json")
    if any(test.interval for claim in verdicts.claims for test in claim.evidence):
        plots.save_figure(plots.claims(verdicts), directory / "claims.png")


def _is_there(
    experiment: Experiment, directory: Path, before: Existing, *, with_params: bool = False
) -> bool:
    """Whether a directory already has the result of an experiment.

    Raises:
      RefusedError: if it has the result of another run, or lacks the seeds before the first.
    """
    path, first = directory / "manifest.json", experiment.first_seed
    if not first:
        more = [PARAMS] if with_params else []
        done = finished(path, experiment, before, seeds_too=False, files=more)
        if done and (have := done["config"]["num_seeds"]) < experiment.num_seeds:
            raise RefusedError(
                f"{directory} has {have} seeds, and num_seeds is {experiment.num_seeds}; to add "
                f"seeds, give --first-seed {have} and the number of new ones"
            )
        return done is not None
    with refusing():
        now = plain(manifest(experiment.model_dump(mode="json"), seed=0, data=""))
        if _is_joined(experiment, directory, now):
            return True
        found = find_finished(path, now, ("num_seeds",))
        if found is None or found.damage:
            reason = f"there is none in {directory}" if found is None else found.damage
            raise ValueError(
                f"--first-seed {first} adds seeds to a finished result, but {reason}; run the "
                "seeds before it first"
            )
        have = found.content["config"]["num_seeds"]
        if have != first:
            raise ValueError(f"{directory} has {have} seeds; give --first-seed {have}")
    return False


def _is_joined(experiment: Experiment, directory: Path, now: Mapping[str, Any]) -> bool:
    """Whether a result already contains these seeds, whose files are then completed."""
    if not (directory / RESULT).exists():
        return False
    dataset = load_dataset(directory / RESULT)
    of = experiment.first_seed + experiment.num_seeds
    wanted = {name: now[name] for name in ("config", "versions", "git_revision")}
    wanted["config"] = {**wanted["config"], "num_seeds": of}
    about = dataset.attrs["manifest"]
    if dataset.sizes["seed"] != of or {name: about.get(name) for name in wanted} != wanted:
        return False
    if read_about(directory / "manifest.json").damage:  # the process was killed before it finished
        _finish(experiment, directory, dataset)
    return True


def _run_part(
    experiment: Experiment,
    directory: Path,
    part: Part,
    before: Existing,
    how: Execution,
    callbacks: Sequence[Callback],
    with_params: bool,
) -> None:
    """Computes a part of an experiment's runs and saves it for `merge`, unless it exists."""
    keep: Any = "params" if with_params else None
    path = file_of(directory, part, experiment.first_seed, overwrite=before == "overwrite")
    made = manifest({}, seed=experiment.seed, data="")
    wanted = {
        "config": experiment.model_dump(),
        "keep": keep,
        "first_seed": experiment.first_seed,
        "versions": made["versions"],
        "revision": made["git_revision"],
    }
    resume = before == "resume"
    if before != "overwrite" and is_complete(
        path, wanted, lambda words: say(words, notes), resume=resume
    ):
        leave_alone(path)
        return
    with saving(path.with_suffix(""), before, how) as how:
        how = how._replace(callbacks=[*callbacks, *how.callbacks])
        say(f"part {part}", notes)
        with gridded(experiment, how.memory, keep) as grid:
            settings = given(experiment)
            compute_into(path, grid, part, how, experiment.on_divergence, settings=settings)
    with suppress(OSError):
        path.with_suffix("").rmdir()
    more = f" --first-seed {experiment.first_seed}" * (experiment.first_seed > 0)
    say(f"part {part} is in {path}; when all parts are there: fedjax-mm merge {directory}{more}")


def merge(directory: Path, before: Existing, first_seed: int, allow_code: bool) -> None:
    """Joins the parts in a directory into the result that a single machine would have written."""
    with refusing():
        paths = parts_in(directory, first_seed)
        about = load_part(paths[0]).about
        if "settings" not in about:
            raise ValueError(f"{paths[0]} is of a grid in Python; join it there, by `merge`")
        _find_here(allow_code)
        with allowing_code(allow_code):
            experiment = validate(Experiment, about["settings"])
        experiment = experiment.with_seeds(first_seed, experiment.num_seeds)
    if _is_there(experiment, directory, before, with_params=about["keep"] is not None):
        leave_alone(directory)
        return
    with alone(directory), refusing(), shown_progress() as report:
        with gridded(experiment, keep=about["keep"]) as grid:
            earlier = open_result(directory) if first_seed else None
            dataset, params = join_files(grid, paths, directory / RESULT, earlier, report)
        _complete(experiment, directory, dataset, params)
    with dataset:
        _show_claims(experiment, dataset, directory)
        _show(dataset, directory)


def outline(path: Path, overrides: Sequence[str], which: Which, how: Execution) -> None:
    """Prints the plan of an experiment before it is compiled."""
    experiment, workers = _read(path, overrides, which)
    with refusing(), shown_progress(), gridded(experiment, how.memory) as grid:
        programs = all_programs(grid, how.memory)
        if which.part and not (programs := programs_in(programs, which.part)):
            raise ValueError(f"part {which.part} has no runs; take fewer parts")
        where: Any = {"split": how.split, "limit": how.memory, "client_states": how.client_states}
        show_plan(make_plan(grid, **where, programs=programs, compiles=False))
    if workers:
        say(f"  {workers.num_parts} parts, which {workers.name} computes", notes, "dim")


def show_plan(plan: Plan) -> None:
    """Prints the programs, batches, memory and work of a plan."""
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


def _read(
    path: Path, overrides: Sequence[str], which: Which
) -> tuple[Experiment, AnyExecutor | None]:
    """Reads the experiment in a file, and its executor."""
    with refusing():
        # Refuse names whose stem would lead outside OUT. Do not compare `path.stem`, because Python
        # 3.14 returns another one for names that begin with dots.
        if path.name.rpartition(".")[0] in (".", ".."):
            raise ValueError(f"{path}: results have the file's name; give it one with letters")
        mine, overrides = split_off(overrides)
        _find_here(which.allow_code)
        experiment = load(path, Experiment, overrides, allow_code=which.allow_code)
        workers = executor_of(which.executor, experiment.executor, mine)
        if which.part and which.executor:
            raise ValueError("--executor computes all parts, and --part one; give one of the two")
    return experiment.with_seeds(which.first_seed, experiment.num_seeds), workers


def _find_here(allow_code: bool) -> None:
    """Lets Python import modules of the current directory, as `python -m` does."""
    if allow_code and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _run_and_save(
    experiment: Experiment, directory: Path, how: Execution, with_params: bool = False
) -> xr.Dataset:
    """Runs an experiment and saves its result, which is partial if divergence ends the run.

    Raises:
      DivergenceError: if a model diverged and divergence ends the run.
    """
    try:
        if with_params:
            return _save(experiment, directory, *run_experiment(experiment, how, keep="params"))
        return _save(experiment, directory, run_experiment(experiment, how))
    except DivergenceError as error:
        # Save nothing for a part, or with `first_seed`, because the existing result is complete.
        if error.partial is not None and experiment.first_seed == 0:
            _save(experiment, directory, error.partial)
        raise


def _save(
    experiment: Experiment, directory: Path, dataset: xr.Dataset, params: list[Params] | None = None
) -> xr.Dataset:
    """Saves the result in the first process and returns it, joined with earlier seeds if any."""
    if jax.process_index() > 0:
        return dataset
    if experiment.first_seed:
        dataset = join_seeds(open_result(directory), dataset)
    save_dataset(dataset, directory / RESULT)
    _complete(experiment, directory, dataset, params)
    return dataset


def _complete(
    experiment: Experiment, directory: Path, dataset: xr.Dataset, params: list[Params] | None
) -> None:
    """Writes the files of a result next to its Dataset, the manifest last."""
    # Remove an earlier run's parameters, because they would appear to belong to this result.
    (directory / PARAMS).unlink(missing_ok=True)
    if params is not None:
        save_params(params, dataset, directory / PARAMS)
    _finish(experiment, directory, dataset)


def _finish(experiment: Experiment, directory: Path, dataset: xr.Dataset) -> None:
    """Draws the figure, and writes the manifest as the last file of a result."""
    _draw(dataset, experiment, directory / "figure.png")
    made = [name for name in _FILES if (directory / name).exists()]
    save_about(directory / "manifest.json", dataset.attrs["manifest"], made)


def _show(dataset: xr.Dataset, directory: Path) -> None:
    """Prints the last values of a result, the runs that diverged, and its files."""
    show_last(dataset)
    diverged = (dataset.diverged >= 0).any("model")
    if count := int(diverged.sum()):
        words = f" {count} of {diverged.size:,} runs; see the variable diverged"
        say(Text.assemble("  ", ("diverged:", "red"), words))
    if root := dataset.attrs["manifest"]["seed"]:
        labels = f"{dataset.seed.values[0]} ... {dataset.seed.values[-1]}"
        words = f"seed = {root} is the root of all draws; the runs have the labels {labels}"
        say(
            f"  {words}, as with any root. To add seeds to a result, give --first-seed", style="dim"
        )
    every = (*_FILES, "manifest.json", "claims.json", "claims.png")
    files = [name for name in every if (directory / name).exists()]
    show_end(dataset, directory, ", ".join(files))


def _draw(dataset: xr.Dataset, experiment: Experiment, path: Path) -> None:
    from fedjax_mm import plots

    has_axes = bool(experiment.axes)
    figure = plots.sweep_overview(dataset) if has_axes else plots.curves(dataset, hue="algorithm")
    plots.save_figure(figure, path)
