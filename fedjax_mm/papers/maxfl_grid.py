"""Cho et al., section 5: every method at all points of the paper's grid, on the same clients."""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import xarray as xr
from pydantic import Field, TypeAdapter, model_validator

from fedjax_mm.algorithm_configs import Byzantine, Method, MethodConfig, Requiring, Share
from fedjax_mm.assignment import appealing, full_participation, mfa_rand
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.papers.maxfl_clients import (
    POPULATIONS,
    Dataset,
    Partition,
    Population,
    check_files,
    classifier,
    draw_clients,
    source_of,
)
from fedjax_mm.plan import Setup
from fedjax_mm.sweep import Execution, sweep
from fedjax_mm.task_configs import Config, Count, Positive, Seed

POINT = ("variant", "learning_rate", "local_steps", "batch_size")
"""The axes over which the best point of each method is looked for."""

_METHOD: TypeAdapter[Method] = TypeAdapter(MethodConfig)


class Comparison(Config):
    """Settings of Tables 1 to 6 and Figures 3, 4 and 7: methods, their grid, and the clients.

    In `methods` a list of values, as ``q = [1, 10]``, is a grid of the method's own.
    """

    dataset: Dataset = "fmnist"
    directory: Path | None = None
    """Of the data set's files; without them something stands in."""
    partition: Partition = "dirichlet"
    num_clients: Count | None = None
    """That train; by default as many as the paper has of this data set, as the next two."""
    num_unseen: Count | None = None
    cohort_size: Count | None = None
    flipped: Share = 0.3
    dropout_rate: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.5
    appealing_from: Count | None = None
    """The first round in which clients stay away to whom the model does not appeal; None: none."""
    byzantine: Annotated[tuple[Share, ...], Field(min_length=1)] = (0.0,)
    warm_up_steps: Annotated[tuple[Count, ...], Field(min_length=1)] = (100,)
    tuning_steps: Annotated[int, Field(strict=True, ge=0, lt=2**31)] = 0
    methods: Annotated[Mapping[str, Mapping[str, Any]], Field(min_length=1)]
    learning_rates: Annotated[tuple[Positive, ...], Field(min_length=1)] = (
        *(0.1, 0.05, 0.01, 0.005, 0.001),
    )
    local_steps: Annotated[tuple[Count, ...], Field(min_length=1)] = (10, 30, 50)
    batch_sizes: Annotated[tuple[Count, ...], Field(min_length=1)] = (32, 64, 128)
    num_rounds: Count = 200
    num_seeds: Count = 3
    seed: Seed = 0
    record_every: Count = 20
    """Rounds between records; the largest common divisor with the rounds is taken."""

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        for label, (name, _) in self.variants.items():
            try:
                self.method(label, self.learning_rates[0], self.local_steps[0], self.batch_sizes[0])
            except ValueError as error:
                raise ValueError(f"methods.{name}: {error}") from error
        check_files(self.dataset, self.directory)
        population = self.population
        if population.cohort_size > population.num_clients:
            raise ValueError(
                f"cohort_size is {population.cohort_size}; it must be at most num_clients = "
                f"{population.num_clients}"
            )
        return self

    @property
    def variants(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Every method at every value of its own parameters: its name and its settings."""
        found = {}
        for name, settings in self.methods.items():
            own = {key: value for key, value in settings.items() if isinstance(value, list | tuple)}
            for values in itertools.product(*own.values()):
                point = dict(zip(own, values, strict=True))
                text = ", ".join(f"{key} = {value:g}" for key, value in point.items())
                label = f"{name} ({text})" if text else name
                found[label] = name, {**settings, **point}
        return found

    def method(self, label: str, learning_rate: float, local_steps: int, batch_size: int) -> Method:
        """A variant at a point of the grid."""
        point = {"learning_rate": learning_rate, "batch_size": batch_size}
        settings = self.variants[label][1]
        if settings.get("name") != "afl":  # which takes one step
            point["local_steps"] = local_steps
        return _METHOD.validate_python({**settings, **point})

    @property
    def population(self) -> Population:
        """How many clients there are."""
        default = POPULATIONS[source_of(self.dataset, self.directory)]
        given = {
            "num_clients": self.num_clients,
            "num_unseen": self.num_unseen,
            "cohort_size": self.cohort_size,
        }
        return default._replace(**{key: n for key, n in given.items() if n is not None})

    @property
    def resolution(self) -> int:
        """Rounds between records."""
        return math.gcd(self.record_every, self.num_rounds)

    @property
    def num_points(self) -> int:
        """Points of the grid of each variant."""
        sizes = (self.learning_rates, self.local_steps, self.batch_sizes)
        return math.prod(map(len, sizes))


def run_comparison(config: Comparison, execution: Execution | None = None) -> xr.Dataset:
    """Every method at every point with every seed, each seed with clients of its own.

    Over ``(variant, byzantine, warm_up_steps, learning_rate, local_steps, batch_size, seed,
    round)``.
    """
    population = config.population
    words = np.random.SeedSequence(config.seed).generate_state(config.num_seeds)
    data = draw_clients(
        config.dataset,
        config.directory,
        population,
        partition=config.partition,
        flipped=config.flipped,
        seeds=[int(word) for word in words],
    )
    num_clients, cohort_size = population.num_clients, population.cohort_size
    if config.appealing_from is None:
        assignment = mfa_rand(num_clients, 1, cohort_size=cohort_size)
    else:
        assignment = appealing(
            full_participation(num_clients),
            cohort_size=cohort_size,
            from_round=config.appealing_from,
        )

    def build(
        variant: str,
        byzantine: Any,
        warm_up_steps: int,
        learning_rate: Any,
        local_steps: int,
        batch_size: int,
        data: FederatedData,
        draw: Any,
    ) -> Setup:
        task = classifier(data.select(draw), dropout_rate=config.dropout_rate)
        method = config.method(variant, config.learning_rates[0], local_steps, batch_size)
        method = method.model_copy(update={"learning_rate": learning_rate})
        algorithm = method.build(1)
        if any(config.byzantine):
            attack = Byzantine(fraction=0.0).model_copy(update={"fraction": byzantine})
            algorithm = attack.wrap(algorithm, num_clients)
        asked = Requiring(
            num_steps=warm_up_steps,
            num_unseen=population.num_unseen,
            tuning_steps=config.tuning_steps,
        )
        return Setup(task, asked.wrap(algorithm, method), assignment)

    result = sweep(
        build,
        {
            "variant": list(config.variants),
            "byzantine": [float(share) for share in config.byzantine],
            "warm_up_steps": list(config.warm_up_steps),
            "learning_rate": list(config.learning_rates),
            "local_steps": list(config.local_steps),
            "batch_size": list(config.batch_sizes),
        },
        num_rounds=config.num_rounds,
        num_seeds=config.num_seeds,
        seed=config.seed,
        shared={"data": data},
        per_seed={"draw": np.arange(config.num_seeds)},
        record_every=config.resolution,
        data=data.kind,
        execution=execution,
    )
    result = result.isel(model=0, drop=True)
    names = [config.variants[label][0] for label in result["variant"].values]
    result = result.assign_coords(algorithm=("variant", names))
    result.attrs["manifest"] |= {
        "config": config.model_dump(mode="json"),
        "datasets": [data.name],
        "population": population._asdict(),
    }
    return result


def best_points(result: xr.Dataset, config: Comparison) -> xr.Dataset:
    """Each method at the point with the highest test accuracy of seen clients, by the last record.

    The mean over seeds decides. A point where a seed diverged is not considered, unless all are.

    Args:
      result: of `run_comparison`.
      config: its settings.

    Returns:
      The result over ``(algorithm, byzantine, warm_up_steps, seed, round)``, with the coordinates
      of `POINT` over the first three.
    """
    parts = []
    for name in config.methods:
        mine = result.isel(variant=np.flatnonzero(result["algorithm"].values == name))
        mine = mine.drop_vars("algorithm").stack(point=POINT, create_index=False)
        score = (
            mine["accuracy"]
            .isel(round=-1, drop=True)
            .where(mine["diverged"] < 0)
            .mean("seed", skipna=False)
        )
        best = score.fillna(-1.0).argmax("point")
        parts.append(mine.isel(point=best))
    return xr.concat(parts, xr.IndexVariable("algorithm", list(config.methods)))


def at_the_end(best: xr.Dataset, name: str) -> xr.DataArray:
    """A metric's last record, over ``(algorithm, byzantine, warm_up_steps, seed)``; in percent."""
    values = best[name].isel(round=-1, drop=True)
    return 100 * values
