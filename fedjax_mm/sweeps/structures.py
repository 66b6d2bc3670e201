"""Structures of a grid, each with runs that differ only in numbers and seeds.

The runs of a structure share one program. A part of a sweep contains shares of the runs of some
programs.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.program import Program


def programs_of(grid: Grid) -> list[Program]:
    """Returns the programs of a grid, one per structure, in the order of the axes."""
    structural = [name for name in grid.axes if not grid.is_numeric(name)]
    choices = itertools.product(*(_classes(grid, name) for name in structural))
    return [_program(grid, dict(zip(structural, choice, strict=True))) for choice in choices]


class Part(NamedTuple):
    """One of several parts of a sweep that are computed separately.

    Attributes:
      number: K, starting at 1.
      of: N, the number of parts.
    """

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


class Share(NamedTuple):
    """The runs of one program that a part computes.

    Attributes:
      program: the index of the program in `programs_of`.
      replicas: the indices of its replicas.
    """

    program: int
    replicas: np.ndarray


def shares_of(programs: Sequence[Program], part: Part) -> list[Share]:
    """Returns the consecutive runs of a part, balanced by cost.

    Every run belongs to exactly one part. A part may be empty, and its runs need only a few
    programs, because every part compiles the programs that it needs. The split depends only on the
    grid and the number of parts, so all machines agree on it.
    """
    costs = [
        np.asarray(each.grid.costs(each.index)) * each.traced.facts.updates_per_round
        for each in programs
    ]
    cost = np.concatenate(costs)
    middle = np.cumsum(cost) - cost / 2
    of = np.minimum((middle / cost.sum() * part.of).astype(int), part.of - 1)
    owners = np.split(of == part.number - 1, np.cumsum([len(each) for each in costs])[:-1])
    found = [Share(i, np.flatnonzero(mine)) for i, mine in enumerate(owners)]
    return [share for share in found if len(share.replicas)]


def _classes(grid: Grid, name: str) -> list[list[int]]:
    """Returns the positions on an axis, grouped by program."""
    found: dict[Hashable, list[int]] = {}
    key_of = grid.together.get(name)
    for place, value in enumerate(grid.axes[name]):
        found.setdefault(place if key_of is None else key_of(value), []).append(place)
    return list(found.values())


def _program(grid: Grid, choice: Mapping[str, list[int]]) -> Program:
    """Returns the program for given positions on each structural axis."""
    positions = [
        choice.get(name, range(size)) for name, size in zip(grid.axes, grid.shape, strict=False)
    ]
    mesh = np.meshgrid(*positions, range(grid.num_seeds), indexing="ij")
    index = tuple(each.ravel() for each in mesh)
    if grid.together:
        # Sort similar replicas next to each other, because replicas that run together wait for the
        # longest.
        at = dict(zip(grid.axes, index, strict=False))
        order = np.lexsort([at[name] for name in grid.together])
        index = tuple(each[order] for each in index)
    at = dict(zip(grid.axes, index, strict=False))
    # Use the dtype that JAX gives Python floats, which depends on x64.
    numbers = {
        name: np.asarray(values, jnp.result_type(float))[at[name]]
        for name, values in grid.axes.items()
        if name not in choice
    }
    numbers |= {
        name: np.searchsorted(choice[name], at[name]).astype(np.int32) for name in grid.together
    }
    numbers |= {name: np.asarray(values)[index[-1]] for name, values in grid.per_seed.items()}
    fixed = {
        name: tuple(grid.axes[name][i] for i in places)
        if name in grid.together
        else grid.axes[name][places[0]]
        for name, places in choice.items()
    }
    return Program(grid, _label(grid, choice), fixed, index, numbers)


def _label(grid: Grid, choice: Mapping[str, list[int]]) -> str:
    """Returns a program's label, omitting axes if it covers all their values."""
    words = {
        name: " | ".join(str(grid.labels[name][i]) for i in places)
        for name, places in choice.items()
        if len(places) == 1 or len(places) < len(grid.axes[name])
    }
    algorithm = [words.pop("algorithm")] if "algorithm" in words else []
    return ", ".join(algorithm + [f"{name}={word}" for name, word in words.items()]) or "run"
