"""Jobs per second of asynchronous training, compared with a Python event loop."""

import jax
import numpy as np
import pytest

from benchmarks import asynchronous
from fedjax_mm import params_of

NAMES = "F1", "F2", "F3"


@pytest.mark.parametrize(("name", "fused"), [*((name, True) for name in NAMES), ("F1", False)])
def test_both_do_the_same_work(name, fused):
    models, metrics = asynchronous.event_loop(name, 600, fused=fused)()
    state, trace = asynchronous.compiled(name, 600)[0]()
    for m, (model, measured) in enumerate(zip(models, metrics, strict=True)):
        for x, y in zip(jax.tree.leaves(params_of(state, m)), jax.tree.leaves(model), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)
        np.testing.assert_allclose(trace.metrics["loss"][-1, m], measured["loss"], rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_event_loop(benchmark, name):
    _time(benchmark, (name, "Python", "event loop"), asynchronous.event_loop(name))


@pytest.mark.parametrize("name", NAMES)
def test_ours(benchmark, name):
    run, seconds = asynchronous.compiled(name)
    benchmark.extra_info.update(compile_seconds=seconds)
    _time(benchmark, (name, "fedjax_mm", "simulate"), run)


def _time(benchmark, row, run):
    benchmark.extra_info.update(row=row, client_updates=asynchronous.NUM_ARRIVALS)
    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
