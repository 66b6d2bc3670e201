"""Layers compared with those of JAX and flax: values, gradients, batching, lowering."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from fedjax_mm import fedavg, full_participation, local_sgd, simulate
from fedjax_mm.data import digits, federate, partition
from fedjax_mm.tasks import classification, networks
from fedjax_mm.tasks.layers import conv_same, conv_valid, matmul, max_pool

SHAPES = {  # batch, height, width, channels; rows, columns, features
    "first layer": ((2, 8, 8, 1), (5, 5, 3)),
    "second layer": ((3, 6, 6, 4), (5, 5, 8)),
    "colors": ((2, 8, 8, 3), (3, 3, 4)),
    "two channels": ((2, 5, 4, 2), (3, 3, 3)),
    "odd image": ((2, 7, 5, 4), (3, 3, 2)),
    "flat kernel": ((2, 6, 7, 2), (1, 5, 3)),
    "even kernel": ((2, 6, 7, 2), (4, 2, 3)),
    "kernel larger than the image": ((1, 2, 3, 2), (5, 5, 2)),
    "one pixel": ((1, 1, 1, 1), (1, 1, 1)),
}
"""Shapes of images and kernels."""

every_shape = pytest.mark.parametrize(("images", "kernel"), SHAPES.values(), ids=SHAPES)
"""A test for each of SHAPES."""


def lax_conv(x, kernel, padding="SAME"):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def nn_pool(x):
    return nn.max_pool(x, (2, 2), (2, 2), "SAME")


def drawn(*shapes):
    rng = np.random.default_rng(1)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def full_shape(images, kernel):
    rows, columns, features = kernel
    return (rows, columns, images[3], features)


def gradients_of(function):
    """Maps arguments to the value, and to the gradients of its product with an asymmetric array."""
    return lambda *arguments: value_and_gradients(function, *arguments)


def both(one, other, *arguments):
    """Checks in one program that two functions agree."""
    close(*jax.jit(lambda *a: [f(*a) for f in (one, other)])(*arguments))


def value_and_gradients(function, *arguments):
    value, vjp = jax.vjp(function, *arguments)
    direction = jnp.cos(jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape)
    # adding 0 times the value makes it vary over devices like the value
    return value, *vjp(direction + 0 * value)


def scanned(function):
    """Applies `function` to the rows of its arguments in turn."""
    return lambda *rows: lax.map(lambda row: function(*row), rows)


def close(got, want):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@every_shape
def test_values_and_gradients(images, kernel):
    """The layer is applied to one client, and to several with `vmap` and with `lax.map`."""
    x, kernels = drawn((3, *images), (3, *full_shape(images, kernel)))
    ours, theirs = gradients_of(conv_same), gradients_of(lax_conv)

    @jax.jit
    def all_of_them(x, kernels):
        alone = [theirs(*one) for one in zip(x, kernels, strict=True)]
        together = [over(ours)(x, kernels) for over in (jax.vmap, scanned)]
        return alone, ours(x[0], kernels[0]), together

    want, first, together = jax.device_get(all_of_them(x, kernels))
    close(first, want[0])
    for got in together:
        close(got, [np.stack(rows) for rows in zip(*want, strict=True)])


@pytest.mark.parametrize("name", ["colors", "odd image", "even kernel", "one pixel"])
def test_without_padding(name):
    images, kernel = SHAPES[name]
    arguments = drawn((2, *images), (2, *full_shape(images, kernel)))
    plain = partial(lax_conv, padding="VALID")
    both(*(jax.vmap(gradients_of(f)) for f in (conv_valid, plain)), *arguments)


@pytest.mark.parametrize("axes", [(0, None), (None, 0)])
def test_images_or_kernel_may_be_shared(axes):
    arguments = drawn((2, 5, 5, 2), (3, 3, 2, 4))
    stacked = [np.stack([a, 2 * a]) if n == 0 else a for a, n in zip(arguments, axes, strict=True)]
    both(*(jax.vmap(gradients_of(f), axes) for f in (conv_same, lax_conv)), *stacked)


def test_nested_vmap():
    arguments = drawn((2, 3, 2, 5, 5, 2), (2, 3, 3, 3, 2, 4))
    both(*(jax.vmap(jax.vmap(gradients_of(f))) for f in (conv_same, lax_conv)), *arguments)


def test_clients_are_looped_over_on_cpus_and_batched_elsewhere():
    x, kernels = drawn((3, 2, 5, 5, 2), (3, 3, 3, 2, 4))
    program = jax.jit(jax.vmap(conv_same)).trace(x, kernels)
    cpu, gpu, tpu = (
        program.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda", "tpu")
    )
    assert "stablehlo.while" in cpu
    assert "feature_group_count = 1 " in cpu
    assert "stablehlo.while" not in gpu
    assert "convolution" not in gpu  # one product of patches with a batch axis of clients
    assert "batching_dims = [0] x [0]" in gpu
    assert "feature_group_count = 3 " in tpu


def test_shard_map():
    x, kernels = drawn((4, 2, 5, 5, 2), (4, 3, 3, 2, 4))
    mesh = jax.make_mesh((2,), ("c",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows = PartitionSpec("c")

    def shared_out(function):
        over = scanned(gradients_of(function))
        return jax.jit(jax.shard_map(over, mesh=mesh, in_specs=rows, out_specs=rows))

    close(shared_out(conv_same)(x, kernels), shared_out(lax_conv)(x, kernels))


def test_double_precision(x64):
    x, kernel = (jnp.asarray(a, float) for a in drawn((2, 5, 5, 3), (3, 3, 3, 4)))
    assert conv_same(x, kernel).dtype == float
    np.testing.assert_allclose(conv_same(x, kernel), lax_conv(x, kernel), rtol=1e-12)


@pytest.mark.parametrize(
    "images", [(2, 4, 6, 3), (1, 5, 7, 2), (2, 5, 4, 1), (1, 1, 1, 1), (2, 21, 21, 2)]
)
def test_max_pool(images):
    (x,) = drawn(images)

    @jax.jit
    def pooled(x):
        got, want = gradients_of(max_pool), gradients_of(nn_pool)
        stacked = jnp.stack([x, -x])
        return [
            (got(x - 9), want(x - 9)),
            *((over(got)(stacked), over(want)(stacked)) for over in (jax.vmap, scanned)),
        ]

    for got, want in pooled(x):
        close(got, want)


def test_equal_maxima_share_the_gradient():
    gradient = jax.jit(jax.grad(lambda x: max_pool(x).sum()))(np.zeros((1, 2, 3, 1)))
    assert gradient[0, :, :, 0].tolist() == [[0.25, 0.25, 0.5], [0.25, 0.25, 0.5]]


def test_max_pool_after_batch_norm_trains_as_that_of_flax(monkeypatch):
    """XLA computes normed images again in each fusion, and rounds them differently."""
    pool = digits()
    data = federate(pool, partition.iid(pool.train[1], 20))
    local, losses = local_sgd(0.1, epochs=1, batch_size=16), []
    for block_size, layer in enumerate((max_pool, nn_pool), start=64):  # so that each is compiled
        monkeypatch.setattr(networks, "max_pool", layer)
        module = networks.BatchNormCNN(10)
        task = classification(data, module, scale=1 / 255, block_size=block_size)
        _, trace = simulate(0, task, fedavg(local), full_participation(20), 1, client_map=4)
        losses.append(trace.metrics["loss"])
    close(*losses)


@pytest.mark.parametrize("batch", [1, 3, 16, 17])
def test_matmul(batch, x64):
    x, kernel = (a.astype(float) for a in drawn((2, batch, 4), (2, 4, 5)))
    assert jax.eval_shape(matmul, x[0], kernel[0]).dtype == float

    @jax.jit
    def products(*arguments):
        layers = gradients_of(matmul), gradients_of(jnp.matmul)
        return [[over(f)(*arguments) for f in layers] for over in (jax.vmap, scanned)]

    for got, want in products(x, kernel):
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("layer", "shapes"), [(matmul, ((3, 4), (4, 5))), (max_pool, ((2, 4, 4, 3),))]
)
def test_second_derivatives_and_lowering_on_gpus(layer, shapes):
    arguments = drawn(*shapes)
    plain = nn_pool if layer is max_pool else jnp.matmul

    def of_squared_gradient(f):
        return jax.grad(lambda *a: (jax.grad(lambda *b: (f(*b) ** 3).sum())(*a) ** 2).sum())

    both_of_them = jax.jit(lambda *a: [of_squared_gradient(f)(*a) for f in (layer, plain)])
    got, want = both_of_them(*arguments)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    program = jax.jit(jax.grad(lambda *a: layer(*a).sum())).trace(*arguments)
    cpu, gpu = (program.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda"))
    assert cpu != gpu


def test_wrong_shapes():
    with pytest.raises(ValueError, match="2 channels and the kernel is for 1"):
        conv_same(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 1, 2)))
