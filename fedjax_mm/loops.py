"""The loop of a client's local steps."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax
from jaxtyping import Array, Int

T = TypeVar("T")

_UNROLLED = 8
"""Steps in the body of the loop on accelerators."""


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
