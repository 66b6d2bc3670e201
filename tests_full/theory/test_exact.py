"""Exact moments of all pairs of methods and assignments, closed forms, floors and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mm import averaging, fedavg, fednova, full_participation, local_sgd, mfa_rand, mfa_rr
from fedjax_mm.assignments.partitions import fedcluster
from fedjax_mm.availability import available, bernoulli
from fedjax_mm.tasks import least_squares, quadratic
from fedjax_mm.tasks.view import View
from fedjax_mm.theory import exact, stationary
from tests.helpers import slow_unless
from tests.oracles import multi_model
from tests.oracles.maxfl import Problem
from tests.theory.test_exact import LAWS, N, blocks, check_by_enumeration, check_by_simulation

pytestmark = pytest.mark.usefixtures("x64")

LINEAR = {
    "fedavg": {},
    "fedavg with momentum": {"momentum": 0.6},
    "fedavg with a server's momentum": {"server": True},
    "fedprox": {},
    "fedprox with momentum": {"momentum": 0.6},
    "scaffold": {},
    "scaffold I": {},
    "scaffold with both": {"momentum": 0.6, "server": True},
    "mifa": {},
    "feddyn": {},
    "perfedavg": {},
    "prsgd": {},
    "ditto": {},
    "pfedme": {},
}
PAIRS = [(name, law) for name in LINEAR for law in LAWS]
QUICK = {*zip(LINEAR, list(LAWS) * 3, strict=False)}
"""Each method with one law."""


def given(name):
    return {"name": name.split(" with")[0], **LINEAR[name]}


@pytest.mark.parametrize(("name", "law"), [slow_unless(x in QUICK, *x) for x in PAIRS])
def test_simulated_means_are_exact(name, law):
    check_by_simulation(law=law, **given(name))


@pytest.mark.parametrize("law", LAWS)
def test_simulated_means_of_sparse_updates_are_exact(law):
    check_by_simulation("fedavg", law, blocks)


@pytest.mark.parametrize("name", LINEAR)
def test_moments_equal_those_of_all_cohorts(name):
    check_by_enumeration(law="mfa_rr of unequal sizes", **given(name))


def uneven():
    """Clients with 1 to 4 examples, whose weights differ."""
    rng = np.random.default_rng(5)
    counts = [1, 4, 2, 3]
    features = [rng.normal(size=(n, 2)) for n in counts]
    targets = [rng.normal(size=n) + 2 for n in counts]
    dense = multi_model.LeastSquares(features, targets, 0.1)

    def gradient(k, w, *_):
        return multi_model.least_squares_gradient(dense, k, w)

    problem = Problem(gradient, gradient, lambda k, w: 0.0, np.array(counts), np.zeros(N))
    task = least_squares(features, targets, ridge=0.1)
    return task, problem, lambda w: multi_model.least_squares_loss(dense, w), 2


@pytest.mark.parametrize("law", LAWS)
def test_clients_with_unequal_weights_are_enumerated(law):
    check_by_enumeration("fedavg", law, uneven)


def scalars():
    """Clients a (w - b)^2 / 2 with a = 1, 2, 3, 4 and b = 0, 1, 2, 3."""
    roots = np.sqrt(np.arange(1.0, 5))
    features, targets = list(roots.reshape(4, 1, 1)), list((roots * np.arange(4)).reshape(4, 1))
    return least_squares(features, targets, ridge=1e-300)


def test_worked_numbers():
    """First two moments of a scalar model, from an enumeration in NumPy made elsewhere."""
    algorithm = fedavg(0.1, local_steps=1)
    rand = exact(scalars(), algorithm, mfa_rand(4, 1, cohort_size=2), 4)
    np.testing.assert_allclose(rand.mean[:, 0], [0, 0.5, 0.875, 1.15625, 1.367188], atol=1e-6)
    assert abs(rand.covariance[0, 0] + rand.mean[-1, 0] ** 2 - 1.961375) < 1e-6
    robin = exact(scalars(), algorithm, mfa_rr(4, 2), 4)
    np.testing.assert_allclose(robin.mean[[2, 4], 0], [0.891667, 1.389514], atol=1e-6)
    assert abs(robin.covariance[0, 0] + robin.mean[-1, 0] ** 2 - 1.932653) < 1e-6


def test_one_client_contracts_as_by_hand():
    """w - w* shrinks by (1 - eta a)^E in each round, and nothing is random."""
    task = least_squares([np.array([[2.0]])], [np.array([3.0])], ridge=1e-300)  # a = 4, w* = 1.5
    found = exact(task, fedavg(0.1, local_steps=3), mfa_rr(1, 1), 5)
    error = 1.5 * (1 - 0.4) ** (3 * np.arange(6))
    np.testing.assert_allclose(found.mean[:, 0], 1.5 - error, rtol=1e-12)
    np.testing.assert_allclose(found.excess_loss, 2 * error**2, rtol=1e-12)
    assert found.covariance == 0


def test_full_participation_has_the_published_losses():
    """Moments of Bhuyan et al.'s quadratic, with N = 24, p = 4, mu = 2e-4, eta = .1 and E = 5."""
    found = exact(
        quadratic(24, 4, mu=2e-4), fedavg(0.1, local_steps=5), full_participation(24), 100
    )
    expected = [-0.0005890037832118515, -0.004798407453259831, -0.01488678771283236]
    np.testing.assert_allclose(found.loss[jnp.array([1, 10, 100])], expected, rtol=1e-12)
    assert jnp.abs(found.covariance).max() == 0


def test_the_floor_is_that_of_the_scalar_recursion():
    """With equal curvatures a, the variance is r^2 v + eta^2 a^2 f s^2 for E = 1."""
    a, b, eta = 2.0, np.array([0.0, 1, 2, 5]), 0.1
    task = least_squares(
        [np.full((1, 1), a**0.5)] * 4, [np.array([x * a**0.5]) for x in b], ridge=1e-300
    )
    noise = (eta * a) ** 2 * b.var() * (4 - 2) / (2 * 3)  # f = (N - K) / (K (N - 1))
    floor = noise / (1 - (1 - eta * a) ** 2)
    found = stationary(task, fedavg(eta, local_steps=1), mfa_rand(4, 2))
    np.testing.assert_allclose([found.mean[0], found.covariance[0, 0]], [2, floor], rtol=1e-10)
    np.testing.assert_allclose(found.excess_loss, a * floor / 2, rtol=1e-10)
    assert jnp.isnan(stationary(task, fedavg(1.2, local_steps=1), mfa_rand(4, 2)).loss)
    with pytest.raises(ValueError, match="depends on the round"):
        stationary(task, fedavg(lambda t: 1 / (9 + t), local_steps=1), mfa_rand(4, 2))


def test_rates_are_vectorized_and_methods_may_be_ones_own():
    rates, task = jnp.array([0.1, 0.2]), quadratic(4, 2, mu=0.1)

    def of(rate):
        own = averaging(local_sgd(rate, steps=2).train, num_gradients=2)
        return exact(task, own, mfa_rand(4, 2), 4).loss

    both = [exact(task, fedavg(rate, local_steps=2), mfa_rand(4, 2), 4).loss for rate in (0.1, 0.2)]
    for found in (jax.vmap(of)(rates), jax.jit(jax.vmap(of))(rates)):
        np.testing.assert_allclose(found, both, rtol=1e-12)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moving(View):
    """A task that is another one in each round."""

    def at(self, round):
        return self


PLAIN = fedavg(0.1, local_steps=2)
REFUSED = [
    ("random draws", {"algorithm": fedavg(local_sgd(0.1, steps=2, batch_size=1)), "task": scalars}),
    (r"a product \(square\)", {"algorithm": fedavg(local_sgd(0.1, steps=2, clip=1.0))}),
    ("a product", {"algorithm": fednova(local_sgd(0.1, steps=2))}),
    ("type int32", {"algorithm": fedavg(0.1, local_steps=2, server_optimizer=optax.adam(0.1))}),
    ("changes over rounds", {"task": lambda: Moving(quadratic(4, 2, mu=0.1), 4)}),
    ("4 clients, and the assignment 6", {"assignment": mfa_rand(6, 2)}),
    ("law of fedcluster", {"assignment": fedcluster(4, 2)}),
    ("law of mfa_rr", {"assignment": mfa_rr(4, 2, redraw="never")}),
    ("law of available", {"assignment": available(mfa_rr(4, 2), bernoulli(0.5))}),
    ("law of mfa_rand", {"assignment": mfa_rand(4, 2, processors=2)}),
    (
        "has 369,600 ordered partitions; at most 50,000",
        {"task": lambda: quadratic(12, 2, mu=0.1), "assignment": mfa_rr(12, 4)},
    ),
]


@pytest.mark.parametrize(("words", "changed"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_is_not_known_is_refused(words, changed):
    how = {
        "task": lambda: quadratic(4, 2, mu=0.1),
        "algorithm": PLAIN,
        "assignment": mfa_rand(4, 2),
    }
    how |= changed
    with pytest.raises(ValueError, match=words):
        exact(how["task"](), how["algorithm"], how["assignment"], 3)
