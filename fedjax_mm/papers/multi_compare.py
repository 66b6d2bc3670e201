"""Methods of many models on the same problems, a comparison that is not part of any paper.

The methods are those in `multi_methods`; `multi-jct` compares schedulers, for models that finish.

On each problem, methods are compared at the same number of local trainings, which is the smallest
number that any run of any method reached. All methods train K clients per round, exactly or on
average, except the bandit with Pareto sets, which trains fewer and runs four times as many rounds.
In GVR and StaleVR all clients train all models before the draw, but only the drawn clients count.

Each method has its own learning rate on each problem, and FedAST has its own server rate as well.
Rates are chosen from a grid on separate *selection seeds*, because the best of several rates looks
better than it is on the seeds that chose it.

All methods share a clock, with the same distribution of the duration of a local training. A round
lasts until its slowest client has finished. In GVR the training of all clients before the draw
takes no time. A client with two processors trains two models at the same time, and K / 2 clients
train. FedAST has no rounds. It keeps K jobs in progress, and K arrivals are recorded as a
round. As published it does not weight clients, so it minimizes a different mean than the other
methods. In this comparison, it weights clients like the other methods.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import ValidationInfo, model_validator

from fedjax_mm.data.federated import FederatedData
from fedjax_mm.data.idx import check_idx
from fedjax_mm.experiments.fields import Count, Positive
from fedjax_mm.local import local_sgd
from fedjax_mm.metrics import estimate
from fedjax_mm.papers import selection
from fedjax_mm.papers.figures import dots
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.multi_methods import METHODS
from fedjax_mm.papers.multi_problems import FILES, Digits, Images, Synthetic
from fedjax_mm.papers.rulings import compare
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.training import Make, described, stages, train
from fedjax_mm.papers.values import Several
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup

_MARGIN = 1.0  # the smallest difference of interest, in percentage points
_LAST = np.linspace(0.8, 1, 5)  # shares of the trainings at which accuracies are averaged
_FAST = ("FedAST", "BODS")  # methods designed to be fast in simulated time
_BASE = "MFA-Rand"
_RATES = ("learning_rate", "server_rate")
_KEPT = ("test_accuracy", "time", "client_updates", "diverged")

ProblemName = Literal["synthetic", "digits", "images"]
Rates = Several[Positive]


class MultiCompare(selection.Selecting):
    """The problems, methods, candidate learning rates, and run lengths of the comparison."""

    problems: Several[ProblemName] = (*("synthetic", "digits", "images"),)
    """The problems. The problem "images" is skipped if no directory is given."""
    methods: Several[str] = tuple(METHODS)
    synthetic: Synthetic = Synthetic()
    digits: Digits = Digits()
    images: Images = Images()
    learning_rates: Rates = (0.02, 0.06, 0.2, 0.6)
    server_rates: Rates = (1.0, 0.5, 0.25)
    """The candidates for eta_g in FedAST."""
    num_rounds: Count = 120
    num_seeds: Count = 12
    record_every: Count = 10
    directory: Path | None = None
    """The directory of MNIST and Fashion-MNIST, either in subdirectories or together."""

    def check_files(self) -> None:
        """See `WithFiles`."""
        if "images" in self.chosen:
            for name in FILES:
                check_idx(str(self.directory), dataset=name)

    @model_validator(mode="after")
    def _settings_fit(self, info: ValidationInfo) -> Self:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise ValueError(f"methods has {unknown[0]!r}; choose from {', '.join(METHODS)}")
        if not self.chosen:
            raise ValueError("problems has images alone, which are in files; give --data DIR")
        for problem in self.chosen.values():
            for name in self.methods:
                METHODS[name].assign(problem.sizes(len(problem.models), self.num_rounds))
        return self.with_files(info)

    @property
    def chosen(self) -> "dict[str, Synthetic | Digits | Images]":
        """The problems with available data, by name."""
        known: dict[str, Synthetic | Digits | Images]
        known = {"synthetic": self.synthetic, "digits": self.digits, "images": self.images}
        there = [name for name in self.problems if name != "images" or self.directory is not None]
        return {name: known[name] for name in there}

    @property
    def selecting(self) -> Self:
        """The settings of the runs that choose rates, which use different draws."""
        others = self.model_copy(update={"seed": self.seed ^ 2**31})
        return others.with_seeds(0, self.selection_seeds)

    @property
    def alone(self) -> dict[tuple[str, str], Self]:
        """The settings of each method on each problem, where only some have a server rate."""
        return {
            (problem, name): self.model_copy(
                update={"problems": (problem,), "methods": (name,)}
                | ({} if METHODS[name].has_server_rate else {"server_rates": (1.0,)})
            )
            for problem in self.chosen
            for name in self.methods
        }

    def build(
        self,
        problem: str,
        algorithm: str,
        learning_rate: float,
        server_rate: float,
        data: Sequence[FederatedData],
        seed: int,
    ) -> Setup:
        """Sets up the simulation of one point of the grid."""
        here, way = self.chosen[problem], METHODS[algorithm]
        tasks = here.tasks([stack.select(seed - self.first_seed) for stack in data])
        local = local_sgd(learning_rate, steps=here.local_steps, batch_size=here.batch_size)
        own = {"server_rate": server_rate} if way.has_server_rate else {}
        trained = way.algorithm(local, **own)
        return Setup(tasks, trained, way.assign(here.sizes(len(tasks), self.num_rounds)))


def run(config: MultiCompare, execution: Execution | None = None) -> xr.Dataset:
    """Runs every method at its rates on every problem, with one draw of the data per seed.

    `selection_accuracy` holds the accuracies that chose the rates, by problem, method and rates.
    """
    how = execution or Execution()

    def search(grid: Any, saving: Execution) -> xr.Dataset:
        return _joined(stages("grid", grid.alone, saving, _trainer(grid)))

    found = selection.searched(config.selecting, how, search)
    accuracy = _at_budget(found, config).sel(score="mean", drop=True)
    best = accuracy.isel(selection.best_point(accuracy, _RATES))

    def at_best(problem: str, name: str) -> dict[str, Any]:
        here = best.sel(problem=problem, algorithm=name)
        return {f"{rate}s": (here[rate].item(),) for rate in _RATES}

    points = {pair: one.model_copy(update=at_best(*pair)) for pair, one in config.alone.items()}
    parts = stages("judged", points, how, _trainer(config))
    only = dict.fromkeys(_RATES, 0)
    judged = _joined({pair: part.isel(only, drop=True) for pair, part in parts.items()})
    added = {f"chosen_{name}": best[name].drop_vars(_RATES) for name in _RATES}
    added["selection_accuracy"] = accuracy.rename(seed="selection_seed")
    return described(judged.assign(added), [judged, found])


def _trainer(config: MultiCompare) -> Make:
    """Runs one method on one problem at all rates of its settings, which share draws of data."""
    drawn = functools.cache(
        lambda problem: config.chosen[problem].data(config.data_seeds, config.directory)
    )

    def make(alone: Any, saving: Execution) -> xr.Dataset:
        (problem,), (name,) = alone.problems, alone.methods
        data, rounds = drawn(problem), METHODS[name].rounds
        part = train(
            data,
            functools.partial(config.build, data=data),
            {"problem": [problem], "algorithm": [name]}
            | {rate: getattr(alone, f"{rate}s") for rate in _RATES},
            config,
            saving,
            num_rounds=config.num_rounds * rounds,
            record_every=config.record_every * rounds,
        )
        # Relabel the records of a longer run with the round numbers of the other runs.
        return part[list(_KEPT)].assign_coords(round=part["round"] // rounds)

    return make


def _joined(parts: Mapping[tuple[str, str], xr.Dataset]) -> xr.Dataset:
    """Joins the parts of all methods on all problems."""
    problems, methods = (dict.fromkeys(names) for names in zip(*parts, strict=True))
    how: dict[str, Any] = {"join": "outer", "combine_attrs": "override"}
    by_problem = [
        xr.concat([parts[problem, name] for name in methods], "algorithm", **how)
        for problem in problems
    ]
    return described(xr.concat(by_problem, "problem", **how), list(parts.values()))


def measure(result: xr.Dataset, config: MultiCompare) -> xr.Dataset:
    """Mean and worst-model accuracies at equal numbers of trainings, and the times.

    Accuracies are in percent, averaged over the last fifth of the trainings. "accuracy in time" is
    MFA-Rand's mean accuracy at the simulated times of the fast methods.
    """
    spent = _trainings(result)
    budget = _budget(spent)
    time = result["time"].isel(model=0, drop=True)
    per_seed = _at_budget(result, config)
    found = {"accuracy per seed": per_seed}
    found["accuracy"], found["standard error"] = estimate(per_seed)
    found["trainings"] = budget
    found["time"] = _interpolated(time, spent, budget).mean("seed")
    found |= {f"chosen_{name}": result[f"chosen_{name}"] for name in _RATES}
    fast = [name for name in _FAST if name in config.methods]
    if fast and _BASE in config.methods:
        mean = _scores(result, config).sel(score="mean", algorithm=_BASE, drop=True)
        at = xr.DataArray(_LAST, dims="place") * budget
        times = _interpolated(time.sel(algorithm=fast), spent.sel(algorithm=fast), at)
        same = _interpolated(mean, time.sel(algorithm=_BASE, drop=True), times)
        found["accuracy in time"] = same.mean("place", skipna=False).rename(algorithm="fast")
    return xr.Dataset(found)


def _trainings(result: xr.Dataset) -> xr.DataArray:
    """The cumulative number of local trainings of all models."""
    return result["client_updates"].sum("model", min_count=1)  # NaN if not run


def _budget(trainings: xr.DataArray) -> xr.DataArray:
    """The number of trainings that every run of a problem reached."""
    last = trainings.isel(round=-1, drop=True)
    return last.min([dim for dim in last.dims if dim != "problem"])


def _scores(result: xr.Dataset, config: MultiCompare) -> xr.DataArray:
    """The mean and the smallest accuracy over the models, in percent.

    Problems with fewer models than others are padded with NaN, which is ignored.
    """
    percent = 100 * result["test_accuracy"]
    # Distinguish the NaN of a diverged run from the NaN of padding.
    is_there = xr.DataArray(
        [
            [model < len(problem.models) for model in range(percent.sizes["model"])]
            for problem in config.chosen.values()
        ],
        dims=("problem", "model"),
    )
    mean = percent.where(is_there, 0).sum("model", skipna=False) / is_there.sum("model")
    worst = percent.where(is_there, percent.isel(model=0)).min("model", skipna=False)
    return xr.concat([mean, worst], xr.IndexVariable("score", ["mean", "worst"]))


def _at_budget(result: xr.Dataset, config: MultiCompare) -> xr.DataArray:
    """The scores at equal numbers of trainings, averaged over the last fifth."""
    spent = _trainings(result)
    at = xr.DataArray(_LAST, dims="place") * _budget(spent)
    return _interpolated(_scores(result, config), spent, at).mean("place", skipna=False)


def _interpolated(values: xr.DataArray, along: xr.DataArray, at: xr.DataArray) -> xr.DataArray:
    """Interpolates values between the records, or takes the last one beyond them."""
    found: xr.DataArray = xr.apply_ufunc(
        lambda y, x, place: np.interp(place, x, y),
        *(values, along, at),
        input_core_dims=[["round"], ["round"], []],
        vectorize=True,
        output_dtypes=[float],
    )
    return found


def judge(measured: xr.Dataset, config: MultiCompare) -> Iterator[Check]:
    """Compares each method with the one that it extends, on problems outside the papers."""
    mean = _BASE + "'s"
    for name, other, score, against in (
        ("MFA-RR", _BASE, "mean", f"mean accuracy against {mean}"),
        ("FedFairMMFL", _BASE, "worst", f"worst model against {mean}"),
        ("LVR", _BASE, "mean", "mean accuracy against that of uniform sampling"),
        ("GVR", _BASE, "mean", "mean accuracy against that of uniform sampling"),
        ("StaleVR", "GVR", "mean", "mean accuracy against that without old updates, of GVR"),
        ("StaleVRE", "LVR", "mean", "mean accuracy against that without old updates, of LVR"),
        *(
            (f"bandit: {rule}", "bandit: random", "mean", "mean accuracy against random choices")
            for rule in ("weighted sum", "Pareto", "rank list")
        ),
        *((name, _BASE, "mean", f"mean accuracy against {mean}") for name in _FAST),
    ):
        if {name, other} <= set(config.methods):
            at = measured["accuracy per seed"].sel(score=score, drop=True)
            lead = at.sel(algorithm=name, drop=True) - at.sel(algorithm=other, drop=True)
            yield from _compared(lead, name, other, against, measured, config)
    for name in measured["fast"].values.tolist() if "fast" in measured else ():
        slow = measured["accuracy in time"].sel(fast=name, drop=True)
        at = measured["accuracy per seed"].sel(score="mean", algorithm=name, drop=True)
        against = f"mean accuracy against {mean} in the same simulated time"
        yield from _compared(at - slow, name, _BASE, against, measured, config)
    rates, label = measured["chosen_learning_rate"], "{algorithm} on {problem}"
    yield selection.check_inner(rates, config.learning_rates, label)


def _compared(
    lead: xr.DataArray,
    name: str,
    other: str,
    against: str,
    measured: xr.Dataset,
    config: MultiCompare,
) -> Iterator[Check]:
    """Yields one comparison for each problem."""
    for problem in config.chosen:
        rates = measured["chosen_learning_rate"].sel(problem=problem)
        question = f"{name} on {problem}: {against}"
        found = compare(question, lead.sel(problem=problem, drop=True), _MARGIN, ".1f")
        both = {one: rates.sel(algorithm=one) for one in (name, other)}
        yield selection.unless_at_edge(found, both, config.learning_rates)


def table(measured: xr.Dataset, config: MultiCompare) -> Sequence[Table]:
    """Mean and worst-model accuracies, the rates, and the problems."""
    names = {"mean": "", "worst": "Accuracy of the worst model in percent"}
    tables = []
    for score, title in names.items():
        here = measured[["accuracy", "standard error"]].sel(score=score, drop=True)
        text = cells(here["accuracy"], here["standard error"], form=".1f", missing="diverged")
        form = "{}: mean accuracy in percent" if score == "mean" else "{}"
        tables.append(rows(columns(text, "problem", form), ("algorithm",), title))
    return [*tables, _spent(measured, config), _problems(measured, config)]


def _spent(measured: xr.Dataset, config: MultiCompare) -> Table:
    """The rates of each method, and its simulated time."""
    text = cells(measured["chosen_learning_rate"], form="g")
    has_own = xr.DataArray(
        [METHODS[name].has_server_rate for name in config.methods],
        {"algorithm": list(config.methods)},
    )
    both = text + ", " + cells(measured["chosen_server_rate"], form="g")
    contents = columns(both.where(has_own, text), "problem", "{}: rate")
    contents |= columns(cells(measured["time"], form=".0f"), "problem", "{}: time")
    title = "Learning rates (and FedAST's server learning rate), and simulated time"
    return rows(contents, ("algorithm",), title)


def _problems(measured: xr.Dataset, config: MultiCompare) -> Table:
    """One row per problem."""
    chosen = config.chosen.values()
    numbers = {
        "models": [len(problem.models) for problem in chosen],
        "clients": [problem.num_clients for problem in chosen],
        "clients a round": [problem.cohort_size for problem in chosen],
        "local trainings": measured["trainings"].astype(int).values,
    }
    at = {"problem": list(config.chosen)}
    contents = {name: xr.DataArray(each, at) for name, each in numbers.items()}
    return rows(contents, ("problem",), "Problems, and the local trainings of each method")


def figure(result: xr.Dataset, measured: xr.Dataset, config: MultiCompare) -> Figure:
    """Draws one panel per problem with two dots per method, ordered from best to worst."""
    mean = measured["accuracy"]
    order = np.argsort(-mean.sel(score="mean").mean("problem").values, kind="stable")
    here = measured.isel(algorithm=order).assign_coords(score=["mean of the models", "worst model"])
    about = result.attrs["manifest"]
    caption = f"Means and standard errors of {config.num_seeds} seeds on "
    caption += f"{', '.join(about['datasets'])}, each method at its best rate of "
    caption += f"{len(config.learning_rates)}, chosen on {config.selection_seeds} other seeds."
    dims = ("problem", "algorithm", "score")
    return dots(
        here["accuracy"].transpose(*dims),
        here["standard error"].transpose(*dims),
        xlabel="accuracy in percent",
        title="Several models at once, at equal local trainings",
        caption=caption,
    )


ITEMS = (Item("multi-compare", MultiCompare(), run, measure, judge, table, figure),)
"""A comparison of all multi-model methods."""
