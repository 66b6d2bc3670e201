"""The command line in process: its output, files, exit codes and error messages."""

import html
import json
import re
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
import rich.progress
import xarray as xr

from fedjax_mm import open_result, plots
from fedjax_mm.base.programs import Memory
from fedjax_mm.cli import reproductions, terminal, workloads
from fedjax_mm.cli import speed as bench
from fedjax_mm.papers import ITEMS
from fedjax_mm.sweeps import plan
from fedjax_mm.tools import screen
from tests.test_cli import (
    CONFIG,
    FIG3,
    FIG5,
    Outcome,
    axes_example,
    call,
    check_refusal,
    example,
    files,
    read_json,
    words,
)


@pytest.fixture(scope="module")
def two_figures(tmp_path_factory):
    """Small versions of Figures 3 and 1, from one command."""
    out = tmp_path_factory.mktemp("figures")
    sizes = ("--rounds", 30, "--seeds", 3)
    return out, call("reproduce", "mfa-fig3", "mfa-fig1", *sizes, "--out", out)


class Gain(NamedTuple):
    """A small part of Figure 5."""

    outcome: Outcome
    directory: Path
    bar: list[float]  # the fraction done, at every update


@pytest.fixture(scope="module")
def gain(tmp_path_factory):
    """Outcomes by number of rounds, enough for the target and too few.

    Only the longer run is computed, and the shorter one takes its first records.
    """
    item, results = ITEMS["mfa-fig5"], []

    def run(config, execution):
        if not results:
            results.append(item.run(config, execution))
        return results[0].sel(round=slice(0, config.num_rounds))

    def reproduce(num_rounds):
        bar = []

        class Recorder(rich.progress.Progress):
            def update(self, task_id, *, completed, total, **fields):
                bar.append(completed / total)
                super().update(task_id, completed=completed, total=total, **fields)

        out = tmp_path_factory.mktemp("gain")
        sizes = ("--set", "num_models=[1,2]", "--set", "local_steps=[5]", "--seeds", 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rich.progress, "Progress", Recorder)
            patch.setattr(terminal.notes, "_force_terminal", True)
            patch.setattr(reproductions, "ITEMS", {item.id: item._replace(run=run)})
            command = ("reproduce", "mfa-fig5", *sizes, "--rounds", num_rounds, "--out", out)
            return Gain(call(*command), out / "mfa-fig5", bar)

    return {num_rounds: reproduce(num_rounds) for num_rounds in (30, 5)}


SHORT = ("--set", "num_rounds=26", "--set", "num_seeds=2", "--set", "axes.learning_rate.num=4")


@pytest.fixture(scope="module")
def own_sweep(tmp_path_factory):
    """A shorter version of the example, with some rates that diverge."""
    directory = tmp_path_factory.mktemp("sweep")
    config = directory / "mine.toml"
    config.write_text(f"{example()}\n{axes_example()}")
    hot = ("--set", "axes.learning_rate.stop=300.0", "--set", "axes.num_models=[12]")
    return directory / "out", call("sweep", config, *SHORT, *hot, "--out", directory / "out")


def test_items_with_equal_settings_share_their_runs(tmp_path, monkeypatch, two_figures):
    """Figures with the same settings are computed once, and those with other settings again.

    An existing result stands in for every run, because the numbers do not matter.
    """
    runs = []

    def run(config, execution):
        runs.append(config)
        return open_result(two_figures[0] / "mfa-fig1")

    one, two = names = ("mfa-fig1", "mfa-fig2")  # with the same statements in the paper
    first = ITEMS[one]._replace(run=run)
    items = {item.id: item for item in (first, first._replace(id=two))}
    monkeypatch.setattr(reproductions, "ITEMS", items)
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: path.touch())
    command = ("reproduce", *names, "--rounds", 30, "--seeds", 3, "--out", tmp_path)
    assert call(*command).code in (0, 3)
    assert len(runs) == 1
    for name in names:
        assert files(tmp_path / name) == ["figure.png", "result.nc", "summary.json"]
        assert read_json(tmp_path / name / "summary.json")["id"] == name
    other = items[two].settings.model_copy(update={"num_seeds": 4})
    items[two] = items[two]._replace(settings=other)
    assert call(*command[:3], "--rounds", 30, "--out", tmp_path, "--overwrite").code in (0, 3)
    assert len(runs) == 3


@pytest.mark.parametrize("name", ["mfa-fig3", "mfa-fig1"])
def test_reproduce_writes_result_figure_and_summary(two_figures, name):
    out, outcome = two_figures
    directory = out / name
    assert files(directory) == ["figure.png", "result.nc", "summary.json"]
    assert (directory / "figure.png").read_bytes().startswith(b"\x89PNG")

    summary = read_json(directory / "summary.json")
    first = ["id", "paper", "measured", "statements", "numbers", "checks", "readings", "tables"]
    assert list(summary) == [*first, "changed", "data", "manifest", "files", "digest"]
    assert sorted(summary["changed"]) == ["num_rounds=30", "num_seeds=3"]
    (table,) = summary["tables"]
    assert all(cell in outcome.out for row in table["rows"] for cell in row)
    assert (summary["id"], summary["data"]) == (name, "synthetic")
    published = dict(ITEMS[name].paper)
    assert [each["quote"] for each in summary["statements"]] == [
        each["quote"] for each in published.pop("statements")
    ]
    assert summary["paper"] == {
        key: x for key, x in published.items() if key not in ("module", "title", "runtime", "needs")
    }
    for statement in summary["statements"]:
        assert words(f"“{statement['quote']}”") in words(outcome.out)
        for part in statement["parts"]:
            assert words(part["evidence"]) in words(outcome.out)
            assert part["seeds"] == 3
    measured = xr.Dataset.from_dict(summary["measured"])
    assert measured.algorithm.values.tolist() == ["MFA-Rand", "MFA-RR"]
    for number in measured.drop_dims("seed").to_dataarray().values.ravel():
        assert f"{number:.4f}" in outcome.out

    with xr.open_dataset(directory / "result.nc") as result:
        num_models = {"mfa-fig3": 12, "mfa-fig1": 2}[name]
        sizes = {"algorithm": 2, "seed": 3, "round": 31, "model": num_models}
        assert dict(result.sizes) == sizes
        # The numbers in the summary agree with the file.
        last = result.gap.isel(round=-1).mean(("seed", "model"))
        for label in ("MFA-Rand", "MFA-RR"):
            found = measured["gap at the end"].sel(algorithm=label).item()
            assert found == pytest.approx(last.sel(algorithm=label).item())


def test_gain_is_reproduced(gain):
    outcome, directory, _ = gain[30]
    summary = read_json(directory / "summary.json")
    assert outcome.code == 0
    assert [each["key"] for each in summary["statements"]] == ["increases"]
    with xr.open_dataset(directory / "result.nc") as result:
        assert result.distance.sizes["num_models"] == 2
    measured = xr.Dataset.from_dict(summary["measured"]).sel(E=5)
    for label in ("MFA-Rand", "MFA-RR"):
        here = measured.sel(algorithm=label)
        single, multi = here.rounds.sel(M=[1, 2]).values
        assert here.gain.values.tolist() == [1.0, 2 * single / multi]
        assert f"T={multi:.0f}" in outcome.out


def test_two_seeds_that_reach_no_target_settle_nothing_and_are_not_a_failure(gain):
    outcome, directory, _ = gain[5]
    summary = read_json(directory / "summary.json")
    assert outcome.code == 0
    assert [each["verdict"] for each in summary["statements"]] == ["not settled"]
    assert "not settled section 6.3" in words(outcome.out)
    assert "not reached" in outcome.out
    gains = summary["measured"]["data_vars"]["gain"]
    assert gains["dims"] == ["algorithm", "E", "M"]
    assert gains["data"] == [[[None, None]]] * 2
    assert files(directory) == ["figure.png", "result.nc", "summary.json"]


def test_nested_settings_and_options_reach_the_run(tmp_path):
    settings = (
        *("--set", "task.start=zeros"),
        *("--set", "task.num_clients=4"),
        *("--set", "learning_rate.beta=30"),
        *("--set", "learning_rate.gamma=100"),
        *("--set", "seed=7"),
        *("--rounds", 2, "--seeds", 2),
    )
    outcome = call("reproduce", "mfa-fig1", *settings, "--out", tmp_path)
    assert outcome.code in (0, 3)
    config = read_json(tmp_path / "mfa-fig1" / "summary.json")["manifest"]["config"]
    assert (config["task"]["start"], config["task"]["num_clients"]) == ("zeros", 4)
    assert config["learning_rate"] == {"beta": 30, "gamma": 100, "per": "round"}
    assert (config["seed"], config["num_rounds"], config["num_seeds"]) == (7, 2, 2)
    assert config["task"]["mu"] == 2e-4  # a default in the same table
    with xr.open_dataset(tmp_path / "mfa-fig1" / "result.nc") as result:
        assert result.client_updates.isel(round=-1).sum("model").values.tolist() == [[8, 8]] * 2
        assert result.distance.isel(round=0).std() == 0


def test_final_parameters_are_saved_and_can_start_a_run(tmp_path):
    """They can be added to a finished result, and an overwriting run without them deletes them."""
    config = tmp_path / "mine.toml"
    config.write_text(CONFIG)
    command = ("run", config, "--set", "num_seeds=2", "--out", tmp_path)
    params = tmp_path / "mine" / "params.npz"
    assert call(*command).code == 0
    assert not params.exists()
    outcome = call(*command, "--save-params", "--resume")
    assert "params.npz, result.nc, manifest.json" in words(outcome.out)
    first = open_result(tmp_path / "mine")
    again = call(*command, "--save-params", "--resume")
    assert "is complete; nothing to resume" in words(again.out)
    (kept := tmp_path / "kept.npz").write_bytes(params.read_bytes())
    outcome = call(*command, "--set", f'params="{kept}"', "--overwrite")
    assert (outcome.code, outcome.err) == (0, "")
    assert not params.exists()
    begins = open_result(tmp_path / "mine").distance.sel(round=0)
    np.testing.assert_allclose(begins, first.distance.sel(round=4), rtol=1e-6)
    wrong = call(*command, "--set", 'params="nothing.npz"')
    assert (wrong.code, wrong.out) == (2, "")
    assert "file nothing.npz does not exist" in wrong.err


def test_run_stops_at_divergence_and_keeps_earlier_records(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("hot.toml").write_text(CONFIG)
    settings = ("num_rounds=80", "num_seeds=2", "algorithms.A.learning_rate=50")
    code, out, err = call("run", "hot.toml", *(f"--set={setting}" for setting in settings))
    assert (code, out) == (1, "")
    found = re.fullmatch(
        r"fedjax-mm: A diverged: the loss or a parameter of model \d, seed \d, is not finite in "
        r"round (\d+); lower the learning rate\n",
        err,
    )
    assert found, err
    directory = tmp_path / "results" / "hot"
    assert files(directory) == ["figure.png", "manifest.json", "result.nc"]
    with xr.open_dataset(directory / "result.nc") as result:
        assert result.diverged.where(result.diverged >= 0).min() == int(found[1])
        assert np.isfinite(result.loss.sel(round=slice(0, int(found[1]) - 1))).all()
        assert result.sizes["round"] == 81


FEW = ("--set", "axes.num_models=[2]", "--set", "algorithms.MFA-Rand.local_steps=1")


def test_sweep_writes_a_labelled_result_and_a_figure(own_sweep):
    out, outcome = own_sweep
    assert outcome.code == 0
    assert files(out / "mine") == ["figure.png", "manifest.json", "result.nc"]
    assert (out / "mine" / "figure.png").read_bytes().startswith(b"\x89PNG")
    with xr.open_dataset(out / "mine" / "result.nc") as result:
        dims = ("algorithm", "num_models", "mu", "learning_rate", "seed", "round", "model")
        assert result.excess_loss.dims == dims
        assert result.num_models.values.tolist() == [12]
        assert result.mu.values.tolist() == [2e-4, 0.05]
        np.testing.assert_allclose(result.learning_rate, np.geomspace(0.01, 300, 4), rtol=1e-11)
        runs = (result.diverged >= 0).any("model")
        assert 0 < runs.sum() < runs.size
        assert not runs.sel(learning_rate=0.01).any()
        assert f"diverged: {runs.sum().item()} of {runs.size} runs" in words(outcome.out)
        manifest = read_json(out / "mine" / "manifest.json")
        assert "result.nc" in manifest.pop("files")
        del manifest["digest"]
        assert json.loads(result.attrs["manifest"]) == manifest
    assert manifest["config"]["axes"]["task.mu"] == [2e-4, 0.05]
    assert "figure.png, result.nc, manifest.json" in words(outcome.out)


def test_sweep_announces_its_plan(own_sweep):
    """2 programs have 8 settings and 2 seeds each, and 24 clients train in each of 26 rounds."""
    shown = words(own_sweep[1].err)
    for program in ("MFA-Rand, num_models=12 16", "MFA-RR, num_models=12 16"):
        assert program in shown
    assert "2 programs, each compiled once" in shown
    number = jax.device_count()
    assert f"{2 * 16 * 24 * 26:,} local trainings on {number} of {number} devices" in shown
    assert "share out the replicas" in shown
    assert "GiB may be used" in shown
    assert "split" not in shown


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_a_dry_run_shows_the_plan_without_compiling_and_writes_nothing(
    monkeypatch, tmp_path, command
):
    def compile_(*_):
        raise AssertionError

    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(f"{example()}\n{axes_example() if command == 'sweep' else ''}")
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    settings = (*SHORT, *FEW) if command == "sweep" else SHORT[:4]
    code, out, err = call(command, "mine.toml", *settings, "--dry-run")
    assert (code, out) == (0, "")
    runs = {"run": 2 * 2, "sweep": 2 * 2 * 2 * 4}[command]
    assert f"2 programs to compile; {runs * 24 * 26:,} local trainings" in words(err)
    assert re.search(r"memory: at least [\d.]+ GiB = .* GiB may be used", words(err))
    assert "known once it is compiled" in words(err)
    assert files(tmp_path) == ["mine.toml"]


def test_bench_times_every_algorithm(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    tiny = workloads.Workload("W1", 4, 2, 3, 2)
    monkeypatch.setattr(workloads, "WORKLOADS", {"W1": tiny, "W2": tiny})
    code, out, err = call("bench", "W1", "--repeats", 1)
    assert (code, err) == (0, "")
    assert [len(re.findall(rf"\b{name}\b", out)) for name in ("W1", "W2")] == [2, 0]
    assert files(tmp_path) == []


def test_bench_trains_a_classifier(monkeypatch):
    model = workloads.Model((6,), (), (4, 3))
    tiny = workloads.LearningWorkload("W3", model, 4, 10, 2, 3, 5, num_rounds=2)
    epoch = workloads.LearningWorkload("A8", workloads.LOGISTIC, 3, None, 3, None, 40)
    monkeypatch.setattr(workloads, "WORKLOADS", {"W3": tiny, "A8": epoch})
    monkeypatch.setattr(bench, "gemm_peak", lambda: {"NumPy": 100.0})
    code, out, err = call("bench", "--repeats", 1)
    assert (code, err) == (0, "")
    assert "W3" in out
    assert "A8" in out


WRONG_CONFIGS = {
    "not TOML": (("mu = 0.1", "mu = = 0.1"), ("line 7", "not a toml file")),
    "misspelt": (("num_rounds", "num_round"), ("num_round = 4", "did you mean 'num_rounds'")),
    "misspelt below": (("local_steps", "local_step"), ("local_step = 2", "'local_steps'")),
    "wrong type": (("num_models = 2", 'num_models = "two"'), ("num_models = 'two'", "integer")),
    "missing key": (("num_models = 2", ""), ("num_models", "missing")),
    "missing table": (("[algorithms.A]", "[task.A]"), ("algorithms", "missing")),
    "unknown assignment": (
        ('"mfa_rand"', '"mfa_random"'),
        ("'mfa_random'", "'mfa_rand', 'mfa_rr'"),
    ),
    "cohort too small": (
        ('"mfa_rand" }', '"mfa_rand", cohort_size = 1 }'),
        ("num_models is 2", "at most 1 models"),
    ),
    "one model only": (
        ('"mfa_rand" }', '"fedcluster", num_clusters = 2 }'),
        ("num_models is 2", "fedcluster trains 1 model"),
    ),
    "records": (("num_models = 2", "num_models = 2\nrecord_every = 3"), ("3", "divide 4 rounds")),
    "available a number": (
        ('"mfa_rand" }', '"mfa_rand", available = 0.8 }'),
        ('assignment.available = 0.8: give a table, such as { name = "bernoulli" }',),
    ),
    "privacy a number": (
        ("local_steps = 2", "local_steps = 2\nprivacy = 1.0"),
        ("privacy = 1.0: give a table with adaptive, clients_per_round, clip, noise_multiplier",),
    ),
    "an axis a number": (
        ("num_models = 2", "num_models = 2\naxes = { learning_rate = 0.1 }"),
        ("axes.learning_rate = 0.1: give a list",),
    ),
    "two targets": (
        (
            "num_models = 2",
            'num_models = 2\nuntil = { metric = "loss", at_least = 1, at_most = 2 }',
        ),
        ("until has at_least = 1.0, at_most = 2.0", "give one"),
    ),
    "b1 of 2": (
        ("local_steps = 2", 'local_steps = 2\noptimizer = { name = "adam", b1 = 2 }'),
        ("optimizer.b1 = 2", "less than 1"),
    ),
    "momentum of -1": (
        ("local_steps = 2", 'local_steps = 2\nserver_optimizer = { name = "sgd", momentum = -1 }'),
        ("server_optimizer.momentum = -1", "greater than or equal to 0"),
    ),
    "diverging curvature": (("mu = 0.1", "mu = -0.1"), ("task.mu = -0.1", "greater than 0")),
}


WRONG_AXES = {
    "unknown": ("num_modles = [2]", ("num_modles", "did you mean 'num_models'")),
    "unknown below": ("task.muu = [1.0]", ("task.muu", "did you mean 'mu'")),
    "too many models": ("num_models = [2, 9]", ("at num_models = 9", "at most 4 models")),
    "negative": ("learning_rate = [0.1, -1]", ("learning_rate = -1", "greater than 0")),
    "twice": ("local_steps = [2, 3, 2]", ("'local_steps' has 2 twice",)),
    "empty": ("learning_rate = []", ("axes.learning_rate", "at least 1 value")),
    "rounds": ("num_rounds = [2, 4]", ("axes.num_rounds", "cannot vary within a sweep")),
}


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_a_wrong_configuration_is_refused_in_one_line(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    (old, new), fragments = WRONG_CONFIGS[name]
    assert CONFIG.count(old) == 1
    Path("wrong.toml").write_text(CONFIG.replace(old, new))
    check_refusal(tmp_path, ("run", "wrong.toml"), ("wrong.toml", *fragments))


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
@pytest.mark.parametrize("name", WRONG_AXES)
def test_wrong_axes_are_refused_in_one_line(monkeypatch, tmp_path, name, options):
    monkeypatch.chdir(tmp_path)
    axes, fragments = WRONG_AXES[name]
    Path("wrong.toml").write_text(f"{CONFIG}\n[axes]\n{axes}\n")
    check_refusal(tmp_path, ("sweep", "wrong.toml", *options), fragments)


IDLE = """
[algorithms.LVR]
assignment = { name = "variance_reduced", expected_trainings = 2 }
learning_rate = 0.1
local_steps = 2
"""


@pytest.mark.parametrize("axes", ["", "[axes]\nlearning_rate = [0.1, 0.2]"])
def test_a_run_without_participants_warns(monkeypatch, tmp_path, axes):
    """At zeros all losses of the quadratic are 0, so LVR draws nobody while MFA-Rand does."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(
        CONFIG.replace("mu = 0.1", 'mu = 0.1\nstart = "zeros"') + IDLE + axes
    )
    of = "6 of 12" if axes else "3 of 6"
    said = f"nobody trained in any round of {of} runs, first in LVR,.* none whose loss is 0"
    with pytest.warns(UserWarning, match=said):
        assert call("sweep" if axes else "run", "mine.toml", "--set", "num_seeds=3").code == 0


def test_a_root_seed_is_distinguished_from_the_labels(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(CONFIG)
    both = ("run", "mine.toml", "--set", "num_seeds=2")
    code, out, _ = call(*both, "--set", "seed=2")
    assert code == 0
    assert "seed = 2 is the root of all draws; the runs have the labels 0 ... 1" in words(out)
    assert "--first-seed" in out
    assert "root of all draws" not in words(call(*both, "--out", "other").out)


def test_an_interrupt_reports_the_number_of_compiled_programs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(f"{CONFIG}\n[axes]\nnum_models = [1, 2, 3]\n")
    lowered = []

    def third_is_interrupted(*given):
        lowered.append(given)
        if len(lowered) == 3:
            raise KeyboardInterrupt
        return lower(*given)

    lower = plan._lower
    monkeypatch.setattr(plan, "_lower", third_is_interrupted)
    monkeypatch.setattr(plan, "_compiled", Memory(1))
    code, _, err = call("sweep", "mine.toml", "--set", "num_seeds=2")
    assert code == 130
    assert re.search("interrupted; [0-2] of 3 programs were compiled", words(err))


def test_the_unmodified_configuration_is_valid(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("right.toml").write_text(CONFIG)
    assert call("run", "right.toml", "--set", "num_seeds=1").code == 0
    assert files(tmp_path / "results" / "right") == ["figure.png", "manifest.json", "result.nc"]


def test_a_report_shows_the_reproduced_items(two_figures, tmp_path):
    out, _ = two_figures
    code, printed, err = call("report", out, "--out", tmp_path / "page.html")
    assert (code, err) == (0, "")
    assert words(printed) == f"items: 2, other runs: 0, problems: 0; in {tmp_path / 'page.html'}"
    text = (tmp_path / "page.html").read_text()
    assert text.count("data:image/png") == 2
    for path in out.rglob("summary.json"):
        summary = read_json(path)
        for statement in summary["statements"]:
            assert html.escape(statement["quote"], quote=False) in text
        for cell in summary["tables"][0]["rows"][0]:
            assert f"<td>{cell}</td>" in text
        command = f"fedjax-mm reproduce {summary['id']} --set num_seeds=3 --set num_rounds=30"
        assert command in text


def test_a_summary_records_its_provenance(two_figures):
    manifest = read_json(two_figures[0] / "mfa-fig3" / "summary.json")["manifest"]
    assert {"versions", "device", "seed", "prng", "git_revision", "config"} <= set(manifest)
    assert {"python", "fedjax-mm", "jax", "jaxlib", "numpy"} <= set(manifest["versions"])
    assert manifest["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert manifest["device"]["platform"] == jax.default_backend()
    assert (manifest["seed"], manifest["prng"]) == (0, "threefry2x32")
    assert set(manifest["wall_seconds"]) == {"compile", "run"}
    assert all(seconds > 0 for seconds in manifest["wall_seconds"].values())
    default = ITEMS["mfa-fig3"].settings.model_dump()
    assert manifest["config"] == default | {"num_rounds": 30, "num_seeds": 3}


def test_reproduce_exits_with_3_if_a_statement_is_contradicted(two_figures):
    out, outcome = two_figures
    summaries = [read_json(path) for path in sorted(out.rglob("summary.json"))]
    verdicts = [each["verdict"] for summary in summaries for each in summary["statements"]]
    assert len(verdicts) == 4
    assert outcome.code == (3 if "contradicted" in verdicts else 0)


def test_the_progress_bar_never_goes_back_and_reaches_the_end(gain):
    bar = gain[30].bar
    assert (bar[0], bar[-1]) == (0, 1)
    assert bar == sorted(bar)


def test_sweep_shows_the_last_values(own_sweep):
    """Shows the main metric, without standard errors of two seeds, omitting diverged runs."""
    out, outcome = own_sweep
    with xr.open_dataset(out / "mine" / "result.nc") as result:
        last = result.excess_loss.isel(round=-1).astype(float).mean("model")
        is_whole = (result.diverged < 0).all("model")
        values = last.where(is_whole).sel(algorithm="MFA-RR", num_models=12, mu=0.05)
        for rate in result.learning_rate.values:
            here = values.sel(learning_rate=rate)
            text = f"{here.mean().item():.4g}"
            row = f"MFA-RR │ 12 │ 0.05 │ {rate:g} │ "
            shown = text if here.notnull().all() else "diverged"
            assert f"{row}{shown} │" in words(outcome.out)
    assert "also in the file: distance, client_updates" in words(outcome.out)


MORE_WRONG_COMMANDS = {
    "no local steps": ((*FIG3, "--set", "local_steps=0"), ("local_steps = 0", "equal to 1")),
    "zero rate": ((*FIG3, "--set", "learning_rate=0"), ("learning_rate", "= 0", "than 0")),
    "negative rate": ((*FIG3, "--set", "learning_rate=-0.1"), ("learning_rate", "-0.1", "than 0")),
    "rate not a number": (
        (*FIG3, "--set", "learning_rate=nan"),
        ("learning_rate", "nan", "finite"),
    ),
    "rate misspelt": (
        (*FIG3, "--set", "learning_rate={beta=30, gama=100}"),
        ("gama", "did you mean 'gamma'"),
    ),
    "unknown experiment": (("reproduce", "mfa-fig9"), ("'mfa-fig9'", "mfa-fig1, mfa-fig2")),
    "one of several unknown": ((*FIG3, "mfa-fig9"), ("'mfa-fig9'", "mfa-fig1, mfa-fig2")),
    "one seed has no spread": ((*FIG3, "--seeds", 1), ("num_seeds = 1", "equal to 2")),
    "no rounds": ((*FIG3, "--rounds", 0), ("num_rounds = 0", "equal to 1")),
    "negative rounds": ((*FIG3, "--rounds", -5), ("num_rounds = -5", "equal to 1")),
    "setting without a key": ((*FIG3, "--set", "=3"), ("=3", "key=value")),
    "nested setting misspelt": ((*FIG3, "--set", "task.strat=zeros"), ("task.strat", "'start'")),
    "unknown precision": ((*FIG3, "--set", "precision=half"), ("'half'", "'float32' or 'float64'")),
    "steps given twice": (
        (*FIG5, "--rounds", 2, "--set", "num_models=[1,2]", "--set", "local_steps=[5,5]"),
        ("local_steps", "5, 5"),
    ),
    "no target": ((*FIG5, "--set", "threshold=1.5"), ("threshold = 1.5", "less than 1")),
}


@pytest.mark.parametrize("name", MORE_WRONG_COMMANDS)
def test_more_wrong_commands_are_refused_in_one_line(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    check_refusal(tmp_path, *MORE_WRONG_COMMANDS[name])


class Clock:
    """A fake clock that tests advance by hand."""

    def __init__(self, patch):
        self.now = 1000.0
        patch.setattr(terminal, "time", self)
        patch.setattr(screen, "time", self)

    def monotonic(self):
        return self.now


def test_the_time_left_is_estimated_from_the_work_of_this_run(monkeypatch):
    """Compilation and the work of an earlier run do not count."""
    clock = Clock(monkeypatch)
    left = screen.time_left()
    assert left(0, 1) == ""  # compiling
    clock.now += 60
    assert left(20, 100) == ""  # continued at a fifth
    clock.now += 10
    assert left(25, 100) == "0:02:30 left"
    clock.now += 10
    assert left(60, 100) == "0:00:20 left"
    assert left(100, 100) == "0:00:00 left"


def test_progress_without_a_terminal_is_logged_in_lines(monkeypatch, capsys):
    """At most one line per interval, with the fraction done, the label and the time left."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(terminal, "_LOG_SECONDS", 10)
    monkeypatch.setattr(terminal, "notes", terminal.Console(stderr=True))
    with terminal.shown_progress() as report:
        for second in range(25):
            report("A, num_models=2", second, 50)
            clock.now += 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["20% A, num_models=2 0:00:40 left", "40% A, num_models=2 0:00:30 left"]


def test_progress_is_repeated_during_a_long_round(monkeypatch, capsys):
    said = threading.Event()

    def say(text, *_):
        print(text)
        said.set()

    monkeypatch.setattr(terminal, "_LOG_SECONDS", 0.01)
    monkeypatch.setattr(terminal, "say", say)
    with terminal.reminded(lambda *_: None) as report:
        report("A, num_models=2", 1, 4)
        assert said.wait(60)
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("25% A, num_models=2 for 0:00:00; forecast after a round")


def test_bench_shows_every_number_in_full(monkeypatch):
    """A terminal of 80 columns has room for a laptop's numbers."""
    monkeypatch.setattr(bench, "build", lambda *_: bench.Program(lambda: None, 1.05, 1456.3))
    monkeypatch.setattr(bench, "median_seconds", lambda *_: 0.0548)
    shown = call("bench", "W1").out
    for cell in ("MFA-Rand", "MFA-RR", "1.05", "0.055", f"{24 * 1000 * 20 / 0.0548:,.0f}", "1456"):
        assert shown.count(cell) >= 1
    assert "…" not in shown


def test_bench_compares_classifiers_with_the_peak(monkeypatch):
    monkeypatch.setattr(bench, "build", lambda *_: bench.Program(lambda: None, 12.34, 1456.3, 1.25))
    monkeypatch.setattr(bench, "median_seconds", lambda *_: 0.0548)
    monkeypatch.setattr(bench, "gemm_peak", lambda: {"NumPy": 100.0, "jax": 200.0})
    shown = call("bench", "W2b").out
    speed = 200 * 1000 / 0.0548
    gflops = speed * 5 * 20 * 4 * 60 * 5 / 1e9
    for cell in ("12.34", "0.055", f"{200 / 0.0548:,.1f}", f"{speed:,.0f}", "1.25", "1456"):
        assert cell in shown
    assert f"{gflops:.1f}" in shown
    assert f"{gflops / 200:.1%}" in shown
    assert "peak 200 GFLOP/s" in words(shown)
    assert "…" not in shown
