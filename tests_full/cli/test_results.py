"""The file of `init`, and the output of `show` and the tables."""

import json
import re
import tomllib

import pytest
import xarray as xr
from jsonschema import Draft7Validator

from fedjax_mm import Experiment
from fedjax_mm.cli import results
from fedjax_mm.experiments.overrides import validate
from tests.cli.test_results import call, dataset


def test_init_writes_a_valid_experiment(monkeypatch, tmp_path):
    """It runs as it is, and its commented-out parts are valid, too."""
    monkeypatch.chdir(tmp_path)
    code, out, err = call("init")
    assert (code, err) == (0, "")
    assert "then run: fedjax-mm run experiment.toml" in out
    text = (tmp_path / "experiment.toml").read_text()
    schema = re.match(r"#:schema \./(\S+)\n", text)[1]
    check = Draft7Validator(json.loads((tmp_path / schema).read_text()))
    code, out, err = call("run", "experiment.toml", "--set", "num_rounds=20")
    assert (code, err) == (0, "")
    assert "After 20 rounds" in out
    blocks = text.split("\n\n")
    on = [re.sub(r"^# (?=\[|\w+ = )", "", block, flags=re.MULTILINE) for block in blocks]
    _, numbers, quadratic, digits, tasks, rand, rr, axes = on
    rr = rr.replace("learning_rate = 0.1\n", "")  # replaced by a schedule

    def read(*parts):
        check.validate(tomllib.loads("\n".join(parts)))
        return validate(Experiment, tomllib.loads("\n".join(parts)))

    everything = read(numbers, quadratic, rand, rr, axes)
    assert everything.points().values.keys() == {"num_models", "learning_rate"}
    assert everything.algorithms["MFA-RR"].server_optimizer.momentum == 0.9
    assert everything.algorithms["MFA-RR"].schedule(3, 200)(1) == pytest.approx(0.1)
    assert read(numbers, digits, rand, rr).task.data_seed == "seed"
    assert read(numbers.replace("num_models = 3", ""), tasks, rand, rr).num_models == 2


def test_only_shown_points_are_formatted(monkeypatch, capsys):
    """Formatting a point takes 10 ms, and a sweep may have 100,000 points."""
    many = dataset().sel(algorithm="A").drop_vars("algorithm")
    many = xr.concat([many.isel(learning_rate=0)] * 2000, xr.Variable("learning_rate", range(2000)))
    text, formatted = results._text, []

    def counted(*given):
        formatted.append(given)
        return text(*given)

    monkeypatch.setattr(results, "_text", counted)
    results.show_last(many)
    assert "40 of 2,000 points, evenly spread" in " ".join(capsys.readouterr().out.split())
    assert len(formatted) == 2 * 40  # two metrics, 40 rows


def test_show_names_omitted_metrics_and_points(monkeypatch, capsys):
    monkeypatch.setattr(results.console, "_width", 40)
    results.show_last(dataset())
    out = " ".join(capsys.readouterr().out.split())
    assert "also in the file: loss" in out
    monkeypatch.setattr(results, "_MOST_ROWS", 3)
    results.show_last(dataset())
    out = " ".join(capsys.readouterr().out.split())
    assert "3 of 4 points, evenly spread" in out
    assert [f"│ {name} │" in out for name in ("A", "B")] == [True, True]
