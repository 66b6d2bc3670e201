"""Models that mix, against plain loops, and identities."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fedjax_mm import (
    advance,
    cfl,
    edges,
    fedavg,
    full_participation,
    gradient_tracking,
    ifca,
    local_sgd,
    mfa_rand,
    params_of,
    peers,
    reporting,
    simulate,
    soft_clusters,
)
from fedjax_mm.availability import available, bernoulli, dropping, finishing
from fedjax_mm.base import Look
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.tasks import least_squares, mean_estimation
from fedjax_mm.topologies import (
    alternating,
    cloud,
    directed,
    exponential,
    graph,
    matching,
    merging,
    mixing,
    mixing_matrix,
    network,
    random_regular,
    ring,
    server,
    share,
    star,
    torus,
)
from tests.oracles import mixing as oracle
from tests.oracles.clusters import Problem

N, DIM, ROUNDS, RATE, STEPS = 8, 3, 12, 0.05, 2
RING = [(i, (i + 1) % N) for i in range(N)]
GRID = [(i, j) for i in range(N) for j in (4 * (i // 4) + (i + 1) % 4, (i + 4) % N)]
ARROWS = [*RING, (0, 2), (0, 5), (3, 6), (6, 1)]
LOSSY = {"lost": 0.3}


@functools.cache
def problem():
    """Clients of 1 to 9 examples, in two groups with different targets."""
    rng = np.random.default_rng(0)
    counts = rng.permutation([1, 2, 3, 4, 5, 7, 8, 9])
    X = [rng.normal(size=(n, DIM)) for n in counts]
    targets = [np.full(DIM, 2.0), np.full(DIM, -1.0)]
    y = [x @ targets[i % 2] + rng.normal(size=len(x)) for i, x in enumerate(X)]
    return Problem(X, y, 0.3)


def task():
    return least_squares(problem().X, problem().y, ridge=problem().ridge)


def start(num_models=N):
    return np.random.default_rng(2).normal(size=(num_models, DIM))


def played(algorithm, assignment, params=None, rounds=ROUNDS):
    """Runs one round at a time, and returns the models and the mixing's state of each round."""
    parts, all_own = (task(), algorithm, assignment), []
    given = start(assignment.num_models) if params is None else params
    state, _ = simulate(jax.random.key(3), *parts, 1, params=given)
    for t in range(rounds):
        if t:
            state, _ = advance(state, *parts, 1)
        own = state.assignment
        while not hasattr(own, "messages"):
            own = own.own if hasattr(own.own, "messages") else own.inner
        all_own.append(own)
    return state, all_own


def events(all_own):
    """Available peers and links (from, to) of every round."""
    found = []
    for own in all_own:
        weights, table = map(np.asarray, (own.links.weights, own.links.neighbours))
        up = {(int(table[i, k]), int(i)) for i, k in zip(*np.nonzero(weights), strict=True)}
        found.append(oracle.Round({*np.flatnonzero(own.present).tolist()}, up))
    return found


SGD = fedavg(RATE, local_steps=STEPS)


def lossy(net, **more):
    return available(mixing(peers(N), net, **LOSSY, **more), bernoulli(0.7))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize(
    ("net", "pairs"), [(ring(), RING), (torus(2), GRID)], ids=["ring", "torus"]
)
def test_gossip_matches_its_loop(net, pairs, before):
    assignment = lossy(net, combine="before" if before else "after")
    state, all_own = played(SGD, assignment)
    rounds, weights = events(all_own), oracle.metropolis({tuple(sorted(x)) for x in pairs})
    expected = oracle.gossip(problem(), start(), rounds, weights, RATE, STEPS, before=before)
    np.testing.assert_allclose(state.models[0].params, expected, rtol=0, atol=1e-9)
    assert {len(each.present) for each in rounds} != {N}
    counts = [sum(i == k for each in rounds for i, _ in each.links) for k in range(N)]
    np.testing.assert_array_equal(all_own[-1].messages, counts)


@pytest.mark.usefixtures("x64")
def test_random_pairs_match_their_loop():
    state, all_own = played(SGD, lossy(matching()))
    rounds = events(all_own)
    expected = oracle.pairs(problem(), start(), rounds, RATE, STEPS)
    np.testing.assert_allclose(state.models[0].params, expected, rtol=0, atol=1e-9)
    assert len({frozenset(each.links) for each in rounds}) > ROUNDS // 2


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("chosen", ["present", "drawn"])
def test_push_sum_matches_its_loop(chosen):
    assignment = lossy(directed(ARROWS))
    if chosen == "drawn":
        assignment = mixing(peers(N, cohort_size=6), directed(ARROWS), **LOSSY)
    state, all_own = played(SGD, assignment)
    expected, mass = oracle.push_sum(problem(), start(), events(all_own), ARROWS, RATE, STEPS)
    np.testing.assert_allclose(state.models[0].params, expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(all_own[-1].mass[1], mass, rtol=0, atol=1e-12)
    assert sum(mass) == pytest.approx(N)


@pytest.mark.usefixtures("x64")
def test_gradient_tracking_matches_its_loop_and_finds_the_minimizer_of_the_sum():
    algorithm = gradient_tracking(local_sgd(RATE))
    state, all_own = played(algorithm, lossy(ring(), combine="before"))
    weights = oracle.metropolis(RING)
    expected = oracle.tracking(problem(), start(), events(all_own), weights, RATE)
    np.testing.assert_allclose(state.models[0].params, expected, rtol=0, atol=1e-9)
    A = [x.T @ x / len(x) + problem().ridge * np.eye(DIM) for x in problem().X]
    b = [x.T @ y / len(x) for x, y in zip(problem().X, problem().y, strict=True)]
    best = np.linalg.solve(sum(A), sum(b))
    found, biased = (
        simulate(
            0, task(), how, mixing(peers(N), ring(), combine="before"), 4000, record_every=4000
        )
        for how in (algorithm, fedavg(RATE, local_steps=1))
    )
    np.testing.assert_allclose(found[0].models[0].params, [best] * N, rtol=0, atol=1e-9)
    assert np.abs(biased[0].models[0].params - best).max() > 0.01


EDGE_OF = [0, 0, 0, 0, 1, 1, 2, 0]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("by", ["examples", "clients", "models"])
def test_edges_and_a_cloud_match_their_loop(by):
    inner = edges(N, 3, edge_of=EDGE_OF, cohort_size=2)
    assignment = dropping(mixing(inner, cloud(by), every=3, **LOSSY), 0.2)
    parts, rounds = (task(), SGD, assignment), []
    state, _ = simulate(jax.random.key(3), *parts, 1, params=start(3))
    for t in range(1, ROUNDS + 1):
        if t > 1:
            state, _ = advance(state, *parts, 1)
        reached = np.flatnonzero(state.assignment.own.present).tolist()
        rounds.append([None, reached])
    participants = participants_of(assignment, 3)
    rounds = [(who, reached) for who, (_, reached) in zip(participants, rounds, strict=True)]
    expected = oracle.hierarchy(problem(), start(3), rounds, EDGE_OF, 3, RATE, STEPS, by=by)
    np.testing.assert_allclose(state.models[0].params, expected, rtol=0, atol=1e-9)


def watched(assignment):
    """The assignment, and a list of the round, clients and models of each cohort to come."""
    seen = []

    def observe(t, cohort, reports, state):
        jax.debug.callback(
            lambda *x: seen.append(x), t, cohort.clients, cohort.models, ordered=True
        )
        return assignment.observe(t, cohort, reports, state) if assignment.observe else state

    return assignment._replace(observe=observe), seen


def participants_of(assignment, num_models):
    """The participants of each model in every round."""
    seeing, seen = watched(assignment)
    simulate(jax.random.key(3), task(), SGD, seeing, ROUNDS, params=start(num_models))
    jax.effects_barrier()
    return [
        [
            [int(k) for k, own in zip(clients, models, strict=True) if own == m and k >= 0]
            for m in range(num_models)
        ]
        for _, clients, models in sorted(seen, key=lambda x: int(x[0]))
    ]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("cohort_size", [None, 6])
def test_splits_match_their_loop(cohort_size):
    most, eps, rounds = 4, (0.35, 0.05), 60
    assignment = cfl(N, most, eps_1=eps[0], eps_2=eps[1], cohort_size=cohort_size)
    seeing, seen = watched(assignment)
    algorithm = reporting(fedavg(RATE, local_steps=STEPS, weighted=False))
    first = start(1)[0]
    state, _ = simulate(1, task(), algorithm, seeing, rounds, params=first)
    jax.effects_barrier()
    drawn = [clients.tolist() for _, clients, _ in sorted(seen, key=lambda x: int(x[0]))]
    expected, label, splits = oracle.cfl(problem(), first, drawn, most, eps, RATE, STEPS)
    np.testing.assert_allclose(state.models[0].params, expected, rtol=0, atol=1e-9)
    assert state.assignment.cluster.tolist() == label
    assert len(splits) > 1
    assert cohort_size is None or splits[0] > 1


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("cohort_size", [None, 6])
def test_soft_clusters_match_their_loop(cohort_size):
    temperature, number = 0.7, 3
    assignment = soft_clusters(N, number, temperature=temperature, cohort_size=cohort_size)
    cohorts = [{*who[0]} for who in participants_of(assignment, number)]
    state, _ = simulate(jax.random.key(3), task(), SGD, assignment, ROUNDS, params=start(number))
    expected = oracle.soft_clusters(problem(), start(number), cohorts, temperature, RATE, STEPS)
    np.testing.assert_allclose(state.models[0].params, expected, rtol=0, atol=1e-9)
    assert {len(each) for each in cohorts} == {cohort_size or N}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("cohort_size", [None, 6])
def test_clusters_that_merge_match_their_loop(cohort_size):
    distance, number = 1.8, 5
    assignment = merging(ifca(N, number, cohort_size=cohort_size), distance)
    cohorts = [{*itertools.chain(*who)} for who in participants_of(assignment, number)]
    state, _ = simulate(jax.random.key(3), task(), SGD, assignment, ROUNDS, params=start(number))
    expected, left = oracle.merging(problem(), start(number), cohorts, distance, RATE, STEPS)
    np.testing.assert_allclose(state.models[0].params, expected, rtol=0, atol=1e-9)
    assert 1 < left[-1] < left[0]


UPDATES = [(1.0, 0.0), (0.9, 0.1), (-1.0, 0.1), (-0.8, -0.1)]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("eps", "splits"), [((0.036, 1.0), True), ((0.035, 1.0), False), ((0.036, 1.005), False)]
)
def test_four_updates_split_into_the_pairs_that_agree(eps, splits):
    """|mean| is .035355, max |d| 1.004988, and the largest cosine across the pairs -.977963."""
    reports = {"update": jnp.array(UPDATES)}
    how = cfl(4, 2, eps_1=eps[0], eps_2=eps[1])
    before = how.init(jax.random.key(0), Look())
    cohort, _ = how.assign(jax.random.key(0), 1, before, Look())
    state = how.observe(1, cohort, reports, before)
    assert state.cluster.tolist() == ([0, 0, 1, 1] if splits else [0] * 4)
    gram = np.array(UPDATES) @ np.array(UPDATES).T
    first, across = oracle.halves(gram)
    np.testing.assert_allclose(state.products, gram, rtol=0, atol=1e-12)
    assert (first, round(across, 6)) == ([0, 1], -0.977963)
    parents = how.mix(1, state, None, jnp.array([[3.0], [7.0]]))
    assert parents.tolist() == ([[3.0], [3.0]] if splits else [[3.0], [7.0]])


def test_splits_find_known_groups():
    """Even and odd clients have different targets."""
    rng = np.random.default_rng(4)
    X = [rng.normal(size=(20, DIM)) for _ in range(N)]
    y = [x @ np.full(DIM, 2.0 if i % 2 else -1.0) for i, x in enumerate(X)]
    split = cfl(N, 4, eps_1=0.5, eps_2=1.0)
    data = least_squares(X, y, ridge=1e-3)
    state, trace = simulate(0, data, reporting(fedavg(0.1, local_steps=5)), split, 60)
    cluster = state.assignment.cluster
    assert {*map(tuple, np.asarray(cluster.reshape(-1, 2)).tolist())} == {(0, 1)}
    assert trace.metrics["clients"][-1].tolist() == [4, 4, 0, 0]
    assert not trace.idle_rounds[:, 2:].any()


# Identities


def last(trace, name="loss"):
    return np.asarray(trace.metrics[name][-1])


def test_the_mean_of_all_is_fedavg_and_the_identity_is_local_training():
    one, everybody = start(1)[0], fedavg(RATE, local_steps=STEPS, weighted=False)
    plain, _ = simulate(0, task(), everybody, full_participation(N), ROUNDS, params=one)
    for net in (network(np.full((N, N), 1 / N)), cloud("models")):
        state, _ = simulate(0, task(), SGD, mixing(peers(N), net), ROUNDS, params=one)
        for x in params_of(state):
            np.testing.assert_allclose(x, params_of(plain)[0], rtol=1e-5, atol=1e-6)
    alone, _ = simulate(0, task(), SGD, peers(N), ROUNDS, params=start())
    same, _ = simulate(0, task(), SGD, mixing(peers(N), network(np.eye(N))), ROUNDS, params=start())
    np.testing.assert_array_equal(same.models[0].params, alone.models[0].params)


def test_edges_that_always_meet_are_fedavg():
    one = start(1)[0]
    plain, _ = simulate(0, task(), SGD, full_participation(N), ROUNDS, params=one)
    assignment = mixing(edges(N, 3, edge_of=EDGE_OF), cloud("examples"))
    state, trace = simulate(0, task(), SGD, assignment, ROUNDS, params=one)
    for x in params_of(state):
        np.testing.assert_allclose(x, params_of(plain)[0], rtol=1e-5, atol=1e-6)
    assert trace.metrics["messages"][-1].tolist() == [2 * ROUNDS] * 3


NETWORKS = {
    "ring": ring(),
    "torus": torus(),
    "star": star(),
    "regular": random_regular(3),
    "matching": matching(),
    "matrix": network(jnp.asarray(mixing_matrix(graph(ARROWS), N))),
    "alternating": alternating([ring(), graph(ARROWS), matching()]),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", NETWORKS)
def test_gossip_keeps_the_mean_and_the_means_of_squares_fall(name):
    idle = fedavg(lambda t: 0.0, local_steps=1)
    assignment = mixing(peers(N), NETWORKS[name], lost=0.2)
    state, trace = simulate(0, task(), idle, assignment, 30, params=start())
    found = state.models[0].params
    np.testing.assert_allclose(found.mean(0), start().mean(0), rtol=0, atol=1e-14)
    error = trace.metrics["consensus_error"].mean(1)
    assert (np.diff(error) <= 1e-15).all()
    assert error[-1] < error[0] / 100
    wanted = ((found - found.mean(0)) ** 2).sum(1)
    np.testing.assert_allclose(last(trace, "consensus_error"), wanted, rtol=1e-9, atol=1e-15)


def test_the_exponential_graph_averages_exactly():
    idle = fedavg(lambda t: 0.0, local_steps=1)
    state, _ = simulate(0, task(), idle, mixing(peers(N), exponential()), 3, params=start())
    mean = np.broadcast_to(start().mean(0), (N, DIM))
    np.testing.assert_allclose(state.models[0].params, mean, rtol=1e-5, atol=1e-6)


CASES = {
    "lossy ring": (lossy(ring()), SGD),
    "push-sum": (lossy(directed(ARROWS)), SGD),
    "tracking": (lossy(matching()), gradient_tracking(local_sgd(RATE))),
    "edges": (mixing(edges(N, 3, edge_of=EDGE_OF, cohort_size=2), cloud(), every=2, lost=0.2), SGD),
    "cfl": (cfl(N, 3, eps_1=0.35, eps_2=0.05, cohort_size=6), reporting(SGD)),
}


def numbers_of(state):
    return state._replace(rng_key=jax.random.key_data(state.rng_key))


@pytest.mark.parametrize("name", CASES)
def test_runs_resume_exactly_and_chunks_devices_and_neighbours_change_nothing(name):
    assignment, algorithm = CASES[name]
    data, begin = task(), start(assignment.num_models)
    parts, key = (data, algorithm, assignment), jax.random.key(0)

    def run(key, **how):
        return simulate(key, *parts, 6, params=begin, **how)[0]

    expected = run(key)
    first, _ = simulate(key, *parts, 2, params=begin)
    jax.tree.map(
        np.testing.assert_array_equal,
        *map(numbers_of, (advance(first, *parts, 4)[0], expected)),
    )
    mesh = jax.make_mesh((2,), ("clients",), devices=jax.devices()[:2])
    split = jax.jit(
        jax.shard_map(
            functools.partial(run, client_axis="clients"),
            mesh=mesh,
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )
    )
    others = [run(key, client_map="scan"), run(key, client_map=3), split(key)]
    for other in others:
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
            *map(numbers_of, (other, expected)),
        )
    keys = jax.vmap(jax.random.key)(jnp.arange(2000))
    many = jax.jit(jax.vmap(lambda key: run(key).models[0].params))(keys)
    for i in (0, 777, 1999):
        alone = run(keys[i]).models[0].params
        np.testing.assert_allclose(many[i], alone, rtol=1e-4, atol=1e-5)


# Parts in common


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Split:
    """Clients with targets for a trunk and for a head, whose size may differ between models."""

    trunk: jax.Array  # [clients, d]
    head: jax.Array

    @property
    def num_clients(self):
        return len(self.trunk)

    def init(self, rng_key):
        return {"trunk": jnp.zeros(self.trunk.shape[1]), "head": jnp.zeros(self.head.shape[1])}

    def weight(self, client):
        return jnp.ones(())

    def batch(self, rng_key, client, step, how):
        return client

    def loss(self, params, client):
        ends = (params["trunk"] - self.trunk[client], params["head"] - self.head[client])
        return sum(jnp.sum(x**2) for x in ends) / 2

    def metrics(self, rng_key, params):
        return {"loss": jnp.mean(jax.vmap(lambda k: self.loss(params, k))(jnp.arange(N)))}


def two_tasks():
    rng = np.random.default_rng(7)
    return [Split(*(jnp.asarray(rng.normal(size=(N, d))) for d in (DIM, h))) for h in (2, 5)]


def test_models_share_their_trunk_and_keep_their_heads():
    tasks = two_tasks()
    run = tasks, fedavg(0.1, local_steps=1), share(mfa_rand(N, 2), "trunk")
    state, trace = simulate(0, *run, 5)
    (one, other), (alone, apart) = (
        params_of(each) for each in (state, simulate(0, *run[:2], mfa_rand(N, 2), 5)[0])
    )
    np.testing.assert_allclose(one["trunk"], other["trunk"], rtol=1e-6)
    # Steps are linear here, so the mean of the trunks is that of models that train alone.
    np.testing.assert_allclose(one["trunk"], (alone["trunk"] + apart["trunk"]) / 2, rtol=1e-5)
    for x, y in ((one, alone), (other, apart)):
        np.testing.assert_array_equal(x["head"], y["head"])
    assert trace.mixed_size == (DIM, DIM)
    assert not last(trace, "messages").any()


def test_unlike_models_mix_only_what_they_have_in_common():
    run = two_tasks(), fedavg(0.1, local_steps=1)
    with pytest.raises(ValueError, match=r"mixes parameters of unlike models.*where=\"trunk\""):
        simulate(0, *run, mixing(mfa_rand(N, 2), server()), 1)


def test_models_that_are_near_merge_and_the_idle_one_follows():
    data = mean_estimation(np.zeros(4), np.zeros(4))
    assignment = merging(edges(4, 4), 0.5)
    begin = jnp.array([0.0, 0.3, 5.0, 9.0])
    state, _ = simulate(0, data, fedavg(1e-6, local_steps=1), assignment, 1, params=begin)
    np.testing.assert_allclose(state.models[0].params, [0.15, 0.15, 5, 9], atol=1e-4)


def test_finished_models_and_their_links_rest():
    data = mean_estimation(np.arange(4.0), np.arange(4.0))
    begin = jnp.array([1.5, 3.0, 4.0, 5.0])
    gossip = finishing(mixing(peers(4), ring()), "loss", at_most=[1.3, 0.0, 0.0, 0.0])
    idle = fedavg(lambda t: 0.0, local_steps=1)
    state, trace = simulate(0, data, idle, gossip, 200, params=begin)
    np.testing.assert_allclose(state.models[0].params, [1.5, 4, 4, 4], rtol=1e-5)
    assert last(trace, "messages").tolist() == [0, 200, 400, 200]


FILES = {
    "ring": (
        {"name": "peers", "mixing": {"name": "ring", "lost": 0.1, "where": ["trunk"]}},
        mixing(peers(6, 6), ring(), lost=0.1, where=("trunk",)),
    ),
    "matrix": (
        {"name": "peers", "mixing": {"name": "network", "W": [[1 / 6] * 6] * 6}},
        mixing(peers(6, 6), network(((1 / 6,) * 6,) * 6)),
    ),
    "edges": (
        {"name": "edges", "edge_of": [0, 1, 2, 3, 4, 5], "mixing": {"name": "cloud", "every": 4}},
        mixing(edges(6, 6, edge_of=(0, 1, 2, 3, 4, 5)), cloud(), every=4),
    ),
    "splits": ({"name": "cfl", "eps_1": 0.1, "eps_2": 0.2}, cfl(6, 6, eps_1=0.1, eps_2=0.2)),
}


def settings(value):
    """The factories and arguments of a part and of those inside it."""
    if getattr(value, "call", None) is None:
        return value
    arguments = value.call.arguments.items()
    return value.call.factory.__name__, {key: settings(x) for key, x in arguments}


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_the_same_as_a_call(name):
    table, expected = FILES[name]
    algorithm = {"assignment": table, "learning_rate": 0.1, "reports_updates": name == "splits"}
    values = {"task": {"num_clients": 6}, "num_models": 6, "num_rounds": 2}
    made = validate(Experiment, values | {"algorithms": {"A": algorithm | {"local_steps": 2}}})
    found = made.algorithms["A"]
    assert settings(found.assignment.build(6, 6)) == settings(expected)
    assert (found.build(6).name == "reporting") == (name == "splits")


@pytest.mark.parametrize(
    "links", [ring(), network(jnp.full((3, 3), 1 / 3)), cloud("models")], ids=["list", "W", "mean"]
)
def test_a_diverged_model_whose_links_are_down_reaches_no_other(links):
    """Weights of links that are down are 0, and 0 times NaN is NaN."""
    task, steep = mean_estimation(np.zeros(3), [0.0, 1.0, 0.0]), fedavg(1e6, local_steps=5)
    alone = mixing(peers(3), links, lost=1.0)
    state, _ = simulate(0, task, steep, alone, 4, params=jnp.zeros(3))
    assert np.isfinite(np.ravel(params_of(state))).tolist() == [True, False, True]
