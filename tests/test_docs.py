"""What README shows, runs."""

import json
import re
import shutil
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fedjax_mm import Experiment, run
from fedjax_mm.cli import app, page
from fedjax_mm.experiments.methods import METHOD_TABLES, Method
from fedjax_mm.experiments.optimizers import OPTIMIZER_TABLES, SCHEDULE_TABLES, Scheduled
from fedjax_mm.experiments.overrides import validate
from tests.experiments.test_method_tables import EXAMPLES, METHOD
from tests.helpers import slow_unless

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXPERIMENTS = (ROOT / "docs" / "experiments.md").read_text()


@pytest.mark.parametrize("rounds", [slow_unless(rounds == 20, rounds) for rounds in (20, 1000)])
def test_readme_code_runs(rounds, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 15
    assert "num_rounds=1000" in code
    code = code.replace("num_rounds=1000", f"num_rounds={rounds}")
    exec(compile(code, "README.md", "exec"), {})
    assert "learning_rate" in capsys.readouterr().out


def test_readme_names_only_commands_and_functions_that_exist():
    import fedjax_mm

    commands = set(re.findall(r"^    fedjax-mm (\w+)", README, re.MULTILINE))
    assert commands == {
        command.name or command.callback.__name__ for command in app.registered_commands
    }
    for name in re.findall(r"^\| `(\w+)\(", README, re.MULTILINE):
        assert name in fedjax_mm.__all__
    assert len(README.splitlines()) <= 160


SUMMARIES = sorted((ROOT / "docs" / "summaries").glob("*.json"))


def test_the_results_are_the_page_of_their_summaries(tmp_path):
    """Nobody edits `docs/results.md`: it is what `fedjax-mm report` makes of the summaries."""
    assert len(SUMMARIES) >= 18
    figures = ROOT / "docs" / "figures"
    for path in SUMMARIES:
        folder = tmp_path / "results" / path.stem
        folder.mkdir(parents=True)
        shutil.copy(path, folder / "summary.json")
        shutil.copy(figures / f"{path.stem}.png", folder / "figure.png")
        (folder / "result.nc").touch()
    page.write(tmp_path / "results", "md", tmp_path / "results.md")
    expected = (tmp_path / "results.md").read_text()
    assert (ROOT / "docs" / "results.md").read_text() == expected
    assert {path.stem for path in figures.iterdir()} == {path.stem for path in SUMMARIES}
    assert not re.search(r"/(home|root|tmp|work)/", "".join(map(Path.read_text, SUMMARIES)))


def test_readme_counts_the_verdicts_of_the_results():
    verdicts = Counter(
        claim["verdict"] for path in SUMMARIES for claim in json.loads(path.read_text())["claims"]
    )
    counts = [f"{verdicts[name]} {name}" for name in ("holds", "fails", "open")]
    wanted = f"{len(SUMMARIES)} figures and tables, claims: {', '.join(counts)}"
    assert wanted in " ".join(README.split()), wanted


def test_the_documented_experiment_runs_and_may_be_swept():
    text, *_ = re.findall(r"```toml\n(.*?)```", EXPERIMENTS, re.DOTALL)
    short = ["num_rounds=2", "record_every=2", "num_seeds=1", "requirement.num_steps=5"]
    experiment = validate(Experiment, tomllib.loads(text), short)
    first = {"MaxFL": experiment.algorithms["MaxFL"]}
    result = run(experiment.model_copy(update={"algorithms": first}))
    assert np.isfinite(result.unseen_preferred_accuracy).all()
    of_optimizers, axes, of_data = re.findall(
        r"^    \[axes\]\n.*?\n\n", EXPERIMENTS, re.DOTALL | re.MULTILINE
    )
    swept = validate(Experiment, tomllib.loads(text + axes))
    assert len(swept.grid().programs) == 2  # an algorithm each
    swept = validate(Experiment, tomllib.loads(text + of_data))
    assert swept.task.data_seed == "seed"
    assert swept.grid().shape == (2, 2, 3)
    assert len(swept.grid().programs) == 2
    optimizers, rate, tasks = re.findall(r"```toml\n(.*?)```", EXPERIMENTS, re.DOTALL)[1:]
    head = 'num_models = 2\nnum_rounds = 20\nassignment = { name = "mfa_rand" }\ntask = {}\n'
    one = validate(Experiment, tomllib.loads(head + optimizers + of_optimizers))
    assert len(one.grid().programs) == 1
    one = validate(
        Experiment, tomllib.loads(head + optimizers.replace("learning_rate = 0.01", rate))
    )
    schedule = one.algorithms["FedAvg"].schedule(2, 20)
    assert [float(schedule(t)) for t in (1, 6)] == pytest.approx([0, 0.1])
    no_task = head.replace("task = {}\n", "").replace("num_models = 2\n", "")
    assert validate(Experiment, tomllib.loads(no_task + tasks + optimizers)).num_models == 3


def test_the_documented_schedules_and_optimizers_are_those_that_there_are():
    rows = re.findall(r"^\| `\"(\w+)\"` \| (.*) \|$", EXPERIMENTS, re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", cell)) for name, cell in rows} == {
        name: set(table.model_fields) - set(Scheduled.model_fields)
        for name, table in SCHEDULE_TABLES.items()
    }
    listed = re.search(r"settings are optax's: (.*?)\. ", EXPERIMENTS, re.DOTALL)[1]
    assert re.findall(r"`(\w+)`", listed) == list(OPTIMIZER_TABLES)


def test_the_documented_methods_and_settings_are_those_that_there_are():
    rows = re.findall(r"^\| `(\w+)`.*? \| (.*) \|$", EXPERIMENTS, re.MULTILINE)[1:]
    settings = {name: set(re.findall(r"`(\w+)`", cell)) for name, cell in rows}
    shared = {*Method.model_fields, "local_steps", "batch_size"}
    assert {name: keys - shared for name, keys in settings.items()} == {
        name: set(table.model_fields) - shared for name, table in METHOD_TABLES.items()
    }
    for name, cell in rows:
        method = METHOD.validate_python({"name": name, "learning_rate": 0.1} | EXAMPLES[name][1])
        assert method.asks_for_thresholds() == ("needs `[requirement]`" in cell), name
