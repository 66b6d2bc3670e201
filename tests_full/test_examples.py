"""Examples are short, run without warnings, and print or plot something."""

import ast
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

FOLDER = Path(__file__).parent.parent / "examples"
SMALLER = {  # replacements that make an example small
    "away_and_private": {"NUM_ROUNDS = 1000, 2, 50": "NUM_ROUNDS = 100, 2, 5"},
    "first_run": {"num_rounds=1000, num_seeds=20": "num_rounds=24, num_seeds=3"},
    "own_method": {"NUM_ROUNDS = 30, 60": "NUM_ROUNDS = 30, 3"},
    "peers_on_a_graph": {"num_rounds=60": "num_rounds=4"},
    "rates_and_seeds": {"num_rounds=400, num_seeds=10": "num_rounds=200, num_seeds=2"},
}
PRINTS = {
    "away_and_private": r"(noise \d+\.0: epsilon [\d.]+, excess loss [\d.]+, clients .*\n){2}",
    "first_run": r"(.*\n)*mfa_rand +[\d.e-]+\nmfa_rr +[\d.e-]+\n(.*\n)*",
    "own_method": r"(C = [\d.]+: accuracy \[0\.\d+ +0\.\d+\]\n){2}",
    "peers_on_a_graph": r"(\S+\(.*\): mean [\d.]+, worst [\d.]+\n){2}",
    "rates_and_seeds": r"(mfa_r\w+: best rate [\d.]+, excess loss [\d.e-]+ \+- [\d.e-]+\n){2}",
}


def test_every_example_is_tested_and_listed():
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert names == set(SMALLER) == set(PRINTS)
    listed = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\)", (FOLDER / "README.md").read_text(), re.M)
    assert names == set(listed)


@pytest.mark.parametrize("name", SMALLER)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = (FOLDER / f"{name}.py").read_text()
    assert len(code.splitlines()) <= 40
    assert ast.get_docstring(ast.parse(code))
    for old, new in SMALLER[name].items():
        assert old in code, old
        code = code.replace(old, new)
    exec(compile(code, f"{name}.py", "exec"), {"__name__": "__main__"})
    assert re.fullmatch(PRINTS[name], capsys.readouterr().out)
    drawn = [path.name for path in tmp_path.iterdir()]
    assert drawn == re.findall(r'savefig\("(.*)"\)', code)
    plt.close("all")
