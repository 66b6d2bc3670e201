"""The grid of an experiment: all points of its axes, with data loaded once per draw."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_mm.base import Task
from fedjax_mm.data.federated import FederatedData, stack_data
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.fields import Numbers
from fedjax_mm.experiments.point import Point
from fedjax_mm.experiments.start import load_start, params_at
from fedjax_mm.experiments.tasks import AnyTask
from fedjax_mm.sweeps.grid import Grid, Setup
from fedjax_mm.sweeps.plan import check_fits
from fedjax_mm.sweeps.until import Until

Data = tuple[FederatedData, ...]

SEED_NUMBER = "seed_number"
"""The name of the argument with the index of a run's seed, which starts at 0."""


def grid_of(experiment: Experiment, limit: float | None = None) -> Grid:
    """Returns the grid of an experiment over ``algorithm`` and its axes, after loading the data.

    Args:
      experiment: the experiment to run.
      limit: the memory limit in bytes; defaults to 60 % of the free memory.

    Raises:
      ValueError, OSError: if data or initial parameters cannot be loaded or do not fit.

    Example:
      >>> experiment = Experiment.model_validate({
      ...     "task": {"name": "quadratic"}, "num_models": 2, "num_rounds": 10,
      ...     "algorithms": {"MFA-RR": {
      ...         "assignment": {"name": "mfa_rr"}, "learning_rate": 0.1, "local_steps": 5}},
      ...     "axes": {"learning_rate": [0.05, 0.1]},
      ... })
      >>> grid_of(experiment).shape  # algorithms, rates, seeds
      (1, 2, 20)
    """
    first, num_seeds = experiment.first_seed, experiment.num_seeds
    seeds = range(first, first + num_seeds)
    start = experiment.params and load_start(experiment.params, list(experiment.algorithms), seeds)
    draws = Draws(experiment)
    points, data = draws.points, draws.load(limit)
    for here in points.every:
        here.check_sizes(data, limit)

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
        if not start:
            return setup
        params = params_at(point["start"], point["algorithm"], point[SEED_NUMBER], setup)
        return setup._replace(params=params)

    return Grid(
        build,
        {"algorithm": list(experiment.algorithms)}
        | {name: points.values[key] for name, key in points.names.items()},
        experiment.num_rounds,
        num_seeds,
        experiment.seed,
        # Pass data as an argument, because XLA would copy constants into every program.
        shared={"data": data} | ({"start": start} if start else {}),
        per_seed={SEED_NUMBER: np.arange(num_seeds)} if draws.are_by_seed or start else {},
        record_every=experiment.record_every,
        client_map=experiment.client_map,
        prepare=None if experiment.requirement is None else prepare,
        until=None if experiment.until is None else Until(**dict(experiment.until)),
        together=points.together,
        first_seed=first,
        data=" and ".join(sorted({each.kind for each in data})) or "synthetic",
        config=experiment.model_dump(),
    )


class Draws:
    """All draws of the data, with one store per kind of data.

    A store has one draw per value of the data axes, such as `task.partition.alpha`, and also per
    seed, which varies fastest, if `data_seed` is "seed". Runs on different draws share compiled
    programs, because the index of a draw is an argument. Models and points with equal settings
    share a store.

    Attributes:
      points: the points of the experiment.
      are_by_seed: whether any model has different data for each seed.
    """

    def __init__(self, experiment: Experiment) -> None:
        """Lists all draws without loading them."""
        self.points = points = experiment.points()
        self._experiment = experiment
        self.are_by_seed = False
        self._stores = dict[str, list[AnyTask]]()
        self._names = dict[tuple[int, ...], list[str | None]]()
        for choice in points.choices:
            self._names[choice] = [
                self._name(variants)
                for variants in zip(
                    *(here.each_task for here in points.on_data_axes(choice)), strict=True
                )
            ]

    def _name(self, variants: Sequence[AnyTask]) -> str | None:
        """Returns the name of the store of a model's draws, or None if the model has no data."""
        if variants[0].source is None:
            return None
        self.are_by_seed |= variants[0].is_drawn_by_seed
        seeds = self._experiment.data_seeds if variants[0].is_drawn_by_seed else ()
        draws = [draw for task in variants for draw in task.draws(seeds)]
        name = str([draw.source for draw in draws])
        self._stores.setdefault(name, draws)
        return name

    def load(self, limit: float | None = None) -> Data:
        """Returns the data of all stores.

        Args:
          limit: the memory limit in bytes; see `check_fits`.

        Raises:
          ValueError, OSError: if data cannot be loaded or do not fit in memory.
        """
        for draws in self._stores.values():
            what = f"task.num_clients = {draws[0].num_clients or 0:,}, draws: {len(draws):,};"
            needed = len(draws) * draws[0].num_bytes
            check_fits(f"{what} the data", needed, limit, "take fewer clients or features")
        loaded: Any = ([each.data() for each in draws] for draws in self._stores.values())
        return tuple(stack_data(each) if len(each) > 1 else each[0] for each in loaded)

    def of(self, point: Mapping[str, Any], data: Data) -> list[FederatedData | None]:
        """Returns the data of every model at a point, or None for a model without data.

        Args:
          point: values by dimension name, with `OneOf` on data axes, and `SEED_NUMBER` if draws are
            per seed.
          data: the data of all stores.
        """
        points = self.points
        place, num_seeds = 0, self._experiment.num_seeds
        for key in points.data_axes:
            place = place * len(points.values[key]) + point[points.name_of(key)].place

        def of_model(task: AnyTask, name: str | None) -> FederatedData | None:
            if name is None:
                return None
            store = data[list(self._stores).index(name)]
            if len(self._stores[name]) == 1:
                return store
            by_seed = task.is_drawn_by_seed
            return store.select(place * num_seeds + point[SEED_NUMBER] if by_seed else place)

        here, _ = points.at(point)
        names = self._names[points.choice(point)]
        return [of_model(*each) for each in zip(here.each_task, names, strict=True)]
