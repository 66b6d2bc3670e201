"""A grid of 20 learning rates as one writes it for oneself: `python grid.py RESULT.npz FIGURE.png`.

Logistic regression on scikit-learn's digits, dealt to 30 clients, two models by MFA-Rand with 10
clients a round, 5 local steps of 10 examples, 100 rounds, 3 seeds, in JAX alone. It is what
`fedjax-mm run grid.toml` is timed beside.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

N, M, K, E, B, ROUNDS, EVERY, SEEDS = 30, 2, 10, 5, 10, 100, 10, 3
NAMES = "loss", "train_accuracy", "test_loss", "test_accuracy"
RATES = np.geomspace(0.001, 0.5, 20)


def losses(params, x, y):
    """Returns every example's cross-entropy, and whether it is classified rightly."""
    logits = params[0] @ x.T + params[1][:, None]
    picked = jnp.sum(jnp.where(jnp.arange(10)[:, None] == y, logits, 0), axis=0)
    return jax.nn.logsumexp(logits, axis=0) - picked, jnp.argmax(logits, axis=0) == y


def run(rate, seed, train, test):
    """Returns both models' losses and accuracies at the start and at every record."""
    rng_key, size = jax.random.key(seed), len(train[0]) // N
    gradient = jax.grad(lambda params, x, y: losses(params, x, y)[0].mean())

    def client(params, number, rows):
        def step(own, rows):
            new = gradient(own, train[0][rows], train[1][rows])
            return jax.tree.map(lambda w, g: w - rate * g, own, new), None

        return jax.lax.scan(step, params, number * size + rows)[0]

    def one_round(params, t):
        cohort_key, batch_key = jax.random.split(jax.random.fold_in(rng_key, t))
        groups = jax.random.permutation(cohort_key, N)[:K].reshape(M, K // M)
        rows = jax.random.randint(batch_key, (*groups.shape, E, B), 0, size)
        new = jax.vmap(jax.vmap(client, (None, 0, 0)))(params, groups, rows)
        return jax.tree.map(lambda x: x.mean(1), new), None

    def measured(params):
        def of_model(own):
            return jnp.stack([x.mean() for each in (train, test) for x in losses(own, *each)])

        return jax.vmap(of_model)(params)

    def record(params, t):
        params, _ = jax.lax.scan(one_round, params, t)
        return params, measured(params)

    weights = jax.random.uniform(jax.random.fold_in(rng_key, ROUNDS), (M, 10, 64), minval=-1)
    start = weights * (6 / (10 + 64)) ** 0.5, jnp.zeros((M, 10))
    _, records = jax.lax.scan(record, start, jnp.arange(ROUNDS).reshape(-1, EVERY))
    return jnp.concatenate([measured(start)[None], records])


def grid():
    """Returns NAMES for all ``[rates, seeds, records, models]``, along the last axis."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = jnp.asarray(x[order] / 16, jnp.float32), jnp.asarray(y[order], jnp.int32)
    cut = 4 * len(x) // 5
    seeds = jax.vmap(run, (None, 0, None, None))
    runs = jax.jit(jax.vmap(seeds, (0, None, None, None)))
    return np.asarray(
        runs(jnp.asarray(RATES), jnp.arange(SEEDS), (x[:cut], y[:cut]), (x[cut:], y[cut:]))
    )


def main():
    """Runs the grid, saves it, prints the last accuracies and draws the last records."""
    found = grid()
    np.savez_compressed(sys.argv[1], **dict(zip(NAMES, np.moveaxis(found, -1, 0), strict=True)))
    by_seed = found[:, :, -1].mean(2)
    mean, error = by_seed.mean(1), by_seed.std(1, ddof=1) / SEEDS**0.5
    for rate, value in zip(RATES, mean[:, 3], strict=True):
        print(f"{rate:.4f} {value:.3f}")
    figure = Figure(figsize=(9, 4.3), layout="tight")
    for axes, values, around in zip(figure.subplots(2, 2).flat, mean.T, error.T, strict=True):
        axes.errorbar(RATES, values, around)
        axes.set_xscale("log")
    figure.savefig(sys.argv[2], dpi=200)


if __name__ == "__main__":
    main()
