"""Personal models inside wrappers, and in runs that resume."""

import numpy as np

from fedjax_mm import advance, join_traces, mfa_rand, simulate
from fedjax_mm.compression import compressed, top_k
from fedjax_mm.tasks import requiring
from tests.simulator.test_personal import METHODS, N, problem


def test_wrappers_keep_personal_models_and_runs_resume():
    task = requiring(problem(), np.ones(N), num_unseen=2)
    algorithm, assignment = compressed(METHODS["ditto"], top_k(0.5)), mfa_rand(N - 2, 2)
    state, first = simulate(0, task, algorithm, assignment, 2)
    _, later = advance(state, task, algorithm, assignment, 2)
    _, whole = simulate(0, task, algorithm, assignment, 4)
    joined = join_traces(first, later)
    for name in ("personal_loss", "personal_accuracy"):
        np.testing.assert_array_equal(joined.metrics[name], whole.metrics[name])
