"""Attackers: clients that say they lose more than they do, and send noise."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.algorithms.views import View, appeals, client_losses, measured
from fedjax_mm.base import (
    Algorithm,
    ClientState,
    Contribution,
    Params,
    Round,
    Scalar,
    ServerState,
    Task,
)
from fedjax_mm.checks import check_not_negative, check_positive
from fedjax_mm.contribution import dense_update

_NOISE = 2**31 - 1  # folded into a client's key, where steps fold their own small numbers


def byzantine(
    algorithm: Algorithm,
    clients: Any,
    *,
    loss_factor: Scalar = 10.0,
    noise: Scalar = 1.0,
    stays: bool = True,
) -> Algorithm:
    """The algorithm with attackers: they report a loss ``10 F_k`` and send noise with the update.

    Every number of an attacker's update gets an independent N(0, s^2) with s the `noise` times the
    root of the mean square of the whole update, of all that they send. Attackers take part whenever
    they are asked: with `appealing`, every model appeals to them. Attack first, then ask for
    thresholds, which attackers have as the others do, and measure:
    ``requiring(byzantine(maxfl(...), ...), ...)``.

    Args:
      algorithm: any that is not wrapped by `requiring`.
      clients: ``bool[clients]``, which of those that train attack; it may be traced.
      loss_factor: what their losses are multiplied by, wherever the algorithm looks at losses.
      noise: s over the root mean square of the update; 0 sends the update as it is.
      stays: False lets them stay away, with `appealing`, where others would.

    Raises:
      ValueError: if a number is negative, `loss_factor` is 0, `clients` are not ``bool[clients]``,
        or the algorithm is wrapped by `requiring`.

    Example:
      >>> import jax
      >>> from fedjax_mm import byzantine, fedavg, full_participation, quadratic, simulate
      >>> task, attackers = quadratic(24, 4, mu=2e-4), jax.numpy.arange(24) < 2
      >>> algorithm = byzantine(fedavg(0.1, local_steps=5), attackers)
      >>> _, trace = simulate(jax.random.key(0), task, algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Cho et al., section 4, Table 2.
    """
    check_positive("loss_factor", loss_factor)
    check_not_negative("noise", noise)
    attacks = jnp.asarray(clients)
    if attacks.ndim != 1 or attacks.dtype != jnp.bool_:
        raise ValueError(
            f"clients are {attacks.dtype}{list(attacks.shape)}; give one bool for "
            "each client that trains"
        )
    if algorithm.metrics is not None:
        raise ValueError(
            "the algorithm is wrapped by `requiring`, whose thresholds and metrics are not to be "
            "inflated; attack first: requiring(byzantine(algorithm, clients), ...)"
        )

    def seen(task: Task) -> "_Inflated":
        if len(attacks) != task.num_clients:
            raise ValueError(
                f"clients has {len(attacks)} entries; give one for each of the {task.num_clients} "
                "clients that train"
            )
        factors = jnp.where(attacks, jnp.asarray(loss_factor, float), 1)
        return _Inflated(task, task.num_clients, factors)

    def init(task: Task, params: Params) -> tuple[ServerState, ClientState]:
        return algorithm.init(seen(task), params)

    def client(
        rng_key: PRNGKeyArray,
        round: Round,
        task: Task,
        client: Int[Array, ""],
        params: Params,
        server_state: ServerState,
        client_state: ClientState,
    ) -> tuple[Contribution, ClientState]:
        contribution, state = algorithm.client(
            rng_key, round, seen(task), client, params, server_state, client_state
        )
        update = dense_update(contribution.update, params)
        noisy = _with_noise(jax.random.fold_in(rng_key, _NOISE), update, noise)
        sent = jax.tree.map(lambda x, y: jnp.where(attacks[client], x, y), noisy, update)
        return contribution._replace(update=sent), state

    def appeal(
        task: Task, params: Params, server_state: ServerState, client_states: ClientState
    ) -> Bool[Array, " clients"]:
        if not stays:
            return appeals(task, params)
        if algorithm.appeal is not None:  # the others' losses are what they are
            return algorithm.appeal(task, params, server_state, client_states) | attacks
        return appeals(task, params) | attacks

    return Algorithm(
        init,
        client,
        algorithm.server,
        _of_view(algorithm.num_steps, seen, 0),
        start=_of_view(algorithm.start, seen, 1),
        begin=_of_view(algorithm.begin, seen, 1),
        output=algorithm.output,
        appeal=appeal,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Inflated(View):
    """A task as the algorithm sees it: with the losses that clients report."""

    factors: Float[Array, " clients"]

    def client_loss(self, params: Params, client: Int[Array, ""]) -> Float[Array, ""]:
        loss = measured(self.task).client_loss(params, client)
        return loss * self.factors[client].astype(loss.dtype)

    def client_losses(self, params: Params, num_clients: int) -> Float[Array, " clients"]:
        losses = client_losses(self.task, params, num_clients)
        return losses * self.factors[:num_clients].astype(losses.dtype)


def _of_view(function: Any, seen: Any, place: int) -> Any:
    """The function, if there is one, with another view of the task at a place of its arguments."""

    def call(*args: Any) -> Any:
        return function(*args[:place], seen(args[place]), *args[place + 1 :])

    return None if function is None else call


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
