"""Runs that stop at a target are bitwise equal up to it, in every batch and after a resume."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import Experiment, fedavg, mfa_rand, run, sweep
from fedjax_mm.sweeps import Execution, Setup, Until, progress
from fedjax_mm.sweeps.devices import layout
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.program import Block, programs_of
from fedjax_mm.tasks import quadratic

RATES, SEEDS, ROUNDS = [0.05, 0.1, 0.2], 3, 40


def build(learning_rate):
    algorithm = fedavg(learning_rate, local_steps=2)
    return Setup(quadratic(6, 2, mu=0.05), algorithm, mfa_rand(6, 2))


def swept(execution=None, **options):
    axes = {"learning_rate": RATES}
    return sweep(Grid(build, axes, num_rounds=ROUNDS, num_seeds=SEEDS, **options), execution)


def test_a_finished_batch_computes_no_further_segment():
    """All runs meet the target at the start, so only one segment is computed."""
    seen = []

    def report(label, done, total):
        seen.append((label, done))

    execution = Execution(callbacks=[progress(report)])
    result = swept(until=Until("excess_loss", at_most=1e9), execution=execution)
    assert (result.ended == 0).all()
    assert result.excess_loss.isel(round=0).notnull().all()
    assert result.excess_loss.isel(round=slice(1, None)).isnull().all()
    assert (result.client_updates == 0).all()
    computed = [done for label, done in seen if label.startswith("run")]
    assert computed == [0, ROUNDS * SEEDS * len(RATES) * 6]  # one segment


def test_the_loop_on_the_device_stops_at_a_count():
    until = Until("client_updates", at_least=44)
    (program,) = programs_of(Grid(build, {"learning_rate": RATES}, ROUNDS, SEEDS, until=until))
    runs, block = SEEDS * len(RATES), Block(*program.shape, 0)
    given, _, state = program.inputs(layout(1), block, 0)
    segment = jax.jit(functools.partial(program.segment, None, block))
    replica, _ = segment(given, (0, ROUNDS), state)
    np.testing.assert_array_equal(replica.total.client_updates, np.full((runs, 2), 45))


def test_a_value_equal_to_the_bound_meets_it():
    values = {"loss": np.array([[0.6], [0.5], [0.4]])}
    assert Until("loss", at_most=0.5).first_record(values) == 1
    assert Until("loss", at_least=0.6).first_record(values) == 0
    exact = {"updates": np.array([[20_000_000], [20_000_001]], np.int32)}  # equal in float32
    for counts in (exact, {"updates": jnp.asarray(exact["updates"])}):
        _, is_met = Until("updates", 20_000_001.0).after((), counts)
        np.testing.assert_array_equal(is_met, [False, True])


SETTINGS = {
    "task": {"name": "quadratic", "num_clients": 6, "block_size": 2, "mu": 0.05},
    "num_models": 2,
    "num_rounds": 5,
    "num_seeds": 2,
    "assignment": {"name": "mfa_rand"},
    "algorithms": {"Rand": {"learning_rate": 0.1, "local_steps": 2}},
}


def test_a_file_may_have_a_target():
    result = run(
        Experiment.model_validate(SETTINGS | {"until": {"metric": "loss", "at_most": 1e9}})
    )
    assert (result.ended == 0).all()


def test_wrong_targets_are_refused():
    for until, says in [
        ({"metric": "excess_loss"}, "give one"),
        ({"metric": "excess_loss", "at_least": 1.0, "at_most": 2.0}, "give one"),
        ({"metric": "excess_loss", "at_least": float("nan")}, "finite"),
    ]:
        with pytest.raises(ValueError, match=says):
            Experiment.model_validate(SETTINGS | {"until": until})


def test_a_metric_that_is_not_recorded_is_refused_before_compilation():
    says = "'accuracy'; .* metrics are client_updates, distance, excess_loss, gradients, idle"
    with pytest.raises(ValueError, match=says):
        swept(until=Until("accuracy", at_least=0.9))
    with pytest.raises(ValueError, match="give one"):
        swept(until=Until("loss"))
    with pytest.raises(ValueError, match="client_updates, which grows; give at_least"):
        swept(until=Until("client_updates", at_most=100))
    with pytest.raises(ValueError, match=r"at_least is 1e\+12; counts go up to 2147483647"):
        swept(until=Until("gradients", at_least=1e12))
