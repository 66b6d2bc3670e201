"""Job completion times: the rounds in which several models reach their targets, by scheduler.

All methods train with FedAvg on the same pool. Every method has its own learning rate for each mix
of models, chosen on separate selection seeds. K clients train in a round, with these exceptions:
LVR has K local trainings in expectation, the bandit trains all clients in each of the first M
rounds, and the schedulers give a model its demand or less. FedAST has K jobs in progress, and its
round is K arrivals. A model that has met its target gets no more clients. In "MFA-Rand, clients
kept" the clients of finished models stay idle, as if each model had its own share of the pool.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignments.bandits import bandit
from fedjax_mm.assignments.fairness import fedfair
from fedjax_mm.assignments.partitions import mfa_rand, mfa_rr, sequential
from fedjax_mm.assignments.scheduling import scheduled
from fedjax_mm.assignments.variance_reduced import variance_reduced
from fedjax_mm.asynchrony.clock import on_clock
from fedjax_mm.asynchrony.delays import shifted_exponential
from fedjax_mm.asynchrony.dispatch import Dispatch, fedast
from fedjax_mm.availability.jobs import arriving, finishing
from fedjax_mm.base import Algorithm, Assignment
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.fields import Count, Fraction, Positive
from fedjax_mm.local import local_sgd
from fedjax_mm.metrics import completion, estimate
from fedjax_mm.papers.cho2022.clients import all_digits
from fedjax_mm.papers.figures import dots
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.multi_maxfl import ask
from fedjax_mm.papers.multi_problems import deal
from fedjax_mm.papers.rulings import compare
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.selection import (
    Selecting,
    best_point,
    check_inner,
    searched,
    unless_at_edge,
)
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.training import described, staged, stages, train
from fedjax_mm.papers.values import Several
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import MLP
from fedjax_mm.tasks.supervised import Supervised

MixName = Literal["equal", "unequal", "straggler", "scarce"]
Arrivals = Literal["at once", "over time"]

_BASE, _ASYNC = "MFA-Rand", "FedAST"
_KEPT = "MFA-Rand, clients kept"
_METRIC = "test_accuracy"
CLOCKS = {"round": "rounds", "time": "simulated time"}
"""The clocks by which completion times are measured."""

_SAVED = (_METRIC, "time", "client_updates", "finished_at", "arrived_at", "active")


class Way(NamedTuple):
    """A method.

    Attributes:
      assign: makes the assignment or the dispatch from N, M, K, each model's demand and the
        eligible clients.
      algorithm: FedAvg as the method needs it.
      is_redealt: whether finished models leave their clients to the others.
      is_strict: whether the method trains only eligible clients.
    """

    assign: Callable[..., Assignment | Dispatch]
    algorithm: Callable[..., Algorithm] = fedavg
    is_redealt: bool = True
    is_strict: bool = False


def _drawn(factory: Callable[..., Assignment], **options: Any) -> Way:
    def assign(N: int, M: int, K: int, demands: Sequence[int], eligible: Any) -> Assignment:
        return factory(N, M, cohort_size=K, **options)

    return Way(assign)


def _by(policy: str) -> Way:
    def assign(N: int, M: int, K: int, demands: Sequence[int], eligible: Any) -> Assignment:
        how: dict[str, Any] = {"demand": demands, "policy": policy, "eligible": eligible}
        return scheduled(N, M, cohort_size=K, **how)

    return Way(assign, is_strict=True)


def _unequal(N: int, M: int, K: int, demands: Sequence[int], eligible: Any) -> Assignment:
    return variance_reduced(N, M, expected_trainings=float(K))


def _dispatched(N: int, M: int, K: int, demands: Sequence[int], eligible: Any) -> Dispatch:
    at_work = [len(part) for part in np.array_split(np.arange(K), M)]
    how: dict[str, Any] = {"ratio": min(2, *at_work), "delay": shifted_exponential(N, mean=1.0)}
    return fedast(N, M, at_work=at_work, arrivals_per_round=K, **how)


METHODS: Mapping[str, Way] = {
    _BASE: _drawn(mfa_rand),
    _KEPT: _drawn(mfa_rand)._replace(is_redealt=False),
    "MFA-RR": _drawn(mfa_rr),
    "MFA-RR, frames end": _drawn(mfa_rr, on_change="wait"),
    "round robin": _drawn(mfa_rr, redraw="never"),
    "FedAvg, one by one": _drawn(sequential, rounds_per_model=10**6),
    "LVR": Way(_unequal, functools.partial(fedavg, server_scale="1/N")),
    "bandit: rank list": _drawn(bandit, policy="rank-list"),
    "FedFairMMFL": _drawn(fedfair),
    "Bayesian": _drawn(fedfair, by="accuracy", memory=0.9),
    "FIFO": _by("fifo"),
    "random order": _by("random"),
    "SRSF": _by("srsf"),
    "LAS": _by("las"),
    "Venn": _by("venn"),
    _ASYNC: Way(_dispatched),
}
"""All methods by name. To add a method, add a line."""


class MultiJCT(Selecting):
    """Mixes of models that learn questions about the digits, the pool, and the run lengths."""

    mixes: Several[MixName] = ("equal", "unequal", "straggler", "scarce")
    """Equal models; two models of each of three questions and sizes; equal models of which the
    first has the higher target; and models with unequal demands of which the last two may only use
    scarce clients.
    """
    arrivals: Several[Arrivals] = ("at once", "over time")
    methods: Several[str] = tuple(METHODS)
    num_models: Count = 6
    num_clients: Count = 60
    cohort_size: Count = 24
    demand: Count = 8
    """The clients that a model asks for in a round, for the schedulers that know demands."""
    unequal_demands: Several[Count] = (12, 8, 4)
    """The demands of the models of "scarce", in turn."""
    target: Fraction = 0.85
    straggler_target: Fraction = 0.9
    scarce: Fraction = 0.2
    """The share of the clients that the last two models of "scarce" may use."""
    rounds_between: Count = 8
    """The number of rounds between two arrivals."""
    alpha: Positive = 0.5
    rates: Several[Positive] = (0.05, 0.1, 0.2, 0.4, 0.8)
    """The candidates for the learning rate."""
    local_steps: Count = 5
    batch_size: Count = 10
    num_rounds: Count = 160
    num_seeds: Count = 30
    record_every: Count = 2

    def tasks(self, mix: str, data: FederatedData) -> list[Supervised]:
        """The models' tasks on one draw."""
        sizes = [(64, 30), (32,), (16,)] if mix == "unequal" else [(64, 30)]
        count = len(sizes)
        return [
            classification(
                data, MLP(data.num_classes, sizes[m % count]), scale=1 / 255, column=m % count
            )
            for m in range(self.num_models)
        ]

    def targets(self, mix: str) -> np.ndarray:
        """Each model's target."""
        most = self.straggler_target if mix == "straggler" else self.target
        return np.array([most] + [self.target] * (self.num_models - 1))

    def demands(self, mix: str) -> list[int]:
        """The clients that each model asks for."""
        each = self.unequal_demands if mix == "scarce" else (self.demand,)
        return [each[m % len(each)] for m in range(self.num_models)]

    def eligible(self, mix: str) -> np.ndarray:
        """Whether each client may train each model."""
        found = np.ones((self.num_models, self.num_clients), bool)
        if mix == "scarce":
            found[-2:, round(self.scarce * self.num_clients) :] = False
        return found

    def build(
        self, mix: str, arrivals: str, rate: float, name: str, data: FederatedData, seed: int
    ) -> Setup:
        """Sets up the simulation of one point of the grid."""
        way, (N, M, K) = METHODS[name], (self.num_clients, self.num_models, self.cohort_size)
        steps, size = self.local_steps, self.batch_size
        algorithm = way.algorithm(local_sgd(rate, steps=steps, batch_size=size))
        tasks = self.tasks(mix, data.select(seed - self.first_seed))
        rule: Any = way.assign(N, M, K, self.demands(mix), self.eligible(mix))
        # Give arrays, so that points with other targets or arrivals share a program.
        if way.is_redealt:
            targets = jnp.asarray(self.targets(mix), jnp.float32)
            rule = finishing(rule, _METRIC, at_least=targets, every=self.record_every)
        between = self.rounds_between if arrivals == "over time" else 0
        rule = arriving(rule, between * jnp.arange(M))
        if not isinstance(rule, Dispatch):
            rule = on_clock(rule, shifted_exponential(N, mean=1.0))
        return Setup(tasks, algorithm, rule)


def drawn(config: MultiJCT) -> FederatedData:
    """The clients' digits with the answers to all questions, with one draw per seed."""
    return ask(deal(all_digits(), config.num_clients, config.alpha, config.data_seeds))


def run(config: MultiJCT, execution: Execution | None = None) -> xr.Dataset:
    """Runs every method on every mix at its best rate, with one draw of the data per seed.

    `selection_time` holds the mean completion times in rounds that chose the rates, of models that
    arrive at once.
    """
    how = execution or Execution()
    # A method without a point of the grid is left out.
    alone = {
        name: config.model_copy(update={"methods": (name,)})
        for name in config.methods
        if METHODS[name].is_strict or set(config.mixes) != {"scarce"}
    }
    parts = list(stages("method", alone, how, _tuned).values())
    index = xr.IndexVariable("algorithm", list(alone))
    found = xr.concat(parts, index, join="outer", combine_attrs="override")
    return described(found.reindex(mix=list(config.mixes)), parts)


def _tuned(alone: MultiJCT, execution: Execution) -> xr.Dataset:
    """Runs the only method of some settings, at the rate that is best on the selection seeds."""
    (name,) = alone.methods
    # Only some methods train eligible clients alone.
    is_strict = METHODS[name].is_strict
    mixes: dict[str, Sequence[Any]] = {
        "mix": [mix for mix in alone.mixes if is_strict or mix != "scarce"]
    }

    def search(config: MultiJCT, saving: Execution) -> xr.Dataset:
        data = drawn(config)
        build = functools.partial(config.build, name=name, data=data)
        tried = {**mixes, "arrivals": ["at once"], "rate": config.rates}
        return train([data], build, tried, config, saving)

    found = searched(alone.selecting, execution, search).isel(arrivals=0, drop=True)
    times = _completion(found, alone)["least"]
    rates = times["rate"].isel(best_point(-times, ["rate"])).drop_vars("rate")

    def judge(config: MultiJCT, saving: Execution) -> xr.Dataset:
        data = drawn(config)

        def build(mix: str, arrivals: str, seed: int) -> Setup:
            rate = rates.sel(mix=mix).item()
            return config.build(mix, arrivals, rate, name=name, data=data, seed=seed)

        return train([data], build, {**mixes, "arrivals": config.arrivals}, config, saving)

    judged = staged("judged", alone, execution, judge)
    kept = judged[[key for key in _SAVED if key in judged]]
    added = {"chosen_rate": rates, "selection_time": times.rename(seed="selection_seed")}
    return described(kept.assign(added), [judged, found])


def measure(result: xr.Dataset, config: MultiJCT) -> xr.Dataset:
    """Mean completion times, makespans, trainings, shares of finished models, and accuracies.

    Times are in rounds and in simulated time. They are NaN for a seed with an unfinished model. In
    its least times, unfinished models finish at the end of the run. The trainings are those of all
    models until their targets.
    """
    is_run = result[_METRIC].isel(round=0, drop=True).notnull().all("model")
    found = {"chosen_rate": result["chosen_rate"]}
    for clock, words in CLOCKS.items():
        times = _completion(result, config, clock)
        is_all = times["finished_share"] == 1
        for key in ("mean_completion_time", "makespan"):
            found[f"{key} in {words} per seed"] = times[key].where(is_all)
        found[f"least_mean_completion_time in {words}"] = times["least"].where(is_run)
    is_before = result["time"] <= times["finished_at"]
    trainings = result["client_updates"].where(is_before).max("round").sum("model")
    found["trainings per seed"] = trainings.where(is_all)
    found["is_run"] = is_run.all("seed")
    finished = 100 * times["finished_share"].where(is_run)
    found["finished"], found["finished error"] = estimate(finished)
    for key in [*found]:
        if key.endswith("per seed"):
            plain = key.removesuffix(" per seed")
            found[plain], found[f"{plain} error"] = estimate(found[key])
    last = 100 * result[_METRIC].isel(round=-1, drop=True).mean("model")
    found["accuracy"], found["accuracy error"] = estimate(last)
    return xr.Dataset(found)


def _completion(result: xr.Dataset, config: MultiJCT, clock: str = "round") -> xr.Dataset:
    """Completion times, and the least mean that unfinished models leave possible."""
    mixes = result["mix"].values.tolist()
    each = [config.targets(mix) for mix in mixes]
    targets = xr.DataArray(each, {"mix": mixes}, dims=("mix", "model"))
    times = completion(result, _METRIC, at_least=targets, clock=clock)
    # A round that is not recorded counts as the next one.
    is_there = result["round"] >= result["arrived_at"].max("round")
    most = result[clock].max("round") - result[clock].where(is_there).min("round")
    return times.assign(least=times["completion_time"].fillna(most).mean("model"))


_MARGIN = 1.0  # round, or mean duration of a local training


def judge(measured: xr.Dataset, config: MultiJCT) -> Iterator[Check]:
    """Compares mean completion times with those of MFA-Rand, and schedulers with each other.

    Medians are compared, because a seed with an unfinished model has no mean. It is behind if even
    the least mean completion time that it may have is.
    """
    for name, other, mixes in (
        (_BASE, _KEPT, config.mixes),
        *((name, _BASE, config.mixes) for name in METHODS if name not in (_BASE, _KEPT)),
        *((*pair, ("scarce",)) for pair in (("Venn", "SRSF"), ("Venn", "FIFO"), ("SRSF", "FIFO"))),
    ):
        # Simulated time differs from rounds where the server waits for nobody.
        for clock in CLOCKS.values() if name == _ASYNC else ("rounds",):
            for mix in mixes:
                yield from _compared(measured, config, name, other, mix, clock)
    yield check_inner(measured["chosen_rate"], config.rates, "{algorithm} on {mix}")


def _compared(
    measured: xr.Dataset, config: MultiJCT, name: str, other: str, mix: str, clock: str
) -> Iterator[Check]:
    """Yields how much sooner a method finishes than another, if both ran."""
    if mix not in config.mixes or not {name, other} <= set(measured["algorithm"].values.tolist()):
        return
    here = measured.sel(mix=mix, drop=True)
    key = f"mean_completion_time in {clock}"
    first, own = (here[f"{key} per seed"].sel(algorithm=one, drop=True) for one in (other, name))
    most = first - here[f"least_{key}"].sel(algorithm=name, drop=True)
    saved = (first - own).fillna(most.where(most < -_MARGIN)).dropna("arrivals", how="all")
    if saved.size:
        text = f"{mix}: {clock} that {name} saves in the mean completion time against {other}"
        found = compare(text, saved, _MARGIN, ".1f", "median")
        rates = {one: here["chosen_rate"].sel(algorithm=one) for one in (name, other)}
        yield unless_at_edge(found, rates, config.rates)


def table(measured: xr.Dataset, config: MultiJCT) -> Sequence[Table]:
    """One table per measure, with a column for each mix and each way to arrive, and the rates."""
    named = {
        "mean_completion_time in rounds": "Mean completion time in rounds",
        "makespan in rounds": "Makespan in rounds",
        "mean_completion_time in simulated time": "Mean completion time in simulated time",
        "makespan in simulated time": "Makespan in simulated time",
        "trainings": "Local trainings of all models until their targets",
        "finished": "Models that finished, in percent",
        "accuracy": "Final mean accuracy in percent",
    }
    tables = []
    place: Any = {"place": ("mix", "arrivals"), "create_index": False}
    is_run = measured["is_run"].stack(**place).drop_vars(["mix", "arrivals"])
    for key, title in named.items():
        mean, error = measured[key].stack(**place), measured[f"{key} error"].stack(**place)
        words = [f"{mix}, {when}" for mix in config.mixes for when in measured["arrivals"].values]
        mean, error = (x.drop_vars(["mix", "arrivals"]) for x in (mean, error))
        text = cells(mean, error, form=".1f", missing="not reached").where(is_run, "not run")
        text = text.assign_coords(place=words)
        tables.append(rows(columns(text, "place"), ("algorithm",), title))
    rates = cells(measured["chosen_rate"], form="g", missing="not run")
    return [*tables, rows(columns(rates, "mix"), ("algorithm",), "Chosen learning rates")]


def figure(result: xr.Dataset, measured: xr.Dataset, config: MultiJCT) -> Figure:
    """Draws medians of the mean completion times in rounds, with one panel per mix."""
    times = measured["mean_completion_time in rounds per seed"]
    # A seed with an unfinished model is later than all others.
    times = times.fillna(np.inf).where(measured["is_run"]).dropna("mix", how="all")
    low, middle, high = (
        times.quantile(share, "seed", method="lower", skipna=False).drop_vars("quantile")
        for share in (0.25, 0.5, 0.75)
    )
    order = np.argsort(middle.mean(["mix", "arrivals"]).values, kind="stable")
    dims = ("mix", "algorithm", "arrivals")
    caption = f"Medians of {config.num_seeds} seeds, and half the distance of their quartiles. A "
    caption += "seed in which a model did not reach its target is later than all others."
    return dots(
        middle.isel(algorithm=order).transpose(*dims),
        ((high - low) / 2).isel(algorithm=order).transpose(*dims),
        xlabel="rounds",
        title="Mean job completion time",
        caption=caption,
    )


ITEMS = (Item("multi-jct", MultiJCT(), run, measure, judge, table, figure),)
"""Job completion times."""
