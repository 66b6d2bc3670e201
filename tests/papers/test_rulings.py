"""Verdicts on made-up samples: thresholds, deciding parts, and error rates."""

import math

import numpy as np
import pytest
import xarray as xr
from scipy.stats import binom
from scipy.stats import t as student

from fedjax_mm.papers.rulings import (
    LEVEL,
    alike,
    check,
    fact,
    median_more,
    more,
    no_less,
    ruling,
    untested,
)
from fedjax_mm.papers.schema import Statement

NAN, INF = float("nan"), float("inf")


def samples(*rows):
    """Samples of differences, ``[pair, seed]``."""
    values = np.array(rows, float)
    pairs = [f"pair {i}" for i in range(len(values))]
    return xr.DataArray(values, {"pair": pairs}, dims=("pair", "seed"))


def with_mean(mean, num_seeds, error=1.0):
    """Samples with a given mean and standard error."""
    steps = np.linspace(-1, 1, num_seeds)
    return mean + error * steps * np.sqrt(num_seeds) / steps.std(ddof=1)


def verdict(*parts):
    return ruling("key", *parts).verdict


def test_the_level_is_one_tail_of_three_standard_errors():
    assert pytest.approx(0.00134990, abs=1e-8) == LEVEL


@pytest.mark.parametrize("num_seeds", [2, 3, 4, 10, 64])
def test_verdicts_change_at_students_quantile(num_seeds):
    beyond = student.isf(LEVEL, num_seeds - 1)
    turns = {1.01: "supported", 0.99: "not settled", -0.99: "not settled", -1.01: "contradicted"}
    for factor, expected in turns.items():
        here = samples(with_mean(factor * beyond, num_seeds))
        for part in (more(here), more(here + 5, by=5.0), no_less(here - 2, margin=2.0)):
            made = ruling("key", part)
            assert (made.verdict, made.parts[0].seeds) == (expected, num_seeds)


@pytest.mark.parametrize("side", [-1, 1])
def test_alike_splits_the_level_over_two_sides(side):
    holds, fails = student.isf(LEVEL, 3), student.isf(LEVEL / 2, 3)
    turns = {1.01 * holds: "supported", 0.99 * holds: "not settled"}
    turns |= {-0.99 * fails: "not settled", -1.01 * fails: "contradicted"}
    for room, expected in turns.items():
        here = samples(side * (200 - with_mean(room, 4)))
        assert verdict(alike(here, margin=200.0)) == expected


@pytest.mark.parametrize("num_parts", [2, 6])
def test_a_part_contradicts_at_its_share_of_the_level(num_parts):
    fine = [with_mean(99, 5)] * (num_parts - 1)
    edge = student.isf(LEVEL / num_parts, 4)
    for factor, expected in ((1.01, "contradicted"), (0.99, "not settled")):
        made = ruling("key", more(samples(*fine, with_mean(-factor * edge, 5))))
        assert made.verdict == expected
        assert [part.verdict for part in made.parts] == [*["supported"] * (num_parts - 1), expected]
    assert made.parts[-1].name == f"pair {num_parts - 1}"


def test_a_tie_in_every_seed_is_decided():
    level = samples([0, 0, 0])
    assert verdict(no_less(level, margin=0.0)) == "supported"
    assert verdict(alike(level, margin=0.0)) == "supported"
    assert verdict(no_less(level - 2, margin=2.0)) == "supported"
    assert verdict(more(level)) == "contradicted"
    assert verdict(more(level + 10, by=10.0)) == "contradicted"
    assert verdict(median_more(level, by=0.0)) == "contradicted"
    # 0.3 - 0.1 and 0.2 differ in the last digit.
    assert verdict(no_less(samples([0.1 - 0.3] * 3), margin=0.2)) == "supported"
    assert verdict(more(samples([1e-3] * 3))) == "supported"


@pytest.mark.parametrize("lost", [NAN, INF, -INF])
def test_samples_that_are_not_finite_are_not_tested(lost):
    here = samples([-9, -8, lost, -9, -8, -9])
    for part in (more(here), no_less(here, 1.0), alike(here, 1.0)):
        made = ruling("key", part)
        assert made.verdict == "not tested"
        assert "1 of 6 seeds" in made.parts[0].evidence
    # Another part that is contradicted still decides.
    assert verdict(more(here), more(samples(with_mean(-99, 6)))) == "contradicted"
    assert verdict(more(here), more(samples(with_mean(99, 6)))) == "not tested"


def test_one_seed_settles_nothing_and_without_parts_nothing_is_tested():
    for part in (more(samples([9])), no_less(samples([9]), 1.0), alike(samples([9]), 1.0)):
        assert verdict(part) == "not settled"
    assert verdict() == "not tested"
    assert verdict([]) == "not tested"


def test_the_sign_test_counts_seeds_on_each_side_of_the_margin():
    for above, expected in ((16, "supported"), (15, "supported"), (14, "not settled")):
        here = samples([2.0] * above + [0.5] * (16 - above))
        assert verdict(median_more(here, by=1.0)) == expected
        mirrored = verdict(median_more(2 - here, by=1.0))
        assert mirrored == {"supported": "contradicted"}.get(expected, expected)
    assert binom.sf(14, 16, 0.5) < LEVEL < binom.sf(13, 16, 0.5)


def test_an_unreached_target_counts_if_its_limit_decides():
    here = samples([NAN] * 3 + [2.0] * 13)
    assert verdict(median_more(here, by=1.0)) == "not tested"
    assert verdict(median_more(here, by=1.0, unreached=1.5)) == "not tested"
    assert verdict(median_more(here, by=1.0, unreached=0.5)) == "not settled"
    assert verdict(median_more(samples([NAN] * 16), by=1.0, unreached=0.5)) == "contradicted"
    assert verdict(median_more(samples([NAN] * 16), by=1.0, unreached=1.5)) == "not tested"
    # One unreached seed does not overrule fifteen others.
    assert verdict(median_more(samples([NAN] + [2.0] * 15), by=1.0)) == "supported"
    limits = xr.DataArray([0.5, 1.5], {"pair": ["pair 0", "pair 1"]})
    rows = ruling("key", median_more(samples([NAN] * 16, [NAN] * 16), 1.0, limits)).parts
    assert [row.verdict for row in rows] == ["contradicted", "not tested"]


def test_facts_are_supported_contradicted_or_not_tested():
    assert verdict(fact(True, "")) == "supported"
    assert verdict(fact(False, "")) == "contradicted"
    assert verdict(fact(None, "")) == verdict(fact(NAN, "")) == "not tested"
    both = fact(xr.DataArray([True, False], {"C": [5, 10]}), "u")
    assert [(part.name, part.verdict) for part in ruling("key", both).parts] == [
        ("C = 5", "supported"),
        ("C = 10", "contradicted"),
    ]
    assert untested("key", "the digits").verdict == "not tested"


def statement(made):
    about = {"key": "key", "quote": "A leads", "where": "section 5"}
    return Statement(**about, verdict=made.verdict, parts=made.parts)


@pytest.mark.parametrize("num_seeds", [4, 12])
def test_the_estimated_number_of_seeds_would_settle_the_statement(num_seeds):
    made = ruling("key", more(samples(with_mean(1.5, num_seeds), with_mean(99, num_seeds))))
    needed = statement(made).needed
    effect = 1.5 / np.sqrt(num_seeds)
    assert effect * np.sqrt(needed) >= student.isf(LEVEL, needed - 1)
    assert effect * np.sqrt(needed - 1) < student.isf(LEVEL, needed - 2)
    assert statement(made).remains == f"about {needed} seeds"
    hopeless = ruling("key", more(samples(with_mean(1e-3, num_seeds))))
    assert statement(hopeless).remains == "more than 10,000 seeds"


def test_checks_pass_fail_or_stay_undecided():
    outcomes = {True: "passed", False: "failed", None: "undecided", NAN: "undecided"}
    assert all(check("text", passed).outcome == found for passed, found in outcomes.items())
    assert check("text", xr.DataArray([True, False])).outcome == "failed"
    assert check("text", np.array([1.0, NAN])).outcome == "undecided"
    assert check("text", np.zeros(0, bool)).outcome == "undecided"
    lead = samples(with_mean(99, 5))
    assert check("text", more(lead)).outcome == "passed"
    assert check("text", more(-lead)).outcome == "failed"
    assert check("text", more(samples(with_mean(0, 5)))).outcome == "undecided"
    assert check("text", more(lead)).evidence == "pair 0: 99.00 ± 1.00"


def test_six_comparisons_with_equal_methods_rarely_contradict():
    """The parts of a statement share its level."""
    rows = more(samples(*np.random.default_rng(1).normal(size=(6000, 20))))
    found = [verdict(rows[start : start + 6]) for start in range(0, 6000, 6)]
    assert found.count("contradicted") <= 1000 * LEVEL + 4 * math.sqrt(1000 * LEVEL)
    assert found.count("supported") == 0


def test_repeated_tests_while_doubling_seeds_rarely_err():
    """At the margin, 1.4 % of repetitions from 3 to 96 seeds err on either side."""
    drawn = np.random.default_rng(2).normal(size=(1000, 96))
    looks = [more(samples(*drawn[:, : 3 * 2**k])) for k in range(6)]
    wrong = sum(
        any(verdict([look]) != "not settled" for look in of_one)
        for of_one in zip(*looks, strict=True)
    )
    assert 1 <= wrong <= 14 + 4 * math.sqrt(14)
