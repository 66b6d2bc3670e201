"""Who trains what if models lie at peers or at edge servers."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from fedjax_mm.assignments.sampling import no_state
from fedjax_mm.base import Assignment, Cohort, Look, Round
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import Count, part


@part
def peers(
    num_clients: Count,
    num_models: Count | None = None,
    *,
    cohort_size: Count | None = None,
    measured: Count = 64,
) -> Assignment:
    """Every client trains its own model, without a server, for `mixing`.

    Args:
      num_clients: N.
      num_models: M, which is N.
      cohort_size: the number of clients that train in a round, drawn uniformly; None means all.
      measured: the largest number of peers with the task's metrics, which are over the data of all
        clients; of more peers some, spread evenly, have them, and those of the others are NaN.
        Metrics such as ``own_loss`` have all peers.

    Raises:
      ValueError: if M is not N, or `cohort_size` is not between 1 and N.

    Example: without mixing, clients train alone.
      >>> cohort, _ = peers(3).assign(jax.random.key(0), 1, (), Look())
      >>> cohort.clients.tolist(), cohort.models.tolist()
      ([0, 1, 2], [0, 1, 2])
    """
    if num_models not in (None, num_clients):
        raise ValueError(f"num_models is {num_models}; peers have one model each, {num_clients}")
    number = checks.check_cohort_size(num_clients, cohort_size)

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        del round
        clients, active = jnp.arange(num_clients, dtype=jnp.int32), look.active()
        if number < num_clients:
            drawn = permutation(rng_key, num_clients, number)
            clients = jnp.full_like(clients, -1).at[drawn].set(drawn)
        clients = clients if active is None else jnp.where(active, clients, -1)
        return Cohort.of_rows(clients[:, None]), state

    return Assignment(num_clients, num_clients, no_state, assign, peers=True, measured=measured)


@part
def edges(
    num_clients: Count,
    num_models: Count,
    *,
    edge_of: Sequence[int] | Int[np.ndarray, " clients"] | None = None,
    cohort_size: Count | None = None,
) -> Assignment:
    """Every model is that of an edge server, which trains it on its own clients, for `mixing`.

    Args:
      num_clients: N.
      num_models: M, the number of edges.
      edge_of: the edge of each client, from 0; None splits the clients in order into parts of
        nearly equal size.
      cohort_size: the number of an edge's clients that train in a round, drawn uniformly, or all if
        it has fewer; None means all.

    Raises:
      ValueError: if there is not one edge for each client, or an edge has no client.

    Example:
      >>> cohort, _ = edges(3, 2, edge_of=[0, 1, 0]).assign(jax.random.key(0), 1, (), Look())
      >>> cohort.clients.reshape(2, -1).tolist()
      [[0, 2], [1, -1]]
    """
    parts = np.array_split(np.arange(num_clients), num_models)
    of = np.repeat(np.arange(num_models), [*map(len, parts)]) if edge_of is None else edge_of
    of = np.asarray(of)
    if of.shape != (num_clients,) or set(of.tolist()) != set(range(num_models)):
        raise ValueError(
            f"edge_of has {of.size} numbers, of {len(set(of.tolist()))} edges; give each of "
            f"{num_clients} clients one of 0 ... {num_models - 1}, and each edge a client"
        )
    mine = [np.flatnonzero(of == edge) for edge in range(num_models)]
    width = max(map(len, mine))
    rows = np.stack([np.pad(x, (0, width - len(x)), constant_values=-1) for x in mine])
    rows = rows.astype(np.int32)
    number = width if cohort_size is None else min(cohort_size, width)

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        del round
        clients, active = jnp.asarray(rows), look.active()
        if number < width:
            # XLA takes ten times longer to compile a draw with two axes than a flat one.
            lots = jax.random.bits(rng_key, (rows.size,), jnp.uint32).reshape(rows.shape)
            order = jnp.lexsort((lots, clients < 0), axis=1)[:, :number]
            clients = jnp.take_along_axis(clients, order, axis=1)
        clients = clients if active is None else jnp.where(active[:, None], clients, -1)
        return Cohort.of_rows(clients), state

    may = of == np.arange(num_models)[:, None]
    return Assignment(num_clients, num_models, no_state, assign, eligible=may)
