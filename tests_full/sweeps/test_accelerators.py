"""Code paths for accelerators, run on the CPU, give the same results as those for CPUs."""

import dataclasses
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import fedavg, full_participation, local_sgd, mfa_rr, params_of, simulate, sweep
from fedjax_mm.base.shuffles import shuffled
from fedjax_mm.data import synthetic
from fedjax_mm.sweeps import Callback, Checkpoints, Execution, Grid, Setup, Until
from fedjax_mm.sweeps.errors import InterruptedRunError
from fedjax_mm.sweeps.plan import make_plan
from fedjax_mm.tasks import LogisticRegression, classification, quadratic
from fedjax_mm.tools.loops import local_steps, loop_until


@pytest.fixture
def accelerator(monkeypatch):
    """A function that makes JAX report a GPU as its default backend."""

    def pretend():
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    return pretend


@pytest.mark.parametrize("steps", [1, 5, 8, 13])
def test_unrolled_local_steps_equal_those_of_the_loop(steps, accelerator):
    def numbers(number):
        start = jnp.zeros(20, jnp.int32)
        return local_steps(number, lambda i, x: x.at[i].set(2 * x.sum() + i + 1), start)

    jaxprs = [str(jax.make_jaxpr(lambda: numbers(steps))())]
    expected = numbers(steps)
    accelerator()
    jaxprs.append(str(jax.make_jaxpr(lambda: numbers(steps))()))
    np.testing.assert_array_equal(numbers(steps), expected)
    np.testing.assert_array_equal(numbers(jnp.int32(steps)), expected)
    assert jaxprs[0] != jaxprs[1] or steps == 1


@pytest.mark.parametrize("number", [1, 4, 9])
def test_an_unrolled_while_loop_ends_at_the_same_state(number, accelerator):
    def count():
        return loop_until(lambda x: x >= number, lambda x: jnp.minimum(x + 1, number), jnp.int32(0))

    jaxprs = [str(jax.make_jaxpr(lambda: count())())]
    assert count() == number
    accelerator()
    jaxprs.append(str(jax.make_jaxpr(lambda: count())()))
    assert count() == number
    assert jaxprs[0] != jaxprs[1]


@pytest.mark.parametrize("size", [2, 7, 1000])
def test_a_random_order_equals_that_on_cpus(size, accelerator):
    order = shuffled.__wrapped__  # not jitted, because jit would reuse the program of the CPU
    words, places = jnp.array([3, 5], jnp.uint32), jnp.arange(size)
    expected = order(words, places, size)
    accelerator()
    np.testing.assert_array_equal(order(words, places, size), expected)
    assert sorted(expected.tolist()) == list(range(size))


@pytest.mark.parametrize("block_size", [1, 4, 40])
def test_local_updates_of_a_quadratic_equal_those_on_cpus(block_size, accelerator):
    def updates():
        params = jnp.sin(jnp.arange(task.dim))
        return [task.local_sgd(params, jnp.int32(client), 0.1, 5) for client in range(3)]

    task = quadratic(3, block_size, mu=0.1)
    expected = updates()
    jaxprs = [str(jax.make_jaxpr(lambda: updates())())]
    accelerator()
    found = updates()
    jaxprs.append(str(jax.make_jaxpr(lambda: updates())()))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), found, expected
    )
    assert jaxprs[0] != jaxprs[1]


@pytest.mark.parametrize("name", ["quadratic", "classification"])
def test_a_run_has_the_same_results_as_on_cpus(name, accelerator):
    def run():
        if name == "quadratic":
            task, algorithm, assignment = quadratic(6, 4, mu=0.1), fedavg(0.1, local_steps=5), None
        else:
            task = classification(synthetic(6, dim=5, num_classes=3), LogisticRegression(3))
            algorithm = fedavg(local_sgd(0.1, steps=11, batch_size=4))
            assignment = full_participation(6)
        state, trace = simulate(0, task, algorithm, assignment or mfa_rr(6, 2), 6)
        return params_of(state, 0), trace.metrics

    expected = run()
    accelerator()
    found = run()
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), found, expected
    )


@pytest.mark.parametrize(("num_rounds", "every", "step"), [(24, 12, 6), (21, 7, 7), (9, 9, 3)])
def test_segments_end_at_multiples_of_a_number_of_rounds(num_rounds, every, step, accelerator):
    def run():
        ends = []
        task = quadratic(6, 4, mu=0.1)

        def build(learning_rate):
            return Setup(task, fedavg(learning_rate, local_steps=3), mfa_rr(6, 2))

        grid = Grid(build, {"learning_rate": [0.05, 0.1]}, num_rounds, 3, record_every=every)
        watch = Callback(on_segment=lambda segment: ends.append(segment.rounds))
        return sweep(grid, Execution(callbacks=[watch])), ends

    expected, _ = run()
    accelerator()
    found, ends = run()
    assert ends[0] == step
    assert not any(end % step for end in ends)
    for name in ("loss", "distance", "client_updates"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5)


@pytest.mark.parametrize("num_seeds", [1, 4])
def test_a_run_that_does_not_fit_computes_clients_in_chunks(
    num_seeds, accelerator, monkeypatch, tmp_path
):
    task = quadratic(64, 64, mu=0.1)

    def build():
        return Setup(task, fedavg(0.1, local_steps=3), full_participation(64))

    def stop(segment):
        signal.raise_signal(signal.SIGTERM)

    grid = Grid(build, {}, 6, num_seeds, record_every=3)
    one = dataclasses.replace(grid, num_seeds=1)
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    expected = sweep(grid)
    accelerator()
    (whole,) = make_plan(one).compiled
    room = 0.7 * whole.num_bytes
    monkeypatch.setattr("fedjax_mm.sweeps.plan._room", lambda *_: (room, room))
    plan = make_plan(grid)
    (compiled,) = plan.compiled
    assert compiled.batch_size == 1
    assert 1 < compiled.block.chunk_size < 64
    assert compiled.num_bytes <= room
    assert f"{compiled.block.chunk_size} are computed at once" in plan.lines[-1]
    found = sweep(grid)
    for name in ("loss", "client_updates"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5)

    watch = Callback(on_segment=stop)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(InterruptedRunError):
        sweep(grid, Execution(callbacks=[watch], checkpoints=checkpoints))
    # More memory than before, with which a new run would compute all clients at once.
    monkeypatch.setattr("fedjax_mm.sweeps.plan._room", lambda *_: (2**40, 2**40))
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        resumed = sweep(grid, Execution(checkpoints=checkpoints))
    xr.testing.assert_identical(found.drop_attrs(), resumed.drop_attrs())
    explicit = dataclasses.replace(grid, client_map="vmap")
    monkeypatch.setattr("fedjax_mm.sweeps.plan._room", lambda *_: (room, room))
    with pytest.raises(ValueError, match="1 run, the fewest at once"):
        make_plan(explicit)


def test_early_stopping_and_resuming_equal_those_on_cpus(accelerator, tmp_path):
    def grid():
        def build(learning_rate):
            return Setup(
                quadratic(6, 4, mu=0.1), fedavg(learning_rate, local_steps=3), mfa_rr(6, 2)
            )

        until = Until("distance", at_most=0.3)
        return Grid(build, {"learning_rate": [0.05, 0.1]}, 60, 3, record_every=6, until=until)

    def stop(segment):
        signal.raise_signal(signal.SIGTERM)

    expected = sweep(grid())
    accelerator()
    watch = Callback(on_segment=stop)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(InterruptedRunError):
        sweep(grid(), Execution(callbacks=[watch], checkpoints=checkpoints))
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        assert checkpoints.load(0).rounds == 6
        found = sweep(grid(), Execution(checkpoints=checkpoints))
    assert (found["ended"] < 60).all()
    for name in ("loss", "ended", "client_updates"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5)
