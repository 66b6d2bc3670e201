"""Combinations of methods, wrappers and schedules that once gave wrong numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    apfl,
    fedavg,
    fednova,
    full_participation,
    local_sgd,
    noisy,
    pfedme,
    scheduled,
    simulate,
)
from fedjax_mm.availability import available, bernoulli
from fedjax_mm.compression import compressed, qsgd
from fedjax_mm.privacy import private
from fedjax_mm.robust import attacking, fltrust, median, robust, sign_flip
from fedjax_mm.tasks import least_squares, quadratic

N = 6
TASK = least_squares([np.eye(3)] * N, [np.ones(3)] * N, ridge=0.1)
FEW = np.arange(N) < 2


def rate(t):
    return jnp.where(t == 1, 0.0, 0.1)


@pytest.mark.parametrize(
    "method",
    [lambda local: apfl(local), lambda local: pfedme(local, inner_rate=0.05)],
    ids=["APFL", "pFedMe"],
)
def test_a_round_with_rate_0_leaves_personal_methods_finite(method):
    task, everybody = quadratic(8, 3, mu=0.1), full_participation(8)
    _, trace = simulate(0, task, method(local_sgd(rate, steps=3)), everybody, 4)
    loss, own = (np.asarray(trace.metrics[name])[:, 0] for name in ("loss", "personal_loss"))
    assert np.isfinite([loss, own]).all()
    assert loss[1] == loss[0] > loss[2]


WRAPPERS = {
    "private": lambda f: private(f, clip=1.0, noise_multiplier=0.0, clients_per_round=N),
    "compressed": lambda f: compressed(f, qsgd(4)),
    "attacking": lambda f: attacking(f, FEW, sign_flip()),
    "noisy": lambda f: noisy(f, FEW),
    "robust": lambda f: robust(f, median()),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_nothing_may_change_the_two_sums_of_fednova(name):
    algorithm = WRAPPERS[name](fednova(local_sgd(0.1, steps=2)))
    with pytest.raises(ValueError, match=f"{name} changes the clients' updates, .* multiplies"):
        simulate(0, TASK, algorithm, full_participation(N), 1)


def test_combinations_without_a_meaning_are_refused():
    for make, words in [
        (
            lambda: robust(attacking(fedavg(0.1, local_steps=1), FEW, sign_flip()), fltrust(TASK)),
            "attacking is inside robust .* put attackers around robust",
        ),
        (
            lambda: robust(noisy(fedavg(0.1, local_steps=1), FEW), fltrust(TASK)),
            "noisy is inside robust",
        ),
        (
            lambda: attacking(
                attacking(fedavg(0.1, local_steps=1), FEW, sign_flip()), FEW, sign_flip()
            ),
            "attacking is around attacking",
        ),
        (
            lambda: available(
                scheduled(N, 1, demand=2, eligible=[[True] * 5 + [False]])._replace(metrics=None),
                bernoulli(0.5),
                when_absent="replace",
            ),
            "not every client is eligible .* take 'skip'",
        ),
    ]:
        with pytest.raises(ValueError, match=words):
            make()
