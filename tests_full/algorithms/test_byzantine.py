"""Attackers change their own reports and updates, and no other client."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    appealing,
    attacked,
    fedavg,
    full_participation,
    local_sgd,
    maxfl,
    mfa_rand,
    mwfed,
    noisy,
    simulate,
)
from fedjax_mm.base import ClientContext
from fedjax_mm.base.sums import dense_update
from fedjax_mm.compression import compressed, top_k
from fedjax_mm.tasks import own_models, quadratic, requiring
from fedjax_mm.tasks.view import client_losses, thresholds
from tests.algorithms.method_problems import BATCH, PROBLEMS, SEED, N
from tests.helpers import Measured, replay, roll_out, slow_unless
from tests.methods import METHODS
from tests.oracles import maxfl as oracle

TASK = quadratic(12, 80, mu=0.1)
ATTACKS = jnp.arange(12) < 3
PARAMS = jax.random.normal(jax.random.key(8), (TASK.dim,), jnp.float32)
KEY = jax.random.key(0)


@functools.cache
def sender(algorithm):
    """A function from client, seed and task to a client's dense contribution in round 1."""

    def send(task, rng_key, client):
        server, state = algorithm.init(task, PARAMS)
        local = ClientContext(rng_key, 1, task, client, PARAMS)
        return dense_update(algorithm.client(local, server, state)[0], PARAMS)

    program = jax.jit(send)
    return lambda client, seed=0, task=TASK: program(task, jax.random.key(seed), jnp.int32(client))


@functools.cache
def method(name):
    return METHODS[name].factory(local_sgd(0.1, steps=2))


@pytest.mark.parametrize("noise", [1.0, 2.5])
@pytest.mark.parametrize("name", ["fedavg", "scaffold"], ids=["sparse", "of two parts"])
def test_noise_is_as_large_as_the_update(name, noise):
    """Its standard deviation is `noise` times the root mean square of the update."""
    plain, send = sender(method(name))(1), sender(noisy(method(name), ATTACKS, noise=noise))
    sent = send(1)
    leaves = [np.ravel(x) for x in jax.tree.leaves(plain.update)]
    draws = [np.ravel(x) - y for x, y in zip(jax.tree.leaves(sent.update), leaves, strict=True)]
    update, added = np.concatenate(leaves), np.concatenate(draws)
    deviation = noise * np.sqrt(np.mean(update**2))
    assert added.std() == pytest.approx(deviation, rel=4 / np.sqrt(2 * len(added)))
    assert abs(added.mean()) < 4 * deviation / np.sqrt(len(added))
    for part in draws:
        assert part.std() == pytest.approx(deviation, rel=4 / np.sqrt(2 * len(part)))
    assert sent.weight == plain.weight
    assert sent.report == plain.report
    other = send(1, seed=1)
    assert not np.allclose(jax.tree.leaves(other.update)[0], jax.tree.leaves(sent.update)[0])
    for honest in (3, 11):
        for a, b in zip(
            *(jax.tree.leaves(each(honest)) for each in (sender(method(name)), send)), strict=True
        ):
            np.testing.assert_array_equal(a, b)


def test_parts_get_independent_noise():
    plain = sender(method("scaffold"))(1).update
    sent = sender(noisy(method("scaffold"), ATTACKS))(1).update
    first, second = (np.asarray(sent[name] - plain[name]) for name in ("params", "c"))
    step = jax.random.normal(jax.random.fold_in(KEY, 0), first.shape, jnp.float32)
    for one, other in (
        (first, second),
        (first, step),
        (second, step),
    ):  # also against the key of local step 0
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(len(first))


def test_attackers_report_inflated_losses():
    """Their thresholds, the metrics and the losses of other clients do not change."""
    honest = requiring(TASK, jnp.linspace(-0.1, 0.1, 12), num_unseen=2)
    task = attacked(honest, ATTACKS[:10], loss_factor=3.0)
    factors = np.where(ATTACKS[:10], 3.0, 1.0)

    @jax.jit
    def look(task):
        each = jax.vmap(lambda k: task.client_loss(PARAMS, k))(jnp.arange(10))
        few = client_losses(task, PARAMS, 4)
        return each, client_losses(task, PARAMS), few, thresholds(task), task.metrics(KEY, PARAMS)

    (each, together, few, rho, metrics), expected = look(task), look(honest)
    np.testing.assert_allclose(each, factors * expected[0], rtol=1e-6)
    np.testing.assert_allclose(together, factors * expected[0], rtol=1e-6)
    np.testing.assert_allclose(few, (factors * expected[0])[:4], rtol=1e-6)
    np.testing.assert_array_equal(rho, expected[3])
    assert metrics == expected[4]
    assert task.num_clients == 10
    default = attacked(TASK, ATTACKS).client_loss(PARAMS, jnp.int32(2))
    assert default == pytest.approx(10 * float(expected[0][2]), rel=1e-6)


def test_maxfl_hardly_weighs_attackers():
    """q is 1/4 at the threshold, and sigma'(9 rho_k) for attackers that report 10 F_k."""
    losses = jax.vmap(lambda k: TASK.client_loss(PARAMS, k))(jnp.arange(12))
    task, send = requiring(TASK, losses), sender(method("maxfl"))
    plain, sent = send(1, task=task), send(1, task=attacked(task, ATTACKS))
    assert plain.weight == pytest.approx(0.25)
    assert sent.weight < 1e-6 * plain.weight or sent.weight < 1e-30
    some = send(1, task=attacked(task, ATTACKS, loss_factor=1.01))
    s = oracle.sigmoid(0.01 * float(losses[1]))
    assert some.weight == pytest.approx(s * (1 - s), rel=1e-4)


@pytest.mark.usefixtures("x64")
def test_mwfed_with_inflated_losses_matches_its_loop():
    """Attackers inflate their losses before the first round, too."""
    compared, rng_key = PROBLEMS["least squares"](), jax.random.key(SEED)
    rho = np.array([0.4, 4.0, 1.5, 3.0, 0.9, 2.0, 6.0])
    attacks = np.array([False, True, False, False, False, False, True])
    assignment, start = mfa_rand(N, 1, cohort_size=4), np.ones((1, compared.size))
    algorithm = mwfed(local_sgd(0.05, steps=3, batch_size=BATCH))

    @jax.jit
    def run(attacks):
        task = attacked(requiring(compared.task, rho), attacks)
        return simulate(rng_key, task, algorithm, assignment, 8, params=start)[0].models[0]

    rounds = [[int(k) for k in group[0] if k >= 0] for group in roll_out(assignment, rng_key, 8)]
    problem = compared.problem(0, rho)
    ends = []
    for who in (attacks, ~attacks):
        models, factors = run(who), np.where(who, 10.0, 1.0)
        w, v = oracle.mwfed(
            problem, start[0], rounds, lambda t: 0.05, 3, growth=4.0, factors=factors
        )
        np.testing.assert_allclose(models.params[0], w, rtol=1e-10)
        np.testing.assert_allclose(np.exp(models.server[0]), v, rtol=1e-9)
        ends.append(v)
    assert ends[0][attacks].sum() > 2 * ends[1][attacks].sum()


@pytest.mark.parametrize("stays", [True, False])
def test_attackers_participate_regardless_or_opt_out_like_others(stays):
    """With `stays` every model appeals to attackers. Metrics are not inflated."""
    assignment = appealing(full_participation(12), cohort_size=12, from_round=1)

    @jax.jit
    def run(rho):
        task = attacked(requiring(TASK, rho), ATTACKS, stays=stays)
        state, trace = simulate(KEY, task, maxfl(local_sgd(0.1, steps=1)), assignment, 2)
        return trace, task.appeals(state.models[0].params[0]), state.models[0].params[0]

    trace, appeals, params = run(jnp.where(jnp.arange(12) == 5, 1e9, -1e9))
    present = [0, 1, 2, 5] if stays else [5]
    assert trace.client_updates[1:, 0].tolist() == [len(present)] * 2
    np.testing.assert_array_equal(np.flatnonzero(appeals), present)
    losses = jax.vmap(lambda k: TASK.client_loss(params, k))(jnp.arange(12))
    assert trace.metrics["train_loss"][-1, 0] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert trace.metrics["train_appeal"][-1, 0] == pytest.approx(1 / 12)
    trace, *_ = run(jnp.full(12, -1e9))
    assert trace.client_updates[1:, 0].tolist() == [len(present) - 1] * 2
    assert trace.idle_rounds[1:, 0].tolist() == [not stays] * 2


def test_attackers_opt_out_by_their_true_losses():
    """F_k = 1.5 is below the threshold 2, but the reported loss is not."""
    task = requiring(Measured(jnp.ones(3)), jnp.full(3, 2.0))
    appeals = attacked(task, jnp.arange(3) < 1, stays=False).appeals({"w": jnp.zeros(3)})
    assert appeals.all()


@pytest.mark.parametrize(
    "names",
    [("scaffold", "mwfed"), slow_unless(False, [m for m in METHODS if METHODS[m].remembers])],
    ids=["some", "all"],
)
def test_without_attackers_nothing_changes(names):
    """Compares states, parameters and traces of methods with states."""
    algorithms = [METHODS[name].build(0.1, 2) for name in names if name != "mifa"]
    rho, nobody = jnp.linspace(-0.1, 0.1, 12), jnp.zeros(12, bool)
    assignment = mfa_rand(12, len(algorithms), unbiased=True)

    def run(wrap_task, wrap):
        task, each = wrap_task(requiring(TASK, rho)), [wrap(one) for one in algorithms]
        program = jax.jit(lambda key: simulate(key, task, each, assignment, 4))
        state, trace = program(KEY)
        return state.models, trace

    plain = run(lambda task: task, lambda algorithm: algorithm)
    same = run(lambda task: attacked(task, nobody), lambda algorithm: noisy(algorithm, nobody))
    for a, b in zip(*map(jax.tree.leaves, (plain, same)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_thresholds_of_attackers_are_those_of_their_own_models():
    """Attackers train their own models on the true losses, and inflate only reports."""
    options = {"learning_rate": 0.1, "num_steps": 3}
    own = jax.jit(lambda: own_models(KEY, TASK, PARAMS, **options))()
    task = attacked(requiring(TASK, own), ATTACKS)
    np.testing.assert_array_equal(thresholds(task), own.threshold)


def test_attackers_may_be_traced():
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def end(attacks, factor, noise):
        task = attacked(requiring(TASK, jnp.zeros(12)), attacks, loss_factor=factor)
        algorithm = noisy(maxfl(local_sgd(0.1, steps=1)), attacks, noise=noise)
        return simulate(KEY, task, algorithm, mfa_rand(12, 2), 2)[0].models[0].params

    ends = [end(ATTACKS, 2.0, 1.0), end(~ATTACKS, 2.0, 1.0), end(ATTACKS, 3.0, 1.0)]
    ends.append(end(ATTACKS, 2.0, 0.5))
    assert all(not np.array_equal(a, b) for i, a in enumerate(ends) for b in ends[:i])


def median(context):
    """A server that adds the coordinate-wise median of the client states."""
    step = jax.tree.map(lambda x: jnp.median(x, axis=0), context.client_states)
    return jax.tree.map(jnp.add, context.params, step), context.server_state


def by_median():
    """FedAvg whose clients keep their updates as states, from which the server takes the median."""
    plain = fedavg(0.1, local_steps=1)

    def client(context, server_state, client_state):
        sent, _ = plain.client(context, server_state, ())
        return sent, dense_update(sent, context.params).update

    def init(task, params):
        return (), jax.tree.map(jnp.zeros_like, params)

    return plain._replace(init=init, client=client, server=median)


@pytest.mark.parametrize(
    ("algorithm", "is_refused"),
    [
        (by_median(), True),
        (METHODS["mifa"].build(0.1, 2), True),
        (METHODS["stalevr"].build(0.1, 2), False),
        (METHODS["afl"].build(0.1, 1), False),
        (compressed(fedavg(0.1, local_steps=1), top_k(0.5)), False),
    ],
    ids=["median", "mifa", "stalevr", "afl", "compressed"],
)
def test_noise_is_refused_if_the_server_ignores_the_sum(algorithm, is_refused):
    def run():
        wrapped = noisy(noisy(algorithm, ATTACKS), ATTACKS)
        return simulate(KEY, TASK, wrapped, mfa_rand(12, 2, unbiased=True), 1)[0].models

    if not is_refused:
        jax.eval_shape(run)
        return
    with pytest.raises(ValueError, match="noisy: the server of this method does not read the sum"):
        jax.eval_shape(run)


def test_noise_differs_between_rounds_and_models():
    """The attackers have equal data, so only noise can differ."""
    task, attackers = Measured(jnp.ones(2), 5), jnp.ones(2, bool)
    algorithm = noisy(fedavg(1e-3, local_steps=1), attackers)

    @jax.jit
    def moves(rng_key):
        alone, params = replay([[[0], [1]], [[0], [1]]], 2), {"w": jnp.zeros(5)}
        first = simulate(rng_key, task, algorithm, alone, 1, params=params)[0].models[0].params["w"]
        both = simulate(rng_key, task, algorithm, alone, 2, params=params)[0].models[0].params["w"]
        return jnp.concatenate([first, both - first])

    draws = np.asarray(moves(KEY))
    assert draws.shape == (4, 5)
    assert all(np.abs(a - b).max() > 1e-4 for i, a in enumerate(draws) for b in draws[:i])


def test_wrong_arguments_are_refused():
    base = maxfl(local_sgd(0.1, steps=1))
    for clients in (jnp.arange(12), jnp.array(True), [0.5] * 12):
        for wrap in (lambda who: noisy(base, who), lambda who: attacked(TASK, who)):
            with pytest.raises(ValueError, match="give one bool for each client"):
                wrap(clients)
    with pytest.raises(ValueError, match=r"loss_factor is 0\.0"):
        attacked(TASK, ATTACKS, loss_factor=0.0)
    with pytest.raises(ValueError, match=r"noise is -1\.0; it must not be negative"):
        noisy(base, ATTACKS, noise=-1.0)
    with pytest.raises(ValueError, match="clients has 5 entries"):
        attacked(TASK, jnp.ones(5, bool))


@pytest.mark.parametrize(
    ("task", "algorithm", "assignment", "message"),
    [
        (TASK, noisy(fedavg(0.1, local_steps=1), jnp.ones(5, bool)), None, "clients has 5 entries"),
        (
            attacked(TASK, ATTACKS),
            fedavg(0.1, local_steps=1),
            appealing(full_participation(12), cohort_size=2),
            "is not a task whose clients have thresholds",
        ),
        (
            attacked(TASK, ATTACKS),
            METHODS["maxfl"].build(0.1, 1),
            None,
            "is not a task whose clients have thresholds",
        ),
    ],
    ids=["length", "appeal", "thresholds"],
)
def test_attacks_that_do_not_fit_the_task_are_refused(task, algorithm, assignment, message):
    with pytest.raises(ValueError, match=message):
        simulate(KEY, task, algorithm, assignment or full_participation(12), 1)
