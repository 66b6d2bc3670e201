"""Golden values of the papers and of the specification, through the public API."""

import jax
import numpy as np
import pytest

from fedjax_mm import fedavg, full_participation, mfa_rand, mfa_rr, simulate
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.run import run
from fedjax_mm.metrics import log_gap
from fedjax_mm.schedules import inverse_time
from fedjax_mm.tasks import quadratic
from tests.helpers import slow_unless

PRECISIONS = {"float64": 1e-10, "float32": 1e-4}


@pytest.fixture(params=PRECISIONS)
def tolerance(request):
    with jax.enable_x64(request.param == "float64"):
        yield PRECISIONS[request.param]


def losses(num_clients, learning_rate, local_steps, num_rounds):
    task = quadratic(num_clients, 4, mu=2e-4)
    algorithm = fedavg(learning_rate, local_steps=local_steps)
    assignment = full_participation(num_clients)

    def program(rng_key, task):
        return simulate(rng_key, task, algorithm, assignment, num_rounds)[1].metrics["loss"]

    return np.asarray(jax.jit(program)(jax.random.key(0), task))[:, 0]


def test_minimum(tolerance):
    task = quadratic(24, 4, mu=2e-4)
    assert float(task.optimum) == pytest.approx(-0.019439088226487246, rel=tolerance)
    norm = float(np.linalg.norm(np.asarray(task.minimizer, np.float64)))
    assert norm == pytest.approx(2.594153371647943, rel=tolerance)


@pytest.mark.parametrize(
    ("learning_rate", "golden"),
    [
        (
            0.1,
            {
                1: -0.0005890037832118515,
                10: -0.004798407453259831,
                100: -0.01488678771283236,
                1000: -0.018674610791027203,
            },
        ),
        (inverse_time(30.0, 100.0), {1: -0.0009950133546211533, 1000: -0.018415527622596135}),
    ],
    ids=["constant", "decaying"],
)
def test_fedavg(learning_rate, golden, tolerance):
    measured = losses(24, learning_rate, 5, 1000)
    for t, value in golden.items():
        assert measured[t] == pytest.approx(value, rel=tolerance), f"round {t}"


@pytest.mark.parametrize(
    ("local_steps", "golden"),
    [
        (1, {1: -0.1471936, 2: -0.252835739402, 10: -0.578767179587, 100: -0.857986570424}),
        (
            100,
            {1: -0.319106926718, 2: -0.488102718513, 10: -0.69650548592, 100: -0.838545733933},
        ),
    ],
)
def test_published_traces_of_li_et_al(local_steps, golden, tolerance):
    measured = 2 * 5 * losses(5, 0.4, local_steps, 100)
    for t, value in golden.items():
        assert measured[t] == pytest.approx(value, rel=tolerance), f"round {t}"


@pytest.mark.parametrize(
    ("num_models", "at_least", "num_rounds"),
    [(2, 10, 400), slow_unless(False, 12, 3, 1000), slow_unless(False, 2, 10, 1000)],
)
def test_round_robin_collapses_the_spread(num_models, at_least, num_rounds):
    """Standard deviation over 20 seeds of the gap, averaged over the last 200 rounds."""
    algorithms = {
        label: {"assignment": {"name": label}, "learning_rate": 0.1, "local_steps": 5}
        for label in ("mfa_rand", "mfa_rr")
    }
    experiment = Experiment.model_validate(
        {
            "task": {"name": "quadratic"},
            "num_models": num_models,
            "num_rounds": num_rounds,
            "algorithms": algorithms,
        }
    )
    gaps = log_gap(run(experiment).excess_loss.transpose("algorithm", "model", "round", "seed"))
    spread = gaps[..., -200:, :].std(axis=-1, ddof=1).mean(axis=-1)  # algorithm, model
    assert (spread[0] > at_least * spread[1]).all(), "for every one of the models"


def test_models_differ_and_seeds_differ():
    task = quadratic(24, 4, mu=2e-4)

    @jax.jit
    @jax.vmap
    def ends(rng_key):
        assignments, algorithm = (mfa_rand(24, 3), mfa_rr(24, 3)), fedavg(0.1, local_steps=5)
        traces = [simulate(rng_key, task, algorithm, each, 10)[1] for each in assignments]
        return [trace.metrics["loss"][-1] for trace in traces]

    for one, other in map(np.asarray, ends(jax.vmap(jax.random.key)(np.array([1, 2])))):
        assert len(np.unique(one)) == 3
        assert (one != other).any()
