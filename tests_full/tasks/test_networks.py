"""Networks compared with NumPy, their sizes, and their options."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax

from fedjax_mm.tasks.networks import (
    MLP,
    CelebACNN,
    CharacterGRU,
    LogisticRegression,
    McMahanCNN,
    ReddiCNN,
    glorot_uniform,
)
from tests.compiling import optimised

NETWORKS = {  # module, shape of one example, number of parameters
    "logistic regression": (LogisticRegression(5), (60,), 60 * 5 + 5),
    "logistic regression of images": (LogisticRegression(3), (4, 4, 1), 16 * 3 + 3),
    "MLP": (MLP(10), (28, 28, 1), 784 * 64 + 64 + 64 * 30 + 30 + 30 * 10 + 10),
    "MLP for tweets": (MLP(2, hidden=(128, 86, 30)), (200,), 39_494),
    "McMahan's CNN": (McMahanCNN(), (28, 28, 1), 1_663_370),
    "McMahan's CNN of colors": (McMahanCNN(), (32, 32, 3), 2_156_490),
    "Reddi's CNN": (ReddiCNN(62), (28, 28, 1), 1_206_590),
    "Reddi's CNN of colors": (ReddiCNN(), (32, 32, 3), 1_626_442),
    "CelebA's CNN": (CelebACNN(), (84, 84, 3), 31_074),
    "GRU of characters": (CharacterGRU(), (80,), 640 + 3 * 8 * 128 + 3 * 128**2 + 512 + 10_320),
}
"""Every network. CelebA's: 864 + 3 * 9,216 of kernels, 4 * 64 of batch norm, 2,306 of the last."""

every_network = pytest.mark.parametrize(
    ("module", "shape", "count"), NETWORKS.values(), ids=NETWORKS
)
"""A test for each of NETWORKS."""


def setup(module, shape, batch=3):
    """Parameters with nonzero biases, and examples."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(batch, *shape)).astype(np.float32)
    params = jax.device_get(jax.jit(module.init)(jax.random.key(0), x)["params"])
    noisy = [p + 0.1 * rng.normal(size=p.shape).astype(np.float32) for p in jax.tree.leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), noisy), x


@functools.partial(jax.jit, static_argnums=0)
def applied(module, params, x, *args, rngs=None):
    return module.apply({"params": params}, x, *args, rngs=rngs)


def arrays(params):
    """Maps the path of every leaf to a float64 array."""
    leaves, _ = jax.tree.flatten_with_path(params)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf, float)
        for path, leaf in leaves
    }


@every_network
def test_sizes_and_shapes(module, shape, count):
    variables = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((1, *shape)))
    assert set(variables) == {"params"}
    assert sum(leaf.size for leaf in jax.tree.leaves(variables)) == count
    logits = jax.eval_shape(module.apply, variables, jnp.ones((2, *shape)))
    assert logits.shape == (2, module.num_classes)
    assert logits.dtype == jnp.float32


@every_network
def test_modules_are_static(module, shape, count):
    assert hash(module) == hash(module.clone())
    assert module == module.clone()
    assert module != module.clone(num_classes=module.num_classes + 1)


@every_network
def test_weights_start_glorot_uniform_and_biases_at_zero(module, shape, count):
    params = jax.jit(module.init)(jax.random.key(1), np.ones((1, *shape), np.float32))["params"]
    for path, leaf in arrays(params).items():
        if path.endswith(("kernel", "embedding")):
            fans = np.prod(leaf.shape[:-2]) * np.add(*leaf.shape[-2:])
            limit = np.sqrt(6 / fans)
            assert np.abs(leaf).max() <= limit
            # 4 standard errors of the mean square, whose expectation is limit^2 / 3.
            error = 4 * limit**2 * np.sqrt(4 / 45 / leaf.size)
            assert np.mean(leaf**2) == pytest.approx(limit**2 / 3, abs=error)
        else:
            assert (leaf == path.endswith("scale")).all()


@pytest.mark.parametrize("sigmoid_head", [False, True])
def test_logistic_regression_agrees_with_numpy(sigmoid_head):
    module = LogisticRegression(4, sigmoid_head)
    params, x = setup(module, (6,))
    p = arrays(params)
    (weights,) = [leaf for path, leaf in p.items() if path.endswith("kernel")]
    (bias,) = [leaf for path, leaf in p.items() if path.endswith("bias")]
    want = np.asarray(x, float) @ weights.T + bias
    if sigmoid_head:
        want = 1 / (1 + np.exp(-want))
    np.testing.assert_allclose(applied(module, params, x), want, rtol=1e-5, atol=1e-6)


def test_mlp_agrees_with_numpy():
    module = MLP(4, hidden=(7, 5))
    params, x = setup(module, (3, 2))
    p = arrays(params)
    hidden = np.asarray(x, float).reshape(3, 6)
    for layer in ("dense1", "dense2"):
        hidden = np.maximum(hidden @ p[f"{layer}/kernel"].T + p[f"{layer}/bias"], 0)
    want = hidden @ p["classes/kernel"].T + p["classes/bias"]
    np.testing.assert_allclose(applied(module, params, x), want, rtol=1e-5, atol=1e-6)


def test_mcmahans_cnn_takes_other_widths():
    small = McMahanCNN(2, (8, 16), 64)
    shapes = jax.eval_shape(small.init, jax.random.key(0), jnp.ones((1, 28, 28, 1)))
    kernels = 25 * 8 + 25 * 8 * 16 + 7 * 7 * 16 * 64 + 64 * 2
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == kernels + 8 + 16 + 64 + 2


def lax_conv(x, kernel, padding="SAME"):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def lax_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")


def test_mcmahans_cnn_applies_relu_before_pooling():
    module = McMahanCNN()
    params, x = setup(module, (9, 8, 2))
    p = {path: leaf.astype(np.float32) for path, leaf in arrays(params).items()}

    @jax.jit
    def by_hand(p, x):
        for n in (1, 2):
            x = lax_conv(x, p[f"convolution{n}/kernel"]) + p[f"bias{n}/bias"]
            x = lax_pool(jax.nn.relu(x))
        x = x.reshape(3, -1) @ p["dense/kernel"] + p["dense/bias"]
        return jax.nn.relu(x) @ p["classes/kernel"] + p["classes/bias"]

    want = by_hand(p, x)
    np.testing.assert_allclose(applied(module, params, x), want, rtol=1e-4, atol=1e-4)


def test_reddis_cnn_pools_once_and_drops_units_twice():
    module = ReddiCNN(3, (2, 4), 5)
    params, x = setup(module, (9, 8, 2))
    p = {path: leaf.astype(np.float32) for path, leaf in arrays(params).items()}

    @jax.jit
    def by_hand(p, x):
        for n in (1, 2):
            x = lax_conv(x, p[f"convolution{n}/kernel"], "VALID") + p[f"bias{n}/bias"]
            x = jax.nn.relu(x)
        x = lax_pool(x).reshape(3, -1) @ p["dense/kernel"] + p["dense/bias"]
        return jax.nn.relu(x) @ p["classes/kernel"] + p["classes/bias"]

    want = by_hand(p, x)
    np.testing.assert_allclose(applied(module, params, x), want, rtol=1e-5, atol=1e-5)
    keys = {"dropout": jax.random.key(0)}
    np.testing.assert_array_equal(applied(module, params, x, rngs=keys), applied(module, params, x))
    for rates in ({"dropout_rate": 0.5}, {"dense_dropout_rate": 0.5}):
        dropping = module.clone(**rates)
        np.testing.assert_array_equal(applied(dropping, params, x), applied(module, params, x))
        assert np.all(applied(dropping, params, x, rngs=keys) != applied(module, params, x))


def test_celebas_cnn_normalizes_by_batch_statistics():
    module = CelebACNN()
    params, x = setup(module, (9, 12, 3))
    p = arrays(params)

    @jax.jit
    def by_hand(p, x):
        for n in (1, 2, 3, 4):
            x = lax_conv(x, p[f"convolution{n}/kernel"])
            x = (x - x.mean((0, 1, 2))) / jnp.sqrt(x.var((0, 1, 2)) + 1e-3)
            x = x * p[f"norm{n}/scale"] + p[f"norm{n}/_Bias_0/bias"]
            x = jnp.maximum(lax_pool(x), 0)
        return x.reshape(3, -1) @ p["classes/kernel"] + p["classes/bias"]

    with jax.enable_x64(True):
        want = by_hand(p, x.astype(float))
    np.testing.assert_allclose(applied(module, params, x), want, rtol=1e-3, atol=1e-3)


def test_the_gru_agrees_with_numpy():
    """As in Cho et al., z keeps the state and r resets it, here after the matrix product."""
    module = CharacterGRU(5, embedding=3, hidden=4)
    params, _ = setup(module, (7,))
    p = arrays(params)
    x = np.random.default_rng(0).integers(5, size=(6, 7))

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    want = []
    for text in x:
        h = np.zeros(4)
        for character in text:
            v = p["characters/embedding"][character]
            gate = {g: v @ p[f"gru/i{g}/kernel"] + p[f"gru/i{g}/bias"] for g in "rzn"}
            r = sigmoid(gate["r"] + h @ p["gru/hr/kernel"])
            z = sigmoid(gate["z"] + h @ p["gru/hz/kernel"])
            n = np.tanh(gate["n"] + r * (h @ p["gru/hn/kernel"] + p["gru/hn/bias"]))
            h = (1 - z) * n + z * h
        want.append(h @ p["classes/kernel"] + p["classes/bias"])
    np.testing.assert_allclose(applied(module, params, x.astype(float)), want, rtol=1e-4, atol=1e-5)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda leaf: np.asarray(leaf, float), params)
        got = applied(module, exact, x.astype(float))
    np.testing.assert_allclose(got, want, rtol=1e-10)


@functools.cache
def padded_cnn():
    """Parameters, examples, a program for the loss and its gradient, and their values."""
    module = CelebACNN()

    def loss(params, x, weights=None):
        return (module.apply({"params": params}, x, weights)[:3] ** 2).sum()

    run = jax.jit(jax.value_and_grad(loss))
    params, x = setup(module, (8, 8, 3))
    with optimised():  # otherwise XLA's gradients of tiny images have NaN, even without padding
        return params, x, run, run(params, x)


@pytest.mark.parametrize("padding", [7.0, np.nan, np.inf])
def test_padding_rows_do_not_change_loss_and_gradient(padding):
    params, x, run, (want, want_gradient) = padded_cnn()
    padded = np.concatenate([x, np.full((2, 8, 8, 3), padding, np.float32)])
    with optimised():
        got, gradient = run(params, padded, np.array([0.2, 0.5, 0.3, 0, 0], np.float32))
    assert got == pytest.approx(float(want), rel=1e-5)
    if np.isfinite(padding):  # gradients contain products 0 * NaN
        for one, other in zip(*map(jax.tree.leaves, (gradient, want_gradient)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    assert np.isfinite(applied(CelebACNN(), params, x, np.zeros(3, np.float32))).all()


def test_dropout_needs_a_key_and_a_rate():
    (params, x), module, half = setup(MLP(3), (20,)), MLP(3), MLP(3, dropout_rate=0.5)
    keys = [{"dropout": jax.random.key(n)} for n in range(2)]
    plain = np.asarray(applied(module, params, x))
    np.testing.assert_array_equal(applied(half, params, x), plain)
    np.testing.assert_array_equal(applied(module, params, x, rngs=keys[0]), plain)
    first, again, other = (np.asarray(applied(half, params, x, rngs=keys[n])) for n in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()
    assert (first != plain).any()


def test_dropout_keeps_the_mean_of_the_first_hidden_layer():
    module = MLP(3, hidden=(64,), dropout_rate=0.25)
    params, x = setup(module, (20,), batch=1)
    keys = jax.random.split(jax.random.key(3), 4000)
    draws = jax.vmap(lambda key: applied(module, params, x, rngs={"dropout": key})[0])
    logits = np.asarray(jax.jit(draws)(keys))
    error = 4 * logits.std(0) / np.sqrt(len(keys))
    assert (np.abs(logits.mean(0) - applied(module, params, x)[0]) < error).all()


@pytest.mark.parametrize("sigmoid_head", [False, True])
def test_vmap_over_clients_equals_a_loop(sigmoid_head):
    module = LogisticRegression(4, sigmoid_head)
    params, x = setup(module, (6,), batch=12)
    x, labels = x.reshape(3, 4, 6), np.arange(12).reshape(3, 4) % 4

    def loss(params, x, labels):
        logits = module.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()

    gradient = jax.jit(jax.grad(loss))
    got = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))(params, x, labels)
    want = [gradient(params, *one) for one in zip(x, labels, strict=True)]
    want = jax.tree.map(lambda *rows: np.stack(rows), *want)
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(10, 64), (5, 5, 3, 32)])
def test_initial_weights_equal_those_of_flax(shape):
    theirs = nn.initializers.glorot_uniform()(jax.random.key(3), shape)
    np.testing.assert_array_equal(glorot_uniform(jax.random.key(3), shape), theirs)
