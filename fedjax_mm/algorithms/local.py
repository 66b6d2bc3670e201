"""Local training: what every federated method runs on a client."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm.base import (
    Batch,
    Batching,
    Contribution,
    Params,
    Round,
    Scalar,
    Schedule,
    ServerState,
    Task,
)
from fedjax_mm.checks import check_count, check_positive

LocalOptimizer = Callable[[Scalar], optax.GradientTransformation]
"""From the round's learning rate to an optax optimizer, for example `optax.sgd`."""

Direction = Callable[..., Params]
"""``(params, *batches) -> direction``: what a local step descends along."""

_LARGE_BYTES = 2**20  # of parameters


def train_locally(
    rng_key: PRNGKeyArray,
    task: Task,
    client: Int[Array, ""],
    params: Params,
    optimizer: optax.GradientTransformation,
    num_steps: int | Int[Array, ""],
    how: Batching,
    direction: Direction | None = None,
    num_batches: int = 1,
) -> Params:
    """The client's parameters after `num_steps` optimizer steps from the global `params`.

    Args:
      rng_key: the key of this client in this round.
      task: what is learned.
      client: the client's number.
      params: global parameters.
      optimizer: a fresh optimizer, its learning rate fixed.
      num_steps: E; where it is traced, gradients of the result cannot be taken.
      how: which of the client's examples each batch has.
      direction: what the optimizer gets in place of the gradient of the task's loss.
      num_batches: batches that each step sees, one after the other those of the task.
    """
    gradient = jax.grad(task.loss) if direction is None else direction

    def batches_of(step: int | Int[Array, ""]) -> list[Batch]:
        first = jnp.asarray(step, jnp.int32) * num_batches
        return [task.batch(rng_key, client, first + i, how) for i in range(num_batches)]

    # Each step draws the batch of the next one: what is carried is computed once, where XLA would
    # else draw a row's number again for every feature that it reads.
    def step(
        step: Int[Array, ""], carry: tuple[Params, optax.OptState, list[Batch]]
    ) -> tuple[Params, optax.OptState, list[Batch]]:
        params, state, batches = carry
        gradients = gradient(params, *batches)
        gradients = _all_at_once(gradients) if is_large else gradients
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, batches_of(step + 1)

    is_large = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)) >= _LARGE_BYTES
    start = params, optimizer.init(params), batches_of(0)
    params, _, _ = lax.fori_loop(0, num_steps, step, start)
    return params


def _all_at_once(gradients: Params) -> Params:
    """The same numbers, none of which is there before all gradients are computed.

    Else XLA copies the parameters in every step: it does not see that those of one layer may be
    overwritten while a gradient of another one is still to come. (It removes optimization barriers
    too early; that nothing is above infinity it does not know.)
    """
    leaves = [leaf for leaf in jax.tree.leaves(gradients) if leaf.size]
    zero = sum((leaf.ravel()[0] > jnp.inf).astype(leaf.dtype) for leaf in leaves)
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), gradients)


class LocalSGD(NamedTuple):
    """E local steps at the round's learning rate; build it with `local_sgd`.

    Attributes:
      learning_rate: eta, or its schedule.
      num_steps: E.
      how: which of the client's examples each batch has.
    """

    learning_rate: Scalar | Schedule
    num_steps: int
    how: Batching

    def rate(self, round: Round) -> Scalar:
        """The learning rate in a round."""
        return self.learning_rate(round) if callable(self.learning_rate) else self.learning_rate

    def change(
        self,
        rng_key: PRNGKeyArray,
        round: Round,
        task: Task,
        client: Int[Array, ""],
        params: Params,
        *,
        direction: Direction | None = None,
        num_batches: int = 1,
        num_steps: Int[Array, ""] | None = None,
        start: Params | None = None,
    ) -> Params:
        """Local minus global parameters. Arguments as of `train_locally`.

        `num_steps` is for clients who take steps of their own number, and `start` for those who do
        not start from the global parameters; then it is the local parameters minus their start.
        """
        start = params if start is None else start
        steps = self.num_steps if num_steps is None else num_steps
        optimizer = optax.sgd(self.rate(round))
        local = train_locally(
            rng_key, task, client, start, optimizer, steps, self.how, direction, num_batches
        )
        return jax.tree.map(jnp.subtract, local, start)


def local_sgd(
    learning_rate: Scalar | Schedule, local_steps: int, batch_size: int | None
) -> LocalSGD:
    """The checked options that most methods have, as `fedavg` documents them."""
    check_positive("learning_rate", learning_rate)
    check_count("local_steps", local_steps)
    check_count("batch_size", batch_size)
    if local_steps is None:
        raise ValueError("local_steps is None; give a positive whole number")
    return LocalSGD(learning_rate, local_steps, Batching(batch_size))


def proximal(task: Task, strength: Scalar, params: Params) -> Direction:
    """Along ``grad F_k(w_k) + strength (w_k - w)``: held to the global parameters."""

    def direction(own: Params, batch: Batch) -> Params:
        def held(gradient: Array, own: Array, start: Array) -> Array:
            return gradient + strength * (own - start)

        return jax.tree.map(held, jax.grad(task.loss)(own, batch), own, params)

    return direction


def add_mean(
    round: Round, params: Params, server_state: ServerState, total: Contribution
) -> tuple[Params, ServerState]:
    """The plain server: ``w <- w + (sum of weighted changes) / (sum of weights)``."""
    del round
    mean = jax.tree.map(lambda x: x / total.weight, total.update)
    return optax.apply_updates(params, mean), server_state
