"""Compares results of programs that are compiled as users compile them, in a separate process.

`python -m tests_full.as_users METHOD/ASSIGNMENT ...` prints JSON: for each pair, how many of 2,000
seeds give non-finite results or differ between the vmapped program and a single run, and which of
100 random programs differ from NumPy. Other tests compile without optimisations.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mm import (
    bandit,
    fedcluster,
    fedfair,
    full_participation,
    ifca,
    mfa_rand,
    mfa_rr,
    params_of,
    sequential,
    simulate,
    variance_reduced,
)
from fedjax_mm.tasks import least_squares, requiring
from fedjax_mm.tools.compiler import canary
from tests.methods import METHODS

N, M, NUM_SEEDS = 6, 2, 2000
ASSIGNMENTS = {
    "mfa_rand": mfa_rand(N, M),
    "cohorts": mfa_rand(N, M, cohort_size=4),
    "mfa_rr": mfa_rr(N, M),
    "fedcluster": fedcluster(N, 3),
    "full_participation": full_participation(N),
    "sequential": sequential(N, M, rounds_per_model=1),
    "bandit": bandit(N, M, cohort_size=4),
    "fedfair": fedfair(N, M),
    "ifca": ifca(N, M),
    "lvr": variance_reduced(N, 1, expected_trainings=2.0),
    "lvr of two": variance_reduced(N, M, expected_trainings=2.0),
    "gvr": variance_reduced(N, 1, expected_trainings=2.0, by="update"),
}


def ridge_regression(is_demanding):
    """Six clients with different numbers of examples, with thresholds if `is_demanding`."""
    rng, sizes = np.random.default_rng(0), (5, 9, 3, 7, 4, 8)
    features = [rng.standard_normal((size, 4)) for size in sizes]
    targets = [x @ rng.standard_normal(4) + 1 for x in features]
    task = least_squares(features, targets, ridge=0.1)
    return requiring(task, jnp.full(N, 3.0)) if is_demanding else task


def unlike(method, assignment):
    """Counts the seeds whose results are not finite or differ between `vmap` and `map`."""
    row, chosen = METHODS[method], ASSIGNMENTS[assignment]
    algorithm, learned = row.build(0.05, 1), ridge_regression(row.is_demanding)

    def run(seed, learned):
        state, trace = simulate(jax.random.key(seed), learned, algorithm, chosen, 1)
        return params_of(state), trace.metrics

    seeds = jnp.arange(NUM_SEEDS)
    together = jax.jit(jax.vmap(run, (0, None)))(seeds, learned)
    alone = jax.jit(lambda seeds, learned: jax.lax.map(lambda s: run(s, learned), seeds))(
        seeds, learned
    )
    wrong = np.zeros(NUM_SEEDS, bool)
    for x, y in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        a, b = np.asarray(x).reshape(NUM_SEEDS, -1), np.asarray(y).reshape(NUM_SEEDS, -1)
        wrong |= ~np.isclose(a, b, rtol=1e-3, atol=1e-4).all(1) | ~np.isfinite(b).all(1)
    return int(wrong.sum())


def operand(xp, rng, shape):
    """Draws a matrix-valued function (plain, broadcast, transposed or constant) and its inputs."""
    kind, (rows, columns) = rng.integers(8), shape
    values = [rng.standard_normal(size).astype(np.float32) for size in (shape, rows, columns)]
    return [
        lambda full, row, column, scalar: full,
        lambda full, row, column, scalar: xp.broadcast_to(scalar, shape),
        lambda full, row, column, scalar: xp.broadcast_to(row[:, None], shape),
        lambda full, row, column, scalar: xp.broadcast_to(column, shape),
        lambda full, row, column, scalar: full.reshape(columns, rows).T,
        lambda full, row, column, scalar: xp.concatenate([full, full])[rows // 2 :][:rows],
        lambda full, row, column, scalar: xp.zeros(shape, np.float32),
        lambda full, row, column, scalar: xp.full(shape, 0.5, np.float32) * scalar,
    ][kind], (*values, np.float32(rng.integers(2)))


def sums(xp, rng):
    """Draws sum(weights * (left @ right - shift)^2) over a random axis, with its arguments."""
    groups, size, inner, outer = (int(rng.integers(2, most)) for most in (8, 12, 40, 3000))
    left, of_left = operand(xp, rng, (groups * size, inner))
    right, of_right = operand(xp, rng, (inner, outer))
    shift, of_shift = operand(xp, rng, (groups, size))
    weigh, of_weigh = operand(xp, rng, (groups, size))
    axis = int(rng.integers(3))

    def function(of_left, of_right, of_shift, of_weigh):
        product = (left(*of_left) @ right(*of_right)).reshape(groups, size, outer)
        errors = product - shift(*of_shift)[:, :, None]
        return (weigh(*of_weigh)[:, :, None] * errors * errors).sum(axis)

    return function, (of_left, of_right, of_shift, of_weigh)


def unlike_numpy(number=100):
    """Seeds of the random programs whose results differ from NumPy's."""
    wrong = []
    for seed in range(number):
        compiled, arguments = sums(jnp, np.random.default_rng(seed))
        plain, _ = sums(np, np.random.default_rng(seed))
        exact = plain(*jax.tree.map(np.float64, arguments))
        scale = 1 + np.abs(exact).max()
        if not np.allclose(jax.jit(compiled)(*arguments) / scale, exact / scale, atol=1e-4):
            wrong.append(seed)
    return wrong


def main():
    pairs = {pair: unlike(*pair.split("/")) for pair in sys.argv[1:]}
    print(json.dumps({"canary": canary(), "seeds": pairs, "programs": unlike_numpy()}))


if __name__ == "__main__":
    main()
