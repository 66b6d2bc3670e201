"""Figures 2 and 3: best accuracy by cohort size at constant cost (section 3.2)."""

from collections.abc import Iterator, Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field

from fedjax_mm import plots
from fedjax_mm.claims import Evidence, fact, more, welch, within
from fedjax_mm.data.partition import Parts
from fedjax_mm.experiments.fields import Count, TwoOrMore
from fedjax_mm.experiments.tasks import IIDShare, PartitionConfig
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.pawlik2020.setting import EVALUATIONS, Trained
from fedjax_mm.papers.published import published
from fedjax_mm.papers.rulings import Ruling, finding, ruling, untested
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, rows
from fedjax_mm.papers.values import Increasing
from fedjax_mm.results.labels import places
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.sweeps.until import Until
from fedjax_mm.tasks.networks import McMahanCNN
from fedjax_mm.tasks.supervised import Supervised

_QUANTITIES = ("mean", "sd", "distinct values")
_WAYS = ("as-published", "all images")
_HER_SEEDS = 100
_SLOPE = 2.0  # a change that matters, in points per doubling of the cohort
_FLAT = 5.0  # allowed difference from the mean over all cohort sizes, in points
_LARGE = 5.0  # points of standard deviation
_WHY = "E B test images are scored in a round, so that accuracies are multiples of 1 / (E B)"
_TAKES = "--data DIR with MNIST, with all other settings at their defaults"


class CohortAccuracy(Trained):
    """Settings of Figures 2 and 3: R = c / C rounds and batches of B = u / C images."""

    paper_sizes = (5, 10, 15, 20, 30)
    digits_sizes = (2, 4, 6, 8, 12)

    num_seeds: TwoOrMore = 10
    contacts: Annotated[Increasing[Count], Field(min_length=1)] | None = None
    """The numbers of contacts c = R C. Only the largest is run, and its first rounds are used for
    the others. Defaults to 60, and to 120 with doubled round limits. For the digits, which have few
    clients, the defaults are 120 and 240."""
    updates: Count | None = None
    """The updates u = B C. Defaults to 300, or to 120 for the digits."""
    local_epochs: Count = 1
    partition: PartitionConfig = IIDShare(name="iid_share", percent=80.0)

    def deal(self, labels: np.ndarray, seed: int) -> list[Parts]:
        """The only partition of the images for one seed."""
        return [self.partition.deal(labels, self.clients, seed)]

    @property
    def num_updates(self) -> int:
        """The updates u = B C."""
        return self.updates or (120 if self.directory is None else 300)

    @property
    def costs(self) -> list[dict[str, int]]:
        """The contacts and updates for each round limit."""
        default = (120, 240) if self.directory is None else (60, 120)
        return [{"contacts": c, "updates": self.num_updates} for c in self.contacts or default]


def run(config: CohortAccuracy, execution: Execution | None = None) -> xr.Dataset:
    """Accuracies after every round, scored in both ways, over ``(C, seed, round)``."""
    contacts = config.costs[-1]["contacts"]

    def build(C: int, task: Supervised, seed: int) -> Setup:
        return config.setup(C, task, seed - config.first_seed, config.num_updates // C)

    until, rounds = Until("client_updates", at_least=contacts), contacts // config.sizes[0]
    result = config.train(build, {}, rounds, until, execution)
    return result[list(EVALUATIONS.values())]


def _parameters() -> int:
    """The number of parameters of the network on 28 x 28 images."""
    module, images = McMahanCNN(10), jnp.zeros((1, 28, 28, 1))
    params = jax.eval_shape(module.init, jax.random.key(0), images)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def published_numbers(config: CohortAccuracy) -> xr.Dataset:
    """The author's numbers by R C and C, or NaN for settings other than hers.

    They are the mean, the standard deviation and the number of distinct values of the best
    accuracies in 100 runs.
    """
    same = {"learning_rate", "local_epochs", "partition", "programmed"}
    is_hers = config.model_dump(include=same) == CohortAccuracy().model_dump(include=same)
    is_hers &= config.directory is not None and config.clients == 100 and config.num_updates == 300
    known = published("cb-fig2")["100 seeds by R C and C"] if is_hers else {}
    contacts = [costs["contacts"] for costs in config.costs]

    def of(quantity: str) -> list[list[float]]:
        rows = [known.get(quantity, {}).get(str(c), {}) for c in contacts]
        return [[row.get(str(C), np.nan) for C in config.sizes] for row in rows]

    coords = {"contacts": contacts, "C": config.sizes}
    return xr.Dataset({name: (("contacts", "C"), of(name)) for name in _QUANTITIES}, coords)


def measure(result: xr.Dataset, config: CohortAccuracy) -> xr.Dataset:
    """The best accuracy over all rounds, over ``(contacts, evaluation, C, seed)``."""
    both = result[list(EVALUATIONS.values())].sel(round=slice(1, None)).astype(float)
    curves = both.to_dataarray("evaluation").assign_coords(evaluation=[*EVALUATIONS])
    contacts = xr.DataArray([costs["contacts"] for costs in config.costs], dims="contacts")
    contacts = contacts.assign_coords(contacts=contacts)
    best = curves.where(curves["round"] <= contacts // curves.C).max("round")
    best = best.transpose("contacts", "evaluation", "C", "seed").drop_attrs()
    mean, error = estimate(best)
    # Count the steps between the sorted values, and add 1, to get the number of distinct values.
    steps = best.copy(data=np.sort(best, axis=-1)).diff("seed")
    hers = published_numbers(config).expand_dims(evaluation=["as-published"])
    hers = hers.reindex(evaluation=best.evaluation)
    found = {
        "best": best,
        "mean": mean,
        "standard_error": error,
        "standard_deviation": best.std("seed", ddof=1),
        "distinct": 1 + (steps > 0).sum("seed"),
        "R": contacts // best.C,
        "B": config.num_updates // best.C,
    }
    return xr.Dataset(found | {f"published {name}": hers[name] for name in _QUANTITIES})


def slopes(best: xr.DataArray) -> xr.DataArray:
    """The gain in accuracy per doubling of the cohort, in points, for every seed."""
    doublings = np.log2(best.C) - np.log2(best.C).mean()
    return 100 * (best * doublings).sum("C") / (doublings**2).sum()


def judge_fig2(measured: xr.Dataset, config: CohortAccuracy) -> Iterator[Ruling | Check]:
    """Judges the slope over cohort sizes, and whether few test images cause clusters of values."""
    first, last = (measured.isel(contacts=place, drop=True) for place in (0, -1))
    yield ruling("parameters", fact(_parameters() == 1_663_370, f"{_parameters():,}"))
    for key, runs in {"limited-values": first, "doubled-limits": last}.items():
        yield ruling(key, *_few_values(runs, config), about=_WHY)
    scored = first.best.sel(evaluation="as-published", drop=True)
    yield ruling("cohort-size", within(slopes(scored), margin=_SLOPE))
    rest = slopes(measured.best).stack(case=("contacts", "evaluation"))
    for contacts, evaluation in rest.case.values[1:]:
        text = f"cohort size does not matter for R C = {contacts}, scored on {evaluation}"
        yield finding(text, within(rest.sel(case=(contacts, evaluation), drop=True), margin=_SLOPE))


def _few_values(runs: xr.Dataset, config: CohortAccuracy) -> list[list[Evidence]]:
    """Rules, as facts, on whether accuracies cluster with few test images, but not with all.

    The answer is unknown if all runs have distinct values under both evaluations.
    """
    found, num_seeds = [], runs.sizes["seed"]
    for at, (name,) in places(runs, "C"):
        here = runs.sel(at)
        few, many = (here.distinct.sel(evaluation=way).item() for way in _WAYS)
        most = config.local_epochs * here.B.item() + 1
        text = f"{few} values in {num_seeds} seeds, at most {most}; {many} on all test images"
        holds = None if few == many == num_seeds and few <= most else few <= most and few < many
        found.append(fact(holds, text, name))
    return found


def judge_fig3(measured: xr.Dataset, config: CohortAccuracy) -> Iterator[Ruling | Check]:
    """Judges the author's means and error bars, and whether the curve is flat."""
    scored = measured.sel(evaluation="as-published")
    hers = {
        contacts: _compare_with_hers(scored.sel(contacts=contacts))
        for contacts in (60, 120)
        if contacts in scored.contacts and scored["published mean"].notnull().any()
    }
    if 60 in hers:
        yield ruling("means", hers[60], is_shared=False)
    else:
        yield untested("means", "the settings are not those of the author's trials", _TAKES)
    if 120 in hers:
        text = f"for R C = 120, means are within {_FLAT:g} points of the author's"
        yield finding(text, hers[120])
    first = scored.isel(contacts=0, drop=True).best
    apart = 100 * (first - first.mean("C"))
    yield ruling("flat", within(apart, margin=_FLAT, form=".1f"))
    yield ruling("error-bars", _variance_more(100 * first, by=_LARGE**2))


def _variance_more(samples: xr.DataArray, by: float) -> list[Evidence]:
    """Tests whether the variance over seeds is above `by` for each cohort size."""
    number = samples.sizes["seed"]
    # The mean of these terms is the unbiased variance.
    squares = (samples - samples.mean("seed")) ** 2 * number / (number - 1)
    tests = more(squares, by=by, form=".0f")
    tests = [each._replace(text=each.text.partition(" (median")[0]) for each in tests]
    if number > 2:
        return tests
    # With two samples both squares are equal, so their spread says nothing about the error.
    return [each._replace(supports=1.0, contradicts=1.0) for each in tests]


def _compare_with_hers(ours: xr.Dataset) -> list[Evidence]:
    mean, sd = (100 * ours[f"published {name}"] for name in ("mean", "sd"))
    return welch(100 * ours.best, mean, sd, _HER_SEEDS, _FLAT)


def table(measured: xr.Dataset, config: CohortAccuracy) -> Sequence[Table]:
    """One row per cohort size, with published numbers in parentheses, and the slopes."""
    contents = {
        "R": measured.R,
        "B": measured.B,
        "mean": cells(measured["mean"], measured.standard_error, measured["published mean"], ".4f"),
        "sd": cells(measured.standard_deviation, None, measured["published sd"], ".3f"),
        "distinct": cells(measured.distinct, None, measured["published distinct values"], "g"),
    }
    title = "In parentheses: the author's means over 100 runs"
    slope = {"points where the cohort doubles": cells(*estimate(slopes(measured.best)))}
    return [
        rows(contents, ("contacts", "evaluation", "C")),
        rows(slope, ("contacts", "evaluation"), title),
    ]


_X, _Y = "clients in a cohort $C$", "best test accuracy"


def figure_2(result: xr.Dataset, measured: xr.Dataset, config: CohortAccuracy) -> Figure:
    """Draws the best accuracy of every run, scored in both ways."""
    ticks_at, num_seeds = np.arange(measured.sizes["C"]), measured.sizes["seed"]
    # Spread the seeds along x, because points with equal accuracies would hide each other.
    x = ticks_at[:, None] + np.linspace(-0.28, 0.28, num_seeds)
    dashes = ticks_at[:, None] + np.array([-0.28, 0.28, np.nan])  # as wide as their runs
    ticks = {f"{C:g}": float(place) for place, C in enumerate(measured.C.values)}
    drawn = []
    for at, (contacts, name) in places(measured, "contacts", "evaluation"):
        shown = measured.sel(at)
        runs = plots.Line("one run", x.ravel(), shown.best.values.ravel(), style=".")
        means = plots.Line("mean", dashes.ravel(), np.repeat(shown["mean"].values, 3))
        title = f"{name}, {contacts.replace('contacts', 'R C')}"
        drawn.append(plots.Panel(title, _X, _Y, [runs, means], ticks=ticks))
    caption = f"{num_seeds} runs of each size, one point each, and their means."
    width = measured.sizes["evaluation"]
    panels = [drawn[first : first + width] for first in range(0, len(drawn), width)]
    return plots.draw(panels, title=config.title(result, "best of R rounds"), caption=caption)


def figure_3(result: xr.Dataset, measured: xr.Dataset, config: CohortAccuracy) -> Figure:
    """Draws means and standard errors of the best accuracies, and the author's means."""
    mean, error = measured["mean"], measured.standard_error
    hers = measured["published mean"].sel(evaluation="as-published", drop=True)
    if hers.notnull().any():
        mean = xr.concat([mean, hers.expand_dims(evaluation=["published"])], "evaluation")
        error = error.reindex(evaluation=mean.evaluation)
    names = [f"R C = {contacts:g}" for contacts in mean.contacts.values]
    values, bars = (x.assign_coords(contacts=names) for x in (mean, error))
    drawn = plots.panels(values, bars, xlabel=_X, ylabel=_Y)
    caption = f"Means and standard errors of {measured.sizes['seed']} seeds."
    return plots.draw([drawn], title=config.title(result, "best of R rounds"), caption=caption)


_RUNS = CohortAccuracy(), run, measure

ITEMS = (
    Item("cb-fig2", *_RUNS, judge_fig2, table, figure_2),
    Item("cb-fig3", *_RUNS, judge_fig3, table, figure_3),
)
"""Figures 2 and 3."""
