"""Flexible participation: clients opt out of models that do not appeal to them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from fedjax_mm.base import Assignment, Cohort, Look, Round
from fedjax_mm.base.cohorts import by_rows, places_of
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import Count, TracedCount, part
from fedjax_mm.checks.instances import check_assignment
from fedjax_mm.wrap import wrap_assignment


@part
def appealing(
    assignment: Assignment, *, cohort_size: Count, from_round: TracedCount = 10
) -> Assignment:
    """Flexible participation: from a given round on, only clients that a model appeals to train it.

    The assignment draws a group of clients for each model. Among the clients in the group that the
    model currently appeals to, m are drawn uniformly without replacement, or all of them if there
    are fewer. A model that appeals to none of them does not change. Before `from_round` all clients
    in the group are eligible.

    Args:
      assignment: chooses the clients that may train each model, such as ``full_participation(N)``.
      cohort_size: m, per model.
      from_round: the first round in which clients may opt out.

    Raises:
      ValueError: if `cohort_size` is not between 1 and N, or `from_round` is not positive.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedjax_mm import full_participation
      >>> assignment = appealing(full_participation(6), cohort_size=2, from_round=1)
      >>> appeals = jnp.array([[False, True, False, False, False, False]])
      >>> look = Look(losses=None, appeals=lambda: appeals, metric=None)
      >>> cohort, _ = assignment.assign(jax.random.key(0), 1, (), look)
      >>> cohort.clients.tolist()
      [1, -1]

    Reference: Cho et al., section 4, Tables 1 and 2.
    """
    num_clients = check_assignment(assignment).num_clients
    checks.check_between("cohort_size", cohort_size, 1, num_clients, "num_clients")

    def change(
        rng_key: PRNGKeyArray, round: Round, own: Any, drawn: Cohort, look: Look
    ) -> tuple[Cohort, Any]:
        places = places_of(drawn.clients, drawn.models, assignment.num_models)
        arrays = drawn.clients, drawn.scale, drawn.takes_part
        clients, scale, takes_part = by_rows(arrays, places)
        is_there = clients >= 0
        wants = jnp.take_along_axis(look.appeals(), jnp.maximum(clients, 0), axis=1)
        stays = is_there & (wants | (jnp.asarray(round) < from_round))
        # Sort by random numbers to get a uniform order, with eligible clients first.
        lots = jax.random.bits(rng_key, stays.shape, jnp.uint32)
        order = jnp.lexsort((lots, ~stays), axis=1)[:, :cohort_size]
        rows = jnp.where(stays, clients, -1), scale, takes_part
        clients, *rest = jax.tree.map(lambda x: jnp.take_along_axis(x, order, axis=1), rows)
        return Cohort.of_rows(clients, rest[0], drawn.num_gradients, rest[1]), own

    return wrap_assignment(
        assignment, "appealing", change, keys_of=lambda key: tuple(jax.random.split(key))
    )
