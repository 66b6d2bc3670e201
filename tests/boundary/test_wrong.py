"""Every rule of refusal has one row: a call, words of the message, and the type of the error.

`tests_full/boundary` has more inputs for the same rules.
"""

import traceback

import pytest

from fedjax_mm import fedavg, mfa_rr, simulate, sweep
from fedjax_mm.sweeps import Grid
from tests.boundary import wrong_data, wrong_drift, wrong_files, wrong_parts, wrong_wrappers
from tests.boundary.parts import EVERYBODY, FEDAVG


def table_of(*modules):
    """Cases of the modules for `pytest.mark.parametrize`."""
    return [
        pytest.param(*case[:2], *(case[2:] or (ValueError,)), id=name)
        for module in modules
        for name, case in module.CASES.items()
    ]


MODULES = wrong_data, wrong_drift, wrong_files, wrong_parts, wrong_wrappers


@pytest.mark.parametrize(("call", "words", "kind"), table_of(*MODULES))
def test_wrong_input_is_refused_in_one_line(call, words, kind):
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


def test_a_refusal_has_few_lines():
    """The traceback has three frames: this test, the call and the refusal."""
    for call in SHORT.values():
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
    assert any(frame.name == "descend" for frame in frames)
