"""Networks of models, which exchange parameters after a round.

A network draws the links of a round, and `mixing` combines the models along them.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.assignments.peers import peers
from fedjax_mm.asynchrony.dispatch import Dispatch
from fedjax_mm.base import Assignment, Cohort, Look, Params, Round
from fedjax_mm.base.calls import Part
from fedjax_mm.base.paths import Where
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.checks.annotations import (
    Count,
    CountOrZero,
    Mixture,
    NonNegative,
    TracedCount,
    checked,
    part,
)
from fedjax_mm.checks.instances import check_assignment, check_instance, check_where
from fedjax_mm.wrap import names_of, wrap_assignment

__all__ = [
    *("Links", "Network", "alternating", "cloud", "directed", "exponential", "graph", "matching"),
    *(
        "merging",
        "mixing",
        "mixing_matrix",
        "network",
        "random_regular",
        "ring",
        "server",
        "share",
        "star",
    ),
    "torus",
]

Edges: TypeAlias = Sequence[Sequence[int]] | Int[np.ndarray, "edges 2"]
"""Pairs of models, numbered from 0."""

MeanOf: TypeAlias = Literal["models", "clients", "examples"]
"""Weights of models in a mean: equal, or the number of their clients or of these clients' examples,
whether or not they took part."""

_MOST = 16  # neighbours in a list; beyond, a matrix is faster


class Links(NamedTuple):
    """How models mix in a round.

    Attributes:
      weights: ``[models, degree]`` for lists of neighbours; ``[models, models]`` for a matrix W,
        whose diagonal is ignored; ``[models]`` for one mean of all models. What remains of 1 is
        the model's own weight.
      neighbours: the models from which each model receives, ``int[models, degree]``, where the
        model itself with weight 0 is padding; ``()`` without lists.
    """

    weights: Float[Array, "models ..."]
    neighbours: Int[Array, "models degree"] | tuple[()] = ()


LinksFn: TypeAlias = Callable[[PRNGKeyArray, Round, Assignment, Look], Links]
"""``(rng_key, round, assignment, look) -> links``."""


@dataclasses.dataclass(frozen=True, repr=False)
class Network(Part):
    """Links between models in every round, for `mixing`.

    Attributes:
      links: returns the links of a round.
      directed: whether weights are shares that models send, so that columns sum to 1 instead of
        rows, as in push-sum.
      messages: the messages of a model that takes part in a mean; None counts links.
      name: the name of the factory.
    """

    links: LinksFn
    directed: bool = False
    messages: int | None = None
    name: str = ""


def _graph(size: int, edges: Any) -> Links:
    """Links of an undirected graph, with Metropolis weights ``1 / (1 + max(deg_i, deg_j))``."""
    pairs = np.sort(np.asarray(edges, int).reshape(-1, 2), 1)
    pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
    both = np.concatenate([pairs, pairs[:, ::-1]])
    degree = np.bincount(both[:, 0], minlength=size)
    return _listed(size, both, 1 / (1 + degree[both].max(1)))


def _listed(size: int, links: Int[np.ndarray, "links 2"], weights: Any) -> Links:
    """Lists of neighbours, or a matrix if some model has many, from (receiver, sender) pairs."""
    if len(links) and not 0 <= links.min() <= links.max() < size:
        raise ValueError(
            f"the network has models {links.min()} ... {links.max()}, but the assignment has "
            f"{size}, with numbers from 0; give edges between those"
        )
    most = np.bincount(links[:, 0], minlength=size).max(initial=0)
    if most > _MOST:
        matrix = np.zeros((size, size))
        matrix[links[:, 0], links[:, 1]] = weights
        return Links(jnp.asarray(matrix, float))
    order = np.lexsort((links[:, 1], links[:, 0]))
    rows, senders = links[order].T
    place = np.arange(len(rows)) - np.searchsorted(rows, rows)
    neighbours = np.repeat(np.arange(size, dtype=np.int32)[:, None], max(most, 1), 1)
    table = np.zeros(neighbours.shape)
    neighbours[rows, place], table[rows, place] = senders, np.asarray(weights)[order]
    return Links(jnp.asarray(table, float), jnp.asarray(neighbours))


def _fixed(links: Callable[[int], Links], **about: Any) -> Network:
    return Network(lambda rng_key, t, inner, look: links(inner.num_models), **about)


@part
def ring() -> Network:
    """Every model mixes with two neighbours, with weights 1/3.

    Example: eigenvalues of the mixing matrix of a ring of 8.
      >>> np.linalg.eigvalsh(mixing_matrix(ring(), 8)).round(3).tolist()
      [-0.333, -0.138, -0.138, 0.333, 0.333, 0.805, 0.805, 1.0]
    """
    return _fixed(lambda n: _graph(n, [(i, (i + 1) % n) for i in range(n)]))


@part
def torus(rows: Count | None = None) -> Network:
    """Models form a grid whose sides meet, and mix with four neighbours, with weights 1/5.

    Args:
      rows: the number of rows, which divides the number of models; None takes the most square grid.

    Example:
      >>> round(float(np.linalg.eigvalsh(mixing_matrix(torus(), 16))[-2]), 3)
      0.6
    """

    def links(n: int) -> Links:
        high = rows or max(i for i in range(1, math.isqrt(n) + 1) if n % i == 0)
        if n % high:
            raise ValueError(f"rows is {high}, which does not divide {n} models; give a divisor")
        at = np.arange(n).reshape(high, -1)
        near = [np.stack([at, np.roll(at, -1, axis)], -1).reshape(-1, 2) for axis in (0, 1)]
        return _graph(n, np.concatenate(near))

    return _fixed(links)


@part
def star() -> Network:
    """The first model mixes with all others, which mix with it alone, with weights 1/M.

    Example:
      >>> mixing_matrix(star(), 3).round(3).tolist()
      [[0.333, 0.333, 0.333], [0.333, 0.667, 0.0], [0.333, 0.0, 0.667]]
    """
    return _fixed(lambda n: _graph(n, [(0, i) for i in range(1, n)]))


@part
def graph(edges: Edges) -> Network:
    """An undirected graph, with Metropolis weights ``1 / (1 + max(deg_i, deg_j))``.

    Args:
      edges: pairs of models, each once, numbered from 0.

    Example:
      >>> mixing_matrix(graph([(0, 1), (1, 2)]), 3).round(3).tolist()
      [[0.667, 0.333, 0.0], [0.333, 0.333, 0.333], [0.0, 0.333, 0.667]]
    """
    return _fixed(lambda n: _graph(n, edges))


@part
def random_regular(degree: Count, *, seed: CountOrZero = 0) -> Network:
    """A random graph, the same in all rounds, in which every model has the same number of edges.

    Pairs of stubs are drawn, and pairs that are loops or repeat are exchanged with others.

    Args:
      degree: the number of edges of a model. Its product with M is even.
      seed: of the draw.

    Example:
      >>> matrix = mixing_matrix(random_regular(4), 10)
      >>> ((matrix > 0).sum(1) - 1).tolist()
      [4, 4, 4, 4, 4, 4, 4, 4, 4, 4]
    """

    def links(n: int) -> Links:
        if n * degree % 2 or degree >= n:
            raise ValueError(
                f"degree is {degree} for {n} models; give one below {n} whose product with {n} is "
                "even"
            )
        rng = np.random.default_rng(seed)
        pairs = rng.permutation(np.repeat(np.arange(n), degree)).reshape(-1, 2)
        for _ in range(10_000):
            names = np.sort(pairs, 1) @ (n, 1)
            _, first = np.unique(names, return_index=True)
            is_bad = np.ones(len(pairs), bool)
            is_bad[first] = False
            (bad,) = np.nonzero(is_bad | (pairs[:, 0] == pairs[:, 1]))
            if not len(bad):
                return _graph(n, pairs)
            for one, other in zip(bad, rng.integers(len(pairs), size=len(bad)), strict=True):
                pairs[one, 1], pairs[other, 1] = pairs[other, 1], pairs[one, 1]
        raise ValueError(f"degree is {degree} for {n} models; give a smaller one, or complete W")

    return _fixed(links)


@part
def network(W: Float[np.ndarray, "models models"] | Float[Array, "models models"]) -> Network:
    """A mixing matrix: model i becomes ``sum_j W_ij x_j``.

    Args:
      W: a matrix whose rows sum to 1. If its columns do, too, mixing keeps the models' mean.

    Example: all models become their mean.
      >>> mixing_matrix(network(np.full((2, 2), 0.5)), 2).tolist()
      [[0.5, 0.5], [0.5, 0.5]]
    """
    shape = np.shape(W)
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"W has the shape {shape}; give a square matrix, a row for each model")
    if not isinstance(W, jax.core.Tracer):
        sums = np.sum(np.asarray(W, np.float64), 1)
        if not np.allclose(sums, 1, atol=1e-5):
            i = int(np.argmax(np.abs(sums - 1)))
            raise ValueError(f"row {i} of W sums to {sums[i]:g}; rows must sum to 1")

    def links(n: int) -> Links:
        if n != shape[0]:
            raise ValueError(f"W is for {shape[0]} models, but the assignment has {n}")
        if isinstance(W, np.ndarray):
            rows, senders = np.nonzero(W - np.diag(np.diag(W)))
            return _listed(n, np.stack([rows, senders], 1), W[rows, senders])
        return Links(jnp.asarray(W, float))

    return _fixed(links)


@part
def directed(edges: Edges) -> Network:
    """Push-sum: a model sends equal shares to itself and to the ends of its edges.

    Mass x_i and weights y_i, 1 at the start, are mixed by the same shares, and the model is ``z_i =
    x_i / y_i``, at which gradients are computed. A model that sends less than it receives does not
    pull the mean to itself.

    Args:
      edges: pairs (sender, receiver), each once.

    Example: the shares of each model are a column.
      >>> mixing_matrix(directed([(0, 1), (1, 2), (2, 0), (0, 2)]), 3).round(3).tolist()
      [[0.333, 0.0, 0.5], [0.333, 0.5, 0.0], [0.333, 0.5, 0.5]]

    Reference: Kempe, Dobra, Gehrke, "Gossip-Based Computation of Aggregate Information" (2003);
    Assran et al., "Stochastic Gradient Push for Distributed Deep Learning" (2019).
    """

    def links(n: int) -> Links:
        pairs = np.unique(np.asarray(edges, int).reshape(-1, 2), axis=0)
        senders, receivers = pairs[pairs[:, 0] != pairs[:, 1]].T
        shares = 1 / (1 + np.bincount(senders, minlength=n))
        return _listed(n, np.stack([receivers, senders], 1), shares[senders])

    return _fixed(links, directed=True)


@part
def exponential() -> Network:
    """One-peer exponential graph: in round t model i receives from ``i - 2^((t - 1) mod L)``.

    L is ``ceil(log2 M)``. Every model sends half of itself, by push-sum. With a power of two models
    all are equal to the mean after L rounds without training.

    Example:
      >>> mixing_matrix(exponential(), 2).tolist()
      [[0.5, 0.5], [0.5, 0.5]]

    Reference: Assran et al. (2019).
    """

    def links(rng_key: PRNGKeyArray, round: Round, inner: Assignment, look: Look) -> Links:
        del rng_key, look
        n = inner.num_models
        jumps = 2 ** np.arange(max(1, math.ceil(math.log2(n))), dtype=np.int32)
        jump = jnp.asarray(jumps)[(jnp.asarray(round, jnp.int32) - 1) % len(jumps)]
        senders = (jnp.arange(n, dtype=jnp.int32) - jump) % n
        return Links(jnp.full((n, 1), 0.5 if n > 1 else 0.0, float), senders[:, None])

    return Network(links, directed=True)


@part
def matching() -> Network:
    """Models mix in pairs, which are drawn in every round: both become their mean.

    If M is odd, one model is alone.

    Example:
      >>> mixing_matrix(matching(), 2).tolist()
      [[0.5, 0.5], [0.5, 0.5]]

    Reference: Boyd et al., "Randomized Gossip Algorithms" (2006).
    """

    def links(rng_key: PRNGKeyArray, round: Round, inner: Assignment, look: Look) -> Links:
        del round, look
        n = inner.num_models
        order = permutation(rng_key, n)
        others = jnp.append(order[: n - n % 2].reshape(-1, 2)[:, ::-1].ravel(), order[n - n % 2 :])
        partner = jnp.zeros_like(order).at[order].set(others)
        weights = jnp.where(partner == jnp.arange(n), 0.0, 0.5)
        return Links(weights[:, None].astype(float), partner[:, None])

    return Network(links)


@part
def alternating(networks: Sequence[Network]) -> Network:
    """A time-varying network: round t uses number ``(t - 1) mod L`` of L networks.

    Args:
      networks: all with lists of neighbours, or all with matrices; all directed, or none.

    Raises:
      ValueError: if there are none, or their kinds differ.

    Example: round 1.
      >>> mixing_matrix(alternating([graph([(0, 1)]), ring()]), 3).tolist()
      [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    """
    kinds = {(each.directed, each.messages) for each in networks}
    if len(kinds) != 1:
        raise ValueError("networks are of several kinds, or none; give some of one kind")

    def links(rng_key: PRNGKeyArray, round: Round, inner: Assignment, look: Look) -> Links:
        each = [one.links(rng_key, round, inner, look) for one in networks]
        most = max(one.weights.shape[-1] for one in each)
        wide = [_padded(one, most) for one in each]
        turn = (jnp.asarray(round, jnp.int32) - 1) % len(each)
        found: Links = jax.tree.map(lambda *x: jnp.stack(x)[turn], *wide)
        return found

    return dataclasses.replace(networks[0], links=links)


def _padded(links: Links, width: int) -> Links:
    if isinstance(links.neighbours, tuple):
        return links
    n, degree = links.neighbours.shape
    own = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[:, None], (n, width - degree))
    weights = jnp.pad(links.weights, ((0, 0), (0, width - degree)))
    return Links(weights, jnp.concatenate([links.neighbours, own], 1))


@part
def cloud(weights: MeanOf = "examples") -> Network:
    """All models become their weighted mean, which a cloud computes.

    A model sends one message, and one comes back; both are counted. A lost link separates one model
    from the cloud for a round.

    Args:
      weights: of the models in the mean. "examples" counts all clients that may train the model.

    Example:
      >>> from fedjax_mm import edges
      >>> mixing(edges(6, 2), cloud(), every=4)
      mixing(edges(6, 2), cloud(), every=4)

    Reference: Liu et al., "Client-Edge-Cloud Hierarchical Federated Learning" (2020).
    """
    return _mean(weights, 2)


@part
def server(weights: MeanOf = "models") -> Network:
    """All models become their weighted mean, and lie on one server, so nothing is sent.

    Args:
      weights: as in `cloud`.

    Example:
      >>> mixing_matrix(server(), 2).tolist()
      [[0.5, 0.5], [0.5, 0.5]]
    """
    return _mean(weights, 0)


def _mean(weights: MeanOf, messages: int) -> Network:
    def links(rng_key: PRNGKeyArray, round: Round, inner: Assignment, look: Look) -> Links:
        del rng_key, round
        models, may = inner.num_models, inner.eligible
        if weights == "models":
            return Links(jnp.ones(models))
        counts = look.weights() if weights == "examples" else jnp.ones((models, inner.num_clients))
        return Links(jnp.sum(counts if may is None else jnp.where(may, counts, 0), 1).astype(float))

    return Network(links, messages=messages)


@checked
def mixing_matrix(network: Network, num_models: Count) -> Float[np.ndarray, "models models"]:
    """The matrix W of a network in round 1, or A of a directed one.

    Args:
      network: a network whose links do not depend on the models' clients.
      num_models: M.

    Example:
      >>> mixing_matrix(matching(), 2).tolist()
      [[0.5, 0.5], [0.5, 0.5]]
    """
    with jax.ensure_compile_time_eval():
        links = network.links(jax.random.key(0), 1, peers(num_models), Look())
        own = _linked(network, links, np.ones(num_models, bool))
        return np.asarray(_combined(own, jnp.eye(num_models)), np.float64)


class Mixing(NamedTuple):
    """State of `mixing`.

    Attributes:
      links: the links of the round, after losses.
      kept: the weight of each model in its own combination.
      present: whether each model takes part.
      mass: the push-sum weights y before and after the round, ``[2, models]``; ``()`` in undirected
        networks.
      messages: the number of models sent so far.
    """

    links: Links
    kept: Float[Array, " models"]
    present: Bool[Array, " models"]
    mass: Any
    messages: Int[Array, " models"]


def _linked(network: Network, links: Links, present: Any) -> Mixing:
    """Links between models that are present, and the weights that models keep."""
    weights, neighbours = links
    if weights.ndim == 1:
        weights = jnp.where(present, weights, 0)
        total = jnp.sum(weights)
        weights = weights / jnp.where(total > 0, total, 1)
        count = jnp.where(present, network.messages or 0, 0)
        return Mixing(Links(weights), jnp.ones_like(weights), present, (), count.astype(jnp.int32))
    is_list, is_self = not isinstance(neighbours, tuple), np.eye(len(weights), dtype=bool)
    others = present[neighbours] if is_list else jnp.where(is_self, False, present)
    weights = jnp.where(others & present[:, None], weights, 0)

    def sent(x: Array) -> Array:
        """Sums over receivers."""
        return jnp.zeros_like(x[:, 0]).at[neighbours].add(x) if is_list else jnp.sum(x, 0)

    kept = 1 - (sent(weights) if network.directed else jnp.sum(weights, 1))
    count = sent((weights != 0).astype(jnp.int32))
    return Mixing(Links(weights, neighbours), kept, present, (), count)


def _combined(own: Mixing, tree: Params) -> Params:
    """Every model's combination of itself and the models that it receives."""
    weights, neighbours = own.links

    def column(x: Array, like: Array) -> Array:
        return x.reshape(-1, *[1] * (like.ndim - 1))

    def one(x: Array) -> Array:
        # A link that is down has weight 0, but 0 * NaN is NaN.
        total = column(own.kept, x) * x
        if not isinstance(neighbours, tuple):
            for i in range(neighbours.shape[1]):
                weight = column(weights[:, i], x)
                total = total + jnp.where(weight != 0, weight * x[neighbours[:, i]], 0)
            return total.astype(x.dtype)
        is_sent = column(jnp.any(weights.reshape(-1, len(x)) != 0, 0), x)
        received = jnp.tensordot(
            weights, jnp.where(is_sent, x, 0), 1, precision=lax.Precision.HIGHEST
        )
        if weights.ndim == 1:
            return jnp.where(column(own.present, x), received.astype(x.dtype), x)
        return (total + received).astype(x.dtype)

    return jax.tree.map(one, tree)


@part
def mixing(
    assignment: Assignment,
    network: Network,
    *,
    every: TracedCount = 1,
    lost: Mixture | None = None,
    combine: Literal["after", "before"] = "after",
    where: Where | None = None,
) -> Assignment:
    """Wraps an assignment so that its models mix with others after training.

    - Decentralised SGD: ``mixing(peers(N), ring())``, where every client has a model.
    - Edge and cloud: ``mixing(edges(N, M, edge_of), cloud(), every=4)``.
    - A merge at the end: ``every`` is the number of rounds.

    A link is up if both of its ends are. An inactive model is down, see `finishing`, and so is a
    peer whose client does not participate in the round. The weight of a link that is down goes to
    the receiver's own model; in directed networks the sender keeps it. The mean of all models then
    is that with all links up. The metric ``messages`` has the number of messages of each model so
    far, and a result ``parameters_mixed`` from it.

    Args:
      assignment: chooses clients and models.
      network: the links between models, such as ``ring()``.
      every: the number of rounds from one mixing to the next.
      lost: the probability that a link is down in a round, independent for each; of a directed
        network, for each direction.
      combine: "after" mixes the trained models, ``W (x + d)``, where d is the change in the round.
        "before" mixes the models before training, ``W x + d``, as in D-PSGD and DIGing.
      where: the parameters that are mixed, as in `personal`; None means all. Models may differ in
        the others.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if the assignment mixes already, or its models arrive or finish.

    Example: gossip without training, of eight peers on a ring.
      >>> from fedjax_mm import fedavg, simulate
      >>> from fedjax_mm.tasks import mean_estimation
      >>> task, start = mean_estimation(np.zeros(8), np.zeros(8)), jnp.arange(8.0)
      >>> idle, gossip = fedavg(lambda t: 0.0, local_steps=1), mixing(peers(8), ring())
      >>> _, trace = simulate(0, task, idle, gossip, 2, params=start)
      >>> [round(float(x), 4) for x in trace.metrics["consensus_error"].mean(1)]
      [5.25, 2.3611, 1.4475]

    Reference: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?"
    (2017); Sayed, "Adaptation, Learning, and Optimization over Networks" (2014), for "after".
    """
    _check_unmixed(assignment, where)
    check_instance("network", network, Network, "give one, such as ring()")
    M = assignment.num_models

    def init(rng_key: PRNGKeyArray) -> Mixing:
        def first(key: PRNGKeyArray) -> Mixing:
            look = Look(weights=lambda: jnp.zeros((M, assignment.num_clients)))
            links = network.links(key, 1, assignment, look)
            return _linked(network, links, jnp.ones(M, bool))

        shapes = jax.eval_shape(first, rng_key)
        own: Mixing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return own._replace(mass=jnp.ones((2, M)) if network.directed else ())

    def change(
        rng_key: PRNGKeyArray, round: Round, own: Mixing, cohort: Cohort, look: Look
    ) -> tuple[Cohort, Mixing]:
        links_key, lost_key = jax.random.split(rng_key)
        links, active = network.links(links_key, round, assignment, look), look.active()
        present = jnp.ones(M, bool) if active is None else active
        if lost is not None:
            up = _uniform(lost_key, links, network.directed) >= lost
            if links.weights.ndim == 1:
                present = present & up
            else:
                links = links._replace(weights=jnp.where(up, links.weights, 0))
        return cohort, own._replace(links=links, present=present)

    def learn(round: Round, cohort: Cohort, own: Mixing) -> Mixing:
        present = own.present & (cohort.sizes(M) > 0) if assignment.peers else own.present
        present = present & (jnp.asarray(round) % every == 0)
        new = _linked(network, own.links, present)
        mass = own.mass
        if network.directed:
            mass = jnp.stack([mass[1], _combined(new, mass[1])])
        return new._replace(mass=mass, messages=own.messages + new.messages)

    def mix(round: Round, own: Mixing, old: Params | None, new: Params) -> Params:
        if network.directed:
            return _pushed(own, old, new, combine)

        def mixed() -> Params:
            if combine == "after" or old is None:
                return _combined(own, new)
            return jax.tree.map(lambda x, y, z: x + (z - y), _combined(own, old), old, new)

        if isinstance(every, int) and every == 1:
            return mixed()
        return lax.cond(jnp.asarray(round) % every == 0, mixed, lambda: new)

    return wrap_assignment(
        assignment,
        "mixing",
        change,
        init=init,
        metrics=lambda own: {"messages": own.messages},
        learn=learn,
        mix=mix,
        where=where,
    )


def _uniform(rng_key: PRNGKeyArray, links: Links, is_directed: bool) -> Array:
    """One uniform number for each link, shared by both directions of an undirected link."""
    size = len(links.weights)
    if links.weights.ndim == 1:
        return jax.random.uniform(rng_key, (size,), jnp.float32)
    receivers = jnp.broadcast_to(jnp.arange(size)[:, None], links.weights.shape)
    every = jnp.broadcast_to(jnp.arange(size), links.weights.shape[:1] * 2)
    senders = every if isinstance(links.neighbours, tuple) else links.neighbours
    ends = receivers, senders
    if not is_directed:
        ends = jnp.minimum(*ends), jnp.maximum(*ends)

    def of_link(one: Array, other: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(rng_key, one), other)
        return jax.random.uniform(key, (), jnp.float32)

    return jax.vmap(jax.vmap(of_link))(*ends)


def _pushed(own: Mixing, old: Params | None, new: Params, combine: str) -> Params:
    """Push-sum: models are z = x / y, and their changes are changes of x."""
    if old is None:
        raise ValueError(
            "the algorithm has a state that is mixed, for which push-sum has no weights; use an "
            "undirected network, such as ring()"
        )
    before, after = own.mass

    def scaled(mass: Array, x: Array) -> Array:
        return (x * mass.reshape(-1, *[1] * (x.ndim - 1))).astype(x.dtype)

    x = jax.tree.map(lambda z: scaled(before, z), old)
    change = jax.tree.map(jnp.subtract, new, old)
    if combine == "after":
        x = _combined(own, jax.tree.map(jnp.add, x, change))
    else:
        x = jax.tree.map(jnp.add, _combined(own, x), change)
    made: Params = jax.tree.map(lambda z: scaled(1 / after, z), x)
    return made


@part
def merging(
    assignment: Assignment, distance: NonNegative, *, where: Where | None = None
) -> Assignment:
    """Wraps an assignment so that models merge if they are near to each other.

    After every round, each model becomes the mean of the models within the distance that had
    participants in the round, if there are any. If clients choose the better of two models, as in
    `ifca`, they all train the first of two that have merged, and the second follows it.

    Args:
      assignment: chooses clients and models.
      distance: the largest Euclidean distance of models that merge.
      where: the parameters that are compared and merged, as in `personal`; None means all.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if the assignment mixes already.

    Example: two of three models are near.
      >>> from fedjax_mm import edges, fedavg, simulate
      >>> from fedjax_mm.tasks import mean_estimation
      >>> task, idle = mean_estimation([0, 0, 0], [0, 0, 0]), fedavg(lambda t: 0.0, local_steps=1)
      >>> start = jnp.array([0.0, 1.0, 4.0])
      >>> state, _ = simulate(0, task, idle, merging(edges(3, 3), 1.5), 1, params=start)
      >>> state.models[0].params.tolist()
      [0.5, 0.5, 4.0]
    """
    _check_unmixed(assignment, where)

    def mix(round: Round, own: Any, old: Params | None, new: Params) -> Params:
        del round
        if old is None:
            return new

        def squares(x: Array, y: Array) -> Array:
            return jnp.sum((x - y) ** 2, range(1, x.ndim))

        def total(x: Params, y: Params) -> Array:
            made: Array = jax.tree.reduce(jnp.add, jax.tree.map(squares, x, y))
            return made

        distances = lax.map(lambda one: total(new, one), new)
        near = (distances <= distance**2) & own
        count = jnp.sum(near, 1)

        def mean(x: Array) -> Array:
            sums = jnp.tensordot(near.astype(x.dtype), x, 1, precision=lax.Precision.HIGHEST)
            number = count.reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(number > 0, sums / jnp.maximum(number, 1), x).astype(x.dtype)

        merged: Params = jax.tree.map(mean, new)
        return merged

    def change(
        rng_key: PRNGKeyArray, round: Round, own: Any, cohort: Cohort, look: Look
    ) -> tuple[Cohort, Any]:
        del rng_key, round, look
        return cohort, own

    def learn(round: Round, cohort: Cohort, own: Any) -> Bool[Array, " models"]:
        del round, own
        return cohort.sizes(assignment.num_models) > 0

    return wrap_assignment(
        assignment,
        "merging",
        change,
        init=lambda _: jnp.zeros(assignment.num_models, bool),
        learn=learn,
        mix=mix,
        where=where,
    )


def _check_unmixed(assignment: Assignment, where: Where | None) -> None:
    if isinstance(assignment, Dispatch):
        raise TypeError(
            "an asynchronous run does not mix models, because each takes its steps at times of its "
            "own; give an assignment in rounds, such as peers(8)"
        )
    check_assignment(assignment)
    if where is not None:
        check_where(where)
    if assignment.mix is not None:
        raise ValueError("the assignment mixes already; give one network, or alternating([...])")
    for name in names_of(assignment):
        if name in ("finishing", "arriving"):
            raise ValueError(
                f"models mix outside {name}, but inactive ones must not; write "
                f"{name}(mixing(...), ...)"
            )


@part
def share(assignment: Assignment, where: Where, *, weights: MeanOf = "models") -> Assignment:
    """Wraps an assignment so that its models have a part in common, as in multi-task learning.

    After every round, the part of each model becomes the mean over the active models. Other parts,
    such as the heads of different tasks, stay the models' own, and may differ in shape.

    Args:
      assignment: chooses clients and models.
      where: the parameters in common, as in `personal`.
      weights: of the models in the mean, as in `cloud`.

    Raises:
      TypeError: if an argument has another type.
      ValueError: as in `mixing`.

    Example:
      >>> from fedjax_mm import mfa_rand
      >>> share(mfa_rand(8, 2), "trunk").where
      'trunk'
    """
    return mixing(assignment, server(weights), where=where)
