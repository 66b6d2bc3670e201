"""Private training: clipped updates, one Gaussian noise per round and model, adaptive clipping."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    advance,
    fedavg,
    full_participation,
    local_sgd,
    mfa_rand,
    mfa_rr,
    mifa,
    noisy,
    scaffold,
    simulate,
    stalevr,
)
from fedjax_mm.availability import available, bernoulli, dropping
from fedjax_mm.base import ClientContext
from fedjax_mm.compression import compressed, qsgd, sign
from fedjax_mm.privacy import AdaptiveClip, private
from fedjax_mm.tasks import quadratic
from tests.helpers import Precise, Towards
from tests.oracles import wrappers as oracle

N, DIM, ROUNDS = 8, 5, 20
KEY = jax.random.key(4)
TARGETS = np.random.default_rng(8).normal(size=(N, DIM)) * np.arange(1, N + 1)[:, None]


def fed(steps=2, rate=0.3):
    return fedavg(rate, local_steps=steps)


def test_runs_without_noise_match_the_oracle():
    """Half of the updates are clipped, and the divisor is constant."""
    with jax.enable_x64(True):
        task = Precise(jnp.asarray(TARGETS), DIM)
        algorithm = private(fed(), clip=2.0, noise_multiplier=0.0, clients_per_round=6)
        _, trace = simulate(KEY, task, algorithm, full_participation(N), ROUNDS)
        groups = [list(range(N))] * ROUNDS

        def message(client, update):
            return oracle.clipped(update, 2.0)

        models = oracle.fedavg(np.ones(DIM), TARGETS, 0.3, 2, groups, message, divisor=6)
        norms = [np.sqrt(np.sum(w**2)) for w in models]
        np.testing.assert_allclose(trace.metrics["norm"][:, 0], norms, rtol=1e-10)


def test_a_large_norm_without_noise_is_plain_training():
    task = Towards(jnp.asarray(TARGETS, jnp.float32), DIM)
    algorithm = private(fed(), clip=1e9, noise_multiplier=0.0, clients_per_round=N)
    one = simulate(KEY, task, algorithm, full_participation(N), 5)[0].models[0].params["w"]
    other = simulate(KEY, task, fed(), full_participation(N), 5)[0].models[0].params["w"]
    np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize(
    "algorithm", [fed(), scaffold(local_sgd(0.3, steps=2)), compressed(fed(), sign())]
)
def test_messages_are_never_longer_than_the_clip(algorithm):
    task = Towards(jnp.asarray(TARGETS, jnp.float32), DIM)
    params, clip = {"w": jnp.ones(DIM)}, 0.7
    private_one = private(algorithm, clip=clip, noise_multiplier=1.0, clients_per_round=4)
    server, own = private_one.init(task, params)

    @jax.vmap
    def norms(client):
        context = ClientContext(KEY, 1, task, client, params, is_scaled=False)
        sent, _ = private_one.client(context, server, own)
        return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(sent.update))), sent.weight

    lengths, weights = jax.jit(norms)(jnp.arange(N))
    assert (lengths <= clip * (1 + 1e-6)).all()
    assert lengths.max() > 0.999 * clip
    np.testing.assert_array_equal(weights, 1)


@pytest.mark.parametrize(
    "strategy", [full_participation(N), available(mfa_rand(N, 3), bernoulli(0))]
)
def test_noise_has_its_law(strategy):
    """Clients send 0 or are absent. Noise is N(0, (z C / W)^2), independent by model and seed."""
    task = Towards(jnp.ones((N, 400)), 400)
    algorithm = private(fed(), clip=2.0, noise_multiplier=1.5, clients_per_round=6)
    start = {"w": jnp.ones((strategy.num_models, 400))}

    @jax.jit
    @jax.vmap
    def steps(seed):
        state, _ = simulate(seed, task, algorithm, strategy, 1, params=start)
        return state.models[0].params["w"] - 1

    moved = np.asarray(steps(jnp.arange(30)), float)
    expected = 1.5 * 2 / 6
    error = expected / np.sqrt(2 * moved.size)
    assert abs(moved.std() - expected) < 4 * error
    assert abs(moved.mean()) < 4 * expected / np.sqrt(moved.size)
    flat = moved.reshape(-1, 400)
    correlation = np.corrcoef(flat) - np.eye(len(flat))
    assert abs(correlation).max() < 5.5 / np.sqrt(400)


def test_lost_messages_do_not_change_the_divisor():
    task = Precise(jnp.asarray(TARGETS), DIM)
    algorithm = private(fed(), clip=2.0, noise_multiplier=0.0, clients_per_round=6)
    strategy = dropping(full_participation(N), jnp.asarray([1.0] * 5 + [0.0] * 3))
    state, _ = simulate(KEY, task, algorithm, strategy, 1)
    groups = [[5, 6, 7]]

    def message(client, update):
        return oracle.clipped(update, 2.0)

    _, model = oracle.fedavg(np.ones(DIM), TARGETS, 0.3, 2, groups, message, divisor=6)
    np.testing.assert_allclose(state.models[0].params["w"][0], model, rtol=1e-5)


def test_an_adaptive_norm_tends_to_the_median():
    """Norms of updates are constant, because the server does not move."""
    targets = jnp.eye(DIM)[0] * jnp.arange(1.0, N + 1)[:, None] / 0.3 + 1
    task = Precise(targets, DIM)
    still = fed(steps=1)._replace(server=lambda given: (given.params, given.server_state))
    rule = AdaptiveClip(quantile=0.5, rate=0.2)
    algorithm = private(still, clip=0.1, noise_multiplier=0.0, clients_per_round=N, adaptive=rule)
    _, trace = simulate(KEY, task, algorithm, full_participation(N), 200)
    clip = np.asarray(trace.metrics["clip"][:, 0])
    assert clip[0] == pytest.approx(0.1)
    expected = [0.1]
    norms = 0.3 * np.linalg.norm(np.asarray(targets) - 1, axis=1)
    for _ in range(200):
        share = np.mean(norms <= expected[-1])
        expected.append(expected[-1] * np.exp(-0.2 * (share - 0.5)))
    np.testing.assert_allclose(clip, expected, rtol=1e-4)
    assert 4 <= clip[-1] <= 5


def test_counts_of_an_adaptive_norm_cost_noise():
    """z = 1 with 100 clients per round and s_b = 5 leaves 1.0050378 for the updates."""
    task = Towards(jnp.ones((N, 400)), 400)
    given = {"clip": 2.0, "noise_multiplier": 1.0, "clients_per_round": 100}
    rule = AdaptiveClip(count_noise=5.0)
    start = {"w": jnp.ones((1, 400))}

    def step(adaptive):
        algorithm = private(fed(), **given, adaptive=adaptive)
        state, _ = simulate(KEY, task, algorithm, full_participation(N), 1, params=start)
        return state.models[0].params["w"] - 1

    np.testing.assert_allclose(step(rule) / step(None), 1.0050378, rtol=1e-3)


def test_numbers_can_vary_without_recompiling_and_runs_continue():
    task = Towards(jnp.asarray(TARGETS, jnp.float32), DIM)

    @jax.jit
    def run(clip, noise, expected, rate):
        rule = AdaptiveClip(rate=rate, count_noise=3.0)
        how = {"clip": clip, "noise_multiplier": noise, "clients_per_round": expected}
        algorithm = private(fed(), **how, adaptive=rule)
        parts = task, algorithm, mfa_rand(N, 2)
        whole, _ = simulate(KEY, *parts, 5)
        state, _ = advance(simulate(KEY, *parts, 2)[0], *parts, 3)
        return whole.models[0].params, state.models[0].params

    values = jnp.array([[1.0, 0.5, 4.0, 0.1], [2.0, 0.1, 8.0, 0.3]])
    whole, later = jax.vmap(run)(*values.T)
    jax.tree.map(np.testing.assert_array_equal, whole, later)
    alone = [run(*each)[0]["w"] for each in values]
    np.testing.assert_allclose(whole["w"], alone, rtol=1e-5, atol=1e-6)
    assert run._cache_size() == 1


@pytest.mark.parametrize("client_map", ["scan", 3])
def test_client_maps_agree_for_models_of_different_structure(client_map):
    tasks = [Towards(jnp.asarray(TARGETS, jnp.float32), DIM), quadratic(N, 2, mu=0.1)]
    algorithm = private(fed(), clip=1.0, noise_multiplier=0.3, clients_per_round=4)
    runs = [
        simulate(KEY, tasks, algorithm, mfa_rr(N, 2), 4, client_map=each)[0].models
        for each in ("vmap", client_map)
    ]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), *runs)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda algorithm: private(algorithm, clip=0.05, noise_multiplier=0.4, clients_per_round=3),
        lambda algorithm: noisy(algorithm, jnp.ones(4, bool)),
        lambda algorithm: compressed(algorithm, qsgd(2)),
    ],
    ids=["private", "noisy", "qsgd"],
)
@pytest.mark.usefixtures("x64")
def test_gradients_are_finite_if_an_update_is_zero(wrap):
    """Clients 2 to 4 have no linear part, so they send 0 in round 1 from a start at 0."""
    task = quadratic(4, 2, mu=0.1)

    @jax.jit
    def end(rate):
        algorithm, strategy = wrap(fedavg(rate, local_steps=2)), mfa_rand(4, 1)
        _, trace = simulate(KEY, task, algorithm, strategy, 2)
        return trace.metrics["excess_loss"][-1, 0]

    difference = (end(0.3 + 1e-6) - end(0.3 - 1e-6)) / 2e-6
    np.testing.assert_allclose(jax.grad(end)(0.3), difference, rtol=1e-4)


def test_an_update_that_is_not_finite_is_dropped():
    targets = TARGETS.copy()
    targets[2], targets[5] = np.inf, np.nan
    task = Precise(jnp.asarray(targets), DIM)
    algorithm = private(fed(), clip=2.0, noise_multiplier=0.0, clients_per_round=N)
    state, _ = simulate(KEY, task, algorithm, full_participation(N), 1)
    groups = [[k for k in range(N) if k not in (2, 5)]]

    def message(client, update):
        return oracle.clipped(update, 2.0)

    _, model = oracle.fedavg(np.ones(DIM), targets, 0.3, 2, groups, message, divisor=N)
    np.testing.assert_allclose(state.models[0].params["w"][0], model, rtol=1e-5)


def test_a_vote_is_plus_or_minus_one_half():
    """The accounting of adaptive clipping assumes this, for clipped and unclipped clients."""
    task, params = Towards(jnp.asarray(TARGETS, jnp.float32), DIM), {"w": jnp.ones(DIM)}
    algorithm = private(
        fed(),
        clip=2.0,
        noise_multiplier=0.1,
        clients_per_round=4,
        adaptive=AdaptiveClip(count_noise=1.0),
    )
    server, own = algorithm.init(task, params)

    def vote(client, takes_part):
        context = ClientContext(KEY, 1, task, client, params, takes_part=takes_part)
        context = context._replace(scale=jnp.where(takes_part, 1.0, 0.0))
        return algorithm.client(context, server, own)[0].update["vote"]

    votes = jax.jit(jax.vmap(vote, (0, None)))
    assert set(np.asarray(votes(jnp.arange(N), True))) == {-0.5, 0.5}
    assert not votes(jnp.arange(N), False).any()


@pytest.mark.parametrize("method", [mifa, stalevr])
def test_servers_that_read_the_clients_states_are_refused(method):
    algorithm = private(
        method(local_sgd(0.1, steps=1)), clip=1.0, noise_multiplier=0.3, clients_per_round=4
    )
    with pytest.raises(ValueError, match="private: the server of this method reads the clients'"):
        simulate(KEY, Towards(jnp.ones((N, 3))), algorithm, mfa_rand(N, 2, unbiased=True), 1)


GIVEN = {"clip": 1.0, "noise_multiplier": 0.3, "clients_per_round": 4}


def user_wrapper(algorithm):
    """A wrapper written by a user, which replaces a function."""

    def client(context, server_state, client_state):
        return algorithm.client(context, server_state, client_state)

    return algorithm._replace(client=client)


@pytest.mark.parametrize("between", [lambda x: noisy(x, jnp.zeros(N, bool)), user_wrapper])
def test_wrappers_do_not_hide_each_other(between):
    """Compressed updates may exceed the clip, and feedback would send the clipped part later."""
    hidden, small = between(private(fed(), **GIVEN)), between(compressed(fed(), sign()))
    for wrap, name in ((compressed, "private"), (compressed, "compressed")):
        inner = hidden if name == "private" else small
        with pytest.raises(ValueError, match=f"compressed is around {name}; compress once"):
            wrap(inner, sign())
    with pytest.raises(ValueError, match="private is around private; clip and add noise once"):
        private(hidden, **GIVEN)
    private(small, **GIVEN)


@pytest.mark.parametrize("dtype", ["complex64", "float16", "bfloat16"])
def test_complex_parameters_are_refused(dtype):
    """Their imaginary parts would get no noise."""
    init, _, *_ = private(fed(), **GIVEN)
    start, task = {"w": jnp.ones(3), "v": jnp.ones(3, dtype)}, Towards(jnp.ones((N, 3)))
    if dtype != "complex64":
        init(task, start)
        return
    with pytest.raises(
        ValueError, match="private: the model has complex64 parameters, but the noi"
    ):
        init(task, start)


def by_loss(context):
    """A server that moves only if the loss of the first client is above 1."""
    step = context.task.client_loss(context.params, jnp.int32(0)) > 1
    return jax.tree.map(lambda x: x + step, context.params), context.server_state


@pytest.mark.parametrize(
    "method",
    [fedavg(0.3, local_steps=1, server_scale="1/N"), fed()._replace(server=by_loss)],
    ids=["total weight", "loss"],
)
def test_servers_that_read_the_data_are_refused(method):
    """Reading only the sum of the numbers of examples is refused, too."""
    algorithm, task = private(method, **GIVEN), quadratic(N, 2, mu=0.1)
    with pytest.raises(ValueError, match="private: the server of this method reads the clients' d"):
        simulate(KEY, task, algorithm, mfa_rand(N, 2), 1)


def test_a_server_may_use_the_number_of_clients():
    def server(context):
        return context.params, (context.task.num_clients + context.server_state).astype(int)

    counting = fed()._replace(init=lambda task, params: (jnp.zeros((), int), ()), server=server)
    algorithm, task = private(counting, **GIVEN), Towards(jnp.ones((N, 3)))
    state, _ = simulate(KEY, task, algorithm, mfa_rand(N, 2), 3)
    assert state.models[0].server.state.tolist() == [3 * N] * 2


def test_a_missing_extra_warns_before_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.warns(
        UserWarning, match=r"epsilon cannot be computed.* pip install 'fedjax-mm\[pri"
    ):
        private(fed(), **GIVEN)


def test_scales_of_an_assignment_are_ignored():
    """A client with weight two would need twice the noise."""
    task = Towards(jnp.asarray(TARGETS, jnp.float32), DIM)
    algorithm = private(fed(), clip=1.0, noise_multiplier=0.3, clients_per_round=4)
    plain, scaled = (
        simulate(KEY, task, algorithm, mfa_rand(N, 2, unbiased=unbiased), 3)[0].models[0].params
        for unbiased in (False, True)
    )
    np.testing.assert_allclose(plain["w"], scaled["w"], rtol=1e-5)
