"""Bounds for cohorts, compared with transcriptions of Pawlik's formulas and with drawn cohorts."""

import math
import re
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_mm.theory import cohorts
from fedjax_mm.theory.problem import Problem
from tests.oracles.cohorts import Quadratics, exact_training
from tests.statements import evaluate

MANY = settings(deadline=None, max_examples=150)
positive = st.floats(0.01, 50)
whole = st.integers(1, 40)
losses = st.fixed_dictionaries({"L": positive, "G": positive, "sigma": positive, "gap": positive})

SIZES = {"T": 4096, "N": 4, "E": 2}
LOSSES = {"L": 2.0, "G": 1.5, "sigma": 0.5, "gap": 3.0}
BOUNDS = {
    "theorem_1": {**SIZES, "gamma": 0.1, **LOSSES},
    "corollary_part_1": {**SIZES, **LOSSES},
    "corollary_part_2": {**SIZES, **LOSSES},
}
NOISES = ["squared_step_25", "squared_step_26", "excess_noise_27", "excess_noise_28"]


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def lopsided(shape, seed=0):
    return np.random.default_rng(seed).lognormal(size=shape) - 1


# Transcriptions of the paper for plain numbers.


def printed_theorem(T, N, E, gamma, L, G, sigma, gap):
    drift = (2 * gamma * E * G * L) ** 2
    return math.fsum([2 * gap / gamma / T, drift, gamma * L * sigma * sigma / N])


def printed_part_1(T, N, E, L, G, sigma, gap):
    drift = 4 * N / T * (E * G) ** 2
    return math.fsum([2 * L * gap / math.sqrt(N * T), drift, sigma * sigma / math.sqrt(N * T)])


def printed_part_2(T, N, E, L, G, sigma, gap):
    return (2 * L * gap + 4 * G * G + sigma * sigma) * N**-0.5 * T**-0.5


def by_norms(rows):
    """`sum |G_i|^2 - N |G_bar|^2`, and `|G_bar|^2`, by exact sums."""
    mean = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
    squares = math.fsum(x * x for row in rows for x in row)
    return squares - len(rows) * math.fsum(x * x for x in mean), math.fsum(x * x for x in mean)


def by_products(rows):
    N, (_, squared_mean) = len(rows), by_norms(rows)
    products = math.fsum(
        x * y
        for i, one in enumerate(rows)
        for j, other in enumerate(rows)
        if i != j
        for x, y in zip(one, other, strict=True)
    )
    return N * (N - 1) * squared_mean - products


def printed_noises(rows, C, gamma, L):
    """The four quantities in the order of `NOISES`."""
    N, (norms, squared_mean) = len(rows), by_norms(rows)
    scale = gamma * gamma / (N - 1) * (N - C) / (C * N)
    steps = [scale * part + gamma * gamma * squared_mean for part in (norms, by_products(rows))]
    return [*steps, L / 2 * scale * norms, L / 2 * scale * by_products(rows)]


@MANY
@given(T=whole, N=whole, E=whole, part=st.floats(0.001, 0.999), losses=losses)
def test_theorem_1(T, N, E, part, losses):
    gamma = part / losses["L"]
    found = evaluate(cohorts.theorem_1, T=T, N=N, E=E, gamma=gamma, **losses)
    close(found, printed_theorem(T, N, E, gamma, **losses))


@MANY
@given(N=whole, more=st.integers(0, 1000), E=whole, losses=losses)
def test_corollary_part_1(N, more, E, losses):
    T = N + more
    found = evaluate(cohorts.corollary_part_1, T=T, N=N, E=E, **losses)
    close(found, printed_part_1(T, N, E, **losses))
    close(found, printed_theorem(T, N, E, math.sqrt(N / T) / losses["L"], **losses))


@MANY
@given(N=whole, E=whole, more=st.integers(0, 1000), losses=losses)
def test_corollary_part_2(N, E, more, losses):
    T = E**4 * N**3 + more
    found = evaluate(cohorts.corollary_part_2, T=T, N=N, E=E, **losses)
    close(found, printed_part_2(T, N, E, **losses))
    assert found >= evaluate(cohorts.corollary_part_1, T=T, N=N, E=E, **losses) * (1 - 1e-12)


@MANY
@given(
    seed=st.integers(0, 2**32 - 1),
    N=st.integers(2, 9),
    d=st.integers(1, 5),
    C=st.integers(1, 9),
    gamma=positive,
    L=positive,
)
def test_noises_agree_with_their_transcriptions(seed, N, d, C, gamma, L):
    updates, C = np.random.default_rng(seed).normal(size=(N, d)), min(C, N)
    found = [
        cohorts.squared_step_25(updates, C, gamma),
        cohorts.squared_step_26(updates, C, gamma),
        cohorts.excess_noise_27(updates, C, gamma, L),
        cohorts.excess_noise_28(updates, C, gamma, L),
    ]
    # The terms that cancel have the size of the updates, not of their spread.
    size = gamma**2 * (updates**2).sum()
    expected = printed_noises(updates.tolist(), C, gamma, L)
    for one, other, scale in zip(found, expected, (1, 1, L, L), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13 * size * scale)
    np.testing.assert_allclose(found[2], found[3], rtol=1e-12, atol=1e-13 * size * L)


def test_the_noise_is_zero_for_all_clients_and_for_equal_updates():
    updates = lopsided((6, 3))
    for noise in (cohorts.excess_noise_27, cohorts.excess_noise_28):
        assert noise(updates, 6, 0.1, 2.0) == 0
        assert abs(noise(np.tile(updates[0], (6, 1)), 2, 0.1, 2.0)) < 1e-15


def test_parallel_updates_have_nonzero_noise():
    parallel = np.outer([1.0, 2.0, 4.0], [0.6, 0.8])
    for noise in (cohorts.excess_noise_27, cohorts.excess_noise_28):
        # The norms of the updates have sum 7, and their squares have sum 21.
        close(noise(parallel, 1, 0.1, 2.0), 0.01 * 2 / 3 / 2 * (21 - 49 / 3))


def test_the_noise_is_the_variance_over_all_cohorts():
    for C in [1, 2, 5, 6]:
        updates = lopsided((6, 3))
        means = np.array(
            [updates[list(chosen)].mean(axis=0) for chosen in combinations(range(6), C)]
        )
        variance = ((means - means.mean(axis=0)) ** 2).sum(axis=1).mean()
        noise = cohorts.excess_noise_27(updates, C, 0.3, 5.0)
        np.testing.assert_allclose(noise, 5 / 2 * 0.3**2 * variance, rtol=1e-12, atol=1e-15)
        close(cohorts.squared_step_25(updates, C, 0.3), 0.3**2 * (means**2).sum(axis=1).mean())


@pytest.mark.parametrize("C", [1, 3, 10])
def test_the_noise_is_the_variance_over_drawn_cohorts(C):
    N, draws, rng = 15, 40_000, np.random.default_rng(C)
    updates = lopsided((N, 4), seed=1)
    chosen = np.argsort(rng.random((draws, N)), axis=1)[:, :C]
    squares = ((updates[chosen].mean(axis=1) - updates.mean(axis=0)) ** 2).sum(axis=1)
    error = squares.std(ddof=1) / np.sqrt(draws)
    variance = cohorts.excess_noise_27(updates, C, 0.3, 5.0) / (5 / 2 * 0.3**2)
    assert abs(squares.mean() - variance) < 4 * error
    assert error < 0.02 * variance


def test_bounds_broadcast_like_a_loop():
    for name in BOUNDS:
        bound, given = getattr(cohorts, name), BOUNDS[name]
        grid = evaluate(
            bound, **{**given, "T": [[4096], [9000]], "E": [1, 2], "gap": [[[0.5]], [[3.0]]]}
        )
        assert grid.shape == (2, 2, 2)
        assert grid.dtype == np.float64
        for k, gap in enumerate([0.5, 3.0]):
            for i, T in enumerate([4096, 9000]):
                for j, E in enumerate([1, 2]):
                    close(grid[k, i, j], evaluate(bound, **{**given, "T": T, "E": E, "gap": gap}))


def test_noises_broadcast_like_a_loop():
    for name in NOISES:
        noise, updates = getattr(cohorts, name), lopsided((3, 6, 2))
        constants = (2.0,) if name.startswith("excess") else ()
        grid = noise(updates, [[1], [4]], 0.1, *constants)
        assert grid.shape == (2, 3)
        for i, C in enumerate([1, 4]):
            for j in range(3):
                close(grid[i, j], noise(updates[j], C, 0.1, *constants))


OUTSIDE_ALL = [
    ({"T": 0}, "T >= 1"),
    ({"N": 0}, "N >= 1"),
    ({"E": 0}, "E >= 1"),
    ({"L": 0}, "L > 0"),
    ({"G": -1}, "G >= 0"),
    ({"sigma": np.nan}, "sigma >= 0"),
    ({"gap": -1}, "gap >= 0"),
]
OUTSIDE = {
    "theorem_1": [({"gamma": 0}, "gamma > 0"), ({"gamma": [0.5, 0.5001]}, "gamma <= 1/L")],
    "corollary_part_1": [({"T": 3}, "T >= N")],
    "corollary_part_2": [({"T": 3}, "T >= N"), ({"T": 1023}, "E <= T^(1/4) / N^(3/4)")],
}


def test_outside_a_hypothesis_there_is_no_bound():
    for name in BOUNDS:
        bound = getattr(cohorts, name)
        evaluate(bound, **BOUNDS[name])
        for change, hypothesis in (*OUTSIDE_ALL, *OUTSIDE[name]):
            with pytest.raises(ValueError, match=f"needs {re.escape(hypothesis)};"):
                evaluate(bound, **{**BOUNDS[name], **change})


def test_hypotheses_include_their_borders():
    evaluate(cohorts.theorem_1, **{**BOUNDS["theorem_1"], "gamma": 0.5})
    evaluate(cohorts.corollary_part_1, **{**BOUNDS["corollary_part_1"], "T": 4})
    evaluate(cohorts.corollary_part_2, **{**BOUNDS["corollary_part_2"], "T": 1024})


OUTSIDE_NOISES = [
    ({"updates": np.ones((1, 2)), "C": 1}, "N >= 2"),
    ({"C": 0}, "C >= 1"),
    ({"C": [3, 7]}, "C <= N"),
    ({"gamma": 0}, "gamma > 0"),
    ({"L": 0}, "L > 0"),
]


def test_outside_a_hypothesis_there_is_no_noise():
    for name in NOISES:
        smoothness = {"L": 1.0} if name in NOISES[2:] else {}
        given = {"updates": lopsided((6, 2)), "C": 2, "gamma": 0.1, **smoothness}
        getattr(cohorts, name)(**given)
        for change, hypothesis in OUTSIDE_NOISES:
            if change.keys() <= given.keys():
                with pytest.raises(ValueError, match=f"needs {re.escape(hypothesis)};"):
                    getattr(cohorts, name)(**{**given, **change})


# The bound that the paper leaves open, compared with exact expectations on random quadratics.


def random_quadratics(rng, count, N, d):
    """Problems with random heterogeneity in curvature and minimizers."""
    root = rng.normal(size=(count, N, d, d)) * 10 ** rng.uniform(-1, 0.5, (count, N, 1, 1))
    spread = 10 ** rng.uniform(-2, 1, (count, 1, 1))
    b = spread * rng.normal(size=(count, N, d))
    return Quadratics(root @ root.swapaxes(-1, -2) / d, b, rng.normal(size=(count, d)))


@pytest.mark.parametrize(
    ("N", "C", "E", "S"), [(2, 1, 1, 1), (4, 2, 3, 8), (6, 1, 5, 4), (5, 5, 4, 12)]
)
def test_the_bound_for_cohorts_holds_exactly(N, C, E, S):
    """It holds for 2,500 random problems, from homogeneous to very heterogeneous ones."""
    problems = random_quadratics(np.random.default_rng(N), 2500, N, d=3)
    gamma = np.random.default_rng(0).uniform(0.05, 1, 2500) / (problems.smoothness * E)
    measured, G2, Z2 = exact_training(problems, S, C, E, gamma)
    losses = {"L": problems.smoothness, "gap": problems.gap, "G": np.sqrt(G2), "Z": np.sqrt(Z2)}
    bound = cohorts.cohort_bound(S, Problem(N=N, C=C, E=E, **losses), gamma)
    ratio = measured / bound
    print(f"largest ratio {ratio.max():.3f}, median {np.median(ratio):.3f}")
    assert np.all(ratio <= 1)
    assert ratio.max() > 0.3  # tight within a factor of about three


def test_exact_training_equals_the_mean_over_all_cohorts():
    """The expectation is that over all sequences of cohorts."""
    N, C, E, S, gamma = 3, 2, 2, 3, 0.1
    problems = random_quadratics(np.random.default_rng(0), 1, N, d=2)
    H, b, start = (each[0] for each in problems)

    def squares(x, rounds):
        """The sums of squared gradients over rounds, for all sequences of cohorts."""
        if not rounds:
            return [0.0]
        now = np.sum(np.mean([H[i] @ (x - b[i]) for i in range(N)], 0) ** 2)
        ends = []
        for i in range(N):
            y = x
            for _ in range(E):
                y = y - gamma * H[i] @ (y - b[i])
            ends.append(y)
        later = [np.mean([ends[i] for i in drawn], 0) for drawn in combinations(range(N), C)]
        return [now + rest for y in later for rest in squares(y, rounds - 1)]

    found, _, _ = exact_training(problems, S, C, E, np.array([gamma]))
    assert found[0] == pytest.approx(np.mean(squares(start, S)) / S, rel=1e-12)


def test_the_optimal_cohort_size_minimizes_the_bound_at_constant_cost():
    N, cost, gamma = 40, 240.0, 0.02
    Z, constants = np.geomspace(0.3, 60, 25), {"N": N, "E": 4, "L": 3.0, "gap": 2.0}
    best = cohorts.optimal_cohort_size(cost, Problem(Z=Z, **constants), gamma)
    C = np.linspace(1, N, 3901)
    problem = Problem(C=C, Z=Z[:, None], G=1.0, **constants)
    bounds = cohorts.cohort_bound(cost / C, problem, gamma)
    np.testing.assert_allclose(best, C[bounds.argmin(-1)], atol=0.01)
    assert best.min() == 1
    assert best.max() == N
    assert np.any((best > 1.5) & (best < N - 1))


def test_the_bound_for_cohorts_names_the_violated_hypothesis():
    numbers = {"R": 3, "N": 4, "C": 2, "E": 2, "gamma": 0.1} | dict.fromkeys(
        ["L", "G", "Z", "gap"], 1
    )
    evaluate(cohorts.cohort_bound, **numbers)
    for change, message in [
        ({"C": 5}, "The bound for cohorts needs C <= N; given C = 5, N = 4"),
        ({"R": 0}, "The bound for cohorts needs R >= 1; given R = 0"),
        ({"gamma": 0.6}, "The bound for cohorts needs gamma <= 1/(L E); given gamma = 0.6"),
        ({"gamma": 0.0}, "The bound for cohorts needs gamma > 0; given gamma = 0"),
        ({"gap": -1}, "Problem needs gap >= 0; given gap = -1"),
        ({"Z": np.nan}, "Problem needs Z >= 0; given Z = nan"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            evaluate(cohorts.cohort_bound, **numbers | change)


@given(
    S=whole,
    N=whole,
    C=whole,
    E=whole,
    L=positive,
    G=positive,
    Z=positive,
    gap=positive,
    share=st.floats(0.01, 1),
)
@MANY
def test_the_bound_for_cohorts_is_the_sum_of_its_three_terms(S, N, C, E, L, G, Z, gap, share):
    """Drift sums the squares of 0 ... E-1. Noise is the variance of a mean of C of N numbers."""
    C, gamma = min(C, N), share / (L * E)
    drift = gamma**2 * L**2 * G**2 * sum(t * t for t in range(E)) / E
    variance = 0.0 if N == 1 else Z**2 * N / (N - 1) * (N - C) / (N * C)
    start = 2 * gap / (gamma * E * S)
    found = cohorts.cohort_bound(S, Problem(N=N, C=C, E=E, L=L, G=G, Z=Z, gap=gap), gamma)
    close(found, math.fsum([start, drift, gamma * L * E * variance]))
