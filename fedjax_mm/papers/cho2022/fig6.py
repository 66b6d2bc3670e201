"""Figure 6: how many of three clients the objectives' solutions satisfy, in three cases."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import jax
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field

from fedjax_mm import plots
from fedjax_mm.experiments.fields import Count
from fedjax_mm.papers.cho2022 import descents
from fedjax_mm.papers.claims import Claim, claim, estimate
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.tables import Table, cells, columns, rows
from fedjax_mm.results.labels import describe
from fedjax_mm.sweeps.execute import Execution
from fedjax_mm.tasks.mean_estimation import maxfl_objective, mean_estimation

_ALIKE = 0.1  # solutions that are closer are called the same
_SIGMAS = 4  # standard errors by which a difference must exceed 0
_LEAD = "MaxFL minus FedAvg"
_COUNT, _ANY, _BOTH = "number satisfied", "at least one", "clients 1 and 2"
_NUMBERS = ["none", "one", "two", "all three"]
_SHOWN = ["FedAvg", "MaxFL", "MaxFL (log loss)"]

_Mean = Annotated[float, Field(allow_inf_nan=False)]
ThreeMeans = tuple[_Mean, _Mean, _Mean]


class ThreeClients(descents.Draws):
    """Settings of Figure 6: the true means of its three cases, and the draw that is drawn."""

    num_seeds: Annotated[Count, Field(ge=2)] = 20_000
    case_1: ThreeMeans = (0, 0, 0)
    case_2: ThreeMeans = (0, 4, 8)
    case_3: ThreeMeans = (0, 0, 6)
    example: ThreeMeans = (0.8, -0.7, 0.3)
    """Empirical minus true means of one draw, for all cases."""

    @property
    def cases(self) -> tuple[ThreeMeans, ThreeMeans, ThreeMeans]:
        """Returns the true means of all cases."""
        return self.case_1, self.case_2, self.case_3


def run_three(config: ThreeClients, execution: Execution | None = None) -> xr.Dataset:
    """Returns the solutions of every objective in every draw, for every case.

    Variables that begin with ``example`` belong to one draw of every case, searched from w*.
    """

    def solve(true_means: Any, noise: Any) -> dict[str, Any]:
        task = mean_estimation(true_means, true_means + noise)
        return descents.descend_all(task, task.minimizer)

    with jax.enable_x64(True):
        solve_all = jax.jit(jax.vmap(solve, (0, None)))
        ends = jax.device_get(solve_all(np.array(config.cases), np.array(config.example)))
    return descents.solve_draws(config.cases, "case", config).assign(
        case=[1, 2, 3],
        example_empirical_mean=(("case", "client"), ends["empirical_mean"]),
        example_solution=(("case", "objective"), ends["solution"]),
        example_satisfied=(("case", "objective", "client"), ends["satisfied"]),
    )


def measure(result: xr.Dataset, config: ThreeClients) -> xr.Dataset:
    """Returns how often clients are satisfied, MaxFL's lead of FedAvg, and the example."""
    count = result.satisfied.sum("client")
    events = {
        **{name: count == n for n, name in enumerate(_NUMBERS)},
        _ANY: count > 0,
        _BOTH: result.satisfied.sel(client=[1, 2]).all("client"),
        _COUNT: count,
    }
    samples = xr.Dataset(events).to_dataarray("event")
    lead = samples.sel(objective="MaxFL") - samples.sel(objective="FedAvg")
    # Its error is that of pairs: both objectives have the same draws.
    samples = xr.concat([samples, lead.assign_coords(objective=_LEAD)], "objective")
    mean, error = estimate(samples, "draw")
    apart = abs(result.solution.sel(objective="MaxFL") - result.empirical_mean.mean("client"))
    return xr.Dataset(
        {
            "mean": mean,
            "standard_error": error,
            "distance": apart.median("draw") / config.gamma,
            "alike": (apart / config.gamma <= _ALIKE).mean("draw"),
            "true_means": (("case", "client"), np.array(config.cases)),
            **result[["example_empirical_mean", "example_solution", "example_satisfied"]],
            **descents.convergence(result),
        }
    )


def claims(measured: xr.Dataset, config: ThreeClients) -> Sequence[Claim]:
    """Judges statements about single draws over all draws."""

    def evidence(case: int, *events: str) -> str:
        at = {"case": case, "event": list(events), "objective": ["MaxFL", "FedAvg", _LEAD]}
        here = measured.sel(at).transpose("event", "objective", ...)
        return describe(here["mean"], here.standard_error, ".3f")

    gap = f"{_SIGMAS} standard errors"
    lead = measured.sel(objective=_LEAD)
    leads = lead["mean"] > _SIGMAS * lead.standard_error
    case_1, lead_2, lead_3 = measured.sel(case=1), leads.sel(case=2), leads.sel(case=3)
    same = f"Case 1, similar clients: MaxFL's solution is FedAvg's, within {_ALIKE:g} gamma"
    some = "Case 2, different clients: MaxFL satisfies at least one, unlike FedAvg "
    more = "Case 3, two of three similar: MaxFL satisfies more clients than FedAvg "
    apart = f"in {case_1.alike:.3f} of the draws, median distance {case_1.distance:.3f} gamma"
    return (
        claim(same, case_1.alike == 1, f"{apart}; {evidence(1, _NUMBERS[3], _COUNT)}"),
        claim(f"{some}(more often by {gap})", lead_2.sel(event=_ANY), evidence(2, _ANY)),
        claim(f"{more}(by more than {gap})", lead_3.sel(event=_COUNT), evidence(3, _COUNT, _BOTH)),
        descents.all_converged("A local minimum is found in every draw", measured),
    )


def table(measured: xr.Dataset, config: ThreeClients) -> Sequence[Table]:
    """Returns the distributions of the number of satisfied clients."""
    shown = measured.drop_sel(objective=_LEAD)
    mean, error = shown["mean"], shown.standard_error
    contents = {
        "true means": xr.DataArray([_list(means) for means in config.cases], {"case": mean.case}),
        "mean number": cells(mean, error, form=".4f").sel(event=_COUNT),
        **columns(cells(mean.sel(event=_NUMBERS), form=".4f"), "event"),
    }
    return [rows(contents, ("case", "objective"))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: ThreeClients) -> Figure:
    """Draws MaxFL's objective in one draw of every case; below, how many clients are satisfied."""
    cases = [measured.sel(case=case) for case in measured.case.values]
    return plots.draw(
        [[_objective(each) for each in cases], [_shares(each) for each in cases]],
        title=rf"Mean estimation, three clients, $\gamma$ = {config.gamma:g}",
        caption=f"{config.num_seeds:,} draws, with standard errors.",
        share=False,
    )


def _objective(case: xr.Dataset) -> plots.Panel:
    theta, own = case.true_means.values, case.example_empirical_mean.values
    w = np.linspace(own.min() - 2, own.max() + 2, 300)
    with jax.enable_x64(True):
        objective = jax.vmap(partial(maxfl_objective, mean_estimation(theta, own)))
        curve, at_own = np.asarray(objective(w)), np.asarray(objective(own))
    marks = {f"{name}'s solution": case.example_solution.sel(objective=name) for name in _SHOWN[:2]}
    lines = [
        plots.Line("MaxFL's objective", w, curve, color=3),
        plots.Line("clients' own models", own, at_own, style="o", color=6),
    ]
    title = rf"one draw of case {case.case:d}, $\theta$ = {_list(theta)}"
    depth = 1 - curve.min()
    limits = (1 - 1.05 * depth, 1 + 0.45 * depth)  # room for the legend above
    return plots.Panel(title, "model $w$", "objective", lines, marks, limits)


def _shares(case: xr.Dataset) -> plots.Panel:
    case = case.sel(objective=_SHOWN).transpose("objective", ...)
    means, shares = case["mean"].sel(event=_COUNT), case.sel(event=_NUMBERS)
    bars = plots.lines(shares["mean"], shares.standard_error, style="bar")
    lines = [
        bar._replace(x=bar.x + (i - 1) / 4, label=f"{bar.label}, mean {means[i]:.3f}")
        for i, bar in enumerate(bars)
    ]
    texts = (f"all draws of case {case.case:d}", "number of satisfied clients", "share of draws")
    return plots.Panel(*texts, lines, limits=(0, 1))


def _list(means: Any) -> str:
    return f"({', '.join(f'{x:g}' for x in means)})"


ITEMS = (
    Item(
        id="maxfl-fig6",
        title="How many of three clients are satisfied, mean estimation",
        settings=ThreeClients(),
        run=run_three,
        measure=measure,
        claims=claims,
        table=table,
        figure=figure,
    ),
)
"""Figure 6."""
