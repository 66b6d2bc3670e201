"""Accuracy against the share of attackers, for rules of robust aggregation and attacks."""

from collections.abc import Iterator, Sequence
from functools import partial

import jax.numpy as jnp
import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignments.partitions import full_participation
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.data.synthetic import synthetic
from fedjax_mm.experiments.fields import Count, NonNegative, Positive, Seeded, Share
from fedjax_mm.local import local_sgd
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import finding, more
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.training import train
from fedjax_mm.robust.aggregation import robust
from fedjax_mm.robust.attacks import Attack, alie, attacking, gaussian, ipm, sign_flip
from fedjax_mm.robust.rules import (
    Rule,
    centered_clipping,
    geometric_median,
    mean,
    median,
    multi_krum,
    trimmed_mean,
)
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import LogisticRegression

MEAN = "mean"
RULES = (MEAN, "median", "trimmed mean", "multi-Krum", "geometric median", "centered clipping")
FLIP, FORGED = "sign flip", "inner product"
ATTACKS = (FLIP, "Gaussian", "a little is enough", FORGED)


class RobustCurve(Seeded):
    """Settings of logistic regression on synthetic data with 5 classes, where all clients train."""

    num_clients: Count = 25
    tolerated: Count = 6
    shares: tuple[Share, ...] = (0.0, 0.12, 0.24, 0.36)
    sign_factor: Positive = 5.0
    deviation: Positive = 5.0
    z: NonNegative = 1.5
    product_factor: Positive = 5.0
    radius: Positive = 1.0
    alpha: NonNegative = 0.0
    learning_rate: Positive = 0.1
    local_steps: Count = 5
    batch_size: Count = 10
    num_rounds: Count = 60
    num_seeds: Count = 20
    record_every: Count = 20

    def rule(self, name: str) -> Rule:
        """Returns a rule by its label."""
        f = self.tolerated
        rules = (mean(weighted=False), median(), trimmed_mean(f), multi_krum(f), geometric_median())
        return dict(zip(RULES, (*rules, centered_clipping(self.radius)), strict=True))[name]

    def attack(self, name: str) -> Attack:
        """Returns an attack by its label."""
        flip, forged = sign_flip(self.sign_factor), ipm(self.product_factor)
        attacks = flip, gaussian(self.deviation), alie(self.z), forged
        return dict(zip(ATTACKS, attacks, strict=True))[name]

    def build(self, rule: str, attack: str, share: float, data: FederatedData) -> Setup:
        """Sets up the simulation of one point of the grid."""
        local = local_sgd(self.learning_rate, steps=self.local_steps, batch_size=self.batch_size)
        # A JAX array, so that all shares are one program.
        clients = jnp.arange(self.num_clients) < round(share * self.num_clients)
        algorithm = attacking(robust(fedavg(local), self.rule(rule)), clients, self.attack(attack))
        task = classification(data, LogisticRegression(5))
        return Setup(task, algorithm, full_participation(self.num_clients))


def run(config: RobustCurve, execution: Execution | None = None) -> xr.Dataset:
    """Trains with every rule, under every attack, by every share of the clients."""
    spread, size = config.alpha, config.num_clients
    data = synthetic(size, alpha=spread, beta=spread, seed=config.seed, test_fraction=0.2)
    axes = {"attack": ATTACKS, "rule": RULES, "share": config.shares}
    length = config.model_dump(include={"num_rounds", "record_every"})
    return train([data], partial(config.build, data=data), axes, config, execution, **length)


def measure(result: xr.Dataset, config: RobustCurve) -> xr.Dataset:
    """Returns the test accuracy after the last round."""
    percent = 100 * result["test_accuracy"].isel(round=-1).mean("model")
    found = {"percent": percent, "mean": percent.mean("seed")}
    return xr.Dataset(found | {"standard error": estimate(percent).error})


def judge(measured: xr.Dataset, config: RobustCurve) -> Iterator[Check]:
    """Checks what rules cost without attackers, and what they save with tolerated ones."""
    percent, others = measured["percent"], [name for name in RULES if name != MEAN]
    plain = percent.sel(rule=MEAN, drop=True)
    most = max(share for share in config.shares if share * config.num_clients <= config.tolerated)
    for name in others:
        lead = (percent.sel(rule=name, drop=True) - plain).sel(attack=FLIP, drop=True)
        honest = lead.isel(share=0, drop=True)
        yield finding(f"without attackers, {name} loses less than 2 points", more(honest, -2.0))
        saved = (percent.sel(rule=name, drop=True) - plain).sel(share=most, drop=True)
        for attack in (FLIP, FORGED):
            text = f"with {most:.0%} of attackers ({attack}), {name} is better than the mean"
            yield finding(text, more(saved.sel(attack=attack, drop=True)))


def table(measured: xr.Dataset, config: RobustCurve) -> Sequence[Table]:
    """Returns one row per attack and share, and one column per rule."""
    accuracy = cells(measured["mean"], measured["standard error"], form=".1f")
    return [rows(columns(accuracy, "rule"), ("attack", "share"))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: RobustCurve) -> Figure:
    """Draws the accuracy against the share of attackers, with one panel per attack."""
    dims = ("attack", "rule", "share")
    drawn = plots.panels(
        measured["mean"].transpose(*dims),
        measured["standard error"].transpose(*dims),
        xlabel="share of attackers",
        ylabel="test accuracy in percent",
    )
    about = result.attrs["manifest"]
    title = f"{about['datasets'][0]}, {config.num_clients} clients, {config.num_rounds} rounds"
    caption = f"Means over {config.num_seeds} seeds with standard errors. Trimmed mean and "
    caption += f"multi-Krum tolerate {config.tolerated} attackers in every run."
    return plots.draw([drawn], title=title, caption=caption)


ITEMS = (Item("robust-curve", RobustCurve(), run, measure, judge, table, figure),)
"""The accuracy under attacks."""
