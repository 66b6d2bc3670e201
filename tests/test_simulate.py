"""Every strategy x the properties of the compiled loop."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.errors import KeyReuseError

from fedjax_mm import (
    advance,
    fedavg,
    full_participation,
    inverse_time,
    keys,
    least_squares,
    mfa_rand,
    mfa_rr,
    per_frame,
    quadratic,
    sequential,
    simulate,
)
from fedjax_mm.base import Batching, Task
from fedjax_mm.simulate import init
from tests.helpers import NOTHING_TO_SEE, STRATEGIES, Towards, counting, replay, roll_out

N, ROUNDS = 13, 12
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def examples(num_clients=N, dim=3, seed=0):
    """A regression with 1 to 6 examples per client."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 7, num_clients)
    features = [rng.normal(size=(n, dim)).astype(np.float32) for n in counts]
    return least_squares(features, [x.sum(1) + 1 for x in features], ridge=0.1)


# A task with closed-form, sparse contributions and one with sampled examples and dense ones.
TASKS = {
    "quadratic": lambda: (quadratic(N, 2, mu=0.01), fedavg(inverse_time(3.0, 20.0), local_steps=3)),
    "least squares": lambda: (examples(), fedavg(0.1, local_steps=3, batch_size=2)),
}
every_task = pytest.mark.parametrize("task", TASKS)


def build(strategy, task):
    """A program of the key and the task's data."""
    task, algorithm = TASKS[task]()
    assignment = STRATEGIES[strategy](N)

    def run(rng_key, task, **options):
        return simulate(rng_key, task, algorithm, assignment, ROUNDS, **options)

    return run, task


@functools.cache
def program(strategy, task):
    """The compiled run, everything at its default, and its data."""
    run, data = build(strategy, task)
    return jax.jit(run), data


@functools.cache
def reference_run(strategy, task):
    """With key 0."""
    run, data = program(strategy, task)
    return run(jax.random.key(0), data)


@functools.cache
def swept(strategy):
    """One run as a function of key, learning rate and mu, its grid, and what the grid traced."""
    assignment, traces = STRATEGIES[strategy](N), []

    def run(rng_key, learning_rate, mu):
        algorithm = fedavg(learning_rate, local_steps=2)
        return simulate(rng_key, quadratic(N, 2, mu=mu), algorithm, assignment, ROUNDS)

    def traced(*numbers):
        traces.append(numbers)
        return run(*numbers)

    grid = jax.jit(jax.vmap(jax.vmap(traced, (0, None, None)), (None, 0, None)))
    return run, grid, traces


def assert_close(actual, expected, tolerance=1e-6):
    """Equal up to `tolerance` of the largest entry of each array; integers and keys exactly."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(
                a, b, rtol=0, atol=tolerance * float(np.abs(b).max()) + 1e-30
            )
        else:
            np.testing.assert_array_equal(a, b)


@every_task
@every_strategy
def test_every_client_map_agrees(strategy, task):
    """vmap = scan = chunks, divisors of the group or not, larger than it or not."""
    run, data = build(strategy, task)

    @jax.jit
    def runs(rng_key, data):
        return [run(rng_key, data, client_map=each) for each in ("scan", 2, 100)]

    for actual in runs(jax.random.key(0), data):
        assert_close(actual, reference_run(strategy, task))


@every_task
@every_strategy
def test_seeds_vmapped_equal_seeds_looped(strategy, task):
    run, data = build(strategy, task)
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(3))
    together = jax.jit(jax.vmap(run, (0, None)))(keys, data)
    compiled, _ = program(strategy, task)
    for i in range(3):
        alone = compiled(keys[i], data)
        assert_close(jax.tree.map(operator.itemgetter(i), together), alone)


@every_strategy
def test_jit_equals_eager(strategy):
    run, data = build(strategy, "quadratic")
    assert_close(run(jax.random.key(0), data), reference_run(strategy, "quadratic"))


@every_strategy
def test_one_compilation_for_all_numbers(strategy):
    """20 seeds x 8 learning rates: one compilation, and none on a second call."""
    _, grid, traces = swept(strategy)
    num_models = STRATEGIES[strategy](N).num_models
    keys = jax.random.split(jax.random.key(0), 20)
    before = len(traces)
    first = grid(keys, jnp.linspace(0.01, 0.2, 8), 0.1)[1]
    assert first.metrics["loss"].shape == (8, 20, ROUNDS + 1, num_models)
    other = jax.random.split(jax.random.key(1), 20)
    second = grid(other, jnp.linspace(0.02, 0.3, 8), 0.2)[1]
    assert len(traces) <= before + 1
    assert grid._cache_size() == 1
    assert not np.array_equal(first.metrics["loss"][:, :, -1], second.metrics["loss"][:, :, -1])


@every_strategy
def test_a_point_of_a_sweep_equals_its_single_run(strategy):
    run, grid, _ = swept(strategy)
    rates, keys = jnp.linspace(0.05, 0.2, 8), jax.random.split(jax.random.key(4), 20)
    points = grid(keys, rates, 0.1)
    alone = jax.jit(run)
    for point in ((0, 0), (2, 3), (7, 19)):
        expected = alone(keys[point[1]], rates[point[0]], 0.1)
        assert_close(jax.tree.map(operator.itemgetter(point), points), expected)


@every_strategy
def test_a_run_continues_where_it_stopped(strategy):
    """Bit for bit: the final state, and every record but the repeated one."""
    whole_state, whole = reference_run(strategy, "least squares")
    (data, algorithm), assignment = TASKS["least squares"](), STRATEGIES[strategy](N)

    half = ROUNDS // 2

    @jax.jit
    def start(rng_key, task):
        return init(rng_key, task, algorithm, assignment)

    @jax.jit
    def resume(state, task):
        return advance(state, task, algorithm, assignment, half)

    state, first = resume(start(jax.random.key(0), data), data)
    state, second = resume(state, data)
    assert_close(state, whole_state, tolerance=0)
    np.testing.assert_array_equal(second.round, np.arange(half, ROUNDS + 1))
    for name, values in whole.metrics.items():
        np.testing.assert_array_equal(first.metrics[name], values[: half + 1])
        np.testing.assert_array_equal(second.metrics[name][1:], values[half + 1 :])
        np.testing.assert_allclose(second.metrics[name][0], values[half], rtol=1e-6)


@every_strategy
def test_sparse_record_is_the_dense_one_thinned(strategy):
    run, data = build(strategy, "quadratic")
    _, dense = reference_run(strategy, "quadratic")
    _, thin = jax.jit(functools.partial(run, record_every=4))(jax.random.key(0), data)
    np.testing.assert_array_equal(thin.round, dense.round[::4])
    assert_close(thin.metrics, jax.tree.map(lambda x: x[::4], dense.metrics))
    for name in ("client_updates", "gradients"):
        counts = np.cumsum(getattr(dense, name), axis=0)[::4]
        np.testing.assert_array_equal(np.cumsum(getattr(thin, name), axis=0), counts)


@every_strategy
def test_counts(strategy):
    _, trace = reference_run(strategy, "least squares")
    present = roll_out(STRATEGIES[strategy](N), jax.random.key(0), ROUNDS) >= 0
    np.testing.assert_array_equal(trace.client_updates[1:], present.sum(axis=2))
    np.testing.assert_array_equal(trace.gradients, 3 * trace.client_updates)
    assert (trace.client_updates[0] == 0).all()
    assert trace.upload_size == trace.download_size == (3,) * trace.gradients.shape[1]


def test_upload_of_a_sparse_update_counts_the_model():
    _, trace = simulate(
        jax.random.key(0), quadratic(N, 2, mu=0.1), fedavg(0.1, local_steps=1), mfa_rr(N, 2), 1
    )
    assert trace.upload_size == trace.download_size == (2 * N + 1,) * 2


# The points where such a contract usually breaks.


@pytest.mark.parametrize("client_map", ["vmap", "scan", 2])
def test_padding_contributes_nothing(client_map):
    """Padding is computed as client 0, whose data is NaN: absent clients are selected away."""
    targets = jnp.arange(1.0, 5.0).at[0].set(jnp.nan)
    padded = replay([[[1, -1, 2], [3, -1, -1]], [[-1, -1, 3], [-1, 2, 1]]], 4)
    task, algorithm = Towards(targets), fedavg(0.5, local_steps=2)
    state, _ = simulate(
        jax.random.key(0),
        task,
        algorithm,
        padded,
        2,
        client_map=client_map,
        params={"w": jnp.zeros(3)},
    )
    # A step halves the distance twice: w <- w + 3/4 (mean of the targets - w).
    first, second = 0.75 * 2.5, 0.75 * 4.0
    first, second = first + 0.75 * (4.0 - first), second + 0.75 * (2.5 - second)
    np.testing.assert_allclose(state.models.params["w"][:, 0], [first, second], rtol=1e-6)


@pytest.mark.parametrize("client_map", ["vmap", "scan", 2])
def test_client_states_come_home_by_rows(client_map):
    """Padding overwrites nobody, the last client least of all; each (model, client) has its own."""
    groups = [[[0, 3, -1], [2, -1, -1]], [[3, -1, -1], [-1, 0, 1]], [[-1] * 3, [3, 2, -1]]]
    state, trace = simulate(
        jax.random.key(0),
        Towards(jnp.zeros(4)),
        counting(),
        replay(groups, 4),
        3,
        client_map=client_map,
        params={"w": jnp.zeros(3)},
    )
    np.testing.assert_array_equal(state.models.clients.count, [[1, 0, 0, 2], [1, 1, 2, 1]])
    np.testing.assert_array_equal(state.models.clients.last_round, [[1, 0, 0, 2], [2, 2, 3, 3]])
    np.testing.assert_array_equal(state.models.params["w"][:, 0], [0 + 3 + 3, 2 + 0 + 1 + 3 + 2])
    np.testing.assert_array_equal(trace.client_updates, [[0, 0], [2, 1], [1, 2], [0, 2]])


def test_a_model_that_nobody_trains_stays_as_it_is():
    """Parameters, and the server's momentum and step count: bit for bit, and no 0/0."""
    task = examples()
    algorithm = fedavg(0.1, local_steps=2, server_optimizer=optax.adam(0.1))
    assignment = sequential(N, 2, rounds_per_model=3)
    before, _ = simulate(jax.random.key(0), task, algorithm, assignment, 3)
    after, trace = advance(before, task, algorithm, assignment, 3)
    for old, new in zip(
        jax.tree.leaves(before.models.server), jax.tree.leaves(after.models.server), strict=True
    ):
        np.testing.assert_array_equal(old[0], new[0])
        assert np.isfinite(new).all()
    np.testing.assert_array_equal(before.models.params[0], after.models.params[0])
    assert not np.array_equal(before.models.params[1], after.models.params[1])
    counts = [state.count for state in after.models.server if hasattr(state, "count")]
    assert counts[0].tolist() == [3, 3]
    assert np.isfinite(trace.metrics["loss"]).all()


def test_schedules_are_evaluated_at_the_round_and_not_restarted():
    """One gradient step on (w - 1)^2 / 2 moves 1 - w by the factor 1 - eta(t)."""
    seen = [0.1, 0.2, 0.3, 0.4]
    assignment = full_participation(1)
    task = Towards(jnp.ones(1))
    for schedule, rates in (
        (lambda t: jnp.array([9.0, *seen])[t], seen),
        (per_frame(lambda frame: frame / 10, 2), [0.1, 0.1, 0.2, 0.2]),
        (optax.piecewise_constant_schedule(0.1, {2: 2.0}), [0.1, 0.2, 0.2, 0.2]),
    ):
        state, _ = simulate(
            jax.random.key(0),
            task,
            fedavg(schedule, local_steps=1),
            assignment,
            4,
            params={"w": jnp.zeros(3)},
        )
        expected = 1 - np.prod(1 - np.array(rates))
        np.testing.assert_allclose(state.models.params["w"][0], expected, rtol=1e-6)


def test_memory_is_bounded_by_the_chunk():
    """4096 clients of dense updates of 2000 numbers: 31 MiB at once, far less in chunks of 16."""
    task = Towards(jnp.arange(4096.0), dim=2000)
    algorithm, assignment = fedavg(0.1, local_steps=2), full_participation(4096)

    def temporaries(client_map):
        run = functools.partial(
            simulate,
            algorithm=algorithm,
            assignment=assignment,
            num_rounds=2,
            client_map=client_map,
        )
        program = jax.jit(lambda key, task: run(key, task)).lower(jax.random.key(0), task)
        return program.compile().memory_analysis().temp_size_in_bytes

    at_once, in_chunks = temporaries("vmap"), temporaries(16)
    assert at_once > 4096 * 2000 * 4
    assert in_chunks < at_once / 30


@every_strategy
def test_draws_do_not_depend_on_precision_or_company(strategy):
    """The same clients with x64, and whatever replicas run beside."""
    assignment = STRATEGIES[strategy](N)
    key = jax.random.fold_in(jax.random.key(9), 1)
    alone = roll_out(assignment, key, ROUNDS)
    others = jax.random.split(jax.random.key(5), 3)
    seeds = jnp.concatenate([others[:2], key[None], others[2:]])

    def rolled(key):
        def one_round(state, t):
            round_key = keys.assignment_key(keys.round_key(key, t))
            groups, state = assignment.assign(round_key, t, state, NOTHING_TO_SEE)
            return state, groups.clients

        start = assignment.init(keys.assignment_key(keys.round_key(key, 0)))
        return jax.lax.scan(one_round, start, jnp.arange(1, ROUNDS + 1))[1]

    np.testing.assert_array_equal(jax.jit(jax.vmap(rolled))(seeds)[2], alone)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(roll_out(assignment, key, ROUNDS), alone)


@pytest.mark.parametrize(
    "how",
    [Batching(4), Batching(4, "epochs"), Batching(), Batching(limit=3)],
    ids=["iid", "epochs", "full", "growing"],
)
def test_minibatch_draws_do_not_depend_on_precision_or_company(how):
    keys = jax.random.split(jax.random.key(3), 3)

    def batches(keys, clients):
        task = examples()
        draw = jax.jit(jax.vmap(lambda key, k: task.batch(key, k, jnp.int32(1), how)))
        return [np.asarray(x) for x in draw(keys, clients)]

    together = batches(keys, jnp.array([2, 5, 2]))
    alone = batches(keys[1:2], jnp.array([5]))
    with jax.enable_x64(True):
        double = batches(keys, jnp.array([2, 5, 2]))
    for one, all_, precise in zip(alone, together, double, strict=True):
        np.testing.assert_array_equal(one[0], all_[1])
        np.testing.assert_array_equal(precise, all_)


def test_a_key_that_is_reused_is_found_while_tracing():
    def twice(key):
        return jax.random.normal(key) + jax.random.uniform(key)

    keys = jax.random.split(jax.random.key(0), 2)
    with jax.debug_key_reuse(True), pytest.raises(KeyReuseError):
        jax.jit(jax.vmap(twice)).trace(keys)


@every_strategy
def test_keys_are_never_reused(strategy):
    """JAX's own checker, on sampled minibatches, under jit and vmap; it looks while tracing."""
    run, data = build(strategy, "least squares")
    keys = jax.random.split(jax.random.key(0), 2)
    with jax.debug_key_reuse(True):
        jax.jit(jax.vmap(lambda key, data: run(key, data)[1], (0, None))).trace(keys, data)


@pytest.mark.parametrize(
    "assignment",
    [mfa_rr(N, 3), sequential(N, 2, rounds_per_model=2)],
    ids=["mfa_rr", "with idle models"],
)
def test_is_differentiable(assignment):
    """d loss / d learning rate, against a central difference; an idle model's 0/0 stays out."""

    @jax.jit
    def final_loss(learning_rate):
        algorithm = fedavg(learning_rate, local_steps=3)
        task = quadratic(N, 2, mu=0.1)
        _, trace = simulate(jax.random.key(0), task, algorithm, assignment, 6)
        return trace.metrics["loss"][-1, 0]

    with jax.enable_x64(True):
        slope = (final_loss(0.1 + 1e-5) - final_loss(0.1 - 1e-5)) / 2e-5
        assert jax.jit(jax.grad(final_loss))(0.1) == pytest.approx(float(slope), rel=1e-6)


# Several tasks and initial parameters.


def test_each_model_has_its_own_task():
    """Three tasks stacked = each task alone with the same groups."""
    tasks = [Towards(jnp.arange(6.0) + shift) for shift in (0.0, 10.0, 20.0)]
    assignment, algorithm = mfa_rr(6, 3), fedavg(0.2, local_steps=2)
    start = {"w": jnp.ones(3)}
    state, _ = simulate(jax.random.key(0), tasks, algorithm, assignment, 7, params=start)
    groups = roll_out(assignment, jax.random.key(0), 7)
    for m, task in enumerate(tasks):
        alone, _ = simulate(
            jax.random.key(0), task, algorithm, replay(groups[:, m : m + 1], 6), 7, params=start
        )
        np.testing.assert_allclose(
            state.models.params["w"][m], alone.models.params["w"][0], rtol=1e-6
        )


def test_initial_parameters_are_drawn_given_or_shared():
    task, algorithm, assignment = Towards(jnp.zeros(4)), fedavg(0.1, local_steps=1), mfa_rand(4, 2)

    def start(params=None):
        _, trace = simulate(jax.random.key(0), task, algorithm, assignment, 1, params=params)
        return np.asarray(trace.metrics["norm"][0])

    drawn = start()
    assert drawn[0] != drawn[1], "each model draws its own"
    np.testing.assert_allclose(start({"w": jnp.ones(3)}), [3**0.5] * 2, rtol=1e-6)
    each = {"w": jnp.stack([jnp.ones(3), 2 * jnp.ones(3)])}
    np.testing.assert_allclose(start(each), [3**0.5, 12**0.5], rtol=1e-6)


def test_protocols_are_checked_at_run_time():
    assert isinstance(quadratic(2, 1, mu=1.0), Task)
    assert not isinstance(object(), Task)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rounds": 0}, "num_rounds is 0"),
        ({"num_rounds": 10, "record_every": 3}, "record_every is 3"),
        ({"record_every": 0}, "record_every is 0"),
        ({"client_map": 0}, "client_map is 0"),
        ({"client_map": True}, "client_map is True"),
        ({"client_map": "pmap"}, "client_map is 'pmap'"),
        (
            {"assignment": mfa_rand(5, 2)},
            r"the tasks have \[4\] clients to train but the assignment .* 5",
        ),
        ({"tasks": [quadratic(4, 2, mu=1.0)]}, "there are 1 tasks but the assignment has 2 models"),
        (
            {"tasks": [quadratic(4, 2, mu=1.0), quadratic(4, 3, mu=1.0)], "params": jnp.zeros(9)},
            "the models differ in structure; give a list of 2 initial parameters",
        ),
        (
            {"tasks": [quadratic(4, 2, mu=1.0), quadratic(5, 2, mu=1.0)]},
            r"the tasks have \[4, 5\] clients",
        ),
        (
            {"algorithm": [fedavg(0.1, local_steps=1)] * 3},
            "there are 3 algorithms but the assignment has 2 models",
        ),
        ({"params": jnp.zeros(4)}, r"initial parameters have shape \(4,\); give \(9,\)"),
        ({"params": {"w": jnp.zeros(9)}}, "initial parameters must have the structure"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    defaults = {
        "tasks": quadratic(4, 2, mu=1.0),
        "algorithm": fedavg(0.1, local_steps=1),
        "assignment": mfa_rand(4, 2),
        "num_rounds": 4,
    }
    with pytest.raises(ValueError, match=message):
        simulate(jax.random.key(0), **(defaults | arguments))
