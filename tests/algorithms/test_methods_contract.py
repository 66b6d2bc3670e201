"""Contract tests for every method, under every `client_map`."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    appealing,
    attacked,
    mfa_rand,
    mfa_rr,
    noisy,
    sequential,
    simulate,
)
from fedjax_mm.algorithms import methods
from fedjax_mm.base import Assignment, ClientContext
from fedjax_mm.tasks import (
    LogisticRegression,
    Tuning,
    classification,
    least_squares,
    own_models,
    requiring,
)
from tests.helpers import Featured, Measured, labelled_data, replay, roll_out, slow_unless
from tests.methods import METHODS

N, M, ROUNDS = 6, 3, 4
ATTACKS = np.arange(N) < 2
RHO = np.array([0.1, 0.5, 2.0, 0.05, 0.3, 1.0])
ALGORITHMS = METHODS | {"noisy": METHODS["maxfl"]}
every_algorithm = pytest.mark.parametrize("method", ALGORITHMS)
# Quick comparisons of runs cover server states, client states and attackers. `test_methods` checks
# all methods against their loops.
QUICK = {"scaffold", "mwfed", "noisy"}
every_run = pytest.mark.parametrize("method", [slow_unless(m in QUICK, m) for m in ALGORITHMS])


def test_every_method_has_its_loop_and_its_row():
    missing = set(methods()) - set(METHODS)
    assert not missing, f"add rows to tests/methods.py for {missing}, with loops in tests/oracles/"


def algorithm_of(method, rate):
    """Builds a method with two local steps on batches of two."""
    algorithm = ALGORITHMS[method].build(rate, 2, batch_size=2)
    return noisy(algorithm, ATTACKS) if method == "noisy" else algorithm


@functools.cache
def tasks():
    """One regression per model, with 1 to 5 examples per client."""

    def one(seed):
        rng = np.random.default_rng(seed)
        features = [rng.normal(size=(n, 2)) for n in (1, 5, 2, 3, 5, 4)]
        targets = [x.sum(1) + rng.normal() for x in features]
        return Featured(least_squares(features, targets, ridge=0.1), N)

    return [one(seed) for seed in range(M)]


@functools.cache
def cases():
    """Stacked arguments of four runs: keys, rates, cohorts ``[T, M, N]`` and opt-outs.

    The second run has groups of 1 and 2, the third has two idle models of three, and clients of the
    last one opt out of models that do not appeal to them.
    """
    assignments = [
        mfa_rand(N, M),
        mfa_rand(N, M, cohort_size=4),
        sequential(N, M, rounds_per_model=1),
        mfa_rr(N, M),
    ]
    rng_keys = jax.random.split(jax.random.key(1), len(assignments))
    groups = [roll_out(*each, ROUNDS) for each in zip(assignments, rng_keys, strict=True)]
    padded = [
        np.pad(each, ((0, 0), (0, 0), (0, N - each.shape[2])), constant_values=-1)
        for each in groups
    ]
    rates, is_free = np.array([0.1, 0.1, 0.05, 0.1]), np.arange(4) == 3
    return rng_keys, rates, np.stack(padded), is_free


def assignment_of(groups, is_free, num_models):
    """An assignment with given cohorts and optional opt-outs that records observations."""
    given = replay(groups, N)
    flexible = appealing(given, cohort_size=N, from_round=2)

    def assign(*args):
        (all_of_them, _), (some, state) = given.assign(*args), flexible.assign(*args)
        clients = jnp.where(is_free, some.clients, all_of_them.clients)
        return dataclasses.replace(all_of_them, clients=clients), state

    nothing = jnp.zeros((num_models, N)), jnp.zeros(())
    return Assignment(N, num_models, lambda rng_key, look: nothing, assign, remember)


def remember(round, groups, reports, state):
    """Sums the reports of every model and client, and those of padding."""
    (losses,) = jax.tree.leaves(reports)
    present = groups.clients >= 0
    rows = groups.models, jnp.where(present, groups.clients, N)
    by_client = state[0].at[rows].add(losses, mode="drop")
    return by_client, state[1] + jnp.sum(jnp.where(present, 0, jnp.abs(losses)))


def program(method, client_map, num_models):
    """A run of the first models, with data as an argument."""

    def run(rng_key, rate, groups, is_free, tasks):
        learned = [requiring(task, RHO) for task in tasks[:num_models]]
        if method == "noisy":
            learned = [attacked(task, ATTACKS) for task in learned]
        assignment = assignment_of(groups, is_free, num_models)
        algorithm = algorithm_of(method, rate)
        state, trace = simulate(
            rng_key, learned, algorithm, assignment, ROUNDS, client_map=client_map
        )
        gradients = trace.client_updates, trace.gradients, trace.idle_rounds
        metrics = trace.metrics["loss"], trace.metrics["train_appeal"]
        by_model = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (gradients, metrics))
        return (state.models[0], by_model, state.assignment[0]), state.assignment[1]

    return run


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-10 * (1 + np.abs(b).max()))
        else:
            np.testing.assert_array_equal(a, b)


@functools.cache
def expected(method):
    """Results with all clients of all models at once, vmapped over the runs."""
    with jax.enable_x64(True):
        together = jax.vmap(program(method, "vmap", M), (0, 0, 0, 0, None))
        return jax.jit(together)(*cases(), tasks())


@pytest.mark.usefixtures("x64")
@every_run
def test_client_maps_agree_and_nothing_recompiles(method):
    """Results depend neither on the places of padding nor on the other models.

    `test_methods` compares chunks of two clients, and all at once, with the same loop.
    """
    chex.clear_trace_counter()
    rng, (rng_keys, rates, groups, is_free) = np.random.default_rng(0), cases()
    compiled = jax.jit(chex.assert_max_traces(program(method, "scan", 1), n=1))
    together, nothing = expected(method)
    np.testing.assert_array_equal(nothing, 0)
    for run, key in enumerate(rng_keys):
        shuffled = rng.permuted(groups[run, :, :1], axis=2)
        alone, nothing = compiled(key, rates[run], shuffled, is_free[run], tasks())
        assert nothing == 0
        assert_close(alone, jax.tree.map(lambda x, run=run: x[run, :1], together))


@pytest.mark.usefixtures("x64")
@every_run
def test_runs_are_finite_and_differ(method):
    """Otherwise the comparison above would be empty."""
    (models, ((updates, _, _), (loss, appeal)), reports), _ = expected(method)
    assert models.params.shape == (4, M, 2)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((models, loss, reports)))
    ends = np.asarray(models.params)
    assert all(np.abs(a - b).max() > 1e-6 for i, a in enumerate(ends) for b in ends[:i])
    _, _, groups, _ = cases()
    present = (groups >= 0).sum(3).swapaxes(1, 2)
    np.testing.assert_array_equal(updates[:3, :, 1:], present[:3])
    assert 0 < updates[3].sum() < present[3].sum(), "some stay away, and not all"
    assert appeal.shape == (4, M, 1 + ROUNDS)
    trained = np.array(
        [[[(groups[r, :, m] == k).any() for k in range(N)] for m in range(M)] for r in range(3)]
    )
    np.testing.assert_array_equal(reports[:3] > 0, trained)


@pytest.mark.usefixtures("x64")
@every_algorithm
def test_a_scale_multiplies_weight_and_update_only(method):
    """The report, the count of gradients and the state do not change.

    Some methods are also compared eagerly.
    """
    task = attacked(requiring(tasks()[0], RHO), ATTACKS)

    def send(scale):
        key, algorithm, params = jax.random.key(0), algorithm_of(method, 0.1), jnp.ones(2)
        server, client_state = algorithm.init(task, params)
        local = ClientContext(key, jnp.int32(1), task, jnp.int32(1), params, scale)
        return algorithm.client(local, server, client_state)

    compiled = jax.jit(send)
    (one, state), (three, same) = compiled(1.0), compiled(3.0)
    if method in QUICK:
        assert_close(send(1.0), (one, state))
    assert_close((three.report, three.num_gradients, same), (one.report, one.num_gradients, state))
    update, larger = one.update, three.update
    if method == "feddyn":  # ignores it, so that h remains the mean of the g_k
        assert_close((larger, three.weight), (update, one.weight))
        return
    if method == "scaffold":  # c remains the mean of the c_k
        assert_close(larger.pop("c"), update.pop("c"))
    pairs = zip(jax.tree.leaves(larger), jax.tree.leaves(update), strict=True)
    for more, less in pairs:
        np.testing.assert_allclose(more, 3 * less, rtol=1e-10)
        assert np.abs(less).max() > 0
    if ALGORITHMS[method].is_weighted:
        assert three.weight == pytest.approx(3 * float(one.weight), rel=1e-12)
    assert set(one.report) == {"loss"}
    assert one.report["loss"].shape == ()


def with_factors(clients, scale):
    """Assigns clients ``[T, n]`` to one model with scales, where scale 0 means no part."""
    clients, scale = jnp.asarray(clients, jnp.int32), jnp.asarray(scale)
    given = replay(clients[:, None], N)

    def assign(rng_key, t, state, look):
        groups, state = given.assign(rng_key, t, state, look)
        takes_part = scale[t - 1] > 0
        now = jnp.where(takes_part, scale[t - 1], 9.0)  # must be ignored
        return dataclasses.replace(groups, scale=now, takes_part=takes_part), state

    return given._replace(assign=assign)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "method", [slow_unless(m in QUICK | {"afl", "mifa"}, m) for m in ALGORITHMS]
)
def test_clients_that_take_no_part_do_not_affect_the_server(method):
    """They are like padding, even in rounds without participants."""
    task = requiring(tasks()[0], RHO)
    everybody = np.tile(np.arange(4), (ROUNDS, 1))
    takes_part = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0], [1, 0, 1, 1]]) > 0
    factors = np.where(takes_part, [2.0, 1.0, 0.5, 1.0], 0.0)

    @jax.jit
    def run(clients, scale):
        assignment = with_factors(clients, scale)
        state, _ = simulate(jax.random.key(0), task, algorithm_of(method, 0.1), assignment, ROUNDS)
        return state.models[0].params, state.models[0].server

    padded = np.where(takes_part, everybody, -1)
    assert_close(run(everybody, factors), run(padded, factors))


def test_all_methods_report_the_loss():
    """An assignment may observe models that are trained by different methods."""
    assignment = replay([[[k] for k in range(len(METHODS))]], len(METHODS))
    assignment = assignment._replace(init=lambda rng_key, look: jnp.zeros(len(METHODS)))
    assignment = assignment._replace(observe=lambda t, groups, reports, state: reports["loss"])
    task = requiring(Measured(jnp.arange(1.0, 1 + len(METHODS))), jnp.ones(len(METHODS)))
    algorithms = [row.build(0.1, 2) for row in METHODS.values()]

    @jax.jit
    def run(rng_key):
        params = {"w": jnp.zeros(3)}
        return simulate(rng_key, task, algorithms, assignment, 1, params=[params] * len(METHODS))[0]

    reports = run(jax.random.key(0)).assignment
    first = 1.5 * np.arange(1.0, 1 + len(METHODS)) ** 2  # F_k(0)
    assert np.all((0.5 * first < reports) & (reports <= first))


def test_single_precision_survives_in_a_double_precision_program():
    """States and parameters keep their dtypes, as `lax.scan` requires of its carry."""
    task = requiring(Measured(jnp.arange(N, dtype=jnp.float32)), jnp.ones(N))

    def run(rng_key, method):
        algorithm = algorithm_of(method, lambda t: 0.1 / t) if method != "noisy" else None
        algorithm = algorithm or noisy(ALGORITHMS[method].build(0.1, 2), ATTACKS)
        assignment = appealing(mfa_rand(N, 1, unbiased=True), cohort_size=2)
        return simulate(rng_key, task, algorithm, assignment, 2)[0].models[0]

    with jax.enable_x64(True):
        for method in ALGORITHMS:
            one = functools.partial(run, method=method)
            models = jax.eval_shape(one, jax.random.key(0))
            dtypes = {leaf.dtype for leaf in jax.tree.leaves(models.params)}
            assert dtypes == {jnp.dtype("float32")}, method


def test_keys_are_never_reused():
    """JAX checks runs with own models, opt-outs, noise and fine-tuning."""
    task = classification(labelled_data(N), LogisticRegression(3))
    algorithms = [METHODS[name].build(0.1, 2, batch_size=2) for name in ("ditto", "perfedavg")]
    algorithms[1] = noisy(algorithms[1], ATTACKS)

    def run(rng_key, task):
        options = {"learning_rate": 0.1, "num_steps": 2, "batch_size": 2}
        own = own_models(rng_key, task, **options)
        demanding = requiring(task, own, tuning=Tuning(0.1, 2, 2))
        assignment = appealing(mfa_rand(N, 2), cohort_size=2, from_round=1)
        return simulate(rng_key, demanding, algorithms, assignment, 2)[1]

    with jax.debug_key_reuse(True):
        jax.jit(run).trace(jax.random.key(0), task)
