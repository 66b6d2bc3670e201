"""Attackers: a task in which they report losses that are too large, and noise in what they send."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedjax_mm import base, keys
from fedjax_mm.base import Algorithm, Contribution, Index, LocalProblem, Params, Scalar, Task
from fedjax_mm.checks import check_flags, check_not_negative, check_positive, needs
from fedjax_mm.sums import add_chunk, finish_sum, zero_sum
from fedjax_mm.tasks.view import View, appeals, client_losses


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
    return Attacked(task, task.num_clients, attacks, jnp.asarray(loss_factor, float), stays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Attacked(View):
    """A task with attackers; build it with `attacked`.

    Attributes:
      attacks: ``bool[clients]``.
      loss_factor: what attackers' losses are multiplied by.
      stays: whether every model appeals to them.
    """

    attacks: Array
    loss_factor: Array
    stays: bool = dataclasses.field(metadata={"static": True})

    def client_loss(self, params: Params, client: Index) -> Float[Array, ""]:
        """The loss that the client reports."""
        loss = needs(self.task, base.MeasuredTask).client_loss(params, client)
        return loss * jnp.where(self.attacks[client], self.loss_factor, 1).astype(loss.dtype)

    def client_losses(self, params: Params, num_clients: int) -> Float[Array, " clients"]:
        """The losses that the first clients report."""
        losses = client_losses(self.task, params, num_clients)
        factors = jnp.where(self.attacks[:num_clients], self.loss_factor, 1)
        return losses * factors.astype(losses.dtype)

    def appeals(self, params: Params) -> Bool[Array, " clients"]:
        """Whether the model appeals to each client; attackers who stay say so of every model."""
        honest = appeals(self.task, params)
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
        is_attacker = attacks[local.client]
        update = jax.tree.map(lambda x, y: jnp.where(is_attacker, x, y), other, sent.update)
        return sent._replace(update=update), state

    return algorithm._replace(client=client)


def dense_update(contribution: Contribution, params: Params) -> Contribution:
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
