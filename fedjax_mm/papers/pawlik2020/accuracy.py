"""Pawlik, section 3.2: the best accuracy of cohorts of several sizes at constant cost."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignment import mfa_rand
from fedjax_mm.data.partition import Parts
from fedjax_mm.experiments.tasks import Count, IIDShare, PartitionConfig
from fedjax_mm.papers.bhuyan2022.accuracy import verdict
from fedjax_mm.papers.old import Claim, Judgement, Reproduction
from fedjax_mm.papers.pawlik2020.clients import STAND_IN, Trained, dealt, images
from fedjax_mm.papers.pawlik2020.costs import check_sizes
from fedjax_mm.results import plots
from fedjax_mm.results.metrics import standard_error
from fedjax_mm.sweeps.execute import Execution, sweep
from fedjax_mm.sweeps.plan import Setup
from fedjax_mm.sweeps.until import Until
from fedjax_mm.tasks.classification import Classification

_EVALUATIONS: Mapping[str, str] = {
    "all images": "test_accuracy",
    "as-published": "published_accuracy",
}
_PUBLISHED: Mapping[int, Mapping[int, float]] = {  # mean best accuracies of 100 seeds, by c and C
    60: {5: 0.722, 10: 0.714, 15: 0.723, 20: 0.704, 30: 0.696},
    120: {5: 0.982, 10: 0.984, 15: 0.978, 20: 0.981, 30: 0.964},
}


class CohortAccuracy(Trained):
    """Settings of Figures 2 and 3: R = c / C rounds and batches of B = u / C images."""

    paper_sizes = (5, 10, 15, 20, 30)
    digits_sizes = (2, 4, 6, 8, 12)

    num_seeds: Annotated[Count, Field(ge=2)] = 10
    contacts: Count | None = None
    """c = R C: 60, or 120 with doubled round limits; 240 with the digits, whose clients are few."""
    updates: Count | None = None
    """B C: 300; 120 with the digits."""
    local_epochs: Count = 1
    partition: PartitionConfig = IIDShare(name="iid_share", percent=80.0)
    evaluation: Literal["all images", "as-published"] = "all images"
    """What is judged: as published, E mini-batches of B test images are scored each round."""

    @model_validator(mode="after")
    def _rounds_and_batches_are_whole(self) -> Self:
        check_sizes(self.sizes, contacts=self.cost("contacts"), updates=self.cost("updates"))
        return self

    def deal(self, labels: np.ndarray, seed: int) -> list[Parts]:
        """By the partition."""
        return [self.partition.deal(labels, self.clients, seed)]

    def cost(self, name: str) -> int:
        """The contacts, or the updates."""
        default = {"contacts": (240, 60), "updates": (120, 300)}[name][self.directory is not None]
        return getattr(self, name) or default

    @property
    def published(self) -> Mapping[int, float]:
        """The author's mean best accuracies by C, where these are the author's trials."""
        default = CohortAccuracy()
        same = all(
            getattr(self, name) == getattr(default, name)
            for name in ("learning_rate", "local_epochs", "partition")
        )
        same &= self.directory is not None and (self.clients, self.cost("updates")) == (100, 300)
        known = _PUBLISHED.get(self.cost("contacts"), {}) if same else {}
        return {C: known[C] for C in self.sizes if C in known}


def run_accuracy(config: CohortAccuracy, execution: Execution | None = None) -> xr.Dataset:
    """Accuracies after every round, scored in both ways, over ``(C, seed, round)``."""
    pool, sizes = config.pool(), config.sizes

    def build(C: int, task: Classification, deal: Any) -> Setup:
        batch_size = config.cost("updates") // C
        mine = dealt(task, deal, config.local_epochs * batch_size)
        algorithm = fedavg(
            config.learning_rate,
            epochs=config.local_epochs,
            batch_size=batch_size,
            weighted=False,
        )
        return Setup(mine, algorithm, mfa_rand(config.clients, 1, cohort_size=C))

    contacts = config.cost("contacts")
    result = sweep(
        build,
        {"C": sizes},
        num_rounds=contacts // sizes[0],
        num_seeds=config.num_seeds,
        seed=config.seed,
        shared={"task": images(pool, config.deals(pool))},
        per_seed={"deal": np.arange(config.num_seeds)},
        until=Until("client_updates", at_least=contacts),
        data=pool.kind,
        execution=execution,
    )
    dataset = result[list(_EVALUATIONS.values())].isel(model=0)
    about = {"config": config.model_dump(mode="json"), "datasets": [pool.name]}
    return dataset.assign_attrs(manifest=result.attrs["manifest"] | about)


def _best(dataset: xr.Dataset) -> xr.DataArray:
    """The best accuracy after any round, over ``(evaluation, C, seed)``."""
    best = dataset.sel(round=slice(1, None)).max("round")
    each = [best[name].astype(float) for name in _EVALUATIONS.values()]
    along = xr.IndexVariable("evaluation", list(_EVALUATIONS))
    return xr.concat(each, along).transpose("evaluation", "C", "seed")


def judge_accuracy(dataset: xr.Dataset, config: CohortAccuracy) -> Judgement:
    """Whether accuracy has a trend over cohort sizes, and what the author's evaluation does."""
    best, published = _best(dataset), config.published
    sizes, scored = best.C.values, config.local_epochs * (config.cost("updates") // best.C.values)
    claims = [_no_trend(best.sel(evaluation=config.evaluation))]
    distinct = {
        name: np.array([len(np.unique(best.sel(evaluation=name, C=C))) for C in sizes])
        for name in _EVALUATIONS
    }
    values = "; ".join(
        f"C = {C}: {few} of at most {most + 1}, {many} where all images are scored"
        for C, few, most, many in zip(
            sizes, distinct["as-published"], scored, distinct["all images"], strict=True
        )
    )
    claims.append(
        Claim(
            "best accuracies fall into groups because the author scored E B test images a round "
            "(as published fewer values than on all images, at most E B + 1)",
            bool(
                (distinct["as-published"] <= scored + 1).all()
                and distinct["as-published"].sum() < distinct["all images"].sum()
            ),
            f"distinct values in {config.num_seeds} seeds: {values}",
        )
    )
    mean, error, spread = (
        np.array([[measure(row) for row in each] for each in best.values])
        for measure in (np.mean, standard_error, _spread)
    )
    if published and config.cost("contacts") == 60:  # the spread of the others is not told
        claims.append(_as_published(sizes, mean[1], error[1], published))
    header = ("C", "R", "B", *(f"{name}: mean, sd" for name in _EVALUATIONS), "distinct")
    header += ("published mean",) * bool(published)
    rows = [
        (
            str(C),
            str(config.cost("contacts") // C),
            str(config.cost("updates") // C),
            *(f"{mean[e, i]:.3f} ± {error[e, i]:.3f}, {spread[e, i]:.3f}" for e in (0, 1)),
            f"{distinct['all images'][i]}, {distinct['as-published'][i]}",
            *((f"{published[C]:.3f}" if C in published else "",) if published else ()),
        )
        for i, C in enumerate(sizes)
    ]
    measured = {
        name: {
            "best": best.sel(evaluation=name).values,
            "mean": mean[e],
            "standard_error": error[e],
            "standard_deviation": spread[e],
            "distinct": distinct[name],
        }
        for e, name in enumerate(_EVALUATIONS)
    }
    return Judgement({"C": sizes} | measured, tuple(claims), (header, *rows))


def _spread(values: np.ndarray) -> float:
    return float(np.std(values, ddof=1))


def _no_trend(best: xr.DataArray) -> Claim:
    """Page's test of an order of the sizes, seeds being blocks, in both directions."""
    from scipy.stats import page_trend_test

    by_seed = best.transpose("seed", "C").values
    sizes = best.C.values
    ranks = np.arange(1, len(sizes) + 1)
    p = min(
        1.0,
        2 * min(page_trend_test(by_seed, predicted_ranks=r).pvalue for r in (ranks, ranks[::-1])),
    )
    slopes = 100 * np.polyfit(np.log2(sizes), by_seed.T, 1)[0]
    means = 100 * by_seed.mean(0)
    return Claim(
        "at constant cost the cohort size does not matter: best accuracy has no trend (p >= 0.05)",
        bool(p >= 0.05),
        f"Page's test in both directions p = {p:.2g}; {slopes.mean():+.2f} ± "
        f"{standard_error(slopes):.2f} points for twice the cohort; means {means.min():.1f} to "
        f"{means.max():.1f} percent",
    )


def _as_published(
    sizes: np.ndarray, mean: np.ndarray, error: np.ndarray, published: Mapping[int, float]
) -> Claim:
    """The means, scored as published, beside the author's of standard errors up to 0.17 / 10."""
    known = np.isin(sizes, list(published))
    theirs = np.array([published[int(C)] for C in sizes[known]])
    away = (mean[known] - theirs) / np.hypot(error[known], 0.017)
    return Claim(
        "mean best accuracies, scored as published, are the author's (within 4 standard errors)",
        bool((np.abs(away) <= 4).all()),
        ", ".join(
            f"C = {C}: {ours:.3f} and {there:.3f}"
            for C, ours, there in zip(sizes[known], mean[known], theirs, strict=True)
        ),
    )


def plot_all(dataset: xr.Dataset, config: CohortAccuracy, judgement: Judgement) -> Figure:
    """Figure 2: the best accuracy of every run, scored in both ways."""
    return plots.runs_by_size(
        _best(dataset),
        panel="evaluation",
        xlabel="clients in a cohort $C$",
        ylabel="best test accuracy",
        title=_title(dataset, config),
        caption=f"{config.num_seeds} runs of each size, one point each, and their means. "
        + verdict(judgement),
    )


def plot_means(dataset: xr.Dataset, config: CohortAccuracy, judgement: Judgement) -> Figure:
    """Figure 3: the mean of the best accuracies, with standard deviations, as the author has it."""
    best = _best(dataset)
    mean, spread = best.mean("seed"), best.std("seed", ddof=1)
    if config.published:
        author = [config.published.get(int(C), np.nan) for C in best.C.values]
        mean = xr.concat(
            [mean, xr.DataArray([author], {"evaluation": ["published"], "C": best.C})], "evaluation"
        )
        spread = spread.reindex(evaluation=mean.evaluation)
    return plots.lines_with_errors(
        mean.expand_dims(panel=["mean of the best accuracies"]),
        spread.expand_dims(panel=["mean of the best accuracies"]),
        x="C",
        series="evaluation",
        panel="panel",
        series_label="{}",
        xlabel="clients in a cohort $C$",
        ylabel="best test accuracy",
        title=_title(dataset, config),
        caption=f"Means and standard deviations of {config.num_seeds} seeds. " + verdict(judgement),
    )


def _title(dataset: xr.Dataset, config: CohortAccuracy) -> str:
    about = dataset.attrs["manifest"]
    return f"{about['datasets'][0]}, {config.clients} clients, R C = {config.cost('contacts')}"


def _figure(number: int, plot: Any) -> Reproduction:
    return Reproduction(
        id=f"cb-fig{number}",
        paper={
            "mean best accuracy of 100 seeds by R C and C": {
                str(contacts): {str(C): value for C, value in of_size.items()}
                for contacts, of_size in _PUBLISHED.items()
            },
            "standard deviation": "0.11 to 0.17 where R C = 60",
            "open": [
                STAND_IN,
                "the author scored E mini-batches of B test images a round (evaluation = "
                "as-published), which the paper does not say",
            ],
        },
        config=CohortAccuracy(),
        run=run_accuracy,
        judge=judge_accuracy,
        plot=plot,
    )


REPRODUCTIONS = (_figure(2, plot_all), _figure(3, plot_means))
"""Figures 2 and 3."""
