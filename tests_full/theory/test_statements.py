"""Rules for all statements: signatures, citations, and required symbols."""

import importlib
import inspect
import math
import pkgutil
import re

import numpy as np
import pytest

from fedjax_mm import theory
from fedjax_mm.theory import cohorts, fairness, maxfl, mfa, mfa_lemmas
from fedjax_mm.theory.problem import Problem, Rate, in_range
from tests.statements import FIELDS, evaluate

OF_TASKS = ("affine", "gossip", "local_steps", "moments", "validation")
"""Modules that compute from tasks, sweeps or networks, or prove bounds of ours."""

MODULES = [
    importlib.import_module(f"fedjax_mm.theory.{module.name}")
    for module in pkgutil.iter_modules(theory.__path__)
    if module.name not in OF_TASKS
]
FUNCTIONS = {
    f"{module.__name__.split('.')[-1]}.{name}": function
    for module in MODULES
    for name, function in vars(module).items()
    if inspect.isroutine(function) and function.__module__ == module.__name__
}
NO_STATEMENTS = ("constants.heterogeneity", "constants.is_quadratic", "rates.fitted_exponent")
PUBLIC = {
    name: function
    for name, function in FUNCTIONS.items()
    if not function.__name__.startswith("_")
    and not name.startswith("problem.")
    and name not in NO_STATEMENTS
}
"""All functions that state a result of a paper, which excludes the module `problem`."""

CITED = r"\n *Reference: (?P<source>[A-Z].+?)\n *$"
NUMBERED = (
    r"(Theorems?|Corollary|Lemma|Remark|Assumptions?|section|eqs?\.|Corollary, part) \(?[A-Z\d]"
)
NEEDS = {
    mfa.theorem_1: "N M E mu L Gamma G sigma",
    mfa.theorem_1_terms: "N M E mu L Gamma G sigma",
    mfa.theorem_2_rate: "M",
    mfa.theorem_2: "M E mu L G",
    mfa.corollary_1: "M E mu L G",
    mfa.least_sample_size: "S E G beta_1 beta_2",
    mfa.rounds_to_accuracy: "N M E mu L Gamma G sigma",
    mfa.theorem_3_condition: "N E L Gamma G",
    mfa.theorem_3: "N M E mu L Gamma G sigma",
    mfa_lemmas.lemma_1: "S G beta_1 beta_2",
    mfa_lemmas.lemma_2: "E mu L",
    mfa_lemmas.lemma_3: "M E L G",
    mfa_lemmas.lemma_4: "S E G beta_1 beta_2",
    mfa_lemmas.drift: "M E L G",
    mfa_lemmas.recursion: "M E mu L G",
    mfa_lemmas.iterated_recursion: "M E mu L G",
    cohorts.theorem_1: "N E L G sigma gap",
    cohorts.corollary_part_1: "N E L G sigma gap",
    cohorts.corollary_part_2: "N E L G sigma gap",
    cohorts.cohort_bound: "N C E L G Z gap",
    cohorts.optimal_cohort_size: "N E L Z gap",
    fairness.costs: "N C S",
    maxfl.lemma_b_1: "L_c beta kappa",
    maxfl.lemma_b_2: "L_c L",
    maxfl.optimal_epsilon: "N L_c L",
    maxfl.adaptive_learning_rate: "L_c L",
    maxfl.theorem_3_1_full: "N E L L_c sigma beta kappa gap",
    maxfl.theorem_3_1_partial: "N C E L L_c sigma beta kappa gap",
}
"""Maps statements to the symbols that they take from their Problem."""

COUNTS = {"N": 8, "M": 1, "E": 2, "C": 2, "S": 20}
LOSSES = {"mu": 0.5, "L": 1.0, "L_c": 1.0, "Gamma": 0.3, "G": 1.0, "Z": 1.0, "gap": 1.0}
MORE = {"zeta": 1.0, "delta": 0.5, "H": 0.0}
NOISE = {"sigma": 1.0, "beta_1": 0.5, "beta_2": 1.0, "beta": 1.0, "kappa": 0.5}
SYMBOLS = COUNTS | LOSSES | MORE | NOISE
OWN = {
    **dict.fromkeys(("t", "R", "B", "epochs", "num_frames", "N_s", "V"), 1),
    "T": 10_000,
    "cost": 100,
    "q": [0.2],
    "eta": 0.1,
    "epsilon": 0.5,
    "gamma": 0.1,
    **dict.fromkeys(("D", "Delta", "Delta_1"), 1.0),
    "rate": Rate(beta=2.5, gamma=50.0),
    "rates": (0.01, 0.5),
}
"""Values that are admissible in every statement."""


def parameters(statement):
    return inspect.signature(statement).parameters


def test_every_statement_about_a_problem_is_in_the_table():
    about = {each for each in PUBLIC.values() if "problem" in parameters(each)}
    assert about == NEEDS.keys()
    assert len(PUBLIC) == 49
    assert SYMBOLS.keys() == FIELDS


def test_no_function_takes_more_than_five_parameters():
    crowded = []
    for name, function in FUNCTIONS.items():
        try:
            number = len(parameters(function))
        except ValueError:  # a compiled function
            number = len(parameters(function.__wrapped__))
        crowded += [name] * (number > 5)
    assert not crowded


def test_every_function_cites_its_statement_by_number():
    """The last line is 'Reference: AUTHORS, STATEMENT NUMBER, EQUATIONS.'."""
    cited = {name: re.search(CITED, f.__doc__, re.DOTALL) for name, f in PUBLIC.items()}
    assert not [
        name for name, at in cited.items() if not at or not re.search(NUMBERED, at["source"])
    ]


def given(statement):
    own = {name: OWN[name] for name in parameters(statement) if name in OWN}
    return {name: SYMBOLS[name] for name in NEEDS[statement].split()}, own


@pytest.mark.parametrize("statement", NEEDS)
def test_a_missing_symbol_is_named(statement):
    symbols, own = given(statement)
    statement(problem=Problem(**symbols), **own)
    for missing in symbols:
        rest = {name: value for name, value in symbols.items() if name != missing}
        remedy = rf"needs {missing}; give Problem\(\.\.\., {missing}=\.\.\.\)"
        with pytest.raises(ValueError, match=remedy):
            statement(problem=Problem(**rest), **own)


@pytest.mark.parametrize("statement", NEEDS)
def test_other_symbols_have_no_effect(statement):
    symbols, own = given(statement)
    few, all_of_them = (
        statement(problem=Problem(**numbers), **own) for numbers in (symbols, SYMBOLS | symbols)
    )
    np.testing.assert_array_equal(few, all_of_them)


OUTSIDE = {
    **dict.fromkeys(("N", "M", "E", "C", "S", "beta", "beta_2"), (1, 0.5)),
    **dict.fromkeys(("Gamma", "G", "Z", "sigma", "beta_1", "kappa", "gap"), (0, -0.5)),
    **dict.fromkeys(("zeta", "delta", "H"), (0, -0.5)),
    **dict.fromkeys(("mu", "L", "L_c"), (math.nextafter(0, 1), 0.0)),
}
"""Maps symbols to the least admissible value and one below it."""


@pytest.mark.parametrize("symbol", sorted(FIELDS))
def test_a_problem_checks_every_range(symbol):
    least, below = OUTSIDE[symbol]
    Problem(**{symbol: least})
    Problem(**{symbol: [least, 7]})
    for value in (below, math.nan, [7, below]):
        with pytest.raises(ValueError, match=rf"Problem needs {symbol} >=? [01]; given {symbol} ="):
            Problem(**{symbol: value})


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0.0, 1.0), "Rate needs beta > 0; given beta = 0"),
        (([1.0, math.nan], 1.0), "Rate needs beta > 0; given beta = nan"),
        ((1.0, -1.0), "Rate needs gamma > -1; given gamma = -1"),
    ],
)
def test_a_rate_checks_its_ranges(numbers, message):
    Rate(1e-9, -0.999)
    with pytest.raises(ValueError, match=message):
        Rate(*numbers)


def test_numbers_are_double_precision_arrays():
    (found,) = Problem(N=np.float32([3, 4])).symbols("Theorem 1", "N")
    assert found.dtype == np.float64
    assert [symbol.dtype for symbol in (*in_range("Theorem 1", t=3), *Rate(1, 2).symbols())] == [
        np.float64
    ] * 3
    assert Rate(np.float32(3), 1).at([1, 2]).tolist() == [1.5, 1.0]
    assert evaluate(mfa.theorem_1_rate, t=1, beta=3, gamma=1).dtype == np.float64
