"""Partial sharing against a plain loop, and its limits."""

import jax
import numpy as np
import pytest

from fedjax_mm import (
    Experiment,
    fedavg,
    fednova,
    fedprox,
    local_sgd,
    mfa_rand,
    mifa,
    personal,
    qffl,
    run,
    simulate,
)
from fedjax_mm.compression import compressed, top_k
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.privacy import private
from fedjax_mm.tasks import quadratic
from tests.algorithms.method_problems import BATCH, CLASSES, MODELS, SEED, N, softmax
from tests.helpers import replay, roll_out
from tests.oracles.maxfl import partial_sharing

pytestmark = pytest.mark.usefixtures("x64")
ROUNDS, E, RATE = 6, 3, 0.2
LOCAL = local_sgd(RATE, steps=E, batch_size=BATCH)


def groups():
    """Cohorts of two models, with a round that trains none."""
    made = roll_out(mfa_rand(N, MODELS, cohort_size=5), jax.random.key(SEED), ROUNDS).copy()
    made[2] = -1
    return made


def trained(algorithm):
    """A run on softmax regression."""
    compared = softmax()
    start = np.random.default_rng(2).normal(size=(MODELS, compared.size))
    how, assignment = {"params": compared.start(start)}, replay(groups(), N)
    one = jax.jit(
        lambda task: simulate(jax.random.key(SEED), task, algorithm, assignment, ROUNDS, **how)
    )
    return compared, start, *one(compared.task)


def nothing(path):
    return False


def everything(path):
    return True


@pytest.mark.parametrize(
    ("where", "options", "own_steps", "sizes"),
    [
        ("bias", {}, None, (12, 12)),
        (["kernel"], {"named": "shared"}, 2, (12, 12)),
        (lambda path: path == "classes/kernel", {}, 1, (3, 3)),
        (everything, {}, None, (0, 0)),
    ],
)
def test_it_matches_its_loop(where, options, own_steps, sizes):
    algorithm = personal(fedavg(LOCAL), where, **options, own_steps=own_steps)
    compared, start, state, trace = trained(algorithm)
    is_bias = np.arange(compared.size) < CLASSES
    own = {12: is_bias, 3: ~is_bias, 0: np.ones(compared.size)}[sizes[0]].astype(float)
    assert trace.upload_size == trace.download_size == (sizes[0],) * MODELS
    models = state.models[0]
    for m in range(MODELS):
        rounds = [[int(k) for k in group if k >= 0] for group in groups()[:, m]]
        problem = compared.problem(m, np.ones(N))
        how = {"own": own, "own_steps": own_steps}
        w, v = partial_sharing(problem, start[m], rounds, lambda t: RATE, E, **how)
        params = jax.tree.map(lambda x, m=m: x[m], models.params)
        np.testing.assert_allclose(compared.flat(params), w, rtol=1e-9, atol=1e-12)
        for k in range(N):
            state_k = jax.tree.map(lambda x, m=m, k=k: x[m, k], models.clients)
            found = compared.flat(algorithm.personal(params, state_k))
            np.testing.assert_allclose(found, v[k], rtol=1e-9, atol=1e-12)


def test_without_own_parts_it_is_the_algorithm_bit_for_bit():
    for inside in (fedavg(LOCAL), fedprox(LOCAL, mu=0.5)):
        *_, state, trace = trained(personal(inside, nothing))
        *_, same, bare = trained(inside)
        jax.tree.map(np.testing.assert_array_equal, state.models[0].params, same.models[0].params)
        assert trace.upload_size == bare.upload_size
        assert trace.download_size == bare.download_size


def test_messages_of_the_shared_part_are_compressed_and_clipped():
    inside = compressed(personal(fedavg(LOCAL), "bias"), top_k(0.5))
    *_, trace = trained(private(inside, clip=1.0, noise_multiplier=0.1, clients_per_round=2.0))
    assert trace.upload_size == (12, 12)
    assert np.isfinite(trace.metrics["personal_loss"]).all()
    assert trace.metrics["message_bits"][0, 0] < 32 * 12


TABLE = {"learning_rate": 0.1, "local_steps": 2, "batch_size": 5}


def test_a_file_names_it():
    own = {"where": ["classes"], "own_steps": 1}
    settings = {
        "task": {"name": "digits", "num_clients": 6, "test_fraction": 0.3},
        "num_models": 1,
        "num_rounds": 3,
        "num_seeds": 1,
        "assignment": {"name": "mfa_rand"},
        "clients": {"metrics": ["test_accuracy"]},
        "algorithms": {"FedRep": TABLE | {"personal": own}, "FedAvg": TABLE},
    }
    result = run(validate(Experiment, settings)).isel(round=-1, seed=0, model=0)
    assert result.parameters_up.sel(algorithm="FedRep") == 0, "logistic regression has one layer"
    assert result.personal_accuracy.sel(algorithm="FedRep") > 0
    assert result.personal_client_test_accuracy.sel(algorithm="FedRep").notnull().all()


TASK = quadratic(4, 2, mu=0.1)
SHORT = local_sgd(0.1, steps=2)


def test_wrong_parts_are_refused():
    for call, words, kind in [
        (lambda: personal(1, "bias"), "algorithm is 1", TypeError),
        (lambda: personal(fedavg(SHORT), "x", named="all"), "named is 'all'", ValueError),
        (lambda: personal(fedavg(SHORT), "x", own_steps=0), "own_steps is 0", ValueError),
        (
            lambda: simulate(0, TASK, personal(fedavg(SHORT), "x"), mfa_rand(4, 1), 1),
            "where has 'x', and the parameters are one array without a name; give",
            ValueError,
        ),
        (
            lambda: simulate(0, softmax().task, personal(fedavg(SHORT), "x"), mfa_rand(N, 1), 1),
            "where has 'x', and the parameters are classes/bias, classes/kernel; give",
            ValueError,
        ),
        (
            lambda: simulate(0, TASK, personal(fednova(SHORT), nothing), mfa_rand(4, 1), 1),
            "personal changes the clients.* updates, but the algorithm sends two parts",
            ValueError,
        ),
        (
            lambda: simulate(0, TASK, personal(mifa(SHORT), nothing), mfa_rand(4, 1), 1),
            "personal cannot be around a method whose server reads",
            ValueError,
        ),
        (
            lambda: personal(qffl(SHORT, q=1.0)._replace(metrics=None), nothing),
            "qffl does not send weighted local changes",
            ValueError,
        ),
        (
            lambda: personal(compressed(fedavg(SHORT), top_k(0.5)), nothing),
            r"personal is around compressed; put it inside, as in compressed\(personal",
            ValueError,
        ),
        (
            lambda: personal(personal(fedavg(SHORT), nothing), nothing),
            "the algorithm has personal models already; use one without",
            ValueError,
        ),
    ]:
        with pytest.raises(kind, match=words):
            call()
