"""Wrong drifts: name, call and error message."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_mm import simulate
from fedjax_mm.asynchrony import fedast
from fedjax_mm.tasks import drifting, requiring
from fedjax_mm.tasks.view import View
from tests.boundary.parts import DATA, EVERYBODY, FEDAVG, QUADRATIC, TASK

CONCEPT = [1, 2, 0]


def drift(*args, **options):
    """A call of `drifting`."""
    return lambda: drifting(TASK, *args, **options)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Growing(View):
    """A task whose arrays have another shape in each round."""

    number: Any

    def at(self, round):
        return dataclasses.replace(self, number=jnp.append(self.number, round))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Vanishing(View):
    """A task whose structure differs in a round."""

    def at(self, round):
        return self.task


def run(task):
    """A call of `simulate`, which refuses the task of a round."""
    return lambda: simulate(0, task, FEDAVG, EVERYBODY, 2)


CASES = {
    "no drift": (drift(), "the data do not drift; give a concept, such as .1, 2, 0., or a window"),
    "times of no drift": (drift(start=3, length=2), "the data do not drift"),
    "drift of a quadratic": (
        lambda: drifting(QUADRATIC, CONCEPT),
        "task is a Quadratic, not a Supervised; give one of classification",
        TypeError,
    ),
    "drift of numbers": (
        lambda: drifting(dataclasses.replace(TASK, column=jnp.int32(0)), window=0.5),
        "the targets are no labels; give one of classification",
    ),
    "drift of data": (lambda: drifting(DATA, CONCEPT), "is a FederatedData, not", TypeError),
    "drift around another wrapper": (
        lambda: drifting(requiring(TASK, jnp.ones(4)), CONCEPT),
        "task is a Requiring, not a Supervised; give one of classification, and wrap the resul",
        TypeError,
    ),
    "drift of a drift": (
        lambda: drifting(drifting(TASK, CONCEPT), CONCEPT),
        "task is a Drifting",
        TypeError,
    ),
    "concept of too few classes": (
        drift([1, 0]),
        "concept has 2 labels, but the data have a label 2; give the new label of each class",
    ),
    "concept of other classes": (
        drift([1, 2, 3]),
        r"concept has 3 in row 2; give labels .* 0 \.\.\. 2",
    ),
    "concept from -1": (drift([-1, 0, 1]), "concept has -1 in row 0"),
    "concept of halves": (drift([0.5, 1, 2]), "concept has 0.5 in row 0"),
    "concept of NaN": (drift([float("nan"), 1, 2]), "concept has nan in row 0"),
    "concept as a matrix": (drift([CONCEPT]), r"concept has shape \(1, 3\); give the new label"),
    "concept a number": (drift(1), r"concept has shape \(\); give the new label of each class"),
    "concept empty": (drift([]), r"concept has shape \(0,\); give the new label of each class"),
    "concept text": (drift("rotate"), "concept has type <U6; give the new label of each class"),
    "window 0": (drift(window=0), "window is 0; each client needs examples"),
    "window in percent": (drift(window=50), "window is 50; it must lie between 0 and 1"),
    "window text": (drift(window="half"), "window is 'half'; it must", TypeError),
    "window traced": (
        lambda: jax.eval_shape(lambda x: drifting(TASK, window=x).weight(jnp.int32(0)), 0.5),
        "window is traced, but Python needs its value; close over it",
        TypeError,
    ),
    "start negative": (drift(CONCEPT, start=-1), "start is -1; it must not be negative"),
    "start None": (drift(CONCEPT, start=None), "start is None; it must", TypeError),
    "length 0": (drift(CONCEPT, length=0), "length is 0; it must be positive"),
    "length infinite": (drift(CONCEPT, length=float("inf")), "length is inf; it must"),
    "period 0": (drift(CONCEPT, period=0), "period is 0; it must be positive"),
    "period 1": (drift(CONCEPT, period=1), "length is 1; it must be at most half of the period, 1"),
    "length beyond the period": (
        drift(CONCEPT, length=6, period=10),
        "length is 6; it must be at most half of the period, 10",
    ),
    "seed text": (drift(CONCEPT, seed="0"), "seed is '0'; give a seed, such as 0", TypeError),
    "seed negative": (drift(CONCEPT, seed=-1), "seed is -1; it must be a whole number"),
    "drift without rounds": (
        lambda: simulate(
            *(0, drifting(TASK, CONCEPT), FEDAVG),
            fedast(4, 1, at_work=2, ratio=1),
            num_rounds=2,
        ),
        "the task changes over rounds, but asynchronous jobs overlap rounds; use an assignment",
    ),
    "a task of a round of other shapes": (
        run(Growing(TASK, 4, jnp.zeros(2))),
        "at of Growing returns a task of another structure, shape or type; return the task",
    ),
    "a task of a round of another structure": (
        run(Vanishing(TASK, 4)),
        "at of Vanishing returns a task of another structure, shape or type",
    ),
}
