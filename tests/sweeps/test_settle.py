"""Claims judged while seeds are added: the points that run, kept results, and sentences."""

import numpy as np
import pytest
import xarray as xr

from fedjax_mm import claims, fedavg, mfa_rand, mfa_rr, settle, sweep
from fedjax_mm.metrics import final
from fedjax_mm.sweeps import Setup
from fedjax_mm.tasks import quadratic

TASK = quadratic(6, 2, mu=0.05)


def build(assignment, learning_rate):
    return Setup(TASK, fedavg(learning_rate, local_steps=2), assignment(6, 2))


AXES = {"assignment": [mfa_rand, mfa_rr], "learning_rate": [0.1, 0.2]}


def rates_differ(result):
    """The smaller rate is slower."""
    loss = final(result, "excess_loss")
    yield claims.more(loss.sel(learning_rate=0.1), loss.sel(learning_rate=0.2))


def is_open(result):
    """No number of seeds decides whether the mean of 1, -1, 1, ... is above 0."""
    loss = final(result, "excess_loss").sel(learning_rate=0.2).sum("assignment", skipna=False)
    yield claims.more(0 * loss + 1 - 2 * (loss.seed % 2))


def test_only_open_points_get_more_seeds_and_those_of_one_run():
    looks = []
    result, verdicts = settle(
        *(build, AXES, [rates_differ, is_open]),
        num_rounds=4,
        max_seeds=70,
        on_look=looks.append,
    )
    counts = np.isfinite(final(result, "excess_loss")).sum("seed")
    assert counts.values.tolist() == [[32, 64], [32, 64]]
    assert [each.look for each in looks] == [0, 1, 2]
    assert [each.verdict for each in verdicts.claims] == ["supported", "not settled"]
    decided, still = (each.parts for each in verdicts.claims)
    assert [part.seeds for part in decided + still] == [32, 32, 64]
    assert not verdicts.is_settled
    whole = sweep(build, AXES, num_rounds=4, num_seeds=64)
    rate = {"learning_rate": 0.2}
    xr.testing.assert_equal(result.sel(rate)[["excess_loss"]], whole.sel(rate)[["excess_loss"]])


def test_the_time_ends_before_a_block():
    result, verdicts = settle(build, AXES, is_open, num_rounds=4, max_seconds=0.0)
    assert (result.sizes["seed"], verdicts.look) == (16, 0)


def test_wrong_uses_are_refused():
    for how, error, words in (
        ({"num_seeds": 3}, TypeError, "num_seeds is what settle finds"),
        ({"max_seeds": 8}, ValueError, "max_seeds is 8, and a block has 16 seeds"),
    ):
        with pytest.raises(error, match=words):
            settle(build, AXES, is_open, num_rounds=4, **how)
    data = xr.DataArray(np.arange(40.0).reshape(2, 20), {"rule": ["A", "B"]}, dims=("rule", "seed"))
    one, other = data.isel(rule=0), data.isel(rule=1).assign_coords(seed=range(1, 21))
    with pytest.raises(ValueError, match="cannot be paired, because their seeds"):
        claims.more(one.assign_coords(seed=range(20)), other)
    with pytest.raises(ValueError, match="give one for each seed"):
        claims.at_most(one.mean("seed"), 1.0)
    with pytest.raises(ValueError, match="yields no comparison"):
        claims.judge(data.to_dataset(name="x"), lambda result: [])
    with pytest.raises(TypeError, match="give a function of a result"):
        claims.judge(data.to_dataset(name="x"), [3])


def test_all_comparisons_and_looks_share_the_level():
    rng = np.random.default_rng(0)
    data = xr.DataArray(rng.normal(size=(3, 40)), {"rule": ["A", "B", "C"]}, dims=("rule", "seed"))
    data += xr.DataArray([4.0, 1.0, 0.0], dims="rule")

    def ordered(result):
        """A is first."""
        yield claims.first(result.x, "rule", "A", by=0.5)

    def grows(result):
        yield claims.increases("rule", -result.x)

    one = claims.judge(data.to_dataset(name="x"), ordered)
    both = claims.judge(data.to_dataset(name="x"), [ordered, grows])
    later = claims.judge(data.to_dataset(name="x"), [ordered, grows], look=2)
    assert one.claims[0].levels == (0.05 / 4,) * 2
    assert both.claims[0].levels == (0.05 / 8,) * 2
    assert later.claims[1].levels == (0.05 / 8 / 12,) * 2
    widths = [np.diff(each.claims[0].intervals).sum() for each in (one, both, later)]
    assert widths == sorted(widths)
    assert [row[0] for row in both.rows] == [
        *("claim", "ordered: B", "ordered: C", "grows: rule from A to B", "grows: rule from B to C")
    ]
    assert one.sentences[0].startswith("A is first: B, by ")
    assert one.sentences[0].endswith(" (holds if above 0.5), 40 seeds, paired (95 % simultaneous).")
    assert "<td>ordered: B</td>" in one._repr_html_()


def test_intervals_end_where_verdicts_change():
    """Of means and of medians: a margin inside the interval is not decided, one outside is."""
    x = xr.DataArray(np.random.default_rng(1).exponential(size=60), dims="seed")
    for of in ("mean", "median"):
        [test] = claims.more(x, of=of)
        low, high = test.interval(0.01)
        assert low < test.center < high
        for by, word in (
            (low - 1e-6, "supported"),
            (low + 1e-6, "not settled"),
            (high - 1e-6, "not settled"),
            (high + 1e-6, "contradicted"),
        ):
            [moved] = claims.more(x, by=by, of=of)
            assert moved.verdict((0.01, 0.01), 0.01) == word, (of, by)
