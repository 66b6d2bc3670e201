"""Wrappers in sweeps: numbers on axes, devices, client maps, and resumed runs."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, mfa_rand, sweep
from fedjax_mm.asynchrony import on_clock, shifted_exponential
from fedjax_mm.availability import arriving, available, bernoulli, dropping, finishing, markov
from fedjax_mm.compression import compressed, qsgd, random_k, top_k
from fedjax_mm.privacy import private
from fedjax_mm.sweeps import Callback, Checkpoints, Grid, Setup
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks import quadratic
from tests.helpers import slow_unless

execute = importlib.import_module("fedjax_mm.sweeps.execute")
N = 8
FED = fedavg(0.1, local_steps=2)


def present(x, assignment):
    return FED, available(assignment, bernoulli(x))


def replaced(x, assignment):
    return FED, available(mfa_rand(N, 2, cohort_size=5), markov(x, 0.3), when_absent="replace")


def lost(x, assignment):
    return FED, dropping(assignment, x)


def late(x, assignment):
    return FED, on_clock(assignment, shifted_exponential(N), first=3, deadline=2 + x)


def done_and_new(x, assignment):
    jobs = finishing(mfa_rand(N, 2), "excess_loss", at_most=x / 4)
    return FED, arriving(jobs, jnp.array([0, 2]))


def hidden(x, assignment):
    return private(FED, clip=1.0, noise_multiplier=x, clients_per_round=4), assignment


def sparse(x, assignment):
    return compressed(FED, top_k(x)), assignment


def coarse(x, assignment):
    return compressed(FED, qsgd(jnp.asarray(1 + 10 * x, jnp.int32))), assignment


def all_of_them(x, assignment):
    inner = compressed(FED, random_k(x))
    algorithm = private(inner, clip=1.0, noise_multiplier=0.1, clients_per_round=4)
    return algorithm, dropping(available(assignment, bernoulli(0.8)), x / 2)


WRAPPERS = [present, replaced, lost, late, done_and_new, hidden, sparse, coarse, all_of_them]


def grid(wrap, **how):
    def build(x):
        tasks = [quadratic(N, 2, mu=0.1), quadratic(N, 3, mu=0.2)]  # of two structures
        algorithm, assignment = wrap(x, mfa_rand(N, 2))
        return Setup(tasks, algorithm, assignment)

    return Grid(build, {"x": [0.25, 0.75]}, num_rounds=6, num_seeds=2, **how)


def alike(found, expected):
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "wrap", [slow_unless(wrap in (late, all_of_them), wrap) for wrap in WRAPPERS]
)
def test_a_wrapped_sweep_is_one_program_with_one_result(wrap, tmp_path, monkeypatch):
    """Results do not depend on `split`, `client_map` or `first_seed`, and resume exactly."""
    assert len(programs_of(grid(wrap))) == 1
    expected = sweep(grid(wrap), Execution(split="replicas"))
    assert np.isfinite(expected.excess_loss).all()
    alike(sweep(grid(wrap), Execution(split="clients")), expected)
    alike(sweep(grid(wrap, client_map="scan")), expected)
    alike(sweep(grid(wrap, client_map=3)), expected)
    alike(sweep(grid(wrap, first_seed=1)).isel(seed=0), expected.isel(seed=1))

    monkeypatch.setattr(execute, "_SEGMENT_SECONDS", 0)

    def stop(segment):
        if segment.rounds >= 3:
            raise InterruptedError

    how = Execution(split="replicas", save_every=0)
    with Checkpoints(tmp_path) as saved:
        stopping = how._replace(checkpoints=saved, callbacks=[Callback(on_segment=stop)])
        with pytest.raises(InterruptedError):
            sweep(grid(wrap), stopping)
    with Checkpoints(tmp_path, resume=True) as saved:
        found = sweep(grid(wrap), how._replace(checkpoints=saved))
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x)
