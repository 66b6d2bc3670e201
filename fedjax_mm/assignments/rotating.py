"""Rotations and draws that favour pairs of clients and models by statistics of their data.

MFA-RR, whose groups rotate regardless of data, is in `partitions.py`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.assignments.sampling import no_state
from fedjax_mm.base import Assignment, Cohort, Look, Round
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import Count, NonNegative, Positive, part

Flags: TypeAlias = Sequence[bool] | Bool[np.ndarray, " models"]
"""One bool for each model."""


@part
def mdh(
    num_clients: Count,
    num_models: Count,
    *,
    cohort_size: Count,
    heterogeneous: Flags,
    from_round: Count = 51,
    at_once: Count = 1,
) -> Assignment:
    """MultiFedAvg-MDH: models with heterogeneous data take turns in getting clients.

    Before `from_round`, or without heterogeneous models, the cohort is split into M near-equal
    groups. From then on the H heterogeneous models take turns, ``q = min(H, at_once)`` of them per
    round. They share ``round(H K / M)`` clients, and the other models share the rest. If all models
    are heterogeneous, those whose turn it is share all clients. Shares are near-equal, and larger
    ones come first.

    Args:
      num_clients: N.
      num_models: M.
      cohort_size: K of the N clients, drawn uniformly each round.
      heterogeneous: whether each model's data are heterogeneous, ``bool[models]``; the authors call
        them so if their `homogeneity` is at most 0.36.
      from_round: the first round with turns.
      at_once: the number of heterogeneous models with clients in a round.

    Raises:
      ValueError: if the sizes do not fit.

    Example: the second and fourth models take turns.
      >>> import jax
      >>> how = {"heterogeneous": [False, True, False, True], "from_round": 1}
      >>> assignment = mdh(8, 4, cohort_size=8, **how)
      >>> for t in (1, 2):
      ...     cohort, _ = assignment.assign(jax.random.key(0), t, (), Look())
      ...     print(cohort.sizes(4).tolist())
      [2, 4, 2, 0]
      [2, 0, 2, 4]

    Reference: the authors' code of MultiFedAvg-MDH, whose rounds count from 0.
    """
    checks.check_between("cohort_size", cohort_size, 1, num_clients, "num_clients")
    flags = np.asarray(heterogeneous)
    if flags.shape != (num_models,) or flags.dtype != bool:
        raise ValueError(
            f"heterogeneous is {heterogeneous!r}; give a bool for each of the {num_models} models"
        )
    turns = np.array(list(_turns(flags, cohort_size, at_once)), np.int32)
    even = np.repeat(np.arange(num_models, dtype=np.int32), _sizes(cohort_size, num_models))

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        del look
        clients = permutation(rng_key, num_clients, cohort_size)
        since = jnp.asarray(round, jnp.int32) - from_round
        turn = jnp.asarray(turns)[since % len(turns)]
        return Cohort(clients, jnp.where(since >= 0, turn, even)), state

    return Assignment(num_clients, num_models, no_state, assign)


def homogeneity(counts: Int[np.ndarray, "clients classes"]) -> float:
    """How homogeneous clients' labels are, from 0 to 1, weighted by their numbers of examples.

    It is the mean of ``(1 + c - i) / 2``, where c is the share of classes that a client has, and i
    the share of those with fewer than ``n_k / C`` examples.

    Args:
      counts: the number of examples of each client and class.

    Example:
      >>> homogeneity(np.array([[5, 5, 0, 0]])), homogeneity(np.array([[97, 1, 1, 1]]))
      (0.5, 0.625)

    Reference: the authors' code of MultiFedAvg-MDH.
    """
    counts = np.asarray(counts)
    sizes = counts.sum(1, keepdims=True)
    has, few = (counts > 0).mean(1), (counts < sizes / counts.shape[1]).mean(1)
    return float(np.average((1 + has - few) / 2, weights=sizes[:, 0]))


class Drift(NamedTuple):
    """State of DMA-FL.

    Attributes:
      loss: the client's last mean training loss; NaN before.
      grew: its relative growth from the training before, or 0.
    """

    loss: Float[Array, "models clients"]
    grew: Float[Array, "models clients"]


@part
def dma_fl(
    num_clients: Count,
    num_models: Count,
    *,
    cohort_size: Count,
    threshold: NonNegative = 0.05,
    weight: Positive = 3.0,
) -> Assignment:
    """DMA-FL, synchronous part: clients whose loss has grown are drawn more often.

    The models draw ``floor(K / M)`` clients in turn, without replacement. A client has the weight w
    for a model if its mean training loss on it grew by a share of at least the threshold between
    its last two trainings of this model, and 1 otherwise.

    Args:
      num_clients: N.
      num_models: M <= K.
      cohort_size: K of the N clients take part in a round.
      threshold: the share.
      weight: w.

    Raises:
      ValueError: if the sizes do not fit.

    Example:
      >>> import jax
      >>> assignment, key = dma_fl(4, 2, cohort_size=4), jax.random.key(0)
      >>> cohort, _ = assignment.assign(key, 1, assignment.init(key, Look()), Look())
      >>> sorted(cohort.clients.tolist()), cohort.models.tolist()
      ([0, 1, 2, 3], [0, 0, 1, 1])

    Reference: the authors' code of the synchronous part of DMA-FL, with new random numbers in every
    round.
    """
    checks.check_sizes(num_clients, num_models, cohort_size)
    shape, each = (num_models, num_clients), cohort_size // num_models

    def init(rng_key: PRNGKeyArray, look: Look) -> Drift:
        del rng_key, look
        return Drift(jnp.full(shape, jnp.nan), jnp.zeros(shape))

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        del round, look
        # The largest of Gumbel variables plus log-weights are a weighted draw without replacement.
        lots = jax.random.gumbel(rng_key, shape, jnp.float32)
        lots += jnp.where(state.grew >= threshold, jnp.log(weight), 0.0)

        def draw(is_taken: Array, own: Array) -> tuple[Array, Array]:
            _, clients = lax.top_k(jnp.where(is_taken, -jnp.inf, own), each)
            return is_taken.at[clients].set(True), clients.astype(jnp.int32)

        _, rows = lax.scan(draw, jnp.zeros(num_clients, bool), lots)
        return Cohort.of_rows(rows), state

    def observe(round: Round, cohort: Cohort, reports: Any, state: Any) -> Drift:
        del round
        pairs = cohort.models, jnp.where(cohort.clients >= 0, cohort.clients, num_clients)
        new, old = reports["loss"], state.loss.at[pairs].get(mode="fill", fill_value=jnp.nan)
        grew = jnp.where(jnp.isnan(old), 0, jnp.maximum(0, (new - old) / old))
        return Drift(
            state.loss.at[pairs].set(new, mode="drop"), state.grew.at[pairs].set(grew, mode="drop")
        )

    return Assignment(num_clients, num_models, init, assign, observe)


def _turns(flags: Bool[np.ndarray, " models"], cohort_size: int, at_once: int) -> Any:
    """Yields the models of the K places of the cohort, for each turn."""
    (takers,), (others,) = np.nonzero(flags), np.nonzero(~flags)
    together = min(len(takers), at_once)
    shared = round(len(takers) * cohort_size / len(flags)) if len(others) else cohort_size
    for turn in range(max(1, len(takers))):
        now = {takers[(turn * together + i) % len(takers)] for i in range(together)}
        share = dict(zip(sorted(now), _sizes(shared, len(now)), strict=True))
        share |= dict(zip(others, _sizes(cohort_size - shared, len(others)), strict=True))
        yield np.repeat(sorted(share), [share[m] for m in sorted(share)])


def _sizes(number: int, parts: int) -> list[int]:
    return [len(part) for part in np.array_split(np.arange(number), parts)] if parts else []
