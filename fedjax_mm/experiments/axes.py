"""The axes of an experiment, and checks of all points."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from fedjax_mm.base import Padded
from fedjax_mm.base.shuffles import RANK_LIMIT
from fedjax_mm.experiments.errors import closest
from fedjax_mm.experiments.fields import Config, Number
from fedjax_mm.experiments.overrides import replaced, settings_of, validate
from fedjax_mm.experiments.own import allowing_code
from fedjax_mm.experiments.point import Point
from fedjax_mm.sweeps.grid import check_values

NOT_SWEPT = (
    *("num_rounds", "num_seeds", "seed", "record_every", "client_map", "precision", "axes"),
    *("until", "params", "tasks", "together", "executor", "clients"),
)
"""Settings of an experiment that cannot be axes."""

# "model" is a dimension of results, and "loss" a metric. The others are needed before compilation.
NEVER_SWEPT = ("model", "hidden", "dropout_rate", "decay_rate", "loss", "metrics")
"""Keys of all tables that cannot be axes."""

_MOST = 5000  # limit on axis values, programs and draws, which cost time or memory


class Range(Config):
    """`num` numbers from `start` to `stop`, inclusive, spaced linearly or logarithmically.

    Attributes:
      start: the first number.
      stop: the last number.
      num: how many numbers there are.
      scale: "linear" for equal differences, or "log" for equal ratios.

    Example:
      >>> Range(start=0.01, stop=1.0, num=3, scale="log").values()
      [0.01, 0.1, 1.0]
    """

    start: Number
    stop: Number
    num: Annotated[int, Field(strict=True, ge=2, le=_MOST)]
    scale: Literal["linear", "log"] = "linear"

    @model_validator(mode="after")
    def _logarithms_exist(self) -> Self:
        if self.scale == "log" and min(self.start, self.stop) <= 0:
            raise ValueError(
                f"from {self.start:g} to {self.stop:g} in factors; both must be positive"
            )
        return self

    def values(self) -> list[float]:
        """The numbers, rounded to remove floating-point noise."""
        space = np.geomspace if self.scale == "log" else np.linspace
        return [float(f"{value:.12g}") for value in space(self.start, self.stop, self.num)]


def dotted(axes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the axes with their dotted names."""
    # Flatten nested tables, because TOML parses ``task.mu = [...]`` as one. Keep ranges, which
    # are tables without inner tables, lists or a `data_seed`.
    for key, value in axes.items():
        if isinstance(value, dict) and any(
            name == "data_seed" or isinstance(inner, dict | list) for name, inner in value.items()
        ):
            yield from ((f"{key}.{name}", inner) for name, inner in dotted(value))
        else:
            yield key, value


Axes = dict[str, Annotated[list[Any], Field(min_length=1, max_length=_MOST)] | Range]
"""The values of each axis, by the dotted name of a setting."""


class Points:
    """All points of a sweep, each of them a table in which the axes replace values.

    Attributes:
      base: the settings varied by the axes.
      values: the validated values of every axis, by key.
      names: maps the names of the result's dimensions to keys.
      draws: lists of validated points, without axes of floats. The points of one list differ only
        on axes of the data.
      joined: the keys of count axes whose values share a program, as given by `together`.
      every: the first of each list.
    """

    def __init__(
        self, base: Point, axes: Mapping[str, Any], together: Sequence[str] | None = None
    ) -> None:
        """Validates the points on each axis, and raises a `ValueError` about the first invalid one.

        Args:
          base: the settings varied by the axes.
          axes: values by setting key.
          together: the keys of count axes whose values share a program; `local_steps` by default
            if possible.
        """
        self.base = base
        _check_known(base, axes)
        self.names = _names(axes)
        self._raw = {
            key: self._range(key, values) if isinstance(values, Range) else values
            for key, values in axes.items()
        }
        self._made = dict[tuple[int, ...], Point]()
        at = {
            key: [self._at({key: place}) for place in range(len(values))]
            for key, values in self._raw.items()
        }
        self.values = {key: [self._value(here, key) for here in at[key]] for key in at}
        if "seed" in self.values.get("task.data_seed", ()):
            raise ValueError(
                'axes.task.data_seed: "seed" cannot be one of several; write it without a list'
            )
        real = [key for key, values in self.values.items() if all(type(v) is float for v in values)]
        of_data = [
            key
            for key in at
            if ((key in real and key.startswith("task.")) or key == "task.data_seed")
            and any(here.sources != at[key][0].sources for here in at[key])
        ]
        everywhere = [here for each in at.values() for here in each] or [base]
        self.joined = self._joined(everywhere, together)
        # Floats, rather than tables, are not combined until a grid is built.
        structural = [key for key in at if key not in (*real, *of_data)]
        self._check_number("programs", structural)
        by_seed = any(each.is_drawn_by_seed for here in everywhere for each in here.kinds_of_task)
        self._check_number("draws of the data", of_data, base.num_seeds if by_seed else 1)
        self.draws = [
            [self._at(places | there) for there in self._places(of_data)]
            for places in self._places(structural)
        ]
        self.every = [first for first, *_ in self.draws]
        for name, key in self.names.items():
            check_values(name, self.values[key])

    def _joined(self, everywhere: Sequence[Point], named: Sequence[str] | None) -> list[str]:
        """The count axes whose values share a program.

        Raises:
          ValueError: if the values of an axis in `named` cannot share a program.
        """
        able = [key for key in self.names.values() if all(x.can_join(key) for x in everywhere)]
        if named is None:
            # Exclude M, because rounds with a traced M take up to 2.7 times longer.
            return [key for key in able if key != "num_models"]
        for key in named:
            if key not in self.names.values():
                known = ", ".join(self.names.values()) or "none"
                raise ValueError(
                    f"together has {key!r}, which is not an axis; the axes are {known}"
                )
            if key not in able:
                raise ValueError(
                    f"together has {key!r}, whose values cannot share a program; only local_steps "
                    "and num_models can, of plain fedavg on the quadratic, and num_models by "
                    "mfa_rand or mfa_rr without params"
                )
        return list(named)

    def _check_number(self, of: str, keys: Sequence[str], each: int = 1) -> None:
        """Raises `ValueError` if the axes `keys` have too many points."""
        if (number := each * math.prod(len(self._raw[key]) for key in keys)) > _MOST:
            names = ", ".join(f"axes.{key} of {len(self._raw[key]):,} values" for key in keys)
            seeds = f"num_seeds = {each:,}" if each > 1 else ""
            raise ValueError(
                f"{' and '.join(filter(None, (names, seeds)))} make {number:,} {of}; at most "
                f"{_MOST:,} are possible: take fewer values, or several files"
            )

    def _range(self, key: str, values: Range) -> Sequence[float]:
        """A range's numbers, as ints if the setting is a count, which rejects floats."""
        numbers = values.values()
        if not all(number.is_integer() for number in numbers):
            return numbers
        try:
            self._checked({key: numbers[0]})
        except ValueError:
            return [int(number) for number in numbers]
        return numbers

    def _places(self, keys: Sequence[str]) -> Iterator[dict[str, int]]:
        """Yields all combinations of positions on some axes."""
        for places in itertools.product(*(range(len(self._raw[key])) for key in keys)):
            yield dict(zip(keys, places, strict=True))

    def name_of(self, key: str) -> str:
        """The name of an axis' dimension in the result."""
        return key.rpartition(".")[2]

    def at(self, point: Mapping[str, Any]) -> Point:
        """The validated settings of a point.

        Args:
          point: values by dimension name, with a `TracedInt` on joined axes. An axis that is not a
            setting of the experiment is a setting of the point's `algorithm`.
        """
        places = {key: self.values[key].index(point[name]) for name, key in self.names.items()}
        here = self._at(places, keep=False)  # a grid may have many more points than its axes
        for key in self.joined:
            value = point[self.name_of(key)]
            if key == "num_models":
                # Numbers of models below and above the limit are drawn by different methods.
                alike = [x for x in self.values[key] if (x > RANK_LIMIT) == (value > RANK_LIMIT)]
                changed: dict[str, Any] = {key: Padded(max(alike), value)}
            else:
                _, label, name = _path_of(key, here, point["algorithm"])
                method = here.algorithms[label].model_copy(update={name: value})
                changed = {"algorithms": {**here.algorithms, label: method}}
            here = here.model_copy(update=changed)
        return here

    def _at(self, places: Mapping[str, int], *, keep: bool = True) -> Point:
        """The validated settings at some positions on the axes, which default to the first."""
        # Set a value on every axis, because a rate swept within a table must be a table at all
        # points.
        place = tuple(places.get(key, 0) for key in self._raw)
        axes = zip(self._raw.items(), place, strict=True)
        here = self._made.get(place) or self._checked({key: x[i] for (key, x), i in axes})
        if keep:
            self._made[place] = here
        return here

    def _checked(self, point: Mapping[str, Any]) -> Point:
        """The validated settings with some values replaced."""
        if not point:
            return self.base
        # Validate only tables on the paths of axes, because the others have been validated already.
        values: Mapping[str, Any] = settings_of(self.base)
        values = {key: value for key, value in values.items() if key in Point.model_fields}
        for key, value in point.items():
            for label in self.base.algorithms:
                head, *rest = _path_of(key, self.base, label)
                if head == "task" and self.base.tasks is not None:  # applies to every model
                    each_task = [replaced(task, rest, value) for task in values["tasks"]]
                    values = values | {"tasks": each_task}
                else:
                    values = replaced(values, [head, *rest], value)
        where = ", ".join(f"{key} = {value}" for key, value in point.items())
        try:
            with allowing_code(self.base.allows_code):
                return validate(Point, values)
        except ValueError as error:
            raise ValueError(f"at {where}: {error}") from None

    def _value(self, here: Point, key: str) -> Any:
        """A setting of the point, or else of its first algorithm or task."""
        head, *rest = _path_of(key, self.base, next(iter(here.algorithms)))
        value: Any = here.each_task[0] if head == "task" else getattr(here, head)
        for name in rest:
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        return value


def _check_known(base: Point, axes: Mapping[str, Any]) -> None:
    """Raises `ValueError` if an axis is not a setting of the experiment or of any algorithm."""
    owners = [base, *base.algorithms.values()]
    fields = {name for owner in owners for name in type(owner).model_fields}
    known = sorted(fields - {"algorithms", "name", *NOT_SWEPT})
    tables = {name: each for owner in owners for name, each in owner if isinstance(each, Config)}
    for key in axes:
        head, _, rest = key.partition(".")
        if (
            head == "algorithms"
            and rest
            and (label := rest.partition(".")[0]) not in base.algorithms
        ):
            labels = ", ".join(base.algorithms)
            raise ValueError(f"axes.{key}: unknown algorithm {label!r}; choose from {labels}")
        if head not in fields:
            inside = [f"{name}.{key}" for name, x in tables.items() if head in type(x).model_fields]
            close = closest(head, known)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            hint = f"give {' or '.join(inside)}" if inside else hint
            raise ValueError(f"axes.{key}: unknown key, {hint}")


def _names(keys: Mapping[str, Any]) -> dict[str, str]:
    """The keys by dimension name."""
    names: dict[str, str] = {}
    for key in keys:
        name = key.rpartition(".")[2]
        if name in names:
            raise ValueError(f"axes.{key}: two axes are called {name!r}; sweep one of them")
        if key.partition(".")[0] in NOT_SWEPT or name in NEVER_SWEPT:
            raise ValueError(f"axes.{key}: it cannot vary within a sweep; run one for each")
        for other in keys:
            if other.startswith(f"{key}."):
                raise ValueError(f"axes.{other}: it is a part of {key}; sweep one of them")
        names[name] = key
    return names


def _path_of(key: str, base: Point, algorithm: str) -> list[str]:
    """The path of an axis in the settings of a point, or else of an algorithm.

    If an algorithm has its own assignment, the axes of the assignment belong to that algorithm.
    """
    path, own = key.split("."), ["algorithms", algorithm]
    if path[0] == "assignment" and base.algorithms[algorithm].assignment is not None:
        return [*own, *path]
    return path if path[0] in Point.model_fields else [*own, *path]
