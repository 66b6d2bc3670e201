"""Attackers: what they report and send, and that the others do not change."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fedjax_mm.contribution import dense_update

from fedjax_mm import (
    afl,
    appealing,
    byzantine,
    fedavg,
    full_participation,
    maxfl,
    mfa_rand,
    mwfed,
    quadratic,
    requiring,
    scaffold,
    simulate,
)
from fedjax_mm.simulate import init
from tests import reference_maxfl as oracle
from tests.helpers import roll_out
from tests.method_problems import BATCH, PROBLEMS, SEED, N

TASK = quadratic(12, 80, mu=0.1)
ATTACKS = jnp.arange(12) < 3
PARAMS = jax.random.normal(jax.random.key(8), (TASK.dim,), jnp.float32)


def contribution(algorithm, client, seed=0, thresholds=None):
    """What one client sends in round 1, its parts dense."""
    if thresholds is not None:
        algorithm = requiring(algorithm, thresholds=thresholds)
    params = PARAMS
    server, state = algorithm.init(TASK, params)
    if thresholds is not None:
        state = state._replace(threshold=jnp.asarray(thresholds, float)[client])
    key, client = jax.random.key(seed), jnp.int32(client)
    sent, _ = algorithm.client(key, 1, TASK, client, params, server, state)
    return sent._replace(update=dense_update(sent.update, params))


@pytest.mark.parametrize("noise", [1.0, 2.5])
@pytest.mark.parametrize(
    "algorithm",
    [fedavg(0.1, local_steps=2), scaffold(0.1, local_steps=2)],
    ids=["sparse", "of two parts"],
)
def test_noise_is_as_large_as_the_update(algorithm, noise):
    """Its standard deviation over all coordinates is `noise` times the root mean square."""
    plain = contribution(algorithm, 1)
    sent = contribution(byzantine(algorithm, ATTACKS, noise=noise), 1)
    leaves = [np.ravel(x) for x in jax.tree.leaves(plain.update)]
    draws = [np.ravel(x) - y for x, y in zip(jax.tree.leaves(sent.update), leaves, strict=True)]
    update, added = np.concatenate(leaves), np.concatenate(draws)
    deviation = noise * np.sqrt(np.mean(update**2))
    assert added.std() == pytest.approx(deviation, rel=4 / np.sqrt(2 * len(added)))
    assert abs(added.mean()) < 4 * deviation / np.sqrt(len(added))
    for part in draws:
        assert part.std() == pytest.approx(deviation, rel=4 / np.sqrt(2 * len(part)))
    assert sent.weight == plain.weight
    other = contribution(byzantine(algorithm, ATTACKS, noise=noise), 1, seed=1)
    assert not np.allclose(jax.tree.leaves(other.update)[0], jax.tree.leaves(sent.update)[0])


def test_parts_get_independent_noise():
    algorithm = scaffold(0.1, local_steps=2)
    plain, sent = (
        contribution(each, 1).update for each in (algorithm, byzantine(algorithm, ATTACKS))
    )
    first, second = (np.asarray(sent[name] - plain[name]) for name in ("params", "c"))
    step = jax.random.normal(jax.random.fold_in(jax.random.key(0), 0), first.shape, jnp.float32)
    for one, other in ((first, second), (first, step), (second, step)):  # the key of local step 0
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(len(first))


@pytest.mark.parametrize("client", [3, 11])
def test_the_honest_are_untouched(client):
    rho = jnp.full(12, 1.0)
    plain = contribution(maxfl(0.1, local_steps=2), client, thresholds=rho)
    sent = contribution(byzantine(maxfl(0.1, local_steps=2), ATTACKS), client, thresholds=rho)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(sent), strict=True):
        np.testing.assert_array_equal(a, b)


def test_maxfl_hardly_weighs_attackers():
    """q of F_k is near 1/4 at the threshold; q of 10 F_k is sigma'(9 rho_k)."""
    losses = jax.vmap(lambda k: TASK.client_loss(PARAMS, k))(jnp.arange(12))
    plain = contribution(maxfl(0.1, local_steps=1), 1, thresholds=losses)
    sent = contribution(byzantine(maxfl(0.1, local_steps=1), ATTACKS), 1, thresholds=losses)
    assert plain.weight == pytest.approx(0.25)
    assert sent.weight < 1e-6 * plain.weight or sent.weight < 1e-30
    some = contribution(
        byzantine(maxfl(0.1, local_steps=1), ATTACKS, loss_factor=1.01), 1, thresholds=losses
    )
    s = oracle.sigmoid(0.01 * float(losses[1]))
    assert some.weight == pytest.approx(s * (1 - s), rel=1e-4)


@pytest.mark.usefixtures("x64")
def test_mwfed_sees_inflated_losses():
    """Against its loop, without noise."""
    compared, rng_key = PROBLEMS["least squares"](), jax.random.key(SEED)
    rho = np.array([0.4, 4.0, 1.5, 3.0, 0.9, 2.0, 6.0])
    attacks = np.array([False, True, False, False, False, False, True])
    assignment, start = mfa_rand(N, 1, cohort_size=4), np.ones((1, compared.size))
    algorithm = byzantine(mwfed(0.05, local_steps=3, batch_size=BATCH), attacks, noise=0.0)
    state, _ = simulate(
        rng_key,
        compared.task,
        requiring(algorithm, thresholds=rho),
        assignment,
        8,
        params=start,
    )
    rounds = [[int(k) for k in group[0] if k >= 0] for group in roll_out(assignment, rng_key, 8)]
    problem = compared.problem(0, rho)
    loop = partial(oracle.mwfed, problem, start[0], rounds, lambda t: 0.05, 3, growth=4.0)
    w, v, _ = loop(factors=np.where(attacks, 10.0, 1.0))
    np.testing.assert_allclose(state.models.params[0], w, rtol=1e-10)
    np.testing.assert_allclose(np.exp(state.models.server.log_weights[0]), v, rtol=1e-9)
    assert v[attacks].sum() > 2 * loop()[1][attacks].sum()


def test_attackers_always_take_part():
    """Every model appeals to them, whatever they want; thresholds and metrics are not inflated."""
    rho = jnp.where(jnp.arange(12) == 5, 1e9, -1e9)
    algorithm = requiring(byzantine(maxfl(0.1, local_steps=1), ATTACKS), thresholds=rho)
    strategy = appealing(full_participation(12), cohort_size=12, from_round=1)
    state, trace = simulate(jax.random.key(0), TASK, algorithm, strategy, 2)
    assert trace.client_updates[1:, 0].tolist() == [4, 4]
    models = jax.tree.map(lambda x: x[0], state.models)
    appeal = algorithm.appeal(TASK, models.params, (), models.clients)
    np.testing.assert_array_equal(np.flatnonzero(appeal), [0, 1, 2, 5])
    losses = [float(TASK.client_loss(models.params, jnp.int32(k))) for k in range(12)]
    assert trace.metrics["train_loss"][-1, 0] == pytest.approx(np.mean(losses), rel=1e-5)
    assert trace.metrics["train_appeal"][-1, 0] == pytest.approx(1 / 12)


@pytest.mark.parametrize(("stays", "present"), [(True, 3), (False, 0)])
def test_attackers_may_stay_away_as_others_would(stays, present):
    algorithm = byzantine(maxfl(0.1, local_steps=1), ATTACKS, stays=stays)
    algorithm = requiring(algorithm, thresholds=jnp.full(12, -1e9))
    strategy = appealing(full_participation(12), cohort_size=12, from_round=1)
    _, trace = simulate(jax.random.key(0), TASK, algorithm, strategy, 2)
    assert trace.client_updates[1:, 0].tolist() == [present] * 2
    assert trace.idle_rounds[1:, 0].tolist() == [present == 0] * 2


def test_thresholds_of_attackers_are_those_of_their_own_models():
    algorithms = [maxfl(0.1, local_steps=1), byzantine(maxfl(0.1, local_steps=1), ATTACKS)]
    plain, attacked = (
        simulate(
            jax.random.key(0),
            TASK,
            requiring(each, learning_rate=0.1, num_steps=3),
            full_participation(12),
            1,
        )[0].models.clients.threshold
        for each in algorithms
    )
    np.testing.assert_array_equal(plain, attacked)


@pytest.mark.parametrize(
    "algorithm",
    [afl(0.1, mixture_rate=0.1), mwfed(0.1, local_steps=2), scaffold(0.1, local_steps=2)],
    ids=["afl", "mwfed", "scaffold"],
)
def test_without_attackers_nothing_changes(algorithm):
    """States, steps and outputs included."""
    results = []
    for each in (algorithm, byzantine(algorithm, jnp.zeros(12, bool))):
        wrapped = requiring(each, thresholds=jnp.linspace(-0.1, 0.1, 12))
        state, trace = simulate(jax.random.key(0), TASK, wrapped, mfa_rand(12, 2), 4)
        results.append((state.models, trace))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_attackers_start_with_inflated_losses():
    """Where an algorithm's states depend on them."""

    def start(rng_key, task, client, params, state):
        return task.client_loss(params, client)

    def losses(wrap):
        algorithm = fedavg(0.1, local_steps=1)._replace(
            init=lambda task, params: ((), jnp.zeros(())), start=start
        )
        state = init(jax.random.key(0), TASK, wrap(algorithm), full_participation(12), PARAMS)
        return np.asarray(state.models.clients[0])

    factors = np.where(ATTACKS, 3.0, 1.0)
    inflated = losses(lambda algorithm: byzantine(algorithm, ATTACKS, loss_factor=3.0))
    np.testing.assert_allclose(inflated, factors * losses(lambda algorithm: algorithm), rtol=1e-6)


def test_who_attacks_may_be_traced():
    traces = []

    @jax.jit
    def end(attacks):
        traces.append(attacks)
        algorithm = byzantine(fedavg(0.1, local_steps=1), attacks)
        strategy = mfa_rand(12, 2)
        return simulate(jax.random.key(0), TASK, algorithm, strategy, 2)[0].models.params

    assert not np.allclose(end(ATTACKS), end(~ATTACKS))
    assert len(traces) == 1


def test_wrong_wrappings_are_refused():
    base = maxfl(0.1, local_steps=1)
    with pytest.raises(ValueError, match=r"requiring\(byzantine\(algorithm, clients\)"):
        byzantine(requiring(base, thresholds=jnp.ones(12)), ATTACKS)
    for clients in (jnp.arange(12), jnp.array(True), [0.5] * 12):
        with pytest.raises(ValueError, match="give one bool for each client"):
            byzantine(base, clients)
    with pytest.raises(ValueError, match=r"loss_factor is 0\.0"):
        byzantine(base, ATTACKS, loss_factor=0.0)
    with pytest.raises(ValueError, match=r"noise is -1\.0; it must not be negative"):
        byzantine(base, ATTACKS, noise=-1.0)


@pytest.mark.parametrize(
    ("algorithm", "strategy", "message"),
    [
        (byzantine(fedavg(0.1, local_steps=1), jnp.ones(5, bool)), None, "clients has 5 entries"),
        (
            byzantine(fedavg(0.1, local_steps=1), ATTACKS),
            appealing(full_participation(12), cohort_size=2),
            "have no thresholds; wrap",
        ),
        (byzantine(maxfl(0.1, local_steps=1), ATTACKS), None, "have no thresholds; wrap"),
    ],
    ids=["length", "appeal", "thresholds"],
)
def test_what_does_not_fit_the_task_is_refused(algorithm, strategy, message):
    with pytest.raises(ValueError, match=message):
        simulate(jax.random.key(0), TASK, algorithm, strategy or full_participation(12), 1)
