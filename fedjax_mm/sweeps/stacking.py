"""Builds the points of a grid, and stacks those of equal structure into programs."""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mm.base.calls import in_short
from fedjax_mm.base.programs import OpaqueError, Split, TracedInt, split
from fedjax_mm.sweeps.grid import Grid, Setup
from fedjax_mm.sweeps.purity import Computed, check_pure, computed, impure


class Leaf(NamedTuple):
    """A number or an array of all runs of a program.

    Attributes:
      value: the value that all runs share, or the different values, stacked.
      place: which value each run has, ``int32[points or 1, seeds or 1]``; None if shared.
    """

    value: Any
    place: np.ndarray | None = None

    def __repr__(self) -> str:
        return in_short(self)

    @property
    def is_number(self) -> bool:
        """Whether runs differ in a single number, so that each can be given its own."""
        return self.place is not None and self.value.ndim == 1 and not is_key(self.value)

    @property
    def kind(self) -> Hashable:
        """A key that is equal for leaves of programs that are compiled alike."""
        if self.place is None:
            return kind_of(self.value)
        # Programs differ by which values points or seeds share, because these are not repeated.
        alike = tuple(size == 1 for size in self.place.shape)
        number = 0 if self.is_number else len(self.value)  # numbers are given one by one
        return self.value.shape[1:], self.value.dtype, number, alike

    @property
    def digest(self) -> str:
        """A digest of the values and places."""
        found = hashlib.sha256()
        for x in (self.value, self.place):
            array = np.asarray(without_keys(x)) if x is not None else np.zeros(0)
            found.update(f"{array.dtype} {array.shape}".encode())
            found.update(array.tobytes())
        return found.hexdigest()


class Stacked(NamedTuple):
    """Runs of equal structure, before they become a program.

    Attributes:
      structure: their common structure, apart from shapes.
      rebuild: makes a run's setup from its leaves.
      leaves: the leaves of all runs.
      runs: the runs' points and seeds, ``int[points, seeds]`` each.
    """

    structure: Hashable
    rebuild: Callable[[Sequence[Any]], Setup]
    leaves: list[Leaf]
    runs: tuple[np.ndarray, np.ndarray]

    def __repr__(self) -> str:
        return in_short(self)


def stacked(grid: Grid, report: Callable[[str], None] = lambda _: None) -> list[Stacked]:
    """Builds every point, and groups those of equal structure, in the order of the axes.

    Equal data that are made by several calls of `build` are stored once.

    Args:
      grid: the runs.
      report: called with progress messages.
    """
    known, groups = _Values(), dict[Hashable, _Group]()
    seeds, number = range(grid.num_seeds) if grid.has_seeds else [0], len(grid.points)
    is_float = [all(type(x) is float for x in axis) for axis in grid.axes.values()]
    this_sweep = object()
    for place, point in enumerate(_in_order(grid)):
        if place % 100 == 0 and place:
            report(f"built {place:,} of {number:,} points")
        for seed in seeds:
            setup = grid.setup(grid.points[point], seed)
            try:
                found, rebuild = split_setup(setup)
            except OpaqueError:
                raise ValueError(
                    f"the setup of the point {grid.words(grid.points[point], seed)} holds a "
                    "tracer; call sweep outside of transformations of JAX, and let functions keep "
                    "no arguments"
                ) from None
            column = [known.number_of(leaf) for leaf in found.leaves]
            structure = found.structure, this_sweep if found.undeclared else None
            key = structure, tuple(map(kind_of, found.leaves))
            words = grid.words(grid.points[point], seed)
            first = _Group(structure, rebuild, [], [], setup, found, words, [], set())
            group = groups.setdefault(key, first)
            group.runs.append((point, seed))
            group.columns.append(column)
            values = {each for each in enumerate(grid.points[point]) if not is_float[each[0]]}
            # Trace points 1, 2, 4, 8, ... of a structure and the first of each label and int,
            # because each takes a while.
            is_new = len(group.runs).bit_count() == 1 or not values <= group.values
            if found.undeclared and is_new:
                group.values.update(values)
                group.computed.append(computed(words, rebuild, found.leaves, grid.client_map))
    known.check_unchanged()
    for group in groups.values():
        again, rebuild = split_setup(group.setup)
        if again.structure != group.first.structure:
            raise impure(group.words, ["a class or a factory of yours, by its name"])
        if group.computed:
            now = computed("", rebuild, again.leaves, grid.client_map)
            check_pure(group.computed, now, again.undeclared)
    _report_programs([*groups.values()], report)
    return [group.stacked(grid, known.values) for group in groups.values()]


def _report_programs(groups: Sequence["_Group"], report: Callable[[str], None]) -> None:
    """Says what would make one program of several."""
    own = [each.first for each in groups if each.first.undeclared]
    alike = len({each.without_own for each in own})
    if alike < len(own):
        names = dict.fromkeys(name for each in own for name in each.own)
        report(
            f"{len(groups):,} programs; {len(own) - alike:,} fewer if points had equal "
            f"{', '.join(names)}: make them by a function with @part above it"
        )


def _in_order(grid: Grid) -> np.ndarray:
    """Sorts similar points next to each other, because the longest run ends a batch."""
    if not grid.together:
        return np.arange(len(grid.points))
    places = dict(zip(grid.axes, grid.points.T, strict=True))
    return np.lexsort([np.take(grid.axes[name], places[name]) for name in grid.together])


def split_setup(
    setup: Setup, *, traced: bool = False
) -> tuple[Split, Callable[[Sequence[Any]], Setup]]:
    """Splits a setup into structure and leaves, and a function that makes it from new leaves."""
    data, parts = (setup.tasks, setup.params), (setup.algorithm, setup.assignment, *setup[4:])
    found = split(data, parts, opens=True, traced=traced)

    def remade(leaves: Sequence[Any]) -> Setup:
        tasks, params, algorithm, assignment, *rest = found.rebuild(leaves)
        return Setup(tasks, algorithm, assignment, params, *rest)

    return found, remade


class _Group(NamedTuple):
    """Runs of equal structure, with the numbers of their leaves' values.

    Attributes:
      setup: the setup of the first run, split into `first`, and in `words`.
      computed: what some runs computed right after they were built.
      values: the axes and the places of values that these have.
    """

    structure: Hashable
    rebuild: Callable[[Sequence[Any]], Setup]
    runs: list[tuple[int, int]]
    columns: list[list[int]]
    setup: Setup
    first: Split
    words: str
    computed: list[Computed]
    values: set[tuple[int, int]]

    def stacked(self, grid: Grid, values: Sequence[Any]) -> Stacked:
        """Stacks the leaves that differ between runs."""
        points, seeds = np.array(self.runs).T
        table = np.array(self.columns, np.int32).reshape(len(points), -1)
        every = np.arange(grid.num_seeds)
        if not grid.has_seeds:
            shape = len(points), 1
            points, seeds = np.broadcast_arrays(points[:, None], every)
        elif len(points) == len(set(points)) * grid.num_seeds:
            shape = len(set(points)), grid.num_seeds
            points, seeds = points.reshape(shape), seeds.reshape(shape)
        else:  # seeds of one point differ in structure
            shape = len(points), 1
            points, seeds = points[:, None], seeds[:, None]
        leaves = [_leaf(column.reshape(shape), values) for column in table.T]
        numbers = (grid.first_seed + np.arange(grid.num_seeds)).astype(np.int32)
        place = seeds[:1] if (seeds == seeds[:1]).all() else seeds
        seed = Leaf(numbers, place.astype(np.int32))
        return Stacked(self.structure, self.rebuild, [seed, *leaves], (points, seeds))


def _leaf(numbers: np.ndarray, values: Sequence[Any]) -> Leaf:
    different, place = np.unique(numbers, return_inverse=True)
    if len(different) == 1:
        return Leaf(values[different[0]])
    place = place.reshape(numbers.shape).astype(np.int32)
    for axis in range(2):
        first = place.take([0], axis)
        place = first if (place == first).all() else place
    each = [values[number] for number in different]
    if isinstance(each[0], float):
        return Leaf(np.array(each, jnp.result_type(float)), place)
    if is_key(each[0]):
        return Leaf(jnp.stack(each), place)
    return Leaf(np.stack([np.asarray(x) for x in each]), place)


class _Values:
    """All different values of leaves.

    Attributes:
      values: the values.
    """

    def __init__(self) -> None:
        self.values = list[Any]()
        self._numbers = dict[Any, int]()
        self._known = dict[int, int]()

    def number_of(self, x: Any) -> int:
        """The number of a value, which equal values share."""
        if id(x) in self._known:  # only of values that are kept, whose identity nothing else has
            return self._known[id(x)]
        number = self._numbers.setdefault((kind_of(x), _content(x)), len(self.values))
        if number == len(self.values):
            self.values.append(np.int32(x) if isinstance(x, TracedInt) else x)
            self._known[id(self.values[-1])] = number
        return number

    def check_unchanged(self) -> None:
        """Raises `ValueError` if `build` has changed an array that it had returned."""
        for (_, content), x in zip(self._numbers, self.values, strict=True):
            if isinstance(x, np.ndarray) and _content(x) != content:
                raise ValueError(
                    f"build has changed an array {x.dtype}{list(x.shape)} of an earlier point; "
                    "give every point its own"
                )


def _content(x: Any) -> bytes:
    plain = np.asarray(without_keys(x))
    return plain.tobytes() if plain.nbytes < 64 else hashlib.blake2b(plain.tobytes()).digest()


def kind_of(x: Any) -> Hashable:
    """The static properties that the values of one leaf share."""
    if isinstance(x, float):
        return "float"
    if isinstance(x, TracedInt):
        return "int"
    return x.shape, x.dtype, getattr(x, "weak_type", False)


def is_key(x: Any) -> bool:
    """Whether an array holds random keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def without_keys(tree: Any) -> Any:
    """Replaces random keys with plain arrays, which can be saved."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def with_keys(tree: Any, like: Any) -> Any:
    """Inverts `without_keys`."""
    return jax.tree.map(
        lambda x, shape: jax.random.wrap_key_data(x) if is_key(shape) else x, tree, like
    )
