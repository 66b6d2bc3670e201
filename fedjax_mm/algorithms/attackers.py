"""Attackers: clients that report inflated losses or add noise to their updates."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedjax_mm import base
from fedjax_mm.base import (
    Algorithm,
    ClientContext,
    Contribution,
    Index,
    Params,
    Scalar,
    ServerContext,
    Task,
    keys,
)
from fedjax_mm.base.chunks import reads
from fedjax_mm.base.sums import root, with_update
from fedjax_mm.checks.annotations import NonNegative, Positive, checked, part
from fedjax_mm.checks.instances import check_algorithm, check_task
from fedjax_mm.checks.values import check_flags
from fedjax_mm.tasks.view import View
from fedjax_mm.wrap import wrap_algorithm


@checked
def attacked(
    task: Task, clients: Any, *, loss_factor: Positive = 10.0, stays: bool = True
) -> "Attacked":
    """Wraps a task so that attackers report inflated losses to algorithms and assignments.

    An attacker reports ``loss_factor F_k``. Every model appeals to attackers, so they always
    participate. Thresholds and metrics do not change. If the task has thresholds, apply this
    wrapper last, as in ``attacked(requiring(task, own), clients)``. `noisy` adds noise to the
    updates of the same clients.

    Args:
      task: any task.
      clients: ``bool[clients]``, True for attackers; it may be traced.
      loss_factor: multiplies the attackers' losses.
      stays: whether attackers always participate; if False, they may opt out, see `appealing`.

    Raises:
      ValueError: if `loss_factor` is not positive or `clients` are not ``bool[clients]``.

    Example:
      >>> import jax
      >>> from fedjax_mm import attacked
      >>> from fedjax_mm.tasks import quadratic
      >>> honest, attackers = quadratic(24, 4, mu=2e-4), jax.numpy.arange(24) < 2
      >>> task, params = attacked(honest, attackers), jax.numpy.ones(97)
      >>> first = jax.numpy.int32(0)
      >>> bool(task.client_loss(params, first) == 10 * honest.client_loss(params, first))
      True

    Reference: Cho et al., section 4, Table 2.
    """
    attacks = check_flags("clients", clients, check_task(task).num_clients)
    factors = jnp.where(attacks, jnp.asarray(loss_factor, float), 1)
    return Attacked(task, task.num_clients, attacks, factors, stays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Attacked(View):
    """A task with attackers, built by `attacked`.

    Attributes:
      attacks: ``bool[clients]``.
      factors: ``float[clients]``, the factors that multiply the clients' losses.
      stays: whether attackers always participate.
    """

    attacks: Array
    factors: Array
    stays: bool = dataclasses.field(metadata={"static": True})
    divides = True

    def client_loss(self, params: Params, client: Index) -> Float[Array, ""]:
        """Loss reported by the client."""
        loss = super().client_loss(params, client)
        return loss * self.factors[client].astype(loss.dtype)

    def client_losses(self, params: Params, num_clients: int) -> Float[Array, " clients"]:
        """Losses reported by the first `num_clients` clients."""
        losses = super().client_losses(params, num_clients)
        return losses * self.factors[:num_clients].astype(losses.dtype)

    def appeals(self, params: Params) -> Bool[Array, " clients"]:
        """Whether the model appeals to each client, always True for attackers that stay."""
        honest = super().appeals(params)
        return honest | self.attacks if self.stays else honest


@part
def noisy(algorithm: Algorithm, clients: Any, *, noise: NonNegative = 1.0) -> Algorithm:
    """Wraps an algorithm so that attackers add noise to their updates.

    Adds independent N(0, s^2) noise to every entry of an attacker's update, where s is `noise`
    times the root mean square of the whole update. `attacked` makes the same clients report
    inflated losses. Client states get no noise, so a server that reads them, such as `stalevr`'s,
    sees them as they are.

    Args:
      algorithm: any algorithm whose server reads the sum of updates, so not `mifa`.
      clients: ``bool[clients]``, True for attackers; it may be traced.
      noise: s divided by the root mean square of the update; 0 leaves the update unchanged.

    Raises:
      ValueError: if `noise` is negative or `clients` are not ``bool[clients]``; in a run, if the
        server does not read the sum of updates.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedavg, full_participation, noisy, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> task, attackers = quadratic(24, 4, mu=2e-4), jax.numpy.arange(24) < 2
      >>> algorithm = noisy(fedavg(0.1, local_steps=5), attackers)
      >>> _, trace = simulate(jax.random.key(0), task, algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Cho et al., section 4, Table 2.
    """
    check_algorithm(algorithm)
    attacks = check_flags("clients", clients)

    def send(
        context: ClientContext, contribution: Contribution, server: Any, own: Any
    ) -> tuple[Contribution, Any]:
        del server
        check_flags("clients", attacks, context.task.num_clients)

        # A sparse update cannot hold noise in omitted coordinates.
        def change(update: Any) -> Any:
            other = _with_noise(keys.noise_key(context.rng_key), update, noise)
            return jax.tree.map(partial(jnp.where, attacks[context.client]), other, update)

        return with_update(contribution, context.params, change), own

    def serve(context: ServerContext, own: Any) -> tuple[ServerContext, Any]:
        def step_with(update: Any) -> tuple[Params, base.ServerState]:
            return algorithm.server(context._replace(total=context.total._replace(update=update)))

        if not reads(step_with, context.total.update):
            raise ValueError(
                "noisy: the server of this method does not read the sum of updates, so noise would "
                "change nothing; take a method whose server reads it, such as fedavg"
            )
        return context, own

    return wrap_algorithm(algorithm, "noisy", send=send, serve=serve)


def _with_noise(rng_key: PRNGKeyArray, update: Any, noise: Scalar) -> Any:
    mean_square = optax.tree.norm(update, squared=True) / optax.tree.size(update)
    leaves, structure = jax.tree.flatten(update)

    def add_noise(i: int, leaf: Array) -> Array:
        # Drawn in float32, the noise of a seed is the same with and without x64.
        draw = jax.random.normal(jax.random.fold_in(rng_key, i), leaf.shape, jnp.float32)
        return leaf + (noise * root(mean_square) * draw).astype(leaf.dtype)

    return jax.tree.unflatten(structure, [add_noise(*each) for each in enumerate(leaves)])
