"""Figure 3 of Bhuyan et al. by hand: `python figure_3.py RESULT.npz FIGURE.png`.

The quadratic with N = 24, p = 4, E = 5, M = 12, eta = 0.1, 1000 rounds and 20 seeds, by MFA-Rand
and by MFA-RR, in JAX alone. It is the baseline for timing `fedjax-mm reproduce mfa-fig3`.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

N, P, E, M, RATE, MU, ROUNDS, SEEDS = 24, 4, 5, 12, 0.1, 2e-4, 1000, 20
DIM = N * P + 1
LAPLACIAN = 2 * np.eye(DIM) - np.eye(DIM, k=1) - np.eye(DIM, k=-1)
BEST = np.linalg.solve(LAPLACIAN + N * MU * np.eye(DIM), np.eye(DIM)[0])


def local(w, client):
    """Returns a client's parameters after E steps, less w."""
    block = jax.lax.dynamic_slice(w, (client * P,), (P + 1,))
    first, last = (client == 0).astype(w.dtype), (client == N - 1).astype(w.dtype)
    x = block
    for _ in range(E):
        flow = jnp.concatenate([(first * (x[0] - 1))[None], jnp.diff(x), (-last * x[-1])[None]])
        x = x + RATE * (jnp.diff(flow) - MU * x)
    decay = (1 - RATE * MU) ** E
    return jax.lax.dynamic_update_slice(decay * w, x, (client * P,)) - w


def excess(w):
    """Returns F(w) - F*."""
    error = w - jnp.asarray(BEST, w.dtype)
    curvature = error[0] ** 2 + error[-1] ** 2 + jnp.sum(jnp.diff(error) ** 2)
    return (curvature / N + MU * jnp.sum(error**2)) / 2


def run(rng_key, in_frames):
    """Returns F(w_t) - F* of the start, and of every round and model."""

    def one_round(w, t):
        draw = jax.random.fold_in(rng_key, t // M if in_frames else t)
        groups = jax.random.permutation(draw, N).reshape(M, N // M)
        groups = jnp.roll(groups, t % M, axis=0) if in_frames else groups
        new = w + jax.vmap(lambda v, k: jax.vmap(local, (None, 0))(v, k).mean(0))(w, groups)
        return new, jax.vmap(excess)(new)

    start = jnp.tile(jax.random.normal(jax.random.key(0), (DIM,)), (M, 1))  # of all seeds
    records = jax.lax.scan(one_round, start, jnp.arange(ROUNDS))[1]
    return jnp.concatenate([jax.vmap(excess)(start)[None], records])


def both():
    """Returns F(w_t) - F* of both algorithms, for every seed."""
    keys = jax.random.split(jax.random.key(0), SEEDS)
    runs = jax.jit(
        lambda keys: [jax.vmap(partial(run, in_frames=how))(keys) for how in (False, True)]
    )
    return dict(zip(("MFA-Rand", "MFA-RR"), map(np.asarray, runs(keys)), strict=True))


def main():
    """Runs, saves, prints the means of the last fifth, and draws."""
    found = both()
    np.savez_compressed(sys.argv[1], **found)
    figure = Figure(figsize=(9, 4.1), layout="tight")
    left, right = figure.subplots(1, 2)
    for name, values in found.items():
        gap = np.log10(values)
        print(name, gap[:, -ROUNDS // 5 :].mean(), gap[:, -1].std(0).mean())
        left.plot(gap[..., 0].mean(0), label=name)
        right.plot(gap[..., 0].T, linewidth=0.5)
    left.legend()
    figure.savefig(sys.argv[2], dpi=200)


if __name__ == "__main__":
    main()
