"""Files of final parameters, labelled like the result they belong to."""

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from fedjax_mm.base import Params
from fedjax_mm.tools.files import plain, write_aside

_LABELS = "labels"


class SavedParams(NamedTuple):
    """Parameters read from a file.

    Attributes:
      labels: the coordinates of the leading axes of all arrays, by axis name.
      arrays: arrays keyed by ``MODEL/PATH``, the model's index and the path in its pytree.
    """

    labels: dict[str, list[Any]]
    arrays: dict[str, np.ndarray]

    @property
    def num_models(self) -> int:
        """The number of models, M."""
        return len({name.partition("/")[0] for name in self.arrays})


def save_params(params: Sequence[Params], dataset: xr.Dataset, path: Path | str) -> None:
    """Writes the final parameters of a result to a NumPy file atomically.

    The file holds ``labels``, as JSON text, and an array per leaf, such as ``0/Dense_0/kernel`` for
    the first model. `numpy.load` can read it, because nothing is pickled.

    Args:
      params: parameters from `run` or `sweep`, a list with one pytree per model.
      dataset: the result to which the parameters belong.
      path: a path that ends in ``.npz``; its directory must exist.

    Raises:
      OSError: if the file cannot be written.

    Example:
      >>> import tempfile
      >>> result = xr.Dataset(coords={"seed": [0, 1], "round": [0, 5], "model": [1]})
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save_params([{"w": np.ones((2, 3))}], result, Path(directory, "params.npz"))
      ...     saved = load_params(Path(directory, "params.npz"))
      >>> saved.labels, saved.arrays["0/w"].shape
      ({'seed': [0, 1]}, (2, 3))
    """
    dims = [str(dim) for dim in dataset.coords if dim not in ("round", "model", "client")]
    labels = json.dumps(plain({dim: dataset[dim].values for dim in dims}))
    # Store bfloat16 as float32, which is lossless, because NumPy's format has no bfloat16.
    content: dict[str, Any] = {_LABELS: np.array(labels)} | {
        name: x.astype(np.float32) if x.dtype.kind == "V" else x
        for name, x in leaves_of(params).items()
    }

    def write(aside: Path) -> None:
        with aside.open("wb") as file:
            np.savez(file, **content)

    write_aside(Path(path), write)


def load_params(path: Path | str) -> SavedParams:
    """Reads a file written by `save_params`.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if the file does not hold parameters.
    """
    content = BytesIO(Path(path).read_bytes())  # errors on this line come from the disk
    try:
        with np.load(content) as file:
            labels, *arrays = dict(file).items()
        named = json.loads(labels[1].item())
        if not all(isinstance(values, list) for values in named.values()):
            raise ValueError("its labels are not lists")
        return SavedParams(named, dict(arrays))
    except Exception as error:  # damaged content can raise any exception
        reason = " ".join(str(error).split())[:80] or type(error).__name__
        raise ValueError(
            f"{path} holds no parameters: {reason}; `fedjax-mm run --save-params` writes such files"
        ) from error


def leaves_of(params: Sequence[Params]) -> dict[str, np.ndarray]:
    """The arrays of all models by ``MODEL/PATH``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(list(params))
    return {_name(path): np.asarray(x) for path, x in leaves}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def params_like(arrays: Mapping[str, Any], model: int, like: Params) -> Params:
    """Restores one model's parameters with the structure of a task's parameters.

    Args:
      arrays: arrays by ``MODEL/PATH``.
      model: the index of the model.
      like: parameters with that structure, or their shapes.

    Raises:
      ValueError: if an array is missing, has another shape, or is left over.
    """

    def take(path: Any, wanted: Any) -> Any:
        name = _name((jax.tree_util.SequenceKey(model), *path))
        if name not in arrays or jnp.shape(arrays[name]) != wanted.shape:
            given = jnp.shape(arrays[name]) if name in arrays else "missing"
            raise ValueError(f"parameters {name} are {given}; the task has {wanted.shape}")
        return arrays[name]

    taken = jax.tree_util.tree_map_with_path(take, like)
    mine = [name for name in arrays if name.partition("/")[0] == str(model)]
    if len(mine) != len(jax.tree.leaves(like)):
        raise ValueError(f"the task has no such parameters as some of {', '.join(mine)}")
    return taken
