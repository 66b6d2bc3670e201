"""The algorithms of an experiment file: who trains what, how, and what clients ask for."""

from operator import itemgetter
from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from pydantic import BeforeValidator, Field, model_validator

from fedjax_mm import assignment as assignments
from fedjax_mm import keys
from fedjax_mm.algorithms.afl import afl
from fedjax_mm.algorithms.ditto import ditto
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.algorithms.fedprox import fedprox
from fedjax_mm.algorithms.maxfl import maxfl
from fedjax_mm.algorithms.mwfed import mwfed
from fedjax_mm.algorithms.noisy import noisy
from fedjax_mm.algorithms.perfedavg import perfedavg
from fedjax_mm.algorithms.qffl import qffl
from fedjax_mm.algorithms.scaffold import scaffold
from fedjax_mm.base import Algorithm, Assignment, Task
from fedjax_mm.schedules import Schedule, inverse_time, per_frame
from fedjax_mm.task_configs import Config, Count, Flag, NonNegative, Positive, Seed
from fedjax_mm.task_configs import Share as Share
from fedjax_mm.tasks.attackers import attacked
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
        factory, settings = self._factory(), dict(self)
        for used in ("name", "assignment", "learning_rate"):
            del settings[used]
        return factory(self.schedule(num_models), **settings)

    def _factory(self) -> Any:
        raise NotImplementedError


class FedAvg(Method):
    """See `fedavg`."""

    name: Literal["fedavg"] = "fedavg"
    local_steps: Count | None = None
    epochs: Count | None = None
    batch_size: Count | None = None
    order: Literal["iid", "epochs"] | None = None
    weighted: Flag = True
    server_scale: Literal["mean", "1/N"] = "mean"

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.local_steps is None and self.epochs is None:
            raise ValueError("local_steps and epochs are missing; give one of the two")
        self.build(1)
        return self

    def _factory(self) -> Any:
        return fedavg


class _Stepping(Method):
    """A method whose clients all take E steps, on batches drawn independently."""

    local_steps: Count
    batch_size: Count | None = None


class FedProx(_Stepping):
    """See `fedprox`."""

    name: Literal["fedprox"]
    mu: NonNegative

    def _factory(self) -> Any:
        return fedprox


class Scaffold(_Stepping):
    """See `scaffold`."""

    name: Literal["scaffold"]
    server_rate: Positive = 1.0
    option: Literal["I", "II"] = "II"

    def _factory(self) -> Any:
        return scaffold


class PerFedAvg(_Stepping):
    """See `perfedavg`."""

    name: Literal["perfedavg"]
    alpha: NonNegative = 1e-2
    variant: Literal["FO", "HF"] = "FO"
    delta: Positive = 1e-3

    def _factory(self) -> Any:
        return perfedavg


class QFFL(_Stepping):
    """See `qffl`."""

    name: Literal["qffl"]
    q: NonNegative

    def _factory(self) -> Any:
        return qffl


class AFL(Method):
    """See `afl`."""

    name: Literal["afl"]
    mixture_rate: Positive
    batch_size: Count | None = None

    def _factory(self) -> Any:
        return afl


class MWFed(_Stepping):
    """See `mwfed`."""

    name: Literal["mwfed"]
    growth: Annotated[float, Field(strict=True, gt=1, allow_inf_nan=False)] = 4.0

    def _factory(self) -> Any:
        return mwfed


class Ditto(_Stepping):
    """See `ditto`."""

    name: Literal["ditto"]
    lam: NonNegative

    def _factory(self) -> Any:
        return ditto


class MaxFL(_Stepping):
    """See `maxfl`."""

    name: Literal["maxfl"]
    server_rate: Positive = 1.0
    eps: NonNegative = 1e-2
    weight: Literal["derivative", "sigmoid"] = "derivative"
    slope: Positive = 1.0

    def _factory(self) -> Any:
        return maxfl


MethodConfig = Annotated[
    Annotated[
        FedAvg | FedProx | Scaffold | PerFedAvg | QFFL | AFL | MWFed | Ditto | MaxFL,
        Field(discriminator="name"),
    ],
    BeforeValidator(
        lambda method: {"name": "fedavg"} | method if isinstance(method, dict) else method
    ),
]
"""Any of the methods; FedAvg if there is no name."""

NEEDS_THRESHOLDS = ("maxfl", "mwfed")
"""Methods whose clients must require something."""


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

        def of_model(model: Any) -> OwnModels:
            start = task.init(keys.start_keys(rng_key, model[None])[0])
            if params is not None:
                start = jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), params, start)
            return own_models(
                keys.preparation_key(rng_key, model),
                task,
                start,
                learning_rate=rate,
                num_steps=self.num_steps,
                batch_size=batch_size,
            )

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
