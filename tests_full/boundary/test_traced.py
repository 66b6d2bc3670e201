"""Errors about traced values name the traced part, in every traced function."""

import jax
import pytest

from fedjax_mm import fedavg, mfa_rr, simulate
from fedjax_mm.asynchrony import fedast
from fedjax_mm.sweeps import Setup
from tests.boundary.parts import EVERYBODY, FEDAVG, KEY, QUADRATIC, swept


def at_random(rng_key, look):
    return 1 if jax.random.uniform(rng_key) > 0.5 else 0


def by_round(rng_key, round, state, look):
    return EVERYBODY.assign(rng_key, round, state, look) if round > 1 else None


def starting(task, params):
    return (1 if params[0] > 0 else 0), ()


def by_client(task, client, server_state):
    return 1 if client > 0 else 2


STARTED = FEDAVG._replace(init=starting)
FIRST = EVERYBODY._replace(init=at_random)
DRAWN = EVERYBODY._replace(assign=by_round)
SEEN = EVERYBODY._replace(metrics=lambda state: {"x": 1 if state.clients[0] > 0 else 0})


def run(algorithm=FEDAVG, assignment=EVERYBODY):
    jax.eval_shape(lambda key: simulate(key, QUADRATIC, algorithm, assignment, 2), KEY)


def sweep_over(assignment):
    swept(lambda rate: Setup(QUADRATIC, fedavg(rate, local_steps=2), assignment))


def prepared(rate):
    """A setup whose preparation reads a number of the task."""

    def prepare(rng_key, setup):
        return setup if setup.tasks.mu > 0 else setup._replace(params=())

    return Setup(QUADRATIC, fedavg(rate, local_steps=2), EVERYBODY, prepare=prepare)


def arrivals(algorithm):
    simulate(KEY, QUADRATIC, algorithm, fedast(4, 2, at_work=4, ratio=2), 2)


START, RECORD = "the start of a run", "the record of a round"

CASES = {
    "an algorithm's start": (lambda: run(STARTED), START),
    "of several models": (lambda: simulate(KEY, QUADRATIC, STARTED, mfa_rr(4, 2), 2), START),
    "of arrivals": (lambda: arrivals(STARTED), START),
    "the number of steps": (lambda: run(FEDAVG._replace(num_steps=by_client)), START),
    "an assignment's start": (lambda: run(assignment=FIRST), START),
    "in a sweep": (lambda: sweep_over(FIRST), START),
    "a draw": (lambda: run(assignment=DRAWN), "a round"),
    "a draw in a sweep": (lambda: sweep_over(DRAWN), "a round"),
    "a record": (lambda: run(assignment=SEEN), RECORD),
    "a record in a sweep": (lambda: sweep_over(SEEN), RECORD),
    "prepare": (lambda: swept(prepared), "a sweep's prepare"),
}


@pytest.mark.parametrize(("call", "what"), CASES.values(), ids=CASES)
def test_concretization_errors_explain_traced_values_once(call, what):
    with pytest.raises(TypeError) as refusal:
        call()
    (note,) = [note for note in refusal.value.__notes__ if "is compiled once" in note]
    assert note.startswith(f"{what} is compiled once and then serves all rounds, clients, models")
    assert "Instead of `if` use jax.numpy.where" in note


def test_other_errors_get_no_note():
    def wrong(*args):
        raise TypeError("own")

    with pytest.raises(TypeError, match="own") as refusal:
        run(FEDAVG._replace(init=wrong))
    assert not any("is compiled once" in note for note in getattr(refusal.value, "__notes__", []))
