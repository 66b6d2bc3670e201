"""Layers with fast gradients on CPUs and on GPUs, which are plain JAX operations elsewhere."""

# XLA's CPU compiler uses its matrix kernels for a convolution only if channels are the innermost
# dimension. The gradients are written here as channels-last convolutions, because JAX's are not,
# and XLA does not transpose them inside a loop. `sequential_vmap` computes one kernel at a time,
# because `jax.vmap` over clients with different kernels produces grouped convolutions, which are
# even slower. The gradients of `max_pool` and `matmul` access memory less often. On GPUs grouped
# convolutions are slow too, so that images are unfolded into patches, and clients are the batch of
# one matrix product.

from functools import partial, reduce
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float

Images: TypeAlias = Float[Array, "batch height width channels"]
Kernel: TypeAlias = Float[Array, "rows columns inputs features"]
Padding: TypeAlias = tuple[tuple[int, int], tuple[int, int]]  # zeros around rows and columns

CHANNEL_LAST = ("NHWC", "HWIO", "NHWC")

_ALIGNED = 8  # the inner dimension of a product on GPUs is a multiple of this
_MOST_OUTER_PRODUCTS = 16  # up to this number, outer products are faster than a matrix product


def conv_same(x: Images, kernel: Kernel) -> Float[Array, "batch height width features"]:
    """Convolves images with a kernel, with stride 1 and zero padding.

    Equal to ``lax.conv_general_dilated(x, kernel, (1, 1), "SAME")`` with channels last. On CPUs
    only first-order reverse-mode derivatives are supported.

    Args:
      x: the images.
      kernel: the weights by row, column, input channel and output feature.

    Returns:
      Features with the same rows and columns as `x`.

    Raises:
      ValueError: if the kernel's number of input channels differs from that of `x`.

    Example:
      >>> import jax.numpy as jnp
      >>> ones = conv_same(jnp.ones((1, 3, 3, 1)), jnp.ones((3, 3, 1, 1)))
      >>> ones[0, :, :, 0].tolist()
      [[4.0, 6.0, 4.0], [6.0, 9.0, 6.0], [4.0, 6.0, 4.0]]
    """
    rows, columns = kernel.shape[:2]
    around = ((rows - 1) // 2, rows // 2), ((columns - 1) // 2, columns // 2)
    return _convolved(x, kernel, around)


def conv_valid(
    x: Images, kernel: Kernel
) -> Float[Array, "batch fewer_rows fewer_columns features"]:
    """Convolves images with a kernel, with stride 1 and without padding.

    Equal to ``lax.conv_general_dilated(x, kernel, (1, 1), "VALID")`` with channels last, and
    otherwise as `conv_same`.

    Example:
      >>> import jax.numpy as jnp
      >>> conv_valid(jnp.ones((1, 3, 4, 1)), jnp.ones((3, 3, 1, 1)))[0, :, :, 0].tolist()
      [[9.0, 9.0]]
    """
    return _convolved(x, kernel, ((0, 0), (0, 0)))


def _convolved(x: Array, kernel: Array, padding: Padding) -> Array:
    if x.shape[3] != kernel.shape[2]:
        raise ValueError(
            f"x has {x.shape[3]} channels and the kernel is for {kernel.shape[2]}; "
            "give [batch, height, width, channels] and [rows, columns, channels, features]"
        )
    patches = partial(_conv_patches, padding=padding)
    return lax.platform_dependent(
        x,
        kernel,
        cpu=partial(_conv_cpu, padding),
        cuda=patches,
        rocm=patches,
        default=partial(_conv, padding=padding),
    )


def max_pool(x: Images) -> Float[Array, "batch half_height half_width channels"]:
    """Takes the maxima of 2 x 2 windows with stride 2.

    If the number of rows or columns is odd, the last windows are smaller. Tied maxima of a window
    share its gradient equally. On CPUs only reverse-mode derivatives are supported.

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
    """Computes ``x @ kernel``, with only reverse-mode derivatives on CPUs.

    Example:
      >>> import jax.numpy as jnp
      >>> matmul(jnp.ones((1, 2)), jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist()
      [[5.0, 7.0, 9.0]]
    """
    return lax.platform_dependent(x, kernel, cpu=_matmul_cpu, default=jnp.matmul)


def _conv(x: Array, kernel: Array, padding: Padding) -> Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=CHANNEL_LAST)


def _conv_patches(x: Array, kernel: Array, padding: Padding) -> Array:
    rows, columns, inputs, features = kernel.shape
    padded = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    height, width = padded.shape[1] - rows + 1, padded.shape[2] - columns + 1
    patches = [
        padded[:, row : row + height, column : column + width]
        for row in range(rows)
        for column in range(columns)
    ]
    matrix = kernel.reshape(rows * columns * inputs, features)
    # Fill up with zeros, because tensor cores read rows whose lengths are multiples of 16 bytes.
    fill = -len(matrix) % _ALIGNED
    patches.append(jnp.zeros((len(x), height, width, fill), x.dtype))
    return jnp.concatenate(patches, axis=3) @ jnp.pad(matrix, ((0, fill), (0, 0)))


def _forward(padding: Padding, x: Array, kernel: Array) -> Array:
    # Pad several channels with zeros to a multiple of four, because XLA convolves four channels
    # faster than three.
    fill = -x.shape[3] % 4 if x.shape[3] > 1 else 0
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, fill)))
    return _conv(x, jnp.pad(kernel, ((0, 0), (0, 0), (0, fill), (0, 0))), padding)


def _gradient_of_images(padding: Padding, gradient: Array, kernel: Array) -> Array:
    # Convolve the output gradient with the kernel rotated by 180 degrees.
    turned = kernel[::-1, ::-1].swapaxes(2, 3)
    rows, columns = (
        (size - 1 - before, size - 1 - after)
        for size, (before, after) in zip(kernel.shape[:2], padding, strict=True)
    )
    return _conv(gradient, turned, (rows, columns))


def _gradient_of_kernel(padding: Padding, x: Array, gradient: Array) -> Array:
    # Convolve every channel as an image, with the examples as its channels.
    images, filters = x.transpose(3, 1, 2, 0), gradient.transpose(1, 2, 0, 3)
    return _conv(images, filters, padding).transpose(1, 2, 0, 3)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv_cpu(padding: Padding, x: Array, kernel: Array) -> Array:
    return sequential_vmap(partial(_forward, padding))(x, kernel)


def _save(padding: Padding, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _conv_cpu(padding, x, kernel), (x, kernel)


def _pull_back(
    padding: Padding, saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    # Use two maps, so that XLA drops the unused gradient of the first layer's images.
    x, kernel = saved
    of_images, of_kernel = (
        sequential_vmap(partial(f, padding)) for f in (_gradient_of_images, _gradient_of_kernel)
    )
    return of_images(gradient, kernel), of_kernel(x, gradient)


_conv_cpu.defvjp(_save, _pull_back)


def _windows(x: Array) -> Float[Array, "batch half_height 2 half_width 2 channels"]:
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels)


def _pool(x: Array) -> Array:
    return _windows(x).max((2, 4))


@jax.custom_vjp
def _pool_cpu(x: Array) -> Array:
    return _pool(x)


def _save_images(x: Array) -> tuple[Array, Array]:
    return _pool(x), x


def _share_out(x: Array, gradient: Array) -> tuple[Array]:
    # JAX's gradient of a reduce-window is a select-and-scatter, which is slow on CPUs. Compute the
    # maxima again: XLA may recompute x, as after batch norm, and round it differently, so that no
    # corner equals a maximum of the forward pass.
    windows = _windows(x)
    corners = [windows[:, :, row, :, column] for row in range(2) for column in range(2)]
    maxima = reduce(jnp.maximum, corners)
    count = sum(((corner == maxima).astype(x.dtype) for corner in corners), jnp.zeros_like(maxima))
    is_maximum = windows == maxima[:, :, None, :, None]
    shares = jnp.where(is_maximum, (gradient / count)[:, :, None, :, None], 0)
    return (shares.reshape(x.shape),)


_pool_cpu.defvjp(_save_images, _share_out)


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
    # Use outer products, because XLA fuses them into the kernel update but writes a matrix product
    # to memory first.
    outer = [left[:, None] * right for left, right in zip(x, gradient, strict=True)]
    return gradient @ kernel.T, reduce(jnp.add, outer)


_matmul_cpu.defvjp(_save_factors, _sum_outer_products)
