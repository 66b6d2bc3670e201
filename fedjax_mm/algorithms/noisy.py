"""Attackers that send noise with their updates."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from fedjax_mm import base, keys
from fedjax_mm.base import Algorithm, Contribution, LocalProblem, Params, Scalar
from fedjax_mm.checks import check_flags, check_not_negative
from fedjax_mm.sums import add_chunk, finish_sum, zero_sum


def noisy(algorithm: Algorithm, clients: Any, *, noise: Scalar = 1.0) -> Algorithm:
    """The algorithm with attackers who send noise with the update.

    Every number of an attacker's update gets an independent N(0, s^2) with s the `noise` times the
    root of the mean square of the whole update, of all that they send. `attacked` makes attackers
    of the same clients in a task, who report losses that are too large.

    Args:
      algorithm: any.
      clients: ``bool[clients]``, which of those that train attack; it may be traced.
      noise: s over the root mean square of the update; 0 sends the update as it is.

    Raises:
      ValueError: if `noise` is negative or `clients` are not ``bool[clients]``.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedavg, full_participation, noisy, quadratic, simulate
      >>> task, attackers = quadratic(24, 4, mu=2e-4), jax.numpy.arange(24) < 2
      >>> algorithm = noisy(fedavg(0.1, local_steps=5), attackers)
      >>> _, trace = simulate(jax.random.key(0), task, algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Cho et al., section 4, Table 2.
    """
    check_not_negative("noise", noise)
    attacks = check_flags("clients", clients)

    def client(
        local: LocalProblem, server_state: base.ServerState, client_state: base.ClientState
    ) -> tuple[Contribution, base.ClientState]:
        check_flags("clients", attacks, local.task.num_clients)
        contribution, state = algorithm.client(local, server_state, client_state)
        sent = _dense(contribution, local.params)
        other = _with_noise(keys.noise_key(local.rng_key), sent.update, noise)
        is_attacker = attacks[local.client]
        update = jax.tree.map(lambda x, y: jnp.where(is_attacker, x, y), other, sent.update)
        return sent._replace(update=update), state

    return algorithm._replace(client=client)


def _dense(contribution: Contribution, params: Params) -> Contribution:
    """The contribution with every sparse part of its update written out as a dense array."""
    alone = jax.tree.map(lambda x: x[None], contribution)
    total = add_chunk(zero_sum(contribution, params), alone, jnp.ones(1, bool))
    return contribution._replace(update=finish_sum(total, params).update)


def _with_noise(rng_key: PRNGKeyArray, update: Any, noise: Scalar) -> Any:
    """The update and independent noise as large as the update is, in the mean square."""
    leaves, structure = jax.tree.flatten(update)
    size = sum(leaf.size for leaf in leaves)
    deviation = noise * jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in leaves) / size)
    draws = [
        jax.random.normal(jax.random.fold_in(rng_key, i), leaf.shape, jnp.float32)
        for i, leaf in enumerate(leaves)
    ]
    noisy = [
        leaf + (deviation * draw).astype(leaf.dtype)
        for leaf, draw in zip(leaves, draws, strict=True)
    ]
    return jax.tree.unflatten(structure, noisy)
