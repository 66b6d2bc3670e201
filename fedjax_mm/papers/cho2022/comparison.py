"""Tables of section 5 of Cho et al.: methods at their best points, with published numbers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.claims import Evidence, at_least, more, welch
from fedjax_mm.experiments.overrides import changes
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.cho2022.clients import source_of
from fedjax_mm.papers.cho2022.grid import DIMS, OURS, POINT, Comparison
from fedjax_mm.papers.cho2022.runs import SCORES, best_candidates, run_comparison
from fedjax_mm.papers.figures import dots
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.published import published
from fedjax_mm.papers.rulings import Ruling, ruling, untested
from fedjax_mm.papers.schema import Check, Reading, Table, published_statements
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.results.labels import places

_METRICS = {
    "accuracy": "test accuracy",
    "appeal": "GM-Appeal",
    "preferred_accuracy": "preferred-model accuracy",
}
_LEVELS = {
    "test accuracy, seen": ("accuracy", 100.0, ".1f"),
    "test loss, seen": ("loss", 1.0, ".2f"),
}
"""Metrics of the same models, shown where a table's own metrics hide how good the models are."""

BOTH = ("accuracy", "appeal", "unseen_accuracy", "unseen_appeal")
"""Metrics of both kinds of clients."""

BY_ACCURACY = "points by test accuracy, as the paper says, on the selection seed alone"
EQUAL = 0.1
"""Preferred-model accuracies that are less than this many points apart count as equal."""

_PRINTED = {"published": "values", "published spread": "spreads"}  # tables of `published.toml`
_RUNS = 3  # runs behind each printed mean and standard deviation
_MARGIN = dict(zip(_METRICS.values(), (5.0, 5.0, 0.5), strict=True))  # points
_UNIT = dict(zip(_METRICS.values(), (0.01, 1.0, 0.01), strict=True))  # points of the last digit
_RULES = {"accuracy": "test accuracy, as the paper says", "appeal": "GM-Appeal"}
_PARTITIONS = {
    "dirichlet": "each client's labels by Dirichlet's law",
    "dirichlet_labels": "each label by Dirichlet's law",
    "clusters": "five clusters of neighbouring labels",
    "shuffled_clusters": "five clusters of random labels",
}

_WHO_STAYS = "Willing clients, once clients may drop out: means over records and seeds"
_POOLS = {
    "clients in the pool": "pool",
    "flipped among them, %": "flipped in the pool",
    "flipped share of MaxFL's weights, %": "flipped in the weights",
}

Rules: TypeAlias = Callable[[xr.Dataset, Comparison], Iterable[Ruling | Check | Reading]]
"""Judges a table's statements, given the measured numbers and the settings."""

_PROTOCOL = {
    *("partition", "redraws", "flips", "flipped", "participation", "appealing_from"),
    "requirement",
    *("num_clients", "num_unseen", "cohort_size", "num_rounds", "dropout_rate"),
    *("byzantine", "loss_factor", "noise", "attackers_stay", "tuning_steps", "tuned_weights"),
}
"""Settings that the statements depend on, as opposed to grids, seeds and data."""


def item(
    id: str,
    settings: Comparison,
    metrics: Sequence[str],
    rules: Rules = lambda measured, settings: (),
    **others: Any,
) -> Item:
    """An item that compares methods at their best points.

    Args:
      id: the item's id.
      settings: the default settings.
      metrics: metrics of the seen clients and, prefixed by "unseen_", of the others, in the order
        of the published numbers.
      rules: yields a ruling on every statement, and checks. By default it yields nothing.
      **others: replacements for `run_comparison` as `run`, and for this module's `measure`,
        `table` and `figure`.
    """
    functions: dict[str, Any] = {"measure": partial(measure, id=id, metrics=metrics)}
    functions |= {"judge": partial(_judge, id=id, rules=rules, default=settings)}
    functions |= {"run": run_comparison, "table": table, "figure": figure} | others
    return Item(id, settings, **functions)


def judged(result: xr.Dataset) -> xr.Dataset:
    """Drops the selection runs, leaving ``(algorithm, *DIMS, seed, round)``."""
    return result.drop_dims(["candidate", "selection_seed"], errors="ignore").rename(DIMS)


def in_percent(best: xr.Dataset, metrics: Sequence[str]) -> xr.DataArray:
    """Metrics of the best points in percent, ``(metric, algorithm, ..., seed, round)``."""
    titles = [
        f"{_METRICS[name.removeprefix('unseen_')]}, {'un' * name.startswith('unseen_')}seen"
        for name in metrics
    ]
    return 100 * xr.concat([best[name] for name in metrics], xr.IndexVariable("metric", titles))


def measure(
    result: xr.Dataset, settings: Comparison, *, id: str, metrics: Sequence[str]
) -> xr.Dataset:
    """The final metrics, over ``(metric, algorithm, *DIMS)``."""
    records = judged(result)
    best = records.isel(round=-1, drop=True)
    percent = in_percent(best, metrics)
    # Keep NaN, because the mean would look better without a diverged seed.
    mean = percent.mean("seed", skipna=False)
    printed = [published(id).get(key, {}).get(settings.dataset, {}) for key in _PRINTED.values()]
    numbers = [
        [row.get(name, [np.nan] * len(metrics)) for name in names_of(mean)] for row in printed
    ]
    return xr.Dataset(
        {
            "percent": percent,
            "mean": mean,
            "standard error": estimate(percent).error,
            **{
                name: mean.copy(data=np.transpose(each).reshape(mean.shape))
                for name, each in zip(_PRINTED, numbers, strict=True)
            },
            "skipped rounds": best["idle_rounds"],
            "diverged": (best["diverged"] >= 0).any("seed"),
            "diverged runs": (best["diverged"] >= 0).sum(),
            "grid points of a variant": settings.num_points,
            "largest difference": difference_of_losses(records),
            **_pools(records, settings),
            **(_by_rule(result) if settings.chosen_by == "appeal" else {}),
            **{
                title: factor * best[name]
                for title, (name, factor, _) in _LEVELS.items()
                if title not in percent["metric"].values
            },
        }
    )


def _by_rule(result: xr.Dataset) -> dict[str, xr.DataArray]:
    """The points and scores by both rules of selection, on the selection seeds.

    The result is empty if the search is not stored.
    """
    if "candidate" not in result.dims:
        return {}
    names = {f"selection_{name}": name for name in SCORES}
    each = [best_candidates(result[[*names]], rule) for rule in _RULES]
    index = xr.IndexVariable("rule", [*_RULES])
    best = xr.concat(each, index, data_vars="all", coords="all").rename(names)
    point = [best[f"candidate_{key}"] for key in POINT]
    text = xr.apply_ufunc(_text, *point, False, vectorize=True, output_dtypes=[object])
    chosen = in_percent(best.reset_coords(drop=True), SCORES).rename(metric="score")
    chosen = chosen.transpose("score", "selection_seed", ...)
    return {"selected": chosen, "selected point": text.reset_coords(drop=True)}


def selected(measured: xr.Dataset, rule: str) -> xr.Dataset | None:
    """The scores on the selection seeds of the points that a rule chooses, if stored."""
    if "selected" not in measured:
        return None
    scores = (
        measured["selected"].sel(rule=rule, drop=True).rename(selection_seed="seed", score="metric")
    )
    names = {dim: [measured[dim].values[0]] for dim in DIMS.values()}
    return xr.Dataset({"percent": scores.expand_dims(names)})


def difference_of_losses(records: xr.Dataset) -> xr.DataArray:
    """How far test and training loss are apart, in percent of the larger, at most.

    Both are means over the seen clients.
    """
    both = records[["loss", "train_loss"]].to_array("examples")
    share = abs(both.diff("examples")) / both.max("examples", skipna=False)
    largest: xr.DataArray = 100 * share.max(("examples", "round"), skipna=False)
    return largest


def _pools(records: xr.Dataset, settings: Comparison) -> dict[str, xr.DataArray]:
    """Pool statistics, averaged over the records of rounds in which clients may leave.

    These are the number of clients in the pool, and the flipped clients' percentages of the pool
    and of its MaxFL weights, ``q_k`` of eq. (4). Percentages are NaN if the pool was always empty.
    """
    first = settings.appealing_from
    if first is None or first > settings.num_rounds:
        return {}
    mean = records.sel(round=slice(first, None)).mean("round", skipna=False)
    pool, weight = (mean[name].where(mean[name] > 0) for name in ("available", "weight"))
    return {
        "pool": settings.population.num_clients * mean["available"],
        "flipped in the pool": 100 * mean["available_flipped"] / pool,
        "flipped in the weights": 100 * mean["weight_flipped"] / weight,
    }


def unattacked(values: Any) -> Any:
    """Selects the values without attackers and with the first warm-up."""
    return values.isel(dict.fromkeys(DIMS.values(), 0), drop=True)


def squeezed(values: Any) -> Any:
    """Drops dimensions of size one, except for the methods."""
    # Most tables have no attackers and a single warm-up, so those columns would be constant.
    alone = [dim for dim in DIMS.values() if values.sizes[dim] == 1]
    return values.squeeze(alone, drop=True)


def names_of(values: xr.DataArray) -> list[str]:
    """The row names of a table, such as "MaxFL, attackers = 0.05"."""
    return _names(squeezed(values))


def _names(short: xr.DataArray) -> list[str]:
    one = short.isel(metric=0)
    return [", ".join(words) for _, words in places(one, *map(str, one.dims))]


def lead(measured: xr.Dataset, others: Sequence[str], *metrics: str) -> xr.DataArray:
    """MaxFL's lead over other methods in points, ``(metric, algorithm, ..., seed)``.

    A missing method or metric gives NaN, so that statements about it are left untested.
    """
    percent = squeezed(measured["percent"]).reindex(metric=list(metrics))
    ours = percent.reindex(algorithm=[OURS]).isel(algorithm=0, drop=True)
    return ours - percent.reindex(algorithm=list(others))


def preferred(
    measured: xr.Dataset, others: Sequence[str], metric: str, *, or_same: bool = False
) -> list[Evidence]:
    """Tests that MaxFL's preferred-model accuracy is higher than others', or at least as high.

    Accuracies less than `EQUAL` points apart count as equal. If those of all methods are, no method
    could fail, and nothing is tested.
    """
    ahead = lead(measured, others, metric)
    tests = at_least(ahead, -EQUAL, form=".3f") if or_same else more(ahead, form=".3f")
    means = squeezed(measured["percent"]).reindex(metric=[metric], algorithm=[OURS, *others])
    means = means.mean("seed", skipna=False)
    apart = (means.max("algorithm", skipna=False) - means.min("algorithm", skipna=False)).max()
    if not apart < EQUAL:
        return tests
    why = f"the methods are {apart.item():.2f} points apart, where {EQUAL:g} would count"
    return [
        each._replace(text=f"{each.text}: {why}", supports=np.nan, contradicts=np.nan)
        for each in tests
    ]


def concordance(one: xr.DataArray, other: xr.DataArray, along: str) -> xr.DataArray:
    """Kendall's rank correlation (tau-a) along a dimension, counting ties as 0.

    Example:
      >>> appeal, accuracy = (xr.DataArray(x, dims="algorithm") for x in ([1, 2, 3], [5, 9, 7]))
      >>> round(concordance(appeal, accuracy, "algorithm").item(), 3)
      0.333
    """

    def signs(values: xr.DataArray) -> xr.DataArray:
        # Drop the coordinates, because xarray would align on them and compare values to themselves.
        plain = values.drop_vars(along, errors="ignore")
        another = plain - plain.rename({along: "another"})
        return another.copy(data=np.sign(another.values))

    size = one.sizes[along]
    agreeing = (signs(one) * signs(other)).sum((along, "another"), skipna=False)
    found: xr.DataArray = agreeing / (size * (size - 1))
    return found


def _judge(
    measured: xr.Dataset, settings: Comparison, *, id: str, rules: Rules, default: Comparison
) -> Iterator[Ruling | Check | Reading]:
    """Yields rulings and checks, marked untested if the item's protocol was changed."""
    given, usual = (each.model_dump(mode="json", include=_PROTOCOL) for each in (settings, default))
    changed = [f"{key} unset" for key in given if given[key] is None and usual[key] is not None]
    changed += changes(given, usual)
    for found in (*rules(measured, settings), *_printed(measured, id)):
        # Comparisons among published numbers have no seeds and depend on no settings.
        is_measured = isinstance(found, Ruling) and (
            not found.parts or any(part.seeds for part in found.parts)
        )
        if changed and isinstance(found, Ruling) and is_measured:
            yield untested(found.key, f"the protocol was changed: {', '.join(changed)}")
        elif not (changed and isinstance(found, Reading)):
            yield found


def _printed(measured: xr.Dataset, id: str) -> Iterator[Ruling]:
    """Compares the printed means with ours, given their printed standard deviations."""
    if not published_statements(published(id), "numbers"):
        return
    short = squeezed(measured[["percent", "published", "published spread"]])
    kinds = [str(metric) for metric in short["metric"].values]
    units = xr.DataArray([_UNIT[_kind(metric)] for metric in kinds], {"metric": kinds})
    margins = xr.DataArray([_MARGIN[_kind(metric)] for metric in kinds], {"metric": kinds})
    # A printed deviation of 0.0 is smaller than the last digit, whose rounding has this deviation.
    spread = np.maximum(short["published spread"], units / np.sqrt(12))
    tests = welch(short["percent"], short["published"], spread, _RUNS, margins, ".2f")
    yield ruling("printed", tests, is_shared=False)


def _kind(metric: str) -> str:
    return metric.rpartition(",")[0]


def table(measured: xr.Dataset, settings: Comparison) -> Sequence[Table]:
    """One row per method, number of attackers and length of the warm-up."""
    short = squeezed(measured)
    texts = cells(short["mean"], short["standard error"], short["published"], ".1f", "none")
    middle = short["percent"].median("seed")
    is_apart = abs(middle - short["mean"]) > 1.01 * short["standard error"]  # as in the evidence
    texts = texts + xr.where(is_apart, "\nmedian " + cells(middle, form=".1f"), "")
    point = [short[name] for name in (*POINT, "diverged")]
    contents = columns(texts, "metric") | {
        "chosen point": xr.apply_ufunc(_text, *point, vectorize=True, output_dtypes=[object]),
        "skipped rounds": cells(short["skipped rounds"].mean("seed"), form=".0f"),
    }
    for title, (_, _, form) in _LEVELS.items():
        if title in short:
            contents[title] = cells(*estimate(short[title]), form=form)
    over = tuple(map(str, short["diverged"].dims))
    pools = [rows(_pool_columns(short), over, _WHO_STAYS)] if "pool" in short else []
    return [rows(contents, over), *pools, *_both_rules(measured)]


def _both_rules(measured: xr.Dataset) -> Iterator[Table]:
    """Yields one row per method and rule of selection, if the search is stored."""
    if "selected" in measured:
        seeds = measured["selected"].sizes["selection_seed"]
        short = measured[["selected", "selected point"]].assign_coords(rule=[*_RULES.values()])
        short = short.dropna("algorithm", how="all", subset=["selected"])  # at given points
        texts = cells(short["selected"].mean("selection_seed"), form=".1f")
        contents = columns(texts, "score") | {"point": short["selected point"]}
        title = f"Points by both rules of selection, on {seeds} selection seed" + "s" * (seeds > 1)
        yield rows(contents, ("algorithm", "rule"), title)


def _pool_columns(short: xr.Dataset) -> dict[str, xr.DataArray]:
    """Means over the seeds whose pool is not empty."""
    found = {}
    for title, name in _POOLS.items():
        error = estimate(short[name]).error
        found[title] = cells(short[name].mean("seed"), error, form=".1f", missing="empty")
    return found


def _text(variant: str, learning_rate: float, local_steps: int, batch_size: int, bad: bool) -> str:
    own = variant.partition(" (")[2].removesuffix(")")
    settings = [f"lr {learning_rate:g}", f"tau {local_steps}", f"B {batch_size}", own]
    return ", ".join(filter(None, [*settings, "diverged" * bad]))


def figure(result: xr.Dataset, measured: xr.Dataset, settings: Comparison) -> Figure:
    """Draws one panel per kind of metric, for seen and unseen clients, with published values.

    Seeds are drawn as points, because accuracies and appeals often have two modes.
    """
    short = squeezed(measured[["mean", "standard error", "published", "percent"]])
    kinds, who = zip(*(metric.split(", ") for metric in short["metric"].values), strict=True)
    axes = {
        "kind": list(dict.fromkeys(kinds)),
        "name": _names(short["mean"]),
        "series": [f"{x}{y}" for x in dict.fromkeys(who) for y in (" clients", ", published")],
    }
    mean, error = (xr.DataArray(np.nan, axes, tuple(axes)) for _ in range(2))
    runs = mean.expand_dims(seed=short["seed"].values, axis=-1).copy()
    for kind, clients, metric in zip(kinds, who, short["metric"].values, strict=True):
        here, at = short.sel(metric=metric), {"kind": kind, "series": f"{clients} clients"}
        mean.loc[at], error.loc[at] = (here[x].values.ravel() for x in ("mean", "standard error"))
        mean.loc[{"kind": kind, "series": f"{clients}, published"}] = here.published.values.ravel()
        runs.loc[at] = here["percent"].transpose(..., "seed").values.reshape(len(axes["name"]), -1)
    mean = mean.dropna("series", how="all")
    words = _words(settings)
    words["caption"] = f"One faint point for each seed. {words['caption']}"
    return dots(mean, error.reindex_like(mean), runs, xlabel="percent", **words)


def draw(panels: Sequence[Sequence[plots.Panel]], settings: Comparison) -> Figure:
    """Draws rows of panels with a title and a caption."""
    return plots.draw(panels, **_words(settings))


def _words(settings: Comparison) -> dict[str, Any]:
    """A figure's title, and a caption that explains how the numbers were computed."""
    who = settings.population
    source = source_of(settings.dataset, settings.directory)
    standing = f" standing in for {settings.dataset}" * (source != settings.dataset)
    invented = " (invented tweets)" * (source == "sent140" and settings.directory is None)
    leaving, chosen = "", "at given settings"
    if settings.appealing_from:
        leaving = f", clients that may leave from round {settings.appealing_from} on,"
    if settings.selecting.methods:
        given = f" ({', '.join(settings.points)} at a given one)" * bool(settings.points)
        chosen = f"at the best of {settings.num_points} points by {settings.chosen_by}{given}"
    flips = "training " * (settings.flips == "training") + "labels flipped"
    tuned = f" and {settings.tuning_steps} steps of tuning" * (settings.tuning_steps > 0)
    return {
        "title": f"{source}{standing}{invented}, {who.num_clients} seen and {who.num_unseen} "
        f"unseen clients, {who.cohort_size} a round, T = {settings.num_rounds}",
        "caption": f"Means and standard errors of {settings.num_seeds} seeds, each method {chosen}"
        f"{tuned}, with {_PARTITIONS[settings.partition]}{leaving} and {flips} for "
        f"{settings.flipped:.0%} of clients.",
    }
