"""Runs of items that train: data in the manifest, and several sweeps saved and described as one."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import jax
import xarray as xr

from fedjax_mm.experiments.fields import Config, Seeded
from fedjax_mm.results.dataset import save_dataset
from fedjax_mm.results.finished import RESULT, open_result
from fedjax_mm.results.manifest import manifest, read_about, save_about
from fedjax_mm.sweeps.errors import refusing
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Grid, Setup
from fedjax_mm.sweeps.sweep import sweep
from fedjax_mm.tools.files import plain

ABOUT = "manifest.json"
"""The file of a stage with the manifest and the digest of its result."""

_SAME = ("config", "versions", "device", "git_revision")  # equal in the manifests of all batches

Make = Callable[[Any, Execution], xr.Dataset]
"""Computes the result of some settings, like `Item.run`."""

Key = TypeVar("Key")


class Data(Protocol):
    """Data with a name and a kind, such as `FederatedData`."""

    @property
    def name(self) -> str:
        """The name of the data set."""

    @property
    def kind(self) -> str:
        """One of "surrogate", "real" and "synthetic"."""


def train(
    data: Sequence[Data],
    build: Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]],
    config: Config,
    execution: Execution | None = None,
    *,
    on_divergence: Literal["mark", "stop"] = "mark",
    **settings: Any,
) -> xr.Dataset:
    """Sweeps simulations over some axes and the seeds of an item.

    Args:
      data: all data that the simulations use, which the manifest names; none if it has no name.
      build: as in `Grid`.
      axes: as in `Grid`.
      config: the item's settings, with the seeds, and often the numbers of rounds.
      execution: the execution of the sweep.
      on_divergence: as in `sweep`.
      **settings: further settings of `Grid`, such as `num_rounds`.
    """
    given = config.model_dump(include={"num_seeds", "seed", "num_rounds", "record_every"})
    given["data"] = _weakest(each.kind for each in data) if data else "synthetic"
    given["first_seed"] = config.first_seed if isinstance(config, Seeded) else 0
    grid = Grid(build, axes, **given | settings)
    result = sweep(grid, execution, on_divergence=on_divergence)
    if data:
        result.attrs["manifest"] |= {"datasets": list(dict.fromkeys(each.name for each in data))}
    return result


def _weakest(kinds: Iterator[str]) -> str:
    return min(kinds, key=("surrogate", "real", "synthetic").index)


def described(result: xr.Dataset, parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """A result with the first of its parts' manifests, the data of all, and their time."""
    each = [part.attrs["manifest"] for part in parts]
    about = {
        "data": _weakest(one["data"] for one in each),
        "datasets": list(dict.fromkeys(name for one in each for name in one.get("datasets", ()))),
        "wall_seconds": {
            key: sum(one["wall_seconds"][key] for one in each) for key in each[0]["wall_seconds"]
        },
    }
    return result.assign_attrs(manifest=each[0] | about)


def staged(name: str, config: Seeded, execution: Execution, make: Make) -> xr.Dataset:
    """The result of `make`, or the result saved in a stage of the checkpoints.

    Args:
      name: the stage's name in the run directory.
      config: the settings, which become the "config" of the result's manifest.
      execution: the execution of the stage, passed to `make` with the stage's checkpoints.
      make: computes the result if the stage does not have it.
    """
    if not execution.checkpoints:
        return with_config(make(config, execution), config)
    with refusing():
        saved = execution.checkpoints.stage(name)
    with saved:
        path = saved.directory / RESULT
        damage = read_about(path.with_name(ABOUT)).damage if path.exists() else ""
        if damage:
            words = f"the saved result in {path.parent} is skipped: {damage}; computing it again"
            warnings.warn(words, stacklevel=2)
        elif path.exists():
            result = open_result(path)
            with refusing():
                _check(result, config, path)
            return result
        result = with_config(make(config, execution._replace(checkpoints=saved)), config)
        if jax.process_index() == 0:
            save_dataset(result, path)
            save_about(path.with_name(ABOUT), result.attrs["manifest"], [RESULT])
        saved.discard()
    return result


def stages(
    name: str, configs: Mapping[Key, Seeded], execution: Execution, make: Make
) -> dict[Key, xr.Dataset]:
    """The results of several settings by key, each as a stage."""
    return {
        key: staged(f"{name}-{i}", config, execution, make)
        for i, (key, config) in enumerate(configs.items())
    }


def with_config(result: xr.Dataset, config: Config) -> xr.Dataset:
    """A result whose manifest has the settings."""
    about = result.attrs["manifest"] | {"config": config.model_dump(mode="json")}
    return result.assign_attrs(manifest=about)


def _check(result: xr.Dataset, config: Seeded, path: Path) -> None:
    """Raises `ValueError` if a saved batch has other settings, apart from its seeds."""
    saved = result.attrs["manifest"]
    now = plain(manifest(config.model_dump(mode="json"), seed=config.seed, data=""))
    now["config"] |= {"num_seeds": saved["config"]["num_seeds"]}
    if others := [name for name in _SAME if saved[name] != now[name]]:
        raise ValueError(
            f"{path} is from another run, with a different {' and '.join(others)}; run it as it "
            f"was, or delete {path.parents[1]} to start again"
        )
