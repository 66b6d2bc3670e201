"""Clustered federated learning: clients with similar data train a model together."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.assignments.sampling import no_state
from fedjax_mm.base import Assignment, Cohort, Look, Metrics, Params, Round, Scalar
from fedjax_mm.base.contract import ACTIVE
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import Count, NonNegative, Positive, part


@part
def ifca(
    num_clients: Count,
    num_models: Count,
    *,
    cohort_size: Count | None = None,
    average: Literal["models", "gradients"] = "models",
) -> Assignment:
    """IFCA: each client of the cohort trains the model with the smallest loss on its data.

    Client i joins cluster ``j_i = argmin_j F_i(w_j)``, and ties go to the lowest number. All models
    must share a task, because their losses are compared, and start from different parameters,
    because otherwise all clients would join model 1. A model that no client joins does not change.
    Every round evaluates each model on all training examples.

    With ``fedavg(local, weighted=False)`` the new model is the mean of its cluster's local models.
    With ``average="gradients"`` use ``fedavg(local_sgd(rate, steps=1), server_scale="1/N",
    weighted=False)``. The model then moves by ``-rate / m`` times the sum of its cluster's
    gradients, where m is the size of the cohort, not of the cluster. With the default server scale,
    which divides by the participants' weights, the factors would cancel and models would be
    averaged.

    Args:
      num_clients: N.
      num_models: p, the number of clusters.
      cohort_size: m of the N clients, drawn uniformly each round; None means all of them.
      average: "models" leaves clients' weights unchanged. "gradients" multiplies them by N/m, so
        that the server's division by N becomes a division by m.

    Raises:
      ValueError: if a size is not positive, `cohort_size` is larger than N or `average` is unknown.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> losses = jnp.array([[0.5, 2.0, 1.0], [0.7, 0.1, 1.0]])
      >>> look = Look(losses=lambda: losses)
      >>> cohort, _ = ifca(3, 2).assign(jax.random.key(0), 1, (), look)
      >>> cohort.clients.tolist(), cohort.models.tolist()
      ([0, 1, 2], [0, 1, 0])

    Reference: Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated
    Learning" (2020).
    """
    number = checks.check_cohort_size(num_clients, cohort_size)

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        del round
        clients, losses = _cohort_losses(rng_key, look, num_clients, number)
        models = jnp.argmin(losses, axis=0)
        scale = None
        if average == "gradients":
            # Keep the dtype weak, so that float32 contributions stay float32.
            scale = jnp.broadcast_to(jnp.asarray(num_clients / number), clients.shape)
        return Cohort(clients, models.astype(jnp.int32), scale), state

    return Assignment(num_clients, num_models, no_state, assign)


@part
def soft_clusters(
    num_clients: Count,
    num_models: Count,
    *,
    temperature: Positive,
    cohort_size: Count | None = None,
) -> Assignment:
    """Soft clusters: clients train all models, with weights that fall with the models' losses.

    Client i multiplies its weight in model j by ``softmax_j(-F_i(w_j) / temperature)``. A small
    temperature gives `ifca`, and a large one M copies of FedAvg. Models must share a task and start
    from different parameters, and every round evaluates each of them on all training examples.

    Args:
      num_clients: N.
      num_models: M, the number of clusters.
      temperature: of the softmax, in units of the loss.
      cohort_size: the number of clients that train in a round, drawn uniformly; None means all.

    Raises:
      ValueError: if a number is not positive, or `cohort_size` is larger than N.

    Example:
      >>> import jax
      >>> look = Look(losses=lambda: jnp.array([[0.0, 3.0], [0.0, 0.0]]))
      >>> cohort, _ = soft_clusters(2, 2, temperature=1.0).assign(jax.random.key(0), 1, (), look)
      >>> [round(float(x), 2) for x in cohort.scale]
      [0.5, 0.05, 0.5, 0.95]
    """
    number = checks.check_cohort_size(num_clients, cohort_size)

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        del round
        clients, losses = _cohort_losses(rng_key, look, num_clients, number)
        weights = jax.nn.softmax(-losses / temperature, axis=0).astype(losses.dtype)
        return Cohort.of_rows(jnp.broadcast_to(clients, losses.shape), weights), state

    return Assignment(num_clients, num_models, no_state, assign)


def _cohort_losses(
    rng_key: PRNGKeyArray, look: Look, num_clients: int, cohort_size: int
) -> tuple[Int[Array, " cohort"], Float[Array, "models cohort"]]:
    clients = jnp.arange(num_clients, dtype=jnp.int32)
    if cohort_size < num_clients:
        clients = permutation(rng_key, num_clients, cohort_size)
    losses = look.losses()[:, clients]
    # Replace NaN with infinity, because every client would join a diverged model otherwise.
    return clients, jnp.where(jnp.isnan(losses), jnp.inf, losses)


class Clusters(NamedTuple):
    """State of `cfl`.

    Attributes:
      cluster: the model of each client.
      number: the number of models in use, the first ones.
      products: inner products of the clients' updates, of the last round that both trained in.
      is_known: whether two clients have trained in one round since their cluster's last split.
      parent: the model whose parameters each model takes over after the round, usually its own.
    """

    cluster: Int[Array, " clients"]
    number: Int[Array, ""]
    products: Float[Array, "clients clients"]
    is_known: Bool[Array, "clients clients"]
    parent: Int[Array, " models"]


@part
def cfl(
    num_clients: Count,
    num_models: Count,
    *,
    eps_1: NonNegative,
    eps_2: NonNegative,
    cohort_size: Count | None = None,
) -> Assignment:
    """CFL: a cluster splits when its model stands still, but its clients' updates do not.

    All clients begin in the first cluster. With updates d_i of the cluster's clients, it splits if
    ``|mean d_i| < eps_1 < eps_2 < max |d_i|``, into the two groups whose most similar updates, by
    their cosine, are least similar. The second group trains the next unused model, which begins
    with the parameters of the first. When all M models are in use, no cluster splits.

    If not all clients train in a round, updates of different rounds are compared pair by pair, and
    a cluster splits only after each pair of its clients has trained in the same round since its
    last split.

    Args:
      num_clients: N.
      num_models: M, the most clusters.
      eps_1: the norm of the mean update below which a model stands still.
      eps_2: the norm of an update above which a client does not.
      cohort_size: the number of clients that train in a round, drawn uniformly; None means all.

    Raises:
      ValueError: if a size does not fit. When a run starts: if clients do not report their updates,
        see `reporting`.

    Example: two clients with the minimizers -1 and 1.
      >>> from fedjax_mm import fedavg, reporting, simulate
      >>> from fedjax_mm.tasks import mean_estimation
      >>> task, how = mean_estimation([-1.0, 1.0], [-1.0, 1.0]), fedavg(0.25, local_steps=1)
      >>> split = cfl(2, 2, eps_1=0.1, eps_2=0.4)
      >>> state, _ = simulate(0, task, reporting(how), split, 20)
      >>> state.models[0].params.round(3).tolist(), state.assignment.cluster.tolist()
      ([-1.0, 1.0], [0, 1])

    Reference: Sattler, Mueller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed
    Multi-Task Optimization under Privacy Constraints" (2021).
    """
    number = checks.check_cohort_size(num_clients, cohort_size)
    models = jnp.arange(num_models, dtype=jnp.int32)

    def init(rng_key: PRNGKeyArray, look: Look) -> Clusters:
        del rng_key, look
        pairs = num_clients, num_clients
        first = jnp.zeros(num_clients, jnp.int32)
        return Clusters(first, jnp.int32(1), jnp.zeros(pairs), jnp.zeros(pairs, bool), models)

    def assign(
        rng_key: PRNGKeyArray, round: Round, state: Clusters, look: Look
    ) -> tuple[Cohort, Clusters]:
        del round, look
        clients = jnp.arange(num_clients, dtype=jnp.int32)
        if number < num_clients:
            clients = permutation(rng_key, num_clients, number)
        return Cohort(clients, state.cluster[clients]), state

    def observe(round: Round, cohort: Cohort, reports: Any, state: Clusters) -> Clusters:
        del round
        if not isinstance(reports, dict) or "update" not in reports:
            raise ValueError(
                "cfl compares the clients' updates, which the algorithm does not report; write "
                "reporting(fedavg(...))"
            )
        clients = jnp.where(cohort.clients >= 0, cohort.clients, num_clients)
        is_there = jnp.zeros(num_clients, bool).at[clients].set(True, mode="drop")
        both = is_there[:, None] & is_there

        def products(x: Array) -> Array:
            rows = jnp.zeros((num_clients, x[0].size), x.dtype)
            rows = rows.at[clients].set(x.reshape(len(x), -1), mode="drop")
            return jnp.matmul(rows, rows.T, precision=lax.Precision.HIGHEST)

        new = sum(map(products, jax.tree.leaves(reports["update"])))
        gram = jnp.where(both, new, state.products).astype(state.products.dtype)
        is_known = state.is_known | both
        members = state.cluster == models[:, None]
        splits, second = jax.vmap(partial(_split, gram, is_known, eps_1, eps_2))(members)
        place = state.number + jnp.cumsum(splits, dtype=jnp.int32) - 1
        splits &= place < num_models
        moves = second & splits[:, None]
        cluster = jnp.where(jnp.any(moves, 0), (place @ moves).astype(jnp.int32), state.cluster)
        parent = models.at[jnp.where(splits, place, num_models)].set(models, mode="drop")
        has_split = splits[state.cluster]
        return Clusters(
            cluster,
            state.number + jnp.sum(splits, dtype=jnp.int32),
            gram,
            is_known & ~(has_split[:, None] & has_split),
            parent,
        )

    def mix(round: Round, state: Clusters, old: Params | None, new: Params) -> Params:
        del round, old
        copied: Params = jax.tree.map(lambda x: x[state.parent], new)
        return copied

    def metrics(state: Clusters) -> Metrics:
        clients = jnp.sum(state.cluster == models[:, None], 1)
        return {ACTIVE: (models < state.number).astype(float), "clients": clients.astype(float)}

    return Assignment(num_clients, num_models, init, assign, observe, metrics, mix=mix)


def _split(
    gram: Float[Array, "clients clients"],
    is_known: Bool[Array, "clients clients"],
    eps_1: Scalar,
    eps_2: Scalar,
    members: Bool[Array, " clients"],
) -> tuple[Bool[Array, ""], Bool[Array, " clients"]]:
    """Whether a cluster splits, and its second group."""
    inside, size = members[:, None] & members, jnp.maximum(jnp.sum(members), 1)
    mean = jnp.sqrt(jnp.maximum(jnp.sum(jnp.where(inside, gram, 0)), 0)) / size
    norms = jnp.sqrt(jnp.diagonal(gram))
    largest = jnp.max(jnp.where(members, norms, 0))
    is_all = jnp.all(is_known | ~inside)
    scale = jnp.where(norms > 0, norms, 1)
    second = bipartition(gram / (scale[:, None] * scale), members)
    return (mean < eps_1) & (largest > eps_2) & is_all & jnp.any(second), second


def bipartition(
    similarity: Float[Array, "clients clients"], members: Bool[Array, " clients"]
) -> Bool[Array, " clients"]:
    """The group without the first member, in the split whose largest similarity across is least.

    A tree of largest similarities is grown from the first member, by Prim's algorithm. Its weakest
    edge separates the groups: all that join later are reached across it.

    Example:
      >>> similarity = jnp.array([[1.0, 0.9, -0.9], [0.9, 1.0, -1.0], [-0.9, -1.0, 1.0]])
      >>> bipartition(similarity, jnp.ones(3, bool)).tolist()
      [False, False, True]
    """
    n, first = len(members), jnp.argmax(members)

    def join(step: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        nearest, turn, weakest, weakest_step = carry
        waits = members & (turn < 0)
        one = jnp.argmax(jnp.where(waits, nearest, -jnp.inf))
        is_one, link = jnp.any(waits), nearest[one]
        turn = turn.at[one].set(jnp.where(is_one, step, turn[one]))
        is_weakest = is_one & (link < weakest)
        return (
            jnp.maximum(nearest, similarity[one]),
            turn,
            jnp.where(is_weakest, link, weakest),
            jnp.where(is_weakest, step, weakest_step),
        )

    turn = jnp.full(n, -1, jnp.int32).at[first].set(0)
    start = similarity[first], turn, jnp.asarray(jnp.inf, similarity.dtype), jnp.int32(n)
    _, turn, _, weakest = lax.fori_loop(jnp.int32(1), jnp.int32(n), join, start)
    return members & (turn >= weakest)
