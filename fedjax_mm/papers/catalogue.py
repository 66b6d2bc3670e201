"""The tables of `published.toml`, one for each item, which are read without importing an item."""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent
_FILE = "published.toml"


def folders() -> Iterator[str]:
    """Yields the packages of the papers by name, and then that of items in no paper."""
    for path in sorted(_ROOT.glob(f"*/{_FILE}")):
        yield f"{__package__}.{path.parent.name}"
    yield str(__package__)


@cache
def entries(folder: str) -> Mapping[str, Mapping[str, Any]]:
    """All tables in the file of one of the `folders`, by the id of their item."""
    inner = folder.removeprefix(str(__package__)).strip(".")
    return tomllib.loads((_ROOT / inner / _FILE).read_text())
