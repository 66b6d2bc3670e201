"""The data of an experiment: all draws, each loaded once, and the draw of every run."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_mm.data.federated import FederatedData, stack_data
from fedjax_mm.experiments.axes import Points
from fedjax_mm.experiments.tasks import AnyTask
from fedjax_mm.sweeps.plan import check_fits

Data = tuple[FederatedData, ...]

SEED_NUMBER = "seed_number"
"""The name of the argument for the index of a run's seed, from 0."""


class Draws:
    """All draws of the data, in one store for each kind of data.

    A store has a draw for every value on the axes of the data, such as `task.partition.alpha`, and,
    if `data_seed` is "seed", for every seed, which changes fastest. The runs on them share compiled
    programs, because the index of a draw is a number. Models and points of equal settings share a
    store.

    Attributes:
      points: the points of the experiment.
      are_by_seed: whether some model's data are drawn for every seed.
    """

    def __init__(self, points: Points) -> None:
        """Lists all draws, without loading them."""
        self.points = points
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
        seeds = self.points.base.data_seeds if variants[0].is_drawn_by_seed else ()
        draws = [draw for task in variants for draw in task.draws(seeds)]
        name = str([draw.source for draw in draws])
        self._stores.setdefault(name, draws)
        return name

    def load(self, limit: float | None = None) -> Data:
        """Returns the data of all stores.

        Args:
          limit: bytes of memory that may be used; see `check_fits`.

        Raises:
          ValueError, OSError: if the data cannot be loaded, or do not fit the memory.
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
          point: values by the names of dimensions, those on the axes of the data as `OneOf`, and
            `SEED_NUMBER` if draws are by seed.
          data: the data of all stores.
        """
        points = self.points
        place, num_seeds = 0, points.base.num_seeds
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


def kind_of(data: Data) -> str:
    """Returns the origin of the data, for a manifest."""
    return " and ".join(sorted({each.kind for each in data})) or "synthetic"
