"""Several models trained at once with MaxFL, a combination that is not part of any paper.

MFA-Rand or MFA-RR assigns clients to models, MaxFL aggregates each model, and clients skip rounds
in which the assigned model does not appeal to them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import lax
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.algorithms.maxfl import maxfl
from fedjax_mm.assignments.appealing import appealing
from fedjax_mm.data.clients import ClientData
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.fields import Config, Count, Positive, Seeded, Share
from fedjax_mm.local import local_sgd
from fedjax_mm.metrics import estimate
from fedjax_mm.papers.bhuyan2022.gains import ASSIGNMENTS
from fedjax_mm.papers.cho2022.clients import POPULATIONS, classifier, draw_clients
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import compare
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.training import train
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.requirements import OwnModels, own_models, requiring

QUESTIONS = ("which digit", "digit modulo 5", "5 or more")
"""The questions that the three models answer about the same images."""

_AGGREGATIONS: Mapping[str, Any] = {"FedAvg": fedavg, "MaxFL": maxfl}
_METRICS = {"appeal": "GM-Appeal", "unseen_appeal": "unseen", "accuracy": "test accuracy"}


class Requirement(Config):
    """Training of the clients' own models, whose losses are thresholds for the global models."""

    learning_rate: Positive = 0.05
    batch_size: Count = 32
    num_steps: Count = 50


class MultiAppeal(Seeded):
    """Settings of three questions about the digits, with flipped labels for some clients."""

    num_clients: Count = 20
    num_unseen: Count = 10
    flipped: Share = 0.3
    learning_rate: Positive = 0.05
    local_steps: Count = 20
    batch_size: Count = 32
    requirement: Requirement = Requirement()
    appealing_from: Count = 10
    num_rounds: Count = 100
    num_seeds: Count = 32
    record_every: Count = 5

    def build(self, assignment: str, aggregation: str, data: FederatedData, seed: int) -> Setup:
        """Sets up the simulation of one point of the grid."""
        mine = data.select(seed - self.first_seed)
        method, groups = _AGGREGATIONS[aggregation], ASSIGNMENTS[assignment]
        steps, size = self.local_steps, self.batch_size
        # Make cohorts as large as the groups, so that every client trains if its model appeals to
        # it.
        invited = {"cohort_size": self.num_clients, "from_round": self.appealing_from}
        return Setup(
            [classifier(mine, dropout_rate=0.5, column=i) for i in range(len(QUESTIONS))],
            method(local_sgd(self.learning_rate, steps=steps, batch_size=size)),
            appealing(groups(self.num_clients, len(QUESTIONS)), **invited),
            prepare=partial(_with_thresholds, self.num_unseen, **dict(self.requirement)),
        )


def _with_thresholds(num_unseen: int, rng_key: Any, setup: Setup, **how: Any) -> Setup:
    """Trains the clients' own models for every question, and gives tasks their thresholds."""
    tasks: Any = setup.tasks

    def of_question(column: Any) -> OwnModels:
        task = dataclasses.replace(tasks[0], column=column)
        return own_models(rng_key, task, model=column, **how)

    # Use lax.map to compile a single training for all questions, because they differ only in a
    # column.
    every = lax.map(of_question, jnp.arange(len(tasks)))
    own = [jax.tree.map(itemgetter(column), every) for column in range(len(tasks))]
    pairs = zip(tasks, own, strict=True)
    return setup._replace(tasks=[requiring(*pair, num_unseen=num_unseen) for pair in pairs])


def _answers(y: np.ndarray) -> list[np.ndarray]:
    """The labels of the digits for each question."""
    return [y, y % 5, y // 5]


def ask(
    data: FederatedData,
    answers: Callable[[np.ndarray], Sequence[np.ndarray]] = _answers,
    num_classes: int | None = None,
) -> FederatedData:
    """Replaces the labels with one column of answers per question.

    Args:
      data: the clients' data, with one label per example.
      answers: maps the labels to the answers of each question.
      num_classes: the number of classes of the answers; defaults to that of the data.
    """

    def columns(store: ClientData) -> ClientData:
        x, y = store.examples
        found = np.stack(answers(np.asarray(y)), axis=-1).astype(np.int32)
        return dataclasses.replace(store, examples=(x, found))

    how: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    return dataclasses.replace(data, train=columns(data.train), test=columns(data.test), **how)


def run(config: MultiAppeal, execution: Execution | None = None) -> xr.Dataset:
    """Runs every assignment with every aggregation, with separate clients per seed."""
    sizes = config.model_dump(include={"num_clients", "num_unseen"})
    population = POPULATIONS["digits"]._replace(**sizes)
    how: dict[str, Any] = {
        "partition": "dirichlet_labels",
        "flipped": config.flipped,
        "flips": "everywhere",
        "seeds": config.data_seeds,
    }
    data = ask(draw_clients("digits", None, population, **how))
    axes = {"assignment": list(ASSIGNMENTS), "aggregation": list(_AGGREGATIONS)}
    result = train([data], partial(config.build, data=data), axes, config, execution)
    result.attrs["manifest"] |= {"population": population._asdict()}
    return result.assign_coords(question=("model", list(QUESTIONS)))


def measure(result: xr.Dataset, config: MultiAppeal) -> xr.Dataset:
    """Each model's appeal and accuracy over the rounds, and its idle rounds."""
    by_question = result.swap_dims(model="question")
    percent = 100 * by_question[list(_METRICS)].rename(_METRICS).to_dataarray("metric")
    found = {"percent": percent, "mean": percent.mean("seed")}
    found["standard error"] = estimate(percent).error
    found["skipped rounds"] = by_question["idle_rounds"].isel(round=-1).mean("seed")
    return xr.Dataset(found)


_MARGIN = 1.0  # points of appeal


def judge(measured: xr.Dataset, config: MultiAppeal) -> Iterator[Check]:
    """Compares MaxFL's final appeal with FedAvg's, averaged over models."""
    appeal = measured["percent"].sel(metric="GM-Appeal").isel(round=-1).mean("question")
    ahead = appeal.sel(aggregation="MaxFL") - appeal.sel(aggregation="FedAvg")
    for name in ahead["assignment"].values:
        found = ahead.sel(assignment=name, drop=True)
        yield compare(f"{name}: MaxFL's mean appeal against FedAvg's", found, _MARGIN, ".1f")


def table(measured: xr.Dataset, config: MultiAppeal) -> Sequence[Table]:
    """One row per assignment, aggregation and model."""
    last = measured.isel(round=-1)
    contents = columns(cells(last["mean"], last["standard error"], form=".1f"), "metric")
    contents["skipped"] = cells(last["skipped rounds"], form=".0f")
    return [rows(contents, ("assignment", "aggregation", "question"))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: MultiAppeal) -> Figure:
    """Draws the models' mean appeal over the rounds, with one panel per assignment."""
    appeal = measured["percent"].sel(metric="GM-Appeal").mean("question", skipna=False)
    # Order the dimensions as panels, lines and x, as `plots.panels` expects.
    dims = ("assignment", "aggregation", "round")
    mean, error = (each.transpose(*dims) for each in estimate(appeal))
    drawn = plots.panels(mean, error, xlabel="round", ylabel="GM-Appeal in percent", style="-")
    about = result.attrs["manifest"]
    title = f"{about['datasets'][0]} ({about['data']} data), {config.num_clients} clients, "
    caption = f"Means and standard errors over models and {config.num_seeds} seeds, where "
    caption += f"{config.flipped:.0%} of the clients have flipped labels, and from round "
    caption += f"{config.appealing_from} on only clients train a model to whom it appeals."
    return plots.draw([drawn], title=f"{title}{len(QUESTIONS)} models at once", caption=caption)


ITEMS = (Item("multi-maxfl", MultiAppeal(), run, measure, judge, table, figure),)
"""Multi-model MaxFL."""
