"""The key rule: a draw depends on the seed, the round, the model and the client, on nothing else.

Round 0 is before the first one. A round's key is folded with 0 for the assignment, 1 + m for model
m, and M + 2 for the metrics; a model's key with the client's number.
"""

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm.base import Index, Round

Models: TypeAlias = Sequence[int] | Int[Array, " models"]

_NOISE = 2**31 - 1  # a client's local steps fold their own small numbers


def round_key(rng_key: PRNGKeyArray, round: Round) -> PRNGKeyArray:
    """The key of a round from that of the seed."""
    return jax.random.fold_in(rng_key, round)


def assignment_key(round_key: PRNGKeyArray) -> PRNGKeyArray:
    """The key of the assignment's draws in a round."""
    return jax.random.fold_in(round_key, 0)


def model_keys(round_key: PRNGKeyArray, models: Models) -> PRNGKeyArray:
    """The keys of some models, numbered from 0, in a round."""
    return jax.vmap(jax.random.fold_in, (None, 0))(round_key, 1 + jnp.asarray(models))


def metrics_keys(round_key: PRNGKeyArray, models: Models, num_models: int) -> PRNGKeyArray:
    """The keys of what some of the M models' metrics draw after a round."""
    return model_keys(jax.random.fold_in(round_key, 2 + num_models), models)


def start_keys(rng_key: PRNGKeyArray, models: Models) -> PRNGKeyArray:
    """The keys of some models' initial parameters, from that of the seed."""
    return model_keys(round_key(rng_key, 0), models)


def preparation_key(start_key: PRNGKeyArray) -> PRNGKeyArray:
    """The key of what clients do for a model before round 1, such as training models of their own.

    It comes from that of the model's initial parameters.
    """
    return jax.random.fold_in(start_key, 1)


def client_key(model_key: PRNGKeyArray, client: Index) -> PRNGKeyArray:
    """The key of a client from that of the round and the model."""
    return jax.random.fold_in(model_key, client)


def noise_key(client_key: PRNGKeyArray) -> PRNGKeyArray:
    """The key of the noise that an attacker sends."""
    return jax.random.fold_in(client_key, _NOISE)
