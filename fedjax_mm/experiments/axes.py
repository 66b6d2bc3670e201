"""The axes of an experiment: what varies, checked at every point."""

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from fedjax_mm.experiments.fields import Config, Number, Numbers
from fedjax_mm.experiments.overrides import replaced, validate

if TYPE_CHECKING:
    from fedjax_mm.experiments.experiment import Experiment

_NOT_SWEPT = (
    *("num_rounds", "num_seeds", "seed", "record_every", "client_map", "precision", "axes"),
    "until",
)


class Range(Config):
    """`num` numbers from `start` to `stop`, both included, equally spaced or, with "log", factors.

    Example:
      >>> Range(start=0.01, stop=1.0, num=3, scale="log").values()
      [0.01, 0.1, 1.0]
    """

    start: Number
    stop: Number
    num: Annotated[int, Field(strict=True, ge=2, lt=2**31)]
    scale: Literal["linear", "log"] = "linear"

    @model_validator(mode="after")
    def _logarithms_exist(self) -> Self:
        if self.scale == "log" and min(self.start, self.stop) <= 0:
            raise ValueError(
                f"from {self.start:g} to {self.stop:g} in factors; both must be positive"
            )
        return self

    def values(self) -> list[float]:
        """The numbers, without digits that are round-off."""
        space = np.geomspace if self.scale == "log" else np.linspace
        return [float(f"{value:.12g}") for value in space(self.start, self.stop, self.num)]


def _dotted(axes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the axes by their full names."""
    # TOML reads ``task.mu = [...]`` as a table within a table; a range is a table of numbers.
    for key, value in axes.items():
        if isinstance(value, dict) and any(isinstance(v, dict | list) for v in value.values()):
            yield from ((f"{key}.{name}", inner) for name, inner in _dotted(value))
        else:
            yield key, value


Axes = Annotated[
    dict[str, Annotated[list[Any], Field(min_length=1)] | Range],
    BeforeValidator(lambda axes: dict(_dotted(axes)) if isinstance(axes, dict) else axes),
]
"""Values by the keys of settings."""


class Points:
    """All points of an experiment's axes, checked.

    Attributes:
      values: the checked values on every axis, by its key.
      names: the keys by the names of the result's dimensions.
    """

    def __init__(self, experiment: "Experiment") -> None:
        """Checks all points. Raises `ValueError` naming the first that is wrong."""
        self._experiment = experiment
        raw = {
            key: values.values() if isinstance(values, Range) else values
            for key, values in experiment.axes.items()
        }
        self.names = _names(raw)
        # Every point has a value on every axis: a rate swept inside a table is a table everywhere.
        first = {key: values[0] for key, values in raw.items()}
        self.values = {
            key: [self._value(self._at(first | {key: value}), key) for value in raw[key]]
            for key in raw
        }
        # Floats become arguments of one program, unless tables stand beside them.
        self._structural = [
            key for key, values in self.values.items() if not all(type(v) is float for v in values)
        ]
        self._experiments = {}
        for choice in itertools.product(*(range(len(raw[key])) for key in self._structural)):
            point = {key: raw[key][i] for key, i in zip(self._structural, choice, strict=True)}
            self._experiments[choice] = self._at(first | point)

    def at(self, algorithm: str, point: Mapping[str, Any]) -> tuple["Experiment", Numbers]:
        """Returns the checked experiment at a point, and its numbers, which may be traced.

        Args:
          algorithm: the label; axes without a table of their own are of its settings.
          point: values by the names of dimensions.
        """
        choice = tuple(
            self.values[key].index(point[name])
            for name, key in self.names.items()
            if key in self._structural
        )
        here, numbers = self._experiments[choice], dict[str, Any]()
        for name, key in self.names.items():
            if key not in self._structural:
                numbers = replaced(numbers, _path_of(key, here, algorithm), point[name])
        return here, numbers

    def _at(self, point: Mapping[str, Any]) -> "Experiment":
        """Returns the checked experiment at one point."""
        experiment = self._experiment
        if not point:
            return experiment
        # Plain data again: values of axes are checked as a file's are, with the same words.
        values = experiment.model_dump(exclude={"axes"})
        for key, value in point.items():
            for label in experiment.algorithms:
                values = replaced(values, _path_of(key, experiment, label), value)
        where = ", ".join(f"{key} = {value}" for key, value in point.items())
        try:
            here = validate(type(experiment), values)
        except ValueError as error:
            raise ValueError(f"at {where}: {error}") from None
        if here.task.source != experiment.task.source:
            raise ValueError(f"at {where}: it changes the data; run one for each")
        return here

    def _value(self, here: "Experiment", key: str) -> Any:
        """Returns a setting, of the first algorithm if it is one of theirs."""
        value: Any = here
        for name in _path_of(key, self._experiment, next(iter(here.algorithms))):
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        return value


def _names(keys: Mapping[str, Any]) -> dict[str, str]:
    """Returns the keys by the names of dimensions."""
    names: dict[str, str] = {}
    for key in keys:
        name = key.rpartition(".")[2]
        if name in names:
            raise ValueError(f"axes.{key}: two axes are called {name!r}; sweep one of them")
        # Results have a dimension "model" already; a module's rate of dropout and an exponential
        # schedule's rate of decay are no arguments: flax and optax want them before compiling.
        if key.partition(".")[0] in _NOT_SWEPT or name in ("model", "dropout_rate", "decay_rate"):
            raise ValueError(f"axes.{key}: it cannot vary within a sweep; run one for each")
        for other in keys:
            if other.startswith(f"{key}."):
                raise ValueError(f"axes.{other}: it is a part of {key}; sweep one of them")
        names[name] = key
    return names


def _path_of(key: str, experiment: "Experiment", algorithm: str) -> list[str]:
    """Returns where an axis is in an experiment: its own settings first, then the algorithm's.

    An assignment is the algorithm's if it has one.
    """
    path, own = key.split("."), ["algorithms", algorithm]
    if path[0] == "assignment" and experiment.algorithms[algorithm].assignment is not None:
        return [*own, *path]
    return path if path[0] in type(experiment).model_fields else [*own, *path]
