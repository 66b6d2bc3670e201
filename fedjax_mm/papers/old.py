"""What it takes to reproduce an item of a paper: settings, a run, a judgement, a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_mm.papers.catalogue import CATALOGUE

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

    from fedjax_mm.experiments.tasks import Config
    from fedjax_mm.sweeps.execute import Execution


class Claim(NamedTuple):
    """A statement of the paper, whether it holds in our run, and the numbers that say so."""

    claim: str
    holds: bool
    evidence: str


class Judgement(NamedTuple):
    """What was measured.

    Attributes:
      measured: numbers by name, for `summary.json`.
      claims: the paper's claims.
      table: a header and rows for the terminal.
      more: further tables, each below its title.
    """

    measured: Mapping[str, Any]
    claims: tuple[Claim, ...]
    table: tuple[tuple[str, ...], ...]
    more: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = ()


class Reproduction(NamedTuple):
    """One figure or table of a paper.

    Attributes:
      id: such as "mfa-fig3", of the catalogue.
      paper: the published values, and what the paper leaves open.
      config: default settings; the command line may override every one.
      run: from settings to a Dataset with a manifest.
      judge: from the Dataset and the settings to the judgement.
      plot: from the Dataset, the settings and the judgement to the figure.
    """

    id: str
    paper: Mapping[str, Any]
    config: Config
    run: Callable[[Any, Execution | None], xr.Dataset]
    judge: Callable[[xr.Dataset, Any], Judgement]
    plot: Callable[[xr.Dataset, Any, Judgement], Figure]

    @property
    def title(self) -> str:
        """One line for `list`."""
        return CATALOGUE[self.id].title
