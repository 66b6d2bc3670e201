"""Sweeps: number of compilations, agreement with single runs, labels, and refusals."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import xarray as xr

from fedjax_mm import (
    fedavg,
    local_sgd,
    mfa_rand,
    mfa_rr,
    prsgd,
    simulate,
    sweep,
    to_dataset,
)
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.sweeps import Setup
from fedjax_mm.sweeps.execute import carry_out, plan_for
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.plan import make_plan
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks import quadratic
from fedjax_mm.tasks.view import View
from tests.helpers import Towards

N, ROUNDS, SEEDS, SEED = 5, 12, 3, 4


AXES = {
    "learning_rate": [0.05, 0.1, 0.2],
    "assignment": [mfa_rand, mfa_rr],
    "num_models": [3, 2],
}


ONE = {"learning_rate": AXES["learning_rate"], "assignment": [mfa_rr], "num_models": [2]}


"""The axes of one program, a subset of the whole grid."""


SIZES = {"num_rounds": ROUNDS, "num_seeds": SEEDS, "seed": SEED}


HOT, HOTTER = 20.0, 80.0  # rates that diverge late or not at all, and early


def build(learning_rate, assignment, num_models):
    """Cohorts have unequal sizes, and all clients but the first start at their minimum."""
    algorithm = fedavg(learning_rate, local_steps=2)
    return Setup(quadratic(N, 2, mu=0.05), algorithm, assignment(N, num_models))


ONE_GRID = Grid(build, ONE, **SIZES)


"""Traced only once by `follow`."""


def follow(grid, on_divergence="mark", **how):
    """Does the same as `sweep`, but traces a grid only once."""
    how = Execution(**how)
    return carry_out(plan_for(grid, how), how, on_divergence=on_divergence)[0]


def runs_at(points, build, num_rounds=ROUNDS, num_seeds=SEEDS):
    """Yields the same for each of several points, given as arguments of `build`."""

    @jax.jit
    def one(key, point):
        tasks, algorithm, assignment, params, *_ = build(*point)
        return simulate(key, tasks, algorithm, assignment, num_rounds, params=params)[1]

    for point in points:
        keys = [jax.random.fold_in(jax.random.key(SEED), number) for number in range(num_seeds)]
        runs = [to_dataset(one(key, point)) for key in keys]
        yield xr.concat(runs, xr.Variable("seed", range(num_seeds)))


def check_close(actual, expected, tolerance=1e-6):
    """Checks dimensions and counts exactly, and metrics to `tolerance` of their largest value."""
    assert set(actual.data_vars) - set(expected.data_vars) <= {"diverged"}
    for name, values in expected.data_vars.items():
        assert actual[name].dims == values.dims
        assert actual[name].dtype == values.dtype
        scale = np.nanmax(np.abs(values)).item() if values.dtype.kind == "f" else 0
        np.testing.assert_allclose(
            actual[name], values, rtol=0, atol=tolerance * scale, err_msg=str(name)
        )


def one_batch_at_a_time(patch):
    """Puts one replica on each of 8 devices, so that 9 replicas need a second, padded batch."""
    patch.setattr("fedjax_mm.sweeps.plan._CACHE_BYTES", 1)


class Work:
    """Counts JAX's compilations, those of the package, and the calls of a build function."""

    def __init__(self, patch):
        self.programs = self.compilations = self.builds = 0
        compile_ = jax.stages.Lowered.compile

        def counted(lowered, *args, **kwargs):
            self.programs += 1
            return compile_(lowered, *args, **kwargs)

        patch.setattr(jax.stages.Lowered, "compile", counted)

    def build(self, **values):
        self.builds += 1
        return build(**values)

    def note(self, event, seconds, **_):
        del seconds
        self.compilations += event.endswith("backend_compile_duration")

    def __enter__(self):
        jax.monitoring.register_event_duration_secs_listener(self.note)
        return self

    def __exit__(self, *error):
        jax.monitoring.unregister_event_duration_listener(self.note)


@pytest.fixture(scope="module")
def whole():
    """The result of the whole grid, its plan, and the work of planning and of running."""
    with pytest.MonkeyPatch.context() as patch:
        one_batch_at_a_time(patch)
        with Work(patch) as planning:
            how = Execution()
            plan = plan_for(Grid(planning.build, AXES, ROUNDS, SEEDS, SEED), how)
        with Work(patch) as running:
            result = carry_out(plan, how)[0]
    return result, plan, planning, running


@pytest.fixture(scope="module")
def part(whole):
    """The result of one program of the grid."""
    return whole[0].sel(assignment=["mfa_rr"], num_models=[2]).isel(model=slice(2))


def test_every_point_is_built_once(whole):
    """No number of seeds traces a user's function again."""
    _, _, planning, running = whole
    assert (planning.builds, running.builds) == (3 * 2 * 2, 0)


def test_axes_of_real_numbers_share_a_program():
    for values in ([0.5, 1], [np.float32(0.5), 1.0], np.array([0.5, 1]), jnp.array([0.5, 1])):
        grid = Grid(build, ONE | {"learning_rate": values}, 2)
        assert len(programs_of(grid)) == 1
        assert grid.axes["learning_rate"] == [0.5, 1.0]


def test_points_of_other_structures_have_their_own_programs():
    for values in ([1, 2], [True, 0.5], [0.5, "half"], [mfa_rr, mfa_rand]):

        def told(x):
            return build(0.1, mfa_rr, 2)._replace(prepare=lambda key, setup: (x, setup)[1])

        assert len(programs_of(Grid(told, {"x": values}, 2))) == 2


@pytest.mark.parametrize("assignment", AXES["assignment"])
@pytest.mark.parametrize("num_models", AXES["num_models"])
def test_every_point_equals_a_single_run(whole, assignment, num_models):
    """Points are selected by label, so that permuted axes would be noticed."""
    rates = AXES["learning_rate"]
    runs = runs_at([(rate,) for rate in rates], lambda rate: build(rate, assignment, num_models))
    for learning_rate, expected in zip(rates, runs, strict=True):
        label = {"learning_rate": learning_rate, "assignment": assignment.__name__}
        actual = whole[0].sel(label, drop=True).sel(num_models=num_models, drop=True)
        check_close(actual.isel(model=slice(num_models)), expected)


def test_points_seeds_and_models_differ(whole):
    """Otherwise the comparisons in this module could not distinguish them."""
    final = whole[0].distance.isel(round=-1).values.ravel()
    final = final[~np.isnan(final)]
    assert len(np.unique(final)) == final.size == 3 * 2 * (3 + 2) * 3


def test_a_build_with_seeds_gets_their_numbers():
    built = []

    def drawn(learning_rate, seed):
        built.append((learning_rate, seed))
        return build(learning_rate, mfa_rr, 2)

    axes = {"learning_rate": [0.1, 0.2]}
    (program,) = programs_of(Grid(drawn, axes, 1, num_seeds=2, first_seed=7))
    assert built == [(0.1, 7), (0.1, 8), (0.2, 7), (0.2, 8)]
    assert program.shape == (2, 2)


@pytest.mark.parametrize("method", [fedavg, prsgd])
def test_steps_that_share_a_program_are_those_of_plain_points(method):
    def build(steps, rate):
        algorithm = method(local_sgd(rate, steps=steps, batch_size=1))
        return Setup(Towards(jnp.arange(float(N))), algorithm, mfa_rr(N, 2))

    axes = {"steps": [1, 3], "rate": [0.1, 0.3]}
    plain = sweep(build, axes, num_rounds=3)
    shared = sweep(build, axes, num_rounds=3, together=["steps"])
    assert len(programs_of(Grid(build, axes, 3, together=["steps"]))) == 1
    xr.testing.assert_allclose(shared, plain, rtol=1e-5)
    np.testing.assert_array_equal(shared.gradients, plain.gradients)


@pytest.mark.parametrize("name", ["tau", "rate"])
def test_together_takes_only_names_of_axes_of_ints(name):
    axes = {"local_steps": [1], "rate": [0.1]}
    with pytest.raises(
        ValueError,
        match=f"together has '{name}'; give names of axes of ints, of which there are local_steps",
    ):
        Grid(lambda local_steps, rate: None, axes, 1, together=[name])


def test_an_array_that_changes_between_points_is_refused():
    targets = np.zeros(4, np.float32)

    def filling(x):
        targets[:] = x
        return Setup(Towards(targets), fedavg(0.1, local_steps=1), mfa_rr(4, 2))

    with pytest.raises(ValueError, match=r"build has changed an array float32\[4\] of an earlier"):
        sweep(Grid(filling, {"x": [1.0, 2.0]}, 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Keyed(View):
    """A task with a random key among its data."""

    key: jax.Array

    def metrics(self, rng_key, params):
        return self.task.metrics(rng_key, params) | {"drawn": jax.random.uniform(self.key)}


@pytest.mark.parametrize("order", [1, -1])
def test_an_axis_inside_another_one_has_its_values_in_either_order(order):
    setup = Setup(quadratic(4, 2, mu=0.1), fedavg(local_sgd(0.1, steps=2)), mfa_rr(4, 2))
    axes = {
        "algorithm.local.learning_rate": [0.01, 0.2],
        "algorithm.local": [local_sgd(0.3, steps=1), local_sgd(0.3, steps=3)],
    }
    grid = Grid(setup, dict([*axes.items()][::order]), num_rounds=2)
    for point in np.ndindex(2, 2):
        rate, steps = [(0.01, 0.2)[point[::order][0]], (1, 3)[point[::order][1]]]
        expected = f"fedavg(local_sgd({rate}, steps={steps}))"
        assert repr(grid.setup(point, 0).algorithm) == expected


def test_keys_differ_between_points_and_seeds():
    """Random keys in a setup are stacked like numbers, and results are those of `simulate`."""
    task = Towards(jnp.arange(4.0))

    def setup(number, seed):
        key = jax.random.key(10 * int(number) + seed)
        params = {"w": jax.random.normal(key, (3,), jnp.float32)}
        drawn = Keyed(task, task.num_clients, key)
        return Setup(drawn, fedavg(0.1, local_steps=1), mfa_rand(4, 2), params)

    result = sweep(setup, {"number": [1.0, 2.0]}, num_rounds=3, num_seeds=2)
    keys = seed_keys(0, range(2))
    for number, seed in itertools.product([1, 2], [0, 1]):
        own = setup(number, seed)
        trace = simulate(keys[seed], *own[:3], 3, params=own.params)[1]
        found = result.sel(number=number, seed=seed)
        np.testing.assert_allclose(found.norm, trace.metrics["norm"], rtol=1e-6)
        np.testing.assert_array_equal(found.drawn, trace.metrics["drawn"])
    assert len(np.unique(result.drawn)) == 4


def test_every_point_equals_a_single_run_in_double_precision(x64):
    axes = ONE | {"learning_rate": [0.1, 0.2], "assignment": [mfa_rand]}
    result = sweep(Grid(build, axes, **SIZES))
    rates = axes["learning_rate"]
    runs = runs_at([(rate,) for rate in rates], lambda rate: build(rate, mfa_rand, 2))
    for learning_rate, expected in zip(rates, runs, strict=True):
        actual = result.isel(assignment=0, num_models=0, drop=True)
        actual = actual.sel(learning_rate=learning_rate, drop=True)
        assert actual.loss.dtype == np.float64
        check_close(actual, expected, 1e-12)


def test_record_every_selects_rounds(part):
    """Recording every fourth round gives the values of a full record, counts included."""
    result = sweep(Grid(build, ONE, **SIZES, record_every=4))
    assert result["round"].values.tolist() == [0, 4, 8, 12]
    check_close(result, part.sel(round=result["round"]))


def test_dimensions_and_coordinates_are_those_of_the_axes(whole):
    result = whole[0]
    dims = ("learning_rate", "assignment", "num_models", "seed", "round", "model")
    assert result.distance.dims == dims
    assert result.diverged.dims == (*dims[:4], "model")
    assert {name: result[name].values.tolist() for name in dims} == {
        "learning_rate": [0.05, 0.1, 0.2],
        "assignment": ["mfa_rand", "mfa_rr"],
        "num_models": [3, 2],
        "seed": [0, 1, 2],
        "round": list(range(13)),
        "model": [1, 2, 3],
    }
    about = result.attrs["manifest"]
    assert about["config"]["axes"] == {name: result[name].values.tolist() for name in dims[:3]}
    assert (about["seed"], about["data"]) == (SEED, "not stated")
    assert all(about["wall_seconds"][name] > 0 for name in ("compile", "run"))


def test_absent_models_have_nan_metrics_and_zero_counts(whole):
    absent = whole[0].sel(num_models=2, model=3)
    for name in ("loss", "excess_loss", "distance"):
        assert absent[name].isnull().all()
        assert whole[0][name].notnull().sum() == whole[0][name].size * 5 / 6
    for name in ("client_updates", "gradients", "idle_rounds", "parameters_up", "parameters_down"):
        assert np.all(absent[name] == 0)
    assert np.all(whole[0].diverged == -1)


HOT_GRID = Grid(build, ONE | {"learning_rate": [0.05, HOT, HOTTER, 0.2]}, **SIZES)


@pytest.fixture(scope="module")
def hot():
    """The result of one program in two batches, in which two of four rates diverge."""
    with pytest.MonkeyPatch.context() as patch:
        one_batch_at_a_time(patch)
        return follow(HOT_GRID).isel(assignment=0, num_models=0, drop=True)


def first_not_finite(dataset):
    """The first round in which the loss is not finite, or -1, by a loop."""
    metrics = dataset[["loss"]].to_array()
    first = xr.full_like(dataset.distance.isel(round=0, drop=True), -1, int)
    for t in dataset["round"].values[::-1]:
        finite = np.isfinite(metrics.sel(round=t)).all("variable")
        first = first.where(finite, t)
    return first


def test_the_first_round_that_is_not_finite_is_marked(hot):
    expected = first_not_finite(hot).transpose(*hot.diverged.dims)
    np.testing.assert_array_equal(hot.diverged, expected)
    rounds = hot.diverged.sel(learning_rate=HOTTER)
    assert np.all((rounds > 2) & (rounds < ROUNDS))
    assert hot.diverged.sel(learning_rate=HOT).min() == -1
    assert hot.diverged.sel(learning_rate=HOT).max() > rounds.max()


def test_divergence_leaves_the_other_points_alone(hot, part):
    """The other points equal, bit for bit, those of a grid without divergence."""
    others = hot.sel(learning_rate=[0.05, 0.2])
    assert np.all(others.diverged == -1)
    alone = part.isel(assignment=0, num_models=0, drop=True).sel(learning_rate=[0.05, 0.2])
    xr.testing.assert_equal(others, alone)


def test_wrong_axes_and_setups_are_refused():
    for axes, message in [
        ({"rate": 0.1}, "the axis 'rate' is 0.1; give a list of values"),
        ({"start": "zeros"}, "the axis 'start' is 'zeros'; give a list of values"),
        ({"rule": [functools.partial(mfa_rr, redraw="round")]}, "name differs in every process"),
        ({"rate": [0.1]}, "build returned a tuple of 3; return Setup"),
    ]:
        with pytest.raises(ValueError, match=message):
            sweep(Grid(lambda **point: (1, 2, 3), axes, num_rounds=2))


def test_on_divergence_is_checked():
    with pytest.raises(ValueError, match="on_divergence is 'halt'; it must be 'mark' or 'stop'"):
        sweep(Grid(build, ONE, num_rounds=2), on_divergence="halt")


def large(learning_rate):
    """Two models of 80 001 parameters."""
    return Setup(
        quadratic(20_000, 4, mu=0.05), fedavg(learning_rate, local_steps=1), mfa_rr(20_000, 2)
    )


LARGE = 2 * 4 * 80_001  # bytes of the parameters of one replica


HUNDRED = {"learning_rate": np.linspace(0.1, 0.2, 100)}


def above(num_bytes):
    """A limit that leaves `num_bytes` above the memory in use."""
    return psutil.Process().memory_info().rss + num_bytes


def traced(grid):
    """The programs of a grid, whose points take memory of their own."""
    programs = programs_of(grid)
    for each in programs:
        _ = each.traced
    return programs


def test_a_program_that_fits_is_not_split(whole):
    assert not whole[1].is_split


def test_a_program_that_cannot_fit_is_refused_before_it_runs(monkeypatch):
    grid = Grid(large, HUNDRED, 3)
    programs = traced(grid)
    with pytest.raises(ValueError, match=r"fewest at once, take .* GiB .*allow more memory"):
        make_plan(grid, limit=above(5 * LARGE), programs=programs)


def test_a_result_that_cannot_fit_is_refused_before_compiling(monkeypatch):
    work = Work(monkeypatch)
    with pytest.raises(
        ValueError, match=r"records each take at least \d\d\.\d\d GiB.*record_every"
    ):
        make_plan(Grid(build, ONE, 100_000_000 // 3, SEEDS), limit=above(2**30))
    assert work.programs == 0


def named(name, value):
    def assignment(num_clients, num_models):
        return value(num_clients, num_models)

    assignment.__name__ = name
    return assignment


def test_a_wrong_grid_is_refused():
    for change, message in [
        ({"axes": {"seed": [0.1]}}, "called 'seed', like a part of every result; rename it"),
        ({"axes": {"diverged": [0.1]}}, "called 'diverged', like a part of every result"),
        ({"axes": {"learning_rate": []}}, "'learning_rate' has no values; give at least one"),
        ({"axes": {"learning_rate": [0.1, math.nan]}}, "'learning_rate' is .*must be finite"),
        ({"axes": {"learning_rate": [math.inf, 1]}}, "'learning_rate' is .*must be finite"),
        ({"axes": {"learning_rate": [0.1, 0.2, 0.1]}}, r"'learning_rate' has 0\.1 twice"),
        (
            {"axes": {"assignment": [named("f", mfa_rr), named("f", mfa_rand)]}},
            "'assignment' has 'f' twice; .* another __name__",
        ),
        ({"num_rounds": 0}, "num_rounds is 0"),
        ({"num_seeds": 0}, "num_seeds is 0"),
        ({"num_rounds": 10, "record_every": 4}, "record_every is 4; it must divide 10 rounds"),
    ]:
        with pytest.raises(ValueError, match=message):
            Grid(**{"build": build, "axes": ONE, "num_rounds": 12} | change)


def test_an_axis_named_like_a_metric_is_refused(monkeypatch):
    work = Work(monkeypatch)
    with pytest.raises(ValueError, match="called 'loss', like one of the task's metrics; rename"):
        sweep(Grid(lambda loss: build(loss, mfa_rr, 2), {"loss": [0.1]}, num_rounds=2))
    assert work.programs == 0


def test_an_invalid_point_is_named_before_compiling(monkeypatch):
    work = Work(monkeypatch)
    with pytest.raises(ValueError, match="num_models is 9, more than the clients there are"):
        sweep(Grid(build, ONE | {"num_models": [2, 9]}, num_rounds=2))
    assert work.programs == 0
