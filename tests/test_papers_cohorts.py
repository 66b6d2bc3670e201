"""Items of Pawlik's paper: its Table 1, and how large cohorts should be."""

import functools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_mm.cli import main
from fedjax_mm.papers import REPRODUCTIONS
from fedjax_mm.papers.cohort_optimum import OptimalCohort, bowls
from fedjax_mm.papers.cohorts import Trials
from fedjax_mm.theory.cohorts import cohort_bound
from fedjax_mm.theory.fairness import Costs, costs
from tests.reference_cohorts import Quadratics, exact_training

ITEM = REPRODUCTIONS["cb-table1"]
positive = st.integers(1, 500)


@given(C=positive, R=positive, B=positive, E=positive, N=positive, extra=st.integers(0, 500))
def test_costs_count_what_a_trial_does(C, R, B, E, N, extra):
    """By counting, round by round, in whole numbers where they are whole."""
    K, rounds = C + extra, min(R, 4)
    gradients = contacts = 0
    for _ in range(rounds):
        for _ in range(C):
            gradients += E * N
            contacts += 1
    found = costs(C, rounds, B, E, N=N, K=K)
    assert (found.g_total, found.c) == (gradients, contacts)
    assert (found.g * rounds, found.g_client * C * rounds) == (gradients, gradients)
    assert found.u * B == pytest.approx(E * N)
    assert found.u_total == pytest.approx(rounds * found.u)
    assert found.g_client_total * K == pytest.approx(gradients)
    assert found.c_client * K == pytest.approx(contacts)


@pytest.mark.parametrize("name", ["C", "R", "B", "E", "N", "K"])
def test_costs_name_what_is_wrong(name):
    numbers = dict.fromkeys("CRBENK", 2) | {name: 0}
    with pytest.raises(ValueError, match=rf"A trial needs ({name} > 0|C <= K); given"):
        costs(**numbers)
    with pytest.raises(ValueError, match="A trial needs C <= K; given C = 3"):
        costs(3, 1, 1, 1, N=1, K=2)


def test_two_columns_of_the_printed_table_contradict_their_equations():
    """Every entry is compared: u and u_R are wrong, and by the equations u_R is constant."""
    dataset = ITEM.run(ITEM.config, None)
    judgement = ITEM.judge(dataset, ITEM.config)
    wrong = [claim for claim in judgement.claims if not claim.holds]
    assert [claim.claim.split(" is that")[0] for claim in wrong] == [
        "the printed column u",
        "the printed column u_R",
    ]
    assert len(judgement.claims) == len(Costs._fields) + 1
    np.testing.assert_array_equal(judgement.measured["u"], [10, 20, 30, 40, 60])
    np.testing.assert_array_equal(judgement.measured["u_total"], 120)
    (title, printed), *_ = judgement.more
    assert title == "Table 1 as printed"
    assert printed[1][-4:-2] == ("12", "144")
    assert judgement.table[1][-4:-2] == ("10", "120")


def test_other_trials_have_no_printed_table():
    config = Trials(cohort_sizes=(2, 6), num_examples=30)
    judgement = ITEM.judge(ITEM.run(config, None), config)
    assert [claim.holds for claim in judgement.claims] == [True]
    assert judgement.more == ()


def test_the_command_writes_both_tables(tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"^3$"):
        main(["reproduce", "cb-table1", "--out", str(tmp_path)])
    summary = json.loads((tmp_path / "cb-table1" / "summary.json").read_text())
    assert summary["paper"]["table"]["5"][6:8] == [12, 144]
    assert "Table 1 as printed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("cohort_sizes=[7]", "does not divide contacts = 60"),
        ("cohort_sizes=[200]", "only num_clients = 100"),
        ("contacts=50", "does not divide contacts = 50"),
    ],
)
def test_wrong_trials_are_refused(setting, says, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["reproduce", "cb-table1", "--out", str(tmp_path), "--set", setting])
    assert says in " ".join(capsys.readouterr().err.split())


# How large cohorts should be

OPTIMUM = REPRODUCTIONS["cb-optimal-cohort"]
SMALL = OptimalCohort(
    num_clients=6, dim=3, contacts=24, heterogeneity=(0.1, 1.0, 4.0), num_seeds=200, local_steps=3
)


@functools.cache
def optimum():
    return OPTIMUM.run(SMALL, None)


def test_the_map_of_cohorts_is_that_of_exact_expectations():
    """The mean over drawn cohorts, by 4 standard errors, for every size and heterogeneity."""
    dataset, (H, b) = optimum(), bowls(SMALL)
    start = np.full((1, 3), 3**-0.5)
    gamma = SMALL.rate / (np.linalg.eigvalsh(H).max() * SMALL.local_steps)
    assert list(dataset.C.values) == SMALL.cohort_sizes == [1, 2, 3, 4, 6]
    for C in SMALL.cohort_sizes:
        for scale in SMALL.heterogeneity:
            problem = Quadratics(H[None], scale * b[None], start)
            expected, _, Z2 = exact_training(problem, 24 // C, C, 3, np.array([gamma]))
            at = dataset.sel(C=C, heterogeneity=scale)
            assert abs(at.measured - expected[0]) < 4 * at.standard_error + 1e-5 * expected[0]
            bound = {"gamma": gamma, "L": np.linalg.eigvalsh(H).max(), "G": 0, "gap": 0}
            noise = cohort_bound(24 // C, 6, C, 3, Z=np.sqrt(Z2[0]), **bound)
            assert at.bound > noise / 4  # of its terms the last one, with Z^2 along the way
    assert (dataset.bound > dataset.measured).all()


def test_the_optimal_cohort_is_judged_by_what_was_measured():
    dataset = optimum()
    judgement = OPTIMUM.judge(dataset, SMALL)
    holds = [claim.holds for claim in judgement.claims]
    assert holds[0]
    assert holds[3]
    best = dataset.C.values[dataset.measured.values.argmin(1)]
    np.testing.assert_array_equal(judgement.measured["best_size"], best)
    assert best[0] < best[-1]
    worse = dataset.assign(bound=dataset.measured / 2)
    assert not OPTIMUM.judge(worse, SMALL).claims[0].holds
    far = dataset.assign(optimal_size=6 / (dataset.optimal_size * 0 + 1))
    assert not OPTIMUM.judge(far, SMALL).claims[3].holds
    assert len(OPTIMUM.plot(dataset, SMALL, judgement).axes) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heterogeneity": (1.0, 0.5, 2.0)}, "it must increase"),
        ({"contacts": 100}, "give a multiple of num_clients = 24"),
        ({"rate": 1.5}, "less than or equal to 1"),
    ],
)
def test_wrong_maps_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        OptimalCohort(**change)
