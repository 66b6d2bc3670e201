"""The Gaussian mechanism: clipping to a norm, and noise."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, PRNGKeyArray

from fedjax_mm.base import Params, Scalar
from fedjax_mm.base.sums import root


def clipped(update: Any, clip: Scalar) -> tuple[Any, Bool[Array, ""]]:
    """Clips an update to a norm, and also returns whether it was within the norm before.

    A non-finite update becomes 0, because no factor can scale it to the norm.
    """
    norm = root(optax.tree.norm(update, squared=True))
    is_finite, factor = jnp.isfinite(norm), jnp.minimum(1, clip / jnp.where(norm > 0, norm, 1))

    def shorten(x: Array) -> Array:
        return jnp.where(is_finite, x * factor.astype(x.dtype), jnp.zeros_like(x))

    return jax.tree.map(shorten, update), is_finite & (norm <= clip)


def check_real(params: Params) -> None:
    """Raises `ValueError` if parameters are complex, because the noise is real."""
    for leaf in jax.tree.leaves(params):
        if jnp.iscomplexobj(leaf):
            raise ValueError(
                f"private: the model has {leaf.dtype} parameters, but the noise is real; use real "
                "parameters, such as real and imaginary parts"
            )


def with_noise(rng_key: PRNGKeyArray, tree: Any, deviation: Scalar) -> Any:
    """Adds independent Gaussian noise to every array entry."""
    # Drawn in float32, the noise of a seed is the same with and without x64.
    drawn = optax.tree.random_like(rng_key, tree, jax.random.normal, jnp.float32)
    return jax.tree.map(lambda x, noise: x + (deviation * noise).astype(x.dtype), tree, drawn)
