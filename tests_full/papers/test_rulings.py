"""Verdicts on made-up samples: thresholds, deciding parts, and error rates."""

import math

import numpy as np
import pytest

from fedjax_mm.papers.rulings import (
    LEVEL,
    alike,
    median_more,
    more,
    no_less,
    ruling,
)
from tests.papers.test_rulings import samples

KINDS = {
    "more": (lambda x: more(x), 0.0),
    "no_less": (lambda x: no_less(x, 1.0), -1.0),
    "alike": (lambda x: alike(x, 3.0), 3.0),
    "median_more": (lambda x: median_more(x, 0.0), 0.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_error_rates_stay_below_the_level(kind):
    """Verdicts err at most at the level on the margin, and decide correctly away from it."""
    part, margin = KINDS[kind]
    rng = np.random.default_rng(0)
    sign = -1 if kind == "alike" else 1  # `alike` holds below its margin

    def count(difference):
        drawn = margin + sign * difference + rng.normal(size=(1000, 20))
        found = [ruling("key", [each]).verdict for each in part(samples(*drawn))]
        return {name: found.count(name) for name in ("supported", "contradicted")}

    most = 1000 * LEVEL + 4 * math.sqrt(1000 * LEVEL)  # 4 standard errors above the level
    at_margin = count(0.0)
    assert max(at_margin.values()) <= most
    beyond, behind = count(1.5), count(-1.5)
    assert beyond["supported"] > 900
    assert behind["contradicted"] > 900
    assert beyond["contradicted"] == behind["supported"] == 0
    # 20 seeds rarely settle half a standard deviation, and hardly ever wrongly.
    assert count(0.5)["contradicted"] <= 1
    assert count(-0.5)["supported"] <= 1
