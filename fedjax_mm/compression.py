"""Compression of client updates: top-k, random-k, QSGD and sign, with error feedback."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from annotated_types import Interval
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedjax_mm.base import (
    Algorithm,
    ClientContext,
    Contribution,
    Metrics,
    Params,
    Scalar,
    ServerContext,
    Task,
    keys,
)
from fedjax_mm.base.calls import Part
from fedjax_mm.base.sums import dense_update, is_stacked, root
from fedjax_mm.checks.annotations import TracedCount, checked, part
from fedjax_mm.checks.instances import check_algorithm, check_instance, check_task
from fedjax_mm.tools.selection import kth_largest
from fedjax_mm.wrap import Hidden, names_of, sent_by, wrap_algorithm, zero_message

__all__ = [
    *("Compressor", "MessageBytes", "compressed", "message_bytes", "qsgd", "random_k", "sign"),
    "top_k",
]

_BITS = 32  # per number

SomeShare = Annotated[Scalar, Interval(gt=0, le=1)]
"""A fraction of the coordinates, which may be traced."""


@dataclasses.dataclass(frozen=True, repr=False)
class Compressor(Part):
    """A compression operator for vectors of d numbers.

    Attributes:
      compress: maps a key and a vector to the vector that the server decodes.
      bits: maps d to the size of the message in bits.
      variance: maps d to omega, where ``E|C(v) - v|^2 <= omega |v|^2``, for an unbiased operator;
        None means that the operator is biased, and so needs error feedback.
    """

    compress: Callable[[PRNGKeyArray, Float[Array, " d"]], Float[Array, " d"]]
    bits: Callable[[int], Scalar]
    variance: Callable[[int], Scalar] | None = None


@part
def top_k(share: SomeShare) -> Compressor:
    """Keeps the k coordinates of largest magnitude, with ties going to the lower index.

    A message has ``k (32 + ceil(log2 d))`` bits. The operator is biased, so use error feedback.

    Args:
      share: k / d, where k is rounded and at least 1.

    Raises:
      ValueError: if `share` is not positive or is above 1.

    Example:
      >>> top_k(0.5).compress(None, jnp.array([3.0, -4.0, 0.0, 12.0])).tolist()
      [0.0, -4.0, 0.0, 12.0]
    """

    def compress(rng_key: PRNGKeyArray, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        del rng_key
        return jnp.where(_largest(jnp.abs(vector), _number(share, vector.size)), vector, 0)

    # The number of bits of a large model may not fit 32-bit integers. Count in floats.
    return Compressor(
        compress, lambda d: float(_BITS + math.ceil(math.log2(max(d, 1)))) * _number(share, d)
    )


@part
def random_k(share: SomeShare) -> Compressor:
    """Keeps a random set of k coordinates, scaled by d / k to be unbiased.

    A message has ``32 k + 32`` bits, for the values and for a seed from which the server draws the
    set. Its mean squared error is ``d / k - 1`` times that of sending nothing.

    Args:
      share: k / d, where k is rounded and at least 1.

    Raises:
      ValueError: if `share` is not positive or is above 1.

    Example:
      >>> vector = random_k(0.5).compress(jax.random.key(0), jnp.ones(4))
      >>> sorted(vector.tolist())
      [0.0, 0.0, 2.0, 2.0]
    """

    def compress(rng_key: PRNGKeyArray, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        k = _number(share, vector.size)
        lots = jax.random.bits(rng_key, vector.shape, jnp.uint32)
        return jnp.where(_largest(lots, k), vector * (vector.size / k).astype(vector.dtype), 0)

    def variance(d: int) -> Scalar:
        return d / _number(share, d) - 1

    return Compressor(compress, lambda d: float(_BITS) * _number(share, d) + _BITS, variance)


@part
def qsgd(levels: TracedCount) -> Compressor:
    """QSGD: rounds each coordinate stochastically to one of s levels of the norm, without bias.

    A message has ``32 + d (1 + ceil(log2(s + 1)))`` bits. Its mean squared error is at most
    ``min(d / s^2, sqrt(d) / s)`` times that of sending nothing.

    Args:
      levels: s, the number of levels between 0 and the norm.

    Raises:
      ValueError: if `levels` is not positive.

    Example:
      >>> qsgd(1).compress(jax.random.key(0), jnp.array([0.0, -5.0])).tolist()
      [0.0, -5.0]

    Reference: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via
    Gradient Quantization and Encoding" (2017).
    """

    def compress(rng_key: PRNGKeyArray, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        norm = root(jnp.sum(vector**2))
        a = levels * jnp.abs(vector) / jnp.where(norm > 0, norm, 1)
        lots = jax.random.uniform(rng_key, vector.shape, jnp.float32)
        level = jnp.floor(a) + (lots < a - jnp.floor(a))
        return (norm * jnp.sign(vector) * level / levels).astype(vector.dtype)

    def bits(d: int) -> Scalar:
        return _BITS + d * (1 + jnp.ceil(jnp.log2(jnp.asarray(levels, float) + 1)))

    def variance(d: int) -> Scalar:
        return jnp.minimum(d / levels / levels, math.sqrt(d) / levels)

    return Compressor(compress, bits, variance)


@part
def sign() -> Compressor:
    """Keeps the signs of the coordinates, scaled by their mean absolute value.

    A message has ``32 + d`` bits. The operator is biased, so use error feedback.

    Example:
      >>> sign().compress(None, jnp.array([1.0, -3.0])).tolist()
      [2.0, -2.0]
    """

    def compress(rng_key: PRNGKeyArray, vector: Float[Array, " d"]) -> Float[Array, " d"]:
        del rng_key
        return jnp.mean(jnp.abs(vector)) * jnp.sign(vector)

    return Compressor(compress, lambda d: _BITS + d)


_NOT_COMPRESSED = (
    "compressed: the server of this method reads the clients' states, which are not compressed; "
    "take a method whose server needs only the messages, such as fedavg"
)


@part
def compressed(
    algorithm: Algorithm, compressor: Compressor, *, error_feedback: bool | None = None
) -> Algorithm:
    """Wraps an algorithm so that clients compress their updates.

    A client's whole update, divided by its weight, is compressed as one vector. With error feedback
    a client adds its error e to the update v, ``p = e + v``, and sets ``e <- p - sent``. A client
    that does not participate keeps its e. The metric ``message_bits`` is the size of a message, and
    `to_dataset` adds the cumulative upload in bits as ``bits_up``.

    Args:
      algorithm: any algorithm whose messages are proportional to the clients' weights.
      compressor: the compressor, such as ``top_k(0.01)``, `random_k`, `qsgd` or `sign`.
      error_feedback: whether clients keep the unsent part, which takes one copy of the model per
        client. Biased compressors require it; with an unbiased one of large variance, errors
        accumulate until the run diverges. None means only for biased compressors.

    Raises:
      TypeError: if an argument has another type.
      ValueError: when a run starts, if the server reads the clients' states, as that of `mifa`.

    Warns:
      UserWarning: if error feedback may diverge, when a run starts.

    Example:
      >>> from fedjax_mm import fedavg, full_participation, simulate
      >>> from fedjax_mm.compression import compressed, top_k
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = compressed(fedavg(0.1, local_steps=5), top_k(0.1))
      >>> _, trace = simulate(0, quadratic(24, 4, mu=0.1), algorithm, full_participation(24), 50)
      >>> float(trace.metrics["message_bits"][0, 0])  # 10 of 97 numbers, with their places
      390.0
      >>> bool(trace.metrics["excess_loss"][-1, 0] < 0.1 * trace.metrics["excess_loss"][0, 0])
      True

    Reference: Seide et al., "1-Bit Stochastic Gradient Descent" (2014); Stich, Cordonnier, Jaggi,
    "Sparsified SGD with Memory" (2018).
    """
    check_algorithm(algorithm)
    check_instance("compressor", compressor, Compressor, "give one, such as top_k(0.01)")
    for name in ("private", "compressed"):
        if name in names_of(algorithm):
            raise ValueError(
                f"compressed is around {name}; compress once, and inside: "
                "private(compressed(algorithm, compressor), ...)"
            )
    if "robust" in names_of(algorithm):
        raise ValueError(
            "compressed is around robust; compress before the rule: "
            "robust(compressed(algorithm, compressor), rule)"
        )
    feedback = compressor.variance is None if error_feedback is None else error_feedback

    def init(task: Task, params: Params, server: Any, state: Any) -> tuple[Any, Any]:
        if not feedback:
            return (), ()
        message = zero_message(algorithm, task, params, server, state).update
        error, _ = ravel_pytree(message)
        _warn_of_divergence(compressor, error.size)
        return (), error

    def send(
        context: ClientContext, sent: Contribution, server: Any, error: Any
    ) -> tuple[Contribution, Any]:
        del server
        vector, unravel = ravel_pytree(of_weight_one(sent, context.params))
        vector = vector + error if feedback else vector
        message = compressor.compress(keys.compression_key(context.rng_key), vector)
        is_active = jnp.asarray(context.takes_part) & (sent.weight > 0)
        kept = jnp.where(is_active, vector - message, error) if feedback else ()
        # Some methods give a weight even to clients that do not participate.
        factor = jnp.where(is_active, sent.weight, 0)
        update = jax.tree.map(lambda x: x * factor.astype(x.dtype), unravel(message))
        return sent._replace(update=update), kept

    def serve(context: ServerContext, own: Any) -> tuple[ServerContext, Any]:
        return context._replace(client_states=Hidden(_NOT_COMPRESSED)), own

    def metrics(task: Task, params: Params, server: Any, own: Any) -> Metrics:
        del own
        _, state = algorithm.init(task, params)
        message = zero_message(algorithm, task, params, server, state).update
        return {"message_bits": jnp.asarray(compressor.bits(optax.tree.size(message)), float)}

    return wrap_algorithm(
        algorithm, "compressed", send=send, serve=serve, init=init, metrics=metrics
    )


class MessageBytes(NamedTuple):
    """Bytes of one client's messages in a round.

    Attributes:
      up: the upload, which may be traced.
      down: the download.
    """

    up: Scalar
    down: Scalar


@checked
def message_bytes(task: Task, algorithm: Algorithm) -> MessageBytes:
    """Computes how many bytes a client sends and receives in a round, without a run.

    The upload is the update after compression, and the download is the part of the parameters that
    the server sends. All models take 4 bytes per number, as in results, where ``parameters_up`` and
    ``parameters_down`` count numbers.

    Args:
      task: the learning problem, of which only shapes matter.
      algorithm: the algorithm with its wrappers, such as `compressed` and `personal`.

    Raises:
      TypeError: if an argument has another type.

    Example:
      >>> from fedjax_mm import fedavg
      >>> from fedjax_mm.compression import compressed, message_bytes, top_k
      >>> from fedjax_mm.tasks import quadratic
      >>> task, algorithm = quadratic(24, 4, mu=0.1), fedavg(0.1, local_steps=5)
      >>> message_bytes(task, algorithm)  # 97 numbers
      MessageBytes(up=388.0, down=388.0)
      >>> message_bytes(task, compressed(algorithm, top_k(0.1)))  # 10 of 97, with their places
      MessageBytes(up=48.75, down=388.0)
    """
    check_task(task)
    check_algorithm(algorithm)

    def messages(rng_key: PRNGKeyArray, task: Task) -> tuple[Any, Any, Any]:
        params = task.init(rng_key)
        server, state = algorithm.init(task, params)
        # Rules of aggregation refuse scaled weights, which other methods need.
        factor = None if "robust" in names_of(algorithm) else 1.0
        context = ClientContext(rng_key, 1, task, jnp.int32(0), params, factor)
        sent = sent_by(algorithm, context, server, state)
        update = sent.update
        update = update.update if is_stacked(update) else dense_update(sent, params).update
        down = params if algorithm.download is None else algorithm.download(params)
        others = {} if algorithm.metrics is None else algorithm.metrics(task, params, server)
        return update, down, others.get("message_bits", ())

    rng_key = jax.random.key(0)
    update, down, bits = jax.eval_shape(messages, rng_key, task)
    up: Scalar = float(_BITS * _size(update))
    if jax.tree.leaves(bits):
        # XLA computes the number of bits alone, and drops the training.
        value: Any = jax.jit(lambda *given: messages(*given)[2])(rng_key, task)
        up = value if isinstance(value, jax.core.Tracer) else float(value)
    return MessageBytes(up / 8, float(_BITS * _size(down)) / 8)


def _size(shapes: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def _warn_of_divergence(compressor: Compressor, size: int) -> None:
    if compressor.variance is None:
        return
    with jax.ensure_compile_time_eval():
        variance = compressor.variance(size)
    if not isinstance(variance, jax.core.Tracer) and (most := float(variance)) > 1:
        warnings.warn(
            f"error_feedback is True, but the error of a message may be {most:.3g} times as large "
            "as the update (squared norms; above 1, unsent parts can grow until the run "
            "diverges); leave out error_feedback, because the compressor is unbiased",
            stacklevel=2,
        )


def of_weight_one(sent: Contribution, params: Params) -> Any:
    """Dense update divided by its weight, or 0 if the weight is 0."""
    update, has_weight = dense_update(sent._replace(report=()), params).update, sent.weight > 0
    factor = jnp.where(has_weight, 1 / jnp.where(has_weight, sent.weight, 1), 0)
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), update)


def _number(share: Scalar, size: int) -> Any:
    """Number k of entries, a fraction of d rounded to a whole number from 1 to d."""
    return jnp.clip(jnp.round(jnp.asarray(share, jnp.float32) * size).astype(jnp.int32), 1, size)


def _largest(values: Array, k: Any) -> Bool[Array, " d"]:
    """Marks the k largest values, with ties going to the lower index."""
    least = kth_largest(values, k)
    is_above, is_tied = values > least, values == least
    room = k - jnp.sum(is_above, dtype=jnp.int32)
    return is_above | (is_tied & (jnp.cumsum(is_tied) <= room))
