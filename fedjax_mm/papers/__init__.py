"""All figures and tables of the papers, one folder per paper and one module per figure.

Item metadata is parsed from the module sources, so `fedjax-mm list` does not import them.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple


class _Place(NamedTuple):
    title: str
    module: str


# The type is Any because importing `Item` would import JAX and matplotlib, which takes a second.
class _Items(Mapping[str, Any]):
    """Maps names to items, importing an item's module on lookup."""

    def __init__(self, places: Mapping[str, _Place], prefix: str = "") -> None:
        """Stores the module locations, keyed by item id, and the prefix of the ids."""
        self._places, self._prefix = places, prefix

    def __getitem__(self, name: str) -> Any:
        key = self._prefix + name
        module = import_module(self._places[key].module)
        return next(item for item in module.ITEMS if item.id == key)

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self._prefix) for key in self._places)

    def __len__(self) -> int:
        return len(self._places)

    def title(self, name: str) -> str:
        """Returns an item's title without importing its module."""
        return self._places[self._prefix + name].title

    def paper(self, name: str) -> str:
        """Returns the citation of an item's paper."""
        folder = self._places[self._prefix + name].module.rpartition(".")[0]
        return "In no paper" if folder == __name__ else str(import_module(folder).__doc__)


def _places() -> dict[str, _Place]:
    """Returns the title and module of every item, sorted by paper and id."""
    root = Path(__file__).parent
    found: dict[str, _Place] = {}
    for path in sorted(root.glob("*/*.py")) + sorted(root.glob("*.py")):
        module = ".".join(("fedjax_mm.papers", *path.relative_to(root).with_suffix("").parts))
        # Parse only the source after ITEMS, because parsing whole modules would take as long as
        # importing the commands.
        _, _, items = path.read_text().partition("\nITEMS")
        for node in ast.walk(ast.parse(f"ITEMS{items}" if items else "")):
            if isinstance(node, ast.Call):
                # The id and the title are either the first two arguments or keywords.
                given = node.args if ast.unparse(node.func) == "Item" else []
                named: dict[str | None, ast.expr] = dict(zip(("id", "title"), given, strict=False))
                match named | {each.arg: each.value for each in node.keywords}:
                    case {"id": ast.Constant(value=str(key)), "title": ast.Constant(value=title)}:
                        found[key] = _Place(str(title), module)
    return dict(sorted(found.items(), key=_in_order))


def _in_order(place: tuple[str, _Place]) -> tuple[int, str, list[str]]:
    key, (_, module) = place
    # Sort numerically, so that Figure 10 comes after Figure 9. Items without a paper come last.
    numbered = [part.zfill(3) for part in re.split(r"(\d+)", key)]
    return -module.count("."), module.rpartition(".")[0], numbered


_ALL = _places()
_BOUNDS = "bounds-"

ALL = _Items(_ALL)
"""All items, including those of `fedjax-mm bounds`, by full id."""

ITEMS = _Items({key: place for key, place in _ALL.items() if not key.startswith(_BOUNDS)})
"""All items except those of `fedjax-mm bounds`, by id."""

BOUNDS = _Items({key: place for key, place in _ALL.items() if key.startswith(_BOUNDS)}, _BOUNDS)
"""The items shown by `fedjax-mm bounds`, by paper."""

__all__ = ["ALL", "BOUNDS", "ITEMS"]
