"""Shapes of the metrics and parameters of a grid's programs, which one result has to hold."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedjax_mm.base import Params
from fedjax_mm.checks import check_alike
from fedjax_mm.stacks import each_params
from fedjax_mm.sweeps.program import Program


def metric_shapes(programs: Sequence[Program]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Returns the largest shape of each metric of one model over all programs, and its type.

    Raises:
      ValueError: if a metric's number of axes differs between programs.
    """
    found: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    for program in programs:
        for name, x in program.traced.record.metrics.items():
            # Absent models have NaN metrics, so metrics of integers and booleans become floats.
            dtype, shape = np.dtype(x.dtype if x.dtype.kind == "f" else float), x.shape[1:]
            largest, _ = found.get(name, (shape, dtype))
            if len(largest) != len(shape):
                raise ValueError(
                    f"the metric {name!r} has shapes {largest} and {shape} at different points; "
                    "give it two names"
                )
            found[name] = tuple(map(max, largest, shape)), dtype
    return found


def kept_shapes(programs: Sequence[Program]) -> list[Params]:
    """Returns the shapes of the final parameters of every model, if they are kept.

    Raises:
      ValueError: if the structure of a model's parameters differs between programs.
    """
    each = [
        jax.eval_shape(each_params, program.traced.carry.models)
        for program in programs
        if program.grid.keep is not None
    ]
    longest: list[Params] = max(each, key=len, default=[])
    for program, shapes in zip(programs, each, strict=False):
        for number, (one, other) in enumerate(zip(longest, shapes, strict=False)):
            words = (
                f"keep is 'params', but those of model {number + 1} are others in {program.label} "
                "than elsewhere; run these points one by one"
            )
            check_alike(words, one, other, shapes=True)
    return longest
