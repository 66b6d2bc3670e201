"""Shapes of results and states, obtained by tracing."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedjax_mm.asynchrony.dispatch import Dispatch
from fedjax_mm.base import Algorithm, Assignment, Params, Task
from fedjax_mm.checks import check_alike
from fedjax_mm.simulate import init
from fedjax_mm.stacks import each_params
from fedjax_mm.sweeps.program import Program, num_bytes


def metric_shapes(programs: Sequence[Program]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Returns each metric's dtype and its largest shape for one model, over all programs.

    Raises:
      ValueError: if a metric's number of axes differs between programs.
    """
    found: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    for program in programs:
        for name, x in program.traced.record.metrics.items():
            # Use floats for integer and boolean metrics too, because absent models have NaN.
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
    """Returns the shapes of every model's final parameters, if they are kept.

    Raises:
      ValueError: if the structure of a model's parameters differs between programs.
    """
    each = [
        jax.eval_shape(each_params, program.traced.replica.models)
        for program in programs
        if program.grid.keep is not None
    ]
    longest: list[Params] = max(each, key=len, default=[])
    for program, shapes in zip(programs, each, strict=False):
        for number, (one, other) in enumerate(zip(longest, shapes, strict=False)):
            words = (
                f"keep is 'params', but those of model {number + 1} differ in {program.label} "
                "from those elsewhere; run these points one by one"
            )
            check_alike(words, one, other, shapes=True)
    return longest


def state_bytes(
    tasks: Task | Sequence[Task],
    algorithm: Algorithm | Sequence[Algorithm],
    assignment: Assignment | Dispatch,
) -> int:
    """Returns the size in bytes of one seed's state, for arguments of `simulate`.

    The state of an asynchronous run consists mostly of model versions, R + M per structure of
    models. Reallocation keeps 8 updates per model. Training a batch of arrivals takes additional
    memory: several times the parameters of the jobs trained together, and one sum per model step
    in the batch, at most R_m / b_m.

    Example:
      >>> from fedjax_mm import fedavg
      >>> from fedjax_mm.asynchrony import fedast
      >>> from fedjax_mm.sweeps import state_bytes
      >>> from fedjax_mm.tasks import quadratic
      >>> dispatch = fedast(24, 2, at_work=12, ratio=3, reallocate=False)
      >>> of_all = state_bytes(quadratic(24, 4, mu=0.1), fedavg(0.1, local_steps=5), dispatch)
      >>> (24 + 2) * 97 * 4, of_all  # versions of 97 numbers; and all
      (10088, 12576)
    """
    return num_bytes(jax.eval_shape(lambda: init(0, tasks, algorithm, assignment)))
