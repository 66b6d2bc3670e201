"""Delays: how long a local training takes in simulated time, by its model and its client."""

from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fedjax_mm.base import Index, Scalar
from fedjax_mm.checks import check_between, check_count, check_not_negative, check_positive
from fedjax_mm.shuffles import hash_words, shuffled

__all__ = ["Delay", "shifted_exponential"]


class Delay(Protocol):
    """Function that draws how long one local training takes."""

    def __call__(self, rng_key: PRNGKeyArray, model: Index, client: Index) -> Float[Array, ""]:
        """Returns a time that is not negative; models and clients are counted from 0."""


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
    """Shifted exponential delays, longer at slow clients: ``factor_k (shift_m + mean_m Exp(1))``.

    Args:
      num_clients: N.
      mean: of the exponential part; a number, or one for each model.
      shift: the least delay of a client that is neither slow nor fast; None is half the mean. With
        a mean of 0 delays are constant.
      slow: the share of slow clients. Who is slow does not depend on the seed of a run.
      fast: the share of fast clients.
      slow_factor: what the delays of slow clients are multiplied by.
      fast_factor: what the delays of fast clients are multiplied by.

    Raises:
      ValueError: if a number is out of its range.

    Example:
      >>> import jax
      >>> delay = shifted_exponential(100, mean=2.0)
      >>> keys = jax.random.split(jax.random.key(0), 10_000)
      >>> times = jax.vmap(delay, (0, None, None))(keys, 0, 7)
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
    num_slow, num_fast = round(slow * num_clients), round(fast * num_clients)

    def delay(rng_key: PRNGKeyArray, model: Index, client: Index) -> Float[Array, ""]:
        # A client's place in a fixed random order: an array of all would be a constant as large.
        place = shuffled(hash_words(jax.random.key(0)), jnp.asarray(client), num_clients)
        factor = jnp.where(place >= num_clients - num_fast, fast_factor, 1.0)
        factor = jnp.where(place < num_slow, slow_factor, factor)
        of_model = mean if jnp.ndim(mean) == 0 else jnp.asarray(mean)[model]
        least = of_model / 2 if shift is None else shift
        least = least if jnp.ndim(least) == 0 else jnp.asarray(least)[model]
        draw = jax.random.exponential(rng_key, (), jnp.float32).astype(float)
        return factor * (least + of_model * draw)

    return delay
