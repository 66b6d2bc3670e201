"""The local minimum that a descent of a function of one number reaches, for many at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fedjax_mm.checks import check_count, check_positive


class Minimum(NamedTuple):
    """Where a descent ended, and whether that is a local minimum.

    Attributes:
      point: where.
      gradient: the first derivative there.
      curvature: the second derivative there.
      converged: the point is within the tolerance of a minimum: by its Newton step, the curvature
        being positive, or by two points that close between which the gradient changes its sign.
      num_steps: how many steps it took.
    """

    point: Float[Array, ""]
    gradient: Float[Array, ""]
    curvature: Float[Array, ""]
    converged: Bool[Array, ""]
    num_steps: Int[Array, ""]


class _Descent(NamedTuple):
    """The point is always one of the two ends, between which there is a minimum."""

    found: Minimum
    low: Float[Array, ""]  # the gradient is negative here; minus infinity until such a point is met
    high: Float[Array, ""]  # the gradient is positive here; infinity until such a point is met


def local_minimum(
    fn: Callable[[Any], Any],
    start: Any,
    *,
    tolerance: Any = None,
    scale: Any = 1.0,
    max_step: Any = 0.1,
    max_steps: int = 200,
) -> Minimum:
    """The first local minimum downhill from the start, of a function of one number.

    Newton steps along the curvature's absolute value, so that they descend where the function is
    concave too, not longer than `max_step`. Once the gradient has changed its sign the minimum is
    enclosed, and a step that would leave the enclosure halves it instead. Hence the result lies in
    the valley of the start if valleys are wider than `max_step`, and Newton's quadratic convergence
    does not depend on a good start. Flat parts do no harm: a step depends on the ratio of the two
    derivatives, not on their size.

    Args:
      fn: from a number to a number, twice differentiable where it matters; vmap over what it
        depends on to minimize many functions as one program.
      start: where the descent starts. A maximum is left only if it is not met exactly.
      tolerance: of the point, relative to the larger of `scale` and its size; by default the 2/3
        power of the precision (4e-11 in double, 2e-5 in single precision).
      scale: 0 asks for that accuracy however close to 0 the minimum is.
      max_step: the longest step.
      max_steps: after so many steps the descent ends, not converged.

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
    check_positive("tolerance", tolerance)
    check_positive("max_step", max_step)
    if not isinstance(scale, jax.core.Tracer) and not (np.isfinite(scale) and scale >= 0):
        raise ValueError(f"scale is {scale}; it must not be negative")
    check_count("max_steps", max_steps)
    start = jnp.asarray(start, float)
    if tolerance is None:
        tolerance = jnp.finfo(start.dtype).eps ** (2 / 3)
    gradient = jax.grad(fn)

    def resolution(point: Any) -> Any:
        return tolerance * jnp.maximum(scale, jnp.abs(point))

    def at(point: Any, low: Any, high: Any, num_steps: Any) -> _Descent:
        """The derivatives at a point between the ends, which it then replaces one of."""
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
        newton = jnp.abs(slope) / jnp.abs(curvature)  # infinite where there is no curvature
        trial = point - jnp.sign(slope) * jnp.clip(newton, resolution(point), max_step)
        trial = jnp.where((low < trial) & (trial < high), trial, (low + high) / 2)
        return at(trial, low, high, num_steps + 1)

    infinity = jnp.asarray(jnp.inf, start.dtype)
    begin = at(start, -infinity, infinity, jnp.int32(0))
    return lax.while_loop(goes_on, step, begin).found
