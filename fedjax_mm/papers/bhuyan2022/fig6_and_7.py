"""Figures 6 and 7: the gain from training several models of one task together."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

import jax.numpy as jnp
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field, ValidationInfo, model_validator

from fedjax_mm import plots
from fedjax_mm.assignments.partitions import mfa_rand, mfa_rr
from fedjax_mm.base import Params
from fedjax_mm.claims import less, more, one_draw
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.fields import Count
from fedjax_mm.metrics import Estimate, estimate, gain
from fedjax_mm.papers.bhuyan2022 import accuracy
from fedjax_mm.papers.bhuyan2022.accuracy import PARTS, Trainings, by_part
from fedjax_mm.papers.bhuyan2022.gains import Limits, Models, gain_columns, gain_panels
from fedjax_mm.papers.bhuyan2022.learners import FacesLearner, Learner, SyntheticLearner
from fedjax_mm.papers.bhuyan2022.together import Aiming, aims
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.published import published
from fedjax_mm.papers.rulings import Ruling, ruling
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, rows
from fedjax_mm.papers.training import described, train
from fedjax_mm.papers.values import Some
from fedjax_mm.results.labels import number
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup

_ALGORITHMS = ("MFA-Rand", "MFA-RR")
_WHY = (
    "At a learning rate of 3e-4 no model has converged after T_1 rounds, so the null hypothesis is "
    "T_M near T_1, a gain near M. MFA-RR has a gain of M or more for two reasons. It applies each "
    "client's M rounds at once, and 1 - Mx <= (1 - x)^M. Groups without the largest client give "
    "small clients more weight. Both effects grow with the largest client's share of the examples, "
    "which FedProx's generator does not limit"
)


class GainVersusModels(Trainings):
    """Settings of Figures 6 and 7: models of one task, trained until all match FedAvg."""

    learners: Some[Learner]
    """The learners, each with different data."""
    cohort_size: Count | None = None
    redraw: Literal["frame", "round"] = "frame"
    """When MFA-RR draws a cohort; see `mfa_rr`."""
    num_models: Annotated[Models, Field(min_length=2)] = (1, 2, 4, 5, 8, 10, 16, 20)

    @model_validator(mode="after")
    def _models_fit(self, info: ValidationInfo) -> Self:
        for num_models in self.num_models:
            mfa_rr(self.num_clients, num_models, cohort_size=self.cohort_size)
        if len(set(self.sources)) < len(self.learners):
            raise ValueError(f"learners are {', '.join(self.sources)}; give each data of its own")
        return self.with_files(info)

    @property
    def sources(self) -> list[str]:
        """The data source of every learner."""
        return [learner.source for learner in self.learners]

    @property
    def at_once(self) -> tuple[int, ...]:
        """The numbers of models trained at once."""
        return self.num_models

    def setup(
        self,
        learner: Learner,
        algorithm: str,
        num_models: int,
        data: FederatedData,
        targets: np.ndarray,
        start: Params,
        seed: int,
    ) -> Setup:
        """Sets up one algorithm with M models of the task, which aim at FedAvg's accuracies."""
        draw = seed - self.first_seed
        task = learner.task(accuracy.draw_of(data, draw))
        aim = targets[_ALGORITHMS.index(algorithm), draw]
        aiming = Aiming(task, task.num_clients, jnp.asarray(aim))
        assign = partial(mfa_rr, redraw=self.redraw) if algorithm == "MFA-RR" else mfa_rand
        assignment = assign(self.num_clients, num_models, cohort_size=self.cohort_size)
        return Setup(aiming, learner.algorithm(self), assignment, start)


def run_gain(config: GainVersusModels, execution: Execution | None = None) -> xr.Dataset:
    """The accuracies of every model, for all learners, both algorithms and every M."""
    every = [_run_on(learner, config, execution or Execution()) for learner in config.learners]
    result = xr.concat(every, xr.IndexVariable("source", config.sources), join="exact")
    return described(result, every)


def _run_on(learner: Learner, config: GainVersusModels, execution: Execution) -> xr.Dataset:
    """The accuracies for one learner's data."""
    data = learner.data(config)
    initial = learner.start(learner.task(accuracy.draw_of(data, 0)))

    def runs(name: str, num_models: Sequence[int], rounds: int, targets: np.ndarray) -> xr.Dataset:
        build = partial(config.setup, learner, data=data, targets=targets, start=initial)
        axes = {"algorithm": _ALGORITHMS, "num_models": num_models}
        records: Any = {"record_every": config.resolution, "until": config.until}
        with execution.stage(f"{name}-{config.learners.index(learner)}") as how:
            return train([data], build, axes, config, how, num_rounds=rounds, **records)

    # Run FedAvg on one model first, with unreachable targets, because its accuracies after T_1
    # rounds become the targets that stop the runs of several models.
    beyond = np.full((len(_ALGORITHMS), config.num_seeds, len(PARTS)), 2, np.float32)
    alone = runs("alone", (1,), config.num_rounds, beyond)
    curves = by_part(alone.isel(num_models=0, model=0), "accuracy")
    targets = aims(curves).transpose("algorithm", "seed", "part").values.astype(np.float32)
    together = runs("together", config.num_models[1:], config.most_rounds, targets)
    both = xr.concat([alone, together], "num_models", join="outer", combine_attrs="override")
    both = described(accuracy.accuracies_of(both), [together, alone])
    both.attrs["manifest"] |= {"draws": len(data.train.counts)}
    shares = {
        f"{part}_majority": accuracy.majorities(data, part, config.num_seeds) for part in PARTS
    }
    shares["largest_share"] = accuracy.largest_shares(data, config.num_seeds)
    return both.assign({name: ("seed", share) for name, share in shares.items()})


def median(samples: xr.DataArray) -> Estimate:
    """The median over seeds and its bootstrap standard error.

    Args:
      samples: over dimensions that include "seed"; -inf and inf sort below and above all numbers.
    """
    # Use the median, because a fluctuating accuracy may cross a target early by chance, and one
    # such seed can dominate the mean.
    values = samples.transpose(..., "seed")
    size, center = samples.sizes["seed"], values.isel(seed=0, drop=True)
    drawn = np.random.default_rng(0).integers(size, size=(1000, size))
    with np.errstate(invalid="ignore"):  # inf - inf occurs if a seed missed its target
        middle = np.median(values.values, axis=-1)
        resampled = np.sort(np.median(values.values[..., drawn], axis=-1), axis=-1)
        error = (resampled[..., 841] - resampled[..., 158]) / 2  # the 16th and 84th percentiles
    is_known = np.isfinite(error) & (size > 1)
    return Estimate(center.copy(data=middle), center.copy(data=np.where(is_known, error, np.nan)))


def measure(paper: Mapping[str, float], result: xr.Dataset, config: GainVersusModels) -> xr.Dataset:
    """FedAvg's accuracies in percent, and M T_1 / T_M and its median over seeds."""
    curves = by_part(result, "accuracy").rename(num_models="M")
    alone = curves.sel(M=1, round=slice(config.num_rounds), drop=True).isel(model=0, drop=True)
    rounds = accuracy.rounds_to_all(alone, curves, config.records_in_window)
    single, several = (each.sel(target=config.targets) for each in rounds)
    ratios = xr.apply_ufunc(gain, several.M, single, several)
    gains = ratios.transpose("source", "part", "target", "algorithm", "M", "seed")
    # Rank the gain of a run that missed its target below all others.
    middle, error = median(gains.fillna(-np.inf))
    is_known = np.isfinite(middle)
    percent = 100 * alone.sel(round=config.num_rounds, algorithm="MFA-RR", drop=True)
    return xr.Dataset(
        {
            "accuracy_per_seed": percent,
            "majority_per_seed": 100 * by_part(result, "majority"),
            "published": ("part", [paper[part] for part in PARTS]),
            "gain": middle.where(is_known),
            "gain_standard_error": error.where(is_known),
            "gain_per_seed": gains,
            "reached": gains.notnull().sum("seed"),
            "largest_share": result.largest_share,
        }
    )


def judge_full(measured: xr.Dataset, config: GainVersusModels) -> Iterable[Ruling | Check]:
    """Judges Figure 6, in which the gain increases sub-linearly with M."""
    gains = _limits(measured, config)
    is_synthetic = all(isinstance(learner, SyntheticLearner) for learner in config.learners)
    yield from _levels(measured)
    yield ruling("increases", more(gains.trend.decided(0.5), by=0.5, of="median"))
    about = f"{_WHY} ({_of_share(measured)})" if is_synthetic else ""
    exponents = Limits(*(-each for each in reversed(gains.exponents))).decided(-1.0)
    yield ruling("sub-linear", less(-exponents, by=1.0, of="median"), about=about)
    yield ruling("advantageous", _above_one(measured, config))


def judge_partial(measured: xr.Dataset, config: GainVersusModels) -> Iterable[Ruling | Check]:
    """Judges Figure 7, in which the gain is above 1 and mostly increases, with some dips."""
    steps = _limits(measured, config).steps
    rising = Limits(*((each > 0).mean("pair") for each in steps))
    # Use the largest possible orders, because they show which decreases are certain.
    dips = Limits(*((each < 0).any("pair").astype(float) for each in reversed(steps)))
    yield from _levels(measured)
    yield ruling("for-the-most-part", more(rising.decided(0.5), by=0.5, of="median"))
    yield ruling("dips", more(dips.decided(0.5), by=0.5, of="median", form=".0f"))
    yield ruling("above-one", _above_one(measured, config))


def _levels(measured: xr.Dataset) -> Iterable[Ruling | Check]:
    draws = measured.accuracy_per_seed
    readings = {source: draws.sel(source=source, drop=True) for source in draws.source.values}
    tests = one_draw(readings, measured.published, accuracy.WIDE)
    yield ruling("fedavg-accuracy", tests, is_shared=False)
    yield accuracy.beats_majority("FedAvg", measured.accuracy_per_seed - measured.majority_per_seed)


def _judged(measured: xr.Dataset) -> xr.DataArray:
    """The gain g for test accuracy, to which the paper's statements refer."""
    gains: xr.DataArray = measured.gain_per_seed.sel(part="test", target="g", drop=True)
    return gains


def _highest(gains: xr.DataArray, config: GainVersusModels) -> xr.DataArray:
    """The gain of a run that reaches its targets in the last round of the budget."""
    return gains.M * config.num_rounds / config.most_rounds


def _limits(measured: xr.Dataset, config: GainVersusModels) -> Limits:
    gains = _judged(measured)
    return Limits(gains.fillna(0.0), gains.fillna(_highest(gains, config)))


def _above_one(measured: xr.Dataset, config: GainVersusModels) -> list[Any]:
    gains = _judged(measured)
    several = gains.sel(M=gains.M > 1)
    return more(several, by=1.0, of="median", unreached=_highest(several, config))


def _excess(measured: xr.Dataset) -> xr.DataArray:
    """Each seed's mean of g / M over M > 1, counting unreached targets as 0."""
    gains = _judged(measured).fillna(0.0)
    return (gains / gains.M).sel(M=gains.M > 1).mean("M")


def _rank_correlation(x: xr.DataArray, y: xr.DataArray) -> float:
    """Spearman's rho, or NaN if all values are equal."""
    from scipy.stats import rankdata

    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.corrcoef(rankdata(x.values), rankdata(y.values))[0, 1])


def _of_share(measured: xr.Dataset) -> str:
    """Describes how MFA-RR's gains depend on the largest client's share."""
    excess = _excess(measured).sel(algorithm="MFA-RR", drop=True)
    return "Spearman's rho of MFA-RR's gain with that share over seeds: " + ", ".join(
        f"{source} {_rank_correlation(measured.largest_share.sel(at), excess.sel(at)):.2f}"
        for source in measured.source.values
        for at in [{"source": source}]
    )


def table(measured: xr.Dataset, config: GainVersusModels) -> Sequence[Table]:
    """The median gains, FedAvg's accuracies, and how the largest client affects gains."""
    found = gain_columns(measured, config.num_seeds, "no median")
    mean, error = estimate(measured.accuracy_per_seed)
    published = measured.published.broadcast_like(mean)
    levels = {
        "FedAvg (published)": cells(mean, error, published, form=".1f"),
        "most frequent class": cells(measured.majority_per_seed.mean("seed"), form=".1f"),
    }
    return [
        rows(found, ("source", "part", "target", "algorithm")),
        rows(levels, ("source", "part"), f"Accuracy in percent after {config.num_rounds} rounds"),
        _of_largest(measured),
    ]


def _of_largest(measured: xr.Dataset) -> Table:
    """Gains per model for seeds whose largest client is small, and for the others."""
    share, excess = measured.largest_share, _excess(measured)
    is_large = share > share.median("seed")
    about = [
        [
            source,
            algorithm,
            *(f"{100 * x:.0f} %" for x in share.sel(source=source).quantile([0, 0.5, 1], "seed")),
            *(number(each.where(half).median("seed").item()) for half in (~here, here)),
            number(_rank_correlation(share.sel(source=source), each), missing="none"),
        ]
        for source in share.source.values.tolist()
        for algorithm in _ALGORITHMS
        for here in [is_large.sel(source=source)]
        for each in [excess.sel(source=source, algorithm=algorithm)]
    ]
    header = (
        *("source", "algorithm", "least share", "median share", "largest share"),
        *("g / M, small shares", "g / M, large shares", "Spearman's rho"),
    )
    title = "The largest client's share of the examples, and the mean of test g / M over M > 1"
    return Table(header=header, rows=tuple(map(tuple, about)), title=title)


def figure(result: xr.Dataset, measured: xr.Dataset, config: GainVersusModels) -> Figure:
    """Draws gains against M on training and test examples, with one row per learner."""
    rows = []
    for source in config.sources:
        paper = measured.sel(source=source, target="g").rename(part="of")
        panels = gain_panels(paper.gain, paper.gain_standard_error, "gain $g$")
        rows.append([panel._replace(title=f"{source}, {panel.title}") for panel in panels])
    about, size = result.attrs["manifest"], config.cohort_size
    who = f"{f'K = {size} of ' if size else ''}N = {config.num_clients} clients"
    names = " and ".join(dict.fromkeys(about["datasets"]))
    return plots.draw(
        rows,
        title=f"{names} ({about['data']} data), {who}, $T_1$ = {config.num_rounds}",
        caption=f"Median gains of {config.num_seeds} seeds with standard errors, where at $T_M$ "
        "every model first has FedAvg's accuracy after $T_1$ rounds, and $g=MT_1/T_M$ counts as "
        f"the lowest if some model does not in {config.most_rounds} rounds.",
    )


def _figure(id: str, settings: GainVersusModels) -> Item:
    of_paper = partial(measure, published(id)["FedAvg's accuracy"])
    judge = judge_full if settings.cohort_size is None else judge_partial
    return Item(id, settings, run_gain, of_paper, judge, table, figure)


def _of_both(**how: Any) -> tuple[Learner, ...]:
    return (SyntheticLearner(**how), SyntheticLearner(**how, generator="leaf"))


_A, _B = _of_both(dim=60, num_classes=5), _of_both(dim=30, num_classes=10)
_ALL: dict[str, Any] = {"num_clients": 100, "num_rounds": 70, "num_seeds": 16}
_SOME = _ALL | {"num_clients": 200, "cohort_size": 32, "num_rounds": 200, "record_every": 4}
_FACES: dict[str, Any] = {"num_clients": 96, "num_rounds": 75, "num_seeds": 8}
_FACES |= {"record_every": 5, "num_models": (1, 2, 4, 8), "budget": 2.0}
_ALL_A, _ALL_B = (GainVersusModels(learners=both, **_ALL) for both in (_A, _B))
_SOME_A, _SOME_B = (GainVersusModels(learners=both, **_SOME) for both in (_A, _B))
_ALL_C = GainVersusModels(learners=(FacesLearner(),), **_FACES)
_SOME_C = GainVersusModels(learners=(FacesLearner(),), **_FACES, cohort_size=24)

ITEMS = (
    _figure("mfa-fig6a", _ALL_A),
    _figure("mfa-fig6b", _ALL_B),
    _figure("mfa-fig6c", _ALL_C),
    _figure("mfa-fig7a", _SOME_A),
    _figure("mfa-fig7b", _SOME_B),
    _figure("mfa-fig7c", _SOME_C),
)
"""Figures 6 and 7."""
