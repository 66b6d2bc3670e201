"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def number(text: str) -> Any:
    """Declares an option for a setting that is validated along with the other settings."""
    return typer.Option(metavar="NUMBER", help=text)


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
        help="Continue an unfinished run exactly; leave a complete one; else start a new one.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the finished result of another run.")
]
SaveEvery = Annotated[float, typer.Option(help="Seconds between two saves of unfinished work.")]
Memory = Annotated[
    float | None,
    typer.Option(metavar="GIB", help="Memory that may be used; 60 % of the free one by default."),
]
Split = Annotated[
    Literal["replicas", "clients"] | None,
    typer.Option(
        help="Axis to split over devices: seeds and points, or the clients of each cohort."
    ),
]
ClientStates = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Keep the states of clients, such as SCAFFOLD's, in files there, not in memory.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show the plan without compiling anything, and stop.")
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help='Let the file name functions of your own, as in name = "my_package.tasks:make", which '
        "are imported and called.",
    ),
]
PartOf = Annotated[
    str | None,
    typer.Option(
        "--part",
        metavar="K/N",
        help="Compute the K-th of N shares of the runs, which `fedjax-mm merge` joins; slurm: that "
        "of a task of an array.",
    ),
]
ExecutorName = Annotated[
    str | None,
    typer.Option(
        "--executor",
        metavar="NAME",
        help="Let an executor compute parts: submitit (Slurm) or dask, with the settings of the "
        "file's table executor, or of --set executor.KEY=VALUE.",
    ),
]
FirstSeed = Annotated[
    int,
    typer.Option(
        "--first-seed",
        metavar="NUMBER",
        min=0,
        help="Number of the first seed: adds the file's seeds to a result of earlier ones.",
    ),
]
FigureFormat = Annotated[
    Literal["png", "pdf", "svg"],
    typer.Option("--format", help="Write the figure in this format, too; text stays text."),
]
UntilSettled = Annotated[
    bool,
    typer.Option(
        "--until-settled",
        help="Add seeds until the claims of a file, or the statements of a paper, are decided.",
    ),
]
MaxSeeds = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="NUMBER",
        help="Of --until-settled: the most seeds, by default 512 of a file and 8 times the first "
        "ones of a figure.",
    ),
]
MaxMinutes = Annotated[
    float | None,
    typer.Option(metavar="MINUTES", help="Of --until-settled, for each result; no default limit."),
]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.toml")]
