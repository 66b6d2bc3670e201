"""Job completion times: the rounds in which several models reach their targets, by scheduler.

All methods train with FedAvg and the same settings on the same pool. K clients train in a round,
with these exceptions: LVR has K local trainings in expectation, the bandit trains all clients in
each of the first M rounds, and the schedulers give a model its demand or less. FedAST has K jobs in
progress, and its round is K arrivals. A model that has met its target gets no more clients. In
"MFA-Rand, clients kept" the clients of finished models stay idle, as if each model had its own
share of the pool.
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
from fedjax_mm.experiments.fields import Count, Fraction, Positive, Seeded
from fedjax_mm.local import local_sgd
from fedjax_mm.metrics import completion, estimate
from fedjax_mm.papers.cho2022.clients import all_digits
from fedjax_mm.papers.figures import dots
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.multi_maxfl import ask
from fedjax_mm.papers.multi_problems import deal
from fedjax_mm.papers.rulings import compare
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.training import described, stages, train
from fedjax_mm.papers.values import Several
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import MLP
from fedjax_mm.tasks.supervised import Supervised

MixName = Literal["equal", "unequal", "straggler", "scarce"]
Arrivals = Literal["at once", "over time"]

_BASE = "MFA-Rand"
_KEPT = "MFA-Rand, clients kept"
_METRIC = "test_accuracy"
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
    def assign(N: int, M: int, K: int, demand: int, eligible: Any) -> Assignment:
        return factory(N, M, cohort_size=K, **options)

    return Way(assign)


def _by(policy: str) -> Way:
    def assign(N: int, M: int, K: int, demand: int, eligible: Any) -> Assignment:
        how: dict[str, Any] = {"demand": demand, "policy": policy, "eligible": eligible}
        return scheduled(N, M, cohort_size=K, **how)

    return Way(assign, is_strict=True)


def _unequal(N: int, M: int, K: int, demand: int, eligible: Any) -> Assignment:
    return variance_reduced(N, M, expected_trainings=float(K))


def _dispatched(N: int, M: int, K: int, demand: int, eligible: Any) -> Dispatch:
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
    "FedAST": Way(_dispatched),
}
"""All methods by name. To add a method, add a line."""


class MultiJCT(Seeded):
    """Mixes of models that learn questions about the digits, the pool, and the run lengths."""

    mixes: Several[MixName] = ("equal", "unequal", "straggler", "scarce")
    """Equal models; two models of each of three questions and sizes; equal models of which the
    first has the higher target; and equal models of which the last two may only use scarce clients.
    """
    arrivals: Several[Arrivals] = ("at once", "over time")
    methods: Several[str] = tuple(METHODS)
    num_models: Count = 6
    num_clients: Count = 60
    cohort_size: Count = 24
    demand: Count = 8
    """The clients that a model asks for in a round, for the schedulers that know demands."""
    target: Fraction = 0.85
    straggler_target: Fraction = 0.9
    scarce: Fraction = 0.2
    """The share of the clients that the last two models of "scarce" may use."""
    rounds_between: Count = 8
    """The number of rounds between two arrivals."""
    alpha: Positive = 0.5
    learning_rate: Positive = 0.05
    local_steps: Count = 5
    batch_size: Count = 10
    num_rounds: Count = 240
    num_seeds: Count = 10
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

    def eligible(self, mix: str) -> np.ndarray:
        """Whether each client may train each model."""
        found = np.ones((self.num_models, self.num_clients), bool)
        if mix == "scarce":
            found[-2:, round(self.scarce * self.num_clients) :] = False
        return found

    def build(self, mix: str, arrivals: str, name: str, data: FederatedData, seed: int) -> Setup:
        """Sets up the simulation of one point of the grid."""
        way, (N, M, K) = METHODS[name], (self.num_clients, self.num_models, self.cohort_size)
        steps, size = self.local_steps, self.batch_size
        algorithm = way.algorithm(local_sgd(self.learning_rate, steps=steps, batch_size=size))
        tasks = self.tasks(mix, data.select(seed - self.first_seed))
        rule: Any = way.assign(N, M, K, self.demand, self.eligible(mix))
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
    """Runs every method on every mix, with one draw of the data per seed."""
    how, data = execution or Execution(), functools.cache(drawn)

    def make(alone: Any, saving: Execution) -> xr.Dataset:
        (name,), stack = alone.methods, data(config)
        build = functools.partial(alone.build, name=name, data=stack)
        # Only some methods train eligible clients alone.
        strict = METHODS[name].is_strict
        mixes = [mix for mix in alone.mixes if strict or mix != "scarce"]
        axes = {"mix": mixes, "arrivals": list(alone.arrivals)}
        found = train([stack], build, axes, alone, saving)
        return found[[key for key in _SAVED if key in found]]

    # A method without a point of the grid is left out.
    alone = {
        name: config.model_copy(update={"methods": (name,)})
        for name in config.methods
        if METHODS[name].is_strict or set(config.mixes) != {"scarce"}
    }
    parts = list(stages("method", alone, how, make).values())
    index = xr.IndexVariable("algorithm", list(alone))
    found = xr.concat(parts, index, join="outer", combine_attrs="override")
    return described(found.reindex(mix=list(config.mixes)), parts)


def measure(result: xr.Dataset, config: MultiJCT) -> xr.Dataset:
    """Mean completion times, makespans and shares of finished models, and accuracies.

    Times are in rounds and in simulated time. They are NaN for a seed with an unfinished model. In
    its least time, unfinished models run from the last arrival to the end.
    """
    mixes = result["mix"].values.tolist()
    targets = xr.DataArray(
        [config.targets(mix) for mix in mixes], {"mix": mixes}, dims=("mix", "model")
    )
    is_run = result[_METRIC].isel(round=0, drop=True).notnull().all("model")
    found = {}
    for clock in ("round", "time"):
        times = completion(result, _METRIC, at_least=targets, clock=clock)
        is_all = times["finished_share"] == 1
        for key in ("mean_completion_time", "makespan"):
            found[f"{key} in {clock}s per seed"] = times[key].where(is_all)
        if clock == "round":
            end = config.num_rounds - config.rounds_between * (config.num_models - 1)
            at_least = times["completion_time"].fillna(end).mean("model")
            found["least mean completion time in rounds"] = at_least.where(is_run)
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


_MARGIN = 1.0  # rounds


def judge(measured: xr.Dataset, config: MultiJCT) -> Iterator[Check]:
    """Compares mean completion times with those of MFA-Rand, and Venn with SRSF and FIFO.

    Medians are compared, because a seed with an unfinished model has no mean. It is behind if even
    the least mean completion time that it may have is.
    """
    times = measured["mean_completion_time in rounds per seed"]
    least = measured["least mean completion time in rounds"]
    known = set(times["algorithm"].values.tolist())
    for name, other, mixes in (
        (_BASE, _KEPT, config.mixes),
        *((name, _BASE, config.mixes) for name in METHODS if name not in (_BASE, _KEPT)),
        ("Venn", "SRSF", ("scarce",)),
        ("Venn", "FIFO", ("scarce",)),
    ):
        if not {name, other} <= known:
            continue
        first, own = (times.sel(algorithm=one, drop=True) for one in (other, name))
        most = first - least.sel(algorithm=name, drop=True)
        saved = (first - own).fillna(most.where(most < -_MARGIN))
        for mix in mixes:
            here = saved.sel(mix=mix, drop=True) if mix in config.mixes else None
            if here is not None and here.notnull().any():
                here = here.dropna("arrivals", how="all")
                yield compare(
                    f"{mix}: rounds that {name} saves in the mean completion time against {other}",
                    here,
                    _MARGIN,
                    ".1f",
                    "median",
                )


def table(measured: xr.Dataset, config: MultiJCT) -> Sequence[Table]:
    """One table per measure, with a column for each mix and each way to arrive."""
    named = {
        "mean_completion_time in rounds": "Mean completion time in rounds",
        "makespan in rounds": "Makespan in rounds",
        "mean_completion_time in times": "Mean completion time in simulated time",
        "makespan in times": "Makespan in simulated time",
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
    return tables


def figure(result: xr.Dataset, measured: xr.Dataset, config: MultiJCT) -> Figure:
    """Draws the mean completion times in rounds, with one panel per mix."""
    key = "mean_completion_time in rounds"
    mean, error = measured[key], measured[f"{key} error"]
    # Draw no panel without points.
    mean = mean.dropna("mix", how="all")
    error = error.sel(mix=mean["mix"])
    order = np.argsort(mean.mean(["mix", "arrivals"]).values, kind="stable")
    dims = ("mix", "algorithm", "arrivals")
    caption = f"Means and standard errors of {config.num_seeds} seeds, where all "
    caption += f"{config.num_models} models reached their targets in every seed."
    return dots(
        mean.isel(algorithm=order).transpose(*dims),
        error.isel(algorithm=order).transpose(*dims),
        xlabel="rounds",
        title="Mean job completion time",
        caption=caption,
    )


ITEMS = (Item("multi-jct", MultiJCT(), run, measure, judge, table, figure),)
"""Job completion times."""
