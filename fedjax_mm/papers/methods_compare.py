"""Methods of a single model on unequal clients, a comparison that is not part of any paper.

Clients train for epochs, so that they take unequal numbers of local steps, as in most published
comparisons. `multi-compare` compares methods of many models.

Every method has its own best learning rate, and the best value of a setting of its own, in each
condition: the data and its partition, how many clients train in a round, and the momentum of local
SGD. Both are chosen on separate *selection seeds*. Rates are *effective rates* r, and the learning
rate is r (1 - beta) with momentum beta.

A method's accuracy is what clients get: the accuracy of a client's model, which is its own in
methods with personal models and otherwise the global one, on the client's own test examples. A
difference is a method's accuracy minus FedAvg's with the same seed, and hence the same data. Its
interval is Student's at the level of one test of `rulings`, 0.135 % on each side. Intervals of 17
methods in one condition then all hold at once with a probability of 95 % for normal samples.

Left out are methods that need more than data: `maxfl` and `mwfed` need requirements of clients, and
`perfedavg` trains a model to be tuned. `prsgd` refuses epochs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import optax
import xarray as xr
from matplotlib.figure import Figure
from pydantic import ValidationInfo, model_validator
from scipy import stats

from fedjax_mm.algorithms.afl import afl
from fedjax_mm.algorithms.apfl import apfl
from fedjax_mm.algorithms.ditto import ditto
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.algorithms.feddyn import feddyn
from fedjax_mm.algorithms.fednova import fednova
from fedjax_mm.algorithms.fedprox import fedprox
from fedjax_mm.algorithms.mifa import mifa
from fedjax_mm.algorithms.moon import moon
from fedjax_mm.algorithms.pfedme import pfedme
from fedjax_mm.algorithms.qffl import qffl
from fedjax_mm.algorithms.scaffold import scaffold
from fedjax_mm.algorithms.sharing import personal
from fedjax_mm.algorithms.stalevr import stalevr
from fedjax_mm.assignments.partitions import mfa_rand
from fedjax_mm.base import Algorithm, Scalar
from fedjax_mm.claims.evidence import LEVEL
from fedjax_mm.data.digits import digits
from fedjax_mm.data.federated import FederatedData, Pool
from fedjax_mm.data.idx import check_idx, load_idx
from fedjax_mm.data.synthetic import synthetic
from fedjax_mm.experiments.fields import Count, Positive
from fedjax_mm.local import local_sgd
from fedjax_mm.metrics import estimate
from fedjax_mm.optimizers import fedadam
from fedjax_mm.papers.figures import dots
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.multi_problems import deal
from fedjax_mm.papers.rulings import compare
from fedjax_mm.papers.schema import Check, Outcome, Table
from fedjax_mm.papers.selection import Selecting, at_edge, best_point, check_inner, searched
from fedjax_mm.papers.tables import cells, rows
from fedjax_mm.papers.training import Make, described, stages, train
from fedjax_mm.papers.values import Several
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.classification import classification
from fedjax_mm.tasks.networks import MLP

_MARGIN = 1.0  # the smallest difference of interest, in percentage points
_NEAR = 0.95  # the share of FedAvg's last accuracy that is the target
_SOURCES = 100  # clients of the synthetic data whose examples are pooled
_BASE = "FedAvg"
_CHOSEN = ("rate", "own")
_CONDITION = ("problem", "clients", "momentum")

Data = Literal["synthetic", "digits", "images"]
Clients = Literal["some", "all"]


class Way(NamedTuple):
    """A method.

    Attributes:
      make: returns the algorithm, given local training and the value of the method's own setting.
      setting: what this setting is, or "" if the method has none.
      values: the candidates for it.
    """

    make: Callable[[Any, Scalar], Algorithm]
    setting: str = ""
    values: tuple[float, ...] = (1.0,)


def _plain(factory: Callable[..., Algorithm], **options: Any) -> Way:
    return Way(lambda local, _: factory(local, **options))


def _with(factory: Callable[..., Algorithm], setting: str, *values: float, **options: Any) -> Way:
    return Way(lambda local, own: factory(local, **{setting: own}, **options), setting, values)


METHODS: Mapping[str, Way] = {
    _BASE: _plain(fedavg),
    "FedAvgM": Way(
        lambda local, own: fedavg(local, server_optimizer=optax.sgd(own, momentum=0.9)),
        *("server rate", (0.1, 0.3, 1.0)),
    ),
    "FedAdam": Way(
        lambda local, own: fedavg(local, server_optimizer=fedadam(own)),
        *("server rate", (0.003, 0.01, 0.03)),
    ),
    "FedProx": _with(fedprox, "mu", 0.01, 0.1, 1.0),
    "SCAFFOLD, option I": _plain(scaffold, option="I"),
    "SCAFFOLD, option II": _plain(scaffold),
    "FedDyn": _with(feddyn, "alpha", 0.01, 0.1, 1.0),
    "FedNova": _plain(fednova),
    "MOON": _with(moon, "mu", 0.1, 1.0, 5.0),
    "q-FFL": _with(qffl, "q", 0.1, 1.0, 5.0),
    "AFL": _with(afl, "mixture_rate", 0.001, 0.01, 0.1),
    "MIFA": _plain(mifa),
    "StaleVR": _plain(stalevr),
    "Ditto": _with(ditto, "lam", 0.1, 1.0, 10.0),
    "APFL": _with(apfl, "alpha", 0.25, 0.5, 0.75, adaptive=False),
    "pFedMe": Way(
        lambda local, own: pfedme(local, inner_rate=0.1, inner_steps=3, lam=own),
        *("lam", (0.3, 1.0, 3.0)),
    ),
    "FedPer": Way(lambda local, _: personal(fedavg(local), "classes")),
}
"""All compared methods by name. To add a method, add a line."""


class MethodsCompare(Selecting):
    """The data, clients, methods, candidates and run lengths of the comparison."""

    problems: Several[Data] = ("synthetic", "digits", "images")
    """The data. "images" is skipped if no directory is given."""
    alphas: Several[Positive] = (0.1, 0.5)
    """The parameters of the Dirichlet law by which each class is dealt to clients."""
    clients: Several[Clients] = ("some", "all")
    """Which clients train in a round: `cohort_size` of them, or all."""
    momenta: Several[float] = (0.0, 0.9)
    methods: Several[str] = tuple(METHODS)
    rates: Several[Positive] = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
    num_clients: Count = 20
    cohort_size: Count = 4
    epochs: Count = 2
    batch_size: Count = 20
    num_examples: Count = 2_000
    """The most examples of a problem, training and testing together."""
    num_rounds: Count = 40
    num_seeds: Count = 20
    record_every: Count = 2
    directory: Path | None = None
    """The directory of Fashion-MNIST."""

    def check_files(self) -> None:
        """See `WithFiles`."""
        if "images" in self.problems and self.directory is not None:
            check_idx(str(self.directory), dataset="fashion-mnist")

    @model_validator(mode="after")
    def _settings_fit(self, info: ValidationInfo) -> Self:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise ValueError(f"methods has {unknown[0]!r}; choose from {', '.join(METHODS)}")
        if not self.chosen:
            raise ValueError("problems has images alone, which are in files; give --data DIR")
        if self.cohort_size > self.num_clients:
            raise ValueError(
                f"cohort_size is {self.cohort_size}, but there are {self.num_clients} clients"
            )
        return self.with_files(info)

    @property
    def chosen(self) -> dict[str, tuple[Data, float]]:
        """The data, and the parameter of the Dirichlet law, by the name of the problem."""
        titles = {"synthetic": "synthetic", "digits": "digits", "images": "Fashion-MNIST"}
        there = [name for name in self.problems if name != "images" or self.directory is not None]
        return {
            f"{titles[name]}, Dirichlet({alpha:g})": (name, alpha)
            for name in there
            for alpha in self.alphas
        }

    @property
    def selecting(self) -> Self:
        """The settings of the runs that choose rates, which use different draws."""
        others = self.model_copy(update={"seed": self.seed ^ 2**31})
        return others.with_seeds(0, self.selection_seeds)

    @property
    def alone(self) -> dict[tuple[str, str, str], Self]:
        """The settings of each method on each problem, with some or all clients."""
        return {
            (problem, clients, method): self.model_copy(
                update={
                    "problems": (name,),
                    "alphas": (alpha,),
                    "clients": (clients,),
                    "methods": (method,),
                }
            )
            for problem, (name, alpha) in self.chosen.items()
            for clients in self.clients
            for method in self.methods
        }

    def data(self, problem: str) -> FederatedData:
        """The draws of a problem's data, one for each seed."""
        name, alpha = self.chosen[problem]
        return deal(self._pool(name), self.num_clients, alpha, self.data_seeds)

    def _pool(self, name: Data) -> Pool:
        """The examples, all of them for training, because clients test on examples of their own."""
        if name == "images":
            pool = load_idx(self.directory or Path(), dataset="fashion-mnist")
            x, y = pool.train
        elif name == "digits":
            pool = digits()
            x, y = (np.concatenate(each) for each in zip(pool.train, pool.test, strict=True))
        else:
            # One labelling for all, whose examples are dealt to clients by their classes.
            drawn = synthetic(_SOURCES, num_classes=10, beta=0, iid=True, seed=self.seed)
            x, y = (np.asarray(each) for each in drawn.train.examples)
            kept = np.random.default_rng(self.seed).permutation(len(y))[: self.num_examples]
            return Pool("synthetic, IID", "synthetic", 10, (x[kept], y[kept]), (x[:0], y[:0]))
        return pool._replace(train=(x[: self.num_examples], y[: self.num_examples]))

    def build(
        self,
        problem: str,
        clients: str,
        algorithm: str,
        momentum: float,
        rate: float,
        own: float,
        data: FederatedData,
        seed: int,
    ) -> Setup:
        """Sets up the simulation of one point of the grid."""
        scale = 1.0 if self.chosen[problem][0] == "synthetic" else 1 / 255
        mine = data.select(seed - self.first_seed)
        task = classification(mine, MLP(mine.num_classes, (64, 30)), scale=scale)
        local = local_sgd(
            rate * (1 - momentum),
            epochs=self.epochs,
            batch_size=self.batch_size,
            momentum=momentum,
        )
        cohort = {"some": self.cohort_size, "all": self.num_clients}[clients]
        # StaleVR needs factors from the assignment.
        is_unbiased = algorithm == "StaleVR"
        assignment = mfa_rand(self.num_clients, 1, cohort_size=cohort, unbiased=is_unbiased)
        return Setup(task, METHODS[algorithm].make(local, own), assignment)


def run(config: MethodsCompare, execution: Execution | None = None) -> xr.Dataset:
    """Trains with every method in every condition, at its chosen settings.

    `selection_accuracy` holds the accuracies that chose them, over all candidates.
    """
    how = execution or Execution()

    def search(grid: Any, saving: Execution) -> xr.Dataset:
        axes = {name: {"rate": grid.rates, "own": METHODS[name].values} for name in grid.methods}
        return _joined(stages("grid", grid.alone, saving, _trainer(grid, grid.build, axes)))

    found = searched(config.selecting, how, search)
    accuracy = _last(found["accuracy"])
    best = accuracy.isel(best_point(accuracy, _CHOSEN))

    def at_best(
        problem: str,
        clients: str,
        algorithm: str,
        momentum: float,
        data: FederatedData,
        seed: int,
    ) -> Setup:
        at: dict[str, Any] = {"problem": problem, "clients": clients, "algorithm": algorithm}
        at |= {"momentum": momentum}
        rate, own = (best[name].sel(at).item() for name in _CHOSEN)
        return config.build(**at, rate=rate, own=own, data=data, seed=seed)

    judged = _joined(stages("judged", config.alone, how, _trainer(config, at_best, {})))
    added = {f"chosen_{name}": best[name].drop_vars(_CHOSEN) for name in _CHOSEN}
    added["selection_accuracy"] = accuracy.rename(seed="selection_seed")
    return described(judged.assign(added), [judged, found])


def _trainer(
    config: MethodsCompare,
    build: Callable[..., Setup],
    axes: Mapping[str, Mapping[str, Sequence[float]]],
) -> Make:
    """Runs a method on a problem with some or all clients, on draws of data that settings share."""
    drawn = cache(config.data)

    def make(alone: Any, saving: Execution) -> xr.Dataset:
        (problem,), (clients,), (name,) = alone.chosen, alone.clients, alone.methods
        data = drawn(problem)
        points: dict[str, Any] = {"problem": [problem], "clients": [clients], "algorithm": [name]}
        points |= {"momentum": config.momenta, **axes.get(name, {})}
        length = config.model_dump(include={"num_rounds", "record_every"})
        part = train([data], partial(build, data=data), points, config, saving, **length)
        # The global model of a method with personal models is used by nobody.
        accuracy = part.get("personal_accuracy", part["test_accuracy"])
        sent = part["parameters_up"] + part["parameters_down"]
        kept = xr.Dataset({"accuracy": accuracy, "sent": sent}, attrs=part.attrs)
        return kept.isel(model=0, drop=True).assign(diverged=part["diverged"].isel(model=0))

    return make


def _joined(parts: Mapping[tuple[str, str, str], xr.Dataset]) -> xr.Dataset:
    """Joins the parts of all methods in all conditions."""
    problems, clients, methods = (dict.fromkeys(names) for names in zip(*parts, strict=True))
    nested = [[[parts[x, y, z] for z in methods] for y in clients] for x in problems]
    found = xr.combine_nested(
        nested, ["problem", "clients", "algorithm"], join="outer", combine_attrs="override"
    )
    return described(found, list(parts.values()))


def _last(curves: xr.DataArray) -> xr.DataArray:
    """Returns the mean over the last fifth of the rounds."""
    rounds = curves["round"]
    return curves.where(rounds >= 0.8 * rounds.max(), drop=True).mean("round", skipna=False)


def measure(result: xr.Dataset, config: MethodsCompare) -> xr.Dataset:
    """Returns accuracies, differences from FedAvg, and the rounds and bytes to a target.

    The target is 95 % of FedAvg's accuracy over the last fifth of the rounds, in the mean over
    seeds. Rounds are medians over seeds, infinite if most seeds miss the target.
    """
    curves = 100 * result["accuracy"]
    last = _last(curves)
    found = {"last": last, "rate": result["chosen_rate"], "own": result["chosen_own"]}
    found["accuracy"], found["standard error"] = estimate(last)
    megabytes = 4e-6 * result["sent"].isel(round=-1, seed=0, drop=True) / config.num_rounds
    if _BASE in config.methods:
        lead = last - last.sel(algorithm=_BASE, drop=True)
        found["lead"] = lead
        found["difference"], found["error"] = estimate(lead)
        target = _NEAR * found["accuracy"].sel(algorithm=_BASE, drop=True)
        rounds = curves["round"].where(curves >= target).min("round")
        found["reached"] = rounds.notnull().mean("seed")
        found["rounds"] = rounds.fillna(np.inf).median("seed")
        found["megabytes"] = found["rounds"] * megabytes
    return xr.Dataset(found)


def _outcomes(measured: xr.Dataset, config: MethodsCompare) -> xr.DataArray:
    """Whether a method is ahead, level or behind in every condition, or undecided.

    A comparison is undecided if the rate of one of the two is at the edge of the grid.
    """
    outcomes = np.vectorize(
        lambda samples: compare("", xr.DataArray(samples, dims="seed"), _MARGIN).outcome,
        signature="(n)->()",
        otypes=[object],
    )
    found: xr.DataArray = xr.apply_ufunc(outcomes, measured["lead"], input_core_dims=[["seed"]])
    ends = at_edge(measured["rate"], config.rates)
    both = ends | ends.sel(algorithm=_BASE, drop=True)
    return found.where(~both | (len(config.rates) <= 2), "undecided")


def judge(measured: xr.Dataset, config: MethodsCompare) -> Iterator[Check]:
    """Compares every method with FedAvg over all conditions."""
    if "lead" in measured:
        words = _outcomes(measured, config)
        means = measured["difference"]
        for name in config.methods:
            if name == _BASE:
                continue
            for clients in config.clients:
                at = {"algorithm": name, "clients": clients}
                yield _check(name, clients, words.sel(at), means.sel(at), config)
    label = "{algorithm} on {problem}, {clients} clients, beta = {momentum:g}"
    yield check_inner(measured["rate"], config.rates, label)


def _check(
    name: str, clients: str, words: xr.DataArray, means: xr.DataArray, config: MethodsCompare
) -> Check:
    values, counts = np.unique(words.values.astype(str), return_counts=True)
    shares = ", ".join(f"{word} in {n}" for word, n in zip(values, counts, strict=True))
    how = f"all {config.num_clients}"
    if clients == "some":
        how = f"{config.cohort_size} of {config.num_clients}"
    text = f"{name}, {how} clients in a round: accuracy minus FedAvg's"
    spread = f"{float(means.min()):.1f} to {float(means.max()):.1f} points"
    outcome: Outcome = words.values.flat[0] if len(values) == 1 else "undecided"
    return Check(
        text=text, outcome=outcome, evidence=f"{shares} of {words.size} conditions: {spread}"
    )


def table(measured: xr.Dataset, config: MethodsCompare) -> Sequence[Table]:
    """Returns the numbers of conditions by outcome, and then the numbers of every condition."""
    tables = []
    if "lead" in measured:
        words = _outcomes(measured, config)
        over = list(_CONDITION)
        counts = {
            word: (words == word).sum(over).astype(str)
            for word in ("ahead", "level", "behind", "undecided")
        }
        mean, error = measured["difference"].mean(over), estimate(measured["lead"].mean(over)).error
        counts["mean difference"] = cells(mean, error, form=".1f", missing="diverged")
        tables.append(rows(counts, ("algorithm",)))
    for problem in measured["problem"].values.tolist():
        for clients in config.clients:
            here = measured.sel(problem=problem, clients=clients)
            contents: dict[str, xr.DataArray] = {}
            for momentum in config.momenta:
                contents |= _columns(here.sel(momentum=momentum), momentum, config)
            tables.append(
                rows(contents, ("algorithm",), f"{problem}, {clients} clients in a round")
            )
    return tables


def _columns(here: xr.Dataset, momentum: float, config: MethodsCompare) -> dict[str, xr.DataArray]:
    """Returns the columns of one condition."""
    has_own = xr.DataArray(
        [bool(METHODS[name].setting) for name in config.methods], dims="algorithm"
    )
    chosen = cells(here["rate"], form="g")
    own = xr.DataArray(
        [f", {METHODS[name].setting} " for name in config.methods], dims="algorithm"
    ) + cells(here["own"], form="g")
    chosen = chosen + own.where(has_own, "")
    found = {"accuracy": cells(here["accuracy"], here["standard error"], form=".1f")}
    if "lead" in here:
        quantile = stats.t.isf(LEVEL, config.num_seeds - 1)
        found["minus FedAvg's"] = cells(here["difference"], quantile * here["error"], form=".1f")
        found["rounds to target"] = cells(here["rounds"], form=".0f", missing="not reached")
        found["MB to target"] = cells(here["megabytes"], form=".2g", missing="not reached")
    found["rate"] = chosen
    return {f"beta = {momentum:g}: {name}": values for name, values in found.items()}


def figure(result: xr.Dataset, measured: xr.Dataset, config: MethodsCompare) -> Figure:
    """Draws one panel for some and one for all clients, with one row of dots for each method."""
    over = "problem"
    mean = measured["difference"].mean(over)
    # Problems are drawn independently of each other.
    error = (measured["error"] ** 2).sum(over) ** 0.5 / measured.sizes[over]
    order = np.argsort(-mean.mean(["clients", "momentum"]).values, kind="stable")
    titles = [f"{config.cohort_size} of {config.num_clients} clients", "all clients"]
    names = dict(zip(("some", "all"), titles, strict=True))
    labels = {
        "clients": [names[name] for name in config.clients],
        "momentum": [f"momentum {momentum:g}" for momentum in config.momenta],
    }
    dims = ("clients", "algorithm", "momentum")
    values, errors = (
        each.isel(algorithm=order).assign_coords(labels).transpose(*dims) for each in (mean, error)
    )
    about = result.attrs["manifest"]
    caption = f"Means over {measured.sizes[over]} problems and standard errors of "
    caption += f"{config.num_seeds} seeds on {', '.join(about['datasets'])}, {config.epochs} local "
    caption += f"epochs, each method at its best of {len(config.rates)} rates and of its own "
    caption += f"setting, chosen on {config.selection_seeds} other seeds."
    return dots(
        *(values, errors),
        xlabel="accuracy minus FedAvg's, in points",
        title="What clients get from each method, compared with FedAvg",
        caption=caption,
    )


ITEMS = (Item("methods-compare", MethodsCompare(), run, measure, judge, table, figure),)
"""A comparison of all methods of a single model."""
