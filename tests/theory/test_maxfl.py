"""MaxFL's theory, compared with transcriptions of the paper's formulas and with draws."""

import math
import re

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fedjax_mm.theory import maxfl, mean_estimation
from fedjax_mm.theory.problem import Problem
from tests.statements import evaluate

MANY = settings(deadline=None, max_examples=150)
positive = st.floats(0.05, 20)
part = st.floats(0.01, 0.999)
whole = st.integers(1, 60)
losses = st.fixed_dictionaries(
    {
        "L_c": positive,
        "L": positive,
        "beta": st.floats(1, 5),
        "kappa": st.floats(0, 5),
        "sigma": st.floats(0, 5),
        "gap": st.floats(0, 1),
    }
)

LOSSES = {"L_c": 2.0, "L": 1.5, "beta": 1.2, "kappa": 0.7, "sigma": 0.4, "gap": 0.5}
FULL = {"T": 100, "E": 5, "N": 10, "eta_l": 0.01, "eta_g": 0.5, **LOSSES}
GIVEN = {
    "lemma_b_1": {"beta": 1.2, "kappa": 0.7, "L_c": 2.0},
    "lemma_b_2": {"q": 0.2, "L_c": 2.0, "L": 1.5},
    "optimal_epsilon": {"N": 10, "L_c": 2.0, "L": 1.5},
    "adaptive_learning_rate": {"q": [0.1, 0.25], "L_c": 2.0, "L": 1.5},
    "theorem_3_1_learning_rates": {"T": 100, "E": 5, "C": 4},
    "theorem_3_1_full": FULL,
    "theorem_3_1_partial": {**FULL, "C": 4},
    "lemma_a_1": {"gamma_G": 1.5, "gamma": 0.8},
    "lemma_a_2": {"theta_hat_1": 0.5, "theta_hat_2": 3.0},
    "midpoint_curvature": {"gamma_hat_G": 1.5},
    "lemma_a_3": {"gamma_hat_G": 2.5},
    "lemma_a_4": {"theta_hat_1": 0.5, "theta_hat_2": 3.0},
    "theorem_a_1": {"gamma": 0.8},
}


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def function(name):
    return getattr(maxfl, name, None) or getattr(mean_estimation, name)


# Transcriptions of the paper for plain numbers. Its M, m, tau, L_s and sigma_g are N, C, E, L and
# sigma here.


def quarter(L_c, as_printed):
    return 0.25 * (L_c if as_printed else L_c * L_c)


def kappa_prime_squared(beta, kappa, L_c):
    return 4 * (beta * L_c) ** 2 + kappa * kappa


def printed_100(T, E, N, eta_l, eta_g, L_c, L, beta, kappa, sigma, gap, as_printed):
    """(100) from the terms of the descent (98), divided by the factor of the gradient norm."""
    eps = N * quarter(L_c, as_printed) / L
    descent = N * E * eta_l * eta_g / (4 * (N + eps))
    L_tilde = L + quarter(L_c, as_printed)
    noise = L_tilde * N * E * (eta_l * eta_g * sigma / eps) ** 2
    drift = N * E**2 * L**2 * eta_l**3 * eta_g * sigma**2 / eps
    apart = 4 * N * eta_l**3 * eta_g * E**3 * L**2 * kappa_prime_squared(beta, kappa, L_c) / eps
    return math.fsum([gap / T, noise, drift, apart]) / descent


def printed_125(T, E, C, N, eta_l, eta_g, L_c, L, beta, kappa, sigma, gap, as_printed):
    nu = L + quarter(L_c, as_printed)
    last = 4 * (sigma * L) ** 2 * E * (eta_l if as_printed else eta_l**2)
    noise = 4 * sigma**2 * eta_l * eta_g * nu / C + 8 / 3 * (sigma * L * eta_l) ** 2 * E
    apart = 80 / 3 * (L * eta_l * E) ** 2 * kappa_prime_squared(beta, kappa, L_c)
    drawn = 48 * eta_l * eta_g * nu / E / C * L_c**2 * (N - C) / (N - 1)
    return math.fsum([4 * gap / (T * eta_l * eta_g * E), noise, last, apart, drawn])


@MANY
@given(losses=losses)
def test_lemma_b_1(losses):
    beta, kappa, L_c = losses["beta"], losses["kappa"], losses["L_c"]
    beta_prime, kappa_prime = maxfl.lemma_b_1(Problem(beta=beta, kappa=kappa, L_c=L_c))
    close(beta_prime, math.sqrt(2) * beta)
    close(kappa_prime**2, kappa_prime_squared(beta, kappa, L_c))


@MANY
@given(weights=st.lists(st.floats(0, 1), min_size=1, max_size=8), L_c=positive, L=positive)
def test_lemma_b_2_and_the_adaptive_learning_rate(weights, L_c, L):
    problem = Problem(N=len(weights), L_c=L_c, L=L)
    close(maxfl.lemma_b_2(weights, problem), [L_c**2 / 4 + q * L for q in weights])
    for as_printed in (False, True):
        smoothness = L / len(weights) * math.fsum(weights) + quarter(L_c, as_printed)
        found = maxfl.adaptive_learning_rate(weights, problem, as_printed=as_printed)
        close(found, 1 / smoothness)
        eps = maxfl.optimal_epsilon(problem, as_printed=as_printed)
        close(eps, len(weights) * quarter(L_c, as_printed) / L)


@MANY
@given(T=whole, E=whole, C=whole)
def test_learning_rates(T, E, C):
    eta_l, eta_g = maxfl.theorem_3_1_learning_rates(T, E, C)
    close(eta_l, T**-0.5 / E)
    close(eta_g, E**0.5 * C**0.5)


@MANY
@given(T=whole, E=whole, N=whole, parts=st.tuples(part, part), losses=losses, printed=st.booleans())
def test_theorem_3_1_full(T, E, N, parts, losses, printed):
    limit = 1 / (4 * E * losses["L"])
    eta_l = parts[0] * limit / (math.sqrt(2) * losses["beta"])
    rates = {"eta_l": eta_l, "eta_g": parts[1] * limit / eta_l}
    given = {"T": T, "E": E, "N": N, **rates, **losses, "as_printed": printed}
    close(evaluate(maxfl.theorem_3_1_full, **given), printed_100(**given))


@MANY
@given(
    T=whole,
    E=whole,
    N=st.integers(2, 60),
    C=whole,
    parts=st.tuples(part, part),
    losses=losses,
    printed=st.booleans(),
)
def test_theorem_3_1_partial(T, E, N, C, parts, losses, printed):
    C, L = min(C, N), losses["L"]
    eta_l = parts[0] / (4 * math.sqrt(2) * losses["beta"] * E * L)
    eta_g = parts[1] / (9 * E * (L + quarter(losses["L_c"], printed)) * eta_l)
    rates = {"eta_l": eta_l, "eta_g": eta_g}
    given = {"T": T, "E": E, "C": C, "N": N, **rates, **losses, "as_printed": printed}
    close(evaluate(maxfl.theorem_3_1_partial, **given), printed_125(**given))


@MANY
@given(gamma_G=st.floats(0, 5), gamma=st.floats(0.3, 5))
def test_bounds_of_mean_estimation(gamma_G, gamma):
    close(mean_estimation.lemma_a_1(gamma_G, gamma), 2 * math.exp(-((gamma_G / gamma) ** 2) / 5))
    close(mean_estimation.theorem_a_1(gamma), 0.0625 * math.exp(-1 / gamma / gamma))


@MANY
@given(one=st.floats(-9, 9), other=st.floats(-9, 9))
@example(one=0.0, other=5e-324)  # half of 5e-324 rounds to zero
def test_points_of_mean_estimation(one, other):
    assume(one != other)
    np.testing.assert_allclose(
        mean_estimation.lemma_a_2(one, other), one / 2 + other / 2, atol=1e-14
    )
    first, second = mean_estimation.lemma_a_4(one, other)
    close(first, [min(one, other), min(one, other) + 2])
    close(second, [max(one, other) - 2, max(one, other)])


@MANY
@given(gamma_hat_G=st.floats(0, 6))
def test_curvature_in_the_middle(gamma_hat_G):
    assume(abs(gamma_hat_G - 1.0216) > 0.001)  # relative errors diverge at a zero
    x = gamma_hat_G**2
    # q(x) = 1 / (4 cosh^2(x/2)) and 1 - 2 sigma(x) = -tanh(x/2).
    expected = (1 - 2 * x * math.tanh(x / 2)) / (2 * math.cosh(x / 2) ** 2)
    close(mean_estimation.midpoint_curvature(gamma_hat_G), expected)
    if gamma_hat_G > 2:
        close(mean_estimation.lemma_a_3(gamma_hat_G), expected)
        assert expected < 0


def test_arrays_equal_a_loop_over_numbers():
    for name in GIVEN:
        scales = np.linspace(1, 1.02, 5)
        arrays = {key: np.multiply.outer(scales, value) for key, value in GIVEN[name].items()}
        for key in arrays.keys() & {"N", "C", "E"}:  # counts are whole numbers
            arrays[key] = np.add.outer([0, 1, 0, 1, 0], GIVEN[name][key])
        found = evaluate(function(name), **arrays)
        for i in range(5):
            expected = evaluate(
                function(name), **{key: values[i] for key, values in arrays.items()}
            )
            if isinstance(found, tuple):
                close([part[i] for part in found], expected)
            else:
                close(found[i], expected)


@pytest.mark.parametrize(
    ("name", "clients"), [("theorem_3_1_full", "N"), ("theorem_3_1_partial", "C")]
)
def test_a_bound_over_a_grid_is_one_call(name, clients):
    bound, given = function(name), GIVEN[name]
    T, sizes, E = [100, 200], [3, 8, 10], [1, 5]
    axes = {"T": np.reshape(T, (2, 1, 1)), clients: np.reshape(sizes, (3, 1)), "E": E}
    grid = evaluate(bound, **given | axes)
    assert grid.shape == (2, 3, 2)
    for index in np.ndindex(2, 3, 2):
        one = {"T": T[index[0]], clients: sizes[index[1]], "E": E[index[2]]}
        close(grid[index], evaluate(bound, **given | one))


SYMBOLS = {
    "T": ({"T": 0}, "T >= 1"),
    "E": ({"E": 0}, "E >= 1"),
    "N": ({"N": 0}, "N >= 1"),
    "C": ({"C": 0}, "C >= 1"),
    "eta_l": ({"eta_l": 0}, "eta_l > 0"),
    "eta_g": ({"eta_g": 0}, "eta_g > 0"),
    "L_c": ({"L_c": 0}, "L_c > 0"),
    "L": ({"L": 0}, "L > 0"),
    "beta": ({"beta": 0.9}, "beta >= 1"),
    "kappa": ({"kappa": np.nan}, "kappa >= 0"),
    "sigma": ({"sigma": -1}, "sigma >= 0"),
    "gap": ({"gap": -1}, "gap >= 0"),
    "q": ({"q": [0.1, 1.1]}, "0 <= q <= 1"),
    "gamma": ({"gamma": 0}, "gamma > 0"),
    "gamma_G": ({"gamma_G": -1}, "gamma_G >= 0"),
}
"""What every statement with the symbol refuses."""

OUTSIDE = {
    # 1/(4 E L) = 1/30, beta' = 1.697, 1/(9 E nu) = 1/112.5.
    "theorem_3_1_full": [
        ({"eta_g": 3.34}, "eta_l eta_g <= 1/(4 E L)"),
        ({"eta_l": 0.0197}, "eta_l <= min{1, 1/beta'}/(4 E L)"),
    ],
    "theorem_3_1_partial": [
        ({"eta_l": 0.0197, "eta_g": 0.1}, "eta_l <= 1/(4 beta' E L)"),
        ({"eta_g": 0.89}, "eta_l eta_g <= 1/(9 E nu)"),
        ({"N": 1, "C": 1}, "N >= 2"),
        ({"C": [10, 11]}, "C <= N"),
    ],
    "midpoint_curvature": [({"gamma_hat_G": -1}, "gamma_hat_G >= 0")],
    "lemma_a_3": [({"gamma_hat_G": [3.0, 2.0]}, "gamma_hat_G > 2")],
    "lemma_a_4": [({"theta_hat_1": 3.0}, "gamma_hat_G > 0")],
}


def test_outside_a_hypothesis_there_is_no_bound():
    for name in GIVEN:
        given = GIVEN[name]
        evaluate(function(name), **given)
        symbols = [SYMBOLS[symbol] for symbol in given if symbol in SYMBOLS]
        for change, hypothesis in (*symbols, *OUTSIDE.get(name, ())):
            with pytest.raises(ValueError, match=f"needs {re.escape(hypothesis)};"):
                evaluate(function(name), **{**given, **change})


def test_hypotheses_include_the_largest_step_sizes():
    beta_prime, _ = maxfl.lemma_b_1(Problem(beta=1.2, kappa=0.7, L_c=2.0))
    evaluate(
        maxfl.theorem_3_1_full, **{**FULL, "eta_l": 1 / beta_prime / (4 * 5 * 1.5), "eta_g": 1}
    )
    given = {**FULL, "C": 4, "eta_l": 1 / (4 * beta_prime * 5 * 1.5), "eta_g": 0.4}
    evaluate(maxfl.theorem_3_1_partial, **given)
    evaluate(maxfl.theorem_3_1_full, **{**FULL, "eta_l": 2**-7, "eta_g": 4, "L": 1.6})
    # With L_c/4 instead of L_c^2/4, nu is smaller here and the largest step size is larger.
    evaluate(maxfl.theorem_3_1_partial, **{**FULL, "C": 4, "eta_g": 1.1, "as_printed": True})


def test_the_losses_dissimilarity_bounds_the_objectives():
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(1000, 8, 3)) + 2
    lengths = np.linalg.norm(directions, axis=-1, keepdims=True)
    gradients = 2.0 * rng.uniform(size=(1000, 8, 1)) * directions / lengths
    q = rng.uniform(0, 0.25, size=(1000, 8, 1))

    def means(g):
        return (g**2).sum(axis=-1).mean(axis=-1), (g.mean(axis=-2) ** 2).sum(axis=-1)

    mean_square, squared_mean = means(gradients)
    kappa = np.sqrt(np.maximum(0, mean_square - squared_mean))
    beta_prime, kappa_prime = maxfl.lemma_b_1(Problem(beta=1.0, kappa=kappa, L_c=2.0))
    left, right = means(q * gradients)
    assert (left <= beta_prime**2 * right + kappa_prime**2).all()


def test_the_printed_smoothness_is_too_small():
    # F(w) = L_c w has no curvature, so that L may be arbitrarily small.
    L_c, w = 10.0, np.linspace(-1, 1, 2001)
    problem = Problem(L_c=L_c, L=1e-6)
    sigma = 1 / (1 + np.exp(-L_c * w))
    q = sigma * (1 - sigma)
    curvature = np.abs(L_c**2 * q * (1 - 2 * sigma))
    assert (curvature <= maxfl.lemma_b_2(q, problem)).all()
    assert (curvature <= 1 / maxfl.adaptive_learning_rate(q[:, None], problem)).all()
    printed = maxfl.adaptive_learning_rate(q[:, None], problem, as_printed=True)
    assert (curvature > 1 / printed).any()


# Draws of the empirical means of two clients, as in the paper's Fig. 5.


def pull(x):
    """g(x) = q(x^2) x of (36), a client's term of the slope at distance x from its mean."""
    e = np.exp(-(x**2))
    return x * e / (1 + e) ** 2


def distances(hat, rng):
    """Distances of a local minimum from the lower and the higher empirical mean, `[draws, 2]`.

    The bisection is over the distance. A minimum may be closer to a mean than round-off, and its
    side of the mean decides whether the client is satisfied.
    """
    whole = np.ptp(hat, axis=1)
    low, high = np.full_like(whole, 1e-300), whole / 2 * (1 - 1e-9)
    for _ in range(64):
        near = np.sqrt(low) * np.sqrt(high)
        beyond = pull(near) > pull(whole - near)
        low, high = np.where(beyond, low, near), np.where(beyond, near, high)
    apart = mean_estimation.midpoint_curvature(whole / 2) < 0
    np.testing.assert_allclose(pull(near)[apart], pull(whole - near)[apart], rtol=1e-6)
    near = np.where(apart, near, whole / 2)
    near = np.where(rng.random(len(hat)) < 0.5, near, whole - near)
    return np.stack([near, whole - near], axis=1)


@pytest.mark.parametrize("gamma", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("gamma_G", [0.0, 1.0, 2.0, 3.0, 4.4])
def test_appeal_satisfies_the_bounds(gamma, gamma_G):
    rng = np.random.default_rng(5)
    theta = np.array([0, 2 * gamma_G])
    hat = rng.normal(theta, gamma, size=(20_000, 2))
    middle = mean_estimation.lemma_a_2(*hat.T)
    fedavg = (np.abs(middle[:, None] - theta) < np.abs(hat - theta)).mean()
    assert fedavg <= mean_estimation.lemma_a_1(gamma_G, gamma)

    minima, order = distances(hat, rng), np.argsort(hat, axis=1)
    low, high = (np.take_along_axis(hat - theta, order, axis=1)).T
    # (w - theta_k)^2 < (theta_hat_k - theta_k)^2, for w between the two means.
    satisfied = np.stack([minima[:, 0] < -2 * low, minima[:, 1] < 2 * high])
    assert satisfied.mean() >= mean_estimation.theorem_a_1(gamma)
    if gamma_G > 3 * gamma:
        assert satisfied.mean() > 10 * fedavg

    found = hat.min(axis=1) + minima[:, 0]
    inside = (found[:, None, None] - mean_estimation.lemma_a_4(*hat.T)) * [1, -1] >= -1e-12
    assert inside.all(axis=-1).any(axis=-1).all()


def test_the_middle_turns_from_a_minimum_to_a_maximum():
    for gamma_hat_G, sign in [(0.5, 1), (1.0215, 1), (1.0217, -1), (2.5, -1)]:
        numeric = (pull(gamma_hat_G + 1e-5) - pull(gamma_hat_G - 1e-5)) / 1e-5
        found = mean_estimation.midpoint_curvature(gamma_hat_G)
        assert np.sign(found) == sign
        np.testing.assert_allclose(found, numeric, rtol=1e-5, atol=1e-9)


def test_a_convex_surrogate_has_its_minimum_in_the_middle():
    for surrogate in [np.exp, lambda x: x + x**2, lambda x: np.log1p(np.exp(x)), lambda x: x]:
        hat, w = np.array([-0.4, 1.6]), np.linspace(-1, 2, 3001)
        objective = surrogate((w[:, None] - hat) ** 2).mean(axis=1)
        assert w[objective.argmin()] == pytest.approx(mean_estimation.lemma_a_2(*hat), abs=1e-9)
