"""A simulated clock for rounds, which leaves out late clients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.asynchrony.delays import Delay, check_delay
from fedjax_mm.base import Assignment, Cohort, Index, Look, Round, Sampling, keys
from fedjax_mm.checks.annotations import Count, Positive, part
from fedjax_mm.checks.instances import check_assignment
from fedjax_mm.wrap import wrap_assignment


def delays_of(
    delay: Delay, rng_key: PRNGKeyArray, cohort: Cohort, num_models: int
) -> Float[Array, " slots"]:
    """Delays of a round's local trainings for a `delays_key`, with 0 for padding."""

    def of_job(key: PRNGKeyArray, model: Index, client: Index) -> Float[Array, ""]:
        is_padding = (client < 0) | (model < 0)
        return jnp.where(is_padding, 0.0, delay(key, model, jnp.maximum(client, 0)))

    model, client = jnp.asarray(cohort.models), jnp.asarray(cohort.clients)
    each = keys.slot_keys(rng_key, client, model, num_models)
    return jax.vmap(of_job)(each, model, client)


@part
def on_clock(
    assignment: Assignment,
    delay: Delay,
    *,
    first: Count | None = None,
    deadline: Positive | None = None,
) -> Assignment:
    """Adds the metric `time`, the simulated time, to an assignment.

    A round takes the longest delay of its local trainings. A client that trains several models
    trains them in parallel. Time is simulated as in asynchronous runs. A round in which no
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
    """The cohort in which only a subset of the participants still participates."""
    return dataclasses.replace(cohort, takes_part=cohort.participates() & does)


def _places(
    groups: Int[Array, " n"], times: Float[Array, " n"], numbers: Int[Array, " n"]
) -> Int[Array, " n"]:
    """Rank of each entry within its group, from 0, ordered by time and then by number."""
    order = jnp.lexsort((numbers, times, groups))
    ordered, places = groups[order], jnp.arange(len(groups), dtype=jnp.int32)
    first = jnp.searchsorted(ordered, ordered).astype(jnp.int32)  # first position of the group
    return jnp.zeros_like(places).at[order].set(places - first)
