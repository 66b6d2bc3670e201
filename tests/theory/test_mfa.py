"""Statements of Bhuyan, Moharir and Joshi, compared with transcriptions in exact numbers.

The transcriptions take single numbers. If derivations and final formulas of the paper differ, they
follow the derivations: sums over rounds, clients and steps, and K = N / M clients per round.
"""

import inspect
import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_mm.schedules import inverse_time, per_frame
from fedjax_mm.theory import mfa, mfa_lemmas
from tests.statements import evaluate

# --- Transcriptions ---------------------------------------------------------------------------


def paper_rate_1(t, beta, gamma):
    return Fraction(beta) / (Fraction(t) + Fraction(gamma))


def paper_rate_2(t, M, beta, gamma):
    frame, rounds = 1, 0
    while rounds + M < t:
        frame, rounds = frame + 1, rounds + M
    return Fraction(beta) / (frame + Fraction(gamma))


def paper_terms(N, M, E, mu, L, Gamma, G, sigmas, beta, gamma, D):
    """Eqs. (12) to (14), with K of N clients per round and a noise sigma_k for each client."""
    mu, L, Gamma, G, beta, gamma, D = map(Fraction, (mu, L, Gamma, G, beta, gamma, D))
    K = Fraction(N, M)
    B = 6 * L * Gamma + 8 * (E - 1) ** 2 * G**2
    for sigma in sigmas:
        B += Fraction(sigma) ** 2 / N**2
    C = (N - K) / ((N - 1) * K) * E**2 * G**2 if N > 1 else 0
    return beta**2 * (B + C) / (beta * mu - 1), D * (1 + gamma)


def paper_theorem_1(t, gamma, terms):
    return math.sqrt(max(terms)) / math.sqrt(t + gamma)


def paper_rounds(gamma, epsilon, terms, reading):
    """T_M from eq. (126), with the sum, or with the maximum as in eq. (124)."""
    nu = sum(terms) if reading == "sum" else max(terms)
    return nu / Fraction(epsilon) ** 2 - Fraction(gamma)


def paper_lemma_1(S, N_s, G, beta_1, beta_2):
    """Eq. (59), with both factors at most 2 (S - |xi|) / S times the bound of Assumption 4."""
    used, unused = Fraction(S - N_s, S * max(N_s, 1)), Fraction(1, S)
    total = N_s * used + (S - N_s) * unused if N_s else Fraction(2)
    return total**2 * (Fraction(beta_1) + Fraction(beta_2) * Fraction(G) ** 2)


def paper_lemma_2(Delta, eta, E, mu):
    for _ in range(E):
        Delta *= 1 - eta * mu
    return Delta


def paper_lemma_3(eta, M, E, L, G):
    """Eqs. (97) and (108), summed over the rounds i and steps p."""
    eta, L, G = map(Fraction, (eta, L, G))
    total = Fraction(0)
    for i in range(1, M + 1):
        for p in range(1, E + 1):
            total += L * (2 * (p - 1) * eta * G + eta * (i - 1) * E * G / M) / M
    return total


def paper_lemma_4(S, N_s, E, G, beta_1, beta_2):
    """Eq. (116), the sum of the root of Lemma 1's variance over E steps."""
    return sum(math.sqrt(paper_lemma_1(S, N_s, G, beta_1, beta_2)) for _ in range(E))


def paper_recursion(Delta, eta, M, E, mu, L, G, V):
    Delta, eta, mu, L, G, V = map(Fraction, (Delta, eta, mu, L, G, V))
    Y = L * G * E * E * (M - 1) / (2 * M)
    Z = L * G * E * (E - 1)
    return Delta - eta * mu * Delta + eta * eta * Y + eta * eta * Z + eta * eta * V


def paper_nu(M, E, mu, L, G, V, beta, gamma, Delta_1):
    """Eq. (43), for MFA-RR."""
    mu, L, G, V, beta, gamma, Delta_1 = map(Fraction, (mu, L, G, V, beta, gamma, Delta_1))
    Y = L * G * E**2 * (M - 1) / (2 * M)
    Z = L * G * E * (E - 1)
    return max(beta**2 * (Y + Z + V) / (beta * mu - 1), (1 + gamma) * Delta_1)


def paper_theorem_2(t, M, E, mu, L, G, V, beta, gamma, Delta_1):
    phi = Fraction(beta) * E * Fraction(G) * (M - 1) / M
    phi += paper_nu(M, E, mu, L, G, V, beta, gamma, Delta_1)
    return phi / (Fraction(t, M) + Fraction(gamma))


def paper_sample_size(eta, S, E, G, V, beta_1, beta_2):
    for N_s in range(1, S + 1):
        if (S - N_s) / S <= eta * V / (2 * E * math.sqrt(beta_1 + beta_2 * G**2)):
            return N_s
    raise AssertionError


def paper_remark_2(T, mu, constant):
    mean_square = constant / math.sqrt(T) / mu**2
    return math.sqrt(mean_square)


# --- Admissible numbers -----------------------------------------------------------------------


def up_to(largest):
    """Zero, or numbers with squares in the normal range."""
    return st.just(0.0) | st.floats(1e-6, largest)


@st.composite
def problems(draw, steps=(1, 20), clients=(1, 500)):
    """Draws the constants of Theorem 1, which include those of Theorem 2."""
    mu = draw(st.floats(1e-4, 10))
    L = mu * draw(st.floats(1, 1e3))
    beta = draw(st.floats(1.01, 10)) / mu
    return {
        "N": draw(st.integers(*clients)),
        "E": draw(st.integers(*steps)),
        "mu": mu,
        "L": L,
        "Gamma": draw(up_to(10)),
        "G": draw(up_to(100)),
        "beta": beta,
        "gamma": 4 * L * beta - 1 + draw(st.floats(1e-2, 100)),
        "D": draw(st.floats(1e-3, 1e3)),
    }


def agrees(found, expected):
    return float(found) == pytest.approx(float(expected), rel=1e-12, abs=0)


def part(problem, *left_out):
    return {symbol: value for symbol, value in problem.items() if symbol not in left_out}


hundreds = settings(max_examples=60, deadline=None, derandomize=True)
rounds = st.integers(1, 10_000)
share = st.floats(0, 1)
rest = st.data()


@hundreds
@given(problems(), rounds, rest)
def test_theorem_1(problem, t, data):
    N = problem["N"]
    M = data.draw(st.integers(1, N))
    sigmas = data.draw(st.lists(up_to(100), min_size=1, max_size=4)) * N
    sigmas = sigmas[:N]
    terms = paper_terms(M=M, sigmas=sigmas, **problem)
    sigma = math.sqrt(math.fsum(s**2 for s in sigmas) / N)
    found = evaluate(mfa.theorem_1, t=t, M=M, sigma=sigma, **problem)
    assert agrees(found, paper_theorem_1(t, problem["gamma"], terms))
    noise, start = evaluate(mfa.theorem_1_terms, M=M, sigma=sigma, **problem)
    assert agrees(noise, terms[0])
    assert agrees(start, terms[1])


@hundreds
@given(problems(), rounds, st.integers(1, 50), up_to(1e3), st.floats(1e-3, 1e3))
def test_theorem_2_and_corollary_1(problem, t, M, V, Delta_1):
    problem = part(problem, "N", "Gamma", "D") | {"M": M, "Delta_1": Delta_1}
    # Move gamma to just above beta L - 1.
    problem["gamma"] = (problem["gamma"] + 1) / 4 - 1
    assert agrees(evaluate(mfa.theorem_2, t=t, V=V, **problem), paper_theorem_2(t, V=V, **problem))
    assert agrees(evaluate(mfa.corollary_1, t=t, **problem), paper_theorem_2(t, V=0, **problem))


@hundreds
@given(rounds, st.integers(1, 50), st.floats(1e-3, 1e3), st.floats(-0.9, 1e4))
def test_rates(t, M, beta, gamma):
    assert agrees(
        evaluate(mfa.theorem_1_rate, t=t, beta=beta, gamma=gamma), paper_rate_1(t, beta, gamma)
    )
    assert agrees(
        evaluate(mfa.theorem_2_rate, t=t, M=M, beta=beta, gamma=gamma),
        paper_rate_2(t, M, beta, gamma),
    )


def test_rates_equal_those_of_the_simulator():
    t = np.arange(1, 50)
    np.testing.assert_allclose(
        evaluate(mfa.theorem_1_rate, t=t, beta=30.0, gamma=99.0),
        inverse_time(30.0, 99.0)(t),
        rtol=1e-15,
    )
    np.testing.assert_allclose(
        evaluate(mfa.theorem_2_rate, t=t, M=12, beta=30.0, gamma=99.0),
        per_frame(inverse_time(30.0, 99.0), 12)(t),
        rtol=1e-15,
    )


@hundreds
@given(problems(), st.floats(0.01, 0.999), up_to(100), rest)
def test_rounds_to_accuracy_and_theorem_3(problem, relative, sigma, data):
    problem["N"] += 1
    N, E, G = problem["N"], problem["E"], problem["G"]
    M = data.draw(st.integers(1, N // 2))
    epsilon = relative * math.sqrt(problem["D"])
    condition = E >= 2 or 6 * Fraction(problem["L"]) * Fraction(problem["Gamma"]) > (
        Fraction(G) ** 2 / (N - 1)
    )
    arguments = problem | {"sigma": sigma, "epsilon": epsilon}
    for reading in ("sum", "max"):
        T_1, T_M = (
            paper_rounds(
                problem["gamma"],
                epsilon,
                paper_terms(M=models, sigmas=[sigma] * N, **problem),
                reading,
            )
            for models in (1, M)
        )
        assert agrees(evaluate(mfa.rounds_to_accuracy, M=M, reading=reading, **arguments), T_M)
        if condition:
            assert agrees(evaluate(mfa.theorem_3, M=M, reading=reading, **arguments), M * T_1 / T_M)
        else:
            with pytest.raises(ValueError, match="needs E >= 2, or E = 1 and N > 1"):
                evaluate(mfa.theorem_3, M=M, reading=reading, **arguments)


@hundreds
@given(st.integers(1, 9), st.integers(1, 3), *(st.integers(0, 12) for _ in range(3)))
def test_the_condition_of_theorem_3_is_eq_136(N, E, L, Gamma, G):
    found = evaluate(mfa.theorem_3_condition, N=N, E=E, L=L + 1, Gamma=Gamma / 8, G=G / 4)
    if E == 1 and Gamma:
        assert found == (1 + Fraction(G, 4) ** 2 / (6 * (L + 1) * Fraction(Gamma, 8)) < N)
    else:
        assert found == (E >= 2)


@hundreds
@given(st.integers(1, 1000), share, up_to(100), up_to(10), st.floats(1, 10), rest)
def test_lemmas_1_and_4(S, used, G, beta_1, beta_2, data):
    sample = {"S": S, "N_s": round(used * S), "G": G, "beta_1": beta_1, "beta_2": beta_2}
    E = data.draw(st.integers(1, 20))
    assert agrees(evaluate(mfa_lemmas.lemma_1, **sample), paper_lemma_1(**sample))
    assert agrees(evaluate(mfa_lemmas.lemma_4, E=E, **sample), paper_lemma_4(E=E, **sample))


@hundreds
@given(problems(), st.floats(1e-3, 1), st.integers(1, 12), up_to(1e3), up_to(1e3))
def test_lemmas_2_and_3_and_the_recursion(problem, relative, M, Delta, V):
    problem = part(problem, "N", "Gamma", "beta", "gamma", "D")
    E, mu, L, G = (problem[symbol] for symbol in ("E", "mu", "L", "G"))
    eta = relative / L
    eta = eta if eta <= 1 / L else 1 / L
    lemma_3 = paper_lemma_3(eta, M, E, L, G)
    assert agrees(evaluate(mfa_lemmas.lemma_3, eta=eta, M=M, E=E, L=L, G=G), lemma_3)
    assert agrees(
        evaluate(mfa_lemmas.drift, M=M, E=E, L=L, G=G),
        lemma_3 / Fraction(eta),
    )
    if eta * mu < 0.999:
        found = evaluate(mfa_lemmas.lemma_2, Delta=Delta, eta=eta, E=E, mu=mu, L=L)
        assert agrees(found, paper_lemma_2(Delta, eta, E, mu))
        found = evaluate(mfa_lemmas.recursion, Delta=Delta, eta=eta, M=M, V=V, **problem)
        assert agrees(found, paper_recursion(Delta, eta, M, V=V, **problem))


@hundreds
@given(problems(), st.integers(1, 12), up_to(1e3), st.floats(1e-3, 1e3))
def test_the_iterated_recursion_proves_theorem_2(problem, M, V, Delta_1):
    problem = part(problem, "N", "Gamma", "D") | {"M": M, "V": V}
    found = evaluate(mfa_lemmas.iterated_recursion, num_frames=8, Delta_1=Delta_1, **problem)
    beta, gamma = problem["beta"], problem["gamma"]
    rates = part(problem, "beta", "gamma")
    error, nu = Fraction(Delta_1), paper_nu(Delta_1=Delta_1, **problem)
    for frame in range(1, 9):
        assert agrees(found[frame - 1], error)
        assert error <= nu / (frame + Fraction(gamma)), "eq. (46)"
        error = paper_recursion(error, Fraction(beta) / (frame + Fraction(gamma)), **rates)


@hundreds
@given(
    st.floats(1e-4, 2),
    st.integers(1, 200),
    st.integers(1, 9),
    *(up_to(20), up_to(50), st.floats(0.1, 9), st.floats(1, 9)),
)
def test_least_sample_size(eta, S, E, G, V, beta_1, beta_2):
    sample = {"S": S, "E": E, "G": G, "beta_1": beta_1, "beta_2": beta_2}
    found = evaluate(mfa.least_sample_size, eta=eta, V=V, **sample)
    assert found == paper_sample_size(eta, V=V, **sample)
    assert found.dtype == np.int64
    assert evaluate(mfa_lemmas.lemma_4, N_s=found, **sample) <= eta * V * (1 + 1e-12)
    if found > 1:
        assert evaluate(mfa_lemmas.lemma_4, N_s=found - 1, **sample) >= eta * V * (1 - 1e-12)


def test_least_sample_size_at_equality():
    for S in [3, 10, 49, 98, 103, 1000]:
        unused = np.arange(1, S)
        sample = {"S": S, "E": 1, "G": 0.0, "beta_1": 1.0, "beta_2": 1.0}
        share = unused / S
        np.testing.assert_array_equal(
            evaluate(mfa.least_sample_size, eta=1, V=2 * share, **sample), S - unused
        )
        below = np.nextafter(share, 0)
        np.testing.assert_array_equal(
            evaluate(mfa.least_sample_size, eta=1, V=2 * below, **sample), S - unused + 1
        )


def test_least_sample_size_is_clipped_to_one_and_all():
    sample = {"S": 9, "E": 1, "G": 0.0, "beta_1": 1.0, "beta_2": 1.0}
    assert evaluate(mfa.least_sample_size, eta=1, V=[0, 2, 1e9], **sample).tolist() == [9, 1, 1]


@hundreds
@given(st.integers(1, 1000), st.floats(1, 1e8), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_remarks(M, T, mu, constant):
    never = Fraction(1)
    for _ in range(M):
        never *= Fraction(M - 1, M)
    assert agrees(mfa.remark_1(M), never)
    assert agrees(
        evaluate(mfa.remark_2, T=T, mu=mu, constant=constant), paper_remark_2(T, mu, constant)
    )


def test_sigma_as_printed_is_lemma_1_without_a_sample():
    variance = evaluate(mfa_lemmas.lemma_1, S=7, N_s=0, G=3.0, beta_1=2.0, beta_2=1.5)
    assert variance == 4 * (2.0 + 1.5 * 9)


def test_a_single_client_has_no_sampling_noise():
    problem = {"E": 3, "mu": 1.0, "L": 1.0, "Gamma": 0.0, "G": 2.0, "sigma": 0.0}
    rate = {"beta": 2.0, "gamma": 8.0, "D": 1.0}
    one, many = (evaluate(mfa.theorem_1_terms, N=N, M=1, **problem, **rate)[0] for N in (1, 9))
    assert one == many == 4 * 8 * 4 * 4


# --- Broadcasting and hypotheses --------------------------------------------------------------

PAIRS = {
    "t": (1, 10),
    "T": (1, 9),
    "N": (8, 40),
    "M": (1, 3),
    "E": (2, 5),
    "S": (20, 50),
    "N_s": (0, 20),
    "mu": (0.5, 1.0),
    "L": (1.0, 2.5),
    "Gamma": (0.0, 0.3),
    "G": (1.0, 2.0),
    "sigma": (0.0, 1.5),
    "beta": (2.5, 4.0),
    "gamma": (50.0, 80.0),
    "beta_1": (0.5, 2.0),
    "beta_2": (1.0, 3.0),
    "eta": (0.1, 0.4),
    "V": (0.0, 2.0),
    "D": (3.0, 7.0),
    "Delta": (1.0, 4.0),
    "Delta_1": (1.0, 3.0),
    "epsilon": (0.5, 1.2),
    "constant": (1.0, 2.0),
}
"""Two values of each symbol that are admissible in any combination."""

OUTSIDE = {
    **dict.fromkeys(("t", "T", "N", "M", "E", "S", "beta_2"), 0.5),
    **dict.fromkeys(("Gamma", "G", "sigma", "D", "Delta", "Delta_1", "V", "N_s", "beta_1"), -0.5),
    **dict.fromkeys(("mu", "L", "beta", "eta", "epsilon", "constant"), 0.0),
    "gamma": -1.0,
}
"""A value of each symbol that no statement admits."""


FIRST = "N M E mu L Gamma G sigma beta gamma D"
SECOND = "M E mu L G beta gamma Delta_1"
SYMBOLS = {
    mfa.theorem_1_rate: "t beta gamma",
    mfa.theorem_1: f"t {FIRST}",
    mfa.theorem_1_terms: FIRST,
    mfa.theorem_2_rate: "t M beta gamma",
    mfa.theorem_2: f"t {SECOND} V",
    mfa.corollary_1: f"t {SECOND}",
    mfa.least_sample_size: "eta S E G V beta_1 beta_2",
    mfa.rounds_to_accuracy: f"{FIRST} epsilon",
    mfa.theorem_3_condition: "N E L Gamma G",
    mfa.theorem_3: f"{FIRST} epsilon",
    mfa.remark_1: "M",
    mfa.remark_2: "T mu constant",
    mfa_lemmas.lemma_1: "S N_s G beta_1 beta_2",
    mfa_lemmas.lemma_2: "Delta eta E mu L",
    mfa_lemmas.lemma_3: "eta M E L G",
    mfa_lemmas.lemma_4: "S N_s E G beta_1 beta_2",
    mfa_lemmas.drift: "M E L G",
    mfa_lemmas.recursion: "Delta eta M E mu L G V",
    mfa_lemmas.iterated_recursion: f"{SECOND} V",
}
STATEMENTS = {function.__name__: function for function in SYMBOLS}


def number(name, **given):
    """The value of a statement, or a number that depends on all of its values."""
    if name == "iterated_recursion":
        return evaluate(mfa_lemmas.iterated_recursion, num_frames=2, **given)[..., -1]
    found = evaluate(STATEMENTS[name], **given)
    return np.divide(*found) if name == "theorem_1_terms" else found


def symbols(name):
    return SYMBOLS[STATEMENTS[name]].split()


def first_values(name):
    return {symbol: PAIRS[symbol][0] for symbol in symbols(name)}


def test_every_argument_is_a_symbol():
    public = {
        function
        for module in (mfa, mfa_lemmas)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    assert public == SYMBOLS.keys()
    others = {
        parameter
        for name, function in STATEMENTS.items()
        for parameter in inspect.signature(function).parameters.keys() - symbols(name)
    }
    assert others == {"problem", "rate", "reading", "num_frames"}


def test_arrays_broadcast_as_loops_of_numbers():
    for name in STATEMENTS:
        names = symbols(name)
        axes = np.ix_(*(PAIRS[symbol] for symbol in names))
        together = number(name, **dict(zip(names, axes, strict=True)))
        # Lemma 2 uses L only in its hypotheses.
        assert together.ndim == len(names)
        together = np.broadcast_to(together, (2,) * len(names))
        rng = np.random.default_rng(0)
        for index in {tuple(row) for row in rng.integers(0, 2, (200, len(names)))}:
            numbers = {symbol: PAIRS[symbol][i] for symbol, i in zip(names, index, strict=True)}
            np.testing.assert_allclose(together[index], number(name, **numbers), rtol=1e-14)


def test_the_iterated_recursion_has_a_last_axis_of_frames():
    numbers = first_values("iterated_recursion") | {"M": [[1], [2]], "Delta_1": [1.0, 2.0, 3.0]}
    assert evaluate(mfa_lemmas.iterated_recursion, num_frames=1, **numbers).shape == (2, 3, 1)
    assert evaluate(mfa_lemmas.iterated_recursion, num_frames=4, **numbers).shape == (2, 3, 4)
    with pytest.raises(ValueError, match="needs num_frames >= 1"):
        evaluate(mfa_lemmas.iterated_recursion, num_frames=0, **numbers)


def test_every_symbol_has_a_range():
    for name in STATEMENTS:
        numbers = first_values(name)
        number(name, **numbers)
        for symbol in symbols(name):
            for value in (OUTSIDE[symbol], math.nan, [PAIRS[symbol][1], OUTSIDE[symbol]]):
                words = rf"needs .*\b{symbol}\b.*; given .*\b{symbol} = "
                with pytest.raises(ValueError, match=words):
                    number(name, **numbers | {symbol: value})


BY_THEOREM_1 = ("theorem_1", "theorem_1_terms", "rounds_to_accuracy", "theorem_3")
BY_THEOREM_2 = ("theorem_2", "corollary_1")

VIOLATED = [
    (BY_THEOREM_1, {"mu": 2.0}, "Theorem 1 needs mu <= L; given mu = 2, L = 1"),
    (BY_THEOREM_1, {"beta": 2.0}, "Theorem 1 needs beta > 1/mu; given beta = 2, mu = 0.5"),
    (BY_THEOREM_1, {"gamma": 9.0}, "Theorem 1 needs gamma > 4 L beta - 1; given gamma = 9"),
    (("theorem_1", "rounds_to_accuracy"), {"M": 9}, "Theorem 1 needs M <= N; given M = 9, N = 8"),
    (BY_THEOREM_2, {"mu": 2.0}, "Theorem 2 needs mu <= L; given mu = 2, L = 1"),
    (BY_THEOREM_2, {"beta": 2.0}, "Theorem 2 needs beta > 1/mu; given beta = 2, mu = 0.5"),
    (BY_THEOREM_2, {"gamma": 1.5}, "Theorem 2 needs gamma > beta L - 1; given gamma = 1.5"),
    (("rounds_to_accuracy", "theorem_3"), {"epsilon": 2.0, "D": 4.0}, "needs epsilon^2 < D; given"),
    (("theorem_3",), {"M": 4.5}, "Theorem 3 needs M <= N/2; given M = 4.5, N = 8"),
    (("theorem_3",), {"E": 1}, "Theorem 3 needs E >= 2, or E = 1 and N > 1 + G^2 / (6 L Gamma)"),
    (("theorem_3",), {"E": 1, "N": 2, "G": 3.0, "Gamma": 1.5}, "Theorem 3 needs E >= 2, or E = 1"),
    (("theorem_3",), {"E": 1.5, "Gamma": 9.0}, "Theorem 3 needs E = 1, 2, ...; given E = 1.5"),
    (("lemma_1",), {"N_s": 21}, "Lemma 1 needs N_s <= S; given N_s = 21, S = 20"),
    (("lemma_4",), {"N_s": 21}, "Lemma 4 needs N_s <= S; given N_s = 21, S = 20"),
    (("lemma_2",), {"mu": 2.0}, "Lemma 2 needs mu <= L"),
    (("lemma_2",), {"eta": 1.01}, "Lemma 2 needs eta <= 1/L; given eta = 1.01, L = 1"),
    (("recursion",), {"mu": 2.0}, "The recursion (32) needs mu <= L"),
    (("recursion",), {"eta": 1.01}, "The recursion (32) needs eta <= 1/L; given eta = 1.01, L = 1"),
    (("iterated_recursion",), {"mu": 2.0}, "The recursion (32) needs mu <= L"),
    (("iterated_recursion",), {"gamma": 1.4}, "The recursion (32) needs eta <= 1/L"),
    (("least_sample_size",), {"S": 20.5}, "The sample-size condition needs S = 1, 2, ..."),
    (("least_sample_size",), {"G": 0.0, "beta_1": 0.0}, "needs beta_1 + beta_2 G^2 > 0"),
]


def test_a_violated_hypothesis_is_an_error():
    for names, changed, message in VIOLATED:
        for name in names:
            with pytest.raises(ValueError, match=re.escape(message)):
                number(name, **first_values(name) | changed)


INSIDE = [
    (("theorem_1",), {"M": 8}),
    ((*BY_THEOREM_1, *BY_THEOREM_2, "lemma_2", "recursion"), {"mu": 1.0}),
    ((*BY_THEOREM_1, *BY_THEOREM_2), {"beta": 2.001}),
    (BY_THEOREM_1, {"gamma": 9.001}),
    (BY_THEOREM_2, {"gamma": 1.501}),
    (("theorem_3",), {"M": 4}),
    (("theorem_3",), {"epsilon": 1.999, "D": 4.0}),
    (("theorem_3",), {"E": 1, "N": 2, "G": 3.0, "Gamma": 1.501}),
    (("lemma_1", "lemma_4"), {"N_s": 20}),
    (("lemma_2", "recursion"), {"eta": 1.0}),
    (("iterated_recursion",), {"gamma": 1.5}),
]


def test_hypotheses_include_their_borders():
    for names, changed in INSIDE:
        for name in names:
            assert np.isfinite(number(name, **first_values(name) | changed)), (name, changed)


@pytest.mark.parametrize("name", ["theorem_3", "rounds_to_accuracy"])
def test_an_unknown_reading_is_refused(name):
    with pytest.raises(ValueError, match="reading is 'mean'; it must be 'sum' or 'max'"):
        number(name, **first_values(name), reading="mean")


# --- Theorem 3's claim ------------------------------------------------------------------------


def increases_from_one(problem):
    """Whether the gain is 1 for one model and increases with M, also between whole numbers."""
    M = np.unique([*range(1, problem["N"] // 2 + 1), *np.linspace(1, problem["N"] / 2, 20)])
    gain = evaluate(mfa.theorem_3, M=M, **problem)
    return gain[0] == 1 and np.all(np.diff(gain) > 0)


many = settings(max_examples=100, deadline=None, derandomize=True)


@many
@given(problems((2, 50), (2, 400)), st.floats(0.01, 0.9999), up_to(100))
def test_the_gain_increases_for_several_local_steps(problem, relative, sigma):
    epsilon = relative * math.sqrt(problem["D"])
    assert increases_from_one(problem | {"sigma": sigma, "epsilon": epsilon})


@many
@given(
    problems((1, 1), (2, 400)),
    *(st.floats(1.0001, 10), st.floats(0.01, 0.9999), up_to(100)),
)
def test_the_gain_increases_for_one_local_step(problem, margin, relative, sigma):
    problem["G"] += 0.01
    problem["Gamma"] = margin * problem["G"] ** 2 / (6 * problem["L"] * (problem["N"] - 1))
    epsilon = relative * math.sqrt(problem["D"])
    assert increases_from_one(problem | {"sigma": sigma, "epsilon": epsilon})


COUNTEREXAMPLE = {
    "N": 4,
    "E": 2,
    "mu": 1.0,
    "L": 12.5,
    "Gamma": 0.0,
    "G": 1.0,
    "sigma": 0.0,
    "beta": 2.0,
    "gamma": 100.0,
    "D": 36 / 101,
    "epsilon": math.sqrt(0.999 * 36 / 101),
}


@pytest.mark.parametrize(("reading", "gain"), [("sum", 1.72), ("max", 0.45)])
def test_with_the_maximum_the_claim_can_fail(reading, gain):
    assert evaluate(mfa.theorem_3, M=2, **COUNTEREXAMPLE, reading=reading) == pytest.approx(
        gain, abs=5e-3
    )


def test_for_one_local_step_the_printed_condition_is_not_enough():
    problem = COUNTEREXAMPLE | {"E": 1, "N": 24, "G": 100.0, "Gamma": 1e-3}
    assert problem["N"] > 1 + 6 * problem["L"] * problem["Gamma"] / problem["G"] ** 2
    models = np.arange(1, 13)
    times = evaluate(mfa.rounds_to_accuracy, M=models, **problem)
    assert np.all(np.diff(models * times[0] / times) < 0)
    with pytest.raises(ValueError, match=re.escape("N > 1 + G^2 / (6 L Gamma)")):
        evaluate(mfa.theorem_3, M=models, **problem)
