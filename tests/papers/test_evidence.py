"""The evidence for twelve verdicts, recomputed by NumPy from the stored results alone.

The twelve are the first of all verdicts with seeds and a stored result, in the order of the SHA-256
of `DIGEST` followed by the item and the key. `DIGEST` is that of a commit before the rules were
made.
"""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from scipy.stats import kendalltau
from scipy.stats import t as student

DIGEST = "4306cb3c4694fb093c524af25f44a4a4d9e41019"
MEANS = [
    *("maxfl-table1/low-appeal", "cb-fig1/percent", "maxfl-table2/mw-fed-susceptible"),
    *("theory-maxfl/partial", "maxfl-table3/at-least-10", "maxfl-table5/loses-very-little"),
    *("cb-fig1/cohort-size", "theory-mfa-growing/order-one-over-t"),
    *("maxfl-flexible/few-data-points", "maxfl-flexible/even-more-imperative"),
]
MEDIANS = ["mfa-fig6b/sub-linear", "mfa-fig6a/increases"]
FOLDER = Path(__file__).parents[2] / "docs" / "summaries"
SHARED = {"maxfl-fig4": "maxfl-fig3", "maxfl-table5": "maxfl-table3", "cb-fig3": "cb-fig2"}
LEVEL = 0.00134990


def result_of(item):
    return FOLDER / f"{SHARED.get(item, item)}.nc"


def statements():
    """The statements with seeds whose results are stored, by item and key."""
    return {
        f"{path.stem}/{each['key']}": each
        for path in sorted(FOLDER.glob("*.json"))
        if result_of(path.stem).exists()
        for each in json.loads(path.read_text())["statements"]
        if any(part["seeds"] for part in each["parts"])
    }


def metric(item, name, method, attackers=0):
    """The final values of one method in percent, ``[seeds]``."""
    with xr.open_dataset(result_of(item)) as data:
        place = list(data["algorithm"].values).index(method)
        return 100 * data[name].values[place, attackers, 0, 0, :, -1]


def slope(y, x):
    """Of least squares over the first axis."""
    x = x - x.mean()
    return np.tensordot(x, y, (0, 0)) / (x**2).sum()


def rounds(name, target):
    """The first round at which runs of Figure 1 reach a target, ``[C, percent, seed]``."""
    with xr.open_dataset(result_of("cb-fig1")) as data:
        accuracy = data[name].transpose("C", "percent", "seed", "round").values
        C = data["C"].values
    met = accuracy >= np.float32(target)
    return np.where(met.any(-1), met.argmax(-1), np.nan), np.log2(C)


def means(name):
    """For each part its samples, the margin, the side of it, and whether equality is enough."""
    item, key = name.split("/")
    if key == "low-appeal":
        methods = ("FedProx", "SCAFFOLD", "PerFedAvg", "qFFL")
        return [(100 - metric(item, "appeal", each), 50, 1) for each in methods]
    if item == "maxfl-flexible":
        with xr.open_dataset(result_of(item)) as data:
            names = ("accuracy", "unseen_accuracy")
            both = [100 * data[each].values.squeeze()[..., -1] for each in names]
        if key == "few-data-points":
            return [(row, 0, 1) for flexible, full in both for row in (full - flexible)[1:5]]
        leads = [accuracy[:, -1:] - accuracy[:, :-1] for accuracy in both]
        return [(row, 0, 1) for flexible, full in leads for row in flexible - full]
    if key == "percent":
        found, _ = rounds("test_accuracy", 0.95)
        return [(slope(found.mean(0), np.arange(5.0)), 0, -1)]
    if key == "cohort-size":
        found, doublings = rounds("published_accuracy", 0.99)
        return [(each, 0, -1) for each in slope(found, doublings)]
    if key == "mw-fed-susceptible":
        both = ("accuracy", "unseen_accuracy")
        values = [[metric(item, each, "MW-Fed", at) for at in range(3)] for each in both]
        return [(of[0] - of[at], 5, 1) for of in values for at in (1, 2)]
    if key == "at-least-10":
        methods = ("FedAvg", "FedProx", "SCAFFOLD", "PerFedAvg", "MW-Fed")
        both = ("appeal", "unseen_appeal")
        return [
            (metric(item, x, "MaxFL") - metric(item, x, y), 10, 1) for x in both for y in methods
        ]
    if key == "loses-very-little":
        methods = ("FedAvg", "FedProx", "PerFedAvg", "MW-Fed")
        both = {"unseen_preferred_accuracy": -0.1, "unseen_appeal": 0}
        return [
            (metric(item, x, "MaxFL") - metric(item, x, y), margin, 1)
            for x, margin in both.items()
            for y in methods
        ]
    with xr.open_dataset(result_of(item)) as data:
        if key == "partial":
            here = data.sel(participation="partial").transpose("E", "T", "seed", ...)
            ratio = here["mean_squared"].values / here["bound"].values[..., None]
            return [(1 - row, 0, 1) for row in ratio.reshape(-1, ratio.shape[-1])]
        distance = data["distance"].sel(sample="growing")
        distance = distance.transpose("num_models", "local_steps", "left_out", "seed", "round")
        M, t = data["num_models"].values[:, None], data["round"].values + 1
        about = json.loads((FOLDER / f"{item}.json").read_text())
        time = t / M + about["measured"]["data_vars"]["gamma"]["data"]
        product = (distance.values * time[:, None, None, None]).reshape(-1, 50, len(t))
        end = len(t)
        third = product[..., end // 2 : 3 * end // 4].mean(-1)
        last = product[..., 3 * end // 4 :].mean(-1)
        growth = (last - third) / third.mean(1, keepdims=True)
        return [(row, 0.05, -1) for row in growth]


def one_mean(samples, margin, side):
    """The mean, its error, and the p-values for and against: the mean is beyond the margin."""
    size, mean = len(samples), samples.mean()
    error = samples.std(ddof=1) / np.sqrt(size)
    if error < 1e-9:
        holds = side * (mean - margin) > 0
        return mean, error, float(not holds), float(holds)
    t, z = side * (mean - margin) / error, (samples - mean) / samples.std()
    p_values = []
    for sign in (1, -1):
        reduced = sign * t - 5 * max(0, -sign * side * (z**3).mean() + 40 / size) / np.sqrt(size)
        p_values.append(student.sf(reduced, size - 1) if size >= 20 else 1.0)
    return mean, error, *p_values


def combined(statement, verdicts):
    """Checks the parts' verdicts and that of the whole."""
    against = "not reproduced" if statement["reading"] else "contradicted"
    words = [{"against": against, "for": "supported"}.get(each, "not settled") for each in verdicts]
    assert [part["verdict"] for part in statement["parts"]] == words
    order = (against, "not settled", "supported")
    assert statement["verdict"] == next(each for each in order if each in words)


@pytest.mark.parametrize("name", MEANS)
def test_means_and_their_verdicts(name):
    statement, verdicts = statements()[name], []
    parts = means(name)
    for part, (samples, margin, side) in zip(statement["parts"], parts, strict=True):
        mean, error, supports, contradicts = one_mean(samples, margin, side)
        middle = re.search(r" \(median (.*)\)", part["evidence"])
        printed = part["evidence"].partition(" (")[0].split(" ± ")
        digits = len(printed[0].partition(".")[2])
        assert [float(each) for each in printed] == pytest.approx(
            [mean, error], abs=0.51 / 10**digits
        )
        assert bool(middle) == (abs(mean - np.median(samples)) > 1.01 * error > 1e-9)
        if middle:
            assert float(middle[1]) == pytest.approx(np.median(samples), abs=0.51 / 10**digits)
        is_against = contradicts < LEVEL / len(parts)
        verdicts.append("for" if supports < LEVEL else "against" * bool(is_against))
        assert part["margin"].split()[-1] == f"{margin:g}"
    combined(statement, verdicts)


def gains(item, num_rounds, most):
    """M T_1 / T_M for test accuracy, ``[source, algorithm, M > 1, seed]``, and the highest of M."""
    with xr.open_dataset(result_of(item)) as data:
        accuracy = data["test_accuracy"].transpose(
            "source", "algorithm", "num_models", "seed", "round", "model"
        )
        at, M = accuracy["round"].values, accuracy["num_models"].values
        accuracy = accuracy.values
    target = accuracy[:, :, M == 1][..., at == num_rounds, 0]
    is_there = np.isnan(accuracy) | (accuracy >= target[..., None])
    is_there &= ~np.isnan(accuracy[..., :1]) & (at > 0)[:, None]
    together = is_there.all(-1)
    first = np.where(together.any(-1), at[together.argmax(-1)], np.nan)
    return (M[:, None] * num_rounds / first)[:, :, M > 1], M[M > 1] * num_rounds / most


def signs(parts, is_above, is_below):
    """The verdicts of sign tests: at least k of n tosses, with probability below the level."""
    from scipy.stats import binom

    for part, above, below in zip(parts, is_above, is_below, strict=True):
        high, low, size = above.sum(), below.sum(), len(above)
        assert f"{high} of {size} seeds" in part["evidence"]
        is_against = binom.sf(low - 1, size, 0.5) < LEVEL / len(parts)
        yield "for" if binom.sf(high - 1, size, 0.5) < LEVEL else "against" * bool(is_against)


def test_gains_that_increase_below_proportion():
    """A target that was missed counts as reached at the end: the largest possible gain."""
    statement = statements()["mfa-fig6b/sub-linear"]
    found, highest = gains("mfa-fig6b", 70, 210)
    M = np.array([2, 4, 5, 8, 10, 16, 20])
    assert not np.isnan(found[:, :, M < 8]).any()  # so that the largest gain has the largest slope
    whole = np.log(np.where(np.isnan(found), highest[:, None], found))
    exponents = slope(np.moveaxis(whole, 2, 0), np.log(M)).reshape(-1, found.shape[-1])
    combined(statement, signs(statement["parts"], exponents < 1, exponents > 1))


def test_gains_that_increase():
    """Kendall's tau over all M, with a gain of 1 at M = 1, of seeds that reached all targets."""
    statement = statements()["mfa-fig6a/increases"]
    found, _ = gains("mfa-fig6a", 70, 1400)
    M = np.array([1, 2, 4, 5, 8, 10, 16, 20])
    taus = np.array(
        [
            [
                kendalltau(M, [1, *row]).statistic if np.isfinite(row).all() else np.nan
                for row in rows
            ]
            for rows in np.moveaxis(found, 2, -1).reshape(-1, found.shape[-1], 7)
        ]
    )
    combined(statement, signs(statement["parts"], taus > 0.5, taus < 0.5))


def test_the_twelve_are_those_that_are_drawn():
    def digest(name):
        return hashlib.sha256((DIGEST + name).encode()).hexdigest()

    assert sorted(sorted(statements(), key=digest)[:12]) == sorted(MEANS + MEDIANS)
