"""Delays: the simulated duration of a local training, given its model and its client."""

import dataclasses
import inspect
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm import keys
from fedjax_mm.base import Assignment, Cohort, Index, Look, Round, Sampling, Scalar
from fedjax_mm.checked import Count, Positive, checked
from fedjax_mm.checks import (
    check_between,
    check_count,
    check_not_negative,
    check_positive,
    described,
    tracing,
)
from fedjax_mm.parts import check_assignment
from fedjax_mm.shuffles import hash_words, shuffled
from fedjax_mm.wrap import wrap_assignment


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


def delays_of(
    delay: Delay, rng_key: PRNGKeyArray, cohort: Cohort, num_models: int
) -> Float[Array, " slots"]:
    """Returns the delays of a round's local trainings for a `delays_key`, with 0 for padding."""

    def of_job(key: PRNGKeyArray, model: Index, client: Index) -> Float[Array, ""]:
        is_padding = (client < 0) | (model < 0)
        return jnp.where(is_padding, 0.0, delay(key, model, jnp.maximum(client, 0)))

    model, client = jnp.asarray(cohort.models), jnp.asarray(cohort.clients)
    each = keys.slot_keys(rng_key, client, model, num_models)
    return jax.vmap(of_job)(each, model, client)


@checked
def on_clock(
    assignment: Assignment,
    delay: Delay,
    *,
    first: Count | None = None,
    deadline: Positive | None = None,
) -> Assignment:
    """Adds the metric `time`, the simulated time, to an assignment.

    A round lasts as long as the longest delay of its local trainings. A client that trains several
    models trains them in parallel. Time is simulated as in asynchronous runs. A round in which no
    client trains takes no time.

    With `first` or `deadline`, clients can be too late. Late clients do not participate, but their
    gradients count, because they have trained. `availability.dropping` treats clients with lost
    messages in the same way.

    Args:
      assignment: chooses clients and models.
      delay: draws the duration of a local training.
      first: k. Each model uses only its k fastest clients, with ties going to lower client numbers,
        so an assignment can over-select clients. None waits for all clients.
      deadline: the time at which a round ends without the clients that are still training. None
        waits for all clients.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if the delays are for another number of clients or models.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedavg, mfa_rr, simulate
      >>> from fedjax_mm.asynchrony import on_clock, shifted_exponential
      >>> from fedjax_mm.tasks import quadratic
      >>> constant = shifted_exponential(6, mean=0.0, shift=2.0, slow=0.0)
      >>> rounds = on_clock(mfa_rr(6, 2), constant)
      >>> task, algorithm = quadratic(6, 4, mu=0.1), fedavg(0.1, local_steps=5)
      >>> simulate(0, task, algorithm, rounds, 3)[1].metrics["time"][:, 0].tolist()
      [0.0, 2.0, 4.0, 6.0]
    """
    check_assignment(assignment)
    check_delay(delay, assignment.num_clients, assignment.num_models)

    sampling = assignment.sampling
    if sampling and (first is not None or deadline is not None):
        sampling = Sampling(sampling.most_models)  # because lateness depends on other clients

    def change(
        rng_key: PRNGKeyArray, round: Round, time: Any, cohort: Cohort, look: Look
    ) -> tuple[Cohort, Any]:
        del round, look
        times = delays_of(delay, rng_key, cohort, assignment.num_models)
        model, client = jnp.asarray(cohort.models), jnp.asarray(cohort.clients)
        if first is not None:
            groups = jnp.where(cohort.participates(), model, -1)
            is_among = (groups >= 0) & (_places(groups, times, client) < first)
            cohort = _taking_part(cohort, is_among)
            times = jnp.where(is_among, times, 0.0)  # clients do not wait for each other
        if deadline is not None:
            cohort = _taking_part(cohort, times <= deadline)
            times = jnp.minimum(times, deadline)
        longest = jnp.max(times, initial=0.0)
        return cohort, time + longest.astype(time.dtype)

    return wrap_assignment(
        assignment,
        "on_clock",
        change,
        keys_of=lambda key: (key, keys.delays_key(key)),
        init=lambda _: jnp.zeros((), float),
        metrics=lambda time: {"time": time},
        sampling=sampling,
    )


def _taking_part(cohort: Cohort, does: Bool[Array, " slots"]) -> Cohort:
    """Returns the cohort in which only a subset of the participants still participates."""
    return dataclasses.replace(cohort, takes_part=cohort.participates() & does)


def _places(
    groups: Int[Array, " n"], times: Float[Array, " n"], numbers: Int[Array, " n"]
) -> Int[Array, " n"]:
    """Returns each entry's rank within its group, from 0, ordered by time and then by number."""
    order = jnp.lexsort((numbers, times, groups))
    ordered, places = groups[order], jnp.arange(len(groups), dtype=jnp.int32)
    first = jnp.searchsorted(ordered, ordered).astype(jnp.int32)  # first position of the group
    return jnp.zeros_like(places).at[order].set(places - first)
