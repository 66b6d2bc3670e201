"""More wrong drifting data for rules of refusal that `tests/boundary` tests once."""

import jax.numpy as jnp

from fedjax_mm.tasks import drifting, requiring
from tests.boundary.parts import DATA, TASK
from tests.boundary.wrong_drift import CONCEPT, Vanishing, drift, run

CASES = {
    "times of no drift": (drift(start=3, length=2), "the data do not drift"),
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
    "concept of other classes": (
        drift([1, 2, 3]),
        r"concept has 3 in row 2; give labels .* 0 \.\.\. 2",
    ),
    "concept from -1": (drift([-1, 0, 1]), "concept has -1 in row 0"),
    "concept of halves": (drift([0.5, 1, 2]), "concept has 0.5 in row 0"),
    "concept of NaN": (drift([float("nan"), 1, 2]), "concept has nan in row 0"),
    "concept a number": (drift(1), r"concept has shape \(\); give the new label of each class"),
    "concept empty": (drift([]), r"concept has shape \(0,\); give the new label of each class"),
    "concept text": (drift("rotate"), "concept has type <U6; give the new label of each class"),
    "window in percent": (drift(window=50), "window is 50; it must lie between 0 and 1"),
    "window text": (drift(window="half"), "window is 'half'; it must", TypeError),
    "start negative": (drift(CONCEPT, start=-1), "start is -1; it must not be negative"),
    "start None": (drift(CONCEPT, start=None), "start is None; it must", TypeError),
    "length 0": (drift(CONCEPT, length=0), "length is 0; it must be positive"),
    "length infinite": (drift(CONCEPT, length=float("inf")), "length is inf; it must"),
    "period 0": (drift(CONCEPT, period=0), "period is 0; it must be positive"),
    "length beyond the period": (
        drift(CONCEPT, length=6, period=10),
        "length is 6; it must be at most half of the period, 10",
    ),
    "a task of a round of another structure": (
        run(Vanishing(TASK, 4)),
        "at of Vanishing returns a task of another structure, shape or type",
    ),
}
