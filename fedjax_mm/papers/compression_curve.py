"""Accuracy against bits sent by clients, for compressors with and without error feedback."""

from collections.abc import Iterator, Sequence
from functools import partial

import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignments.partitions import mfa_rand
from fedjax_mm.compression import Compressor, compressed, qsgd, random_k, sign, top_k
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.data.synthetic import synthetic
from fedjax_mm.experiments.fields import Count, Positive, Seeded, Share
from fedjax_mm.local import local_sgd
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import check, finding, more
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, rows
from fedjax_mm.papers.training import train
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import LogisticRegression

PLAIN, TOP, TOP_ALONE = "all numbers", "top-k", "top-k without feedback"
RANDOM, ROUNDED, SIGNS = "random-k, unbiased", "QSGD, unbiased", "signs"
LABELS = (PLAIN, TOP, TOP_ALONE, RANDOM, ROUNDED, SIGNS)
"""The ways in which clients send their updates."""


class CompressionCurve(Seeded):
    """Settings of logistic regression on synthetic data with 5 classes and two models."""

    num_clients: Count = 200
    num_models: Count = 2
    share: Share = 0.05
    levels: Count = 4
    alpha: Positive = 0.1
    learning_rate: Positive = 0.1
    local_steps: Count = 5
    batch_size: Count = 10
    num_rounds: Count = 150
    num_seeds: Count = 5
    record_every: Count = 5

    def rules(self) -> dict[str, tuple[Compressor, bool]]:
        """Returns the compressors by label, and whether they use error feedback."""
        return {
            TOP: (top_k(self.share), True),
            TOP_ALONE: (top_k(self.share), False),
            RANDOM: (random_k(self.share), False),
            ROUNDED: (qsgd(self.levels), False),
            SIGNS: (sign(), True),
        }

    def build(self, message: str, data: FederatedData) -> Setup:
        """Sets up the simulation of one point of the grid."""
        local = local_sgd(self.learning_rate, steps=self.local_steps, batch_size=self.batch_size)
        algorithm = fedavg(local)
        if message != PLAIN:
            rule, feedback = self.rules()[message]
            algorithm = compressed(algorithm, rule, error_feedback=feedback)
        task = classification(data, LogisticRegression(5))
        assignment = mfa_rand(self.num_clients, self.num_models)
        return Setup([task] * self.num_models, algorithm, assignment)


def run(config: CompressionCurve, execution: Execution | None = None) -> xr.Dataset:
    """Trains with every way of sending updates."""
    spread, size = config.alpha, config.num_clients
    data = synthetic(size, alpha=spread, beta=spread, seed=config.seed, test_fraction=0.2)
    length = config.model_dump(include={"num_rounds", "record_every"})
    build = partial(config.build, data=data)
    return train([data], build, {"message": LABELS}, config, execution, **length)


def measure(result: xr.Dataset, config: CompressionCurve) -> xr.Dataset:
    """Returns accuracies and bits over the rounds, averaged over the models."""
    percent = 100 * result["test_accuracy"].mean("model")
    bits = result["bits_up"].mean("model").isel(seed=0, drop=True)
    found = {"percent": percent, "mean": percent.mean("seed"), "megabits": bits / 1e6}
    return xr.Dataset(found | {"standard error": estimate(percent).error})


def judge(measured: xr.Dataset, config: CompressionCurve) -> Iterator[Check]:
    """Checks that error feedback helps, and that a tenth of the bits gives a similar accuracy."""
    last = measured["percent"].isel(round=-1)
    gain = last.sel(message=TOP, drop=True) - last.sel(message=TOP_ALONE, drop=True)
    yield finding("top-k is better with error feedback", more(gain))
    loss = last.sel(message=PLAIN, drop=True) - last.sel(message=TOP, drop=True)
    yield finding("top-k with error feedback loses less than 2 points", more(-loss, -2.0))
    bits = measured["megabits"].isel(round=-1)
    ratio = float(bits.sel(message=PLAIN) / bits.sel(message=TOP))
    yield check("top-k sends less than a tenth of the bits", ratio > 10, f"a {ratio:.0f}th")


def table(measured: xr.Dataset, config: CompressionCurve) -> Sequence[Table]:
    """Returns one row per way of sending updates."""
    last = measured.isel(round=-1)
    contents = {
        "accuracy": cells(last["mean"], last["standard error"], form=".1f"),
        "megabits": cells(last["megabits"], form=",.1f"),
    }
    return [rows(contents, ("message",))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: CompressionCurve) -> Figure:
    """Draws the accuracy against the bits sent so far, with one line per way of sending them."""
    after = measured.isel(round=slice(1, None))  # zero bits cannot be shown on a log axis
    drawn = [
        plots.Line(
            label,
            after["megabits"].sel(message=label).values,
            after["mean"].sel(message=label).values,
            after["standard error"].sel(message=label).values,
            color=number,
        )
        for number, label in enumerate(LABELS)
    ]
    xlabel = "megabits sent by a model's clients"
    panel = plots.Panel("", xlabel, "test accuracy in percent", drawn, xscale="log")
    about = result.attrs["manifest"]
    title = f"{about['datasets'][0]}, {config.num_clients} clients, {config.num_models} models"
    caption = f"Means and standard errors over models and {config.num_seeds} seeds in "
    caption += f"{config.num_rounds} rounds, where k is {config.share:.0%} of the numbers, and "
    caption += f"QSGD has {config.levels} levels."
    return plots.draw([[panel]], title=title, caption=caption)


ITEMS = (Item("compression-curve", CompressionCurve(), run, measure, judge, table, figure),)
"""The savings due to compression."""
