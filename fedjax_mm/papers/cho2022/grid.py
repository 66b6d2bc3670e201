"""Cho et al., section 5: settings of the tables that compare methods, and the paper's grid."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationInfo, model_validator

from fedjax_mm.base import Algorithm
from fedjax_mm.experiments.fields import (
    Config,
    Count,
    CountOrZero,
    Flag,
    NonNegative,
    Positive,
    Share,
)
from fedjax_mm.experiments.methods import Method, MethodConfig
from fedjax_mm.papers.cho2022 import clients
from fedjax_mm.papers.selection import Selecting
from fedjax_mm.papers.values import Some

POINT = ("variant", "learning_rate", "local_steps", "batch_size")
"""The axes over which each method's best point is searched."""

DIMS = {
    "byzantine": "attackers",
    "warm_up_steps": "warm-up steps",
    "demand_rate": "rate of the warm-up",
}
"""Maps the other axes to their names in tables."""

OURS = "MaxFL"
"""The paper's method."""

_METHOD: TypeAdapter[Method] = TypeAdapter(MethodConfig)

METHODS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "FedProx": {"name": "fedprox", "mu": [0.01, 0.1]},
    "SCAFFOLD": {"name": "scaffold"},
    "PerFedAvg": {"name": "perfedavg"},
    "qFFL": {"name": "qffl", "q": [1.0, 10.0]},
    "MW-Fed": {"name": "mwfed"},
    OURS: {"name": "maxfl"},
}


def methods(*names: str) -> dict[str, Mapping[str, Any]]:
    """The settings of some of the paper's methods, with lists for method-specific grids."""
    return {name: METHODS[name] for name in names}


class Requirement(Config):
    """Training of the clients' own models, which set the thresholds for all methods."""

    learning_rates: Some[Positive] | Literal["training"] = (0.05,)
    """"training" is MaxFL's rate: that of each point in the search, then that of its best point."""
    num_steps: Some[Count] = (100,)
    batch_size: Count = 32

    @property
    def rates(self) -> Sequence[float | str]:
        """The values of the axis of learning rates."""
        return ("training",) if self.learning_rates == "training" else self.learning_rates

    @property
    def first(self) -> Self:
        """The first of several trainings."""
        changes: dict[str, Any] = {"num_steps": self.num_steps[:1]}
        if self.learning_rates != "training":
            changes["learning_rates"] = self.learning_rates[:1]
        return self.model_copy(update=changes)


class Point(Config):
    """A point of a method's grid."""

    learning_rate: Positive
    local_steps: Count
    batch_size: Count
    own: Mapping[str, Any] = {}
    """Values of the parameters that are lists in `methods`."""


class Comparison(Selecting):
    """Settings of Tables 1 to 6 and Figures 3, 4 and 7: methods, their grid, and the clients.

    A list of values in `methods`, such as ``q = [1, 10]``, is a method-specific grid.
    """

    dataset: clients.Dataset = "fmnist"
    directory: Path | None = None
    """The directory of the data set's files, or None for a substitute."""
    partition: clients.Partition = "dirichlet"
    redraws: Flag = True
    """Whether every seed draws a partition and flips of its own, instead of those of the first."""
    num_clients: Count | None = None
    """The number of clients that train. The paper's number for the data set is the default for this
    and the next two fields."""
    num_unseen: Count | None = None
    cohort_size: Count | None = None
    flipped: Share = 0.3
    flips: clients.Flips = "training"
    """The labels of a flipped client that are flipped, which the paper does not specify."""
    participation: Literal["training", "test"] | None = None
    """The examples whose loss decides participation. Defaults to "test" if only training labels are
    flipped, and to "training" otherwise."""
    dropout_rate: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.5
    appealing_from: Count | None = None
    """The first round in which clients stay away if the model does not appeal to them."""
    byzantine: Some[Share] = (0.0,)
    """The fractions of clients that attack."""
    loss_factor: Positive = 10.0
    noise: NonNegative = 1.0
    attackers_stay: Flag = True
    requirement: Requirement = Requirement()
    tuning_steps: CountOrZero = 0
    tuned_weights: Flag = True
    """Whether MaxFL weights clients by the loss after tuning, as described in section 5.1."""
    methods: Annotated[Mapping[str, Mapping[str, Any]], Field(min_length=1)]
    learning_rates: Some[Positive] = (*(0.1, 0.05, 0.01, 0.005, 0.001),)
    local_steps: Some[Count] = (10, 30, 50)
    batch_sizes: Some[Count] = (32, 64, 128)
    chosen_by: Literal["accuracy", "appeal"] = "accuracy"
    """The metric that chooses a method's point. Ties are broken by accuracy."""
    points: Mapping[str, Point] = {}
    """Fixed points, for methods without a search."""
    num_rounds: Count = 200
    num_seeds: Count = 3
    record_every: Count = 20
    """Rounds between records, reduced to the greatest common divisor with the rounds."""

    @model_validator(mode="after")
    def _methods_fit(self) -> Self:
        if self.requirement.learning_rates == "training" and OURS not in self.methods:
            raise ValueError(
                f'requirement.learning_rates is "training", the rate of {OURS}; add it to methods'
            )
        for name, settings in self.methods.items():
            for key, value in settings.items():
                # An empty list would leave no variant of the method, and no row in the table.
                if isinstance(value, list | tuple) and not value:
                    raise ValueError(f"methods.{name}.{key} has no values; give at least one")
        for label, (name, _) in self.variants.items():
            try:
                self._first_point(label)
            except ValueError as error:
                raise ValueError(f"methods.{name}: {error}") from error
        return self

    @model_validator(mode="after")
    def _points_fit(self) -> Self:
        for name, point in self.points.items():
            if name not in self.methods:
                raise ValueError(f"points.{name}: no such method")
            if set(point.own) != set(lists_of(self.methods[name])):
                wanted = ", ".join(lists_of(self.methods[name])) or "nothing"
                raise ValueError(f"points.{name}.own is {dict(point.own)}; it must have {wanted}")
            alone = self.at(name, point)
            try:
                alone._first_point(*alone.variants)
            except ValueError as error:
                raise ValueError(f"points.{name}: {error}") from error
        return self

    def check_files(self) -> None:
        """See `WithFiles`."""
        clients.check_files(self.dataset, self.directory)

    @model_validator(mode="after")
    def _clients_fit(self, info: ValidationInfo) -> Self:
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
        if self.partition.endswith("clusters") and self.dataset == "emnist" and self.directory:
            raise ValueError("EMNIST's 62 labels do not make 5 equal clusters; choose dirichlet")
        return self.with_files(info)

    @property
    def variants(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """The name and settings of every method at each value of its own parameters."""
        found = {}
        for name, settings in self.methods.items():
            own = lists_of(settings)
            for values in itertools.product(*own.values()):
                point = dict(zip(own, values, strict=True))
                text = ", ".join(f"{key} = {_text(value)}" for key, value in point.items())
                found[f"{name} ({text})" if text else name] = name, {**settings, **point}
        return found

    @property
    def axes(self) -> dict[str, Sequence[Any]]:
        """The axes of the grid and their values."""
        return {
            "variant": list(self.variants),
            "byzantine": self.byzantine,
            "warm_up_steps": self.requirement.num_steps,
            "demand_rate": self.requirement.rates,
            "learning_rate": self.learning_rates,
            "local_steps": self.local_steps,
            "batch_size": self.batch_sizes,
        }

    def method(self, label: str, learning_rate: float, local_steps: int, batch_size: int) -> Method:
        """A variant at a point of the grid."""
        point = dict(zip(POINT[1:], (learning_rate, local_steps, batch_size), strict=True))
        settings = dict(self.variants[label][1])
        if settings.get("name") == "maxfl" and self.tuned_weights and self.tuning_steps:
            settings.setdefault("tuning_steps", self.tuning_steps)
        return _METHOD.validate_python(settings | point)

    def algorithm(self, label: str, local: Mapping[str, Any]) -> Algorithm:
        """Builds a variant with settings of local training."""
        method = self._first_point(label)
        known = {k: x for k, x in local.items() if k in type(method).model_fields}
        return method.model_copy(update=known).build(1)

    def _first_point(self, label: str) -> Method:
        return self.method(label, self.learning_rates[0], self.local_steps[0], self.batch_sizes[0])

    @property
    def population(self) -> clients.Population:
        """The population, which defaults to the paper's."""
        default = clients.POPULATIONS[clients.source_of(self.dataset, self.directory)]
        given = {key: getattr(self, key) for key in ("num_clients", "num_unseen", "cohort_size")}
        return default._replace(**{key: n for key, n in given.items() if n is not None})

    @property
    def data_seeds(self) -> list[int]:
        """The seeds of all draws of clients."""
        if self.redraws:
            return super().data_seeds
        return super(Comparison, self.with_seeds(0, 1)).data_seeds * self.num_seeds

    @property
    def demands(self) -> list[tuple[int, float]]:
        """The numbers of steps and the learning rates of the warm-ups."""
        rates = self.requirement.learning_rates
        rates = self.learning_rates if rates == "training" else rates
        return list(itertools.product(self.requirement.num_steps, rates))

    @property
    def num_points(self) -> int:
        """The number of grid points per variant."""
        return math.prod(len(self.axes[axis]) for axis in POINT[1:])

    @property
    def stays_by(self) -> Literal["training", "test"]:
        """The examples whose loss decides participation."""
        return self.participation or ("test" if self.flips == "training" else "training")

    def only(self, name: str) -> Point | None:
        """A method's point if it is given or is the only one."""
        own = lists_of(self.methods[name])
        if name in self.points or self.num_points * math.prod(map(len, own.values())) > 1:
            return self.points.get(name)
        return Point(
            learning_rate=self.learning_rates[0],
            local_steps=self.local_steps[0],
            batch_size=self.batch_sizes[0],
            own={key: values[0] for key, values in own.items()},
        )

    def at(self, name: str, point: Point) -> Self:
        """The settings for one method at one point."""
        lists = {key: [value] for key, value in point.own.items()}
        changes: dict[str, Any] = {
            "methods": {name: {**self.methods[name], **lists}},
            "points": {},
            "learning_rates": (point.learning_rate,),
            "local_steps": (point.local_steps,),
            "batch_sizes": (point.batch_size,),
        }
        return self.model_copy(update=changes)

    def judging(self, points: Mapping[str, Point]) -> dict[str, Self]:
        """The settings of each method at its point, with the same thresholds for all."""
        settings = self
        if self.requirement.learning_rates == "training":
            demand = self.requirement.model_copy(
                update={"learning_rates": (points[OURS].learning_rate,)}
            )
            settings = self.model_copy(update={"requirement": demand})
        return {name: settings.at(name, point) for name, point in points.items()}

    @property
    def selecting(self) -> Self:
        """The settings of the grid search, with the methods whose point is chosen.

        No client attacks, the clients' thresholds come from the first warm-up, and only the
        last record counts.
        """
        changes: dict[str, Any] = {
            "methods": {name: own for name, own in self.methods.items() if self.only(name) is None},
            "points": {},
            "byzantine": (0.0,),
            "requirement": self.requirement.first,
            "record_every": self.num_rounds,
        }
        return super().selecting.model_copy(update=changes)


def clustered(*names: str, **settings: Any) -> Comparison:
    """Settings of Figures 3, 4 and 7 and Tables 3 to 6, which choose points by GM-Appeal.

    Test labels are flipped too, because the paper's own models reach a preferred-model accuracy of
    98 % and more, which flipped clients could not reach on true test labels.
    """
    found = {"partition": "clusters", "flips": "everywhere", "chosen_by": "appeal"}
    return Comparison(**found | {"methods": methods(*names)} | settings)


def lists_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a method that are lists, which form its own grid."""
    return {key: value for key, value in settings.items() if isinstance(value, list | tuple)}


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
