"""Trains models alone with FedAvg, and several at once until all match FedAvg (section 7.2).

Each model has its own targets, its accuracies after T_1 rounds of FedAvg with all clients.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, PRNGKeyArray
from pydantic import ValidationInfo, model_validator

from fedjax_mm.assignments.partitions import full_participation, mfa_rr
from fedjax_mm.base import Metrics, Params
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.fields import Count
from fedjax_mm.metrics import estimate, gain
from fedjax_mm.papers.bhuyan2022 import accuracy
from fedjax_mm.papers.bhuyan2022.accuracy import PARTS, Trainings, by_part
from fedjax_mm.papers.bhuyan2022.gains import ASSIGNMENTS
from fedjax_mm.papers.training import described, train
from fedjax_mm.papers.values import Several
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.view import View


class Model(NamedTuple):
    """A model, given by its name, the index of its learner, and its label column."""

    name: str
    learner: int
    column: int


class Drawn(NamedTuple):
    """Data and first parameters of the models of every learner.

    Attributes:
      stacks: the data, with all draws.
      starts: the initial parameters.
    """

    stacks: list[FederatedData]
    starts: list[Params]


class Together(Trainings):
    """Settings for running FedAvg on each model alone, and several models at once."""

    algorithms: Several[Literal["MFA-Rand", "MFA-RR"]] = ("MFA-RR",)
    num_models: Several[Count] | None = None
    """Numbers M of models trained at once, always the first M. Defaults to all models."""

    @property
    def models(self) -> list[Model]:
        """All models: the first of each learner, then the second of each, and so on."""
        found = [
            Model(name, i, column)
            for i, learner in enumerate(self.learners)
            for column, name in enumerate(learner.models)
        ]
        return sorted(found, key=lambda model: model.column)

    @property
    def at_once(self) -> tuple[int, ...]:
        """The numbers of models trained at once."""
        return self.num_models or (len(self.models),)

    @model_validator(mode="after")
    def _models_fit(self, info: ValidationInfo) -> Self:
        for num_models in self.at_once:
            if num_models > len(self.models):
                raise ValueError(f"num_models has {num_models}; there are {len(self.models)}")
            mfa_rr(self.num_clients, num_models)
        return self.with_files(info)

    def alone(self, which: int, drawn: Drawn, seed: int) -> Setup:
        """Sets up FedAvg with all clients on one model."""
        model = self.models[which]
        algorithm = self.learners[model.learner].algorithm(self)
        everybody = full_participation(self.num_clients)
        return Setup(
            self._task(model, drawn, seed), algorithm, everybody, drawn.starts[model.learner]
        )

    def together(
        self,
        algorithm: str,
        num_models: int,
        drawn: Drawn,
        targets: np.ndarray,
        seed: int,
    ) -> Setup:
        """Sets up an algorithm on the first models, which aim at their targets on this draw."""
        models = self.models[:num_models]
        aims = map(jnp.asarray, targets[:, seed - self.first_seed])
        tasks = [self._task(model, drawn, seed) for model in models]
        tasks = [
            Aiming(task, task.num_clients, aim) for task, aim in zip(tasks, aims, strict=False)
        ]
        # Stack the models of one learner, because they share an algorithm.
        training = [learner.algorithm(self) for learner in self.learners]
        each = [training[model.learner] for model in models]
        assign = ASSIGNMENTS[algorithm](self.num_clients, num_models)
        return Setup(tasks, each, assign, [drawn.starts[model.learner] for model in models])

    def _task(self, model: Model, drawn: Drawn, seed: int) -> Any:
        """A model's task on a draw of its learner's data."""
        store = accuracy.draw_of(drawn.stacks[model.learner], seed - self.first_seed)
        return self.learners[model.learner].task(store, model.column)


def draw(config: Together) -> Drawn:
    """Draws the data of every learner, and its initial parameters."""
    stacks = [learner.data(config) for learner in config.learners]
    pairs = zip(config.learners, stacks, strict=True)
    starts = [each.start(each.task(accuracy.draw_of(stack, 0), 0)) for each, stack in pairs]
    return Drawn(stacks, starts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Aiming(View):
    """A task that also records how far a model's accuracies fall short of its targets.

    Attributes:
      targets: ``[parts]``.
    """

    targets: Array

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> Metrics:
        """Adds the largest shortfall to the task's metrics."""
        found = self.task.metrics(rng_key, params)
        reached = jnp.stack([found[f"{part}_accuracy"] for part in PARTS])
        return found | {"shortfall": jnp.max(self.targets - reached)}


def aims(alone: xr.DataArray) -> xr.DataArray:
    """FedAvg's final accuracies, at which runs of several models may stop.

    Args:
      alone: over ``("part", "round", ...)``.
    """
    start, end = alone.isel(round=0, drop=True), alone.isel(round=-1, drop=True)
    # Replace targets that the initial model already meets with unreachable ones, because they would
    # stop a run in round 0, which does not count.
    return end.where((end > start).any("part"), 2.0)


def run_together(config: Together, execution: Execution | None = None) -> xr.Dataset:
    """Accuracies of FedAvg on each model, and of several models trained at once."""
    how, models = execution or Execution(), config.models[: max(config.at_once)]
    drawn, every = draw(config), config.resolution
    stacks = drawn.stacks
    with how.stage("alone") as saving:
        build, axes = partial(config.alone, drawn=drawn), {"which": range(len(models))}
        alone = train(stacks, build, axes, config, saving, record_every=every)
    curves = by_part(alone.isel(model=0, drop=True).rename(which="model"), "accuracy")
    targets = aims(curves).transpose("model", "seed", "part").values.astype(np.float32)
    with how.stage("together") as saving:
        several = train(
            stacks,
            partial(config.together, drawn=drawn, targets=targets),
            {"algorithm": config.algorithms, "num_models": config.at_once},
            config,
            saving,
            num_rounds=config.most_rounds,
            until=config.until,
            record_every=every,
        )
    several = described(accuracy.accuracies_of(several), [several, alone])
    return _with_alone(several, curves, stacks, config)


def _with_alone(
    found: xr.Dataset, curves: xr.DataArray, stacks: Sequence[FederatedData], config: Together
) -> xr.Dataset:
    """Adds FedAvg's accuracies and the share of the most frequent class to the result."""
    models = config.models[: found.sizes["model"]]
    curves = curves.assign_coords(model=found["model"]).reindex(round=found["round"])
    for part in PARTS:
        shares = [
            accuracy.majorities(stacks[model.learner], part, config.num_seeds, model.column)
            for model in models
        ]
        found[f"{part}_majority"] = ("model", "seed"), shares
        found[f"{part}_alone"] = curves.sel(part=part, drop=True)
    return found.assign_coords(name=("model", [model.name for model in models]))


def measure(result: xr.Dataset, config: Together) -> xr.Dataset:
    """Accuracies in percent, the rounds T_M until all models match FedAvg, and gains.

    A model has no T_M if its run diverged or did not reach the targets.
    """
    names = result.name.values.tolist()
    several = by_part(result, "accuracy").rename(num_models="M").drop_vars("name")
    order = xr.DataArray(np.arange(len(names)), {"model": several["model"]})
    is_there = order < several.M
    alone = by_part(result, "alone").drop_vars("name").sel(round=slice(config.num_rounds))
    curves = several.fillna(-np.inf).where(is_there)
    rounds = accuracy.rounds_to_all(alone.fillna(np.inf), curves, config.records_in_window)
    single, multi = (each.sel(target=config.targets) for each in rounds)
    each = accuracy.rounds_to_all(
        alone.fillna(np.inf).rename(model="each"),
        curves.rename(model="each").expand_dims("model"),
        config.records_in_window,
    ).together.rename(each="model")
    own = each.sel(target=config.targets).where(is_there)
    # Replace M T_1 with the sum of the models' own rounds, because the models differ.
    gains = xr.apply_ufunc(partial(gain, 1), single.where(is_there).sum("model"), multi)
    own_gains = xr.apply_ufunc(gain, multi.M, single, own)
    last = multi.sel(target="g", drop=True).fillna(several["round"][-1]).astype(int)
    dims = ("part", "target", "algorithm", "M", "seed")
    mean, error = estimate(gains.transpose(*dims))
    measured = xr.Dataset(
        {
            "curve": 100 * several,
            "alone": 100 * alone.isel(round=-1, drop=True),
            "alone_curve": 100 * alone,
            "together": 100 * several.sel(round=last).drop_vars("round"),
            "majority": 100 * by_part(result, "majority").drop_vars("name"),
            "rounds_alone": single,
            "rounds": multi,
            "own_rounds": own,
            "own_gain_per_seed": own_gains,
            "gain_per_seed": gains.transpose(*dims),
            "gain": mean,
            "gain_standard_error": error,
            "reached": gains.notnull().sum("seed"),
        }
    )
    labels = [f"{n} {i}" if names.count(n) > 1 else n for i, n in enumerate(names, 1)]
    return measured.assign_coords(model=labels)
