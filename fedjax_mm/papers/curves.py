"""Accuracy against the cost of compression and of privacy, and against the share of attackers.

All three curves have logistic regression on synthetic data with 5 classes. In `private-curve`,
clients clip their updates, and the server adds noise to each model's sum. A client trains one model
per round, so all models together spend the epsilon of one, but each model has fewer clients.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignments.partitions import full_participation, mfa_rand
from fedjax_mm.base import Algorithm
from fedjax_mm.claims import more
from fedjax_mm.compression import Compressor, compressed, qsgd, random_k, sign, top_k
from fedjax_mm.data.synthetic import synthetic
from fedjax_mm.experiments.fields import (
    Count,
    Flag,
    Fraction,
    NonNegative,
    Positive,
    Seeded,
    Share,
)
from fedjax_mm.local import local_sgd
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import check, finding
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.training import train
from fedjax_mm.privacy.accounting import epsilon
from fedjax_mm.privacy.mechanism import private
from fedjax_mm.robust import aggregation, attacks, rules
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import LogisticRegression
from fedjax_mm.tasks.supervised import Supervised

PLAIN, TOP, TOP_ALONE = "all numbers", "top-k", "top-k without feedback"
RANDOM, ROUNDED, SIGNS = "random-k, unbiased", "QSGD, unbiased", "signs"
LABELS = (PLAIN, TOP, TOP_ALONE, RANDOM, ROUNDED, SIGNS)
"""The ways in which clients send their updates."""

MEAN = "mean"
RULES = (MEAN, "median", "trimmed mean", "multi-Krum", "geometric median", "centered clipping")
FLIP, FORGED = "sign flip", "inner product"
ATTACKS = (FLIP, "Gaussian", "a little is enough", FORGED)

_ACCURACY = "test accuracy in percent"


class Curve(Seeded):
    """Settings that all curves share."""

    num_clients: Count
    learning_rate: Positive = 0.1
    local_steps: Count = 5
    batch_size: Count = 10
    num_rounds: Count
    record_every: Count = 20

    @property
    def axes(self) -> Mapping[str, Sequence[Any]]:
        """The axes of the sweep, which are arguments of `build`."""
        raise NotImplementedError


class CompressionCurve(Curve):
    """Settings of two models whose clients compress their updates."""

    num_clients: Count = 200
    num_models: Count = 2
    share: Share = 0.05
    levels: Count = 4
    alpha: Positive = 0.1
    num_rounds: Count = 150
    num_seeds: Count = 5
    record_every: Count = 5

    @property
    def axes(self) -> Mapping[str, Sequence[Any]]:
        """The ways of sending updates."""
        return {"message": LABELS}

    def rules(self) -> dict[str, tuple[Compressor, bool]]:
        """The compressors by label, and whether they use error feedback."""
        return {
            TOP: (top_k(self.share), True),
            TOP_ALONE: (top_k(self.share), False),
            RANDOM: (random_k(self.share), False),
            ROUNDED: (qsgd(self.levels), False),
            SIGNS: (sign(), True),
        }

    def build(self, message: str, task: Supervised, plain: Algorithm) -> Setup:
        """Sets up one way of sending updates."""
        algorithm = plain
        if message != PLAIN:
            rule, feedback = self.rules()[message]
            algorithm = compressed(plain, rule, error_feedback=feedback)
        assignment = mfa_rand(self.num_clients, self.num_models)
        return Setup([task] * self.num_models, algorithm, assignment)


class PrivateCurve(Curve):
    """Settings of private clients."""

    num_clients: Count = 1000
    num_models: tuple[Count, ...] = (1, 4, 16)
    noise_multipliers: tuple[NonNegative, ...] = (0.0, 1.0, 3.0, 10.0, 30.0)
    clip: Positive = 1.0
    delta: Fraction = 1e-5
    iid: Flag = True
    learning_rate: Positive = 0.3
    num_rounds: Count = 40
    num_seeds: Count = 4

    @property
    def axes(self) -> Mapping[str, Sequence[Any]]:
        """The numbers of models and the noise multipliers."""
        return {"num_models": self.num_models, "noise_multiplier": self.noise_multipliers}

    def build(
        self, num_models: int, noise_multiplier: float, task: Supervised, plain: Algorithm
    ) -> Setup:
        """Sets up some models at one noise multiplier."""
        algorithm = private(
            plain,
            clip=self.clip,
            noise_multiplier=noise_multiplier,
            clients_per_round=self.num_clients / num_models,
        )
        return Setup([task] * num_models, algorithm, mfa_rand(self.num_clients, num_models))

    def epsilons(self) -> list[float]:
        """The epsilon of each noise multiplier, for any number of models."""
        assignment = mfa_rand(self.num_clients, self.num_models[0])
        how: dict[str, Any] = {"num_rounds": self.num_rounds, "delta": self.delta}
        return [
            epsilon(assignment, noise_multiplier=z, **how) if z else math.inf
            for z in self.noise_multipliers
        ]


class RobustCurve(Curve):
    """Settings of robust rules under attacks, where all clients train."""

    num_clients: Count = 25
    tolerated: Count = 6
    shares: tuple[Share, ...] = (0.0, 0.12, 0.24, 0.36)
    sign_factor: Positive = 5.0
    deviation: Positive = 5.0
    z: NonNegative = 1.5
    product_factor: Positive = 5.0
    radius: Positive = 1.0
    alpha: NonNegative = 0.0
    num_rounds: Count = 60
    num_seeds: Count = 20

    @property
    def axes(self) -> Mapping[str, Sequence[Any]]:
        """The attacks, the rules and the shares of attackers."""
        return {"attack": ATTACKS, "rule": RULES, "share": self.shares}

    def rule(self, name: str) -> rules.Rule:
        """A rule by its label."""
        f = self.tolerated
        found = (
            *(rules.mean(weighted=False), rules.median(), rules.trimmed_mean(f)),
            *(rules.multi_krum(f), rules.geometric_median(), rules.centered_clipping(self.radius)),
        )
        return dict(zip(RULES, found, strict=True))[name]

    def attack(self, name: str) -> attacks.Attack:
        """An attack by its label."""
        found = (
            *(attacks.sign_flip(self.sign_factor), attacks.gaussian(self.deviation)),
            *(attacks.alie(self.z), attacks.ipm(self.product_factor)),
        )
        return dict(zip(ATTACKS, found, strict=True))[name]

    def build(
        self, rule: str, attack: str, share: float, task: Supervised, plain: Algorithm
    ) -> Setup:
        """Sets up one rule under one attack by a share of the clients."""
        # A JAX array, so that all shares are one program.
        clients = jnp.arange(self.num_clients) < round(share * self.num_clients)
        robust = aggregation.robust(plain, self.rule(rule))
        algorithm = attacks.attacking(robust, clients, self.attack(attack))
        return Setup(task, algorithm, full_participation(self.num_clients))


def run(config: Any, execution: Execution | None = None) -> xr.Dataset:
    """Trains at all points of a curve's axes."""
    spread, how = dict(config).get("alpha", 0.0), config.model_dump(include={"num_clients", "iid"})
    data = synthetic(alpha=spread, beta=spread, seed=config.seed, test_fraction=0.2, **how)
    local = local_sgd(config.learning_rate, steps=config.local_steps, batch_size=config.batch_size)
    task, plain = classification(data, LogisticRegression(5)), fedavg(local)
    build = partial(config.build, task=task, plain=plain)
    return train([data], build, config.axes, config, execution)


def measure(accuracy: xr.DataArray) -> xr.Dataset:
    """Averages accuracies over the models and the seeds, in percent."""
    percent = 100 * accuracy.mean("model")
    found = {"percent": percent, "mean": percent.mean("seed")}
    return xr.Dataset(found | {"standard error": estimate(percent).error})


def measure_last(result: xr.Dataset, config: Curve) -> xr.Dataset:
    """Averages test accuracies after the last round."""
    return measure(result["test_accuracy"].isel(round=-1))


def measure_bits(result: xr.Dataset, config: CompressionCurve) -> xr.Dataset:
    """Averages test accuracies and bits over the rounds."""
    bits = result["bits_up"].mean("model").isel(seed=0, drop=True)
    return measure(result["test_accuracy"]).assign(megabits=bits / 1e6)


def measure_epsilon(result: xr.Dataset, config: PrivateCurve) -> xr.Dataset:
    """Adds epsilon to the test accuracies after the last round."""
    found = measure_last(result, config)
    return found.assign_coords(epsilon=("noise_multiplier", config.epsilons()))


def judge_compression(measured: xr.Dataset, config: CompressionCurve) -> Iterator[Check]:
    """Checks that error feedback helps, and that a tenth of the bits gives a similar accuracy."""
    last = measured["percent"].isel(round=-1)
    plain, top, alone = (last.sel(message=name, drop=True) for name in (PLAIN, TOP, TOP_ALONE))
    yield finding("top-k is better with error feedback", more(top - alone))
    yield finding("top-k with error feedback loses less than 2 points", more(top - plain, by=-2.0))
    bits = measured["megabits"].isel(round=-1)
    ratio = float(bits.sel(message=PLAIN) / bits.sel(message=TOP))
    yield check("top-k sends less than a tenth of the bits", ratio > 10, f"a {ratio:.0f}th")


def judge_privacy(measured: xr.Dataset, config: PrivateCurve) -> Iterator[Check]:
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


def judge_rules(measured: xr.Dataset, config: RobustCurve) -> Iterator[Check]:
    """Checks the cost of rules without attackers, and their benefit with tolerated ones."""
    percent = measured["percent"]
    plain = percent.sel(rule=MEAN, drop=True)
    most = max(share for share in config.shares if share * config.num_clients <= config.tolerated)
    for name in (name for name in RULES if name != MEAN):
        lead = percent.sel(rule=name, drop=True) - plain
        honest = lead.sel(attack=FLIP, drop=True).isel(share=0, drop=True)
        yield finding(f"without attackers, {name} loses less than 2 points", more(honest, by=-2.0))
        for attack in (FLIP, FORGED):
            text = f"with {most:.0%} of attackers ({attack}), {name} is better than the mean"
            yield finding(text, more(lead.sel(share=most, attack=attack, drop=True)))


def table_of_bits(measured: xr.Dataset, config: CompressionCurve) -> Sequence[Table]:
    """One row per way of sending updates."""
    last = measured.isel(round=-1)
    contents = {"accuracy": _cells(last), "megabits": cells(last["megabits"], form=",.1f")}
    return [rows(contents, ("message",))]


def table_of_epsilon(measured: xr.Dataset, config: PrivateCurve) -> Sequence[Table]:
    """One row per noise multiplier and one column per number of models."""
    spent = measured["epsilon"].reset_coords(drop=True).rename("spent")
    accuracy = columns(_cells(measured.drop_vars("epsilon")), "num_models")
    return [rows({"epsilon": cells(spent, form=".2f")} | accuracy, ("noise_multiplier",))]


def table_of_rules(measured: xr.Dataset, config: RobustCurve) -> Sequence[Table]:
    """One row per attack and share, and one column per rule."""
    return [rows(columns(_cells(measured), "rule"), ("attack", "share"))]


def _cells(measured: xr.Dataset) -> xr.DataArray:
    return cells(measured["mean"], measured["standard error"], form=".1f")


def _curves(measured: xr.Dataset, *dims: str) -> list[xr.DataArray]:
    """Means and standard errors over the dimensions of panels, lines and x."""
    return [measured[name].transpose(*dims) for name in ("mean", "standard error")]


def figure_of_bits(result: xr.Dataset, measured: xr.Dataset, config: CompressionCurve) -> Figure:
    """Draws the accuracy against the bits sent so far, with one line per way of sending them."""
    after = measured.isel(round=slice(1, None))  # zero bits cannot be shown on a log axis
    names, drawn = ("megabits", "mean", "standard error"), []
    for number, label in enumerate(LABELS):
        x, y, errors = (after[name].sel(message=label).values for name in names)
        drawn.append(plots.Line(label, x, y, errors, color=number))
    panel = plots.Panel("", "megabits sent by a model's clients", _ACCURACY, drawn, xscale="log")
    about = result.attrs["manifest"]
    return plots.draw(
        [[panel]],
        title=f"{about['datasets'][0]}, {config.num_clients} clients, {config.num_models} models",
        caption=f"Means and standard errors over models and {config.num_seeds} seeds in "
        f"{config.num_rounds} rounds, where k is {config.share:.0%} of the numbers, and QSGD has "
        f"{config.levels} levels.",
    )


def figure_of_epsilon(result: xr.Dataset, measured: xr.Dataset, config: PrivateCurve) -> Figure:
    """Draws the accuracy against epsilon, with one line per number of models."""
    noisy = measured.isel(noise_multiplier=np.isfinite(measured["epsilon"].values))
    noisy = noisy.swap_dims(noise_multiplier="epsilon").drop_vars("noise_multiplier")
    noisy = noisy.rename(num_models="M").expand_dims(panel=[""])
    how: Any = {"xlabel": r"$\epsilon$ of the clients", "ylabel": _ACCURACY, "xscale": "log"}
    return plots.draw(
        [plots.panels(*_curves(noisy, "panel", "M", "epsilon"), **how)],
        title=f"{config.num_clients:,} clients, {config.num_rounds} rounds, clipped to "
        f"{config.clip:g}",
        caption=f"Means over models and {config.num_seeds} seeds with standard errors, where all M "
        rf"models of all rounds together have this $\epsilon$ at $\delta$ = {config.delta:g}.",
    )


def figure_of_rules(result: xr.Dataset, measured: xr.Dataset, config: RobustCurve) -> Figure:
    """Draws the accuracy against the share of attackers, with one panel per attack."""
    drawn = _curves(measured, "attack", "rule", "share")
    about = result.attrs["manifest"]
    return plots.draw(
        [plots.panels(*drawn, xlabel="share of attackers", ylabel=_ACCURACY)],
        title=f"{about['datasets'][0]}, {config.num_clients} clients, {config.num_rounds} rounds",
        caption=f"Means over {config.num_seeds} seeds with standard errors. Trimmed mean and "
        f"multi-Krum tolerate {config.tolerated} attackers in every run.",
    )


_BITS = measure_bits, judge_compression, table_of_bits, figure_of_bits
_EPSILON = measure_epsilon, judge_privacy, table_of_epsilon, figure_of_epsilon
_ROBUST = measure_last, judge_rules, table_of_rules, figure_of_rules

ITEMS = (
    Item("compression-curve", CompressionCurve(), run, *_BITS),
    Item("private-curve", PrivateCurve(), run, *_EPSILON),
    Item("robust-curve", RobustCurve(), run, *_ROBUST),
)
"""The savings of compression, the cost of privacy, and the accuracy under attacks."""
