"""Attackers: a task in which they report losses that are too large, and noise in what they send."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedjax_mm import base, keys
from fedjax_mm.base import Algorithm, Contribution, Index, LocalProblem, Params, Scalar, Task
from fedjax_mm.checks import check_flags, check_not_negative, check_positive
from fedjax_mm.sums import add_chunk, finish_sum, zero_sum
from fedjax_mm.tasks.view import View


def attacked(
    task: Task, clients: Any, *, loss_factor: Scalar = 10.0, stays: bool = True
) -> "Attacked":
    """The task with attackers, whose loss is ``10 F_k`` wherever an algorithm looks at losses.

    They take part whenever they are asked: every model appeals to them. Their thresholds and the
    task's metrics are what they are: ``attacked(requiring(task, own), clients)``. `noisy` makes
    attackers of the same clients in an algorithm, who send noise.

    Args:
      task: any.
      clients: ``bool[clients]``, which of those that train attack; it may be traced.
      loss_factor: what their losses are multiplied by.
      stays: False lets them stay away, with `appealing`, where others would.

    Raises:
      ValueError: if `loss_factor` is not positive or `clients` are not ``bool[clients]``.

    Example:
      >>> import jax
      >>> from fedjax_mm import attacked, quadratic
      >>> honest, attackers = quadratic(24, 4, mu=2e-4), jax.numpy.arange(24) < 2
      >>> task, params = attacked(honest, attackers), jax.numpy.ones(97)
      >>> first = jax.numpy.int32(0)
      >>> bool(task.client_loss(params, first) == 10 * honest.client_loss(params, first))
      True

    Reference: Cho et al., section 4, Table 2.
    """
    check_positive("loss_factor", loss_factor)
    attacks = check_flags("clients", clients, task.num_clients)
    factors = jnp.where(attacks, jnp.asarray(loss_factor, float), 1)
    return Attacked(task, task.num_clients, attacks, factors, stays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Attacked(View):
    """A task with attackers; build it with `attacked`.

    Attributes:
      attacks: ``bool[clients]``.
      factors: ``float[clients]``, what their losses are multiplied by.
      stays: whether every model appeals to attackers.
    """

    attacks: Array
    factors: Array
    stays: bool = dataclasses.field(metadata={"static": True})

    def client_loss(self, params: Params, client: Index) -> Float[Array, ""]:
        """The loss that the client reports."""
        loss = super().client_loss(params, client)
        return loss * self.factors[client].astype(loss.dtype)

    def client_losses(self, params: Params, num_clients: int) -> Float[Array, " clients"]:
        """The losses that the first clients report."""
        losses = super().client_losses(params, num_clients)
        return losses * self.factors[:num_clients].astype(losses.dtype)

    def appeals(self, params: Params) -> Bool[Array, " clients"]:
        """Whether the model appeals to each client; attackers who stay say so of every model."""
        honest = super().appeals(params)
        return honest | self.attacks if self.stays else honest


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
        sent = dense_update(contribution, local.params)
        other = _with_noise(keys.noise_key(local.rng_key), sent.update, noise)
        update = jax.tree.map(partial(jnp.where, attacks[local.client]), other, sent.update)
        return sent._replace(update=update), state

    return algorithm._replace(client=client)


def dense_update(contribution: Contribution, params: Params) -> Contribution:
    """The contribution with every sparse part of its update written out as a dense array."""
    alone = jax.tree.map(lambda x: x[None], contribution)
    total = add_chunk(zero_sum(contribution, params), alone, jnp.ones(1, bool))
    return contribution._replace(update=finish_sum(total, params).update)


def _with_noise(rng_key: PRNGKeyArray, update: Any, noise: Scalar) -> Any:
    """The update and independent noise as large as the update is, in the mean square."""
    mean_square = optax.tree.norm(update, squared=True) / optax.tree.size(update)
    leaves, structure = jax.tree.flatten(update)

    def add_noise(i: int, leaf: Array) -> Array:
        draw = jax.random.normal(jax.random.fold_in(rng_key, i), leaf.shape, jnp.float32)
        return leaf + (noise * jnp.sqrt(mean_square) * draw).astype(leaf.dtype)

    return jax.tree.unflatten(structure, [add_noise(*each) for each in enumerate(leaves)])
