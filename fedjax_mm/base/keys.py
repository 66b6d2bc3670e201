"""Random keys: every draw depends only on the seed, the round, the model and the client.

A seed's key folds the seed's number into a sweep's root key, and a round's key folds the round into
the seed's key. The assignment folds 0 into the round's key, model m folds in 1 + m, and the metrics
fold in `_METRICS`. A client folds its number into the model's key, and the server folds in
`_SERVER`. A local step that asks for a key folds `_STEPS` into the client's key, and then its
number. Round 0 precedes the first round. Asynchronous jobs have no round: their keys fold `_JOBS`
into the seed's key, then the job's number, and then 0 for the client, 1 for the delay and 2 for the
training.
"""

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm.base import Index, Round

ModelNumbers: TypeAlias = Sequence[int] | Int[Array, " models"]
"""The models' indices, from 0."""

_METRICS = 2**31 - 1  # far from model indices, so that draws do not depend on M
_JOBS = 2**31 - 1  # far from round numbers
_DELAYS = 2**31 - 2  # this and the next four are far from values that assignments fold in
_WRAPPER = 2**31 - 3
_LEAVING = 2**31 - 4
_PROCESSORS = 2**31 - 5
_GROUPS = 2**31 - 6
_SERVER = 2**31 - 1  # far from client numbers, which are folded into the same key
_NOISE = 2**31 - 1  # far from local step numbers, which are folded into the same key
_COMPRESSION = 2**31 - 2
_STEPS = 2**31 - 4
_RULE = 2**31 - 3  # far from what servers fold into the same key


def seed_keys(seed: int | Index, numbers: Sequence[int] | ArrayLike) -> PRNGKeyArray:
    """Returns the independent keys of a sweep's seeds, numbered from 0."""
    return jax.vmap(seed_key, (None, 0))(seed, jnp.asarray(numbers))


def seed_key(seed: int | Index, number: Index) -> PRNGKeyArray:
    """Returns the key of one of a sweep's seeds."""
    return jax.random.fold_in(jax.random.key(seed), number)


def round_key(rng_key: PRNGKeyArray, round: Round) -> PRNGKeyArray:
    """Returns the key of a round, given the seed's key."""
    return jax.random.fold_in(rng_key, round)


def assignment_key(round_key: PRNGKeyArray) -> PRNGKeyArray:
    """Returns the key of the assignment's draws in a round."""
    return jax.random.fold_in(round_key, 0)


def delays_key(assignment_key: PRNGKeyArray) -> PRNGKeyArray:
    """Returns the key for delays in a round, which replaces the round's key in `model_keys`."""
    return jax.random.fold_in(assignment_key, _DELAYS)


def wrapper_key(assignment_key: PRNGKeyArray, depth: int) -> PRNGKeyArray:
    """Returns the key of a wrapper around `depth` others, such as for the clients' presence."""
    return jax.random.fold_in(jax.random.fold_in(assignment_key, _WRAPPER), depth)


def processors_key(assignment_key: PRNGKeyArray) -> PRNGKeyArray:
    """Returns the key with which clients with several processors draw additional models."""
    return jax.random.fold_in(assignment_key, _PROCESSORS)


def groups_key(assignment_key: PRNGKeyArray) -> PRNGKeyArray:
    """Returns the key that orders the groups of a partition that stays."""
    return jax.random.fold_in(assignment_key, _GROUPS)


def leaving_key(assignment_key: PRNGKeyArray, model: Index) -> PRNGKeyArray:
    """Returns the key with which a model's jobs go to others when it finishes."""
    return jax.random.fold_in(jax.random.fold_in(assignment_key, _LEAVING), model)


def model_keys(round_key: PRNGKeyArray, models: ModelNumbers) -> PRNGKeyArray:
    """Returns the keys of the given models in a round."""
    return jax.vmap(jax.random.fold_in, (None, 0))(round_key, 1 + jnp.asarray(models))


def metrics_keys(round_key: PRNGKeyArray, models: ModelNumbers) -> PRNGKeyArray:
    """Returns the keys for the given models' metrics after a round."""
    return model_keys(jax.random.fold_in(round_key, _METRICS), models)


def start_keys(rng_key: PRNGKeyArray, models: ModelNumbers) -> PRNGKeyArray:
    """Returns the keys for the given models' initial parameters, given the seed's key."""
    return model_keys(round_key(rng_key, 0), models)


def preparation_key(start_key: PRNGKeyArray) -> PRNGKeyArray:
    """Returns the key for work before round 1, such as training clients' own models.

    Args:
      start_key: the key of the model's initial parameters.
    """
    return jax.random.fold_in(start_key, 1)


def client_key(model_key: PRNGKeyArray, client: Index) -> PRNGKeyArray:
    """Returns the key of a client, given the key of the round and model."""
    return jax.random.fold_in(model_key, client)


def server_key(model_key: PRNGKeyArray) -> PRNGKeyArray:
    """Returns the key for the server's draws, given the key of the round and model."""
    return jax.random.fold_in(model_key, _SERVER)


def step_key(rng_key: PRNGKeyArray, model: Int[Array, ""], number: Int[Array, ""]) -> PRNGKeyArray:
    """Returns the key for a model's server step in an asynchronous run, given the seed's key."""
    return server_key(jax.random.fold_in(round_key(rng_key, number), 1 + model))


def slot_keys(
    round_key: PRNGKeyArray,
    clients: Int[Array, " slots"],
    models: Int[Array, " slots"],
    num_models: int,
) -> PRNGKeyArray:
    """Returns one key per slot of a cohort, depending only on the slot's client and model."""
    each = model_keys(round_key, jnp.arange(num_models, dtype=jnp.int32))
    return jax.vmap(client_key)(each[models], jnp.maximum(clients, 0))


def local_step_key(client_key: PRNGKeyArray, step: Index) -> PRNGKeyArray:
    """Returns the key of a client's local step, which neither batches nor dropped units use."""
    return jax.random.fold_in(jax.random.fold_in(client_key, _STEPS), step)


def noise_key(client_key: PRNGKeyArray) -> PRNGKeyArray:
    """Returns the key of an attacker's noise."""
    return jax.random.fold_in(client_key, _NOISE)


def compression_key(client_key: PRNGKeyArray) -> PRNGKeyArray:
    """Returns the key for compressing a client's update."""
    return jax.random.fold_in(client_key, _COMPRESSION)


def rule_key(server_key: PRNGKeyArray) -> PRNGKeyArray:
    """Returns the key for the draws of a rule of aggregation."""
    return jax.random.fold_in(server_key, _RULE)


def job_key(rng_key: PRNGKeyArray, number: Int[Array, ""]) -> PRNGKeyArray:
    """Returns the key of an asynchronous job, given the seed's key and the job's number."""
    return jax.random.fold_in(round_key(rng_key, _JOBS), number)


def draw_key(job_key: PRNGKeyArray) -> PRNGKeyArray:
    """Returns the key for drawing the client of a job."""
    return jax.random.fold_in(job_key, 0)


def delay_key(job_key: PRNGKeyArray) -> PRNGKeyArray:
    """Returns the key for drawing the delay of a job."""
    return jax.random.fold_in(job_key, 1)


def training_key(job_key: PRNGKeyArray) -> PRNGKeyArray:
    """Returns the key for a job's local training."""
    return jax.random.fold_in(job_key, 2)
