"""Parts of a model's parameters, chosen by path."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jaxtyping import Array

Where: TypeAlias = str | Sequence[str] | Callable[[str], bool]
"""Names of modules or arrays, or a function of paths such as ``classes/kernel``."""


def _paths(params: Any) -> tuple[list[str], list[Array], Any]:
    pairs, structure = jax.tree_util.tree_flatten_with_path(params)
    known = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs]
    return known, [leaf for _, leaf in pairs], structure


def marked(where: Where, params: Any) -> Any:
    """Whether each array is one of those in `where`.

    Raises:
      ValueError: if the parameters do not have a name.
    """
    known, _, structure = _paths(params)
    if callable(where):
        return structure.unflatten([bool(where(path)) for path in known])
    names = (where,) if isinstance(where, str) else tuple(where)
    for name in names:
        if not any(name in path.split("/") for path in known):
            listed = ", ".join(known) if any(known) else "one array without a name"
            raise ValueError(
                f"where has {name!r}, and the parameters are {listed}; give a part of their "
                "paths, or a function of a path"
            )
    return structure.unflatten([any(name in path.split("/") for name in names) for path in known])


def chosen(where: Where | None, params: Any) -> Any:
    """The arrays in `where`, as a dict by path, or all parameters if it is None."""
    if where is None:
        return params
    known, leaves, _ = _paths(params)
    marks = jax.tree.leaves(marked(where, params))
    return {path: x for path, x, is_in in zip(known, leaves, marks, strict=True) if is_in}


def replaced(where: Where | None, params: Any, new: Mapping[str, Array]) -> Any:
    """Parameters with other arrays in `where`, given as by `chosen`."""
    if where is None:
        return new
    known, leaves, structure = _paths(params)
    return structure.unflatten([new.get(*each) for each in zip(known, leaves, strict=True)])
