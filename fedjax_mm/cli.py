"""The command line: list, reproduce, bounds, run, sweep, bench.

Each command imports what it computes with: JAX and the rest take seconds, which neither a list nor
a wrong word in a command should cost.
"""

from __future__ import annotations

import datetime
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedjax_mm.papers import BOUNDS, ITEMS, Findings, Item
from fedjax_mm.sweeps.errors import DivergenceError, InterruptedRunError, RefusedError

if TYPE_CHECKING:
    import xarray as xr

    from fedjax_mm.experiments.experiment import Experiment
    from fedjax_mm.experiments.fields import Config
    from fedjax_mm.sweeps.execute import Execution
    from fedjax_mm.sweeps.journal import Progress as Report
    from fedjax_mm.sweeps.plan import Plan

FAILED, BAD_INPUT, CLAIM_FAILED, INTERRUPTED = 1, 2, 3, 130
_LOG_SECONDS = 30.0

app = typer.Typer(
    name="fedjax-mm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Simulate multi-model federated learning, and reproduce its papers.

    First steps:

    - `fedjax-mm list` shows what can be reproduced
    - `fedjax-mm reproduce mfa-fig3` makes a figure in `results/mfa-fig3/`
    - `fedjax-mm reproduce mfa-fig3 --set num_models=6 --seeds 5` changes its settings
    - `fedjax-mm bounds mfa --models 12` puts the theorems' bounds beside measured errors
    - `fedjax-mm run experiment.toml` runs an experiment of your own
    - `fedjax-mm sweep experiment.toml` runs it at all points of a grid

    Exit codes: 0 done, 1 failed, 2 wrong input (nothing is written), 3 done, but a paper's claim
    does not hold, 130 or 143 interrupted: what was done is saved, and `--resume` continues it.
    """,
)
console = Console()
notes = Console(stderr=True)

Out = Annotated[
    Path, typer.Option(help="Directory for results; each has a folder of its own in it.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, e.g. task.mu=0.05; repeatable."
    ),
]


Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue an unfinished run bit by bit; start if there is none; leave a complete one.",
    ),
]
SaveEvery = Annotated[float, typer.Option(help="Seconds between two saves of unfinished work.")]
Memory = Annotated[
    float | None,
    typer.Option(metavar="GIB", help="Memory that may be used; 60 % of what is free if not given."),
]
Split = Annotated[
    Literal["replicas", "clients"] | None,
    typer.Option(
        help="What the devices share out: seeds and points, or the clients of each group.",
    ),
]


class InputError(Exception):
    """Wrong input, found before anything was computed or written."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: wrong input is one line on stderr and exit code 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = app(args=arguments, standalone_mode=False)
    except (InputError, RefusedError) as error:
        _fail(str(error), BAD_INPUT)
    except typer.TyperException as error:
        _fail(f"{error.format_message().rstrip('.')}. See 'fedjax-mm --help'.", BAD_INPUT)
    except InterruptedRunError as error:
        _fail(str(error), 128 + error.number)
    except (ArithmeticError, OSError) as error:
        _fail(str(error), FAILED)
    except typer.Abort:
        _fail("interrupted", INTERRUPTED)
    sys.exit(code or 0)


def _fail(message: str, code: int) -> NoReturn:
    print(f"fedjax-mm: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def _checking_input() -> Iterator[None]:
    """Raises `InputError` for what the user gave; other errors are the program's own."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error


@contextmanager
def _output(directories: Sequence[Path]) -> Iterator[None]:
    """Makes directories that can be written to; those that stay empty are removed at the end."""
    from fedjax_mm.files import prepare_directory

    parents = {parent for directory in directories for parent in (directory, *directory.parents)}
    new = sorted((path for path in parents if not path.exists()), reverse=True)
    try:
        with _checking_input():
            for directory in directories:
                prepare_directory(directory)
        yield
    finally:
        for path in new:
            with suppress(OSError):  # it holds results, or was never made
                path.rmdir()


@app.callback()
def set_up(
    context: typer.Context,
    devices: Annotated[
        int | None, typer.Option(help="CPU devices; one per core if not given.", show_default=False)
    ] = None,
    cache: Annotated[
        bool, typer.Option(help="Keep compiled programs on disk for the next start.")
    ] = True,
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed", help="Be one of several processes that a cluster's scheduler started."
        ),
    ] = False,
    process: Annotated[
        str | None,
        typer.Option(
            metavar="I/N@HOST:PORT",
            help="Be process I = 0, 1, ... of N, without a scheduler; process 0 is at HOST:PORT.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option(help="Say which devices and which cache are used.")
    ] = False,
) -> None:
    """Sets JAX up, before it starts its devices."""
    is_asked = verbose or distributed or process is not None or devices is not None
    if context.invoked_subcommand == "list" and not is_asked:
        return  # it computes nothing, and JAX takes longer to import than the list to show

    import jax

    from fedjax_mm.sweeps.devices import join_processes, use_compilation_cache, use_cpu_devices

    with _checking_input():
        try:
            use_cpu_devices(devices)
        except RuntimeError:  # a process that has computed before keeps its devices
            if devices is not None:
                raise
        if distributed or process is not None:
            join_processes(process)
            console.quiet = notes.quiet = jax.process_index() > 0
    place = use_compilation_cache() if cache else None
    if verbose:
        kinds = ", ".join(f"{device.platform}:{device.id}" for device in jax.devices())
        text = f"devices: {kinds}\ncompilation cache: {place or 'off'}"
        notes.print(text, highlight=False, soft_wrap=True)


@app.command("list")
def list_() -> None:
    """Show what `reproduce` can reproduce."""
    table = Table("id", "what it shows", box=None, header_style="bold")
    for name in ITEMS:
        table.add_row(name, ITEMS.title(name))
    console.print(table)
    console.print("\nMake one with: fedjax-mm reproduce ID [ID ...]", style="dim")


@app.command()
def reproduce(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="See `fedjax-mm list`.")],
    out: Out = Path("results"),
    seeds: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Seeds, instead of the paper's.")
    ] = None,
    rounds: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Rounds, instead of the paper's.")
    ] = None,
    clients: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Clients, instead of the paper's.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the real data, where it is used.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Data set, where there are several.")
    ] = None,
    overrides: Overrides = None,
    resume: Resume = False,
    save_every: SaveEvery = 30.0,
) -> None:
    """Reproduce figures of the papers.

    Writes `result.nc`, `figure.png` and `summary.json` to OUT/ID/, prints the measured table and
    checks the paper's claims. `--set` changes any setting that `summary.json` lists under
    manifest.config, for example `--set task.start=zeros`, `--set learning_rate=0.05` or `--set
    precision=float64`.
    """
    settings = _settings(overrides, num_seeds=seeds, num_rounds=rounds)
    with _checking_input():
        items = [_find(name) for name in dict.fromkeys(ids)]
        configs = [
            _configure(item, [*_scaled(item, clients, data, dataset), *settings]) for item in items
        ]
    raise typer.Exit(_reproduce_all(items, configs, out, resume, save_every))


def _settings(overrides: Sequence[str] | None, **options: str | None) -> list[str]:
    """The overrides, and the options that were given."""
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    return [*(overrides or []), *given]


def _reproduce_all(
    items: Sequence[Item],
    configs: Sequence[Config],
    out: Path,
    resume: bool,
    save_every: float,
) -> int:
    """The exit code."""
    folders = [out / item.id for item in items]
    holds = []
    results: dict[str, xr.Dataset] = {}  # figures of the same runs share them
    with _output(folders):
        for item, config, folder in zip(items, configs, folders, strict=True):
            if resume and (done := _done_already(folder / "summary.json", config)):
                holds.append(all(claim["holds"] for claim in done["claims"]))
                continue
            runs = f"{item.run} {config.model_dump_json()}"
            with _execution(folder, resume, save_every) as execution:
                if runs not in results:
                    results[runs] = item.make(config, execution)
                holds.append(_report(item, config, folder, results[runs]))
    return 0 if all(holds) else CLAIM_FAILED


@app.command()
def bounds(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help="Whose theorems: mfa.")],
    out: Out = Path("results"),
    clients: Annotated[str | None, typer.Option(metavar="NUMBER", help="N.")] = None,
    models: Annotated[
        list[str] | None, typer.Option(metavar="NUMBER", help="M; repeatable.")
    ] = None,
    steps: Annotated[
        list[str] | None, typer.Option(metavar="NUMBER", help="E, local steps; repeatable.")
    ] = None,
    mu: Annotated[
        list[str] | None, typer.Option(metavar="NUMBER", help="Strong convexity; repeatable.")
    ] = None,
    rounds: Annotated[str | None, typer.Option(metavar="NUMBER", help="Rounds.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="NUMBER", help="Seeds.")] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER", help="First rate, in units of the largest that the theorem admits."
        ),
    ] = None,
    overrides: Overrides = None,
    resume: Resume = False,
    save_every: SaveEvery = 30.0,
) -> None:
    """Put a paper's bounds beside measured errors.

    Prints the constants, the bounds and the errors, says whether each bound holds at every recorded
    round and how loose it is, and writes OUT/bounds-PAPER/ as `reproduce` does. For example
    `fedjax-mm bounds mfa --clients 24 --models 12 --steps 1 --steps 5`.
    """
    lists = {"num_models": models, "local_steps": steps, "mu": mu}
    settings = _settings(
        overrides,
        num_clients=clients,
        num_rounds=rounds,
        num_seeds=seeds,
        rate=rate,
        **{key: f"[{', '.join(values)}]" if values else None for key, values in lists.items()},
    )
    with _checking_input():
        if paper not in BOUNDS:
            raise ValueError(f"unknown paper {paper!r}; choose from {', '.join(BOUNDS)}")
        config = _configure(BOUNDS[paper], settings)
    raise typer.Exit(_reproduce_all([BOUNDS[paper]], [config], out, resume, save_every))


def _scaled(item: Item, clients: str | None, data: Path | None, dataset: str | None) -> list[str]:
    """The settings that an item has for its clients and its data."""
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


def _configure(item: Item, settings: Sequence[str]) -> Config:
    from fedjax_mm.experiments.overrides import validate

    try:
        return validate(type(item.settings), item.settings.model_dump(), settings)
    except ValueError as error:
        raise ValueError(f"{item.id}: {error}") from error


def _find(name: str) -> Item:
    if name not in ITEMS:
        raise ValueError(f"unknown experiment {name!r}; choose from {', '.join(ITEMS)}")
    return ITEMS[name]


def _report(item: Item, config: Any, directory: Path, dataset: xr.Dataset) -> bool:
    """One reproduction, from its result to files; whether all claims hold."""
    import jax

    from fedjax_mm.files import save_json
    from fedjax_mm.results import plots
    from fedjax_mm.results.dataset import save_dataset

    if jax.process_index() == 0:
        save_dataset(dataset, directory / "result.nc")
    findings = item.judge(dataset, config)
    holds = all(claim.holds for claim in findings.claims)
    if jax.process_index() > 0:
        return holds
    figure = item.figure(dataset, findings.measured, config)
    plots.save_figure(figure, directory / "figure.png")
    save_json(item.summary(dataset, findings), directory / "summary.json")
    changed = "" if config == item.settings else ", with other settings"
    _show(f"{item.id}: {item.title}{changed}", findings)
    seconds = dataset.attrs["manifest"]["wall_seconds"]
    _show_end(seconds, directory, "figure.png, result.nc, summary.json")
    return holds


def _show(title: str, findings: Findings) -> None:
    for header, rows, heading in findings.tables:
        table = Table(*header, title=heading or title, title_justify="left", title_style="bold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for claim in findings.claims:
        mark = "[green]holds[/]" if claim.holds else "[red]DOES NOT HOLD[/]"
        text = escape(f"{claim.claim}: {claim.evidence}")
        console.print(f"  {mark}  {text}", highlight=False, soft_wrap=True)


def _show_end(wall: dict[str, float], directory: Path, files: str) -> None:
    text = (
        f"compiled in {wall['compile']:.1f} s, ran in {wall['run']:.2f} s; in {directory}: {files}"
    )
    console.print(f"  {escape(text)}\n", style="dim", highlight=False, soft_wrap=True)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml")],
    out: Out = Path("results"),
    overrides: Overrides = None,
    resume: Resume = False,
    save_every: SaveEvery = 30.0,
    memory: Memory = None,
    split: Split = None,
) -> None:
    """Run an experiment described in a TOML file.

    Writes OUT/NAME/result.nc, a labelled NetCDF file for `xarray.open_dataset`, where NAME is the
    file's name. Algorithms are FedAvg or, by their `name`, any other method; tables `assignment`,
    `requiring` and `byzantine` are for all of them, see docs/experiments.md. A complete experiment:

        num_models = 12
        num_rounds = 1000

        [task]
        name = "quadratic"
        num_clients = 24
        block_size = 4
        mu = 2e-4

        [algorithms.MFA-Rand]
        assignment = { name = "mfa_rand" }
        learning_rate = 0.1
        local_steps = 5

        [algorithms.MFA-RR]
        assignment = { name = "mfa_rr" }
        learning_rate = { beta = 30, gamma = 100, per = "frame" }
        local_steps = 5
    """
    with _checking_input():
        experiment = _experiment(config, overrides, "run")
    directory = out / config.stem
    if resume and _done_already(directory / "manifest.json", experiment):
        return
    with (
        _output([directory]),
        _execution(directory, resume, save_every, memory, split) as execution,
    ):
        dataset = _run_and_save(experiment, directory, execution)
    last = dataset.drop_vars("diverged").isel(round=-1).mean(("seed", "model"))
    labels = [str(label) for label in last.algorithm.values]
    title = f"After {experiment.num_rounds} rounds, means over seeds and models"
    table = Table("", *map(escape, labels), title=title)
    for name, values in last.data_vars.items():
        table.add_row(str(name), *(f"{value:.6g}" for value in values.values))
    console.print(table)
    _show_end(dataset.attrs["manifest"]["wall_seconds"], directory, "result.nc, manifest.json")


@app.command()
def sweep(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml")],
    out: Out = Path("results"),
    overrides: Overrides = None,
    resume: Resume = False,
    save_every: SaveEvery = 30.0,
    memory: Memory = None,
    split: Split = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Compile, show the plan, and stop.")
    ] = False,
) -> None:
    """Run an experiment at all points of a grid.

    The file is that of `fedjax-mm run` with a table of axes. An axis is a setting of the experiment
    or one of every algorithm's (algorithms.NAME.q is one algorithm's); its values are a list, or a
    range:

        [axes]
        num_models = [2, 12]
        task.mu = [2e-4, 0.05]
        learning_rate = { start = 0.01, stop = 0.3, num = 16, scale = "log" }

    Numbers that are not counts, and seeds, cost no compilation. Writes OUT/NAME/result.nc with one
    dimension per axis, and OUT/NAME/figure.png. Runs that diverge are marked in the variable
    `diverged`, and the others go on.
    """
    import jax

    from fedjax_mm.experiments import run as runs
    from fedjax_mm.results import plots

    with _checking_input():
        experiment = _experiment(config, overrides, "sweep")
    directory = out / config.stem
    if dry_run:
        with _checking_input(), _progress() as report:
            plan = runs.plan(experiment, _how(memory, split)._replace(progress=report))
        _show_plan(plan)
        return
    if resume and _done_already(directory / "manifest.json", experiment):
        return
    with (
        _output([directory]),
        _execution(directory, resume, save_every, memory, split) as execution,
    ):
        dataset = _run_and_save(experiment, directory, execution._replace(announce=_show_plan))
        if jax.process_index() == 0:
            plots.save_figure(plots.sweep_overview(dataset), directory / "figure.png")
    diverged = int((dataset.diverged >= 0).any("model").sum())
    if diverged:
        total = math.prod(dataset.diverged.isel(model=0).shape)
        console.print(
            f"  [red]diverged:[/] {diverged} of {total:,} runs; see the variable diverged"
        )
    files = "figure.png, result.nc, manifest.json"
    _show_end(dataset.attrs["manifest"]["wall_seconds"], directory, files)


def _experiment(path: Path, overrides: list[str] | None, command: str) -> Experiment:
    """The experiment in a file, which has axes if it is to be swept."""
    from fedjax_mm.experiments.experiment import Experiment
    from fedjax_mm.experiments.overrides import load

    experiment = load(path, Experiment, overrides or [])
    if experiment.axes and command == "run":
        raise ValueError(f"{path}: it has axes; run it with `fedjax-mm sweep`")
    if not experiment.axes and command == "sweep":
        raise ValueError(f"{path}: axes: missing; give at least 1, or use `fedjax-mm run`")
    return experiment


def _run_and_save(experiment: Experiment, directory: Path, execution: Execution) -> xr.Dataset:
    """The result, saved; if a model diverged and that is the end, what came before it."""
    import jax

    from fedjax_mm.experiments import run as runs
    from fedjax_mm.files import save_json
    from fedjax_mm.results.dataset import save_dataset

    def save(dataset: xr.Dataset) -> None:
        if jax.process_index() == 0:
            save_dataset(dataset, directory / "result.nc")
            save_json(dataset.attrs["manifest"], directory / "manifest.json")

    try:
        dataset = runs.run(experiment, execution)
    except DivergenceError as error:
        save(error.partial)
        raise
    save(dataset)
    return dataset


def _done_already(path: Path, config: Config) -> dict[str, Any] | None:
    """The content of a file that this configuration and code have made, if there is one."""
    from fedjax_mm.files import plain
    from fedjax_mm.results.dataset import manifest
    from fedjax_mm.sweeps.checkpoint import Checkpoints

    if Checkpoints(path.parent).has_work or not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    about = content.get("manifest", content)
    now = plain(manifest(config.model_dump(mode="json"), seed=0, data=""))
    same = all(about.get(name) == now[name] for name in ("config", "versions", "git_revision"))
    if not same or "stopped" in about:
        return None
    console.print(f"{path.parent} is complete; nothing to resume", highlight=False, soft_wrap=True)
    return content


@contextmanager
def _execution(
    directory: Path,
    resume: bool,
    save_every: float,
    memory: Memory = None,
    split: Split = None,
) -> Iterator[Execution]:
    """Checkpoints in a directory, discarded when all is written, and a progress bar."""
    from fedjax_mm.sweeps.checkpoint import Checkpoints

    with _checking_input():
        execution = _how(memory, split, save_every)
        checkpoints = Checkpoints(directory, resume=resume).open()
    with checkpoints:
        with _progress() as report:
            try:
                yield execution._replace(progress=report, checkpoints=checkpoints)
            except DivergenceError:  # the run is over: it would end so again
                checkpoints.discard()
                raise
        checkpoints.discard()


def _how(memory: Memory, split: Split, save_every: float = 30.0) -> Execution:
    """The options' values, checked."""
    from fedjax_mm.sweeps.execute import Execution

    if memory is not None and not memory > 0:
        raise ValueError(f"--memory is {memory:g}; it must be positive")
    if not save_every >= 0:
        raise ValueError(f"--save-every is {save_every:g}; it must not be negative")
    return Execution(
        save_every=save_every, split=split, memory=None if memory is None else memory * 2**30
    )


def _show_plan(plan: Plan) -> None:
    """Programs, batches, memory and work, before they begin."""
    table = Table("program", "runs", "batches", "models", "MiB a batch", box=None, title="Plan")
    for each in plan.compiled:
        table.add_row(
            escape(each.program.label),
            f"{len(each.program):,}",
            f"{each.num_batches} x {each.batch_size:,}",
            str(each.program.num_models),
            f"{each.num_bytes / 2**20:,.0f}",
        )
    notes.print(table)
    devices = plan.where.mesh.size
    lines = [
        f"{len(plan.compiled)} programs, each compiled once, in {plan.compile_seconds:.1f} s; "
        f"{plan.client_updates:,} local trainings on {devices} devices, which share out the "
        f"{plan.where.axis}",
        f"memory: {_gib(plan.num_bytes)} estimated = {_gib(plan.process_bytes)} this process + "
        f"{_gib(plan.batch_bytes)} the largest batch + {_gib(plan.result_bytes)} the result; "
        f"{_gib(plan.limit)} may be used",
    ]
    if plan.is_split:
        lines.append("all runs of a program at once would not fit: they are split into batches")
    for line in lines:
        notes.print(f"  {line}", style="dim", highlight=False, soft_wrap=True)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


@app.command()
def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORKLOAD", help="As named below; all if none is."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs after one warm-up.")] = 5,
) -> None:
    """Time the simulator on this machine: compile and run apart, medians.

    Quadratics with E = 5 local steps: W1 has 24 clients, 12 models, 1000 rounds, 20 seeds; W1b
    1000 clients, 10 models, 200 rounds, 20 seeds; W1c a million clients, 10 models, 20 rounds; S1
    is a sweep of 24 clients, 2 or 12 models, 16 learning rates, 64 seeds, 1000 rounds, labelled.

    Classifiers on random examples, one model and one seed, without evaluation: W2 is logistic
    regression 60-5, 100 clients, E = 5, B = 20; W2b the same, 1000 of 10,000 clients; W3 a
    perceptron 784-64-30-10, 10 of 100 clients, E = 30, B = 32; W3b the same, all clients; W4
    McMahan's CNN, 10 clients, E = 60, B = 10. A8 is one epoch, B = 10, of Synthetic(1, 1), whose
    100 clients have very different numbers of examples.

    All devices are used (`fedjax-mm --devices 1 bench` uses one). Updates are local trainings of
    one client; MiB is the memory of the compiled program, or of the largest batch; peak is that of
    matrix products, measured now; steps are the local steps computed for each that counts.
    """
    import jax

    from fedjax_mm import bench as benchmarks

    if repeats < 1:
        raise InputError(f"--repeats is {repeats}; it must be at least 1")
    names = workloads or list(benchmarks.WORKLOADS)
    for name in names:
        if name not in benchmarks.WORKLOADS:
            raise InputError(
                f"unknown workload {name!r}; choose from {', '.join(benchmarks.WORKLOADS)}"
            )
    points = [
        (benchmarks.WORKLOADS[name], label)
        for name in names
        for label in benchmarks.WORKLOADS[name].labels
    ]
    quadratic, learning, peak = list[list[str]](), list[list[str]](), math.nan
    with _progress() as report:
        if any(isinstance(each, benchmarks.LearningWorkload) for each, _ in points):
            report("matrix products", 0, len(points))
            peak = max(benchmarks.gemm_peak().values())
        for number, (workload, label) in enumerate(points):
            report(f"{workload.name} {label}", number, len(points))
            program = benchmarks.build(workload, label)
            seconds = benchmarks.median_seconds(program, repeats)
            speed = workload.client_updates / seconds
            times = [f"{program.compile_seconds:.2f}", f"{seconds:.3f}"]
            memory = f"{program.mebibytes:.0f}"
            if isinstance(workload, benchmarks.LearningWorkload):
                gflops = workload.flops * speed / 1e9
                rounds = f"{workload.num_rounds / seconds:,.1f}"
                updates = f"{speed:,.1f}" if speed < 100 else f"{speed:,.0f}"
                cells = [rounds, updates, f"{gflops:.1f}", f"{gflops / peak:.1%}"]
                learning.append([workload.name, *times, *cells, f"{program.steps:.2f}", memory])
            else:
                cells = [f"{1e3 * seconds / workload.num_rounds:.3f}", f"{speed:,.0f}"]
                quadratic.append([workload.name, label, *times, *cells, memory])
    title = f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}"
    header = ("workload", "algorithm", "compile s", "run s", "ms a round", "updates/s", "MiB")
    _show_rows(title, header, quadratic)
    columns = ("work", "compile s", "run s", "rounds/s", "updates/s", "GFLOP/s", "peak", "steps")
    _show_rows(f"{title}, peak {peak:,.0f} GFLOP/s", (*columns, "MiB"), learning)


def _show_rows(title: str, header: Sequence[str], rows: list[list[str]]) -> None:
    """A table, if it has rows."""
    table = Table(*header, title=title, box=None if len(header) > 7 else box.HEAVY_HEAD)
    for row in rows:
        table.add_row(*row)
    if rows:
        console.print(table)


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar with what is being done, and the time since the start and to the end.

    Where nobody watches, as in a cluster's log, it is a line now and then.
    """
    if not notes.is_terminal:
        yield _log_lines()
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=notes, transient=True) as bars:
        bar, left = bars.add_task("starting", total=None, left=""), _time_left()

        def report(label: str, done: int, total: int) -> None:
            bars.update(bar, description=label, completed=done, total=total, left=left(done, total))

        yield report


def _log_lines() -> Report:
    """Prints progress at most twice a minute."""
    left, last = _time_left(), time.monotonic()

    def report(label: str, done: int, total: int) -> None:
        nonlocal last
        forecast = left(done, total)
        if time.monotonic() - last >= _LOG_SECONDS:
            last = time.monotonic()
            notes.print(f"{done / total:.0%} {label} {forecast}", highlight=False, soft_wrap=True)

    return report


def _time_left() -> Callable[[int, int], str]:
    """The forecast of the time to the end, from the speed since the work began."""
    start: tuple[float, int, int] | None = None

    def left(done: int, total: int) -> str:
        nonlocal start
        now = time.monotonic()
        # After compiling, some work may be done from before; and then nothing is done yet.
        if start is None or total != start[2] or done <= start[1]:
            start = now, done, total
            return ""
        seconds = (now - start[0]) * (total - done) / (done - start[1])
        return f"{datetime.timedelta(seconds=round(seconds))} left"

    return left


def start() -> None:
    """The program: `main` without collecting, again and again, what imports left for good.

    This takes a tenth off every command, half of it at the exit.
    """
    gc.freeze()
    try:
        main()
    finally:
        gc.freeze()


if __name__ == "__main__":
    start()
