"""Parts of a sweep, computed separately and joined, equal the sweep."""

import functools
import os
import shutil
import signal

import numpy as np
import pytest

from fedjax_mm import open_result, sweep
from fedjax_mm.results.dataset import load_dataset
from fedjax_mm.results.params import load_params
from fedjax_mm.sweeps import (
    Callback,
    Checkpoints,
    Execution,
    InterruptedRunError,
    RefusedError,
    Until,
    merge,
)
from fedjax_mm.sweeps.cluster import (
    Part,
    compute_part,
    join_parts,
    load_part,
)
from tests.sweeps.test_parts import (
    AXES,
    FILE,
    _quick,  # noqa: F401
    build,
    call,
    check_equal,
    folder,  # noqa: F401
    grid,  # noqa: F401
    make,
    part,
    pieces,  # noqa: F401
    whole,  # noqa: F401
)


def test_joined_parts_that_met_a_target_equal_the_sweep():
    grid = make(until=Until("excess_loss", at_most=0.3), keep=None, seed=3, first_seed=5)
    made = [compute_part(grid, Part(number, 2)) for number in (1, 2)]
    found, params = join_parts(grid, made)
    assert params is None
    assert (found.ended >= 0).any()
    check_equal(found, sweep(grid))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rounds": 8}, "num_rounds was 4, is 8"),
        ({"num_seeds": 3}, "num_seeds was 2, is 3"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"first_seed": 1}, "first_seed was 0, is 1"),
        ({"keep": None}, 'keep was "params", is null'),
        ({"build": functools.partial(build, scale=2.0)}, "data was"),
        ({"config": {"mu": 1}}, 'config was null, is {"mu": 1}'),
    ],
)
def test_parts_of_another_run_are_named(pieces, change, message):
    with pytest.raises(ValueError, match="part 1/3 is from another run") as error:
        join_parts(make(**change), pieces)
    assert message in str(error.value)


def test_a_part_in_python_is_continued_or_left_alone(tmp_path):
    stop = Callback(on_segment=lambda segment: os.kill(os.getpid(), signal.SIGTERM))
    how = Execution(callbacks=[stop], save_every=0)
    with pytest.raises(InterruptedRunError):
        sweep(make(), how, part="1/2", out=tmp_path)
    assert (tmp_path / "parts/1-of-2/unfinished").exists()
    path = sweep(make(), part="1/2", out=tmp_path)
    assert [each.name for each in path.parent.iterdir()] == ["1-of-2.npz"]
    before = path.stat().st_mtime_ns
    assert sweep(make(), part=Part(1, 2), out=str(tmp_path)) == path
    assert path.stat().st_mtime_ns == before
    with pytest.raises(RefusedError, match="num_rounds was 4, is 8; choose another directory"):
        sweep(make(num_rounds=8), part="1/2", out=tmp_path)
    with pytest.raises(RefusedError, match="has parts of 2; give part K/N with that N"):
        sweep(make(), part="1/3", out=tmp_path)
    with pytest.raises(ValueError, match='or part="2/2" in Python'):
        merge(tmp_path, make())
    sweep(make(), part="2/2", out=tmp_path)
    found, params = merge(tmp_path, build, AXES, num_rounds=4, num_seeds=2, keep="params")
    expected, wanted = sweep(make())
    check_equal(found, expected)
    for mine, theirs in zip(params, wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"part": "1/2"}, "give both part and out"),
        ({"out": "results"}, "give both part and out"),
        (
            {"part": "1/2", "out": "results", "execution": Execution(executor=1)},
            "no executor and no checkpoints",
        ),
    ],
)
def test_wrong_options_of_a_part_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        sweep(make(), **options)


def test_commands_compute_parts_and_merge_them(folder, capsys):
    assert call("merge", folder / "cut/grid") == 0
    found, expected = open_result(folder / "cut/grid"), open_result(folder / "whole/grid")
    check_equal(found, expected)
    about = found.attrs["manifest"]
    assert about["config"] == expected.attrs["manifest"]["config"]
    assert about["parts"] == 3
    names = {"figure.png", "manifest.json", "parts", "result.nc"}
    assert {path.name for path in (folder / "cut/grid").iterdir()} == names
    assert {path.name for path in (folder / "cut/grid/parts").iterdir()} == {
        f"{number}-of-3.npz" for number in (1, 2, 3)
    }
    capsys.readouterr()
    assert call("merge", folder / "cut/grid", "--resume") == 0
    assert "is complete; nothing to resume" in capsys.readouterr().out


def test_a_finished_part_is_left_alone(folder, capsys):
    path = folder / "cut/grid/parts/2-of-3.npz"
    before = path.stat().st_mtime_ns
    assert part(folder, "2/3") == 0
    assert "2-of-3.npz is complete; nothing to resume" in capsys.readouterr().out
    assert path.stat().st_mtime_ns == before
    assert part(folder, "2/3", "--overwrite") == 0
    assert path.stat().st_mtime_ns > before


def test_a_damaged_part_is_computed_again(folder, capsys):
    path = folder / "cut/grid/parts/2-of-3.npz"
    path.write_bytes(path.read_bytes()[:-100])
    assert call("merge", folder / "cut/grid") == 2
    assert "2-of-3.npz is damaged; compute this part again" in capsys.readouterr().err
    assert not (folder / "cut/grid/result.nc").exists()
    assert part(folder, "2/3") == 0
    assert "made again" in capsys.readouterr().err
    assert call("merge", folder / "cut/grid") == 0


def test_missing_unfinished_and_damaged_parts_are_named(folder, capsys):
    parts = folder / "cut/grid/parts"

    def refused(*words):
        assert call("merge", folder / "cut/grid", *words) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
        return line

    capsys.readouterr()
    kept = (parts / "3-of-3.npz").rename(folder / "kept")
    assert "part number 3 of 3 is missing: compute with --part 3/3 --resume" in refused()
    (parts / "3-of-3/unfinished/part-0000").mkdir(parents=True)
    assert "part number 3 of 3 is unfinished: continue with --part 3/3 --resume" in refused()
    kept.rename(parts / "3-of-3.npz")
    shutil.copy(parts / "2-of-3.npz", parts / "1-of-4.npz")
    assert "has parts of 3 and of 4; delete the unwanted ones" in refused()
    (parts / "1-of-4.npz").rename(parts / "1-of-3.npz")
    assert "1-of-3.npz is damaged" in refused()
    assert call("merge", folder / "whole") == 2
    assert "has no parts; compute them" in capsys.readouterr().err


def test_a_part_of_another_run_is_kept(folder, capsys):
    assert part(folder, "1/3", "--set", "num_rounds=8") == 2
    words = "1-of-3.npz is a part of another run: config.num_rounds was 4, is 8; choose another"
    assert words in capsys.readouterr().err
    assert part(folder, "1/3", "--set", "num_rounds=8", "--overwrite") == 0
    capsys.readouterr()
    assert call("merge", folder / "cut/grid") == 2
    assert "is from another run" in capsys.readouterr().err


def test_parts_of_another_split_are_kept(folder, capsys):
    """A Slurm array task that is repeated alone must not count as the only part."""
    assert part(folder, "1/1") == 2
    assert "has parts of 3; give part K/N with that N, or delete them" in capsys.readouterr().err


def test_an_interrupted_part_resumes(folder, capsys, monkeypatch):
    """The part was going to replace a finished one."""
    change = ("--set", "num_rounds=8", "--save-every", 0)
    stop = Callback(on_segment=lambda segment: os.kill(os.getpid(), signal.SIGTERM))

    def watched(grid, part, how, **more):
        return compute_part(grid, part, how._replace(callbacks=[*how.callbacks, stop]), **more)

    with monkeypatch.context() as patch:
        patch.setattr("fedjax_mm.sweeps.part_files.compute_part", watched)
        assert part(folder, "1/3", *change, "--overwrite") == 128 + signal.SIGTERM
    assert (folder / "cut/grid/parts/1-of-3/unfinished").exists()
    assert part(folder, "1/3", *change) == 2
    assert "holds an unfinished run; continue it with --resume" in capsys.readouterr().err
    assert part(folder, "1/3", *change, "--resume") == 0
    assert load_part(folder / "cut/grid/parts/1-of-3.npz").about["config"]["num_rounds"] == 8


def test_axes_that_choose_tables_are_merged(tmp_path):
    """The assignment is chosen by an axis, and each one has its own table of settings."""
    text = FILE.replace("task.mu = [0.1, 0.2, 0.4]", 'assignment.name = ["mfa_rand", "mfa_rr"]')
    (tmp_path / "grid.toml").write_text(text)
    words = ("sweep", tmp_path / "grid.toml", "--out")
    assert call(*words, tmp_path / "whole") == 0
    for number in (1, 2):
        assert call(*words, tmp_path / "cut", "--part", f"{number}/2") == 0
    assert call("merge", tmp_path / "cut/grid") == 0
    check_equal(open_result(tmp_path / "cut/grid"), open_result(tmp_path / "whole/grid"))


@pytest.mark.slow
def test_parameters_are_merged(folder):
    """The parameters are those of a run without axes."""
    text = FILE[: FILE.index("[axes]")]
    (folder / "one.toml").write_text(text)
    words = ("run", folder / "one.toml", "--save-params", "--out")
    assert call(*words, folder / "whole") == 0
    for number in (1, 2):
        assert call(*words, folder / "cut", "--part", f"{number}/2") == 0
    assert call("merge", folder / "cut/one") == 0
    found, expected = (load_params(folder / name / "one/params.npz") for name in ("cut", "whole"))
    assert found.labels == expected.labels
    for name, x in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], x)


def test_later_seeds_are_added_to_a_finished_result(folder, capsys):
    """Three seeds and two later ones give the result of five seeds."""
    words = ("sweep", folder / "grid.toml", "--out")
    assert call(*words, folder / "whole", "--first-seed", 3, "--set", "num_seeds=2") == 0
    found = open_result(folder / "whole/grid")
    assert call(*words, folder / "five", "--set", "num_seeds=5") == 0
    expected = open_result(folder / "five/grid")
    check_equal(found, expected)
    np.testing.assert_array_equal(found.seed, range(5))
    assert found.attrs["manifest"]["config"] == expected.attrs["manifest"]["config"]
    capsys.readouterr()
    assert call(*words, folder / "whole", "--first-seed", 3, "--set", "num_seeds=2") == 0
    assert "is complete; nothing to resume" in capsys.readouterr().out
    for number in (3, 5):  # the seeds of the file, as in a script that is run again, and all
        words_of = (*words, folder / "whole", "--set", f"num_seeds={number}", "--resume")
        assert call(*words_of) == 0
        assert "is complete; nothing to resume" in capsys.readouterr().out
    assert call(*words, folder / "whole", "--set", "num_seeds=7", "--resume") == 2
    assert "has 5 seeds, and num_seeds is 7; to add seeds, give --first-seed 5" in (
        capsys.readouterr().err
    )
    (folder / "whole/grid/figure.png").unlink()
    assert call(*words, folder / "whole", "--resume") == 2
    assert "figure.png is missing, and it has 5 seeds instead of 3" in capsys.readouterr().err
    assert load_dataset(folder / "whole/grid/result.nc").sizes["seed"] == 5


def test_later_seeds_survive_a_kill_before_the_last_file(folder):
    later = ("--first-seed", 3, "--set", "num_seeds=2")
    words = ("sweep", folder / "grid.toml", "--out", folder / "whole", *later)
    manifest = folder / "whole/grid/manifest.json"
    before = manifest.read_bytes()
    assert call(*words) == 0
    after = manifest.read_bytes()
    manifest.write_bytes(before)
    assert call(*words) == 0
    assert manifest.read_bytes() == after


@pytest.mark.slow
def test_later_seeds_may_be_computed_in_parts(folder):
    later = ("--first-seed", 3, "--set", "num_seeds=2")
    words = ("sweep", folder / "grid.toml", "--out", folder / "whole", *later)
    for number in (1, 2):
        assert call(*words, "--part", f"{number}/2") == 0
    assert call("merge", folder / "whole/grid", "--first-seed", 3) == 0
    assert open_result(folder / "whole/grid").sizes["seed"] == 5


def test_a_merge_refuses_a_directory_in_use(folder, capsys):
    with Checkpoints(folder / "cut/grid"):
        assert call("merge", folder / "cut/grid") == 2
    assert "another process is writing into" in capsys.readouterr().err
    (folder / "cut/grid/unfinished/part-0000").mkdir(parents=True)
    assert call("merge", folder / "cut/grid") == 2
    assert "holds an unfinished run" in capsys.readouterr().err
    assert not (folder / "cut/grid/result.nc").exists()


def test_a_finished_result_needs_no_parts(folder, capsys):
    words = ("sweep", folder / "grid.toml", "--out", folder / "whole", "--part", "1/3", "--resume")
    assert call(*words) == 0
    assert "is complete; nothing to resume" in capsys.readouterr().out


def test_the_plan_of_a_part_is_shown(folder, capsys):
    assert part(folder, "1/3", "--dry-run") == 0
    shown = capsys.readouterr().err
    assert "1 program to compile" in shown
    assert f"{3 * 4 * 6:,} local trainings" in shown  # runs, rounds, clients


def test_later_seeds_are_not_added_to_parameters(folder, capsys):
    (folder / "whole/grid/params.npz").touch()
    words = ("sweep", folder / "grid.toml", "--out", folder / "whole", "--first-seed", 3)
    assert call(*words) == 2
    assert "--first-seed 3 adds to no parameters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--first-seed", 2], "has 3 seeds; give --first-seed 3"),
        (["--first-seed", 3, "--set", "num_rounds=8"], "num_rounds was 4, is 8"),
        (
            ["--first-seed", 3, "--out", "none"],
            "adds seeds to a finished result, but there is none",
        ),
    ],
)
def test_seeds_are_added_only_to_a_result_of_the_same_settings(
    folder, capsys, monkeypatch, options, message
):
    monkeypatch.chdir(folder)
    before = (folder / "whole/grid/result.nc").read_bytes()
    assert call("sweep", "grid.toml", "--out", "whole", *options) == 2
    assert message in capsys.readouterr().err
    assert (folder / "whole/grid/result.nc").read_bytes() == before
