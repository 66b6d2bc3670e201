"""Truncated, flipped and deleted files, full disks, and two processes in one directory."""

import random
import shutil
import signal
import warnings

import pytest

from tests.sweeps.test_checkpoint import small_disk
from tests_full.faults.children import COMMANDS, end, finish, outcome, start, write_files

DAMAGE = ("truncated", "flipped", "deleted")


def spoil(path, damage, moments):
    content = path.read_bytes()
    place = moments.randrange(len(content))
    if damage == "deleted":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[:place])
    else:
        flipped = content[place] ^ 1 << moments.randrange(8)
        path.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])


def files_of(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def content_of(directory):
    """All files except locks, which a killed process cannot remove."""
    return {path: path.read_bytes() for path in files_of(directory) if path.suffix != ".lock"}


def check_ends(name, directory, expected, done):
    """Resuming gives the same result, or a refusal in one line that changes no file."""
    results = directory / "results"
    before = content_of(results)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about damaged files that are skipped
        code, said = finish(name, directory)
    assert "Traceback" not in said
    if code == 2:
        # Earlier lines report the seeds that were read.
        assert [line.startswith("fedjax-mm: ") for line in said.splitlines()].count(True) == 1
        assert said.splitlines()[-1].startswith("fedjax-mm: ")
        assert content_of(results) == before
        return "refused"
    assert code in (0, done), said
    assert outcome(name, directory) == expected
    return "the same result"


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_damaged_file_is_refused_or_does_not_change_the_result(name, tmp_path, record_property):
    moments, found = random.Random(name), []
    write_files(tmp_path / "whole")
    done, told, said = end(start(name, tmp_path / "whole"))
    assert done in (0, 3), said
    expected = outcome(name, tmp_path / "whole")
    write_files(tmp_path / "stopped")
    process = start(name, tmp_path / "stopped", "--save-every", 0)
    code, _, said = end(process, [signal.SIGKILL], after=len(told) - 4)
    assert code == -signal.SIGKILL, said
    for state in ("whole", "stopped"):
        results = tmp_path / state / "results"
        for path in files_of(results):
            for damage in DAMAGE if path.stat().st_size else ():
                copy = tmp_path / "copy"
                shutil.copytree(tmp_path / state, copy)
                spoil(copy / path.relative_to(tmp_path / state), damage, moments)
                found.append(check_ends(name, copy, expected, done))
                shutil.rmtree(copy)
    for each in sorted(set(found)):
        record_property(f"faults: {name}, damaged files, {each}", found.count(each))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sweep", "run", "reproduce"])
def test_commands_on_a_full_disk_fail_in_one_line_and_can_continue(name, tmp_path, record_property):
    """The disk fills up at the record, a checkpoint, the result, the figure or the manifest."""
    write_files(tmp_path / "whole")
    done = finish(name, tmp_path / "whole")[0]
    assert done in (0, 3)
    expected, failed = outcome(name, tmp_path / "whole"), 0
    for number, size in enumerate((4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)):
        disk = tmp_path / f"disk{number}"
        with small_disk(disk, f"{size}k") as resize:
            try:
                write_files(disk)
            except OSError:
                continue
            code, said = finish(name, disk, "--save-every", 0)
            lines = [line for line in said.splitlines() if line.startswith("fedjax-mm: ")]
            assert "Traceback" not in said
            if code != done:
                failed += 1
                assert code in (1, 2)
                assert len(lines) == 1, said
                assert str(disk) in lines[0]
            assert not list(disk.rglob("*.part"))
            resize("20m")
            assert finish(name, disk)[0] == done
            assert outcome(name, disk) == expected, size
    record_property(f"faults: {name}, full disks, all continued to the same result", failed)
    assert failed


@pytest.mark.slow
def test_processes_that_share_a_full_disk_or_a_directory(tmp_path):
    write_files(tmp_path / "whole")
    assert finish("sweep", tmp_path / "whole")[0] == 0
    expected, disk = outcome("sweep", tmp_path / "whole"), tmp_path / "disk"
    with small_disk(disk, "80k") as resize:
        places = [disk / "a", disk / "b"]
        for place in places:
            write_files(place)
        processes = [start("sweep", place, "--save-every", 0) for place in places]
        for code, _, said in [end(process) for process in processes]:
            assert code in (0, 1)
            assert "Traceback" not in said
            assert code == 0 or f"{disk}" in said.splitlines()[-1]
        resize("20m")
        for place in places:
            assert finish("sweep", place)[0] == 0
            assert outcome("sweep", place) == expected
    write_files(tmp_path / "one")
    processes = [start("sweep", tmp_path / "one", "--resume", "--save-every", 0) for _ in range(3)]
    ended = [end(process) for process in processes]
    assert 0 in {code for code, *_ in ended}
    for code, _, said in ended:
        assert "Traceback" not in said
        assert code == 0 or (code, "another process" in said) == (2, True)
    assert outcome("sweep", tmp_path / "one") == expected
