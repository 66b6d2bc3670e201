"""Errors in user functions that JAX or Python finds name the function."""

import re

import jax.numpy as jnp
import pytest

from fedjax_mm import advance, simulate
from fedjax_mm.tasks import quadratic
from tests.boundary.parts import EVERYBODY, FEDAVG, KEY, QUADRATIC


def sending_three(context, server_state, client_state):
    """Sends an update whose shape differs from the parameters."""
    sent, state = FEDAVG.client(context, server_state, client_state)
    return sent._replace(update=jnp.ones(3)), state


OWN = {
    "update of another shape": (
        {"client": sending_three},
        r"in server\(context\) of the algorithm sending_three, which gets params float32\[9\] and "
        r"total.update float32\[3\]",
    ),
    "client of one argument": (
        {"client": lambda context: context},
        r"in client\(context, server_state, client_state\) of the algorithm <lambda>",
    ),
    "server of none": ({"server": lambda: ()}, r"in server\(context\) of the algorithm fedavg"),
    "init of none": ({"init": lambda: ()}, r"in init\(task, params\) of the algorithm fedavg"),
}


@pytest.mark.parametrize("name", OWN)
def test_errors_in_an_algorithm_name_the_function(name):
    functions, words = OWN[name]
    with pytest.raises(TypeError) as error:
        simulate(KEY, QUADRATIC, FEDAVG._replace(**functions), EVERYBODY, 2)
    notes = "\n".join(error.value.__notes__)
    assert re.search(words, notes)


def test_advance_takes_what_simulate_returns():
    state, _ = simulate(KEY, QUADRATIC, FEDAVG, EVERYBODY, 2)
    other = quadratic(4, 2, mu=0.2)  # the same structure with other numbers
    state, trace = advance(state, other, FEDAVG, EVERYBODY, 2)
    assert trace.round.tolist() == [2, 3, 4]
