"""Progress of sweeps in Python: in terminals and notebooks, and nowhere else."""

import sys
from types import SimpleNamespace

import IPython
import pytest

from fedjax_mm import fedavg, mfa_rr, sweep
from fedjax_mm.sweeps import Callback, Execution, Setup
from fedjax_mm.tasks import quadratic
from fedjax_mm.tools import screen

ONE = Setup(quadratic(4, 2, mu=0.1), fedavg(0.1, local_steps=2), mfa_rr(4, 2))


def run(*callbacks, **how):
    return sweep(ONE, {}, execution=Execution(callbacks, **how), num_rounds=4)


@pytest.mark.parametrize("seen", ["all", "short work", "opted out", "a pipe"])
def test_a_terminal_shows_work_that_takes_long(seen, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: seen != "a pipe")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(screen, "_SHORT", 1e3 if seen == "short work" else 0.0)
    # A sweep inside another one has no bar of its own, which rich would refuse.
    run(Callback(on_segment=lambda _: run()), progress=seen != "opted out")
    shown = capsys.readouterr()
    assert not shown.out
    assert ("compil" in shown.err) == (seen == "all")
    run(progress=False)
    assert not capsys.readouterr().err


def test_a_notebook_shows_one_line_that_disappears(monkeypatch):
    shown = []
    handle = SimpleNamespace(update=lambda content, raw: shown.append(content["text/plain"]))
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=None))
    monkeypatch.setattr("IPython.display.display", lambda display_id: display_id and handle)
    monkeypatch.setattr(screen, "_SHORT", 1e3)
    run()
    assert not shown
    monkeypatch.setattr(screen, "_SHORT", 0.0)
    monkeypatch.setattr(screen, "_UPDATE_SECONDS", 0.0)
    run()
    *lines, last = shown
    assert lines[-1].startswith("100% run, ")
    assert not last
