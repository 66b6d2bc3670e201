"""Adds seeds to an item until all of its statements are settled or a budget is spent."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import xarray as xr

from fedjax_mm.experiments.fields import Seeded
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.training import ABOUT, Make, staged
from fedjax_mm.results.dataset import join_seeds
from fedjax_mm.results.finished import RESULT, open_result
from fedjax_mm.results.manifest import save_about
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.devices import agree
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.tools.files import write_aside

_TIMES = 8  # default limit on seeds, as a multiple of the initial number


class Budget(NamedTuple):
    """Limits on the seeds and time of an item.

    Attributes:
      max_seeds: the total number of seeds, by default 8 times the initial number.
      max_minutes: the time to compile and run. A batch of seeds does not start if the total time,
        estimated in proportion to the earlier batches, would exceed the limit.
    """

    max_seeds: int | None = None
    max_minutes: float | None = None

    def seeds(self, item: Item, config: Seeded) -> int:
        """The largest number of seeds.

        Raises:
          ValueError: if the item starts with more seeds.
        """
        most = self.max_seeds or _TIMES * config.num_seeds
        if most < config.num_seeds:
            raise ValueError(
                f"--max-seeds is {most}; {item.id} begins with {config.num_seeds} seeds; raise the "
                f"limit, or begin with --set num_seeds={most}"
            )
        return most

    def allows(self, result: xr.Dataset, more: int) -> bool:
        """Whether there is time to add more seeds to the result."""
        if self.max_minutes is None:
            return True
        # Agree on the answer, because all processes must stop at the same time.
        spent = agree(sum(result.attrs["manifest"]["wall_seconds"].values()))[0]
        return spent * (1 + more / result.sizes["seed"]) <= 60 * self.max_minutes


def decide(
    item: Item,
    config: Seeded,
    execution: Execution,
    budget: Budget,
    make: Make,
    tell: Callable[[str], None],
    begun: Path | None = None,
) -> tuple[Seeded, xr.Dataset]:
    """Adds seeds until all statements are settled or the budget is spent.

    Each batch doubles the number of seeds, and its result equals that of the same seeds in a single
    run. A stage of the checkpoints keeps this result.

    Args:
      item: the item to reproduce.
      config: the item's settings, including the number of seeds in the first batch.
      execution: the execution of each batch.
      budget: limits at which to stop even if some statements are unsettled.
      make: computes a batch.
      tell: called after each batch with the number of seeds and the unsettled statements.
      begun: a complete result for some seeds, used as the first batch.

    Returns:
      The settings, with the total number of seeds, and the result.
    """
    if begun and execution.checkpoints:
        _begin_with(begun, execution.checkpoints)
    most, result = budget.seeds(item, config), _batch(item, config, execution, make)
    while True:
        config = config.with_seeds(0, result.sizes["seed"])
        statements = item.findings(result, config).statements
        still = [each.key for each in statements if each.verdict == "not settled"]
        more = min(config.num_seeds, most - config.num_seeds)
        is_time = budget.allows(result, more)
        end = _end(still, more, is_time=is_time)
        count = (
            f"{config.num_seeds} seeds, {len(still)} of {len(statements)} statements not settled"
        )
        tell(f"{item.id}: {'; '.join([count, *still, end or f'adding {more} seeds'])}")
        if end:
            return config, result
        others = config.with_seeds(config.num_seeds, more)
        result = join_seeds(result, _batch(item, others, execution, make))


def _end(still: list[str], more: int, *, is_time: bool) -> str:
    """The reason for not adding seeds, or "" to add them."""
    if not still:
        return "there is nothing left to settle"
    if more <= 0:
        return "no more are allowed (--max-seeds)"
    return "" if is_time else f"{more} more would take too long (--max-minutes)"


def _batch(item: Item, config: Seeded, execution: Execution, make: Make) -> xr.Dataset:
    """The result of some seeds, reusing that of an interrupted run."""
    first = config.first_seed
    label = f"seeds {first} to {first + config.num_seeds - 1}"
    return staged(f"seeds-{first}", config, execution._replace(label=label), make)


def _begin_with(result: Path, checkpoints: Checkpoints) -> None:
    """Uses a complete result as the first batch of an unfinished run, which adds seeds to it."""
    with checkpoints.stage("seeds-0") as saved:
        if jax.process_index() == 0:
            path = saved.directory / RESULT
            write_aside(path, partial(shutil.copyfile, result))
            about = open_result(path).attrs["manifest"]
            save_about(path.with_name(ABOUT), about, [RESULT])
