"""Sweeps: number of compilations, agreement with single runs, labels, and refusals."""

import dataclasses
import gc
import os
import re
import threading
import weakref
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import (
    Experiment,
    appealing,
    fedavg,
    full_participation,
    mfa_rand,
    mfa_rr,
    run,
    sequential,
    simulate,
    sweep,
)
from fedjax_mm.base import Algorithm, Assignment, Cohort
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.base.programs import Memory
from fedjax_mm.cli.workloads import WORKLOADS
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.schedules import inverse_time, per_frame
from fedjax_mm.sweeps import DivergenceError, Setup
from fedjax_mm.sweeps import plan as plan_module
from fedjax_mm.sweeps.devices import layout
from fedjax_mm.sweeps.execute import carry_out
from fedjax_mm.sweeps.execution import Callback, Execution
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.plan import make_plan
from fedjax_mm.sweeps.program import Block, Program, programs_of
from fedjax_mm.tasks import quadratic, requiring
from tests.helpers import Towards, counting
from tests.sweeps.test_sweep import (
    HOT,
    HOT_GRID,
    HOTTER,
    HUNDRED,
    LARGE,
    ONE,
    ONE_GRID,
    ROUNDS,
    SEED,
    SEEDS,
    SIZES,
    N,
    above,
    build,
    check_close,
    first_not_finite,
    follow,
    hot,  # noqa: F401
    large,
    one_batch_at_a_time,
    part,  # noqa: F401
    runs_at,
    whole,  # noqa: F401
)


@dataclasses.dataclass(frozen=True)
class Hits(Towards):
    """A task with one metric that is always finite, and one that never is."""

    def metrics(self, rng_key, params):
        return {"hits": jnp.sum(params["w"] > 0, dtype=jnp.int32), "log": -jnp.inf}


jax.tree_util.register_dataclass(Hits, data_fields=["targets"], meta_fields=["dim"])


def single_runs(setup, num_rounds=ROUNDS, num_seeds=SEEDS):
    """Labelled results of `simulate`, run one seed at a time."""
    (runs,) = runs_at([()], lambda: setup, num_rounds, num_seeds)
    return runs


def steps_apart(local_steps, learning_rate):
    """A quadratic with full gradients, in which steps that share a program run one by one."""
    algorithm = fedavg(learning_rate, local_steps=local_steps)
    return Setup(quadratic(6, 2, mu=0.1), algorithm, full_participation(6))


def test_values_that_are_together_share_a_program():
    """Results equal those of separate programs, in which a closed form takes all steps at once."""
    axes = {"learning_rate": [0.1, 0.2], "local_steps": [4, 1, 3]}
    runs = {"num_rounds": 3, "num_seeds": 2}
    grid = Grid(steps_apart, axes, **runs, together=["local_steps"])
    (program,) = programs_of(grid)
    # Replicas of one batch take equally many steps.
    np.testing.assert_array_equal(program.index[1], [1] * 4 + [2] * 4 + [0] * 4)
    apart = Grid(steps_apart, axes, **runs)
    assert [each.label for each in programs_of(apart)] == [
        "local_steps=4",
        "local_steps=1",
        "local_steps=3",
    ]
    expected, shared = sweep(apart), sweep(grid)
    np.testing.assert_allclose(shared["loss"], expected["loss"], rtol=2e-6)
    np.testing.assert_array_equal(shared["gradients"], expected["gradients"])


def test_the_forecast_includes_the_cost_of_a_training():
    axes = {"local_steps": [4, 1], "learning_rate": [0.1]}
    runs = {"num_rounds": 3, "cost": lambda local_steps, **_: 10 * local_steps}
    plan = make_plan(Grid(steps_apart, axes, **runs))
    assert plan.work == [3 * 6 * 40, 3 * 6 * 10]
    assert plan.client_updates == 2 * 3 * 6


@pytest.mark.parametrize(("count", "split"), [(1, "replicas"), (8, "replicas"), (8, "clients")])
def test_batches_devices_and_split_do_not_change_results(monkeypatch, part, count, split):
    """All 9 replicas run at once, on 1 device or on 8, split by replicas or by clients."""
    devices = jax.devices()[:count]
    monkeypatch.setattr("fedjax_mm.sweeps.plan.layout", lambda n, axis: layout(n, devices, axis))
    plans = []
    result = follow(ONE_GRID, split=split, callbacks=[Callback(on_start=plans.append)])
    assert plans[0].where.axis == split
    assert plans[0].where.mesh.size == count
    padded = 16 if (split, count) == ("replicas", 8) else 9
    assert [(each.num_batches, each.batch_size) for each in plans[0].compiled] == [(1, padded)]
    check_close(result, part)


def sequentially():
    """Trains two models one after the other."""
    return build(0.1, partial(sequential, rounds_per_model=4), 2)


def rotating():
    """Three clients visit three models in turn, and the first one never trains."""
    task = requiring(quadratic(3, 2, mu=0.05), jnp.array([-1e3, 1e3, 1e3]))
    assignment = appealing(mfa_rr(3, 3), cohort_size=1, from_round=4)
    return Setup(task, fedavg(0.1, local_steps=2), assignment)


@pytest.mark.parametrize(
    ("build", "idle"),
    [
        (sequentially, [[0, 0], [0, 3], [2, 4], [4, 5], [4, 8]]),
        # Frames have 3 rounds. From the second frame on, each model idles once per frame.
        (rotating, [[0] * 3, [0] * 3, [1] * 3, [2] * 3, [3] * 3]),
    ],
)
def test_idle_rounds_equal_those_of_single_runs(monkeypatch, build, idle):
    """Idle rounds are summed between records and across segments."""
    monkeypatch.setattr(Program, "records_kept", 2)
    result = sweep(Grid(build, {}, **SIZES, record_every=3))
    check_close(result, single_runs(build()).sel(round=result["round"]))
    for seed in range(SEEDS):
        np.testing.assert_array_equal(result.idle_rounds.sel(seed=seed), idle)


def test_a_grid_without_axes_has_only_seeds(part):
    """The result equals that point of a larger grid, though the rate is a Python float."""
    result = sweep(Grid(lambda: build(0.1, mfa_rr, 2), {}, **SIZES | {"num_seeds": 2}))
    alone = part.sel(learning_rate=0.1, drop=True).isel(assignment=0, num_models=0, drop=True)
    check_close(result, alone.isel(seed=[0, 1]))


def test_axes_of_a_file_take_tables_and_name_their_parts():
    """A number and a table need two programs, and nested tables become dotted keys."""
    rates = [0.1, {"beta": 3, "gamma": 20}]
    algorithm = {"assignment": {"name": "mfa_rand"}, "learning_rate": 0.5, "local_steps": 2}
    config = {
        "task": {"num_clients": N, "block_size": 2, "mu": 0.05},
        "num_models": 2,
        "num_rounds": ROUNDS,
        "num_seeds": 2,
        "seed": SEED,
        "algorithms": {"Rand": algorithm},
        "axes": {"task": {"mu": [0.05, 1]}, "learning_rate": rates},
    }
    plans = []
    result = run(
        validate(Experiment, config), Execution(callbacks=[Callback(on_start=plans.append)])
    )
    assert [len(each.program) for each in plans[0].compiled] == [4, 4]
    assert result.distance.dims[:3] == ("algorithm", "mu", "learning_rate")
    assert result.learning_rate.values.tolist() == [
        "0.1",
        "schedule='inverse_time' beta=3.0 gamma=20.0 per='round'",
    ]
    for i, rate, mu in ((0, 0.1, 1.0), (1, inverse_time(3.0, 20.0), 0.05)):
        setup = Setup(quadratic(N, 2, mu=mu), fedavg(rate, local_steps=2), mfa_rand(N, 2))
        actual = result.sel(algorithm="Rand", mu=mu, drop=True)
        check_close(actual.isel(learning_rate=i, drop=True), single_runs(setup, num_seeds=2))


def test_the_numbers_of_a_schedule_share_a_program():
    """The axes replace a plain number of the file by a table."""
    algorithm = {"assignment": {"name": "mfa_rr"}, "learning_rate": 0.5, "local_steps": 2}
    config = {
        "task": {"num_clients": N, "block_size": 2, "mu": 0.05},
        "num_models": 2,
        "num_rounds": ROUNDS,
        "num_seeds": 2,
        "seed": SEED,
        "algorithms": {"RR": algorithm},
        "axes": {"learning_rate": {"beta": [3, 1.5], "gamma": [20], "per": ["frame"]}},
    }
    plans = []
    result = run(
        validate(Experiment, config), Execution(callbacks=[Callback(on_start=plans.append)])
    )
    assert len(plans[0].compiled) == 1
    rate = per_frame(inverse_time(1.5, 20.0), 2)
    setup = Setup(quadratic(N, 2, mu=0.05), fedavg(rate, local_steps=2), mfa_rr(N, 2))
    actual = result.sel(algorithm="RR", beta=1.5, gamma=20, per="frame", drop=True)
    check_close(actual, single_runs(setup, num_seeds=2))


def test_divergence_is_marked_at_records_only():
    axes = ONE | {"learning_rate": [0.05, HOTTER]}
    result = sweep(Grid(build, axes, **SIZES, record_every=4)).isel(assignment=0, num_models=0)
    np.testing.assert_array_equal(
        result.diverged, first_not_finite(result).transpose(*result.diverged.dims)
    )
    assert set(np.unique(result.diverged)) == {-1, 8}


@pytest.mark.parametrize("kept", [1, 5])
def test_divergence_stops_a_sweep_and_names_the_first(monkeypatch, hot, kept):
    """The error names the run that diverged earliest in its batch, not the first in the grid."""
    one_batch_at_a_time(monkeypatch)
    monkeypatch.setattr(Program, "records_kept", kept)
    with pytest.raises(DivergenceError) as stopped:
        follow(HOT_GRID, on_divergence="stop")
    together = hot.diverged.stack(run=("learning_rate", "seed", "model"))[: 8 * 2]  # a batch
    first = min(t for t in together.values if t >= 0)
    message = str(stopped.value)
    found = re.fullmatch(
        r"assignment=mfa_rr, num_models=2, learning_rate=(\S+) diverged: the loss or a parameter "
        r"of model (\d), seed (\d), is not finite in round (\d+); lower the learning rate",
        message,
    )
    assert found, message
    rate, model, seed, t = found.groups()
    assert int(t) == first
    assert float(rate) == HOTTER
    point = hot.sel(learning_rate=float(rate), model=int(model), seed=int(seed))
    assert point.diverged == first
    assert not np.isfinite(point.loss.sel(round=first))

    partial = stopped.value.partial.isel(assignment=0, num_models=0, drop=True)
    assert partial.sizes == hot.sizes
    seen = partial.distance.sel(learning_rate=0.05, seed=0, model=1).notnull()
    done = int(seen.sum()) - 1
    assert done == first if kept == 1 else first <= done < ROUNDS
    computed = {"learning_rate": [0.05, HOT], "round": range(done + 1)}
    xr.testing.assert_equal(partial.distance.sel(computed), hot.distance.sel(computed))
    assert partial.distance.sel(round=slice(done + 1, None)).isnull().all()
    assert partial.distance.sel(learning_rate=0.2).isnull().all()  # in the batch that never ran


def test_divergence_is_judged_by_parameters_and_absent_counts_are_nan():
    def build(num_models, learning_rate):
        assignment = mfa_rand(4, num_models)
        return Setup(Hits(jnp.arange(4.0)), fedavg(learning_rate, local_steps=3), assignment)

    axes = {"num_models": [1, 2], "learning_rate": [0.1, 1e9]}
    result = sweep(Grid(build, axes, num_rounds=6))
    assert np.all(result.diverged.sel(learning_rate=0.1) == -1)
    hot = result.diverged.sel(learning_rate=1e9)
    assert 0 < hot.sel(num_models=1, model=1).item() <= 6
    assert hot.sel(num_models=1, model=2).item() == -1  # an absent model
    assert result.hits.sel(num_models=1, model=2).isnull().all()
    assert result.hits.sel(model=1).notnull().all()


def test_a_program_that_does_not_fit_is_split(monkeypatch):
    """All 100 replicas exceed the limit, and every batch of the plan fits."""
    monkeypatch.setattr("fedjax_mm.sweeps.plan._CACHE_BYTES", 2**40)  # memory alone limits batches
    room = 80 * LARGE
    plan = make_plan(Grid(large, HUNDRED, 3), limit=above(room))
    (compiled,) = plan.compiled
    assert plan.is_split
    assert compiled.num_batches > 2
    assert compiled.batch_size % 8 == 0
    assert compiled.batch_size * LARGE <= plan.batch_bytes <= room
    replicas = np.concatenate([compiled.replicas(i) for i in range(compiled.num_batches)])
    assert np.unique(replicas).tolist() == list(range(100))


TARGETS = np.random.default_rng(0).normal(size=1000).astype(np.float32)


def test_data_are_stored_once_and_are_arguments():
    """Every point makes its own copy."""

    def towards(learning_rate):
        task = Towards(jnp.asarray(TARGETS))
        return Setup(task, fedavg(learning_rate, local_steps=1), mfa_rr(1000, 2))

    plans, how = [], {"num_rounds": 4, "seed": SEED}
    execution = Execution(callbacks=[Callback(on_start=plans.append)])
    result = sweep(towards, {"learning_rate": [0.1, 0.2]}, **how, execution=execution)
    (compiled,) = plans[0].compiled
    assert not re.search(r"f32\[1000\]\S* constant\(", compiled.call.as_text())
    sizes = [np.size(leaf.value) for leaf in compiled.program.stacked.leaves]
    assert sizes.count(1000) == 1
    alone = result.sel(learning_rate=0.2, drop=True)
    check_close(alone, single_runs(towards(0.2), 4, 1))


def remembering():
    """Multiplies each update by the client's count of trainings of that model."""
    inner = counting()

    def client(*args):
        contribution, state = inner.client(*args)
        update = jax.tree.map(lambda x: x * state.count, contribution.update)
        return contribution._replace(update=update), state

    return Algorithm(inner.init, client, inner.server)


def keyed(num_clients, num_models):
    """An assignment that draws cohorts with a key that it keeps in its state and splits."""

    def assign(rng_key, t, state, look):
        state, draw = jax.random.split(state)
        clients = jax.random.permutation(draw, num_clients).reshape(num_models, -1)
        return Cohort.of_rows(clients), state

    return Assignment(num_clients, num_models, lambda rng_key, look: rng_key, assign)


def test_custom_algorithms_and_assignments_keep_their_states(monkeypatch):
    """States survive segments, and the sizes of messages are counted."""
    one_batch_at_a_time(monkeypatch)
    monkeypatch.setattr(Program, "records_kept", 2)

    def own(scale, dim):
        task = Towards(scale * jnp.arange(6.0), dim)
        return Setup(task, remembering(), keyed(6, 2))

    axes = {"dim": [2, 3], "scale": [1.0, 2.0]}
    result = sweep(Grid(own, axes, **SIZES))
    assert result.norm.isel(round=-1).std("seed").min() > 0
    for dim in (2, 3):
        expected = single_runs(own(1.0, dim))
        check_close(result.sel(dim=dim, scale=1.0, drop=True), expected)
        sent = result.sel(dim=dim).parameters_up / result.sel(dim=dim).client_updates
        assert np.all(sent.isel(round=slice(1, None)) == dim)


@pytest.mark.slow
@pytest.mark.parametrize(("x64", "tolerance"), [(False, 1e-6), (True, 1e-12)])
def test_every_run_of_the_benchmark_sweep_equals_a_single_run(x64, tolerance):
    """All 4,096 runs of S1 are repeated one at a time by `simulate`."""
    with jax.enable_x64(x64):
        grid = WORKLOADS["S1"].grid()
        plan = make_plan(grid)
        assert len(plan.compiled) == 4
        result = carry_out(plan, Execution())[0]
        keys = seed_keys(grid.seed, range(grid.num_seeds))
        for program in programs_of(grid):
            fixed = {
                name: places[0]
                for name, places in zip(grid.axes, program.index, strict=False)
                if name != "learning_rate"
            }

            @jax.jit
            def alone(key, rate, fixed=fixed):
                at = {name: grid.axes[name][place] for name, place in fixed.items()}
                task, algorithm, assignment, *_ = grid.build(learning_rate=rate, **at)
                every = grid.record_every
                return simulate(
                    key, task, algorithm, assignment, grid.num_rounds, record_every=every
                )[1].metrics

            points = result.isel(fixed).isel(model=slice(program.num_models))
            for rate in grid.axes["learning_rate"]:
                for seed, key in enumerate(keys):
                    point = points.sel(learning_rate=rate, seed=seed)
                    for name, values in alone(key, rate).items():
                        scale = tolerance * np.abs(values).max()
                        np.testing.assert_allclose(point[name], values, rtol=0, atol=scale)


def test_every_structure_is_compiled_once_for_all_batches(whole):
    """Each of 4 structures has 3 rates and 3 seeds, and its 9 runs are padded to 16."""
    _, plan, planning, running = whole
    assert planning.programs == 4
    assert planning.compilations >= 4  # the listener hears of compilations
    assert [len(each.program) for each in plan.compiled] == [9] * 4
    assert [(each.num_batches, each.batch_size) for each in plan.compiled] == [(2, 8)] * 4
    assert plan.compiled[0].replicas(1).tolist() == [8] * 8
    assert (running.programs, running.compilations) == (0, 0)


def test_programs_of_older_sweeps_are_freed_before_the_memory_maps_run_out(monkeypatch, tmp_path):
    limit = tmp_path / "max_map_count"
    assert not plan_module._is_crowded(limit)
    for most, is_crowded in (("1000000000", False), ("10", True)):
        limit.write_text(f"{most}\n")
        assert plan_module._is_crowded(limit) is is_crowded
    monkeypatch.setattr(plan_module, "_compiled", Memory(64))
    grids = [dataclasses.replace(ONE_GRID, num_rounds=rounds, record_every=1) for rounds in (7, 9)]
    alive = []
    for crowded in (False, True):
        monkeypatch.setattr(plan_module, "_is_crowded", lambda crowded=crowded: crowded)
        plans = [make_plan(grid) for grid in grids]
        calls = [weakref.ref(plan.compiled[0].call) for plan in plans]
        del plans
        gc.collect()
        alive.append([call() is not None for call in calls])
    assert alive == [[True, True], [False, True]]


class Lowered:
    """A program that compiles until the others are cancelled, or for ten seconds."""

    def __init__(self):
        self.started, self.released = [], threading.Event()

    def as_text(self):
        return ""

    def compile(self):
        self.started.append(True)
        self.released.wait(10)


def test_an_interrupt_while_compiling_cancels_the_queue(monkeypatch):
    lowered, cancelled, cancel, given = Lowered(), [], Future.cancel, []

    def noted(future):
        cancelled.append(cancel(future))
        if len(cancelled) == 5:
            lowered.released.set()

    def approve(label, text):
        given.append(label)
        if len(given) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(Future, "cancel", noted)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(plan_module, "_lower", lambda *_: lowered)
    kept = {"records_kept": 1, "rounds_at_once": 1, "division": SimpleNamespace(shapes=())}
    programs = [SimpleNamespace(key=i, **kept) for i in range(9)]
    told = []
    with pytest.raises(KeyboardInterrupt):
        plan_module._compile(
            programs, [Block(1, 1, 0)] * 9, layout(1, axis="replicas"), told.append, approve
        )
    assert sum(cancelled) >= 4
    assert len(lowered.started) <= 1
    assert told == ["compiling 9 programs"]


def test_segments_do_not_change_results(monkeypatch, part):
    monkeypatch.setattr(Program, "records_kept", 5)
    check_close(follow(ONE_GRID), part)
