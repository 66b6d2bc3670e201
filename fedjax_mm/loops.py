"""Loops that suit the device."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax
from jaxtyping import Array, Bool, Int

T = TypeVar("T")

_UNROLLED = 8
"""Local steps in the body of a loop on accelerators."""

_AT_ONCE = 4
"""Steps on accelerators before the first time that a loop may end, and after it."""


def local_steps(
    num_steps: int | Int[Array, ""], step: Callable[[Int[Array, ""], T], T], start: T
) -> T:
    """Returns what `lax.fori_loop` returns, with a loop that suits the device.

    Args:
      num_steps: E. If it is traced, the result cannot be differentiated in reverse.
      step: takes the number of a step, from 0, and a carry; returns the next carry.
      start: the first carry.
    """
    # Unroll on accelerators, because every trip of a loop launches kernels for its counter and its
    # carry, and small kernels take less time than their launch. CPUs are faster with a small body.
    if jax.default_backend() == "cpu" or not isinstance(num_steps, int):
        return lax.fori_loop(0, num_steps, step, start)
    return lax.fori_loop(0, num_steps, step, start, unroll=min(num_steps, _UNROLLED))


def loop_until(is_over: Callable[[T], Bool[Array, ""]], step: Callable[[T], T], start: T) -> T:
    """Repeats a step at least once, until the carry is final.

    Args:
      is_over: whether a carry is final.
      step: takes a carry, and returns the next one; it returns a final carry unchanged.
      start: the first carry, which is not final.
    """

    # Take several steps at once on accelerators, because the device waits for the host whenever it
    # has to know whether a loop is over.
    def steps(carry: T) -> T:
        for _ in range(_AT_ONCE):
            carry = step(carry)
        return carry

    if jax.default_backend() == "cpu":
        return lax.while_loop(lambda carry: ~is_over(carry), step, start)
    return lax.while_loop(lambda carry: ~is_over(carry), steps, steps(start))
