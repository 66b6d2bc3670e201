"""Random orders without a sort.

`jax.random.permutation` sorts, and on a CPU that sort would cost more than the whole training step
of a small model, and half a second for a million clients. The draws here use 32-bit words whatever
the floating-point precision, so that a seed means the same clients with and without x64.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray, UInt32

RANK_LIMIT = 128
"""Up to this size an order is drawn by ranking (n^2 comparisons), above it by a keyed bijection."""

_FEISTEL_ROUNDS = 8


def permutation(rng_key: PRNGKeyArray, size: int, length: int | None = None) -> Int[Array, " n"]:
    """The first `length` entries of a random permutation of ``0, ..., size - 1``.

    Up to `RANK_LIMIT` the ranks of independent 32-bit words are used: exactly uniform but for ties
    (probability below 2^-19). Above it entry i is the image of i under a keyed bijection: a Feistel
    network over Z_a x Z_b with a b >= size, walked until the image lies below size (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). It costs O(length): drawing a thousand
    of a million clients does not touch the others.

    Example:
      >>> import jax
      >>> sorted(permutation(jax.random.key(0), 5).tolist())
      [0, 1, 2, 3, 4]
    """
    length = size if length is None else length
    if size <= RANK_LIMIT:
        return _by_rank(rng_key, size)[:length]
    return _by_bijection(rng_key, size, length)


def _by_rank(rng_key: PRNGKeyArray, size: int) -> Int[Array, " size"]:
    words = jax.random.bits(rng_key, (size,), jnp.uint32)
    number = jnp.arange(size, dtype=jnp.int32)
    tie = (words[None, :] == words[:, None]) & (number[None, :] < number[:, None])
    rank = jnp.sum((words[None, :] < words[:, None]) | tie, axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(rank[None, :] == number[:, None], number, 0), axis=1, dtype=jnp.int32)


def _by_bijection(rng_key: PRNGKeyArray, size: int, length: int) -> Int[Array, " length"]:
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    keys = jax.random.bits(rng_key, (_FEISTEL_ROUNDS,), jnp.uint32)

    def encrypt(x: UInt32[Array, " length"]) -> UInt32[Array, " length"]:
        left, right = x // b, x % b
        for i in range(0, _FEISTEL_ROUNDS, 2):
            left = (left + _mix(right ^ keys[i]) % a) % a
            right = (right + _mix(left ^ keys[i + 1]) % b) % b
        return left * b + right

    image = encrypt(jnp.arange(length, dtype=jnp.uint32))
    image = lax.while_loop(
        lambda image: jnp.any(image >= size),
        lambda image: jnp.where(image >= size, encrypt(image), image),
        image,
    )
    return image.astype(jnp.int32)


def _mix(x: UInt32[Array, " length"]) -> UInt32[Array, " length"]:
    """The finalizer of MurmurHash3: every input bit reaches every output bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
