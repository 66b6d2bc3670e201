"""Bounds against sweeps: mistakes are found, and theorems have the numbers of their items."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, local_sgd, maxfl, mfa_rand, mfa_rr
from fedjax_mm.papers.bhuyan2022 import bounds
from fedjax_mm.papers.cho2022 import theorem_3_1
from fedjax_mm.schedules import inverse_time, per_frame
from fedjax_mm.sweeps import Setup
from fedjax_mm.tasks import least_squares, quadratic, with_metrics
from fedjax_mm.theory import Rate, mfa, require, validate
from fedjax_mm.theory import maxfl as theory

B = np.array([0.0, 1.0, 2.0, 5.0])


def build(eta):
    """Clients (w - b)^2, of which two are drawn in each round."""
    root = 2.0**0.5
    task = least_squares([np.full((1, 1), root)] * 4, list(root * B[:, None]), ridge=1e-6)
    return Setup(task, fedavg(eta, local_steps=1), mfa_rand(4, 1, cohort_size=2))


def recursion(round, problem, start, eta, ddof=1):
    """The mean squared distance, if the variance has ``ddof=1``."""
    require("the bound", {"eta < 1/L": eta < 1 / problem.L}, eta=eta, L=problem.L)
    kept = (1 - eta * problem.mu) ** (2 * round)
    noise = B.var(ddof=ddof) / 2 * (1 - 2 / problem.N)
    return kept * start + noise * (1 - kept) * eta * problem.L / (2 - eta * problem.L)


def test_a_mistake_in_a_constant_is_found_with_the_number_of_seeds():
    axes, how = {"eta": [0.3, 0.6]}, {"num_rounds": 12, "measure": lambda runs: runs.distance**2}
    right = validate(recursion, build, axes, num_seeds=600, **how)
    assert not right.violated.any()
    assert right.outside[0] == ""
    assert "eta < 1/L" in right.outside[1].item()
    assert right.bound.isel(eta=1).isnull().all()
    mistaken = partial(recursion, ddof=0)
    wrong = validate(mistaken, build, axes, num_seeds=600, **how)
    assert wrong.violated.any()
    assert "1 of 2 points are outside" in wrong.verdict
    # Fewer seeds would not show it, but the named number of other seeds would.
    seeds = int(wrong.seeds.min())
    assert 20 < seeds < 300
    few = validate(mistaken, build, axes, num_seeds=max(seeds // 10, 3), **how)
    assert not few.violated.any()
    again = validate(mistaken, build, axes, num_seeds=4 * seeds, first_seed=600, **how)
    assert again.violated.any()


@pytest.mark.parametrize(
    ("words", "bound", "changed"),
    [
        ("a parameter rate; name round, problem, start or axes: eta", lambda rate: rate, {}),
        ("num_seeds is 2; a standard error takes 3 or more", lambda eta: eta, {"num_seeds": 2}),
    ],
)
def test_wrong_bounds_are_refused(words, bound, changed):
    with pytest.raises(ValueError, match=words):
        validate(bound, build, {"eta": [0.3]}, **{"num_rounds": 2, "num_seeds": 3} | changed)


def gradient(task, params):
    clients = jnp.arange(task.num_clients)
    each = jax.vmap(jax.grad(task.loss), (None, 0))(params, clients)
    return {"gradient": jnp.linalg.norm(each, axis=1).max()}


@pytest.mark.parametrize("method", ["MFA-Rand", "MFA-RR, 1/N"])
def test_theorem_1_and_corollary_1_have_the_numbers_of_their_items(method):
    config = bounds.Bounds(
        algorithms=(method,),
        mu=(0.05,),
        num_models=(4,),
        local_steps=(5,),
        num_rounds=40,
        num_seeds=3,
    )
    expected = bounds.run_bounds(config).squeeze(drop=True)
    at = config.constants(method)
    beta, gamma = (float(at[name].squeeze()) for name in ("beta", "gamma"))
    is_rand = method == "MFA-Rand"

    def build(M):
        task = with_metrics(quadratic(24, 4, mu=0.05), gradient)
        schedule = inverse_time(beta, gamma)
        if is_rand:
            return Setup(task, fedavg(schedule, local_steps=5), mfa_rand(24, M))
        training = fedavg(per_frame(schedule, M), local_steps=5, server_scale="1/N")
        return Setup(task, training, mfa_rr(24, M))

    def bound(round, problem, start):
        prove, power = (mfa.theorem_1, 2) if is_rand else (mfa.corollary_1, 1)
        return prove(round + 1, problem, Rate(beta, gamma), start**power)

    with jax.enable_x64(True):
        found = validate(
            bound,
            build,
            {"M": [4]},
            measure=lambda runs: runs.distance.mean("model"),
            constants=lambda problem, runs: dataclasses.replace(
                problem, G=float(runs.gradient.max()), sigma=0.0
            ),
            num_rounds=40,
            num_seeds=3,
            record_every=10,
        ).squeeze(drop=True)
    np.testing.assert_allclose(found.bound, expected.bound, rtol=1e-9)
    np.testing.assert_allclose(found.measured, expected.distance.mean("seed"), rtol=1e-9)
    assert not found.violated.any()


def test_theorem_3_1_has_the_numbers_of_its_item():
    config = theorem_3_1.Bounded(
        participation=("full",), local_steps=(1,), num_rounds=(400, 1600), num_seeds=3
    )
    expected = theorem_3_1.run(config).squeeze(drop=True)
    known = config.problem()

    def build(T):
        eta_l, eta_g = map(float, theory.theorem_3_1_learning_rates(T, 1, known.N))
        local = local_sgd(eta_l, steps=1, batch_size=config.batch_size)
        eps = float(theory.optimal_epsilon(known))
        return Setup(task, maxfl(local, server_rate=eta_g, eps=eps), mfa_rand(known.N, 1))

    def bound(problem, T):
        return theory.theorem_3_1_full(T, problem, theory.theorem_3_1_learning_rates(T, 1, known.N))

    def constants(problem, runs):
        return dataclasses.replace(known, E=1, gap=float(gap))

    with jax.enable_x64(True):
        task, gap = theorem_3_1.make_task(config), expected.gap
        found = validate(
            bound,
            build,
            {"T": [400.0, 1600.0]},
            measure=lambda runs: runs.squared.where(runs["round"] < runs["T"]).mean("round"),
            constants=constants,
            num_rounds=1600,
            num_seeds=3,
        ).squeeze(drop=True)
    np.testing.assert_allclose(found.bound, expected.bound, rtol=1e-12)
    np.testing.assert_allclose(found.measured, expected.mean_squared.mean("seed"), rtol=1e-9)
    assert not found.violated.any()
