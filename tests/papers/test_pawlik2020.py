"""Items of Pawlik's paper: its table and figures, and how large cohorts should be."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from fedjax_mm.cli import main
from fedjax_mm.data.digits import digits
from fedjax_mm.data.partition import iid
from fedjax_mm.papers import ITEMS
from fedjax_mm.papers.pawlik2020.clients import dealt, images
from fedjax_mm.papers.pawlik2020.excess_noise import CohortNoise
from fedjax_mm.papers.pawlik2020.fig1 import CohortRounds
from fedjax_mm.papers.pawlik2020.fig2_and_3 import CohortAccuracy, published_means
from fedjax_mm.papers.pawlik2020.optimal_cohort import OptimalCohort, bowls
from fedjax_mm.papers.pawlik2020.table1 import Trials
from fedjax_mm.theory.cohorts import cohort_bound
from fedjax_mm.theory.fairness import Costs, costs
from fedjax_mm.theory.problem import Problem
from tests.helpers import plain, slow_unless
from tests.oracles.cohorts import Quadratics, exact_training

ITEM = ITEMS["cb-table1"]
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
    found = costs(rounds, Problem(N=K, C=C, S=N), B, epochs=E)
    assert (found.g_total, found.c) == (gradients, contacts)
    assert (found.g * rounds, found.g_client * C * rounds) == (gradients, gradients)
    assert found.u * B == pytest.approx(E * N)
    assert found.u_total == pytest.approx(rounds * found.u)
    assert found.g_client_total * K == pytest.approx(gradients)
    assert found.c_client * K == pytest.approx(contacts)


@pytest.mark.parametrize("name", ["R", "B", "epochs"])
def test_costs_name_what_is_wrong(name):
    problem, numbers = Problem(N=2, C=2, S=2), {"R": 2, "B": 2, "epochs": 2}
    costs(problem=problem, **numbers)
    with pytest.raises(ValueError, match=rf"A trial needs {name} >=? [01]; given {name} = 0"):
        costs(problem=problem, **numbers | {name: 0})
    with pytest.raises(ValueError, match="A trial needs C <= N; given C = 3, N = 2"):
        costs(problem=Problem(N=2, C=3, S=2), **numbers)


def test_two_columns_of_the_printed_table_contradict_their_equations():
    """Every entry is compared: u and u_R are wrong, and by the equations u_R is constant."""
    dataset = ITEM.run(ITEM.settings, None)
    findings = ITEM.judge(dataset, ITEM.settings)
    wrong = [claim for claim in findings.claims if not claim.holds]
    assert [claim.claim.split(" is that")[0] for claim in wrong] == [
        "the printed column u",
        "the printed column u_R",
    ]
    assert len(findings.claims) == len(Costs._fields) + 1
    by_equation = findings.measured.cost.sel(source="equations")
    np.testing.assert_array_equal(by_equation.sel(measure="u"), [10, 20, 30, 40, 60])
    np.testing.assert_array_equal(by_equation.sel(measure="u_R"), 120)
    ours, printed = findings.tables
    assert printed.title == "Table 1 as printed"
    assert printed.header[-4:-2] == ours.header[-4:-2] == ("u", "u_R")
    assert printed.rows[0][-4:-2] == ("12", "144")
    assert ours.rows[0][:3] == ("5", "12", "60")
    assert ours.rows[0][-4:-2] == ("10", "120")
    assert len(ITEM.figure(dataset, findings.measured, ITEM.settings).axes) == 2


def test_other_trials_have_no_printed_table():
    config = Trials(cohort_sizes=(2, 6), num_examples=30)
    dataset = ITEM.run(config, None)
    findings = ITEM.judge(dataset, config)
    assert [claim.holds for claim in findings.claims] == [True]
    assert len(findings.tables) == 1
    figure = ITEM.figure(dataset, findings.measured, config)
    assert [len(axes.lines) for axes in figure.axes] == [1, 1]


def test_only_the_papers_sizes_are_printed():
    config = Trials(cohort_sizes=(5, 60))
    findings = ITEM.judge(ITEM.run(config, None), config)
    assert [claim.holds for claim in findings.claims] == [True] * 4 + [False] * 2 + [True] * 3
    printed = findings.tables[1].rows
    assert (printed[0][3], printed[1][3]) == ("3000", "")


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

OPTIMUM = ITEMS["cb-optimal-cohort"]
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
            constants = {"L": np.linalg.eigvalsh(H).max(), "G": 0, "gap": 0, "Z": np.sqrt(Z2[0])}
            noise = cohort_bound(24 // C, Problem(N=6, C=C, E=3, **constants), gamma)
            assert at.bound > noise / 4  # of its terms the last one, with Z^2 along the way
    assert (dataset.bound > dataset.measured).all()


def test_the_optimal_cohort_is_judged_by_what_was_measured():
    dataset = optimum()
    findings = OPTIMUM.judge(dataset, SMALL)
    holds = [claim.holds for claim in findings.claims]
    assert holds[0]
    assert holds[3]
    best = dataset.C.values[dataset.measured.values.argmin(1)]
    np.testing.assert_array_equal(findings.measured["best C"], best)
    assert best[0] < best[-1]
    worse = dataset.assign(bound=dataset.measured / 2)
    assert not OPTIMUM.judge(worse, SMALL).claims[0].holds
    far = dataset.assign(optimal_size=6 / (dataset.optimal_size * 0 + 1))
    assert not OPTIMUM.judge(far, SMALL).claims[3].holds
    assert len(OPTIMUM.figure(dataset, findings.measured, SMALL).axes) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heterogeneity": (1.0, 0.5, 2.0)}, "they must increase"),
        ({"heterogeneity": (1.0, 2.0)}, "a trend needs 3 or more"),
        ({"contacts": 100}, "give a multiple of num_clients = 24"),
        ({"rate": 1.5}, "less than or equal to 1"),
    ],
)
def test_wrong_maps_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        OptimalCohort(**change)


# The excess noise of cohorts


def test_excess_noise_is_measured():
    item = ITEMS["theory-cohort-noise"]
    config = CohortNoise(num_clients=8, num_seeds=2000)
    dataset = item.run(config, None)
    findings = item.judge(dataset, config)
    assert [claim.holds for claim in findings.claims] == [True, True, True, True, False]
    wrong = dataset.assign(equation_27=dataset.equation_27 * 1.2)
    assert [claim.holds for claim in item.judge(wrong, config).claims][:3] == [False, True, False]
    item.figure(dataset, findings.measured, config).savefig("/dev/null", format="png")


# The figures


@pytest.fixture
def linear(monkeypatch):
    """The figures' pipeline with a model that compiles at once."""
    monkeypatch.setattr("fedjax_mm.papers.pawlik2020.clients.McMahanCNN", plain)


FIG1, FIG2, FIG3 = (ITEMS[f"cb-fig{number}"] for number in (1, 2, 3))
FEW = CohortAccuracy(
    num_clients=12, cohort_sizes=(1, 2, 3), contacts=12, updates=60, num_seeds=4, learning_rate=0.5
)


@pytest.mark.usefixtures("linear")
def test_both_evaluations_are_those_of_the_test_images():
    """All images; and E B different ones, which are others in every record."""
    pool = digits()
    parts = iid(pool.train[1], 3)
    task = dealt(images(pool, [parts, parts[::-1]]), 1, 30)
    params = task.init(jax.random.key(0))
    logits = task.task.module.apply({"params": params}, jnp.asarray(pool.test[0] / np.float32(255)))
    is_right = np.asarray(logits).argmax(1) == pool.test[1]
    record = jax.jit(task.metrics)
    some = []
    for number in range(20):
        found = record(jax.random.key(number), params)
        assert found["test_accuracy"] == pytest.approx(is_right.mean(), abs=1e-6)
        some.append(float(found["published_accuracy"]) * 30)
    np.testing.assert_allclose(some, np.round(some), atol=1e-4)
    assert len(np.unique(np.round(some))) > 3
    spread = np.sqrt(30 * is_right.mean() * (1 - is_right.mean()) / 20)
    assert abs(np.mean(some) - 30 * is_right.mean()) < 4 * spread
    every = dealt(images(pool, [parts]), 0, 10_000).metrics(jax.random.key(0), params)
    assert every["published_accuracy"] == pytest.approx(is_right.mean(), abs=1e-6)


@pytest.mark.usefixtures("linear")
def test_cohorts_train_at_constant_cost_and_are_judged():
    dataset = FIG2.run(FEW, None)
    assert dict(dataset.sizes) == {"C": 3, "seed": 4, "round": 13}
    for C in (1, 2, 3):  # R = 12 / C rounds, and the start
        recorded = dataset.test_accuracy.sel(C=C).notnull().sum("round")
        assert (recorded == 1 + 12 // C).all()
    assert not dataset.test_accuracy.isel(round=1).equals(dataset.published_accuracy.isel(round=1))
    findings = FIG3.judge(dataset, FEW)
    best = dataset.test_accuracy.isel(round=slice(1, None)).max("round")
    measured = findings.measured.sel(evaluation="all images")
    np.testing.assert_allclose(measured.best, best)
    np.testing.assert_allclose(measured["mean"], best.mean("seed"))
    np.testing.assert_array_equal(measured.distinct, [len(np.unique(row)) for row in best])
    (table,) = findings.tables
    assert [row[:4] for row in table.rows[::2]] == [
        ("1", "all images", "12", "60"),
        ("2", "all images", "6", "30"),
        ("3", "all images", "4", "20"),
    ]
    for item in (FIG2, FIG3):
        assert item.figure(dataset, findings.measured, FEW).axes


def accuracies(best, scored=None):
    """A result whose best accuracies ``[C, seed]`` are these."""
    curves = np.stack([np.zeros_like(best), best, best / 2], axis=-1)
    some = curves if scored is None else np.round(curves * scored) / scored
    dims, coords = ("C", "seed", "round"), {"C": [1, 2, 3], "round": [0, 1, 2]}
    return xr.Dataset({"test_accuracy": (dims, curves), "published_accuracy": (dims, some)}, coords)


def test_a_trend_over_cohort_sizes_is_found_and_noise_is_not():
    rng = np.random.default_rng(0)
    flat = 0.7 + 0.1 * rng.normal(size=(3, 30))
    assert FIG2.judge(accuracies(flat), FEW).claims[0].holds
    for slope in (0.1, -0.1):
        sloping = flat + slope * np.arange(3)[:, None]
        claim = FIG2.judge(accuracies(sloping), FEW).claims[0]
        assert not claim.holds
        assert f"{100 * slope:+.0f}"[:1] in claim.evidence
    as_published = FEW.model_copy(update={"evaluation": "as-published"})
    assert FIG2.judge(accuracies(sloping), as_published).claims[0].holds is False


def test_few_scored_images_make_groups():
    values = np.random.default_rng(0).uniform(0.5, 0.9, size=(3, 30))
    grouped, not_grouped = (
        FIG2.judge(accuracies(values, scored), FEW).claims[1] for scored in (10, None)
    )
    assert (grouped.holds, not_grouped.holds) == (True, False)


def test_published_means_stand_beside_the_authors_trials_only(tmp_path):
    def of(config):
        return published_means(config).dropna("C").to_series().to_dict()

    author = CohortAccuracy.model_construct(**dict(CohortAccuracy()) | {"directory": tmp_path})
    assert of(author) == {5: 0.722, 10: 0.714, 15: 0.723, 20: 0.704, 30: 0.696}
    doubled = author.model_copy(update={"contacts": 120, "num_seeds": 3})
    assert of(doubled)[30] == 0.964
    assert of(author.model_copy(update={"learning_rate": 0.2})) == {}
    assert of(author.model_copy(update={"num_clients": 100, "updates": 300}))
    assert of(author.model_copy(update={"cohort_sizes": (2, 3, 4)})) == {}
    assert of(CohortAccuracy()) == {}
    means = np.array([[0.722], [0.714], [0.723]]) + 0.01 * np.random.default_rng(0).normal(
        size=(3, 20)
    )
    dataset = accuracies(means).assign_coords(C=[5, 10, 15])  # the scores are the author's
    dataset["test_accuracy"] = dataset.test_accuracy * 0.9
    few = author.model_copy(update={"cohort_sizes": (5, 10, 15)})
    findings = FIG2.judge(dataset, few)
    assert findings.claims[-1].holds
    texts = {row[:2]: row[4] for row in findings.tables[0].rows}
    assert texts["5", "as-published"].endswith("(0.722)")
    assert not texts["5", "all images"].endswith(")")
    shown = dataset.assign_attrs(manifest={"datasets": ["MNIST"]})
    (axes,) = FIG3.figure(shown, findings.measured, few).axes
    drawn = [text.get_text() for text in axes.get_legend().get_texts()]
    assert drawn == ["all images", "as-published", "published"]
    assert not FIG2.judge(dataset - 0.2, few).claims[-1].holds


ROUNDS = CohortRounds(
    num_clients=12,
    cohort_sizes=(1, 3, 6),
    percents=(0.0, 50.0, 100.0),
    targets=(0.3, 0.6),
    max_rounds=8,
    local_epochs=2,
    num_seeds=2,
    learning_rate=0.5,
)


@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize(
    "sizes", [slow_unless(sizes == (3,), sizes) for sizes in ((3,), (1, 3, 6))]
)
def test_rounds_to_an_accuracy_do_not_depend_on_stopping_there(sizes):
    """Each cohort size is a program."""
    stopped = FIG1.run(ROUNDS, None)
    whole = FIG1.run(ROUNDS.model_copy(update={"stop": False, "cohort_sizes": sizes}), None)
    assert stopped.test_accuracy.isnull().any()
    assert whole.test_accuracy.notnull().all()
    one = FIG1.judge(stopped, ROUNDS)
    if sizes == ROUNDS.cohort_sizes:
        other = FIG1.judge(whole, ROUNDS)
        np.testing.assert_array_equal(one.measured.rounds, other.measured.rounds)
        assert one.tables == other.tables
    accuracy = whole.test_accuracy.transpose("percent", "C", "seed", "round").values
    found = one.measured.rounds.sel(C=list(sizes))
    for target, rounds in zip(ROUNDS.targets, found.values, strict=True):
        for place in np.ndindex(rounds.shape):
            met = np.flatnonzero(accuracy[place] >= target)
            assert rounds[place] == met[0] if len(met) else np.isnan(rounds[place])
    # Each share of IID images has its own clients, of every seed: one that knows two digits
    # teaches less than one that knows more.
    by_share = accuracy.mean((1, 3))
    assert (by_share[1:] > by_share[0]).all()
    assert FIG1.figure(stopped, one.measured, ROUNDS).axes


def test_fewer_rounds_are_found_along_the_right_axis():
    """Rounds fall with C and grow with the percentage."""
    size, percent, round_ = np.meshgrid([1, 3, 6], [0, 50, 100], np.arange(40), indexing="ij")
    curve = (round_ >= 12 / size + percent / 20).astype(float)[:, :, None]
    curve = np.repeat(curve, 3, axis=2)
    dims = ("C", "percent", "seed", "round")
    coords = {"C": [1, 3, 6], "percent": [0.0, 50.0, 100.0], "round": np.arange(40)}
    dataset = xr.Dataset({"test_accuracy": (dims, curve)}, coords)
    config = ROUNDS.model_copy(update={"targets": (0.5,)})
    assert [claim.holds for claim in FIG1.judge(dataset, config).claims] == [True, False]
    late = dataset.where(dataset["round"] < 14, 0.0)  # some never get there: they come last
    findings = FIG1.judge(late, config)
    assert np.isnan(findings.measured.rounds).any()
    assert [claim.holds for claim in findings.claims] == [True, False]
    assert any("not reached\nin 3 of 3" in cell for row in findings.tables[0].rows for cell in row)


def test_a_run_that_hits_its_target_exactly_has_reached_it():
    """As float32, in which 0.9 is less than the number 0.9; afterwards nothing is recorded."""
    curve = np.full((3, 3, 2, 4), np.nan, np.float32)
    curve[..., :3] = 0.1, 0.5, 0.9
    dims = ("C", "percent", "seed", "round")
    coords = {"C": [1, 3, 6], "percent": [0.0, 50.0, 100.0], "round": np.arange(4)}
    dataset = xr.Dataset({"test_accuracy": (dims, curve)}, coords)
    config = ROUNDS.model_copy(update={"targets": (0.5, 0.9, 0.903)})
    dataset = dataset.assign_attrs(manifest={"datasets": ["digits"]})
    found = FIG1.judge(dataset, config)
    assert [np.unique(each).tolist() for each in found.measured.rounds[:2]] == [[1.0], [2.0]]
    assert np.isnan(found.measured.rounds[2]).all()
    assert found.tables[0].rows[-1][0] == "to 90.3 %"
    figure = FIG1.figure(dataset, found.measured, config)
    assert len(figure.axes) == 3


@pytest.mark.parametrize(
    ("item", "setting", "says"),
    [
        ("cb-fig1", "cohort_sizes=[2,4,30]", "only num_clients = 24"),
        ("cb-fig1", "cohort_sizes=[2,4]", "a trend needs 3 or more"),
        ("cb-fig1", "percents=[20.0,60.0]", "a trend needs 3 or more"),
        ("cb-fig1", "percents=[20.0,60.0,120.0]", "less than or equal to 100"),
        ("cb-fig1", "targets=[0.9,1.5]", "less than 1"),
        ("cb-fig1", "percents=[60.0,20.0,80.0]", "they must increase"),
        ("cb-fig2", "cohort_sizes=[4,2,6]", "they must increase"),
        ("cb-fig2", "cohort_sizes=[7,8,9]", "does not divide contacts = 240"),
        ("cb-fig2", "updates=50", "does not divide updates = 50"),
        ("cb-fig2", "num_clients=4", "only num_clients = 4"),
        ("cb-fig2", "cohort_sizes=[2,4]", "a trend needs 3 or more"),
        (
            "cb-fig2",
            'partition={name="iid_share",percent=80.0,labels_per_client=11}',
            "labels_per_client is 11; it must lie between 1 and the number of labels = 10",
        ),
        ("cb-fig3", "directory=/nowhere", "/nowhere"),
    ],
)
def test_wrong_figures_are_refused(item, setting, says, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["reproduce", item, "--out", str(tmp_path), "--set", setting])
    error = " ".join(capsys.readouterr().err.split())
    assert says in error
    assert "Traceback" not in error
