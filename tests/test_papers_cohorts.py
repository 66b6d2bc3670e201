"""Items of Pawlik's paper: what the product says of its Table 1."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_mm.cli import main
from fedjax_mm.papers import REPRODUCTIONS
from fedjax_mm.papers.cohorts import Trials
from fedjax_mm.theory.fairness import Costs, costs

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
