"""Schedulers of jobs, in which each model requests clients and the clients check in one by one."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.assignments.sampling import dealt_to
from fedjax_mm.base import Assignment, Cohort, Look, Round
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import Count, check_argument, part

Eligible: TypeAlias = Bool[np.ndarray, "models clients"] | Sequence[Sequence[bool]]
"""Which clients may serve each model."""


class Requests(NamedTuple):
    """State of a scheduler.

    Attributes:
      since: the first round in which each model asked for clients; 0 before.
      served: the number of clients that each model got so far.
      lot: a random number of each model, drawn once.
    """

    since: Int[Array, " models"]
    served: Int[Array, " models"]
    lot: Float[Array, " models"]


class Supply(NamedTuple):
    """Eligibility by classes and types, the distinct rows and the distinct columns of `eligible`.

    Attributes:
      class_of: the class of each model. Classes are in ascending order of their eligible clients,
        and then of their first model.
      type_of: the type of each client.
      has: whether each type is eligible for each class, ``bool[classes, types]``.
      counts: the number of clients of each type.
    """

    class_of: Int[np.ndarray, " models"]
    type_of: Int[np.ndarray, " clients"]
    has: Bool[np.ndarray, "classes types"]
    counts: Int[np.ndarray, " types"]

    @classmethod
    def of(cls, eligible: Bool[np.ndarray, "models clients"]) -> "Supply":
        """Finds the classes and the types."""
        rows, first, class_of = np.unique(eligible, axis=0, return_index=True, return_inverse=True)
        order = np.lexsort((first, rows.sum(1)))
        rows, class_of = rows[order], np.argsort(order)[class_of.ravel()]
        columns, type_of, counts = np.unique(rows, axis=1, return_inverse=True, return_counts=True)
        return cls(class_of, type_of.ravel(), columns, counts)


@part
def scheduled(
    num_clients: Count,
    num_models: Count,
    *,
    demand: Count | Sequence[int],
    cohort_size: Count | None = None,
    policy: Literal["fifo", "random", "srsf", "las", "venn"] = "srsf",
    eligible: Eligible | None = None,
) -> Assignment:
    """Schedulers of jobs: FIFO, random, SRSF, LAS and Venn.

    In every round each active model requests a number of clients. The clients check in one after
    another, in a new uniform order, and each serves one model that it is eligible for and that
    still lacks clients. The policy says which. A model that gets fewer clients than it requested
    trains with them, and one that gets none keeps its parameters.

    Args:
      num_clients: N.
      num_models: M.
      demand: d_m, the clients that a model requests per round; one number, or one per model.
      cohort_size: K of the N clients check in, drawn uniformly each round; None means all of them.
      policy: "fifo" serves the model first that asked first. "random" draws the models' order
        once. "srsf" serves the smallest demand first, and "las" the model that got the fewest
        clients so far. Ties go to the lower number. "venn" reserves scarce clients, see
        `reserved`; whenever a demand is filled, it plans again. Among the models that a client is
        reserved for, the one with the smallest remaining demand is served. As in its simulator,
        clients of a finished model may wait while a model with more eligible clients lacks some.
      eligible: whether a client may train a model, ``bool[models, clients]``; None means all.

    Raises:
      ValueError: if a demand is not positive, or the sizes or shapes do not fit.

    Example: client 2 is the only one that may train the second model.
      >>> import jax
      >>> eligible = [[True, True, True], [False, False, True]]
      >>> assignment = scheduled(3, 2, demand=[2, 1], policy="venn", eligible=eligible)
      >>> key = jax.random.key(0)
      >>> cohort, _ = assignment.assign(key, 1, assignment.init(key, Look()), Look())
      >>> sorted(zip(cohort.clients.tolist(), cohort.models.tolist()))
      [(0, 0), (1, 0), (2, 1)]

    Reference: Liu et al., "Venn: Resource Management for Collaborative Learning Jobs" (2025), by
    its simulator, whose rounds end when 80 % of a demand have answered. Here all models' rounds
    begin and end together, and the supply of a type is its number of clients.
    """
    number = checks.check_cohort_size(num_clients, cohort_size)
    wanted = _demands(demand, num_models)
    may = _eligible(eligible, num_models, num_clients)
    supply, slots = Supply.of(may), min(number, int(wanted.sum()))

    def init(rng_key: PRNGKeyArray, look: Look) -> Requests:
        del look
        nothing = jnp.zeros(num_models, jnp.int32)
        return Requests(nothing, nothing, jax.random.uniform(rng_key, (num_models,), jnp.float32))

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        dealt = dealt_to(num_models, look)
        asks = jnp.ones(num_models, bool) if dealt is None else dealt.active
        since = jnp.where((state.since == 0) & asks, jnp.asarray(round, jnp.int32), state.since)
        state, lacks = state._replace(since=since), jnp.where(asks, wanted, 0)
        clients = permutation(rng_key, num_clients, number)
        if policy == "venn":
            models = _planned(supply, clients, lacks)
        else:
            first = {"fifo": since, "random": state.lot, "srsf": wanted, "las": state.served}
            models = serve(jnp.asarray(may)[:, clients], lacks, jnp.asarray(first[policy]))
        served = state.served.at[models].add(1, mode="drop")
        order = jnp.argsort(models == num_models, stable=True)[:slots]
        is_served = models[order] < num_models
        cohort = Cohort(
            jnp.where(is_served, clients[order], -1), jnp.where(is_served, models[order], 0)
        )
        return cohort, state._replace(served=served)

    limits = None if eligible is None else may
    return Assignment(num_clients, num_models, init, assign, eligible=limits)


def serve(
    may: Bool[Array, "models places"], lacks: Int[Array, " models"], key: Array
) -> Int[Array, " places"]:
    """The model that each client serves, or M if none.

    Models are served in ascending order of `key`. Each takes the first clients that may serve it
    and that no model before took, which is the same as to let each client serve the first model
    that it may serve and that still lacks clients.

    Args:
      may: whether the client in a place of the queue may serve a model.
      lacks: the number of clients that each model still lacks.
      key: what orders the models; ties go to the lower number.

    Example:
      >>> serve(jnp.ones((2, 4), bool), jnp.array([1, 2]), jnp.array([1, 0])).tolist()
      [1, 1, 0, 2]
    """
    none = jnp.full(may.shape[1], len(may), jnp.int32)

    def take(models: Array, model: Array) -> tuple[Array, None]:
        is_free = may[model] & (models == len(may))
        is_taken = is_free & (jnp.cumsum(is_free) <= lacks[model])
        return jnp.where(is_taken, model, models), None

    return lax.scan(take, none, jnp.argsort(key, stable=True).astype(jnp.int32))[0]


def reserved(
    supply: Supply, lacks: Int[Array, " models"]
) -> tuple[Int[Array, " types"], Float[Array, " classes"]]:
    """Venn's plan: the class that each type of client is reserved for, and each class's supply.

    First, from the scarcest class on, each class takes the types that no scarcer class took. Then,
    from the largest class on, each class e with requests looks at the scarcer classes h in turn. If
    h has no requests, e takes over the types that are eligible for it. If h has requests, e passes
    over h if h holds types that are not eligible for it, takes over all of h if ``m / supply_e`` is
    larger than the number of h's requests over supply_h, and else stops. Here D is the sum of a
    class's demands over its supply, and m is the number of e's requests if ``D_e <= D_h``, or of
    those whose sum of demands, from the smallest on, is below ``D_h supply_e``.

    As in Venn's simulator, a class that has stopped takes over nothing from the classes after it,
    so that clients of a class without requests may wait while a larger class lacks clients.

    Args:
      supply: the classes and the types.
      lacks: the number of clients that each model lacks; 0 for models without a request.

    Example: the second class of Venn's example is scarce, and keeps its clients.
      >>> eligible = np.repeat([[1, 1], [0, 1]], [60, 40], axis=1).astype(bool)
      >>> plan, sizes = reserved(Supply.of(eligible), jnp.array([50, 10]))
      >>> sizes.tolist()
      [40.0, 60.0]
    """
    number = len(supply.has)
    owner = np.where(supply.has.any(0), supply.has.argmax(0), number)
    first = np.maximum(np.bincount(owner, supply.counts, number + 1)[:number], 1)
    order = jnp.argsort(lacks, stable=True)
    class_of = jnp.asarray(supply.class_of)[order]
    waits = (jnp.arange(number)[:, None] == class_of) & (lacks[order] > 0)
    demands = lacks[order].astype(float)
    counts = jnp.asarray(supply.counts, float)
    pairs = np.array([(e, h) for e in reversed(range(number)) for h in reversed(range(e))])

    def compare(now: Any, pair: Array) -> tuple[Any, None]:
        owner, sizes, queues, stopped = now
        (e, h), lengths = pair, queues.sum(1)
        delay = (queues * demands).sum(1) / jnp.maximum(sizes, 1)
        ahead = queues[e] & (jnp.cumsum(queues[e] * demands) / jnp.maximum(sizes[e], 1) < delay[h])
        longer = jnp.where(delay[e] <= delay[h], lengths[e], ahead.sum())
        is_idle = lengths[h] == 0
        # Multiply out the comparison, because a class that was taken over has no supply.
        wins = is_idle | (longer * sizes[h] > lengths[h] * sizes[e])
        usable = jnp.asarray(supply.has)[e]
        left = jnp.sum(jnp.where((owner == h) & ~usable, counts, 0))
        looks = (is_idle | (left == 0)) & (lengths[e] > 0) & (sizes[e] > 0) & ~stopped[e]
        takes = looks & wins
        owner = jnp.where(takes & (owner == h) & usable, e, owner)
        sizes = jnp.where(takes, sizes.at[e].add(sizes[h] - left).at[h].set(left), sizes)
        both = queues.at[e].set(queues[e] | queues[h]).at[h].set(False)
        queues = jnp.where(takes, both, queues)
        return (owner, sizes, queues, stopped.at[e].set(stopped[e] | (looks & ~wins))), None

    start = jnp.asarray(owner, jnp.int32), jnp.asarray(first, float), waits, jnp.zeros(number, bool)
    if len(pairs):
        start, _ = lax.scan(compare, start, jnp.asarray(pairs, jnp.int32))
    return start[:2]


def _planned(
    supply: Supply, clients: Int[Array, " places"], lacks: Int[Array, " models"]
) -> Int[Array, " places"]:
    """Serves models by Venn's plan, which is made again whenever a demand is filled."""
    none, number = len(lacks), len(clients)
    types, places = jnp.asarray(supply.type_of)[clients], jnp.arange(number)

    def goes_on(now: Any) -> Array:
        _, lacks, place = now
        return (place < number) & jnp.any(lacks > 0)

    def serve_until_filled(now: Any) -> Any:
        models, lacks, place = now
        plan, _ = reserved(supply, lacks)
        may = (plan[types] == supply.class_of[:, None]) & (places >= place)
        found = serve(may, lacks, lacks)
        is_its = found == jnp.arange(none)[:, None]
        is_last = is_its & (jnp.cumsum(is_its, axis=1) == lacks[:, None])
        until = jnp.where(is_last.any(), jnp.argmax(is_last.any(0)), number - 1)
        is_done = (places >= place) & (places <= until)
        got = (is_its & is_done).sum(1, dtype=lacks.dtype)
        return jnp.where(is_done, found, models), lacks - got, until + 1

    start = jnp.full(number, none, jnp.int32), lacks, jnp.zeros((), places.dtype)
    return lax.while_loop(goes_on, serve_until_filled, start)[0]


def _demands(demand: Any, num_models: int) -> Int[np.ndarray, " models"]:
    if isinstance(demand, int | np.integer):
        return np.full(num_models, demand, np.int32)
    each = [check_argument(f"demand[{m}]", one, Count) for m, one in enumerate(demand)]
    if len(each) != num_models:
        raise ValueError(f"demand has {len(each)} numbers; give one, or {num_models}, one each")
    return np.array(each, np.int32)


def _eligible(
    eligible: Any, num_models: int, num_clients: int
) -> Bool[np.ndarray, "models clients"]:
    shape = num_models, num_clients
    if eligible is None:
        return np.ones(shape, bool)
    if np.shape(eligible) != shape or np.asarray(eligible).dtype != bool:
        raise ValueError(
            f"eligible has the shape {np.shape(eligible)} and the type "
            f"{np.asarray(eligible).dtype}; give bool[models, clients], here of the shape {shape}"
        )
    return np.asarray(eligible)
