"""Cho et al., appendix A: who likes the solutions of mean estimation, Figures 5(a) and 6."""

import math
from functools import partial
from typing import Annotated, Any

import jax
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field

from fedjax_mm.experiments.tasks import Count, NonNegative
from fedjax_mm.papers.bhuyan2022.accuracy import verdict
from fedjax_mm.papers.cho2022.descents import (
    Descent,
    Draws,
    convergence,
    descend_all,
    mean_and_error,
    solve_draws,
)
from fedjax_mm.papers.old import Claim, Judgement, Reproduction
from fedjax_mm.results import plots
from fedjax_mm.sweeps.execute import Execution
from fedjax_mm.tasks.mean_estimation import OBJECTIVES, maxfl_objective, mean_estimation
from fedjax_mm.theory.mean_estimation import lemma_a_1, theorem_a_1

_ALIKE = 0.1  # solutions that are closer are called the same
_SIGMAS = 4  # standard errors that a random quantity may be off

# From about 150 on, exp(-4 gamma_G^2), the other client's pull, is less than the least number.
Heterogeneity = Annotated[NonNegative, Field(le=100)]
_Mean = Annotated[float, Field(allow_inf_nan=False)]
ThreeMeans = tuple[_Mean, _Mean, _Mean]


class TwoClients(Draws):
    """Settings of Figure 5(a): theta_1 = 0, theta_2 = 2 gamma_G."""

    gamma_g_squared: Annotated[tuple[Heterogeneity, ...], Field(min_length=2)] = tuple(range(21))


class ThreeClients(Draws):
    """Settings of Figure 6: the true means of its three cases, and the draw that is drawn."""

    num_seeds: Annotated[Count, Field(ge=2)] = 20_000
    case_1: ThreeMeans = (0, 0, 0)
    case_2: ThreeMeans = (0, 4, 8)
    case_3: ThreeMeans = (0, 0, 6)
    example: ThreeMeans = (0.8, -0.7, 0.3)
    """Empirical minus true means of one draw, for all cases."""

    @property
    def cases(self) -> tuple[ThreeMeans, ThreeMeans, ThreeMeans]:
        """The true means of all cases."""
        return self.case_1, self.case_2, self.case_3


# Figure 5(a): two clients.


def run_two(config: TwoClients, execution: Execution | None = None) -> xr.Dataset:
    """The solutions of every objective in every draw, over gamma_G^2."""
    del execution
    points = [(0.0, 2 * math.sqrt(square)) for square in config.gamma_g_squared]
    dataset = solve_draws(points, "gamma_g_squared", config)
    return dataset.assign_coords(gamma_g_squared=list(config.gamma_g_squared))


def exact_appeal(gamma_G: Any, gamma: float) -> np.ndarray:
    """FedAvg's expected appeal, ``P(|w - theta_1| < |hat theta_1 - theta_1|)``, by integration.

    With ``a = hat theta_1 - theta_1`` and ``b = hat theta_2 - theta_1`` client 1 is satisfied if
    |a + b| < 2 |a|, that is if b lies between -3 a and a. Client 2 is alike.
    """
    nodes, weights = np.polynomial.legendre.leggauss(200)
    a = 6 * (nodes + 1)  # up to 12 standard deviations
    density = 6 * weights * np.exp(-(a**2) / 2) / math.sqrt(2 * math.pi)
    mean = 2 * np.asarray(gamma_G, np.float64)[..., None] / gamma
    cdf = np.vectorize(lambda x: math.erfc(-x / math.sqrt(2)) / 2)
    between = cdf(a - mean) - cdf(-3 * a - mean) + cdf(3 * a - mean) - cdf(-a - mean)
    return np.asarray(between @ density)


def judge_two(dataset: xr.Dataset, config: TwoClients) -> Judgement:
    """GM-Appeal over gamma_G^2 against the bounds and against the exact probability."""
    squares = dataset.gamma_g_squared.values
    mean, error = mean_and_error(dataset.satisfied.mean("client"))
    exact, upper = exact_appeal(np.sqrt(squares), config.gamma), _upper(squares, config.gamma)
    lower = float(theorem_a_1(config.gamma))
    found, claim = convergence(dataset)
    numbers = {
        name: {
            "appeal": mean.sel(objective=name).values,
            "standard_error": error.sel(objective=name).values,
        }
        for name in OBJECTIVES
    }
    measured = {
        "gamma_g_squared": squares,
        **numbers,
        "exact": exact,
        "lemma_A_1": upper,
        "theorem_A_1": lower,
        "convergence": found,
    }
    fedavg, maxfl = numbers["FedAvg"]["appeal"], numbers["MaxFL"]["appeal"]
    claims = (
        _lemma_claim(fedavg, upper, squares),
        _exact_claim(dataset.satisfied.sel(objective="FedAvg"), exact),
        _theorem_claim(maxfl, numbers["MaxFL"]["standard_error"], lower, squares),
        *(_same_claim(dataset, name) for name in ("MaxFL (ReLU)", "MaxFL (log loss)")),
        claim,
    )
    header = ("gamma_G^2", "FedAvg", "exact", "Lemma A.1", "MaxFL", "Theorem A.1")
    rows = [
        (
            f"{square:g}",
            _with_error(numbers["FedAvg"], i),
            f"{exact[i]:.4f}",
            f"{upper[i]:.4f}",
            _with_error(numbers["MaxFL"], i),
            f"{lower:.4f}",
        )
        for i, square in enumerate(squares)
    ]
    return Judgement(measured, claims, (header, *rows))


def _with_error(numbers: dict[str, Any], i: int) -> str:
    return f"{numbers['appeal'][i]:.4f} ± {numbers['standard_error'][i]:.4f}"


def _upper(squares: np.ndarray, gamma: float) -> np.ndarray:
    """Lemma A.1's bound; it speaks of gamma_G > 0 only."""
    bound = np.full(len(squares), np.inf)
    bound[squares > 0] = lemma_a_1(np.sqrt(squares[squares > 0]), gamma)
    return bound


def _lemma_claim(appeal: np.ndarray, bound: np.ndarray, squares: np.ndarray) -> Claim:
    says = np.flatnonzero(bound < 1)
    text = "it is below 1 nowhere"
    if says.size:
        ratio = (appeal / bound)[says]
        text = (
            f"it is below 1 at {says.size} points from gamma_G^2 = {squares[says].min():g}; appeal "
            f"/ bound is {ratio.min():.3f} to {ratio.max():.3f} there"
        )
    return Claim(
        "FedAvg's appeal is below Lemma A.1's curve wherever that is below 1",
        bool(np.all(appeal[says] < bound[says])),
        text,
    )


def _exact_claim(satisfied: xr.DataArray, exact: np.ndarray) -> Claim:
    """Per client, whose being satisfied is a Bernoulli variable of known variance."""
    frequency = satisfied.mean("draw").transpose("gamma_g_squared", "client").values
    spread = np.sqrt(exact * (1 - exact) / satisfied.sizes["draw"])[:, None]
    difference = np.abs(frequency - exact[:, None])
    most = float(
        np.divide(difference, spread, np.zeros_like(frequency), where=difference > 0).max()
    )
    return Claim(
        f"FedAvg satisfies a client as often as is exact, within {_SIGMAS} standard errors",
        most <= _SIGMAS,
        f"largest deviation {most:.2f} standard errors, over {len(exact)} gamma_G and both clients",
    )


def _theorem_claim(
    appeal: np.ndarray, error: np.ndarray, bound: float, squares: np.ndarray
) -> Claim:
    least = int(np.argmin(appeal))
    return Claim(
        "MaxFL's appeal is above Theorem A.1's constant at every gamma_G",
        bool(np.all(appeal > bound)),
        f"least appeal {appeal[least]:.4f} (standard error {error[least]:.4f}) at gamma_G^2 = "
        f"{squares[least]:g}, against {bound:.4f}",
    )


def _same_claim(dataset: xr.Dataset, name: str) -> Claim:
    distance = np.abs(dataset.solution.sel(objective=name) - dataset.empirical_mean.mean("client"))
    most = float(distance.max())
    return Claim(f"{name} has FedAvg's solution", most <= 1e-6, f"largest distance {most:.1e}")


def plot_two(dataset: xr.Dataset, config: TwoClients, judgement: Judgement) -> Figure:
    """GM-Appeal against gamma_G^2 with the bounds, on a linear and on a logarithmic axis."""
    numbers = judgement.measured
    squares = dataset.gamma_g_squared.values
    fine = np.linspace(max(squares.max() * 1e-3, 1e-9), squares.max(), 200)
    lower = np.full(2, numbers["theorem_A_1"])
    lines = [
        plots.Line(name, squares, numbers[name]["appeal"], numbers[name]["standard_error"], style)
        for name, style in zip(OBJECTIVES, ("o", "s-", "+", "x"), strict=True)
    ]
    lines += [
        plots.Line("FedAvg, exact", fine, exact_appeal(np.sqrt(fine), config.gamma)),
        plots.Line("Lemma A.1: FedAvg is below", fine, _upper(fine, config.gamma), style="--"),
        plots.Line("Theorem A.1: MaxFL is above", squares[[0, -1]], lower, style=":"),
    ]
    texts = (r"heterogeneity $\gamma_G^2$", "GM-Appeal")
    return plots.line_panels(
        [
            [
                plots.Panel("all draws", *texts, lines, limits=(0, 1)),
                plots.Panel(
                    "the same, logarithmic", *texts, lines, limits=(1e-3, 1.5), scale="log"
                ),
            ]
        ],
        title=rf"Mean estimation, two clients, $\gamma$ = {config.gamma:g}",
        caption=f"Means over {config.num_seeds:,} draws with standard errors. "
        + verdict(judgement),
    )


# Figure 6: three clients.


def run_three(config: ThreeClients, execution: Execution | None = None) -> xr.Dataset:
    """The solutions of every objective in every draw, for every case; and in the example, from w*.

    What begins with ``example`` belongs to one draw of every case, which starts in the very middle.
    """
    del execution

    def solve(true_means: Any, noise: Any) -> tuple[Any, Descent]:
        task = mean_estimation(true_means, true_means + noise)
        return task.empirical_means, descend_all(task, task.minimizer)

    dataset = solve_draws(config.cases, "case", config).assign_coords(case=[1, 2, 3])
    with jax.enable_x64(True):
        own, ends = jax.jit(jax.vmap(solve, (0, None)))(
            np.array(config.cases), np.array(config.example)
        )
    return dataset.assign(
        example_empirical_mean=(("case", "client"), np.asarray(own)),
        example_solution=(("case", "objective"), np.asarray(ends.point)),
        example_satisfied=(("case", "objective", "client"), np.asarray(ends.satisfied)),
    )


def judge_three(dataset: xr.Dataset, config: ThreeClients) -> Judgement:
    """The distribution of the number of satisfied clients, and the paper's three statements."""
    number = dataset.satisfied.sum("client")
    share, share_error = mean_and_error(number == xr.DataArray(range(4), dims="number"))
    mean, error = mean_and_error(number)
    found, claim = convergence(dataset)
    measured: dict[str, Any] = {
        f"case {case}": {
            "true_means": means,
            "example": _example(dataset, case),
            **{
                name: {
                    "mean": mean.sel(at).item(),
                    "standard_error": error.sel(at).item(),
                    "distribution": share.sel(at).values,
                    "distribution_standard_error": share_error.sel(at).values,
                }
                for name in OBJECTIVES
                for at in [{"case": case, "objective": name}]
            },
        }
        for case, means in enumerate(config.cases, 1)
    }
    claims = _case_claims(dataset, measured, config.gamma)
    header = ("true means", "objective", "mean number", "0", "1", "2", "3")
    rows = [
        (
            _list(means),
            name,
            f"{numbers['mean']:.4f} ± {numbers['standard_error']:.4f}",
            *(f"{x:.4f}" for x in numbers["distribution"]),
        )
        for case, means in enumerate(config.cases, 1)
        for name in OBJECTIVES
        for numbers in [measured[f"case {case}"][name]]
    ]
    return Judgement(measured | {"convergence": found}, (*claims, claim), (header, *rows))


def _example(dataset: xr.Dataset, case: int) -> dict[str, Any]:
    """One draw: where each objective leads from the mean, and whom that satisfies."""
    here = dataset.sel(case=case)
    ends = {
        name: {
            "solution": here.example_solution.sel(objective=name).item(),
            "satisfied": here.client[here.example_satisfied.sel(objective=name)].values.tolist(),
        }
        for name in OBJECTIVES
    }
    return {"empirical_means": here.example_empirical_mean.values.tolist(), **ends}


def _case_claims(
    dataset: xr.Dataset, measured: dict[str, Any], gamma: float
) -> tuple[Claim, Claim, Claim]:
    """As statements about draws."""
    number = dataset.satisfied.sum("client")
    maxfl, fedavg = number.sel(objective="MaxFL"), number.sel(objective="FedAvg")
    lead, lead_error = mean_and_error(maxfl - fedavg)
    any_lead, any_error = mean_and_error((maxfl > 0).astype(int) - (fedavg > 0))
    apart = np.abs(dataset.solution.sel(objective="MaxFL") - dataset.empirical_mean.mean("client"))
    apart = apart.sel(case=1) / gamma
    both = dataset.satisfied.sel(client=[1, 2], case=3).all("client").mean("draw")

    def ends(case: int, first: int, last: int) -> str:
        shares = [
            measured[f"case {case}"][name]["distribution"][first : last + 1].sum()
            for name in ("MaxFL", "FedAvg")
        ]
        return "MaxFL {:.3f}, FedAvg {:.3f}".format(*shares)

    def by(case: int, lead: xr.DataArray, error: xr.DataArray) -> str:
        at = {"case": case}
        return f"MaxFL minus FedAvg {lead.sel(at):+.4f} (standard error {error.sel(at):.4f})"

    return (
        Claim(
            f"Case 1, similar clients: MaxFL's solution is FedAvg's, within {_ALIKE:g} gamma",
            bool((apart <= _ALIKE).all()),
            f"in {float((apart <= _ALIKE).mean()):.3f} of the draws, median distance "
            f"{float(apart.median()):.3f} gamma; all three are satisfied in {ends(1, 3, 3)}; "
            f"number satisfied, {by(1, lead, lead_error)}",
        ),
        Claim(
            "Case 2, different clients: MaxFL satisfies at least one, unlike FedAvg "
            f"(more often by {_SIGMAS} standard errors)",
            bool((any_lead - _SIGMAS * any_error).sel(case=2) > 0),
            f"at least one in {ends(2, 1, 3)}; {by(2, any_lead, any_error)}",
        ),
        Claim(
            "Case 3, two of three similar: MaxFL satisfies more clients than FedAvg "
            f"(by more than {_SIGMAS} standard errors)",
            bool((lead - _SIGMAS * lead_error).sel(case=3) > 0),
            f"number satisfied, {by(3, lead, lead_error)}; clients 1 and 2 both in MaxFL "
            f"{both.sel(objective='MaxFL'):.3f}, FedAvg {both.sel(objective='FedAvg'):.3f}",
        ),
    )


def plot_three(dataset: xr.Dataset, config: ThreeClients, judgement: Judgement) -> Figure:
    """Above, MaxFL's objective in one draw of every case; below, how many clients are satisfied."""
    del dataset
    numbers = [judgement.measured[f"case {case}"] for case in (1, 2, 3)]
    above = [_objective_panel(case, each) for case, each in enumerate(numbers, 1)]
    below = [_share_panel(case, each) for case, each in enumerate(numbers, 1)]
    return plots.line_panels(
        [above, below],
        title=rf"Mean estimation, three clients, $\gamma$ = {config.gamma:g}",
        caption=f"{config.num_seeds:,} draws, with standard errors. " + verdict(judgement),
    )


def _objective_panel(case: int, numbers: dict[str, Any]) -> plots.Panel:
    """MaxFL's objective, the clients' own models on it, and where the searches ended."""
    theta, own = np.array(numbers["true_means"]), np.array(numbers["example"]["empirical_means"])
    w = np.linspace(own.min() - 2, own.max() + 2, 300)
    with jax.enable_x64(True):
        objective = jax.vmap(partial(maxfl_objective, mean_estimation(theta, own)))
        curve, at_own = np.asarray(objective(w)), np.asarray(objective(own))
    ends = {name: numbers["example"][name]["solution"] for name in ("FedAvg", "MaxFL")}
    least = curve.min()
    return plots.Panel(
        rf"one draw of case {case}, $\theta$ = {_list(theta)}",
        "model $w$",
        "objective",
        [
            plots.Line("MaxFL's objective", w, curve, color=3),
            plots.Line("clients' own models", own, at_own, style="o", color=6),
        ],
        marks={f"{name}'s solution": end for name, end in ends.items()},
        limits=(least - 0.05 * (1 - least), 1 + 0.45 * (1 - least)),
    )


def _share_panel(case: int, numbers: dict[str, Any]) -> plots.Panel:
    """The distribution of the number of satisfied clients."""
    shares = [
        plots.Line(
            f"{name}, mean {numbers[name]['mean']:.3f}",
            np.arange(4) + shift,
            numbers[name]["distribution"],
            numbers[name]["distribution_standard_error"],
            style="bar",
        )
        for name, shift in {"FedAvg": -0.25, "MaxFL": 0.0, "MaxFL (log loss)": 0.25}.items()
    ]
    texts = ("number of satisfied clients", "share of draws")
    return plots.Panel(f"all draws of case {case}", *texts, shares, limits=(0, 1))


def _list(means: Any) -> str:
    return f"({', '.join(f'{x:g}' for x in means)})"


REPRODUCTIONS = (
    Reproduction(
        id="maxfl-fig5a",
        paper={
            "figure": "Figure 5(a): GM-Appeal over gamma_G^2, 10,000 draws, curves without numbers",
            "Lemma A.1": "FedAvg's expected appeal is at most 2 exp(-gamma_G^2 / (5 gamma^2))",
            "Theorem A.1": "MaxFL's expected appeal is at least exp(-1 / gamma^2) / 16",
            "Lemma A.2": "convex surrogates of the 0-1 loss have FedAvg's solution",
            "open": [
                "the range is printed as gamma_G in [0, sqrt(20)] and as gamma_G^2 in [0, sqrt(20)]"
                "; gamma_G^2 in [0, 20] is used",
                "which local minimum scipy.optimize finds is not said; here it is the one downhill "
                "from the middle, left by a small random jitter",
            ],
        },
        config=TwoClients(),
        run=run_two,
        judge=judge_two,
        plot=plot_two,
    ),
    Reproduction(
        id="maxfl-fig6",
        paper={
            "figure": "Figure 6: the objective in three cases, curves without numbers",
            "case 1": "MaxFL's optimal solution is identical to that of FedAvg",
            "case 2": "at least one of the clients will be satisfied, unlike FedAvg",
            "case 3": "two clients are satisfied, while FedAvg satisfies none",
            "open": [
                "the true means are not given: case_1, case_2, case_3",
                "the figure shows single draws; the statements are judged over draws",
                "Algorithm 1 prints the weight sigma, not sigma (1 - sigma): that is the log loss",
            ],
        },
        config=ThreeClients(),
        run=run_three,
        judge=judge_three,
        plot=plot_three,
    ),
)
"""Figures 5(a) and 6."""
