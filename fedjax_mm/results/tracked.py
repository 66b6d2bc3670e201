"""Splits a result into runs for experiment trackers, one per point and seed."""

import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from fedjax_mm.results.finished import RESULT, open_result
from fedjax_mm.results.manifest import digest_of
from fedjax_mm.tools.files import leads_out, plain, read_image

_ONCE = ("diverged", "ended")  # numbers that describe a whole run

_FIGURE = "figure.png"

_CURVE = {"round", "model"}
"""The dimensions of a curve. Other metrics are arrays, which trackers cannot draw."""


class Run(NamedTuple):
    """One seed at one point of a result.

    Attributes:
      point: the coordinates of the point, such as ``algorithm=MFA-RR,learning_rate=0.1``.
      seed: the number of the seed.
      params: settings and coordinates by name.
      curves: rounds and values by metric and model, such as ``loss/model_1``.
    """

    point: str
    seed: int
    params: dict[str, bool | int | float | str]
    curves: dict[str, tuple[np.ndarray, np.ndarray]]

    @property
    def name(self) -> str:
        """The name of the run, which consists of the coordinates of the point and the seed."""
        return ",".join(filter(None, (self.point, f"seed={self.seed}")))

    @property
    def by_round(self) -> dict[int, dict[str, float]]:
        """The values of the curves by round and name, in the order of rounds."""
        found: dict[int, dict[str, float]] = {}
        for name, curve in self.curves.items():
            for step, value in zip(*curve, strict=True):
                found.setdefault(int(step), {})[name] = float(value)
        return dict(sorted(found.items()))


class Tracked(NamedTuple):
    """A result on disk.

    Attributes:
      dataset: the result, with a dimension ``seed``.
      axes: the dimensions of its points.
      folder: the directory of the result.
      name: the name of the directory, or of the file if it is not ``result.nc``.
      digest: the digest of the file, which identifies the result.
      seconds: the modification time of the file, in seconds since 1970.
    """

    dataset: xr.Dataset
    axes: tuple[str, ...]
    folder: Path
    name: str
    digest: str
    seconds: float

    @classmethod
    def read(cls, path: Path) -> "Tracked":
        """Reads a result from its directory or file.

        Raises:
          OSError: if it does not exist.
          ValueError: if it is not a result, is a link to another directory, has no curves, or has a
            figure that is no image or has too many pixels.
        """
        dataset = open_result(path)
        if path.is_dir() and leads_out(path / RESULT):
            target = (path / RESULT).resolve()
            raise ValueError(f"{path / RESULT} is a link; if it is yours, export {target}")
        file = (path / RESULT if path.is_dir() else path).resolve()
        leading = [
            str(dim)
            for values in dataset.data_vars.values()
            if "round" in values.dims
            for dim in values.dims[: values.dims.index("round")]
        ]
        axes = tuple(dim for dim in dict.fromkeys(leading) if dim not in ("seed", "model"))
        name = file.parent.name if file.name == RESULT else file.stem
        made = cls(dataset, axes, file.parent, name, digest_of(file), file.stat().st_mtime)
        if not made.metrics:
            raise ValueError(f"{file} has no curves by round; give a result of run or sweep")
        if made.figure:
            read_image(made.figure)  # refuses files that are no images
        if "seed" not in dataset.dims:
            made = made._replace(
                dataset=dataset.drop_vars("seed", errors="ignore").expand_dims(seed=[0])
            )
        return made

    @property
    def metrics(self) -> list[str]:
        """The names of variables with a curve per run, or per run and model."""
        dims = {*_CURVE, "seed", *self.axes}
        return [
            str(name)
            for name, values in self.dataset.data_vars.items()
            if "round" in values.dims and {*values.dims} <= dims and values.dtype.kind in "biuf"
        ]

    @property
    def left_out(self) -> list[str]:
        """The names of array metrics, and of a figure that is a link to another directory."""
        by_round = [str(name) for name, x in self.dataset.data_vars.items() if "round" in x.dims]
        figure = self.folder / _FIGURE
        linked = [_FIGURE] * (figure.is_file() and leads_out(figure))
        return [name for name in by_round if name not in self.metrics] + linked

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The provenance of the result, empty if unknown."""
        found: Mapping[str, Any] = self.dataset.attrs.get("manifest", {})
        return found

    @property
    def figure(self) -> Path | None:
        """The figure of the result, if any."""
        path = self.folder / _FIGURE
        return path if path.is_file() and not leads_out(path) else None

    @property
    def num_runs(self) -> int:
        """The number of points and seeds."""
        return int(np.prod([self.dataset.sizes[dim] for dim in (*self.axes, "seed")]))

    def runs(self) -> Iterator[Run]:
        """Yields the runs, point by point."""
        dims, about = (*self.axes, "seed"), self.manifest
        sizes = (range(self.dataset.sizes[dim]) for dim in dims)
        words = {dim: _in_short(self.dataset[dim].values.tolist()) for dim in self.axes}
        for place in product(*sizes):
            here = self.dataset.isel(dict(zip(dims, place, strict=True)))
            at = {
                dim: self.dataset[dim].values[i].item() for dim, i in zip(dims, place, strict=True)
            }
            point = ",".join(
                f"{dim}={words[dim][i]}" for dim, i in zip(self.axes, place, strict=False)
            )
            params = settings_at(about.get("config", {}), at) | at
            if "seed" in about:
                params["root_seed"] = about["seed"]
            yield Run(point, at["seed"], params, self._curves(here))

    def _curves(self, here: xr.Dataset) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Curves of one run, up to the round that met its target, if any."""
        rounds = here["round"].values
        end = here.ended.item() if "ended" in here else -1
        is_kept = rounds <= end if end >= 0 else np.ones(len(rounds), bool)
        curves = dict[str, tuple[np.ndarray, np.ndarray]]()
        last = here.isel(round=slice(is_kept.sum() - 1, is_kept.sum()))
        once = {name: last[name].expand_dims(round=last["round"]) for name in _ONCE if name in last}
        curves_by = {name: here[name][is_kept] for name in self.metrics} | once
        for name, values in curves_by.items():
            steps = values["round"].values
            if "model" not in values.dims:
                curves[name] = steps, values.values
                continue
            each = zip(values["model"].values, values.values.T, strict=True)
            curves |= {f"{name}/model_{model}": (steps, x) for model, x in each}
        return curves


def _in_short(values: list[Any]) -> list[str]:
    """Coordinates as text, with 6 digits of each float if these distinguish them."""
    words = [f"{x:g}" if isinstance(x, float) else str(x) for x in values]
    return words if len({*words}) == len(values) else [*map(str, values)]


def settings_at(config: Mapping[str, Any], at: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of one point by dotted name, with its algorithm's under ``algorithm.``.

    Args:
      config: the settings in a manifest. Its table ``axes`` lists the settings that vary.
      at: the coordinates of the point.

    Example:
      >>> config = {
      ...     "num_rounds": 20, "seed": 0, "axes": {"learning_rate": [0.1, 0.2]},
      ...     "algorithms": {"A": {"learning_rate": 1.0, "mu": None}, "B": {"learning_rate": 2.0}},
      ... }
      >>> settings_at(config, {"algorithm": "A", "learning_rate": 0.2})
      {'num_rounds': 20, 'algorithm.learning_rate': 0.2}
    """
    algorithm = at.get("algorithm")
    methods = config.get("algorithms")
    own = methods.get(algorithm) if isinstance(methods, Mapping) else None
    # Omit the root seed, because a run's own seed has this name.
    rest = {k: x for k, x in config.items() if k not in ("axes", "seed", "algorithms")}
    settings = dict(_flat(rest | ({} if own is None else {"algorithm": own})))
    axes = config.get("axes")
    for key in axes if isinstance(axes, Mapping) else ():
        name = _name_at(key, algorithm, config, own or {})
        if name.startswith("algorithms."):  # belongs to another algorithm
            continue
        for inner in [each for each in settings if f"{each}.".startswith(f"{name}.")]:
            del settings[inner]
        if (value := at.get(key.rpartition(".")[2])) is not None and name != key.rpartition(".")[2]:
            settings[name] = value
    return settings


def _name_at(key: str, algorithm: Any, config: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Dotted name of the setting varied by an axis."""
    prefix = f"algorithms.{algorithm}."
    if key.startswith(prefix):
        return f"algorithm.{key.removeprefix(prefix)}"
    head, _, _ = key.partition(".")
    if head == "assignment":  # an algorithm's own assignment takes precedence
        return f"algorithm.{key}" if own.get(head) is not None else key
    return key if head in config or not own else f"algorithm.{key}"


def _flat(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields given settings by dotted name, with lists as JSON."""
    for key, value in plain(settings).items():
        name = f"{path}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif value is not None:
            yield name, json.dumps(value) if isinstance(value, list) else value
