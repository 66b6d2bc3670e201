"""Which clients of a group are computed together, and in which order."""

import math
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from fedjax_mm.base import Algorithm, AnalyticTask, Params, ServerState, Task

ClientMap: TypeAlias = Literal["auto", "vmap", "scan"] | int
"""How local trainings are computed: those of all models at once, one by one, or, model by model, in
chunks of that many; "auto" chooses by the device and the size of a model."""

_CHUNK_BYTES = 32 * 2**10  # parameters of clients that one CPU device trains at once


def chunk_size_of(client_map: ClientMap, task: Task, params: Params, group_size: int) -> int | None:
    """Clients computed at once, model by model; None means all clients of all models.

    Args:
      client_map: as in `simulate`.
      task: of the models.
      params: of the models, with a leading axis; only shapes count.
      group_size: clients in the groups of all of them.
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


def is_lockstep(algorithm: Algorithm, task: Task, server_state: ServerState) -> bool:
    """Whether all clients take the same number of local steps, known before anything runs."""
    return isinstance(algorithm.num_steps(task, jnp.int32(0), server_state), int)


def longest_first(
    algorithm: Algorithm, task: Task, server_state: ServerState, clients: Int[Array, " group"]
) -> Int[Array, " group"] | None:
    """The places of a group in the order of their local steps; None if all take as many."""
    if is_lockstep(algorithm, task, server_state):
        return None
    steps = jax.vmap(algorithm.num_steps, (None, 0, None))(task, clients, server_state)
    return jnp.argsort(-jnp.where(clients >= 0, steps, 0))


def in_chunks(
    rows: Any, order: Int[Array, " group"] | None, chunk_size: int | None, client_axis: str | None
) -> Iterator[Any]:
    """The rows of a group, or this device's share of them, as chunks ``[chunks, size, ...]``.

    With an order, those with the most local steps come first, few at a time, so that at most twice
    the steps that count are computed (by one replica: where replicas are vmapped, all take the
    steps of the longest). Devices are dealt rows in turn, so that all get as many long trainings.
    What fills up the last chunk is -1.
    """
    if order is not None:
        rows = jax.tree.map(itemgetter(order), rows)
    if client_axis is not None:
        dealt = _cut(rows, lax.axis_size(client_axis))
        rows = jax.tree.map(lambda x: x[:, lax.axis_index(client_axis)], dealt)
    first, size = 0, len(jax.tree.leaves(rows)[0])
    for width, count in chunks_of(size, chunk_size or size, growing=order is not None):
        last = first + width * count
        yield _cut(jax.tree.map(itemgetter(slice(first, last)), rows), width)
        first = last


def _cut(rows: Any, width: int) -> Any:
    """Rows as ``[chunks, width, ...]``, filled up with -1."""

    def cut(x: Array) -> Array:
        return jnp.pad(x, (0, -len(x) % width), constant_values=-1).reshape(-1, width)

    return jax.tree.map(cut, rows)


def put_rows(tree: Any, rows: Int[Array, " chunk"], new: Any) -> Any:
    """The arrays with new rows; those out of range are dropped."""
    return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), tree, new)


def chunks_of(group_size: int, chunk_size: int, *, growing: bool) -> list[tuple[int, int]]:
    """Sizes of chunks, and how many there are of each; `growing` begins with small ones.

    A chunk takes as long as its first client. Beginning at place r it costs, with w clients, at
    most the steps of the w clients up to place r. Where each size has at least as many clients as
    the next size is large, every client is so charged at most twice: at most twice the steps that
    count are computed, whatever their distribution.

    Example:
      >>> chunks_of(100, 25, growing=True)
      [(1, 4), (4, 7), (25, 3)]
    """
    chunk_size = -(-group_size // -(-group_size // chunk_size))  # as many chunks, equally large
    size, sizes, done = 1 if growing else chunk_size, [], 0
    while done < group_size:
        larger = min(4 * size, chunk_size) if 8 * size < chunk_size else chunk_size
        enough = group_size - done if size == chunk_size else min(larger, group_size - done)
        sizes.append((size, -(-enough // size)))
        done, size = done + sizes[-1][0] * sizes[-1][1], larger
    return sizes


def unless_empty(function: Any, present: Any, *args: Any, skip: bool) -> Any:
    """``function(*args)``, or zeros where a chunk is all padding, as an idle model's chunks are."""
    if not skip:
        return function(*args)
    shapes = jax.eval_shape(function, *args)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.cond(jnp.any(present), lambda: function(*args), lambda: nothing)


def vmap_unless_one(size: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.vmap` over a leading axis; of length 1 it is taken off, so that branches stay branches.

    So do convolutions, which a batch of kernels, be it of one, would make loops of.
    """

    def call(*args: Any) -> Any:
        alone = function(*jax.tree.map(itemgetter(0), args))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], alone)

    return call if size == 1 else jax.vmap(function)
