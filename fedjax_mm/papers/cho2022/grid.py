"""Cho et al., section 5: every method at all points of the paper's grid, on the same clients."""

import itertools
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import lax
from pydantic import Field, TypeAdapter, model_validator

from fedjax_mm.assignments.appealing import appealing
from fedjax_mm.assignments.partitions import full_participation, mfa_rand
from fedjax_mm.base import Algorithm, Padded
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.fields import Config, Count, Flag, NonNegative, Positive, Seeded, Share
from fedjax_mm.experiments.methods import (
    DEFAULT_METHOD,
    METHOD_TABLES,
    Byzantine,
    Method,
    MethodConfig,
)
from fedjax_mm.papers.cho2022 import clients
from fedjax_mm.sweeps.devices import layout
from fedjax_mm.sweeps.errors import RefusedError
from fedjax_mm.sweeps.execute import Execution, sweep
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.sweeps.program import OneOf
from fedjax_mm.tasks.classification import Classification
from fedjax_mm.tasks.requirements import OwnModels, Tuning, own_models, requiring

POINT = ("variant", "learning_rate", "local_steps", "batch_size")
"""The axes over which the best point of each method is looked for."""

DIMS = {
    "byzantine": "attackers",
    "warm_up_steps": "warm-up steps",
    "demand_rate": "rate of the warm-up",
}
"""The other axes by their names in tables."""

_METHOD: TypeAdapter[Method] = TypeAdapter(MethodConfig)

METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "FedProx": {"name": "fedprox", "mu": [0.01, 0.1]},
    "SCAFFOLD": {"name": "scaffold"},
    "PerFedAvg": {"name": "perfedavg"},
    "qFFL": {"name": "qffl", "q": [1.0, 10.0]},
    "MW-Fed": {"name": "mwfed"},
    "MaxFL": {"name": "maxfl"},
}


def methods(*names: str) -> dict[str, Mapping[str, Any]]:
    """Returns the settings of some of the paper's methods; a list is a grid of the method's own."""
    return {name: METHODS[name] for name in names}


class Requirement(Config):
    """How clients train models of their own, which set what they require of all methods alike."""

    learning_rates: Annotated[tuple[Positive, ...], Field(min_length=1)] = (0.05,)
    num_steps: Annotated[tuple[Count, ...], Field(min_length=1)] = (100,)
    batch_size: Count = 32


class Comparison(Seeded):
    """Settings of Tables 1 to 6 and Figures 3, 4 and 7: methods, their grid, and the clients.

    In `methods` a list of values, as ``q = [1, 10]``, is a grid of the method's own.
    """

    dataset: clients.Dataset = "fmnist"
    directory: Path | None = None
    """The folder of the data set's files; without it something stands in."""
    partition: clients.Partition = "clusters"
    num_clients: Count | None = None
    """The clients that train; this and the next two are the paper's for this data set if None."""
    num_unseen: Count | None = None
    cohort_size: Count | None = None
    flipped: Share = 0.3
    dropout_rate: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.5
    appealing_from: Count | None = None
    """The first round in which a client stays away if the model does not appeal to it."""
    byzantine: Annotated[tuple[Share, ...], Field(min_length=1)] = (0.0,)
    """Shares of the clients that attack."""
    loss_factor: Positive = 10.0
    noise: NonNegative = 1.0
    attackers_stay: Flag = True
    requirement: Requirement = Requirement()
    tuning_steps: Annotated[int, Field(strict=True, ge=0, lt=2**31)] = 0
    methods: Annotated[Mapping[str, Mapping[str, Any]], Field(min_length=1)]
    learning_rates: Annotated[tuple[Positive, ...], Field(min_length=1)] = (
        *(0.1, 0.05, 0.01, 0.005, 0.001),
    )
    local_steps: Annotated[tuple[Count, ...], Field(min_length=1)] = (10, 30, 50)
    batch_sizes: Annotated[tuple[Count, ...], Field(min_length=1)] = (32, 64, 128)
    num_rounds: Count = 200
    num_seeds: Count = 3
    record_every: Count = 20
    """Rounds between records; the largest common divisor with the rounds is taken."""

    @model_validator(mode="after")
    def _methods_fit(self) -> Self:
        for name, settings in self.methods.items():
            for key, value in settings.items():
                # No variant would be left of the method, and none of it in the table.
                if isinstance(value, list | tuple) and not value:
                    raise ValueError(f"methods.{name}.{key} has no values; give at least one")
        for label, (name, _) in self.variants.items():
            try:
                self._first_point(label)
            except ValueError as error:
                raise ValueError(f"methods.{name}: {error}") from error
        return self

    @model_validator(mode="after")
    def _clients_fit(self) -> Self:
        clients.check_files(self.dataset, self.directory)
        population = self.population
        if population.cohort_size > population.num_clients:
            raise ValueError(
                f"cohort_size is {population.cohort_size}; it must be at most num_clients = "
                f"{population.num_clients}"
            )
        if any(self.byzantine) and self.byzantine[0] != 0:
            raise ValueError(
                f"byzantine is {list(self.byzantine)}; begin with 0.0, from which losses count"
            )
        if self.partition == "clusters" and self.dataset == "emnist" and self.directory:
            raise ValueError("EMNIST's 62 labels do not make 5 equal clusters; choose dirichlet")
        return self

    @property
    def variants(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Returns every method at every value of its own parameters: its name and its settings."""
        found = {}
        for name, settings in self.methods.items():
            own = {key: value for key, value in settings.items() if isinstance(value, list | tuple)}
            for values in itertools.product(*own.values()):
                point = dict(zip(own, values, strict=True))
                text = ", ".join(f"{key} = {_text(value)}" for key, value in point.items())
                found[f"{name} ({text})" if text else name] = name, {**settings, **point}
        return found

    @property
    def axes(self) -> dict[str, Sequence[Any]]:
        """Returns the axes of the grid and their values."""
        return {
            "variant": list(self.variants),
            "byzantine": self.byzantine,
            "warm_up_steps": self.requirement.num_steps,
            "demand_rate": self.requirement.learning_rates,
            "learning_rate": self.learning_rates,
            "local_steps": self.local_steps,
            "batch_size": self.batch_sizes,
        }

    def method(self, label: str, learning_rate: float, local_steps: int, batch_size: int) -> Method:
        """Returns a variant at a point of the grid."""
        point = dict(zip(POINT[1:], (learning_rate, local_steps, batch_size), strict=True))
        settings = self.variants[label][1]
        # Not every method has all of them: another one's would be an unknown setting.
        table = METHOD_TABLES.get(settings.get("name", DEFAULT_METHOD), Method)
        known = {key: value for key, value in point.items() if key in table.model_fields}
        return _METHOD.validate_python(settings | known)

    def structure(self, label: str) -> Hashable:
        """Returns all of a variant but its floats: equal ones are one program."""
        settings = dict(self._first_point(label))
        return tuple((k, str(v)) for k, v in settings.items() if not isinstance(v, float))

    def algorithm(self, variant: OneOf, local: Mapping[str, Any]) -> Algorithm:
        """Builds one of several variants of equal structure; numbers may be traced."""
        method, *others = [self._first_point(label) for label in variant.values]
        numbers = {k: x for k, x in local.items() if k in type(method).model_fields}
        for name, value in method if others else ():
            if isinstance(value, float) and name not in local:
                values = jnp.asarray([getattr(each, name) for each in (method, *others)])
                numbers[name] = values[variant.place]
        return method.build(1, **numbers)

    def _first_point(self, label: str) -> Method:
        return self.method(label, self.learning_rates[0], self.local_steps[0], self.batch_sizes[0])

    @property
    def population(self) -> clients.Population:
        """Returns how many clients there are, by default as many as the paper has."""
        default = clients.POPULATIONS[clients.source_of(self.dataset, self.directory)]
        given = {key: getattr(self, key) for key in ("num_clients", "num_unseen", "cohort_size")}
        return default._replace(**{key: n for key, n in given.items() if n is not None})

    @property
    def num_points(self) -> int:
        """Returns the number of points of the grid of each variant."""
        return math.prod(len(self.axes[axis]) for axis in POINT[1:])


def run_comparison(config: Comparison, execution: Execution | None = None) -> xr.Dataset:
    """Returns every method at every point with every seed, each seed with clients of its own.

    Over ``(*config.axes, seed, round)``.
    """
    try:
        data = clients.draw_clients(
            config.dataset,
            config.directory,
            config.population,
            partition=config.partition,
            flipped=config.flipped,
            seeds=config.data_seeds,
        )
    except ValueError as error:
        # Too few examples for so many clients, which only the files tell: a wrong setting.
        raise RefusedError(str(error)) from error
    # Own models are trained before the sweep, whose manifest does not count their seconds.
    clock = time.perf_counter()
    own = warm_up(config, data, execution)
    warm_up_seconds = time.perf_counter() - clock
    largest = largest_batches(config.batch_sizes)
    result = sweep(
        _builder(config),
        config.axes,
        num_rounds=config.num_rounds,
        **config.replicas,
        shared={"drawn": (data, own)},
        per_seed={"draw": np.arange(config.num_seeds)},
        # In an order that lets replicas of equal length run at the same time.
        together={
            "demand_rate": lambda _: None,
            "warm_up_steps": lambda _: None,
            "variant": config.structure,
            "batch_size": largest.__getitem__,
            "local_steps": lambda _: None,
        },
        cost=lambda local_steps, batch_size, **_: local_steps * largest[batch_size],
        record_every=math.gcd(config.record_every, config.num_rounds),
        data=data.kind,
        execution=execution,
    )
    about = result.attrs["manifest"]
    result.attrs["manifest"] = about | {
        "wall_seconds": about["wall_seconds"] | {"warm_up": warm_up_seconds},
        "datasets": [data.name],
        "population": config.population._asdict(),
    }
    names = [config.variants[label][0] for label in result["variant"].values]
    return result.isel(model=0, drop=True).assign_coords(algorithm=("variant", names))


def largest_batches(sizes: Sequence[int]) -> dict[int, int]:
    """Returns the rows of each batch size's arrays: at most two sizes, with the least padding.

    Example:
      >>> largest_batches([32, 64, 128])
      {32: 64, 64: 64, 128: 128}
    """
    ordered = sorted(set(sizes))
    cuts = [(ordered[:i], ordered[i:]) for i in range(len(ordered))]
    parts = min(cuts, key=lambda cut: sum(len(part) * max(part) for part in cut if part))
    return {size: max(part) for part in parts for size in part}


def _builder(config: Comparison) -> Callable[..., Setup]:
    """Returns the function that builds the simulation of a point and a seed."""
    population = config.population
    num_clients, cohort_size = population.num_clients, population.cohort_size
    if config.appealing_from is None:
        assignment = mfa_rand(num_clients, 1, cohort_size=cohort_size)
    else:
        # Everybody is asked; `appealing` draws the cohort from those who do not stay away.
        everybody, first = full_participation(num_clients), config.appealing_from
        assignment = appealing(everybody, cohort_size=cohort_size, from_round=first)

    def build(drawn: tuple[FederatedData, OwnModels], draw: Any, **point: Any) -> Setup:
        (data, own), rate, batches = drawn, point["learning_rate"], point["batch_size"]
        task: Any = clients.classifier(data.select(draw), dropout_rate=config.dropout_rate)
        # Batches of several sizes have equal arrays: a program of one size needs no empty rows.
        size, rows = max(batches.values), batches.number if len(batches.values) > 1 else None
        local = {
            "learning_rate": rate,
            "local_steps": point["local_steps"].number,
            "batch_size": size if rows is None else Padded(size, rows),
        }
        algorithm = config.algorithm(point["variant"], local)
        start, tuning = _start(config, task, draw), None
        if config.tuning_steps:
            tuning = Tuning(rate, config.tuning_steps, size, rows)
        place = point["warm_up_steps"].place, point["demand_rate"].place, draw
        mine = jax.tree.map(itemgetter(place), own)
        task = requiring(task, mine, num_unseen=population.num_unseen, tuning=tuning)
        if any(config.byzantine):
            harm: dict[str, Any] = {"loss_factor": config.loss_factor, "noise": config.noise}
            attack = Byzantine(fraction=0.0, stays=config.attackers_stay, **harm)
            task = attack.wrap_task(task, fraction=point["byzantine"])
            algorithm = attack.wrap(algorithm, num_clients, fraction=point["byzantine"])
        return Setup(task, algorithm, assignment, start)

    return build


def warm_up(config: Comparison, data: FederatedData, execution: Execution | None) -> OwnModels:
    """Returns every client's own model, ``[numbers of steps, rates, draws, clients]``.

    They start where all methods do, and do not depend on the methods.
    """
    demand, num_draws = config.requirement, config.num_seeds
    kinds = (demand.num_steps, demand.learning_rates, range(num_draws))
    mesh = [each.ravel() for each in np.meshgrid(*kinds, indexing="ij")]
    number = len(mesh[0])
    if execution and execution.progress:
        execution.progress(f"warm-up of {number} x {data.num_clients} clients", 0, 1)
    where = layout(number)
    # Every device gets equally many: the first ones fill up the last device.
    numbers = [np.resize(each, where.padded(number)) for each in mesh]
    types = (np.int32, np.float32, np.int32)
    each = where.put(tuple(x.astype(t) for x, t in zip(numbers, types, strict=True)), 0)

    def of_device(numbers: Any, data: FederatedData) -> OwnModels:
        def of_replica(numbers: Any) -> OwnModels:
            steps, rate, draw = numbers
            task = clients.classifier(data.select(draw), dropout_rate=config.dropout_rate)
            how = {"num_steps": steps, "learning_rate": rate, "batch_size": demand.batch_size}
            return own_models(_key(config, draw), task, _start(config, task, draw), **how)

        # One after the other: `own_models` already trains many clients side by side.
        return lax.map(of_replica, numbers)

    found = where.fetch(jax.jit(where.over(of_device, (0, None)))(each, where.put(data, None)))
    shape = (*map(len, kinds), -1)
    own: OwnModels = jax.tree.map(lambda x: np.asarray(x)[:number].reshape(shape), found)
    return own


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _key(config: Comparison, draw: Any) -> Any:
    return jax.random.fold_in(jax.random.key(config.seed), config.first_seed + draw)


def _start(config: Comparison, task: Classification, draw: Any) -> Any:
    """Returns the common initialisation of all methods and of the clients' own models."""
    return task.init(jax.random.fold_in(_key(config, draw), 1))


def best_points(result: xr.Dataset, config: Comparison) -> xr.Dataset:
    """Returns each method at the point with the highest test accuracy of seen clients at the end.

    The mean over seeds decides. A point where a seed diverged is not considered, unless all are.

    Args:
      result: of `run_comparison`.
      config: its settings.

    Returns:
      The result over ``(algorithm, *DIMS, seed, round)``, and the coordinates of
      `POINT` over the first three.
    """
    parts = []
    for name in config.methods:
        mine = result.isel(variant=np.flatnonzero(result["algorithm"].values == name))
        mine = mine.drop_vars("algorithm").stack(point=POINT, create_index=False)
        score = mine["accuracy"].isel(round=-1, drop=True).where(mine["diverged"] < 0)
        # Less than any accuracy, in place of NaN where a seed diverged.
        best = score.mean("seed", skipna=False).fillna(-1.0).argmax("point")
        parts.append(mine.isel(point=best))
    names = xr.IndexVariable("algorithm", list(config.methods))
    # coords="all": xarray drops this dimension of a coordinate that is equal for all methods.
    return xr.concat(parts, names, coords="all").rename(DIMS)
