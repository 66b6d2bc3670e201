"""The command line: list, reproduce, bounds, report, init, run, show, export, bench.

This module defines options, help texts and exit codes. The modules that do the work are imported
inside the commands that need them, because importing JAX takes seconds and would delay the list of
items and the message for a mistyped command.
"""

from __future__ import annotations

import gc
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

import fedjax_mm
from fedjax_mm.cli.experiments import export, init, merge, run, show
from fedjax_mm.cli.options import (
    ExecutorName,
    FigureFormat,
    MaxMinutes,
    MaxSeeds,
    Out,
    Overrides,
    Overwrite,
    Resume,
    SaveEvery,
    UntilSettled,
    number,
)
from fedjax_mm.cli.terminal import console, notes, printable, say
from fedjax_mm.papers import ITEMS
from fedjax_mm.sweeps.errors import InterruptedRunError, RefusedError, refusing
from fedjax_mm.tools.compiler import OFF, cache_directory

_NOT_COMPUTING = ("cache", "export", "init", "list", "report", "show")
FAILED, BAD_INPUT, CONTRADICTED, INTERRUPTED = 1, 2, 3, 130

_FIRST = """\
Simulates multi-model federated learning. Three commands to try:

  fedjax-mm list                   shows what can be reproduced
  fedjax-mm reproduce mfa-fig3     makes a figure of a paper in about ten seconds
  fedjax-mm init                   writes experiment.toml, for: fedjax-mm run experiment.toml

fedjax-mm --help shows all commands."""

app = typer.Typer(
    name="fedjax-mm",
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Simulate multi-model federated learning, and reproduce its papers.

    First steps:

    - `fedjax-mm list` shows what can be reproduced
    - `fedjax-mm reproduce mfa-fig3` makes a figure in `results/mfa-fig3/`
    - `fedjax-mm reproduce mfa-fig3 --set num_models=6 --seeds 5` changes its settings
    - `fedjax-mm report results` shows everything that was made on one page
    - `fedjax-mm judge results` judges finished results again, by this version's rules
    - `fedjax-mm bounds mfa --models 12` compares the theorems' bounds with measured errors
    - `fedjax-mm init` writes an experiment of your own to start from, `experiment.toml`
    - `fedjax-mm run experiment.toml` runs it, at all points of its axes
    - `fedjax-mm show results/experiment` shows the result
    - `fedjax-mm export results/experiment --to mlflow` writes it to a tracker

    Exit codes: 0 done, 1 failed, 2 wrong input (nothing is written), 3 done, but a paper's
    statement is contradicted, 130 or 143 interrupted. Interrupted work is saved, and `--resume`
    continues it.
    """,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits, with code 2 and one line on stderr for invalid input."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=arguments, prog_name="fedjax-mm", standalone_mode=False)
    except RefusedError as error:
        _fail(str(error), BAD_INPUT)
    except typer.TyperException as error:
        _fail(f"{error.format_message().rstrip('.')}. See 'fedjax-mm --help'.", BAD_INPUT)
    except InterruptedRunError as error:
        _fail(str(error), 128 + error.number)
    except ArithmeticError as error:
        _fail(str(error), FAILED)
    except typer.Abort:
        _fail("interrupted", INTERRUPTED)
    except Exception as error:
        if _is_one_of_several():
            _leave(error)
        if isinstance(error, OSError):
            _fail(str(error), FAILED)
        raise
    sys.exit(code or 0)


def _is_one_of_several() -> bool:
    """Whether this process is part of a multi-process run."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1


def _leave(error: Exception) -> NoReturn:
    """Exits one process of a multi-process run immediately after an error."""
    # Skip the orderly exit, because JAX would wait minutes for the other processes, which may have
    # ended or be waiting for this one.
    jax = sys.modules["jax"]
    if isinstance(error, jax.errors.JaxRuntimeError):
        (first, *_) = str(error).splitlines()
        remedy = "if another process has ended, start all of them again with --resume"
        print(f"fedjax-mm: {first}; {remedy}", file=sys.stderr)
    elif isinstance(error, OSError):
        print(f"fedjax-mm: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAILED)


def _fail(message: str, code: int) -> NoReturn:
    say(f"fedjax-mm: {printable(' '.join(message.split()))}", notes)
    sys.exit(code)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name, "")
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ[name] = before


@app.callback(invoke_without_command=True)
def set_up(
    context: typer.Context,
    devices: Annotated[
        int | None, typer.Option(help="CPU devices; one per core if not given.", show_default=False)
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep compiled programs for the next start there; else in FEDJAX_MM_CACHE, or in "
            "the user's cache directory.",
        ),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Keep no compiled programs.")
    ] = False,
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
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show it and exit; with --verbose all that a bug report needs."
        ),
    ] = False,
) -> None:
    """Configures JAX before its backends are initialized."""
    if version:
        if verbose:
            fedjax_mm.show_versions()
        else:
            say(f"fedjax-mm {fedjax_mm.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        say(_FIRST)
        raise typer.Exit
    if no_cache or cache is not None:
        chosen = cache_directory(OFF if no_cache else str(cache))
        # Set it for workers, too.
        context.with_resource(_environment("FEDJAX_MM_CACHE", str(chosen or OFF)))
    is_asked = verbose or distributed or process is not None or devices is not None
    if context.invoked_subcommand in _NOT_COMPUTING and not is_asked:
        return  # these commands do not compute, and importing JAX would take longer than they do

    import jax

    from fedjax_mm.cli.machine import show_devices, tell_of_accelerators, watched
    from fedjax_mm.cli.terminal import warnings_as_lines
    from fedjax_mm.sweeps.devices import join_processes, use_cpu_devices
    from fedjax_mm.tools.compiler import use_compilation_cache

    with refusing():
        try:
            use_cpu_devices(devices)
        except RuntimeError:  # devices cannot change once a process has computed
            if devices is not None:
                raise
        if distributed or process is not None:
            say("waiting for the other processes, for 5 minutes at most", notes, "dim")
            join_processes(process)
            console.quiet = notes.quiet = jax.process_index() > 0
    context.with_resource(warnings_as_lines())
    if place := use_compilation_cache():
        context.with_resource(watched())
    tell_of_accelerators()
    if verbose:
        show_devices(place)


@app.command("list")
def list_() -> None:
    """List all items that `reproduce` can reproduce."""
    console.print(f"{'id':20} {'took':16} what it shows", style="bold")
    for name in ITEMS:
        needs = f"; needs {ITEMS.needs(name)}" if ITEMS.needs(name) else ""
        line = f"{name:20} {ITEMS.runtime(name):16} {ITEMS.title(name)}{needs}"
        if console.is_terminal:
            line = textwrap.fill(line, console.width, subsequent_indent=" " * 38)
        say(line)
    words = "Times are those of the published runs, on two CPU cores or on the GPU that is named."
    console.print(f"\n{words} Data are read from the folder of --data.", style="dim")
    console.print("Make one with: fedjax-mm reproduce ID [ID ...]", style="dim")


@app.command()
def reproduce(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="See `fedjax-mm list`.")],
    out: Out = Path("results"),
    seeds: Annotated[str | None, number("Seeds, instead of the paper's.")] = None,
    until_settled: UntilSettled = False,
    max_seeds: MaxSeeds = None,
    max_minutes: MaxMinutes = None,
    rounds: Annotated[str | None, number("Rounds, instead of the paper's.")] = None,
    clients: Annotated[str | None, number("Clients, instead of the paper's.")] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the real data, if it is used.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Data set, for figures that can use several.")
    ] = None,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    save_every: SaveEvery = 30.0,
    executor: ExecutorName = None,
    kind: FigureFormat = "png",
) -> None:
    """Reproduce figures of the papers.

    Writes `result.nc`, `figure.png` and `summary.json` to OUT/ID/, prints the measured table and
    judges the paper's statements, and compares its printed numbers. `--until-settled` doubles the
    number of seeds until all statements are settled. `--set` changes any setting listed under
    manifest.config in `summary.json`, for example `--set task.start=zeros`, `--set
    learning_rate=0.05` or `--set precision=float64`.
    """
    from fedjax_mm.cli import directories as saving
    from fedjax_mm.cli import reproductions

    before = saving.existing(resume, overwrite)
    how = saving.execution(None, None, save_every)
    budget = reproductions.budget_of(until_settled, max_seeds, max_minutes)
    settings = _settings(overrides, num_seeds=seeds, num_rounds=rounds)
    scale = {"clients": clients, "dataset": dataset}
    _exit(
        reproductions.reproduce(
            ids, settings, scale, data, out, before, how, budget, executor, kind
        )
    )


def _exit(none_is: bool) -> NoReturn:
    raise typer.Exit(0 if none_is else CONTRADICTED)


def _settings(overrides: Sequence[str] | None, **options: str | None) -> list[str]:
    """Merges the overrides and the given options into one list."""
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    return [*(overrides or []), *given]


@app.command()
def bounds(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help="Whose theorems: mfa.")],
    out: Out = Path("results"),
    clients: Annotated[str | None, number("N.")] = None,
    models: Annotated[list[str] | None, number("M; repeatable.")] = None,
    steps: Annotated[list[str] | None, number("E, local steps; repeatable.")] = None,
    mu: Annotated[list[str] | None, number("Strong convexity; repeatable.")] = None,
    rounds: Annotated[str | None, number("Rounds.")] = None,
    seeds: Annotated[str | None, number("Seeds.")] = None,
    rate: Annotated[
        str | None, number("First rate, in units of the largest that the theorem admits.")
    ] = None,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    save_every: SaveEvery = 30.0,
) -> None:
    """Compare a paper's bounds with measured errors.

    Prints constants, bounds and errors, checks at every recorded round whether each bound holds and
    how loose it is, and writes OUT/bounds-PAPER/ as `reproduce` does. For example `fedjax-mm bounds
    mfa --clients 24 --models 12 --steps 1 --steps 5`.
    """
    from fedjax_mm.cli import directories as saving
    from fedjax_mm.cli import reproductions

    lists = {"num_models": models, "local_steps": steps, "mu": mu}
    single = {"num_clients": clients, "num_rounds": rounds, "num_seeds": seeds, "rate": rate}
    given = {key: f"[{', '.join(values)}]" for key, values in lists.items() if values}
    settings = _settings(overrides, **single, **given)
    before = saving.existing(resume, overwrite)
    how = saving.execution(None, None, save_every)
    _exit(reproductions.bounds(paper, settings, out, before, how))


@app.command()
def judge(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the results are.")],
) -> None:
    """Judge finished results again by the rules of this version.

    Reads every `result.nc` below DIR and rewrites `summary.json` and `figure.png` next to it,
    without computing anything.
    """
    from fedjax_mm.cli import reproductions

    _exit(reproductions.judge(directory))


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the results are.")],
    kind: Annotated[
        Literal["html", "md"], typer.Option("--format", help="One page in HTML, or Markdown pages.")
    ] = "html",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The page; report.html or report.md in DIR if not given."
        ),
    ] = None,
) -> None:
    """Make one page of all results below a directory.

    The page has the papers' statements by verdict, and the requirements for settling or testing the
    rest. For each item it shows the figure, the statements, the main table, the paper's published
    numbers and open points, the manifest and the command to reproduce it. In HTML, one file has
    everything. In Markdown, each item has a page of its own in a folder with the name of FILE, and
    figures are in the folder figures/. Runs of files have a line
    each, and the verdicts on their claims. Unreadable results are listed on the page.
    """
    from fedjax_mm.cli import page

    path = out or directory / f"report.{kind}"
    with refusing():
        found = page.write(directory, kind, path)
    for problem in found.problems:
        say(problem, notes, "dim")
    counts = f"items: {len(found.items)}, other runs: {len(found.runs)}"
    say(f"{counts}, problems: {len(found.problems)}; in {path}")


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of them.")] = False,
) -> None:
    """Show or remove the cached compiled programs.

    Each version of jaxlib and each platform has its own folder of at most 1 GiB, from which the
    least recently used programs are evicted.
    """
    from fedjax_mm.cli import machine

    machine.show_cache(clear)


for command in (init, run, merge, show, export):
    app.command()(command)
app.command("sweep", hidden=True)(run)


@app.command()
def bench(
    workloads: Annotated[
        list[str] | None, typer.Argument(metavar="WORKLOAD", help="As named below; all if none is.")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(help="Timed runs after one warm-up: 5 by default, 7 of capabilities."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A capability, or a kind of them; repeatable."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of a run of capabilities.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Save capabilities, with a picture beside it."),
    ] = None,
) -> None:
    """Time the simulator on this machine, with medians of compile and run times.

    Quadratics with E = 5 local steps: W1 has 24 clients, 12 models, 1000 rounds, 20 seeds; W1b
    1000 clients, 10 models, 200 rounds, 20 seeds; W1c a million clients, 10 models, 20 rounds; S1
    is a sweep of 24 clients, 2 or 12 models, 16 learning rates, 64 seeds, 1000 rounds, labelled.

    Classifiers on random examples, one model and one seed, without evaluation: W2 is logistic
    regression 60-5, 100 clients, E = 5, B = 20; W2b the same, 1000 of 10,000 clients; W3 a
    perceptron 784-64-30-10, 10 of 100 clients, E = 30, B = 32; W3b the same, all clients; W4
    McMahan's CNN, 10 clients, E = 60, B = 10. A8 is one epoch, B = 10, of Synthetic(1, 1), whose
    100 clients have very different numbers of examples.

    All devices are used (`fedjax-mm --devices 1 bench` uses one). An update is one client's local
    training. MiB is the memory of the compiled program, or of the largest batch. Peak is the
    measured peak of matrix products. Steps is the number of local steps computed per useful step.

    `fedjax-mm --no-cache bench capabilities` times every method, wrapper, rule, compressor and
    assignment on W2 and on the network of W3 with 10 clients, all of which train in every round.
    `bench capabilities W2 --only rule` times some. x is the least time divided by that of FedAvg.
    MiB are temporary arrays, keys and draws those of a round, all on one device. Draws are random
    words of 32 bits.
    """
    from fedjax_mm.cli import timing

    timing.bench(workloads or [], repeats, only or [], rounds, out)


def start() -> None:
    """Runs `main` with garbage collection tuned for programs dominated by imports and tracing.

    This saves a sixth of the time of every command, because importing and tracing allocate many
    long-lived objects and hardly any cycles.
    """
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    try:
        main()
    finally:
        gc.freeze()
