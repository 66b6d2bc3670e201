"""Final parameters: returned, saved in a file, and used as the start of another experiment."""

import os
import signal

import jax
import numpy as np
import pytest

from fedjax_mm import Experiment, fedavg, mfa_rr, params_of, run, simulate, sweep
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.results.params import load_params, save_params
from fedjax_mm.sweeps import (
    Checkpoints,
    Execution,
    Grid,
    InterruptedRunError,
    Setup,
    Until,
    progress,
)
from fedjax_mm.tasks import quadratic
from tests.helpers import Towards, traced_once

N, DIM, ROUNDS = 5, 11, 4
METHOD = {"assignment": {"name": "mfa_rr"}, "learning_rate": 0.1, "local_steps": 2}


def experiment(**changes):
    config = {
        "task": {"num_clients": N, "block_size": 2, "mu": 0.05, "start": "normal"},
        "num_models": 2,
        "num_rounds": ROUNDS,
        "num_seeds": 2,
        "algorithms": {"A": METHOD, "B": METHOD | {"learning_rate": 0.2}},
    }
    return Experiment.model_validate(config | changes)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A result, its parameters, and their file."""
    result, params = run(experiment(), keep="params")
    path = tmp_path_factory.mktemp("kept") / "params.npz"
    save_params(params, result, path)
    return result, params, path


def test_the_parameters_equal_those_of_single_runs(kept):
    result, params, path = kept
    assert [x.shape for x in params] == [(2, 2, DIM)] * 2
    config = experiment()

    @jax.jit
    def program(rng_key):
        how = quadratic(N, 2, mu=0.05), fedavg(0.2, local_steps=2), mfa_rr(N, 2)
        start = config.task.initial_params()
        return params_of(simulate(rng_key, *how, ROUNDS, params=start)[0])

    alone = program(seed_keys(0, range(2))[1])
    for model in range(2):
        np.testing.assert_allclose(params[model][1, 1], alone[model], rtol=1e-5, atol=1e-6)
    saved = load_params(path)
    assert saved.labels == {"algorithm": ["A", "B"], "seed": [0, 1]}
    np.testing.assert_array_equal(saved.arrays["1"], params[1])
    assert run(experiment()).drop_attrs().identical(result.drop_attrs()), "keeping changes nothing"


def test_an_experiment_starts_where_another_ended(kept):
    result, _, path = kept
    later = run(experiment(params=str(path)))
    for name in ("loss", "distance"):
        ends, begins = result[name].sel(round=ROUNDS), later[name].sel(round=0)
        np.testing.assert_allclose(begins, ends, rtol=1e-6)
    assert (later.loss.sel(round=ROUNDS) < result.loss.sel(round=ROUNDS)).all()


def test_one_algorithm_seed_or_model_may_start_all(kept, tmp_path):
    result, params, _ = kept
    one = [x[:1, :1] for x in params[:1]]
    path = tmp_path / "one.npz"
    save_params(one, result.isel(algorithm=[0], seed=[0]), path)
    axes = {"learning_rate": [0.05, 0.1]}
    more = experiment(params=str(path), num_models=3, axes=axes, num_seeds=3)
    first = run(more).distance.sel(round=0).values
    np.testing.assert_allclose(first, result.distance.isel(algorithm=0, seed=0)[-1, 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_seeds": 3}, r"has no seed 2, but 0, 1; give it the same seeds, or one for all"),
        ({"algorithms": {"C": METHOD}}, r"has no algorithm 'C', but 'A', 'B'; give it the same"),
        ({"num_models": 3}, r"the file has 2 models; give one for all or one for each of 3"),
        (
            {"task": {"num_clients": N, "block_size": 1}},
            r"parameters 0 are \(11,\); the task has \(6,\)",
        ),
    ],
)
def test_parameters_that_do_not_fit_are_refused(kept, changes, message):
    with pytest.raises(ValueError, match=message):
        run(experiment(params=str(kept[2]), **changes))


def test_missing_and_wrong_files_are_refused(kept, tmp_path):
    with pytest.raises(ValueError, match=r"file .*nothing.npz does not exist; `fedjax-mm run"):
        experiment(params=str(tmp_path / "nothing.npz"))
    (tmp_path / "text.npz").write_text("text")
    with pytest.raises(ValueError, match=r"text.npz holds no parameters: .* --save-params"):
        run(experiment(params=str(tmp_path / "text.npz")))
    with pytest.raises(ValueError, match=r"axes.params: it cannot vary within a sweep"):
        experiment(axes={"params": [str(kept[2])]})
    result, params, _ = kept
    points = result.expand_dims(mu=[1.0, 2.0])
    save_params([np.stack([x, x]) for x in params], points, tmp_path / "points.npz")
    with pytest.raises(ValueError, match=r"has 2 points on the axis 'mu'; save those of one point"):
        run(experiment(params=str(tmp_path / "points.npz")))


def test_parameters_that_are_not_finite_are_refused(kept, tmp_path):
    result, params, _ = kept
    other = [x.copy() for x in params]
    other[1][0, 1, 2] = np.nan  # algorithm A, seed 1
    save_params(other, result, tmp_path / "other.npz")
    with pytest.raises(ValueError, match=r"params: .*other.npz has entries that are not finite"):
        run(experiment(params=str(tmp_path / "other.npz")))
    run(experiment(params=str(tmp_path / "other.npz"), num_seeds=1))  # uses only seed 0


def test_pytrees_survive_a_round_trip(tmp_path):
    """Leaves are named by their paths, and the task gives the structure."""
    from fedjax_mm.results.params import params_like

    tree = {"a": [np.ones((2, 1)), (np.zeros((2, 3), np.int32),)], "b": jax.numpy.bfloat16(2.5)}
    tree["b"] = np.full((2,), tree["b"])
    result = run(experiment(num_rounds=1)).isel(algorithm=0, drop=True)
    save_params([tree, tree], result, tmp_path / "params.npz")
    saved = load_params(tmp_path / "params.npz")
    assert sorted(saved.arrays)[:3] == ["0/a/0", "0/a/1/0", "0/b"]
    like = jax.eval_shape(lambda: tree)
    back = params_like(saved.arrays, 1, like)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert back["b"].tolist() == [2.5, 2.5]
    with pytest.raises(ValueError, match="the task has no such parameters as some of 0/a/0"):
        params_like(saved.arrays, 0, {"b": like["b"]})
    with pytest.raises(ValueError, match=r"parameters 0/c are missing; the task has \(2,\)"):
        params_like(saved.arrays, 0, {"c": like["b"]})


# Sweeps


def build(num_models, learning_rate):
    tasks = [Towards(jax.numpy.arange(4.0), dim=3 - model % 2) for model in range(num_models)]
    return Setup(tasks, fedavg(learning_rate, local_steps=1), mfa_rr(4, num_models))


AXES = {"num_models": [3, 1], "learning_rate": [0.1, 0.2]}


def test_a_sweep_keeps_the_parameters_of_different_models():
    result, params = sweep(Grid(build, AXES, num_rounds=3, num_seeds=2), keep="params")
    assert [x["w"].shape for x in params] == [(2, 2, 2, 3), (2, 2, 2, 2), (2, 2, 2, 3)]
    norms = np.stack([np.linalg.norm(x["w"], axis=-1) for x in params], axis=-1)
    np.testing.assert_allclose(norms, result.norm.sel(round=3), rtol=1e-6)
    assert np.isnan(params[1]["w"][1]).all(), "the second point has one model"
    plain = sweep(Grid(build, AXES, num_rounds=3, num_seeds=2))
    assert plain.drop_attrs().identical(result.drop_attrs())


def test_parameters_with_a_target_are_those_of_the_round_that_met_it():
    """Runs with different rates end in different rounds of one batch."""
    until = Until("norm", at_least=2.3)
    sizes = {"num_rounds": 60, "num_seeds": 2, "until": until, "keep": "params"}
    result, params = sweep(Grid(build, AXES | {"num_models": [1]}, **sizes))
    ended = result.ended.values
    assert len(np.unique(ended)) > 1
    assert (ended > 0).any()
    last = result.norm.sel(round=result.ended.where(result.ended >= 0, 60))
    norms = np.linalg.norm(params[0]["w"], axis=-1)
    np.testing.assert_allclose(norms, last.squeeze("model"), rtol=1e-6)


@traced_once()
def test_parameters_of_finished_batches_survive_an_interruption(tmp_path, monkeypatch):
    """The first program ends before the second one is stopped."""
    sizes = {"num_rounds": 3, "num_seeds": 2, "keep": "params"}
    _, whole = sweep(Grid(build, AXES, **sizes))
    monkeypatch.setattr("fedjax_mm.sweeps.execute._SEGMENT_SECONDS", 0)

    def stop(label, done, total):
        if total > 1 and done > 0.9 * total:
            os.kill(os.getpid(), signal.SIGTERM)

    with Checkpoints(tmp_path) as checkpoints, pytest.raises(InterruptedRunError):
        sweep(Grid(build, AXES, **sizes), execution=Execution([progress(stop)], checkpoints))
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        assert checkpoints.load(0).rounds == 3
        _, rest = sweep(Grid(build, AXES, **sizes), execution=Execution(checkpoints=checkpoints))
        without = sizes | {"keep": None}
        with pytest.raises(ValueError, match='keep was "params", is null'):
            sweep(Grid(build, AXES, **without), execution=Execution(checkpoints=checkpoints))
    for one, other in zip(jax.tree.leaves(rest), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, other)


def test_keeping_parameters_of_different_shapes_is_refused():
    def other(dim):
        return Setup(Towards(jax.numpy.zeros(4), dim=dim), fedavg(0.1, local_steps=1), mfa_rr(4, 1))

    with pytest.raises(ValueError, match=r"those of model 1 differ in dim=3 from those elsewhere"):
        sweep(Grid(other, {"dim": [2, 3]}, num_rounds=1), keep="params")
    with pytest.raises(ValueError, match="keep is 'all'; it must be 'params' or None"):
        sweep(Grid(other, {"dim": [2]}, num_rounds=1), keep="all")
