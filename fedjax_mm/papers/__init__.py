"""All figures and tables of the papers, one folder per paper and one module per figure.

The title and the module of every item are in `published.toml`, so that `fedjax-mm list` imports no
item.
"""

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from fedjax_mm.papers.catalogue import entries, folders


# The type is Any because importing `Item` would import JAX and matplotlib, which takes a second.
class _Items(Mapping[str, Any]):
    """Maps names to items, importing an item's module on lookup."""

    def __init__(self, folders: Mapping[str, str], prefix: str = "") -> None:
        """Stores the folders, keyed by item id, and the prefix of the ids."""
        self._folders, self._prefix = folders, prefix

    def __getitem__(self, name: str) -> Any:
        key = self._prefix + name
        folder = self._folders[key]
        module = import_module(f"{folder}.{entries(folder)[key]['module']}")
        return next(item for item in module.ITEMS if item.id == key)

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self._prefix) for key in self._folders)

    def __len__(self) -> int:
        return len(self._folders)

    def title(self, name: str) -> str:
        """An item's title without importing its module."""
        key = self._prefix + name
        return str(entries(self._folders[key])[key]["title"])

    def name(self, name: str) -> str:
        """An item's place in its paper and its title: "Fig. 3: MFA-Rand against ..."."""
        key = self._prefix + name
        shows, title = entries(self._folders[key])[key].get("shows", ""), self.title(name)
        kind = {"Figure": "Fig."}
        if place := re.match(r"(Figure|Table|Theorem|Corollary) ([\d.]*\d)(?:\((\w)\))?", shows):
            word, number, part = place.groups("")
            return f"{kind.get(word, word)} {number}{part}: {title}"
        return title[0].upper() + title[1:]

    def runtime(self, name: str) -> str:
        """How long the run of an item took whose result is published."""
        key = self._prefix + name
        return str(entries(self._folders[key])[key].get("runtime", "not measured"))

    def needs(self, name: str) -> str:
        """The data that an item needs from the folder of `--data`, or an empty text."""
        key = self._prefix + name
        return str(entries(self._folders[key])[key].get("needs", ""))

    def paper(self, name: str) -> str:
        """The citation of an item's paper."""
        folder = self._folders[self._prefix + name]
        return "In no paper" if folder == __name__ else str(import_module(folder).__doc__)


def _numbered(key: str) -> list[str]:
    # Sort numerically, so that Figure 10 comes after Figure 9.
    return [part.zfill(3) for part in re.split(r"(\d+)", key)]


_ALL = {
    key: folder
    for folder in folders()
    for key in sorted(entries(folder), key=_numbered)
    if "module" in entries(folder)[key]
}
_BOUNDS = "bounds-"

ALL = _Items(_ALL)
"""All items, including those of `fedjax-mm bounds`, by full id."""

ITEMS = _Items({key: folder for key, folder in _ALL.items() if not key.startswith(_BOUNDS)})
"""All items except those of `fedjax-mm bounds`, by id."""

BOUNDS = _Items({key: folder for key, folder in _ALL.items() if key.startswith(_BOUNDS)}, _BOUNDS)
"""The items shown by `fedjax-mm bounds`, by paper."""

__all__ = ["ALL", "BOUNDS", "ITEMS"]
