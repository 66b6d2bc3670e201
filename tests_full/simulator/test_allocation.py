"""Bandits and FedFair, whose choices depend on the models, against NumPy loops."""

import dataclasses
import functools
from operator import itemgetter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_mm import bandit, fedavg, fedfair, local_sgd, simulate
from fedjax_mm.base import Batching, Look, keys
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.simulator.round import metric_of
from fedjax_mm.sweeps import layout
from fedjax_mm.tasks import MLP, LogisticRegression, classification, least_squares, with_metrics
from tests import helpers
from tests.helpers import (
    NOTHING_TO_SEE,
    Towards,
    counting,
    labelled_data,
    remembering,
    slow_unless,
)
from tests.oracles import allocation
from tests.oracles import multi_model as reference

N, M, K, ROUNDS, SEED = 7, 3, 4, 30, 5
DIM, STEPS, RATE, BATCH = 4, 4, 0.05, 3
POLICIES = "random", "weighted-sum", "pareto", "rank-list"


# The bandit and FedFair in whole runs, minibatches included


@functools.cache
def problems():
    """Clients of 1 to 9 examples, with targets of a different scale for each model."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 10, N)
    features = [rng.normal(size=(n, DIM)) for n in counts]
    return [
        reference.LeastSquares(features, [rng.normal(scale, scale, n) for n in counts], 0.3)
        for scale in (1.0, 2.0, 3.0)
    ]


def tasks():
    return [least_squares(each.features, each.targets, ridge=0.3) for each in problems()]


def start():
    return np.random.default_rng(2).normal(size=(M, DIM))


def weights():
    return [float(len(each)) for each in problems()[0].targets]


@functools.cache
def drawn_rows():
    """Indices of the examples in all minibatches, ``[T + 1, models, clients, steps, B]``."""
    data = least_squares(problems()[0].features, problems()[0].targets, ridge=0.3).data
    numbers = np.concatenate([np.arange(int(n)) for n in weights()])
    store = dataclasses.replace(data, examples=jnp.asarray(numbers))

    def rows(t, m, k, e):
        model_key = keys.model_keys(keys.round_key(jax.random.key(SEED), t), jnp.array([m]))[0]
        return store.take(store.batch(keys.client_key(model_key, k), k, e, Batching(BATCH))[0])

    for axis in reversed(range(4)):
        rows = jax.vmap(rows, [0 if i == axis else None for i in range(4)])
    return np.asarray(jax.jit(rows)(*map(jnp.arange, (ROUNDS + 1, M, N, STEPS))))


def train(m, c, w, t):
    """Trains a client and returns its parameters and the mean of its batch losses."""
    problem, losses = problems()[m], []
    for e in range(STEPS):
        rows = drawn_rows()[t, m, c, e]
        residuals = problem.features[c][rows] @ w - problem.targets[c][rows]
        losses.append(0.5 * np.mean(residuals**2) + 0.5 * problem.ridge * w @ w)
        w = w - RATE * reference.least_squares_gradient(problem, c, w, rows)
    return w, float(np.mean(losses))


def draws(of_round):
    """Draws from the assignment key of each round."""

    def of(t):
        return of_round(keys.assignment_key(keys.round_key(jax.random.key(SEED), t)))

    drawn = jax.device_get(jax.jit(jax.vmap(of))(jnp.arange(1, ROUNDS + 1)))
    return [jax.tree.map(itemgetter(t), drawn) for t in range(ROUNDS)]


def draws_of_policy(key):
    one, other = jax.random.split(key)
    return allocation.Draws(
        permutation(one, N, K),
        jax.random.randint(other, (K,), 0, M, jnp.int32),
        jax.random.bits(key, (N,), jnp.uint32),
    )


def draws_of_fedfair(key):
    one, other = jax.random.split(key)
    uniform = jax.random.uniform(other, (K, 1), jnp.float32)[:, 0]
    return allocation.Draws(order=permutation(one, N, K), uniform=uniform)


def run_of(assignment, width=None):
    """The final models, and the cohorts and losses of all rounds."""
    algorithm = fedavg(local_sgd(RATE, steps=STEPS, batch_size=BATCH))
    kept = remembering(assignment, ROUNDS, width)

    @jax.jit
    def run(rng_key, tasks, start):
        state, _ = simulate(rng_key, tasks, algorithm, kept, ROUNDS, params=start)
        return state.models[0].params, *state.assignment[1:]

    return jax.device_get(run(jax.random.key(SEED), tasks(), start()))


def rows_of(choices, num_models=M):
    """The clients of each model, in the order of the choices."""
    return [[c for c, its in choices if its == m] for m in range(num_models)]


def check_run(actual, expected):
    params, clients, losses = actual
    for t in range(ROUNDS):
        rows = [[int(c) for c in row if c >= 0] for row in clients[t]]
        assert rows == rows_of(expected.choices[t]), t + 1
        told = dict(zip(expected.choices[t], expected.losses[t], strict=True))
        for m, row in enumerate(rows):
            wanted = [told[c, m] for c in row]
            np.testing.assert_allclose(losses[t, m, : len(row)], wanted, rtol=1e-10)
    np.testing.assert_allclose(params, expected.params[-1], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("policy", "clock", "options"),
    [
        ("random", "round", {}),
        ("weighted-sum", "round", {"weights": (0.2, 0.3, 0.5)}),
        slow_unless(False, "weighted-sum", "client", {"discount": 0.7}),
        ("pareto", "client", {}),
        slow_unless(False, "pareto", "round", {}),
        ("rank-list", "round", {}),
        ("rank-list", "client", {"discount": 0.7}),
    ],
)
def test_bandits_match_the_papers_loops(policy, clock, options):
    how = {"cohort_size": K, "policy": policy, "clock": clock}
    actual = run_of(bandit(N, M, **how, **options))
    options = {"gamma" if name == "discount" else name: x for name, x in options.items()}
    oracle = allocation.Bandit(N, M, K, policy, clock=clock, **options)
    given = draws(draws_of_policy)
    check_run(actual, allocation.simulate_bandit(oracle, train, start(), given, weights()))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("alpha", [3.0, slow_unless(False, 1.0)])
def test_fedfair_matches_the_papers_loop(alpha):
    actual = run_of(fedfair(N, M, cohort_size=K, alpha=alpha), K)

    def loss(m, w):
        return reference.least_squares_loss(problems()[m], w)

    given = draws(draws_of_fedfair)
    expected = allocation.simulate_fedfair(loss, alpha, train, start(), given, weights())
    check_run(actual, expected)
    each = np.array([len(row) for choices in expected.choices for row in rows_of(choices)])
    assert len(set(each)) > 2  # groups of several sizes


# Choices only, with recorded losses


def replayed(assignment, losses, rng_key=None):
    """The cohorts of each round if client k reports the loss ``losses[t, m, k]``."""

    def one_round(state, at):
        t, loss = at
        key = None if rng_key is None else jax.random.fold_in(rng_key, t)
        groups, state = assignment.assign(key, t, state, NOTHING_TO_SEE)
        told = loss[groups.models, jnp.maximum(groups.clients, 0)]
        reports = {"loss": jnp.where(groups.clients >= 0, told, 0)}
        rows = helpers.rows_of(groups, assignment.num_models)
        return assignment.observe(t, groups, reports, state), rows

    given = jnp.arange(1, len(losses) + 1), losses
    state = assignment.init(jax.random.key(0), NOTHING_TO_SEE)
    return np.asarray(jax.jit(lambda given: lax.scan(one_round, state, given)[1])(given))


SIZES = (7, 3, 4), (6, 2, 3), (5, 1, 2), (9, 4, 9), (4, 5, 1)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("policy", "clock", "size"),
    [
        slow_unless(clock == "round" or size == SIZES[0], policy, clock, size)
        for policy in ("rank-list", "weighted-sum")
        for clock in ("round", "client")
        for size in SIZES
    ],
    ids=str,
)
def test_recorded_losses_lead_to_the_same_choices(policy, clock, size):
    """Some losses are large, and one client always reports 0 for one model."""
    num_clients, num_models, cohort_size = size
    losses = np.random.default_rng(0).gamma(0.5, 1, (120, num_models, num_clients))
    losses[:, -1, 1] = 0
    how = {"cohort_size": cohort_size, "policy": policy, "clock": clock}
    groups = replayed(bandit(num_clients, num_models, **how), losses)
    oracle = allocation.Bandit(*size, policy, clock=clock)
    for t, loss in enumerate(losses, start=1):
        choices = oracle.choose(t, allocation.Draws())
        rows = [[int(c) for c in row if c >= 0] for row in groups[t - 1]]
        assert rows == rows_of(choices, num_models), t
        oracle.observe(t, [((c, m), float(loss[m, c])) for c, m in choices])


@pytest.mark.parametrize("policy", POLICIES)
def test_cohorts_have_distinct_clients_and_a_bounded_size(policy):
    losses = np.random.default_rng(1).gamma(1, 1, (60, M, N)).astype(np.float32)
    key = jax.random.key(3)
    groups = replayed(bandit(N, M, cohort_size=K, policy=policy), losses, key)
    for t, rows in enumerate(groups, start=1):
        present = rows >= 0
        # Padding comes last, so that its chunks can be skipped.
        assert not np.any(present[:, 1:] & ~present[:, :-1])
        if t <= M:
            np.testing.assert_array_equal(rows[t - 1], np.arange(N))
            assert present.sum() == N
        else:
            assert len(set(rows[present])) == present.sum()
            assert 1 <= present.sum() <= K
            assert policy == "pareto" or present.sum() == K


def test_the_random_policy_and_alpha_1_are_uniform():
    """Frequencies are within 4 standard errors, corrected for the number of cells."""
    num_seeds = 20_000
    assignments = (
        (bandit(N, M, cohort_size=K, policy="random"), NOTHING_TO_SEE),
        (
            fedfair(N, M, cohort_size=K, alpha=1.0),
            Look(None, None, metric=lambda *names: jnp.array([5.0, 1.0, 0.0])),
        ),
    )
    seeds = jax.random.split(jax.random.key(0), num_seeds)

    @jax.jit
    @jax.vmap
    def draw(key):
        return [
            helpers.rows_of(assignment.assign(key, M + 1, assignment.init(key, look), look)[0], M)
            for assignment, look in assignments
        ]

    for groups in draw(seeds):
        rows = np.asarray(groups).swapaxes(0, 1)  # of each model, over all seeds
        counts = np.stack([np.bincount(row[row >= 0], minlength=N) for row in rows])
        p = K / (N * M)
        z = np.abs(counts - num_seeds * p) / np.sqrt(num_seeds * p * (1 - p))
        assert z.max() < np.sqrt(16 + 2 * np.log(M * N))


# Client maps, devices and compilation


@functools.cache
def mixed():
    """An MLP, a logistic regression with other classes, and the MLP again."""
    data, other = labelled_data(N), labelled_data(N, num_classes=2, seed=1)
    module = MLP(3, hidden=(4,))
    return [
        classification(data, module),
        classification(other, LogisticRegression(2)),
        classification(data, module),
    ]


ASSIGNMENTS = {
    "rank-list": bandit(N, M, cohort_size=K, clock="client"),
    "fedfair": fedfair(N, M, cohort_size=K, by="accuracy"),
}
SHORT = 12


def one_run(name, client_map, client_axis=None):
    """A run of an assignment that also returns its cohorts and losses."""
    assignment = remembering(ASSIGNMENTS[name], SHORT, K if name == "fedfair" else None)

    def run(rng_key, tasks):
        how = {"client_map": client_map, "client_axis": client_axis}
        algorithm = fedavg(local_sgd(0.3, epochs=1, batch_size=2))
        state, trace = simulate(rng_key, tasks, algorithm, assignment, SHORT, **how)
        return state.models, state.assignment[1:], trace

    return run


@functools.cache
def expected(name):
    return jax.device_get(jax.jit(one_run(name, "vmap"))(jax.random.key(SEED), mixed()))


def close(actual, wanted):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ASSIGNMENTS)
@pytest.mark.parametrize("client_map", ["scan", 2, "auto"])
def test_client_maps_agree(client_map, name):
    program = jax.jit(one_run(name, client_map))
    close(program(jax.random.key(SEED), mixed()), expected(name))
    other = program(jax.random.key(6), mixed())
    assert not np.array_equal(other[1][0], expected(name)[1][0])


@pytest.mark.parametrize("name", [slow_unless(name == "rank-list", name) for name in ASSIGNMENTS])
def test_seeds_on_two_devices_agree_with_one_and_nothing_recompiles(name):
    """Each device computes its share of the clients of both seeds, two clients at a time."""
    chex.clear_trace_counter()
    where = layout(2, jax.devices()[:2], "clients")
    run = chex.assert_max_traces(one_run(name, 2, where.client_axis), n=1)
    program = jax.jit(where.over(jax.vmap(run, (0, None)), (0, None)))
    for place in (1, 0):
        both = jnp.stack([jax.random.key(SEED + place - 1), jax.random.key(SEED + place)])
        found = program(both, mixed())
        close(jax.tree.map(itemgetter(1 - place), found), expected(name))


def test_fedfair_draws_by_the_recorded_accuracies():
    _, (clients, _), trace = expected("fedfair")
    given = draws(draws_of_fedfair)
    for t in range(SHORT):
        lack = 100 * (1 - trace.metrics["test_accuracy"][t])
        models = allocation.fair_models(lack, 3.0, given[t].uniform)
        choices = list(zip(given[t].order, models, strict=True))
        rows = [[c for c in row if c >= 0] for row in clients[t].tolist()]
        assert rows == rows_of(choices)


def test_metric_of_uses_the_first_name_that_the_task_has():
    task = with_metrics(Towards(jnp.arange(2.0)), {"one": lambda w: 1.0, "two": lambda w: 2.0})
    params = {"w": jnp.zeros(3)}
    for names, value in ((("other", "two", "one"), 2), (("one", "two"), 1)):
        assert metric_of(names, task, jax.random.key(0), params) == value


def test_discount_and_alpha_can_vary_without_recompiling():
    task, key = mixed()[0], jax.random.key(SEED)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(discount, alpha):
        both = (
            bandit(N, M, cohort_size=K, discount=discount),
            fedfair(N, M, alpha=alpha, cohort_size=K),
        )
        algorithm = fedavg(local_sgd(0.3, steps=1, batch_size=2))
        return [simulate(key, task, algorithm, each, SHORT)[1].metrics["loss"] for each in both]

    one, other, again = run(0.9, 3.0), run(0.3, 1.0), run(0.9, 3.0)
    for a, b, c in zip(one, other, again, strict=True):
        np.testing.assert_array_equal(a, c)
        assert not np.array_equal(a, b)


def test_padding_is_skipped_under_vmap():
    """A list has room for 7 clients, but a round computes only the 4 that train, in chunks of 2."""
    computed = []
    task = mixed()[0]
    algorithm = fedavg(local_sgd(0.3, steps=1, batch_size=2))

    def client(local, server_state, client_state):
        jax.debug.callback(lambda _: computed.append(1), local.client)
        return algorithm.client(local, server_state, client_state)

    counted = algorithm._replace(client=client)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def run(rng_key, task):
        assignment = bandit(N, M, cohort_size=K)
        return simulate(rng_key, task, counted, assignment, M + 4, client_map=2)[1].client_updates

    updates = run(jax.random.split(jax.random.key(0), 2), task).sum()
    jax.effects_barrier()
    assert updates == 2 * (M * N + 4 * K)
    assert len(computed) == 2 * (M * 8 + 4 * K)


# Errors


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: bandit(0, 2, cohort_size=1), "num_clients is 0"),
        (lambda: bandit(4, 0, cohort_size=1), "num_models is 0"),
        (lambda: bandit(4, 2, cohort_size=5), "cohort_size is 5; it must lie between 1 and num"),
        (lambda: bandit(4, 2, cohort_size=2, policy="best"), "policy is 'best'; it must be 'rand"),
        (lambda: bandit(4, 2, cohort_size=2, clock="day"), "clock is 'day'"),
        (lambda: bandit(4, 2, cohort_size=2, discount=0.0), "discount is 0.0; it must be in"),
        (lambda: bandit(4, 2, cohort_size=2, discount=1.1), "discount is 1.1"),
        (
            lambda: bandit(4, 2, cohort_size=2, weights=(1.0, 1.0)),
            "weights are given, but the policy is 'rank-list'",
        ),
        (
            lambda: bandit(4, 2, cohort_size=2, policy="weighted-sum", weights=(1.0,)),
            "weights has 1 numbers; give one for each of the 2 models",
        ),
        (
            lambda: bandit(4, 2, cohort_size=2, policy="weighted-sum", weights=(1.0, 0.0)),
            "weights is .*; it must be positive",
        ),
        (lambda: fedfair(0, 2), "num_clients is 0"),
        (lambda: fedfair(4, 0), "num_models is 0"),
        (lambda: fedfair(4, 2, cohort_size=5), "cohort_size is 5"),
        (lambda: fedfair(4, 2, alpha=0.5), "alpha is 0.5; it must be at least 1"),
        (lambda: fedfair(4, 2, by="size"), "by is 'size'; it must be 'loss' or 'accuracy'"),
    ],
)
def test_wrong_settings_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_missing_losses_and_metrics_are_refused():
    task, number = Towards(jnp.zeros(4)), jax.random.key(0)
    with pytest.raises(ValueError, match=r"reports PyTreeDef\(\(\)\), but assignments need"):
        simulate(number, task, counting(), bandit(4, 2, cohort_size=2), 1)
    with pytest.raises(ValueError, match="looks at the metric 'loss'; Towards has 'norm'"):
        simulate(number, task, counting(), fedfair(4, 2), 1)
    with pytest.raises(ValueError, match="'test_accuracy' or 'accuracy'; LeastSquares has"):
        simulate(number, tasks()[0], counting(), fedfair(N, 2, by="accuracy"), 1)
