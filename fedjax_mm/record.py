"""What is recorded of a run: metrics of the models, counts of the work done, sizes of messages."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm import keys
from fedjax_mm.base import LocalProblem, Params, Round, Task
from fedjax_mm.chunks import ClientMap, chunk_size_of
from fedjax_mm.stacks import Models, Stack, by_model, over_models, split
from fedjax_mm.sums import finish_sum, zero_sum


class Counts(NamedTuple):
    """What was done since the last record, ``int32[models]`` each; see `Trace`."""

    client_updates: Any
    gradients: Any
    idle_rounds: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trace:
    """What was recorded; the first entry of every array is the state before the recorded rounds.

    Attributes:
      round: ``int32[records]``, rounds done.
      metrics: the task's metrics by name, each ``float[records, models]``.
      client_updates: ``int32[records, models]``, local trainings since the record before.
      gradients: ``int32[records, models]``, gradients computed since the record before; -1 in
        either of the two if there were more than 32 bits hold.
      idle_rounds: ``int32[records, models]``, rounds since the record before in which nobody
        trained the model.
      upload_size: numbers that one client sends up per local training of each model.
      download_size: numbers that one client receives per local training of each model.
    """

    round: Array
    metrics: dict[str, Array]
    client_updates: Array
    gradients: Array
    idle_rounds: Array
    upload_size: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    download_size: tuple[int, ...] = dataclasses.field(metadata={"static": True})


class Record(NamedTuple):
    """One entry of a trace, or a run's entries along a leading axis."""

    round: Int[Array, "*records"]
    metrics: dict[str, Array]
    counts: Counts


def make_trace(first: Record, rest: Record, up: tuple[int, ...], down: tuple[int, ...]) -> Trace:
    """The trace of an entry and those after it, with the sizes of messages."""
    whole = jax.tree.map(lambda start, later: jnp.concatenate([start[None], later]), first, rest)
    made = whole.counts._asdict()
    return Trace(whole.round, whole.metrics, **made, upload_size=up, download_size=down)


class Measured(NamedTuple):
    """Models as they are: metrics by name, and whether parameters and loss are finite."""

    metrics: dict[str, Float[Array, " models"]]
    is_finite: Bool[Array, " models"]


def measure(
    stacks: Sequence[Stack],
    rng_key: PRNGKeyArray,
    round: Round,
    models: Models,
    client_map: ClientMap,
) -> Measured:
    """The metrics of all models after a round; NaN where a model's task does not have one."""
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
    """The sum over rounds, or -1 if it may not fit: a wrong number would look like a right one."""
    fits = counts.sum(0, dtype=jnp.float32) < 2**31 - 2**10
    return jnp.where(fits, counts.sum(0), -1)


def message_sizes(
    stacks: Sequence[Stack], models: Models
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers that one client sends up and receives per local training, from shapes alone."""

    def message(stack: Stack, task: Task, model: Models) -> tuple[Any, Params]:
        local = LocalProblem(jax.random.key(0), 1, task, jnp.int32(0), model.params)
        client_state = jax.tree.map(itemgetter(0), model.clients)
        sent, _ = stack.algorithm.client(local, model.server, client_state)
        return finish_sum(zero_sum(sent, model.params), model.params).update, model.params

    def sizes(stack: Stack, models: Models) -> dict[int, tuple[int, ...]]:
        messages = jax.eval_shape(partial(over_models, partial(message, stack), stack), models)
        each = (sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(m)) for m in messages)
        return dict.fromkeys(stack.models, tuple(each))

    of_model = {m: each for part in split(stacks, models) for m, each in sizes(*part).items()}
    up, down = zip(*(of_model[model] for model in sorted(of_model)), strict=True)
    return up, down
