"""Local training: what every federated method runs on a client."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm.base import Params, Scalar, Task

LocalOptimizer = Callable[[Scalar], optax.GradientTransformation]
"""From the round's learning rate to an optax optimizer, for example `optax.sgd`."""


def train_locally(
    rng_key: PRNGKeyArray,
    task: Task,
    client: Int[Array, ""],
    params: Params,
    optimizer: optax.GradientTransformation,
    num_steps: int,
    batch_size: int | None,
) -> Params:
    """The client's parameters after `num_steps` optimizer steps from the global `params`.

    Args:
      rng_key: the key of this client in this round.
      task: what is learned.
      client: the client's number.
      params: global parameters.
      optimizer: a fresh optimizer, its learning rate fixed.
      num_steps: E.
      batch_size: examples per step; all of the client's examples if None.
    """

    def step(
        carry: tuple[Params, optax.OptState], step: Int[Array, ""]
    ) -> tuple[tuple[Params, optax.OptState], None]:
        params, state = carry
        batch = task.batch(rng_key, client, step, batch_size)
        updates, state = optimizer.update(jax.grad(task.loss)(params, batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = lax.scan(step, (params, optimizer.init(params)), jnp.arange(num_steps))
    return params
