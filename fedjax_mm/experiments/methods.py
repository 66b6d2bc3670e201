"""Algorithms in an experiment file: methods, assignments, attackers and requirements."""

import inspect
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from pydantic import Field, create_model

from fedjax_mm.algorithms import methods
from fedjax_mm.algorithms.attackers import attacked, noisy
from fedjax_mm.algorithms.sharing import personal
from fedjax_mm.assignments import assignments
from fedjax_mm.assignments.appealing import appealing
from fedjax_mm.asynchrony.clock import on_clock
from fedjax_mm.asynchrony.delays import Delay, device_time, shifted_exponential
from fedjax_mm.asynchrony.dispatch import Dispatch, fedast
from fedjax_mm.asynchrony.planning import bods
from fedjax_mm.availability.jobs import arriving, finishing
from fedjax_mm.availability.laws import Law, bernoulli, cyclic, markov, timetable
from fedjax_mm.availability.wrappers import available, dropping
from fedjax_mm.base import (
    Algorithm,
    Assignment,
    Index,
    Padded,
    Task,
)
from fedjax_mm.checks.annotations import members_of
from fedjax_mm.compression import Compressor, compressed, qsgd, random_k, sign, top_k
from fedjax_mm.data.partition import generator
from fedjax_mm.experiments import fields
from fedjax_mm.experiments.fields import (
    Config,
    Count,
    NonNegative,
    Positive,
    columns_of,
    named,
    one_of,
    parameters_of,
    table_of,
)
from fedjax_mm.experiments.optimizers import OptimizingClients, OptimizingServer, Rate, rate_of
from fedjax_mm.local import local_sgd
from fedjax_mm.privacy.mechanism import AdaptiveClip, private
from fedjax_mm.robust.aggregation import robust
from fedjax_mm.robust.attacks import (
    alie,
    attacking,
    gaussian,
    ipm,
    scaling,
    sign_flip,
)
from fedjax_mm.robust.backdoor import backdoored
from fedjax_mm.robust.rules import (
    Rule,
    bucketing,
    bulyan,
    centered_clipping,
    geometric_median,
    krum,
    mean,
    median,
    multi_krum,
    nearest_neighbor_mixing,
    trimmed_mean,
)
from fedjax_mm.schedules import value_at
from fedjax_mm.tasks.quadratic import Quadratic
from fedjax_mm.tasks.requirements import OwnModels, Tuning, own_models, requiring


class Appealing(Config):
    """Settings of `appealing`: clients opt out of models that do not appeal to them."""

    factory = appealing
    cohort_size: Count
    from_round: Count = 10


_Targets = fields.Number | tuple[fields.Number, ...]


class Finishing(Config):
    """Settings of `finishing`: models that meet a target leave their clients to the others."""

    factory = finishing
    metric: str
    at_least: _Targets | None = None
    at_most: _Targets | None = None
    every: Count = 1


class Available(Config):
    """An availability law, selected by name, and settings of `available`."""

    factory = available
    name: str
    when_absent: Literal["skip", "replace"] = "skip"
    unbiased: fields.Flag = False

    def wrap(self, assignment: Assignment) -> Assignment:
        """Wraps an assignment with `available`."""
        law: Law = self.call()
        return available(assignment, law, when_absent=self.when_absent, unbiased=self.unbiased)


_EACH = fields.Share | tuple[fields.Share, ...]
_INTERVALS = tuple[tuple[tuple[fields.NonNegative, Positive], ...], ...]
_LAW_TYPES = {"probability": _EACH, "comes": _EACH, "leaves": _EACH, "intervals": _INTERVALS}
_LAW_TABLES = {
    law.__name__: table_of(Available, law, **_LAW_TYPES)
    for law in (bernoulli, markov, cyclic, timetable)
}
"""The tables of all availability laws, by `name`."""


class Delays(Config):
    """A law of delays, the durations of local trainings, selected by name."""

    factory = shifted_exponential
    name: str

    def build(self, num_clients: int) -> Delay:
        """Builds the delays."""
        return self.call(num_clients=num_clients)


DEFAULT_DELAYS = "shifted_exponential"
"""The law of a table without a `name`."""

_AMOUNTS = NonNegative | tuple[NonNegative, ...]
_RATES = Positive | tuple[Positive, ...]
_DELAY_TYPES: dict[str, Any] = {
    **dict.fromkeys(["flops", "bytes_down", "bytes_up", "latency"], _AMOUNTS),
    "steps": _AMOUNTS | tuple[tuple[NonNegative, ...], ...],
    **dict.fromkeys(["speed", "down"], _RATES),
    "up": _RATES | None,
    **dict.fromkeys(["speed_spread", "bandwidth_spread"], NonNegative),
}
_DELAY_TABLES = {
    law.__name__: table_of(Delays, law, "num_clients", **_DELAY_TYPES)
    for law in (shifted_exponential, device_time)
}
"""The tables of all laws of delays, by `name`."""


class Assigned(Config):
    """An assignment or dispatch, selected by name, with absent or late clients and a clock.

    Attributes:
      finishing: lets models finish when they meet a target, see `finishing`.
      arriving: the number of completed rounds after which each model arrives, see `arriving`.
      appealing: lets clients opt out of models that do not appeal to them, see `appealing`.
      available: lets clients be absent, see `available`.
      dropping: the probability that a message is lost.
      delay: the delays of a clock, which times each round by its slowest client.
    """

    factory: ClassVar[Any] = on_clock
    name: str
    finishing: Finishing | None = None
    arriving: tuple[fields.CountOrZero, ...] | None = None
    appealing: Appealing | None = None
    available: Annotated[Available, one_of(_LAW_TABLES)] | None = None
    dropping: fields.Share | None = None
    first: Count | None = None
    deadline: Positive | None = None
    delay: Annotated[Delays, one_of(_DELAY_TABLES), named(DEFAULT_DELAYS)] | None = None

    @property
    def can_be_padded(self) -> bool:
        """Whether the number of models may be the argument of a program."""
        takes = inspect.signature(type(self).factory, eval_str=True).parameters
        number = takes["num_models"].annotation if "num_models" in takes else None
        others = self.changed & {"appealing", "available", "processors"}
        return Padded in members_of(number) and not others

    def build(self, num_clients: int, num_models: int | Padded) -> Assignment | Dispatch:
        """Builds the assignment."""
        factory = type(self).factory
        sizes: dict[str, Any] = {"num_clients": num_clients}
        # An assignment whose factory has no `num_models` trains one model.
        if "num_models" in parameters_of(factory):
            sizes["num_models"] = num_models
        elif num_models != 1:
            raise ValueError(
                f"num_models is {num_models}; {self.name} trains 1 model: choose mfa_rand or mfa_rr"
            )
        delay = self.delay and self.delay.build(num_clients)
        if "delay" in parameters_of(factory):  # the factory has its own clock
            of_fedast = factory is fedast
            why = "draws clients one by one" if of_fedast else "plans with all its clients"
            jobs = () if of_fedast else ("finishing", "arriving")
            for name in (*jobs, "appealing", "available", "dropping", "first", "deadline"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is not for {self.name}, which {why}")
            return self._as_jobs(self.call(**sizes, delay=delay))
        drawn: Assignment = self._as_jobs(self.call(**sizes))
        drawn = appealing(drawn, **dict(self.appealing)) if self.appealing else drawn
        drawn = self.available.wrap(drawn) if self.available else drawn
        if delay:
            drawn = on_clock(drawn, delay, first=self.first, deadline=self.deadline)
        elif self.first is not None or self.deadline is not None:
            raise ValueError(
                "first and deadline are for a clock; add a delay, such as delay = { mean = 1.0 }"
            )
        return drawn if self.dropping is None else dropping(drawn, self.dropping)

    def _as_jobs(self, rule: Any) -> Any:
        rule = finishing(rule, **dict(self.finishing)) if self.finishing else rule
        return rule if self.arriving is None else arriving(rule, self.arriving)


_OWN_TYPES: dict[str, Any] = {
    **dict.fromkeys(["at_work", "demand", "processors"], Count | tuple[Count, ...]),
    "eligible": tuple[tuple[fields.Flag, ...], ...] | None,
    "heterogeneous": tuple[fields.Flag, ...],
}

_FACTORIES: dict[str, Any] = {**assignments(), "bods": bods, "fedast": fedast}

ASSIGNMENT_TABLES = {
    name: table_of(Assigned, factory, "num_clients", "num_models", "active", **_OWN_TYPES)
    for name, factory in _FACTORIES.items()
}
"""The tables of all assignments in a file, and of the dispatch, by `name`."""

AssignmentConfig = Annotated[Assigned, one_of(ASSIGNMENT_TABLES)]
"""The table of any assignment."""


class Compression(Config):
    """A compressor, selected by name, and whether to use error feedback, as in `compressed`."""

    factory = compressed
    name: str
    error_feedback: fields.Flag | None = None

    def wrap(self, algorithm: Algorithm) -> Algorithm:
        """Wraps an algorithm with `compressed`."""
        rule: Compressor = self.call()
        return compressed(algorithm, rule, error_feedback=self.error_feedback)


_COMPRESSION_TABLES = {
    rule.__name__: table_of(Compression, rule) for rule in (top_k, random_k, qsgd, sign)
}
"""The tables of all compressors, by `name`."""


class Personal(Config):
    """Settings of `personal`: clients keep a part of the model."""

    factory = personal
    where: str | Annotated[tuple[str, ...], Field(min_length=1)]
    named: Literal["own", "shared"] = "own"
    own_steps: Count | None = None

    def wrap(self, algorithm: Algorithm) -> Algorithm:
        """Wraps an algorithm with `personal`."""
        return self.call(algorithm=algorithm)


class Adaptive(Config):
    """Settings of `AdaptiveClip`, for an adaptive clipping norm."""

    factory = AdaptiveClip
    quantile: fields.Fraction = 0.5
    rate: Positive = 0.2
    count_noise: NonNegative = 0.0


class Privacy(Config):
    """Settings of `private`: clipped updates, with noise added by the server."""

    factory = private
    clip: Positive
    noise_multiplier: NonNegative
    clients_per_round: Positive
    adaptive: Adaptive | None = None

    def wrap(self, algorithm: Algorithm) -> Algorithm:
        """Wraps an algorithm with `private`."""
        return self.call(algorithm=algorithm, adaptive=self.adaptive and self.adaptive.call())


class Robust(Config):
    """A rule of robust aggregation, selected by name, and what happens before it.

    Attributes:
      bucket_size: the number of updates in a bucket, whose means the rule gets; see `bucketing`.
      mixed_attackers: the number of attackers among whose updates each is replaced by the mean of
        its nearest neighbors; see `nearest_neighbor_mixing`. Mixing comes before buckets.
    """

    factory = robust
    name: str
    bucket_size: Count | None = None
    mixed_attackers: fields.CountOrZero | None = None

    def wrap(self, algorithm: Algorithm) -> Algorithm:
        """Wraps an algorithm with `robust`."""
        rule: Rule = self.call()
        if self.bucket_size is not None:
            rule = bucketing(rule, self.bucket_size)
        if self.mixed_attackers is not None:
            rule = nearest_neighbor_mixing(rule, self.mixed_attackers)
        return robust(algorithm, rule)


_RULES = (mean, median, trimmed_mean, krum, multi_krum, bulyan, geometric_median, centered_clipping)

_RULE_TABLES = {rule.__name__: table_of(Robust, rule) for rule in _RULES}
"""The tables of all rules of robust aggregation, by `name`."""


class Method(OptimizingClients):
    """A method, selected by name, its local training and, unless all share one, its assignment.

    A method's table also has a key for each argument of `local_sgd`. Updates without clients' own
    parts are compressed first, then clipped, and then aggregated.

    Attributes:
      personal: lets clients keep a part of the model.
      compression: compresses the clients' updates.
      privacy: clips the updates, and adds noise.
      robust: aggregates the updates by a rule, instead of their sum.
      assignment: chooses clients and models; defaults to the experiment's.
      learning_rate: eta of clients, a number or the table of a schedule.
    """

    name: str
    personal: Personal | None = None
    compression: Annotated[Compression, one_of(_COMPRESSION_TABLES)] | None = None
    privacy: Privacy | None = None
    robust: Annotated[Robust, one_of(_RULE_TABLES)] | None = None
    assignment: AssignmentConfig | None = None
    learning_rate: Rate

    @property
    def needs_thresholds(self) -> bool:
        """Whether clients need thresholds, as of a table `requirement`."""
        return self.name in ("maxfl", "mwfed")

    def schedule(self, num_models: int, num_rounds: int = 1) -> Any:
        """Returns the learning rate for factories, as a number or a schedule over rounds."""
        return rate_of(self.learning_rate, num_models, num_rounds)

    def build(self, num_models: int, num_rounds: int = 1) -> Algorithm:
        """Builds the algorithm.

        Args:
          num_models: M, the number of rounds per frame, for schedules per frame.
          num_rounds: T, the last round of schedules without a length.
        """
        factory, rate = type(self).factory, self.schedule(num_models, num_rounds)
        local = {argument: getattr(self, key) for argument, key in _LOCAL_KEYS.items()}
        # Factories with a shorthand also have parameters for local training settings.
        given: dict[str, Any] = dict.fromkeys({*_LOCAL_KEYS.values()} & parameters_of(factory))
        if isinstance(self, OptimizingServer):
            given["server_optimizer"] = self.build_server_optimizer(num_models, num_rounds)
        given["local"] = local_sgd(rate, optimizer=self.local_optimizer(), **local)
        algorithm: Algorithm = self.call(**given)
        algorithm = self.personal.wrap(algorithm) if self.personal else algorithm
        algorithm = self.compression.wrap(algorithm) if self.compression else algorithm
        algorithm = self.privacy.wrap(algorithm) if self.privacy else algorithm
        return self.robust.wrap(algorithm) if self.robust else algorithm


DEFAULT_METHOD = "fedavg"
"""The method of a table without a `name`."""

_LOCAL = columns_of(local_sgd, "learning_rate")
_LOCAL_KEYS = {key: {"steps": "local_steps"}.get(key, key) for key in _LOCAL}
"""Maps the arguments of `local_sgd`, apart from rates and optimizers, to keys of a file."""


def _method_table(factory: Callable[..., Algorithm]) -> type[Method]:
    """Builds a method's table, with its own arguments and those of `local_sgd`."""
    mine = OptimizingServer.model_fields.keys() & parameters_of(factory)
    bases = (Method, OptimizingServer) if mine else (Method,)
    columns = {_LOCAL_KEYS[argument]: column for argument, column in _LOCAL.items()}
    base: Any = create_model("Method", __base__=bases, **columns)
    base.factory, base.renamed = local_sgd, {"local_steps": "steps"}
    return table_of(base, factory, "local")


METHOD_TABLES = {name: _method_table(factory) for name, factory in methods().items()}
"""The tables of all methods in a file, by `name`."""

MethodConfig = Annotated[Method, one_of(METHOD_TABLES), named(DEFAULT_METHOD)]
"""The table of any method."""


DemandFn = Callable[[Any, list[Task], Any], list[Task]]
"""``(rng_key, tasks, params) -> tasks``, whose clients have thresholds. Own models start from the
parameters, or else from those that a task draws."""


class Attacking(Config):
    """An attack, selected by name, for `attacking`."""

    factory: ClassVar[Any] = attacking
    name: str

    def on_tasks(self, clients: Any) -> Callable[[Task], Task] | None:
        """Returns a function that wraps the task on which attackers train, or None."""
        del clients
        return None

    def wrap(self, algorithm: Algorithm, clients: Any) -> Algorithm:
        """Wraps an algorithm with `attacking`."""
        return attacking(algorithm, clients, self.call())


class Backdoor(Attacking):
    """Settings of `backdoored`: attackers train on stamped images.

    Attributes:
      factor: multiplies the attackers' updates, as `scaling` does.
    """

    factory = backdoored
    name: Literal["backdoor"]
    target: fields.CountOrZero
    size: Count = 3
    value: fields.Number = 1.0
    share: fields.Share = 0.5
    factor: fields.Number | None = None

    def on_tasks(self, clients: Any) -> Callable[[Task], Task]:
        """Returns a function that wraps a task with `backdoored`."""
        how = self.model_dump(include={"target", "size", "value", "share"})
        return partial(backdoored, clients=clients, **how)

    def wrap(self, algorithm: Algorithm, clients: Any) -> Algorithm:
        """Scales the attackers' updates if there is a factor."""
        if self.factor is None:
            return algorithm
        return attacking(algorithm, clients, scaling(self.factor))


_ATTACK_TABLES = {
    attack.__name__: table_of(Attacking, attack)
    for attack in (sign_flip, scaling, gaussian, alie, ipm)
} | {"backdoor": Backdoor}
"""The tables of all attacks, by `name`."""


class Byzantine(Config):
    """Settings of attackers, a fraction of the training clients, for `attacked` and `noisy`.

    Attributes:
      fraction: the fraction of attackers, whose number is rounded up.
      loss_factor: multiplies the attackers' losses.
      noise: the standard deviation of the noise in an attacker's update, divided by the root mean
        square of the update.
      stays: whether attackers always participate; if false, they may opt out.
      seed: the seed that chooses the attackers.
      attack: what attackers send instead of their updates with noise, or on what they train.
    """

    fraction: fields.Share
    loss_factor: Positive = 10.0
    noise: NonNegative = 1.0
    stays: fields.Flag = True
    seed: fields.Seed = 0
    attack: Annotated[Attacking, one_of(_ATTACK_TABLES)] | None = None

    def attackers(self, num_clients: int) -> Any:
        """Returns a mask of the `num_clients` training clients that attack."""
        place = generator(self.seed).permutation(num_clients)
        # In float32, (k / num_clients) * num_clients may exceed k. Subtract a little.
        return jnp.asarray(place < self.fraction * num_clients - 1e-3)

    def on_tasks(self, num_clients: int) -> Callable[[Task], Task]:
        """Returns a function that wraps a task with `attacked`, and with `backdoored`."""
        clients = self.attackers(num_clients)
        # Return a partial, whose numbers sweeps find.
        how: Any = {"loss_factor": self.loss_factor, "stays": self.stays}
        wrap = partial(attacked, clients=clients, **how)
        inner = self.attack.on_tasks(clients) if self.attack else None
        return partial(_both, inner, wrap) if inner else wrap

    def wrap(self, algorithm: Algorithm, num_clients: int) -> Algorithm:
        """Wraps an algorithm with `noisy` or `attacking`, for attackers among `num_clients`."""
        clients = self.attackers(num_clients)
        if self.attack is None:
            return noisy(algorithm, clients, noise=self.noise)
        return self.attack.wrap(algorithm, clients)


def _both(inner: Callable[[Task], Task], outer: Callable[[Task], Task], task: Task) -> Task:
    return outer(inner(task))


class Requirement(Config):
    """Clients' thresholds, which all algorithms share, and how to measure them.

    See `requiring`. Fine-tuning uses the algorithm's rate and batches.

    Attributes:
      num_steps: the number of steps of the warm-up, in which clients train models of their own.
      learning_rate: the learning rate of the warm-up.
      batch_size: the batch size of the warm-up; defaults to 32, except on the quadratic, which has
        none.
      num_unseen: the number of clients that do not train, and are measured separately.
      tuning_steps: the number of steps in which clients fine-tune the models before they are
        measured.
    """

    num_steps: Count = 100
    learning_rate: Positive = 0.05
    batch_size: Count | None = None
    num_unseen: fields.CountOrZero = 0
    tuning_steps: fields.CountOrZero = 0

    def demand(self, method: Method, rate: Any) -> DemandFn:
        """Returns a function that trains the clients' own models and gives tasks their thresholds.

        Args:
          method: the method, whose batches fine-tuning uses.
          rate: the method's learning rate.
        """
        tuning = None
        if self.tuning_steps:
            # Fine-tuning starts over after every round, at a schedule's initial rate.
            rate = value_at(rate, 1)
            tuning = Tuning(rate, self.tuning_steps, getattr(method, "batch_size", None))
        # Give numbers one by one, because those in a dict would be structure.
        return partial(
            _demanding,
            num_steps=self.num_steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            num_unseen=self.num_unseen,
            tuning=tuning,
        )


def _demanding(
    rng_key: Any,
    tasks: list[Task],
    params: Any,
    *,
    batch_size: int | None,
    num_unseen: int,
    tuning: Tuning | None,
    **how: Any,
) -> list[Task]:
    own: Any

    def of_model(task: Task, params: Any, model: int | Index) -> OwnModels:
        # Quadratics have no batch size, because a client's loss has no examples.
        size = batch_size or (None if isinstance(task, Quadratic) else 32)
        return own_models(rng_key, task, params, model=model, batch_size=size, **how)

    if any(task is not tasks[0] for task in tasks):
        starts = [None] * len(tasks) if params is None else params
        own = [of_model(*one) for one in zip(tasks, starts, range(len(tasks)), strict=True)]
    else:
        # The own models of all clients might not fit in memory together. Train for one model at a
        # time.
        each = lax.map(partial(of_model, tasks[0], params), jnp.arange(len(tasks)))
        own = [jax.tree.map(itemgetter(model), each) for model in range(len(tasks))]
    options: Any = {"num_unseen": num_unseen, "tuning": tuning}
    return [requiring(task, mine, **options) for task, mine in zip(tasks, own, strict=True)]
