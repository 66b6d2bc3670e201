"""Figure 6: satisfied clients out of three at each objective's solution, in three cases."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import jax
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field

from fedjax_mm import plots
from fedjax_mm.claims import Evidence, mean_above
from fedjax_mm.experiments.fields import TwoOrMore
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.cho2022 import descents
from fedjax_mm.papers.figures import points
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import Ruling, ruling
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.values import Several
from fedjax_mm.results.labels import describe
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.tasks.mean_estimation import maxfl_objective, mean_estimation

_ALIKE = 0.1  # in units of gamma; models closer than this count as equal
_SURELY, _MOSTLY = 0.95, 0.5  # shares of the draws
_DISPARATE = 5.0  # least distance of clients with nothing in common, in units of gamma
_LEAD = "MaxFL minus FedAvg"
_COUNT, _NONE, _ANY, _BOTH = "number satisfied", "none", "at least one", "clients 1 and 2"
_AVERAGE, _OWN, _PAIR = "at the average", "at a client's model", "at the average of 1 and 2"
_SHOWN = ["FedAvg", "MaxFL"]

_Mean = Annotated[float, Field(allow_inf_nan=False)]
ThreeMeans = tuple[_Mean, _Mean, _Mean]


class ThreeClients(descents.Draws):
    """Settings of Figure 6: the true means of its three cases, and the plotted draw."""

    num_seeds: TwoOrMore = 20_000
    case_1: ThreeMeans = (0, 0, 0)
    case_2: Several[ThreeMeans] = (
        *((0, 4, 12), (0, 3, 8), (0, 3, 9), (0, 4, 8), (0, 6, 8)),
        *((0, 5, 12), (0, 6, 12), (0, 6, 20)),
    )
    """Several choices of true means, because the outcome depends on them. The first is plotted."""
    case_3: ThreeMeans = (0, 0, 6)
    example: ThreeMeans = (0.8, -0.7, 0.3)
    """Empirical minus true means of the plotted draw, for all cases."""

    @property
    def points(self) -> list[ThreeMeans]:
        """The true means of all cases."""
        return [self.case_1, *self.case_2, self.case_3]

    @property
    def cases(self) -> list[int]:
        """The case number of each point."""
        return [1, *(2 for _ in self.case_2), 3]


def run_three(config: ThreeClients, execution: Execution | None = None) -> xr.Dataset:
    """The solutions of every objective in every draw, for every case.

    Variables prefixed by ``example`` come from a single draw per case, with descents from w*.
    """

    def solve(true_means: Any, noise: Any) -> dict[str, Any]:
        task = mean_estimation(true_means, true_means + noise)
        return descents.descend_all(task, task.minimizer)

    with jax.enable_x64(True):
        solve_all = jax.jit(jax.vmap(solve, (0, None)))
        ends = jax.device_get(solve_all(np.array(config.points, float), np.array(config.example)))
    return descents.solve_draws(config.points, "point", config).assign(
        example_empirical_mean=(("point", "client"), ends["empirical_mean"]),
        example_solution=(("point", "objective"), ends["solution"]),
        example_satisfied=(("point", "objective", "client"), ends["satisfied"]),
    )


def measure(result: xr.Dataset, config: ThreeClients) -> xr.Dataset:
    """The frequencies of satisfied clients and of solution positions, and the example."""
    count = result.satisfied.sum("client")
    w, own = result.solution, result.empirical_mean

    def near(model: xr.DataArray) -> xr.DataArray:
        return abs(w - model) <= _ALIKE * config.gamma

    events = {
        _COUNT: count,
        _NONE: count == 0,
        _ANY: count > 0,
        _BOTH: result.satisfied.sel(client=[1, 2]).all("client"),
        _AVERAGE: near(own.mean("client")),
        _OWN: near(own).any("client"),
        _PAIR: near(own.sel(client=[1, 2]).mean("client")),
    }
    samples = xr.Dataset(events).to_dataarray("event").sel(objective=_SHOWN)
    lead = samples.sel(objective="MaxFL") - samples.sel(objective="FedAvg")
    # Use the standard error of paired differences, because both objectives share their draws.
    samples = xr.concat([samples, lead.assign_coords(objective=_LEAD)], "objective")
    mean, error = estimate(samples, "draw")
    means = np.array(config.points, float)
    return xr.Dataset(
        {
            "mean": mean,
            "standard_error": error,
            "case": ("point", config.cases),
            "true_means": (("point", "client"), means),
            **result[["example_empirical_mean", "example_solution", "example_satisfied"]],
            **descents.convergence(result),
        }
    ).assign_coords(point=[_list(each) for each in means])


def judge(measured: xr.Dataset, config: ThreeClients) -> Iterator[Ruling | Check]:
    """Judges the three cases over all draws."""

    def above(which: xr.DataArray, event: str, objective: str, by: float) -> list[Evidence]:
        at = measured[["mean", "standard_error"]].isel(point=which.values)
        at = at.sel(event=event, objective=objective, drop=True)
        found = mean_above(at["mean"], at.standard_error, by, config.num_seeds)
        who = f"{objective}, {event}"
        return [each._replace(name=f"{each.name}: {who}") for each in found]

    one, two, three = (measured["case"] == case for case in (1, 2, 3))
    gaps = np.diff(np.sort(measured["true_means"].values), axis=1).min(axis=1)
    far = two & (gaps >= _DISPARATE * config.gamma)
    never = "in many draws, but not in every draw"
    yield ruling("case-1", above(one, _AVERAGE, "MaxFL", _SURELY), about=never)
    yield ruling("case-2-solution", above(far, _OWN, "MaxFL", _SURELY))
    lead = measured["mean"].sel(event=_ANY, objective=_LEAD, drop=True).isel(point=two.values)
    ensured = "in many draws, but not in every draw; MaxFL's share of the draws minus FedAvg's: "
    ensured += describe(lead)
    yield ruling("case-2-satisfied", above(two, _ANY, "MaxFL", _SURELY), about=ensured)
    yield ruling("case-3-solution", above(three, _PAIR, "MaxFL", _SURELY), about=never)
    third = measured.isel(point=three.values).isel(point=0)
    ours, theirs = (third["mean"].sel(event=_COUNT, objective=name) for name in _SHOWN[::-1])
    yield ruling(
        "case-3-satisfied",
        above(three, _BOTH, "MaxFL", _MOSTLY),
        above(three, _NONE, "FedAvg", _MOSTLY),
        about=f"in some draws, but not in every draw; mean number of satisfied clients: MaxFL "
        f"{ours:.3f}, FedAvg {theirs:.3f}",
    )
    yield descents.all_converged("A local minimum is found in every draw", measured)


def table(measured: xr.Dataset, config: ThreeClients) -> Sequence[Table]:
    """The shares of draws that satisfy a client, and of solution positions, by point."""
    shown = measured.rename(point="true means")
    text = cells(shown["mean"], form=".3f")
    contents = {"case": shown["case"]}
    contents |= columns(text.sel(event=_ANY, objective=_SHOWN), "objective", f"{{}}, {_ANY}")
    where = text.sel(objective="MaxFL", event=[_BOTH, _AVERAGE, _OWN, _PAIR])
    contents |= columns(where, "event", "MaxFL, {}")
    return [rows(contents, ("true means",))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: ThreeClients) -> Figure:
    """Draws MaxFL's objective in one draw per case, and shares of draws with satisfied clients."""
    first = [config.cases.index(case) for case in (1, 2, 3)]
    one, two, three = (_objective(measured.isel(point=i)) for i in first)
    return plots.draw(
        [[one, two], [three, _shares(measured)]],
        title=rf"Mean estimation, three clients, $\gamma$ = {config.gamma:g}",
        caption=f"(d): shares of {config.num_seeds:,} draws, by true means.",
        share=False,
    )


def _objective(case: xr.Dataset) -> plots.Panel:
    theta, own = case.true_means.values, case.example_empirical_mean.values
    w = np.linspace(own.min() - 2, own.max() + 2, 300)
    with jax.enable_x64(True):
        objective = jax.vmap(partial(maxfl_objective, mean_estimation(theta, own)))
        curve, at_own = np.asarray(objective(w)), np.asarray(objective(own))
    marks = {f"{name}'s solution": case.example_solution.sel(objective=name) for name in _SHOWN}
    lines = [
        plots.Line("MaxFL's objective", w, curve, color=3),
        plots.Line("clients' own models", own, at_own, style="o", color=6),
    ]
    title = rf"one draw of case {case['case']:d}, $\theta$ = {_list(theta)}"
    depth = 1 - curve.min()
    limits = (1 - 1.1 * depth, 1 + 0.1 * depth)
    return plots.Panel(title, "model $w$", "objective", lines, marks, limits)


def _shares(measured: xr.Dataset) -> plots.Panel:
    at = measured.sel(event=_ANY)
    series = {
        name: tuple(at[key].sel(objective=name).values for key in ("mean", "standard_error"))
        for name in _SHOWN
    }
    names = [str(each) for each in measured.point.values]
    panel = points(names, "at least one client is satisfied", series, "share of draws")
    return panel._replace(xlabel="true means")


def _list(means: Any) -> str:
    return f"({', '.join(f'{x:g}' for x in means)})"


ITEMS = (Item("maxfl-fig6", ThreeClients(), run_three, measure, judge, table, figure),)
"""Figure 6."""
