"""Attackers that report losses that are too large."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedjax_mm.base import Client, MeasuredTask, Params, Scalar, Task
from fedjax_mm.checks import check_flags, check_positive, needs
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

    def client_loss(self, params: Params, client: Client) -> Float[Array, ""]:
        """The loss that the client reports."""
        loss = needs(self.task, MeasuredTask).client_loss(params, client)
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
