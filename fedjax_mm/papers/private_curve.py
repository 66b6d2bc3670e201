"""Accuracy against epsilon: the cost of client-level privacy with one and with several models.

Clients clip their updates, and the server adds noise to each model's sum. A client trains one model
per round, so all models together spend the epsilon of one, but each model has fewer clients.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignments.partitions import mfa_rand
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.data.synthetic import synthetic
from fedjax_mm.experiments.fields import Count, Flag, Fraction, NonNegative, Positive, Seeded
from fedjax_mm.local import local_sgd
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import finding, more
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.training import train
from fedjax_mm.privacy.accounting import epsilon
from fedjax_mm.privacy.mechanism import private
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import LogisticRegression


class PrivateCurve(Seeded):
    """Settings of logistic regression on synthetic data with 5 classes and private clients."""

    num_clients: Count = 1000
    num_models: tuple[Count, ...] = (1, 4, 16)
    noise_multipliers: tuple[NonNegative, ...] = (0.0, 1.0, 3.0, 10.0, 30.0)
    clip: Positive = 1.0
    delta: Fraction = 1e-5
    iid: Flag = True
    learning_rate: Positive = 0.3
    local_steps: Count = 5
    batch_size: Count = 10
    num_rounds: Count = 40
    num_seeds: Count = 4
    record_every: Count = 20

    def build(self, num_models: int, noise_multiplier: float, data: FederatedData) -> Setup:
        """Sets up the simulation of one point of the grid."""
        local = local_sgd(self.learning_rate, steps=self.local_steps, batch_size=self.batch_size)
        algorithm = private(
            fedavg(local),
            clip=self.clip,
            noise_multiplier=noise_multiplier,
            clients_per_round=self.num_clients / num_models,
        )
        task = classification(data, LogisticRegression(5))
        return Setup([task] * num_models, algorithm, mfa_rand(self.num_clients, num_models))

    def epsilons(self) -> list[float]:
        """Returns the epsilon of each noise multiplier, for any number of models."""
        assignment = mfa_rand(self.num_clients, self.num_models[0])
        how: dict[str, Any] = {"num_rounds": self.num_rounds, "delta": self.delta}
        return [
            epsilon(assignment, noise_multiplier=z, **how) if z else math.inf
            for z in self.noise_multipliers
        ]


def run(config: PrivateCurve, execution: Execution | None = None) -> xr.Dataset:
    """Runs all combinations of the numbers of models and the noise multipliers."""
    sizes = config.model_dump(include={"num_clients", "iid"})
    data = synthetic(**sizes, alpha=0.0, beta=0.0, seed=config.seed, test_fraction=0.2)
    axes = {"num_models": config.num_models, "noise_multiplier": config.noise_multipliers}
    length = config.model_dump(include={"num_rounds", "record_every"})
    return train([data], partial(config.build, data=data), axes, config, execution, **length)


def measure(result: xr.Dataset, config: PrivateCurve) -> xr.Dataset:
    """Returns the test accuracy after the last round, averaged over the models."""
    accuracy = 100 * result["test_accuracy"].isel(round=-1).mean("model")
    accuracy = accuracy.assign_coords(epsilon=("noise_multiplier", config.epsilons()))
    found = {"percent": accuracy, "mean": accuracy.mean("seed")}
    return xr.Dataset(found | {"standard error": estimate(accuracy).error})


def judge(measured: xr.Dataset, config: PrivateCurve) -> Iterator[Check]:
    """Checks that the largest noise costs accuracy, and that it costs more with more models."""
    percent = measured["percent"]
    fall = percent.isel(noise_multiplier=0) - percent.isel(noise_multiplier=-1)
    yield finding(
        "with the most models, the largest noise costs accuracy", more(fall.isel(num_models=-1))
    )
    first, last = (percent.isel(num_models=i, noise_multiplier=-1) for i in (0, -1))
    if len(config.num_models) > 1:
        lead = first.drop_vars("num_models") - last.drop_vars("num_models")
        yield finding("the largest noise costs more accuracy with more models", more(lead))


def table(measured: xr.Dataset, config: PrivateCurve) -> Sequence[Table]:
    """Returns one row per noise multiplier and one column per number of models."""
    spent = measured["epsilon"].reset_coords(drop=True).rename("spent")
    plain = measured.drop_vars("epsilon")
    accuracy = cells(plain["mean"], plain["standard error"], form=".1f")
    contents = {"epsilon": cells(spent, form=".2f")} | columns(accuracy, "num_models")
    return [rows(contents, ("noise_multiplier",))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: PrivateCurve) -> Figure:
    """Draws the accuracy against epsilon, with one line per number of models."""
    noisy = measured[["mean", "standard error"]].isel(
        noise_multiplier=np.isfinite(measured["epsilon"].values)
    )
    noisy = noisy.swap_dims(noise_multiplier="epsilon").drop_vars("noise_multiplier")
    noisy = noisy.rename(num_models="M")
    dims = ("panel", "M", "epsilon")
    mean, error = (
        noisy[name].expand_dims(panel=[""]).transpose(*dims) for name in ("mean", "standard error")
    )
    how: dict[str, Any] = {
        "xlabel": r"$\epsilon$ of the clients",
        "ylabel": "test accuracy in percent",
    }
    drawn = plots.panels(mean, error, **how, xscale="log")
    title = (
        f"{config.num_clients:,} clients, {config.num_rounds} rounds, clipped to {config.clip:g}"
    )
    caption = f"Means over models and {config.num_seeds} seeds with standard errors, where all M "
    caption += (
        rf"models of all rounds together have this $\epsilon$ at $\delta$ = {config.delta:g}."
    )
    return plots.draw([drawn], title=title, caption=caption)


ITEMS = (Item("private-curve", PrivateCurve(), run, measure, judge, table, figure),)
"""The cost of privacy."""
