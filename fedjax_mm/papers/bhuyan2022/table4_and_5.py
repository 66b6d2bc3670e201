"""Tables 4 and 5: models trained together until each one matches FedAvg on this model alone."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.claims import more, one_draw
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.bhuyan2022 import accuracy, together
from fedjax_mm.papers.bhuyan2022.accuracy import PARTS
from fedjax_mm.papers.bhuyan2022.learners import (
    ATTRIBUTES,
    FacesLearner,
    Learner,
    SyntheticLearner,
)
from fedjax_mm.papers.bhuyan2022.together import Together, run_together
from fedjax_mm.papers.figures import points
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.published import published
from fedjax_mm.papers.rulings import Ruling, finding, ruling
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, rows
from fedjax_mm.papers.values import Some
from fedjax_mm.results.labels import describe

_WHEN = {"T_1": "FedAvg alone, $T_1$", "T_M": "MFA-RR, $T_M$", "majority": "most frequent class"}
_WIDE = 1.0  # the same as `accuracy.WIDE`, for gains
_LOGISTIC = SyntheticLearner().models[0]


class Different(Together):
    """Settings of Tables 4 and 5."""

    learners: Some[Learner]


def measure(paper: Mapping[str, Any], result: xr.Dataset, config: Different) -> xr.Dataset:
    """Adds the published values to the measures of `together.measure`, for MFA-RR on all models."""
    measured = together.measure(result, config).isel(algorithm=0, M=0, drop=True)
    names = result.name.values.tolist()
    when = xr.IndexVariable("when", list(_WHEN))
    ours = [measured[name] for name in ("alone", "together", "majority")]
    measured["accuracy"] = xr.concat(ours, when).transpose("part", "when", "model", "seed")
    means = measured.accuracy.mean("seed")
    values = [paper["values"].get(name, 4 * [np.nan]) for name in names]
    known = means.isel(when=slice(2)).copy(data=np.reshape(values, (-1, 2, 2)).transpose(1, 2, 0))
    measured["published"] = known.reindex_like(means)
    measured["published_gain"] = "part", [paper["gain"][part] for part in PARTS]
    # Add MFA-RR's accuracies at the paper's own T_M, if that round was recorded.
    at = {part: paper["rounds"]["T_M"][part] for part in PARTS}
    curve = measured["curve"].reindex(round=sorted(set(at.values())))
    there = [curve.sel(part=part, round=at[part], drop=True) for part in PARTS]
    measured["at_published"] = xr.concat(there, xr.IndexVariable("part", list(PARTS)))
    return measured.drop_dims("round")


def judge_similar(measured: xr.Dataset, config: Different) -> Iterator[Ruling | Check]:
    """Yields verdicts on the gains and accuracies of Table 4."""
    yield from _of_gains(measured, config)
    yield _of_printed("accuracies", *_both(measured))
    yield _level(measured)


def judge_mixed(measured: xr.Dataset, config: Different) -> Iterator[Ruling | Check]:
    """Yields verdicts on the gains and both rows of Table 5, one of which needs no images."""
    yield from _of_gains(measured, config)
    ours, printed = (each.reindex(model=[_LOGISTIC]) for each in _both(measured))
    alone, together = (printed.sel(when=when, drop=True) for when in ("T_1", "T_M"))
    yield _of_printed("logistic-alone", ours.sel(when="T_1", drop=True), alone)
    at = measured.at_published.reindex(model=[_LOGISTIC])
    yield _of_printed("logistic-together", at, together)
    networks = measured.model.values != _LOGISTIC
    ours, printed = (each.isel(model=networks) for each in _both(measured))
    yield _of_printed("network", ours, printed)
    yield from _without_images(measured, config)
    yield _level(measured)


def _of_gains(measured: xr.Dataset, config: Different) -> Iterator[Ruling]:
    for part in PARTS:
        here = measured.sel(part=part, target="g", drop=True)
        rounds = describe(*estimate(here.rounds), ".0f")
        gains = describe(here.gain, here.gain_standard_error)
        about = f"T_M {rounds}, gain {gains} (published {here.published_gain:g}), reached by "
        about += f"{here.reached:d} of {config.num_seeds} seeds"
        yield _of_printed(f"gain-{part}", here.gain_per_seed, here.published_gain, about)
    gains = measured.gain_per_seed.sel(target="g", drop=True).transpose("part", "seed")
    yield ruling("advantage", more(gains, by=1.0))


def _both(measured: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Our accuracies after T_1 and T_M, and the published ones."""
    ours, printed = (measured[key].sel(when=["T_1", "T_M"]) for key in ("accuracy", "published"))
    return ours, printed


def _of_printed(key: str, draws: xr.DataArray, printed: xr.DataArray, about: str = "") -> Ruling:
    most = _WIDE if key.startswith("gain") else accuracy.WIDE
    return ruling(key, one_draw({"": draws}, printed, most), about=about, is_shared=False)


def _without_images(measured: xr.Dataset, config: Different) -> Iterator[Check]:
    """Checks the row of Table 5 that needs no images."""
    is_drawn = [isinstance(config.learners[i], SyntheticLearner) for _, i, _ in config.models]
    if any(is_drawn):
        own = measured.own_gain_per_seed.sel(target="g", drop=True).isel(model=is_drawn)
        text = "models on Synthetic: M T_1 / T_M is above 1, if T_M counts rounds until this model "
        gain = own.transpose("part", "model", "seed")
        yield finding(f"{text}has FedAvg's accuracy", more(gain, by=1))


def _level(measured: xr.Dataset) -> Check:
    ahead = measured.accuracy.sel(when="T_1") - measured.accuracy.sel(when="majority")
    return accuracy.beats_majority("FedAvg alone", ahead)


def table(measured: xr.Dataset, config: Different) -> Sequence[Table]:
    """Accuracies in percent, gains, and the rounds that each model needs alone."""
    means, errors = estimate(measured.accuracy)
    text = cells(means, errors, published=measured.published, form=".1f")
    found = {f"{part}, {at}": text.sel(part=part, when=at) for part in PARTS for at in _WHEN}
    # Show only g, because the paper reports no other gain.
    known = measured.published_gain.where(measured.target == "g")
    gains = {
        "gain": cells(measured.gain, measured.gain_standard_error, known),
        "T_1": cells(measured.rounds_alone.mean(("seed", "model")), form=".0f"),
        "T_M": cells(*estimate(measured.rounds), form=".0f"),
        "reached": measured.reached.astype(str) + f" of {config.num_seeds}",
    }
    own = {"T_M": measured.own_rounds, "gain": measured.own_gain_per_seed}
    each = {
        f"{part}, {name}": cells(*estimate(values.sel(target="g", part=part)))
        for part in PARTS
        for name, values in own.items()
    }
    return [
        rows(found, ("model",)),
        rows(gains, ("part", "target"), "Rounds until all models reach their targets"),
        rows(each, ("model",), "Rounds until one model reaches its target"),
    ]


def figure(result: xr.Dataset, measured: xr.Dataset, config: Different) -> Figure:
    """Draws the accuracy of each model, trained alone and with others, next to published values."""
    about, names = result.attrs["manifest"], measured.model.values.tolist()
    panels = []
    for part in PARTS:
        here = measured.sel(part=part)
        series = {label: estimate(here.accuracy.sel(when=when)) for when, label in _WHEN.items()}
        printed = {f"published, ${w}$": (here.published.sel(when=w), None) for w in ("T_1", "T_M")}
        panels.append(points(names, part, series | printed, "accuracy in percent"))
    return plots.draw(
        [panels],
        title=f"{' and '.join(about['datasets'])} ({about['data']} data), "
        f"N = {config.num_clients}, M = {len(names)}, $T_1$ = {config.num_rounds}",
        caption=f"Means and standard errors of {config.num_seeds} seeds, of MFA-RR after all "
        f"{config.most_rounds} rounds if it has no $T_M$; {config.about_gains(config.targets)}.",
    )


def _table(id: str, settings: Different, judge: Any) -> Item:
    of_paper = partial(measure, published(id))
    return Item(id, settings, run_together, of_paper, judge, table, figure)


_MANY: dict[str, Any] = {"num_clients": 96, "num_seeds": 8}
_NINE = (FacesLearner(attributes=ATTRIBUTES),)
_MIXED = (SyntheticLearner(), FacesLearner())
_TABLE4 = Different(learners=_NINE, num_rounds=50, record_every=5, **_MANY)
# Do not stop at the targets, because the paper reports accuracies after 142 rounds regardless.
_TABLE5 = Different(learners=_MIXED, num_rounds=100, record_every=2, stop=False, **_MANY)

ITEMS = (
    _table("mfa-table4", _TABLE4, judge_similar),
    _table("mfa-table5", _TABLE5, judge_mixed),
)
"""Tables 4 and 5."""
