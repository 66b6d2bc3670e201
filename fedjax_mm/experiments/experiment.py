"""An experiment as data, from a file for `run CONFIG.toml` or from the page of a figure."""

from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator

from fedjax_mm.base import Task
from fedjax_mm.experiments.axes import Axes, Points
from fedjax_mm.experiments.draws import SEED_NUMBER, Data, Draws, kind_of
from fedjax_mm.experiments.fields import Numbers
from fedjax_mm.experiments.overrides import replaced
from fedjax_mm.experiments.point import Point
from fedjax_mm.experiments.start import Start, load_start, params_at
from fedjax_mm.sweeps.grid import Grid, Setup
from fedjax_mm.sweeps.until import Until


class Experiment(Point):
    """Tasks, algorithms and seeds, at all points of the experiment's axes.

    An axis is a setting of the experiment, such as `num_models` or `task.mu`, or else a setting of
    every algorithm, such as `learning_rate` or `assignment.cohort_size`. The axis
    ``algorithms.NAME.q`` is a setting of one algorithm. Axes of numbers that are not counts cost no
    compilation, and neither do axes of the data, such as `task.partition.alpha` or
    `task.data_seed`. With `data_seed` "seed" every seed has a separate draw of the data.

    `num_models` may be left out if it is an axis, or if the experiment has `tasks`, one for each
    model, all with the same clients. A setting `task.KEY` then applies to every task.

    `together` names axes of counts whose values share a program, which plain FedAvg on the
    quadratic allows. By default it is `local_steps`. With `num_models`, of MFA-Rand and MFA-RR, a
    sweep compiles less, but a round may take 2.7 times as long.

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

    axes: Axes = Field(default_factory=dict)
    together: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _said_elsewhere(cls, values: Any) -> Any:
        """Returns the values with the settings that axes imply."""
        if not isinstance(values, dict):
            return values
        values = _with_seeds_of_data(values)
        axes = values.get("axes")
        if values.get("num_models") is not None or not isinstance(axes, dict):
            return values
        if "num_models" not in axes:
            return values
        axis = axes["num_models"]
        is_list = isinstance(axis, list) and len(axis) > 0 and isinstance(axis[0], int)
        return values | {"num_models": axis[0] if is_list else 1}

    @model_validator(mode="after")
    def _points_fit(self) -> Self:
        """Raises `ValueError` for a point that does not fit."""
        # Check all points without their data, because data take long to load.
        self._grid(Draws(Points(self, self.axes, self.together)), (), None)
        return self

    @property
    def points(self) -> dict[str, list[Any]]:
        """The checked values on every axis, by its key."""
        return Points(self, self.axes, self.together).values

    def grid(self, limit: float | None = None) -> Grid:
        """Returns all runs, over ``algorithm`` and the axes, with the data loaded.

        Args:
          limit: bytes of memory that may be used; by default 60 % of the free memory.

        Raises:
          ValueError, OSError: if the data or the initial parameters cannot be loaded or do not fit.
        """
        seeds = range(self.first_seed, self.first_seed + self.num_seeds)
        start = load_start(self.params, list(self.algorithms), seeds) if self.params else None
        draws = Draws(Points(self, self.axes, self.together))
        data = draws.load(limit)
        for here in draws.points.every:
            here.check_sizes(data, limit)
        return self._grid(draws, data, start)

    def _grid(self, draws: Draws, data: Data, start: Start | None) -> Grid:
        """Returns the grid of all runs, with data as an argument of the compiled programs."""
        points = draws.points

        def at(point: dict[str, Any], data: Data) -> tuple[Point, Numbers, list[Task]]:
            here, numbers = points.at(point)
            stores = draws.of(point, data)
            return here, numbers, here.build_tasks(stores, numbers.get("task", {}))

        def prepare(rng_key: Any, data: Data = (), **point: Any) -> Any:
            here, numbers, tasks = at(point, data)
            given = numbers.get("requirement", {})
            needed = here.requirement
            return needed and needed.prepare(rng_key, tasks, here.initial_params(), given)

        def build(data: Data = (), prepared: Any = None, **point: Any) -> Setup:
            here, numbers, tasks = at(point, data)
            setup = here.setup(point["algorithm"], tasks, prepared, numbers)
            if start is None:
                return setup
            place = point[SEED_NUMBER]
            return setup._replace(
                params=params_at(point["start"], point["algorithm"], place, setup)
            )

        axes = {name: points.values[key] for name, key in points.names.items()}
        return Grid(
            build,
            {"algorithm": list(self.algorithms)} | axes,
            self.num_rounds,
            self.num_seeds,
            self.seed,
            # Pass data as an argument, because XLA copies constants into every program.
            shared={"data": data} | ({} if start is None else {"start": start}),
            per_seed={SEED_NUMBER: np.arange(self.num_seeds)}
            if draws.are_by_seed or start is not None
            else {},
            record_every=self.record_every,
            client_map=self.client_map,
            prepare=None if self.requirement is None else prepare,
            until=None if self.until is None else Until(**dict(self.until)),
            together=points.together,
            first_seed=self.first_seed,
            data=kind_of(data),
            config=self.model_dump(),
        )


def _with_seeds_of_data(values: dict[str, Any]) -> dict[str, Any]:
    """Moves a `data_seed` "seed" to the tasks, if a file has it as an axis."""
    axes = values.get("axes")
    if not isinstance(axes, dict):
        return values
    nested = axes.get("task")
    if axes.get("task.data_seed") == "seed":
        axes = {key: axis for key, axis in axes.items() if key != "task.data_seed"}
    elif isinstance(nested, dict) and nested.get("data_seed") == "seed":
        rest = {key: axis for key, axis in nested.items() if key != "data_seed"}
        axes = {key: axis for key, axis in axes.items() if key != "task"}
        axes |= {"task": rest} if rest else {}
    else:
        return values
    tasks = values.get("tasks")
    if isinstance(tasks, list):
        drawn = [replaced(each, ["data_seed"], "seed") for each in tasks]
        return values | {"axes": axes, "tasks": drawn}
    return replaced(values, ["task", "data_seed"], "seed") | {"axes": axes}
