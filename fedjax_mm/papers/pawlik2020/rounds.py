"""Pawlik, section 3.1: how many rounds cohorts of several sizes take to an accuracy."""

from typing import Annotated, Any, Literal, Self

import jax.numpy as jnp
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignment import mfa_rand
from fedjax_mm.base import Scalar
from fedjax_mm.data.partition import Parts, iid_clients, iid_share
from fedjax_mm.experiments.tasks import Count, Flag, Percent, Positive
from fedjax_mm.papers.bhuyan2022.accuracy import verdict
from fedjax_mm.papers.old import Claim, Judgement, Reproduction
from fedjax_mm.papers.pawlik2020.clients import STAND_IN, Trained, dealt, images
from fedjax_mm.results import plots
from fedjax_mm.results.metrics import first_round_below, standard_error
from fedjax_mm.sweeps.execute import Execution, sweep
from fedjax_mm.sweeps.plan import Setup
from fedjax_mm.sweeps.until import Until
from fedjax_mm.tasks.classification import Classification

_SCHEMES = {"iid_share": iid_share, "iid_clients": iid_clients}
Accuracy = Annotated[Positive, Field(lt=1)]


class CohortRounds(Trained):
    """Settings of Figure 1: training until the test accuracy is that of the last target."""

    paper_sizes = (2, 5, 10, 20, 40)
    digits_sizes = (2, 4, 8, 12)

    num_seeds: Annotated[Count, Field(ge=2)] = 3
    scheme: Literal["iid_share", "iid_clients"] = "iid_share"
    """Of what the percentages are IID: of every client's images, or of the clients."""
    percents: Annotated[tuple[Percent, ...], Field(min_length=2)] = (20.0, 60.0, 100.0)
    """The paper has 20, 40, 60, 80, 100."""
    targets: Annotated[tuple[Accuracy, ...], Field(min_length=1)] = (0.9,)
    """The paper has 0.99, and 0.9 in the text."""
    max_rounds: Count = 60
    local_epochs: Count = 10
    batch_size: Count = 10
    stop: Flag = True
    """Whether runs end at their last target, or go on for all rounds."""

    @model_validator(mode="after")
    def _axes_increase(self) -> Self:
        if len(self.percents) < 3:
            raise ValueError(f"percents is {list(self.percents)}; a trend needs 3 or more")
        for name in ("percents", "targets"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)):
                raise ValueError(f"{name} is {list(values)}; they must increase")
        return self

    def deal(self, labels: np.ndarray, seed: int) -> list[Parts]:
        """By the scheme, for every percentage."""
        scheme: Any = _SCHEMES[self.scheme]
        return [scheme(labels, self.clients, percent=p, seed=seed) for p in self.percents]


def run_rounds(config: CohortRounds, execution: Execution | None = None) -> xr.Dataset:
    """Test accuracies until the last target, over ``(C, percent, seed, round)``."""
    pool = config.pool()

    def build(C: int, percent: Scalar, task: Classification, seed_number: Any) -> Setup:
        place = jnp.sum(jnp.asarray(config.percents)[:-1] < percent)
        deal = jnp.asarray(seed_number, int) * len(config.percents) + place
        mine = dealt(task, deal, config.local_epochs * config.batch_size)
        algorithm = fedavg(
            config.learning_rate,
            epochs=config.local_epochs,
            batch_size=config.batch_size,
            weighted=False,
        )
        return Setup(mine, algorithm, mfa_rand(config.clients, 1, cohort_size=C))

    result = sweep(
        build,
        {"C": config.sizes, "percent": list(config.percents)},
        num_rounds=config.max_rounds,
        num_seeds=config.num_seeds,
        seed=config.seed,
        shared={"task": images(pool, config.deals(pool))},
        per_seed={"seed_number": np.arange(config.num_seeds)},
        until=Until("test_accuracy", at_least=config.targets[-1]) if config.stop else None,
        data=pool.kind,
        execution=execution,
    )
    dataset = result[["test_accuracy"]].isel(model=0)
    about = {"config": config.model_dump(mode="json"), "datasets": [pool.name]}
    return dataset.assign_attrs(manifest=result.attrs["manifest"] | about)


def _rounds(dataset: xr.Dataset, config: CohortRounds) -> xr.DataArray:
    """The first round at every target, over ``(target, percent, C, seed)``; NaN if none."""
    accuracy = dataset.test_accuracy.transpose("percent", "C", "seed", "round")
    dims, number = ("percent", "C", "seed"), accuracy.dtype.type  # as runs compare when they end
    found = [
        first_round_below(-accuracy.values, accuracy["round"].values, -number(target))
        for target in config.targets
    ]
    coords = {"target": list(config.targets)} | {dim: accuracy[dim] for dim in dims}
    return xr.DataArray(np.array(found), coords, ("target", *dims))


def judge_rounds(dataset: xr.Dataset, config: CohortRounds) -> Judgement:
    """Whether more clients in a cohort, and more alike clients, need fewer rounds."""
    rounds = _rounds(dataset, config)
    claims = []
    for target in config.targets:
        there = rounds.sel(target=target)
        claims += [
            _falls(there, "C", f"to {100 * target:g} %: larger cohorts need fewer rounds"),
            _falls(there, "percent", f"to {100 * target:g} %: more IID clients need fewer rounds"),
        ]
    header = ("target", "IID", *(f"C = {C}" for C in config.sizes))
    rows = [
        (
            f"{100 * target:g} %",
            f"{percent:g} %",
            *(_text(rounds.sel(target=target, percent=percent, C=C).values) for C in config.sizes),
        )
        for target in config.targets
        for percent in config.percents
    ]
    measured = {
        "rounds": rounds.values,
        "dimensions": ["target", "percent", "C", "seed"],
        "target": rounds.target.values,
        "percent": rounds.percent.values,
        "C": rounds.C.values,
    }
    return Judgement(measured, tuple(claims), (header, *rows))


def _falls(rounds: xr.DataArray, along: str, claim: str) -> Claim:
    """Page's test of each seed's median over the other axis. Never reached is last of all."""
    from scipy.stats import page_trend_test

    (other,) = {"C", "percent"} - {along}
    known = rounds.transpose("seed", along, other).fillna(np.inf).values
    by_seed = np.median(known, axis=2)  # a seed's runs share clients and draws: they are no blocks
    p = page_trend_test(by_seed, predicted_ranks=np.arange(by_seed.shape[1], 0, -1)).pvalue
    medians = ", ".join(
        f"{at:g}: {middle:g}"
        for at, middle in zip(rounds[along].values, np.median(by_seed, axis=0), strict=True)
    )
    return Claim(f"{claim} (p < 0.05)", bool(p < 0.05), f"p = {p:.2g}; medians {medians}")


def _text(rounds: np.ndarray) -> str:
    """Mean and standard error, or how many runs did not get there."""
    missed = int(np.isnan(rounds).sum())
    if missed:
        return f"not reached\nin {missed} of {rounds.size}"
    return f"{rounds.mean():.1f} ± {standard_error(rounds):.1f}"


def plot_rounds(dataset: xr.Dataset, config: CohortRounds, judgement: Judgement) -> Figure:
    """Mean rounds to every target against C, one line for each percentage."""
    rounds = _rounds(dataset, config)
    error = xr.apply_ufunc(lambda x: standard_error(x, axis=-1), rounds, input_core_dims=[["seed"]])
    panels = [f"to {100 * target:g} %" for target in config.targets]
    mean, error = (
        each.assign_coords(target=panels) for each in (rounds.mean("seed", skipna=False), error)
    )
    about = dataset.attrs["manifest"]
    return plots.lines_with_errors(
        mean,
        error,
        x="C",
        series="percent",
        panel="target",
        series_label="{:g} % IID",
        xlabel="clients in a cohort $C$",
        ylabel="rounds",
        title=f"{about['datasets'][0]}, {config.clients} clients, E = {config.local_epochs}, "
        f"B = {config.batch_size}",
        caption=f"Means and standard errors of {config.num_seeds} seeds; no point where a run did "
        f"not get there in {config.max_rounds} rounds. " + verdict(judgement),
    )


REPRODUCTIONS = (
    Reproduction(
        id="cb-fig1",
        paper={
            "figure": "Figure 1: rounds to 99 % against the cohort size, 9 seeds, curves without "
            "numbers; C is 2, 5, 10, 12, ..., 30, 35, 40 and 20 to 100 % are IID",
            "open": [
                STAND_IN,
                "by default the target is 90 %, with 3 percentages and 3 seeds; the figure has 99 "
                "%, 5 percentages and 9 seeds (set targets, percents, num_seeds)",
                "rates differed with the share that is IID; the caption has 0.1",
            ],
        },
        config=CohortRounds(),
        run=run_rounds,
        judge=judge_rounds,
        plot=plot_rounds,
    ),
)
"""Figure 1."""
