"""Figures 6 and 7: the gain of training several models of one task."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, PRNGKeyArray
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm import plots
from fedjax_mm.assignments.partitions import mfa_rand, mfa_rr
from fedjax_mm.base import Metrics, Params
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.fields import Count, Flag, Positive
from fedjax_mm.metrics import gain
from fedjax_mm.papers.bhuyan2022 import accuracy
from fedjax_mm.papers.bhuyan2022.accuracy import PARTS, TARGETS, Trainings, by_part
from fedjax_mm.papers.bhuyan2022.gains import Models, gain_panels
from fedjax_mm.papers.bhuyan2022.learners import (
    FacesLearner,
    Learner,
    SyntheticLearner,
    check_files,
)
from fedjax_mm.papers.claims import Claim, Estimate, claim, estimate
from fedjax_mm.papers.item import Item, published
from fedjax_mm.papers.tables import Table, cells, columns, rows
from fedjax_mm.results.labels import describe
from fedjax_mm.sweeps.execute import Execution, sweep
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.sweeps.until import Until
from fedjax_mm.tasks.view import View

_ALGORITHMS = ("MFA-Rand", "MFA-RR")


class GainVersusModels(Trainings):
    """Settings of Figures 6 and 7: several models of one task, until all are as good as FedAvg's.

    Multi-model training may take `budget` times T_1 rounds.
    """

    learner: Learner
    cohort_size: Count | None = None
    redraw: Literal["frame", "round"] = "frame"
    """When MFA-RR draws a cohort; see `mfa_rr`."""
    num_models: Annotated[Models, Field(min_length=2)] = (1, 2, 4, 5, 8, 10, 16, 20)
    budget: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 3.0
    tolerance: Positive
    """Points by which FedAvg's accuracies may differ from the published ones."""
    stop: Flag = False
    """Whether runs end once they have reached FedAvg's accuracies, or go on for all rounds.

    A run that has ended says nothing about means over a window: that gain is then left out.
    """

    @model_validator(mode="after")
    def _models_fit(self) -> Self:
        for num_models in self.num_models:
            mfa_rr(self.num_clients, num_models, cohort_size=self.cohort_size)
        check_files(self.directory, self.learner)
        return self

    @property
    def most_rounds(self) -> int:
        """Returns the budget in rounds, all recorded."""
        return math.ceil(self.budget * self.num_rounds / self.resolution) * self.resolution

    @property
    def targets(self) -> list[str]:
        """Returns the gains that the runs are long enough for."""
        return [target for target in TARGETS if not (self.stop and target == "window")]

    def setup(
        self, algorithm: str, num_models: int, data: FederatedData, draw: Any, targets: Array
    ) -> Setup:
        """Returns one algorithm with M models of the draw's task, which aim at its targets."""
        learner, draw = self.learner, jnp.asarray(draw, int)
        task = learner.task(accuracy.draw_of(data, draw))
        aiming = _Aiming(task, task.num_clients, targets[_ALGORITHMS.index(algorithm), draw])
        assign = partial(mfa_rr, redraw=self.redraw) if algorithm == "MFA-RR" else mfa_rand
        assignment = assign(self.num_clients, num_models, cohort_size=self.cohort_size)
        return Setup(aiming, learner.algorithm(), assignment, learner.start(task))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Aiming(View):
    """A task that also records by how much a model's accuracies fall short of its targets.

    Attributes:
      targets: ``[parts]``.
    """

    targets: Array

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> Metrics:
        """Returns the task's metrics and the largest shortfall."""
        found = self.task.metrics(rng_key, params)
        reached = jnp.stack([found[f"{part}_accuracy"] for part in PARTS])
        return found | {"shortfall": jnp.max(self.targets - reached)}


def run_gain(config: GainVersusModels, execution: Execution | None = None) -> xr.Dataset:
    """Returns accuracies of every model, for both algorithms and every M."""
    execution, data = execution or Execution(), config.learner.data(config)

    def runs(stage: str, num_models: Sequence[int], rounds: int, targets: np.ndarray) -> xr.Dataset:
        saved = execution.checkpoints and execution.checkpoints.stage(stage)
        with saved or nullcontext():
            return sweep(
                config.setup,
                {"algorithm": list(_ALGORITHMS), "num_models": list(num_models)},
                num_rounds=rounds,
                **config.replicas,
                shared={"data": data, "targets": targets},
                per_seed={"draw": np.arange(config.num_seeds)},
                record_every=config.resolution,
                until=Until("shortfall", at_most=0.0) if config.stop else None,
                data=data.kind,
                execution=execution._replace(checkpoints=saved),
            )

    # FedAvg on one model comes first, with targets that no accuracy reaches: its accuracies after
    # T_1 rounds are the targets of several models, at which these end.
    beyond = np.full((len(_ALGORITHMS), config.num_seeds, len(PARTS)), 2, np.float32)
    alone = runs("alone", (1,), config.num_rounds, beyond)
    curves = by_part(alone.isel(num_models=0, model=0), "accuracy")
    curves = curves.transpose("round", "algorithm", "seed", "part")
    start, end = curves.values[[0, -1]]
    # A target that the start meets would end a run there, where it does not count.
    targets = np.where((end > start).any(axis=-1, keepdims=True), end, beyond)
    together = runs("together", config.num_models[1:], config.most_rounds, targets)
    both = xr.concat([alone, together], "num_models", join="outer", combine_attrs="override")
    about, first = together.attrs["manifest"], alone.attrs["manifest"]["wall_seconds"]
    seconds = {name: about["wall_seconds"][name] + first[name] for name in ("compile", "run")}
    both.attrs["manifest"] = about | {"wall_seconds": seconds, "draws": len(data.train.counts)}
    shares = {part: accuracy.majorities(data, part, config.num_seeds) for part in PARTS}
    found = accuracy.accuracies_of(both, [data])
    return found.assign({f"{part}_majority": ("seed", share) for part, share in shares.items()})


def median(samples: xr.DataArray) -> Estimate:
    """Returns the median over seeds, and its standard error by the bootstrap.

    Args:
      samples: over dimensions with "seed"; -inf and inf are below and above all other numbers.
    """
    # Where accuracies go up and down, a target may be passed by chance early on: a single seed can
    # then rule a mean, but not a median.
    values = samples.transpose(..., "seed")
    size, center = samples.sizes["seed"], values.isel(seed=0, drop=True)
    drawn = np.random.default_rng(0).integers(size, size=(1000, size))
    with np.errstate(invalid="ignore"):  # inf - inf, of seeds that did not get there
        middle = np.median(values.values, axis=-1)
        resampled = np.sort(np.median(values.values[..., drawn], axis=-1), axis=-1)
        error = (resampled[..., 841] - resampled[..., 158]) / 2  # one standard error each way
    is_known = np.isfinite(error) & (size > 1)
    return Estimate(center.copy(data=middle), center.copy(data=np.where(is_known, error, np.nan)))


def measure(paper: Mapping[str, float], result: xr.Dataset, config: GainVersusModels) -> xr.Dataset:
    """Returns FedAvg's accuracies in percent, and M T_1 / T_M with its median over seeds."""
    curves = by_part(result, "accuracy").rename(num_models="M")
    alone = curves.sel(M=1, round=slice(config.num_rounds), drop=True).isel(model=0, drop=True)
    rounds = accuracy.rounds_to_all(alone, curves, config.records_in_window)
    single, several = (each.sel(target=config.targets) for each in rounds)
    ratios = xr.apply_ufunc(gain, several.M, single, several)
    gains = ratios.transpose("part", "target", "algorithm", "M", "seed")
    # A gain that was not reached is below all others.
    middle, error = median(gains.fillna(-np.inf))
    is_known = np.isfinite(middle)
    percent = 100 * alone.sel(round=config.num_rounds, algorithm="MFA-RR", drop=True)
    majority = 100 * by_part(result, "majority")
    return xr.Dataset(
        {
            "accuracy": percent.mean("seed"),
            "accuracy_standard_error": estimate(percent).error,
            "accuracy_per_seed": percent,
            "majority": majority.mean("seed"),
            "majority_per_seed": majority,
            "published": ("part", [paper[part] for part in PARTS]),
            "gain": middle.where(is_known),
            "gain_standard_error": error.where(is_known),
            "gain_per_seed": gains,
            "rounds_alone": single,
            "reached": gains.notnull().sum("seed"),
        },
        attrs={"data": result.attrs["manifest"]["data"]},
    )


def claims(measured: xr.Dataset, config: GainVersusModels) -> Sequence[Claim]:
    """FedAvg learns, as well as published; the gain is above 1, increases and is below M."""
    ours = describe(measured.accuracy, measured.accuracy_standard_error, ".1f")
    others = [describe(measured.published, form="g"), describe(measured.majority, form=".1f")]
    evidence = f"{ours} (published {others[0]}; most frequent class {others[1]})"
    after = f"FedAvg after {config.num_rounds} rounds"
    near = f"{after} is within {config.tolerance:g} points of the published"
    is_near = abs(measured.accuracy - measured.published) <= config.tolerance
    ahead = measured.accuracy - measured.majority
    # Accuracies on invented images say nothing about the published ones.
    found = [] if measured.attrs["data"] == "surrogate" else [claim(near, is_near, evidence)]
    found.append(accuracy.beats_majority("FedAvg", ahead, evidence))
    for part, target in itertools.product(PARTS, config.targets):
        found += _of_gains(f"{part}, {target}", measured.sel(part=part, target=target))
    return found


def _of_gains(what: str, measured: xr.Dataset) -> list[Claim]:
    # A median that was not reached is NaN, which makes the first three claims fail: all that is
    # known is that it is less than M over the budget.
    text = describe(measured.gain, measured.gain_standard_error)
    more = measured.gain.isel(M=slice(1, None))
    error = measured.gain_standard_error.fillna(0).values  # an unknown error forgives nothing
    rises = measured.gain.diff("M") + 2 * np.hypot(error[:, 1:], error[:, :-1]) >= 0
    seeds = measured.gain_per_seed.fillna(-np.inf)
    rand, rr = (seeds.sel(algorithm=name, drop=True) for name in _ALGORITHMS)
    with np.errstate(invalid="ignore"):
        # Where one of both was not reached the other is ahead, and where neither was, MFA-Rand.
        ahead = median((rr - rand).fillna(-np.inf))
    leads = ahead.mean + 2 * ahead.error.fillna(0) >= 0
    errors, by_seeds = "(up to 2 standard errors)", f"RR minus Rand, by seeds: {ahead.text()}"
    return [
        claim(f"{what}: the gain is above 1 for every M > 1", more > 1, text),
        claim(f"{what}: the gain increases with M {errors}", rises, text),
        claim(f"{what}: the gain is sub-linear, below M", more < more.M, text),
        claim(f"{what}: MFA-RR's gain is not below MFA-Rand's {errors}", leads, by_seeds),
    ]


def table(measured: xr.Dataset, config: GainVersusModels) -> Sequence[Table]:
    """Returns the median gains, and how many seeds did not get there."""
    missed = config.num_seeds - measured.reached
    text = "\nnot reached\nin " + missed.astype(str).astype(object) + f" of {config.num_seeds}"
    gains = cells(measured.gain, measured.gain_standard_error, missing="no median")
    found = columns(gains + xr.where(missed > 0, text, ""), "M")
    return [rows(found, ("part", "target", "algorithm"))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: GainVersusModels) -> Figure:
    """Draws, for train and test, FedAvg's accuracy with its baselines and the gains against M."""
    curves = by_part(result, "accuracy").sel(algorithm="MFA-RR", num_models=1, drop=True)
    curves = 100 * curves.isel(model=0, drop=True).sel(round=slice(0, config.num_rounds))
    flat = xr.DataArray(np.zeros(2), {"round": [0, config.num_rounds]})
    panels = []
    for part in PARTS:
        here = measured.sel(part=part)
        fedavg = [
            *plots.lines(*estimate(curves.sel(part=part)), "-", label="ours"),
            *plots.lines(here.published + flat, style="--", label="published", color=1),
            *plots.lines(here.majority + flat, style=":", label="most frequent class", color=2),
        ]
        title = f"{part}: FedAvg on one model"
        levels = plots.Panel(title, "round $t$", "accuracy in percent", fedavg)
        gains = gain_panels(here.gain, here.gain_standard_error, "gain")
        panels.append([levels, *(each._replace(title=f"{part}: {each.title}") for each in gains)])
    about, size = result.attrs["manifest"], config.cohort_size
    who = f"{f'K = {size} of ' if size else ''}N = {config.num_clients} clients"
    return plots.draw(
        panels,
        title=f"{about['datasets'][0]} ({about['data']} data), {who}, $T_1$ = {config.num_rounds}",
        caption=f"{config.num_seeds} seeds of training on {about['draws']} draws of the data: mean "
        "accuracies and median gains, with standard errors; recorded every "
        f"{config.resolution} rounds. {config.about_gains(config.targets)} A seed that did not "
        f"reach its targets within {config.most_rounds} rounds counts as the lowest gain.",
    )


def _figure(settings: GainVersusModels, id: str, title: str) -> Item:
    of_paper = partial(measure, published(__name__, id)["FedAvg's accuracy"])
    return Item(id, title, settings, run_gain, of_paper, claims, table, figure)


_A, _B = SyntheticLearner(dim=60, num_classes=5), SyntheticLearner(dim=30, num_classes=10)
_ALL: dict[str, Any] = {"num_clients": 100, "num_rounds": 70, "num_seeds": 8, "tolerance": 12}
_SOME = _ALL | {"num_clients": 200, "cohort_size": 32, "num_rounds": 200}
_SOME |= {"tolerance": 15, "record_every": 2}
_FACES: dict[str, Any] = {"num_clients": 96, "num_rounds": 75, "num_seeds": 2, "tolerance": 15}
_FACES |= {"record_every": 5, "num_models": (1, 2, 4, 8), "budget": 2.0}
_ALL_A, _ALL_B = (GainVersusModels(learner=learner, **_ALL) for learner in (_A, _B))
_SOME_A, _SOME_B = (GainVersusModels(learner=learner, **_SOME) for learner in (_A, _B))
_ALL_C = GainVersusModels(learner=FacesLearner(), **_FACES)
_SOME_C = GainVersusModels(learner=FacesLearner(), **_FACES, cohort_size=24)

ITEMS = (
    _figure(_ALL_A, id="mfa-fig6a", title="Gain against M, Synthetic(1,1)-A, all 100 clients"),
    _figure(_ALL_B, id="mfa-fig6b", title="Gain against M, Synthetic(1,1)-B, all 100 clients"),
    _figure(_ALL_C, id="mfa-fig6c", title="Gain against M, CNN on CelebA, all 96 clients"),
    _figure(_SOME_A, id="mfa-fig7a", title="Gain against M, Synthetic(1,1)-A, 32 of 200 clients"),
    _figure(_SOME_B, id="mfa-fig7b", title="Gain against M, Synthetic(1,1)-B, 32 of 200 clients"),
    _figure(_SOME_C, id="mfa-fig7c", title="Gain against M, CNN on CelebA, 24 of 96 clients"),
)
"""Figures 6 and 7."""
