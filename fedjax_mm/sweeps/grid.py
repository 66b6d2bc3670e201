"""Grids: axes of settings, the points they span, and the setup of each point.

Every point is built in plain Python. `stacking.py` groups the points by structure.
"""

import dataclasses
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, TypedDict

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from fedjax_mm.asynchrony.dispatch import Dispatch
from fedjax_mm.base import Algorithm, Assignment, Params, Task
from fedjax_mm.base.calls import Part, in_html, in_short
from fedjax_mm.base.chunks import ClientMap
from fedjax_mm.base.programs import TracedInt
from fedjax_mm.checks.annotations import refusing_unknown
from fedjax_mm.checks.instances import check_instance, check_seed
from fedjax_mm.checks.values import (
    check_choice,
    check_client_map,
    check_count,
    check_numbers,
    described,
    tracing,
    whole,
)
from fedjax_mm.results.labels import check_selectable
from fedjax_mm.simulator.record import RESERVED
from fedjax_mm.sweeps.until import Until


class Setup(NamedTuple):
    """Arguments of `simulate`, and the number of models in use, as returned by `build`.

    Attributes:
      tasks: one for all models, or one per model.
      algorithm: client training and aggregation; one for all models, or one per model.
      assignment: chooses clients and models; for asynchronous runs a `Dispatch`, such as that of
        `fedast`.
      params: the initial parameters; None lets the tasks draw them.
      num_models: the number of models in use, if the assignment's number is only an upper bound.
        Unused models are absent from the result and ignored by a target.
      prepare: changes the setup of a run before its first round, for example by training the
        clients' own models. It is called with the run's key and this setup, and returns another
        one; it is compiled, and should derive its keys with `keys.preparation_key`.
    """

    tasks: Task | Sequence[Task]
    algorithm: Algorithm | Sequence[Algorithm]
    assignment: Assignment | Dispatch
    params: Params | None = None
    num_models: int | None = None
    prepare: Callable[[PRNGKeyArray, "Setup"], "Setup"] | None = None

    def __repr__(self) -> str:
        return in_short(self)

    def _repr_html_(self) -> str:
        return in_html(self)

    def prepared(self, rng_key: PRNGKeyArray) -> "Setup":
        """The setup that `prepare` makes, or this one.

        Raises:
          ValueError: if it makes something else.
        """
        if self.prepare is None:
            return self
        with tracing("a sweep's prepare"):
            changed = self.prepare(rng_key, self._replace(prepare=None))
        if not isinstance(changed, Setup):
            raise ValueError(f"prepare returned {described(changed)}; return the changed Setup")
        return changed


class Settings(TypedDict, total=False):
    """Settings of `Grid` that `sweep` takes by name."""

    num_rounds: int
    num_seeds: int
    seed: int
    record_every: int
    client_map: ClientMap
    until: Until | None
    together: Sequence[str]
    cost: Callable[..., float] | None
    first_seed: int
    data: str
    config: Mapping[str, Any] | None


@refusing_unknown
@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """The runs of a sweep: all points spanned by some axes, each with all seeds.

    Points whose setups differ only in floats and arrays share a compiled program.

    Attributes:
      build: called with one value per axis, by name; returns the `Setup` to simulate. If it has a
        parameter `seed`, it is called for every seed with the seed's number, so that each may have
        its own data. Or a `Setup`, in which axes change arguments: the axis
        ``"algorithm.local.learning_rate"`` is called "learning_rate" in the result.
      axes: names and values, in the order of the result's dimensions. A value may be any object
        that `build` accepts. If one of several numbers is a float, all are.
      num_rounds: T, the number of rounds. With a `Dispatch`, a round is `arrivals_per_round`
        arrivals (see `fedast`).
      num_seeds: the number of replicas of each point. All points have the same seeds.
      seed: the root of all draws.
      record_every: the number of rounds between records, which must divide `num_rounds`.
      client_map: "auto", "vmap", "scan" or a chunk size, as in `simulate`. On accelerators, "auto"
        computes clients in chunks if those of one run do not fit in memory at once.
      until: an early stopping target. Up to the target, records are bitwise identical to those of a
        run without it; afterwards metrics are NaN and counts constant. Runs computed together
        continue until all of them have reached it.
      together: the names of axes of ints whose values share a program, such as numbers of local
        steps. `build` receives each value as a `TracedInt`, which can be the number of local steps
        or the number in a `Padded`.
      cost: the relative cost of a local training at a point, for estimating the time left.
      first_seed: the number of the first seed, for adding seeds to an earlier run.
      data: "real", "synthetic" or "surrogate", for the manifest; defaults to "not stated".
      config: the settings that describe the runs, for the manifest and for checking an unfinished
        run; defaults to the axes.
      keep: "params" keeps the final parameters, as in `sweep`.

    Raises:
      ValueError, TypeError: if an argument is invalid.
    """

    build: Callable[..., Setup] | Setup
    axes: Mapping[str, Sequence[Any]]
    num_rounds: int
    num_seeds: int = 1
    seed: int = 0
    record_every: int = 1
    client_map: ClientMap = "auto"
    until: Until | None = None
    together: Sequence[str] = ()
    cost: Callable[..., float] | None = None
    first_seed: int = 0
    data: str = "not stated"
    config: Mapping[str, Any] | None = None
    keep: Literal["params"] | None = None

    __repr__ = in_short
    _repr_html_ = in_html

    def __post_init__(self) -> None:
        check_choice("keep", self.keep, None, "params")
        if not isinstance(self.axes, Mapping):
            raise TypeError(f"axes is {described(self.axes)}; give a dict of names and values")
        if isinstance(self.build, Setup):
            self._use_paths(self.build)
        if not callable(self.build):
            raise TypeError(
                f"build is {described(self.build)}; give a function that returns Setup(tasks, "
                "algorithm, assignment)"
            )
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
        plain = {name: _plain(name, values) for name, values in self.axes.items()}
        object.__setattr__(self, "axes", plain)
        for name in self.axes:
            self._check_axis(name)
        self._check_build()
        if isinstance(self.together, str | Mapping):
            raise TypeError(f"together is {described(self.together)}; give a list of names of axes")
        ints = [name for name, values in self.axes.items() if all(type(x) is int for x in values)]
        for name in self.together:
            if name not in ints:
                raise ValueError(
                    f"together has {name!r}; give names of axes of ints, of which there are "
                    f"{', '.join(sorted(ints)) or 'none'}"
                )

    def _use_paths(self, setup: Setup) -> None:
        """Turns a setup, and axes that are paths in it, into a build function and its axes."""
        paths: dict[str, list[str]] = {}
        for axis in self.axes:
            if not isinstance(axis, str):
                raise TypeError(
                    f"an axis is called {described(axis)}; give the path of an argument, such as "
                    "'algorithm.local.learning_rate'"
                )
            path = axis.split(".")
            if path == ["num_models"]:
                raise ValueError(
                    "the axis 'num_models' would hide models instead of training fewer; write "
                    "'assignment.num_models'"
                )
            if (name := path[-1]) in paths:
                raise ValueError(f"two axes are called {name!r}; give a function build, instead")
            at_path(setup, path)
            paths[name] = path

        def build(**point: Any) -> Setup:
            changed: Any = setup
            # Change a part before the arguments inside it, because the part replaces them.
            for name in sorted(point, key=lambda name: len(paths[name])):
                changed = at_path(changed, paths[name], partial(_replaced_by, point[name]))
            return changed

        axes = dict(zip(paths, self.axes.values(), strict=True))
        object.__setattr__(self, "build", build)
        object.__setattr__(self, "axes", axes)

    def _check_build(self) -> None:
        given = [*self.axes, *["seed"] * self.has_seeds]
        try:
            self._signature.bind(**dict.fromkeys(given))
        except TypeError as error:
            raise TypeError(
                f"build cannot be called with {', '.join(given) or 'nothing'}: {error}; give axes "
                "the names of its parameters"
            ) from None

    def _check_axis(self, name: str) -> None:
        if name in RESERVED:
            raise ValueError(f"an axis is called {name!r}, like a part of every result; rename it")
        check_selectable(name)
        if all(isinstance(value, float) for value in self.axes[name]):
            values = self.axes[name]
            check_numbers(f"the axis {name!r}", values, np.isfinite, "be finite", ndim=1)

    @cached_property
    def has_seeds(self) -> bool:
        """Whether `build` is called for every seed."""
        return "seed" in self._signature.parameters

    @cached_property
    def _signature(self) -> inspect.Signature:
        build: Any = self.build
        return inspect.signature(build)

    @cached_property
    def points(self) -> np.ndarray:
        """The position of every point on every axis, ``int[points, axes]``."""
        return np.array([*itertools.product(*map(range, self.shape[:-1]))], int)

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
        """The relative cost of a local training at the given positions on the axes."""
        if self.cost is None:
            return [1.0] * len(index[-1])
        axes = [
            [values[i] for i in at] for values, at in zip(self.axes.values(), index, strict=False)
        ]
        return [
            self.cost(**dict(zip(self.axes, at, strict=True))) for at in zip(*axes, strict=True)
        ]

    def _given(self, point: Sequence[int], seed: int) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for (name, values), place in zip(self.axes.items(), point, strict=True):
            given[name] = TracedInt(values[place]) if name in self.together else values[place]
        return given | ({"seed": self.first_seed + seed} if self.has_seeds else {})

    def words(self, point: Sequence[int], seed: int) -> str:
        """The arguments of `build` for a run, with the labels of the values."""
        given = self._given(point, seed)
        return ", ".join(f"{name}={label_of(value)}" for name, value in given.items())

    def setup(self, point: Sequence[int], seed: int) -> Setup:
        """Builds the setup of a run.

        Args:
          point: the position on every axis.
          seed: the position among the seeds, for a `build` that is called for every seed.
        """
        given = self._given(point, seed)
        build: Any = self.build
        try:
            setup = build(**given)
        except Exception as error:
            error.add_note(f"in build({self.words(point, seed)}) of a sweep")
            raise
        if not isinstance(setup, Setup):
            raise ValueError(
                f"build returned {described(setup)}; return Setup(tasks, algorithm, assignment)"
            )
        if setup.prepare is not None and not callable(setup.prepare):
            raise TypeError(
                f"prepare is {described(setup.prepare)}; give a function of a key and a Setup, "
                "which returns the changed Setup"
            )
        used, trained = whole(setup.num_models), whole(_trained_models(setup.assignment))
        if used is not None and trained is not None and used < trained:
            raise ValueError(
                f"num_models is {used}, but {setup.assignment!r} trains {trained} models, some of "
                "which would be hidden; give the assignment fewer models, or a Padded number"
            )
        return setup


def _trained_models(assignment: Any) -> Any:
    """The number of models that a factory was called with, inside all wrappers, if one was."""
    call = getattr(assignment, "call", None)
    given = call.arguments if call else {}
    if not given or "num_models" in given:
        return given.get("num_models")
    return _trained_models(given.get("assignment"))


def at_path(part: Any, path: Sequence[str], change: Callable[[Any], Any] = lambda x: x) -> Any:
    """Changes the argument at a path in a setup, or in a part, and makes the part again.

    Args:
      part: a setup, or a part that a factory has made.
      path: the names of a field and of parameters of factories.
      change: a function of the present value.

    Raises:
      ValueError: if the path leads to no argument.

    Example:
      >>> from fedjax_mm import fedavg, local_sgd
      >>> at_path(fedavg(local_sgd(0.1, steps=5)), ["local", "learning_rate"], lambda x: 2 * x)
      fedavg(local_sgd(0.2, steps=5))
    """
    if not path:
        return change(part)
    name, *rest = path
    known: Mapping[str, Any]
    if isinstance(part, Setup):
        known, make = part._asdict(), part._replace
    elif isinstance(part, Part) and part.call is not None:
        known, make = part.call.arguments, part.call.again
    else:
        raise ValueError(
            f"{name!r} is an argument of {described(part)}, which no factory of the package has "
            "made; sweep all of it, or give a function build"
        )
    if name not in known:
        of = "a Setup" if isinstance(part, Setup) else repr(part)
        raise ValueError(f"{of} has no {name!r}, but {', '.join(known)}")
    return make(**{name: at_path(known[name], rest, change)})


def _replaced_by(value: Any, _: Any) -> Any:
    return value


def _plain(name: str, values: Any) -> list[Any]:
    """Converts numbers of NumPy and JAX to Python's, and ints to floats if any is a float."""
    # Fetch jax.Arrays, because their elements are device arrays rather than numbers.
    values = np.asarray(values) if isinstance(values, jax.Array) else values
    check_values(name, values)
    found = [x.item() if isinstance(x, np.generic) else x for x in values]
    is_real = all(isinstance(x, int | float) and not isinstance(x, bool) for x in found)
    has_floats = any(isinstance(x, float) for x in found)
    return list(map(float, found)) if is_real and has_floats else found


def label_of(value: Any) -> Any:
    """An axis value as a coordinate: plain values unchanged, others by name."""
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
