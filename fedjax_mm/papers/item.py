"""An item, a figure or table of a paper: how it is run, measured, judged and shown."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

    from fedjax_mm.experiments.fields import Config
    from fedjax_mm.papers.claims import Claim
    from fedjax_mm.papers.tables import Table
    from fedjax_mm.sweeps.execute import Execution


class Findings(NamedTuple):
    """Labelled numbers, the paper's claims about them, and tables for the terminal."""

    measured: xr.Dataset
    claims: tuple[Claim, ...]
    tables: tuple[Table, ...]


class Item(NamedTuple):
    """A figure or table of a paper. All functions take the settings last.

    Attributes:
      id: the paper and the item, such as "mfa-fig3".
      title: a line for `fedjax-mm list`.
      settings: the defaults, each of which the command line may override.
      run: returns the Dataset that is written to `result.nc`, with a manifest.
      measure: takes the result; returns numbers over named dimensions.
      claims: takes the numbers; returns what the paper claims of them.
      table: takes the numbers; returns tables.
      figure: takes the result and the numbers.
    """

    id: str
    title: str
    settings: Config
    run: Callable[[Any, Execution | None], xr.Dataset]
    measure: Callable[[xr.Dataset, Any], xr.Dataset]
    claims: Callable[[xr.Dataset, Any], Iterable[Claim]]
    table: Callable[[xr.Dataset, Any], Sequence[Table]]
    figure: Callable[[xr.Dataset, xr.Dataset, Any], Figure]

    @property
    def paper(self) -> Mapping[str, Any]:
        """Returns the published numbers, and what the paper leaves open."""
        return published(type(self.settings).__module__, self.id)

    def make(self, settings: Config, execution: Execution | None = None) -> xr.Dataset:
        """Returns the result of the run, with the settings in its manifest."""
        result = self.run(settings, execution)
        about = result.attrs["manifest"] | {"config": settings.model_dump(mode="json")}
        return result.assign_attrs(manifest=about)

    def judge(self, result: xr.Dataset, settings: Config) -> Findings:
        """Returns what was measured, with the verdicts on the paper's claims."""
        measured = self.measure(result, settings)
        claims, tables = self.claims(measured, settings), self.table(measured, settings)
        return Findings(measured, tuple(claims), tuple(tables))

    def summary(self, result: xr.Dataset, findings: Findings) -> dict[str, Any]:
        """Returns the contents of `summary.json`."""
        from fedjax_mm.experiments.overrides import changes

        about = result.attrs["manifest"]
        return {
            "id": self.id,
            "paper": self.paper,
            "measured": findings.measured.to_dict(),
            "claims": [claim._asdict() | {"holds": claim.holds} for claim in findings.claims],
            "tables": [table._asdict() for table in findings.tables],
            "changed": changes(about["config"], self.settings.model_dump(mode="json")),
            "data": about["data"],
            "manifest": about,
        }


def published(module: str, id: str) -> Mapping[str, Any]:
    """Returns an item's table in the file `published.toml` of its paper; empty if it has none.

    An item's key `shares` names a table whose entries are the item's too.

    Args:
      module: the name of a module in the paper's folder.
      id: of the item.
    """
    file = resources.files(module.rpartition(".")[0]) / "published.toml"
    tables: dict[str, dict[str, Any]] = tomllib.loads(file.read_text())
    own = tables.get(id, {})
    shared = tables.get(own.pop("shares", ""), {})
    # The item's own entries come first, and count where both tables have one; lists are joined.
    lists = {key for key, value in own.items() if isinstance(value, list) and key in shared}
    return own | shared | own | {key: own[key] + shared[key] for key in sorted(lists)}
