"""Local training: a client's steps, in a loop adapted to the device.

The task draws each batch; for data in memory, `ClientData` does (`data/clients.py`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from fedjax_mm.base import Batching, ClientContext, Params, keys
from fedjax_mm.local.gradients import GradientFn, LocalStep, StepGradient, loss_and_gradient
from fedjax_mm.tools.loops import local_steps

_LARGE_BYTES = 2**20  # bytes of parameters above which a model is large


class LocalUpdate(NamedTuple):
    """Result of local training.

    Attributes:
      update: local minus global parameters.
      report: ``{"loss": the mean training loss of the batches}``.
    """

    update: Any
    report: dict[str, Float[Array, ""]]

    @classmethod
    def between(cls, start: Params, params: Params, loss: Float[Array, ""]) -> "LocalUpdate":
        """Update from one point to another, with the mean loss along the way."""
        return cls(jax.tree.map(jnp.subtract, params, start), {"loss": loss})


def train_locally(
    context: ClientContext,
    optimizer: optax.GradientTransformation,
    num_steps: int | Int[Array, ""],
    how: Batching,
    **others: Any,
) -> tuple[Params, Float[Array, ""]]:
    """Returns a client's parameters after `num_steps` steps, and the mean loss of its batches.

    The arguments are those of `descend`.
    """
    params, loss, _ = descend(context, optimizer, num_steps, how, **others)
    return params, loss


def descend(
    context: ClientContext,
    optimizer: optax.GradientTransformation,
    num_steps: int | Int[Array, ""],
    how: Batching,
    *,
    gradient_fn: GradientFn | StepGradient | None = None,
    num_batches: int = 1,
    start: Params | None = None,
    state: Any = None,
) -> tuple[Params, Float[Array, ""], Any]:
    """Takes `num_steps` steps, and returns parameters, mean loss and the optimizer's state.

    Args:
      context: the client's inputs.
      optimizer: an optax optimizer with a fixed learning rate.
      num_steps: E. If it is traced, the result cannot be differentiated in reverse.
      how: how batches are drawn.
      gradient_fn: replaces the gradient of the task's loss; a `StepGradient` also gets the step.
      num_batches: the number of batches per step.
      start: the parameters to start from; defaults to the global parameters.
      state: the optimizer's state to start from; defaults to a fresh one.
    """
    value_and_gradient = loss_and_gradient(context.task) if gradient_fn is None else gradient_fn

    def descent(step: Int[Array, ""], params: Params, batches: list[Any]) -> tuple[Any, Params]:
        if not isinstance(value_and_gradient, StepGradient):
            return value_and_gradient(params, *batches)
        at = LocalStep(keys.local_step_key(context.rng_key, step), step)
        return value_and_gradient.function(at, params, *batches)

    def batches_of(step: int | Int[Array, ""]) -> list[Any]:
        first = jnp.asarray(step, jnp.int32) * num_batches
        steps = [first + i for i in range(num_batches)]
        return [context.task.batch(context.rng_key, context.client, step, how) for step in steps]

    # Draw the next step's batch in each step, because XLA would otherwise fuse the draw of a row
    # index into the gather and repeat it for every feature, whereas a loop-carried value is
    # computed once.
    def step(step: Int[Array, ""], carry: Any) -> Any:
        params, state, batches, losses = carry
        loss, gradients = descent(step, params, batches)
        gradients = _all_at_once(gradients) if is_large else gradients
        updates, state = optimizer.update(gradients, state, params)
        losses = losses + loss.astype(losses.dtype)
        return optax.apply_updates(params, updates), state, batches_of(step + 1), losses

    start = context.params if start is None else start
    is_large = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(start)) >= _LARGE_BYTES
    state = optimizer.init(start) if state is None else state
    carry = start, state, batches_of(0), jnp.zeros(())
    params, state, _, losses = local_steps(num_steps, step, carry, is_small=not is_large)
    return params, losses / num_steps, state


def each_by(optimizer: optax.GradientTransformation, *names: str) -> optax.GradientTransformation:
    """Optimizes the named entries of a dict one by one, and subtracts the gradients of others."""

    def init(params: Params) -> dict[str, Any]:
        return {name: optimizer.init(params[name]) for name in names}

    def update(gradients: Params, state: dict[str, Any], params: Any) -> tuple[Params, Any]:
        steps = jax.tree.map(jnp.negative, gradients)
        for name in names:
            each = gradients[name], state[name], params[name]
            steps[name], new = optimizer.update(*each)
            state = {**state, name: new}
        return steps, state

    return optax.GradientTransformation(init, update)


def _all_at_once(gradients: Params) -> Params:
    # XLA copies all parameters in every step if it may update one layer before computing another
    # layer's gradient. Make every update depend on all gradients, by a comparison with infinity,
    # which XLA does not simplify. `lax.optimization_barrier` is removed too early.
    leaves = [leaf for leaf in jax.tree.leaves(gradients) if leaf.size]
    zero = sum((leaf.ravel()[0] > jnp.inf).astype(leaf.dtype) for leaf in leaves)
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), gradients)
