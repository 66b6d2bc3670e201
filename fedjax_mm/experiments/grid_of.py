"""The grid of an experiment: all points of its axes, with data loaded once per draw."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from fedjax_mm.base import Task
from fedjax_mm.data.federated import FederatedData, stack_data
from fedjax_mm.experiments.axes import Points
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.start import load_start, params_at
from fedjax_mm.experiments.tasks import AnyTask, OwnTask
from fedjax_mm.sweeps.grid import Grid, Setup
from fedjax_mm.sweeps.plan import check_fits


def grid_of(experiment: Experiment, limit: float | None = None) -> Grid:
    """Loads the data of an experiment, and makes its grid over ``algorithm`` and its axes.

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
    points = experiment.points()
    kinds = [task for here in points.every for task in here.each_task]
    by_seed = any(task.is_drawn_by_seed for task in kinds)
    draws = experiment.data_seeds if by_seed else [0]
    data = load_data(points, draws, limit)
    for here in points.every:
        here.check_sizes(data.values(), limit)

    sorts: set[str] = {each.kind for each in data.values()}
    sorts |= {"not stated" for task in kinds if isinstance(task, OwnTask)}

    @cache
    def built(task: AnyTask) -> Task:
        mine: Any = data.get(str(task.source))
        return task.build(mine)

    def build(seed: int = first, **point: Any) -> Setup:
        here, draw = points.at(point), draws[seed - first if by_seed else 0]
        tasks = [built(task.drawn(draw)) for task in here.each_task]
        setup = here.setup(point["algorithm"], tasks)
        if not start:
            return setup
        return setup._replace(params=params_at(start, point["algorithm"], seed - first, setup))

    def build_once(**point: Any) -> Setup:
        return build(**point)

    return Grid(
        build if by_seed or start else build_once,
        {"algorithm": list(experiment.algorithms)}
        | {name: points.values[key] for name, key in points.names.items()},
        experiment.num_rounds,
        num_seeds,
        experiment.seed,
        record_every=experiment.record_every,
        client_map=experiment.client_map,
        until=experiment.until.call() if experiment.until else None,
        together=[points.name_of(key) for key in points.joined],
        first_seed=first,
        data=" and ".join(sorted(sorts)) or "synthetic",
        config=experiment.model_dump(),
    )


def load_data(
    points: Points, seeds: Sequence[int], limit: float | None = None
) -> dict[str, FederatedData]:
    """Loads the data of all draws, by their settings.

    Draws that differ on axes of the data or in their seed have equal shapes, so that they share
    programs.

    Args:
      points: the points of an experiment.
      seeds: the seeds of its draws.
      limit: the memory limit in bytes; see `check_fits`.

    Raises:
      ValueError, OSError: if data cannot be loaded or do not fit in memory.
    """
    found = dict[str, FederatedData]()
    for variants in points.draws:
        for tasks in zip(*(here.each_task for here in variants), strict=True):
            draws = [
                task.drawn(seed)
                for task in tasks
                for seed in (seeds if task.is_drawn_by_seed else seeds[:1])
            ]
            each = {str(draw.source): draw for draw in draws if draw.source is not None}
            if each.keys() <= found.keys():
                continue
            what = (
                f"task.num_clients = {getattr(draws[0], 'num_clients', 0):,}, draws: {len(each):,};"
            )
            needed = len(each) * draws[0].num_bytes
            check_fits(f"{what} the data", needed, limit, "take fewer clients or features")
            loaded: Any = [draw.data() for draw in each.values()]
            store = stack_data(loaded) if len(loaded) > 1 else None
            data = [store.select(i) for i in range(len(loaded))] if store else loaded
            found = dict(zip(each, data, strict=True)) | found
    return found
