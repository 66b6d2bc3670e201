"""Mean estimation: the task, its local minimizer, and verdicts on the paper's statements."""

import json
import re
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from matplotlib.backends.backend_agg import FigureCanvasAgg

from fedjax_mm import fedavg, full_participation, local_sgd, maxfl, simulate
from fedjax_mm.base import Batching, Task
from fedjax_mm.base.capabilities import AnalyticTask
from fedjax_mm.claims import mean_above
from fedjax_mm.cli import main
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS
from fedjax_mm.papers.cho2022 import fig5a, fig5b
from fedjax_mm.papers.cho2022.fig5a import TwoClients, exact_appeal
from fedjax_mm.papers.cho2022.fig5b import Landscape, critical_gamma_hat, middle_difference
from fedjax_mm.papers.cho2022.fig6 import ThreeClients
from fedjax_mm.papers.cho2022.fig8 import Rate
from fedjax_mm.papers.rulings import Ruling, ruling
from fedjax_mm.tasks import (
    draw_means,
    local_minimum,
    log_objective,
    maxfl_objective,
    mean_estimation,
)
from fedjax_mm.tasks.mean_estimation import OBJECTIVES
from fedjax_mm.tasks.view import client_losses, thresholds
from tests.compiling import optimised
from tests.helpers import slow_unless
from tests.oracles import multi_model as reference

pytestmark = pytest.mark.usefixtures("x64")

THETA = np.array([0.0, 0.0, 6.0])
THETA_HAT = np.array([0.8, -0.7, 6.3])


def verdicts(findings):
    """Maps keys of statements to verdicts, and lists whether each check passed."""
    found = {each.key: each.verdict for each in findings.statements}
    return found, [each.outcome == "passed" for each in findings.checks]


def contradicted(findings):
    """The keys of contradicted statements, if all others are supported."""
    found, _ = verdicts(findings)
    assert set(found.values()) <= {"supported", "contradicted"}
    return {key for key, verdict in found.items() if verdict == "contradicted"}


def judge(name, dataset, config):
    return ITEMS[f"maxfl-{name}"].findings(dataset, config)


def run_and_judge(name, config):
    dataset = ITEMS[f"maxfl-{name}"].make(config)
    return dataset, config, judge(name, dataset, config)


@partial(jax.jit, static_argnames="count")
def draws(true_means, count):
    def one(rng_key):
        draw_key, start_key = jax.random.split(rng_key)
        task = mean_estimation(true_means, draw_means(draw_key, true_means))
        return task, task.init(start_key)

    return jax.vmap(one)(jax.random.split(jax.random.key(0), count))


@jax.jit
def search(tasks, starts):
    """MaxFL's local minimum downhill from the start, for every draw."""
    return jax.vmap(lambda task, w: local_minimum(partial(maxfl_objective, task), w))(tasks, starts)


# The task


def test_mean_estimation_is_an_analytic_task():
    task = mean_estimation(THETA, THETA_HAT)
    assert isinstance(task, Task)
    assert isinstance(task, AnalyticTask)
    assert task.num_clients == 3
    assert float(task.weight(jnp.int32(2))) == 1
    assert task.batch(jax.random.key(0), jnp.int32(2), jnp.int32(0), Batching()) == 2


def test_losses_gradients_and_metrics():
    task = mean_estimation(THETA, THETA_HAT)
    for w in (-1.3, 0.05, 7.0):
        losses = reference.mean_estimation_losses(w, THETA, THETA_HAT)
        for k in range(3):
            loss, gradient = jax.value_and_grad(task.loss)(jnp.asarray(w), jnp.int32(k))
            assert loss == pytest.approx(losses[k], rel=1e-14)
            assert gradient == pytest.approx(2 * (w - THETA_HAT[k]), rel=1e-14)
        metrics = task.metrics(jax.random.key(0), jnp.asarray(w))
        mean = THETA_HAT.mean()
        optimum = reference.mean_estimation_losses(mean, THETA, THETA_HAT).mean()
        assert metrics["loss"] == pytest.approx(losses.mean(), rel=1e-14)
        assert metrics["excess_loss"] == pytest.approx(losses.mean() - optimum, rel=1e-12)
        assert metrics["distance"] == pytest.approx(abs(w - mean), rel=1e-14)
        satisfied = reference.satisfied_clients(w, THETA, THETA_HAT)
        assert task.satisfied(jnp.asarray(w)).tolist() == satisfied
        assert metrics["appeal"] == pytest.approx(np.mean(satisfied))
    own = [
        reference.mean_estimation_losses(w, THETA, THETA_HAT)[k] for k, w in enumerate(THETA_HAT)
    ]
    np.testing.assert_allclose(task.requirements, own, rtol=1e-14)


def test_closed_form_of_local_steps():
    task = mean_estimation(THETA, THETA_HAT)
    w = np.array(2.5)
    for k in range(3):
        local = reference.full_gradient_steps(lambda w, e, k=k: 2 * (w - THETA_HAT[k]), w, 0.1, 4)
        update = task.local_sgd(jnp.asarray(w), jnp.int32(k), 0.1, 4)
        assert update == pytest.approx(float(local - w), rel=1e-12)


def test_federated_averaging_finds_the_mean():
    task = mean_estimation(THETA, THETA_HAT)
    algorithm = fedavg(0.1, local_steps=3)
    run = jax.jit(lambda key: simulate(key, task, algorithm, full_participation(3), 40)[1])
    trace = run(jax.random.key(0))
    assert trace.metrics["distance"].ravel()[-1] < 1e-10
    assert trace.metrics["appeal"].ravel()[-1] == 0


@pytest.mark.parametrize(
    ("weight", "end", "satisfied"),
    [("derivative", 0.05, [True, True, False]), ("sigmoid", 2.19, [False, False, False])],
)
@pytest.mark.parametrize("local_steps", [1, 5])
def test_maxfl_converges_to_a_minimum_of_its_objective(weight, end, satisfied, local_steps):
    """It starts at the mean. Clients have F_k >= rho_k, but are satisfied by their true losses."""
    task = mean_estimation(THETA, THETA_HAT)
    algorithm = maxfl(local_sgd(0.05, steps=local_steps), weight=weight)
    how = {"num_rounds": 400, "params": task.minimizer}
    run = jax.jit(lambda key: simulate(key, task, algorithm, full_participation(3), **how))
    state, trace = run(jax.random.key(0))
    w = state.models[0].params[0]
    assert float(w) == pytest.approx(end, abs=5e-3)
    assert task.satisfied(w).tolist() == satisfied
    assert trace.metrics["appeal"][-1, 0] == pytest.approx(np.mean(satisfied))
    assert (client_losses(task, w) >= thresholds(task)).all()


def test_the_start_is_the_mean_with_a_small_jitter():
    task = mean_estimation(THETA, THETA_HAT)
    starts = jax.vmap(task.init)(jax.random.split(jax.random.key(0), 1000))
    jitter = np.asarray(starts) - THETA_HAT.mean()
    assert 0.9e-3 < jitter.std() < 1.1e-3
    assert abs(jitter.mean()) < 4 * 1e-3 / np.sqrt(1000)
    with jax.enable_x64(False):
        single = mean_estimation(THETA, THETA_HAT).init(
            jax.random.split(jax.random.key(0), 1000)[7]
        )
    assert single.dtype == np.float32
    assert float(single) == pytest.approx(float(starts[7]), abs=1e-6)


def test_draws_have_the_given_means_and_spread():
    keys = jax.random.split(jax.random.key(1), 20_000)
    values = np.asarray(jax.vmap(draw_means, (0, None, None))(keys, THETA, 0.5))
    np.testing.assert_allclose(values.mean(0), THETA, atol=4 * 0.5 / np.sqrt(20_000))
    np.testing.assert_allclose(values.std(0), 0.5, rtol=4 / np.sqrt(2 * 20_000))
    assert np.abs(np.corrcoef(values.T) - np.eye(3)).max() < 4 / np.sqrt(20_000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_estimation([], []), r"shapes \(0,\) and \(0,\)"),
        (lambda: mean_estimation([0.0, 1.0], [0.0]), r"shapes \(2,\) and \(1,\)"),
        (lambda: mean_estimation(0.0, 0.0), r"shapes \(\) and \(\)"),
        (lambda: mean_estimation([0.0, np.nan], [0.0, 1.0]), "true_means is"),
        (lambda: mean_estimation([0.0], [np.inf]), "empirical_means is"),
        (lambda: draw_means(jax.random.key(0), [0.0], 0.0), "gamma is 0.0"),
        (lambda: local_minimum(jnp.cos, 0.1, tolerance=0.0), "tolerance is 0.0"),
        (lambda: local_minimum(jnp.cos, 0.1, max_step=-1.0), "max_step is -1.0"),
        (lambda: local_minimum(jnp.cos, 0.1, max_steps=0), "max_steps is 0"),
        (lambda: local_minimum(jnp.cos, 0.1, scale=-1.0), "scale is -1.0"),
        (
            lambda: mean_estimation([0.0], [0.0]).batch(
                jax.random.key(0), jnp.int32(0), jnp.int32(0), Batching(10)
            ),
            "batch_size is 10; mean estimation has no examples",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Objectives


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_of_the_objectives(name):
    """Includes clients that are far enough for 1 - sigma to round to 0."""
    for theta_hat in (THETA_HAT, 9 * THETA_HAT, np.array([-7.0, 7.0])):
        task = mean_estimation(np.zeros_like(theta_hat), theta_hat)
        for w in (-0.3, 1e-3, 2.0):
            gradient = jax.grad(partial(OBJECTIVES[name], task))(w)
            expected = reference.mean_estimation_gradient(w, theta_hat, name)
            assert gradient == pytest.approx(expected, rel=1e-11, abs=0)
            assert expected != 0


def test_values_of_the_objectives():
    task = mean_estimation(THETA, THETA_HAT)
    w = 0.3
    losses = reference.mean_estimation_losses(w, THETA, THETA_HAT)
    gap = losses - (THETA_HAT - THETA) ** 2
    expected = {
        "FedAvg": losses.mean(),
        "MaxFL": reference.sigmoid(gap).mean(),
        "MaxFL (ReLU)": np.maximum(gap, 0).mean(),
        "MaxFL (log loss)": np.log1p(np.exp(gap)).mean(),
    }
    assert {name: float(fn(task, w)) for name, fn in OBJECTIVES.items()} == pytest.approx(expected)


# The minimizer


@pytest.mark.parametrize(
    "true_means",
    [
        slow_unless(means in ((0, 0), (0, 9), (0, 4, 8)), means)
        for means in ((0, 0), (0, 2), (0, 4), (0, 9), (0, 0, 0), (0, 4, 8), (0, 0, 6))
    ],
    ids=str,
)
def test_the_minimum_agrees_with_a_walk_on_a_dense_grid(true_means):
    count = 25
    tasks, starts = draws(np.array(true_means, float), count)
    found = search(tasks, starts)
    assert found.converged.all()
    expected = [
        reference.valley(np.asarray(tasks.empirical_means[i]), "MaxFL", float(starts[i]))
        for i in range(count)
    ]
    np.testing.assert_allclose(found.point, expected, atol=1e-8)
    assert np.all(np.asarray(found.curvature) > 0)
    assert np.abs(found.gradient).max() < 1e-9


def test_the_first_minimum_downhill_is_found_from_every_start():
    """The function is a sine on a slope, with a minimum in each period."""
    starts = np.linspace(-10, 10, 401)
    found = jax.jit(jax.vmap(partial(local_minimum, lambda w: jnp.sin(w) + w / 10)))(starts)
    minimum = -np.arccos(-0.1) + 2 * np.pi * np.arange(-3, 4)  # cos w = -1/10 and sin w < 0
    maximum = minimum + 2 * np.arccos(-0.1)
    expected = minimum[np.searchsorted(maximum, starts)]
    assert found.converged.all()
    np.testing.assert_allclose(found.point, expected, atol=1e-9)


@pytest.mark.parametrize(
    ("fn", "start", "point"),
    [
        (lambda w: w**4, 3.0, 0.0),  # no curvature at the minimum
        (jnp.abs, 3.0, 0.0),  # a kink
        (lambda w: -jnp.exp(-((w - 3) ** 2)), -3.0, 3.0),  # a flat start
        (lambda w: (w - 1) ** 2, 1.0, 1.0),  # starts at the minimum
        (lambda w: jnp.maximum(w, -2 * w) + w**2, -5.0, 0.0),
    ],
)
def test_hard_functions(fn, start, point):
    found = local_minimum(fn, start)
    assert found.converged
    assert found.point == pytest.approx(point, abs=1e-9)


@pytest.mark.parametrize(
    ("fn", "start", "steps"),
    [
        (lambda w: -(w**2), 0.0, 0),  # exactly on a maximum
        (lambda w: 0.0 * w, 1.0, 0),  # flat
        (lambda w: -w, 0.0, 50),  # unbounded below
        (lambda w: jnp.exp(-w), 0.0, 50),
        (lambda w: jnp.log(w) * jnp.nan, 1.0, 50),
    ],
)
def test_failed_descents_are_reported(fn, start, steps):
    found = local_minimum(fn, start, max_steps=50)
    assert not found.converged
    assert found.num_steps == steps


def test_a_minimum_close_to_zero_has_a_small_relative_error():
    """Minima range down to 1e-300 in size."""
    for u in (1e-3, 1e-12, 1e-30, 1e-300, -1e-30):
        found = local_minimum(lambda w, u=u: (w / u - 1) ** 2 * abs(u), 1e-10, scale=0.0)
        assert found.converged
        assert found.point == pytest.approx(u, rel=1e-9, abs=0)


def test_single_precision_finds_the_same_minima():
    double = search(*draws(np.array([0.0, 6.0]), 300)).point
    with jax.enable_x64(False):
        tasks, starts = draws(np.array([0.0, 6.0]), 300)
        assert starts.dtype == np.float32
        found = search(tasks, starts)
    assert found.converged.all()
    np.testing.assert_allclose(found.point, double, atol=1e-4)


def test_the_middle_is_a_minimum_up_to_a_critical_distance():
    """Beyond half a distance of 1.0216, descents leave the middle to either side."""
    assert critical_gamma_hat() == pytest.approx(1.0216, abs=5e-5)
    for half, stays in ((1.0215, True), (1.0217, False)):
        task = mean_estimation([0.0, 0.0], [-half, half])
        curvature = jax.grad(jax.grad(partial(maxfl_objective, task)))(0.0)
        assert (curvature > 0) == stays
        for start in (-1e-5, 1e-5):
            found = local_minimum(partial(maxfl_objective, task), start)
            assert found.converged
            assert (abs(found.point) < 1e-6) == stays
            assert stays or np.sign(found.point) == np.sign(start)


def test_the_printed_example_descends_to_the_similar_clients():
    """Weights sigma (1 - sigma) satisfy clients 1 and 2, but the printed weights sigma none."""
    task = mean_estimation(THETA, THETA_HAT)
    found = local_minimum(partial(maxfl_objective, task), task.minimizer)
    assert float(found.point) == pytest.approx(0.05, abs=5e-3)
    assert task.satisfied(found.point).tolist() == [True, True, False]
    printed = local_minimum(partial(log_objective, task), task.minimizer)
    assert float(printed.point) == pytest.approx(2.19, abs=5e-3)
    assert task.satisfied(printed.point).tolist() == [False, False, False]


# Figures 5(a) and 6: acceptance

SQUARES = range(21)


@pytest.fixture(scope="module")
def two():
    """Figure 5(a) with its defaults: result, config, findings, and CPU seconds."""
    start = time.process_time()
    with optimised():  # satisfied clients may depend on the last digit
        findings = run_and_judge("fig5a", ITEMS["maxfl-fig5a"].settings)
    return *findings, time.process_time() - start


def test_figure_5a_takes_less_than_a_minute(two):
    _, config, findings, seconds = two
    assert seconds < 60
    assert config == TwoClients(gamma_g_squared=tuple(SQUARES), num_seeds=10_000)
    assert contradicted(findings) == {"at-least-one"}
    assert verdicts(findings)[1] == [True, True]


def test_the_exact_appeal_equals_a_double_integral():
    gammas = np.sqrt([0.0, 1.0, 4.0, 9.0])
    expected = [reference.probability_satisfied_by_the_mean(gamma) for gamma in gammas]
    np.testing.assert_allclose(exact_appeal(gammas, 1.0), expected, rtol=2e-3)
    np.testing.assert_allclose(exact_appeal(gammas / 2, 0.5), exact_appeal(gammas, 1.0))
    # At gamma_G = 0, b - a and b + 3 a have opposite signs and correlation -1/sqrt(5).
    assert exact_appeal(0.0, 1.0) == pytest.approx(0.5 + np.arcsin(1 / np.sqrt(5)) / np.pi)


def test_the_appeal_of_federated_averaging_is_the_exact_probability(two):
    dataset, config, *_ = two
    first = dataset.satisfied.sel(objective="FedAvg", client=1).mean("draw").values
    for i, square in list(enumerate(SQUARES))[::5]:
        p = reference.probability_satisfied_by_the_mean(np.sqrt(square))
        assert abs(first[i] - p) < 4 * np.sqrt(p * (1 - p) / config.num_seeds) + 2e-3 * p


def test_federated_averaging_is_below_lemma_a_1(two):
    bound = 2 * np.exp(-np.array(SQUARES) / 5)
    appeal = two[2].measured.appeal.sel(objective="FedAvg").values
    assert np.sum(bound < 1) == 17
    assert np.all(appeal[bound < 1] < bound[bound < 1])


def test_maxfl_is_above_theorem_a_1(two):
    numbers = two[2].measured.sel(objective="MaxFL")
    assert np.all(numbers.appeal - 40 * numbers.standard_error > np.exp(-1) / 16)


def test_the_relu_objective_is_minimized_by_the_mean(two):
    dataset = two[0]
    for name in ("FedAvg", "MaxFL (ReLU)", "MaxFL (log loss)"):
        distance = dataset.solution.sel(objective=name) - dataset.empirical_mean.mean("client")
        assert float(np.abs(distance).max()) < 1e-6
    distance = dataset.solution.sel(objective="MaxFL") - dataset.empirical_mean.mean("client")
    assert float(np.abs(distance).max()) > 1


def test_all_descents_converge_and_are_counted(two):
    dataset, _, findings, _ = two
    assert dataset.converged.all()
    assert dataset.solution.dtype == np.float64
    assert findings.measured.converged == findings.measured.descents == 4 * 21 * 10_000


@pytest.mark.parametrize(
    ("figure", "dim", "count"),
    [
        ("two", "gamma_g_squared", 2),
        ("three", "point", 2),
        slow_unless(False, "two", "gamma_g_squared", 6),
        slow_unless(False, "three", "point", 12),
    ],
)
def test_satisfied_clients_agree_with_the_oracle(figure, dim, count, request):
    """A minimum may be as close to a client's own model as e^-80, for gamma_G^2 = 20."""
    dataset, config, *_ = request.getfixturevalue(figure)
    least = 1.0
    for i in range(dataset.sizes[dim]):
        theta = np.array(config.points[i] if dim == "point" else [0.0, 2 * np.sqrt(SQUARES[i])])
        for name in ("FedAvg", "MaxFL"):
            at = dataset.isel({dim: i, "draw": slice(0, count)}).sel(objective=name)
            for r in range(count):
                theta_hat = at.empirical_mean.values[r]
                w = float(at.solution[r])
                assert w == pytest.approx(reference.valley(theta_hat, name, w + 1e-6), abs=1e-8)
                j = int(at.nearest[r]) - 1
                assert abs(w - theta_hat[j]) <= np.abs(w - theta_hat).min() + 1e-9
                u = reference.displacement(theta_hat, name, w, j)
                found = at.displacement.values[r]
                assert found == pytest.approx(u, rel=1e-8, abs=1e-15 if name == "FedAvg" else 0)
                least = min(least, abs(u))
                expected = reference.satisfied_near(u, j, theta, theta_hat)
                assert at.satisfied.transpose("draw", "client").values[r].tolist() == expected
    assert least < (1e-30 if figure == "two" else 1e-6)


def test_between_far_clients_the_appeal_is_one_quarter(two):
    """At large gamma_G the solution is next to one client's own model, on the inner side."""
    dataset, config, findings, _ = two
    for square in (12.0, 16.0, 20.0):
        appeal = findings.measured.appeal.sel({"gamma_G^2": square, "objective": "MaxFL"})
        assert appeal == pytest.approx(0.25, abs=4 * 0.25 / np.sqrt(config.num_seeds))
        at = dataset.sel(gamma_g_squared=square, objective="MaxFL")
        assert np.all(at.displacement * (3 - 2 * at.nearest) > 0)


def test_draws_depend_only_on_seed_point_and_number(two):
    for i, r in ((0, 0), (0, 1), (20, 0), (20, 9999)):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), i), r)
        theta = np.array([0.0, 2 * np.sqrt(i)])
        expected = draw_means(jax.random.fold_in(key, 0), theta)
        at = two[0].sel(gamma_g_squared=i, draw=r)
        np.testing.assert_allclose(at.empirical_mean, expected, rtol=1e-12)


@pytest.fixture(scope="module")
def three():
    config = ThreeClients(num_seeds=8000, case_2=((0, 4, 12), (0, 4, 8), (0, 6, 20)))
    return run_and_judge("fig6", config)


def test_the_mean_number_of_satisfied_clients_of_three(three):
    """With means (0, 0, 6), MaxFL satisfies 1.24 on average and FedAvg 0.17."""
    case = three[2].measured.sel(point="(0, 0, 6)", event="number satisfied")
    for name, mean in (("MaxFL", 1.24), ("FedAvg", 0.17)):
        at = case.sel(objective=name)
        assert at["mean"] == pytest.approx(mean, abs=4 * at.standard_error.item() + 5e-3)
    difference = case["mean"].sel(objective="MaxFL") - case["mean"].sel(objective="FedAvg")
    error = np.hypot(*(case.standard_error.sel(objective=name) for name in ("MaxFL", "FedAvg")))
    assert difference > 4 * error
    lead = case.sel(objective="MaxFL minus FedAvg")
    assert lead["mean"] == pytest.approx(difference.item())
    number = three[0].satisfied.isel(point=-1).sum("client")
    pairs = number.sel(objective="MaxFL") - number.sel(objective="FedAvg")
    assert lead.standard_error == pytest.approx(pairs.std(ddof=1).item() / np.sqrt(8000))
    assert three[0].solution.dtype == np.float64


def test_either_objective_may_satisfy_more_clients(three):
    """Client 2 is next to FedAvg's solution for (0, 4, 8), and far from it for (0, 6, 20)."""
    mean = three[2].measured["mean"].sel(event="at least one")
    spread = 4 * np.sqrt(0.25 / 8000) + 5e-3
    for point, theirs, ours in (
        ("(0, 4, 8)", 0.70, 0.20),
        ("(0, 4, 12)", 0.22, 0.45),
        ("(0, 6, 20)", 0.03, 0.50),
    ):
        at = mean.sel(point=point)
        assert at.sel(objective="FedAvg") == pytest.approx(theirs, abs=spread)
        assert at.sel(objective="MaxFL") == pytest.approx(ours, abs=spread)


def test_cases_of_figure_6_are_judged_over_draws(three):
    findings = three[2]
    assert contradicted(findings) == {
        *("case-1", "case-2-satisfied", "case-3-solution", "case-3-satisfied"),
    }
    parts = {
        (each.key, part.name.partition(":")[0]): part.verdict
        for each in findings.statements
        for part in each.parts
    }
    # Only means that are 5 gamma apart are "completely disparate".
    assert parts["case-2-solution", "(0, 6, 20)"] == "supported"
    assert ("case-2-solution", "(0, 4, 8)") not in parts
    # In no case does MaxFL satisfy a client in every draw, though in some in more than FedAvg.
    assert {verdict for (key, _), verdict in parts.items() if key == "case-2-satisfied"} == {
        "contradicted"
    }
    about = {each.key: each.about for each in findings.statements}
    assert "not in every draw" in about["case-1"]
    assert "(0, 4, 12): 0.2" in about["case-2-satisfied"]
    assert "(0, 4, 8): -0.5" in about["case-2-satisfied"]


def test_means_over_draws_equal_shares_of_draws(three):
    dataset, config, findings = three
    for i, point in enumerate(findings.measured.point.values):
        for name in ("FedAvg", "MaxFL"):
            numbers = findings.measured.sel(point=point, objective=name)
            at = dataset.isel(point=i).sel(objective=name)
            satisfied = at.satisfied.transpose("draw", "client").values
            own, w = at.empirical_mean.transpose("draw", "client").values, at.solution.values
            events = {
                "none": ~satisfied.any(1),
                "at least one": satisfied.any(1),
                "clients 1 and 2": satisfied[:, 0] & satisfied[:, 1],
                "at the average": abs(w - own.mean(1)) <= 0.1,
                "at a client's model": (abs(w[:, None] - own) <= 0.1).any(1),
                "at the average of 1 and 2": abs(w - own[:, :2].mean(1)) <= 0.1,
            }
            for event, happened in events.items():
                p = happened.mean()
                found = numbers.sel(event=event)
                assert found["mean"] == pytest.approx(p)
                error = np.sqrt(p * (1 - p) / (config.num_seeds - 1))
                assert found.standard_error == pytest.approx(error)


def test_the_example_of_case_3_is_the_single_draw(three):
    example = three[2].measured.sel(point="(0, 0, 6)")
    np.testing.assert_allclose(example.example_empirical_mean, THETA_HAT)
    satisfied = example.example_satisfied
    assert satisfied.sel(objective="MaxFL").values.tolist() == [True, True, False]
    assert not satisfied.sel(objective="FedAvg").any()


# Verdicts follow the numbers


def test_exchanged_objectives_contradict_figure_5a(two):
    dataset, config, *_ = two
    names = {"FedAvg": "MaxFL", "MaxFL": "FedAvg"}
    labels = [names.get(name, name) for name in dataset.objective.values]
    findings = judge("fig5a", dataset.assign_coords(objective=labels), config)
    # Lemma A.1 is judged by the exact appeal. A check compares that with the draws.
    assert contradicted(findings) == {"fedavg-decays", "theorem-a-1", "at-least-one"}
    assert verdicts(findings)[1] == [False, True]


def test_changed_solutions_contradict_figure_5a(two):
    dataset, config, *_ = two
    shifted = dataset.assign(solution=dataset.solution + 1e-5)
    assert {"relu", "lemma-a-2"} <= contradicted(judge("fig5a", shifted, config))
    lost = dataset.assign(converged=dataset.converged.copy(data=dataset.converged.values.copy()))
    lost.converged[3, 5, 1] = False
    assert verdicts(judge("fig5a", lost, config))[1] == [True, False]


def test_exponential_decay_is_told_from_a_power_law():
    squares = np.arange(21.0)
    falling = xr.DataArray(0.6 * 0.8**squares, {"gamma_G^2": squares})
    assert fig5a._decay(falling)[0] is True
    assert fig5a._decay(1 / (1 + falling["gamma_G^2"]))[0] is False  # a power law
    assert fig5a._decay(falling[::10])[0] is None  # only one slope in the upper half


def test_exchanged_objectives_change_the_verdicts_on_figure_6(three):
    dataset, config, _ = three
    names = {"FedAvg": "MaxFL", "MaxFL": "FedAvg"}
    labels = [names.get(name, name) for name in dataset.objective.values]
    findings = judge("fig6", dataset.assign_coords(objective=labels), config)
    assert contradicted(findings) == {
        *("case-2-solution", "case-2-satisfied", "case-3-solution", "case-3-satisfied"),
    }


def test_means_over_draws_are_judged_by_their_errors():
    mean = xr.DataArray([0.5, 0.5, 0.5, 1.0], {"event": list("abcd")})
    error = xr.DataArray([0.1, 0.01, 0.2, 0.0], {"event": list("abcd")})
    found = ruling("key", mean_above(mean, error, 0.6, 100))
    assert [part.verdict for part in found.parts] == [
        *("not settled", "contradicted", "not settled", "supported"),
    ]
    assert found.parts[0].seeds == 100


# Figures 5(b) and 8


def test_the_landscape_has_one_minimum_and_then_two():
    """Just below the critical point it has three."""
    config = Landscape(num_points=400, num_starts=11, largest=2.0)
    *_, findings = run_and_judge("fig5b", config)
    statements, checks = verdicts(findings)
    assert statements.pop("lemma-a-3") == "not tested"  # no gamma_hat exceeds 2
    assert set(statements.values()) == {"supported"}
    assert checks == [True, True]
    measured = findings.measured
    critical = measured.critical_gamma_hat
    three = measured.gamma_hat[measured.number == 3]
    np.testing.assert_allclose([three.min(), three.max()], [1.015, 1.02])
    for gamma, minima in zip(measured.gamma_hat.values, measured.minima, strict=True):
        found = minima.dropna("minimum").values
        assert len(found) == (1 if gamma < 1.0149 else 3 if gamma < critical else 2)
        assert np.all(np.diff(found) > 0)
        for point in found:
            gradients = [
                reference.mean_estimation_gradient(point + d, np.array([-gamma, gamma]), "MaxFL")
                for d in (-1e-4, 1e-4)
            ]
            assert gradients[0] < 0 < gradients[1]


@pytest.fixture(scope="module")
def landscape():
    return run_and_judge("fig5b", Landscape(num_points=20, num_starts=5))


def test_changed_minima_contradict_figure_5b(landscape):
    dataset, config, found = landscape
    assert contradicted(found) == set()
    shifted = judge("fig5b", dataset.assign(minimum=dataset.minimum + 1.0), config)
    assert contradicted(shifted) == {"collaboration", "separation"}
    keys = ("lemma-a-3", "equation-35")
    for bound, expected in ((99, ["contradicted"] * 2), (2, ["supported", "contradicted"])):
        # The middle is a minimum up to `bound`.
        middle = xr.where(found.measured.gamma_hat < bound, 1.0, -1.0)
        rulings = fig5b.judge(found.measured.assign(middle=middle), config)
        of = {each.key: each.verdict for each in rulings if isinstance(each, Ruling)}
        assert [of[key] for key in keys] == expected
    outside = judge("fig5b", dataset.assign(displacement=-dataset.displacement), config)
    assert contradicted(outside) == {"lemma-a-4"}
    lost = dataset.assign(converged=dataset.converged & (dataset.start < 0.9))
    assert verdicts(judge("fig5b", lost, config))[1] == [True, False]


def test_statements_outside_the_searched_range_are_not_tested():
    config = Landscape(num_points=4, num_starts=3, largest=0.9)
    found, _ = verdicts(run_and_judge("fig5b", config)[2])
    expected = {"collaboration": "supported", "lemma-a-4": "supported"}
    others = ("separation", "lemma-a-3", "equation-35")
    assert found == expected | dict.fromkeys(others, "not tested")


@pytest.mark.parametrize("gamma_hat", [0.3, 1.0, 1.0215, 1.0217, 2.0, 6.0, 40.0])
def test_the_sign_of_the_middle_changes_at_the_critical_distance(gamma_hat):
    assert middle_difference(np.array([gamma_hat])) == (1 if gamma_hat < 1.0216 else -1)


@pytest.fixture(scope="module")
def rate():
    return run_and_judge("fig8", Rate(num_rounds=600, num_starts=21))


def test_the_adaptive_rate_is_high_in_flat_regions(rate):
    dataset, config, findings = rate
    assert contradicted(findings) == set()
    # eta N / (sum q + eps), at a few places
    for gamma in config.gamma_hat:
        for i in (0, 250, 400, 511):
            w = float(dataset.w[i])
            gaps = (w - np.array([-gamma, gamma])) ** 2
            q = reference.mean_estimation_weights(gaps, "MaxFL")
            assert dataset.rate.sel(gamma_hat=gamma)[i] == pytest.approx(0.5 * 2 / (q.sum() + 1e-2))
    # One round of MaxFL: w - eta_g / (sum q + eps) sum q_k Delta_k, Delta_k = eta_l grad F_k.
    path = dataset.path.sel(gamma_hat=3.0, rule="adaptive").isel(start=4).values
    gradients = 2 * (path[0] - np.array([-3.0, 3.0]))
    q = reference.mean_estimation_weights(gradients**2 / 4, "MaxFL")
    assert path[1] == pytest.approx(path[0] - 0.5 * (q @ gradients) / (q.sum() + 1e-2), rel=1e-12)
    exchanged = dataset.assign_coords(rule=dataset.rule.values[::-1])
    assert contradicted(judge("fig8", exchanged, config)) == {"global-smoothness"}
    inverse = judge("fig8", dataset.assign(rate=1 / dataset.rate), config)
    assert contradicted(inverse) == {"flat-regions"}


# Figures and the command line


@pytest.fixture(params=["two", "three", "landscape", "rate"])
def drawn(request):
    dataset, config, findings, *_ = request.getfixturevalue(request.param)
    names = {"two": "fig5a", "three": "fig6", "landscape": "fig5b", "rate": "fig8"}
    item = ITEMS[f"maxfl-{names[request.param]}"]
    return request.param, item.figure(dataset, findings.measured, config)


def test_figures_have_their_panels_within_the_page(drawn):
    name, figure = drawn
    FigureCanvasAgg(figure).draw()
    assert len(figure.axes) == {"two": 2, "three": 4, "landscape": 2, "rate": 2}[name]
    for axes in figure.axes:
        panel = axes.get_tightbbox()
        assert 0 <= panel.y0 < panel.y1 <= figure.bbox.y1
        assert figure.bbox.x0 <= panel.x0 < panel.x1 <= figure.bbox.x1
        assert axes.get_xlabel()
        assert axes.get_ylabel()


def test_figure_5a_shows_the_bounds(two):
    dataset, config, findings, _ = two
    figure = ITEMS["maxfl-fig5a"].figure(dataset, findings.measured, config)
    for axes in figure.axes:
        lines = {bars.get_label(): bars[0].get_xydata().T for bars in axes.containers}
        for label in OBJECTIVES:
            appeal = findings.measured.appeal.sel(objective=label)
            np.testing.assert_allclose(lines[label][1], appeal)
        (upper,) = (xy for label, xy in lines.items() if "Lemma A.1" in label)
        bound = 2 * np.exp(-upper[0] / 5)  # drawn only up to 1
        np.testing.assert_allclose(upper[1], np.where(bound <= 1, bound, np.nan))
        (lower,) = (xy for label, xy in lines.items() if "Theorem A.1" in label)
        np.testing.assert_allclose(lower[1], np.exp(-1) / 16)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("maxfl-fig5b", {"searched_gamma_hat": 200, "start": 41, "gamma_hat": 4}),
        slow_unless(False, "maxfl-fig8", {"gamma_hat": 2, "rule": 2, "round": 3001}),
    ],
)
def test_the_command_line_writes_the_files(name, sizes, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        main(["--no-cache", "reproduce", name, "--out", str(tmp_path)])
    assert exit_.value.code == 0
    summary = json.loads((tmp_path / name / "summary.json").read_text())
    assert summary["data"] == "synthetic"
    assert {each["verdict"] for each in summary["statements"]} == {"supported"}
    assert set(summary["manifest"]["wall_seconds"]) == {"compile", "run"}
    assert (tmp_path / name / "figure.png").stat().st_size > 10_000
    with xr.open_dataset(tmp_path / name / "result.nc") as dataset:
        assert {dim: dataset.sizes[dim] for dim in sizes} == sizes


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("maxfl-fig5a", "num_seeds=1", "num_seeds = 1"),
        ("maxfl-fig5a", "gamma_g_squared=[1, 200]", "less than or equal to 100"),
        ("maxfl-fig5a", "gamma_g_squared=[1, 2, 1]", "give each once"),
        ("maxfl-fig5a", "gamma=0.0", "gamma = 0.0"),
        ("maxfl-fig6", "case_1=[1, inf, 2]", "input should be a finite number"),
        ("maxfl-fig6", "case_1=[1, 2]", "case_1.2: missing"),
        ("maxfl-fig5b", "largest=-1.0", "largest"),
        ("maxfl-fig8", "epsilon=0.0", "epsilon"),
        ("maxfl-fig8", "gamma_hat=[0.5, 0.5]", "give each once"),
    ],
)
def test_wrong_settings_are_refused(name, settings, message):
    config = ITEMS[name].settings
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(type(config), config.model_dump(), [settings])
