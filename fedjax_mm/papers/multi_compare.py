"""All multi-model methods on the same problems, a comparison that is in no paper.

Every method is a line of a table. Each of its rounds trains K clients, or as many in the mean, but
bandits begin with M rounds of all clients; curves are therefore also drawn against local trainings
and bytes. GVR and StaleVR have all clients train all models before they draw, and only those that
are drawn count as trainings.

All methods have one clock, on which a local training takes as long as one law says. A round lasts
as long as its slowest client; that all clients of GVR train before they draw takes no time. FedAST
has no rounds: K jobs are at work, and K that have arrived are drawn as a round. As it is
published it does not weigh its clients, and so minimizes another mean than the other methods: here
it weighs them as these do.

How long a method takes to a target is measured seed by seed. The target is the lower of the two
mean accuracies that FedAST and MFA-Rand end with, so that both of them reach it.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm import plots
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.data.idx import check_idx
from fedjax_mm.experiments.fields import Count, Distinct, Seeded
from fedjax_mm.papers.claims import Claim, estimate, exceeds, not_below
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.multi_methods import METHODS
from fedjax_mm.papers.multi_problems import FILES, Digits, Images, Synthetic
from fedjax_mm.papers.tables import Table, cells, rows
from fedjax_mm.sweeps.execute import Execution, sweep
from fedjax_mm.sweeps.grid import Setup

_BYTES = 4  # of a number that is sent


_RACE = ("FedAST", "MFA-Rand")  # whose ends are the target
_BY_LOSSES = ("bandit: weighted sum", "bandit: Pareto", "bandit: rank list")

ProblemName = Literal["synthetic", "digits", "images"]


class MultiCompare(Seeded):
    """Settings: problems, methods, and the length of the runs."""

    problems: Annotated[tuple[ProblemName, ...], Distinct, Field(min_length=1)] = (
        *("synthetic", "digits", "images"),
    )
    """The images are left out without a folder that has them."""
    methods: Annotated[tuple[str, ...], Distinct, Field(min_length=1)] = tuple(METHODS)
    synthetic: Synthetic = Synthetic()
    digits: Digits = Digits()
    images: Images = Images()
    num_rounds: Count = 150
    num_seeds: Count = 12
    record_every: Count = 5
    directory: Path | None = None
    """Folder with the files of MNIST and of Fashion-MNIST, each in a folder or together."""

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise ValueError(f"methods has {unknown[0]!r}; choose from {', '.join(METHODS)}")
        if not self.chosen:
            raise ValueError("problems has images alone, which are in files; give --data DIR")
        for problem in self.chosen.values():
            for name in self.methods:
                METHODS[name].assign(problem.sizes(len(problem.models), self.num_rounds))
        if "images" in self.chosen:
            try:
                for name in FILES:
                    check_idx(str(self.directory), name=name)
            except OSError as error:
                raise ValueError(str(error)) from error
        return self

    @property
    def chosen(self) -> "dict[str, Synthetic | Digits | Images]":
        """Returns the problems whose data there are, by name."""
        known: dict[str, Synthetic | Digits | Images]
        known = {"synthetic": self.synthetic, "digits": self.digits, "images": self.images}
        there = [name for name in self.problems if name != "images" or self.directory is not None]
        return {name: known[name] for name in there}

    def build(
        self, problem: str, algorithm: str, data: Mapping[str, Sequence[FederatedData]], draw: Any
    ) -> Setup:
        """Returns a point of the grid."""
        here, way = self.chosen[problem], METHODS[algorithm]
        tasks = here.tasks([stack.select(draw) for stack in data[problem]])
        how = here.model_dump(include={"local_steps", "batch_size"})
        trained = way.algorithm(here.learning_rate, **how)
        return Setup(tasks, trained, way.on_clock(here.sizes(len(tasks), self.num_rounds)))


def run(config: MultiCompare, execution: Execution | None = None) -> xr.Dataset:
    """Returns every problem with every method; each seed has a draw of the data."""
    data = {name: problem.data(config) for name, problem in config.chosen.items()}
    stacks = [stack for each in data.values() for stack in each]
    kinds = [stack.kind for stack in stacks]
    runs: dict[str, Any] = config.model_dump(include={"num_rounds", "record_every"})
    result = sweep(
        config.build,
        {"problem": list(data), "algorithm": list(config.methods)},
        **runs,
        **config.replicas,
        shared={"data": data},
        per_seed={"draw": np.arange(config.num_seeds)},
        data=min(kinds, key=("surrogate", "real", "synthetic").index),
        execution=execution,
    )
    names = list(dict.fromkeys(stack.name for stack in stacks))
    kept = ["test_accuracy", "time", "client_updates", "parameters_up", "parameters_down"]
    about = result.attrs["manifest"] | {"datasets": names}
    return result[[*kept, "diverged"]].assign_attrs(manifest=about)


def measure(result: xr.Dataset, config: MultiCompare) -> xr.Dataset:
    """Returns accuracies of the mean and the worst model, their variance, and what was spent.

    A problem with fewer models than others has no accuracy for the rest, which do not count. The
    variance is that of the M accuracies in percent, as of a population.
    """
    percent = 100 * result["test_accuracy"]
    # A run that diverged has NaN for its models, and for the rest it always has them.
    is_there = xr.DataArray(
        [
            [model < len(problem.models) for model in range(percent.sizes["model"])]
            for problem in config.chosen.values()
        ],
        dims=("problem", "model"),
    )
    filled = percent.where(is_there, percent.isel(model=0))
    mean = (percent.where(is_there, 0).sum("model", skipna=False)) / is_there.sum("model")
    squares = ((percent - mean) ** 2).where(is_there, 0).sum("model", skipna=False)
    curves = xr.Dataset(
        {
            "mean": mean,
            "worst": filled.min("model", skipna=False),
            "variance": squares / is_there.sum("model"),
        }
    ).to_dataarray("score")
    sent = result["parameters_up"] + result["parameters_down"]
    spent = {
        "trainings": result["client_updates"].sum("model"),
        "megabytes": _BYTES * sent.sum("model") / 1e6,
        "time": result["time"].isel(model=0, drop=True),
    }
    rounds = result["round"].values
    last = rounds > 0.8 * rounds[-1]
    end = curves.isel(round=np.flatnonzero(last)).mean("round", skipna=False)
    found = {"curve": curves.mean("seed", skipna=False)}
    found |= {"end per seed": end, "end": end.mean("seed", skipna=False)}
    found |= {"end error": estimate(end).error}
    found |= {"at equal trainings per seed": _at_equal(curves, spent["trainings"])}
    found |= {name: each.mean("seed", skipna=False) for name, each in spent.items()}
    if set(_RACE) <= set(config.methods):
        target = end.sel(score="mean", algorithm=list(_RACE)).min("algorithm", skipna=False)
        found["target per seed"] = target
        found["time to target per seed"] = _time_to(target, mean, spent["time"])
    return xr.Dataset(found)


def _at_equal(curves: xr.DataArray, trainings: xr.DataArray) -> xr.DataArray:
    """Returns the scores where each method has done as many trainings as the thriftiest did."""
    least = trainings.isel(round=-1).min("algorithm")

    def at(scores: np.ndarray, spent: np.ndarray, budget: float) -> float:
        return float(np.interp(budget, spent, scores))

    found: xr.DataArray = xr.apply_ufunc(
        at,
        curves,
        trainings,
        least,
        input_core_dims=[["round"], ["round"], []],
        vectorize=True,
        output_dtypes=[float],
    )
    return found


def _time_to(target: xr.DataArray, scores: xr.DataArray, time: xr.DataArray) -> xr.DataArray:
    """Returns when curves first reach a target, between two records.

    It is NaN if they do not, or if the target is NaN, as where a run that sets it diverged.
    """

    def first(scores: np.ndarray, times: np.ndarray, target: float) -> float:
        (reached,) = np.nonzero(scores >= target)
        if not len(reached):
            return np.nan
        around = slice(max(0, reached[0] - 1), reached[0] + 1)
        return float(np.interp(target, scores[around], times[around]))

    dims = [["round"], ["round"], []]
    found: xr.DataArray = xr.apply_ufunc(
        first, scores, time, target, input_core_dims=dims, vectorize=True, output_dtypes=[float]
    )
    return found


def claims(measured: xr.Dataset, config: MultiCompare) -> Iterator[Claim]:
    """Returns the headline claims of the methods' papers, problem by problem."""
    for problem in config.chosen:
        end = measured["end per seed"].sel(problem=problem, drop=True)

        def lead(score: str, one: str, other: str, end: xr.DataArray = end) -> xr.DataArray:
            at = end.sel(score=score, drop=True)
            return at.sel(algorithm=one, drop=True) - at.sel(algorithm=other, drop=True)

        def both(*names: str) -> bool:
            return set(names) <= set(config.methods)

        if both("FedFairMMFL", "MFA-Rand"):
            text = f"{problem}: FedFairMMFL's worst model is better than MFA-Rand's"
            yield exceeds(text, lead("worst", "FedFairMMFL", "MFA-Rand"))
            text = f"{problem}: FedFairMMFL's models vary less than MFA-Rand's"
            yield exceeds(text, lead("variance", "MFA-Rand", "FedFairMMFL"))
        for name in ("LVR", "GVR"):
            if both(name, "MFA-Rand"):
                text = f"{problem}: the mean accuracy of {name} exceeds that of uniform sampling"
                yield exceeds(text, lead("mean", name, "MFA-Rand"))
        for name, without in (("StaleVR", "GVR"), ("StaleVRE", "LVR")):
            if both(name, without):
                text = f"{problem}: the mean accuracy of {name} exceeds that of {without}"
                yield exceeds(text, lead("mean", name, without))
        for name in _BY_LOSSES:
            if both(name, "bandit: random"):
                text = f"{problem}: the mean accuracy of {name} exceeds that of random choices"
                yield exceeds(text, lead("mean", name, "bandit: random"))
        for name in ("bandit: random", *_BY_LOSSES):
            if both(name, "FedAvg, one by one"):
                text = f"{problem}: the mean accuracy of {name} is not below FedAvg's, one by one"
                yield not_below(text, lead("mean", name, "FedAvg, one by one"))
        if both(*_RACE):
            times = measured["time to target per seed"].sel(problem=problem, drop=True)
            saved = times.sel(algorithm=_RACE[1], drop=True) - times.sel(algorithm=_RACE[0])
            text = f"{problem}: FedAST reaches the target accuracy in less simulated time than "
            yield exceeds(text + "MFA-Rand", saved.drop_vars("algorithm"))


def table(measured: xr.Dataset, config: MultiCompare) -> Sequence[Table]:
    """Returns the problems, and of each two tables: how well every method did, at what cost."""
    here = {name: measured.sel(problem=name, drop=True) for name in config.chosen}
    of_each = [part(name, each) for name, each in here.items() for part in (_scores, _costs)]
    return [_problems(measured, config), *of_each]


def _problems(measured: xr.Dataset, config: MultiCompare) -> Table:
    """Returns a row for each problem."""
    chosen = config.chosen.values()
    numbers = {
        "models": [len(problem.models) for problem in chosen],
        "clients": [problem.num_clients for problem in chosen],
        "clients a round": [problem.cohort_size for problem in chosen],
    }
    at = {"problem": list(config.chosen)}
    contents = {name: xr.DataArray(each, at) for name, each in numbers.items()}
    if "target per seed" in measured:
        target = estimate(measured["target per seed"])
        contents["target in percent"] = cells(
            target.mean, target.error, form=".1f", missing="diverged"
        )
    return rows(contents, ("problem",))


def _scores(problem: str, here: xr.Dataset) -> Table:
    """Returns how well each method did, in a row."""
    contents = {}
    for score in here["score"].values.tolist():
        end = here[["end", "end error"]].sel(score=score)
        contents[score] = cells(end["end"], end["end error"], form=".1f", missing="diverged")
    found = estimate(here["at equal trainings per seed"].sel(score="worst"))
    equal = cells(found.mean, found.error, form=".1f", missing="diverged")
    contents["worst, equal trainings"] = equal
    return rows(contents, ("algorithm",), f"{problem}: accuracies of the models in percent")


def _costs(problem: str, here: xr.Dataset) -> Table:
    """Returns what each method took, in a row."""
    last = here.isel(round=-1)
    contents = {
        "trainings": cells(last["trainings"], form=".0f"),
        "MB": cells(last["megabytes"], form=".1f"),
        "time": cells(last["time"], form=".0f"),
    }
    if "time to target per seed" in here:
        taken = estimate(here["time to target per seed"])
        missing = "not reached by all seeds"
        reached = cells(taken.mean, taken.error, form=".1f", missing=missing)
        has_target = here["target per seed"].notnull().all("seed")
        contents["time to target"] = reached.where(has_target, "target diverged")
    return rows(contents, ("algorithm",), f"{problem}: trainings, messages and simulated time")


_AGAINST = {
    "round": "round",
    "trainings": "local trainings",
    "megabytes": "megabytes sent",
    "time": "simulated time",
}
_YLABEL = {"mean": "mean accuracy", "worst": "worst model's accuracy", "variance": "variance"}
_PANELS = (
    (("mean", "round"), ("worst", "round"), ("variance", "round")),
    (("mean", "time"), ("worst", "trainings"), ("worst", "megabytes")),
)
_STYLES = ("-", "--")  # of the first and of the second methods of a colour


def figure(result: xr.Dataset, measured: xr.Dataset, config: MultiCompare) -> Figure:
    """Draws two rows of panels for each problem."""

    def panel(problem: str, score: str, against: str) -> plots.Panel:
        here = measured.sel(problem=problem)
        curves, drawn = here["curve"].sel(score=score), []
        for number, name in enumerate(config.methods):
            x = here[against] if against == "round" else here[against].sel(algorithm=name)
            y = curves.sel(algorithm=name).values
            again, color = divmod(number, len(plots.COLORS))
            style = _STYLES[again % len(_STYLES)]
            drawn.append(plots.Line(name, x.values.astype(float), y, None, style, color))
        is_variance = score == "variance"
        ylabel = f"{_YLABEL[score]} in {'points squared' if is_variance else 'percent'}"
        scale = "log" if is_variance else "linear"
        return plots.Panel(problem, _AGAINST[against], ylabel, drawn, scale=scale)

    about = result.attrs["manifest"]
    # So many curves with standard errors would hide each other.
    caption = f"Means over {config.num_seeds} seeds with draws of the data of their own; the table "
    caption += "has standard errors. The variance is that over the models. Bandits begin with a "
    caption += "round of all clients for each model; a round of FedAST is as many local trainings."
    drawn = [[panel(name, *each) for each in row] for name in config.chosen for row in _PANELS]
    title = f"Several models at once: {', '.join(about['datasets'])}"
    return plots.draw(drawn, title=title, caption=caption, share=False)


_page = MultiCompare(), run, measure, claims, table, figure

ITEMS = (Item("multi-compare", "Who trains what: all multi-model methods compared", *_page),)
"""A comparison of multi-model methods."""
