"""Commands for custom experiments: init, run, merge, show, export."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedjax_mm.cli.options import (
    AllowCode,
    ClientStates,
    ConfigFile,
    DryRun,
    ExecutorName,
    FigureFormat,
    FirstSeed,
    MaxMinutes,
    MaxSeeds,
    Memory,
    Out,
    Overrides,
    Overwrite,
    PartOf,
    Resume,
    SaveEvery,
    Split,
    UntilSettled,
)
from fedjax_mm.cli.terminal import say
from fedjax_mm.sweeps.errors import RefusedError, refusing


def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]")] = Path("experiment.toml"),
    like: Annotated[
        str, typer.Option(metavar="NAME", help="A tuned method, such as methods-compare/fedprox.")
    ] = "experiment",
) -> None:
    """Write an experiment file to start from.

    FILE is experiment.toml by default; an existing file is never overwritten. The new file is
    commented, runs in seconds, and lists further settings to enable:

        fedjax-mm init mine.toml
        fedjax-mm run mine.toml

    With `--like methods-compare/fedprox` the file has this method and FedAvg with the settings that
    `methods-compare` chose for them.

    Next to FILE goes experiment.schema.json, this version's JSON schema of all experiment files,
    with which editors complete, explain and check settings. A file that begins with the line
    `#:schema ./experiment.schema.json` uses it.
    """
    from fedjax_mm.experiments.schema import FILE, MADE_BY, schema
    from fedjax_mm.tools.files import write_aside

    if file.exists():
        raise RefusedError(f"{file} exists and was not changed; give another FILE, or remove it")
    templates = resources.files("fedjax_mm.cli").joinpath("templates")
    tuned = sorted(each.name[:-5] for each in (templates / "methods-compare").iterdir())
    names = ["experiment", *(f"methods-compare/{each}" for each in tuned)]
    if like not in names:
        raise RefusedError(f"there is no {like} to start from; take one of {', '.join(names)}")
    text = templates.joinpath(f"{like}.toml").read_text()
    for_editors, there = json.dumps(schema(), indent=1), file.with_name(FILE)
    with refusing((OSError, ValueError)):
        if there.exists() and MADE_BY not in there.read_text():
            raise ValueError(f"{there} exists and is not of fedjax-mm; move it, or choose a folder")
        write_aside(file, lambda aside: aside.write_text(text))
        write_aside(there, lambda aside: aside.write_text(for_editors))
    say(f"wrote {file}, and {FILE} for editors; edit it, then run: fedjax-mm run {file}")


def run(
    config: ConfigFile,
    out: Out = Path("results"),
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    save_every: SaveEvery = 30.0,
    memory: Memory = None,
    split: Split = None,
    client_states: ClientStates = None,
    part: PartOf = None,
    first_seed: FirstSeed = 0,
    executor: ExecutorName = None,
    dry_run: DryRun = False,
    save_params: Annotated[
        bool,
        typer.Option("--save-params", help="Write the models' final parameters to params.npz too."),
    ] = False,
    keep_state: Annotated[
        bool,
        typer.Option(
            "--keep-state",
            help="Keep the final state, from which --set num_rounds=MORE --resume goes on.",
        ),
    ] = False,
    until_settled: UntilSettled = False,
    max_seeds: MaxSeeds = None,
    max_minutes: MaxMinutes = None,
    kind: FigureFormat = "png",
    allow_code: AllowCode = False,
) -> None:
    """Run an experiment described in a TOML file, at all points of its axes.

    Writes OUT/NAME/result.nc, a labelled NetCDF file for `xarray.open_dataset`, where NAME is the
    file's name, and prints the last values. `fedjax-mm init` writes a file to start from, and
    `--dry-run` shows the plan of the run. Algorithms are FedAvg or, given a `name`, any other
    method. The tables `assignment`, `requirement` and `byzantine` apply to all algorithms; see
    "Experiments in a file" in the documentation. A complete experiment:

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

    With a table of axes it is a sweep. An axis is a setting of the experiment or of all algorithms
    (algorithms.NAME.q is a setting of one algorithm). Its values are a list or a range:

        [axes]
        num_models = [2, 12]
        task.mu = [2e-4, 0.05]
        learning_rate = { start = 0.01, stop = 0.3, num = 16, scale = "log" }

    Axes of real numbers, seeds and data draws need no further compilation. A sweep also writes
    OUT/NAME/figure.png. Runs that diverge are marked in its variable `diverged`, and the others
    continue.

    With claims, the verdicts are printed, and written to claims.json and claims.png, which
    `report` shows. `--until-settled` adds seeds until all are decided; see "Is it really better?"
    in the documentation:

        [claims.round-robin-is-better]
        metric = "excess_loss"
        more = { algorithm = "MFA-Rand" }
        than = { algorithm = "MFA-RR" }
    """
    from fedjax_mm.cli import directories as saving
    from fedjax_mm.cli import reproductions, runs

    before = saving.existing(resume, overwrite)
    how = saving.execution(memory, split, save_every)
    how = how._replace(keep_state=keep_state, client_states=client_states)
    which = runs.Which(saving.part(part), first_seed, executor, allow_code)
    budget = reproductions.budget_of(until_settled, max_seeds, max_minutes)
    if dry_run:
        runs.outline(config, overrides or [], which, how)
    else:
        runs.run(
            *(config, overrides or [], which, out, before, how, budget),
            with_params=save_params,
            kind=kind,
        )


def merge(
    directory: Annotated[Path, typer.Argument(metavar="DIR")],
    first_seed: FirstSeed = 0,
    resume: Resume = False,
    overwrite: Overwrite = False,
    allow_code: AllowCode = False,
) -> None:
    """Join the separately computed parts of a run.

    DIR is the directory of the result, OUT/NAME, with one file per part in its folder parts/. The
    result equals that of a single machine. Parts may be computed anywhere, at any time and in any
    order, on a shared file system or copied together:

        fedjax-mm run grid.toml --part 1/2
        fedjax-mm run grid.toml --part 2/2
        fedjax-mm merge results/grid

    If parts are missing or damaged, or differ in settings, version or number of parts, they are
    listed and nothing is joined.
    """
    from fedjax_mm.cli import directories as saving
    from fedjax_mm.cli import runs

    runs.merge(directory, saving.existing(resume, overwrite), first_seed, allow_code)


def show(
    result: Annotated[Path, typer.Argument(metavar="RESULT")],
) -> None:
    """Show a result: its provenance, dimensions and last values.

    RESULT is a directory that `run` or `reproduce` wrote, or its result.nc:

        fedjax-mm show results/experiment

    Values are means over models and seeds, with standard errors over seeds. For a run with a target
    they are those of the round that reached it.
    """
    from fedjax_mm.cli import results

    results.show(result)


def export(
    result: Annotated[Path, typer.Argument(metavar="RESULT")],
    to: Annotated[
        Literal["mlflow", "tensorboard", "wandb"],
        typer.Option(help="The tracker.", show_default=False),
    ],
    store: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="MLflow's tracking URI, else the environment's; TensorBoard's folder, else runs; "
            "the parent of wandb's folder, else the current one.",
        ),
    ] = None,
) -> None:
    """Write a result to MLflow, TensorBoard or Weights & Biases (wandb).

    RESULT is a directory that `run` or `reproduce` wrote, or its result.nc. Each point and
    seed becomes a run with its settings and with a curve over rounds for each metric and model.
    Exporting the same result again adds nothing:

        pip install 'fedjax-mm[tracking]'
        fedjax-mm export results/experiment --to tensorboard
        fedjax-mm export results/experiment --to mlflow --store sqlite:///mlflow.db

    wandb's runs are offline ones: pip install wandb, and later wandb sync wandb/offline-run-*.
    """
    from fedjax_mm.cli import results

    results.export(result, to, store)
