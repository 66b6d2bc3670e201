"""Example-level privacy: DP-SGD at the clients, its sensitivity, its noise and its accounting."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedjax_mm import (
    averaging,
    bandit,
    fedavg,
    full_participation,
    local_sgd,
    mfa_rand,
    personal,
    scaffold,
    simulate,
)
from fedjax_mm import noisy as lost
from fedjax_mm.algorithms import methods
from fedjax_mm.base import Batching
from fedjax_mm.privacy import epsilon, example_epsilon, private
from fedjax_mm.tasks import least_squares, quadratic
from tests.algorithms.method_problems import (
    BATCH,
    DIM,
    RIDGE,
    SEED,
    N,
    drawn_rows,
    examples,
    regression,
    softmax,
)
from tests.algorithms.test_methods import Quiet, error
from tests.methods import METHODS
from tests.oracles.maxfl import Problem
from tests.oracles.maxfl import fedavg as loop

pytestmark = pytest.mark.usefixtures("x64")

T, C, RATE = 4, 0.5, 0.1


def noisy(algorithm, noise_multiplier=0.0, **how):
    return private(algorithm, clip=C, noise_multiplier=noise_multiplier, per="example", **how)


def gradient_of(x, y, w):
    """Gradient of one example's loss, clipped to the norm C."""
    g = (x @ w - y) * x + RIDGE * w
    return g * min(1, C / np.linalg.norm(g))


def test_clipped_steps_match_the_loop():
    features, targets, _, counts = examples()
    local = local_sgd(RATE, epochs=2, batch_size=BATCH, momentum=0.9)
    rows = drawn_rows(counts, Batching(BATCH, "epochs"), T, 8)

    def gradient(k, w, t, i):
        each = [row for row, there in zip(*rows(t, k, i), strict=True) if there]
        return np.mean([gradient_of(features[k][row], targets[k][row], w) for row in each], 0)

    steps = [2 * math.ceil(n / BATCH) for n in counts]
    unused = gradient, None, None
    problem = Problem(*unused, counts.astype(float), np.zeros(N), steps=steps, momentum=0.9)
    start = np.random.default_rng(2).normal(size=(1, DIM))
    task, everybody = Quiet(regression().task, N), full_participation(N)
    how = {"params": jnp.asarray(start)}
    state, _ = simulate(SEED, task, noisy(fedavg(local)), everybody, T, **how)
    w = loop(problem, start[0], [list(range(N))] * T, lambda t: RATE, 0, weighted=True)
    assert error(state.models[0].params[0], w) < 1e-10


FEATURES = itertools.product((-4.0, 0.1, 3.0), repeat=2)
EXAMPLES = [(np.array(x), y) for x in FEATURES for y in (-9.0, 9.0)]


@pytest.mark.parametrize("problem", [regression, softmax])
def test_the_loss_of_a_batch_is_the_mean_of_those_of_its_examples(problem):
    """The equality includes the padded last batch of an epoch."""
    task = problem().task
    params = jax.tree.map(lambda x: x + 0.3, task.init(jax.random.key(0)))
    for client, step in itertools.product(range(3), range(3)):
        how = Batching(BATCH, "epochs")
        batch = task.batch(jax.random.key(1), jnp.int32(client), jnp.int32(step), how)
        ones, weights = task.examples(params, batch)
        losses = jax.vmap(task.loss, (None, 0))(params, ones)
        mean = jnp.sum(weights * losses) / jnp.sum(weights)
        assert task.loss(params, batch) == pytest.approx(float(mean), rel=1e-12)


def test_one_example_moves_a_sum_by_at_most_twice_the_norm():
    """Each of four examples is replaced by each other one, with all examples in a batch."""

    plain = least_squares([np.zeros((4, 2))], [np.zeros(4)], ridge=1e-9)

    @jax.jit
    def total(x, y):
        data = dataclasses.replace(plain.data, examples=(x, y))
        task = Quiet(dataclasses.replace(plain, data=data), 1)
        algorithm = noisy(fedavg(local_sgd(1.0, steps=1)))
        state, _ = simulate(0, task, algorithm, full_participation(1), 1)
        return -4 * state.models[0].params[0]

    def of(chosen):
        return np.asarray(total(*map(np.stack, zip(*chosen, strict=True))))

    moved = []
    for place, other in itertools.product(range(4), EXAMPLES):
        chosen = [EXAMPLES[3 * i] for i in range(4)]
        neighbor = [*chosen[:place], other, *chosen[place + 1 :]]
        moved.append(np.linalg.norm(of(chosen) - of(neighbor)))
    assert 1.99 * C < max(moved) <= 2 * C * (1 + 1e-12)


@pytest.mark.parametrize("steps", [1, 3])
def test_noise_has_its_law_in_every_step(steps):
    """Sums over 5 examples have independent noise of deviation z C in every step."""
    z, task = 2.0, least_squares([np.zeros((5, 2))] * 2, [np.zeros(5)] * 2, ridge=1e-9)

    def end(seed):
        algorithm = private(
            fedavg(local_sgd(1.0, steps=steps)), clip=1e-9, noise_multiplier=z, per="example"
        )
        state, _ = simulate(seed, Quiet(task, 2), algorithm, full_participation(2), 1)
        return state.models[0].params[0] * 1e9

    drawn = np.asarray(jax.jit(jax.vmap(end))(jax.random.split(jax.random.key(0), 4000)))
    expected = z / 5 * math.sqrt(steps / 2)  # the mean of two clients
    assert abs(drawn.std() / expected - 1) < 4 / math.sqrt(2 * drawn.size)
    assert abs(drawn.mean()) < 4 * expected / math.sqrt(drawn.size)


def gaussian(mu, delta):
    """Epsilon of a Gaussian mechanism with sensitivity mu (Balle and Wang, 2018)."""

    def excess(epsilon):
        a, b = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
        return norm.cdf(a) - math.exp(epsilon) * norm.cdf(b) - delta

    return brentq(excess, 0, 50)


@pytest.mark.parametrize(
    ("how", "mechanisms"),
    [
        ({"steps": 3}, 3),
        ({"epochs": 2, "batch_size": 10}, 2),
        ({"epochs": 1.5, "batch_size": 10}, 2),
        ({"steps": 6, "batch_size": 10, "order": "epochs"}, 2),  # of 5 steps
        ({"steps": 3, "batch_size": lambda t: 100}, 3),
    ],
)
def test_an_example_pays_for_the_steps_that_read_it(how, mechanisms):
    algorithm = noisy(fedavg(local_sgd(0.1, **how)), 8.0)
    given = {"num_examples": 50, "num_rounds": 10, "delta": 1e-5}
    found = example_epsilon(algorithm, mfa_rand(20, 2), **given)
    assert found == pytest.approx(gaussian(2 / 8 * math.sqrt(10 * mechanisms), 1e-5), rel=1e-3)


def test_samples_without_replacement_amplify():
    given = {"num_examples": 1000, "num_rounds": 10, "delta": 1e-5}

    def spent(size):
        algorithm = noisy(scaffold(local_sgd(0.1, steps=5, batch_size=lambda t: size)), 4.0)
        return example_epsilon(algorithm, full_participation(20), **given)

    assert spent(10) < spent(100) < spent(1000)
    # A step draws at least one example, and one more for a fraction.
    assert 0 < spent(0.0) == spent(1) < spent(2.2) == spent(3)
    assert spent(1000) == pytest.approx(gaussian(math.sqrt(50) / 2, 1e-5), rel=1e-3)
    # This is the law of a cohort of 100 clients, one of them replaced.
    cohort = mfa_rand(1000, 1, cohort_size=100)
    how = {"noise_multiplier": 4.0, "num_rounds": 50, "delta": 1e-5, "neighbors": "replace"}
    assert spent(100) == pytest.approx(epsilon(cohort, **how), rel=1e-12)


COVERED = (
    *("fedavg", "fedprox", "feddyn", "gradient_tracking", "scaffold", "prsgd", "mifa", "stalevr"),
)


@pytest.mark.parametrize("name", methods())
def test_methods_are_covered_or_refused_with_a_reason(name):
    row = METHODS[name]
    algorithm = row.factory(local_sgd(0.1, steps=2), **row.choices, **row.numbers)
    if name not in COVERED:
        with pytest.raises(ValueError, match=f"the method is {name}, which private") as refused:
            noisy(algorithm)
        assert "nothing is known" not in str(refused.value)
        return
    task, assignment = Quiet(regression().task, N), mfa_rand(N, 1, cohort_size=3, unbiased=True)
    state, _ = simulate(0, task, noisy(algorithm, 1.0), assignment, 2)
    assert np.isfinite(state.models[0].params).all()


STEPS = local_sgd(0.1, steps=2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: noisy(averaging(STEPS.train, num_gradients=2)), "nothing is known about what"),
        (lambda: noisy(scaffold(STEPS, option="I")), "a gradient over all examples"),
        (
            lambda: noisy(fedavg(local_sgd(0.1, steps=2, batch_size=3))),
            "batches of 3 are drawn with replacement",
        ),
        (lambda: noisy(fedavg(STEPS), clients_per_round=3), "are for per='client'"),
        (lambda: private(fedavg(STEPS), clip=1.0, noise_multiplier=1.0), "clients_per_round is"),
    ],
)
def test_what_would_claim_too_much_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_runs_that_read_the_data_are_refused():
    phased = personal(fedavg(STEPS), where="bias", own_steps=1)
    with pytest.raises(ValueError, match="this method reads losses, which no noise covers"):
        simulate(0, softmax().task, noisy(phased), full_participation(N), 1)
    with pytest.raises(ValueError, match="is not a task with examples"):
        simulate(0, quadratic(4, 2, mu=0.1), noisy(fedavg(STEPS)), full_participation(4), 1)


@pytest.mark.parametrize(
    ("algorithm", "assignment", "words"),
    [
        (fedavg(STEPS), mfa_rand(4, 1), "does not print as private"),
        (noisy(fedavg(STEPS), 1.0)._replace(steps_idle=True), mfa_rand(4, 1), "does not print"),
        (
            lost(noisy(fedavg(STEPS), 1.0), [True] * 4)._replace(steps_idle=True),
            *(mfa_rand(4, 1), "nothing is known about the wrapper 'noisy', or a function"),
        ),
        (
            noisy(fedavg(STEPS), 1.0),
            bandit(4, 2, cohort_size=2),
            "learns from the clients' reports",
        ),
        (noisy(fedavg(STEPS)), mfa_rand(4, 1), "noise_multiplier is 0"),
    ],
)
def test_epsilon_is_not_claimed_for_what_is_not_known(algorithm, assignment, words):
    with pytest.raises(ValueError, match=words):
        example_epsilon(algorithm, assignment, num_examples=9, num_rounds=3, delta=1e-5)


def test_an_example_counts_once_whatever_its_weight():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Heavy(Quiet):
        def examples(self, params, batch):
            ones, weights = self.task.examples(params, batch)
            return ones, 10 * weights

    found = [
        simulate(0, kind(regression().task, N), noisy(fedavg(STEPS), 1.0), full_participation(N), 2)
        for kind in (Quiet, Heavy)
    ]
    (plain, _), (heavy, _) = found
    np.testing.assert_array_equal(plain.models[0].params, heavy.models[0].params)
