"""Parts of a sweep, computed separately and joined, equal the sweep."""

import os
import shutil

import numpy as np
import pytest

from fedjax_mm import cli, fedavg, mfa_rand, mfa_rr, sweep
from fedjax_mm.sweeps import Grid, Setup, plan
from fedjax_mm.sweeps.cluster import (
    Part,
    compute_part,
    join_parts,
    load_part,
    part_of,
    save_part,
    shares_of,
)
from fedjax_mm.sweeps.program import programs_of
from fedjax_mm.tasks import quadratic
from tests.helpers import once_for_each_grid, slow_unless

ASSIGNMENTS = {"RR": mfa_rr, "Rand": mfa_rand}


def build(assignment, num_models, mu, scale=1.0):
    task, algorithm = quadratic(6, 2, mu=scale * mu), fedavg(0.1, local_steps=2)
    return Setup(task, algorithm, ASSIGNMENTS[assignment](6, num_models))


AXES = {"assignment": ["RR", "Rand"], "num_models": [2], "mu": [0.1, 0.2, 0.4]}


def make(**changes):
    given = {"axes": AXES, "num_rounds": 4, "num_seeds": 2, "keep": "params"} | changes
    return Grid(**{"build": build} | given)


@pytest.fixture(scope="module")
def grid():
    return make()


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Traces each program once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "programs_of", once_for_each_grid(programs_of))
        patch.setattr("fedjax_mm.sweeps.cluster.programs_of", plan.programs_of)
        yield


@pytest.fixture(scope="module")
def pieces(grid):
    return [compute_part(grid, Part(number, 3)) for number in (1, 2, 3)]


def check_equal(found, expected):
    assert list(found) == list(expected)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
        assert found[name].attrs == expected[name].attrs


@pytest.mark.parametrize("of", [1, 2, 5, 12, 30])
def test_shares_contain_every_run_once_and_in_order(grid, of):
    programs = plan.programs_of(grid)
    owners = [np.zeros(len(each), int) for each in programs]
    for number in range(1, of + 1):
        for owner, replicas in zip(owners, shares_of(programs, Part(number, of)), strict=True):
            assert (owner[replicas] == 0).all()
            owner[replicas] = number
    order = np.concatenate(owners)
    assert (order > 0).all()
    assert (np.diff(order) >= 0).all()
    if of <= len(order):
        assert set(order) == set(range(1, of + 1))


def test_shares_have_about_equal_costs():
    """A local training of MFA-RR costs three times that of MFA-Rand here."""

    def cost(assignment, num_models, mu):
        return 3.0 if assignment == "RR" else 1.0

    programs = programs_of(make(cost=cost))

    def total(number):
        each = zip(programs, shares_of(programs, Part(number, 4)), strict=True)
        return sum(
            program.traced.facts.updates_per_round
            * sum(program.grid.costs([places[replicas] for places in program.index]))
            for program, replicas in each
        )

    totals = np.array([total(number) for number in (1, 2, 3, 4)])
    one_run = 3.0 * max(each.traced.facts.updates_per_round for each in programs)
    assert np.ptp(totals) <= one_run


@pytest.mark.parametrize("of", [slow_unless(of == 3, of) for of in (1, 3, 7, 30)])
def test_joined_parts_equal_the_sweep(grid, pieces, of):
    """With 30 parts and 12 runs, some parts are empty."""
    expected, params = sweep(grid)
    made = pieces if of == 3 else [compute_part(grid, Part(k, of)) for k in range(1, of + 1)]
    found, kept = join_parts(grid, reversed(made))
    check_equal(found, expected)
    for mine, theirs in zip(kept, params, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    about = found.attrs["manifest"]
    assert about["parts"] == of
    assert about["wall_seconds"]["run"] == pytest.approx(
        sum(each.about["seconds"]["run"] for each in made)
    )
    assert {**about, "parts": 0, "wall_seconds": 0} == {
        **expected.attrs["manifest"],
        "parts": 0,
        "wall_seconds": 0,
    }


def test_a_part_survives_a_round_trip(pieces, tmp_path):
    save_part(pieces[1], tmp_path / "2-of-3.npz")
    again = load_part(tmp_path / "2-of-3.npz")
    assert again.rounds == 4
    assert again.about == pieces[1].about
    assert again.about["part"] == [2, 3]
    for mine, theirs in zip(again.arrays, pieces[1].arrays, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ([], "no parts were given"),
        ([0, 2], "parts 2 of 3 are missing"),
        ([0, 1, 2, 1], "part 2/3 comes twice"),
    ],
)
def test_every_part_must_be_given_once(grid, pieces, which, message):
    with pytest.raises(ValueError, match=message):
        join_parts(grid, [pieces[each] for each in which])


def test_a_part_number_above_the_number_of_parts_is_refused(grid):
    with pytest.raises(ValueError, match=r"part is 3/2; give Part\(K, N\) with K from 1 to N"):
        compute_part(grid, Part(3, 2))


def test_parts_must_contain_their_runs(grid, pieces):
    """The parts are as if two versions had split the runs at different places."""
    records, *rest = pieces[0].arrays
    fewer = pieces[0]._replace(arrays=[records[:, 1:], *rest])
    with pytest.raises(ValueError, match="part 1/3 does not contain its runs; compute it again"):
        join_parts(grid, [fewer, *pieces[1:]])


def test_parts_of_different_splits_are_not_joined(grid, pieces):
    other = compute_part(grid, Part(1, 30))
    with pytest.raises(ValueError, match="part 1/30 comes twice, or with parts of 3"):
        join_parts(grid, [pieces[0], other])


@pytest.mark.parametrize("name", ["versions", "revision"])
def test_parts_of_another_version_are_named(grid, pieces, name):
    older = pieces[0]._replace(about={**pieces[0].about, name: "older"})
    with pytest.raises(ValueError, match=f'part 1/3 is from another run: {name} was "older"'):
        join_parts(grid, [older, *pieces[1:]])


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "rename", "pipe"])
def test_damaged_parts_are_named(pieces, tmp_path, damage):
    path = tmp_path / "1-of-3.npz"
    save_part(pieces[0], path)
    content = bytearray(path.read_bytes())
    if damage == "rename":
        path = path.rename(tmp_path / "2-of-3.npz")
    elif damage == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    with pytest.raises(ValueError, match=r"-of-3\.npz( is damaged; compute|: not a regular)"):
        load_part(path)


def array(first, last, here, step=1, count=None):
    count = 1 + (last - first) // step if count is None else count
    given = {"ID": here, "MIN": first, "MAX": last, "STEP": step, "COUNT": count}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in given.items()}


def test_the_name_of_a_part_is_parsed():
    for text, environ, part in [
        ("1/1", {}, (1, 1)),
        ("3/7", {}, (3, 7)),
        ("slurm", array(1, 4, 4), (4, 4)),
        ("slurm", array(0, 6, 0), (1, 7)),
        ("slurm", array(0, 20, 10, step=10), (2, 3)),
    ]:
        assert part_of(text, environ) == Part(*part)


def test_other_names_are_refused():
    for text, environ, message in [
        ("0/3", {}, "give K/N with K from 1 to N"),
        ("4/3", {}, "give K/N with K from 1 to N"),
        ("1", {}, "give K/N"),
        ("a/b", {}, "give K/N"),
        ("slurm", {}, "SLURM_ARRAY_TASK_ID is not set; submit an array"),
        (
            "slurm",
            array(1, 9, 9, count=3),
            "3 tasks from 1 to 9, and not all from 0 or 1 on, so that",
        ),
        ("slurm", array(57, 57, 57), "1 tasks from 57 to 57, and not all from 0 or 1 on, so that"),
    ]:
        with pytest.raises(ValueError, match=message):
            part_of(text, environ)


FILE = """\
num_models = 2
num_rounds = 4
num_seeds = 3
[task]
name = "quadratic"
num_clients = 6
block_size = 2
[algorithms.A]
assignment = { name = "mfa_rr" }
learning_rate = 0.1
local_steps = 2
[axes]
task.mu = [0.1, 0.2, 0.4]
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with an experiment file, its result and its three parts."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "grid.toml").write_text(FILE)
    assert call("sweep", folder / "grid.toml", "--out", folder / "whole") == 0
    for number in (1, 2, 3):
        assert part(folder, f"{number}/3") == 0
    return folder


def call(*words):
    with pytest.raises(SystemExit) as end:
        cli.main([str(word) for word in words])
    return end.value.code


def part(folder, name, *options):
    words = ("sweep", folder / "grid.toml", "--out", folder / "cut", "--part", name)
    return call(*words, *options)


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def test_a_part_leaves_out_the_padding_of_devices():
    """Nine runs share eight devices."""
    axes = {"assignment": ["Rand"], "num_models": [2], "mu": [0.1, 0.2, 0.4]}
    saved = compute_part(Grid(build, axes, num_rounds=1, num_seeds=3), Part(1, 1))
    assert {x.shape[:2] for x in saved.arrays} == {(2, 9)}
