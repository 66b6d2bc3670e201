"""Accuracy against the cost of compression and of privacy, and against the share of attackers.

All three curves have logistic regression. Every way of training has its own best learning rate, and
in `private-curve` its own best clip, chosen on separate selection seeds. Every seed draws its own
data. In `private-curve` clients clip their updates, and the server adds noise to each model's sum.
A client trains one model per round, so all models together spend the epsilon of one, but each model
has fewer clients.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignments.partitions import full_participation, mfa_rand
from fedjax_mm.availability.laws import bernoulli
from fedjax_mm.availability.wrappers import available
from fedjax_mm.base import Algorithm, Assignment
from fedjax_mm.claims import more
from fedjax_mm.compression import Compressor, compressed, qsgd, random_k, sign, top_k
from fedjax_mm.data.federated import FederatedData, stack_data
from fedjax_mm.data.synthetic import synthetic
from fedjax_mm.experiments.fields import Count, Fraction, NonNegative, Positive, Share
from fedjax_mm.local import local_sgd
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.cho2022.clients import all_digits
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.multi_problems import deal
from fedjax_mm.papers.rulings import check, finding
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.selection import Selecting, best_point, check_inner, searched
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.training import described, staged, train
from fedjax_mm.papers.values import Several
from fedjax_mm.privacy.accounting import noise_for
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
BUCKETS, MIXED = "buckets, median", "mixing, trimmed mean"
RULES = (
    *(MEAN, "median", "trimmed mean", "multi-Krum", "geometric median", "centered clipping"),
    *(BUCKETS, MIXED),
)
FLIP, FORGED, WORST = "sign flip", "inner product", "worst for the rule"
ATTACKS = (FLIP, "Gaussian", "a little is enough", FORGED)

ALIKE: Literal["IID"] = "IID"
UNLIKE: Literal["non-IID"] = "non-IID"

_ACCURACY = "test accuracy in percent"
_DIGITS = "digits"
_SCALES = {_DIGITS: 1 / 255}


class Curve(Selecting):
    """Settings that all curves share."""

    num_clients: Count
    rates: Several[Positive]
    """The candidates for the learning rate."""
    local_steps: Count = 5
    batch_size: Count = 10
    num_rounds: Count
    record_every: Count = 20
    num_seeds: Count = 20

    @property
    def tuned(self) -> dict[str, Sequence[Any]]:
        """The candidates for settings that are chosen on the selection seeds."""
        return {"rate": self.rates}

    @property
    def axes(self) -> Mapping[str, Sequence[Any]]:
        """The axes of the judged runs."""
        raise NotImplementedError

    @property
    def selecting_axes(self) -> Mapping[str, Sequence[Any]]:
        """The axes of the runs that choose, each of which has its own best candidates."""
        return self.axes

    @property
    def data(self) -> dict[str, list[FederatedData]]:
        """The draws of each problem's data, one for each seed."""
        raise NotImplementedError

    def build(self, *args: Any, **at: Any) -> Setup:
        """Sets up one point, given its place on the axes, the task and the plain algorithm."""
        raise NotImplementedError

    def draws(self, *, alpha: float, iid: bool = False) -> list[FederatedData]:
        """Draws of synthetic data, one for each seed."""
        how: dict[str, Any] = {"alpha": alpha, "beta": alpha, "iid": iid, "test_fraction": 0.2}
        return [synthetic(self.num_clients, seed=seed, **how) for seed in self.data_seeds]

    def sweep(
        self,
        axes: Mapping[str, Sequence[Any]],
        execution: Execution,
        chosen: Mapping[str, xr.DataArray] | None = None,
    ) -> xr.Dataset:
        """Trains at all points of some axes, with the tuned settings, if given."""
        data = self.data

        def build(seed: int, **at: Any) -> Setup:
            for name, each in (chosen or {}).items():
                at[name] = each.sel({dim: at[dim] for dim in map(str, each.dims)}).item()
            problem = at.pop("problem", "")
            mine, scale = data[problem][seed - self.first_seed], _SCALES.get(problem)
            task = classification(mine, LogisticRegression(mine.num_classes), scale=scale)
            local = local_sgd(at.pop("rate"), steps=self.local_steps, batch_size=self.batch_size)
            return self.build(task=task, plain=fedavg(local), **at)

        return train([each[0] for each in data.values()], build, axes, self, execution)


class CompressionCurve(Curve):
    """Settings of two models whose clients compress their updates."""

    problems: Several[Literal["synthetic", "digits"]] = ("synthetic", "digits")
    num_clients: Count = 200
    num_digits_clients: Count = 50
    """The number of clients to which the digits are dealt."""
    num_models: Count = 2
    share: Share = 0.05
    levels: Count = 4
    alpha: Positive = 0.1
    digits_alpha: Positive = 0.5
    """The parameter of the Dirichlet law by which each digit is dealt to clients."""
    rates: Several[Positive] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
    num_rounds: Count = 150
    record_every: Count = 5

    @property
    def axes(self) -> Mapping[str, Sequence[Any]]:
        """The problems, and the ways of sending updates."""
        return {"problem": self.problems, "message": LABELS}

    @property
    def data(self) -> dict[str, list[FederatedData]]:
        """The draws of each problem's data, one for each seed."""
        make = {
            "synthetic": lambda: stack_data(self.draws(alpha=self.alpha)),
            _DIGITS: lambda: deal(
                all_digits(), self.num_digits_clients, self.digits_alpha, self.data_seeds
            ),
        }
        stacks = {name: make[name]() for name in self.problems}
        return {
            name: list(map(each.select, range(self.num_seeds))) for name, each in stacks.items()
        }

    def rules(self) -> dict[str, tuple[Compressor, bool]]:
        """The compressors by label, and whether they use error feedback."""
        return {
            TOP: (top_k(self.share), True),
            TOP_ALONE: (top_k(self.share), False),
            RANDOM: (random_k(self.share), False),
            ROUNDED: (qsgd(self.levels), False),
            SIGNS: (sign(), True),
        }

    def build(self, *, message: str, task: Supervised, plain: Algorithm) -> Setup:
        """Sets up one way of sending updates."""
        algorithm = plain
        if message != PLAIN:
            rule, feedback = self.rules()[message]
            algorithm = compressed(plain, rule, error_feedback=feedback)
        assignment = mfa_rand(task.num_clients, self.num_models)
        return Setup([task] * self.num_models, algorithm, assignment)


class PrivateCurve(Curve):
    """Settings of private clients."""

    num_clients: Count = 250
    num_models: Several[Count] = (1, 4)
    sampling: Several[Fraction | Literal[1]] = (1, 0.1)
    """The probabilities with which a client takes part in a round."""
    epsilons: Several[Positive] = (10.0, 1.0)
    delta: Fraction = 1e-5
    rates: Several[Positive] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
    clips: Several[Positive] = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
    """The candidates for the clip."""
    num_rounds: Count = 40
    record_every: Count = 40
    selection_seeds: Count = 2

    @property
    def tuned(self) -> dict[str, Sequence[Any]]:
        """The candidates for the learning rate and the clip."""
        return {"rate": self.rates, "clip": self.clips}

    @property
    def axes(self) -> Mapping[str, Sequence[Any]]:
        """The numbers of models, the sampling, and epsilon as text, "inf" without noise."""
        epsilons = [f"{epsilon:g}" for epsilon in (math.inf, *self.epsilons)]
        return {"num_models": self.num_models, "sampling": self.sampling, "epsilon": epsilons}

    @property
    def data(self) -> dict[str, list[FederatedData]]:
        """One problem with IID data."""
        stack = stack_data(self.draws(alpha=0.0, iid=True))
        return {"": list(map(stack.select, range(self.num_seeds)))}

    def build(
        self,
        *,
        num_models: int,
        sampling: float,
        epsilon: str,
        clip: float,
        task: Supervised,
        plain: Algorithm,
    ) -> Setup:
        """Sets up some models at one epsilon."""
        algorithm = private(
            plain,
            clip=clip,
            noise_multiplier=self.noise_multiplier(sampling, float(epsilon)),
            clients_per_round=self.num_clients * sampling / num_models,
        )
        return Setup([task] * num_models, algorithm, self.assignment(num_models, sampling))

    def assignment(self, num_models: int, sampling: float) -> Assignment:
        """MFA-Rand, where every client takes part in a round with a probability."""
        everybody = mfa_rand(self.num_clients, num_models)
        return everybody if sampling == 1 else available(everybody, bernoulli(sampling))

    def noise_multiplier(self, sampling: float, epsilon: float) -> float:
        """The noise multiplier of an epsilon, for any number of models."""
        return 0.0 if math.isinf(epsilon) else _noise(self, sampling, epsilon)


class RobustCurve(Curve):
    """Settings of robust rules under attacks, where all clients train."""

    problems: Several[Literal["IID", "non-IID"]] = (ALIKE, UNLIKE)
    num_clients: Count = 25
    tolerated: Count = 6
    shares: Several[Share] = (0.0, 0.12, 0.24)
    sign_factor: Positive = 5.0
    deviation: Positive = 5.0
    z: NonNegative = 1.5
    product_factor: Positive = 5.0
    strengths: Several[Positive] = (0.3, 1.0, 3.0)
    """The factors by which the strengths of all attacks are multiplied."""
    radius: Positive = 1.0
    bucket_size: Count = 2
    alpha: NonNegative = 0.0
    rates: Several[Positive] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
    num_rounds: Count = 60

    @property
    def axes(self) -> Mapping[str, Sequence[Any]]:
        """The data, the rules, the attacks, their strengths, and the shares of attackers."""
        attacks = {"attack": ATTACKS, "strength": self.strengths, "share": self.shares}
        return {"problem": self.problems, "rule": RULES, **attacks}

    @property
    def selecting_axes(self) -> Mapping[str, Sequence[Any]]:
        """The data and the rules, without attackers, whom the server does not know."""
        return {**self.axes, "attack": [FLIP], "strength": [1.0], "share": [0.0]}

    @property
    def data(self) -> dict[str, list[FederatedData]]:
        """IID and non-IID data with one draw for each seed, in one store, for one program."""
        how: dict[str, dict[str, Any]] = {ALIKE: {"iid": True}, UNLIKE: {}}
        each = [
            data for name in self.problems for data in self.draws(alpha=self.alpha, **how[name])
        ]
        stack, size = stack_data(each), self.num_seeds
        return {
            name: [
                dataclasses.replace(stack.select(number), name=each[number].name)
                for number in range(place * size, (place + 1) * size)
            ]
            for place, name in enumerate(self.problems)
        }

    def rule(self, name: str) -> rules.Rule:
        """A rule by its label."""
        f, median = self.tolerated, rules.median()
        found = (
            *(rules.mean(weighted=False), median, rules.trimmed_mean(f), rules.multi_krum(f)),
            *(rules.geometric_median(), rules.centered_clipping(self.radius)),
            rules.bucketing(median, self.bucket_size),
            rules.nearest_neighbor_mixing(rules.trimmed_mean(f), f),
        )
        return dict(zip(RULES, found, strict=True))[name]

    def attack(self, name: str, strength: Any) -> attacks.Attack:
        """An attack by its label."""
        found = (
            attacks.sign_flip(strength * self.sign_factor),
            attacks.gaussian(strength * self.deviation),
            attacks.alie(strength * self.z),
            attacks.ipm(strength * self.product_factor),
        )
        return dict(zip(ATTACKS, found, strict=True))[name]

    def build(
        self,
        *,
        rule: str,
        attack: str,
        strength: float,
        share: float,
        task: Supervised,
        plain: Algorithm,
    ) -> Setup:
        """Sets up one rule under one attack by a share of the clients."""
        # A JAX array, so that all shares are one program.
        clients = jnp.arange(self.num_clients) < round(share * self.num_clients)
        robust = aggregation.robust(plain, self.rule(rule))
        algorithm = attacks.attacking(robust, clients, self.attack(attack, strength))
        return Setup(task, algorithm, full_participation(self.num_clients))


@cache
def _noise(config: PrivateCurve, sampling: float, epsilon: float) -> float:
    assignment = config.assignment(config.num_models[0], sampling)
    how: dict[str, Any] = {"num_rounds": config.num_rounds, "delta": config.delta}
    return noise_for(assignment, epsilon=epsilon, **how)


def run(config: Any, execution: Execution | None = None) -> xr.Dataset:
    """Trains at all points of a curve's axes, at the best of the tuned numbers.

    `selection_accuracy` holds the accuracies that chose them, over all candidates.
    """
    how = execution or Execution()

    def search(curve: Any, saving: Execution) -> xr.Dataset:
        return curve.sweep({**curve.selecting_axes, **curve.tuned}, saving)

    found = searched(config.selecting, how, search)
    axes = config.axes
    alone = [name for name, few in config.selecting_axes.items() if list(few) != list(axes[name])]
    accuracy = _percent(found).isel(round=-1, drop=True).squeeze(alone, drop=True)
    best = accuracy.isel(best_point(accuracy, tuple(config.tuned)))
    chosen = {name: best[name].drop_vars(list(config.tuned)) for name in config.tuned}

    def judge(curve: Any, saving: Execution) -> xr.Dataset:
        return curve.sweep(curve.axes, saving, chosen)

    judged = staged("judged", config, how, judge)
    added = {f"chosen_{name}": each for name, each in chosen.items()}
    added["selection_accuracy"] = accuracy.rename(seed="selection_seed")
    return described(judged.assign(added), [judged, found])


def _percent(result: xr.Dataset) -> xr.DataArray:
    """Test accuracies in percent, averaged over the models."""
    return 100 * result["test_accuracy"].mean("model")


def measure(percent: xr.DataArray, result: xr.Dataset) -> xr.Dataset:
    """Averages accuracies over the seeds, and adds the chosen settings."""
    found = {"percent": percent, "mean": percent.mean("seed", skipna=False)}
    found |= {"standard error": estimate(percent).error}
    return xr.Dataset(found | {name: result[name] for name in result if "chosen_" in str(name)})


def measure_bits(result: xr.Dataset, config: CompressionCurve) -> xr.Dataset:
    """Averages test accuracies and bits over the rounds."""
    up, down = (
        result[name].mean("model").isel(seed=0, drop=True)
        for name in ("bits_up", "parameters_down")
    )
    sent = {"megabits": up / 1e6, "megabits down": 32 * down / 1e6}
    return measure(_percent(result), result).assign(sent)


def measure_epsilon(result: xr.Dataset, config: PrivateCurve) -> xr.Dataset:
    """Adds noise multipliers to the test accuracies after the last round."""
    found = measure(_percent(result).isel(round=-1), result)
    epsilons = list(map(float, found["epsilon"].values))
    noise = [[config.noise_multiplier(q, e) for e in epsilons] for q in config.sampling]
    found = found.assign(noise=(("sampling", "epsilon"), noise))
    return found.assign_coords(epsilon=epsilons)


def measure_attacks(result: xr.Dataset, config: RobustCurve) -> xr.Dataset:
    """Adds the accuracies under the worst attack to those after the last round.

    The worst attack on a rule, with its strength, is for each seed the one with the lowest mean
    accuracy over the other seeds, so that no seed chooses the attack by which it is judged.
    """
    percent = _percent(result).isel(round=-1)
    each = percent.stack(way=("attack", "strength"))
    others = each.sum("seed") - each
    worst = each.isel(way=others.fillna(np.inf).argmin("way")).drop_vars(("way", *ATTACKED))
    found = measure(percent, result)
    return found.assign({f"worst {name}": x for name, x in measure(worst, result[[]]).items()})


ATTACKED = ("attack", "strength")


def judge_compression(measured: xr.Dataset, config: CompressionCurve) -> Iterator[Check]:
    """Checks that error feedback helps, and what fewer bits cost."""
    last = measured["percent"].isel(round=-1, drop=True)
    bits = measured["megabits"].isel(round=-1, drop=True)
    for problem in config.problems:
        at = {name: last.sel(problem=problem, message=name, drop=True) for name in LABELS}
        text = f"{problem}: top-k is better with error feedback"
        yield finding(text, more(at[TOP] - at[TOP_ALONE]))
        for name in LABELS[1:]:
            text = f"{problem}: {name} loses less than 2 points"
            yield finding(text, more(at[name] - at[PLAIN], by=-2.0))
    first = bits.isel(problem=0)
    ratio = float(first.sel(message=PLAIN) / first.sel(message=TOP))
    yield check("top-k sends less than a tenth of the bits", ratio > 10, f"a {ratio:.0f}th")
    yield check_inner(measured["chosen_rate"], config.rates)


def judge_privacy(measured: xr.Dataset, config: PrivateCurve) -> Iterator[Check]:
    """Checks the cost of privacy, with one and with more models, and with sampling."""
    least = min(config.epsilons)
    percent = measured["percent"].assign_coords(num_models=list(map(str, config.num_models)))
    fall = percent.sel(epsilon=math.inf, drop=True) - percent.sel(epsilon=least, drop=True)
    one, most = fall.isel(num_models=0, drop=True), fall.isel(num_models=-1, drop=True)
    label = f"epsilon = {least:g}"
    for q in config.sampling:
        how = "if all clients take part" if q == 1 else f"if {q:.0%} of the clients take part"
        text = f"{how}, {label} costs accuracy with {config.num_models[-1]} models"
        yield finding(text, more(most.sel(sampling=q, drop=True)))
        if len(config.num_models) > 1:
            text = f"{how}, {label} costs more with {config.num_models[-1]} models than with one"
            yield finding(text, more((most - one).sel(sampling=q, drop=True)))
    if len(config.sampling) > 1:
        lead = percent.sel(epsilon=least, drop=True).isel(num_models=-1, drop=True)
        lead = lead.isel(sampling=-1, drop=True) - lead.isel(sampling=0, drop=True)
        text = f"at {label}, {config.num_models[-1]} models are better with sampling"
        yield finding(text, more(lead))
    yield check_inner(measured["chosen_rate"], config.rates)
    # Without noise the largest clip may be best, which hardly clips.
    noisy = measured["chosen_clip"].sel(epsilon=list(config.epsilons))
    yield check_inner(noisy, config.clips, of="clip")


def judge_rules(measured: xr.Dataset, config: RobustCurve) -> Iterator[Check]:
    """Checks the cost of rules without attackers, and their benefit under the worst attack."""
    most = max(config.shares)
    honest = measured["percent"].isel(attack=0, strength=0, drop=True).sel(share=0.0, drop=True)
    worst = measured["worst percent"].sel(share=most, drop=True)
    for problem in config.problems:
        free, under = (
            {name: each.sel(problem=problem, rule=name, drop=True) for name in RULES}
            for each in (honest, worst)
        )
        for name in (name for name in RULES if name != MEAN):
            text = f"{problem}, without attackers: {name} loses less than 2 points"
            yield finding(text, more(free[name] - free[MEAN], by=-2.0))
            text = f"{problem}, {most:.0%} of attackers, {WORST}: {name} is better than the mean"
            yield finding(text, more(under[name] - under[MEAN]))
        for name, inner in ((BUCKETS, "median"), (MIXED, "trimmed mean")):
            text = f"{problem}, without attackers: {name} is better than {inner} alone"
            yield finding(text, more(free[name] - free[inner]))
            text = f"{problem}, {most:.0%} of attackers, {WORST}: {name} is better than {inner}"
            yield finding(text, more(under[name] - under[inner]))
    yield check_inner(measured["chosen_rate"], config.rates)


def table_of_bits(measured: xr.Dataset, config: CompressionCurve) -> Sequence[Table]:
    """One row per problem and way of sending updates."""
    last = measured.isel(round=-1)
    contents = {"accuracy": _cells(last), "rate": cells(last["chosen_rate"], form="g")}
    contents |= {"megabits up": cells(last["megabits"], form=",.1f")}
    contents |= {"megabits down": cells(last["megabits down"], form=",.1f")}
    return [rows(contents, ("problem", "message"))]


def table_of_epsilon(measured: xr.Dataset, config: PrivateCurve) -> Sequence[Table]:
    """One row per sampling and epsilon, and one column per number of models."""
    over = ("sampling", "epsilon")
    accuracy = columns(_cells(measured), "num_models")
    chosen = cells(measured["chosen_rate"], form="g") + ", "
    chosen = chosen + cells(measured["chosen_clip"], form="g")
    title = "The chosen learning rate and clip"
    return [
        rows({"noise multiplier": cells(measured["noise"], form=".2f")} | accuracy, over),
        rows(columns(chosen, "num_models"), over, title),
    ]


def table_of_rules(measured: xr.Dataset, config: RobustCurve) -> Sequence[Table]:
    """One row per data and share of attackers, and one column per rule."""
    worst = cells(measured["worst mean"], measured["worst standard error"], form=".1f")
    most = measured.sel(share=max(config.shares), drop=True)
    title = f"By attack and strength, with {max(config.shares):.0%} of attackers"
    chosen = columns(cells(measured["chosen_rate"], form="g"), "rule")
    return [
        rows(columns(worst, "rule"), ("problem", "share"), "Under the attack that is " + WORST),
        rows(columns(_cells(most), "rule"), ("problem", "attack", "strength"), title),
        rows(chosen, ("problem",), "The chosen learning rates"),
    ]


def _cells(measured: xr.Dataset) -> xr.DataArray:
    return cells(measured["mean"], measured["standard error"], form=".1f")


def figure_of_bits(result: xr.Dataset, measured: xr.Dataset, config: CompressionCurve) -> Figure:
    """Draws accuracies against the bits sent so far, with one line per way of sending them."""
    after = measured.isel(round=slice(1, None))  # zero bits cannot be shown on a log axis
    names, panels = ("megabits", "mean", "standard error"), []
    for problem in config.problems:
        drawn = []
        for number, label in enumerate(LABELS):
            at = {"problem": problem, "message": label}
            x, y, errors = (after[name].sel(at).values for name in names)
            drawn.append(plots.Line(label, x, y, errors, color=number))
        xlabel = "megabits sent by a model's clients"
        panels.append(plots.Panel(problem, xlabel, _ACCURACY, drawn, xscale="log"))
    return plots.draw(
        [panels],
        title=f"{config.num_models} models on one pool of clients",
        caption=f"Means and standard errors over models and {config.num_seeds} seeds in "
        f"{config.num_rounds} rounds, where k is {config.share:.0%} of the numbers, and QSGD has "
        f"{config.levels} levels. Each has its best of {len(config.rates)} learning rates.",
    )


def figure_of_epsilon(result: xr.Dataset, measured: xr.Dataset, config: PrivateCurve) -> Figure:
    """Draws the accuracy against epsilon, with one panel per number of models."""
    noisy = measured.isel(epsilon=np.isfinite(measured["epsilon"].values))
    noisy = noisy.rename(num_models="M")
    how: Any = {"xlabel": r"$\epsilon$ of the clients", "ylabel": _ACCURACY, "xscale": "log"}
    drawn = [noisy[name].transpose("M", "sampling", "epsilon") for name in _DRAWN]
    return plots.draw(
        [plots.panels(*drawn, **how)],
        title=f"{config.num_clients:,} clients, {config.num_rounds} rounds",
        caption=f"Means over models and {config.num_seeds} seeds with standard errors, where all M "
        rf"models of all rounds together have this $\epsilon$ at $\delta$ = {config.delta:g}. "
        "Learning rate and clip are the best of a grid at every point.",
    )


def figure_of_rules(result: xr.Dataset, measured: xr.Dataset, config: RobustCurve) -> Figure:
    """Draws the accuracy under the worst attack against the share of attackers."""
    drawn = [measured[f"worst {name}"].transpose("problem", "rule", "share") for name in _DRAWN]
    return plots.draw(
        [plots.panels(*drawn, xlabel="share of attackers", ylabel=_ACCURACY)],
        title=f"{config.num_clients} clients, {config.num_rounds} rounds, attacked",
        caption=f"Means over {config.num_seeds} seeds with standard errors, under the attack and "
        "strength that are worst for the rule. Rules that need the number of attackers tolerate "
        f"{config.tolerated} in every run.",
    )


_DRAWN = ("mean", "standard error")
_BITS = measure_bits, judge_compression, table_of_bits, figure_of_bits
_EPSILON = measure_epsilon, judge_privacy, table_of_epsilon, figure_of_epsilon
_ROBUST = measure_attacks, judge_rules, table_of_rules, figure_of_rules

ITEMS = (
    Item("compression-curve", CompressionCurve(), run, *_BITS),
    Item("private-curve", PrivateCurve(), run, *_EPSILON),
    Item("robust-curve", RobustCurve(), run, *_ROBUST),
)
"""The savings of compression, the cost of privacy, and the accuracy under attacks."""
