"""Theorem 1, Corollary 1 and Theorem 3 compared with measured errors on the quadratic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import fedavg, local_sgd, mfa_rr, simulate
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import BOUNDS, ITEMS
from fedjax_mm.papers.bhuyan2022.bounds import Bounds, run_bounds, tightest
from fedjax_mm.papers.bhuyan2022.theorem_3 import GainBounds, run_gain
from fedjax_mm.schedules import growing_sample_size, inverse_time
from fedjax_mm.tasks import least_squares
from fedjax_mm.theory.mfa import least_sample_size, theorem_1_rate
from fedjax_mm.theory.problem import Problem, Rate
from tests.oracles import multi_model as reference

ALL = ("MFA-Rand", "MFA-RR, 1/N", "MFA-RR, mean")
SMALL = Bounds(
    algorithms=ALL,
    mu=(2e-4, 0.05),
    num_models=(4,),
    num_rounds=240,
    num_seeds=20,
    record_every=12,
)


@pytest.fixture(scope="module")
def small():
    return run_bounds(SMALL)


def judge_bounds(dataset, config):
    return BOUNDS["mfa"].findings(dataset, config)


def failed(findings):
    return [check.text for check in findings.checks if check.outcome not in ("passed", "holds")]


def verdicts(findings):
    """Maps keys to verdicts, for all statements that a run can judge."""
    return {each.key: each.verdict for each in findings.statements if not each.untested}


def test_the_bounds_hold(small):
    findings = judge_bounds(small, SMALL)
    assert not [text for text in failed(findings) if "bound" in text]
    measured = findings.measured
    assert dict(measured.least_ratio.sizes) == {"algorithm": 3, "mu": 2, "M": 1, "E": 2}
    assert (measured.least_ratio > 1 - 1e-9).all()
    # They are loose, and looser with more local steps.
    one, five = (measured.largest_ratio.sel(E=e) for e in (1, 5))
    assert (five / one).min() > 5


def test_a_bound_is_exact_at_the_start_of_one_model():
    """Covers M = E = 1, which only slow tests contain otherwise."""
    settings = {"algorithms": ["MFA-RR, 1/N"], "num_models": [1], "local_steps": [1], "mu": [0.05]}
    config = validate(Bounds, SMALL.model_dump() | settings)
    findings = judge_bounds(run_bounds(config), config)
    assert not [text for text in failed(findings) if "bound" in text]
    assert findings.measured.least_ratio.item() == pytest.approx(1, abs=1e-9)


def test_a_violated_bound_is_found(small):
    tampered = small.copy(deep=True)
    tampered["bound"].loc[
        {"algorithm": "MFA-Rand", "mu": 0.05, "num_models": 4, "local_steps": 1}
    ] /= 9
    wrong = [text for text in failed(judge_bounds(tampered, SMALL)) if "bound" in text]
    assert wrong == ["MFA-Rand: Theorem 1's bound holds at every recorded round"]
    found = verdicts(ITEMS["theory-mfa-rand"].findings(tampered, SMALL))
    assert found == {"theorem-1": "contradicted", "more-models-more-rounds": "not tested"}


def test_a_violation_at_one_record_is_found(small):
    """It must exceed the errors over seeds."""
    rand = validate(Bounds, SMALL.model_dump() | {"algorithms": ["MFA-Rand"]})
    good = small.sel(algorithm=["MFA-Rand"])
    assert verdicts(ITEMS["theory-mfa-rand"].findings(good, rand))["theorem-1"] == "supported"
    at = {"mu": 0.05, "num_models": 4, "local_steps": 5, "round": 120}
    for factor, verdict in ((1.5, "contradicted"), (1.0, "not settled")):
        wrong = good.copy(deep=True)
        noise = np.linspace(-0.1, 0.1, wrong.sizes["seed"])
        wrong.distance.loc[at] = wrong.bound.sel(at).item() * (factor + noise)
        found = verdicts(ITEMS["theory-mfa-rand"].findings(wrong, rand))
        assert found["theorem-1"] == verdict


def test_points_without_a_value_are_never_the_tightest():
    room = [[[0.5, 0.4], [np.nan, np.nan]], [[np.nan, np.nan], [np.nan, np.nan]]]
    room = xr.DataArray(room, {"frame": [0, 1]}, ("lemma", "frame", "seed"))
    found = tightest(room, "frame")
    np.testing.assert_array_equal(found, [[0.5, 0.4], [np.nan, np.nan]])


def test_theorems_are_judged_only_by_their_methods(small):
    """Corollary 1 needs the method with the factor 1/N."""
    item = ITEMS["theory-mfa-rr"]
    assert verdicts(item.findings(small, SMALL)) == {"corollary-1": "supported"}
    other = validate(Bounds, SMALL.model_dump() | {"algorithms": ["MFA-RR, mean"]})
    found = item.findings(small.sel(algorithm=["MFA-RR, mean"]), other)
    assert verdicts(found) == {"corollary-1": "not tested"}


def test_exponents_are_shown_and_not_judged(small):
    """An upper bound implies nothing about the slope of the bounded quantity."""
    findings = judge_bounds(small, SMALL)
    assert not [check for check in findings.checks if "errors fall" in check.text]
    slopes = findings.tables[0]
    assert slopes.header == ("algorithm", "mu", "E", "M = 4", "of the bound")
    assert len(slopes.rows) == 3 * 2 * 2
    measured = findings.measured.sel(algorithm="MFA-RR, mean", mu=0.05, E=5, M=4)
    numbers = (measured[f"exponent{end}"].item() for end in ("", "_low", "_high"))
    shown = "{:.2f} ({:.2f} to {:.2f})".format(*numbers)
    assert ("MFA-RR, mean", "0.05", "5", shown, "1") in slopes.rows


def test_the_bounds_use_the_constants_of_the_run(small):
    """The bound is recomputed at one point from the start, G and the time index."""
    case = small.sel(algorithm="MFA-RR, 1/N", mu=0.05, num_models=4, local_steps=5)
    problem = reference.dense_quadratic(24, 4, 0.05)
    mu, smoothness, _ = reference.constants(problem)
    distance = np.linalg.norm(reference.minimizer(problem))
    G, M, E, beta = float(case.G), 4, 5, 2 / mu
    assert pytest.approx(1.0) == G  # the first client's gradient at 0
    gamma = beta * smoothness
    drift = smoothness * G * (E**2 * (M - 1) / (2 * M) + E * (E - 1))
    phi = beta * E * G * (M - 1) / M
    phi += max(beta**2 * drift / (beta * mu - 1), (1 + gamma) * distance)
    t = case["round"].values + 1
    np.testing.assert_allclose(case.bound, phi / (t / M + gamma), rtol=1e-9)


def test_the_check_can_detect_a_frozen_model(small):
    """The check is evaluated at M in {1, 2, 4, 12}."""
    config = validate(Bounds, SMALL.model_dump() | {"num_models": [1, 2, 4, 12]})
    repeated = small.sel(num_models=[4, 4, 4, 4]).assign_coords(num_models=[1, 2, 4, 12])
    found = judge_bounds(repeated, config).checks
    checks = [check for check in found if "frozen" in check.text]
    assert [check.outcome for check in checks] == ["passed"] * 3
    assert all("E = 1, mu = 0.05" in check.text for check in checks)
    assert all("M = 12: " in check.evidence for check in checks)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 2.0}, r"Theorem 1 needs gamma > 4 L beta - 1; given gamma = 73"),
        ({"rate": 2.0, "algorithms": ["MFA-RR, 1/N"]}, r"Theorem 2 needs gamma > beta L - 1"),
        ({"contraction": 1.0}, r"needs beta > 1/mu; given beta = 5000, mu = 0.0002"),
        ({"num_models": [30]}, "num_models is 30"),
        ({"num_models": [2, 2]}, "give each once"),
        ({"record_every": 7}, "must divide 240 rounds"),
    ],
)
def test_settings_outside_of_the_theorems_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        validate(Bounds, SMALL.model_dump() | settings)


def test_verdicts_on_theorem_3():
    config = validate(
        GainBounds,
        GainBounds().model_dump()
        | {"num_models": [1, 2], "local_steps": [5], "num_rounds": 300, "num_seeds": 4},
    )
    item, dataset = ITEMS["theory-gain"], run_gain(config)
    findings = item.findings(dataset, config)
    measured = findings.measured
    proven = ("theorem-3", "theorem-3-increasing")
    supported = dict.fromkeys(proven, "supported")
    assert verdicts(findings) == supported | {"theorem-3-one-step": "slip in print"}
    assert failed(findings) == []
    examples = measured.counterexample
    assert examples.sel(reading="max").item() == pytest.approx(0.45, abs=0.005)
    assert examples.sel(reading="sum").item() == pytest.approx(1.72, abs=0.005)
    assert (measured.gain.sel(what="measured", M=2) > 1).all()
    lower = dataset.copy(deep=True)
    lower.gain.loc[{"what": "the sum of (127)", "num_models": 2}] = 1.0
    assert [verdicts(item.findings(lower, config))[key] for key in proven] == ["contradicted"] * 2
    lower = dataset.copy(deep=True)
    lower.gain.loc[{"what": "measured", "num_models": 2}] = 1.0
    found = verdicts(item.findings(lower, config))
    assert [found[key] for key in proven] == ["supported", "contradicted"]
    alone = validate(GainBounds, config.model_dump() | {"num_models": [1]})
    found = verdicts(item.findings(dataset.sel(num_models=[1]), alone))
    assert [found[key] for key in proven] == ["not tested"] * 2
    item.figure(dataset, measured, config).savefig("/dev/null", format="png")


@pytest.mark.slow
def test_local_steps_outside_of_theorem_3_are_named():
    """A small mu gives a small Gamma, for which E = 1 fails eq. (136)."""
    config = validate(
        GainBounds,
        GainBounds().model_dump()
        | {"mu": [2e-4], "num_models": [1, 2], "local_steps": [1, 2]}
        | {"num_rounds": 20, "num_seeds": 2},
    )
    findings = ITEMS["theory-gain"].findings(run_gain(config), config)
    proven = findings.measured.gain.sel(what="the sum of (127)")
    np.testing.assert_array_equal(proven.isnull().all("M"), [True, False])
    assert "E = 1 fails the condition (136)" in findings.statements[0].about
    assert verdicts(findings)["theorem-3"] == "supported"


@pytest.mark.parametrize("x64", [False, True])
def test_growing_samples_satisfy_the_condition(x64):
    """The size is that of the exact condition or larger by one."""
    rate, constants = inverse_time(20.0, 30.0), {"E": 5, "G": 2.0, "beta_1": 1.5, "beta_2": 1.25}
    t = np.arange(1, 2001)
    for num_examples in (1, 49, 600, 20_000):
        eta = theorem_1_rate(t, Rate(beta=20.0, gamma=30.0))
        exact = least_sample_size(eta, Problem(S=num_examples, **constants), V=7.0)
        with jax.enable_x64(x64):
            schedule = growing_sample_size(
                rate,
                num_examples=num_examples,
                local_steps=5,
                gradient_bound=2.0,
                noise=(1.5, 1.25),
                growth=7.0,
            )
            sizes = np.asarray(jax.vmap(schedule)(jnp.asarray(t)))
        assert np.all((sizes - exact >= 0) & (sizes - exact <= 1))
        assert sizes[-1] > 0.99 * num_examples
    assert sizes[0] < 0.9 * num_examples  # the first sample is smaller


def test_growing_samples_train_in_one_program():
    """The sample size sets weights to 0 or 1 and is not a shape."""
    rng = np.random.default_rng(0)
    data = rng.standard_normal((3, 40, 4)), rng.standard_normal((3, 40))
    task, rate = least_squares(*data, ridge=0.5), inverse_time(2.0, 20.0)

    @jax.jit
    def run(key, growth):
        size = growing_sample_size(
            rate,
            num_examples=40,
            local_steps=2,
            gradient_bound=4.0,
            noise=(1.0, 1.0),
            growth=growth,
        )
        algorithm = fedavg(local_sgd(rate, steps=2, batch_size=size))
        return simulate(key, task, algorithm, mfa_rr(3, 1), 60)[1].metrics["distance"][-1, 0]

    few, everything = run(jax.random.key(0), 100.0), run(jax.random.key(0), 0.0)
    assert run._cache_size() == 1
    full = fedavg(rate, local_steps=2)
    whole = jax.jit(lambda key: simulate(key, task, full, mfa_rr(3, 1), 60)[1].metrics["distance"])
    exact = whole(jax.random.key(0))[-1, 0]
    np.testing.assert_allclose(everything, exact, rtol=1e-4)
    assert abs(few - exact) > 1e-3


def test_figures_and_tables(small, tmp_path):
    _, errors, constants = judge_bounds(small, SMALL).tables  # curves only for few points
    assert len(errors.rows) == 12
    assert {len(row) for row in errors.rows} == {len(errors.header)}
    assert errors.header[:4] == ("algorithm", "mu", "M", "E")
    assert [row[:2] for row in constants.rows[:2]] == [("MFA-Rand", "0.0002"), ("MFA-Rand", "0.05")]
    few = validate(
        Bounds, SMALL.model_dump() | {"mu": [0.05], "num_models": [4], "local_steps": [5]}
    )
    some = small.sel(mu=[0.05], num_models=[4], local_steps=[5])
    findings = judge_bounds(some, few)
    curves = findings.tables[3:]
    assert [each.title for each in curves] == [f"{name}, mu = 0.05, M = 4, E = 5" for name in ALL]
    assert [row[0] for row in curves[0].rows][:2] == ["0", "12"]
    assert {row[-1] for row in curves[0].rows} == {"holds"}
    tampered = judge_bounds(some.assign(bound=some.bound / 1e4), few).tables[3]
    assert "DOES NOT HOLD" in {row[-1] for row in tampered.rows}

    figure = BOUNDS["mfa"].figure(some, findings.measured, few)
    figure.savefig(tmp_path / "figure.png")
    for axes, name in zip(figure.axes, ALL, strict=True):
        here = some.sel(algorithm=name, mu=0.05, num_models=4, local_steps=5)
        (drawn,) = axes.containers
        assert drawn.get_label() == "M = 4"
        # Records are more widely spaced as training progresses.
        few = np.geomspace(1, here.sizes["round"] - 1, 11).round().astype(int)
        chosen = here.isel(round=sorted({0, *few.tolist()}))
        x_and_y = np.stack([chosen["round"] + 1, chosen.bound / chosen.largest], axis=1)
        np.testing.assert_allclose(drawn[0].get_xydata(), x_and_y, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["theory-mfa-rand", "theory-mfa-rr"])
def test_the_bounds_hold_at_full_size(name):
    """Runs the default settings of 2,000 rounds and 200 seeds."""
    item = ITEMS[name]
    findings = item.findings(item.run(item.settings, None), item.settings)
    assert set(verdicts(findings).values()) == {"supported"}


def test_the_command_runs_all_methods():
    assert BOUNDS["mfa"].settings.algorithms == ALL
