"""Cho et al., section 5 and appendix D: Tables 1 to 6, Figures 3, 4 and 7."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm.papers.bhuyan2022.accuracy import verdict
from fedjax_mm.papers.cho2022.clients import STAND_INS, Partition, source_of
from fedjax_mm.papers.cho2022.grid import POINT, Comparison, at_the_end, best_points, run_comparison
from fedjax_mm.papers.old import Claim, Judgement, Reproduction
from fedjax_mm.results import plots
from fedjax_mm.results.metrics import standard_error

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
    "five clusters of labels are given for Figures 3 and 4 and Table 3; the numbers of Tables 4, 5 "
    "and 6 look like those of such clusters too, and Figure 7 is ours to choose",
    "whether attackers may stay away is not given: here they never do (attackers_stay), and they "
    "are among the seen clients over which is averaged",
)

_PARTITIONS = {"dirichlet": "labels by Dirichlet's law", "clusters": "five clusters of labels"}

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
    for name in best["algorithm"].values:
        for share in shares:
            for count in steps:
                text = f", {share:g} attack" if len(shares) > 1 else ""
                text += f", {count} warm-up steps" if len(steps) > 1 else ""
                where = {"algorithm": name, "byzantine": share, "warm_up_steps": count}
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
        has_diverged = bool((here["diverged"] >= 0).any())
        text = _point_text(point) + ", diverged" * has_diverged
        table.append((label, *cells, text, f"{skipped.mean():.0f}"))
        measured["rows"][label] = {
            metric: {
                "mean": x.mean(),
                "standard_error": standard_error(x),
                "per_seed": x,
                "published": paper,
            }
            for (metric, x), paper in zip(values.items(), papers, strict=True)
        } | {"best point": point, "skipped rounds": skipped, "diverged": has_diverged}
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
    """MaxFL is above every other method by two standard errors, and by `by` points or more."""
    del config
    least = f", and at least {by:g} points" if by else ""
    return [
        _against_others(
            metric,
            best,
            f"MaxFL exceeds every other method by more than 2 standard errors{least}",
            lambda mean, error: mean - 2 * error > 0 and mean >= by,
        )
        for metric in metrics
    ]


def not_below(metrics: Sequence[str], best: xr.Dataset, config: Comparison) -> list[Claim]:
    """MaxFL is not below any other method by more than two standard errors."""
    del config
    return [
        _against_others(
            metric,
            best,
            "MaxFL is not below any other method (2 standard errors)",
            lambda mean, error: mean + 2 * error >= 0,
        )
        for metric in metrics
    ]


def _against_others(
    metric: str, best: xr.Dataset, text: str, holds: Callable[[float, float], bool]
) -> Claim:
    """Whether something holds of MaxFL minus every other method, seed by seed."""
    values, found, evidence = at_the_end(best, metric), [], []
    others = [name for name in best["algorithm"].values if name != OURS]
    if len(others) < best.sizes["algorithm"]:
        for label, where in rows_of(best.sel(algorithm=others)).items():
            difference = values.sel({**where, "algorithm": OURS}) - values.sel(where)
            found.append(_judged(difference.values, holds))
            evidence.append(f"{label} {_with_error(difference.values)}")
    text = f"{title_of(metric)}: {text}"
    return Claim(text, bool(found) and all(found), f"MaxFL minus {', '.join(evidence)} points")


def _judged(values: np.ndarray, holds: Callable[[float, float], bool]) -> bool:
    """Of the mean over seeds and its standard error; of one seed nothing holds."""
    error = float(standard_error(values))
    return bool(np.isfinite(error)) and holds(float(values.mean()), error)


def _with_error(values: np.ndarray) -> str:
    error = standard_error(values)
    return f"{values.mean():+.1f} " + (f"± {error:.1f}" if np.isfinite(error) else "(one seed)")


def withstands(best: xr.Dataset, config: Comparison) -> list[Claim]:
    """Attackers take at most 10 points of accuracy from MaxFL, and more from MW-Fed."""
    claims = []
    shares = [share for share in config.byzantine if share > 0]
    if not shares or OURS not in best["algorithm"].values:
        what = "there are no attackers, or MaxFL is not among the methods"
        return [Claim("MaxFL withstands attackers", False, what)]
    for metric in ("accuracy", "unseen_accuracy"):
        values = at_the_end(best, metric).isel(warm_up_steps=0)
        lost = (values.sel(byzantine=0.0) - values.sel(byzantine=shares)).transpose(
            "algorithm", "byzantine", "seed"
        )
        lost = lost.assign_coords(byzantine=shares)
        text = "; ".join(
            f"{share:g}: "
            + ", ".join(
                f"{name} {_with_error(lost.sel(algorithm=name, byzantine=share).values)}"
                for name in lost["algorithm"].values
            )
            for share in shares
        )
        evidence = f"each share at its own best point, points lost with {text}"
        ours = lost.sel(algorithm=OURS).values
        kept = [_judged(x, lambda mean, error: mean + 2 * error <= MOST_LOST) for x in ours]
        title = title_of(metric)
        claims.append(
            Claim(
                f"{title}: MaxFL loses at most {MOST_LOST:g} points to attackers (2 standard "
                "errors)",
                all(kept),
                evidence,
            )
        )
        if "MW-Fed" in lost["algorithm"].values:
            more = lost.sel(algorithm="MW-Fed").values - ours
            claims.append(
                Claim(
                    f"{title}: MW-Fed loses more to attackers, by more than 2 standard errors",
                    all(_judged(x, lambda mean, error: mean - 2 * error > 0) for x in more),
                    evidence,
                )
            )
    return claims


def hardly_varies(best: xr.Dataset, config: Comparison) -> list[Claim]:
    """The number of warm-up steps moves no method's appeal much."""
    del config
    means = at_the_end(best, "appeal").isel(byzantine=0).mean("seed", skipna=False)
    spread = means.max("warm_up_steps", skipna=False) - means.min("warm_up_steps", skipna=False)
    return [
        Claim(
            f"GM-Appeal varies by at most {LITTLE:g} points with the number of warm-up steps",
            bool((spread <= LITTLE).all()),
            ", ".join(
                f"{name} {x:.1f} (about {mean:.1f})"
                for name, x, mean in zip(
                    means["algorithm"].values,
                    spread.values,
                    means.mean("warm_up_steps").values,
                    strict=True,
                )
            ),
        )
    ]


def nearly_identical(best: xr.Dataset, config: Comparison) -> list[Claim]:
    """Mean test and training losses of a global model hardly differ, in any round."""
    del config
    here = best.isel(byzantine=0, warm_up_steps=0)
    true, empirical = (here[name].mean("seed", skipna=False) for name in ("loss", "train_loss"))
    larger = xr.where(true > empirical, true, empirical)
    worst = (abs(true - empirical) / larger).max("round", skipna=False)
    return [
        Claim(
            f"the mean test loss is within {NEARLY:.0%} of the mean training loss in every record",
            bool((worst <= NEARLY).all()),
            ", ".join(
                f"{name} at most {x:.1%}"
                for name, x in zip(worst["algorithm"].values, worst.values, strict=True)
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
        for number, name in enumerate(best["algorithm"].values):
            for metric, style in zip(metrics, ("-", "--"), strict=False):
                curve = scale * best[metric].sel(algorithm=name).transpose("round", "seed")
                label = name if metric == metrics[0] else ""
                error = standard_error(curve.values, axis=1)
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
        ylabel = "percent" if scale == 100 else "loss"
        rows.append([plots.Panel(title, "round", ylabel, tuple(lines))])
    return plots.line_panels(
        rows, title=_title(config), caption=_caption(config) + verdict(judgement)
    )


def _title(config: Comparison) -> str:
    who = config.population
    source = source_of(config.dataset, config.directory)
    standing = f" standing in for {config.dataset}" if source != config.dataset else ""
    invented = " (invented tweets)" if source == "sent140" and config.directory is None else ""
    return (
        f"{source}{standing}{invented}, {who.num_clients} seen and {who.num_unseen} unseen "
        f"clients, {who.cohort_size} a round, T = {config.num_rounds}"
    )


def _caption(config: Comparison) -> str:
    stay = (
        f"from round {config.appealing_from} on only clients train to whom the model appeals"
        if config.appealing_from
        else "all clients may be drawn in every round"
    )
    chosen = "All methods at one point of the grid"
    if config.num_points > 1:
        chosen = f"Each method at the best of {config.num_points} points of the grid, by accuracy"
    tuned = f" {config.tuning_steps} local steps of tuning." if config.tuning_steps else ""
    return (
        f"Means over {config.num_seeds} seeds with clients of their own, with standard errors; "
        f"{_PARTITIONS[config.partition]}; {stay}. {chosen}.{tuned} "
    )


_FEDAVG = {"FedAvg": {"name": "fedavg"}}
_FEDPROX = {"FedProx": {"name": "fedprox", "mu": [0.01, 0.1]}}
_SCAFFOLD = {"SCAFFOLD": {"name": "scaffold"}}
_PERFEDAVG = {"PerFedAvg": {"name": "perfedavg"}}
_QFFL = {"qFFL": {"name": "qffl", "q": [1.0, 10.0]}}
_MWFED = {"MW-Fed": {"name": "mwfed"}}
_MAXFL = {OURS: {"name": "maxfl"}}

_BOTH = ("accuracy", "appeal", "unseen_accuracy", "unseen_appeal")

# Seen accuracy and appeal, unseen accuracy and appeal.
_TABLE_1: Published = {
    "fmnist": {
        "FedAvg": (43.70, 4, 43.14, 7),
        "FedProx": (44.59, 5, 43.80, 7),
        "SCAFFOLD": (39.90, 0, 39.24, 1),
        "PerFedAvg": (46.62, 5, 46.00, 7),
        "qFFL": (29.92, 0, 19.63, 0),
        "MW-Fed": (44.41, 4, 43.46, 6),
        OURS: (70.86, 37, 74.53, 39),
    },
    "emnist": {
        "FedAvg": (35.15, 2, 37.14, 6),
        "FedProx": (34.06, 0.4, 36.82, 0.8),
        "SCAFFOLD": (34.78, 0, 34.19, 0.4),
        "PerFedAvg": (34.78, 0.3, 36.92, 0.8),
        "qFFL": (15.95, 0, 5.41, 0),
        "MW-Fed": (30.44, 1, 36.54, 1),
        OURS: (57.34, 25, 55.62, 31),
    },
}
_TABLE_2: Published = {
    "fmnist": {
        "MW-Fed, 0 attack": (44.41, 4, 43.46, 6),
        "MW-Fed, 0.05 attack": (21.28, 2, 21.91, 1),
        "MW-Fed, 0.1 attack": (17.24, 1, 18.45, 1),
        f"{OURS}, 0 attack": (70.86, 37, 74.53, 39),
        f"{OURS}, 0.05 attack": (70.60, 42, 71.11, 46),
        f"{OURS}, 0.1 attack": (69.42, 35, 69.75, 39),
    },
    "emnist": {
        "MW-Fed, 0 attack": (30.44, 1, 36.54, 1),
        "MW-Fed, 0.05 attack": (22.22, 0.8, 22.23, 0.3),
        "MW-Fed, 0.1 attack": (15.83, 0.4, 17.03, 0.5),
        f"{OURS}, 0 attack": (57.34, 25, 55.62, 31),
        f"{OURS}, 0.05 attack": (56.10, 23, 55.10, 28),
        f"{OURS}, 0.1 attack": (52.74, 20, 53.82, 26),
    },
}
# Seen and unseen.
_TABLE_3: Published = {
    "fmnist": {
        "FedAvg": (38, 39),
        "FedProx": (40, 41),
        "SCAFFOLD": (2, 3),
        "PerFedAvg": (45, 46),
        "MW-Fed": (28, 39),
        OURS: (55, 56),
    },
    "sent140": {
        "FedAvg": (25, 42),
        "FedProx": (26, 43),
        "SCAFFOLD": (16, 7),
        "PerFedAvg": (24, 47),
        "MW-Fed": (8, 20),
        OURS: (36, 55),
    },
}
# Seen appeal and preferred-model accuracy.
_TABLE_4: Published = {
    "fmnist": {
        f"{name}, {steps} warm-up steps": values
        for name, row in {
            "FedAvg": ((1, 98.56), (1, 98.72), (1, 98.75)),
            "FedProx": ((1, 98.56), (1, 98.72), (1, 98.75)),
            OURS: ((55, 98.64), (55, 98.77), (55, 98.77)),
        }.items()
        for steps, values in zip((50, 100, 150), row, strict=True)
    }
}
_TABLE_5: Published = {
    "fmnist": {
        "FedAvg": (99.37, 99.50),
        "FedProx": (99.35, 99.55),
        "PerFedAvg": (99.20, 98.98),
        "MW-Fed": (99.27, 99.47),
        OURS: (99.40, 99.50),
    },
    "sent140": {
        "FedAvg": (55.71, 58.79),
        "FedProx": (55.75, 58.82),
        "PerFedAvg": (55.74, 58.82),
        "MW-Fed": (55.06, 57.36),
        OURS: (55.82, 58.88),
    },
}
_TABLE_6: Published = {
    "fmnist": {"qFFL, q = 1": (3, 99.24), "qFFL, q = 10": (0, 98.90), OURS: (55, 99.29)},
    "sent140": {"qFFL, q = 1": (9, 53.10), "qFFL, q = 10": (9, 52.71), OURS: (41, 53.93)},
}
# Unseen appeal and preferred-model accuracy.
_FIGURE_4: Published = {
    "fmnist": {
        "FedAvg": (8, 98.53),
        "FedProx": (7, 98.43),
        "SCAFFOLD": (2, 98.26),
        "MW-Fed": (5, 98.32),
        OURS: (55, 98.83),
    },
    "sent140": {
        "FedAvg": (37, 57.05),
        "FedProx": (37, 57.07),
        "SCAFFOLD": (3, 51.59),
        "MW-Fed": (17, 55.57),
        OURS: (43, 57.16),
    },
}


def _item(
    id: str,
    item: Item,
    what: str,
    *,
    figure: Any = None,
    partition: Partition = "clusters",
    **settings: Any,
) -> Reproduction:
    return Reproduction(
        id=id,
        paper={"shows": what, "values": item.published, "open": list(_OPEN)},
        config=Comparison(partition=partition, **settings),
        run=run_comparison,
        judge=partial(judge, item=item),
        plot=partial(plot, item=item) if figure is None else figure,
    )


def _claims(*parts: Callable[[xr.Dataset, Comparison], list[Claim]]) -> Any:
    return lambda best, config: [claim for part in parts for claim in part(best, config)]


def _unseen_margin(best: xr.Dataset, config: Comparison) -> list[Claim]:
    source = source_of(config.dataset, config.directory)
    points = {"fmnist": 47.0, "sent140": 6.0}.get(source, 0.0)
    return exceeds(["unseen_appeal"], best, config, by=points)


_CLUSTERED = _FEDAVG | _FEDPROX | _SCAFFOLD | _MWFED | _MAXFL
_TUNED = _FEDAVG | _FEDPROX | _SCAFFOLD | _PERFEDAVG | _MWFED | _MAXFL

REPRODUCTIONS = (
    _item(
        "maxfl-table1",
        Item(_BOTH, _TABLE_1, partial(exceeds, _BOTH)),
        "Table 1: test accuracy and GM-Appeal of seen and unseen clients",
        partition="dirichlet",
        appealing_from=10,
        methods=_FEDAVG | _FEDPROX | _SCAFFOLD | _PERFEDAVG | _QFFL | _MWFED | _MAXFL,
    ),
    _item(
        "maxfl-table2",
        Item(_BOTH, _TABLE_2, _claims(withstands, partial(exceeds, _BOTH))),
        "Table 2: the same with clients that report large losses and send noise",
        partition="dirichlet",
        appealing_from=10,
        byzantine=(0.0, 0.05, 0.1),
        methods=_MWFED | _MAXFL,
    ),
    _item(
        "maxfl-fig3",
        Item(
            ("appeal", "preferred_accuracy"),
            {},
            partial(exceeds, ("appeal", "preferred_accuracy")),
        ),
        "Figure 3: curves without numbers",
        figure=partial(
            plot_rounds,
            panels={
                "GM-Appeal": ("appeal",),
                "preferred-model accuracy": ("preferred_accuracy",),
            },
        ),
        methods=_CLUSTERED,
    ),
    _item(
        "maxfl-fig4",
        Item(
            ("unseen_appeal", "unseen_preferred_accuracy"),
            _FIGURE_4,
            _claims(_unseen_margin, partial(not_below, ("unseen_preferred_accuracy",))),
        ),
        "Figure 4, which is a table: GM-Appeal and preferred-model accuracy of unseen clients",
        methods=_CLUSTERED,
    ),
    _item(
        "maxfl-table3",
        Item(
            ("appeal", "unseen_appeal"),
            _TABLE_3,
            _claims(
                lambda best, config: exceeds(("appeal", "unseen_appeal"), best, config, by=10.0)
            ),
        ),
        "Table 3: GM-Appeal of locally tuned models",
        tuning_steps=5,
        methods=_TUNED,
    ),
    _item(
        "maxfl-table4",
        Item(
            ("appeal", "preferred_accuracy"),
            _TABLE_4,
            _claims(hardly_varies, partial(exceeds, ("appeal",))),
        ),
        "Table 4: GM-Appeal and preferred-model accuracy by steps of warm-up",
        warm_up_steps=(50, 100, 150),
        methods=_FEDAVG | _FEDPROX | _MAXFL,
    ),
    _item(
        "maxfl-table5",
        Item(
            ("preferred_accuracy", "unseen_preferred_accuracy"),
            _TABLE_5,
            partial(not_below, ("preferred_accuracy", "unseen_preferred_accuracy")),
        ),
        "Table 5: preferred-model accuracy with locally tuned models",
        tuning_steps=5,
        methods=_TUNED,
    ),
    _item(
        "maxfl-table6",
        Item(
            ("appeal", "preferred_accuracy"),
            _TABLE_6,
            partial(exceeds, ("appeal", "preferred_accuracy")),
        ),
        "Table 6: GM-Appeal and preferred-model accuracy of q-FFL",
        methods={
            "qFFL, q = 1": {"name": "qffl", "q": 1.0},
            "qFFL, q = 10": {"name": "qffl", "q": 10.0},
            **_MAXFL,
        },
    ),
    _item(
        "maxfl-fig7",
        Item(("accuracy",), {}, nearly_identical),
        "Figure 7: curves without numbers; the rate, the steps and the batches are not given",
        figure=partial(
            plot_rounds,
            panels={
                "mean loss over clients: test (solid), training (dashed)": ("loss", "train_loss")
            },
            scale=1.0,
        ),
        learning_rates=(0.05,),
        local_steps=(30,),
        batch_sizes=(64,),
        record_every=5,
        methods=_FEDAVG | _MAXFL,
    ),
)
"""Tables 1 to 6, Figures 3, 4 and 7."""
