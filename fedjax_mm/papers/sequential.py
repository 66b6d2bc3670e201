"""Seeds added to an item until each of its statements is settled, or a budget is spent."""

import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import xarray as xr

from fedjax_mm.experiments.fields import Seeded
from fedjax_mm.files import plain, write_aside
from fedjax_mm.papers.item import Item
from fedjax_mm.results.dataset import join_seeds, manifest, open_result, save_dataset
from fedjax_mm.results.finished import RESULT, read_about, save_about
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.devices import agree
from fedjax_mm.sweeps.errors import refusing
from fedjax_mm.sweeps.execution import Execution

_ABOUT = "manifest.json"  # of a batch, with the digest of its result
_TIMES = 8  # the seeds that an item begins with are the most that it has by default
_SAME = ("config", "versions", "device", "git_revision")  # in the manifests of all batches

Make = Callable[[Seeded, Execution], xr.Dataset]
"""Returns the result of some seeds, as `Item.make` does."""


class Budget(NamedTuple):
    """Seeds and time that an item may take.

    Attributes:
      max_seeds: in all; None is 8 times the initial number.
      max_minutes: of compiling and running. No batch of seeds is begun that would exceed it,
        estimated in proportion to the time of all batches before.
    """

    max_seeds: int | None = None
    max_minutes: float | None = None

    def seeds(self, item: Item, config: Seeded) -> int:
        """Returns the largest number of seeds.

        Raises:
          ValueError: if the item begins with more.
        """
        most = self.max_seeds or _TIMES * config.num_seeds
        if most < config.num_seeds:
            raise ValueError(
                f"--max-seeds is {most}; {item.id} begins with {config.num_seeds} seeds; raise the "
                f"limit, or begin with --set num_seeds={most}"
            )
        return most

    def allows(self, result: xr.Dataset, more: int) -> bool:
        """Returns whether there is time for more seeds than the result has."""
        if self.max_minutes is None:
            return True
        # All processes must stop at the same time.
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

    Each batch doubles the number of seeds. It is a stage of the checkpoints, which keeps its
    result, and it equals the same seeds of one run with all seeds.

    Args:
      item: the item to reproduce.
      config: its settings; the first batch has their number of seeds.
      execution: the execution of each batch.
      budget: limits at which to stop though statements are not settled.
      make: computes a batch.
      tell: called after each batch with its seeds and the unsettled statements.
      begun: a complete result of some seeds, which is the first batch.

    Returns:
      The settings, with the number of all seeds, and the result.
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
    """Returns the reason for adding no seeds, or an empty text if seeds are added."""
    if not still:
        return "there is nothing left to settle"
    if more <= 0:
        return "no more are allowed (--max-seeds)"
    return "" if is_time else f"{more} more would take too long (--max-minutes)"


def _batch(item: Item, config: Seeded, execution: Execution, make: Make) -> xr.Dataset:
    """Returns the result of some seeds, which an interrupted run may have left."""
    first = config.first_seed
    label = f"seeds {first} to {first + config.num_seeds - 1}"
    return staged(f"seeds-{first}", config, execution._replace(label=label), make)


def staged(stage: str, config: Seeded, execution: Execution, make: Make) -> xr.Dataset:
    """Returns the result of `make`, which a stage of the checkpoints keeps, if any.

    Args:
      stage: its name in the run's directory.
      config: the settings, which the manifest of the result is to have as its "config".
      execution: the execution of the stage, passed to `make` with the stage's checkpoints.
      make: computes the result unless the stage has it.
    """
    if not execution.checkpoints:
        return make(config, execution)
    with refusing():
        saved = execution.checkpoints.stage(stage)
    with saved:
        path = saved.directory / RESULT
        damage = read_about(path.with_name(_ABOUT)).damage if path.exists() else ""
        if damage:
            words = f"the saved result in {path.parent} is passed over: {damage}; made again"
            warnings.warn(words, stacklevel=2)
        elif path.exists():
            result = open_result(path)
            with refusing():
                _check(result, config, path)
            return result
        result = make(config, execution._replace(checkpoints=saved))
        if jax.process_index() == 0:
            save_dataset(result, path)
            save_about(path.with_name(_ABOUT), result.attrs["manifest"], [RESULT])
        saved.discard()
    return result


def _check(result: xr.Dataset, config: Seeded, path: Path) -> None:
    """Raises `ValueError` unless a saved batch has these settings, except for its seeds."""
    saved = result.attrs["manifest"]
    now = plain(manifest(config.model_dump(mode="json"), seed=config.seed, data=""))
    now["config"] |= {"num_seeds": saved["config"]["num_seeds"]}
    if others := [name for name in _SAME if saved[name] != now[name]]:
        raise ValueError(
            f"{path} is of another run, with other {' and '.join(others)}; run it as it was, or "
            f"delete {path.parents[1]} to start again"
        )


def _begin_with(result: Path, checkpoints: Checkpoints) -> None:
    """Takes a complete result for the first batch of an unfinished run, which adds seeds to it."""
    with checkpoints.stage("seeds-0") as saved:
        if jax.process_index() == 0:
            path = saved.directory / RESULT
            write_aside(path, partial(shutil.copyfile, result))
            about = open_result(path).attrs["manifest"]
            save_about(path.with_name(_ABOUT), about, [RESULT])
