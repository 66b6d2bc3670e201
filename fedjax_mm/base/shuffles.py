"""Random permutations and draws without sorting, independent of floating-point precision."""

# Avoid `jax.random.permutation`, because it sorts, which on a CPU takes longer than a training step
# of a small model, and half a second for a million clients. All draws here use 32-bit words, so
# that a seed gives the same clients with or without x64.

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, UInt32

from fedjax_mm.base import Padded
from fedjax_mm.tools.loops import loop_until

RANK_LIMIT = 128
"""The size up to which orders are drawn by ranking (n^2 comparisons), not by keyed bijections."""

_FEISTEL_ROUNDS = 16  # with 8, permutations of 5 to 7 items are measurably non-uniform
_GOLDEN = np.uint32(0x9E3779B9)  # 2^32 over the golden ratio, made odd, to spread counters apart


def permutation(
    rng_key: PRNGKeyArray, size: int | Padded, length: int | None = None
) -> Int[Array, " n"]:
    """Returns the first `length` entries of a random permutation of ``0, ..., size - 1``.

    For sizes up to `RANK_LIMIT`, entries are ranks of independent 32-bit words, which are uniform
    except for ties (probability below 2^-19). For larger sizes entry i is the image of i under a
    keyed bijection, at a cost of O(length), so drawing a thousand out of a million clients does not
    touch the others.

    A padded size with a traced number n gives a permutation of ``0, ..., n - 1`` followed by the
    numbers from n on. It equals the permutation for the unpadded size n, unless `RANK_LIMIT` lies
    between n and the upper bound.

    Example:
      >>> import jax
      >>> sorted(permutation(jax.random.key(0), 5).tolist())
      [0, 1, 2, 3, 4]
    """
    size, drawn = size if isinstance(size, Padded) else (size, None)
    places = jnp.arange(size if length is None else length, dtype=jnp.int32)
    if size <= RANK_LIMIT:
        return _by_rank(rng_key, size, drawn)[places]
    order = shuffled(hash_words(rng_key), places, size if drawn is None else drawn)
    return order if drawn is None else jnp.where(places < drawn, order, places)


def _by_rank(
    rng_key: PRNGKeyArray, size: int, drawn: int | Int[Array, ""] | None
) -> Int[Array, " size"]:
    words = jax.random.bits(rng_key, (size,), jnp.uint32)
    number = jnp.arange(size, dtype=jnp.int32)
    tie = (words[None, :] == words[:, None]) & (number[None, :] < number[:, None])
    is_before = (words[None, :] < words[:, None]) | tie
    if drawn is not None:  # the random words do not depend on `drawn`
        is_in = number < drawn
        is_before = jnp.where(is_in[:, None], is_before & is_in, number[None, :] < number[:, None])
    rank = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(rank[None, :] == number[:, None], number, 0), axis=1, dtype=jnp.int32)


@jax.jit
def shuffled(
    words: UInt32[Array, " 2"], places: Int[Array, "*places"], size: int | Int[Array, ""]
) -> Int[Array, "*places"]:
    """Returns the entries at the given positions of a random order of ``0, ..., size - 1``.

    Args:
      words: the key, from `hash_words`.
      places: the positions. Entries at positions from `size` on are arbitrary numbers below it.
      size: the size of the order, from 1 to 2^31 - 1; it may be traced.
    """
    # Use a Feistel network over Z_a x Z_b with a b >= size, because it is a bijection, and encrypt
    # images of `size` or more again until they are below `size` (Black and Rogaway, "Ciphers with
    # arbitrary finite domains", 2002).
    size = jnp.asarray(size, jnp.uint32)
    a = jnp.ceil(jnp.sqrt(size.astype(jnp.float32))).astype(jnp.uint32)
    b = (size + a - 1) // a
    keys = _mix(jnp.arange(_FEISTEL_ROUNDS, dtype=jnp.uint32) * _GOLDEN + words[0]) ^ words[1]

    def encrypt(x: UInt32[Array, "*places"]) -> UInt32[Array, "*places"]:
        left, right = x // b, x % b
        for i in range(0, _FEISTEL_ROUNDS, 2):
            left = left + _below(_mix(right ^ keys[i]), a)
            left = jnp.where(left >= a, left - a, left)
            right = right + _below(_mix(left ^ keys[i + 1]), b)
            right = jnp.where(right >= b, right - b, right)
        return left * b + right

    def walk(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        image, is_out = carry
        image = jnp.where(is_out, encrypt(image), image)
        return image, image >= size

    start = jnp.minimum(jnp.asarray(places, jnp.uint32), size - 1)
    is_out = jnp.ones(start.shape, bool)
    image, _ = loop_until(lambda carry: ~jnp.any(carry[1]), walk, (start, is_out))
    # Swap 0 and 1 for half of the keys, because for odd a and b the network produces only even
    # permutations.
    swap = (words[0] & 1 == 1) & (image < 2) & (size > 1)
    return jnp.where(swap, 1 - image, image).astype(jnp.int32)


@jax.jit
def drawn(
    words: UInt32[Array, " 2"], counters: Int[Array, "*draws"], size: int | Int[Array, ""]
) -> Int[Array, "*draws"]:
    """Returns independent uniform draws from ``0, ..., size - 1``, one per counter.

    Args:
      words: the key, from `hash_words`.
      counters: a different number for every draw with this key.
      size: a positive number, which may be traced. Probabilities are exact up to 2^-32.
    """
    word = _mix(_mix(jnp.asarray(counters, jnp.uint32) * _GOLDEN + words[0]) ^ words[1])
    size = jnp.asarray(size, jnp.uint32)
    # Compute the upper half of the 64-bit product from 16-bit halves, because JAX has no 64-bit
    # integers without x64.
    high, low = size >> 16, size & 0xFFFF
    middle = (word >> 16) * low + ((word & 0xFFFF) * low >> 16)
    other = (word & 0xFFFF) * high
    upper = (word >> 16) * high + (middle >> 16) + (other >> 16)
    carry = (middle & 0xFFFF) + (other & 0xFFFF) >> 16
    return (upper + carry).astype(jnp.int32)


def hash_words(rng_key: PRNGKeyArray) -> UInt32[Array, " 2"]:
    """Returns 64 bits from a key, for `shuffled` and `drawn`."""
    data = jax.random.key_data(rng_key).astype(jnp.uint32).reshape(-1, 2)
    return data[0] if len(data) == 1 else _mix(data[0] ^ _mix(data[1]))


def fold_words(words: UInt32[Array, " 2"], number: Int[Array, ""]) -> UInt32[Array, " 2"]:
    """Derives new words from a number, different for every number."""
    return _mix(words + jnp.asarray(number, jnp.uint32) * _GOLDEN)


def _below(word: UInt32[Array, "*words"], size: UInt32[Array, ""]) -> UInt32[Array, "*words"]:
    # Scale, because this is cheaper than a remainder and correct for sizes up to 2^16.
    return (word >> 16) * size >> 16


def _mix(x: UInt32[Array, "*words"]) -> UInt32[Array, "*words"]:
    # This is the finalizer of MurmurHash3, in which every input bit affects every output bit.
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
