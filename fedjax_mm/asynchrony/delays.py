"""Delays: the simulated duration of a local training, given its model and its client.

`clock.py` leaves out clients that are late.
"""

import dataclasses
import inspect
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fedjax_mm.base import Index, Scalar
from fedjax_mm.base.shuffles import hash_words, shuffled
from fedjax_mm.checks.values import (
    check_between,
    check_count,
    check_not_negative,
    check_positive,
    described,
    tracing,
)


class Delay(Protocol):
    """Function that draws the duration of one local training."""

    def __call__(self, rng_key: PRNGKeyArray, model: Index, client: Index) -> Float[Array, ""]:
        """Returns a non-negative duration for a model and a client, both counted from 0."""


def shifted_exponential(
    num_clients: int,
    mean: Scalar | Float[Array, " models"] = 1.0,
    *,
    shift: Scalar | Float[Array, " models"] | None = None,
    slow: float = 0.25,
    fast: float = 0.25,
    slow_factor: Scalar = 1.3,
    fast_factor: Scalar = 0.7,
) -> Delay:
    """Shifted exponential delays ``factor_k (shift_m + mean_m Exp(1))``, longer for slow clients.

    Args:
      num_clients: N.
      mean: the mean of the exponential part; one number, or one per model.
      shift: the minimum delay of a client that is neither slow nor fast; None means half the mean.
        If the mean is 0, delays are constant.
      slow: the fraction of slow clients, chosen independently of the run's seed.
      fast: the fraction of fast clients.
      slow_factor: multiplies the delays of slow clients.
      fast_factor: multiplies the delays of fast clients.

    Raises:
      ValueError: if a number is out of its range.

    Example:
      >>> import jax
      >>> delay = shifted_exponential(100, mean=2.0)
      >>> keys = jax.random.split(jax.random.key(0), 10_000)
      >>> times = jax.vmap(lambda key: delay(key, jax.numpy.int32(0), jax.numpy.int32(7)))(keys)
      >>> round(times.min().item(), 2), round(times.mean().item(), 1)
      (1.0, 3.0)

    Reference: Askin, Sharma, Joe-Wong, Joshi, "FedAST: Federated Asynchronous Simultaneous
    Training" (2024).
    """
    num_clients = check_count("num_clients", num_clients)
    for name, value in (("mean", mean), ("shift", mean if shift is None else shift)):
        for each in [value] if jnp.ndim(value) != 1 else list(jnp.asarray(value)):
            check_not_negative(name, each)
    for name, share in (("slow", slow), ("fast", fast), ("slow + fast", slow + fast)):
        check_between(name, share, 0, 1)
    check_positive("slow_factor", slow_factor)
    check_positive("fast_factor", fast_factor)
    shapes = [jnp.shape(x) for x in (mean, 0.0 if shift is None else shift)]
    sizes = [shape[0] for shape in shapes if shape]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"mean has {sizes[0]} numbers and shift has {sizes[1]}; give one for each model, or "
            "one for all"
        )
    num_slow, num_fast = round(slow * num_clients), round(fast * num_clients)
    num_models = min(sizes, default=None)
    factors = slow_factor, fast_factor
    return _ShiftedExponential(num_clients, num_models, mean, shift, num_slow, num_fast, *factors)


@dataclasses.dataclass(frozen=True, eq=False)
class _ShiftedExponential:
    """Delays of `shifted_exponential`, with `num_models` None if all models share them."""

    num_clients: int
    num_models: int | None
    mean: Any
    shift: Any
    num_slow: int
    num_fast: int
    slow_factor: Scalar
    fast_factor: Scalar

    def __call__(self, rng_key: PRNGKeyArray, model: Index, client: Index) -> Float[Array, ""]:
        """Returns how long a local training takes."""
        # Compute the client's rank in a fixed random order, because an array of all ranks would be
        # a large constant in the program.
        place = shuffled(hash_words(jax.random.key(0)), jnp.asarray(client), self.num_clients)
        is_fast = place >= self.num_clients - self.num_fast
        factor = jnp.where(is_fast, self.fast_factor, 1.0)
        factor = jnp.where(place < self.num_slow, self.slow_factor, factor)
        mean = _of_model(self.mean, model)
        least = mean / 2 if self.shift is None else _of_model(self.shift, model)
        draw = jax.random.exponential(rng_key, (), jnp.float32).astype(float)
        return factor * (least + mean * draw)


def _of_model(numbers: Any, model: Index) -> Any:
    return numbers if jnp.ndim(numbers) == 0 else jnp.asarray(numbers)[model]


def check_delay(delay: Any, num_clients: int, num_models: int) -> None:
    """Raises an error if the argument is not a `Delay` for these numbers of clients and models."""
    if not callable(delay):
        raise TypeError(
            f"delay is {described(delay)}; give a function of a key, a model and a client, such as "
            "asynchrony.shifted_exponential(num_clients)"
        )
    if not isinstance(delay, _ShiftedExponential):
        _check_law(delay)
        return
    if delay.num_clients != num_clients:
        raise ValueError(
            f"delay is for {delay.num_clients} clients, and there are {num_clients}; give "
            f"shifted_exponential({num_clients})"
        )
    if delay.num_models not in (None, num_models):
        raise ValueError(
            f"delay has means or shifts of {delay.num_models} models, and there are {num_models}; "
            "give one number for each model, or one for all"
        )


def _check_law(delay: Any) -> None:
    """Raises an error if a user's function does not draw a single time."""
    what = "delay(rng_key, model, client)"
    try:
        inspect.signature(delay).bind(None, None, None)
    except TypeError as error:
        raise TypeError(
            f"{what} cannot be called: {error}; give a function of these three"
        ) from error
    number = jax.ShapeDtypeStruct((), jnp.int32)
    with tracing("a delay"):
        drawn = jax.eval_shape(delay, jax.eval_shape(lambda: jax.random.key(0)), number, number)
    if getattr(drawn, "shape", None) != ():
        raise ValueError(f"{what} returns {described(drawn)}; give one time, of shape ()")
