"""MW-Fed: clients that a model does not satisfy weigh more and more, and work more."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.algorithms.local import add_mean, local_sgd
from fedjax_mm.algorithms.views import appeals
from fedjax_mm.base import (
    Algorithm,
    ClientState,
    Contribution,
    Params,
    Round,
    Scalar,
    Schedule,
    Task,
)
from fedjax_mm.contribution import scale_update

_MOST = 4  # times local_steps
_LEAST_WEIGHT = 1e-30  # so that clients long satisfied have a mean, if they are alone in a round


class MWFedState(NamedTuple):
    """What the server of one model keeps between rounds."""

    log_weights: Float[Array, " clients"]  # products of hundreds of rounds are no 32-bit numbers
    is_satisfied: Bool[Array, " clients"]  # by the model as it is


def mwfed(
    learning_rate: Scalar | Schedule,
    *,
    local_steps: int,
    batch_size: int | None = None,
    growth: Scalar = 4.0,
) -> Algorithm:
    """MW-Fed: FedAvg whose weights v_k grow wherever ``F_k(w) >= rho_k``, as do the local steps.

    Weights are 1/N to begin with. Before each round those of the clients to whom the model does not
    appeal are multiplied by 4, and all are normalised; then client k takes ``clip(round(tau N v_k),
    1, 4 tau)`` local steps, and participants are averaged by v_k. It takes one pass over all
    training examples a round, and thresholds: wrap it with `requiring`.

    Args:
      learning_rate: a number (it may be traced) or a schedule of the round t = 1, 2, ...
      local_steps: tau, SGD steps of a client of mean weight.
      batch_size: B examples per local step, drawn independently; None takes the full gradient.
      growth: what weights are multiplied by; greater than 1.

    Raises:
      ValueError: if a number is not positive or `growth` is not greater than 1.

    Example:
      >>> import jax
      >>> from fedjax_mm import full_participation, mwfed, quadratic, requiring, simulate
      >>> algorithm = requiring(mwfed(0.1, local_steps=5), learning_rate=0.1, num_steps=2)
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Blum et al., "One for One, or All for All" (2021), as compared with in Cho et al.
    """
    local = local_sgd(learning_rate, local_steps, batch_size)
    if not isinstance(growth, jax.core.Tracer) and not growth > 1:
        raise ValueError(f"growth is {growth}; it must be greater than 1")

    def init(task: Task, params: Params) -> tuple[MWFedState, ClientState]:
        del params
        uniform = jnp.full(task.num_clients, -jnp.log(float(task.num_clients)))
        return MWFedState(uniform, jnp.zeros(task.num_clients, bool)), ()

    def begin(
        round: Round,
        task: Task,
        params: Params,
        server_state: MWFedState,
        client_states: ClientState,
    ) -> MWFedState:
        del round, client_states
        old = server_state.log_weights
        is_satisfied = appeals(task, params)
        grown = old + jnp.where(is_satisfied, 0, jnp.log(growth))
        return MWFedState(jax.nn.log_softmax(grown).astype(old.dtype), is_satisfied)

    def appeal(
        task: Task, params: Params, server_state: MWFedState, client_states: ClientState
    ) -> Bool[Array, " clients"]:
        del task, params, client_states
        return server_state.is_satisfied

    def num_steps(task: Task, client: Int[Array, ""], server_state: MWFedState) -> Int[Array, ""]:
        share = task.num_clients * jnp.exp(server_state.log_weights[client])
        steps = jnp.round(local_steps * share)
        return jnp.clip(steps, 1, _MOST * local_steps).astype(jnp.int32)

    def client(
        rng_key: PRNGKeyArray,
        round: Round,
        task: Task,
        client: Int[Array, ""],
        params: Params,
        server_state: MWFedState,
        client_state: ClientState,
    ) -> tuple[Contribution, ClientState]:
        steps = num_steps(task, client, server_state)
        change = local.change(rng_key, round, task, client, params, num_steps=steps)
        weight = jnp.maximum(jnp.exp(server_state.log_weights[client]), _LEAST_WEIGHT)
        return Contribution(scale_update(change, weight), weight, steps), client_state

    return Algorithm(init, client, add_mean, num_steps, begin=begin, appeal=appeal)
