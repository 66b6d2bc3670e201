"""Private training: clipped updates, one Gaussian noise per round and model, adaptive clipping."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    fedavg,
    full_participation,
    local_sgd,
    mfa_rand,
    mifa,
    noisy,
    scaffold,
    simulate,
    stalevr,
)
from fedjax_mm.availability import available, bernoulli, dropping
from fedjax_mm.base import ClientContext
from fedjax_mm.compression import compressed, sign
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
        context = ClientContext(KEY, 1, task, client, params, factor=None)
        sent, _ = private_one.client(context, server, own)
        return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(sent.update))), sent.weight

    lengths, weights = jax.jit(norms)(jnp.arange(N))
    assert (lengths <= clip * (1 + 1e-6)).all()
    assert lengths.max() > 0.999 * clip
    np.testing.assert_array_equal(weights, 1)


@pytest.mark.parametrize(
    "assignment", [full_participation(N), available(mfa_rand(N, 3), bernoulli(0))]
)
def test_noise_has_its_law(assignment):
    """Clients send 0 or are absent. Noise is N(0, (z C / W)^2), independent by model and seed."""
    task = Towards(jnp.ones((N, 400)), 400)
    algorithm = private(fed(), clip=2.0, noise_multiplier=1.5, clients_per_round=6)
    start = {"w": jnp.ones((assignment.num_models, 400))}

    @jax.jit
    @jax.vmap
    def steps(seed):
        state, _ = simulate(seed, task, algorithm, assignment, 1, params=start)
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
    assignment = dropping(full_participation(N), jnp.asarray([1.0] * 5 + [0.0] * 3))
    state, _ = simulate(KEY, task, algorithm, assignment, 1)
    groups = [[5, 6, 7]]

    def message(client, update):
        return oracle.clipped(update, 2.0)

    _, model = oracle.fedavg(np.ones(DIM), TARGETS, 0.3, 2, groups, message, divisor=6)
    np.testing.assert_allclose(state.models[0].params["w"][0], model, rtol=1e-5)


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
        return algorithm.client(context, server, own)[0].update["vote"]

    votes = jax.jit(jax.vmap(vote, (0, None)))
    assert set(np.asarray(votes(jnp.arange(N), True))) == {-0.5, 0.5}
    assert not votes(jnp.arange(N), False).any()


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


def test_the_clip_follows_the_votes():
    """Norms of updates are 1 to 8 in all rounds, because the server does not move."""
    task = Precise(1 + jnp.eye(DIM)[0] * jnp.arange(1.0, N + 1)[:, None] / 0.3, DIM)
    still = fed(steps=1)._replace(server=lambda given: (given.params, given.server_state))
    rule = AdaptiveClip(quantile=0.3, rate=0.5)
    algorithm = private(still, clip=6.5, noise_multiplier=0.0, clients_per_round=10, adaptive=rule)
    _, trace = simulate(KEY, task, algorithm, full_participation(N), 12)
    expected = [6.5]
    for _ in range(12):
        votes = sum(0.5 if norm <= expected[-1] else -0.5 for norm in range(1, N + 1))
        expected.append(expected[-1] * np.exp(-0.5 * (0.5 + votes / 10 - 0.3)))
    np.testing.assert_allclose(trace.metrics["clip"][:, 0], expected, rtol=1e-4)


def test_the_noise_of_the_votes_has_its_law():
    """All of N clients vote 1/2. Noise is N(0, s_b^2), independent of that of the updates."""
    task, start = Towards(jnp.ones((N, 1)), 1), {"w": jnp.ones((1, 1))}
    rule = AdaptiveClip(quantile=0.5, rate=0.2, count_noise=3.0)
    given = {"clip": 2.0, "noise_multiplier": 1.0, "clients_per_round": 10}
    algorithm = private(fed(), **given, adaptive=rule)

    @jax.jit
    @jax.vmap
    def step(seed):
        state, trace = simulate(seed, task, algorithm, full_participation(N), 1, params=start)
        return trace.metrics["clip"][1, 0], state.models[0].params["w"][0, 0] - 1

    clip, moved = (np.asarray(x, float) for x in step(jnp.arange(2000)))
    noise = (-np.log(clip / 2.0) / 0.2 - (0.5 + N / 2 / 10 - 0.5)) * 10
    error = 3.0 / np.sqrt(2000)
    assert abs(noise.mean()) < 4 * error
    assert abs(noise.std() - 3.0) < 4 * error / np.sqrt(2)
    assert abs(np.corrcoef(noise, moved)[0, 1]) < 4 / np.sqrt(2000)


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


def delegating(algorithm):
    """Another one, which replaces three functions."""
    return algorithm._replace(
        init=lambda task, params: algorithm.init(task, params),
        client=lambda *given: algorithm.client(*given),
        server=lambda context: algorithm.server(context),
    )


@pytest.mark.parametrize(
    "between", [lambda x: noisy(x, jnp.zeros(N, bool)), user_wrapper, delegating]
)
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
    init = private(fed(), **GIVEN).init
    start, task = {"w": jnp.ones(3), "v": jnp.ones(3, dtype)}, Towards(jnp.ones((N, 3)))
    if dtype != "complex64":
        init(task, start)
        return
    with pytest.raises(
        ValueError, match="private: the model has complex64 parameters, but the noi"
    ):
        init(task, start)


def by_states(context):
    """A server that moves by the clients' states alone."""
    moved = context.params["w"] + context.client_states["w"].sum(0)
    return {"w": moved}, context.server_state


def test_servers_that_read_only_the_clients_states_are_refused():
    stateful = fed()._replace(
        init=lambda task, params: ((), jax.tree.map(jnp.zeros_like, params)),
        client=lambda context, server, own: (fed().client(context, server, ())[0], own),
        server=by_states,
    )
    with pytest.raises(ValueError, match="private: the server of this method reads the clients' s"):
        simulate(KEY, Towards(jnp.ones((N, 3))), private(stateful, **GIVEN), mfa_rand(N, 2), 1)


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
    assert state.models[0].server.inner.tolist() == [3 * N] * 2


def test_a_missing_extra_warns_before_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.warns(
        UserWarning, match=r"epsilon cannot be computed.* pip install 'fedjax-mm\[pri"
    ):
        private(fed(), **GIVEN)


@pytest.mark.parametrize("clip", [1.0, 100.0])
def test_scales_of_an_assignment_are_ignored(clip):
    """A client with weight two would need twice the noise."""
    task = Towards(jnp.asarray(TARGETS, jnp.float32), DIM)
    algorithm = private(fed(), clip=clip, noise_multiplier=0.3, clients_per_round=4)
    plain, scaled = (
        simulate(KEY, task, algorithm, mfa_rand(N, 2, unbiased=unbiased), 3)[0].models[0].params
        for unbiased in (False, True)
    )
    np.testing.assert_allclose(plain["w"], scaled["w"], rtol=1e-5)
