"""Every assignment x the properties of the compiled loop."""

import functools

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
    local_sgd,
    mfa_rand,
    mfa_rr,
    scaffold,
    sequential,
    simulate,
)
from fedjax_mm.asynchrony import fedast
from fedjax_mm.base import Task
from fedjax_mm.schedules import inverse_time, per_frame
from fedjax_mm.simulator.record import add_counts
from fedjax_mm.simulator.simulate import init
from fedjax_mm.tasks import least_squares, quadratic
from tests.helpers import ASSIGNMENTS, Towards, counting, replay, roll_out, slow_unless

N, ROUNDS = 13, 12


# For properties that do not depend on the draw: an assignment with a state and cohorts, and one
# with padding and idle models. The other assignments are slow.
FEW = {"mfa_rr redrawn": "least squares", "sequential": "quadratic"}


few_assignments = pytest.mark.parametrize(
    "assignment", [slow_unless(name in FEW, name) for name in ASSIGNMENTS]
)


def examples(num_clients=N, dim=3, seed=0):
    """A regression with 1 to 6 examples per client."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 7, num_clients)
    features = [rng.normal(size=(n, dim)).astype(np.float32) for n in counts]
    return least_squares(features, [x.sum(1) + 1 for x in features], ridge=0.1)


RATES = {"quadratic": 3.0, "least squares": 2.0}


# A task with closed-form, sparse contributions and one with sampled examples and dense ones.
TASKS = {
    "quadratic": functools.cache(lambda: quadratic(N, 2, mu=0.01)),
    "least squares": functools.cache(lambda: examples()),
}


HOW = {"quadratic": {"steps": 3}, "least squares": {"steps": 3, "batch_size": 2}}


def build(assignment, task):
    """A run as a function of the key, the data and the rate, and the data."""
    made, how, rate = ASSIGNMENTS[assignment](N), HOW[task], RATES[task]

    def run(rng_key, task, rate=rate, **options):
        algorithm = fedavg(local_sgd(inverse_time(rate, 20.0), **how))
        return simulate(rng_key, task, algorithm, made, ROUNDS, **options)

    return run, TASKS[task]()


@functools.cache
def program(assignment, task):
    """The compiled run with default options, and its data."""
    run, data = build(assignment, task)
    return jax.jit(run), data


@functools.cache
def reference_run(assignment, task):
    """The result with key 0."""
    run, data = program(assignment, task)
    return run(jax.random.key(0), data, RATES[task])


def on_host(tree):
    """Converts to NumPy arrays, whose indexing does not compile, and keys to their data."""
    return jax.tree.map(
        lambda x: np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        ),
        tree,
    )


def assert_close(actual, expected, tolerance=1e-6):
    """Equality up to `tolerance` of the largest entry of an array, exact for integers and keys."""
    actual, expected = (jax.tree.leaves(on_host(tree)) for tree in (actual, expected))
    for a, b in zip(actual, expected, strict=True):
        if np.issubdtype(a.dtype, np.floating):
            np.testing.assert_allclose(
                a, b, rtol=0, atol=tolerance * float(np.abs(b).max()) + 1e-30
            )
        else:
            np.testing.assert_array_equal(a, b)


@few_assignments
def test_jit_equals_eager(assignment):
    run, data = build(assignment, "quadratic")
    assert_close(run(jax.random.key(0), data), reference_run(assignment, "quadratic"))


@few_assignments
def test_a_run_continues_where_it_stopped(assignment):
    """The final state and every record but the repeated one are bitwise equal."""
    name = FEW.get(assignment, "least squares")
    whole_state, whole = on_host(reference_run(assignment, name))
    data, made = TASKS[name](), ASSIGNMENTS[assignment](N)
    half = ROUNDS // 2

    def algorithm(rate):
        return fedavg(local_sgd(inverse_time(rate, 20.0), **HOW[name]))

    @jax.jit
    def start(rng_key, task, rate):
        return init(rng_key, task, algorithm(rate), made)

    @jax.jit
    def resume(state, task, rate):
        return advance(state, task, algorithm(rate), made, half)

    rate = RATES[name]
    state, first = resume(start(jax.random.key(0), data, rate), data, rate)
    state, second = resume(state, data, rate)
    first, second = on_host((first, second))
    assert_close(state, whole_state, tolerance=0)
    np.testing.assert_array_equal(second.round, np.arange(half, ROUNDS + 1))
    for name, values in whole.metrics.items():
        np.testing.assert_array_equal(first.metrics[name], values[: half + 1])
        np.testing.assert_array_equal(second.metrics[name][1:], values[half + 1 :])
        np.testing.assert_allclose(second.metrics[name][0], values[half], rtol=1e-6)


@few_assignments
def test_sparse_record_is_the_dense_one_thinned(assignment):
    run, data = build(assignment, "quadratic")
    _, dense = on_host(reference_run(assignment, "quadratic"))
    thinned = jax.jit(functools.partial(run, record_every=4))
    _, thin = on_host(thinned(jax.random.key(0), data, RATES["quadratic"]))
    np.testing.assert_array_equal(thin.round, dense.round[::4])
    assert_close(thin.metrics, jax.tree.map(lambda x: x[::4], dense.metrics))
    for name in ("client_updates", "gradients"):
        counts = np.cumsum(getattr(dense, name), axis=0)[::4]
        np.testing.assert_array_equal(np.cumsum(getattr(thin, name), axis=0), counts)


@few_assignments
def test_counts(assignment):
    trace = reference_run(assignment, "quadratic")[1]
    updates, gradients = on_host((trace.client_updates, trace.gradients))
    present = roll_out(ASSIGNMENTS[assignment](N), jax.random.key(0), ROUNDS) >= 0
    np.testing.assert_array_equal(updates[1:], present.sum(axis=2))
    np.testing.assert_array_equal(gradients, 3 * updates)
    assert (updates[0] == 0).all()
    # Updates are sparse, but clients send whole models.
    assert trace.upload_size == trace.download_size == (2 * N + 1,) * gradients.shape[1]


def test_overflowing_counts_stay_marked():
    """int32 would continue from -2^31."""
    done, new = np.int32([2**31 - 1, 5, -1, 7]), np.int32([1, 2, 3, -1])
    assert add_counts(*map(jnp.asarray, (done, new))).tolist() == [-1, 7, -1, -1]


def test_uploads_and_downloads_are_counted_separately():
    """SCAFFOLD also uploads a control variate, which counts as upload."""
    run = functools.partial(simulate, algorithm=scaffold(local_sgd(0.1, steps=1)), num_rounds=1)
    run = functools.partial(run, assignment=mfa_rr(N, 2))
    _, trace = jax.eval_shape(run, jax.random.key(0), TASKS["quadratic"]())
    assert (trace.upload_size, trace.download_size) == ((4 * N + 2,) * 2, (2 * N + 1,) * 2)


@pytest.mark.parametrize("client_map", ["vmap", "scan", 2])
def test_padding_contributes_nothing(client_map):
    """Padding is computed as client 0, whose data is NaN, and its result is discarded."""
    targets = jnp.arange(1.0, 5.0).at[0].set(jnp.nan)
    padded = replay([[[1, -1, 2], [3, -1, -1]], [[-1, -1, 3], [-1, 2, 1]]], 4)
    algorithm, how = fedavg(0.5, local_steps=2), {"client_map": client_map}

    @jax.jit
    def run(rng_key, task):
        return simulate(rng_key, task, algorithm, padded, 2, params={"w": jnp.zeros(3)}, **how)

    state, _ = run(jax.random.key(0), Towards(targets))
    # A round halves the distance twice: w <- w + 3/4 (mean of the targets - w).
    first, second = 0.75 * 2.5, 0.75 * 4.0
    first, second = first + 0.75 * (4.0 - first), second + 0.75 * (2.5 - second)
    np.testing.assert_allclose(state.models[0].params["w"][:, 0], [first, second], rtol=1e-6)


@pytest.mark.parametrize("client_map", ["vmap", "scan", 2])
def test_client_states_are_stored_by_model_and_client(client_map):
    """Padding overwrites no state, not even that of the last client."""
    groups = [[[0, 3, -1], [2, -1, -1]], [[3, -1, -1], [-1, 0, 1]], [[-1] * 3, [3, 2, -1]]]
    how = {"params": {"w": np.zeros(3, np.float32)}, "client_map": client_map}

    @jax.jit
    def run(rng_key, task):
        return simulate(rng_key, task, counting(), replay(groups, 4), 3, **how)

    state, trace = run(jax.random.key(0), Towards(jnp.zeros(4)))
    np.testing.assert_array_equal(state.models[0].clients.count, [[1, 0, 0, 2], [1, 1, 2, 1]])
    np.testing.assert_array_equal(state.models[0].clients.last_round, [[1, 0, 0, 2], [2, 2, 3, 3]])
    np.testing.assert_array_equal(state.models[0].params["w"][:, 0], [0 + 3 + 3, 2 + 0 + 1 + 3 + 2])
    np.testing.assert_array_equal(trace.client_updates, [[0, 0], [2, 1], [1, 2], [0, 2]])


def test_an_idle_model_does_not_change():
    """Parameters, server momentum and step count are bitwise equal, without NaN from 0/0."""
    task = examples()
    algorithm = fedavg(0.1, local_steps=2, server_optimizer=optax.adam(0.1))
    assignment = sequential(N, 2, rounds_per_model=3)

    @jax.jit
    def run(rng_key, task):
        before, _ = simulate(rng_key, task, algorithm, assignment, 3)
        return before, *advance(before, task, algorithm, assignment, 3)

    before, after, trace = run(jax.random.key(0), task)
    for old, new in zip(
        jax.tree.leaves(before.models[0].server),
        jax.tree.leaves(after.models[0].server),
        strict=True,
    ):
        np.testing.assert_array_equal(old[0], new[0])
        assert np.isfinite(new).all()
    np.testing.assert_array_equal(before.models[0].params[0], after.models[0].params[0])
    assert not np.array_equal(before.models[0].params[1], after.models[0].params[1])
    assert after.models[0].server.optimizer[0].count.tolist() == [3, 3]
    assert np.isfinite(trace.metrics["loss"]).all()


def test_schedules_are_evaluated_at_the_round_and_not_restarted():
    """One gradient step on (w - 1)^2 / 2 moves 1 - w by the factor 1 - eta(t)."""
    seen = [0.1, 0.2, 0.3, 0.4]
    rates = [seen, [0.1, 0.1, 0.2, 0.2], [0.1, 0.2, 0.2, 0.2]]

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, None, 0))
    def run(rng_key, task, which):
        def schedule(t):
            given = (
                lambda t: jnp.array([9.0, *seen])[t],
                per_frame(lambda frame: frame / 10, 2),
                optax.piecewise_constant_schedule(0.1, {2: 2.0}),
            )
            return jnp.stack([jnp.asarray(each(t)) for each in given])[which]

        algorithm, start = fedavg(schedule, local_steps=1), {"w": jnp.zeros(3)}
        return simulate(rng_key, task, algorithm, full_participation(1), 4, params=start)[0]

    ends = run(jax.random.key(0), Towards(jnp.ones(1)), np.arange(3)).models[0].params["w"]
    expected = 1 - np.prod(1 - np.array(rates), axis=1)
    np.testing.assert_allclose(ends, np.broadcast_to(expected[:, None, None], ends.shape), 1e-6)


def test_memory_is_bounded_by_the_chunk():
    """Dense updates of 4096 clients take 31 MiB at once, and far less in chunks of 16."""
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


def test_a_reused_key_is_detected_while_tracing():
    def twice(key):
        return jax.random.normal(key) + jax.random.uniform(key)

    keys = jax.random.split(jax.random.key(0), 2)
    with jax.debug_key_reuse(True), pytest.raises(KeyReuseError):
        jax.jit(jax.vmap(twice)).trace(keys)


def test_each_model_has_its_own_task():
    """Three stacked tasks train like each task alone with the same clients."""
    tasks = [Towards(np.arange(6, dtype=np.float32) + shift) for shift in (0, 10, 20)]
    assignment, algorithm = mfa_rr(6, 3), fedavg(0.2, local_steps=2)
    start = {"w": np.ones(3, np.float32)}

    @jax.jit
    def together(rng_key, tasks):
        return simulate(rng_key, tasks, algorithm, assignment, 7, params=start)[0].models[0].params

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0, 1))
    def alone(rng_key, task, groups):
        given = replay(groups[:, None], 6)
        return simulate(rng_key, task, algorithm, given, 7, params=start)[0].models[0].params

    groups = roll_out(assignment, jax.random.key(0), 7)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *tasks)
    expected = alone(jax.random.key(0), stacked, groups)["w"][:, 0]
    np.testing.assert_allclose(together(jax.random.key(0), tasks)["w"], expected, rtol=1e-6)


def test_initial_parameters_are_drawn_given_or_shared():
    algorithm, assignment = fedavg(0.1, local_steps=1), mfa_rand(4, 2)
    ones, each = np.ones(3), np.stack([np.ones(3), 2 * np.ones(3)])
    given = [None, *({"w": w.astype(np.float32)} for w in (ones, each))]

    @jax.jit
    def start(rng_key, task):
        runs = [simulate(rng_key, task, algorithm, assignment, 1, params=each) for each in given]
        return [trace.metrics["norm"][0] for _, trace in runs]

    drawn, *others = map(np.asarray, start(jax.random.key(0), Towards(jnp.zeros(4))))
    assert drawn[0] != drawn[1], "each model draws its own"
    np.testing.assert_allclose(others, [[3**0.5] * 2, [3**0.5, 12**0.5]], rtol=1e-6)


def test_protocols_are_checked_at_run_time():
    assert isinstance(quadratic(2, 1, mu=1.0), Task)
    assert not isinstance(object(), Task)


@pytest.mark.parametrize(
    ("call", "most"), [("init", 1), ("simulate", 2), ("advance", 2), ("asynchronous", 3)]
)
def test_a_client_function_is_traced_once_at_the_door_and_once_in_the_run(call, most):
    """An asynchronous run traces it once more, for the shapes of its first sums."""
    task, plain, calls = quadratic(6, 4, mu=0.1), fedavg(local_sgd(0.1, steps=2)), []

    def client(*given):
        calls.append(given)
        return plain.client(*given)

    algorithm = plain._replace(client=client)
    chooses = fedast(6, 2, at_work=4, ratio=2) if call == "asynchronous" else mfa_rr(6, 2)
    if call == "init":
        jax.eval_shape(lambda: init(0, task, algorithm, chooses))
    elif call == "advance":
        state = jax.eval_shape(lambda: init(0, task, plain, chooses))
        jax.eval_shape(lambda state: advance(state, task, algorithm, chooses, 4), state)
    else:
        how = {"client_map": 2, "record_every": 2}
        jax.eval_shape(lambda: simulate(0, task, algorithm, chooses, 4, **how))
    assert len(calls) == most
