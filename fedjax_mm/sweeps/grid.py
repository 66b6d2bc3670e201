"""Grids: axes of settings, the points they span, and the setup of each point.

Numbers are program arguments, and structure is closed over. Seeds, axes of floats, and values
grouped by `together` become one replica axis of a compiled program. Every other value has its own
program.
"""

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from numbers import Real
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from fedjax_mm.asynchrony.dispatch import Dispatch
from fedjax_mm.base import Algorithm, Assignment, Params, Task
from fedjax_mm.checked import refusing_unknown
from fedjax_mm.checks import (
    check_choice,
    check_client_map,
    check_count,
    check_numbers,
    described,
    whole,
)
from fedjax_mm.chunks import ClientMap
from fedjax_mm.data.federated import FederatedData, check_federated
from fedjax_mm.parts import check_instance, check_seed
from fedjax_mm.record import RESERVED
from fedjax_mm.results.labels import check_selectable
from fedjax_mm.sweeps.until import Until


class Setup(NamedTuple):
    """Arguments of `simulate`, and the number of models in use, as returned by `build`.

    Attributes:
      tasks: one for all models, or one per model.
      algorithm: client training and aggregation; one for all models, or one per model.
      assignment: chooses clients and models; for asynchronous runs a `Dispatch`, such as that of
        `fedast`.
      params: the initial parameters; None lets the tasks draw them.
      num_models: the number of models in use, which may be traced, if the assignment's number is
        only an upper bound. Unused models are absent from the result and ignored by a target.
    """

    tasks: Task | Sequence[Task]
    algorithm: Algorithm | Sequence[Algorithm]
    assignment: Assignment | Dispatch
    params: Params | None = None
    num_models: int | Int[Array, ""] | None = None


@refusing_unknown
@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """The runs of a sweep: all points spanned by some axes, each with all seeds.

    The values on axes of floats are arguments of a compiled program. Every value on another axis
    has its own program, unless `together` groups it.

    Attributes:
      build: called with one value per axis and with the shared arguments, by name; returns the
        `Setup` to simulate. It is traced, and values of numeric axes are tracers.
      axes: names and values, in the order of the result's dimensions. A value may be any object
        that `build` accepts.
      num_rounds: T. With a `Dispatch`, a round is `arrivals_per_round` arrivals (see `fedast`).
      num_seeds: the number of replicas of each point. All points have the same seeds.
      seed: the root of all draws.
      shared: further arguments of `build`, by name, as pytrees of arrays, such as a task with its
        data. They are arguments of the compiled program rather than constants in it.
      per_seed: further arguments of `build`, by name, with one number per seed, such as the index
        of its data draw.
      record_every: the number of rounds between records, which must divide `num_rounds`.
      client_map: "auto", "vmap", "scan" or a chunk size, as in `simulate`.
      prepare: computes a pytree of arrays once per replica, before its first round, such as the
        clients' own models. It is called with the replica's key and all arguments of `build`,
        which then receives the result as `prepared`. It should derive its keys with
        `keys.preparation_key`.
      until: an early stopping target. Up to the target, records are bitwise identical to those of a
        run without it; afterwards metrics are NaN and counts constant. Runs computed together
        continue until all of them have reached it.
      together: a function for each axis whose values may share a program. Values for which it
        returns the same result share one, and `build` receives a `OneOf` with a traced number.
      cost: the relative cost of a local training at a point, for estimating the time left.
      first_seed: the number of the first seed, for adding seeds to an earlier run.
      data: "real", "synthetic" or "surrogate", for the manifest; defaults to "not stated".
      config: the settings that describe the runs, for the manifest and for checking an unfinished
        run; defaults to the axes.
      keep: "params" keeps the final parameters, as in `sweep`.

    Raises:
      ValueError, TypeError: if an argument is invalid.
    """

    build: Callable[..., Setup]
    axes: Mapping[str, Sequence[Any]]
    num_rounds: int
    num_seeds: int = 1
    seed: int = 0
    shared: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    per_seed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    record_every: int = 1
    client_map: ClientMap = "auto"
    prepare: Callable[..., Any] | None = None
    until: Until | None = None
    together: Mapping[str, Callable[[Any], Hashable]] = dataclasses.field(default_factory=dict)
    cost: Callable[..., float] | None = None
    first_seed: int = 0
    data: str = "not stated"
    config: Mapping[str, Any] | None = None
    keep: Literal["params"] | None = None

    def __post_init__(self) -> None:
        check_choice("keep", self.keep, None, "params")
        if not callable(self.build):
            raise TypeError(
                f"build is {described(self.build)}; give a function that returns Setup(tasks, "
                "algorithm, assignment)"
            )
        if not isinstance(self.axes, Mapping):
            raise TypeError(f"axes is {described(self.axes)}; give a dict of names and values")
        for name in ("shared", "per_seed"):
            object.__setattr__(self, name, getattr(self, name) or {})  # treats None as empty
        if self.until is not None:
            check_instance("until", self.until, Until, 'give one, as in Until("loss", at_most=0.1)')
        for name in ("num_rounds", "num_seeds", "record_every"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        object.__setattr__(self, "seed", check_seed("seed", self.seed))
        first = whole(self.first_seed)
        if first is None or not 0 <= first <= 2**31 - self.num_seeds:
            raise ValueError(
                f"first_seed is {described(self.first_seed)}; seeds are numbered 0 ... {2**31 - 1}"
            )
        object.__setattr__(self, "first_seed", first)
        check_records(self.num_rounds, self.record_every)
        object.__setattr__(self, "client_map", check_client_map(self.client_map))
        for name, values in self.per_seed.items():
            if np.ndim(values) != 1 or len(values) != self.num_seeds:
                raise ValueError(
                    f"per_seed[{name!r}] has shape {np.shape(values)}; give one number for each of "
                    f"{self.num_seeds} seeds"
                )
        # Fetch jax.Arrays, because their elements are device arrays rather than numbers.
        plain = {
            name: np.asarray(values) if isinstance(values, jax.Array) else values
            for name, values in self.axes.items()
        }
        object.__setattr__(self, "axes", plain)
        for name in self.axes:
            self._check_axis(name)
        self._check_build()
        for data in jax.tree.leaves(self.shared, is_leaf=lambda x: isinstance(x, FederatedData)):
            if isinstance(data, FederatedData):
                check_federated(data, stacked=True)
        for name in self.together:
            if name not in self.axes:
                raise ValueError(f"together has {name!r}; give names of {sorted(self.axes)}")

    def _check_build(self) -> None:
        given = [*self.axes, *self.shared, *self.per_seed]
        given += [] if self.prepare is None else ["prepared"]
        try:
            inspect.signature(self.build).bind(**dict.fromkeys(given))
        except TypeError as error:
            raise TypeError(
                f"build cannot be called with {', '.join(given) or 'nothing'}: {error}; give axes "
                "and shared arguments the names of its own"
            ) from None

    def _check_axis(self, name: str) -> None:
        values = self.axes[name]
        if name in (*RESERVED, "prepared", *self.shared, *self.per_seed):
            is_argument = name in self.shared or name in self.per_seed
            what = "an argument in shared or per_seed" if is_argument else "a part of every result"
            raise ValueError(f"an axis is called {name!r}, like {what}; rename it")
        check_selectable(name)
        check_values(name, values)
        if self.is_numeric(name):
            check_numbers(f"the axis {name!r}", values, np.isfinite, "be finite", ndim=1)

    def is_numeric(self, name: str) -> bool:
        """Whether an axis has floats, and possibly integers, so that one program covers all values.

        Booleans do not count as numbers.
        """
        if name in self.together:
            return False
        kinds = {np.asarray(v).dtype.kind if isinstance(v, Real) else "O" for v in self.axes[name]}
        return "f" in kinds and kinds <= {"f", "i", "u"}

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes and the number of seeds."""
        return *(len(values) for values in self.axes.values()), self.num_seeds

    @property
    def num_records(self) -> int:
        """The number of records after round 0."""
        return self.num_rounds // self.record_every

    @cached_property
    def labels(self) -> dict[str, list[Any]]:
        """The coordinates of every axis."""
        return {name: [label_of(value) for value in values] for name, values in self.axes.items()}

    def costs(self, index: Sequence[np.ndarray]) -> list[float]:
        """Returns the relative cost of a local training at the given positions on the axes."""
        if self.cost is None:
            return [1.0] * len(index[-1])
        axes = [
            [values[i] for i in at] for values, at in zip(self.axes.values(), index, strict=False)
        ]
        return [
            self.cost(**dict(zip(self.axes, at, strict=True))) for at in zip(*axes, strict=True)
        ]

    def setup(self, prepared: Any, **arguments: Any) -> Setup:
        """Calls `build` and checks the result."""
        more = {} if self.prepare is None else {"prepared": prepared}
        setup = self.build(**arguments, **more)
        if not isinstance(setup, Setup):
            raise ValueError(
                f"build returned {described(setup)}; return Setup(tasks, algorithm, assignment)"
            )
        return setup


def label_of(value: Any) -> Any:
    """Returns an axis value as a coordinate: plain values unchanged, others by name."""
    if isinstance(value, str | bool | int | float | np.generic):
        return value
    return getattr(value, "__name__", str(value))


def check_records(num_rounds: int, record_every: int) -> None:
    """Raises `ValueError` unless `record_every` divides the number of rounds."""
    if num_rounds % record_every:
        raise ValueError(f"record_every is {record_every}; it must divide {num_rounds} rounds")


def check_values(name: str, values: Any) -> None:
    """Raises `ValueError` unless the values of an axis have distinct labels."""
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
        raise ValueError(f"the axis {name!r} is {values!r}; give a list of values")
    if len(values) == 0:
        raise ValueError(f"the axis {name!r} has no values; give at least one")
    for value in values:
        # A label with a memory address differs between processes, so the sweep could not be
        # resumed.
        if " at 0x" in str(label_of(value)):
            raise ValueError(
                f"the axis {name!r} has {value!r}, whose name differs in every process; "
                "give it a __name__, or use a string that build looks up"
            )
    label, count = Counter(map(label_of, values)).most_common(1)[0]
    if count > 1:
        renamed = ", or give it another __name__" * any(map(callable, values))
        raise ValueError(f"the axis {name!r} has {label!r} twice; drop one{renamed}")
