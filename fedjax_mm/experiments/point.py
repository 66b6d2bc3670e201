"""A single point of a sweep: tasks, algorithms and seeds, without axes."""

from collections.abc import Callable, Collection, Sequence
from functools import cache, cached_property, partial
from typing import Annotated, Any, Literal, Self, TypeVar

import jax
import jax.numpy as jnp
from pydantic import Field, PrivateAttr, model_validator

from fedjax_mm.asynchrony.dispatch import Dispatch
from fedjax_mm.base import Algorithm, Assignment, Task
from fedjax_mm.checks.values import check_epochs
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.fields import (
    Config,
    Count,
    CountOrZero,
    Distinct,
    NonNegative,
    Recorded,
    Seeded,
    keys_of,
)
from fedjax_mm.experiments.methods import (
    Assigned,
    AssignmentConfig,
    Byzantine,
    DemandFn,
    MethodConfig,
    Requirement,
)
from fedjax_mm.experiments.own import allows_code
from fedjax_mm.experiments.start import check_file
from fedjax_mm.experiments.tasks import AnyTask, OwnTask, QuadraticConfig, TaskConfig
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.sweeps.plan import check_fits
from fedjax_mm.sweeps.until import Until
from fedjax_mm.tasks.with_clients import ClientMetric, with_clients

Precision = Literal["float32", "float64"]

T = TypeVar("T")


def _once(method: Callable[..., T]) -> "cached_property[Callable[..., T]]":
    """Makes a method that a point calls once with the same arguments, in its precision."""

    def calls(self: "Point") -> Callable[..., T]:
        def call(*args: Any) -> T:
            with jax.enable_x64(self.precision == "float64"):
                return method(self, *args)

        return cache(call)

    return cached_property(calls)


@keys_of(Until, min_delta=NonNegative, warmup=CountOrZero)
class Target(Config):
    """The early stopping target of a run, as in `Until`."""


@keys_of(with_clients)
class Clients(Config):
    """Metrics of every client, and how they are distributed over clients, as in `with_clients`."""

    metrics: Annotated[tuple[ClientMetric, ...], Distinct, Field(min_length=1)]

    def record(self, tasks: Sequence[Task]) -> list[Task]:
        """Wraps all tasks with `with_clients`."""
        return [self.call(task=task) for task in tasks]


class Point(Recorded, Seeded):
    """Tasks, algorithms and seeds.

    Attributes:
      task: the task of all models.
      tasks: the task of each model, instead of `task`; all have the same clients.
      algorithms: the tables of the algorithms that are compared, by label.
      assignment: the default for algorithms without their own; it covers only seen clients.
      byzantine: turns some clients into attackers.
      requirement: sets the clients' thresholds, which all algorithms share.
      num_models: M, the number of models; it may be omitted if there are `tasks`.
      client_map: how a device computes its clients: "vmap" all at once, "scan" one at a time, or
        this many at a time.
      clients: records metrics of every client, and their worst and best share, variance and others.
      precision: the precision of parameters and data; classifiers are trained in "float32".
      until: ends runs early.
      params: a file with the final parameters of another run, from which this run starts. If it has
        a single algorithm, seed or model, all start from it; otherwise each starts from its own.
    """

    task: TaskConfig | None = None
    tasks: Annotated[list[TaskConfig], Field(min_length=1)] | None = None
    algorithms: Annotated[dict[str, MethodConfig], Field(min_length=1)]
    assignment: AssignmentConfig | None = None
    byzantine: Byzantine | None = None
    requirement: Requirement | None = None
    num_models: Annotated[Count, Field(le=100_000)]
    num_seeds: Count = 20
    client_map: Literal["auto", "vmap", "scan"] | Count = "auto"
    precision: Precision = "float32"
    until: Target | None = None
    clients: Clients | None = None
    params: str | None = None
    _allows_code: bool = PrivateAttr(default_factory=allows_code)

    @property
    def allows_code(self) -> bool:
        """Whether the settings were read with leave to name code."""
        return self._allows_code

    @model_validator(mode="before")
    @classmethod
    def _counted(cls, values: Any) -> Any:
        """Sets the number of models to the number of tasks, unless given."""
        if not isinstance(values, dict) or not isinstance(values.get("tasks"), list):
            return values
        return {"num_models": len(values["tasks"])} | values

    @model_validator(mode="after")
    def _all_fits(self) -> Self:
        """Raises `ValueError` if the settings cannot be built, before any compilation."""
        if self.until is not None:
            self.until.call()
        self._check_tasks()
        self._check_examples()
        for label in self.algorithms:
            assignment = self._assignment_of(label)
            try:
                self._check_method(label, assignment)
            except ValueError as error:
                raise ValueError(f"algorithms.{label}: {error}") from error
        is_exact = all(
            each.has_closed_form or isinstance(each, OwnTask) for each in self.kinds_of_task
        )
        if self.precision == "float64" and not is_exact:
            raise ValueError("precision is 'float64'; classifiers are trained in 'float32'")
        if self.params is not None:
            check_file(self.params)
        return self

    def __copy__(self) -> Self:
        """A copy without parts, because `model_copy` may change the settings of which they are."""
        copied = super().__copy__()
        for name in vars(copied).keys() - type(self).model_fields:
            del vars(copied)[name]
        return copied

    @property
    def each_task(self) -> list[AnyTask]:
        """The tasks of all models."""
        if self.task is None:
            return self.kinds_of_task
        return [self.task] * getattr(self.num_models, "size", self.num_models)

    @property
    def kinds_of_task(self) -> list[AnyTask]:
        """The tasks of all models, or a single one if all models share it."""
        return list(self.tasks or []) if self.task is None else [self.task]

    @property
    def sources(self) -> list[Any]:
        """The data settings of each task, or None for a task without data."""
        return [each.source for each in self.kinds_of_task]

    def can_join(self, key: str) -> bool:
        """Whether the values of a count axis can be arguments of one program.

        This holds for E and M if local training has a closed form. M also needs an assignment that
        can be padded.
        """
        tables = [*self.kinds_of_task, *self.algorithms.values()]
        is_changed = self.requirement is not None or self.byzantine is not None
        if is_changed or not all(each.has_closed_form for each in tables):
            return False
        if key != "num_models":
            return key.rpartition(".")[2] == "local_steps"
        assigned = map(self._assignment_of, self.algorithms)
        return self.params is None and all(each.can_be_padded for each in assigned)

    def _check_tasks(self) -> None:
        if (self.task is None) == (self.tasks is None):
            given = "missing" if self.task is None else "there are tasks, too"
            raise ValueError(
                f"task: {given}; give a table [task], which all models learn, or a table [[tasks]] "
                "for each model"
            )
        if self.tasks is None:
            return
        if len(self.tasks) != self.num_models:
            raise ValueError(
                f"num_models is {self.num_models}, but there are {len(self.tasks)} tables "
                "[[tasks]]; give one for each model, and leave num_models out"
            )
        clients = {getattr(each, "num_clients", None) for each in self.tasks} - {None}
        if len(clients) > 1:
            raise ValueError(
                f"tasks of {' and '.join(map(str, sorted(clients, key=str)))} clients; the same "
                "clients train all models: give every task the same number of clients"
            )
        quadratic = [each for each in self.tasks if isinstance(each, QuadraticConfig)]
        if len(quadratic) < len(self.tasks) and any(each.start != "zeros" for each in quadratic):
            raise ValueError(
                "a quadratic's start is 'normal', but other tasks draw their own; leave start out"
            )

    def _check_examples(self) -> None:
        metrics = () if self.clients is None else self.clients.metrics
        named = [f"clients.metrics has {name!r}" for name in metrics if name != "loss"]
        tested = ["requirement: clients are asked one by one"] * (self.requirement is not None)
        tested += [each for each in named if "test_" in each]
        for task in self.kinds_of_task:
            if isinstance(task, QuadraticConfig):
                if self.requirement is not None:
                    _check_on_quadratic(self.requirement, "requirement.")
                if named:
                    raise ValueError(f"{named[0]}; the quadratic has no examples: give 'loss'")
            elif tested and not task.has_own_tests:
                raise ValueError(
                    f"{tested[0]}, but one pool of test examples stands for all; give "
                    "task.test_fraction, such as 0.4, so that each has its own"
                )

    def _check_method(self, label: str, assignment: Assigned) -> None:
        method, trained = self.algorithms[label], self._trained(label)
        if self.byzantine is not None:
            self.byzantine.wrap(trained, num_clients=1)
        if self.requirement is None and (assignment.appealing or method.needs_thresholds):
            asking = "assignment.appealing" if assignment.appealing else method.name
            raise ValueError(
                f"{asking} asks for clients with thresholds; add a table requirement, such as "
                "requirement = { num_steps = 100 }"
            )
        for task in self.kinds_of_task:
            # The files of LEAF and functions of one's own may know the number alone.
            if (num_clients := getattr(task, "num_clients", None)) is not None:
                self._assigned(label, num_clients)
            if isinstance(task, QuadraticConfig):
                _check_on_quadratic(method)
                if assignment.name == "ifca" and self.num_models > 1 and self.params is None:
                    raise ValueError(
                        "ifca sends all clients to one model if models start equal, as quadratics "
                        "do in a file; give params, or a task that draws each model's start"
                    )

    def _assignment_of(self, label: str) -> Assigned:
        """An algorithm's own assignment, or else the default."""
        assignment = self.algorithms[label].assignment or self.assignment
        if assignment is None:
            raise ValueError(
                f"algorithms.{label}.assignment: missing; give one, or a table assignment for all "
                "algorithms"
            )
        return assignment

    @_once
    def _trained(self, label: str) -> Algorithm:
        """Builds an algorithm, without attackers."""
        used: Any = self.num_models if self._used is None else self._used
        return self.algorithms[label].build(used, self.num_rounds)

    @property
    def _used(self) -> Any:
        """The number of models that train, if `num_models` is padded."""
        return getattr(self.num_models, "number", None)

    @_once
    def _assigned(self, label: str, num_clients: int) -> Assignment | Dispatch:
        """Builds an algorithm's assignment over seen clients."""
        num_unseen = 0 if self.requirement is None else self.requirement.num_unseen
        if num_unseen >= num_clients:
            raise ValueError(
                f"requirement.num_unseen is {num_unseen}, but there are {num_clients} clients; at "
                f"most {num_clients - 1} may be unseen"
            )
        try:
            seen = num_clients - num_unseen
            return self._assignment_of(label).build(seen, self.num_models)
        except ValueError as error:
            unseen = (
                f", without those of requirement.num_unseen = {num_unseen}" if num_unseen else ""
            )
            raise ValueError(f"{error}{unseen}") from error

    def check_sizes(self, data: Collection[FederatedData], limit: float | None) -> None:
        """Raises `ValueError` if int32 cannot count local steps, or arrays do not fit in memory.

        Args:
          data: the data of all models.
          limit: the memory limit in bytes; see `check_fits`.
        """
        for task in self.kinds_of_task:
            if isinstance(task, QuadraticConfig):
                what = f"task.num_clients = {task.num_clients:,}; the parameters"
                needed = self.num_models * 4 * (task.num_clients * task.block_size + 1)
                check_fits(what, needed, limit, "take fewer clients or models")
        most = max((each.train.max_count for each in data), default=1)
        row_bytes = max(map(_row_bytes, data), default=0.0)
        for label, method in self.algorithms.items():
            how = dict(method)
            epochs, size = how["epochs"] or 0, how["batch_size"] or 0
            check_epochs(epochs, -(-most // (size or most)), f"algorithms.{label}: ")
            what = f"algorithms.{label}: the {size:,} rows of a batch"
            check_fits(what, size * row_bytes, limit, "take a smaller batch_size")

    def initial_params(self) -> Any:
        """The initial parameters for `simulate`, or None if tasks draw them."""
        if self.task is not None:
            return self.task.initial_params()
        starts: list[Any] = [each.initial_params() for each in self.each_task]
        if any(start is None for start in starts):
            return None
        # Stack the parameters of models with equal structure, and use a list for others.
        is_alike = len({start.shape for start in starts}) == 1
        return jnp.stack(starts) if is_alike else starts

    def setup(self, algorithm: str, tasks: list[Task]) -> Setup:
        """Builds the `Setup` of one run, including attackers and requirements."""
        method = self.algorithms[algorithm]
        trained = self._trained(algorithm)
        assignment = self._assigned(algorithm, tasks[0].num_clients)
        initial, attack, prepare = self.initial_params(), None, None
        if self.byzantine is not None:
            attack = self.byzantine.on_tasks(assignment.num_clients)
            trained = self.byzantine.wrap(trained, assignment.num_clients)
        if self.requirement is not None:
            demand = self.requirement.demand(method, method.schedule(1, self.num_rounds))
            prepare = partial(_with_thresholds, demand, initial, attack)
        elif attack is not None:
            tasks = list(map(attack, tasks))
        if self.clients is not None:
            if prepare is None:
                tasks = self.clients.record(tasks)
            else:
                prepare = partial(_with_clients, prepare, self.clients)
        return Setup(tasks, trained, assignment, initial, self._used, prepare)


def _with_thresholds(
    demand: DemandFn, params: Any, attack: Callable[[Task], Task] | None, rng_key: Any, setup: Setup
) -> Setup:
    given: Any = setup.tasks
    tasks = demand(rng_key, given, params)
    return setup._replace(tasks=tasks if attack is None else list(map(attack, tasks)))


def _with_clients(
    prepare: Callable[[Any, Setup], Setup], clients: Clients, rng_key: Any, setup: Setup
) -> Setup:
    made = prepare(rng_key, setup)
    tasks: Any = made.tasks
    return made._replace(tasks=clients.record(tasks))


def _row_bytes(data: FederatedData) -> float:
    """Size in bytes of an example in a batch, including its index and weight."""
    arrays = jax.tree.leaves(data.train.examples)
    return 8 + sum(x.nbytes / len(x) for x in arrays)


def _check_on_quadratic(config: Config, table: str = "") -> None:
    """Raises `ValueError` for batch settings, because the quadratic has no examples."""
    for key in ("epochs", "batch_size"):
        value = getattr(config, key, None)
        if value is not None:
            instead = ", and give local_steps" if key == "epochs" else ""
            raise ValueError(
                f"{table}{key} is {value}; the quadratic has no examples: leave it out{instead}"
            )
