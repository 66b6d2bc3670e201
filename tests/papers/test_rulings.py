"""Verdicts on made-up samples: thresholds, deciding parts, and error rates."""

import math

import numpy as np
import pytest
import xarray as xr
from scipy.stats import binom, norm
from scipy.stats import t as student

from fedjax_mm.claims import at_least, fact, less, more, one_draw, welch, within
from fedjax_mm.claims.evidence import LEVEL
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.rulings import check, compare, finding, ruling, untested
from fedjax_mm.papers.schema import Published, Statement

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


def quantile(num_seeds, level=LEVEL):
    """The t at which a sample without skewness decides: Student's, and room for a skewed law."""
    scale = (1 + 2 * norm.isf(level) ** 2) / 19  # 1 at 3 standard errors
    return student.isf(level, num_seeds - 1) + scale * 5 * 40 / num_seeds**1.5


@pytest.mark.parametrize("num_seeds", [20, 24, 64, 1000])
def test_verdicts_change_at_the_quantile(num_seeds):
    beyond = quantile(num_seeds)
    turns = {1.01: "supported", 0.99: "not settled", -0.99: "not settled", -1.01: "contradicted"}
    for factor, expected in turns.items():
        here = samples(with_mean(factor * beyond, num_seeds))
        parts = more(here), more(here + 5, by=5.0), at_least(here - 2, -2.0), less(-here)
        for part in parts:
            made = ruling("key", part)
            assert (made.verdict, made.parts[0].seeds) == (expected, num_seeds)


def test_margins_are_told():
    here = samples(with_mean(99, 20))
    parts = more(here), less(here, by=5.0), at_least(here, -2.0), within(here, margin=3.0)
    parts += more(here, by=1.0, of="median"), less(here, by=1.0, of="median")
    words = ("above 0", "below 5", "at least -2", "within 3", "median above 1", "median below 1")
    assert tuple(ruling("key", part).parts[0].margin for part in parts) == words


@pytest.mark.parametrize("num_seeds", [2, 5, 19])
def test_fewer_than_twenty_seeds_decide_no_mean(num_seeds):
    far = samples(with_mean(1e6, num_seeds))
    for part in (more(far), more(-far), within(far, margin=1.0), at_least(far, -1.0)):
        assert verdict(part) == "not settled"
    assert ruling("key", more(far)).parts[0].leans == "for"


def test_a_longer_tail_towards_the_margin_asks_for_more():
    """Of two mirrored samples only the one whose tail points away from the margin decides."""
    tail = np.random.default_rng(0).exponential(size=40)
    tail = (tail - tail.mean()) / tail.std(ddof=1) * np.sqrt(40)
    t = quantile(40) + 1
    assert verdict(more(samples(t + tail))) == "supported"
    assert verdict(more(samples(t - tail))) == "not settled"


@pytest.mark.parametrize("side", [-1, 1])
def test_alike_splits_the_level_over_two_sides(side):
    holds, fails = quantile(24), quantile(24, LEVEL / 2)
    turns = {1.01 * holds: "supported", 0.99 * holds: "not settled"}
    turns |= {-0.99 * fails: "not settled", -1.01 * fails: "contradicted"}
    for room, expected in turns.items():
        here = samples(side * (200 - with_mean(room, 24)))
        assert verdict(within(here, margin=200.0)) == expected


@pytest.mark.parametrize("num_parts", [2, 6])
def test_a_part_contradicts_at_its_share_of_the_level(num_parts):
    fine = [with_mean(99, 24)] * (num_parts - 1)
    edge = quantile(24, LEVEL / num_parts)
    for factor, expected in ((1.01, "contradicted"), (0.99, "not settled")):
        test = more(samples(*fine, with_mean(-factor * edge, 24)))
        made = ruling("key", test)
        assert made.verdict == expected
        assert [part.verdict for part in made.parts] == [*["supported"] * (num_parts - 1), expected]
        alone = ruling("key", test, is_shared=False).parts[-1].verdict
        assert alone == "contradicted"  # printed numbers do not share the level
    assert made.parts[-1].name == f"pair {num_parts - 1}"


def test_a_tie_in_every_seed_is_decided():
    level = samples([0, 0, 0])
    assert verdict(at_least(level, -0.0)) == "supported"
    assert verdict(within(level, margin=0.0)) == "supported"
    assert verdict(at_least(level - 2, -2.0)) == "supported"
    assert verdict(more(level)) == "contradicted"
    assert verdict(more(level + 10, by=10.0)) == "contradicted"
    assert verdict(more(level, by=0.0, of="median")) == "contradicted"
    # 0.3 - 0.1 and 0.2 differ in the last digit.
    assert verdict(at_least(samples([0.1 - 0.3] * 3), -0.2)) == "supported"
    assert verdict(more(samples([1e-3] * 3))) == "supported"


@pytest.mark.parametrize("lost", [NAN, INF, -INF])
def test_samples_that_are_not_finite_are_not_tested(lost):
    here = samples([-9, -8, lost, -9, -8, -9])
    for part in (more(here), at_least(here, -1.0), within(here, margin=1.0)):
        made = ruling("key", part)
        assert made.verdict == "not tested"
        assert "1 of 6 seeds" in made.parts[0].evidence
    # Another part that is contradicted still decides.
    assert verdict(more(here), more(samples(with_mean(-99, 24)))) == "contradicted"
    assert verdict(more(here), more(samples(with_mean(99, 24)))) == "not tested"


def test_one_seed_settles_nothing_and_without_parts_nothing_is_tested():
    for part in (
        more(samples([9])),
        at_least(samples([9]), -1.0),
        within(samples([9]), margin=1.0),
    ):
        assert verdict(part) == "not settled"
    assert verdict() == "not tested"
    assert verdict([]) == "not tested"


def test_the_sign_test_counts_seeds_on_each_side_of_the_margin():
    for above, expected in ((16, "supported"), (15, "supported"), (14, "not settled")):
        here = samples([2.0] * above + [0.5] * (16 - above))
        assert verdict(more(here, by=1.0, of="median")) == expected
        assert verdict(less(-here, by=-1.0, of="median")) == expected
        mirrored = verdict(more(2 - here, by=1.0, of="median"))
        assert mirrored == {"supported": "contradicted"}.get(expected, expected)
    assert binom.sf(14, 16, 0.5) < LEVEL < binom.sf(13, 16, 0.5)


def test_an_unreached_target_counts_if_its_limit_decides():
    here = samples([NAN] * 3 + [2.0] * 13)
    assert verdict(more(here, by=1.0, of="median")) == "not tested"
    assert verdict(more(here, by=1.0, unreached=1.5, of="median")) == "not tested"
    assert verdict(more(here, by=1.0, unreached=0.5, of="median")) == "not settled"
    assert verdict(more(samples([NAN] * 16), by=1.0, unreached=0.5, of="median")) == "contradicted"
    assert verdict(more(samples([NAN] * 16), by=1.0, unreached=1.5, of="median")) == "not tested"
    # One unreached seed does not overrule fifteen others.
    assert verdict(more(samples([NAN] + [2.0] * 15), by=1.0, of="median")) == "supported"
    limits = xr.DataArray([0.5, 1.5], {"pair": ["pair 0", "pair 1"]})
    rows = ruling(
        "key", more(samples([NAN] * 16, [NAN] * 16), by=1.0, unreached=limits, of="median")
    ).parts
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
    parts = [part.model_dump() for part in made.parts]
    return Statement(**about, verdict=made.verdict, parts=parts)


@pytest.mark.parametrize(
    ("mean", "level", "side"),
    [(2.9, LEVEL, "towards it"), (-2.9, LEVEL / 2, "against it"), (0.5, LEVEL, "to neither side")],
)
def test_the_seeds_that_are_named_would_settle_it(mean, level, side):
    """Of two parts each contradicts at half of the level."""
    made = ruling("key", more(samples(with_mean(mean, 24), with_mean(99, 24))))
    needed = statement(made).needed
    effect = abs(mean) / np.sqrt(24)
    assert effect * np.sqrt(needed) >= quantile(needed, level)
    assert effect * np.sqrt(needed - 1) < quantile(needed - 1, level)
    assert statement(made).remains == f"about {needed} seeds; the evidence leans {side}"
    hopeless = ruling("key", more(samples(with_mean(1e-3, 24))))
    assert statement(hopeless).remains.startswith("more than 10,000 seeds")


def test_one_of_two_sides_contradicts_at_half_of_the_level():
    def needed(part):
        return statement(ruling("key", part)).needed

    here = samples(with_mean(2.0, 12))
    assert needed(within(here + 7, margin=7.0)) > needed(more(-here))
    assert needed(within(here - 7, margin=7.0)) == needed(more(here))


def test_too_few_seeds_tell_neither_an_error_nor_how_many_are_needed():
    made = statement(ruling("key", more(samples(with_mean(1.5, 4)))))
    assert made.needed is None
    assert made.remains == "at least 5 seeds, from which to tell how many are needed"
    assert "±" in made.parts[0].evidence
    two = ruling("key", more(samples([1.0, 3.0]))).parts[0].evidence
    assert two == "2.00"
    mean, error = estimate(samples([1.0, 3.0]))
    assert (mean.item(), bool(np.isnan(error.item()))) == (2.0, True)
    assert np.isfinite(estimate(samples([1.0, 3.0, 4.0])).error.item())


@pytest.mark.parametrize(
    ("above", "lost", "expected"),
    [(18, 1, "not settled"), (18, 5, "not tested"), (3, 5, "not tested"), (6, 1, "not settled")],
)
def test_an_unreached_target_matters_only_if_it_could_decide(above, lost, expected):
    here = samples([2.0] * above + [0.5] * (24 - above - lost) + [NAN] * lost)
    assert verdict(more(here, by=1.0, of="median")) == expected


@pytest.mark.parametrize(
    ("kind", "yes", "no"), [(check, "passed", "defect"), (finding, "holds", "does not hold")]
)
def test_a_defect_and_a_finding_are_different_words(kind, yes, no):
    outcomes = {True: yes, False: no, None: "undecided", NAN: "undecided"}
    assert all(kind("text", passed).outcome == found for passed, found in outcomes.items())
    assert kind("text", xr.DataArray([True, False])).outcome == no
    assert kind("text", np.array([1.0, NAN])).outcome == "undecided"
    assert kind("text", np.zeros(0, bool)).outcome == "undecided"
    lead = samples(with_mean(99, 20))
    assert kind("text", more(lead)).outcome == yes
    assert kind("text", more(-lead)).outcome == no
    assert kind("text", more(samples(with_mean(0, 5)))).outcome == "undecided"
    assert kind("text", more(lead)).evidence == "pair 0: 99.00 ± 1.00"


def test_a_comparison_is_ahead_level_or_behind():
    far, near, open_ = with_mean(99, 20), with_mean(0, 20, 0.1), with_mean(1, 20)
    words = {"ahead": far, "behind": -far, "level": near, "undecided": open_}
    for word, one in words.items():
        assert compare("text", samples(one), 1.0).outcome == word
        assert compare("text", samples(one, one), 1.0).outcome == word
    mixed = compare("text", samples(far, -far), 1.0, ".0f")
    assert mixed.outcome == "undecided"
    assert mixed.evidence == "pair 0: 99 ± 1 (ahead); pair 1: -99 ± 1 (behind)"
    medians = compare("text", samples(-far[:10]), 1.0, ".0f", "median")
    assert medians.outcome == "behind"
    assert medians.evidence.endswith("10 of 10 seeds below -1")


def test_six_comparisons_with_equal_methods_rarely_contradict():
    """The parts of a statement share its level."""
    rows = more(samples(*np.random.default_rng(1).normal(size=(6000, 20))))
    found = [verdict(rows[start : start + 6]) for start in range(0, 6000, 6)]
    assert found.count("contradicted") <= 1000 * LEVEL + 4 * math.sqrt(1000 * LEVEL)
    assert found.count("supported") == 0


def test_repeated_tests_while_doubling_seeds_rarely_err():
    """At the margin, 0.8 % of repetitions from 20 to 640 seeds err on either side."""
    drawn = np.random.default_rng(2).normal(size=(1000, 640))
    looks = [more(samples(*drawn[:, : 20 * 2**k])) for k in range(6)]
    wrong = sum(
        any(verdict([look]) != "not settled" for look in of_one)
        for of_one in zip(*looks, strict=True)
    )
    assert 1 <= wrong <= 8 + 4 * math.sqrt(8)


def test_words_depend_on_what_is_judged():
    about = {"key": "key", "where": "section 5"}
    words = {
        "contradicted": Published(**about),
        "slip in print": Published(**about, slip="section 6"),
        "not reproduced": Published(**about, reading="flips in training"),
        "differs": Published(**about, numbers=2),
    }
    for word, published in words.items():
        assert published.word("contradicted") == word
        number = {"supported": "agrees", "not settled": "too noisy", "not tested": "not run"}
        for verdict, other in number.items():
            assert published.word(verdict) == (other if published.numbers else verdict)


def test_printed_means_have_an_error_of_their_own():
    """Ours are at 50 +- 0.1, and three runs with a printed sd of 0.3 have an error of 0.17."""
    ours = samples(*[with_mean(50, 20, 0.1)] * 4)
    printed = xr.DataArray([52, 60, 52, np.nan], ours.pair.coords, dims="pair")
    spread = xr.DataArray([0.3, 0.3, 3.0, 0.3], ours.pair.coords, dims="pair")
    found = ruling("key", welch(ours, printed, spread, 3, 5.0), is_shared=False)
    assert [part.verdict for part in found.parts] == ["supported", "contradicted", "not settled"]
    assert found.parts[0].evidence == "50.0 ± 0.1, printed 52.0 with sd 0.3"
    both = np.hypot(0.1, 0.3 / np.sqrt(3))
    freedom = both**4 / (0.1**4 / 19 + 0.03**2 / 2)
    test = welch(ours, printed, spread, 3, 5.0)[0]
    assert test.supports == pytest.approx(student.sf((5 - 2) / both, freedom))


def test_a_printed_draw_lies_among_ours_or_not():
    ours = samples(with_mean(50, 24, 1.0))  # draws with a spread of 4.9 points
    reach = np.sqrt(24) * np.sqrt(1 + 1 / 24)
    edge, far = student.isf(0.025, 23) * reach, student.isf(LEVEL / 2, 23) * reach
    turns = {0.99 * edge: "supported", 1.01 * edge: "not settled", 1.01 * far: "contradicted"}
    for off, expected in turns.items():
        assert verdict(one_draw({"": ours}, 50 + off, 20.0)) == expected
        assert verdict(one_draw({"": ours}, 50 - off, 20.0)) == expected
    # An interval that is too wide says nothing, and under two readings a number agrees with both.
    assert verdict(one_draw({"": ours}, 50.0, 0.99 * edge)) == "not settled"
    assert verdict(one_draw({"A": ours, "B": ours + 99}, 50.0, 20.0)) == "not settled"
    assert verdict(one_draw({"": ours * NAN}, 50.0, 20.0)) == "not tested"
