"""Layers with fast gradients on CPUs, and with the plain operations on other platforms."""

# XLA's CPU compiler uses its matrix kernels for a convolution only if channels are the innermost
# dimension. The gradients are written here as channel-last convolutions, because JAX's are not, and
# XLA does not transpose them inside a loop. `sequential_vmap` computes one kernel after the other,
# because `jax.vmap` over clients, each with its own kernel, makes grouped convolutions, which are
# slower still. The gradients of `max_pool` and `matmul` read memory less often.

from functools import partial, reduce
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float

Images: TypeAlias = Float[Array, "batch height width channels"]
Kernel: TypeAlias = Float[Array, "rows columns inputs features"]
Padding: TypeAlias = Literal["SAME"] | list[tuple[int, int]]

CHANNEL_LAST = ("NHWC", "HWIO", "NHWC")

_MOST_OUTER_PRODUCTS = 16  # up to about this number they are faster than a matrix product


def conv_same(x: Images, kernel: Kernel) -> Float[Array, "batch height width features"]:
    """Returns the convolution of images with a kernel, stride 1, zeros around the image.

    Equal to ``lax.conv_general_dilated(x, kernel, (1, 1), "SAME")`` with channels last. On a CPU it
    has reverse-mode derivatives of first order only.

    Args:
      x: images.
      kernel: weights by row, column, channel of `x` and feature of the result.

    Returns:
      Features, with the rows and columns of `x`.

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


def max_pool(x: Images) -> Float[Array, "batch half_height half_width channels"]:
    """Returns the maxima of 2 x 2 windows with stride 2.

    A last odd row or column has smaller windows. Equal maxima of a window share its gradient
    equally. On a CPU it has reverse-mode derivatives only.

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
    """Returns ``x @ kernel``. On a CPU it has reverse-mode derivatives only.

    Example:
      >>> import jax.numpy as jnp
      >>> matmul(jnp.ones((1, 2)), jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist()
      [[5.0, 7.0, 9.0]]
    """
    return lax.platform_dependent(x, kernel, cpu=_matmul_cpu, default=jnp.matmul)


def _conv(x: Array, kernel: Array, padding: Padding = "SAME") -> Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=CHANNEL_LAST)


def _forward(x: Array, kernel: Array) -> Array:
    # Fill three channels with zeros, because XLA convolves four channels faster.
    fill = -x.shape[3] % 4 if x.shape[3] > 1 else 0
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, fill)))
    return _conv(x, jnp.pad(kernel, ((0, 0), (0, 0), (0, fill), (0, 0))))


def _gradient_of_images(gradient: Array, kernel: Array) -> Array:
    # The convolution of the result's gradient with the kernel rotated by half a turn.
    turned = kernel[::-1, ::-1].swapaxes(2, 3)
    padding = [(size // 2, (size - 1) // 2) for size in kernel.shape[:2]]
    return _conv(gradient, turned, padding)


def _gradient_of_kernel(size: tuple[int, ...], x: Array, gradient: Array) -> Array:
    # A convolution of every channel, as an image whose channels are the examples.
    images, filters = x.transpose(3, 1, 2, 0), gradient.transpose(1, 2, 0, 3)
    padding = [((n - 1) // 2, n // 2) for n in size]
    return _conv(images, filters, padding).transpose(1, 2, 0, 3)


@jax.custom_vjp
def _conv_cpu(x: Array, kernel: Array) -> Array:
    return sequential_vmap(_forward)(x, kernel)


def _save(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _conv_cpu(x, kernel), (x, kernel)


def _pull_back(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    # Use two maps, so that XLA drops the gradient of the first layer's images, which is not used.
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
    # JAX's gradient of a reduce-window is a select-and-scatter, which is slow on CPUs. The maxima's
    # places are computed again, because an array of them would be as large as x.
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
    # XLA fuses outer products into the kernel's update, but writes a matrix product to memory
    # first.
    outer = [left[:, None] * right for left, right in zip(x, gradient, strict=True)]
    return gradient @ kernel.T, reduce(jnp.add, outer)


_matmul_cpu.defvjp(_save_factors, _sum_outer_products)
