"""One module per paper: its figures and tables as data, and the claims to check."""

from collections.abc import Iterator, Mapping
from importlib import import_module

from fedjax_mm.papers import catalogue
from fedjax_mm.papers.item import Claim, Judgement, Reproduction


class _Items(Mapping[str, Reproduction]):
    """Items of the catalogue by a name, each imported with its module when it is looked up."""

    def __init__(self, ids: Mapping[str, str]) -> None:
        """The ids by name."""
        self._ids = ids

    def __getitem__(self, name: str) -> Reproduction:
        """The item."""
        return _find(self._ids[name])

    def __iter__(self) -> Iterator[str]:
        """The names; nothing is imported."""
        return iter(self._ids)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._ids)


def _find(id: str) -> Reproduction:
    module = import_module(f"fedjax_mm.papers.{catalogue.CATALOGUE[id].module}")
    items: tuple[Reproduction, ...] = module.REPRODUCTIONS
    return next(item for item in items if item.id == id)


REPRODUCTIONS: Mapping[str, Reproduction] = _Items(
    {name: name for name in catalogue.CATALOGUE if name not in catalogue.BOUNDS.values()}
)
"""Every reproduction by its id, in the papers' order, and then what no paper has."""

BOUNDS: Mapping[str, Reproduction] = _Items(catalogue.BOUNDS)
"""What `fedjax-mm bounds` shows, by paper."""

__all__ = ["BOUNDS", "REPRODUCTIONS", "Claim", "Judgement", "Reproduction"]
