"""Absurd files, names and settings are refused in one line, without writing anything."""

import os
import time
from pathlib import Path

import pytest
from rich.markup import escape

from fedjax_mm.cli import terminal
from tests.test_cli import CONFIG, call, check_refusal

NESTED = "[" * 2000 + "]" * 2000
SPOILT = {
    "2000 brackets": (f"x = {NESTED}", (), "are nested too deeply"),
    "2000 brackets of --set": ("", ("--set", f"num_rounds={NESTED}"), "too deep"),
    "3000 tables of --set": ("", ("--set", ".".join("a" * 3000) + "=1"), "too deep"),
    "a table of 100 dots": (f"[{'.'.join('a' * 100)}]", (), "too deep"),
    "a table of 3000 dots": (f"[{'.'.join('a' * 3000)}]", (), "too deep"),
    "a long value": (f"precision = '{'x' * 10**6}'", (), "xxx...: "),
    "a long name": ("", ("--out", "x" * 300), "name too long; choose another directory with --out"),
    "a null": ("", ("--out", "x\0y"), "null"),
}
"""Maps a name to a line of the file, options, and a fragment of the error."""


@pytest.mark.parametrize("name", SPOILT)
def test_absurd_input_is_refused_in_one_line(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    line, options, fragment = SPOILT[name]
    Path("mine.toml").write_text(f"{line}\n{CONFIG}")
    check_refusal(tmp_path, ("run", "mine.toml", *options), (fragment,))


def test_many_unknown_keys_are_refused_at_once(monkeypatch, tmp_path):
    """The first keys are shown and the others counted, because all proposals took a minute."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("".join(f"key{i} = 1\n" for i in range(3000)) + CONFIG)
    start = time.process_time()
    check_refusal(tmp_path, ("run", "mine.toml"), ("key0 = 1: unknown key", "and 2,990 more"))
    assert time.process_time() - start < 10


@pytest.mark.parametrize("name", ["...toml", "..toml"])
def test_results_stay_below_out(monkeypatch, tmp_path, name):
    """Before Python 3.14 the stems of these names are ".." and "."."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(CONFIG)
    check_refusal(tmp_path, ("run", name), ("results have the file's name",))


@pytest.mark.parametrize("name", ["mine.toml", "data/train/a.json"])
def test_a_named_pipe_is_refused_without_waiting(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    head, _, algorithm = CONFIG.partition("[task]")
    algorithm = algorithm[algorithm.index("[algorithms") :]
    table = '[task]\nname = "leaf"\ndirectory = "data"\n'
    Path("mine.toml").write_text(head + table + algorithm)
    for folder in ("train", "test"):
        Path("data", folder).mkdir(parents=True)
        Path("data", folder, "a.json").touch()
    Path(name).unlink()
    os.mkfifo(name)
    check_refusal(tmp_path, ("run", "mine.toml"), (f"{name}: not a regular file",))


@pytest.mark.parametrize("label", ["[/x]", "[red]", ":smile:", "a[b=c]"])
def test_labels_are_shown_literally(capsys, label):
    """They are not markup, in which "[/x]" would be a closing tag without an opening one."""
    for screen in (terminal.console, terminal.notes):
        terminal.say(label, screen)
        terminal.show_table([label], [[label]], screen, title=label)
    text = "".join(capsys.readouterr())
    assert text.count(label) == 8
    assert escape(label) == label or escape(label) not in text


def test_a_progress_bar_shows_labels_literally(monkeypatch, capsys):
    screen = terminal.Console(force_terminal=True, width=200, markup=False)
    monkeypatch.setattr(terminal, "notes", screen)
    with terminal.shown_progress() as report:
        report("[/x]", 1, 2)
    assert "[/x]" in capsys.readouterr().out


def test_brackets_in_labels_and_paths_are_allowed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("a[").mkdir()
    Path("a[/x].toml").write_text(CONFIG.replace("[algorithms.A]", '[algorithms."[/x]"]'))
    arguments = ("run", "a[/x].toml", "--out", "b[/y]", "--set", "num_seeds=1")
    code, out, _ = call(*arguments)
    assert code == 0
    assert "b[/y]/x]" in out
    code, out, _ = call(*arguments, "--resume")
    assert (code, out) == (0, "b[/y]/x] is complete; nothing to resume\n")
