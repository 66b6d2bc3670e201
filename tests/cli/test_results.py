"""The file of `init`, and the output of `show` and the tables."""

import io
import os
import string
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
import xarray as xr

from fedjax_mm import cli, save_dataset
from fedjax_mm.cli import directories as saving
from fedjax_mm.cli import results
from fedjax_mm.results.manifest import Manifest
from fedjax_mm.sweeps.execution import Execution


def call(*arguments):
    """The exit code, stdout with single spaces, and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        cli.main(["--no-cache", *map(str, arguments)])
    return ended.value.code, " ".join(out.getvalue().split()), err.getvalue()


def dataset(**changes):
    """A made-up result of two algorithms, rates, rounds and models, and three seeds."""
    sizes = {"algorithm": 2, "learning_rate": 2, "seed": 3, "round": 2, "model": 2}
    shape, dims = tuple(sizes.values()), tuple(sizes)
    numbers = np.arange(np.prod(shape)).reshape(shape)
    coords = {
        "algorithm": ["A", "B"],
        "learning_rate": [0.1, 0.2],
        "seed": range(3),
        "round": [0, 10],
        "model": [1, 2],
    }
    diverged = np.full((2, 2, 3, 2), -1)
    diverged[1, 1, 0, 1] = 10
    values = {"loss": (dims, numbers / 4), "test_accuracy": (dims, numbers / 100)}
    values |= {"diverged": ((*dims[:3], "model"), diverged)}
    made = xr.Dataset(values, coords)
    manifest = {
        "data": "real",
        "seed": 7,
        "versions": {"fedjax-mm": "0.1.0", "jax": "0.10.2", "python": "3.11"},
        "git_revision": None,
        "device": {"count": 2, "kind": "cpu"},
        "wall_seconds": {"compile": 1.25, "run": 0.5},
    }
    return made.assign(changes).assign_attrs(manifest=Manifest(manifest))


@pytest.mark.parametrize(
    ("file", "fragment"),
    [("mine.toml", "mine.toml exists"), ("nowhere/mine.toml", "cannot write nowhere/mine.toml")],
)
def test_init_never_overwrites_a_file(monkeypatch, tmp_path, file, fragment):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("mine")
    code, out, err = call("init", file)
    assert (code, out) == (2, "")
    assert fragment in err
    assert "give " in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]
    assert (tmp_path / "mine.toml").read_text() == "mine"


@pytest.mark.parametrize("is_file", [True, False])
def test_show_prints_origin_dimensions_and_last_values(tmp_path, is_file):
    save_dataset(dataset(), tmp_path / "result.nc")
    if is_file:
        (tmp_path / "figure.png").touch()
    code, out, err = call("show", tmp_path / "result.nc" if is_file else tmp_path)
    assert (code, err) == (0, "")
    for text in (
        *("data real", "root seed 7", "versions fedjax-mm 0.1.0, jax 0.10.2", "device 2 x cpu"),
        *("compiled, ran 1.2 s, 0.5 s", "algorithm A, B", "learning_rate 0.1, 0.2", "round 0, 10"),
        "After 10 rounds, means over models and seeds",
        # The values are 2, 3, 6, 7, 10, 11 hundredths, with means 2.5, 6.5, 10.5 of the seeds.
        "│ A │ 0.1 │ 0.065 ± 0.023 │ 1.625 ± 0.58 │",
        "│ B │ 0.2 │ diverged │ diverged │",
    ):
        assert text in out
    assert "revision" not in out
    figure = tmp_path / "figure.png" if is_file else "none"
    assert out.replace(" ", "").endswith(f"figure:{figure}")


def test_what_clients_get_comes_first_and_clients_are_no_axis(capsys):
    made = dataset()
    made["client_test_accuracy"] = made.test_accuracy.expand_dims(client=7, axis=-1)
    made["personal_test_accuracy_worst"] = made["personal_accuracy"] = made.test_accuracy
    made["test_accuracy_worst"] = made.test_accuracy
    results.show_last(made)
    out = " ".join(capsys.readouterr().out.split())
    assert "┃ personal_accuracy ┃ personal_test_accuracy_worst ┃" in out
    assert out.count("│ 0.065 ± 0.023 │") == 1
    assert "points" not in out
    assert out.endswith("client_test_accuracy")
    results.show_last(made.sel(learning_rate=0.1, drop=True))
    out = " ".join(capsys.readouterr().out.split())
    assert out.index("│ personal_accuracy │") < out.index("│ test_accuracy │")
    assert out.endswith("also in the file: client_test_accuracy")


def test_control_characters_are_escaped(tmp_path):
    bad = "\x1b]0;title\x07\x1b[31m\u202e\x9b"
    made = dataset().assign_coords(algorithm=[f"A{bad}", "B"]).rename({"loss": f"loss{bad[-2:]}"})
    made.attrs["manifest"] |= {"data": bad}
    save_dataset(made, tmp_path / "result.nc")
    code, out, err = call("show", tmp_path)
    assert (code, err) == (0, "")
    _, _, err = call("show", tmp_path / bad)
    assert not set(bad) & set(out + err) - set(string.printable)
    assert r"A\x1b]0;title\x07\x1b[31m\u202e\x9b" in out


def test_show_uses_the_round_that_met_the_target(capsys):
    ended = (("algorithm", "learning_rate", "seed"), np.array([[[0, 0, 0], [-1] * 3]] * 2))
    results.show_last(dataset(ended=ended))
    out = " ".join(capsys.readouterr().out.split())
    assert "In the round that stopped the run, or else the last" in out
    assert "stopped at the target: 6 of 12 runs, in round 0.0 on average" in out
    assert "│ A │ 0.1 │ 0.045 ± 0.023 │" in out
    assert "│ A │ 0.2 │ 0.185 ± 0.023 │" in out


def test_a_missing_metric_is_not_shown_as_diverged(capsys):
    data = dataset()
    data["test_accuracy"] = data.test_accuracy.where(data.algorithm == "A")
    results.show_last(data.sel(learning_rate=0.1, drop=True).isel(seed=[0, 1]))
    out = " ".join(capsys.readouterr().out.split())
    # Two seeds have no standard error.
    assert "│ test_accuracy │ 0.045 │ none │" in out


def test_an_absent_run_is_not_shown_as_diverged(capsys):
    """Joining runs of different lengths gives NaN."""
    data = dataset()
    is_absent = data.algorithm == "A"
    data["diverged"] = data.diverged.where(~is_absent)
    data["loss"], data["test_accuracy"] = (
        data[x].where(~is_absent) for x in ("loss", "test_accuracy")
    )
    results.show_last(data)
    out = " ".join(capsys.readouterr().out.split())
    assert "│ A │ 0.1 │ none │ none │" in out
    assert "│ B │ 0.2 │ diverged │ diverged │" in out


@pytest.mark.parametrize("name", ["missing", "broken", "empty", "other", "pipe.nc", "endless"])
def test_show_refuses_files_without_a_result(tmp_path, name):
    (tmp_path / "broken").write_text("a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "endless").mkdir()
    (tmp_path / "endless" / "result.nc").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.nc")
    xr.Dataset({"x": 1}).to_netcdf(tmp_path / "other")
    code, out, err = call("show", tmp_path / name)
    assert (code, out) == (2, "")
    assert str(tmp_path / name) in err
    assert "give a directory that run, sweep or reproduce wrote" in err
    assert err.count("\n") == 1


def test_an_interrupt_reports_whether_anything_was_saved(tmp_path, capsys):
    def work(before):
        with saving.saving(tmp_path, before, Execution()) as how:
            if before == "resume":
                how.checkpoints.claim({})
                how.checkpoints.begin({})
                how.checkpoints.save(0, 1, [np.zeros(1)])
            raise KeyboardInterrupt

    def said(before):
        with pytest.raises(KeyboardInterrupt):
            work(before)
        return " ".join(capsys.readouterr().err.split())

    assert said("keep") == "interrupted; there is nothing for --resume to continue"
    assert said("resume") == "interrupted; --resume continues what was saved"
