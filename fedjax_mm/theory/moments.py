"""Exact mean and covariance of a model's iterates, for methods that are affine on quadratics.

Let z be a model's state: its parameters w, the method's real numbers, and the clients' states. A
client's message is affine in z, and the server's step is affine in z and in the sum of messages. So
a round is ``z <- A z + sum of D_k z`` over the clients of the cohort, with a constant coordinate in
z, and the cohort's law gives the mean and the covariance after it. Methods are not listed: the
traced program is the proof (`fedjax_mm.theory.affine`), so a method of your own counts, too.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from fedjax_mm.assignments.partitions import full_participation, mfa_rand, mfa_rr
from fedjax_mm.assignments.sampling import cohort_sizes
from fedjax_mm.base import (
    Algorithm,
    Assignment,
    Batching,
    ClientContext,
    Contribution,
    Index,
    Padded,
    Params,
    ServerContext,
    Task,
)
from fedjax_mm.base.programs import compiled
from fedjax_mm.base.sums import as_arrays, dense_update, is_sparse, is_stacked
from fedjax_mm.checks.annotations import Count, checked
from fedjax_mm.checks.instances import check_algorithm, check_assignment
from fedjax_mm.tasks.view import changes, client_weights
from fedjax_mm.theory.affine import Kind, dependence

_MOST_ORDERS = 50_000
"""The largest number of cohorts, or of ordered partitions, that are enumerated."""

_ROUND = "the round"
_DRAWS = ("random draws, such as minibatches or noise",)


class Exact(NamedTuple):
    """Exact moments of one model's iterates, before round 1 and after each round.

    Attributes:
      mean: E w, raveled.
      covariance: of w after the last round.
      loss: E F(w), where F is the mean of F_k weighted by n_k.
      excess_loss: E F(w) - F*.
      squared_distance: E|w - w*|^2.
    """

    mean: Float[Array, "*rounds dim"]
    covariance: Float[Array, "dim dim"]
    loss: Float[Array, "*rounds"]
    excess_loss: Float[Array, "*rounds"]
    squared_distance: Float[Array, "*rounds"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Law:
    """Law of the cohorts of one model.

    Attributes:
      sizes: possible sizes of a cohort, which is uniform given its size, if rounds are independent
        and weights equal.
      masks: otherwise, ``bool[cases, rounds, clients]``, the clients of each round of a frame, in
        equally likely cases; else None.
      shares: the probability of each size.
      factor: the factor of the clients' weights.
    """

    sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    masks: Any
    shares: Any
    factor: float = dataclasses.field(metadata={"static": True})


class _Moments(NamedTuple):
    """Mean and covariance of z."""

    mean: Float[Array, " state"]
    covariance: Float[Array, "state state"]


@checked
def exact(
    task: Task,
    algorithm: Algorithm,
    assignment: Assignment,
    num_rounds: Count,
    *,
    params: Params | None = None,
) -> Exact:
    """Exact mean, covariance and expected loss of each model, without simulating.

    The clients' losses are quadratic and the method is affine: FedAvg, FedProx, SCAFFOLD, MIFA and
    others, with full gradients, with or without momentum of clients and server. The program of the
    method is the proof, and everything else is refused. Compute in float64, by `jax.enable_x64`.

    The law of cohorts is known for `full_participation`, `mfa_rand` and `mfa_rr`. Unequal weights,
    and frames of MFA-RR, are enumerated, so they need few clients. A round costs O(N d^3), where d
    counts the numbers of w and of a client's and the server's state, and one product of matrices of
    all states. Clients that send sparse updates, as those of `quadratic`, cost O(p d^2).

    Args:
      task: every client's loss is quadratic. All models have the same law; call it for each task if
        tasks differ.
      algorithm: numbers may be traced, so `jax.vmap` goes over rates.
      assignment: one of the above, without wrappers.
      num_rounds: T.
      params: the initial parameters; None takes those of the task, if they are not drawn.

    Raises:
      ValueError: if the law is unknown, too many cases would be enumerated, or the method is not
        affine.

    Example: at the ends of frames, MFA-RR has a far smaller variance than MFA-Rand.
      >>> from fedjax_mm import fedavg, mfa_rand, mfa_rr
      >>> from fedjax_mm.tasks import quadratic
      >>> task, algorithm = quadratic(4, 2, mu=0.1), fedavg(0.3, local_steps=5)
      >>> both = [exact(task, algorithm, law(4, 2), 20) for law in (mfa_rand, mfa_rr)]
      >>> [round(float(jnp.trace(found.covariance)), 4) for found in both]
      [0.0199, 0.0009]
    """
    law, start = _checked(task, algorithm, assignment, params, is_stationary=False)
    return compiled(_iterate, [task, start, law], [algorithm, num_rounds])


@checked
def stationary(
    task: Task, algorithm: Algorithm, assignment: Assignment, *, params: Params | None = None
) -> Exact:
    """The limit of `exact` as the number of rounds grows: the floor of a constant rate.

    With `mfa_rr` it is the limit at the ends of frames. The limit is found by GMRES, and it is NaN
    if it was not found or no covariance has it, as for rates that are too large.

    Raises:
      ValueError: as in `exact`, or if the method depends on the round.

    Example: at half the rate, the floor is about half as high.
      >>> from fedjax_mm import fedavg, mfa_rand
      >>> from fedjax_mm.tasks import quadratic
      >>> with jax.enable_x64(True):
      ...     task, sampled = quadratic(4, 2, mu=0.5), mfa_rand(4, 2)
      ...     floors = [stationary(task, fedavg(rate, local_steps=1), sampled).excess_loss
      ...               for rate in (0.02, 0.01)]
      >>> round(float(floors[0] / floors[1]), 2)
      2.01
    """
    law, start = _checked(task, algorithm, assignment, params, is_stationary=True)
    return compiled(_limit, [task, start, law], [algorithm])


def _checked(
    task: Task, algorithm: Algorithm, assignment: Assignment, params: Any, *, is_stationary: bool
) -> tuple[_Law, Params]:
    """The law and the initial parameters, after all proofs."""
    check_algorithm(algorithm), check_assignment(assignment)
    if task.num_clients != assignment.num_clients:
        raise ValueError(
            f"the task has {task.num_clients} clients, and the assignment {assignment.num_clients}"
        )
    if changes(task):
        raise ValueError("the task changes over rounds; give one that does not")
    key = jax.random.key(0)
    if params is None:
        _require("the initial model", dependence(task.init, [key], [_DRAWS]), "give params")
        params = task.init(key)
    linear = _Linear.of(task, algorithm, params, 1.0)
    weights = linear.prove(is_stationary)
    return _law(assignment, weights), params


def _require(what: str, kinds: list[Kind], remedy: str) -> None:
    for kind in kinds:
        if isinstance(kind, tuple):
            raise ValueError(f"{what} depends on {kind[0]}; {remedy}")


_LINEAR = (
    "exact moments need quadratic losses, full gradients, and a method that is affine in its state "
    "with real numbers only, such as fedavg, fedprox or scaffold, with sgd"
)


class _Linear(NamedTuple):
    """A method on a task, as functions of vectors.

    Attributes:
      task: the task.
      algorithm: the method.
      params: initial parameters.
      factor: the factor of the clients' weights.
      head: the initial parameters and server state, as a vector.
      own: a client's initial state, as a vector.
    """

    task: Task
    algorithm: Algorithm
    params: Params
    factor: Any
    head: Float[Array, " head"]
    own: Float[Array, " own"]

    @classmethod
    def of(cls, task: Task, algorithm: Algorithm, params: Params, factor: Any) -> "_Linear":
        """The method with its initial states.

        Raises:
          ValueError: if a state has other than real numbers.
        """
        states = algorithm.init(task, params)
        for x in jax.tree.leaves(states):
            if not jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating):
                raise ValueError(f"the method's state has numbers of type {x.dtype}; {_LINEAR}")
        server, client = states
        return cls(
            task,
            algorithm,
            params,
            factor,
            ravel_pytree((params, server))[0],
            ravel_pytree(client)[0],
        )

    @property
    def num_clients(self) -> int:
        """N."""
        return self.task.num_clients

    @property
    def dim(self) -> int:
        """The number of parameters."""
        return sum(map(jnp.size, jax.tree.leaves(self.params)))

    def states(self, head: Array, own: Array) -> tuple[Params, Any, Any]:
        """Parameters, the server's state and a client's state."""
        server, client = self.algorithm.init(self.task, self.params)
        params, server = ravel_pytree((self.params, server))[1](head)
        return params, server, ravel_pytree(client)[1](own)

    def send(self, head: Array, own: Array, client: Any, t: Any, rng_key: Any) -> Contribution:
        """A client's contribution, with the change of its state as the report."""
        params, server, state = self.states(head, own)
        context = ClientContext(rng_key, t, self.task, client, params, self.factor)
        sent, new = self.algorithm.client(context, server, state)
        sent = as_arrays(sent)._replace(report=ravel_pytree(new)[0] - own)
        if is_stacked(sent.update):
            raise ValueError(f"the server gets the updates of all clients, not a sum; {_LINEAR}")
        return sent if is_sparse(sent.update) else dense_update(sent, params)

    def message(self, head: Array, own: Array, client: Any, t: Any) -> tuple[Array, ...]:
        """Factor of w, coordinates and numbers of the update, change of the state, weight."""
        # No result depends on the key, as `prove` has shown.
        sent = self.send(head, own, client, t, jax.random.key(0))
        if is_sparse(sent.update):
            scale, places, values = sent.update
        else:
            values = ravel_pytree(sent.update)[0]
            scale, places = jnp.zeros(()), jnp.arange(values.size)
        return scale, places, values, sent.report, sent.weight

    def step(
        self, head: Array, owns: Array, total: Array, weight: Any, t: Any, rng_key: Any
    ) -> Float[Array, " head"]:
        """The server's step, given the clients' new states and the sum of their updates."""
        params, server, _ = self.states(head, self.own)
        states = jax.vmap(lambda own: self.states(head, own)[2])(owns)
        update = ravel_pytree(self.sent)[1](total)
        summed = Contribution(update, weight, jnp.int32(1))
        context = ServerContext(t, self.task, params, server, states, summed, rng_key)
        return ravel_pytree(self.algorithm.server(context))[0]

    def prove(self, is_stationary: bool) -> Float[np.ndarray, " clients"]:
        """Shows that all steps are affine, and finds the clients' weights up to a factor.

        Raises:
          ValueError: unless they are.
        """
        key, t = jax.random.key(0), jnp.int32(1)
        time: Kind = (_ROUND,) if is_stationary else "constant"
        varied: list[Kind] = ["affine", "affine", "constant", time, _DRAWS]
        given = [self.head, self.own, jnp.int32(0), t, key]

        def parts(*given: Any) -> tuple[Any, Any]:
            sent = self.send(*given)
            update, fixed = sent.update, [sent.weight]
            if is_sparse(update):
                fixed += [update.scale, update.indices]
                update = update.values
            return fixed, (update, sent.report)

        kinds = dependence(parts, given, varied)
        _require("what clients send", kinds, _LINEAR)
        number = len(jax.tree.leaves(jax.eval_shape(parts, *given)[0]))
        if "affine" in kinds[:number]:
            raise ValueError(f"the clients' weights depend on the model; {_LINEAR}")
        size = self.num_sent
        owns, total = jnp.zeros((self.num_clients, self.own.size)), jnp.zeros(size)
        kinds = ["affine", "affine", "affine", "constant", time, _DRAWS]
        given = [self.head, owns, total, jnp.ones(()), t, key]
        _require("the server's step", dependence(self.step, given, kinds), _LINEAR)
        gradient = dependence(jax.grad(self.loss), [ravel_pytree(self.params)[0]], ["affine"])
        _require("the gradient of the loss", gradient, _LINEAR)

        def weight(client: Index) -> Array:
            return self.send(self.head, self.own, client, t, key).weight

        if dependence(weight, [jnp.int32(0)], ["affine"]) == ["constant"]:
            return np.ones(self.num_clients)  # equal for any value
        try:
            # Evaluate now, even inside `jax.jit`, because the weights choose the law.
            with jax.ensure_compile_time_eval():
                return np.asarray(jax.jit(jax.vmap(weight))(jnp.arange(self.num_clients)))
        except jax.errors.TracerArrayConversionError:
            raise ValueError(
                "the clients' weights are not known while JAX traces; call exact outside of jax.jit"
            ) from None

    @property
    def sent(self) -> Any:
        """A dense update of zeros."""
        given = self.head, self.own, jnp.int32(0), jnp.int32(1), jax.random.key(0)
        sent = jax.eval_shape(self.send, *given).update
        return jax.tree.map(jnp.zeros_like, self.params if is_sparse(sent) else sent)

    @property
    def num_sent(self) -> int:
        """The number of coordinates of a dense update."""
        return sum(x.size for x in jax.tree.leaves(self.sent))

    def loss(self, w: Float[Array, " dim"]) -> Float[Array, ""]:
        """F(w), the mean of F_k weighted by n_k."""
        params, unused = ravel_pytree(self.params)[1](w), jax.random.key(0)

        def one(client: Index) -> Array:
            batch = self.task.batch(unused, client, jnp.int32(0), Batching())
            return self.task.loss(params, batch)

        weights = client_weights(self.task)
        losses = jax.vmap(one)(jnp.arange(self.num_clients))
        return jnp.sum(weights * losses) / jnp.sum(weights)

    def start(self) -> _Moments:
        """The moments before round 1."""
        z = jnp.concatenate([self.head, jnp.tile(self.own, self.num_clients)])
        return _Moments(z, jnp.zeros((z.size, z.size)))

    def client_matrix(self, client: Index, t: Any) -> tuple[Array, ...]:
        """Factor of w, then rows, columns and entries of the rest of a client's matrix T_k."""
        h, q, size = self.head.size, self.own.size, self.num_sent

        def numbers(x: Array) -> tuple[Array, Any]:
            scale, places, values, change, _ = self.message(x[:h], x[h:], client, t)
            return jnp.concatenate([values, change]), (scale, places)

        zero = jnp.zeros(h + q)
        constant, (scale, places) = numbers(zero)
        entries = jax.jacfwd(lambda x: numbers(x)[0])(zero)
        own = client * q + jnp.arange(q)
        rows = jnp.concatenate([places, size + own])
        columns = jnp.concatenate([jnp.arange(h), h + own, jnp.array([h + self.num_clients * q])])
        return scale, rows, columns, jnp.column_stack([entries, constant])

    def messages(self, X: Float[Array, "columns columns"], t: Any) -> tuple[Array, Array]:
        """The sums of T_k and of ``T_k X T_k'`` over clients, where X is the second moment of z.

        Client k sends ``T_k z``, where z has a constant coordinate.
        """
        d, size = self.dim, self.num_sent
        shape = size + self.num_clients * self.own.size, len(X)

        def add(carry: Any, client: Index) -> tuple[Any, None]:
            total, squares, scaled, scales = carry
            scale, rows, columns, entries = self.client_matrix(client, t)
            place = rows[:, None], columns
            square = entries @ X[columns[:, None], columns] @ entries.T
            return (
                total.at[place].add(entries),
                squares.at[rows[:, None], rows].add(square),
                scaled.at[place].add(scale * entries),
                scales + jnp.array([scale, scale**2]),
            ), None

        zero = jnp.zeros(shape), jnp.zeros((shape[0], shape[0])), jnp.zeros(shape), jnp.zeros(2)
        (total, squares, scaled, scales), _ = lax.scan(add, zero, jnp.arange(self.num_clients))
        if size == d:  # otherwise no update is sparse, and factors are 0
            cross = (scaled @ X[:, :d])[:, :d]
            cross = jnp.pad(cross, ((0, 0), (0, shape[0] - d)))
            squares = squares + cross + cross.T
            squares = squares.at[:d, :d].add(scales[1] * X[:d, :d])
            total = total.at[jnp.arange(d), jnp.arange(d)].add(scales[0])
        return total, squares

    def server_matrices(self, weight: Any, t: Any) -> tuple[Array, Array]:
        """B and S in ``z <- B z + S y``, where y is the sum of the messages."""
        h, size = self.head.size, self.num_sent
        n = self.num_clients * self.own.size

        def server(x: Array) -> Array:
            owns = x[h : h + n].reshape(self.num_clients, -1)
            return self.step(x[:h], owns, x[h + n :], weight, t, jax.random.key(0))

        zero = jnp.zeros(h + n + size)
        matrix, constant = jax.jacfwd(server)(zero), server(zero)
        keep = jnp.eye(n, h + n + 1, h)
        B = jnp.vstack([jnp.column_stack([matrix[:, : h + n], constant]), keep])
        # The server sees the clients' new states.
        S_own = jnp.vstack([matrix[:, h : h + n], jnp.eye(n)])
        S_total = jnp.vstack([matrix[:, h + n :], jnp.zeros((n, size))])
        return B, jnp.column_stack([S_total, S_own])


def _law(assignment: Assignment, weights: Float[np.ndarray, " clients"]) -> _Law:
    """The law of one model's cohorts.

    Raises:
      ValueError: if it is unknown or has too many cases.
    """
    call, N = assignment.call, assignment.num_clients
    factory = None if call is None or assignment.inner else call.factory
    given = call.arguments if call and factory in (full_participation, mfa_rand, mfa_rr) else {}
    M, redraw = given.get("num_models", 1), given.get("redraw", "round")
    if not given or isinstance(M, Padded) or redraw == "never" or given.get("processors", 1) != 1:
        raise ValueError(
            f"the law of {assignment!r} is not known exactly; give full_participation, mfa_rand or "
            "mfa_rr (not redraw='never'), with a fixed number of models, one processor per client, "
            "and no wrapper"
        )
    K = cohort_sizes(N, M, given.get("cohort_size"))[2]
    # A model has a larger group with probability (K mod M) / M.
    groups = [K // M + (j < K % M) for j in range(M)]
    factor = N * M / K if given.get("unbiased") else 1.0
    if redraw == "frame" and M > 1:
        arrangements = sorted(set(itertools.permutations(groups)))
        return _listed(N, arrangements, f"{assignment!r} has", "ordered partitions", factor)
    sizes = tuple(sorted(set(groups)))
    if np.ptp(weights) == 0 or sizes == (N,):
        return _Law(sizes, None, np.array([groups.count(n) / M for n in sizes]), factor)
    arrangements = [(n,) for n in groups]
    about = "with unequal weights of clients (see `weighted`) there are"
    return _listed(N, arrangements, about, "cohorts", factor)


def _listed(
    N: int, arrangements: list[tuple[int, ...]], about: str, what: str, factor: float
) -> _Law:
    sizes = [[*each, N - sum(each)] for each in arrangements]
    counts = [math.factorial(N) // math.prod(map(math.factorial, each)) for each in sizes]
    if sum(counts) > _MOST_ORDERS:
        raise ValueError(
            f"{about} {sum(counts):,} {what}; at most {_MOST_ORDERS:,} are enumerated: take fewer "
            "clients"
        )
    # Cases need equal probabilities. All arrangements of MFA-RR have the same count, and of unequal
    # cohorts each arrangement is repeated.
    common = math.lcm(*counts)
    found = [
        mask
        for each, count in zip(arrangements, counts, strict=True)
        for mask in _masks(frozenset(range(N)), each, N)
        for _ in range(common // count)
    ]
    return _Law((), np.array(found), np.ones(0), factor)


def _masks(left: frozenset[int], sizes: tuple[int, ...], N: int) -> Iterator[list[list[bool]]]:
    """Disjoint groups of the given sizes, as masks of the clients."""
    if not sizes:
        yield []
        return
    for group in itertools.combinations(sorted(left), sizes[0]):
        mask = [k in group for k in range(N)]
        for rest in _masks(left - {*group}, sizes[1:], N):
            yield [mask, *rest]


def _augmented(moments: _Moments) -> tuple[Array, Array]:
    """Mean and second moment of z with a constant coordinate."""
    z = jnp.append(moments.mean, 1)
    n = moments.mean.size
    return z, jnp.outer(z, z).at[:n, :n].add(moments.covariance)


def _one_round(linear: _Linear, law: _Law, weight: Any, moments: _Moments, t: Any) -> _Moments:
    """A round with a uniform cohort, whose size may vary."""
    z, X = _augmented(moments)
    n, N = moments.mean.size, linear.num_clients
    T, squares = linear.messages(X, t)
    deviations = squares - T @ X @ T.T / N
    found = []
    for size in law.sizes:
        B, S = linear.server_matrices(size * weight, t)
        A = B + S @ T * (size / N)
        # The variance of a sum without replacement.
        noise = size * (N - size) / (N * max(N - 1, 1)) * deviations
        covariance = A[:, :n] @ moments.covariance @ A[:, :n].T + S @ noise @ S.T
        found.append(_Moments(A @ z, covariance))
    means, covariances = (jnp.stack(x) for x in zip(*found, strict=True))
    mean = law.shares @ means
    between = jnp.einsum("s,si,sj->ij", law.shares, means - mean, means - mean)
    return _Moments(mean, jnp.tensordot(law.shares, covariances, 1) + between)


def _one_frame(
    linear: _Linear, law: _Law, weights: Array, moments: _Moments, t: Any
) -> tuple[_Moments, _Moments]:
    """The moments at the end of a frame that starts in round t, and after each of its rounds."""
    size = linear.num_sent + linear.num_clients * linear.own.size
    n, rounds = moments.mean.size, jnp.arange(law.masks.shape[1])

    def of_round(i: Any) -> Array:
        def placed(client: Index) -> Array:
            scale, rows, columns, entries = linear.client_matrix(client, t + i)
            matrix = jnp.zeros((size, n + 1)).at[rows[:, None], columns].add(entries)
            d = min(linear.dim, linear.num_sent)
            return matrix.at[jnp.arange(d), jnp.arange(d)].add(scale)

        return jax.vmap(placed)(jnp.arange(linear.num_clients))

    sent = jax.vmap(of_round)(rounds)

    def matrices(mask: Array) -> Array:
        def one(mask: Array, i: Any) -> Array:
            B, S = linear.server_matrices(mask @ weights, t + i)
            return B + S @ jnp.tensordot(mask, sent[i], 1)

        return jax.vmap(one)(mask, rounds)

    def follow(mean: Array, mask: Array) -> tuple[Array, Array]:
        def after(mean: Array, A: Array) -> tuple[Array, Array]:
            mean = A @ jnp.append(mean, 1)
            return mean, mean

        return lax.scan(after, mean, matrices(mask))[1], mask

    masks = jnp.asarray(law.masks, moments.mean.dtype)
    means = lax.map(lambda mask: follow(moments.mean, mask)[0], masks)
    mean = means.mean(0)

    # Sum over cases one by one, because each has covariances of its own.
    def add(total: Array, case: tuple[Array, Array]) -> tuple[Array, None]:
        mask, away = case

        def after(covariance: Array, A: Array) -> tuple[Array, Array]:
            covariance = A[:, :n] @ covariance @ A[:, :n].T
            return covariance, covariance

        inside = lax.scan(after, moments.covariance, matrices(mask))[1]
        return total + (inside + away[:, :, None] * away[:, None]) / len(masks), None

    zero = jnp.zeros((len(rounds), n, n))
    covariance, _ = lax.scan(add, zero, (masks, means - mean))
    return _Moments(mean[-1], covariance[-1]), _Moments(mean, covariance)


def _summary(linear: _Linear, moments: _Moments) -> Exact:
    """Moments of w, and the expected losses."""
    d = linear.dim
    mean, covariance = moments.mean[..., :d], moments.covariance[..., :d, :d]
    zero = jnp.zeros(d, mean.dtype)
    hessian, gradient = jax.hessian(linear.loss)(zero), jax.grad(linear.loss)(zero)
    best = jnp.linalg.solve(hessian, -gradient)
    error = mean - best
    excess = jnp.einsum("...i,ij,...j->...", error, hessian, error)
    excess = (excess + jnp.einsum("ij,...ji->...", hessian, covariance)) / 2
    distance = jnp.sum(error**2, -1) + jnp.trace(covariance, axis1=-2, axis2=-1)
    return Exact(mean, covariance, linear.loss(best) + excess, excess, distance)


def _frame(task: Task, params: Params, law: _Law, algorithm: Algorithm) -> tuple[_Linear, int, Any]:
    """The method, the rounds of a frame, and the function of a frame."""
    linear = _Linear.of(task, algorithm, params, law.factor)
    given = linear.head, linear.own
    weights = jax.vmap(lambda k: linear.message(*given, k, jnp.int32(1))[-1])(
        jnp.arange(linear.num_clients)
    )

    def frame(moments: _Moments, t: Any) -> tuple[_Moments, _Moments]:
        if law.masks is not None:
            return _one_frame(linear, law, weights, moments, t)
        after = _one_round(linear, law, weights.mean(), moments, t)
        return after, jax.tree.map(lambda x: x[None], after)

    return linear, 1 if law.masks is None else law.masks.shape[1], frame


def _iterate(task: Task, params: Params, law: _Law, algorithm: Algorithm, num_rounds: int) -> Exact:
    linear, length, frame = _frame(task, params, law, algorithm)
    start = linear.start()

    def one(moments: _Moments, number: Any) -> tuple[_Moments, Exact]:
        after, each = frame(moments, number * length + 1)
        return after, _summary(linear, each)

    @jax.jit  # also where it is called inside of `jax.vmap` alone
    def iterate() -> Exact:
        first = _summary(linear, jax.tree.map(lambda x: x[None], start))
        _, found = lax.scan(one, start, jnp.arange(-(-num_rounds // length)))

        def in_a_row(x: Array, y: Array) -> Array:
            return jnp.concatenate([x, y.reshape(-1, *y.shape[2:])])[: num_rounds + 1]

        found = jax.tree.map(in_a_row, first, found)
        return found._replace(covariance=found.covariance[-1])

    return iterate()


def _limit(task: Task, params: Params, law: _Law, algorithm: Algorithm) -> Exact:
    linear, _, frame = _frame(task, params, law, algorithm)
    start, t = linear.start(), jnp.int32(1)
    eps = jnp.finfo(start.mean.dtype).eps

    def fixed_point(after: Any, first: Array, scale: Any) -> tuple[Array, Array]:
        """Solves x = after(x), where `after` is affine, and whether it was solved."""
        zero = jnp.zeros_like(first)
        constant = after(zero)

        def residual(x: Array) -> Array:
            return x - (after(x) - constant)

        how: Any = {"tol": 100 * eps, "restart": min(100, first.size), "maxiter": 50}
        found, _ = jax.scipy.sparse.linalg.gmres(residual, constant, first, **how)
        wrong = jnp.max(jnp.abs(after(found) - found))
        return found, wrong <= eps**0.5 * jnp.max(jnp.abs(found)) + 100 * eps * scale

    @jax.jit
    def limit() -> Exact:
        z, C = start
        mean, is_mean = fixed_point(lambda x: frame(_Moments(x, C), t)[0].mean, z, jnp.max(z**2))
        scale = 1 + jnp.max(mean**2)  # the covariance may be 0
        covariance, is_found = fixed_point(
            lambda x: frame(_Moments(mean, x), t)[0].covariance, C, scale
        )
        # The equation of a divergent method has a solution that is no covariance.
        least, most = jnp.linalg.eigvalsh((covariance + covariance.T) / 2)[jnp.array([0, -1])]
        least = least + eps**0.5 * jnp.abs(most) + 100 * eps * scale
        is_there = is_mean & is_found & (least >= 0)
        found = _summary(linear, _Moments(mean, covariance))
        return jax.tree.map(lambda x: jnp.where(is_there, x, jnp.nan), found)

    return limit()
