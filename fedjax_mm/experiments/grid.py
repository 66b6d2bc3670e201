"""The grid of an experiment: all points of its axes, with data loaded once per draw."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from fedjax_mm.base import Task
from fedjax_mm.data.federated import FederatedData, stack_data
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.start import load_start, params_at
from fedjax_mm.experiments.tasks import AnyTask
from fedjax_mm.sweeps.grid import Grid, Setup
from fedjax_mm.sweeps.plan import check_fits
from fedjax_mm.sweeps.until import Until

Data = tuple[FederatedData, ...]

Named = tuple[tuple[str, float], ...]


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

    @cache
    def tasks_of(choice: tuple[int, ...], draw: int, seed: int, numbers: Named) -> list[Task]:
        here = points.at_choice(choice)
        return here.build_tasks(draws.of(choice, draw, seed, data), dict(numbers))

    def build(seed: int = first, **point: Any) -> Setup:
        here, numbers = points.at(point)
        place = points.choice(point), points.place_of_draw(point), seed - first
        tasks = tasks_of(*place, tuple(numbers.get("task", {}).items()))
        setup = here.setup(point["algorithm"], tasks, numbers)
        if not start:
            return setup
        return setup._replace(params=params_at(start, point["algorithm"], seed - first, setup))

    def build_once(**point: Any) -> Setup:
        return build(**point)

    return Grid(
        build if draws.are_by_seed or start else build_once,
        {"algorithm": list(experiment.algorithms)}
        | {name: points.values[key] for name, key in points.names.items()},
        experiment.num_rounds,
        num_seeds,
        experiment.seed,
        record_every=experiment.record_every,
        client_map=experiment.client_map,
        until=None if experiment.until is None else Until(**dict(experiment.until)),
        together=[points.name_of(key) for key in points.joined],
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

    def of(
        self, choice: tuple[int, ...], draw: int, seed: int, data: Data
    ) -> list[FederatedData | None]:
        """Returns the data of every model at a point, or None for a model without data.

        Args:
          choice: the point's positions on structural axes.
          draw: the place of the draw among the points of the data axes.
          seed: the place of the seed.
          data: the data of all stores.
        """
        num_seeds = self._experiment.num_seeds

        def of_model(task: AnyTask, name: str | None) -> FederatedData | None:
            if name is None:
                return None
            store = data[list(self._stores).index(name)]
            if len(self._stores[name]) == 1:
                return store
            return store.select(draw * num_seeds + seed if task.is_drawn_by_seed else draw)

        each_task = self.points.at_choice(choice).each_task
        return [of_model(*each) for each in zip(each_task, self._names[choice], strict=True)]
