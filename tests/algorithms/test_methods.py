"""Every method against its NumPy float64 loop and its special cases."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import (
    apfl,
    fedavg,
    feddyn,
    fednova,
    full_participation,
    local_sgd,
    maxfl,
    mfa_rand,
    mwfed,
    pfedme,
    qffl,
    scaffold,
    simulate,
)
from fedjax_mm.algorithms.moon import contrast
from fedjax_mm.base import ClientContext
from fedjax_mm.schedules import inverse_time
from fedjax_mm.tasks import (
    LogisticRegression,
    classification,
    least_squares,
    quadratic,
    requiring,
)
from fedjax_mm.tasks.view import View, client_losses
from tests.algorithms.method_problems import BATCH, MODELS, PROBLEMS, ROUNDS, SEED, N, examples
from tests.helpers import Bowls, Measured, Towards, labelled_data, replay, roll_out, slow_unless
from tests.methods import METHODS, VARIANTS

pytestmark = pytest.mark.usefixtures("x64")

M, E = MODELS, 3
RATE, RATES = inverse_time(2.0, 30.0), [2.0 / (t + 30.0) for t in range(ROUNDS + 1)]
# Some clients are below their threshold from the start, some later, and some never.
THRESHOLDS = {
    "least squares": np.array([0.4, 4.0, 1.5, 3.0, 0.9, 2.0, 6.0]),
    "softmax": np.array([0.2, 1.5, 0.9, 1.1, 0.6, 1.0, 2.0]),
}
# Linear gradients of least squares test these least. The others are slow with softmax.
NONLINEAR = {"scaffold", "perfedavg HF", "qffl"}
# `test_properties` compares these with their loops, with the same kind of weights.
COVERED = {"feddyn", "prsgd", "afl", "pfedme", "scaffold I"}
CLIENT_MAPS = {"least squares": 2, "softmax": "vmap"}


@functools.cache
def all_groups():
    """Cohorts of 2 or 3 of 7 clients for two models, with some empty rounds."""
    groups = roll_out(mfa_rand(N, M, cohort_size=5), jax.random.key(SEED), ROUNDS).copy()
    groups[3:5] = groups[7, 0] = -1
    return groups


def first_round_alone():
    groups = all_groups().copy()
    groups[1:] = -1
    return groups


@functools.cache
def start_of(name):
    compared = PROBLEMS[name]()
    return np.random.default_rng(2).normal(size=(M, compared.size))


def error(actual, expected):
    """The largest difference relative to the largest entry."""
    return np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quiet(View):
    """Removes the metrics of a task, and its test examples, because they take long to compile."""

    def metrics(self, rng_key, params):
        return {}


@functools.cache
def program(factory, choices, takes_steps, name):
    """The compiled run. Data, thresholds, cohorts and numeric options are arguments."""

    def run(task, thresholds, numbers, groups, start):
        local = local_sgd(RATE, steps=E if takes_steps else None, batch_size=BATCH)
        algorithm = factory(local, **dict(choices), **numbers)
        task, assignment = requiring(Quiet(task, N), thresholds), replay(groups, N)
        how = {"params": start, "client_map": CLIENT_MAPS[name]}
        return simulate(jax.random.key(SEED), task, algorithm, assignment, ROUNDS, **how)

    return jax.jit(run)


def run(method, name="least squares", *, task=None, rho=None, groups=None, **numbers):
    """Runs a row of the table on a problem, with any changes."""
    row, compared = VARIANTS[method], PROBLEMS[name]()
    compiled = program(row.factory, tuple(row.choices.items()), row.takes_steps, name)
    return compiled(
        compared.task if task is None else task,
        jnp.asarray(THRESHOLDS[name] if rho is None else rho),
        {**row.numbers, **numbers},
        jnp.asarray(all_groups() if groups is None else groups),
        compared.start(start_of(name)),
    )


def end(*args, **options):
    """The parameters after the last round."""
    return np.asarray(run(*args, **options)[0].models[0].params)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        slow_unless(
            method in NONLINEAR or (name == "least squares" and method not in COVERED), method, name
        )
        for name in PROBLEMS
        for method in VARIANTS
    ],
)
def test_a_method_matches_its_loop(method, name):
    """Two models are trained by 2 or 3 of 7 clients, and in some rounds by none."""
    row, compared, start = VARIANTS[method], PROBLEMS[name](), start_of(name)
    state, trace = run(method, name)
    states = row.states(state.models[0])
    num_steps = E if row.takes_steps else 1
    for m in range(M):
        problem = compared.problem(m, THRESHOLDS[name])
        rounds = [[int(k) for k in group if k >= 0] for group in all_groups()[:, m]]
        options = {**row.numbers, **row.choices}
        lengths = [] if row.num_gradients is None else None
        more = {} if lengths is None else {"lengths": lengths}
        result = row.loop(
            problem, start[m], rounds, RATES.__getitem__, num_steps, **options, **more
        )
        w, *rest = result if isinstance(result, tuple) else (result,)
        assert error(compared.flat(state.models[0].params)[m], w) < 1e-10
        assert len(rest) == len(states)
        for actual, expected in zip(states, rest, strict=True):
            flat = compared.flat(actual) if isinstance(actual, dict) else np.asarray(actual)
            assert error(flat[m], expected) < 1e-10
        appeal = np.mean([problem.loss(k, w) < THRESHOLDS[name][k] for k in range(N)])
        assert trace.metrics["train_appeal"][-1, m] == pytest.approx(appeal)
        if lengths is None:
            gradients = [len(clients) * row.num_gradients(num_steps) for clients in rounds]
        else:
            gradients = lengths
            assert len(set(lengths)) > 3, "the weights do not change the numbers of steps"
        np.testing.assert_array_equal(trace.gradients[1:, m], gradients)


def test_equal_gaps_make_maxfl_unweighted_fedavg():
    """Clients have the same examples, so their losses are equal, and so are n_k."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 3)), rng.normal(size=5)
    task = requiring(least_squares([x] * N, [y] * N, ridge=0.1), np.full(N, 0.5))
    local = local_sgd(0.1, steps=E, batch_size=2)
    algorithms = maxfl(local, eps=0.0), fedavg(local, weighted=False)
    cohorts = roll_out(mfa_rand(N, 1, cohort_size=3), jax.random.key(0), ROUNDS)

    @functools.partial(jax.jit, static_argnums=0)
    def last(algorithm):
        return simulate(jax.random.key(1), task, algorithm, replay(cohorts, N), ROUNDS)[0]

    both = [last(algorithm).models[0].params for algorithm in algorithms]
    assert error(both[0], both[1]) < 1e-12


def test_equal_gaps_of_different_clients_make_maxfl_unweighted_fedavg():
    """In one round, all thresholds are 0.3 below the losses, but losses and n_k differ."""
    task, groups = PROBLEMS["least squares"]().task, first_round_alone()
    losses = np.asarray(client_losses(task, jnp.asarray(start_of("least squares")[0])))
    one = {"rho": losses - 0.3, "groups": groups}
    actual = end("maxfl", eps=0.0, server_rate=1.0, **one)[0]
    assert error(actual, end("fedavg unweighted", groups=groups)[0]) < 1e-12
    assert error(actual, end("fedavg", groups=groups)[0]) > 1e-3


@pytest.mark.parametrize(
    ("method", "numbers", "same"),
    [
        ("qffl", {"q": 0.0}, "fedavg unweighted"),
        ("fedprox", {"mu": 0.0}, "fedavg"),
        ("fednova", {}, "fedavg"),
        ("apfl fixed", {"alpha": 0.0}, "fedavg"),
        ("ditto", {"lam": 1.0}, "fedavg"),
        ("moon", {"mu": 0.0}, "fedavg"),
    ],
)
def test_reduces_to_fedavg(method, numbers, same):
    assert error(end(method, **numbers), end(same)) < 1e-12


@pytest.mark.parametrize("method", ["perfedavg", "perfedavg HF"])
def test_perfedavg_without_inner_step_is_unweighted_fedavg(method):
    """The examples of a client are equal, because the outer step uses the second batch."""
    features, targets, *_ = examples()
    alike = [np.repeat(x[:1], len(x), axis=0) for x in features]
    task = least_squares(alike, [np.repeat(y[:1], len(y)) for y in targets], ridge=0.3)
    expected = end("fedavg unweighted", task=task)
    assert error(end(method, task=task, alpha=0.0), expected) < 1e-12
    assert error(end(method, task=task), expected) > 1e-4


def test_scaffold_keeps_the_mean_of_control_variates():
    """sum of c_k / N = c, with 2 or 3 of 7 clients per round and a changing rate."""
    models = run("scaffold")[0].models[0]
    c, c_k = models.server, models.clients
    np.testing.assert_allclose(c_k.mean(axis=1), c, rtol=0, atol=1e-13 * np.abs(c_k).max())
    assert np.abs(c).max() > 0.1
    assert np.abs(c_k - c[:, None]).max() > 0.1


def test_scaffold_finds_the_minimizer_and_fedavg_does_not():
    """Both take 5 full-gradient steps with a constant rate on the quadratic."""
    assignment, gaps = full_participation(8), {}
    for method in ("fedavg", "scaffold"):
        algorithm = METHODS[method].build(0.2, 5)
        how = {"num_rounds": 600, "record_every": 300}
        one = functools.partial(simulate, algorithm=algorithm, assignment=assignment, **how)
        trace = jax.jit(lambda key, task, one=one: one(key, task)[1])
        gaps[method] = trace(jax.random.key(0), quadratic(8, 2, mu=0.1)).metrics["excess_loss"]
    stalled, found = gaps["fedavg"][:, 0], gaps["scaffold"][:, 0]
    assert stalled[-1] > 1e-5
    assert stalled[-1] == pytest.approx(float(stalled[-2]), rel=1e-6), "it stalls"
    assert found[-1] < 1e-20


def test_scaffold_of_one_client_is_fedavg():
    """With epochs and momentum, because c = c_k."""
    task, local = Bowls.of([4.0], counts=[7]), local_sgd(0.1, epochs=2, batch_size=3, momentum=0.9)
    both = [
        simulate(0, task, algorithm, full_participation(1), 5)[0].models[0].params
        for algorithm in (scaffold(local), fedavg(local))
    ]
    assert error(*both) < 1e-12


def test_scaffold_options_agree_on_one_full_gradient_step():
    """The gradient at w is then the mean gradient of the local steps."""
    groups = roll_out(mfa_rand(8, 1, cohort_size=3), jax.random.key(0), 10)

    @functools.partial(jax.jit, static_argnums=0)
    def controls(option):
        algorithm = scaffold(local_sgd(0.2, steps=1), option=option)
        task, assignment = quadratic(8, 2, mu=0.1), replay(groups, 8)
        return simulate(jax.random.key(0), task, algorithm, assignment, 10)[0].models[0].clients

    assert error(controls("I"), controls("II")) < 1e-12


def test_fednova_has_the_numbers_computed_by_hand():
    """p = (1/4, 3/4), tau = (1, 3): steps of -1 and -6 give -4.375, and FedAvg's mean -4.75."""
    task = Bowls.of([-2.0, -6 / 0.875], counts=[1, 3])
    local, ends = local_sgd(0.5, epochs=1, batch_size=1), {}
    for name, factory in (("fednova", fednova), ("fedavg", fedavg)):
        how = {"params": jnp.zeros(1)}
        state, trace = simulate(0, task, factory(local), full_participation(2), 1, **how)
        ends[name] = state.models[0].params[0, 0]
        assert trace.gradients[1, 0] == 4
    assert ends["fednova"] == pytest.approx(-4.375)
    assert ends["fedavg"] == pytest.approx(-4.75)


def test_feddyn_has_the_numbers_computed_by_hand():
    local, everybody = local_sgd(0.5, steps=1), full_participation(2)
    how = {"params": jnp.ones(1)}
    task, algorithm = Bowls.of([0.0, 4.0]), feddyn(local, alpha=1.0)
    state, _ = simulate(0, task, algorithm, everybody, 1, **how)
    models = state.models[0]
    np.testing.assert_allclose(models.clients.ravel(), [0.5, -1.5])
    np.testing.assert_allclose([models.server.item(), models.params.item()], [-0.5, 2.0])
    state, trace = simulate(0, task, algorithm, everybody, 200, **how, record_every=200)
    np.testing.assert_allclose(state.models[0].clients.ravel(), [2.0, -2.0], rtol=1e-9)
    assert state.models[0].params.item() == pytest.approx(2.0, rel=1e-9)
    assert trace.upload_size == (1,)


def test_apfl_and_pfedme_have_the_numbers_computed_by_hand():
    """F(w) = (w - 4)^2 / 2 from w = 1, and from 3 for APFL's own model."""
    task, algorithm = Bowls.of([4.0]), apfl(local_sgd(0.1, steps=1))
    context = ClientContext(jax.random.key(0), jnp.int32(1), task, jnp.int32(0), jnp.ones(1))
    state = {"v": jnp.full(1, 3.0), "alpha": jnp.array(0.5)}
    sent, new = algorithm.client(context, (), state)
    np.testing.assert_allclose([sent.update[0], new["v"][0], new["alpha"]], [0.3, 3.2, 0.9])
    np.testing.assert_allclose(algorithm.personal(jnp.ones(1), state), [2.0])
    method = pfedme(local_sgd(0.005, steps=1), inner_rate=0.01, inner_steps=5, lam=15.0)
    sent, theta = method.client(context, (), jnp.ones(1))
    np.testing.assert_allclose([theta[0], sent.update[0]], [1.109085, 0.008181], atol=5e-7)
    near = pfedme(local_sgd(0.005, steps=1), inner_rate=0.01, inner_steps=500, lam=15.0)
    assert near.client(context, (), jnp.ones(1))[1][0] == pytest.approx(1.1875), "the exact point"


def test_moon_has_the_number_computed_by_hand():
    z, near, far = (jnp.array([x]) for x in ([1.0, 0.0], [1.0, 1.0], [0.0, 1.0]))
    assert contrast(z, near, far, 0.5)[0] == pytest.approx(np.log1p(np.exp(-np.sqrt(2))), rel=1e-12)
    dead = jax.grad(lambda z: contrast(z, near, far, 0.5).sum())(jnp.zeros((1, 2)))
    assert np.isfinite(dead).all(), "features of 0 have no direction"


@pytest.mark.parametrize(("unbiased", "weighted"), [(False, False), (True, False), (False, True)])
def test_feddyn_finds_the_optimum_with_two_of_five_clients(unbiased, weighted):
    """FedAvg stalls elsewhere, because local optima differ and curvatures, too."""
    targets, curvatures = np.array([0.0, 4.0, 1.0, -3.0, 7.0]), np.array([1.0, 0.3, 2.0, 0.5, 1.2])
    counts = np.array([2, 1, 4, 3, 2])
    task = Bowls.of(targets, curvatures, counts)
    weights = curvatures * (counts if weighted else 1)
    best = np.sum(weights * targets) / np.sum(weights)
    some = mfa_rand(5, 1, cohort_size=2, unbiased=unbiased)
    ends = {}
    for factory in (feddyn, fedavg):
        options = {"alpha": 0.5} if factory is feddyn else {}
        algorithm = factory(local_sgd(0.3, steps=5), weighted=weighted, **options)
        state, _ = simulate(0, task, algorithm, some, 600, record_every=600)
        ends[factory] = state.models[0].params.item()
        if factory is feddyn:
            models = state.models[0]
            p = counts / counts.sum() if weighted else np.full(5, 1 / 5)
            assert models.server.item() == pytest.approx(
                float(p @ np.ravel(models.clients)), abs=1e-12
            )
    assert ends[feddyn] == pytest.approx(best, rel=1e-6)
    assert abs(ends[fedavg] - best) > 0.05


def test_mwfed_stays_finite_if_weights_underflow():
    """After hundreds of rounds, satisfied clients have weight 0 in 32 bits.

    The remaining client takes 4 tau steps instead of N tau.
    """
    with jax.enable_x64(False):
        rho = jnp.array([-1e3] + 7 * [1e3], jnp.float32)
        assignment, algorithm = mfa_rand(8, 1, cohort_size=1), mwfed(local_sgd(0.1, steps=2))

        @jax.jit
        def run(rho):
            task = requiring(quadratic(8, 1, mu=0.5), rho)
            return simulate(jax.random.key(0), task, algorithm, assignment, 300)

        state, trace = run(rho)
        assert np.isfinite(state.models[0].params).all()
        assert np.exp(state.models[0].server[0, 0]) == pytest.approx(1.0)
        assert set(np.unique(trace.gradients[50:])) == {1, 8}


@functools.cache
def two_losses(q, num_steps):
    """Runs q-FFL with two clients from 0, as a function of their targets."""
    algorithm, everybody = qffl(local_sgd(0.1, steps=num_steps), q=q), full_participation(2)

    def run(targets):
        task, start = Measured(targets), {"w": jnp.zeros(3)}
        return simulate(jax.random.key(0), task, algorithm, everybody, 1, params=start)[0]

    return lambda targets: jax.jit(run)(jnp.array(targets)).models[0].params["w"]


def test_qffl_stays_finite_if_powers_of_losses_underflow():
    """F^q underflows in 32 bits for F = 0.015 and 0.06, so the model does not move."""
    with jax.enable_x64(False):
        np.testing.assert_array_equal(two_losses(500.0, 1)([0.1, 0.2]), 0)


def test_qffl_stays_finite_if_a_loss_is_zero():
    """With q < 1 the loss has a negative exponent, so a small constant is added to it."""
    loss, dw = 1.5, (1 - 0.9**2) / 0.1
    h = 0.5 * loss**-0.5 * 3 * dw**2 + (loss**0.5 + 1e-5) / 0.1
    actual = two_losses(0.5, 2)([0.0, 1.0])[0, 0]
    np.testing.assert_allclose(actual, loss**0.5 * dw / h, rtol=1e-6)


def test_maxfl_does_not_move_if_all_weights_underflow():
    actual = end("maxfl", rho=np.full(N, -1e9), eps=0.0)
    np.testing.assert_array_equal(actual, start_of("least squares"))


def test_mwfed_weights_stay_in_rounds_without_clients():
    """They grow at the start, and after rounds with participants."""
    none, one = np.full_like(all_groups(), -1), first_round_alone()
    rho = np.where(np.arange(N) == 0, -1.0, 1e9)  # the first client stays above its threshold
    for groups, times in ((none, 1), (one, 2)):
        weights = np.exp(run("mwfed", groups=groups, rho=rho)[0].models[0].server)
        expected = np.where(np.arange(N) == 0, 4.0**times, 1.0)
        np.testing.assert_allclose(weights, [expected / expected.sum()] * M, rtol=1e-12)


def test_methods_need_local_steps_or_epochs():
    for name, row in METHODS.items():
        if row.takes_steps and name != "gradient_tracking":  # takes 1 step by default
            with pytest.raises(ValueError, match="local steps"):
                row.build(0.1, None)


MEASURED = [name for name, row in METHODS.items() if row.is_measured or row.is_demanding]


@pytest.mark.parametrize("method", [*MEASURED, "moon"])
def test_tasks_without_losses_or_thresholds_are_refused(method):
    row = METHODS[method]
    algorithm, everybody = row.build(0.1, 1), mfa_rand(3, 1, unbiased=True)

    def refused(task, message):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(
                lambda key: simulate(key, task, algorithm, everybody, 1), jax.random.key(0)
            )

    if row.is_measured:
        refused(Towards(jnp.ones(3)), "Towards is not a task with client_loss")
    if method == "moon":
        refused(Towards(jnp.ones(3)), "Towards is not a task with features")
        plain = classification(labelled_data(3), LogisticRegression(3))
        refused(plain, "module LogisticRegression gives no features; call self.sow")
    if row.is_demanding:
        refused(Measured(jnp.ones(3)), "Measured is not a task whose clients have .* `requiring`")
