"""The algorithms of an experiment file: who trains what, how, and what clients ask for."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache, reduce
from operator import itemgetter, or_
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray
from pydantic import BeforeValidator, Field, GetPydanticSchema, create_model, model_validator

from fedjax_mm import assignment as assignments
from fedjax_mm.algorithms import methods
from fedjax_mm.algorithms.attackers import attacked, noisy
from fedjax_mm.base import Algorithm, Assignment, Batching, DemandingTask, Index, LocalProblem, Task
from fedjax_mm.checks import MissingError
from fedjax_mm.experiments.tasks import Config, Count, Flag, NonNegative, Positive, Seed
from fedjax_mm.experiments.tasks import Share as Share
from fedjax_mm.schedules import Schedule, inverse_time, per_frame
from fedjax_mm.tasks.quadratic import Quadratic
from fedjax_mm.tasks.requirements import OwnModels, Tuning, own_models, requiring

_Steps = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


class InverseTime(Config):
    """The decaying rate beta / (t + gamma), per round t or per frame l = 1 + floor((t - 1) / M)."""

    beta: Positive
    gamma: NonNegative
    per: Literal["round", "frame"] = "round"


class Appealing(Config):
    """Clients to whom a model does not appeal stay away; see `appealing`."""

    cohort_size: Count
    from_round: Count = 10


class _Assigned(Config):
    """Who trains what, and whether clients may stay away."""

    appealing: Appealing | None = None

    def build(self, num_clients: int, num_models: int) -> Assignment:
        """The assignment."""
        drawn = self._draws(num_clients, num_models)
        if self.appealing is None:
            return drawn
        return assignments.appealing(
            drawn,
            cohort_size=self.appealing.cohort_size,
            from_round=self.appealing.from_round,
        )

    def _draws(self, num_clients: int, num_models: int) -> Assignment:
        raise NotImplementedError


class MFARand(_Assigned):
    """A fresh partition every round."""

    name: Literal["mfa_rand"]
    cohort_size: Count | None = None

    def _draws(self, num_clients: int, num_models: int) -> Assignment:
        return assignments.mfa_rand(num_clients, num_models, cohort_size=self.cohort_size)


class MFARR(_Assigned):
    """A partition per frame, rotated over the models."""

    name: Literal["mfa_rr"]
    cohort_size: Count | None = None
    redraw: Literal["frame", "round"] = "frame"

    def _draws(self, num_clients: int, num_models: int) -> Assignment:
        return assignments.mfa_rr(
            num_clients, num_models, cohort_size=self.cohort_size, redraw=self.redraw
        )


class FedCluster(_Assigned):
    """Fixed clusters visited in a reshuffled order, for one model."""

    name: Literal["fedcluster"]
    num_clusters: Count

    def _draws(self, num_clients: int, num_models: int) -> Assignment:
        if num_models != 1:
            raise ValueError(f"num_models is {num_models}; fedcluster trains 1 model")
        return assignments.fedcluster(num_clients, self.num_clusters)


class Sequential(_Assigned):
    """All clients train one model after the other."""

    name: Literal["sequential"]
    rounds_per_model: Count

    def _draws(self, num_clients: int, num_models: int) -> Assignment:
        return assignments.sequential(
            num_clients, num_models, rounds_per_model=self.rounds_per_model
        )


class FullParticipation(_Assigned):
    """Every client trains the one model in every round, unless it stays away."""

    name: Literal["full_participation"]

    def _draws(self, num_clients: int, num_models: int) -> Assignment:
        if num_models != 1:
            raise ValueError(
                f"num_models is {num_models}; full_participation trains 1 model: choose mfa_rand "
                "or mfa_rr"
            )
        return assignments.full_participation(num_clients)


AssignmentConfig = Annotated[
    MFARand | MFARR | FedCluster | Sequential | FullParticipation, Field(discriminator="name")
]


class Method(Config):
    """What all methods have: a rate, and an assignment unless the experiment has one for all."""

    name: str
    assignment: AssignmentConfig | None = None
    learning_rate: Positive | InverseTime

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        self.build(1)
        return self

    def schedule(self, num_models: int) -> Any:
        """The learning rate as factories take it: a number, or a schedule of the round."""
        rate = self.learning_rate
        if not isinstance(rate, InverseTime):
            return rate
        schedule: Schedule = inverse_time(rate.beta, rate.gamma)
        return per_frame(schedule, num_models) if rate.per == "frame" else schedule

    def build(self, num_models: int) -> Algorithm:
        """The algorithm."""
        settings = {key: value for key, value in self if key not in Method.model_fields}
        return methods()[self.name](self.schedule(num_models), **settings)

    def asks_for_thresholds(self) -> bool:
        """Whether it trains only clients who require something of a model."""
        numbers = tuple(key for key, value in self if isinstance(value, float | InverseTime))
        structure = self.model_copy(update=dict.fromkeys(numbers) | {"assignment": None})
        return _asks_for_thresholds(structure, numbers)


_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_FROM_FILE = {float: _Number, int: Count, bool: Flag, NoneType: None}


def _field_type(annotation: Any) -> Any:
    """What a file may give where a factory takes `annotation`: None, if it can give nothing.

    Whole numbers are counts. Which other numbers are allowed the factory itself checks.
    """
    is_union = get_origin(annotation) in (Union, UnionType)
    members = get_args(annotation) if is_union else [annotation]
    literals = [each for each in members if get_origin(each) is Literal]
    types = [*literals, *(_FROM_FILE[each] for each in members if each in _FROM_FILE)]
    return reduce(or_, types) if any(types) else None


def _table_of(name: str, factory: Callable[..., Algorithm]) -> type[Method]:
    """The table of a method in a file: what the factory takes, but for what no file can give."""
    fields: dict[str, Any] = {"name": (Literal[name], ...)}
    for key, parameter in inspect.signature(factory, eval_str=True).parameters.items():
        type_ = _field_type(parameter.annotation)
        if type_ is not None and key not in Method.model_fields:
            fields[key] = type_, ... if parameter.default is parameter.empty else parameter.default
    return create_model(name, __base__=Method, **fields)


DEFAULT_METHOD = "fedavg"
"""Of a table without a `name`."""

METHOD_TABLES = {name: _table_of(name, factory) for name, factory in methods().items()}
"""The tables of all methods in a file, by their `name`."""

_ANY_TABLE: Any = Annotated[
    Annotated[reduce(or_, METHOD_TABLES.values()), Field(discriminator="name")],
    BeforeValidator(
        lambda method: {"name": DEFAULT_METHOD} | method if isinstance(method, dict) else method
    ),
]
MethodConfig = Annotated[
    Method, GetPydanticSchema(lambda _, handler: handler.generate_schema(_ANY_TABLE))
]
"""The table of any method."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _StandIn(Quadratic):
    """One client with whatever methods may ask for, but for a threshold."""

    def batch(
        self, rng_key: PRNGKeyArray, client: Int[Array, ""], step: Int[Array, ""], how: Batching
    ) -> Int[Array, ""]:
        del rng_key, step, how
        return client

    def num_batches(self, client: Int[Array, ""], size: int | None) -> int:
        del client, size
        return 1


@cache
def _asks_for_thresholds(method: Method, numbers: tuple[str, ...]) -> bool:
    """Whether a method asks for thresholds; whatever its `numbers` are, which are traced."""

    def train(number: Array) -> None:
        task, key = _StandIn(number, jnp.zeros(2), number, 1, 1), jax.random.key(0)
        algorithm = method.model_copy(update=dict.fromkeys(numbers, number)).build(1)
        params = task.init(key)
        local = LocalProblem(key, 1, task, jnp.int32(0), params)
        algorithm.client(local, *algorithm.init(task, params))

    try:
        jax.eval_shape(train, 1.0)
    except MissingError as error:
        return error.capability is DemandingTask
    return False


class Byzantine(Config):
    """A fraction of the clients that train, rounded up, attacks; see `attacked` and `noisy`."""

    fraction: Share
    loss_factor: Positive = 10.0
    noise: NonNegative = 1.0
    stays: Flag = True
    seed: Seed = 0
    """Of the choice of attackers."""

    def attackers(self, num_clients: int) -> Any:
        """Which of the `num_clients` that train attack."""
        place = np.random.Generator(np.random.PCG64(self.seed)).permutation(num_clients)
        return place < self.fraction * num_clients - 1e-3  # rounded up, but for round-off

    def wrap_task(self, task: Task) -> Task:
        """The task with attackers."""
        attackers = self.attackers(task.num_clients)
        return attacked(task, attackers, loss_factor=self.loss_factor, stays=self.stays)

    def wrap(self, algorithm: Algorithm, num_clients: int) -> Algorithm:
        """The algorithm with attackers among the `num_clients` that train."""
        return noisy(algorithm, self.attackers(num_clients), noise=self.noise)


class Requiring(Config):
    """What clients require of a model, and how it is measured; see `requiring`.

    The rate and the batches of the warm-up and of tuning are the algorithm's, if not given here.
    """

    num_steps: Count = 100
    learning_rate: Positive | None = None
    batch_size: Count | None = None
    num_unseen: _Steps = 0
    tuning_steps: _Steps = 0

    def prepare(
        self, rng_key: Any, task: Task, num_models: int, method: Method, params: Any
    ) -> OwnModels:
        """The clients' own models for each of the M models, ``[models, clients]``.

        They start where the models do: at `params`, or at what the task draws.
        """
        rate, batch_size = self._rate_and_batch(method)

        def of_model(model: Index) -> OwnModels:
            how: dict[str, Any] = {"num_steps": self.num_steps, "batch_size": batch_size}
            return own_models(rng_key, task, params, learning_rate=rate, model=model, **how)

        return lax.map(of_model, jnp.arange(num_models))

    def wrap(self, task: Task, own: OwnModels, method: Method) -> list[Task]:
        """The task of each model, whose clients require something."""
        rate, batch_size = self._rate_and_batch(method)
        tuning = Tuning(rate, self.tuning_steps, batch_size) if self.tuning_steps else None
        each = [jax.tree.map(itemgetter(model), own) for model in range(len(own.threshold))]
        return [requiring(task, own, num_unseen=self.num_unseen, tuning=tuning) for own in each]

    def _rate_and_batch(self, method: Method) -> tuple[Any, int | None]:
        """Those of the warm-up and of tuning: the algorithm's, if none are given."""
        rate: Any = self.learning_rate
        if rate is None:
            rate = method.schedule(1)
            rate = rate(1) if callable(rate) else rate
        batch_size = self.batch_size
        if batch_size is None:
            batch_size = getattr(method, "batch_size", None)
        return rate, batch_size
