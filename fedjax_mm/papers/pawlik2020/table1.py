"""Table 1: costs of trials with cohorts of several sizes, as printed and by their equations."""

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Self

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm import plots
from fedjax_mm.experiments.fields import Config, Count
from fedjax_mm.papers.claims import Claim, claim
from fedjax_mm.papers.item import Item, published
from fedjax_mm.papers.pawlik2020.clients import check_sizes
from fedjax_mm.papers.tables import Table, cells, columns, rows
from fedjax_mm.results.dataset import manifest
from fedjax_mm.results.labels import describe
from fedjax_mm.sweeps.execute import Execution
from fedjax_mm.theory.fairness import Costs, costs
from fedjax_mm.theory.problem import Problem

_SYMBOLS = ["g", "g_R", "g'", "g'_R", "u", "u_R", "c", "c'"]  # by eqs. (1) to (8)


class Trials(Config):
    """Settings of trials by cohorts of several sizes that contact the server equally often."""

    cohort_sizes: Annotated[tuple[Count, ...], Field(min_length=1)] = (5, 10, 15, 20, 30)
    contacts: Count = 60
    """c = R C."""
    updates: Count = 300
    """B C."""
    local_epochs: Count = 1
    num_examples: Count = 600
    """N of every client."""
    num_clients: Count = 100

    @model_validator(mode="after")
    def _fits(self) -> Self:
        costs = {"contacts": self.contacts, "updates": self.updates}
        check_sizes(self.cohort_sizes, self.num_clients, **costs)
        return self


def run(config: Trials, execution: Execution | None = None) -> xr.Dataset:
    """Returns every trial's costs by eqs. (1) to (8), and as printed if the table has the trial."""
    began = time.perf_counter()
    C = np.array(config.cohort_sizes)
    R, B = config.contacts // C, config.updates // C
    problem = Problem(N=config.num_clients, C=C, S=config.num_examples)
    by_equation = np.array(costs(R, problem, B, config.local_epochs))
    # Other trials than the paper's have other costs: nothing is printed of them.
    is_printed = config == Trials(cohort_sizes=config.cohort_sizes)
    table = published(__name__, "cb-table1")["table"] if is_printed else {}
    # The first two printed columns are R and B.
    printed = np.transpose([table.get(str(size), [np.nan] * 10)[2:] for size in C])
    seconds = {"compile": 0.0, "run": time.perf_counter() - began}
    about = manifest({}, seed=0, data="synthetic") | {"wall_seconds": seconds}
    cost = (("source", "measure", "C"), [by_equation, printed])
    coords = {"source": ["equations", "printed"], "measure": list(Costs._fields), "C": C}
    found = {"cost": cost, "R": ("C", R), "B": ("C", B)}
    return xr.Dataset(found, coords, {"manifest": about})


def measure(result: xr.Dataset, config: Trials) -> xr.Dataset:
    """Returns the costs by the paper's symbols; those not printed are left out."""
    known = result.drop_attrs().dropna("source", how="all", subset=["cost"])
    return known.assign_coords(measure=_SYMBOLS)


def claims(measured: xr.Dataset, config: Trials) -> Iterator[Claim]:
    """Every printed column is that of its equation, and six equations are constant."""
    if measured.sizes["source"] == 2:
        for number, symbol in enumerate(_SYMBOLS, start=1):
            column = measured.cost.sel(measure=symbol).dropna("C")
            equal = np.isclose(column[0], column[1], rtol=1e-12)
            text = f"the printed column {symbol} is that of eq. ({number})"
            yield claim(text, equal, describe(column, form="g"))
    constant = measured.cost.sel(source="equations").drop_sel(measure=["g", "u"])  # section 2.3.9
    ranges = constant.max("C") - constant.min("C")
    text = "eqs. (2), (3), (4), (6), (7) and (8) are constant over the cohort sizes"
    yield claim(text, ranges == 0, f"ranges {describe(ranges, form='g')}")


def table(measured: xr.Dataset, config: Trials) -> Sequence[Table]:
    """Returns the table by the equations, and as printed."""
    titles = {"equations": "", "printed": "Table 1 as printed"}
    trials = {"R": measured.R, "B": measured.B}
    costs = cells(measured.cost, form="g", missing="")
    return [
        rows(trials | columns(costs.sel(source=source), "measure"), ("C",), titles[source])
        for source in measured.source.values
    ]


def figure(result: xr.Dataset, measured: xr.Dataset, config: Trials) -> Figure:
    """Draws the two columns in which the table and the equations differ."""
    both = measured.cost.sel(measure=["u", "u_R"]).transpose("measure", "source", "C")
    both = both.assign_coords(measure=["local updates in a round $u$", "in all rounds $u_R$"])
    drawn = plots.panels(both, xlabel="clients in a cohort $C$", ylabel="updates of a client")
    title = f"Costs of trials with {config.contacts} contacts"
    caption = "By eqs. (5) and (6), and as Table 1 prints them if it has these trials."
    return plots.draw([drawn], title=title, caption=caption)


_page = Trials(), run, measure, claims, table, figure

ITEMS = (Item("cb-table1", "What trials with cohorts of different sizes cost", *_page),)
"""Table 1."""
