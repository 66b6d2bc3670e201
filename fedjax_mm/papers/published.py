"""The papers' published statements, numbers and open points, as data."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from fedjax_mm.papers.schema import Published, published_statements

_FILE = "published.toml"


def published(module: str, id: str) -> Mapping[str, Any]:
    """Returns an item's table from the `published.toml` of its paper, or an empty one.

    An item's key `shares` names a table whose entries it inherits.

    Args:
      module: the name of a module in the paper's directory.
      id: the item's id.
    """
    tables = _tables(module.rpartition(".")[0])
    own = dict(tables.get(id, {}))
    shared = tables.get(own.pop("shares", ""), {})
    # The item's own entries take precedence, and lists are concatenated.
    lists = {key for key, value in own.items() if isinstance(value, list) and key in shared}
    return own | shared | own | {key: own[key] + shared[key] for key in sorted(lists)}


@cache
def all_statements() -> Mapping[str, Mapping[str, tuple[Published, ...]]]:
    """Returns all statements, by the citation of their paper and the item that judges them."""
    found = {}
    for path in sorted(Path(__file__).parent.glob(f"*/{_FILE}")):
        folder = f"{__package__}.{path.parent.name}"
        of_items = {item: published_statements(table) for item, table in _tables(folder).items()}
        citation = str(import_module(folder).__doc__)
        found[citation] = {item: each for item, each in of_items.items() if each}
    return found


def _tables(folder: str) -> dict[str, dict[str, Any]]:
    file = resources.files(folder) / _FILE
    return tomllib.loads(file.read_text()) if file.is_file() else {}
