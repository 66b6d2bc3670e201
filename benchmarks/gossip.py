"""Peers on a random 4-regular graph with logistic regression, beside a loop by hand in JAX.

    python -m benchmarks.gossip [ours|hand] [PEERS]

Every peer takes one step on 10 of its 20 examples with 60 features and 10 classes, and mixes with
its neighbours. Both have the same lists of neighbours. The time of a round is the difference of a
long and a short run, so that it has neither compilation nor evaluation. Ours draws batches by the
package's rule, and evaluates 4 peers on all data before and after. Memory is the peak.
"""

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mm import fedavg, local_sgd, peers, simulate
from fedjax_mm.base import Look
from fedjax_mm.data.clients import client_data
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.tasks import LogisticRegression, classification
from fedjax_mm.topologies import mixing, random_regular

EXAMPLES, FEATURES, CLASSES, BATCH, RATE = 20, 60, 10, 10, 0.1
SHORT, LONG = 5, 45


def examples(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of all peers, whose labels follow linear models of their own."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, EXAMPLES, FEATURES)).astype(np.float32)
    W = rng.normal(size=(size, FEATURES, CLASSES)) + rng.normal(size=(FEATURES, CLASSES))
    return x, (x @ W).argmax(-1).astype(np.int32)


def ours(size: int) -> Callable[[int], Any]:
    """Runs `simulate`, which evaluates before and after all rounds."""
    clients = client_data(list(zip(*examples(size), strict=True)))
    data = FederatedData("normal", "synthetic", CLASSES, clients, clients)
    task = classification(data, LogisticRegression(CLASSES))
    sgd = fedavg(local_sgd(RATE, steps=1, batch_size=BATCH))
    assignment = mixing(peers(size, measured=4), random_regular(4))
    return lambda rounds: simulate(0, task, sgd, assignment, rounds, record_every=rounds)


def hand(size: int) -> Callable[[int], Any]:
    """A scan over rounds, without evaluation."""
    x, y = map(jnp.asarray, examples(size))
    neighbours = random_regular(4).links(jax.random.key(0), 1, peers(size), Look()).neighbours
    params = jnp.zeros((size, FEATURES + 1, CLASSES))

    def loss(W: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(x @ W[:-1] + W[-1])
        return -jnp.mean(jnp.take_along_axis(logits, y[:, None], 1))

    def one_round(params: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        rows = jax.random.randint(key, (size, BATCH), 0, EXAMPLES)
        batch = (jnp.take_along_axis(x, rows[..., None], 1), jnp.take_along_axis(y, rows, 1))
        new = params - RATE * jax.vmap(jax.grad(loss))(params, *batch)
        return (new + sum(new[neighbours[:, i]] for i in range(4))) / 5, None

    run = jax.jit(lambda keys: jax.lax.scan(one_round, params, keys)[0])
    return lambda rounds: run(jax.random.split(jax.random.key(0), rounds))


def main(name: str = "ours", size: str = "10000") -> None:
    """Prints what one side takes."""
    run = {"ours": ours, "hand": hand}[name](int(size))
    cpu, wall = {}, {}
    for kind, rounds in (("first", SHORT), ("short", SHORT), ("", LONG), ("long", LONG)):
        start = time.process_time(), time.perf_counter()
        jax.block_until_ready(jax.tree.leaves(run(rounds)))
        cpu[kind], wall[kind] = time.process_time() - start[0], time.perf_counter() - start[1]
    for word, of in (("CPU", cpu), ("wall", wall)):
        each = (of["long"] - of["short"]) / (LONG - SHORT)
        print(
            f"{name}: {word} s: {1e3 * each:.1f} ms a round, {int(size) / each:,.0f} updates/s, "
            f"first call {of['first']:.1f} s, {SHORT} rounds again {of['short']:.2f} s"
        )
    print(f"{name}: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main(*sys.argv[1:])
