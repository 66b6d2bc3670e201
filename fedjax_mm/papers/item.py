"""An item is a figure or table of a paper, with functions to run, measure, judge and show it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm.experiments.fields import Config
from fedjax_mm.experiments.overrides import changes
from fedjax_mm.papers import schema
from fedjax_mm.papers.published import published
from fedjax_mm.papers.rulings import Ruling
from fedjax_mm.papers.training import with_config
from fedjax_mm.sweeps.execution import Execution

_LARGEST = 4096
"""The size of the largest arrays that are stored in `summary.json`."""


_ELSEWHERE = ("module", "title", "statements", "numbers", "reading", "runtime", "needs")
"""The keys of an item in `published.toml` that are not among its published numbers."""


class Findings(NamedTuple):
    """The measured numbers, and the verdicts on the paper's sentences and printed numbers."""

    measured: xr.Dataset
    statements: tuple[schema.Statement, ...]
    numbers: tuple[schema.Statement, ...]
    checks: tuple[schema.Check, ...]
    tables: tuple[schema.Table, ...]
    readings: tuple[schema.Reading, ...] = ()


class Item(NamedTuple):
    """A figure or table of a paper. All functions take the settings as their last argument.

    Attributes:
      id: the paper and the item, such as "mfa-fig3".
      settings: the default settings, each of which can be overridden on the command line.
      run: returns the Dataset written to `result.nc`, with a manifest.
      measure: maps the result to numbers over named dimensions.
      judge: yields, from the numbers, our own checks and a ruling on every statement judged by
        code, identified by its key in `published.toml`. It may also yield verdicts on statements of
        other items under another reading.
      table: returns tables of the numbers.
      figure: draws the result and the numbers.
    """

    id: str
    settings: Config
    run: Callable[[Any, Execution | None], xr.Dataset]
    measure: Callable[[xr.Dataset, Any], xr.Dataset]
    judge: Callable[[xr.Dataset, Any], Iterable[Ruling | schema.Check | schema.Reading]]
    table: Callable[[xr.Dataset, Any], Sequence[schema.Table]]
    figure: Callable[[xr.Dataset, xr.Dataset, Any], Figure]

    @property
    def title(self) -> str:
        """The title shown by `fedjax-mm list`."""
        return str(self.paper["title"])

    @property
    def paper(self) -> Mapping[str, Any]:
        """The published numbers, and the points that the paper leaves open."""
        return published(self.id)

    def make(self, settings: Config, execution: Execution | None = None) -> xr.Dataset:
        """Runs the item and stores the settings in the result's manifest."""
        return with_config(self.run(settings, execution), settings)

    def findings(self, result: xr.Dataset, settings: Config) -> Findings:
        """The measured numbers, and the verdict on every statement of the paper.

        Raises:
          ValueError: if a statement of `published.toml` is not judged, or an unknown one is.
        """
        measured = self.measure(result, settings)
        found = list(self.judge(measured, settings))
        rulings = {each.key: each for each in found if isinstance(each, Ruling)}
        statements = schema.published_statements(self.paper)
        numbers = schema.published_statements(self.paper, "numbers")
        judged = {each.key for each in statements + numbers if not each.untested}
        if unlike := sorted(judged ^ rulings.keys()):
            raise ValueError(
                f"{self.id}: published.toml and `judge` differ in {', '.join(unlike)}; a statement "
                "is judged once, or says why it is untested"
            )
        about = result.attrs["manifest"]
        return Findings(
            measured,
            tuple(_judged(each, rulings.get(each.key), about) for each in statements),
            tuple(_judged(each, rulings.get(each.key), about) for each in numbers),
            tuple(each for each in found if isinstance(each, schema.Check)),
            tuple(self.table(measured, settings)),
            tuple(each for each in found if isinstance(each, schema.Reading)),
        )

    def summary(self, result: xr.Dataset, findings: Findings) -> dict[str, Any]:
        """The contents of `summary.json`."""
        about = result.attrs["manifest"]
        return {
            "id": self.id,
            "paper": {key: self.paper[key] for key in self.paper if key not in _ELSEWHERE},
            "measured": _small(findings.measured).to_dict(),
            "statements": [each.model_dump() for each in findings.statements],
            "numbers": [each.model_dump() for each in findings.numbers],
            "checks": [each.model_dump() for each in findings.checks],
            "readings": [each.model_dump() for each in findings.readings],
            "tables": [each.model_dump() for each in findings.tables],
            "changed": changes(about["config"], self.settings.model_dump(mode="json")),
            "data": about["data"],
            "manifest": about,
        }


def _small(measured: xr.Dataset) -> xr.Dataset:
    """Drops long curves, which can be recomputed from `result.nc`."""
    large = [name for name, values in measured.data_vars.items() if values.size > _LARGEST]
    return measured.drop_vars(large).drop_attrs()


def _judged(
    published: schema.Published, ruling: Ruling | None, about: Mapping[str, Any]
) -> schema.Statement:
    """Combines a statement with its verdict, given a ruling and the result's manifest."""
    if ruling is None:
        return schema.not_run(published, published.untested)
    names = [name.lower() for name in about.get("datasets", ())]
    if published.data and not any(name.startswith(published.data) for name in names):
        stood = " and ".join(names) or f"{about['data']} data"
        return schema.not_run(published, f"run on {stood} instead of {published.data}")
    words = published.model_dump() | ({"takes": ruling.takes} if ruling.takes else {})
    parts = tuple(
        schema.Part(**part.model_dump() | {"verdict": published.word(part.verdict)})
        for part in ruling.parts
    )
    found = ruling._asdict() | {"verdict": published.word(ruling.verdict), "parts": parts}
    return schema.Statement(**(found | words))
