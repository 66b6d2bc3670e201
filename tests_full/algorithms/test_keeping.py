"""Every method that keeps the states of local optimizers against its loop, with Adam."""

import numpy as np
import optax
import pytest

from fedjax_mm import fedavg, local_sgd, mfa_rand, simulate
from fedjax_mm.asynchrony import fedast
from fedjax_mm.compression import compressed, top_k
from fedjax_mm.privacy import private
from fedjax_mm.robust import mean, robust
from fedjax_mm.tasks import quadratic
from tests.algorithms.method_problems import BATCH, SEED, N, regression
from tests.algorithms.test_keeping import RATE, check, kept_by
from tests.algorithms.test_methods import Quiet, error

pytestmark = pytest.mark.usefixtures("x64")

CASES = [(name, keeps) for keeps in ("client", "mean") for name in kept_by(keeps)]


@pytest.mark.parametrize(("name", "keeps"), CASES)
def test_methods_keep_states_like_their_loops(name, keeps):
    check(name, keeps, "adam")


def end(algorithm, **how):
    """The parameters of two models after 6 rounds."""
    task = Quiet(regression().task, N)
    state, _ = simulate(SEED, task, algorithm, mfa_rand(N, 2, cohort_size=4), 6, **how)
    return np.asarray(state.models[0].params)


def adam(keeps, **how):
    return local_sgd(RATE, steps=2, batch_size=BATCH, optimizer=optax.adam, keeps=keeps, **how)


@pytest.mark.parametrize("keeps", ["client", "mean"])
def test_states_do_not_depend_on_how_clients_are_computed(keeps):
    algorithm = fedavg(adam(keeps))
    first = end(algorithm)
    for client_map in (1, 2, "scan", "vmap"):
        assert error(end(algorithm, client_map=client_map), first) < 1e-12


@pytest.mark.parametrize("keeps", ["client", "mean"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: compressed(f, top_k(1.0)),
        lambda f: robust(f, mean()),
        lambda f: private(f, clip=1e6, noise_multiplier=0.0, clients_per_round=2),
    ],
)
def test_wrappers_leave_the_states_as_they_are(wrap, keeps):
    """Wrappers with neutral settings keep the states, with equal weights and momentum."""
    local = local_sgd(RATE, steps=2, batch_size=BATCH, momentum=0.9, keeps=keeps)
    algorithm = fedavg(local, weighted=False)
    assert error(end(wrap(algorithm)), end(algorithm)) < 1e-10


def test_the_server_of_a_private_method_cannot_read_the_counts_of_steps():
    algorithm = private(fedavg(adam("mean")), clip=1.0, noise_multiplier=1.0, clients_per_round=3)
    with pytest.raises(ValueError, match="reads the clients' states, which no noise covers"):
        end(algorithm)


def test_asynchronous_clients_start_from_the_mean_of_their_version():
    task, dispatch = quadratic(6, 2, mu=0.1), fedast(6, 1, at_work=3, ratio=1)

    def ends(**how):
        algorithm = fedavg(local_sgd(0.05, steps=2, momentum=0.9, **how))
        return np.asarray(simulate(0, task, algorithm, dispatch, 5)[0].models[0].params)

    assert np.isfinite(ends(keeps="mean")).all()
    assert error(ends(keeps="mean"), ends()) > 1e-4
    with pytest.raises(ValueError, match="may run several jobs"):
        ends(keeps="client")
