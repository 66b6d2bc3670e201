"""Local training: what every federated method runs on a client."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm.base import Batch, Batching, Params, Scalar, Task

LocalOptimizer = Callable[[Scalar], optax.GradientTransformation]
"""From the round's learning rate to an optax optimizer, for example `optax.sgd`."""

_LARGE_BYTES = 2**20  # of parameters


def train_locally(
    rng_key: PRNGKeyArray,
    task: Task,
    client: Int[Array, ""],
    params: Params,
    optimizer: optax.GradientTransformation,
    num_steps: int | Int[Array, ""],
    how: Batching,
) -> Params:
    """The client's parameters after `num_steps` optimizer steps from the global `params`.

    Args:
      rng_key: the key of this client in this round.
      task: what is learned.
      client: the client's number.
      params: global parameters.
      optimizer: a fresh optimizer, its learning rate fixed.
      num_steps: E; where it is traced, gradients of the result cannot be taken.
      how: which of the client's examples each step sees.
    """

    def batch_of(step: int | Int[Array, ""]) -> Batch:
        return task.batch(rng_key, client, jnp.asarray(step, jnp.int32), how)

    # Each step draws the batch of the next one: what is carried is computed once, where XLA would
    # else draw a row's number again for every feature that it reads.
    def step(
        step: Int[Array, ""], carry: tuple[Params, optax.OptState, Batch]
    ) -> tuple[Params, optax.OptState, Batch]:
        params, state, batch = carry
        updates, state = optimizer.update(jax.grad(task.loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state, batch_of(step + 1)

    start = params, optimizer.init(params), batch_of(0)
    # XLA copies the parameters in every step, unless two steps write to each other's buffers; the
    # program gets longer, which only large models are worth.
    is_large = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)) >= _LARGE_BYTES
    unroll = 2 if is_large and isinstance(num_steps, int) else None
    params, _, _ = lax.fori_loop(0, num_steps, step, start, unroll=unroll)
    return params
