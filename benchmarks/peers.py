"""The quadratic workload W1 in two peer systems, FedJAX and DrJAX, and in plain NumPy.

W1 is one model of the M of a multi-model run: N clients with the objectives

    F_k(w) = 1/2 (w'A_k w - 2 b_k'w) + mu/2 |w|^2,    w in R^d, d = N p + 1,

where a round sends w to N/M clients, each takes E full-gradient steps
`w <- w - eta (A_k w - b_k + mu w)`, and the server adds the mean of their updates to w.

Every `*_rounds` function does its set-up when called and returns `run`, which plays all rounds
from w = 0 and returns the last w `[d]`. The first `run()` compiles, later ones do not. All three
visit the same clients for the same seed, so their results agree up to rounding; the clients are
drawn in the set-up, so no timing of `run` contains the drawing.

Each system is written as its users write it, with the cheapest of the forms that we measured:

- FedJAX: a host loop over `algorithm.apply(state, clients)`, local steps by `for_each_client`.
- DrJAX: `broadcast`, `map_fn`, `reduce_mean` in one program, rounds in `lax.scan` under `jit`.

The peers are imported inside their functions: this file imports without them.

Axes: N clients, T rounds, S = N/M clients in a round, d coordinates.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Run = Callable[[], np.ndarray]


def quadratic_clients(num_clients: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the dense A `[N, d, d]` and b `[N, d]` of all clients, float64.

    A_k is the Laplacian of a path of p + 1 nodes at offset k p (k from 0), and the first and the
    last client get one more at their outer corner: the A_k add up to tridiag(-1, 2, -1).
    """
    dimension = num_clients * block_size + 1
    edges = np.diff(np.eye(block_size + 1), axis=0)
    matrices = np.zeros((num_clients, dimension, dimension))
    for k in range(num_clients):
        block = slice(k * block_size, (k + 1) * block_size + 1)
        matrices[k, block, block] = edges.T @ edges
    matrices[0, 0, 0] += 1.0
    matrices[-1, -1, -1] += 1.0
    vectors = np.zeros((num_clients, dimension))
    vectors[0, 0] = 1.0
    return matrices, vectors


def sample_cohorts(num_rounds: int, num_clients: int, num_models: int, seed: int) -> np.ndarray:
    """Returns the clients of every round, `[T, S]` int32, uniform without replacement.

    Raises:
      ValueError: if `num_models` does not divide `num_clients`.
    """
    if num_clients % num_models:
        raise ValueError(
            f"num_clients={num_clients} must be a multiple of num_models={num_models}: "
            "every model trains on N/M clients a round."
        )
    clients = np.tile(np.arange(num_clients, dtype=np.int32), (num_rounds, 1))
    shuffled = np.random.default_rng(seed).permuted(clients, axis=1)
    return shuffled[:, : num_clients // num_models]


def _fedjax_federated_averaging(
    grad_fn: Callable[[jax.Array, Any], jax.Array], learning_rate: float, local_steps: int
) -> Any:
    """Builds FedAvg as a `fedjax.FederatedAlgorithm` whose server state is the parameters.

    Follows `fedjax.algorithms.fed_avg`, less what W1 has no use for (client random keys, norms of
    the updates, weights by number of examples). FedJAX's own version cannot run here: fedjax 0.0.17
    calls `jax.tree_map` in `fedjax.tree_util`, which JAX removed in 0.6.0.
    """
    import fedjax

    optimizer = fedjax.optimizers.sgd(learning_rate)
    batching = fedjax.BatchHParams(batch_size=1)

    def client_init(server_params: jax.Array, client_rng: None) -> dict[str, Any]:
        del client_rng
        return {"params": server_params, "opt_state": optimizer.init(server_params)}

    def client_step(state: dict[str, Any], batch: Any) -> dict[str, Any]:
        grads = grad_fn(state["params"], batch)
        opt_state, params = optimizer.apply(grads, state["opt_state"], state["params"])
        return {"params": params, "opt_state": opt_state}

    def client_final(server_params: jax.Array, state: dict[str, Any]) -> jax.Array:
        return server_params - state["params"]

    train_for_each_client = fedjax.for_each_client(client_init, client_step, client_final)

    @jax.jit
    def server_update(params: jax.Array, deltas: list[jax.Array]) -> jax.Array:
        return params - sum(deltas) / len(deltas)

    def init(params: jax.Array) -> jax.Array:
        return params

    def apply(params: jax.Array, clients: Iterable[Any]) -> tuple[jax.Array, dict[Any, Any]]:
        # A client has one example, so an epoch is one full-gradient step with nothing to shuffle:
        # `shuffle_repeat_batch`, which seeds a NumPy generator per client and round (0.1 ms), would
        # halve the speed.
        batched = [
            (key, list(data.batch(batching)) * local_steps, rng) for key, data, rng in clients
        ]
        deltas = [delta for _, delta in train_for_each_client(params, batched)]
        return server_update(params, deltas), {}

    return fedjax.FederatedAlgorithm(init, apply)


class Quadratic(NamedTuple):
    """W1 for `torch_peers`: each client's only example is its objective, A_k and b_k.

    Attributes:
      num_clients: N.
      block_size: p.
      mu: weight of the ridge term.
      num_models: M.
      num_steps: E.
      learning_rate: eta.
    """

    num_clients: int = 24
    block_size: int = 4
    mu: float = 2e-4
    num_models: int = 12
    num_steps: int = 5
    learning_rate: float = 0.1
    name: str = "W1"
    num_examples: int = 1
    batch_size: int = 1

    @property
    def cohort_size(self) -> int:
        """The number of clients in a round."""
        return self.num_clients // self.num_models

    def cohorts(self, num_rounds: int, seed: int) -> np.ndarray:
        """Returns the clients of every round, as `sample_cohorts`."""
        return sample_cohorts(num_rounds, self.num_clients, self.num_models, seed)


def fedjax_rounds(
    num_rounds: int,
    *,
    num_clients: int = 24,
    block_size: int = 4,
    mu: float = 2e-4,
    num_models: int = 12,
    local_steps: int = 5,
    learning_rate: float = 0.1,
    seed: int = 0,
) -> Run:
    """Sets up W1 in FedJAX, float32: rounds, clients and local steps are loops on the host.

    A client's one example is its number, with which the loss looks up A_k and b_k on the device:
    a batch goes from NumPy to the device in every step, and A_k itself would slow that down. The
    loss is differentiated by `jax.grad`; a gradient by hand is no faster where dispatch dominates.

    Args:
      num_rounds: T, rounds of one `run()`.
      num_clients: N.
      block_size: p; the dimension is d = N p + 1.
      mu: weight of the ridge term.
      num_models: M; N/M clients train in a round.
      local_steps: E, gradient steps of a client in a round.
      learning_rate: eta.
      seed: of the clients' drawing.

    Returns:
      `run()`, which plays all rounds from zeros and returns w `[d]`.

    Raises:
      ValueError: if `num_models` does not divide `num_clients`.
    """
    import fedjax

    matrices, vectors = quadratic_clients(num_clients, block_size)
    all_A, all_b = jnp.asarray(matrices, jnp.float32), jnp.asarray(vectors, jnp.float32)

    def loss(w: jax.Array, batch: Any) -> jax.Array:
        A, b = all_A[batch["client"]], all_b[batch["client"]]
        return jnp.mean(0.5 * (A @ w) @ w - b @ w) + 0.5 * mu * w @ w

    algorithm = _fedjax_federated_averaging(jax.grad(loss), learning_rate, local_steps)
    clients = [
        (f"{k}".encode(), fedjax.ClientDataset({"client": np.array([k], np.int32)}), None)
        for k in range(num_clients)
    ]
    cohorts = sample_cohorts(num_rounds, num_clients, num_models, seed).tolist()

    def run() -> np.ndarray:
        state = algorithm.init(jnp.zeros(all_b.shape[1]))
        for cohort in cohorts:
            state, _ = algorithm.apply(state, [clients[k] for k in cohort])
        return np.asarray(state)

    return run


def drjax_rounds(
    num_rounds: int,
    *,
    num_clients: int = 24,
    block_size: int = 4,
    mu: float = 2e-4,
    num_models: int = 12,
    local_steps: int = 5,
    learning_rate: float = 0.1,
    seed: int = 0,
) -> Run:
    """Sets up W1 in DrJAX, float32: all rounds are one compiled scan.

    The gradient is written by hand, since `jax.grad` of the quadratic form, which cannot know that
    A_k is symmetric, costs a second matrix-vector product. The drawn clients are scan inputs:
    `jax.random.choice` in the round is slower.

    Args, Returns, Raises: as `fedjax_rounds`.
    """
    import drjax

    matrices, vectors = quadratic_clients(num_clients, block_size)
    data = (jnp.asarray(matrices, jnp.float32), jnp.asarray(vectors, jnp.float32))
    cohorts = jnp.asarray(sample_cohorts(num_rounds, num_clients, num_models, seed))

    def client_update(w: jax.Array, A: jax.Array, b: jax.Array) -> jax.Array:
        def step(v: jax.Array, _: None) -> tuple[jax.Array, None]:
            return v - learning_rate * (A @ v - b + mu * v), None

        return jax.lax.scan(step, w, length=local_steps)[0] - w

    @drjax.program(placements={"clients": cohorts.shape[1]})
    def round_fn(w: jax.Array, A: jax.Array, b: jax.Array) -> jax.Array:
        updates = drjax.map_fn(client_update, (drjax.broadcast(w), A, b))
        return w + drjax.reduce_mean(updates)

    @jax.jit
    def train(w: jax.Array, data: tuple[jax.Array, jax.Array], cohorts: jax.Array) -> jax.Array:
        def one_round(w: jax.Array, cohort: jax.Array) -> tuple[jax.Array, None]:
            A, b = data
            return round_fn(w, A[cohort], b[cohort]), None

        # Rounds are so short that the loop itself costs time: unrolled, 1.4 times faster on a CPU.
        return jax.lax.scan(one_round, w, cohorts, unroll=4)[0]

    return lambda: np.asarray(train(jnp.zeros(data[1].shape[1]), data, cohorts))


def numpy_rounds(
    num_rounds: int,
    *,
    num_clients: int = 24,
    block_size: int = 4,
    mu: float = 2e-4,
    num_models: int = 12,
    local_steps: int = 5,
    learning_rate: float = 0.1,
    seed: int = 0,
) -> Run:
    """Sets up W1 as a plain NumPy loop, float64: the baseline and the reference of the peers.

    Args, Returns, Raises: as `fedjax_rounds`.
    """
    matrices, vectors = quadratic_clients(num_clients, block_size)
    cohorts = sample_cohorts(num_rounds, num_clients, num_models, seed)

    def client_update(w: np.ndarray, A: np.ndarray, b: np.ndarray) -> np.ndarray:
        v = w.copy()
        for _ in range(local_steps):
            v -= learning_rate * (A @ v - b + mu * v)
        return v - w

    def run() -> np.ndarray:
        w = np.zeros(vectors.shape[1])
        for cohort in cohorts:
            w = w + sum(client_update(w, matrices[k], vectors[k]) for k in cohort) / len(cohort)
        return w

    return run
