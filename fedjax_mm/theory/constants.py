"""Constants of a task, exact if it has closed forms and otherwise estimated at given points."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PRNGKeyArray
from typing_extensions import Protocol, runtime_checkable

from fedjax_mm.base import Batching, Params, Task
from fedjax_mm.base.capabilities import EpochTask
from fedjax_mm.checks.annotations import Count, checked
from fedjax_mm.theory.affine import dependence


class Constant(NamedTuple):
    """A constant in a theorem's hypotheses or bound, and how it was obtained.

    Attributes:
      value: the number, or an array.
      known: "exact"; "bound", an upper (or lower) bound; or "estimate", from finitely many points.
      error: the estimate's residual, or 0 if exact. The error may be larger away from the given
        points.
    """

    value: Any
    known: Literal["exact", "bound", "estimate"]
    error: float = 0.0


class Constants(NamedTuple):
    """Constants of Assumptions 1 and 2 of Bhuyan et al., and the solution.

    Attributes:
      mu: the strong convexity constant of all clients' losses, Assumption 1.
      L: the smoothness constant of all clients' losses, Assumption 2.
      Gamma: ``F* - mean of F_k*``, the heterogeneity.
      optimum: F*.
      minimizer: w*.
    """

    mu: Constant
    L: Constant
    Gamma: Constant
    optimum: Constant
    minimizer: Constant


class Heterogeneity(NamedTuple):
    """How clients' losses differ, for bounds without bounded gradients.

    Attributes:
      zeta: root mean square over clients of ``|grad F_k(w*)|``, with weights n_k.
      delta: the largest ``|hess F_k - hess F|`` in the spectral norm, second-order heterogeneity.
      H: the largest Lipschitz constant of a client's Hessian.
    """

    zeta: Constant
    delta: Constant
    H: Constant


@runtime_checkable
class SolvedTask(Task, Protocol):
    """A task with known constants."""

    @property
    def strong_convexity(self) -> Float[Array, ""]:
        """The smallest Hessian eigenvalue over all clients."""

    @property
    def smoothness(self) -> Float[Array, ""]:
        """The largest Hessian eigenvalue over all clients."""

    @property
    def heterogeneity(self) -> Float[Array, ""]:
        """Gamma."""

    @property
    def optimum(self) -> Float[Array, ""]:
        """F*."""

    @property
    def minimizer(self) -> Params:
        """w*."""


def exact_constants(task: Task) -> Constants:
    """Computes the constants of a task with closed forms, or with quadratic losses.

    Closed forms are those of `SolvedTask`. That other losses are quadratic is proved from their
    program, see `fedjax_mm.theory.affine`; their Hessians are dense, of N d^2 numbers, and clients
    have weights n_k.

    Raises:
      ValueError: if the losses are neither.

    Example:
      >>> from fedjax_mm.tasks import quadratic
      >>> constants = exact_constants(quadratic(24, 4, mu=0.05))
      >>> constants.mu.known, round(float(constants.L.value), 3)
      ('exact', 3.733)

    Reference: Bhuyan et al., Assumptions 1 and 2.
    """
    values: Any
    if isinstance(task, SolvedTask):
        curvature = task.strong_convexity, task.smoothness
        values = (*curvature, task.heterogeneity, task.optimum, task.minimizer)
    elif is_quadratic(task):
        values = _solved(task)
    else:
        raise ValueError(
            f"{type(task).__name__} does not know its constants; use estimate_curvature"
        )
    return Constants(*(Constant(np.asarray(value), "exact") for value in values))


def is_quadratic(task: Task) -> bool:
    """Whether the program of the clients' losses proves that they are quadratic.

    Example:
      >>> from fedjax_mm.tasks import quadratic
      >>> is_quadratic(quadratic(4, 2, mu=0.1))
      True
    """
    gradient = jax.grad(lambda params: _local_loss(task, jnp.int32(0), params))
    kinds = dependence(gradient, [task.init(jax.random.key(0))], ["affine"])
    return not any(isinstance(kind, tuple) for kind in kinds)


@jax.jit
def _solved(task: Task) -> tuple[Any, ...]:
    """Constants of quadratic losses, in the order of `Constants`."""
    start, unravel = ravel_pytree(task.init(jax.random.key(0)))
    clients, zero = jnp.arange(task.num_clients), jnp.zeros_like(start)
    weights = jax.vmap(task.weight)(clients)
    weights = weights / weights.sum()

    def loss(x: Array, client: Int[Array, ""]) -> Array:
        return _local_loss(task, client, unravel(x))

    values, gradients, hessians = (
        jax.vmap(of, (None, 0))(zero, clients) for of in (loss, jax.grad(loss), jax.hessian(loss))
    )
    slope = weights @ gradients
    minimizer = -jnp.linalg.solve(jnp.tensordot(weights, hessians, 1), slope)
    optimum = weights @ values + slope @ minimizer / 2
    curvature = jnp.linalg.eigvalsh(hessians)
    # F_k(w*) - F_k*. A client with few examples has many minimizers. Take the shortest.
    excess = jax.vmap(lambda A, g: g @ jnp.linalg.pinv(A, hermitian=True) @ g / 2)
    # Take the maximum, because 0, for equal losses, may round to less.
    Gamma = jnp.maximum(weights @ excess(hessians, gradients + hessians @ minimizer), 0)
    return curvature.min(), curvature.max(), Gamma, optimum, unravel(minimizer)


def heterogeneity(task: Task, points: Params | None = None) -> Heterogeneity:
    """The constants of `Heterogeneity`, exact if all losses are quadratic.

    That they are quadratic is proved from their program, see `fedjax_mm.theory.affine`. Hessians
    are dense, of N d^2 numbers.

    Args:
      task: a task whose loss over all of a client's examples is F_k.
      points: parameters with a leading axis of two or more points, such as a trajectory, if losses
        are not quadratic. The one with the smallest gradient of F stands for w*.

    Returns:
      Constants, which are estimates if losses are not quadratic. The error of zeta is then
      ``|grad F|`` at that point. Those of delta and H are the amounts by which the second half of
      the points increased them; H is taken between neighbouring points.

    Raises:
      ValueError: if losses are not quadratic, and there are no points.

    Example:
      >>> from fedjax_mm.tasks import quadratic
      >>> found = heterogeneity(quadratic(4, 2, mu=0.1))
      >>> found.delta.known, round(float(found.delta.value), 3), float(found.H.value)
      ('exact', 2.413, 0.0)
    """
    is_exact = is_quadratic(task)
    if not is_exact and points is None:
        raise ValueError(
            f"the losses of {type(task).__name__} are not known to be quadratic; give points, such "
            "as a trajectory"
        )
    if is_exact:
        points = jax.tree.map(lambda x: x[None], _solved(task)[-1])
    squares, rest, deltas, changes = map(np.asarray, _differences(task, points))
    if is_exact:
        each = squares[0] ** 0.5, deltas[0], np.zeros(())
        return Heterogeneity(*(Constant(x, "exact") for x in each))
    best, half = rest.argmin(), len(changes) // 2
    return Heterogeneity(
        Constant(squares[best] ** 0.5, "estimate", float(rest[best])),
        *(
            Constant(x.max(), "estimate", float(x.max() - x[: max(half, 1)].max()))
            for x in (deltas, changes)
        ),
    )


@jax.jit
def _differences(task: Task, points: Params) -> tuple[Array, ...]:
    """Mean squared gradients, |grad F|, largest Hessian differences, and their change by points."""
    unravel = ravel_pytree(jax.tree.map(lambda x: x[0], points))[1]
    flat = jax.vmap(lambda x: ravel_pytree(x)[0])(points)
    clients = jnp.arange(task.num_clients)
    weights = jax.vmap(task.weight)(clients)
    weights = weights / weights.sum()

    def of_client(x: Array, client: Int[Array, ""]) -> Array:
        return _local_loss(task, client, unravel(x))

    def each(derivative: Callable[..., Any], x: Array) -> Array:
        return jax.vmap(derivative(of_client), (None, 0))(x, clients)

    def norms(matrices: Array) -> Array:
        return jnp.abs(jnp.linalg.eigvalsh(matrices)).max()

    def at(before: Array, x: Array) -> tuple[Array, tuple[Array, ...]]:
        gradients, hessians = each(jax.grad, x), each(jax.hessian, x)
        mean = weights @ gradients
        found = (
            weights @ jnp.sum(gradients**2, 1),
            jnp.linalg.norm(mean),
            norms(hessians - jnp.tensordot(weights, hessians, 1)),
            norms(hessians - each(jax.hessian, before)) / jnp.linalg.norm(x - before),
        )
        return x, found

    (squares, rest, deltas, changes) = lax.scan(at, flat[0], flat)[1]
    return squares, rest, deltas, changes[1:]


@checked
def estimate_curvature(
    rng_key: PRNGKeyArray, task: Task, points: Params, *, num_steps: Count = 32
) -> tuple[Constant, Constant]:
    """Estimates mu and L, the extreme eigenvalues of all clients' Hessians.

    Elsewhere a non-quadratic loss may have smaller and larger eigenvalues, so mu may be too large
    and L too small. A negative mu shows that the loss is not convex.

    Args:
      rng_key: the key for the starting vectors.
      task: a task whose loss over all of a client's examples is F_k.
      points: parameters with a leading axis of points, such as a trajectory.
      num_steps: the number of Hessian-vector products per client and point.

    Returns:
      The smallest and the largest eigenvalue, whose errors are the residuals of the eigenvectors.

    Example:
      >>> import jax
      >>> from fedjax_mm.tasks import quadratic
      >>> task = quadratic(24, 4, mu=0.05)
      >>> mu, L = estimate_curvature(jax.random.key(0), task, task.init(jax.random.key(0))[None])
      >>> mu.known, round(float(L.value), 3)
      ('estimate', 3.733)

    Reference: Bhuyan et al., Assumptions 1 and 2.
    """
    pairs = _curvature(rng_key, task, points, num_steps)
    ends, errors = (np.asarray(x).reshape(-1, 2) for x in pairs)
    lowest, highest = np.argmin(ends[:, 0]), np.argmax(ends[:, 1])
    return (
        Constant(ends[lowest, 0], "estimate", float(errors[lowest, 0])),
        Constant(ends[highest, 1], "estimate", float(errors[highest, 1])),
    )


@partial(jax.jit, static_argnames="num_steps")
def _curvature(
    rng_key: PRNGKeyArray, task: Task, points: Params, num_steps: int
) -> tuple[Float[Array, "points clients 2"], Float[Array, "points clients 2"]]:
    """Smallest and largest eigenvalue, and their residuals."""

    def at(point: Params, client: Int[Array, ""]) -> tuple[Array, Array]:
        flat, unravel = ravel_pytree(point)
        loss = partial(_local_loss, task, client)
        gradient = jax.grad(lambda x: loss(unravel(x)))

        def product(vector: Float[Array, " dim"]) -> Float[Array, " dim"]:
            # In forward-over-reverse mode, a Hessian-vector product costs only a few gradients, and
            # the Hessian is never materialized.
            return jax.jvp(gradient, (flat,), (vector,))[1]

        start = jax.random.normal(rng_key, flat.shape, flat.dtype)
        return extreme_eigenvalues(product, start, min(num_steps, flat.size))

    return _over_points_and_clients(at, task, points)


def _local_loss(task: Task, client: Int[Array, ""], params: Params) -> Float[Array, ""]:
    """Loss F_k(w) over all of the client's examples."""
    unused = jax.random.key(0)  # a full batch is not random
    return task.loss(params, task.batch(unused, client, jnp.int32(0), Batching()))


def extreme_eigenvalues(
    product: Callable[[Float[Array, " dim"]], Float[Array, " dim"]],
    start: Float[Array, " dim"],
    num_steps: int,
) -> tuple[Float[Array, " 2"], Float[Array, " 2"]]:
    """Computes the extreme eigenvalues of a symmetric matrix from matrix-vector products.

    Uses the Lanczos method with full reorthogonalization. Its basis V makes ``V'HV`` tridiagonal,
    and the extreme eigenvalues of ``V'HV`` converge to those of H from the inside.

    Args:
      product: ``v -> H v``.
      start: a vector with a component along every eigenvector.
      num_steps: the number of products.

    Returns:
      The two eigenvalues, and the norms ``|H v - theta v|`` of their residuals. H has an eigenvalue
      within this distance of each.

    Reference: Golub and Van Loan (2013), Matrix Computations, section 10.3.
    """

    def step(carry: Any, i: Int[Array, ""]) -> tuple[Any, tuple[Array, Array]]:
        basis, vector, is_alive, scale = carry
        basis = basis.at[i].set(vector)
        image = product(vector)
        scale = jnp.maximum(scale, jnp.linalg.norm(image))
        diagonal = vector @ image
        # One pass leaves components along the basis if most of the image cancels. Two passes are
        # enough (Parlett).
        for _ in range(2):
            image = image - basis.T @ (basis @ image)
        norm = jnp.linalg.norm(image)
        # Stop at an invariant subspace, where the next vector is only rounding error. lax.scan has
        # a fixed length, so mark the remaining steps by NaN.
        is_alive_after = is_alive & (norm > jnp.finfo(norm.dtype).eps * scale)
        vector = jnp.where(is_alive_after, image / norm, 0)
        entries = jnp.where(is_alive, diagonal, jnp.nan), jnp.where(is_alive_after, norm, 0)
        return (basis, vector, is_alive_after, scale), entries

    empty = jnp.zeros((num_steps, start.size), start.dtype)
    first = start / jnp.linalg.norm(start)
    carry = empty, first, jnp.array(True), jnp.zeros((), start.dtype)
    _, (diagonal, off_diagonal) = lax.scan(step, carry, jnp.arange(num_steps))
    # Fill the remaining steps with the first entry, because it lies between the extremes, whereas 0
    # might not.
    diagonal = jnp.where(jnp.isnan(diagonal), diagonal[0], diagonal)
    inner = off_diagonal[:-1]
    values, vectors = jnp.linalg.eigh(jnp.diag(diagonal) + jnp.diag(inner, 1) + jnp.diag(inner, -1))
    ends = jnp.array([0, -1])
    return values[ends], jnp.abs(off_diagonal[-1] * vectors[-1, ends])


def gradient_bound(task: Task, points: Params) -> Constant:
    """Largest ``|grad F_k|`` over all clients and points, which is G for full gradients.

    For convex losses and learning rates up to 2/L, gradients shrink along local steps, so it is
    enough to check the points where rounds begin.

    Args:
      task: a task whose loss over all of a client's examples is F_k.
      points: parameters with a leading axis, such as a trajectory.

    Reference: Bhuyan et al., Assumption 3.
    """
    return Constant(np.asarray(_gradient_norms(task, points)).max(), "estimate")


@jax.jit
def _gradient_norms(task: Task, points: Params) -> Float[Array, "points clients"]:
    def norm(point: Params, client: Int[Array, ""]) -> Float[Array, ""]:
        gradient = jax.grad(partial(_local_loss, task, client))(point)
        return jnp.asarray(optax.tree.norm(gradient))

    return _over_points_and_clients(norm, task, points)


def _over_points_and_clients(function: Callable[..., Any], task: Task, points: Params) -> Any:
    """Maps ``function(point, client)`` over all points and clients."""
    # A trajectory may have many points. lax.map bounds the memory.
    clients = jnp.arange(task.num_clients)
    return lax.map(lambda point: jax.vmap(partial(function, point))(clients), points)


@jax.jit
def example_gradients(
    task: EpochTask, points: Params
) -> tuple[Float[Array, "points clients"], Float[Array, "points clients"]]:
    """Computes ``|grad F_k|^2`` and the largest squared gradient over the client's examples.

    The gradient of F_k is the mean over its examples, even if the task's loss is their sum.

    Args:
      task: a task whose clients have examples.
      points: parameters with a leading axis.

    Reference: Bhuyan et al., Assumption 4.
    """

    def sides(point: Params, client: Int[Array, ""]) -> tuple[Array, Array]:
        flat, unravel = ravel_pytree(point)
        num_examples = jnp.asarray(task.num_batches(client, 1))

        # Clients differ in their numbers of examples. Process one example at a time.
        def add(step: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
            total, largest = carry
            batch = task.batch(jax.random.key(0), client, step, Batching(1, "epochs"))
            gradient = jax.grad(lambda x: task.loss(unravel(x), batch))(flat)
            return total + gradient, jnp.maximum(largest, gradient @ gradient)

        start = jnp.zeros_like(flat), jnp.zeros((), flat.dtype)
        total, largest = lax.fori_loop(0, num_examples, add, start)
        mean = total / num_examples
        return mean @ mean, largest

    return _over_points_and_clients(sides, task, points)


def estimate_noise(task: EpochTask, points: Params) -> tuple[Constant, Constant]:
    """Estimates beta_1 and beta_2 in ``|grad f_ky|^2 <= beta_1 + beta_2 |grad F_k|^2``.

    They are the intercept and the slope of the least-squares line through the largest squared
    example gradient of each client and point. The slope is at least 1, as in the assumption, and
    the line is raised until no squared gradient lies above it.

    Args:
      task: a task whose clients have examples.
      points: parameters with a leading axis, such as a trajectory.

    Returns:
      Estimates of beta_1 and beta_2. The error of beta_1 is the amount by which the line was
      raised.

    Reference: Bhuyan et al., Assumption 4.
    """
    squares, largest = (np.asarray(x, np.float64).ravel() for x in example_gradients(task, points))
    # Use the smallest slope if all squares are equal (a single point, or all at the minimum),
    # because they do not determine a slope.
    slope = max(1.0, np.polyfit(squares, largest, 1)[0]) if np.ptp(squares) > 0 else 1.0
    rest = largest - slope * squares
    level = max(rest.max(), 0.0)
    return Constant(level, "estimate", level - rest.mean()), Constant(slope, "estimate")
