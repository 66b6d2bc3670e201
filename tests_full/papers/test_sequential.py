"""Adding seeds until statements are settled: equality with one run, budgets, and resuming."""

import json
import signal

import numpy as np
import pytest
import xarray as xr

from fedjax_mm import cli, papers, plots
from fedjax_mm.claims import fact, more
from fedjax_mm.cli import reproductions
from fedjax_mm.experiments.fields import Seeded
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.published import published
from fedjax_mm.papers.rulings import check, ruling
from fedjax_mm.papers.schema import Table
from fedjax_mm.papers.sequential import Budget, decide
from fedjax_mm.results.manifest import manifest
from fedjax_mm.sweeps.errors import InterruptedRunError
from fedjax_mm.sweeps.execution import Execution
from tests.helpers import slow_unless
from tests.test_cli import call, files, read_json

SEEDS = ("--until-settled",)


PAPER = {
    "title": "draws",
    "statements": [
        {"key": "above", "quote": "It is above.", "where": "section 1"},
        {"key": "not-random", "quote": "It is so.", "where": "section 2"},
    ],
}


class Coin(Seeded):
    """Settings of draws with known mean and standard deviation."""

    num_seeds: int = 3
    mean: float = 0.0
    spread: float = 1.0


class Runs(list):
    """An item without programs, and the list of (first seed, number) of its computed batches."""

    stop_before = np.inf

    def run(self, config, execution):
        """Makes a draw for each seed."""
        if config.first_seed >= self.stop_before:
            raise InterruptedRunError(signal.SIGTERM, 0.5)
        self.append((config.first_seed, config.num_seeds))
        draws = [np.random.default_rng(seed).normal() for seed in config.data_seeds]
        about = manifest({}, seed=config.seed, data="synthetic")
        about |= {"wall_seconds": {"compile": 1.0, "run": 2.0 * config.num_seeds - 1.0}}
        values = config.mean + config.spread * np.array(draws)
        coords = {"seed": config.first_seed + np.arange(config.num_seeds)}
        one = ("about", [config.mean])
        return xr.Dataset({"lead": ("seed", values), "one": one}, coords, {"manifest": about})

    @property
    def item(self):
        return Item(
            id="coin",
            settings=Coin(),
            run=self.run,
            measure=lambda result, config: result.drop_attrs(),
            judge=lambda measured, config: [
                ruling("above", more(measured.lead)),
                ruling("not-random", fact(True, "why")),
                check("a check of our own", False),
            ],
            table=lambda measured, config: [Table(header=("a",), rows=(("1",),))],
            figure=lambda result, measured, config: plots.draw(
                [[plots.Panel("", "", "", [plots.Line("", np.arange(2), np.arange(2))])]],
                title="",
                caption="",
            ),
        )

    def decide(self, budget=None, **settings):
        """Runs `decide` without checkpoints, and returns the result and the reports."""
        told, item = [], self.item
        config, result = decide(
            item, Coin(**settings), Execution(), budget or Budget(), item.make, told.append
        )
        assert config.num_seeds == result.sizes["seed"]
        return result, told


@pytest.fixture(autouse=True)
def stated(monkeypatch):
    """Registers a paper for the item."""
    monkeypatch.setattr(
        papers.item,
        "published",
        lambda name: PAPER if name == "coin" else published(name),
    )


@pytest.mark.parametrize(("mean", "verdict"), [(5.0, "supported"), (-30.0, "contradicted")])
def test_seeds_are_doubled_until_all_statements_are_settled(mean, verdict):
    """Fewer than 20 seeds decide no mean."""
    runs, batches = Runs(), [(0, 3), (3, 3), (6, 6), (12, 12)]
    result, told = runs.decide(mean=mean)
    assert runs == batches
    config = Coin(mean=mean, num_seeds=result.sizes["seed"])
    assert runs.item.findings(result, config).statements[0].verdict == verdict
    assert [line.split("; ")[-1] for line in told] == [
        *(f"adding {number} seeds" for _, number in batches[1:]),
        "there is nothing left to settle",
    ]
    assert told[1] == ("coin: 6 seeds, 1 of 2 statements not settled; above; adding 6 seeds")


def test_joined_batches_of_seeds_equal_one_run():
    """Values, labels and manifests agree, except for wall times."""
    runs = Runs()
    result, _ = runs.decide(mean=0.05)
    assert runs == [(0, 3), (3, 3), (6, 6), (12, 12)]
    whole = runs.item.make(Coin(mean=0.05, num_seeds=24))
    xr.testing.assert_identical(result.drop_attrs(), whole.drop_attrs())
    about, wanted = (dict(each.attrs["manifest"]) for each in (result, whole))
    assert about.pop("wall_seconds") == {"compile": 4.0, "run": 2.0 * 24 - 4}
    del wanted["wall_seconds"]
    assert about == wanted


@pytest.mark.parametrize(
    ("budget", "batches", "end"),
    [
        (Budget(max_seeds=10), [(0, 3), (3, 3), (6, 4)], "no more are allowed (--max-seeds)"),
        (Budget(max_seeds=3), [(0, 3)], "no more are allowed (--max-seeds)"),
        # A seed takes two seconds.
        (Budget(None, 12 / 60), [(0, 3), (3, 3)], "6 more would take too long (--max-minutes)"),
        (Budget(None, 11 / 60), [(0, 3)], "3 more would take too long (--max-minutes)"),
        (Budget(8, 16 / 60), [(0, 3), (3, 3), (6, 2)], "no more are allowed (--max-seeds)"),
    ],
)
def test_a_budget_is_not_exceeded(budget, batches, end):
    runs = Runs()
    _, told = runs.decide(budget, mean=0.05)
    assert runs == batches
    assert told[-1].endswith(f"; {end}")


@pytest.fixture
def coin(monkeypatch):
    """Makes the item known to the command line."""
    runs = Runs()
    monkeypatch.setattr(reproductions, "ITEMS", {"coin": runs.item})
    monkeypatch.setattr(reproductions, "ALL", {"coin": runs.item})
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: path.touch())
    return runs


def reproduce(out, *more, mean=0.05):
    return call("reproduce", "coin", "--set", f"mean={mean}", "--out", out, *more)


def test_unsettled_statements_are_no_failure(coin, tmp_path):
    code, out, err = reproduce(tmp_path, *SEEDS)
    assert code == 0
    shown = " ".join(out.split())
    assert "not settled section 1: “It is above.”" in shown
    assert "it would take" in shown
    assert "more seeds may settle it" in shown
    assert "defect a check of our own" in shown  # not a statement of the paper
    assert "24 seeds, 1 of 2 statements not settled; above; no more are allowed" in err
    summary = read_json(tmp_path / "coin" / "summary.json")
    above, other = summary["statements"]
    assert (above["verdict"], other["verdict"]) == ("not settled", "supported")
    assert [part["seeds"] for part in above["parts"] + other["parts"]] == [24, None]
    assert summary["checks"][0]["outcome"] == "defect"
    assert summary["manifest"]["config"]["num_seeds"] == 24
    assert files(tmp_path / "coin") == ["figure.png", "result.nc", "summary.json"]
    code, out, _ = reproduce(tmp_path, "--overwrite")
    assert code == 0
    assert "--until-settled adds seeds" in out
    assert reproduce(tmp_path, "--overwrite", *SEEDS, mean=-30.0).code == cli.CONTRADICTED


def test_finished_results_are_judged_again(coin, tmp_path):
    reproduce(tmp_path, mean=1.0)
    folder = tmp_path / "coin"
    before = (folder / "summary.json").read_text()
    digest = (folder / "result.nc").read_bytes()
    (folder / "summary.json").unlink()
    (folder / "figure.png").unlink()
    coin.clear()
    assert call("judge", tmp_path).code == 0
    assert coin == []  # nothing is computed
    assert read_json(folder / "summary.json")["statements"] == json.loads(before)["statements"]
    assert files(folder) == ["figure.png", "result.nc", "summary.json"]
    assert digest[:4] == (folder / "result.nc").read_bytes()[:4]
    reproduce(tmp_path, "--overwrite", *SEEDS, mean=-30.0)
    assert call("judge", tmp_path).code == cli.CONTRADICTED
    (tmp_path / "empty").mkdir()
    code, _, err = call("judge", tmp_path / "empty")
    assert code == cli.BAD_INPUT
    assert "holds no finished result of an item" in err


def test_a_finished_batch_is_not_computed_again(coin, tmp_path):
    reproduce(tmp_path / "whole", *SEEDS)
    coin.clear()
    coin.stop_before = 6
    assert reproduce(tmp_path, *SEEDS).code == 128 + signal.SIGTERM
    assert coin == [(0, 3), (3, 3)]
    again = reproduce(tmp_path, *SEEDS)
    assert again.code == cli.BAD_INPUT
    assert "continue it with --resume" in again.err
    other = reproduce(tmp_path, *SEEDS, "--resume", mean=0.1)
    assert other.code == cli.BAD_INPUT
    assert "is from another run, with a different config" in other.err
    coin.clear()
    coin.stop_before = np.inf
    assert reproduce(tmp_path, *SEEDS, "--resume").code == 0
    assert coin == [(6, 6), (12, 12)]
    assert files(tmp_path / "coin") == ["figure.png", "result.nc", "summary.json"]
    with (
        xr.open_dataset(tmp_path / "coin" / "result.nc") as one,
        xr.open_dataset(tmp_path / "whole" / "coin" / "result.nc") as two,
    ):
        xr.testing.assert_identical(one.drop_attrs(), two.drop_attrs())


@pytest.mark.filterwarnings("ignore:the saved result in .* is skipped")
@pytest.mark.parametrize("name", ["result.nc", "manifest.json"])
def test_a_damaged_batch_is_computed_again(coin, tmp_path, name):
    """A readable file with changed values also counts as damaged."""
    reproduce(tmp_path / "whole", *SEEDS)
    coin.stop_before = 3
    reproduce(tmp_path, *SEEDS)
    stage = tmp_path / "coin" / "unfinished" / "seeds-0"
    saved = xr.load_dataset(stage / "result.nc")
    (stage / name).unlink()
    if name == "result.nc":
        saved.assign(lead=saved["lead"] + 1.0).to_netcdf(stage / name)
    coin.clear()
    coin.stop_before = np.inf
    assert reproduce(tmp_path, *SEEDS, "--resume").code == 0
    assert coin == [(0, 3), (3, 3), (6, 6), (12, 12)]
    with (
        xr.open_dataset(tmp_path / "coin" / "result.nc") as one,
        xr.open_dataset(tmp_path / "whole" / "coin" / "result.nc") as two,
    ):
        xr.testing.assert_identical(one.drop_attrs(), two.drop_attrs())


def test_seeds_are_added_to_a_complete_result(coin, tmp_path):
    reproduce(tmp_path)
    reproduce(tmp_path, *SEEDS, "--resume", "--max-seeds", 6)
    assert coin == [(0, 3), (3, 3)]
    code, out, _ = reproduce(tmp_path, *SEEDS, "--resume", "--max-seeds", 6)
    assert (code, len(coin)) == (0, 2)
    assert "is complete; nothing to resume" in out
    coin.stop_before = 12
    reproduce(tmp_path, *SEEDS, "--resume")
    coin.stop_before = np.inf
    reproduce(tmp_path, *SEEDS, "--resume")
    assert coin == [(0, 3), (3, 3), (6, 6), (12, 12)]
    assert read_json(tmp_path / "coin" / "summary.json")["statements"][0]["parts"][0]["seeds"] == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-seeds", 5), "--max-seeds is for --until-settled"),
        (("--max-minutes", 5), "--max-minutes is for --until-settled"),
        ((*SEEDS, "--max-minutes", 0), "--max-minutes is 0; it must be positive"),
        ((*SEEDS, "--max-seeds", 2), "coin begins with 3 seeds"),
        (("--seeds", "many"), "num_seeds"),
    ],
)
def test_wrong_budgets_are_refused(coin, tmp_path, arguments, message):
    code, _, err = reproduce(tmp_path / "new", *arguments)
    assert code == cli.BAD_INPUT
    assert message in err
    assert not (tmp_path / "new").exists()


def test_until_settled_reports_an_item_without_seeds(tmp_path):
    _, _, err = call("reproduce", "cb-table1", *SEEDS, "--out", tmp_path)
    assert "--until-settled: cb-table1 has no seeds to add" in err
    assert files(tmp_path / "cb-table1") == ["figure.png", "result.nc", "summary.json"]


def test_only_draws_and_theory_have_no_seeds_to_add():
    without = {name for name in ITEMS if not isinstance(ITEMS[name].settings, Seeded)}
    draws = {"maxfl-fig5a", "maxfl-fig5b", "maxfl-fig6", "maxfl-fig8"}
    theory = {name for name in ITEMS if name.startswith("theory-")}
    assert without == draws | theory | {"cb-table1", "cb-optimal-cohort"}


SIZES = {
    "mfa-fig3": {"num_rounds": 10},
    "maxfl-table1": {
        "num_clients": 4,
        "num_unseen": 3,
        "cohort_size": 2,
        "num_rounds": 4,
        "learning_rates": (0.05,),
        "local_steps": (2,),
        "batch_sizes": (8,),
        "requirement": {"num_steps": (10,)},
        "record_every": 2,
        "methods": {"MaxFL": {"name": "maxfl"}},
    },
}


# test_cho2022_selection.py also adds seeds to a comparison of Cho et al.
@pytest.mark.parametrize("name", [slow_unless(name == "mfa-fig3", name) for name in SIZES])
def test_added_seeds_equal_those_of_a_longer_run(name):
    """Initial models, clients, thresholds, draws and labels agree."""
    item = ITEMS[name]
    values = item.settings.model_dump() | SIZES[name] | {"num_seeds": 4}
    config = validate(type(item.settings), values)
    whole, added = item.make(config), item.make(config.with_seeds(2, 2))
    assert added["seed"].values.tolist() == [2, 3]
    xr.testing.assert_allclose(added, whole.isel(seed=slice(2, 4)), rtol=1e-5)
    first = whole.isel(seed=slice(0, 2)).drop_vars("seed")
    assert not np.allclose(first["loss"], added["loss"])
