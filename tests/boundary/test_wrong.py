"""Wrong input gives one-line errors of the right type before compilation."""

import traceback

import pytest

from fedjax_mm import fedavg, mfa_rr, simulate, sweep
from fedjax_mm.simulator import asynchronous as run
from fedjax_mm.simulator import round as rounds
from fedjax_mm.sweeps import Grid
from fedjax_mm.sweeps.program import Program
from tests.boundary import wrong_data, wrong_drift, wrong_files, wrong_parts, wrong_wrappers
from tests.boundary.parts import EVERYBODY, FEDAVG

TABLE = [
    pytest.param(*case[:2], *(case[2:] or (ValueError,)), id=name)
    for module in (wrong_data, wrong_drift, wrong_files, wrong_parts, wrong_wrappers)
    for name, case in module.CASES.items()
]


@pytest.mark.parametrize(("call", "words", "kind"), TABLE)
def test_wrong_input_is_refused_in_one_line(call, words, kind, monkeypatch):
    def computed(*args, **kwargs):
        raise AssertionError("a round is traced")

    # All programs that take long to compile contain one of these three.
    monkeypatch.setattr(run, "compute_arrivals", computed)
    monkeypatch.setattr(rounds.Rounds, "one_round", computed)
    monkeypatch.setattr(Program, "segment", computed)
    with pytest.raises(kind, match=words) as refusal:
        call()
    message = str(refusal.value)
    assert "\n" not in message
    assert len(message) < 260


SHORT = {
    "a number": lambda: mfa_rr(24, 0),
    "numbers that do not fit": lambda: mfa_rr(4, 8),
    "a part": lambda: simulate(0, fedavg, FEDAVG, EVERYBODY, 2),
    "a task": lambda: simulate(0, wrong_parts.Plain(), FEDAVG, EVERYBODY, 2),
    "a result of the user's": lambda: simulate(
        0, wrong_parts.plain(weight=lambda self, client: None), FEDAVG, EVERYBODY, 2
    ),
    "a grid": lambda: Grid(lambda learning_rate: None, {"lr": [0.1]}, num_rounds=2),
    "a sweep": lambda: sweep(lambda rate: None, {"rate": [0.1]}),
}


@pytest.mark.parametrize("call", SHORT.values(), ids=SHORT)
def test_a_refusal_has_few_lines(call):
    """The traceback has three frames: this test, the call and the refusal."""
    with pytest.raises((TypeError, ValueError)) as refusal:
        call()
    assert len(traceback.extract_tb(refusal.value.__traceback__)) == 3
    assert refusal.value.__cause__ is None
    assert refusal.value.__suppress_context__


def test_errors_in_user_code_keep_their_frames():
    def wrong(self, params, batch):
        raise ValueError("own")

    with pytest.raises(ValueError, match="own") as error:
        simulate(0, wrong_parts.plain(loss=wrong), FEDAVG, EVERYBODY, 2)
    frames = traceback.extract_tb(error.value.__traceback__)
    assert frames[-1].name == "wrong"
    assert any(frame.name == "train_locally" for frame in frames)
