"""Assignments that partition clients independently of the models' losses.

Groups are near-equal: sizes differ by at most 1, and shorter groups are padded with -1. Every
partition draws at random which models get the larger groups.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, PRNGKeyArray, UInt32

from fedjax_mm.assignments.sampling import (
    Dealt,
    add_models,
    check_processors,
    cohort_sizes,
    dealt_to,
    draw_cohort,
    no_state,
    part_of,
    uniform_sampling,
)
from fedjax_mm.base import Assignment, Cohort, Look, Metrics, Padded, Round, Sampling, keys
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import Count, TracedCount, part

Processors: TypeAlias = int | Sequence[int] | np.ndarray
"""B_k, the maximum number of models a client trains per round; one number, or one per client."""


@part
def mfa_rand(
    num_clients: Count,
    num_models: Count | Padded,
    *,
    cohort_size: Count | None = None,
    unbiased: bool = False,
    processors: Processors = 1,
) -> Assignment:
    """MFA-Rand: in every round, a new uniform partition into M groups, randomly matched to models.

    With one model this is FedAvg with a uniform cohort.

    A client with B_k processors trains ``min(B_k, M)`` distinct models, drawn uniformly. The first
    one is its group's model, so every model still has its group. The others are drawn independently
    of other clients.

    Args:
      num_clients: N.
      num_models: M <= cohort size. If it is padded, models beyond M do not train.
      cohort_size: K of the N clients, drawn uniformly each round; None means all of them.
      unbiased: whether clients' weights are multiplied by 1/p, where ``p = min(B_k, M) K / (N M)``
        is the probability that a client trains a given model. `stalevr` requires this. With
        ``fedavg(server_scale="1/N")`` the expected step then equals that of full participation.
      processors: B_k; one number, or one per client. With 1, each client of the cohort trains one
        model; with M or more, it trains all of them.

    Raises:
      ValueError: if the sizes do not fit, `processors` are not positive integers or `unbiased` is
        not a bool.

    Example:
      >>> import jax
      >>> assignment = mfa_rand(6, 3)
      >>> cohort, _ = assignment.assign(jax.random.key(0), 1, (), Look())
      >>> sorted(cohort.clients.tolist()), cohort.models.tolist()
      ([0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 2])
      >>> assignment = mfa_rand(3, 2, processors=[1, 2, 2])
      >>> cohort, _ = assignment.assign(jax.random.key(0), 1, (), Look())
      >>> sorted(cohort.clients.tolist())
      [0, 1, 1, 2, 2]

    Reference: Bhuyan, Moharir, Joshi, "Multi-Model Federated Learning with Provable Guarantees",
    Alg. 2, for one processor per client; several processors are an extension.
    """
    most_models, number, cohort_size = cohort_sizes(num_clients, num_models, cohort_size)
    num_trained = check_processors(processors, num_clients)
    # There may be a billion clients. Do not broadcast a single number.
    most = num_trained[0] if np.ndim(processors) == 0 else num_trained.max()
    is_several = min(most, most_models) > 1
    num_trained = np.minimum(num_trained, most_models) if is_several else num_trained

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        del round
        dealt = dealt_to(num_models, look)
        models, M = (num_models, number) if dealt is None else (dealt.padded, dealt.number)
        cohort = draw_cohort(rng_key, num_clients, models, cohort_size)
        if is_several:
            slots = int(np.sort(num_trained)[-cohort_size:].sum())
            cohort = add_models(rng_key, cohort, num_trained, most_models, M, slots)
        if unbiased:
            # A weak dtype keeps float32 contributions in float32.
            factor = jnp.asarray(num_clients / cohort_size) * M
            scale = jnp.broadcast_to(factor, cohort.clients.shape)
            if is_several:
                scale = scale / jnp.minimum(jnp.asarray(num_trained)[cohort.clients], M)
            cohort = dataclasses.replace(cohort, scale=scale)
        return cohort if dealt is None else dealt.named(cohort), state

    most_of_a_client = int(min(most, most_models))
    sampling = uniform_sampling(num_clients, cohort_size)._replace(most_models=most_of_a_client)
    return Assignment(num_clients, most_models, no_state, assign).sampled(sampling)


@part
def mfa_rr(
    num_clients: Count,
    num_models: Count | Padded,
    *,
    cohort_size: Count | None = None,
    redraw: Literal["frame", "round", "never"] = "frame",
    on_change: Literal["cut", "wait"] = "cut",
) -> Assignment:
    """MFA-RR: one partition per frame of M rounds, whose groups rotate through the models.

    Group j trains model ((j + t - 2) mod M) + 1 in round t, all counted from 1, so every client
    trains every model exactly once per frame.

    Args:
      num_clients: N.
      num_models: M <= cohort size. If it is padded, models beyond M do not train.
      cohort_size: K of the N clients; None means all of them.
      redraw: "frame", the default, keeps the cohort for a frame. "round" draws a new cohort and
        partition in every round, as in the paper's text on partial participation. Groups are then
        distributed as in MFA-Rand. With "never", all clients stay in the groups of one partition,
        and the K clients of each round are drawn from all groups; this is the round-robin
        allocation of FedFairMMFL's authors, with a partition of the clients in order.
      on_change: how a frame reacts to a change of the active models. "cut" ends it and
        begins a new one with one group per active model. ``frames_cut`` counts these ends.
        With "wait", the frame goes on to its end without the finished and the new models.

    Raises:
      ValueError: if the sizes do not fit, or a choice is unknown.

    Example:
      >>> import jax
      >>> assignment = mfa_rr(4, 2)
      >>> key, look = jax.random.key(0), Look()
      >>> first, state = assignment.assign(key, 1, assignment.init(key, look), look)
      >>> second, state = assignment.assign(key, 2, state, look)
      >>> rows = first.clients.reshape(2, 2), second.clients.reshape(2, 2)
      >>> bool((rows[0] == rows[1][::-1]).all())
      True

    Reference: Bhuyan, Moharir, Joshi, "Multi-Model Federated Learning with Provable Guarantees",
    Alg. 3.
    """
    if redraw == "never":
        return _rotated_groups(num_clients, num_models, cohort_size)
    most_models, number, cohort_size = cohort_sizes(num_clients, num_models, cohort_size)
    rounds_held = number if redraw == "frame" else 1

    def draw(rng_key: PRNGKeyArray, models: int | Padded = num_models) -> Cohort:
        return draw_cohort(rng_key, num_clients, models, cohort_size)

    def init(rng_key: PRNGKeyArray, look: Look) -> Cohort | Frame:
        is_fixed = dealt_to(num_models, look) is None
        models = num_models if is_fixed else Padded(most_models, 1)
        cohort = jax.eval_shape(partial(draw, models=models), rng_key)
        empty = jax.tree.map(lambda x: jnp.full(x.shape, -1, x.dtype), cohort)
        nobody = jnp.zeros(most_models, bool)
        return empty if is_fixed else Frame(empty, nobody, jnp.int32(0), jnp.int32(0))

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        turn = jnp.asarray(round, jnp.int32) - 1
        if isinstance(state, Frame):
            active, may_cut = jnp.asarray(look.active()), on_change == "cut"
            frame = state.next(turn + 1, active, may_cut, redraw == "round", partial(draw, rng_key))
            return frame.cohort(turn + 1, active), frame
        # Keep the unrotated partition as the state, and rotate it in every round.
        held = lax.cond(turn % rounds_held == 0, lambda: draw(rng_key), lambda: state)
        if isinstance(num_models, Padded):
            return Cohort(held.clients, (held.models + turn) % number), held
        rows = held.clients.reshape(number, -1)
        return Cohort.of_rows(rows[(jnp.arange(number) - turn) % number]), held

    def metrics(state: Cohort | Frame) -> Metrics:
        if isinstance(state, Frame):
            return {"frames_cut": jnp.full(most_models, state.cuts, float)}
        return {}

    # The same clients participate throughout a frame.
    sampling = uniform_sampling(num_clients, cohort_size if redraw == "round" else num_clients)
    return Assignment(num_clients, most_models, init, assign, None, metrics).sampled(sampling)


def _rotated_groups(
    num_clients: int, num_models: int | Padded, cohort_size: int | None
) -> Assignment:
    """MFA-RR with one partition of all clients, which stays."""
    most_models, fixed, drawn = cohort_sizes(num_clients, num_models, cohort_size)

    def init(
        rng_key: PRNGKeyArray, look: Look
    ) -> tuple[Int[Array, " clients"], UInt32[Array, " models"]]:
        del look
        # Each client's place in a row, and lots that order the groups.
        lots = jax.random.bits(keys.groups_key(rng_key), (most_models,), jnp.uint32)
        return permutation(rng_key, num_clients, num_clients), lots

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        dealt = dealt_to(num_models, look)
        number = fixed if dealt is None else dealt.number
        (places, lots), clients = state, permutation(rng_key, num_clients, drawn)
        groups = part_of(places[clients], num_clients, number)
        # Groups of equal size are matched to models at random by the places already.
        order = jnp.lexsort((lots, jnp.arange(most_models) >= number))
        groups = jnp.where(num_clients % number == 0, groups, order.astype(jnp.int32)[groups])
        cohort = Cohort(clients, (groups + jnp.asarray(round, jnp.int32) - 1) % number)
        return cohort if dealt is None else dealt.named(cohort), state

    sampling = uniform_sampling(num_clients, drawn)
    return Assignment(num_clients, most_models, init, assign).sampled(sampling)


class Frame(NamedTuple):
    """State of MFA-RR if models come and go, with frames of one round per active model.

    Attributes:
      held: the partition of the frame, of numbers from 0 on.
      active: the active models when the frame began.
      first: its first round.
      cuts: the number of frames that ended early.
    """

    held: Cohort
    active: Bool[Array, " models"]
    first: Int[Array, ""]
    cuts: Int[Array, ""]

    def next(
        self,
        t: Int[Array, ""],
        active: Bool[Array, " models"],
        may_cut: bool,
        redraws: bool,
        draw: Callable[[Padded], Cohort],
    ) -> Self:
        """The frame in round t."""
        is_over = (self.first == 0) | (t - self.first == Dealt.to(self.active).number)
        is_cut = ~is_over & jnp.any(self.active != active) & may_cut
        begins = is_over | is_cut
        now = jnp.where(begins, active, self.active)
        models = Dealt.to(now).padded
        held = lax.cond(begins | redraws, lambda: draw(models), lambda: self.held)
        return self._replace(
            held=held,
            active=now,
            first=jnp.where(begins, t, self.first),
            cuts=self.cuts + is_cut,
        )

    def cohort(self, t: Int[Array, ""], active: Bool[Array, " models"]) -> Cohort:
        """The cohort of round t, without the models that have finished during the frame."""
        dealt = Dealt.to(self.active)
        turned = Cohort(self.held.clients, (self.held.models + t - self.first) % dealt.number)
        return dealt._replace(active=self.active & active).named(turned)


@part
def fedcluster(num_clients: Count, num_clusters: Count) -> Assignment:
    """FedCluster: one model visits fixed clusters of clients, in a new order per learning round.

    One simulator round is a visit to one cluster; a learning round is `num_clusters` visits.

    Args:
      num_clients: N.
      num_clusters: the number of clusters, which are near-equal groups of a uniform partition,
        drawn once.

    Raises:
      ValueError: if there are more clusters than clients.

    Example:
      >>> import jax
      >>> assignment = fedcluster(6, 3)
      >>> key, look = jax.random.key(0), Look()
      >>> cohort, _ = assignment.assign(key, 1, assignment.init(key, look), look)
      >>> cohort.clients.shape
      (2,)

    Reference: Chen et al., "FedCluster" (2020), as compared by Bhuyan et al., Remark 2.
    """
    checks.check_sizes(num_clients, num_clusters, None, parts="clusters")

    def init(rng_key: PRNGKeyArray, look: Look) -> Any:
        del look
        cohort = draw_cohort(rng_key, num_clients, num_clusters, num_clients)
        clusters = cohort.clients.reshape(num_clusters, -1)
        return clusters, jnp.arange(num_clusters, dtype=jnp.int32)

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        del look
        clusters, order = state
        visit = (jnp.asarray(round, jnp.int32) - 1) % num_clusters
        order = lax.cond(visit == 0, lambda: permutation(rng_key, num_clusters), lambda: order)
        return Cohort.of_rows(clusters[order[visit]][None]), (clusters, order)

    return Assignment(num_clients, 1, init, assign).sampled(Sampling(1))


@part
def full_participation(num_clients: Count) -> Assignment:
    """Full participation: every client trains the only model in every round.

    For a uniform cohort of K clients per round use ``mfa_rand(num_clients, 1, cohort_size=K)``.

    Example:
      >>> import jax
      >>> full_participation(3).assign(jax.random.key(0), 1, (), Look())[0].clients.tolist()
      [0, 1, 2]

    Reference: McMahan et al., "Communication-Efficient Learning of Deep Networks ..." (2017).
    """
    return sequential(num_clients, 1, rounds_per_model=1)


@part
def sequential(
    num_clients: Count,
    num_models: Count,
    *,
    rounds_per_model: TracedCount,
    cohort_size: Count | None = None,
) -> Assignment:
    """Sequential FedAvg: clients train model 1 for T1 rounds, then model 2, and so on.

    This is the baseline for the multi-model gain. After the last model it returns to the first.
    If the model whose turn it is has finished, the next active one has its turn at once.

    Args:
      num_clients: N.
      num_models: M.
      rounds_per_model: T1, the number of consecutive rounds in which a model is trained.
      cohort_size: K of the N clients, drawn uniformly each round; None means all of them.

    Raises:
      ValueError: if a size is not positive, or `cohort_size` is larger than N.

    Example:
      >>> import jax
      >>> assignment = sequential(2, 2, rounds_per_model=10)
      >>> cohort, _ = assignment.assign(jax.random.key(0), 11, (), Look())
      >>> cohort.clients.tolist(), cohort.models.tolist()
      ([0, 1], [1, 1])

    Reference: Bhuyan, Moharir, Joshi, eq. (3).
    """
    if cohort_size is not None:
        checks.check_between("cohort_size", cohort_size, 1, num_clients, "num_clients")

    def init(rng_key: PRNGKeyArray, look: Look) -> Any:
        del rng_key
        return () if look.active() is None else (jnp.int32(0), jnp.int32(1))

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        dealt = dealt_to(num_models, look)
        t = jnp.asarray(round, jnp.int32)
        clients = jnp.arange(num_clients, dtype=jnp.int32)
        if cohort_size is not None:
            clients = permutation(rng_key, num_clients, cohort_size)
        if dealt is not None:
            model, first = state
            is_over = t - first >= rounds_per_model
            later = (model + is_over + jnp.arange(num_models, dtype=jnp.int32)) % num_models
            is_any = dealt.active.any()
            turn = jnp.where(is_any, later[jnp.argmax(dealt.active[later])], model)
            first = jnp.where(is_any & (turn == model) & ~is_over, first, t + ~is_any)
            cohort = Cohort(clients, jnp.broadcast_to(turn, clients.shape))
            return dealt.masked(cohort), (turn, first)
        turn = (t - 1) // rounds_per_model % num_models
        if num_models == 1:
            return Cohort.of_rows(clients[None]), state
        return Cohort(clients, jnp.broadcast_to(turn, clients.shape)), state

    sampling = uniform_sampling(num_clients, cohort_size or num_clients)
    return Assignment(num_clients, num_models, init, assign).sampled(sampling)
