"""Pawlik, "Federated Learning with Client Batching and Heterogeneous Data" (2020)."""

import math
import time
from collections.abc import Iterable
from typing import Annotated, Self

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm.experiments.tasks import Config, Count
from fedjax_mm.papers.old import Claim, Judgement, Reproduction
from fedjax_mm.results import plots
from fedjax_mm.results.dataset import manifest
from fedjax_mm.sweeps.execute import Execution
from fedjax_mm.theory.fairness import Costs, costs
from fedjax_mm.theory.problem import Problem

_PRINTED = {  # Table 1, by cohort size: R, B, and g ... c'
    5: (12, 60, 3000, 36000, 600, 360, 12, 144, 60, 0.6),
    10: (6, 30, 6000, 36000, 600, 360, 12, 72, 60, 0.6),
    15: (4, 20, 9000, 36000, 600, 360, 12, 48, 60, 0.6),
    20: (3, 15, 12000, 36000, 600, 360, 12, 36, 60, 0.6),
    30: (2, 10, 18000, 36000, 600, 360, 12, 24, 60, 0.6),
}
_SYMBOLS = dict(zip(Costs._fields, ("g", "g_R", "g'", "g'_R", "u", "u_R", "c", "c'"), strict=True))
_EQUATIONS = {name: number for number, name in enumerate(Costs._fields, start=1)}
_CONSTANT = ("g_total", "g_client", "g_client_total", "u_total", "c", "c_client")  # section 2.3.9


def check_sizes(sizes: Iterable[int], num_clients: int | None = None, **costs: int) -> None:
    """Raises `ValueError` unless there are clients for every cohort, and it divides the costs."""
    for size in sizes:
        if num_clients is not None and size > num_clients:
            raise ValueError(f"cohort_sizes has {size}; there are only num_clients = {num_clients}")
        for name, cost in costs.items():
            if cost % size:
                raise ValueError(
                    f"cohort_sizes has {size}, which does not divide {name} = {cost}; rounds and "
                    "batches are whole"
                )


class Trials(Config):
    """Settings: trials by cohorts of several sizes that contact the server equally often."""

    cohort_sizes: Annotated[tuple[Count, ...], Field(min_length=1)] = tuple(_PRINTED)
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
        check_sizes(
            self.cohort_sizes, self.num_clients, contacts=self.contacts, updates=self.updates
        )
        return self


def run_table(config: Trials, execution: Execution | None = None) -> xr.Dataset:
    """The costs of every trial by eqs. (1) to (8), and as printed where the table has the trial."""
    del execution  # nothing is trained
    began = time.perf_counter()
    C = np.array(config.cohort_sizes)
    R, B = config.contacts // C, config.updates // C
    problem = Problem(N=config.num_clients, C=C, S=config.num_examples)
    by_equation = np.array(costs(R, problem, B, config.local_epochs))
    defaults = Trials()
    is_printed = config.model_copy(update={"cohort_sizes": defaults.cohort_sizes}) == defaults
    missing = (math.nan,) * (2 + len(Costs._fields))
    rows = [_PRINTED.get(int(size), missing) if is_printed else missing for size in C]
    dataset = xr.Dataset(
        {
            "cost": (("source", "measure", "C"), [by_equation, np.array(rows).T[2:]]),
            "R": ("C", R),
            "B": ("C", B),
        },
        {"source": ["equations", "printed"], "measure": list(Costs._fields), "C": C},
    )
    seconds = {"compile": 0.0, "run": time.perf_counter() - began}
    about = manifest(config.model_dump(), seed=0, data="synthetic")
    return dataset.assign_attrs(manifest=about | {"wall_seconds": seconds})


def judge_table(dataset: xr.Dataset, config: Trials) -> Judgement:
    """Every column of the printed table against its equation."""
    del config
    claims = []
    for name in Costs._fields:
        found, printed = dataset.cost.sel(measure=name).values
        known = np.isfinite(printed)
        wrong = known & ~np.isclose(found, printed, rtol=1e-12)
        claims += [
            Claim(
                f"the printed column {_SYMBOLS[name]} is that of eq. ({_EQUATIONS[name]})",
                not wrong.any(),
                f"printed {_numbers(printed[known])}; by the equation {_numbers(found[known])}",
            )
        ] * bool(known.any())
    constant = {
        name: np.ptp(dataset.cost.sel(source="equations", measure=name).values) == 0
        for name in _CONSTANT
    }
    claims.append(
        Claim(
            "eqs. (2), (3), (4), (6), (7) and (8) are constant over the cohort sizes",
            all(constant.values()),
            ", ".join(
                f"{_SYMBOLS[name]} {'is' if same else 'is not'}" for name, same in constant.items()
            ),
        )
    )
    tables = [
        (("C", "R", "B", *_SYMBOLS.values()), *_rows(dataset, source))
        for source in dataset.source.values
    ]
    measured = {
        name: dataset.cost.sel(source="equations", measure=name).values for name in Costs._fields
    }
    more = (("Table 1 as printed", tables[1]),) if len(claims) > 1 else ()
    return Judgement(measured | {"C": dataset.C.values}, tuple(claims), tables[0], more)


def _rows(dataset: xr.Dataset, source: str) -> list[tuple[str, ...]]:
    values = dataset.cost.sel(source=source).values.T
    sizes = zip(dataset.C.values, dataset.R.values, dataset.B.values, values, strict=True)
    return [tuple(f"{x:g}" for x in (C, R, B, *row)) for C, R, B, row in sizes]


def _numbers(values: np.ndarray) -> str:
    distinct = list(dict.fromkeys(f"{value:g}" for value in values))
    return distinct[0] + " everywhere" if len(distinct) == 1 else ", ".join(distinct)


def plot_table(dataset: xr.Dataset, config: Trials, judgement: Judgement) -> Figure:
    """The two columns on which the table and the equations do not agree."""
    values = dataset.cost.sel(measure=["u", "u_total"]).dropna("source", how="all")
    values = values.assign_coords(measure=["local updates in a round $u$", "in all rounds $u_R$"])
    return plots.lines_with_errors(
        values,
        xr.zeros_like(values),
        x="C",
        series="source",
        panel="measure",
        series_label="{}",
        xlabel="clients in a cohort $C$",
        ylabel="updates of a client",
        title=f"Costs of trials with {config.contacts} contacts",
        caption=" ".join(
            f"DOES NOT HOLD: {claim.claim}." for claim in judgement.claims if not claim.holds
        ),
    )


REPRODUCTIONS = (
    Reproduction(
        id="cb-table1",
        paper={
            "columns": ["R", "B", *_SYMBOLS.values()],
            "table": {str(size): row for size, row in _PRINTED.items()},
            "open": ["eq. (2) prints R u where R g is meant"],
        },
        config=Trials(),
        run=run_table,
        judge=judge_table,
        plot=plot_table,
    ),
)
"""Table 1."""
