"""Figure 1: the rounds to a target accuracy for several cohort sizes (section 3.1)."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field

from fedjax_mm import plots
from fedjax_mm.claims import less, more
from fedjax_mm.data.partition import Parts, iid_clients, iid_share
from fedjax_mm.experiments.fields import Count, Flag, Fraction, Percent, TwoOrMore
from fedjax_mm.metrics import estimate, first_round_below
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.pawlik2020.setting import EVALUATIONS, Trained
from fedjax_mm.papers.published import published
from fedjax_mm.papers.rulings import Ruling, ruling, untested
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.values import Increasing, Trend
from fedjax_mm.results.labels import describe
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.sweeps.until import Until
from fedjax_mm.tasks.supervised import Supervised

_SCHEMES: Any = {"iid_share": iid_share, "iid_clients": iid_clients}

_ALL_IMAGES = 0.95  # the target for all test images; at 90 % most runs need one or two rounds


class CohortRounds(Trained):
    """Settings of Figure 1, with training until the test accuracy reaches the last target."""

    paper_sizes = (2, 5, 10, 20)
    digits_sizes = (2, 4, 8, 12)

    num_seeds: TwoOrMore = 4
    scheme: Literal["iid_share", "iid_clients"] = "iid_share"
    """Whether percentages refer to the IID share of every client's images, or to IID clients."""
    percents: Trend[Percent] = (20.0, 60.0, 100.0)
    """The percentages. The paper uses 20, 40, 60, 80 and 100."""
    targets: Annotated[Increasing[Fraction], Field(min_length=1)] = (0.9, 0.99)
    """The target accuracies. The figure uses 0.99, and the text also 0.9."""
    evaluation: Literal["as-published", "all images"] = "as-published"
    """The accuracy that must reach the targets. The author scored E mini-batches of B images."""
    max_rounds: Count = 40
    local_epochs: Count = 10
    batch_size: Count = 10
    stop: Flag = True
    """Whether runs stop at their last target, instead of using all rounds."""

    def deal(self, labels: np.ndarray, seed: int) -> list[Parts]:
        """The scheme's partitions, one for each percentage."""
        deal = partial(_SCHEMES[self.scheme], labels, self.clients, seed=seed)
        return [deal(percent=percent) for percent in self.percents]


def run(config: CohortRounds, execution: Execution | None = None) -> xr.Dataset:
    """Test accuracies until the last target, over ``(C, percent, seed, round)``."""

    def build(C: int, percent: float, task: Supervised, seed: int) -> Setup:
        place, number = config.percents.index(percent), seed - config.first_seed
        deal = number * len(config.percents) + place
        return config.setup(C, task, deal, config.batch_size)

    scored = EVALUATIONS[config.evaluation]
    until = Until(scored, at_least=config.targets[-1]) if config.stop else None
    axes = {"percent": config.percents}
    result = config.train(build, axes, config.max_rounds, until, execution)
    return result[list(EVALUATIONS.values())]


def measure(result: xr.Dataset, config: CohortRounds) -> xr.Dataset:
    """The first round that reaches each target, or NaN: ``(target, percent, C, seed)``."""
    rounds = _rounds(result[EVALUATIONS[config.evaluation]], config.targets)
    mean, error = estimate(rounds)
    missed = rounds.isnull().sum("seed")
    found = {"rounds": rounds, "mean": mean, "standard_error": error, "missed": missed}
    found["rounds, all images"] = _to_all_images(result)
    return xr.Dataset(found | {"published": published_rounds(rounds, config)})


def _to_all_images(result: xr.Dataset) -> xr.DataArray:
    accuracy = result[EVALUATIONS["all images"]]
    return _rounds(accuracy, [_ALL_IMAGES]).isel(target=0, drop=True)


def _rounds(accuracy: xr.DataArray, targets: Sequence[float]) -> xr.DataArray:
    """The first round that reaches each target, or NaN: ``(target, percent, C, seed)``."""
    accuracy = accuracy.transpose("percent", "C", "seed", "round")
    start = accuracy.isel(round=0, drop=True).expand_dims(target=list(targets))
    # Compare in float32, as `Until` does, because 0.9 in float32 is less than Python's 0.9, and a
    # run that stopped at its target would miss it in float64.
    least = start.target.values.astype(accuracy.dtype)[:, None, None, None]
    return start.copy(data=first_round_below(-accuracy.values, accuracy["round"], -least))


def published_rounds(rounds: xr.DataArray, config: CohortRounds) -> xr.DataArray:
    """The author's mean rounds by target, percentage and C, or NaN for other trials."""
    own = {"percents", "cohort_sizes", "targets", "num_seeds", "directory", "max_rounds", "stop"}
    is_hers = config.model_dump(exclude=own) == CohortRounds().model_dump(exclude=own)
    is_hers &= config.directory is not None
    known = published("cb-fig1")["mean rounds to 99 % by percent and C"]
    hers = rounds.isel(seed=0, drop=True).astype(float) * np.nan
    for at in ({"percent": p, "C": C} for p in config.percents for C in config.sizes):
        value = known.get(f"{at['percent']:g}", {}).get(f"{at['C']}", np.nan)
        hers.loc[at] = np.where((hers.target == 0.99) & is_hers, value, np.nan)
    return hers


def _slope(rounds: xr.DataArray, along: str, steps: xr.DataArray) -> xr.DataArray:
    """The slope of a least-squares line, in rounds per step."""
    centred = steps - steps.mean()
    return (rounds * centred).sum(along, skipna=False) / (centred**2).sum()


def judge(measured: xr.Dataset, config: CohortRounds) -> Iterator[Ruling | Check]:
    """Judges whether larger cohorts and more similar clients need fewer rounds."""
    if config.scheme != "iid_share" or config.targets[-1] != 0.99:
        for key in ("percent", "cohort-size", "prediction", "importance-of-cohort-size"):
            yield untested(key, "the figure is about 99 % and a share of every client's images")
        return
    last = measured.rounds.isel(target=-1, drop=True)
    doublings, fifths = np.log2(measured.C), measured.percent / 20
    yield ruling("cohort-size", less(_slope(last, "C", doublings)))
    rounds = measured["rounds, all images"]
    slopes = _slope(rounds, "C", doublings)
    yield ruling("percent", less(_slope(rounds.mean("C", skipna=False), "percent", fifths)))
    change = _slope(slopes, "percent", fifths)
    about = "rounds per doubling of C: " + describe(*estimate(slopes))
    yield ruling("prediction", more(change, form=".3f"), about=about)
    yield ruling("importance-of-cohort-size", less(change, form=".3f"), about=about)


def _in_words(measured: xr.Dataset) -> xr.Dataset:
    targets = [f"to {100 * target:g} %" for target in measured.target.values]
    percents = [f"{percent:g} % IID" for percent in measured.percent.values]
    return measured.assign_coords(target=targets, percent=percents)


def table(measured: xr.Dataset, config: CohortRounds) -> Sequence[Table]:
    """Mean rounds, with the author's, and the number of runs that missed the target."""
    measured = _in_words(measured)
    missed = "\nin " + cells(measured.missed, form=".0f") + f" of {measured.sizes['seed']}"
    text = cells(measured["mean"], measured.standard_error, measured.published, ".1f")
    text += xr.where(measured.missed > 0, missed, "")
    return [rows(columns(text, "C"), ("target", "percent"))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: CohortRounds) -> Figure:
    """Draws mean rounds to every target against C, with one line per percentage."""
    measured = _in_words(measured)
    mean, error, xlabel = measured["mean"], measured.standard_error, "clients in a cohort $C$"
    drawn = plots.panels(mean, error, xlabel=xlabel, ylabel="rounds")
    title = config.title(result, f"E = {config.local_epochs}, B = {config.batch_size}")
    caption = f"Means and standard errors of {config.num_seeds} seeds; no point where a run did "
    caption += f"not get there in {config.max_rounds} rounds."
    return plots.draw([drawn], title=title, caption=caption)


ITEMS = (Item("cb-fig1", CohortRounds(), run, measure, judge, table, figure),)
"""Figure 1."""
