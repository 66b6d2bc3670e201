"""All multi-model methods on the same problems, a comparison that is in no paper.

Every method is a line of a table. Each of its rounds trains K clients, or as many in the mean, but
bandits begin with M rounds of all clients; curves are therefore also drawn against local trainings
and bytes. GVR and StaleVR have all clients train all models before they draw, and only those that
are drawn count as trainings.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm import plots
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.algorithms.mifa import mifa
from fedjax_mm.algorithms.stalevr import stalevr
from fedjax_mm.assignments.bandits import bandit
from fedjax_mm.assignments.fairness import fedfair
from fedjax_mm.assignments.partitions import mfa_rand, mfa_rr, sequential
from fedjax_mm.assignments.sampling import variance_reduced
from fedjax_mm.base import Algorithm, Assignment
from fedjax_mm.data.digits import digits
from fedjax_mm.data.federate import federate
from fedjax_mm.data.federated import FederatedData, Pool, stack_data
from fedjax_mm.data.idx import Name, check_idx, load_idx
from fedjax_mm.data.partition import dirichlet
from fedjax_mm.data.synthetic import synthetic
from fedjax_mm.experiments.fields import Config, Count, Distinct, Positive, Seeded
from fedjax_mm.papers.claims import Claim, estimate, exceeds, not_below
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.multi_maxfl import QUESTIONS, ask
from fedjax_mm.papers.tables import Table, cells, rows
from fedjax_mm.sweeps.execute import Execution, sweep
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.classification import Classification, classification
from fedjax_mm.tasks.networks import MLP, LogisticRegression

TEST_FRACTION = 0.2
_BYTES = 4  # of a number that is sent


class Sizes(NamedTuple):
    """Numbers that assignments depend on."""

    num_clients: int
    num_models: int
    cohort_size: int
    num_rounds: int


class Way(NamedTuple):
    """A method: who trains what, and how clients train and the server aggregates.

    Attributes:
      assign: from the sizes.
      algorithm: a factory that takes a rate, `local_steps` and `batch_size`.
    """

    assign: Callable[[Sizes], Assignment]
    algorithm: Callable[..., Algorithm] = fedavg


def _of(factory: Callable[..., Assignment], **options: Any) -> Way:
    def assign(sizes: Sizes) -> Assignment:
        how = {"cohort_size": sizes.cohort_size} | options
        return factory(sizes.num_clients, sizes.num_models, **how)

    return Way(assign)


def _unequal(algorithm: Callable[..., Algorithm], **options: Any) -> Way:
    def assign(sizes: Sizes) -> Assignment:
        # As many trainings a round as the others have, in the mean.
        how = {"expected_trainings": float(sizes.cohort_size)} | options
        return variance_reduced(sizes.num_clients, sizes.num_models, **how)

    return Way(assign, algorithm)


def _one_by_one(sizes: Sizes) -> Assignment:
    *three, num_rounds = sizes
    turn = max(1, num_rounds // sizes.num_models)
    return sequential(*three[:2], cohort_size=three[2], rounds_per_model=turn)


METHODS: Mapping[str, Way] = {
    "FedAvg, one by one": Way(_one_by_one),
    "MFA-Rand": _of(mfa_rand),
    "MFA-RR": _of(mfa_rr),
    "bandit: random": _of(bandit, policy="random"),
    "bandit: weighted sum": _of(bandit, policy="weighted-sum"),
    "bandit: Pareto": _of(bandit, policy="pareto"),
    "bandit: rank list": _of(bandit, policy="rank-list"),
    "FedFairMMFL": _of(fedfair),
    "LVR": _unequal(partial(fedavg, server_scale="1/N"), by="loss"),
    "GVR": _unequal(partial(fedavg, server_scale="1/N"), by="update"),
    "StaleVR": _unequal(partial(stalevr, beta="exact"), by="update", inactive="train"),
    "StaleVRE": _unequal(partial(stalevr, beta="estimated"), by="loss"),
    "MIFA": _of(mfa_rand)._replace(algorithm=mifa),
}
"""All methods by name; a new one is a line here."""

_BY_LOSSES = ("bandit: weighted sum", "bandit: Pareto", "bandit: rank list")


class Problem(Config):
    """Clients, and how they train."""

    num_clients: Count
    cohort_size: Count
    learning_rate: Positive
    local_steps: Count = 10
    batch_size: Count = 10

    def sizes(self, num_models: int, num_rounds: int) -> Sizes:
        """Returns what assignments depend on."""
        return Sizes(self.num_clients, num_models, self.cohort_size, num_rounds)


class Synthetic(Problem):
    """Synthetic(1, 1) A and B: two models of different size."""

    num_clients: Count = 100
    cohort_size: Count = 20
    learning_rate: Positive = 0.03

    @property
    def models(self) -> tuple[str, ...]:
        """Returns the models' names."""
        return ("Synthetic A", "Synthetic B")

    def data(self, settings: "MultiCompare") -> list[FederatedData]:
        """Returns a stack of draws for each store of data."""
        shapes: list[dict[str, Any]] = [
            {"dim": 60, "num_classes": 5},
            {"dim": 30, "num_classes": 10},
        ]
        seeds = settings.data_seeds
        return [
            stack_data([synthetic(self.num_clients, seed=seed, **how) for seed in seeds])
            for how in shapes
        ]

    def tasks(self, data: Sequence[FederatedData]) -> list[Classification]:
        """Returns the models' tasks on one draw."""
        return [classification(each, LogisticRegression(each.num_classes)) for each in data]


class Digits(Problem):
    """Three questions about the same images."""

    num_clients: Count = 30
    cohort_size: Count = 6
    learning_rate: Positive = 0.05
    alpha: Positive = 0.5

    @property
    def models(self) -> tuple[str, ...]:
        """Returns the models' names."""
        return QUESTIONS

    def data(self, settings: "MultiCompare") -> list[FederatedData]:
        """Returns a stack of draws for each store of data."""
        both = digits()
        x, y = (np.concatenate(each) for each in zip(both.train, both.test, strict=True))
        pool = both._replace(train=(x, y))
        return [ask(_deal(pool, self.num_clients, self.alpha, settings.data_seeds))]

    def tasks(self, data: Sequence[FederatedData]) -> list[Classification]:
        """Returns the models' tasks on one draw."""
        module = MLP(data[0].num_classes, (64, 30))
        columns = range(len(QUESTIONS))
        return [classification(data[0], module, scale=1 / 255, column=i) for i in columns]


class Images(Problem):
    """MNIST and Fashion-MNIST, from files: two models, each with data of its own."""

    num_clients: Count = 100
    cohort_size: Count = 20
    learning_rate: Positive = 0.05
    alpha: Positive = 0.5
    num_images: Count = 12_000
    """Of each data set the first ones; clients share them out."""

    @property
    def models(self) -> tuple[str, ...]:
        """Returns the models' names."""
        return ("MNIST", "Fashion-MNIST")

    def data(self, settings: "MultiCompare") -> list[FederatedData]:
        """Returns a stack of draws for each store of data."""
        folder = settings.directory
        if folder is None:
            raise ValueError("MNIST and Fashion-MNIST are read from files; give --data DIR")
        stacks = []
        for name in _FILES:
            pool = load_idx(folder, name=name)
            x, y = (each[: self.num_images] for each in pool.train)
            few = pool._replace(train=(x, y))
            stacks.append(_deal(few, self.num_clients, self.alpha, settings.data_seeds))
        return stacks

    def tasks(self, data: Sequence[FederatedData]) -> list[Classification]:
        """Returns the models' tasks on one draw."""
        return [classification(each, MLP(10, (64, 30)), scale=1 / 255) for each in data]


_FILES: tuple[Name, ...] = ("mnist", "fashion-mnist")


def _deal(pool: Pool, num_clients: int, alpha: float, seeds: Sequence[int]) -> FederatedData:
    """Returns a stack of draws of who has which of the pool's training examples."""

    def draw(seed: int) -> FederatedData:
        parts = dirichlet(pool.train[1], num_clients, alpha=alpha, min_examples=10, seed=seed)
        return federate(pool, parts, test_fraction=TEST_FRACTION, seed=seed)

    return stack_data([draw(seed) for seed in seeds])


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
                for name in _FILES:
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
        return Setup(tasks, trained, way.assign(here.sizes(len(tasks), self.num_rounds)))


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
    kept = ["test_accuracy", "client_updates", "parameters_up", "parameters_down", "diverged"]
    about = result.attrs["manifest"] | {"datasets": names}
    return result[kept].assign_attrs(manifest=about)


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
    }
    rounds = result["round"].values
    last = rounds > 0.8 * rounds[-1]
    end = curves.isel(round=np.flatnonzero(last)).mean("round", skipna=False)
    found = {"curve": curves.mean("seed", skipna=False), "curve error": estimate(curves).error}
    found |= {"end per seed": end, "end": end.mean("seed", skipna=False)}
    found |= {"end error": estimate(end).error}
    found |= {"at equal trainings per seed": _at_equal(curves, spent["trainings"])}
    found |= {name: each.mean("seed") for name, each in spent.items()}
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


def table(measured: xr.Dataset, config: MultiCompare) -> Sequence[Table]:
    """Returns a row for each problem and method."""
    columns = {}
    for score in measured["score"].values.tolist():
        here = measured.sel(score=score)
        columns[score] = cells(here["end"], here["end error"], form=".1f", missing="diverged")
    equal = measured["at equal trainings per seed"].sel(score="worst")
    found = estimate(equal)
    columns["worst, equal trainings"] = cells(
        found.mean, found.error, form=".1f", missing="diverged"
    )
    last = measured.isel(round=-1)
    columns["trainings"] = cells(last["trainings"], form=".0f")
    columns["MB"] = cells(last["megabytes"], form=".1f")
    return [rows(columns, ("problem", "algorithm"))]


_AGAINST = {"round": "round", "trainings": "local trainings", "megabytes": "megabytes sent"}
_YLABEL = {"mean": "mean accuracy", "worst": "worst model's accuracy", "variance": "variance"}
_COLUMNS = (
    ("mean", "round"),
    ("worst", "round"),
    ("variance", "round"),
    ("worst", "trainings"),
    ("worst", "megabytes"),
)


def figure(result: xr.Dataset, measured: xr.Dataset, config: MultiCompare) -> Figure:
    """Draws a row of panels for each problem."""

    def panel(problem: str, score: str, against: str) -> plots.Panel:
        here = measured.sel(problem=problem)
        curves, errors = (here[name].sel(score=score) for name in ("curve", "curve error"))
        drawn = []
        for number, name in enumerate(config.methods):
            x = here[against] if against == "round" else here[against].sel(algorithm=name)
            y, error = (each.sel(algorithm=name).values for each in (curves, errors))
            drawn.append(plots.Line(name, x.values.astype(float), y, error, "-", number))
        unit = "points squared" if score == "variance" else "percent"
        ylabel = f"{_YLABEL[score]} in {unit}"
        return plots.Panel(f"{problem}", _AGAINST[against], ylabel, drawn)

    about = result.attrs["manifest"]
    caption = f"Means over {config.num_seeds} seeds with draws of the data of their own, with "
    caption += "standard errors; the variance is that over the models. Bandits begin with a round "
    caption += "of all clients for each model."
    return plots.draw(
        [[panel(problem, *column) for column in _COLUMNS] for problem in config.chosen],
        title=f"Several models at once: {', '.join(about['datasets'])}",
        caption=caption,
        share=False,
    )


_page = MultiCompare(), run, measure, claims, table, figure

ITEMS = (Item("multi-compare", "Who trains what: all multi-model methods compared", *_page),)
"""A comparison of multi-model methods."""
