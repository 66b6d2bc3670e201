"""Warm starts: initial parameters read from the final parameters of another run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_mm.base import Params, Task
from fedjax_mm.checks.values import one_each
from fedjax_mm.results.params import SavedParams, load_params, params_like
from fedjax_mm.sweeps.grid import Setup

Start = dict[str, dict[str, np.ndarray]]
"""Arrays ``[seeds, ...]`` by name in the file, for each algorithm."""


def check_file(path: str) -> None:
    """Raises `ValueError` if the file does not exist."""
    if not Path(path).is_file():
        raise ValueError(
            f"params: file {path} does not exist; `fedjax-mm run --save-params` writes params.npz"
        )


def load_start(path: str, algorithms: Sequence[str], seeds: Sequence[int]) -> Start:
    """Reads the initial parameters of each algorithm and seed.

    If the file has a single algorithm or seed, all of them start from it. Otherwise each starts
    from its own.

    Raises:
      ValueError: if the file's algorithms or seeds do not match, or it has several points or
        non-finite entries.
    """
    saved = load_params(path)
    for name, values in saved.labels.items():
        if name not in ("algorithm", "seed") and len(values) > 1:
            raise ValueError(
                f"params: {path} has {len(values)} points on the axis {name!r}; save those of one "
                "point, with `fedjax-mm run --save-params`"
            )

    def rows(name: str, wanted: Sequence[Any]) -> list[int]:
        values = saved.labels.get(name, [0])
        if len(values) == 1:
            return [0] * len(wanted)
        if missing := [value for value in wanted if value not in values]:
            raise ValueError(
                f"params: {path} has no {name} {missing[0]!r}, but {_some(values)}; give it the "
                f"same {name}s, or one for all"
            )
        return [values.index(value) for value in wanted]

    places = rows("seed", seeds)
    start = {
        label: {name: _at(saved, x, row)[places] for name, x in saved.arrays.items()}
        for label, row in zip(algorithms, rows("algorithm", algorithms), strict=True)
    }
    # Check the entries now, because they are traced later as program arguments.
    arrays = [x for each in start.values() for x in each.values()]
    if not all(x.dtype.kind in "biuf" and np.isfinite(x).all() for x in arrays):
        raise ValueError(
            f"params: {path} has entries that are not finite; give the parameters of a run that "
            "did not diverge"
        )
    return start


def _at(saved: SavedParams, x: np.ndarray, algorithm: int) -> np.ndarray:
    """One algorithm's array ``[seeds, ...]``, at the first entry on other axes."""
    place: dict[str, Any] = {"algorithm": algorithm, "seed": slice(None)}
    at: np.ndarray = x[tuple(place.get(name, 0) for name in saved.labels)]
    return at if "seed" in saved.labels else at[None]


def _some(values: Sequence[Any]) -> str:
    return ", ".join(map(repr, values[:5])) + (", ..." if len(values) > 5 else "")


def params_at(
    start: Mapping[str, Mapping[str, Any]], algorithm: str, place: Any, setup: Setup
) -> list[Params]:
    """The initial parameters of every model of one run.

    Args:
      start: the result of `load_start`.
      algorithm: the label of the algorithm.
      place: the index of the seed, which may be traced.
      setup: the setup of the run. If the file has a single model, all models start from it.

    Raises:
      ValueError: if the number of models is wrong, or the parameters do not fit the tasks.
    """
    arrays = {name: x[place] for name, x in start[algorithm].items()}
    num_models = SavedParams({}, dict(start[algorithm])).num_models
    is_one, wanted = isinstance(setup.tasks, Task), setup.assignment.num_models
    tasks = one_each("tasks", setup.tasks, is_one=is_one, num_models=wanted)
    if num_models not in (1, wanted):
        raise ValueError(
            f"params: the file has {num_models} models; give one for all or one for each of "
            f"{wanted}"
        )
    key = jax.eval_shape(lambda: jax.random.key(0))
    return [
        params_like(arrays, 0 if num_models == 1 else model, jax.eval_shape(task.init, key))
        for model, task in enumerate(tasks)
    ]
