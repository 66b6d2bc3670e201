"""Bhuyan, Moharir, Joshi, section 7.1: the gain of training several models of one task."""

import dataclasses
import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, PRNGKeyArray
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm.assignment import mfa_rand, mfa_rr
from fedjax_mm.base import Params
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.tasks import Count, Flag, Positive
from fedjax_mm.papers.bhuyan2022.accuracy import (
    ABOVE_MAJORITY,
    DRAWS,
    NOT_GIVEN,
    PARTS,
    SURROGATE,
    Trainings,
    accuracies_of,
    joined,
    majority,
    rounds_to_targets,
    verdict,
)
from fedjax_mm.papers.bhuyan2022.learners import FacesLearner, Learner, SyntheticLearner
from fedjax_mm.papers.old import Claim, Judgement, Reproduction
from fedjax_mm.results import plots
from fedjax_mm.results.metrics import gain, standard_error
from fedjax_mm.sweeps.execute import Execution, sweep
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.sweeps.until import Until
from fedjax_mm.tasks.view import View

_ASSIGNMENTS: dict[str, Any] = {"MFA-Rand": mfa_rand, "MFA-RR": mfa_rr}


class GainVersusModels(Trainings):
    """Settings of Figures 6 and 7: several models of one task, until all are as good as FedAvg's.

    Multi-model training may take `budget` times T_1 rounds.
    """

    learner: Learner
    cohort_size: Count | None = None
    redraw: Literal["frame", "round"] = "frame"
    """When MFA-RR draws a cohort; see `mfa_rr`."""
    num_models: Annotated[tuple[Count, ...], Field(min_length=2)] = (1, 2, 4, 5, 8, 10, 16, 20)
    budget: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 3.0
    published: tuple[Positive, Positive]
    """Accuracies of FedAvg after T_1 rounds, train and test, in percent."""
    tolerance: Positive
    """Points by which FedAvg's accuracies may differ from the published ones."""
    stop: Flag = True
    """Whether runs end once they have reached FedAvg's accuracies, or go on for all rounds."""

    @model_validator(mode="after")
    def _models_fit(self) -> Self:
        if list(self.num_models) != sorted({1, *self.num_models}):
            raise ValueError(
                f"num_models is {list(self.num_models)}; it must increase from 1, the baseline"
            )
        for num_models in self.num_models:
            mfa_rr(self.num_clients, num_models, cohort_size=self.cohort_size)
        return self

    @property
    def most_rounds(self) -> int:
        """The budget in rounds, all recorded."""
        return math.ceil(self.budget * self.num_rounds / self.resolution) * self.resolution


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Aiming(View):
    """A task that also records by how much a model's accuracies fall short of its targets.

    Attributes:
      targets: ``[parts]``.
    """

    targets: Array

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> dict[str, Float[Array, ""]]:
        """The task's metrics and the largest shortfall."""
        found = self.task.metrics(rng_key, params)
        reached = jnp.stack([found[f"{part}_accuracy"] for part in PARTS])
        return found | {"shortfall": jnp.max(self.targets - reached)}


def run_gain(config: GainVersusModels, execution: Execution | None = None) -> xr.Dataset:
    """Accuracies of every model, for both algorithms and every M, each seed with its own data.

    One model comes first: FedAvg's accuracies after T_1 rounds are the targets of several models,
    at which these end.
    """
    learner, execution = config.learner, execution or Execution()
    data = learner.data(config.num_clients, config.num_seeds, config.seed, config.directory)

    def build(
        algorithm: str, num_models: int, data: FederatedData, which: Any, targets: Any, seed_: Any
    ) -> Setup:
        task = learner.task(data.select(which))
        start = learner.start(task)
        aims = targets[list(_ASSIGNMENTS).index(algorithm), jnp.asarray(seed_, int)]
        aiming = _Aiming(task, task.num_clients, aims)
        settings: dict[str, Any] = {"cohort_size": config.cohort_size}
        if algorithm == "MFA-RR":
            settings["redraw"] = config.redraw
        assignment = _ASSIGNMENTS[algorithm](config.num_clients, num_models, **settings)
        return Setup(aiming, learner.algorithm(), assignment, start)

    which = np.arange(config.num_seeds) % len(data.train.counts)

    def runs(num_models: tuple[int, ...], num_rounds: int, targets: np.ndarray) -> xr.Dataset:
        name = "alone" if num_models == (1,) else "together"
        saved = execution.checkpoints and execution.checkpoints.stage(name)
        with saved or nullcontext():
            return sweep(
                build,
                {"algorithm": list(_ASSIGNMENTS), "num_models": list(num_models)},
                num_rounds=num_rounds,
                num_seeds=config.num_seeds,
                seed=config.seed,
                shared={"data": data, "targets": targets},
                per_seed={"which": which, "seed_": np.arange(config.num_seeds)},
                record_every=config.resolution,
                until=Until("shortfall", at_most=0.0) if config.stop else None,
                data=data.kind,
                execution=execution._replace(checkpoints=saved),
            )

    beyond = np.full((len(_ASSIGNMENTS), config.num_seeds, len(PARTS)), 2, np.float32)
    alone = runs((1,), config.num_rounds, beyond)
    curves = alone.isel(num_models=0, model=0)
    start, targets = (
        np.stack([curves[f"{part}_accuracy"].isel(round=i).values for part in PARTS], axis=-1)
        for i in (0, -1)
    )
    # A target that the start meets would end a run there, where it does not count.
    has_learned = (targets > start).any(axis=-1, keepdims=True)
    targets = np.where(has_learned, targets, beyond)
    together = runs(config.num_models[1:], config.most_rounds, targets)
    result = joined(alone, together, "num_models")
    draws = [data.select(i) for i in which]
    accuracies = accuracies_of(result, config, draws)
    accuracies.attrs["manifest"]["draws"] = len(data.train.counts)
    for part in PARTS:
        accuracies[f"{part}_majority"] = "seed", [majority(getattr(d, part)) for d in draws]
    return accuracies


def judge_gain(dataset: xr.Dataset, config: GainVersusModels) -> Judgement:
    """T_M and g = M T_1 / T_M per seed, the median gain over seeds, and the paper's claims."""
    gains = {part: _gains(dataset[f"{part}_accuracy"], config) for part in PARTS}
    fedavg = {part: _fedavg(dataset, part, config) for part in PARTS}
    measured = {
        "fedavg": fedavg,
        "gain": {
            part: {label: _gain_numbers(values.sel(algorithm=label)) for label in _ASSIGNMENTS}
            for part, values in gains.items()
        },
    }
    claims = [*_level_claims(fedavg, config, dataset.attrs["manifest"]["data"])]
    for part in PARTS:
        claims += _gain_claims(part, gains[part])
    header = ("part", "algorithm", *(f"M = {m}" for m in config.num_models))
    rows = [
        (
            part,
            label,
            *(_gain_text(values.sel(algorithm=label, num_models=m)) for m in config.num_models),
        )
        for part, values in gains.items()
        for label in _ASSIGNMENTS
    ]
    return Judgement(measured, tuple(claims), (header, *rows))


def _gains(accuracy: xr.DataArray, config: GainVersusModels) -> xr.DataArray:
    """The gain over ``(algorithm, num_models, seed)``."""
    targets = accuracy.sel(num_models=1, round=config.num_rounds).isel(model=0, drop=True)
    rounds = rounds_to_targets(accuracy, targets.drop_vars(("num_models", "round")))
    rounds = rounds.transpose("algorithm", "num_models", "seed")
    models = rounds.num_models.values[:, None]
    return rounds.copy(data=gain(models, config.num_rounds, rounds.values))


def _fedavg(dataset: xr.Dataset, part: str, config: GainVersusModels) -> dict[str, Any]:
    """FedAvg's accuracy after T_1 rounds, in percent, over seeds."""
    curves = dataset[f"{part}_accuracy"].sel(algorithm="MFA-RR", num_models=1).isel(model=0)
    accuracy = 100 * curves.sel(round=config.num_rounds).values
    majority = 100 * dataset[f"{part}_majority"].values
    return {
        "accuracy": accuracy.mean(),
        "standard_error": standard_error(accuracy),
        "per_seed": accuracy,
        "majority": majority.mean(),
        "majority_per_seed": majority,
        "published": config.published[PARTS.index(part)],
    }


def _gain_numbers(gains: xr.DataArray) -> dict[str, Any]:
    values = gains.transpose("num_models", "seed").values
    median, error = _median(values)
    return {
        "num_models": gains.num_models.values,
        "median": median,
        "standard_error": error,
        "reached": np.isfinite(values).sum(-1),
        "per_seed": values,
    }


def _median(gains: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The median over seeds, the last axis, and its bootstrap standard error.

    A gain that was not reached is below all others. Where accuracies go up and down, a target may
    be passed by chance early on: a single seed can then rule a mean, but not a median.
    """
    values = np.where(np.isnan(gains), -np.inf, gains)
    median, error = _middle(values), _middle_error(values)
    known = np.isfinite(median)
    return np.where(known, median, np.nan), np.where(known & np.isfinite(error), error, np.nan)


def _middle(values: np.ndarray) -> np.ndarray:
    """The median along the last axis, which may hold infinities, of one sign beside each other."""
    ordered, size = np.sort(values, axis=-1), values.shape[-1]
    low, high = ordered[..., (size - 1) // 2], ordered[..., size // 2]
    return np.where(low == high, low, (low + high) / 2)


def _middle_error(values: np.ndarray) -> np.ndarray:
    """Half of what lies between the bootstrap's standard errors; NaN for one seed."""
    size = values.shape[-1]
    if size < 2:
        return np.full(values.shape[:-1], np.nan)
    seeds = np.random.default_rng(0).integers(size, size=(1000, size))
    with np.errstate(invalid="ignore"):
        middle = np.sort(_middle(values[..., seeds]), axis=-1)
        return np.asarray((middle[..., 841] - middle[..., 158]) / 2)


def _gain_text(gains: xr.DataArray) -> str:
    """Median and standard error; where seeds did not get there, how many did not."""
    (median,), (error,) = _median(gains.values[None])
    missed = int(np.isnan(gains).sum())
    if np.isnan(median):
        return f"not reached\nin {missed} of {gains.size}"
    spread = f"\n± {error:.2f}" if np.isfinite(error) else ""
    return f"{median:.2f}" + spread + f"\n{missed} not reached" * (missed > 0)


def _level_claims(
    fedavg: Mapping[str, Mapping[str, Any]], config: GainVersusModels, data: str
) -> list[Claim]:
    """FedAvg's accuracies against the published ones and against the most frequent class."""
    text = "; ".join(
        f"{part} {values['accuracy']:.1f} (standard error {values['standard_error']:.1f}, "
        f"published {values['published']:g}, most frequent class {values['majority']:.1f})"
        for part, values in fedavg.items()
    )
    points = config.tolerance
    is_near = all(abs(each["accuracy"] - each["published"]) <= points for each in fedavg.values())
    is_above = all(
        each["accuracy"] - each["majority"] >= ABOVE_MAJORITY for each in fedavg.values()
    )
    near = f"FedAvg after {config.num_rounds} rounds is within {points:g} points of the published"
    above = f"FedAvg is at least {ABOVE_MAJORITY} points above the most frequent class"
    claims = [Claim(above, is_above, text)]
    return claims if data == "surrogate" else [Claim(near, is_near, text), *claims]


def _gain_claims(part: str, gains: xr.DataArray) -> list[Claim]:
    """More than 1; increasing with M up to noise; less than M; MFA-RR not below MFA-Rand.

    A median that was not reached within the budget makes its claims fail: what is known of it is
    only that it is less than M over the budget.
    """
    models = gains.num_models.values
    values = gains.sel(algorithm=list(_ASSIGNMENTS)).values  # algorithm, models, seed
    median, error = _median(values)
    text = "; ".join(
        f"{label} "
        + ", ".join(f"{m}: {g:.2f} ± {e:.2f}" for m, g, e in zip(models, *pair, strict=True))
        for label, pair in zip(_ASSIGNMENTS, zip(median, error, strict=True), strict=True)
    )
    noise = 2 * np.hypot(*(_known(error[:, part]) for part in (_LATER, _EARLIER)))
    # Where a target was not reached is NaN, which makes the first three False.
    rises = np.diff(median, axis=-1) + noise >= 0
    differences = _ahead(*values)
    ahead, ahead_error = _middle(differences), _known(_middle_error(differences))
    by = ", ".join(
        f"{m}: {a:+.2f} ± {e:.2f}" for m, a, e in zip(models, ahead, ahead_error, strict=True)
    )
    above, below = bool((median[:, 1:] > 1).all()), bool((median[:, 1:] < models[1:]).all())
    return [
        Claim(f"{part}: the gain is above 1 for every M > 1", above, text),
        Claim(
            f"{part}: the gain increases with M (up to 2 standard errors)", bool(rises.all()), text
        ),
        Claim(f"{part}: the gain is sub-linear, below M", below, text),
        Claim(
            f"{part}: MFA-RR's gain is not below MFA-Rand's (up to 2 standard errors)",
            bool((ahead + 2 * ahead_error >= 0).all()),
            f"RR minus Rand, by seeds {by}",
        ),
    ]


def _known(errors: np.ndarray) -> np.ndarray:
    """The errors; 0, which forgives nothing, where they are not known."""
    return np.where(np.isfinite(errors), errors, 0.0)


_LATER, _EARLIER = slice(1, None), slice(None, -1)


def _ahead(rand: np.ndarray, rr: np.ndarray) -> np.ndarray:
    """RR minus Rand; infinite where one was not reached, and -inf where neither was."""
    with np.errstate(invalid="ignore"):
        difference = np.where(np.isnan(rr), -np.inf, rr) - np.where(np.isnan(rand), -np.inf, rand)
    return np.where(np.isnan(difference), -np.inf, difference)


def plot_gain(dataset: xr.Dataset, config: GainVersusModels, judgement: Judgement) -> Figure:
    """FedAvg's accuracy with its baselines, and the gain against M for train and test."""
    numbers = judgement.measured["gain"]
    coords = {"part": list(PARTS), "algorithm": list(_ASSIGNMENTS), "M": list(config.num_models)}

    def grid(name: str) -> xr.DataArray:
        values = [[numbers[part][label][name] for label in _ASSIGNMENTS] for part in PARTS]
        return xr.DataArray(values, coords)

    curves = xr.concat(
        [
            100 * dataset[f"{part}_accuracy"].sel(algorithm="MFA-RR", num_models=1).isel(model=0)
            for part in PARTS
        ],
        xr.IndexVariable("part", list(PARTS)),
    ).sel(round=slice(0, config.num_rounds))
    levels = {
        part: {"published": values["published"], "majority class": values["majority"]}
        for part, values in judgement.measured["fedavg"].items()
    }
    about = dataset.attrs["manifest"]
    who = f"K = {config.cohort_size} of N" if config.cohort_size else "N"
    return plots.accuracy_and_gain(
        curves,
        levels,
        grid("median"),
        grid("standard_error"),
        title=f"{about['datasets'][0]} ({about['data']} data), {who} = {config.num_clients} "
        f"clients, $T_1$ = {config.num_rounds}",
        caption=f"{config.num_seeds} seeds of training on {about['draws']} draws of the data: mean "
        "accuracies and median gains, with standard errors; recorded every "
        f"{config.resolution} rounds. A seed that did not reach its targets within "
        f"{config.most_rounds} rounds counts as the lowest gain. " + verdict(judgement),
    )


_A = SyntheticLearner(dim=60, num_classes=5)
_B = SyntheticLearner(dim=30, num_classes=10)


def _figure(
    number: str,
    learner: SyntheticLearner | FacesLearner,
    published: tuple[float, float],
    **settings: Any,
) -> Reproduction:
    is_faces = isinstance(learner, FacesLearner)
    open_points = [NOT_GIVEN, SURROGATE if is_faces else DRAWS]
    if "cohort_size" in settings:
        open_points.append(
            "the paper samples clients every round; under MFA-RR that would undo the rotation, so "
            "its cohort is held for a frame (redraw = round is the paper's reading)"
        )
    return Reproduction(
        id=f"mfa-fig{number}",
        paper={
            "figure": f"Figure {number[0]}({number[1]}): gain against M, curves without numbers",
            "FedAvg's accuracy": dict(zip(PARTS, published, strict=True)),
            "open": open_points,
        },
        config=GainVersusModels(learner=learner, published=published, **settings),
        run=run_gain,
        judge=judge_gain,
        plot=plot_gain,
    )


_FULL: dict[str, Any] = {"num_clients": 100, "num_rounds": 70, "num_seeds": 8, "tolerance": 12}
_PARTIAL: dict[str, Any] = {
    "num_clients": 200,
    "cohort_size": 32,
    "num_rounds": 200,
    "num_seeds": 8,
    "tolerance": 15,
    "record_every": 2,
}
_FACES: dict[str, Any] = {
    "num_clients": 96,
    "num_rounds": 75,
    "num_seeds": 2,
    "tolerance": 15,
    "record_every": 5,
    "num_models": (1, 2, 4, 8),
    "budget": 2.0,
}

REPRODUCTIONS = (
    _figure("6a", _A, (51, 51), **_FULL),
    _figure("6b", _B, (42.7, 42.8), **_FULL),
    _figure("6c", FacesLearner(), (79, 68), **_FACES),
    _figure("7a", _A, (61.1, 61.3), **_PARTIAL),
    _figure("7b", _B, (58.4, 57.7), **_PARTIAL),
    _figure(
        "7c",
        FacesLearner(),
        (78, 71.5),
        **_FACES,
        cohort_size=24,
    ),
)
"""Figures 6 and 7."""
