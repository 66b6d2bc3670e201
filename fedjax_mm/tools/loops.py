"""Loops adapted to the device."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax
from jaxtyping import Array, Bool, Int

T = TypeVar("T")

_UNROLLED = 8
"""The number of local steps per loop iteration on accelerators."""

_AT_ONCE = 4
"""The number of steps that accelerators take before each check whether a loop is over."""


def local_steps(
    num_steps: int | Int[Array, ""],
    step: Callable[[Int[Array, ""], T], T],
    start: T,
    *,
    is_small: bool = True,
) -> T:
    """Computes the result of `lax.fori_loop`, with a loop adapted to the device.

    Args:
      num_steps: E. If it is traced, the result cannot be differentiated in reverse.
      step: maps the index of a step, starting at 0, and a carry to the next carry.
      start: the initial carry.
      is_small: whether a step's kernels are as short as their launch.
    """
    # Unroll small steps on accelerators, because every loop iteration launches kernels for its
    # counter and its carry, which take longer than the step's own. Do not unroll large steps,
    # because XLA then gathers the images of several steps in one kernel, which is three times
    # slower. CPUs are faster with a small body.
    if jax.default_backend() == "cpu" or not is_small or not isinstance(num_steps, int):
        return lax.fori_loop(0, num_steps, step, start)
    return lax.fori_loop(0, num_steps, step, start, unroll=min(num_steps, _UNROLLED))


def loop_until(is_over: Callable[[T], Bool[Array, ""]], step: Callable[[T], T], start: T) -> T:
    """Repeats a step at least once, until the carry is final.

    Args:
      is_over: returns whether a carry is final.
      step: maps a carry to the next one, and a final carry to itself.
      start: the initial carry, which is not final.
    """

    # Take several steps at once on accelerators, because the device waits for the host whenever it
    # has to find out whether a loop is over.
    def steps(carry: T) -> T:
        for _ in range(_AT_ONCE):
            carry = step(carry)
        return carry

    if jax.default_backend() == "cpu":
        return lax.while_loop(lambda carry: ~is_over(carry), step, start)
    return lax.while_loop(lambda carry: ~is_over(carry), steps, steps(start))
