"""Finished results are kept, made again, or overwritten on request."""

import json

import pytest
import xarray as xr

from tests.test_cli import call, files

CONFIG = """
num_models = 2
num_rounds = 4
num_seeds = 2
task = { name = "quadratic", num_clients = 4, block_size = 2, mu = 0.1 }

[algorithms.MFA-RR]
assignment.name = "mfa_rr"
learning_rate = 0.1
local_steps = 2
"""
OTHERS = {
    "settings": (("--set", "seed=5"), "config.seed was 0, is 5"),
    "settings, resumed": (("--set", "seed=5", "--resume"), "config.seed was 0, is 5"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The experiment file and the contents of its finished result."""
    directory = tmp_path_factory.mktemp("finished")
    config = directory / "small.toml"
    config.write_text(CONFIG)
    assert call("run", config, "--out", directory / "results").code == 0
    return config, contents(directory / "results" / "small")


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture
def place(made, tmp_path):
    """The command's arguments, and the directory of a copy of the finished result."""
    directory = tmp_path / "small"
    directory.mkdir()
    for name, content in made[1].items():
        (directory / name).write_bytes(content)
    return ("run", made[0], "--out", tmp_path), directory


def values(directory):
    with xr.open_dataset(directory / "result.nc") as result:
        return result.load().drop_attrs(deep=False)


@pytest.mark.parametrize("name", OTHERS)
def test_a_result_of_other_settings_is_kept(place, name):
    command, directory = place
    options, difference = OTHERS[name]
    before = contents(directory)
    code, _, err = call(*command, *options)
    assert code == 2
    for fragment in (str(directory), difference, "--out", "--overwrite"):
        assert fragment in err
    assert contents(directory) == before


def test_overwrite_replaces_a_result_of_other_settings(place):
    command, directory = place
    before = values(directory)
    assert call(*command, "--set", "seed=5", "--overwrite").code == 0
    assert not values(directory).equals(before)
    assert json.loads((directory / "manifest.json").read_text())["config"]["seed"] == 5


def test_resume_and_overwrite_together_are_refused(place):
    code, _, err = call(*place[0], "--resume", "--overwrite")
    assert code == 2
    assert "give one of them" in err


def test_a_result_of_another_version_is_kept(place):
    command, directory = place
    path = directory / "manifest.json"
    about = json.loads(path.read_text())
    about["versions"]["jax"] = "0.1"
    path.write_text(json.dumps(about))
    before = contents(directory)
    code, _, err = call(*command, "--resume")
    assert code == 2
    assert 'versions.jax was "0.1"' in err
    assert contents(directory) == before


def test_the_same_run_may_be_made_again(place):
    command, directory = place
    before = values(directory)
    assert call(*command).code == 0
    xr.testing.assert_identical(values(directory), before)


@pytest.mark.parametrize("name", ["result.nc", "manifest.json"])
@pytest.mark.parametrize("damage", ["deleted", "empty", "truncated", "flipped"])
def test_a_damaged_result_is_made_again(made, place, name, damage):
    command, directory = place
    path = directory / name
    content = path.read_bytes()
    middle = len(content) // 2
    if damage == "deleted":
        path.unlink()
    else:
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes({"empty": b"", "truncated": content[:middle], "flipped": flipped}[damage])
    code, _, err = call(*command, "--resume")
    if code == 2:  # the flipped letter may turn the manifest into that of another run
        assert (name, damage) == ("manifest.json", "flipped")
        assert "--overwrite" in err
        return
    assert code == 0
    assert f"{name} is {'missing' if damage == 'deleted' else 'damaged'}; made again" in err
    assert files(directory) == ["figure.png", "manifest.json", "result.nc"]
    assert call(*command, "--resume").out.strip().endswith("is complete; nothing to resume")


def test_a_result_without_its_manifest_is_kept_from_other_settings(place):
    """The Dataset also contains the manifest."""
    command, directory = place
    (directory / "manifest.json").unlink()
    code, _, err = call(*command, "--set", "seed=5", "--resume")
    assert code == 2
    assert "config.seed was 0, is 5" in err
