"""Table 1: costs of trials with several cohort sizes, as printed and from their equations."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import model_validator

from fedjax_mm import plots
from fedjax_mm.claims import Evidence, fact
from fedjax_mm.experiments.fields import Config, Count
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.pawlik2020.setting import check_sizes
from fedjax_mm.papers.published import published
from fedjax_mm.papers.rulings import Ruling, ruling, untested
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.values import Some
from fedjax_mm.results.manifest import manifest
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.theory.fairness import Costs, costs
from fedjax_mm.theory.problem import Problem

_MISPRINTED = ("u", "u_R")
_SYMBOLS = ["g", "g_R", "g'", "g'_R", "u", "u_R", "c", "c'"]  # in the order of eqs. (1) to (8)


class Trials(Config):
    """Settings of trials with several cohort sizes that contact the server equally often."""

    cohort_sizes: Some[Count] = (5, 10, 15, 20, 30)
    contacts: Count = 60
    """The contacts c = R C."""
    updates: Count = 300
    """The product B C."""
    local_epochs: Count = 1
    num_examples: Count = 600
    """N, the number of examples per client."""
    num_clients: Count = 100

    @model_validator(mode="after")
    def _fits(self) -> Self:
        costs = {"contacts": self.contacts, "updates": self.updates}
        check_sizes(self.cohort_sizes, self.num_clients, **costs)
        return self


def run(config: Trials, execution: Execution | None = None) -> xr.Dataset:
    """Every trial's costs from eqs. (1) to (8), and the printed costs, if any."""
    began = time.perf_counter()
    C = np.array(config.cohort_sizes)
    R, B = config.contacts // C, config.updates // C
    problem = Problem(N=config.num_clients, C=C, S=config.num_examples)
    by_equation = np.array(costs(R, problem, B, config.local_epochs))
    # Use printed costs only for the paper's trials, because other trials have other costs.
    is_printed = config == Trials(cohort_sizes=config.cohort_sizes)
    table = published("cb-table1")["table"] if is_printed else {}
    # The first two printed columns are R and B.
    printed = np.transpose([table.get(str(size), [np.nan] * 10)[2:] for size in C])
    seconds = {"compile": 0.0, "run": time.perf_counter() - began}
    about = manifest({}, seed=0, data="synthetic") | {"wall_seconds": seconds}
    cost = (("source", "measure", "C"), [by_equation, printed])
    coords = {"source": ["equations", "printed"], "measure": list(Costs._fields), "C": C}
    found = {"cost": cost, "R": ("C", R), "B": ("C", B)}
    return xr.Dataset(found, coords, {"manifest": about})


def measure(result: xr.Dataset, config: Trials) -> xr.Dataset:
    """The costs in the table, labelled with the paper's symbols."""
    known = result.drop_attrs().dropna("source", how="all", subset=["cost"])
    return known.assign_coords(measure=_SYMBOLS)


def judge(measured: xr.Dataset, config: Trials) -> Iterator[Ruling | Check]:
    """Rules on the printed columns, using their equations, and on costs that should be constant."""
    right = [symbol for symbol in _SYMBOLS if symbol not in _MISPRINTED]
    for key, symbols in {"columns": right, "u": ["u"], "u-total": ["u_R"]}.items():
        if measured.sizes["source"] == 2:
            yield ruling(key, *(_printed(measured, symbol) for symbol in symbols))
        else:
            yield untested(key, "the settings are not those of the table", "the default settings")
    ours = measured.cost.sel(source="equations", drop=True)
    ranges = (ours.max("C") - ours.min("C")).sel(measure=["g_R", "g'", "g'_R", "u_R", "c", "c'"])
    each = zip(ranges["measure"].values, ranges.values, strict=True)
    tests = [fact(value == 0, f"range {value:g}", str(symbol)) for symbol, value in each]
    yield ruling("constant", *tests)
    products = measured.R * ours.sel(measure=["u", "g"])
    equal = np.isclose(products.sel(measure="u"), ours.sel(measure="g_R"))
    at_g = np.isclose(products.sel(measure="g"), ours.sel(measure="g_R"))
    evidence = f"R u = R C E N in {equal.sum()} of {equal.size} rows, "
    yield ruling("equation-2", fact(equal.all(), f"{evidence}R g = R C E N in {at_g.sum()}"))
    yield from _when_doubled(config)


def _printed(measured: xr.Dataset, symbol: str) -> list[Evidence]:
    """Checks whether a printed column agrees with its equation, which needs no statistics."""
    column = measured.cost.sel(measure=symbol).dropna("C")
    equal = bool(np.isclose(column[0], column[1], rtol=1e-12).all())
    ours, printed = (", ".join(f"{value:g}" for value in row) for row in column.values)
    evidence = printed if equal else f"printed {printed}; by the equation {ours}"
    return fact(equal, evidence, f"{symbol} by eq. ({_SYMBOLS.index(symbol) + 1})")


def _when_doubled(config: Trials) -> Iterator[Ruling]:
    """Rules on statements about constant costs when another quantity is doubled."""
    E, C, S = config.local_epochs, max(config.cohort_sizes), config.num_examples
    R, B, K = config.contacts // C, config.updates // C, config.num_clients

    def of(C: int, R: int, S: int, E: int, B: int) -> Costs:
        return costs(R, Problem(N=4 * K, C=C, S=S), B, E)

    trial = of(2 * C, 2 * R, 2 * S, E, B)  # even numbers only
    halved = of(2 * C, 2 * R, S, 2 * E, B)
    yield _same("constant-g", trial.g, halved.g, of(C, 2 * R, 2 * S, 2 * E, B).g)
    yield _same("constant-u", trial.u, halved.u, of(2 * C, 2 * R, 2 * S, 2 * E, 2 * B).u)
    yield _same("constant-c", trial.c, of(C, 4 * R, S, E, B).c, of(4 * C, R, S, E, B).c)
    yield _same("constant-u-both", trial.u, of(2 * C, 2 * R, 2 * S, 2 * E, 2 * B).u)
    more_epochs, longer = of(2 * C, 2 * R, 2 * S, 2 * E, B), of(2 * C, 4 * R, 2 * S, E, B)
    alike = of(4 * C, R, 2 * S, E, B)
    holds = trial.g_client == alike.g_client != more_epochs.g_client
    text = f"{trial.g_client:g} and {alike.g_client:g}, {more_epochs.g_client:g} if E is doubled"
    yield ruling("constant-g-client", fact(holds, text))
    holds = trial.c_client == alike.c_client != longer.c_client and trial.c == alike.c != longer.c
    text = f"{trial.c_client:g} and {alike.c_client:g}, {longer.c_client:g} if R is doubled"
    yield ruling("constant-c-client", fact(holds, text))
    # A uniform cohort contains a given client with probability C / K.
    yield _same("contacts-per-client", trial.c_client, 2 * R * (2 * C) / (4 * K))


def _same(key: str, cost: Any, *others: Any) -> Ruling:
    """Rules, as a fact, on whether costs are equal."""
    equal = all(np.isclose(cost, other, rtol=1e-12) for other in others)
    return ruling(key, fact(equal, " and ".join(f"{other:g}" for other in others) + f", {cost:g}"))


def table(measured: xr.Dataset, config: Trials) -> Sequence[Table]:
    """The table computed from the equations, and the printed table."""
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


ITEMS = (Item("cb-table1", Trials(), run, measure, judge, table, figure),)
"""Table 1."""
