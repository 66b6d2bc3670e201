"""Optimizers and learning rates in an experiment file, with the names and settings of optax."""

from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Literal

import optax
from pydantic import Discriminator, Field, Tag, create_model

from fedjax_mm.experiments.fields import (
    BelowOne,
    Config,
    Count,
    CountOrZero,
    NonNegative,
    OneOf,
    Positive,
    keys_of,
    one_of,
    table_of,
    tables_of,
)
from fedjax_mm.local import LocalOptimizer
from fedjax_mm.optimizers import fedadagrad, fedadam, fedyogi
from fedjax_mm.schedules import Schedule, inverse_time, per_frame

Per = Literal["round", "frame"]


class InverseTime(Config):
    """The decaying rate beta / (t + gamma), per round t or per frame l = 1 + floor((t - 1) / M).

    Attributes:
      schedule: "inverse_time", which may be omitted.
      beta: the numerator.
      gamma: delays the decay.
      per: "frame" counts frames of `num_models` rounds instead of rounds.
    """

    factory = inverse_time
    schedule: Annotated[Literal["inverse_time"], Field(exclude=True)] = "inverse_time"
    beta: Positive
    gamma: NonNegative
    per: Per = "round"

    def build(self, num_models: int, num_rounds: int) -> Schedule:
        """Builds the schedule over rounds t = 1, 2, ..."""
        del num_rounds
        schedule: Schedule = self.call()
        return per_frame(schedule, num_models) if self.per == "frame" else schedule


class Scheduled(Config):
    """An optax schedule after a linear warm-up from 0, where count 0 is round 1 (or frame 1).

    Lengths are in rounds (or frames). By default a schedule lasts from the end of the warm-up to
    the last round (or frame).

    Attributes:
      schedule: the name of the schedule.
      warmup_steps: the length of the warm-up, in which the rate rises from 0 to `start`.
      per: "frame" counts frames of `num_models` rounds instead of rounds.
    """

    renamed: ClassVar = {"start": "init_value", "end": "end_value"}
    schedule: str
    warmup_steps: CountOrZero = 0
    per: Per = "round"

    def build(self, num_models: int, num_rounds: int) -> Schedule:
        """Builds the schedule over rounds t = 1, 2, ...

        Raises:
          ValueError: if the warm-up takes all rounds.
        """
        length = -(-num_rounds // num_models) if self.per == "frame" else num_rounds
        if self.warmup_steps >= length:
            raise ValueError(
                f"learning_rate: warmup_steps is {self.warmup_steps}, of {length} {self.per}s in "
                "all; give fewer"
            )
        lengths = {key: x or length - self.warmup_steps for key, x in self if key in _LENGTHS}
        schedule: Any = self.call(**lengths)
        if self.warmup_steps:
            rise = optax.linear_schedule(0.0, dict(self)["start"], self.warmup_steps)
            schedule = optax.join_schedules([rise, schedule], [self.warmup_steps])

        def at(t: Any) -> Any:
            return schedule(t - 1)

        return per_frame(at, num_models) if self.per == "frame" else at

    def __str__(self) -> str:
        return in_short(self, self.schedule)


def in_short(config: Config, name: str) -> str:
    """A label: the name with the settings that are not defaults."""
    fields = type(config).model_fields
    changed = [
        f"{key}={value}"
        for key, value in config
        if key not in ("name", "schedule", "code") and value != fields[key].default
    ]
    return f"{name}({', '.join(changed)})" if changed else name


_SCHEDULES: dict[str, Callable[..., Any]] = {
    "cosine": optax.cosine_decay_schedule,
    "exponential": optax.exponential_decay,
    "linear": optax.linear_schedule,
    "polynomial": optax.polynomial_schedule,
}
_LENGTHS = {"decay_steps", "transition_steps"}


_SCHEDULE_TYPES: dict[str, Any] = {
    **dict.fromkeys(_LENGTHS, (Count | None, None)),
    "init_value": Positive,
    "end_value": NonNegative | None,
    "transition_begin": CountOrZero,
}


def _schedule_table(name: str, factory: Callable[..., Any]) -> type[Scheduled]:
    schedule: Any = Literal[name], ...
    table = create_model(name, __base__=Scheduled, schedule=schedule)
    return keys_of(factory, **_SCHEDULE_TYPES)(table)


SCHEDULE_TABLES = {name: _schedule_table(name, factory) for name, factory in _SCHEDULES.items()}
"""The tables of optax's schedules in a file, by `schedule`."""


def schedule(rate: Any) -> str:
    """The name of the schedule in a table, or in the object built from it."""
    given = rate.get("schedule") if isinstance(rate, dict) else getattr(rate, "schedule", None)
    return given or "inverse_time"


_TABLES = {"inverse_time": InverseTime, **SCHEDULE_TABLES}
_AnySchedule: Any = Annotated[
    reduce(or_, (Annotated[table, Tag(name)] for name, table in _TABLES.items())),
    Discriminator(schedule),
]

Rate = Annotated[
    float | InverseTime | Scheduled,
    OneOf(_TABLES.values(), Positive | _AnySchedule),
]
"""A learning rate: a number, or the table of a schedule."""


def rate_of(rate: Any, num_models: int, num_rounds: int) -> Any:
    """A rate for factories, as a number or a schedule over rounds.

    Args:
      rate: the validated setting.
      num_models: M, the number of models.
      num_rounds: T, the number of rounds.
    """
    is_table = isinstance(rate, InverseTime | Scheduled)
    return rate.build(num_models, num_rounds) if is_table else rate


class Optimizer(Config):
    """An optimizer of optax or of `fedjax_mm.optimizers`, selected by name, and its settings."""

    name: str

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that differ from optax's, and the numbers that the table gives."""
        # Points of an axis share a program although one of its numbers may be optax's own.
        fields, given = type(self).model_fields, self.model_fields_set
        return {
            key: x
            for key, x in self
            if key not in ("name", "learning_rate", "code")
            and (x != fields[key].default or (isinstance(x, float) and key in given))
        }

    def __str__(self) -> str:
        return in_short(self, self.name)


_OPTIMIZERS = (
    *("adabelief", "adagrad", "adam", "adamw", "amsgrad", "lamb", "lion", "radam", "rmsprop"),
    *("sgd", "yogi"),
)
_RATED = create_model("Optimizer", __base__=Optimizer, learning_rate=(Rate, ...))
_BASES = dict.fromkeys(_OPTIMIZERS, _RATED)
_BASES["sgd"] = create_model("Optimizer", __base__=Optimizer, learning_rate=(Rate, 1.0))

# State these ranges here, because optax neither annotates nor checks them.
_RANGES: dict[str, Any] = {
    **dict.fromkeys(("b1", "b2", "decay"), BelowOne),
    **dict.fromkeys(("eps", "eps_root", "initial_accumulator_value", "weight_decay"), NonNegative),
    "momentum": BelowOne | None,
}

_OPTAX = [getattr(optax, name) for name in _OPTIMIZERS]
OPTIMIZER_TABLES = tables_of(Optimizer, _OPTAX, "learning_rate", **_RANGES)
"""The tables of client optimizers, by `name`. They use the method's learning rate."""

SERVER_OPTIMIZER_TABLES = {
    name: table_of(base, getattr(optax, name), **_RANGES) for name, base in _BASES.items()
} | {each.__name__: table_of(_RATED, each) for each in (fedadagrad, fedadam, fedyogi)}
"""The tables of server optimizers, by `name`. Each has its own learning rate."""


class OptimizingClients(Config):
    """Settings of methods whose clients may use an optimizer other than SGD.

    Attributes:
      optimizer: the clients' optimizer, whose state is reset every round; SGD by default.
    """

    optimizer: Annotated[Optimizer, one_of(OPTIMIZER_TABLES)] | None = None

    def local_optimizer(self) -> LocalOptimizer:
        """A function that maps the round's rate to the clients' optimizer."""
        if self.optimizer is None:
            return optax.sgd
        # Return `optax.sgd` itself if possible, because tasks may solve SGD in closed form.
        make, settings = type(self.optimizer).factory, self.optimizer.settings
        return partial(make, **settings) if settings else make


class OptimizingServer(Config):
    """Settings of methods whose server may use an optimizer instead of adding the mean update.

    Attributes:
      server_optimizer: the server's optimizer, whose gradient is minus the mean update.
    """

    server_optimizer: Annotated[Optimizer, one_of(SERVER_OPTIMIZER_TABLES)] | None = None

    def build_server_optimizer(
        self, num_models: int, num_rounds: int
    ) -> optax.GradientTransformation | None:
        """Builds the server optimizer, whose schedules count the rounds that train the model."""
        own: Any = self.server_optimizer
        if own is None:
            return None
        rate = rate_of(own.learning_rate, num_models, num_rounds)
        # Add 1, because optax counts from 0 and our schedules count rounds from 1.
        counted = (lambda count: rate(count + 1)) if callable(rate) else rate
        made: optax.GradientTransformation = type(own).factory(counted, **own.settings)
        return made
