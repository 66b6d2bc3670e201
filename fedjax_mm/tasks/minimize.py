"""Local minima of scalar functions, found for many functions at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fedjax_mm.checks.annotations import Count, NonNegative, Positive, checked


class Minimum(NamedTuple):
    """Result of a descent.

    Attributes:
      point: the last point.
      gradient: the first derivative at `point`.
      curvature: the second derivative at `point`.
      converged: whether the point is within the tolerance of a local minimum: either the curvature
        is positive and the Newton step is small, or the gradient changes sign within the tolerance.
      num_steps: the number of steps.
    """

    point: Float[Array, ""]
    gradient: Float[Array, ""]
    curvature: Float[Array, ""]
    converged: Bool[Array, ""]
    num_steps: Int[Array, ""]


class _Descent(NamedTuple):
    found: Minimum  # one of the two ends that enclose a minimum
    low: Float[Array, ""]  # the last point with a negative gradient, initially minus infinity
    high: Float[Array, ""]  # the last point with a positive gradient, initially infinity


@checked
def local_minimum(
    fn: Callable[[Any], Any],
    start: Any,
    *,
    tolerance: Positive | None = None,
    scale: NonNegative = 1.0,
    max_step: Positive = 0.1,
    max_steps: Count = 200,
) -> Minimum:
    """Finds the first local minimum of a scalar function downhill from a point.

    The result lies in the same valley as the start if valleys are wider than `max_step`.
    Convergence is quadratic from any start, as in Newton's method.

    Args:
      fn: a twice differentiable scalar function. Use `vmap` over its parameters to minimize many
        functions in one program.
      start: the initial point. A descent that starts exactly at a maximum stays there.
      tolerance: the tolerance of the point, relative to the larger of `scale` and the point's
        magnitude; defaults to machine epsilon to the power 2/3 (4e-11 in double, 2e-5 in single
        precision).
      scale: the smallest magnitude for `tolerance`; 0 makes it relative even for minima near 0.
      max_step: the maximum length of a step.
      max_steps: the number of steps after which the descent stops without convergence.

    Raises:
      ValueError: if `tolerance`, `max_step` or `max_steps` is not positive, or `scale` is negative.

    Example:
      >>> found = local_minimum(lambda w: (w**2 - 1) ** 2, 0.01)  # a maximum at 0
      >>> round(float(found.point), 4), bool(found.converged)
      (1.0, True)
      >>> starts = jnp.array([0.0, 2.0, 8.0])
      >>> found = jax.vmap(lambda w: local_minimum(jnp.sin, w))(starts)
      >>> [round(float(w / jnp.pi), 3) for w in found.point]
      [-0.5, 1.5, 3.5]
    """
    start = jnp.asarray(start, float)
    least: Any = jnp.finfo(start.dtype).eps ** (2 / 3) if tolerance is None else tolerance
    gradient = jax.grad(fn)

    def resolution(point: Any) -> Any:
        return least * jnp.maximum(scale, jnp.abs(point))

    def at(point: Any, low: Any, high: Any, num_steps: Any) -> _Descent:
        # Replace the end whose gradient has the same sign as the new point's.
        slope, curvature = jax.jvp(gradient, (point,), (jnp.ones_like(point),))
        low, high = jnp.where(slope < 0, point, low), jnp.where(slope > 0, point, high)
        allowed = resolution(point)
        is_near = (curvature > 0) & (jnp.abs(slope) <= allowed * curvature)
        converged = is_near | (high - low <= allowed)
        return _Descent(Minimum(point, slope, curvature, converged, num_steps), low, high)

    def goes_on(descent: _Descent) -> Any:
        found = descent.found
        return ~found.converged & (found.gradient != 0) & (found.num_steps < max_steps)

    def step(descent: _Descent) -> _Descent:
        (point, slope, curvature, _, num_steps), low, high = descent
        # A Newton step with the absolute curvature also descends in concave regions, and it does
        # not stall in flat ones, because it is a ratio of derivatives. If it would leave the
        # bracket of the minimum, bisect the bracket instead.
        newton = jnp.abs(slope) / jnp.abs(curvature)  # the step is infinite if the curvature is 0
        trial = point - jnp.sign(slope) * jnp.clip(newton, resolution(point), max_step)
        trial = jnp.where((low < trial) & (trial < high), trial, (low + high) / 2)
        return at(trial, low, high, num_steps + 1)

    infinity = jnp.asarray(jnp.inf, start.dtype)
    begin = at(start, -infinity, infinity, jnp.int32(0))
    return lax.while_loop(goes_on, step, begin).found
