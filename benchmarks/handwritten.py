"""W1 to W4 in JAX by hand: for each workload the best loop that we know, without any library.

A loop serves one workload and nothing else: its gradients, layouts and chunks are those that were
fastest here. It keeps no records, has no other methods and checks nothing. Rounds are one compiled
scan, and clients are shared out over all devices, but for W4. What was tried is in
`benchmarks/README.md`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.learning import Params, Run, Workload

_CLIENTS_AT_ONCE = 25  # of logistic regression, whose parameters then fit the first cache


def learning_rounds(
    workload: Workload, num_rounds: int, *, seed: int = 0, batches: np.ndarray | None = None
) -> Run:
    """Sets up W2, W2b, W3, W3b or W4.

    Args:
      workload: what to do.
      num_rounds: T, rounds of one `run()`.
      seed: of the data, the parameters and the cohorts.
      batches: examples of every step, `[T, S, E, B]`, numbered within their client; None draws them
        uniformly with replacement in the round.

    Returns:
      `run()`, which plays all rounds and returns the parameters; the first one compiles.
    """
    if workload.model.channels:
        return _convolution_rounds(workload, num_rounds, seed, batches)
    model, num_devices = workload.model, jax.device_count()
    if workload.cohort_size % num_devices:
        num_devices = 1
    share = workload.cohort_size // num_devices
    size = (share, workload.num_steps, workload.batch_size)
    train = _train_logistic if len(model.widths) == 1 else _train_perceptron

    def one_round(data: Any, params: Any, round: Any) -> tuple[Any, None]:
        cohort, draw = round
        if batches is None:
            own = jax.random.fold_in(draw, lax.axis_index("clients"))
            draw = _drawn(jax.random.key_data(own), size, workload.num_examples)
        rows = cohort[:, None, None] * workload.num_examples + draw
        total = train(params, *data, rows, workload.learning_rate)
        return jax.tree.map(lambda x: lax.psum(x, "clients") / workload.cohort_size, total), None

    mesh = Mesh(np.array(jax.devices()[:num_devices]), "clients")
    of_rounds = P(None, "clients"), P() if batches is None else P(None, "clients")

    specs: Any = {"in_specs": (P(), P(), of_rounds), "out_specs": P(), "check_vma": False}

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, **specs)
    def play(params: Any, data: Any, rounds: Any) -> Any:
        return lax.scan(partial(one_round, data), params, rounds)[0]

    inputs, labels = workload.examples(seed)
    data = jnp.asarray(inputs.reshape(-1, *model.example_shape)), jnp.asarray(labels.ravel())
    draws = jax.random.split(jax.random.key(seed), num_rounds) if batches is None else batches
    rounds = jnp.asarray(workload.cohorts(num_rounds, seed)), draws
    start = jax.tree.map(jnp.asarray, workload.params(seed))

    def run() -> Params:
        return [(np.asarray(w), np.asarray(b)) for w, b in play(start, data, rounds)]

    return run


def _drawn(words: Any, shape: tuple[int, ...], most: int) -> Any:
    """Draws numbers below `most` by a hash of their places, in less time than `jax.random`."""
    x = jnp.arange(np.prod(shape), dtype=jnp.uint32).reshape(shape) * jnp.uint32(0x9E3779B9)
    for word in words:
        x = x ^ word
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        x = x ^ (x >> 16)
    return ((x >> 16) * most >> 16).astype(jnp.int32)


def _rows(x: Any, rows: Any) -> Any:
    """Returns rows of examples."""
    # Multiply by a 1 that XLA cannot see through, because CPU code otherwise copies rows one number
    # at a time.
    return x[rows] * (rows >= 0)[..., None]


def _train_logistic(params: Any, x: Any, y: Any, rows: Any, learning_rate: float) -> Any:
    """Returns the sum of the clients' parameters, for kernels `[clients, C, D]`."""
    ((kernel, bias),) = params
    num_clients, _, batch_size = rows.shape
    classes = jnp.arange(kernel.shape[1], dtype=y.dtype)[None, :, None]

    def step(carry: Any, rows: Any) -> tuple[Any, None]:
        kernel, bias = carry
        images, is_class = _rows(x, rows), classes == y[rows][:, None]
        logits = jnp.einsum("kbd,kcd->kcb", images, kernel) + bias[:, :, None]
        error = (jax.nn.softmax(logits, axis=1) - is_class) * (learning_rate / batch_size)
        return (kernel - jnp.einsum("kbd,kcb->kcd", images, error), bias - error.sum(2)), None

    def chunk(total: Any, rows: Any) -> tuple[Any, None]:
        start = jax.tree.map(lambda w: jnp.broadcast_to(w, (rows.shape[1], *w.shape)), own)
        trained, _ = lax.scan(step, start, rows)
        return jax.tree.map(lambda s, w: s + w.sum(0), total, trained), None

    own = kernel.T, bias
    at_once = _CLIENTS_AT_ONCE if num_clients % _CLIENTS_AT_ONCE == 0 else num_clients
    by_step = rows.reshape(-1, at_once, *rows.shape[1:]).swapaxes(1, 2)
    (kernel, bias), _ = lax.scan(chunk, jax.tree.map(jnp.zeros_like, own), by_step)
    return [(kernel.T, bias)]


def _train_perceptron(params: Any, x: Any, y: Any, rows: Any, learning_rate: float) -> Any:
    """Returns the sum of the clients' parameters, computed sequentially, for kernels (out, in)."""

    def loss(layers: Any, x: Any, y: Any) -> Any:
        *hidden, (kernel, bias) = layers
        inputs = x.T
        for hidden_kernel, hidden_bias in hidden:
            inputs = jax.nn.relu(hidden_kernel @ inputs + hidden_bias[:, None])
        return _cross_entropy(kernel @ inputs + bias[:, None], y)

    def step(own: Any, rows: Any) -> tuple[Any, None]:
        gradient = jax.grad(loss)(own, _rows(x, rows), y[rows])
        return jax.tree.map(lambda w, g: w - learning_rate * g, own, gradient), None

    def client(total: Any, rows: Any) -> tuple[Any, None]:
        own, _ = lax.scan(step, start, rows)
        return jax.tree.map(jnp.add, total, own), None

    start = [(kernel.T, bias) for kernel, bias in params]
    total, _ = lax.scan(client, jax.tree.map(jnp.zeros_like, start), rows)
    return [(kernel.T, bias) for kernel, bias in total]


def _convolution_rounds(
    workload: Workload, num_rounds: int, seed: int, batches: np.ndarray | None
) -> Run:
    """Sets up W4: steps are called from Python, as convolutions are slow in XLA's loops."""
    inputs, labels = (jnp.asarray(x) for x in workload.examples(seed))
    cohorts, size = workload.cohorts(num_rounds, seed), (workload.num_steps, workload.batch_size)

    @partial(jax.jit, donate_argnums=0)
    def step(own: Any, x: Any, y: Any, client: Any, rows: Any) -> Any:
        images, classes = x[client, rows], y[client, rows]
        num_convolutions = len(workload.model.channels)
        return _descend(num_convolutions, own, images, classes, workload.learning_rate)

    add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)
    copy = jax.jit(partial(jax.tree.map, jnp.copy))

    def run() -> Params:
        params, rng = jax.tree.map(jnp.asarray, workload.params(seed)), np.random.default_rng(seed)
        for t, cohort in enumerate(cohorts):
            total = jax.tree.map(jnp.zeros_like, params)
            for place, client in enumerate(cohort):
                own, drawn = copy(params), rng.integers(workload.num_examples, size=size)
                for rows in drawn if batches is None else batches[t, place]:
                    own = step(own, inputs, labels, client, rows)
                total = add(total, own)
            params = jax.tree.map(lambda x: x / workload.cohort_size, total)
        return [(np.asarray(w), np.asarray(b)) for w, b in params]

    return run


def _descend(num_convolutions: int, own: Any, x: Any, y: Any, learning_rate: float) -> Any:
    """Returns the parameters after a step along the gradient of the mean cross-entropy."""

    def loss(params: Any) -> Any:
        inputs = x
        for kernel, bias in params[:num_convolutions]:
            inputs = jax.nn.relu(_halved(_convolution(inputs, kernel)) + bias)
        inputs = inputs.reshape(len(inputs), -1)
        *hidden, (kernel, bias) = params[num_convolutions:]
        for hidden_kernel, hidden_bias in hidden:
            inputs = jax.nn.relu(inputs @ hidden_kernel + hidden_bias)
        return _cross_entropy((inputs @ kernel + bias).T, y)

    return jax.tree.map(lambda w, g: w - learning_rate * g, own, jax.grad(loss)(own))


def _cross_entropy(logits: Any, y: Any) -> Any:
    """Returns the mean cross-entropy of logits `[classes, examples]`."""
    is_class = jnp.arange(len(logits), dtype=y.dtype)[:, None] == y
    picked = jnp.sum(jnp.where(is_class, logits, 0), axis=0)
    return jnp.mean(jax.nn.logsumexp(logits, axis=0) - picked)


def _convolution(x: Any, kernel: Any) -> Any:
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _halved(x: Any) -> Any:
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def quadratic_rounds(
    num_rounds: int,
    *,
    num_clients: int = 24,
    block_size: int = 4,
    mu: float = 2e-4,
    num_models: int = 12,
    num_seeds: int = 1,
    local_steps: int = 5,
    learning_rate: float = 0.1,
    seed: int = 0,
    cohorts: np.ndarray | None = None,
) -> Callable[[], np.ndarray]:
    """Sets up W1 for all M models and seeds at once: MFA-Rand, in blocks of p + 1 coordinates.

    Args:
      num_rounds: T, rounds of one `run()`.
      num_clients: N, divisible by M.
      block_size: p; the dimension is d = N p + 1.
      mu: weight of the ridge term.
      num_models: M.
      num_seeds: replicas with draws of their own.
      local_steps: E, gradient steps of a client in a round.
      learning_rate: eta.
      seed: of the clients' drawing.
      cohorts: clients of every round, `[T, M, N / M]`, the same for all seeds; None draws them.

    Returns:
      `run()`, which plays all rounds from zeros and returns w `[seeds, M, d]`.
    """
    width, dim = block_size + 1, num_clients * block_size + 1
    share, decay = num_clients // num_models, (1 - learning_rate * mu) ** local_steps

    def local(w: Any, client: Any) -> Any:
        """Returns a client's block after its steps, less what `decay` leaves of it."""
        block = lax.dynamic_slice(w, (client * block_size,), (width,))
        first, last = (client == 0).astype(w.dtype), (client == num_clients - 1).astype(w.dtype)
        x = block
        for _ in range(local_steps):
            flow = jnp.concatenate([(first * (x[0] - 1))[None], jnp.diff(x), (-last * x[-1])[None]])
            x = x + learning_rate * (jnp.diff(flow) - mu * x)
        return x - decay * block

    def model_round(w: Any, clients: Any) -> Any:
        change = jax.vmap(partial(local, w))(clients)
        rows = clients[:, None] * block_size + jnp.arange(width)
        return decay * w + jnp.zeros_like(w).at[rows].add(change) / share

    def one_round(w: Any, round: Any) -> tuple[Any, None]:
        clients = round
        if cohorts is None:
            shuffled = jax.random.permutation(round, num_clients)
            clients = shuffled.reshape(num_models, share)
        return jax.vmap(model_round)(w, clients), None

    def play(key: Any) -> Any:
        rounds = jax.random.split(key, num_rounds) if cohorts is None else jnp.asarray(cohorts)
        return lax.scan(one_round, jnp.zeros((num_models, dim)), rounds)[0]

    play_all, keys = jax.jit(jax.vmap(play)), jax.random.split(jax.random.key(seed), num_seeds)
    return lambda: np.asarray(play_all(keys))
