"""Records of a run: metrics of the models, counts of the work done, sizes of messages."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm import keys
from fedjax_mm.base import Contribution, Groups, Params, Round, Task
from fedjax_mm.chunks import ClientMap, chunk_size_of
from fedjax_mm.stacks import Models, Stack, by_model, over_models, split


class Counts(NamedTuple):
    """Work done since the last record, ``int32[models]`` each; see `Trace`."""

    client_updates: Any
    gradients: Any
    idle_rounds: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trace:
    """Records of a run; the first entry of every array is the state before the recorded rounds.

    Attributes:
      round: ``int32[records]``, rounds done.
      metrics: the task's metrics by name, each ``float[records, models]``.
      client_updates: ``int32[records, models]``, local trainings since the record before.
      gradients: ``int32[records, models]``, gradients computed since the record before. In either
        count, -1 marks a number that does not fit 32 bits.
      idle_rounds: ``int32[records, models]``, rounds since the record before in which nobody
        trained the model.
      upload_size: how many numbers one client sends per local training of each model.
      download_size: how many numbers one client receives per local training of each model.
    """

    round: Array
    metrics: dict[str, Array]
    client_updates: Array
    gradients: Array
    idle_rounds: Array
    upload_size: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    download_size: tuple[int, ...] = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the messages that one client sends and receives, for each model."""

    # Static: sizes are known while a round is traced, and leave `lax.scan` with the structure.
    up: tuple[int, ...]
    down: tuple[int, ...]


class Record(NamedTuple):
    """One entry of a trace, or a run's entries along a leading axis."""

    round: Int[Array, "*records"]
    metrics: dict[str, Array]
    counts: Counts


def make_trace(first: Record, rest: Record, sizes: Sizes) -> Trace:
    """Returns the trace of a first entry and the later ones."""
    whole = jax.tree.map(lambda start, later: jnp.concatenate([start[None], later]), first, rest)
    made = whole.counts._asdict()
    return Trace(whole.round, whole.metrics, **made, upload_size=sizes.up, download_size=sizes.down)


class Measured(NamedTuple):
    """Metrics of the models by name, and whether their parameters and losses are finite."""

    metrics: dict[str, Float[Array, " models"]]
    is_finite: Bool[Array, " models"]


def measure(
    stacks: list[Stack], rng_key: PRNGKeyArray, round: Round, models: Models, client_map: ClientMap
) -> Measured:
    """Returns all models' metrics after a round; NaN where a model's task lacks a metric."""
    num_models = sum(len(stack.models) for stack in stacks)

    def of_model(task: Task, key: PRNGKeyArray, params: Params) -> Measured:
        metrics, leaves = task.metrics(key, params), jax.tree.leaves(params)
        leaves += [metrics["loss"]] if "loss" in metrics else []
        return Measured(metrics, jnp.all(jnp.array([jnp.isfinite(x).all() for x in leaves])))

    def of_stack(stack: Stack, models: Models) -> Measured:
        chunk_size = chunk_size_of(client_map, stack.task, models.params, len(stack.models))
        key = keys.metrics_keys(keys.round_key(rng_key, round), stack.models, num_models)
        return over_models(of_model, stack, key, models.params, one_by_one=chunk_size is not None)

    metrics, finite = zip(*(of_stack(*each) for each in split(stacks, models)), strict=True)
    absent = [jnp.full(len(stack.models), jnp.nan) for stack in stacks]
    by_name = {
        name: by_model(stacks, [m.get(name, nan) for m, nan in zip(metrics, absent, strict=True)])
        for name in dict.fromkeys(name for each in metrics for name in each)
    }
    return Measured(by_name, by_model(stacks, finite))


def add_counts(counts: Int[Array, "rounds models"]) -> Int[Array, " models"]:
    """Returns the sum over rounds, or -1 if it may not fit 32 bits."""
    # int32 wraps: a wrong number would look like a right one. The float32 sum is rounded: a margin.
    fits = counts.sum(0, dtype=jnp.float32) < 2**31 - 2**10
    return jnp.where(fits, counts.sum(0), -1)


def count(
    stacks: Sequence[Stack], groups: Groups, models: Models, totals: Sequence[Contribution]
) -> tuple[Counts, Sizes]:
    """Returns one round's work for each model, and the sizes of the messages."""
    participants = jnp.sum(groups.clients >= 0, axis=1, dtype=jnp.int32)
    gradients = by_model(stacks, [total.num_gradients for total in totals])
    counts = Counts(participants, gradients, (participants == 0).astype(jnp.int32))
    up = _message_sizes(stacks, [total.update for total in totals])
    down = _message_sizes(stacks, [each.params for _, each in split(stacks, models)])
    return counts, Sizes(up, down)


def _message_sizes(stacks: Sequence[Stack], messages: Sequence[Any]) -> tuple[int, ...]:
    """Returns the size of each model's message, from messages ``[models, ...]`` of each stack."""
    of_model = {
        model: sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(message))
        for stack, message in zip(stacks, messages, strict=True)
        for model in stack.models
    }
    return tuple(of_model[model] for model in sorted(of_model))
