"""The command line in process: its output, files, exit codes and error messages."""

import contextlib
import inspect
import io
import json
import re
import textwrap
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import xarray as xr

from fedjax_mm import cli
from fedjax_mm.cli import terminal
from fedjax_mm.papers import ITEMS


class Outcome(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def call(*arguments):
    """Runs the command line with these arguments and catches its exit."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main(["--no-cache", *map(str, arguments)] if arguments else [])
    return Outcome(ended.value.code, out.getvalue(), err.getvalue())


def words(text):
    """Collapses whitespace, because tables and terminals wrap text."""
    return " ".join(text.split())


def files(directory):
    return sorted(path.name for path in directory.iterdir())


def read_json(path):
    """Reads strict JSON, without NaN and Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} in {path}")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_list_shows_every_id():
    code, out, err = call("list")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    for item in ITEMS.values():
        (line,) = (line for line in lines if line.split()[:1] == [item.id])
        assert item.title in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mfa-fig3", "--dataset", "mnist"), "mfa-fig3: it has one data set; leave out --dataset"),
        (("maxfl-table1", "--dataset", "cifar"), "dataset = 'cifar'"),
        (("maxfl-table1", "--set", "cohort_size=11"), "cohort_size is 11"),
        (("maxfl-table1", "--set", "methods.qFFL.q=-1.0"), "q"),
    ],
)
def test_wrong_data_sets_and_methods_are_refused(tmp_path, arguments, message):
    code, _, err = call("reproduce", *arguments, "--out", tmp_path / "new")
    assert code == cli.BAD_INPUT
    assert message in err
    assert not (tmp_path / "new").exists()


def test_without_arguments_three_commands_are_shown():
    code, out, err = call()
    shown = re.findall(r"^  (fedjax-mm \S+(?: \S+)*)  ", out, re.MULTILINE)
    assert (code, err, len(shown)) == (0, "", 3)
    known = {each.name or each.callback.__name__ for each in cli.app.registered_commands}
    assert {command.split()[1] for command in shown} <= known


def example():
    """Extracts the experiment from the help of `fedjax-mm run`."""
    _, _, shown = inspect.getdoc(cli.run).partition("A complete experiment:\n")
    return textwrap.dedent(shown.partition("\nWith a table")[0])


@pytest.fixture(scope="module")
def own_experiment(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    config = directory / "mine.toml"
    config.write_text(example())
    settings = ("--set", "num_rounds=26", "--set", "num_seeds=3")
    return directory / "out", call("run", config, *settings, "--out", directory / "out")


def test_the_example_in_the_help_is_complete():
    shown = words(call("run", "--help").out)
    lines = [words(line) for line in example().splitlines() if line]
    assert len(lines) > 10
    for line in lines:
        assert line in shown


def test_run_writes_a_labelled_result(own_experiment):
    out, outcome = own_experiment
    assert (outcome.code, outcome.err) == (0, "")
    assert files(out / "mine") == ["figure.png", "manifest.json", "result.nc"]
    with xr.open_dataset(out / "mine" / "result.nc") as result:
        assert result.excess_loss.dims == ("algorithm", "seed", "round", "model")
        assert result.algorithm.values.tolist() == ["MFA-Rand", "MFA-RR"]
        assert result.seed.values.tolist() == [0, 1, 2]
        assert result["round"].values.tolist() == list(range(27))
        assert result.model.values.tolist() == list(range(1, 13))
        # 12 models share 24 clients, which take 5 steps each.
        assert np.all(result.gradients.sel(round=26).sum("model") == 26 * 24 * 5)
        # Client 1, the only one that moves a start at zeros, trains every model within 24 rounds.
        excess = result.excess_loss.sel(algorithm="MFA-RR")
        assert np.all(excess.sel(round=26) < excess.sel(round=0))
        manifest = read_json(out / "mine" / "manifest.json")
        assert "result.nc" in manifest.pop("files")
        del manifest["digest"]
        assert json.loads(result.attrs["manifest"]) == manifest
    config = manifest["config"]
    assert (config["num_rounds"], config["num_models"]) == (26, 12)
    rate = config["algorithms"]["MFA-RR"]["learning_rate"]
    assert rate == {"beta": 30, "gamma": 100, "per": "frame"}


def test_run_shows_the_last_round_in_full(own_experiment):
    out, outcome = own_experiment
    assert "…" not in outcome.out  # nothing is cut at 80 columns
    with xr.open_dataset(out / "mine" / "result.nc") as result:
        means = result.isel(round=-1).mean(("seed", "model"))
        for label in ("MFA-Rand", "MFA-RR"):
            assert label in outcome.out
            assert f"{means.excess_loss.sel(algorithm=label).item():.6g}" in outcome.out


def axes_example():
    """Extracts the axes from the help of `fedjax-mm run`."""
    help_text = inspect.getdoc(cli.run)
    shown = re.search(r"\n( +\[axes\]\n.*?)\n\n", help_text, re.DOTALL)
    return textwrap.dedent(shown[1])


def test_the_axes_in_the_help_are_complete():
    shown = words(call("run", "--help").out)
    lines = [words(line) for line in axes_example().splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert line in shown


CONFIG = """\
num_models = 2
num_rounds = 4

[task]
num_clients = 4
block_size = 2
mu = 0.1

[algorithms.A]
assignment = { name = "mfa_rand" }
learning_rate = 0.1
local_steps = 2
"""


FIG3 = ("reproduce", "mfa-fig3")


FIG5 = ("reproduce", "mfa-fig5")


WRONG_COMMANDS = {
    "more models than clients": ((*FIG3, "--set", "num_models=30"), ("30", "at most 24 models")),
    "misspelt experiment": (("reproduce", "mfa-fig33"), ("did you mean mfa-fig3?", "mfa-fig1")),
    "no experiment": (("reproduce",), ("id", "--help")),
    "seeds not a number": ((*FIG3, "--seeds", "many"), ("seeds", "many", "integer")),
    "no seeds": ((*FIG3, "--seeds", 0), ("num_seeds = 0", "equal to 2")),
    "setting without a value": ((*FIG3, "--set", "seed"), ("seed", "key=value")),
    "setting misspelt": ((*FIG3, "--set", "num_modles=3"), ("num_modles", "'num_models'")),
    "seed beyond 64 bits": ((*FIG3, "--set", "seed=99999999999999999999"), ("seed = 9999", "less")),
    "no baseline": ((*FIG5, "--set", "num_models=[2,3]"), ("[2, 3]", "from 1")),
    "gain at one size": ((*FIG5, "--set", "num_models=[1]"), ("num_models = [1]", "at least 2")),
    "output below a file": ((*FIG3, "--out", "file/results"), ("file/results", "--out")),
    "output is a file": ((*FIG3, "--out", "file"), ("file", "--out")),
    "unknown command": (("reprduce", "mfa-fig3"), ("'reprduce'", "--help")),
    "unknown option": ((*FIG3, "--sseeds", 3), ("--sseeds", "--help")),
    "no configuration": (("run",), ("config", "--help")),
    "missing file": (("run", "missing.toml"), ("missing.toml", "no such file")),
    "unknown workload": (("bench", "W9"), ("'W9'", "W1, W1b, W1c, S1")),
    "no repeats": (("bench", "W1", "--repeats", 0), ("repeats is 0", "at least 1")),
}


"""Commands with parts of their error lines (in any case), by name."""


def check_refusal(directory, command, fragments):
    """Expects exit code 2, one line on stderr with the fragments, and no changed file."""
    before = sorted(directory.rglob("*"))
    code, out, err = call(*command)
    assert code == 2
    assert out.strip() == ""
    assert err.startswith("fedjax-mm: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    for fragment in fragments:
        assert fragment.lower() in err.lower()
    for internal in ("Traceback", "[Errno"):
        assert internal not in err
    assert sorted(directory.rglob("*")) == before


@pytest.mark.parametrize("name", WRONG_COMMANDS)
def test_a_wrong_command_is_refused_in_one_line(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    check_refusal(tmp_path, *WRONG_COMMANDS[name])


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (("--memory", 0), ("--memory is 0", "positive")),
        (("--memory", 1e-6), ("take at least", "this process already", "allow more memory")),
        (("--save-every", -1), ("--save-every is -1", "negative")),
        (("--split", "models"), ("--split", "models")),
    ],
)
def test_wrong_options_of_a_sweep_are_refused_in_one_line(
    monkeypatch, tmp_path, options, fragments
):
    monkeypatch.chdir(tmp_path)
    Path("right.toml").write_text(f"{CONFIG}\n[axes]\nlearning_rate = [0.1, 0.2]\n")
    check_refusal(tmp_path, ("sweep", "right.toml", *options), fragments)


def test_our_warnings_are_single_lines():
    ours, other = UserWarning("nobody trained"), DeprecationWarning("old")
    with terminal.warnings_as_lines():
        assert warnings.formatwarning(ours, UserWarning, "a.py", 3) == "fedjax-mm: nobody trained\n"
        assert "a.py:3" in warnings.formatwarning(other, DeprecationWarning, "a.py", 3)
    assert "a.py:3" in warnings.formatwarning(ours, UserWarning, "a.py", 3)


def test_a_file_may_begin_with_a_byte_order_mark(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("\ufeff" + CONFIG)
    assert call("run", "mine.toml", "--dry-run").code == 0


def test_sweep_is_another_name_of_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(CONFIG)
    assert [call(name, "mine.toml", "--dry-run").code for name in ("run", "sweep")] == [0, 0]
