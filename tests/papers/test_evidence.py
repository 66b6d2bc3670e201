"""The evidence for ten verdicts, recomputed by NumPy from the stored results alone.

The ten are the first of all verdicts with seeds and a stored result, in the order of the SHA-256 of
`DIGEST` followed by the item and the key. `DIGEST` is that of a commit before this file.
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

DIGEST = "ff09419b0995f78a7e37fcd025b28a250091374a"
DRAWN = [
    *("cb-fig3/means", "mfa-fig6b/increases", "mfa-fig6b/sub-linear"),
    *("maxfl-table3/above-perfedavg", "mfa-fig7b/above-one", "maxfl-table3/row-fedavg"),
    *("maxfl-table1/row-perfedavg", "maxfl-table1/low-appeal", "mfa-fig6b/fedavg-accuracy"),
    "maxfl-table3/row-maxfl",
]
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


def metric(item, name, method):
    """The final values of one method in percent, ``[seeds]``."""
    with xr.open_dataset(result_of(item)) as data:
        return 100 * data[name].values[list(data["algorithm"].values).index(method), 0, 0, 0, :, -1]


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
    rounds = np.where(together.any(-1), at[together.argmax(-1)], np.nan)
    return (M[:, None] * num_rounds / rounds)[:, :, M > 1], M[M > 1] * num_rounds / most


def one_mean(samples, margin, side, tie=False):
    """The mean, its error, and the p-values for and against: the mean is beyond the margin."""
    mean, error = samples.mean(), samples.std(ddof=1) / np.sqrt(len(samples))
    room = side * (mean - margin)
    if error < 1e-9:  # all seeds are equal, and "within" holds at the margin
        holds = tie if abs(room) < 1e-6 else room > 0
        return mean, error, float(not holds), float(holds)
    t = room / error
    return mean, error, student.sf(t, len(samples) - 1), student.sf(-t, len(samples) - 1)


def within(samples, margin):
    """As `one_mean`: the mean is at most the margin from 0, by two tests."""
    low, high = (one_mean(samples, -side * margin, side, tie=True) for side in (1, -1))
    return *low[:2], max(low[2], high[2]), min(1, 2 * min(low[3], high[3]))


def published(item, method):
    rows = json.loads((FOLDER / f"{item}.json").read_text())["paper"]["values"]["fmnist"]
    return rows[method]


def means(name):
    """The tests of means over seeds, one for each part."""
    item, key = name.split("/")
    if key == "low-appeal":
        methods = ("FedProx", "SCAFFOLD", "PerFedAvg", "qFFL")
        return [one_mean(100 - metric(item, "appeal", each), 50, 1) for each in methods]
    if key == "above-perfedavg":
        both = [
            metric(item, each, "MaxFL") - metric(item, each, "PerFedAvg")
            for each in ("appeal", "unseen_appeal")
        ]
        return [one_mean(each, 0, 1) for each in both]
    if key == "fedavg-accuracy":
        with xr.open_dataset(result_of(item)) as data:
            first = data.isel(num_models=0, model=0).sel(algorithm="MFA-RR", round=70)
            off = [
                100 * first[f"{part}_accuracy"].values - printed
                for part, printed in (("train", 42.7), ("test", 42.8))
            ]
        return [within(row, 5) for part in off for row in part]
    method = {"row-fedavg": "FedAvg", "row-perfedavg": "PerFedAvg", "row-maxfl": "MaxFL"}[key]
    names = ("accuracy", "appeal", "unseen_accuracy", "unseen_appeal")
    names = names if item == "maxfl-table1" else names[1::2]
    pairs = zip(names, published(item, method), strict=True)
    return [within(metric(item, one, method) - printed, 5) for one, printed in pairs]


@pytest.mark.parametrize(
    "name",
    [x for x in DRAWN if x.split("/")[0].startswith("maxfl")] + ["mfa-fig6b/fedavg-accuracy"],
)
def test_means_and_their_verdicts(name):
    statement = statements()[name]
    tests = means(name)
    verdicts = []
    for part, (mean, error, supports, contradicts) in zip(statement["parts"], tests, strict=True):
        printed = [float(each) for each in part["evidence"].split(" ± ")]
        assert printed == pytest.approx([mean, error], abs=0.0501)  # one decimal
        contradicted = contradicts < LEVEL / len(tests)
        verdicts.append(
            "supported" if supports < LEVEL else "contradicted" if contradicted else "not settled"
        )
        assert part["verdict"] == verdicts[-1]
    order = ("contradicted", "not settled", "supported")
    assert statement["verdict"] == next(each for each in order if each in verdicts)


def counts(statement):
    """Median and seeds above the margin of each part, as printed."""
    texts = (part["evidence"] for part in statement["parts"])
    return [re.match(r"median (\S+), (\d+) of \d+ seeds above", text).groups() for text in texts]


def test_gains_above_one():
    found, _ = gains("mfa-fig7b", 200, 4000)
    rows = found.reshape(-1, found.shape[-1])
    printed = counts(statements()["mfa-fig7b/above-one"])
    for row, (middle, above) in zip(rows, printed, strict=True):
        assert middle == f"{np.median(np.where(np.isnan(row), -np.inf, row)):.2f}"
        assert int(above) == (row > 1).sum()
        assert int(above) >= 15  # P(X >= 15) = 0.026 % of 16 tosses


def test_gains_that_increase_below_proportion():
    found, highest = gains("mfa-fig6b", 70, 210)
    M = np.array([2, 4, 5, 8, 10, 16, 20])
    # A target that was missed counts as reached at the end: the largest possible gain.
    lost = 1 - np.where(np.isnan(found), highest[:, None], found) / M[:, None]
    lost = lost.mean(2).reshape(-1, 12)
    printed = counts(statements()["mfa-fig6b/sub-linear"])
    assert [int(above) for _, above in printed] == (lost > 0).sum(1).tolist()
    # Kendall's tau over all M, with a gain of 1 at M = 1, for the seeds that reached all targets.
    printed = counts(statements()["mfa-fig6b/increases"])
    for rows, (_, above) in zip(found.reshape(-1, *found.shape[2:]), printed, strict=True):
        whole = rows[:, ~np.isnan(rows).any(0)].T
        taus = [kendalltau([1, *M], [1, *row]).statistic for row in whole]
        assert 0 <= int(above) - np.sum(np.array(taus) > 0.5) <= 12 - len(whole)


def test_means_of_best_accuracies():
    with xr.open_dataset(result_of("cb-fig3")) as data:
        curves, C = data["published_accuracy"].transpose("C", "seed", "round"), data["C"].values
        at = curves["round"].values
        best = [curves.values[i][:, (at > 0) & (at <= 60 // c)].max(1) for i, c in enumerate(C)]
    for part, values in zip(statements()["cb-fig3/means"]["parts"], best, strict=True):
        ours, hers = (
            text.split(" ± ") for text in part["evidence"].replace(", hers ", " | ").split(" | ")
        )
        error = values.std(ddof=1) / np.sqrt(len(values))
        assert ours == [f"{values.mean():.4f}", f"{error:.4f}"]
        # Within one of her standard deviations, ten of her errors, by 3 errors of the difference.
        room = 10 * float(hers[1]) - abs(values.mean() - float(hers[0]))
        assert room > 3 * np.hypot(error, float(hers[1]))
        assert part["verdict"] == "supported"


def test_the_ten_are_those_that_are_drawn():
    def digest(name):
        return hashlib.sha256((DIGEST + name).encode()).hexdigest()

    assert sorted(statements(), key=digest)[:10] == DRAWN
