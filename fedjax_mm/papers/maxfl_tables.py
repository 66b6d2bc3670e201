"""Cho et al., section 5 and appendix D: Tables 1 to 6, Figures 3, 4 and 7."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.metrics import standard_error
from fedjax_mm.papers.maxfl_clients import STAND_INS, Partition, source_of
from fedjax_mm.papers.maxfl_grid import POINT, Comparison, at_the_end, best_points, run_comparison
from fedjax_mm.papers.reproduction import Claim, Judgement, Reproduction
from fedjax_mm.papers.trainings import verdict

OURS = "MaxFL"
MOST_LOST = 10.0
"""Points that MaxFL may lose to attackers."""
LITTLE = 5.0
"""Points by which an appeal varies that does not vary much."""
NEARLY = 0.1
"""What two nearly identical losses differ by, of the larger one."""

_METRICS = {
    "accuracy": "test accuracy",
    "appeal": "GM-Appeal",
    "preferred_accuracy": "preferred-model accuracy",
}
_OPEN = (
    STAND_INS,
    "the rate of dropout is not given: dropout_rate = 0.5; images are divided by 255",
    "the grids of the methods' own parameters are not given: `methods` has ours",
    "the best point of a method is chosen by the test accuracy that is reported, as in the paper",
)

Published = Mapping[str, Mapping[str, Sequence[float]]]
"""By data set and row, a number for each metric, in percent."""


class Item(NamedTuple):
    """What one table or figure shows of a comparison.

    Attributes:
      metrics: of the clients that were seen and, as "unseen_...", of the others.
      published: the paper's numbers.
      claims: from each method at its best point, and the settings, to the paper's claims.
    """

    metrics: tuple[str, ...]
    published: Published
    claims: Callable[[xr.Dataset, Comparison], list[Claim]]


def title_of(metric: str) -> str:
    """A metric in words."""
    name = metric.removeprefix("unseen_")
    return f"{_METRICS[name]}, {'unseen' if name != metric else 'seen'}"


def rows_of(best: xr.Dataset) -> dict[str, dict[str, Any]]:
    """Every row of a table, and where it is in the result."""
    shares, steps = best["byzantine"].values, best["warm_up_steps"].values
    rows = {}
    for name in best["method"].values:
        for share in shares:
            for count in steps:
                text = f", {share:g} attack" if len(shares) > 1 else ""
                text += f", {count} warm-up steps" if len(steps) > 1 else ""
                where = {"method": name, "byzantine": share, "warm_up_steps": count}
                rows[f"{name}{text}"] = where
    return rows


def judge(dataset: xr.Dataset, config: Comparison, item: Item) -> Judgement:
    """Every method at its best point, beside the published numbers; and the paper's claims."""
    best = best_points(dataset, config)
    published = item.published.get(config.dataset, {})
    measured: dict[str, Any] = {"grid points of a variant": config.num_points, "rows": {}}
    table = [("method", *map(title_of, item.metrics), "best point", "skipped rounds")]
    for label, where in rows_of(best).items():
        here = best.sel(where)
        values = {metric: at_the_end(here, metric).values for metric in item.metrics}
        papers = published.get(label, [np.nan] * len(item.metrics))
        point = {name: here[name].item() for name in POINT}
        skipped = here["idle_rounds"].isel(round=-1).values
        cells = [_cell(*pair) for pair in zip(values.values(), papers, strict=True)]
        table.append((label, *cells, _point_text(point), f"{skipped.mean():.0f}"))
        measured["rows"][label] = {
            metric: {
                "mean": x.mean(),
                "standard_error": standard_error(x),
                "per_seed": x,
                "published": paper,
            }
            for (metric, x), paper in zip(values.items(), papers, strict=True)
        } | {"best point": point, "skipped rounds": skipped}
    diverged = int((dataset["diverged"] >= 0).sum())
    measured["diverged runs"] = diverged
    return Judgement(measured, tuple(item.claims(best, config)), tuple(table))


def _cell(values: np.ndarray, published: float) -> str:
    error = standard_error(values)
    spread = f" ± {error:.1f}" if np.isfinite(error) else ""
    paper = f" ({published:g})" if np.isfinite(published) else ""
    return f"{values.mean():.1f}{spread}{paper}"


def _point_text(point: Mapping[str, Any]) -> str:
    own = point["variant"].partition(" (")[2].removesuffix(")")
    settings = f"lr {point['learning_rate']:g}, tau {point['local_steps']}, B {point['batch_size']}"
    return f"{settings}, {own}" if own else settings


def exceeds(
    metrics: Sequence[str], best: xr.Dataset, config: Comparison, *, by: float = 0.0
) -> list[Claim]:
    """MaxFL is above every other method by more than `by` points and two standard errors."""
    del config
    return [_exceeds(metric, best, by) for metric in metrics]


def _exceeds(metric: str, best: xr.Dataset, by: float) -> Claim:
    values = at_the_end(best, metric)
    evidence, holds = [], True
    for where in ({"byzantine": b, "warm_up_steps": w} for b in best.byzantine.values
                  for w in best.warm_up_steps.values):
        here = values.sel(where)
        for name in best["method"].values:
            if name == OURS:
                continue
            difference = (here.sel(method=OURS) - here.sel(method=name)).values
            error = standard_error(difference)
            known = error if np.isfinite(error) else 0.0
            holds &= bool(difference.mean() - 2 * known > by)
            evidence.append(f"{name} {difference.mean():+.1f} ± {known:.1f}")
    more = f"more than {by:g} points and " if by else "more than "
    return Claim(
        f"{title_of(metric)}: MaxFL exceeds every other method by {more}2 standard errors",
        holds,
        f"MaxFL minus {', '.join(evidence)} points",
    )


def not_below(metrics: Sequence[str], best: xr.Dataset, config: Comparison) -> list[Claim]:
    """MaxFL is not below any other method by more than two standard errors."""
    del config
    claims = []
    for metric in metrics:
        values = at_the_end(best, metric).isel(byzantine=0, warm_up_steps=0)
        others = [name for name in best["method"].values if name != OURS]
        by = {name: (values.sel(method=OURS) - values.sel(method=name)).values for name in others}
        errors = {name: standard_error(x) for name, x in by.items()}
        known = {name: e if np.isfinite(e) else 0.0 for name, e in errors.items()}
        claims.append(
            Claim(
                f"{title_of(metric)}: MaxFL is not below any other method (2 standard errors)",
                all(x.mean() + 2 * known[name] >= 0 for name, x in by.items()),
                "MaxFL minus "
                + ", ".join(f"{name} {x.mean():+.1f} ± {known[name]:.1f}" for name, x in by.items()),
            )
        )
    return claims


def withstands(best: xr.Dataset, config: Comparison) -> list[Claim]:
    """Attackers take at most 10 points of accuracy from MaxFL, and more from MW-Fed."""
    claims = []
    for metric in ("accuracy", "unseen_accuracy"):
        values = at_the_end(best, metric).isel(warm_up_steps=0)
        lost = {
            name: (values.sel(byzantine=0.0) - values.sel(method=name)).sel(method=name).mean("seed")
            for name in (OURS, "MW-Fed")
        }
        shares = [share for share in config.byzantine if share > 0]
        text = "; ".join(
            f"{share:g}: " + ", ".join(f"{n} {x.sel(byzantine=share).item():.1f}" for n, x in lost.items())
            for share in shares
        )
        ours, theirs = (x.sel(byzantine=shares).values for x in lost.values())
        claims += [
            Claim(
                f"{title_of(metric)}: MaxFL loses at most {MOST_LOST:g} points to attackers",
                bool((ours <= MOST_LOST).all()),
                f"lost with a share of {text}",
            ),
            Claim(
                f"{title_of(metric)}: MW-Fed loses more to attackers than MaxFL",
                bool((theirs > ours).all()),
                f"lost with a share of {text}",
            ),
        ]
    return claims


def hardly_varies(best: xr.Dataset, config: Comparison) -> list[Claim]:
    """The number of warm-up steps moves no method's appeal much."""
    del config
    means = at_the_end(best, "appeal").isel(byzantine=0).mean("seed")
    spread = means.max("warm_up_steps") - means.min("warm_up_steps")
    return [
        Claim(
            f"GM-Appeal varies by at most {LITTLE:g} points with the number of warm-up steps",
            bool((spread <= LITTLE).all()),
            ", ".join(f"{name} {x:.1f}" for name, x in zip(means.method.values, spread.values, strict=True)),
        )
    ]


def nearly_identical(best: xr.Dataset, config: Comparison) -> list[Claim]:
    """Mean test and training losses of a global model hardly differ, in any round."""
    del config
    here = best.isel(byzantine=0, warm_up_steps=0)
    true, empirical = (here[name].mean("seed") for name in ("loss", "train_loss"))
    larger = xr.where(true > empirical, true, empirical)
    worst = (abs(true - empirical) / larger).max("round")
    return [
        Claim(
            f"the mean test loss is within {NEARLY:.0%} of the mean training loss in every record",
            bool((worst <= NEARLY).all()),
            ", ".join(
                f"{name} at most {x:.1%}"
                for name, x in zip(worst["method"].values, worst.values, strict=True)
            ),
        )
    ]


def plot(dataset: xr.Dataset, config: Comparison, judgement: Judgement, item: Item) -> Figure:
    """One panel for each kind of metric: seen and unseen clients, ours and the paper's."""
    del dataset
    rows = judgement.measured["rows"]
    groups: dict[str, dict[str, Any]] = {}
    for metric in item.metrics:
        name = metric.removeprefix("unseen_")
        who = "unseen" if name != metric else "seen"
        numbers = [row[metric] for row in rows.values()]
        ours = [[each[key] for each in numbers] for key in ("mean", "standard_error")]
        group = groups.setdefault(_METRICS[name], {})
        group[f"{who} clients"] = tuple(np.array(x, float) for x in ours)
        published = np.array([each["published"] for each in numbers], float)
        if np.isfinite(published).any():
            group[f"{who}, published"] = published
    return plots.grouped_points(
        list(rows),
        groups,
        ylabel="percent",
        title=_title(config),
        caption=_caption(config) + verdict(judgement),
    )


def plot_rounds(
    dataset: xr.Dataset,
    config: Comparison,
    judgement: Judgement,
    *,
    panels: Mapping[str, Sequence[str]],
    scale: float = 100.0,
) -> Figure:
    """Each method at its best point over the rounds; one panel per group of metrics."""
    best = best_points(dataset, config).isel(byzantine=0, warm_up_steps=0)
    rows = []
    for title, metrics in panels.items():
        lines = []
        for number, name in enumerate(best["method"].values):
            for metric, style in zip(metrics, ("-", "--"), strict=False):
                curve = scale * best[metric].sel(method=name).transpose("round", "seed")
                label = name if metric == metrics[0] else ""
                error = standard_error(curve.values)
                lines.append(
                    plots.Line(
                        label,
                        best["round"].values,
                        curve.mean("seed").values,
                        error if np.isfinite(error).all() else None,
                        style,
                        number,
                    )
                )
        rows.append([plots.Panel(title, "round", title, tuple(lines))])
    return plots.line_panels(rows, title=_title(config), caption=_caption(config) + verdict(judgement))


def _title(config: Comparison) -> str:
    who = config.population
    source = source_of(config.dataset, config.directory)
    standing = f" standing in for {config.dataset}" if source != config.dataset else ""
    invented = " (invented tweets)" if source == "sent140" and config.directory is None else ""
    return (
        f"{source}{standing}{invented}, {who.num_clients} seen and {who.num_unseen} unseen clients, "
        f"{who.cohort_size} a round, T = {config.num_rounds}"
    )


def _caption(config: Comparison) -> str:
    stay = (
        f"from round {config.appealing_from} on only clients train to whom the model appeals"
        if config.appealing_from
        else "all clients may be drawn in every round"
    )
    tuned = f" {config.tuning_steps} local steps of tuning." if config.tuning_steps else ""
    return (
        f"Means over {config.num_seeds} seeds with clients of their own, with standard errors; "
        f"{stay}. Each method at the best of {config.num_points} points of the grid, by test "
        f"accuracy.{tuned} "
    )
