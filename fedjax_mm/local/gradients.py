"""Gradients that local steps descend along."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fedjax_mm.base import ClientContext, Index, Params, Scalar, Task
from fedjax_mm.base.capabilities import GradientTask
from fedjax_mm.checks.values import described

GradientFn: TypeAlias = Callable[..., tuple[Float[Array, ""], Params]]
"""``(params, *batches) -> (loss, gradient)``: the loss to report, and the vector that a local step
descends along, as returned for example by `jax.value_and_grad` of the task's loss."""


class LocalStep(NamedTuple):
    """One local step of a client.

    Attributes:
      rng_key: a key that no other step, client, model, round or seed has, and no batch is drawn by.
      number: the number of the step in this round, from 0.
    """

    rng_key: PRNGKeyArray
    number: Index


class StepGradient(NamedTuple):
    """A gradient function that also gets the local step, for example to draw noise.

    Attributes:
      function: ``(step, params, *batches) -> (loss, gradient)``, where `step` is a `LocalStep`.

    Example: noisy gradients.
      >>> from fedjax_mm import averaging, full_participation, local_sgd, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> local = local_sgd(0.1, steps=5)
      >>> def train(context):
      ...     @StepGradient
      ...     def gradient_fn(step, params, batch):
      ...         loss, gradient = loss_and_gradient(context.task)(params, batch)
      ...         return loss, gradient + 0.01 * jax.random.normal(step.rng_key, params.shape)
      ...     return local.train(context, gradient_fn=gradient_fn)
      >>> algorithm = averaging(train, num_gradients=5)
      >>> _, trace = simulate(0, quadratic(24, 4, mu=0.1), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True
    """

    function: GradientFn


def loss_and_gradient(task: Task) -> GradientFn:
    """Returns the function ``(params, batch) -> (loss, gradient)`` of a task.

    It is the task's own, if the task has one. It raises `TypeError` if the loss is not one float,
    or if parameters are integers.
    """
    return task.loss_and_gradient if isinstance(task, GradientTask) else differentiated(task)


def differentiated(task: Task) -> GradientFn:
    """The derivative of a task's loss, also if the task has a gradient of its own."""
    name = type(task).__name__

    def loss(params: Params, batch: Any) -> Float[Array, ""]:
        found: Any = task.loss(params, batch)
        is_array = isinstance(found, jax.Array)
        if not is_array or found.shape or not jnp.issubdtype(found.dtype, jnp.floating):
            given = jax.typeof(found).str_short() if is_array else described(found)
            raise TypeError(f"{name}.loss returns {given}; return one float, such as a jnp.mean")
        return found

    def both(params: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
        for leaf in jax.tree.leaves(params):
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                given = jax.typeof(leaf).str_short()
                raise TypeError(f"{name}.init returns {given}; gradients need parameters of floats")
        return jax.value_and_grad(loss)(params, batch)

    return both


def proximal(context: ClientContext, strength: Scalar) -> GradientFn:
    """Proximal gradient function ``grad F_k(w_k) + strength (w_k - w)``."""

    def gradient_fn(own: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
        loss, gradient = loss_and_gradient(context.task)(own, batch)
        held = jax.tree.map(lambda g, x, w: g + strength * (x - w), gradient, own, context.params)
        return loss, held

    return gradient_fn
