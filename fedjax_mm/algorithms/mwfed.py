"""MW-Fed: unsatisfied clients get larger weights and take more local steps."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Scalar, Task
from fedjax_mm.checks import check_numbers
from fedjax_mm.local import add_mean, local_sgd
from fedjax_mm.schedules import Schedule
from fedjax_mm.sums import scale_update
from fedjax_mm.tasks.view import client_losses, thresholds

Weights: TypeAlias = Float[Array, " clients"]

_MOST = 4  # times local_steps
_LEAST_WEIGHT = 1e-30  # a round of clients whose weights underflow must not divide by 0


def mwfed(
    learning_rate: Scalar | Schedule,
    *,
    local_steps: base.Steps,
    batch_size: base.BatchSize = None,
    growth: Scalar = 4.0,
) -> Algorithm:
    """MW-Fed: FedAvg whose weights v_k and local steps grow while ``F_k(w) >= rho_k``.

    Weights start at 1/N. At the start, and after each round in which somebody trained, the weights
    of clients whose (reported) loss is not below their threshold are multiplied by `growth`, and
    all weights are normalised. Client k takes ``clip(round(tau N v_k), 1, 4 tau)`` local steps, and
    the server averages participants by v_k. Each round costs one pass over all training examples.
    Clients need thresholds: wrap the task with `requiring`.

    Args:
      learning_rate: a number (it may be traced) or a schedule of the round t = 1, 2, ...
      local_steps: tau, SGD steps of a client of mean weight.
      batch_size: B examples per local step, drawn independently; None takes the full gradient.
      growth: the factor of unsatisfied clients' weights; greater than 1.

    Raises:
      ValueError: if a number is not positive or `growth` is not greater than 1.

    Example:
      >>> import jax
      >>> from fedjax_mm import full_participation, mwfed, simulate
      >>> from fedjax_mm.tasks import quadratic, requiring
      >>> task = requiring(quadratic(24, 4, mu=2e-4), jax.numpy.full(24, -0.01))
      >>> _, trace = simulate(
      ...     jax.random.key(0), task, mwfed(0.1, local_steps=5), full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Blum et al., "One for One, or All for All" (2021), as compared with in Cho et al.
    """
    sgd = local_sgd(learning_rate, local_steps, batch_size)
    check_numbers("growth", growth, lambda x: x > 1, "be greater than 1")

    def grown(task: Task, params: Params, log_weights: Weights) -> Weights:
        is_satisfied = client_losses(task, params) < thresholds(task)
        return jax.nn.log_softmax(log_weights + jnp.where(is_satisfied, 0, jnp.log(growth)))

    def init(task: Task, params: Params) -> tuple[Weights, base.ClientState]:
        uniform = jnp.full(task.num_clients, -jnp.log(float(task.num_clients)))
        return grown(task, params, uniform).astype(uniform.dtype), ()

    def num_steps(task: Task, client: base.Index, server_state: Weights) -> Int[Array, ""]:
        share = task.num_clients * jnp.exp(server_state[client])
        return jnp.clip(jnp.round(local_steps * share), 1, _MOST * local_steps).astype(jnp.int32)

    def client(
        local: ClientContext, server_state: Weights, client_state: base.ClientState
    ) -> tuple[Contribution, base.ClientState]:
        steps = num_steps(local.task, local.client, server_state)
        change = sgd.train(local, num_steps=steps)
        weight = jnp.maximum(jnp.exp(server_state[local.client]), _LEAST_WEIGHT) * local.scale
        update = scale_update(change.update, weight)
        return Contribution(update, weight, steps, change.report), client_state

    def server(given: base.ServerContext) -> tuple[Params, Weights]:
        params, old = add_mean(given.params, given.total), given.server_state
        return params, grown(given.task, params, old).astype(old.dtype)

    return Algorithm(init, client, server, num_steps)
