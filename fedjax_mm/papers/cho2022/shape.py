"""Cho et al.: the shape of MaxFL's objective in mean estimation, Figures 5(b) and 8."""

import math
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import lax
from matplotlib.figure import Figure
from pydantic import Field

from fedjax_mm.experiments.tasks import Config, Count, Positive
from fedjax_mm.papers.bhuyan2022.accuracy import verdict
from fedjax_mm.papers.cho2022.descents import about, descend, timed
from fedjax_mm.papers.old import Claim, Judgement, Reproduction
from fedjax_mm.results import plots
from fedjax_mm.results.metrics import first_round_below
from fedjax_mm.sweeps.execute import Execution
from fedjax_mm.tasks.mean_estimation import MeanEstimation, maxfl_objective, mean_estimation
from fedjax_mm.theory.minimize import local_minimum

_BEYOND = 2.0  # how far beyond the clients' own models w goes
_NEAR = 1e-6  # minima closer than this are one
_AROUND = 0.5  # what is closer to a minimum is not called flat
_RULES = ("adaptive", "constant")


class Landscape(Config):
    """Settings of Figure 5(b): half the distance of the empirical means, which lie around 0."""

    gamma_hat: Annotated[tuple[Positive, ...], Field(min_length=1)] = (0.5, 1.0, 1.5, 3.0)
    """Whose objectives are drawn."""
    largest: Positive = 4.0
    num_points: Annotated[Count, Field(ge=2)] = 200
    """How many gamma_hat up to the largest are searched for minima."""
    num_starts: Annotated[Count, Field(ge=3)] = 41
    """Where the searches start, between the clients' own models."""


class Rate(Config):
    """Settings of Figure 8: gradient descent of MaxFL from many starts."""

    gamma_hat: Annotated[tuple[Positive, ...], Field(min_length=1)] = (0.5, 3.0)
    learning_rate: Positive = 0.5
    """eta_g eta_l; 1/L_s, L_s = 2 being the clients' smoothness."""
    epsilon: Positive = 1e-2
    num_rounds: Count = 3000
    num_starts: Annotated[Count, Field(ge=2)] = 81
    target: Positive = 1e-3
    """The distance to a minimum at which a descent has arrived."""


def _pair(gamma_hat: Any) -> MeanEstimation:
    """Two clients whose own models are -gamma_hat and gamma_hat."""
    means = gamma_hat * jnp.array([-1.0, 1.0])
    return mean_estimation(means, means)


def _weights(task: MeanEstimation, w: Any) -> Any:
    """``q_k = sigma (1 - sigma)`` at ``F_k(w) - rho_k``, eq. (4)."""
    gaps = task.gaps(w)
    return jax.nn.sigmoid(gaps) * jax.nn.sigmoid(-gaps)


# Figure 5(b): minima.


def run_landscape(config: Landscape, execution: Execution | None = None) -> xr.Dataset:
    """The objective over w for some gamma_hat, and its minima for many."""
    del execution
    reach = max(config.gamma_hat) + _BEYOND

    def program(gamma_hat: Any, w: Any, fine: Any, starts: Any) -> tuple[Any, Any]:
        def curve(gamma_hat: Any) -> Any:
            return jax.vmap(partial(maxfl_objective, _pair(gamma_hat)))(w)

        def minima(gamma_hat: Any) -> Any:
            return jax.vmap(partial(descend, maxfl_objective, _pair(gamma_hat)))(gamma_hat * starts)

        return jax.vmap(curve)(gamma_hat), jax.vmap(minima)(fine)

    with jax.enable_x64(True):
        w = jnp.linspace(-reach, reach, 401)
        fine = jnp.linspace(0, config.largest, config.num_points + 1)[1:]
        # Off the middle by less than a minimum beside it can be, but where one is about to be.
        starts = jnp.linspace(-1, 1, config.num_starts) + 1e-5
        (curves, found), seconds = timed(program, jnp.asarray(config.gamma_hat), w, fine, starts)
    dataset = xr.Dataset(
        {
            "objective": (("gamma_hat", "w"), curves),
            "minimum": (("searched_gamma_hat", "start"), found.point),
            "displacement": (("searched_gamma_hat", "start"), found.displacement),
            "nearest": (("searched_gamma_hat", "start"), found.nearest.astype(np.int32) + 1),
            "converged": (("searched_gamma_hat", "start"), found.converged),
        },
        {"gamma_hat": list(config.gamma_hat), "w": np.asarray(w), "start": np.asarray(starts)},
    ).assign_coords(searched_gamma_hat=np.asarray(fine))
    dataset.attrs["manifest"] = about(config, seconds)
    return dataset


def critical_gamma_hat() -> float:
    """Where the middle turns from a minimum into a maximum: ``x tanh(x/2) = 1/2, x = gamma^2``.

    The curvature there is ``2 q (1 - 2 x tanh(x/2))``, with q the weight of both clients.

    Example:
      >>> round(critical_gamma_hat(), 4)
      1.0216
    """
    low, high = 0.0, 2.0
    for _ in range(60):
        x = (low + high) / 2
        low, high = (x, high) if x * math.tanh(x / 2) < 1 / 2 else (low, x)
    return math.sqrt(low)


def judge_landscape(dataset: xr.Dataset, config: Landscape) -> Judgement:
    """How many minima there are, and how far from the clients' own models."""
    del config
    gammas, critical = dataset.searched_gamma_hat.values, critical_gamma_hat()
    minima = [_distinct(row) for row in dataset.minimum.transpose("searched_gamma_hat", "start")]
    small, large = gammas**2 < 1, gammas**2 > 2
    single = [len(m) == 1 and abs(m[0]) < _NEAR for m in minima]
    parted = [
        len(m) == 2 and bool(np.all(np.abs(np.abs(m) - gamma) < np.abs(m)))
        for m, gamma in zip(minima, gammas, strict=True)
    ]
    inwards = dataset.displacement * (3 - 2 * dataset.nearest)  # client 1 is on the left
    nearest, farthest = float(inwards.min()), float(inwards.max())
    converged = int(dataset.converged.sum())
    several = gammas[[len(m) > 2 for m in minima]]
    measured = {
        "critical_gamma_hat": critical,
        "gamma_hat_with_three_minima": [several.min(), several.max()] if several.size else [],
        "gamma_hat": gammas,
        "minima": [m.tolist() for m in minima],
        "convergence": {"descents": dataset.converged.size, "converged": converged},
    }
    claims = (
        Claim(
            "gamma_hat^2 < 1: one minimum, the average of the clients' models",
            bool(np.all(np.array(single)[small])),
            f"at {np.sum(small & single)} of {small.sum()} gamma_hat; it turns into a maximum at "
            f"gamma_hat = {critical:.4f}, gamma_hat^2 = {critical**2:.4f}; at {several.size} "
            "gamma_hat just below there are three minima",
        ),
        Claim(
            "gamma_hat^2 > 2: two minima, each nearer to a client's model than to the middle",
            bool(np.all(np.array(parted)[large])),
            f"at {np.sum(large & parted)} of {large.sum()} gamma_hat",
        ),
        Claim(
            "Lemma A.4: every minimum is at most 2 from a client's model, on the inner side",
            0 < nearest <= farthest <= 2,
            f"distances inwards from {nearest:.1e} to {farthest:.4f}",
        ),
        Claim(
            "A local minimum is found from every start",
            converged == dataset.converged.size,
            f"{converged:,} of {dataset.converged.size:,} descents converged",
        ),
    )
    rows = [
        (f"{gammas[i]:.2f}", str(len(minima[i])), ", ".join(f"{x:+.4f}" for x in minima[i]))
        for i in np.linspace(0, len(gammas) - 1, 9).astype(int)
    ]
    return Judgement(measured, claims, (("gamma_hat", "minima", "where"), *rows))


def _distinct(points: xr.DataArray) -> np.ndarray:
    """Points that are apart, in increasing order."""
    ordered = np.sort(points.values)
    return ordered[np.r_[True, np.diff(ordered) > _NEAR]]


def plot_landscape(dataset: xr.Dataset, config: Landscape, judgement: Judgement) -> Figure:
    """The objective over w, and the minima over gamma_hat."""
    curves = [
        plots.Line(rf"$\hat\gamma_G$ = {gamma:g}", dataset.w.values, values.values)
        for gamma, values in zip(config.gamma_hat, dataset.objective, strict=True)
    ]
    gammas = dataset.searched_gamma_hat.values
    pairs = [
        (gamma, point)
        for gamma, points in zip(gammas, judgement.measured["minima"], strict=True)
        for point in points
    ]
    x, y = np.array(pairs).T
    own = plots.Line("a client's own model", gammas, gammas, style="--", color=6)
    minima = [
        plots.Line("local minima", x, y, style="."),
        own,
        own._replace(label="", y=-gammas),
    ]
    marks = {"the middle turns into a maximum": critical_gamma_hat()}
    return plots.line_panels(
        [
            [
                plots.Panel("MaxFL's objective", "model $w$", "objective", curves),
                plots.Panel(
                    "its local minima",
                    r"half the distance of the empirical means, $\hat\gamma_G$",
                    "model $w$",
                    minima,
                    marks,
                    limits=(-1.1 * config.largest, 1.8 * config.largest),
                ),
            ]
        ],
        title=r"Mean estimation, two clients with empirical means $\pm\hat\gamma_G$",
        caption=verdict(judgement),
    )


# Figure 8: the adaptive learning rate.


def run_rate(config: Rate, execution: Execution | None = None) -> xr.Dataset:
    """The rate over w, and gradient descent with it and with a constant rate.

    The adaptive rate of the objective's gradient is ``eta N / (sum q_k + eps)`` (eq. 6 with one
    local step); the constant one is 1/L with L the objective's largest curvature.
    """
    del execution
    reach = max(config.gamma_hat) + _BEYOND

    def at(gamma_hat: Any, w: Any, starts: Any) -> dict[str, Any]:
        task = _pair(gamma_hat)
        objective = partial(maxfl_objective, task)
        slope = jax.grad(objective)
        curvature = jax.vmap(jax.grad(slope))(w)
        smoothness = jnp.max(jnp.abs(curvature))

        def adaptive(w: Any) -> Any:
            total = jnp.sum(_weights(task, w)) + config.epsilon
            return config.learning_rate * task.num_clients / total

        def descend(rate: Any) -> Any:
            def one_round(w: Any, _: None) -> tuple[Any, Any]:
                w = w - rate(w) * slope(w)
                return w, w

            def path(start: Any) -> Any:
                return jnp.append(start, lax.scan(one_round, start, length=config.num_rounds)[1])

            return jax.vmap(path)(starts)

        return {
            "objective": jax.vmap(objective)(w),
            "curvature": curvature,
            "rate": jax.vmap(adaptive)(w),
            "constant_rate": 1 / smoothness,
            "path": jnp.stack([descend(adaptive), descend(lambda w: 1 / smoothness)]),
            "minimum": jax.vmap(partial(local_minimum, objective))(starts).point,
        }

    with jax.enable_x64(True):
        w = jnp.linspace(-reach, reach, 801)
        # None in the exact middle, which may be a maximum.
        starts = jnp.linspace(-reach, reach, config.num_starts) + 1e-3
        gammas = jnp.asarray(config.gamma_hat)
        values, seconds = timed(jax.vmap(at, (0, None, None)), gammas, w, starts)
    dims: dict[str, tuple[str, ...]] = {
        "constant_rate": (),
        "path": ("rule", "start", "round"),
        "minimum": ("start",),
    }
    dataset = xr.Dataset(
        {name: (("gamma_hat", *dims.get(name, ("w",))), each) for name, each in values.items()},
        {
            "gamma_hat": list(config.gamma_hat),
            "w": np.asarray(w),
            "start": np.asarray(starts),
            "rule": list(_RULES),
            "round": np.arange(config.num_rounds + 1),
        },
    )
    dataset.attrs["manifest"] = about(config, seconds)
    return dataset


def judge_rate(dataset: xr.Dataset, config: Rate) -> Judgement:
    """The rate where the objective is flat and where it is not; rounds to a minimum."""
    rounds = _rounds(dataset, config)
    numbers = {
        gamma: _rates(dataset.sel(gamma_hat=gamma))
        | _rounds_of(rounds.sel(gamma_hat=gamma), dataset.sel(gamma_hat=gamma))
        for gamma in config.gamma_hat
    }
    rates, counts = [], []
    for gamma, each in numbers.items():
        rates.append(
            f"gamma_hat = {gamma:g}: on average {each['flat']:.3g} where it is flat, "
            f"{each['steep']:.3g} where it is steep"
        )
        counts.append(
            f"gamma_hat = {gamma:g}: in the median of {each['flat_starts']} flat starts "
            f"{each['flat_rounds_adaptive']:g} against {each['flat_rounds_constant']:g}, "
            f"{each['not_arrived_adaptive']} against {each['not_arrived_constant']} of all "
            f"{config.num_starts} not arrived after {config.num_rounds}; adaptive is slower from "
            f"{each['slower']}"
        )
    claims = (
        Claim(
            "The rate is higher where the objective is flat",
            all(each["flat"] > each["steep"] for each in numbers.values()),
            "; ".join(rates),
        ),
        Claim(
            "From flat starts the adaptive rate takes fewer rounds than 1/L, L the smoothness",
            all(
                each["flat_rounds_adaptive"] < each["flat_rounds_constant"]
                for each in numbers.values()
            ),
            "; ".join(counts),
        ),
    )
    header = (
        "gamma_hat",
        *("flat", "steep", "minimum", "1/L"),
        *(f"rounds, {rule}" for rule in _RULES),
    )
    rows = [
        (
            f"{gamma:g}",
            *(f"{each[name]:.4g}" for name in ("flat", "steep", "at_minimum", "constant")),
            *(f"{each[f'flat_rounds_{rule}']:g}" for rule in _RULES),
        )
        for gamma, each in numbers.items()
    ]
    measured = {f"gamma_hat={gamma:g}": each for gamma, each in numbers.items()}
    return Judgement(measured, claims, (header, *rows))


def _rounds(dataset: xr.Dataset, config: Rate) -> xr.DataArray:
    """The first round near a minimum, any, over ``(gamma_hat, rule, start)``; NaN if none."""
    path = dataset.path.transpose("gamma_hat", "rule", "start", "round")
    minima = dataset.minimum.transpose("gamma_hat", "start").values
    distance = [
        np.min([np.abs(each - point) for point in (m.min(), m.max())], axis=0)
        for each, m in zip(path.values, minima, strict=True)
    ]
    rounds = first_round_below(distance, path["round"].values, config.target)
    return path.isel(round=0, drop=True).copy(data=rounds)


def _flat_and_steep(dataset: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Over w: slope below a tenth of the steepest, far from minima; slope above half of it."""
    w = dataset.w.values
    slope = np.abs(np.gradient(dataset.objective.values, w))
    near = np.abs(w[:, None] - dataset.minimum.values).min(1) < _AROUND
    return (slope < slope.max() / 10) & ~near, slope > slope.max() / 2


def _rates(dataset: xr.Dataset) -> dict[str, Any]:
    """The adaptive rate, averaged over flat and over steep parts, and at a minimum."""
    w, rate = dataset.w.values, dataset.rate.values
    flat, steep = _flat_and_steep(dataset)
    return {
        "flat": float(rate[flat].mean()) if flat.any() else math.nan,
        "steep": float(rate[steep].mean()),
        "at_minimum": float(np.interp(dataset.minimum.values[0], w, rate)),
        "largest": float(rate.max()),
        "constant": dataset.constant_rate.item(),
    }


def _rounds_of(rounds: xr.DataArray, dataset: xr.Dataset) -> dict[str, Any]:
    """Medians over flat starts, with infinity where a descent did not arrive; and how many."""
    flat = np.interp(rounds.start.values, dataset.w.values, _flat_and_steep(dataset)[0]) > 0.5
    values = {rule: rounds.sel(rule=rule).values for rule in _RULES}
    late = {rule: np.where(np.isnan(x), np.inf, x) for rule, x in values.items()}
    return {
        "flat_starts": int(flat.sum()),
        "slower": int((late["adaptive"] > late["constant"]).sum()),
        **{f"not_arrived_{rule}": int(np.isnan(x).sum()) for rule, x in values.items()},
        **{
            f"flat_rounds_{rule}": float(np.median(x[flat])) if flat.any() else math.nan
            for rule, x in late.items()
        },
    }


def plot_rate(dataset: xr.Dataset, config: Rate, judgement: Judgement) -> Figure:
    """The objective; the rates over w; the rounds to a minimum over the start."""
    rounds = _rounds(dataset, config)
    w, starts = dataset.w.values, dataset.start.values
    objectives, rates, counts = [], [], []
    for i, gamma in enumerate(config.gamma_hat):
        here = dataset.sel(gamma_hat=gamma)
        name = rf"$\hat\gamma_G$ = {gamma:g}"
        constant = np.full(2, here.constant_rate)
        objectives.append(plots.Line(name, w, here.objective.values, color=i))
        rates.append(plots.Line(f"{name}, adaptive", w, here.rate.values, color=i))
        rates.append(plots.Line(f"{name}, 1/L", w[[0, -1]], constant, style="--", color=i))
        for rule, style in zip(_RULES, ("o", "x"), strict=True):
            values = 1 + rounds.sel(gamma_hat=gamma, rule=rule).values
            counts.append(plots.Line(f"{name}, {rule}", starts, values, style=style, color=i))
    return plots.line_panels(
        [
            [
                plots.Panel("MaxFL's objective", "model $w$", "objective", objectives),
                plots.Panel(
                    "learning rate", "model $w$", "rate", rates, limits=_room(rates), scale="log"
                ),
                plots.Panel(
                    "rounds to a minimum",
                    "start $w_0$",
                    "1 + rounds",
                    counts,
                    scale="log",
                ),
            ]
        ],
        title=r"MaxFL's adaptive rate, two clients with empirical means $\pm\hat\gamma_G$, "
        rf"$\epsilon$ = {config.epsilon:g}",
        caption=f"A descent has arrived within {config.target:g} of a minimum; no point: not after "
        f"{config.num_rounds:,} rounds. " + verdict(judgement),
    )


def _room(lines: list[plots.Line]) -> tuple[float, float]:
    """Limits of a logarithmic axis that leave room for the legend above the lines."""
    return min(line.y.min() for line in lines) / 1.5, 12 * max(line.y.max() for line in lines)


REPRODUCTIONS = (
    Reproduction(
        id="maxfl-fig5b",
        paper={
            "figure": "Figure 5(b): the objective for small and large heterogeneity, no numbers",
            "text": "gamma_hat^2 < 1 gives the average of the local models; gamma_hat^2 > 2 a "
            "model close to one of them (appendix A.1)",
            "open": ["the heterogeneities that are drawn are not given: gamma_hat"],
        },
        config=Landscape(),
        run=run_landscape,
        judge=judge_landscape,
        plot=plot_landscape,
    ),
    Reproduction(
        id="maxfl-fig8",
        paper={
            "figure": "Figure 8: the rate over the model, higher where the function is flat",
            "open": [
                "its example is called Fig. 1(b), which there is not: Fig. 5(b) is meant",
                "gamma_hat, eta and epsilon are not given; epsilon bounds the rate from above",
            ],
        },
        config=Rate(),
        run=run_rate,
        judge=judge_rate,
        plot=plot_rate,
    ),
)
"""Figures 5(b) and 8."""
