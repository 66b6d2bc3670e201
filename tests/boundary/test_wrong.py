"""Wrong input of some 300 kinds: one line each, of the right type, before anything is compiled."""

import pytest

from fedjax_mm import engine
from fedjax_mm.sweeps.program import Program
from tests.boundary import wrong_data, wrong_drift, wrong_files, wrong_parts, wrong_wrappers

TABLE = [
    pytest.param(*case[:2], *(case[2:] or (ValueError,)), id=name)
    for module in (wrong_data, wrong_drift, wrong_files, wrong_parts, wrong_wrappers)
    for name, case in module.CASES.items()
]


def test_the_table_has_at_least_200_kinds():
    assert len(TABLE) >= 200


@pytest.mark.parametrize(("call", "words", "kind"), TABLE)
def test_wrong_input_is_refused_in_one_line(call, words, kind, monkeypatch):
    def computed(*args, **kwargs):
        raise AssertionError("a round is traced")

    # Everything that is compiled for long is made of these three.
    monkeypatch.setattr(engine, "arrivals_of", computed)
    monkeypatch.setattr(engine, "aggregate", computed)
    monkeypatch.setattr(Program, "segment", computed)
    with pytest.raises(kind, match=words) as refusal:
        call()
    message = str(refusal.value)
    assert "\n" not in message
    assert len(message) < 260
