"""Delays: the simulated duration of a local training, given its model and its client.

`clock.py` leaves out clients that are late.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
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

PerModel: TypeAlias = Scalar | Float[Array, " models"] | Sequence[float]
"""A number for all models, or one for each."""

PerClient: TypeAlias = Scalar | Float[Array, " clients"] | Sequence[float]
"""A number for all clients, or one for each."""

PerClientAndModel: TypeAlias = PerModel | Float[Array, "models clients"]
"""A number for all, one for each model, or one for each model and client."""


class Delay(Protocol):
    """Function that draws the duration of one local training."""

    def __call__(self, rng_key: PRNGKeyArray, model: Index, client: Index) -> Float[Array, ""]:
        """Non-negative duration for a model and a client, both counted from 0."""


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
class _Law:
    """Delays of some clients and models, with `num_models` None if all models share them."""

    name: ClassVar[str]
    per_model: ClassVar[str]
    num_clients: int
    num_models: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class _ShiftedExponential(_Law):
    """Delays of `shifted_exponential`."""

    name: ClassVar[str] = "shifted_exponential"
    per_model: ClassVar[str] = "means or shifts"
    mean: Any
    shift: Any
    num_slow: int
    num_fast: int
    slow_factor: Scalar
    fast_factor: Scalar

    def __call__(self, rng_key: PRNGKeyArray, model: Index, client: Index) -> Float[Array, ""]:
        # Compute the client's rank in a fixed random order, because an array of all ranks would be
        # a large constant in the program.
        place = shuffled(hash_words(jax.random.key(0)), jnp.asarray(client), self.num_clients)
        is_fast = place >= self.num_clients - self.num_fast
        factor = jnp.where(is_fast, self.fast_factor, 1.0)
        factor = jnp.where(place < self.num_slow, self.slow_factor, factor)
        mean = _at(self.mean, model)
        least = mean / 2 if self.shift is None else _at(self.shift, model)
        draw = jax.random.exponential(rng_key, (), jnp.float32).astype(float)
        return factor * (least + mean * draw)


def _at(numbers: Any, index: Index) -> Any:
    return numbers if jnp.ndim(numbers) == 0 else jnp.asarray(numbers)[index]


def device_time(
    num_clients: int,
    *,
    steps: PerClientAndModel,
    flops: PerModel,
    bytes_down: PerModel,
    bytes_up: PerModel,
    speed: PerClient,
    down: PerClient,
    up: PerClient | None = None,
    latency: PerClient = 0.0,
    speed_spread: Scalar = 0.5,
    bandwidth_spread: Scalar = 1.0,
) -> Delay:
    """Delays of devices that download the model, train it, and upload their updates.

    The delay of model m on client k is ``latency_k + steps_mk flops_m / speed_k + 8 bytes_down_m /
    down_k + 8 bytes_up_m / up_k``, in seconds. It has no random part, so that equal jobs of a
    client take equally long. A client that trains several models has a device for each.

    If `speed` is one number it is the median, and ``speed_k = speed exp(speed_spread z_k)`` with
    standard normal z_k. `down` and `up` are drawn like this too if they are one number, with a
    second normal that both share. The normals are drawn independently of the run's seed.

    Args:
      num_clients: N.
      steps: the number of local steps; one number, one per model, or ``[models, clients]``.
      flops: the floating-point operations of one step; one number, or one per model. A backward
        pass takes about two forward passes.
      bytes_down: the bytes that a client downloads; one number, or one per model. See
        `compression.message_bytes`.
      bytes_up: the bytes that a client uploads, after compression; one number, or one per model.
      speed: operations per second; the median of the clients, or one per client. Infinite speed
        leaves only the transfers.
      down: the download bandwidth in bits per second (not bytes); the median, or one per client.
        Infinite bandwidth leaves only the computation.
      up: the upload bandwidth in bits per second; the median, or one per client. None means
        ``down / 4``.
      latency: seconds in addition to these; one number, or one per client.
      speed_spread: the standard deviation of ``log(speed_k)``, if `speed` is one number.
      bandwidth_spread: that of ``log(down_k)`` and ``log(up_k)``, if these are medians.

    Raises:
      TypeError: if an argument is not a number or an array of numbers.
      ValueError: if a number is out of its range, or arrays are of wrong or different sizes.

    Example:
      >>> import jax
      >>> delay = device_time(
      ...     100, steps=5, flops=3 * 10 * 33.67e6, bytes_down=6_505_768, bytes_up=6_505_768,
      ...     speed=10e9, down=20e6, up=5e6, speed_spread=0, bandwidth_spread=0,
      ... )
      >>> round(delay(jax.random.key(0), jax.numpy.int32(0), jax.numpy.int32(7)).item(), 3)
      13.517

    Reference: the model of FedScale (Lai et al., "FedScale: Benchmarking Model and System
    Performance of Federated Learning at Scale", 2022), in SI units. The default spreads are ours.
    """
    num_clients = check_count("num_clients", num_clients)
    check_not_negative("speed_spread", speed_spread)
    check_not_negative("bandwidth_spread", bandwidth_spread)
    sizes: dict[str, Any] = {"flops": flops, "bytes_down": bytes_down, "bytes_up": bytes_up}
    work = {name: _amount(name, value, 1) for name, value in sizes.items()}
    work["steps"] = _amount("steps", steps, 2)
    rates = {"speed": _rate("speed", speed), "down": _rate("down", down)}
    rates["up"] = rates["down"] / 4 if up is None else _rate("up", up)
    own = rates | {"latency": _amount("latency", latency, 1)}
    of_clients = own | ({"steps": work["steps"]} if jnp.ndim(work["steps"]) == 2 else {})
    for name, value in of_clients.items():
        if jnp.ndim(value) and jnp.shape(value)[-1] != num_clients:
            raise ValueError(
                f"{name} is {described(value)}, and there are {num_clients} clients; give one "
                "number for each client, or one for all"
            )
    num_models = {name: jnp.shape(value)[0] for name, value in work.items() if jnp.ndim(value)}
    if len(set(num_models.values())) > 1:
        given = " and ".join(f"{name} of {size}" for name, size in num_models.items())
        raise ValueError(f"{given} models differ; give one number for each model, or one for all")
    spreads = speed_spread, bandwidth_spread
    most = min(num_models.values(), default=None)
    return _DeviceTime(num_clients, most, **work, **own, spreads=spreads)


def _amount(name: str, value: Any, most_dims: int) -> Any:
    allowed = "be finite and not negative"
    return _numbers(name, value, most_dims, lambda x: np.isfinite(x) & (x >= 0), allowed)


def _rate(name: str, value: Any) -> Any:
    return _numbers(name, value, 1, lambda x: x > 0, "be positive; infinite takes no time")


def _numbers(
    name: str, value: Any, most_dims: int, is_allowed: Callable[[Any], Any], allowed: str
) -> Any:
    """Checks a number or an array in float32 that may be infinite, unlike in `check_numbers`."""
    is_traced = isinstance(value, jax.core.Tracer)
    found: Any = value if is_traced else np.asarray(value)
    if found.dtype.kind not in "iuf":
        raise TypeError(f"{name} is {described(value)}; give a number, or an array of numbers")
    if found.ndim > most_dims:
        dims = "one number, or one axis" if most_dims == 1 else "one number, or one or two axes"
        raise ValueError(f"{name} is of shape {found.shape}; give {dims}")
    if is_traced:
        return found.astype(float)
    with np.errstate(over="ignore", under="ignore"):
        is_right = is_allowed(found.astype(np.float32))
    if not is_right.all():
        where = f" at {np.argwhere(~is_right)[0].tolist()}" if found.ndim else ""
        raise ValueError(f"{name} is {found[~is_right][0]:g}{where}; it must {allowed}")
    return found.astype(float) if found.ndim else float(found)


@dataclasses.dataclass(frozen=True, eq=False)
class _DeviceTime(_Law):
    """Delays of `device_time`."""

    name: ClassVar[str] = "device_time"
    per_model: ClassVar[str] = "steps, flops or bytes"
    steps: Any
    flops: Any
    bytes_down: Any
    bytes_up: Any
    latency: Any
    speed: Any
    down: Any
    up: Any
    spreads: tuple[Scalar, Scalar]

    def __call__(self, rng_key: PRNGKeyArray, model: Index, client: Index) -> Float[Array, ""]:
        del rng_key
        own_key = jax.random.fold_in(jax.random.key(0), client)
        normals = jax.random.normal(own_key, (2,), jnp.float32).astype(float)
        factors = [jnp.exp(s * z) for s, z in zip(self.spreads, normals, strict=True)]

        def rate(numbers: Any, factor: Array) -> Any:
            return _at(numbers, client) * (1 if jnp.ndim(numbers) else factor)

        steps = _at(self.steps, model)
        operations = _at(steps, client) * _at(self.flops, model)
        return jnp.asarray(
            _at(self.latency, client)
            + operations / rate(self.speed, factors[0])
            + 8 * _at(self.bytes_down, model) / rate(self.down, factors[1])
            + 8 * _at(self.bytes_up, model) / rate(self.up, factors[1]),
            float,
        )


def check_delay(delay: Any, num_clients: int, num_models: int) -> None:
    """Raises an error if the argument is not a `Delay` for these numbers of clients and models."""
    if not callable(delay):
        raise TypeError(
            f"delay is {described(delay)}; give a function of a key, a model and a client, such as "
            "asynchrony.shifted_exponential(num_clients)"
        )
    if not isinstance(delay, _Law):
        _check_law(delay)
        return
    if delay.num_clients != num_clients:
        raise ValueError(
            f"delay is for {delay.num_clients} clients, and there are {num_clients}; give "
            f"{delay.name}({num_clients}{', ...' * isinstance(delay, _DeviceTime)})"
        )
    if delay.num_models not in (None, num_models):
        raise ValueError(
            f"delay has {delay.per_model} of {delay.num_models} models, and there are "
            f"{num_models}; give one number for each model, or one for all"
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
