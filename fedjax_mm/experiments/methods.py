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

from fedjax_mm import topologies
from fedjax_mm.algorithms import methods
from fedjax_mm.algorithms.attackers import attacked, noisy
from fedjax_mm.algorithms.reporting import reporting
from fedjax_mm.algorithms.sharing import personal
from fedjax_mm.assignments import assignments
from fedjax_mm.assignments.appealing import appealing
from fedjax_mm.assignments.peers import edges
from fedjax_mm.asynchrony.clock import on_clock
from fedjax_mm.asynchrony.delays import device_time, shifted_exponential
from fedjax_mm.asynchrony.dispatch import Dispatch, fedast
from fedjax_mm.asynchrony.planning import bods
from fedjax_mm.asynchrony.staleness import hinge, polynomial
from fedjax_mm.availability import laws
from fedjax_mm.availability.jobs import arriving, finishing
from fedjax_mm.availability.wrappers import available, dropping
from fedjax_mm.base import Algorithm, Assignment, Index, Padded, Task
from fedjax_mm.checks.annotations import members_of
from fedjax_mm.compression import compressed, qsgd, random_k, sign, top_k
from fedjax_mm.data.partition import generator
from fedjax_mm.experiments import fields
from fedjax_mm.experiments.fields import (
    Config,
    Count,
    FromFactory,
    NonNegative,
    Positive,
    keys_of,
    named,
    one_of,
    parameters_of,
    table_of,
    tables_of,
)
from fedjax_mm.experiments.optimizers import (
    InverseTime,
    OptimizingClients,
    OptimizingServer,
    Rate,
    rate_of,
)
from fedjax_mm.local import local_sgd
from fedjax_mm.privacy.mechanism import AdaptiveClip, private
from fedjax_mm.robust import attacks, rules
from fedjax_mm.robust.aggregation import robust
from fedjax_mm.robust.backdoor import backdoored
from fedjax_mm.schedules import value_at
from fedjax_mm.tasks.quadratic import Quadratic
from fedjax_mm.tasks.requirements import OwnModels, Tuning, own_models, requiring


class Wrapper(Config):
    """Settings of a wrapper of algorithms or assignments, and of its part, selected by name.

    Attributes:
      wrapper: the wrapper. Its first argument is the wrapped algorithm or assignment. Its second
        one is the part that `factory` makes, unless `factory` is the wrapper.
    """

    wrapper: ClassVar[Any] = None

    def wrap(self, inside: Any) -> Any:
        """Wraps an algorithm or an assignment."""
        kind = type(self)
        part = [] if kind.factory is kind.wrapper else [self.call()]
        given = self.arguments(kind.wrapper).items()
        own = {key: x.call() if isinstance(x, Config) else x for key, x in given}
        return kind.wrapper(inside, *part, **own)


class Choosing(Wrapper):
    """Settings of a wrapper whose part is selected by name."""

    name: str


def _wrapper(wrapper: Callable[..., Any], base: Any = Choosing, **types: Any) -> type[Wrapper]:
    """Makes the table of a wrapper, with the keys of its signature."""
    made = keys_of(wrapper, **types)(create_model(wrapper.__name__, __base__=base))
    made.wrapper = wrapper
    return made


_FINISHING = _wrapper(finishing, Wrapper)
_APPEALING = _wrapper(appealing, Wrapper)

_EACH = fields.Share | tuple[fields.Share, ...]
_LAW_TYPES: dict[str, Any] = {
    **dict.fromkeys(["probability", "comes", "leaves"], _EACH),
    "intervals": tuple[tuple[tuple[NonNegative, Positive], ...], ...],
}
_LAWS = (laws.bernoulli, laws.markov, laws.cyclic, laws.timetable)
_AVAILABLE = tables_of(_wrapper(available), _LAWS, **_LAW_TYPES)

_NETWORKS = (
    *(topologies.ring, topologies.torus, topologies.star, topologies.graph, topologies.network),
    *(topologies.random_regular, topologies.directed, topologies.exponential),
    *(topologies.matching, topologies.cloud, topologies.server),
)
_WHERE: Any = str | Annotated[tuple[str, ...], Field(min_length=1)]
_MIXING = tables_of(
    _wrapper(topologies.mixing, where=_WHERE | None),
    _NETWORKS,
    edges=tuple[tuple[fields.CountOrZero, fields.CountOrZero], ...],
    W=tuple[tuple[fields.Number, ...], ...],
)

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


class Delays(Config):
    """A law of delays, the durations of local trainings, selected by name."""


_DELAYS = tables_of(Delays, (shifted_exponential, device_time), "num_clients", **_DELAY_TYPES)


class Staleness(Config):
    """A weight of updates by their staleness, selected by name."""


_STALENESS = tables_of(Staleness, (polynomial, hinge))


@keys_of(on_clock)
class Assigned(Config):
    """An assignment or dispatch, selected by name, with absent or late clients and a clock.

    Attributes:
      mixing: lets models mix with others, see `mixing`.
      finishing: lets models finish when they meet a target, see `finishing`.
      arriving: the number of completed rounds after which each model arrives, see `arriving`.
      appealing: lets clients opt out of models that do not appeal to them, see `appealing`.
      available: lets clients be absent, see `available`.
      dropping: the probability that a message is lost.
      delay: the delays of a clock, which times each round by its slowest client.
    """

    name: str
    mixing: Annotated[Wrapper, one_of(_MIXING)] | None = None
    finishing: Annotated[Wrapper, one_of(_FINISHING)] | None = None
    arriving: tuple[fields.CountOrZero, ...] | None = None
    appealing: Annotated[Wrapper, one_of(_APPEALING)] | None = None
    available: Annotated[Wrapper, one_of(_AVAILABLE)] | None = None
    dropping: fields.Share | None = None
    first: FromFactory
    deadline: FromFactory
    delay: Annotated[Delays, one_of(_DELAYS), named(DEFAULT_DELAYS)] | None = None

    @property
    def can_be_padded(self) -> bool:
        """Whether the number of models may be the argument of a program."""
        takes = inspect.signature(type(self).factory, eval_str=True).parameters
        number = takes["num_models"].annotation if "num_models" in takes else None
        others = self.changed & {"appealing", "available", "mixing", "processors"}
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
        delay = self.delay and self.delay.call(num_clients=num_clients)
        if "delay" in parameters_of(factory):  # the factory has its own clock
            of_fedast = factory is fedast
            why = "draws clients one by one" if of_fedast else "plans with all its clients"
            jobs = () if of_fedast else ("finishing", "arriving")
            for name in (
                *jobs,
                "mixing",
                "appealing",
                "available",
                "dropping",
                "first",
                "deadline",
            ):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is not for {self.name}, which {why}")
            made = {key: x.call() for key, x in self if isinstance(x, Staleness)}
            return self._as_jobs(self.call(**sizes, delay=delay, **made))
        drawn: Assignment = self.call(**sizes)
        drawn = self._as_jobs(self.mixing.wrap(drawn) if self.mixing else drawn)
        for wrapper in filter(None, (self.appealing, self.available)):
            drawn = wrapper.wrap(drawn)
        if delay:
            drawn = on_clock(drawn, delay, first=self.first, deadline=self.deadline)
        elif self.first is not None or self.deadline is not None:
            raise ValueError(
                "first and deadline are for a clock; add a delay, such as delay = { mean = 1.0 }"
            )
        return drawn if self.dropping is None else dropping(drawn, self.dropping)

    def _as_jobs(self, rule: Any) -> Any:
        rule = self.finishing.wrap(rule) if self.finishing else rule
        return rule if self.arriving is None else arriving(rule, self.arriving)


_FACTORIES: dict[str, Any] = {**assignments(), "bods": bods, "fedast": fedast}

_SIZES = "num_clients", "num_models"
_WEIGHT: dict[str, Any] = {"weight": Annotated[Staleness, one_of(_STALENESS)] | None}

ASSIGNMENT_TABLES = tables_of(Assigned, _FACTORIES.values(), *_SIZES)
ASSIGNMENT_TABLES |= tables_of(Assigned, [fedast], *_SIZES, **_WEIGHT)
ASSIGNMENT_TABLES |= tables_of(
    Assigned, [edges], *_SIZES, edge_of=tuple[fields.CountOrZero, ...] | None
)
"""The tables of all assignments in a file, and of the dispatch, by `name`."""

AssignmentConfig = Annotated[Assigned, one_of(ASSIGNMENT_TABLES)]
"""The table of any assignment."""

_PERSONAL = _wrapper(personal, Wrapper, where=_WHERE)
_COMPRESSED = tables_of(_wrapper(compressed), (top_k, random_k, qsgd, sign))
_ADAPTIVE = keys_of(AdaptiveClip)(create_model("AdaptiveClip", __base__=Config))

Privacy = _wrapper(private, Wrapper, adaptive=_ADAPTIVE | None)
"""The table of privacy."""


class Robust(Choosing):
    """A rule of robust aggregation, selected by name, and what happens before it.

    Attributes:
      bucket_size: the number of updates in a bucket, whose means the rule gets; see `bucketing`.
      mixed_attackers: the number of attackers among whose updates each is replaced by the mean of
        its nearest neighbors; see `nearest_neighbor_mixing`. Mixing comes before buckets.
    """

    bucket_size: Count | None = None
    mixed_attackers: fields.CountOrZero | None = None

    def call(self, **given: Any) -> rules.Rule:
        """Builds the rule."""
        rule: rules.Rule = super().call(**given)
        rule = rule if self.bucket_size is None else rules.bucketing(rule, self.bucket_size)
        mixed = self.mixed_attackers
        return rule if mixed is None else rules.nearest_neighbor_mixing(rule, mixed)


_RULES = (
    *(rules.mean, rules.median, rules.trimmed_mean, rules.krum, rules.multi_krum, rules.bulyan),
    *(rules.geometric_median, rules.centered_clipping),
)
_ROBUST = tables_of(_wrapper(robust, Robust), _RULES)


class Method(OptimizingClients):
    """A method, selected by name, its local training and, unless all share one, its assignment.

    A method's table also has a key for each argument of `local_sgd`. Updates without clients' own
    parts are compressed first, then clipped, and then aggregated.

    Attributes:
      personal: lets clients keep a part of the model.
      compression: compresses the clients' updates.
      privacy: clips the updates, and adds noise.
      robust: aggregates the updates by a rule, instead of their sum.
      reports_updates: lets the assignment see the clients' updates, as `cfl` needs.
      assignment: chooses clients and models; defaults to the experiment's.
      learning_rate: eta of clients, a number or the table of a schedule.
    """

    name: str
    personal: Annotated[Wrapper, one_of(_PERSONAL)] | None = None
    compression: Annotated[Wrapper, one_of(_COMPRESSED)] | None = None
    privacy: Annotated[Wrapper, one_of(Privacy)] | None = None
    robust: Annotated[Wrapper, one_of(_ROBUST)] | None = None
    reports_updates: bool = False
    assignment: AssignmentConfig | None = None
    learning_rate: Rate
    renamed: ClassVar = {"local_steps": "steps"}

    @property
    def has_closed_form(self) -> bool:
        """Whether a task may have a closed form of its local training, for any number of steps."""
        plain = {"name", "assignment", "learning_rate", "local_steps"}
        is_smooth = isinstance(self.learning_rate, float | InverseTime)
        return self.name == DEFAULT_METHOD and self.changed <= plain and is_smooth

    @property
    def needs_thresholds(self) -> bool:
        """Whether clients need thresholds, as of a table `requirement`."""
        return self.name in ("maxfl", "mwfed")

    def schedule(self, num_models: int, num_rounds: int = 1) -> Any:
        """The learning rate for factories, as a number or a schedule over rounds."""
        return rate_of(self.learning_rate, num_models, num_rounds)

    def build(self, num_models: int, num_rounds: int = 1) -> Algorithm:
        """Builds the algorithm.

        Args:
          num_models: M, the number of rounds per frame, for schedules per frame.
          num_rounds: T, the last round of schedules without a length.
        """
        rate, optimizer = self.schedule(num_models, num_rounds), self.local_optimizer()
        how = self.arguments(local_sgd) | {"learning_rate": rate, "optimizer": optimizer}
        given: dict[str, Any] = {"local": local_sgd(**how)}
        if isinstance(self, OptimizingServer):
            given["server_optimizer"] = self.build_server_optimizer(num_models, num_rounds)
        algorithm: Algorithm = self.call(**given)
        for each in filter(None, (self.personal, self.compression, self.privacy, self.robust)):
            algorithm = each.wrap(algorithm)
        return reporting(algorithm) if self.reports_updates else algorithm


DEFAULT_METHOD = "fedavg"
"""The method of a table without a `name`."""

_TRAINING = keys_of(local_sgd)(Method)


def _method_table(factory: Callable[..., Algorithm], **types: Any) -> type[Method]:
    """Builds a method's table, with its own arguments and those of `local_sgd`."""
    base: Any = _TRAINING
    if "server_optimizer" in parameters_of(factory):
        base = create_model("Method", __base__=(_TRAINING, OptimizingServer))
    return table_of(base, factory, "local", **types)


METHOD_TABLES = {name: _method_table(factory) for name, factory in methods().items()}
"""The tables of all methods in a file, by `name`."""

MethodConfig = Annotated[Method, one_of(METHOD_TABLES, _method_table), named(DEFAULT_METHOD)]
"""The table of any method."""


DemandFn = Callable[[Any, list[Task], Any], list[Task]]
"""``(rng_key, tasks, params) -> tasks``, whose clients have thresholds. Own models start from the
parameters, or else from those that a task draws."""


class Attacking(Config):
    """An attack, selected by name, for `attacking`."""

    def on_tasks(self, clients: Any) -> Callable[[Task], Task] | None:
        """A function that wraps the task on which attackers train, or None."""
        del clients
        return None

    def wrap(self, algorithm: Algorithm, clients: Any) -> Algorithm:
        """Wraps an algorithm with `attacking`."""
        return attacks.attacking(algorithm, clients, self.call())


@keys_of(backdoored)
class Backdoor(Attacking):
    """Settings of `backdoored`: attackers train on stamped images.

    Attributes:
      factor: multiplies the attackers' updates, as `scaling` does.
    """

    name: Literal["backdoor"]
    target: FromFactory
    size: FromFactory
    value: FromFactory
    share: FromFactory
    factor: fields.Number | None = None

    def on_tasks(self, clients: Any) -> Callable[[Task], Task]:
        """A function that wraps a task with `backdoored`."""
        return partial(backdoored, clients=clients, **self.arguments(backdoored))

    def wrap(self, algorithm: Algorithm, clients: Any) -> Algorithm:
        """Scales the attackers' updates if there is a factor."""
        if self.factor is None:
            return algorithm
        return attacks.attacking(algorithm, clients, attacks.scaling(self.factor))


_SENT = (attacks.sign_flip, attacks.scaling, attacks.gaussian, attacks.alie, attacks.ipm)
_ATTACKS = tables_of(Attacking, _SENT) | {"backdoor": Backdoor}


@keys_of(noisy)
@keys_of(attacked)
class Byzantine(Config):
    """Settings of attackers, a fraction of the training clients, for `attacked` and `noisy`.

    Attributes:
      fraction: the fraction of attackers, whose number is rounded up.
      noise: the standard deviation of the noise in an attacker's update, divided by the root mean
        square of the update.
      stays: whether attackers always participate; if false, they may opt out.
      seed: the seed that chooses the attackers.
      attack: an attack on updates or training data, which replaces the noise.
    """

    fraction: fields.Share
    loss_factor: FromFactory
    noise: FromFactory
    stays: FromFactory
    seed: fields.Seed = 0
    attack: Annotated[Attacking, one_of(_ATTACKS)] | None = None

    def attackers(self, num_clients: int) -> Any:
        """A mask of the `num_clients` training clients that attack."""
        place = generator(self.seed).permutation(num_clients)
        # In float32, (k / num_clients) * num_clients may exceed k. Subtract a little.
        return jnp.asarray(place < self.fraction * num_clients - 1e-3)

    def on_tasks(self, num_clients: int) -> Callable[[Task], Task]:
        """A function that wraps a task with `attacked`, and with `backdoored`."""
        clients = self.attackers(num_clients)
        # Return a partial, whose numbers sweeps find.
        wrap = partial(attacked, clients=clients, **self.arguments(attacked))
        inner = self.attack.on_tasks(clients) if self.attack else None
        return partial(_both, inner, wrap) if inner else wrap

    def wrap(self, algorithm: Algorithm, num_clients: int) -> Algorithm:
        """Wraps an algorithm with `noisy` or `attacking`, for attackers among `num_clients`."""
        clients = self.attackers(num_clients)
        if self.attack is None:
            return noisy(algorithm, clients, **self.arguments(noisy))
        return self.attack.wrap(algorithm, clients)


def _both(inner: Callable[[Task], Task], outer: Callable[[Task], Task], task: Task) -> Task:
    return outer(inner(task))


@keys_of(requiring, "own", "participation")
@keys_of(own_models, "rng_key", "model")
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

    num_steps: FromFactory
    learning_rate: Positive = 0.05
    batch_size: FromFactory
    num_unseen: FromFactory
    tuning_steps: fields.CountOrZero = 0

    def demand(self, method: Method, rate: Any) -> DemandFn:
        """A function that trains the clients' own models and gives tasks their thresholds.

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
        how = self.arguments(own_models)
        return partial(_demanding, num_unseen=self.num_unseen, tuning=tuning, **how)


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
