"""Verdicts: holds, fails or open, on samples made up, and how often they are wrong."""

import numpy as np
import pytest
import scipy.special
import xarray as xr
from scipy.stats import t as student

from fedjax_mm.papers.claims import (
    below,
    claim,
    estimate,
    exceeds,
    increasing,
    not_below,
    sides,
    within,
)


def samples(*rows):
    """Differences over pairs and seeds."""
    return xr.DataArray(np.array(rows, float), dims=("pair", "seed"))


def with_mean(mean, num_seeds, error=1.0):
    """Samples whose mean and standard error are known."""
    steps = np.linspace(-1, 1, num_seeds)
    return mean + error * steps * np.sqrt(num_seeds) / steps.std(ddof=1)


@pytest.mark.parametrize("num_seeds", [2, 3, 4, 10, 64])
def test_verdicts_turn_where_students_tails_are_those_of_three_standard_errors(num_seeds):
    beyond = student.isf(0.00135, num_seeds - 1)  # of one side: 0.27 % on both
    for factor, verdict in ((1.01, "holds"), (0.99, "open"), (-0.99, "open"), (-1.01, "fails")):
        here = samples(with_mean(factor * beyond, num_seeds))
        for judge, margin in ((exceeds, {}), (not_below, {}), (exceeds, {"by": 5.0})):
            made = judge("text", here + margin.get("by", 0.0), **margin)
            assert (made.verdict, made.seeds) == (verdict, num_seeds)
            assert made.holds == (verdict == "holds")
    assert beyond > 3
    if num_seeds == 64:
        assert beyond < 3.2


@pytest.mark.parametrize("side", [-1, 1])
def test_within_is_judged_at_both_ends_of_its_tolerance(side):
    beyond = student.isf(0.00135, 3)
    for factor, verdict in ((1.01, "holds"), (0.99, "open"), (-0.99, "open"), (-1.01, "fails")):
        here = samples(7 + side * (20 - with_mean(factor * beyond, 4)))
        made = within("text", here, 7.0, 20.0)
        assert (made.verdict, made.seeds) == (verdict, 4)
        assert "±" in made.evidence


def test_one_seed_leaves_it_open():
    one = samples([9])
    for made in (exceeds("", one), not_below("", one), not_below("", -one), within("", one, 9, 1)):
        assert (made.verdict, made.seeds) == ("open", 1)


@pytest.mark.parametrize(
    ("value", "above", "not_less"),
    [(1, "holds", "holds"), (0, "fails", "holds"), (-1, "fails", "fails")],
)
def test_seeds_that_are_all_equal_are_decided_by_their_side(value, above, not_less):
    here = samples([value, value])
    assert exceeds("", here).verdict == above
    assert exceeds("", here + 2, by=2.0).verdict == above
    assert not_below("", here).verdict == not_less
    assert within("", -here, -10, 10).verdict == not_less


def test_of_several_pairs_the_worst_counts():
    good, unclear, bad = [9, 9.01, 9.02], [1, -1, 2], [-9, -9.01, -9.02]
    assert exceeds("", samples(good, good)).verdict == "holds"
    assert exceeds("", samples(good, unclear)).verdict == "open"
    assert exceeds("", samples(good, unclear, bad)).verdict == "fails"
    assert exceeds("", samples(good, good)[:0]).verdict == "fails"


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_what_diverged_or_never_got_there_fails_and_says_so(num_seeds):
    values = samples(np.full(num_seeds, 9.0), np.full(num_seeds, np.nan))
    for made in (exceeds("", values), not_below("", values), within("", values, 9, 1)):
        assert made.verdict == "fails"
        assert "unknown" in made.evidence
        assert "diverged" in made.evidence
    one = samples([9.0, 9.0, np.nan])
    assert exceeds("", one).verdict == "fails"


def test_claims_that_are_not_random_have_no_seeds_and_are_never_open():
    values = xr.DataArray([1.0, 2.0], {"M": [1, 2]})
    made = [
        claim("", [True, True], "why"),
        claim("", [], "why"),
        below("", values, 1.5),
        increasing("", values, "M"),
        within("", values, 1.5, 0.5),
    ]
    assert [each.verdict for each in made] == ["holds", "fails", "fails", "holds", "holds"]
    assert {each.seeds for each in made} == {None}


def wrong_verdicts(differences, num_first, *, is_above):
    """The share of wrong verdicts when seeds are doubled until there is one.

    Args:
      differences: ``[repetitions, seeds]``.
      num_first: seeds at the first look.
      is_above: whether their true mean is above the margin, 0.
    """
    num_seeds, is_open, wrong = num_first, True, False
    while num_seeds <= differences.shape[1]:
        seen = xr.DataArray(differences[:, :num_seeds], dims=("repetition", "seed"))
        holds, fails = sides(estimate(seen), num_seeds, at_margin=False)
        wrong = wrong | (is_open & (fails if is_above else holds))
        is_open = is_open & ~holds & ~fails
        num_seeds *= 2
    return wrong.mean().item()


@pytest.mark.parametrize("num_first", [2, 3, 4])
@pytest.mark.parametrize("mean", [0.0, 0.05, 0.25, -0.25, 0.5, -0.5])
def test_looking_again_and_again_gives_few_wrong_verdicts(mean, num_first):
    """At most 5 % of 1,000 pairs of methods, whose difference is known in standard deviations."""
    differences = np.random.default_rng(0).normal(mean, 1.0, (1000, 64))
    assert wrong_verdicts(differences, num_first, is_above=mean > 0) <= 0.05


def test_three_standard_errors_alone_would_give_more(monkeypatch):
    """From the 3 seeds of Cho et al.'s tables, at the margin: why it is Student's quantile."""
    monkeypatch.setattr(scipy.special, "stdtrit", lambda freedom, share: 3.0)
    differences = np.random.default_rng(0).normal(0.0, 1.0, (10_000, 48))
    assert wrong_verdicts(differences, 3, is_above=False) > 0.05
