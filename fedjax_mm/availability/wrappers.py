"""Assignment wrappers for absent clients and lost messages.

Late clients are dropped by the clock, in `asynchrony/clock.py`.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.availability.laws import Law, Probability, check_probability
from fedjax_mm.base import Assignment, Cohort, Look, Round, Sampling, keys
from fedjax_mm.checks.annotations import part
from fedjax_mm.checks.instances import check_assignment, check_instance
from fedjax_mm.wrap import wrap_assignment


@part
def available(
    assignment: Assignment,
    law: Law,
    *,
    when_absent: Literal["skip", "replace"] = "skip",
    unbiased: bool = False,
) -> Assignment:
    """Wraps an assignment so that absent clients do not train.

    Presence is drawn before clients are chosen, and does not depend on the choice. The metric
    ``present`` is the number of clients present in the last round, and -1 before round 1.

    Args:
      assignment: chooses clients and models, regardless of which clients are present.
      law: the availability law, such as ``bernoulli(0.8)``.
      when_absent: "skip" leaves the slots of absent clients empty. "replace" fills each slot with a
        present client that was not chosen, drawn uniformly. If there are too few, a random part of
        the slots stays empty. A uniform cohort of K clients then becomes a uniform cohort of K
        present clients, or of all of them.
      unbiased: whether each client's weight is divided by the fraction of rounds in which the
        client is present. With ``fedavg(server_scale="1/N")`` the expected step then equals the
        step without absence, in every round, or for a `timetable` on average over its period.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if the law is for a different number of clients or lacks the shares that
        `unbiased` needs, or if clients with weight factors would be replaced.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedavg, mfa_rand, simulate
      >>> from fedjax_mm.availability import available, bernoulli
      >>> from fedjax_mm.tasks import quadratic
      >>> assignment = available(mfa_rand(100, 2), bernoulli(0.8))
      >>> task, algorithm = quadratic(100, 4, mu=0.1), fedavg(0.1, local_steps=5)
      >>> _, trace = simulate(0, task, algorithm, assignment, 20)
      >>> bool((trace.client_updates.sum(1) == trace.metrics["present"][:, 0])[1:].all())
      True
    """
    num_clients = check_assignment(assignment).num_clients
    check_instance("law", law, Law, "give one, such as availability.bernoulli(0.8)")
    _check_law(law, num_clients, when_absent, unbiased)
    if when_absent == "replace" and assignment.eligible is not None:
        raise ValueError(
            "when_absent is 'replace', but not every client is eligible for every model; take "
            "'skip'"
        )

    def init(rng_key: PRNGKeyArray) -> tuple[Any, Float[Array, ""]]:
        own = law.init(rng_key, num_clients)
        return own, jnp.full((), -1, float)

    def change(
        rng_key: PRNGKeyArray, round: Round, own: Any, cohort: Cohort, look: Look
    ) -> tuple[Cohort, Any]:
        del look
        state, before = own
        draw_key, fill_key = jax.random.split(rng_key)
        is_present, state = law.step(draw_key, round, state, num_clients)
        if when_absent == "replace":
            cohort = _replaced(fill_key, cohort, is_present)
        else:
            cohort = _skipped(cohort, is_present)
        if unbiased:
            cohort = _scaled(cohort, law.share)
        return cohort, (state, jnp.sum(is_present, dtype=jnp.int32).astype(before.dtype))

    return wrap_assignment(
        assignment,
        "available",
        change,
        init=init,
        metrics=lambda own: {"present": own[1]},
        sampling=_thinned(assignment.sampling, law, when_absent),
    )


def _check_law(law: Law, num_clients: int, when_absent: str, unbiased: bool) -> None:
    """Raises `ValueError` if a law is for another number of clients or does not fit the options."""
    if law.num_clients not in (None, num_clients):
        raise ValueError(
            f"law is for {law.num_clients} clients, and there are {num_clients}; give it one "
            "number for all, or one for each"
        )
    if unbiased and when_absent == "replace":
        raise ValueError("unbiased is for when_absent='skip'; replaced clients need no factors")
    if unbiased and not _is_known(law.share):
        raise ValueError(
            "unbiased needs the shares of presence, which must be positive and which a timetable "
            "has only with a period of whole rounds; give such a period, or leave out unbiased"
        )


def _thinned(sampling: Sampling | None, law: Law, when_absent: str) -> Sampling | None:
    """Sampling law of an assignment whose clients may be absent."""
    if sampling is None:
        return None
    is_poisson = law.is_independent and sampling.cohort_size is None and when_absent == "skip"
    if is_poisson and not isinstance(law.share, jax.core.Tracer):
        return sampling._replace(rate=sampling.rate * float(np.max(law.share)))
    return Sampling(sampling.most_models)


def _skipped(cohort: Cohort, is_present: Bool[Array, " clients"]) -> Cohort:
    """Removes absent clients from the cohort."""
    clients = jnp.asarray(cohort.clients)
    stays = is_present[jnp.maximum(clients, 0)]
    return dataclasses.replace(cohort, clients=jnp.where(stays, clients, -1))


def _replaced(rng_key: PRNGKeyArray, cohort: Cohort, is_present: Bool[Array, " clients"]) -> Cohort:
    """Replaces absent clients in the cohort with present ones."""
    if cohort.scale is not None:
        raise ValueError(
            "when_absent is 'replace', but the assignment gives clients factors of their own, "
            "which another client must not have; take 'skip'"
        )
    if cohort.takes_part is not None:
        raise ValueError(
            "when_absent is 'replace', but clients are lost or late already, which another client "
            "may not be; make them so outside, as in dropping(available(...))"
        )
    clients = jnp.asarray(cohort.clients)
    is_chosen = clients >= 0
    is_absent = is_chosen & ~is_present[jnp.maximum(clients, 0)]
    # Padding gets an index that is out of range and hence dropped. -1 would mark the last client.
    numbers = jnp.where(is_chosen, clients, len(is_present))
    is_free = is_present.at[numbers].set(False, mode="drop")
    free_key, slot_key = jax.random.split(rng_key)
    order = _shuffled_first(free_key, is_free).astype(clients.dtype)
    # The first slots belong to the first models, and there may be too few free clients for all
    # slots. Fill them in random order.
    place = jnp.argsort(_shuffled_first(slot_key, is_absent))
    new = jnp.where(place < jnp.sum(is_free), order[jnp.minimum(place, len(order) - 1)], -1)
    return dataclasses.replace(cohort, clients=jnp.where(is_absent, new, clients))


def _shuffled_first(rng_key: PRNGKeyArray, is_marked: Bool[Array, " n"]) -> Int[Array, " n"]:
    """All places in random order, with the marked ones first."""
    lots = jax.random.bits(rng_key, is_marked.shape, jnp.uint32)
    return jnp.lexsort((lots, ~is_marked))


def _scaled(cohort: Cohort, share: Probability) -> Cohort:
    """Divides each client's weight in the cohort by its fraction of rounds present."""
    factors = 1 / jnp.asarray(share, float)
    own = factors if factors.ndim == 0 else factors[jnp.maximum(jnp.asarray(cohort.clients), 0)]
    old = jnp.ones(cohort.clients.shape) if cohort.scale is None else cohort.scale
    return dataclasses.replace(cohort, scale=(old * own).astype(old.dtype))


def _is_known(share: Probability) -> bool:
    return isinstance(share, jax.core.Tracer) or bool(np.all(np.asarray(share) > 0))


@part
def dropping(assignment: Assignment, probability: Probability) -> Assignment:
    """Wraps an assignment so that some messages are lost on their way to the server.

    A client whose message is lost has trained, so its gradients count, but it does not participate:
    its weight is 0, its state does not change, and the assignment does not see its report.

    Args:
      assignment: chooses clients and models.
      probability: the probability of a loss, independent for each local training; one number, or
        one per client.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if a probability is not between 0 and 1, or there is not one per client.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedavg, mfa_rand, simulate
      >>> from fedjax_mm.availability import dropping
      >>> from fedjax_mm.tasks import quadratic
      >>> assignment = dropping(mfa_rand(100, 2), 0.2)
      >>> task, algorithm = quadratic(100, 4, mu=0.1), fedavg(0.1, local_steps=5)
      >>> _, trace = simulate(0, task, algorithm, assignment, 20)
      >>> int(trace.gradients.sum()), bool(1500 < trace.client_updates.sum() < 1700)
      (10000, True)
    """
    check_assignment(assignment)
    probability, number = check_probability("probability", probability)
    if number not in (None, assignment.num_clients):
        raise ValueError(
            f"probability is for {number} clients, and there are {assignment.num_clients}; give "
            "one number for all, or one for each"
        )

    def change(
        rng_key: PRNGKeyArray, round: Round, own: Any, cohort: Cohort, look: Look
    ) -> tuple[Cohort, Any]:
        del round, look
        slots = jnp.asarray(cohort.clients), jnp.asarray(cohort.models)
        each = keys.slot_keys(rng_key, *slots, assignment.num_models)
        lots = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(each)
        p = jnp.asarray(probability)
        limit = p if p.ndim == 0 else p[jnp.maximum(jnp.asarray(cohort.clients), 0)]
        arrives = cohort.participates() & (lots >= limit)
        return dataclasses.replace(cohort, takes_part=arrives), own

    return wrap_assignment(
        assignment,
        "dropping",
        change,
        sampling=assignment.sampling,
    )
