"""Wrong drifts: name, call and error message."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_mm import simulate
from fedjax_mm.asynchrony import fedast
from fedjax_mm.tasks import drifting
from fedjax_mm.tasks.view import View
from tests.boundary.parts import EVERYBODY, FEDAVG, QUADRATIC, TASK

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
    "drift of a quadratic": (
        lambda: drifting(QUADRATIC, CONCEPT),
        "task is a Quadratic, not a Supervised; give one of classification",
        TypeError,
    ),
    "drift of numbers": (
        lambda: drifting(dataclasses.replace(TASK, column=jnp.int32(0)), window=0.5),
        "the targets are no labels; give one of classification",
    ),
    "concept of too few classes": (
        drift([1, 0]),
        "concept has 2 labels, but the data have a label 2; give the new label of each class",
    ),
    "concept as a matrix": (drift([CONCEPT]), r"concept has shape \(1, 3\); give the new label"),
    "window 0": (drift(window=0), "window is 0; each client needs examples"),
    "window traced": (
        lambda: jax.eval_shape(lambda x: drifting(TASK, window=x).weight(jnp.int32(0)), 0.5),
        "window is traced, but Python needs its value; close over it",
        TypeError,
    ),
    "period 1": (drift(CONCEPT, period=1), "length is 1; it must be at most half of the period, 1"),
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
}
