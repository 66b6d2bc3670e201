"""Assignments that divide the clients without a look at the models.

Groups are near-equal: sizes differ by at most 1, and shorter groups are padded with -1. Every
partition draws which models get the larger groups.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PRNGKeyArray

from fedjax_mm import checks
from fedjax_mm.base import Assignment, Groups, Look, Round
from fedjax_mm.shuffles import permutation


def mfa_rand(num_clients: int, num_models: int, *, cohort_size: int | None = None) -> Assignment:
    """MFA-Rand: a new uniform partition into M groups in every round, matched to models at random.

    With one model this is FedAvg with a uniform cohort.

    Args:
      num_clients: N.
      num_models: M <= cohort size.
      cohort_size: K of the N clients, drawn uniformly each round; all of them if None.

    Raises:
      ValueError: if the sizes do not fit.

    Example:
      >>> import jax
      >>> strategy = mfa_rand(6, 3)
      >>> groups, _ = strategy.assign(jax.random.key(0), 1, (), None)
      >>> groups.clients.shape, sorted(groups.clients.ravel().tolist())
      ((3, 2), [0, 1, 2, 3, 4, 5])

    Reference: Bhuyan, Moharir, Joshi, "Multi-Model Federated Learning with Provable Guarantees",
    Alg. 2.
    """
    num_clients, num_models, cohort_size = checks.check_sizes(num_clients, num_models, cohort_size)

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Groups, Any]:
        del round, look
        return Groups(draw_groups(rng_key, num_clients, num_models, cohort_size)), state

    return Assignment(num_clients, num_models, no_state, assign)


def mfa_rr(
    num_clients: int,
    num_models: int,
    *,
    cohort_size: int | None = None,
    redraw: Literal["frame", "round"] = "frame",
) -> Assignment:
    """MFA-RR: a partition that holds for a frame of M rounds; its groups visit the models in turn.

    Group j trains model ((j + t - 2) mod M) + 1 in round t, all counted from 1, so every client
    trains every model exactly once in a frame.

    Args:
      num_clients: N.
      num_models: M <= cohort size.
      cohort_size: K of the N clients; all of them if None.
      redraw: "frame", the default, keeps a cohort for a frame. "round" draws a new cohort and
        partition in every round, which is what the paper's text on partial participation says;
        groups then have the distribution of MFA-Rand's.

    Raises:
      ValueError: if the sizes do not fit or `redraw` is unknown.

    Example:
      >>> import jax
      >>> strategy = mfa_rr(4, 2)
      >>> key, state = jax.random.key(0), strategy.init(jax.random.key(0))
      >>> first, state = strategy.assign(key, 1, state, None)
      >>> second, state = strategy.assign(key, 2, state, None)
      >>> bool((first.clients == second.clients[::-1]).all())
      True

    Reference: Bhuyan, Moharir, Joshi, "Multi-Model Federated Learning with Provable Guarantees",
    Alg. 3.
    """
    num_clients, num_models, cohort_size = checks.check_sizes(num_clients, num_models, cohort_size)
    checks.check_choice("redraw", redraw, "frame", "round")
    rounds_held = num_models if redraw == "frame" else 1

    def init(rng_key: PRNGKeyArray) -> Any:
        del rng_key
        return jnp.full((num_models, -(-cohort_size // num_models)), -1, jnp.int32)

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Groups, Any]:
        del look
        turn = jnp.asarray(round, jnp.int32) - 1
        # The state is the partition before the rotation, so that it can be rotated in every round.
        groups = lax.cond(
            turn % rounds_held == 0,
            lambda: draw_groups(rng_key, num_clients, num_models, cohort_size),
            lambda: state,
        )
        return Groups(jnp.roll(groups, turn % num_models, axis=0)), groups

    return Assignment(num_clients, num_models, init, assign)


def fedcluster(num_clients: int, num_clusters: int) -> Assignment:
    """FedCluster: one model visits fixed clusters of clients, in a new order each time.

    One round of the simulator is one cluster's visit; a learning round is `num_clusters` of them.

    Args:
      num_clients: N.
      num_clusters: the clusters, drawn once by a uniform partition into near-equal groups.

    Raises:
      ValueError: if there are more clusters than clients.

    Example:
      >>> import jax
      >>> strategy = fedcluster(6, 3)
      >>> groups, _ = strategy.assign(
      ...     jax.random.key(1), 1, strategy.init(jax.random.key(0)), None)
      >>> groups.clients.shape
      (1, 2)

    Reference: Chen et al., "FedCluster" (2020), as compared with in Bhuyan et al., Remark 2.
    """
    num_clients, num_clusters, _ = checks.check_sizes(
        num_clients, num_clusters, None, parts="clusters"
    )

    def init(rng_key: PRNGKeyArray) -> Any:
        clusters = draw_groups(rng_key, num_clients, num_clusters, num_clients)
        return clusters, jnp.arange(num_clusters, dtype=jnp.int32)

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Groups, Any]:
        del look
        clusters, order = state
        visit = (jnp.asarray(round, jnp.int32) - 1) % num_clusters
        order = lax.cond(visit == 0, lambda: permutation(rng_key, num_clusters), lambda: order)
        return Groups(clusters[order[visit]][None, :]), (clusters, order)

    return Assignment(num_clients, 1, init, assign)


def full_participation(num_clients: int) -> Assignment:
    """FedAvg: one model, trained by every client in every round.

    For a uniform cohort of K clients a round use ``mfa_rand(num_clients, 1, cohort_size=K)``.

    Example:
      >>> import jax
      >>> full_participation(3).assign(jax.random.key(0), 1, (), None)[0].clients.tolist()
      [[0, 1, 2]]

    Reference: McMahan et al., "Communication-Efficient Learning of Deep Networks ..." (2017).
    """
    return sequential(num_clients, 1, rounds_per_model=1)


def sequential(
    num_clients: int, num_models: int, *, rounds_per_model: int, cohort_size: int | None = None
) -> Assignment:
    """Sequential FedAvg: the clients train model 1 for T1 rounds, then model 2, and so on.

    The baseline of the multi-model gain. After the last model's turn the first one continues.

    Args:
      num_clients: N.
      num_models: M.
      rounds_per_model: T1.
      cohort_size: K of the N clients, drawn uniformly each round; all of them if None.

    Raises:
      ValueError: if a size is not positive, or there are fewer clients than a cohort has.

    Example:
      >>> import jax
      >>> strategy = sequential(2, 2, rounds_per_model=10)
      >>> strategy.assign(jax.random.key(0), 11, (), None)[0].clients.tolist()
      [[-1, -1], [0, 1]]

    Reference: Bhuyan, Moharir, Joshi, eq. (3).
    """
    num_clients = checks.check_count("num_clients", num_clients)
    num_models = checks.check_count("num_models", num_models)
    rounds_per_model = checks.check_count("rounds_per_model", rounds_per_model)
    num_drawn = checks.check_count("cohort_size", cohort_size, optional=True)
    if num_drawn is not None:
        checks.check_between("cohort_size", num_drawn, 1, num_clients, "num_clients")

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Groups, Any]:
        del look
        turn = (jnp.asarray(round, jnp.int32) - 1) // rounds_per_model % num_models
        its_turn = jnp.arange(num_models) == turn
        cohort = jnp.arange(num_clients, dtype=jnp.int32)
        if num_drawn is not None:
            cohort = permutation(rng_key, num_clients, num_drawn)
        return Groups(jnp.where(its_turn[:, None], cohort, -1)), state

    return Assignment(num_clients, num_models, no_state, assign)


def draw_groups(
    rng_key: PRNGKeyArray, num_clients: int, num_models: int, cohort_size: int
) -> Int[Array, "models group"]:
    """Draws a uniform cohort, divides it into M near-equal groups and matches them to models."""
    cohort_key, order_key = jax.random.split(rng_key)
    cohort = permutation(cohort_key, num_clients, cohort_size)
    # Equal groups of a random order need no second shuffle: the match is random already.
    if cohort_size % num_models == 0:
        return cohort.reshape(num_models, -1)
    slots = _padded_slots(cohort_size, num_models)
    groups = jnp.where(slots >= 0, cohort[slots], -1)
    return groups[permutation(order_key, num_models)]


def _padded_slots(cohort_size: int, num_models: int) -> Int[np.ndarray, "models group"]:
    """Returns positions in the cohort, group by group; the last groups are padded with -1."""
    parts = np.array_split(np.arange(cohort_size, dtype=np.int32), num_models)
    width = len(parts[0])
    return np.stack([np.pad(part, (0, width - len(part)), constant_values=-1) for part in parts])


def no_state(rng_key: PRNGKeyArray) -> Any:
    """Returns the state of an assignment that remembers nothing."""
    del rng_key
    return ()
