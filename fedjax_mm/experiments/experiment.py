"""An experiment as data: what `run CONFIG.toml` reads and what a paper's figure is made of."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fedjax_mm.base import Assignment
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.axes import Axes, Points
from fedjax_mm.experiments.fields import Config, Count, Number, Numbers, Seeded
from fedjax_mm.experiments.methods import (
    Assigned,
    AssignmentConfig,
    Byzantine,
    Method,
    MethodConfig,
    Requirement,
)
from fedjax_mm.experiments.tasks import QuadraticConfig, TaskConfig
from fedjax_mm.sweeps.grid import Grid, Setup
from fedjax_mm.sweeps.until import Until
from fedjax_mm.tasks.requirements import OwnModels

Precision = Literal["float32", "float64"]


class Target(Config):
    """Where a run ends before its last round; see `Until`."""

    metric: str
    at_least: Number | None = None
    at_most: Number | None = None


class Experiment(Seeded):
    """One task, some algorithms, some seeds, at all points of its axes.

    An axis is a setting of the experiment, such as `num_models` or `task.mu`, or else one of every
    algorithm's, such as `learning_rate` or `assignment.cohort_size`; ``algorithms.NAME.q`` is one
    algorithm's. Axes of numbers that are not counts cost no compilation. All points have the same
    data: what changes it cannot be an axis.

    `assignment` is for the algorithms that have none of their own. `byzantine` makes attackers of
    some clients, and `requirement` says what clients ask of a model, of all algorithms alike; the
    assignment is for the clients that are seen.

    Example:
      >>> experiment = Experiment.model_validate({
      ...     "task": {"name": "quadratic"},
      ...     "num_models": 2,
      ...     "num_rounds": 10,
      ...     "algorithms": {"MFA-RR": {
      ...         "assignment": {"name": "mfa_rr"}, "learning_rate": 0.1, "local_steps": 5}},
      ...     "axes": {"num_models": [2, 12], "learning_rate": [0.05, 0.1]},
      ... })
      >>> experiment.grid().shape  # algorithms, numbers of models, rates, seeds
      (1, 2, 2, 20)
    """

    task: TaskConfig
    algorithms: Annotated[dict[str, MethodConfig], Field(min_length=1)]
    assignment: AssignmentConfig | None = None
    byzantine: Byzantine | None = None
    requirement: Requirement | None = None
    num_models: Count
    num_rounds: Count
    num_seeds: Count = 20
    record_every: Count = 1
    client_map: Literal["auto", "vmap", "scan"] | Count = "auto"
    precision: Precision = "float32"
    until: Target | None = None
    axes: Axes = Field(default_factory=dict)

    @model_validator(mode="after")
    def _all_fits(self) -> Self:
        """Raises `ValueError` for what would fail when building, before anything is compiled."""
        self._check_requirement()
        for label, method in self.algorithms.items():
            if method.assignment is None and self.assignment is None:
                raise ValueError(
                    f"algorithms.{label}.assignment: missing; give one, or a table assignment for "
                    "all algorithms"
                )
            try:
                self._check_method(method)
            except ValueError as error:
                raise ValueError(f"algorithms.{label}: {error}") from error
        if self.precision == "float64" and not isinstance(self.task, QuadraticConfig):
            raise ValueError("precision is 'float64'; classifiers are trained in 'float32'")
        self._grid(None)  # all points are checked; data, which take long to load, are not needed
        return self

    def _check_requirement(self) -> None:
        if self.requirement is None:
            return
        if isinstance(self.task, QuadraticConfig):
            _check_on_quadratic(self.requirement, "requirement.")
        elif not self.task.has_own_tests:
            raise ValueError(
                "requirement: clients are asked one by one, but one pool of test examples stands "
                "for all; give task.test_fraction, such as 0.4, so that each has its own"
            )

    def _check_method(self, method: Method) -> None:
        method.build(self.num_models, self.num_rounds)
        assignment = self._assignment_of(method)
        if self.requirement is None:
            asking = "assignment.appealing asks" if assignment.appealing else f"{method.name} asks"
            if assignment.appealing or method.asks_for_thresholds():
                raise ValueError(
                    f"{asking} for clients with thresholds; add a table requirement, such as "
                    "requirement = { num_steps = 100 }"
                )
        if self.task.num_clients is not None:
            self._assigned(method, self.task.num_clients)
        if isinstance(self.task, QuadraticConfig):
            _check_on_quadratic(method)

    def _assignment_of(self, method: Method) -> Assigned:
        """Returns the method's own assignment, or that of all."""
        assignment = method.assignment or self.assignment
        assert assignment is not None
        return assignment

    def _assigned(self, method: Method, num_clients: int) -> Assignment:
        """Builds the assignment of the clients that are seen."""
        num_unseen = 0 if self.requirement is None else self.requirement.num_unseen
        if num_unseen >= num_clients:
            raise ValueError(
                f"requirement.num_unseen is {num_unseen}, but there are {num_clients} clients; at "
                f"most {num_clients - 1} may be unseen"
            )
        try:
            return self._assignment_of(method).build(num_clients - num_unseen, self.num_models)
        except ValueError as error:
            unseen = (
                f", without those of requirement.num_unseen = {num_unseen}" if num_unseen else ""
            )
            raise ValueError(f"{error}{unseen}") from error

    @property
    def points(self) -> dict[str, list[Any]]:
        """The checked values on every axis, by its key."""
        return Points(self).values

    def grid(self) -> Grid:
        """Returns all runs, over ``algorithm`` and the axes, with the data loaded.

        Raises:
          ValueError, OSError: if the data cannot be had.
        """
        return self._grid(self.task.data())

    def _grid(self, data: FederatedData | None) -> Grid:
        """Returns all runs on some data, an argument of the compiled programs."""
        points = Points(self)

        def prepare(rng_key: Any, algorithm: str, data: Any = None, **point: Any) -> OwnModels:
            here, numbers = points.at(algorithm, point)
            return here._prepare(rng_key, data, numbers)

        def build(
            algorithm: str, data: Any = None, prepared: OwnModels | None = None, **point: Any
        ) -> Setup:
            here, numbers = points.at(algorithm, point)
            return here._setup(algorithm, data, prepared, numbers)

        axes = {name: points.values[key] for name, key in points.names.items()}
        return Grid(
            build,
            {"algorithm": list(self.algorithms)} | axes,
            self.num_rounds,
            self.num_seeds,
            self.seed,
            # Closed over, data would be constants, which XLA copies into every program.
            shared={"data": data},
            record_every=self.record_every,
            client_map=self.client_map,
            prepare=None if self.requirement is None else prepare,
            until=None if self.until is None else Until(**dict(self.until)),
            first_seed=self.first_seed,
        )

    def _prepare(self, rng_key: Any, data: Any, numbers: Numbers) -> OwnModels:
        """Trains the clients' own models."""
        assert self.requirement is not None
        task, start = self.task.build(data, **numbers.get("task", {})), self.task.initial_params()
        given = numbers.get("requirement", {})
        return self.requirement.prepare(rng_key, task, self.num_models, start, given)

    def _setup(self, algorithm: str, data: Any, own: OwnModels | None, numbers: Numbers) -> Setup:
        """Builds one run: who trains what and how, with attackers and demands."""
        method, task = self.algorithms[algorithm], self.task.build(data, **numbers.get("task", {}))
        assignment = self._assigned(method, task.num_clients)
        given = numbers.get("algorithms", {}).get(algorithm, {})
        trained = method.build(self.num_models, self.num_rounds, **given)
        # One object M times: `stacks_of` stores the arrays that tasks share once.
        tasks = [task] * self.num_models
        if self.requirement is not None and own is not None:
            tasks = self.requirement.wrap(
                task, own, method, method.schedule(1, self.num_rounds, given)
            )
        if self.byzantine is not None:
            attack = numbers.get("byzantine", {})
            tasks = [self.byzantine.wrap_task(each, **attack) for each in tasks]
            trained = self.byzantine.wrap(trained, assignment.num_clients, **attack)
        return Setup(tasks, trained, assignment, self.task.initial_params())


def _check_on_quadratic(config: Config, table: str = "") -> None:
    """Raises `ValueError` if examples are to be drawn, of which the quadratic has none."""
    for key in ("epochs", "batch_size"):
        value = getattr(config, key, None)
        if value is not None:
            instead = ", and give local_steps" if key == "epochs" else ""
            raise ValueError(
                f"{table}{key} is {value}; the quadratic has no examples: leave it out{instead}"
            )
