"""Figure 7: mean test and training losses over the rounds."""

from collections.abc import Sequence

import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.papers.cho2022.comparison import draw, item, judged, unattacked
from fedjax_mm.papers.cho2022.comparison import measure as measure_ends
from fedjax_mm.papers.cho2022.grid import Comparison, methods
from fedjax_mm.papers.claims import Claim, estimate, within

NEARLY = 0.1
"""The difference between two nearly identical losses, as a share of the larger one."""


def losses(result: xr.Dataset, settings: Comparison) -> xr.DataArray:
    """Returns mean losses over the clients, ``(examples, algorithm, seed, round)``."""
    both = unattacked(judged(result))[["loss", "train_loss"]].to_array("examples")
    return both.assign_coords(examples=["test", "training"])


def measure(result: xr.Dataset, settings: Comparison) -> xr.Dataset:
    """Returns accuracies, and the losses' largest difference as a share of the larger one."""
    means = losses(result, settings).mean("seed", skipna=False)
    share = abs(means.diff("examples")) / means.max("examples", skipna=False)
    largest = share.max(("examples", "round"), skipna=False)
    ends = measure_ends(result, settings, id="maxfl-fig7", metrics=("accuracy",))
    return ends.assign({"largest difference": largest})


def claims(measured: xr.Dataset, settings: Comparison) -> Sequence[Claim]:
    """Claims that test and training losses of a global model hardly differ."""
    text = f"the mean test loss is within {NEARLY:.0%} of the mean training loss in every record"
    return [within(text, measured["largest difference"], 0.0, NEARLY, ".1%")]


def figure(result: xr.Dataset, measured: xr.Dataset, settings: Comparison) -> Figure:
    """Draws test losses as solid lines and training losses as dashed ones."""
    mean, error = estimate(losses(result, settings))
    test, training = zip(mean, error, strict=True)
    lines = [*plots.lines(*test, "-"), *plots.lines(*training, "--", label="training, ")]
    return draw([[plots.Panel("mean loss over clients", "round", "loss", lines)]], settings)


ITEMS = (
    item(
        id="maxfl-fig7",
        title="Mean test and training losses over the rounds",
        metrics=("accuracy",),
        settings=Comparison(
            learning_rates=(0.05,),
            local_steps=(30,),
            batch_sizes=(64,),
            record_every=5,
            methods=methods("FedAvg", "MaxFL"),
        ),
        claims=claims,
        measure=measure,
        figure=figure,
    ),
)
"""Figure 7."""
