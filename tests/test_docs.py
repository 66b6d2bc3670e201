"""What README shows, runs."""

import re
from pathlib import Path

from fedjax_mm.cli import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_readme_code_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 15
    exec(compile(code, "README.md", "exec"), {})
    assert "learning_rate" in capsys.readouterr().out


def test_readme_names_only_commands_and_functions_that_exist():
    import fedjax_mm

    commands = set(re.findall(r"^    fedjax-mm (\w+)", README, re.MULTILINE))
    assert commands == {
        command.name or command.callback.__name__ for command in app.registered_commands
    }
    for name in re.findall(r"^\| `(\w+)\(", README, re.MULTILINE):
        assert name in fedjax_mm.__all__
    assert len(README.splitlines()) <= 150
