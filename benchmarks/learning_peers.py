"""The learning workloads W2 to W5 in two JAX systems, FedJAX and DrJAX (`torch_peers`: PyTorch).

Every `*_rounds` function sets up a workload of `benchmarks.learning` and returns `run`, which plays
all rounds from the same initial parameters and returns the last ones. The first `run()` compiles.
Data, parameters and cohorts are those of the seed, drawn before the clock starts, and equal in all
systems. Minibatches are drawn while it runs, by each system as its users would; where `batches`
prescribes them, all systems return the same parameters up to rounding.

What was tried, in client updates per second (two CPU cores, shared and noisy):

- FedJAX, W4: the maximum of 2 x 2 as `reshape(...).max` 2.7, as `lax.reduce_window` 2.2; taken
  before ReLU, which then has a quarter of the work; a convolution as such 2.7, as a product 2.5.
- DrJAX, W4: mapped over clients, a convolution is a grouped one: 0.1; as a product of the 25
  shifted images 1.9, which is kept.
- DrJAX: the examples of a round gathered before its steps, or by number in each step: W2 66,000 or
  33,000, W2b 48,000 or 35,000, W4 1.9 or 0.6; but W3 161 or 462, W3b 73 or 179. The faster is kept.
- DrJAX: a batch of random examples, or of shuffled ones: W2 66,000 or 22,000, W2b 48,000 or 30,000.
  Random ones are kept; FedJAX offers only its own shuffling.
- DrJAX: the five steps of W2 unrolled, or not: 66,000 or 37,000, equal on another day; kept.
  W3's steps are slower unrolled.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.learning import Params, Run, Workload
from fedjax_mm.cli.workloads import Model


def _convolution(x: jax.Array, kernel: jax.Array, padding: int) -> jax.Array:
    names = ("NHWC", "HWIO", "NHWC")
    around = ((padding, padding),) * 2
    return lax.conv_general_dilated(x, kernel, (1, 1), around, dimension_numbers=names)


def _convolution_by_product(x: jax.Array, kernel: jax.Array, padding: int) -> jax.Array:
    size, around = len(kernel), (padding, padding)
    padded = jnp.pad(x, ((0, 0), around, around, (0, 0)))
    height, width = (n - size + 1 for n in padded.shape[1:3])
    shifted = [padded[:, i : i + height, j : j + width] for i in range(size) for j in range(size)]
    return jnp.concatenate(shifted, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])


def _loss_gradient(model: Model, convolution: Any) -> Any:
    """Returns `gradient(params, x, y)` of the mean cross-entropy."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for layer, (kernel, bias) in enumerate(params[: len(model.channels)]):
            x = convolution(x, kernel, model.padding) + bias
            if model.is_pooled(layer):
                batch, height, width, channels = x.shape
                x = x.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))
            x = jax.nn.relu(x)
        x = x.reshape(len(x), -1)
        *hidden, (kernel, bias) = params[len(model.channels) :]
        for hidden_kernel, hidden_bias in hidden:
            x = jax.nn.relu(x @ hidden_kernel + hidden_bias)
        logits = x @ kernel + bias
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return jax.grad(loss)


def _as_numpy(params: Any) -> Params:
    return [(np.asarray(kernel), np.asarray(bias)) for kernel, bias in params]


def fedjax_rounds(
    workload: Workload, num_rounds: int, *, seed: int = 0, batches: np.ndarray | None = None
) -> Run:
    """Sets up a workload in FedJAX: rounds, clients and steps are loops on the host.

    Follows `fedjax.algorithms.fed_avg`, which JAX 0.6 broke (see `benchmarks.peers`), less what is
    not used here: random keys of clients, norms of the updates, weights by number of examples. The
    sum of the updates is one jitted call a client; its own `tree_add` is not jitted.

    Args:
      workload: what to do.
      num_rounds: T, rounds of one `run()`.
      seed: of the data, the parameters and the cohorts.
      batches: examples of every step, `[T, S, E, B]`, numbered within their client; None for
        FedJAX's own `shuffle_repeat_batch`.

    Returns:
      `run()`, which plays all rounds and returns the parameters.
    """
    import fedjax

    optimizer = fedjax.optimizers.sgd(workload.learning_rate)
    gradient = _loss_gradient(workload.model, _convolution)

    def client_init(server_params: Any, client_rng: None) -> dict[str, Any]:
        del client_rng
        return {"params": server_params, "opt_state": optimizer.init(server_params)}

    def client_step(state: dict[str, Any], batch: Any) -> dict[str, Any]:
        grads = gradient(state["params"], batch["x"], batch["y"])
        opt_state, params = optimizer.apply(grads, state["opt_state"], state["params"])
        return {"params": params, "opt_state": opt_state}

    def client_final(server_params: Any, state: dict[str, Any]) -> Any:
        return jax.tree.map(jnp.subtract, server_params, state["params"])

    train_for_each_client = fedjax.for_each_client(client_init, client_step, client_final)
    add = jax.jit(lambda total, delta: jax.tree.map(jnp.add, total, delta), donate_argnums=0)

    @jax.jit
    def server_update(params: Any, total: Any) -> Any:
        return jax.tree.map(lambda w, dw: w - dw / workload.cohort_size, params, total)

    def apply(params: Any, clients: Iterable[Any]) -> Any:
        total = jax.tree.map(jnp.zeros_like, params)
        for _, delta in train_for_each_client(params, clients):
            total = add(total, delta)
        return server_update(params, total)

    inputs, labels = workload.examples(seed)
    datasets = [fedjax.ClientDataset({"x": x, "y": y}) for x, y in zip(inputs, labels, strict=True)]
    hparams = fedjax.ShuffleRepeatBatchHParams(
        workload.batch_size, num_epochs=None, num_steps=workload.num_steps
    )
    cohorts = workload.cohorts(num_rounds, seed)

    def batched(round: int, place: int, client: int) -> Iterable[Any]:
        if batches is None:
            return datasets[client].shuffle_repeat_batch(hparams)
        steps = batches[round, place]
        return [{"x": inputs[client, numbers], "y": labels[client, numbers]} for numbers in steps]

    def run() -> Params:
        params = jax.tree.map(jnp.asarray, workload.params(seed))
        for t, cohort in enumerate(cohorts.tolist()):
            clients = [(k, batched(t, place, k), None) for place, k in enumerate(cohort)]
            params = apply(params, clients)
        return _as_numpy(params)

    return run


def fedjax_own_rounds(workload: Workload, num_rounds: int, *, seed: int = 0) -> Run:
    """Sets up a workload in FedJAX's own `fedjax.algorithms.fed_avg`, unmodified.

    `jax.tree_map`, which it calls and JAX 0.6 removed, must be there: `with tree_map_restored():`.
    Clients shuffle their examples; FedJAX offers no other batches.
    """
    import fedjax

    gradient = _loss_gradient(workload.model, _convolution)
    inputs, labels = workload.examples(seed)
    datasets = [fedjax.ClientDataset({"x": x, "y": y}) for x, y in zip(inputs, labels, strict=True)]
    batching = fedjax.ShuffleRepeatBatchHParams(
        workload.batch_size, num_epochs=None, num_steps=workload.num_steps
    )
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        lambda params, batch, rng: gradient(params, batch["x"], batch["y"]),
        fedjax.optimizers.sgd(workload.learning_rate),
        fedjax.optimizers.sgd(1.0),
        batching,
    )
    cohorts = workload.cohorts(num_rounds, seed)
    keys = jax.random.split(jax.random.key(seed), cohorts.size).reshape(cohorts.shape)

    def run() -> Params:
        state = algorithm.init(jax.tree.map(jnp.asarray, workload.params(seed)))
        for cohort, rng_keys in zip(cohorts.tolist(), keys, strict=True):
            clients = [(k, datasets[k], key) for k, key in zip(cohort, rng_keys, strict=True)]
            state, _ = algorithm.apply(state, clients)
        return _as_numpy(state.params)

    return run


@contextmanager
def tree_map_restored() -> Iterator[None]:
    """Lets FedJAX 0.0.17 call `jax.tree_map`, as it was in JAX before 0.6."""
    before = vars(jax).get("tree_map")
    setattr(jax, "tree_map", jax.tree.map)  # noqa: B010
    try:
        yield
    finally:
        if before is None:
            delattr(jax, "tree_map")
        else:
            setattr(jax, "tree_map", before)  # noqa: B010


def drjax_rounds(
    workload: Workload, num_rounds: int, *, seed: int = 0, batches: np.ndarray | None = None
) -> Run:
    """Sets up a workload in DrJAX: all rounds are one compiled scan, clients are mapped.

    Args, Returns: as `fedjax_rounds`; where `batches` is None, each step's examples are drawn
      uniformly with replacement, by `jax.random.randint` in the round.
    """
    import drjax

    size = (workload.cohort_size, workload.num_steps, workload.batch_size)
    gradient = _loss_gradient(workload.model, _convolution_by_product)
    inputs, labels = workload.examples(seed)
    data = (
        jnp.asarray(inputs.reshape(-1, *workload.model.example_shape)),
        jnp.asarray(labels.reshape(-1)),
    )
    cohorts = jnp.asarray(workload.cohorts(num_rounds, seed))
    initial = jax.tree.map(jnp.asarray, workload.params(seed))
    gather_first = len(workload.model.widths) < 3  # see the table above
    unroll = 5 if workload.num_steps == 5 else 1

    @jax.jit
    def train(params: Any, data: tuple[jax.Array, jax.Array], rounds: Any) -> Any:
        def take(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
            return data[0][numbers], data[1][numbers]

        def client_update(params: Any, steps: Any) -> Any:
            def step(local: Any, batch: Any) -> tuple[Any, None]:
                grads = gradient(local, *(batch if gather_first else take(batch)))
                return jax.tree.map(lambda w, g: w - workload.learning_rate * g, local, grads), None

            local = lax.scan(step, params, steps, unroll=unroll)[0]
            return jax.tree.map(jnp.subtract, local, params)

        @drjax.program(placements={"clients": workload.cohort_size})
        def round_fn(params: Any, steps: Any) -> Any:
            updates = drjax.map_fn(client_update, (drjax.broadcast(params), steps))
            return jax.tree.map(jnp.add, params, drjax.reduce_mean(updates))

        def one_round(params: Any, round: Any) -> tuple[Any, None]:
            cohort, draw = round
            if batches is None:
                draw = jax.random.randint(draw, size, 0, workload.num_examples)
            numbers = cohort[:, None, None] * workload.num_examples + draw
            return round_fn(params, take(numbers) if gather_first else numbers), None

        return lax.scan(one_round, params, rounds)[0]

    draws = jax.random.split(jax.random.key(seed), num_rounds) if batches is None else batches
    return lambda: _as_numpy(train(initial, data, (cohorts, draws)))
