"""Comparison of the methods of a single model: a small run, and verdicts on made-up accuracies."""

import json
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
import xarray as xr

from fedjax_mm import fedprox, local_sgd, mfa_rand, simulate
from fedjax_mm.cli import main
from fedjax_mm.experiments.overrides import validate
from fedjax_mm.papers import ITEMS
from fedjax_mm.papers.methods_compare import METHODS
from fedjax_mm.plots import save_figure
from fedjax_mm.tasks import MLP, classification

ITEM = ITEMS["methods-compare"]
SMALL = validate(
    type(ITEM.settings),
    ITEM.settings.model_dump()
    | {
        "problems": ["digits"],
        "alphas": [0.5],
        "clients": ["some"],
        "methods": ["FedAvg", "FedProx", "FedPer"],
        "rates": [0.05, 0.2, 0.8],
        "num_clients": 6,
        "cohort_size": 2,
        "num_examples": 300,
        "selection_seeds": 2,
        "num_rounds": 5,
        "num_seeds": 2,
        "record_every": 1,
    },
)


@pytest.fixture(scope="module")
def result():
    return ITEM.make(SMALL)


def test_a_small_instance_runs_from_data_to_figure(result, tmp_path):
    assert dict(result["accuracy"].sizes) == {
        "problem": 1, "clients": 1, "algorithm": 3, "momentum": 2, "seed": 2, "round": 6
    }  # fmt: skip
    assert result["accuracy"].notnull().all()
    scores = result["selection_accuracy"].mean("selection_seed")
    chosen = {name: result[f"chosen_{name}"] for name in ("rate", "own")}
    np.testing.assert_array_equal(scores.sel(chosen), scores.max(["rate", "own"]))
    assert set(chosen["own"].sel(algorithm="FedProx").values.ravel()) <= set(
        METHODS["FedProx"].values
    )
    # FedPer keeps its last layer, so it sends less.
    sent = result["sent"].isel(round=-1, seed=0, momentum=0).squeeze()
    assert sent.sel(algorithm="FedPer") < sent.sel(algorithm="FedAvg")
    findings = ITEM.findings(result, SMALL)
    assert [check.outcome for check in findings.checks[:2]] == ["undecided"] * 2  # two seeds
    assert len(findings.tables) == 2
    figure = ITEM.figure(result, findings.measured, SMALL)
    save_figure(figure, tmp_path / "figure.png")


def test_a_run_equals_simulate(result):
    at = {"algorithm": "FedProx", "momentum": 0.9}
    here = result.sel(at).isel(problem=0, clients=0, seed=1)
    (problem,) = SMALL.chosen
    data = SMALL.data(problem).select(1)
    rate, mu = here["chosen_rate"].item(), here["chosen_own"].item()
    local = local_sgd(rate * (1 - 0.9), epochs=2, batch_size=20, momentum=0.9)
    task = classification(data, MLP(10, (64, 30)), scale=1 / 255)
    rng_key = jax.random.fold_in(jax.random.key(SMALL.seed), 1)
    _, trace = simulate(rng_key, task, fedprox(local, mu=mu), mfa_rand(6, 1, cohort_size=2), 5)
    np.testing.assert_allclose(trace.metrics["test_accuracy"][:, 0], here["accuracy"], atol=0.02)


def test_methods_are_compared_with_fedavg_seed_by_seed():
    rng = np.random.default_rng(0)
    config = SMALL.model_copy(update={"num_seeds": 20})
    base = rng.uniform(0.5, 0.9, (1, 1, 2, 20, 6))  # seeds differ by far more than methods
    ahead, level = base + 0.05, base + rng.normal(0, 1e-3, base.shape)
    accuracy = np.stack([base, ahead, level], 2)
    dims = ("problem", "clients", "algorithm", "momentum", "seed", "round")
    coords = {
        "problem": list(config.chosen), "clients": ["some"], "algorithm": list(config.methods),
        "momentum": [0.0, 0.9], "seed": range(20), "round": range(6),
    }  # fmt: skip
    made = xr.Dataset({"accuracy": (dims, accuracy), "sent": (dims, 1e6 * np.ones(accuracy.shape))})
    made = made.assign_coords(coords)
    for name, value in {"rate": 0.2, "own": 1.0}.items():
        made[f"chosen_{name}"] = (dims[:4], np.full(accuracy.shape[:4], value))
    checks = list(ITEM.judge(ITEM.measure(made, config), config))
    assert [check.outcome for check in checks] == ["ahead", "level", "passed"]
    assert "ahead in 2 of 2 conditions" in checks[0].evidence


ROOT = Path(__file__).parent.parent.parent
TUNED = sorted((ROOT / "fedjax_mm/cli/templates/methods-compare").iterdir())


def test_a_file_to_start_from_has_the_published_settings():
    summary = json.loads((ROOT / "docs/summaries/methods-compare.json").read_text())
    at = {"problem": "digits, Dirichlet(0.1)", "clients": "some", "momentum": 0.9}
    chosen = xr.Dataset.from_dict(summary["measured"]).sel(at)
    assert len(TUNED) == len(METHODS)
    for path in TUNED:
        (name, table), *_ = tomllib.loads(path.read_text())["algorithms"].items()
        here = chosen.sel(algorithm=name)
        np.testing.assert_allclose(table["learning_rate"], 0.1 * here["rate"])
        if key := METHODS[name].setting:
            own = table.get(key) or table["server_optimizer"]["learning_rate"]
            np.testing.assert_allclose(own, here["own"])


def test_a_file_to_start_from_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return ended.value.code

    for path in (TUNED[0].parents[1] / "experiment.toml", *TUNED):
        assert max(map(len, path.read_text().splitlines())) <= 80  # columns of a terminal
    assert call("init", "mine.toml", "--like", "methods-compare/fedprox") == 0
    small = [f"--set={x}" for x in ("num_rounds=2", "num_seeds=1", "task.num_clients=5")]
    assert call("run", "mine.toml", *small) == 0
    assert call("init", "other.toml", "--like", "fedprox") == 2
    assert "take one of experiment, methods-compare/afl" in capsys.readouterr().err
