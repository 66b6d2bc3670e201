"""The papers' classifiers as flax modules: ``module.apply({"params": params}, x) -> logits``.

Initial weights are Glorot-uniform and biases are 0, as in LEAF's reference code (TensorFlow's
defaults) and in TensorFlow Federated's version of McMahan's network. A module is static and
hashable, and its parameters are in `params`.

Networks sow the inputs of their last layer as ``representation``, which `moon` uses.

Axes:  ``batch`` examples · ``...`` the features of one example · ``classes`` C
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from fedjax_mm.tasks.layers import Images, conv_same, conv_valid, matmul, max_pool

Logits: TypeAlias = Float[Array, "batch classes"]


def glorot_uniform(rng_key: PRNGKeyArray, shape: Sequence[int], dtype: Any = float) -> Array:
    """Glorot-uniform initializer with inputs and outputs on the last two axes, in either order."""
    spread = math.prod(shape[:-2]) * (shape[-2] + shape[-1])
    # Draw a flat array, because XLA unrolls the rows of a matrix, which takes a fifth of a linear
    # model's compile time.
    flat = jax.random.uniform(rng_key, (math.prod(shape),), dtype, -1)
    return (flat * jnp.sqrt(3 * jnp.array(2 / spread, dtype))).reshape(shape)


class LogisticRegression(nn.Module):
    """Logits ``W x + b``, or ``sigmoid(W x + b)``.

    Attributes:
      num_classes: C, the number of classes.
      sigmoid_head: whether to apply a sigmoid to the logits before the softmax, as in LEAF. The
        logits are then between 0 and 1, and the cross-entropy has a positive lower bound.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> module = LogisticRegression(5)
      >>> params = module.init(jax.random.key(0), jnp.ones((1, 60)))["params"]
      >>> module.apply({"params": params}, jnp.ones((20, 60))).shape
      (20, 5)

    Reference: Caldas et al. (2018), LEAF, the synthetic data set.
    """

    num_classes: int
    sigmoid_head: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "batch ..."]) -> Logits:
        """Computes the logits."""
        logits = _Dense(self.num_classes, name="classes")(_flat(x))
        return nn.sigmoid(logits) if self.sigmoid_head else logits


class MLP(nn.Module):
    """Dense layers with ReLU, and dropout after the first one.

    Attributes:
      num_classes: C, the number of classes.
      hidden: the width of each hidden layer.
      dropout_rate: the probability that a unit of the first hidden layer is set to 0, while other
        units are scaled up. Units are dropped only if a key is given, as in
        ``module.apply({"params": params}, x, rngs={"dropout": rng_key})``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> module, x = MLP(10, dropout_rate=0.5), jnp.ones((2, 28, 28, 1))
      >>> params = module.init(jax.random.key(0), x)["params"]
      >>> module.apply({"params": params}, x, rngs={"dropout": jax.random.key(1)}).shape
      (2, 10)
      >>> sum(leaf.size for leaf in jax.tree.leaves(params))  # 784-64-30-10
      52500

    Reference: Cho et al., appendix D; Srivastava et al. (2014), dropout.
    """

    num_classes: int
    hidden: tuple[int, ...] = (64, 30)
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, x: Float[Array, "batch ..."]) -> Logits:
        """Computes the logits, with dropout if a ``"dropout"`` key is given."""
        x = _flat(x)
        for layer, width in enumerate(self.hidden):
            x = nn.relu(_Dense(width, name=f"dense{layer + 1}")(x))
            if layer == 0:
                training = self.has_rng("dropout") and not self.is_initializing()
                x = nn.Dropout(self.dropout_rate, deterministic=not training)(x)
        self.sow("intermediates", "representation", x)
        return _Dense(self.num_classes, name="classes")(x)


class McMahanCNN(nn.Module):
    """Two 5 x 5 convolutions with 32 and 64 features, ReLU and pooling, and a layer of 512 units.

    Images may have any size. For 28 x 28 x 1 the network has 1,663,370 parameters, as published.

    Attributes:
      num_classes: C, the number of classes.
      features: the number of features of each convolution; McMahan et al. use two convolutions.
      width: the number of units of the dense layer.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> module, x = McMahanCNN(), jnp.ones((1, 28, 28, 1))
      >>> params = module.init(jax.random.key(0), x)["params"]
      >>> sum(leaf.size for leaf in jax.tree.leaves(params))
      1663370

    Reference: McMahan et al. (2017).
    """

    num_classes: int = 10
    features: tuple[int, ...] = (32, 64)
    width: int = 512

    @nn.compact
    def __call__(self, x: Images) -> Logits:
        """Computes the logits."""
        x = _channels_last(x)
        for layer, features in enumerate(self.features, start=1):
            # Pool before bias and ReLU, because they commute with maxima and then process only a
            # quarter of the data.
            x = max_pool(_Convolution(features, 5, name=f"convolution{layer}")(x))
            x = nn.relu(_Bias(name=f"bias{layer}")(x))
        x = nn.relu(_LargeDense(self.width, name="dense")(_flat(x)))
        self.sow("intermediates", "representation", x)
        return _dense(self.num_classes, "classes")(x)


class ReddiCNN(nn.Module):
    """Two 3 x 3 convolutions with 32 and 64 features, pooling, and a layer of 128 units.

    Convolutions have no padding, and only the second one is followed by pooling. Units are dropped
    after pooling and after the dense layer, if a key is given as for `MLP`. For 28 x 28 x 1 and 62
    classes the network has 1,206,590 parameters, as published.

    Attributes:
      num_classes: C, the number of classes.
      features: the number of features of each convolution.
      width: the number of units of the dense layer.
      dropout_rate: the probability that a unit after pooling is set to 0.
      dense_dropout_rate: the probability that a unit of the dense layer is set to 0.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> module, x = ReddiCNN(62), jnp.ones((1, 28, 28, 1))
      >>> params = module.init(jax.random.key(0), x)["params"]
      >>> sum(leaf.size for leaf in jax.tree.leaves(params))
      1206590

    Reference: Reddi et al. (2021), Adaptive Federated Optimization, EMNIST.
    """

    num_classes: int = 10
    features: tuple[int, ...] = (32, 64)
    width: int = 128
    dropout_rate: float = 0.0
    dense_dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, x: Images) -> Logits:
        """Computes the logits, with dropout if a ``"dropout"`` key is given."""
        x = _channels_last(x)
        is_kept = not self.has_rng("dropout") or self.is_initializing()
        for layer, features in enumerate(self.features, start=1):
            x = _Convolution(features, 3, "VALID", name=f"convolution{layer}")(x)
            x = max_pool(x) if layer == len(self.features) else x
            x = nn.relu(_Bias(name=f"bias{layer}")(x))
        x = nn.Dropout(self.dropout_rate, deterministic=is_kept)(_flat(x))
        x = nn.relu(_LargeDense(self.width, name="dense")(x))
        x = nn.Dropout(self.dense_dropout_rate, deterministic=is_kept)(x)
        self.sow("intermediates", "representation", x)
        return _dense(self.num_classes, "classes")(x)


class CelebACNN(nn.Module):
    """Four blocks of [3 x 3 convolution, batch norm, max-pooling, ReLU], and a dense layer.

    Convolutions have 32 features and no bias, because batch norm would subtract it. Batch norm uses
    the batch's mean and variance in both training and testing, as in LEAF, without running
    averages.

    Attributes:
      num_classes: C, the number of classes.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> module, x = CelebACNN(), jnp.ones((3, 84, 84, 3))
      >>> params = module.init(jax.random.key(0), x)["params"]
      >>> module.apply({"params": params}, x, jnp.array([0.5, 0.5, 0.0])).shape
      (3, 2)

    Reference: Caldas et al. (2018), LEAF, CelebA; Ioffe and Szegedy (2015), batch norm.
    """

    num_classes: int = 2

    @nn.compact
    def __call__(self, x: Images, weights: Float[Array, " batch"] | None = None) -> Logits:
        """Computes the logits, with batch statistics that ignore rows of weight 0."""
        x = _channels_last(x)
        for layer in range(1, 5):
            x = _Convolution(32, 3, name=f"convolution{layer}")(x)
            x = _BatchNorm(name=f"norm{layer}")(x, weights)
            x = nn.relu(max_pool(x))
        x = _flat(x)
        self.sow("intermediates", "representation", x)
        return _dense(self.num_classes, "classes")(x)


class BatchNormCNN(nn.Module):
    """Two blocks of [3 x 3 convolution, batch norm, ReLU, max-pooling], and a dense layer.

    Batch norm uses the batch's mean and variance in training, and running ones in testing. These
    are part of the parameters, see `classification`. Clients keep their own norms, as in FedBN, by
    ``personal(algorithm, where="norm")``. Convolutions have no bias, because batch norm would
    subtract it.

    Attributes:
      num_classes: C, the number of classes.
      features: the number of features of each convolution.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> module, x = BatchNormCNN(), jnp.ones((3, 8, 8, 1))
      >>> variables = module.init(jax.random.key(0), x)
      >>> module.apply(variables, x).shape
      (3, 10)
      >>> sorted(variables["batch_stats"]["block1"]["norm"])
      ['mean', 'var']

    Reference: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch
    Normalization" (2021), for its use; Ioffe and Szegedy (2015), batch norm.
    """

    num_classes: int = 10
    features: tuple[int, ...] = (16, 32)

    @nn.compact
    def __call__(self, x: Images, weights: Float[Array, " batch"] | None = None) -> Logits:
        """Computes the logits, with batch statistics that ignore rows of weight 0."""
        x = _channels_last(x)
        used = None if weights is None else (weights > 0)[:, None, None, None]
        for layer, features in enumerate(self.features, start=1):
            x = _NormBlock(features, name=f"block{layer}")(x, used)
        x = _flat(x)
        self.sow("intermediates", "representation", x)
        return _dense(self.num_classes, "classes")(x)


class CharacterGRU(nn.Module):
    """Character embedding, a GRU over the text, and a dense layer on the last state.

    Predicts the character that follows a text. LEAF uses two LSTM layers of 256 units, whereas this
    GRU is small enough to train many clients at once.

    Attributes:
      num_classes: C, the size of the vocabulary; characters are numbered 0 ... C - 1.
      embedding: the dimension of a character's embedding; LEAF uses 8.
      hidden: the number of units of the GRU.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> module, x = CharacterGRU(80), jnp.ones((2, 80))
      >>> params = module.init(jax.random.key(0), x)["params"]
      >>> module.apply({"params": params}, x).shape
      (2, 80)

    Reference: Cho, van Merrienboer et al. (2014), the GRU, in the form of flax's `GRUCell`; Caldas
    et al. (2018), LEAF, Shakespeare.
    """

    num_classes: int = 80
    embedding: int = 8
    hidden: int = 128

    @nn.compact
    def __call__(self, x: Float[Array, "batch length"]) -> Logits:
        """Computes the logits of the next character."""
        kind: Any = {"param_dtype": jnp.result_type(float)}
        shape = self.num_classes, self.embedding
        vectors = nn.Embed(*shape, embedding_init=glorot_uniform, name="characters", **kind)
        # Tasks pass integers as floats, which represent them exactly.
        text = vectors(x.astype(jnp.int32))
        kind |= {"kernel_init": glorot_uniform, "recurrent_kernel_init": glorot_uniform}
        cell = nn.GRUCell(self.hidden, name="gru", **kind)
        state, _ = nn.RNN(cell, return_carry=True)(text)
        self.sow("intermediates", "representation", state)
        return _dense(self.num_classes, "classes")(state)


def _channels_last(x: Images) -> Images:
    """Raises `ValueError` if the channels of images seem to come first."""
    if x.ndim != 4:
        raise ValueError(
            f"images have shape {list(x.shape[1:])}; give [height, width, channels], such as "
            "X[..., None] for one channel"
        )
    _, height, width, channels = x.shape
    if height in (1, 3) and min(width, channels) > 4:
        raise ValueError("give channels last, as np.moveaxis(X, 1, -1) does for channels first")
    return x


def _flat(x: Array) -> Float[Array, "batch features"]:
    return x.reshape(len(x), -1)


def _dense(width: int, name: str) -> nn.Dense:
    return nn.Dense(width, kernel_init=glorot_uniform, name=name)


class _Dense(nn.Module):
    """A dense layer with few outputs."""

    # Make outputs the outermost dimension, because few outputs would not fill a CPU's vector
    # registers as the innermost one. The loss transposes too, and XLA cancels both transpositions.

    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "batch features"]) -> Logits:
        kernel = self.param("kernel", glorot_uniform, (self.width, x.shape[1]))
        bias = self.param("bias", nn.initializers.zeros, (self.width,))
        products = lax.dot_general(kernel, x, (((1,), (1,)), ((), ())))
        return (products + bias[:, None]).T


class _LargeDense(nn.Module):
    """A dense layer that uses `matmul`."""

    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "batch features"]) -> Float[Array, "batch width"]:
        shape = (x.shape[1], self.width)
        products = matmul(x, self.param("kernel", glorot_uniform, shape))
        return products + self.param("bias", nn.initializers.zeros, (self.width,))


class _Bias(nn.Module):
    """A bias along the last axis."""

    @nn.compact
    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]:
        return x + self.param("bias", nn.initializers.zeros, x.shape[-1:])


class _Convolution(nn.Module):
    """`conv_same` or `conv_valid` with a square kernel."""

    features: int
    size: int
    padding: Literal["SAME", "VALID"] = "SAME"

    @nn.compact
    def __call__(self, x: Images) -> Float[Array, "batch rows columns features"]:
        shape = (self.size, self.size, x.shape[3], self.features)
        convolve = conv_same if self.padding == "SAME" else conv_valid
        return convolve(x, self.param("kernel", glorot_uniform, shape))


class _NormBlock(nn.Module):
    """Convolution, batch norm with running statistics, ReLU and max-pooling."""

    features: int

    @nn.compact
    def __call__(self, x: Images, used: Array | None) -> Array:
        x = _Convolution(self.features, 3, name="convolution")(x)
        is_tested = not self.is_mutable_collection("batch_stats")
        kind = jnp.result_type(float)
        x = nn.BatchNorm(is_tested, momentum=0.0, param_dtype=kind, name="norm")(x, mask=used)
        return nn.relu(max_pool(x))


class _BatchNorm(nn.Module):
    """``scale (x - mean) / sqrt(variance + epsilon) + bias`` with the statistics of the batch."""

    epsilon: float = 1e-3  # as in TensorFlow and LEAF

    @nn.compact
    def __call__(self, x: Images, weights: Any) -> Images:
        scale = self.param("scale", nn.initializers.ones, x.shape[3:])
        used = None if weights is None else (weights > 0)[:, None, None, None]
        centred = x - _mean(x, used)
        return _Bias()(centred * (scale / jnp.sqrt(_mean(centred**2, used) + self.epsilon)))


def _mean(x: Images, used: Array | None) -> Float[Array, " channels"]:
    # Average over the examples in use, or return 0 without any.
    if used is None:
        return x.mean((0, 1, 2))
    pixels = x.shape[1] * x.shape[2]
    return jnp.where(used, x, 0).sum((0, 1, 2)) / (jnp.maximum(used.sum(), 1) * pixels)
