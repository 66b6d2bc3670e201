"""The command line: list, reproduce, run, bench."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
import xarray as xr
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedjax_mm import bench as benchmarks
from fedjax_mm import plots
from fedjax_mm.experiment import Experiment, load, validate
from fedjax_mm.papers import REPRODUCTIONS, Judgement, Reproduction
from fedjax_mm.results import prepare_directory, save_dataset, save_json
from fedjax_mm.runs import Progress as Report
from fedjax_mm.runs import run as run_experiment

CLAIM_FAILED = 3
BAD_INPUT = 2

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
    - `fedjax-mm run experiment.toml` runs an experiment of your own

    Exit codes: 0 done, 2 wrong input (nothing is written), 3 done but a paper's claim does not
      hold.
    """,
)
console = Console()

Out = Annotated[
    Path, typer.Option(help="Directory for results; each has a folder of its own in it.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, e.g. task.mu=0.05; repeatable."
    ),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: wrong input is one line on stderr and exit code 2."""
    try:
        code = app(args=arguments, standalone_mode=False)
    except (ValueError, OSError) as error:
        _fail(str(error))
    except typer.Abort:
        sys.exit(130)
    except typer.TyperException as error:
        _fail(f"{error} See 'fedjax-mm --help'.")
    sys.exit(code or 0)


def _fail(message: str) -> None:
    print(f"fedjax-mm: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(BAD_INPUT)


@app.command("list")
def list_() -> None:
    """Show what `reproduce` can reproduce."""
    table = Table("id", "what it shows", box=None, header_style="bold")
    for item in REPRODUCTIONS.values():
        table.add_row(item.id, item.title)
    console.print(table)
    console.print("\nMake one with: fedjax-mm reproduce ID [ID ...]", style="dim")


@app.command()
def reproduce(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="See `fedjax-mm list`.")],
    out: Out = Path("results"),
    seeds: Annotated[int | None, typer.Option(help="Seeds, instead of the paper's.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds, instead of the paper's.")] = None,
    overrides: Overrides = None,
) -> None:
    """Reproduce figures of the papers.

    Writes `result.nc`, `figure.png` and `summary.json` to OUT/ID/, prints the measured table and
    checks the paper's claims. `--set` changes any setting that `summary.json` lists under
    manifest.config, for example `--set task.start=zeros`, `--set learning_rate=0.05` or `--set
    precision=float64`.
    """
    settings = list(overrides or [])
    settings += [f"num_seeds={seeds}"] if seeds is not None else []
    settings += [f"num_rounds={rounds}"] if rounds is not None else []
    items = [_find(name) for name in ids]
    configs = [validate(type(item.config), item.config.model_dump(), settings) for item in items]
    for item in items:
        prepare_directory(out / item.id)
    holds = [
        _reproduce(item, config, out / item.id) for item, config in zip(items, configs, strict=True)
    ]
    raise typer.Exit(0 if all(holds) else CLAIM_FAILED)


def _find(name: str) -> Reproduction:
    if name not in REPRODUCTIONS:
        raise ValueError(f"unknown experiment {name!r}; choose from {', '.join(REPRODUCTIONS)}")
    return REPRODUCTIONS[name]


def _reproduce(item: Reproduction, config: Any, directory: Path) -> bool:
    """One reproduction, from running to files; whether all claims hold."""
    with _progress() as report:
        dataset = item.run(config, report)
    judgement = item.judge(dataset, config)
    save_dataset(dataset, directory / "result.nc")
    plots.save_figure(item.plot(dataset, config, judgement), directory / "figure.png")
    manifest = dataset.attrs["manifest"]
    summary = {
        "id": item.id,
        "paper": item.paper,
        "measured": judgement.measured,
        "claims": [claim._asdict() for claim in judgement.claims],
        "data": manifest["data"],
        "manifest": manifest,
    }
    save_json(summary, directory / "summary.json")
    _show(item, judgement, manifest["wall_seconds"], directory)
    return all(claim.holds for claim in judgement.claims)


def _show(
    item: Reproduction, judgement: Judgement, wall: dict[str, float], directory: Path
) -> None:
    header, *rows = judgement.table
    table = Table(
        *header, title=f"{item.id}: {item.title}", title_justify="left", title_style="bold"
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for claim in judgement.claims:
        mark = "[green]holds[/]" if claim.holds else "[red]DOES NOT HOLD[/]"
        console.print(f"  {mark}  {claim.claim}: {claim.evidence}", highlight=False)
    console.print(
        f"  compiled in {wall['compile']:.1f} s, ran in {wall['run']:.2f} s; "
        f"wrote {directory}/figure.png, result.nc, summary.json\n",
        style="dim",
        highlight=False,
    )


@app.command()
def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml")],
    out: Out = Path("results"),
    overrides: Overrides = None,
) -> None:
    """Run an experiment described in a TOML file.

    Writes OUT/NAME/result.nc, a labelled NetCDF file for `xarray.open_dataset`, where NAME is the
    file's name. A complete experiment:

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
    experiment = load(config, Experiment, overrides or [])
    directory = out / config.stem
    prepare_directory(directory)
    with _progress() as report:
        dataset = run_experiment(experiment, report)
    save_dataset(dataset, directory / "result.nc")
    save_json(dataset.attrs["manifest"], directory / "manifest.json")
    _show_run(dataset, directory)


def _show_run(dataset: xr.Dataset, directory: Path) -> None:
    last = dataset.isel(round=-1).mean(("seed", "model"))
    names = [str(name) for name in last.data_vars]
    table = Table("algorithm", *names, title=f"After {dataset['round'][-1].item()} rounds, means")
    for label in last.algorithm.values:
        table.add_row(
            str(label), *(f"{last[name].sel(algorithm=label).item():.6g}" for name in names)
        )
    console.print(table)
    wall = dataset.attrs["manifest"]["wall_seconds"]
    console.print(
        f"  compiled in {wall['compile']:.1f} s, ran in {wall['run']:.2f} s; "
        f"wrote {directory}/result.nc, manifest.json",
        style="dim",
        highlight=False,
    )


@app.command()
def bench(
    workloads: Annotated[
        list[str] | None, typer.Argument(metavar="[W1|W1b|W1c]...", help="All if none is named.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs after one warm-up.")] = 5,
) -> None:
    """Time the simulator on this machine: compile and run apart, medians.

    W1: 24 clients, 12 models, 1000 rounds, 20 seeds. W1b: 1000 clients, 10 models, 200 rounds,
    20 seeds. W1c: a million clients, 10 models, 20 rounds. All are quadratics with E = 5 local
    steps. Updates are local trainings of one client; MiB is the memory of the compiled program.
    """
    names = workloads or list(benchmarks.WORKLOADS)
    for name in names:
        if name not in benchmarks.WORKLOADS:
            raise ValueError(
                f"unknown workload {name!r}; choose from {', '.join(benchmarks.WORKLOADS)}"
            )
    header = ("workload", "algorithm", "compile s", "run s", "ms a round", "updates/s", "MiB")
    table = Table(*header, title=f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    points = [
        (benchmarks.WORKLOADS[name], label) for name in names for label in benchmarks.ASSIGNMENTS
    ]
    with _progress() as report:
        for number, (workload, label) in enumerate(points):
            report(f"{workload.name} {label}", number, len(points))
            program = benchmarks.build(workload, label)
            seconds = benchmarks.median_seconds(program, repeats)
            table.add_row(
                workload.name,
                label,
                f"{program.compile_seconds:.2f}",
                f"{seconds:.3f}",
                f"{1e3 * seconds / workload.num_rounds:.3f}",
                f"{workload.client_updates / seconds:,.0f}",
                f"{program.mebibytes:.0f}",
            )
    console.print(table)


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar with what is being done and the time since the start."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("starting", total=None)
        yield lambda label, done, total: bars.update(
            bar, description=label, completed=done, total=total
        )


if __name__ == "__main__":
    main()
