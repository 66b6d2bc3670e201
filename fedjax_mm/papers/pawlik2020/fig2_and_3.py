"""Figures 2 and 3: best accuracies of cohorts of several sizes at constant cost, section 3.2."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field

from fedjax_mm import plots
from fedjax_mm.data.partition import Parts
from fedjax_mm.experiments.fields import Count
from fedjax_mm.experiments.tasks import IIDShare, PartitionConfig
from fedjax_mm.papers.claims import Claim, claim, estimate, trend, within
from fedjax_mm.papers.item import Item, published
from fedjax_mm.papers.pawlik2020.clients import Increasing, Trained
from fedjax_mm.papers.tables import Table, cells, rows
from fedjax_mm.results.labels import describe
from fedjax_mm.sweeps.execute import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.sweeps.until import Until
from fedjax_mm.tasks.classification import Classification

_EVALUATIONS = {"all images": "test_accuracy", "as-published": "published_accuracy"}
_LARGEST_ERROR = 0.017  # of the author's means: standard deviations up to 0.17, 100 seeds


class CohortAccuracy(Trained):
    """Settings of Figures 2 and 3: R = c / C rounds and batches of B = u / C images."""

    paper_sizes = (5, 10, 15, 20, 30)
    digits_sizes = (2, 4, 6, 8, 12)

    num_seeds: Annotated[Count, Field(ge=2)] = 10
    contacts: Annotated[Increasing[Count], Field(min_length=1)] | None = None
    """c = R C, a run for the largest, whose first rounds are the runs of the others: 60, and 120
    with doubled round limits; 120 and 240 with the digits, whose clients are few."""
    updates: Count | None = None
    """B C: 300; 120 with the digits."""
    local_epochs: Count = 1
    partition: PartitionConfig = IIDShare(name="iid_share", percent=80.0)

    def deal(self, labels: np.ndarray, seed: int) -> list[Parts]:
        """Returns the partition's deal."""
        return [self.partition.deal(labels, self.clients, seed)]

    @property
    def num_updates(self) -> int:
        """B C."""
        return self.updates or (120 if self.directory is None else 300)

    @property
    def costs(self) -> list[dict[str, int]]:
        """Contacts and updates, for each round limit."""
        default = (120, 240) if self.directory is None else (60, 120)
        return [{"contacts": c, "updates": self.num_updates} for c in self.contacts or default]


def run(config: CohortAccuracy, execution: Execution | None = None) -> xr.Dataset:
    """Returns accuracies after every round, scored in both ways, over ``(C, seed, round)``."""
    contacts = config.costs[-1]["contacts"]

    def build(C: int, task: Classification, seed_number: Any) -> Setup:
        return config.setup(C, task, seed_number, config.num_updates // C)

    until, rounds = Until("client_updates", at_least=contacts), contacts // config.sizes[0]
    result = config.train(build, {}, num_rounds=rounds, until=until, execution=execution)
    return result[list(_EVALUATIONS.values())]


def published_means(config: CohortAccuracy) -> xr.DataArray:
    """Returns the author's mean best accuracies by C, NaN if these are not the author's trials."""
    contacts, updates = config.costs.values()
    same = {"learning_rate", "local_epochs", "partition"}
    is_his = config.model_dump(include=same) == CohortAccuracy().model_dump(include=same)
    is_his &= config.directory is not None and config.clients == 100 and updates == 300
    by_cost = published(__name__, "cb-fig2")["mean best accuracy of 100 seeds by R C and C"]
    known = by_cost.get(str(contacts), {}) if is_his else {}
    return xr.DataArray([known.get(str(C), np.nan) for C in config.sizes], {"C": config.sizes})


def measure(result: xr.Dataset, config: CohortAccuracy) -> xr.Dataset:
    """Returns best accuracies after any round, over ``(evaluation, C, seed)``, and their means."""
    both = result[list(_EVALUATIONS.values())].sel(round=slice(1, None)).max("round")
    best = both.astype(float).to_dataarray("evaluation").assign_coords(evaluation=[*_EVALUATIONS])
    best = best.transpose("evaluation", "C", "seed").drop_attrs()
    mean, error = estimate(best)
    # Distinct values of the seeds are one more than the steps between them in their order.
    steps = best.copy(data=np.sort(best, axis=-1)).diff("seed")
    found = {
        "best": best,
        "mean": mean,
        "standard_error": error,
        "standard_deviation": best.std("seed", ddof=1),
        "distinct": 1 + (steps > 0).sum("seed"),
        "published": published_means(config),
        "R": config.costs["contacts"] // best.C,
        "B": config.costs["updates"] // best.C,
    }
    return xr.Dataset(found)


def claims(measured: xr.Dataset, config: CohortAccuracy) -> Iterator[Claim]:
    """Accuracy has no trend over cohort sizes; the author's evaluation makes groups of it."""
    best = measured.best.sel(evaluation=config.evaluation)
    p = min(1.0, 2 * min(trend(best, "C", rising=rising) for rising in (True, False)))
    doubled = np.polyfit(np.log2(best.C), 100 * best.transpose("C", "seed"), 1)[0]
    slope, error = estimate(xr.DataArray(doubled, dims="seed"))
    text = "at constant cost the cohort size does not matter: best accuracy has no trend "
    evidence = f"Page's test in both directions p = {p:.2g}; {slope:+.2f} ± {error:.2f} points for "
    evidence += f"twice the cohort; means {describe(best.mean('seed'), form='.3f')}"
    yield claim(text + "(p >= 0.05)", p >= 0.05, evidence)
    few = measured.distinct.sel(evaluation="as-published")
    are_fewer = few.sum() < measured.distinct.sel(evaluation="all images").sum()
    text = "best accuracies fall into groups because the author scored E B test images a round "
    text += "(as published fewer values than on all images, at most E B + 1)"
    evidence = f"distinct values in {config.num_seeds} seeds: "
    evidence += describe(measured.distinct, form="g")
    yield claim(text, (few <= config.local_epochs * measured.B + 1) & are_fewer, evidence)
    his = measured.sel(evaluation="as-published").dropna("C", subset=["published"])
    # The paper tells standard deviations of its trials with 60 contacts only.
    if his.sizes["C"] and config.costs["contacts"] == 60:
        text = "mean best accuracies, scored as published, are the author's (within "
        tolerance = 4 * np.hypot(his.standard_error, _LARGEST_ERROR)
        yield within(text + "4 standard errors)", his["mean"], his.published, tolerance, ".3f")


def table(measured: xr.Dataset, config: CohortAccuracy) -> Sequence[Table]:
    """Returns a row for each cohort size and evaluation; published means are in parentheses."""
    author = measured.published.where(measured.evaluation == "as-published")
    contents = {
        "R": measured.R,
        "B": measured.B,
        "mean": cells(measured["mean"], measured.standard_error, author, ".3f"),
        "sd": cells(measured.standard_deviation, form=".3f"),
        "distinct": measured.distinct,
    }
    return [rows(contents, ("C", "evaluation"))]


_X, _Y = "clients in a cohort $C$", "best test accuracy"


def figure_2(result: xr.Dataset, measured: xr.Dataset, config: CohortAccuracy) -> Figure:
    """Draws the best accuracy of every run, scored in both ways."""
    places, num_seeds = np.arange(measured.sizes["C"]), measured.sizes["seed"]
    # Beside each other: many runs have equal accuracies, which would hide each other.
    beside = places[:, None] + np.linspace(-0.28, 0.28, num_seeds)
    ticks = {f"{C:g}": float(place) for place, C in enumerate(measured.C.values)}
    drawn = []
    for name in measured.evaluation.values:
        shown = measured.sel(evaluation=name)
        runs = plots.Line("one run", beside.ravel(), shown.best.values.ravel(), style=".")
        means = plots.Line("mean", places, shown["mean"].values, style="_")
        drawn.append(plots.Panel(name, _X, _Y, [runs, means], ticks=ticks))
    caption = f"{num_seeds} runs of each size, one point each, and their means."
    title = config.title(result, f"R C = {config.costs['contacts']}")
    return plots.draw([drawn], title=title, caption=caption)


def figure_3(result: xr.Dataset, measured: xr.Dataset, config: CohortAccuracy) -> Figure:
    """Draws means and standard deviations of the best accuracies, and the author's means."""
    mean, spread = measured["mean"], measured.standard_deviation
    if measured.published.notnull().any():
        author = measured.published.expand_dims(evaluation=["published"])
        mean = xr.concat([mean, author], "evaluation")
        spread = spread.reindex(evaluation=mean.evaluation)
    values, bars = (x.expand_dims(panel=["mean of the best accuracies"]) for x in (mean, spread))
    drawn = plots.panels(values, bars, xlabel=_X, ylabel=_Y)
    caption = f"Means and standard deviations of {config.num_seeds} seeds."
    title = config.title(result, f"R C = {config.costs['contacts']}")
    return plots.draw([drawn], title=title, caption=caption)


_page = CohortAccuracy(), run, measure, claims, table

ITEMS = (
    Item("cb-fig2", "Best accuracy of every run, by cohort size", *_page, figure_2),
    Item("cb-fig3", "Mean best accuracy at constant cost, by cohort size", *_page, figure_3),
)
"""Figures 2 and 3."""
