"""Divides clients' examples over devices, so that each device has those of its own clients.

Device i of D has the clients from i * B to (i + 1) * B - 1 of a store, where B = ceil(N / D). Their
examples are padded to the same number of places on every device.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_mm.base import Task
from fedjax_mm.data.clients import ClientData, over_stores, stores_in
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.sweeps.stacking import Leaf
from fedjax_mm.tasks.view import divides


class Division(NamedTuple):
    """Examples of all runs, divided over devices.

    Attributes:
      examples: the examples by the number of their leaf.
      offsets: the offsets by the number of their leaf.
      why_not: why all examples are on every device; empty if they are divided.
    """

    examples: dict[int, Any]
    offsets: dict[int, Any]
    why_not: str = ""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the examples."""
        return tuple(x.shape for x in self.examples.values())


class Store(NamedTuple):
    """Numbers of the leaves of a store."""

    examples: tuple[int, ...]
    offsets: int
    counts: int


class _Window(NamedTuple):
    """The examples of a store's clients, as offsets and counts."""

    offsets: np.ndarray
    counts: np.ndarray

    def blocks(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The first places of the devices' clients, and those after the last."""
        ends = np.append(self.offsets, self.offsets[-1] + self.counts[-1])
        clients = len(self.offsets)
        first = np.arange(number) * -(-clients // number)
        last = first + -(-clients // number)
        return ends[np.minimum(first, clients)], ends[np.minimum(last, clients)]


def whole(why: str) -> Division:
    """Examples that every device has, and the reason."""
    return Division({}, {}, why)


def stores_of(setup: Setup, leaves: Sequence[Any]) -> list[Store] | str:
    """The numbers of the leaves of stores that devices can divide, or why there are none."""
    if setup.prepare is not None:
        return "prepare may read those of all clients"
    tasks = [setup.tasks] if isinstance(setup.tasks, Task) else setup.tasks
    for task in tasks:
        if not divides(task):
            return f"{type(task).__name__} does not declare that it divides them"
    numbers, found = {id(x): number for number, x in enumerate(leaves)}, list[Store]()
    for store in stores_in(tasks):
        arrays = *jax.tree.leaves(store.examples), store.offsets, store.counts
        if store.is_divisible:
            each = [numbers[id(x)] for x in arrays if id(x) in numbers]
            if len(each) < len(arrays):
                return "they are computed from others"
            found.append(Store(tuple(each[:-2]), *each[-2:]))
    return found or "clients share them"


def over_axis(tasks: Any, client_axis: str) -> Any:
    """Tasks whose stores have the examples of one device."""

    def change(store: ClientData) -> ClientData:
        return dataclasses.replace(store, axis=client_axis) if store.is_divisible else store

    return over_stores(change, tasks)


def divide(leaves: Sequence[Leaf], stores: Sequence[Store], number: int) -> Division:
    """Divides the examples of all runs over a number of devices."""
    users: dict[int, set[Store]] = {}
    for store in stores:
        for leaf in store.examples:
            users.setdefault(leaf, set()).add(store._replace(examples=()))
    groups: dict[frozenset[Store], list[int]] = {}
    for leaf, each in users.items():
        groups.setdefault(frozenset(each), []).append(leaf)
    offsets = [store.offsets for group in groups for store in group]
    if len(set(offsets)) < len(offsets):
        return whole("stores share some of their arrays")
    parts = list[_Part]()
    for group, examples in groups.items():
        part = _Part.of(leaves, group, examples)
        if isinstance(part, str):
            return whole(part)
        parts.append(part)
    # Equally long examples remain so, because models are stacked if their data are alike.
    sizes: dict[int, int] = {}
    for part in parts:
        sizes[part.length] = max(sizes.get(part.length, 1), part.size(number))
    made = Division({}, {})
    for part in parts:
        part.add(made, sizes[part.length], number)
    return made


class _Part(NamedTuple):
    """Arrays of examples that the same stores use.

    Attributes:
      leaves: the leaves of all runs.
      examples: numbers of the leaves with the examples.
      windows: the clients' examples, by the number of the offsets' leaf and that of their value.
      owners: for every value of the examples, the window that it is used with; None if all windows
        are about the same examples.
    """

    leaves: Sequence[Leaf]
    examples: list[int]
    windows: dict[tuple[int, int], _Window]
    owners: dict[int, tuple[int, int]] | None

    @classmethod
    def of(
        cls, leaves: Sequence[Leaf], stores: frozenset[Store], examples: list[int]
    ) -> "_Part | str":
        """The arrays of some stores, or the reason why they cannot be divided."""
        windows = dict[tuple[int, int], _Window]()
        for store in stores:
            for pair in _pairs(leaves, store.offsets, store.counts):
                both = zip((store.offsets, store.counts), pair, strict=True)
                window = _Window(*(_value(leaves[leaf], value) for leaf, value in both))
                key = store.offsets, pair[0]
                same = windows.setdefault(key, window)
                gaps = window.offsets[:-1] + window.counts[:-1] != window.offsets[1:]
                if np.any(gaps) or np.any(same.counts != window.counts):
                    return "they are not in the order of the clients"
        if len(windows) == 1 or all(leaves[each].place is None for each in examples):
            return cls(leaves, examples, windows, None)
        (offsets, *others) = {key[0] for key in windows}
        pairs = {pair for each in examples for pair in _pairs(leaves, each, offsets)}
        owners = {value: (offsets, window) for value, window in pairs}
        if others or len(owners) < len(pairs) or any(leaves[x].place is None for x in examples):
            return "runs share some of their arrays"
        return cls(leaves, examples, windows, owners)

    @property
    def length(self) -> int:
        """The number of examples."""
        leaf = self.leaves[self.examples[0]]
        return leaf.value.shape[0 if leaf.place is None else 1]

    def size(self, number: int) -> int:
        """The number of places on one device."""
        lengths = [-np.subtract(*each.blocks(number)) for each in self.windows.values()]
        return int(np.max(np.sum(lengths, 0) if self.owners is None else lengths))

    def add(self, to: Division, size: int, number: int) -> None:
        """Adds the divided examples, and the offsets."""
        bases, before = dict[tuple[int, int], np.ndarray](), np.arange(number) * size
        for key, window in self.windows.items():
            (leaf, value), (first, last) = key, window.blocks(number)
            bases[key] = before
            if self.owners is None:
                before = before + last - first
            owner = np.arange(len(window.offsets)) // -(-len(window.offsets) // number)
            made = to.offsets.setdefault(leaf, np.array(self.leaves[leaf].value))
            made[() if self.leaves[leaf].place is None else value] = (
                window.offsets + (bases[key] - first)[owner]
            )
        for leaf in self.examples:
            values, place = np.asarray(self.leaves[leaf].value), self.leaves[leaf].place
            values = values[None] if place is None else values
            new = np.zeros((len(values), number * size, *values.shape[2:]), values.dtype)
            for key, window in self.windows.items():
                mine = [
                    value
                    for value in range(len(values))
                    if self.owners is None or self.owners[value] == key
                ]
                for begin, first, last in zip(bases[key], *window.blocks(number), strict=True):
                    new[mine, begin : begin + last - first] = values[mine, first:last]
            to.examples[leaf] = new[0] if place is None else new


def _value(leaf: Leaf, value: int) -> np.ndarray:
    return np.asarray(leaf.value if leaf.place is None else leaf.value[value])


def _pairs(leaves: Sequence[Leaf], *numbers: int) -> set[tuple[int, ...]]:
    """The values of some leaves that occur in one run."""
    places = [leaves[each].place for each in numbers]
    each = np.broadcast_arrays(*(np.zeros((1, 1), int) if x is None else x for x in places))
    return {tuple(map(int, values)) for values in zip(*(x.ravel() for x in each), strict=True)}
