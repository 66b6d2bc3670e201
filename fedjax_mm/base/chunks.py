"""Splits a group of clients into chunks that are computed together, and orders the clients."""

import math
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Int

from fedjax_mm.base import Params, Steps, Task
from fedjax_mm.base.capabilities import AnalyticTask

ClientMap: TypeAlias = Literal["auto", "vmap", "scan"] | int
"""How local trainings are computed: "vmap" computes all clients of all models at once, "scan" one
client at a time, and a number n computes n clients at a time, which belong to all models if these
share their structure and data, and otherwise to one model; "auto" chooses based on the device and
the size of a model."""

_CHUNK_BYTES = 32 * 2**10  # bytes of parameters that one CPU device trains at a time


def chunk_size_of(client_map: ClientMap, task: Task, params: Params, group_size: int) -> int | None:
    """Number of clients to compute at once over all models, or None for all.

    Args:
      client_map: as in `simulate`.
      task: the models' task.
      params: the models' parameters, with a leading axis; only their shapes matter.
      group_size: the number of clients in the groups of all these models.
    """
    if isinstance(client_map, int):
        return client_map
    if client_map != "auto":
        return 1 if client_map == "scan" else None
    if jax.default_backend() != "cpu" or isinstance(task, AnalyticTask):
        return None
    model_bytes = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in jax.tree.leaves(params))
    chunk_size = max(1, _CHUNK_BYTES // max(1, model_bytes))
    return chunk_size if chunk_size < group_size else None


def longest_first(
    num_steps: Callable[[Any], Steps], clients: Int[Array, " slots"], jobs: Any
) -> Int[Array, " slots"]:
    """Sorts the slots in decreasing order of local steps.

    Args:
      num_steps: returns the local steps of a job.
      clients: client indices; -1 is padding.
      jobs: the jobs, ``[slots, ...]``.
    """
    steps = jax.vmap(num_steps)(jobs)
    return jnp.argsort(-jnp.where(clients >= 0, steps, 0))


def reads(function: Callable[..., Any], argument: Any, *others: Any) -> bool:
    """Whether a function's result depends on its first argument, of which shapes are enough."""
    jaxpr = jax.make_jaxpr(function)(argument, *others).jaxpr
    used = {*map(id, jaxpr.outvars)}
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not used.isdisjoint(map(id, equation.outvars)):
            used.update(map(id, equation.invars))
    return not used.isdisjoint(map(id, jaxpr.invars[: len(jax.tree.leaves(argument))]))


def in_chunks(
    rows: Any, order: Int[Array, " group"] | None, chunk_size: int | None, client_axis: str | None
) -> Iterator[Any]:
    """Yields a group's rows, or this device's share of them, as chunks ``[chunks, size, ...]``.

    The last chunk is padded with -1. With an order, clients with the most local steps come first,
    and the first chunks are small; see `chunks_of`.
    """
    if order is not None:
        rows = jax.tree.map(itemgetter(order), rows)
    if client_axis is not None:
        # Rows go to devices in turn, which gives each device its share of long trainings.
        dealt = _cut(rows, lax.axis_size(client_axis))
        rows = jax.tree.map(lambda x: x[:, lax.axis_index(client_axis)], dealt)
    first, size = 0, len(jax.tree.leaves(rows)[0])
    for width, count in chunks_of(size, chunk_size or size, growing=order is not None):
        last = first + width * count
        yield _cut(jax.tree.map(itemgetter(slice(first, last)), rows), width)
        first = last


def _cut(rows: Any, width: int) -> Any:
    """Cuts rows into ``[chunks, width, ...]``, padded with -1."""

    def cut(x: Array) -> Array:
        fill = False if x.dtype == bool else -1
        return jnp.pad(x, (0, -len(x) % width), constant_values=fill).reshape(-1, width)

    return jax.tree.map(cut, rows)


def put_rows(
    tree: Any, rows: Int[Array, " chunk"] | tuple[Int[Array, " chunk"], ...], new: Any
) -> Any:
    """Writes rows into arrays along one or more axes, dropping rows that are out of range."""
    return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), tree, new)


def chunks_of(group_size: int, chunk_size: int, *, growing: bool) -> list[tuple[int, int]]:
    """Returns chunk sizes and the number of chunks of each size, smallest first if `growing`.

    Growing chunks compute at most twice the steps that clients need, if clients are sorted by
    decreasing steps and not vmapped over replicas.

    Example:
      >>> chunks_of(100, 25, growing=True)
      [(1, 4), (4, 7), (25, 3)]
    """
    # The bound holds because a chunk of w clients takes w times the steps of its first client, at
    # position r, which is at most the total steps of the w clients before r. If each size covers at
    # least as many clients as the next, no client is counted more than twice.
    chunk_size = -(-group_size // -(-group_size // chunk_size))  # equal sizes, no extra chunk
    size, sizes, done = 1 if growing else chunk_size, [], 0
    while done < group_size:
        larger = min(4 * size, chunk_size) if 8 * size < chunk_size else chunk_size
        enough = group_size - done if size == chunk_size else min(larger, group_size - done)
        sizes.append((size, -(-enough // size)))
        done, size = done + sizes[-1][0] * sizes[-1][1], larger
    return sizes


def repeat_first(present: Bool[Array, " chunk"], rows: Any) -> Any:
    """Replaces a chunk's padding with its first client."""

    # The first client takes the most steps, and vmap of a while_loop runs until the longest client
    # is done anyway.
    def repeat(x: Array) -> Array:
        return jnp.where(present, x, jnp.maximum(x[0], jnp.zeros_like(x[0])))

    return jax.tree.map(repeat, rows)


def compute_chunk(
    function: Callable[..., Any], present: Bool[Array, " chunk"], *args: Any, skip: bool
) -> Any:
    """Computes ``function(*args)`` for each client of a chunk, over a leading axis of `args`.

    With `skip`, a chunk that is all padding is not computed and gives zeros. Under `vmap`, a chunk
    is skipped only if it is empty in all replicas.
    """
    together = jax.jit(vmap_unless_one(len(present), function), inline=True)
    if not skip:
        return together(*args)
    shapes = jax.eval_shape(together, *args)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.cond(is_any(present), lambda: together(*args), lambda: nothing)


@custom_vmap
def is_any(present: Bool[Array, " chunk"]) -> Bool[Array, ""]:
    """Whether any client is present, in any replica if there is a replicas axis."""
    return jnp.any(present)


@is_any.def_vmap
def _is_any_of_replicas(
    axis_size: int, in_batched: list[bool], present: Bool[Array, "..."]
) -> tuple[Bool[Array, ""], bool]:
    # `jax.vmap` computes both branches of a `lax.cond` whose condition has a replicas axis. Reduce
    # over it here; `add_chunk` masks absent clients later.
    del axis_size, in_batched
    return is_any(jnp.any(present, axis=0)), False


def vmap_unless_one(size: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a function over a leading axis of static size."""

    # Remove an axis of length 1 rather than map over it, because `jax.vmap` computes both branches
    # of a `lax.cond`, and XLA turns convolutions with a batch of kernels into loops, even for a
    # batch of one.
    def call(*args: Any) -> Any:
        alone = function(*jax.tree.map(itemgetter(0), args))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], alone)

    return call if size == 1 else jax.vmap(function)
