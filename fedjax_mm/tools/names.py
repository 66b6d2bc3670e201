"""Says where a public name is that the package itself does not have."""

import ast
import difflib
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_MODULES = ("data.partition", "local")  # public, but not in the package's own stub


def missing(name: str) -> str:
    """An error message with the module of a name, or with the closest name of the package."""
    own = _names("")
    for module in (*own, *_MODULES):
        if name in _names(module):
            where = f"fedjax_mm.{module}"
            return f"{name} is in {where}: from {where} import {name}"
    close = difflib.get_close_matches(name, own, n=1, cutoff=0.75)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"fedjax_mm has no {name!r}{hint}"


def _names(module: str) -> list[str]:
    """`__all__` of a module below the package, read from its file because imports take seconds."""
    path = _ROOT.joinpath(*module.split("."))
    files = (path / "__init__.pyi", path / "__init__.py", path.with_suffix(".py"))
    source = next((file for file in files if file.is_file()), None)
    for node in ast.parse(source.read_text(encoding="utf-8")).body if source else ():
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                found = [x.value for x in ast.walk(value) if isinstance(x, ast.Constant)]
                return [each for each in found if isinstance(each, str)]
    return []
