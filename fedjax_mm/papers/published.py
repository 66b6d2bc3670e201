"""The papers' published statements, numbers and open points, as data."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, Literal, TypeAlias

from fedjax_mm.papers.catalogue import entries, folders
from fedjax_mm.papers.schema import Claim, Published, published_statements

Kind: TypeAlias = Literal["statements", "numbers"]


def published(id: str) -> Mapping[str, Any]:
    """An item's table from the `published.toml` of its paper, or an empty one.

    An item's key `shares` names a table whose entries it inherits.
    """
    known = next((entries(folder) for folder in folders() if id in entries(folder)), {})
    own = dict(known.get(id, {}))
    shared = dict(known.get(own.pop("shares", ""), {}))
    # The item's own entries take precedence, and lists are concatenated.
    lists = {key for key, value in own.items() if isinstance(value, list) and key in shared}
    return own | shared | own | {key: own[key] + shared[key] for key in sorted(lists)}


@cache
def all_published(kind: Kind) -> Mapping[str, Mapping[str, tuple[Published, ...]]]:
    """All sentences, or printed numbers, by the citation of their paper and by item."""
    found = {}
    for folder in folders():
        of_items = {name: published_statements(x, kind) for name, x in entries(folder).items()}
        if each := {item: statements for item, statements in of_items.items() if statements}:
            found[str(import_module(folder).__doc__)] = each
    return found


@cache
def all_claims() -> Mapping[str, tuple[Claim, ...]]:
    """The main claims of each paper, by its citation."""
    found = {}
    for folder in folders():
        claims = entries(folder).get("paper", {}).get("claims", ())
        if claims:
            found[str(import_module(folder).__doc__)] = tuple(Claim(**each) for each in claims)
    return found
