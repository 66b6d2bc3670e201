"""Layers whose gradients are fast on CPUs, also in a loop over clients.

XLA's CPU compiler hands a convolution to its matrix kernels only if the channels are the innermost
dimension. The gradients that JAX derives are not of that form, and inside a loop they are not
brought into it; under `jax.vmap` over clients, who have a kernel each, all three convolutions
become grouped ones, which are slower still. Here the two gradients are written as channel-last
convolutions, and a batch of kernels is computed one after the other. The gradients of maxima and of
products with large matrices are written so that they go through memory less often.

Other platforms get the plain operations.
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float

CHANNEL_LAST = ("NHWC", "HWIO", "NHWC")

_MOST_OUTER_PRODUCTS = 16  # they cost in proportion to their number; ten beat a product


def conv_same(
    x: Float[Array, "batch height width channels"],
    kernel: Float[Array, "rows columns inputs features"],
) -> Float[Array, "batch height width features"]:
    """The convolution of images with a kernel, stride 1, zeros around the image.

    Exactly ``lax.conv_general_dilated(x, kernel, (1, 1), "SAME")`` with channels last. On a CPU it
    has reverse-mode derivatives of first order only.

    Args:
      x: images.
      kernel: its offsets, the channels of `x` (inputs) and the features of the result.

    Returns:
      As many rows and columns as `x` has.

    Raises:
      ValueError: if the kernel is for another number of channels.

    Example:
      >>> import jax.numpy as jnp
      >>> ones = conv_same(jnp.ones((1, 3, 3, 1)), jnp.ones((3, 3, 1, 1)))
      >>> ones[0, :, :, 0].tolist()
      [[4.0, 6.0, 4.0], [6.0, 9.0, 6.0], [4.0, 6.0, 4.0]]
    """
    if x.shape[3] != kernel.shape[2]:
        raise ValueError(
            f"x has {x.shape[3]} channels and the kernel is for {kernel.shape[2]}; "
            "give [batch, height, width, channels] and [rows, columns, channels, features]"
        )
    return lax.platform_dependent(x, kernel, cpu=_conv_cpu, default=_conv)


def max_pool(
    x: Float[Array, "batch height width channels"],
) -> Float[Array, "batch half_height half_width channels"]:
    """The maxima of 2 x 2 windows with stride 2; a last odd row or column is a window of its own.

    Equal maxima of a window share its gradient equally. (That of a reduce-window goes to the first,
    by a select-and-scatter, which is slow on CPUs.) On a CPU it has reverse-mode derivatives only.

    Example:
      >>> import jax.numpy as jnp
      >>> max_pool(jnp.arange(9.0).reshape(1, 3, 3, 1))[0, :, :, 0].tolist()
      [[4.0, 5.0], [7.0, 8.0]]
    """
    odd = ((0, 0), (0, x.shape[1] % 2), (0, x.shape[2] % 2), (0, 0))
    x = jnp.pad(x, odd, constant_values=-jnp.inf)
    return lax.platform_dependent(x, cpu=_pool_cpu, default=_pool)


def matmul(
    x: Float[Array, "batch inputs"], kernel: Float[Array, "inputs outputs"]
) -> Float[Array, "batch outputs"]:
    """``x @ kernel``; a CPU computes the gradient of a kernel while it updates the kernel.

    On a CPU it has reverse-mode derivatives only.

    Example:
      >>> import jax.numpy as jnp
      >>> matmul(jnp.ones((1, 2)), jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist()
      [[5.0, 7.0, 9.0]]
    """
    return lax.platform_dependent(x, kernel, cpu=_matmul_cpu, default=jnp.matmul)


def _conv(x: Array, kernel: Array) -> Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=CHANNEL_LAST)


def _forward(x: Array, kernel: Array) -> Array:
    """The convolution; three channels are filled up to four, which XLA computes faster."""
    fill = -x.shape[3] % 4 if x.shape[3] > 1 else 0
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, fill)))
    return _conv(x, jnp.pad(kernel, ((0, 0), (0, 0), (0, fill), (0, 0))))


def _gradient_of_images(gradient: Array, kernel: Array) -> Array:
    """The convolution of the result's gradient with the kernel turned by half a turn."""
    turned = kernel[::-1, ::-1].swapaxes(2, 3)
    padding = [(size // 2, (size - 1) // 2) for size in kernel.shape[:2]]
    return lax.conv_general_dilated(
        gradient, turned, (1, 1), padding, dimension_numbers=CHANNEL_LAST
    )


def _gradient_of_kernel(size: tuple[int, ...], x: Array, gradient: Array) -> Array:
    """A convolution of every channel, as an image with one channel for each example."""
    images, filters = x.transpose(3, 1, 2, 0), gradient.transpose(1, 2, 0, 3)
    padding = [((n - 1) // 2, n // 2) for n in size]
    conv = lax.conv_general_dilated(
        images, filters, (1, 1), padding, dimension_numbers=CHANNEL_LAST
    )
    return conv.transpose(1, 2, 0, 3)


@jax.custom_vjp
def _conv_cpu(x: Array, kernel: Array) -> Array:
    return sequential_vmap(_forward)(x, kernel)


def _save(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _conv_cpu(x, kernel), (x, kernel)


def _pull_back(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    # Apart, because the first layer's images need no gradient, and XLA then drops it.
    x, kernel = saved
    of_kernel = sequential_vmap(partial(_gradient_of_kernel, kernel.shape[:2]))
    return sequential_vmap(_gradient_of_images)(gradient, kernel), of_kernel(x, gradient)


_conv_cpu.defvjp(_save, _pull_back)


def _windows(x: Array) -> Float[Array, "batch half_height 2 half_width 2 channels"]:
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels)


def _pool(x: Array) -> Array:
    return _windows(x).max((2, 4))


@jax.custom_vjp
def _pool_cpu(x: Array) -> Array:
    return _pool(x)


def _save_maxima(x: Array) -> tuple[Array, tuple[Array, Array]]:
    maxima = _pool(x)
    return maxima, (x, maxima)


def _share_out(saved: tuple[Array, Array], gradient: Array) -> tuple[Array]:
    # Without an array, of the size of x, that says where the maxima are.
    x, maxima = saved
    windows = _windows(x)
    corners = [windows[:, :, row, :, column] for row in range(2) for column in range(2)]
    count = sum(((corner == maxima).astype(x.dtype) for corner in corners), jnp.zeros_like(maxima))
    is_maximum = windows == maxima[:, :, None, :, None]
    shares = jnp.where(is_maximum, (gradient / count)[:, :, None, :, None], 0)
    return (shares.reshape(x.shape),)


_pool_cpu.defvjp(_save_maxima, _share_out)


@jax.custom_vjp
def _matmul_cpu(x: Array, kernel: Array) -> Array:
    return x @ kernel


def _save_factors(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ kernel, (x, kernel)


def _sum_outer_products(
    saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, Float[Array, "inputs outputs"]]:
    x, kernel = saved
    if len(x) > _MOST_OUTER_PRODUCTS:
        return gradient @ kernel.T, x.T @ gradient
    # Unlike a product, XLA computes these entries where they are used.
    outer = [left[:, None] * right for left, right in zip(x, gradient, strict=True)]
    return gradient @ kernel.T, reduce(jnp.add, outer)


_matmul_cpu.defvjp(_save_factors, _sum_outer_products)
