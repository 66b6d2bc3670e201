"""The strongly convex federated quadratic of Bhuyan et al., section 6, stored in blocks."""

import dataclasses
import math
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from fedjax_mm.base import Batching, Index, Metrics, Scalar, Steps
from fedjax_mm.base.calls import in_short
from fedjax_mm.base.sums import SparseUpdate
from fedjax_mm.checks.annotations import Count, Positive, checked
from fedjax_mm.tools.loops import local_steps

Vector: TypeAlias = Float[Array, " dim"]
"""One model's parameters."""

Block: TypeAlias = Float[Array, " block"]
Coordinates: TypeAlias = Block | list[Array]

_COORDINATES = 16
"""The largest number of coordinates in a block that accelerators compute one by one."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quadratic:
    """Task with ``F_k(w) = 1/2 (w'A_k w - 2 b_k'w) + mu/2 |w|^2``, eqs. (5)-(9).

    Built by `quadratic`. A_k and b_k involve only the p + 1 coordinates starting at (k-1) p, so the
    memory is O(N p) and a client's E local steps cost O(p E).

    Attributes:
      mu: the regularization strength.
      minimizer: ``float[dim]``, w*.
      optimum: F* = F(w*).
      num_clients: N, the number of clients.
      block_size: p; the loss of each client involves p + 1 coordinates.
    """

    mu: Array
    minimizer: Array
    optimum: Array
    num_clients: int = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})

    __repr__ = in_short

    @property
    def dim(self) -> int:
        """The number of coordinates, D = N p + 1."""
        return self.num_clients * self.block_size + 1

    def init(self, rng_key: PRNGKeyArray) -> Vector:
        """Starts at 0, as in Algorithm 1. Pass `params` to `simulate` to start elsewhere."""
        del rng_key
        return jnp.zeros(self.dim, self.minimizer.dtype)

    def weight(self, client: Index) -> Float[Array, ""]:
        """1, because all clients have equal weights."""
        del client
        return jnp.ones((), self.minimizer.dtype)

    def batch(self, rng_key: PRNGKeyArray, client: Index, step: Index, how: Batching) -> Index:
        """Gives the client's index, because a quadratic has no examples to sample."""
        del rng_key, step
        if how.size is not None or how.limit is not None:
            raise ValueError(f"batch_size is {how.size}; the quadratic has no examples, use None")
        return client

    def loss(self, params: Vector, batch: Index) -> Float[Array, ""]:
        """Loss F_k(w) of the client given by the batch."""
        block = self._block(params, batch)
        first, last = self._ends(batch)
        curvature = first * block[0] ** 2 + last * block[-1] ** 2 + jnp.sum(jnp.diff(block) ** 2)
        return (curvature + self.mu * jnp.sum(params**2)) / 2 - first * block[0]

    def client_loss(self, params: Vector, client: Index) -> Float[Array, ""]:
        """Loss F_k(w) of the client."""
        return self.loss(params, client)

    def metrics(self, rng_key: PRNGKeyArray, params: Vector) -> Metrics:
        """Metrics F(w), F(w) - F*, and |w - w*|."""
        del rng_key
        error = params - self.minimizer
        squares = jnp.sum(error**2)
        # A difference of losses would lose precision near the optimum. Use the quadratic form.
        before = jnp.pad(error[:-1], (1, 0))  # equal lengths let one kernel compute both sums
        curvature = jnp.sum((error - before) ** 2) + error[-1] ** 2
        excess = (curvature / self.num_clients + self.mu * squares) / 2
        loss, distance = self.optimum + excess, jnp.sqrt(squares)
        return {"loss": loss, "excess_loss": excess, "distance": distance}

    def local_sgd(
        self, params: Vector, client: Index, learning_rate: Scalar, num_steps: Steps
    ) -> SparseUpdate:
        """Update of E gradient steps: the client's block, and a factor for the rest."""
        first, last = self._ends(client)
        block: Coordinates = self._block(params, client)
        decay_per_step = learning_rate * self.mu
        # On accelerators, compute coordinate by coordinate. XLA can then fuse all steps into one
        # kernel. CPUs are faster with vectors.
        if jax.default_backend() != "cpu" and len(block) <= _COORDINATES:
            block = list(block)

        # Carry the change since the start and ``decay = (1 - eta mu)^E - 1``, because subtracting
        # parameters, or 1 from the factor, would lose precision in float32.
        def step(_: Index, carry: tuple[Coordinates, Array]) -> tuple[Coordinates, Array]:
            change, decay = carry
            x = jax.tree.map(jnp.add, block, change)
            flow = _enclosed(first * (x[0] - 1), _differences(x), -last * x[-1])

            def moved(change: Array, inflow: Array, x: Array) -> Array:
                return change + learning_rate * inflow - decay_per_step * x

            change = jax.tree.map(moved, change, _differences(flow), x)
            return change, decay - decay_per_step * (1 + decay)

        start = jax.tree.map(jnp.zeros_like, (block, block[0]))
        change, decay = local_steps(num_steps, step, start)
        update = jax.tree.map(lambda change, x: change - decay * x, change, block)
        indices = client * self.block_size + jnp.arange(self.block_size + 1)
        return SparseUpdate(decay, indices, jnp.asarray(update))

    @property
    def strong_convexity(self) -> Float[Array, ""]:
        """The exact smallest eigenvalue of the clients' Hessians."""
        # For N > 1 it is mu, because a client's block does not cover all coordinates.
        if self.num_clients > 1:
            return self.mu
        return self.mu + 2 - 2 * math.cos(math.pi / (self.block_size + 2))

    @property
    def smoothness(self) -> Float[Array, ""]:
        """L, the exact largest eigenvalue of the clients' Hessians."""
        return self.mu + largest_curvature(self.num_clients, self.block_size)

    @property
    def heterogeneity(self) -> Float[Array, ""]:
        """Gamma = F* - mean of F_k* >= 0, exact."""
        # Only client 1 contributes. The other clients' F_k have no term b_k, so their F_k* is 0.
        hessian = self._first_hessian()
        e1 = jnp.zeros_like(hessian[0]).at[0].set(1)
        Gamma = self.optimum + jnp.linalg.solve(hessian, e1)[0] / (2 * self.num_clients)
        return jnp.maximum(Gamma, 0)  # one client's is 0, but may round to less

    def _block(self, params: Vector, client: Index) -> Block:
        return lax.dynamic_slice(params, (client * self.block_size,), (self.block_size + 1,))

    def _ends(self, client: Index) -> tuple[Float[Array, ""], Float[Array, ""]]:
        # Add the terms E_11 and E_dd of eq. (7), which belong only to the first and the last
        # client.
        dtype = self.minimizer.dtype
        return (client == 0).astype(dtype), (client == self.num_clients - 1).astype(dtype)

    def _first_hessian(self) -> Float[Array, "block block"]:
        # Build the client's block of A_1 + mu I.
        width, dtype = self.block_size + 1, self.minimizer.dtype
        path = 2 * jnp.eye(width, dtype=dtype) - jnp.eye(width, k=1) - jnp.eye(width, k=-1)
        last = 2 if self.num_clients == 1 else 1
        return path.at[-1, -1].set(last) + self.mu * jnp.eye(width)


def _differences(x: Coordinates) -> Coordinates:
    return [b - a for a, b in pairwise(x)] if isinstance(x, list) else jnp.diff(x)


def _enclosed(first: Array, x: Coordinates, last: Array) -> Coordinates:
    """Pads the coordinates with one more at each end."""
    if isinstance(x, list):
        return [first, *x, last]
    return jnp.concatenate([first[None], x, last[None]])


def largest_curvature(num_clients: int, block_size: int) -> float:
    """Largest eigenvalue over all A_k.

    Example:
      >>> round(largest_curvature(24, 4), 6)
      3.682507
    """
    # A_k is a second-difference matrix. If N = 1, both of its ends are fixed. Otherwise the first
    # and the last client's A_k have one fixed end, and the A_k of other clients have free ends and
    # smaller eigenvalues.
    angle = math.pi / (block_size + 2)
    if num_clients > 1:
        angle = 2 * math.pi / (2 * block_size + 3)
    return 2 + 2 * math.cos(angle)


@checked
def quadratic(num_clients: Count, block_size: Count, *, mu: Positive) -> Quadratic:
    """Makes the federated quadratic of N clients with blocks of p + 1 coordinates.

    The minimizer solves ``(tridiag(-1, 2, -1) + N mu I) w = e_1``, in closed form
    ``w_i = sinh((d + 1 - i) theta) / sinh((d + 1) theta)`` with ``2 cosh(theta) = 2 + N mu``, which
    costs O(d) and is accurate to rounding error at any condition number.

    Args:
      num_clients: N, the number of clients.
      block_size: p; the loss of each client involves p + 1 coordinates.
      mu: the regularization strength and strong convexity of every client; it may be traced.

    Raises:
      ValueError: if an argument is not positive.

    Example:
      >>> task = quadratic(24, 4, mu=2e-4)
      >>> task.dim, round(float(task.optimum), 6)
      (97, -0.019439)

    Reference: Bhuyan, Moharir, Joshi, section 6.1; Li et al. (2019), the same problem with N = 5.
    """
    if (size := num_clients * block_size + 1) >= 2**31:
        raise ValueError(
            f"num_clients = {num_clients:,} with block_size = {block_size:,} make {size:,} "
            f"parameters; at most {2**31 - 1:,} are possible: take fewer clients or smaller blocks"
        )
    mu = jnp.asarray(mu, float)
    minimizer, optimum = _minimum(num_clients, block_size, mu)
    return Quadratic(mu, minimizer, optimum, num_clients, block_size)


# Compile it at once, because its 20 operations would otherwise be compiled one by one.
@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _minimum(num_clients: int, block_size: int, mu: Array) -> tuple[Array, Array]:
    """The minimizer w* and the minimum F*."""
    excess = num_clients * mu / 2  # cosh(theta) - 1
    theta = jnp.log1p(excess + jnp.sqrt(excess * (excess + 2)))
    dim = num_clients * block_size + 1
    i = jnp.arange(1, dim + 1, dtype=mu.dtype)
    minimizer = jnp.exp(-i * theta) * jnp.expm1(-2 * (dim + 1 - i) * theta)
    minimizer = minimizer / jnp.expm1(-2 * (dim + 1) * theta)
    return minimizer, -minimizer[0] / (2 * num_clients)
