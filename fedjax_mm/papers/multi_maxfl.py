"""Several models at once, each of which wants to appeal to its clients; in no paper.

MFA-Rand or MFA-RR decides who trains which model, MaxFL how each model aggregates, and a client to
whom the model of its group does not appeal stays away in that round.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import lax
from matplotlib.figure import Figure

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.algorithms.maxfl import maxfl
from fedjax_mm.assignment import appealing, mfa_rand, mfa_rr
from fedjax_mm.data.clients import ClientData
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.fields import Config, Count, Positive, Seed, Share
from fedjax_mm.papers.cho2022.clients import POPULATIONS, classifier, draw_clients
from fedjax_mm.papers.claims import Claim, estimate, exceeds
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.tables import Table, cells, columns, rows
from fedjax_mm.results import plots
from fedjax_mm.sweeps.execute import Execution, sweep
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.requirements import OwnModels, Requiring, own_models, requiring

QUESTIONS = ("which digit", "digit modulo 5", "5 or more")
"""The three models' questions about the same images."""

_ASSIGNMENTS: Mapping[str, Any] = {"MFA-Rand": mfa_rand, "MFA-RR": mfa_rr}
_AGGREGATIONS: Mapping[str, Any] = {"FedAvg": fedavg, "MaxFL": maxfl}
_METRICS = {"appeal": "GM-Appeal", "unseen_appeal": "unseen", "accuracy": "test accuracy"}


class MultiAppeal(Config):
    """Settings: three questions about the digits, of clients some of whom have flipped labels."""

    num_clients: Count = 20
    num_unseen: Count = 10
    flipped: Share = 0.3
    learning_rate: Positive = 0.05
    local_steps: Count = 20
    batch_size: Count = 32
    warm_up_steps: Count = 50
    appealing_from: Count = 10
    num_rounds: Count = 100
    num_seeds: Count = 4
    seed: Seed = 0
    record_every: Count = 5


def ask(data: FederatedData) -> FederatedData:
    """Returns the same clients with one column of labels for each question."""

    def columns(store: ClientData) -> ClientData:
        x, y = store.examples
        y = np.asarray(y)
        answers = np.stack([y, y % 5, y // 5], axis=1).astype(np.int32)
        return dataclasses.replace(store, examples=(x, answers))

    return dataclasses.replace(data, train=columns(data.train), test=columns(data.test))


def run_multi(config: MultiAppeal, execution: Execution | None = None) -> xr.Dataset:
    """Returns every assignment with every aggregation; each seed has clients of its own."""
    sizes = {"num_clients": config.num_clients, "num_unseen": config.num_unseen}
    population = POPULATIONS["digits"]._replace(**sizes)
    seeds = np.random.SeedSequence(config.seed).generate_state(config.num_seeds).tolist()
    how: dict[str, Any] = {"partition": "dirichlet", "flipped": config.flipped, "seeds": seeds}
    data = ask(draw_clients("digits", None, population, **how))
    result = sweep(
        partial(_build, config),
        {"assignment": list(_ASSIGNMENTS), "aggregation": list(_AGGREGATIONS)},
        num_rounds=config.num_rounds,
        num_seeds=config.num_seeds,
        seed=config.seed,
        shared={"data": data},
        per_seed={"draw": np.arange(config.num_seeds)},
        prepare=partial(_prepare, config),
        record_every=config.record_every,
        data=data.kind,
        execution=execution,
    )
    result.attrs["manifest"] |= {"datasets": [data.name], "population": population._asdict()}
    return result.assign_coords(question=("model", list(QUESTIONS)))


def _prepare(
    config: MultiAppeal, rng_key: Any, data: FederatedData, draw: Any, **point: str
) -> OwnModels:
    """Returns the clients' own models for every question."""
    mine, rate = data.select(draw), config.learning_rate
    how: dict[str, Any] = {"num_steps": config.warm_up_steps, "batch_size": config.batch_size}

    def of_question(column: Any) -> OwnModels:
        task = classifier(mine, dropout_rate=0.5, column=column)
        return own_models(rng_key, task, model=column, learning_rate=rate, **how)

    # Questions differ in a column only: lax.map compiles one training for all of them.
    return lax.map(of_question, jnp.arange(len(QUESTIONS)))


def _build(
    config: MultiAppeal,
    assignment: str,
    aggregation: str,
    data: FederatedData,
    draw: Any,
    prepared: OwnModels,
) -> Setup:
    mine = data.select(draw)

    def task_of(column: int) -> Requiring:
        task = classifier(mine, dropout_rate=0.5, column=column)
        own = jax.tree.map(itemgetter(column), prepared)
        return requiring(task, own, num_unseen=config.num_unseen)

    local = {"local_steps": config.local_steps, "batch_size": config.batch_size}
    algorithm = _AGGREGATIONS[aggregation](config.learning_rate, **local)
    groups = _ASSIGNMENTS[assignment](config.num_clients, len(QUESTIONS))
    # Cohorts are as large as all groups: a client trains unless the model does not appeal to it.
    invited = {"cohort_size": config.num_clients, "from_round": config.appealing_from}
    tasks = [task_of(column) for column in range(len(QUESTIONS))]
    return Setup(tasks, algorithm, appealing(groups, **invited))


def measure(result: xr.Dataset, config: MultiAppeal) -> xr.Dataset:
    """Returns every model's appeal and accuracy over the rounds, and rounds that it skipped."""
    by_question = result.swap_dims(model="question")
    percent = 100 * by_question[list(_METRICS)].to_array("metric")
    percent = percent.assign_coords(metric=list(_METRICS.values()))
    return xr.Dataset(
        {
            "percent": percent,
            "mean": percent.mean("seed"),
            "standard error": estimate(percent).error,
            "skipped rounds": by_question["idle_rounds"].isel(round=-1).mean("seed"),
        }
    )


def claims(measured: xr.Dataset, config: MultiAppeal) -> Sequence[Claim]:
    """Claims that MaxFL's appeal is ahead at the end, in the mean over the models."""
    appeal = measured["percent"].sel(metric="GM-Appeal").isel(round=-1).mean("question")
    ahead = appeal.sel(aggregation="MaxFL") - appeal.sel(aggregation="FedAvg")
    text = "MaxFL's mean appeal exceeds FedAvg's by more than 2 standard errors"
    return [
        exceeds(f"{name}: {text}", ahead.sel(assignment=name), form=".1f")
        for name in ahead["assignment"].values
    ]


def table(measured: xr.Dataset, config: MultiAppeal) -> Sequence[Table]:
    """Returns a row for each assignment, aggregation and model."""
    last = measured.isel(round=-1)
    contents = columns(cells(last["mean"], last["standard error"], form=".1f"), "metric")
    contents["skipped"] = cells(last["skipped rounds"], form=".0f")
    return [rows(contents, ("assignment", "aggregation", "question"))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: MultiAppeal) -> Figure:
    """Draws appeal over the rounds: a panel for each assignment and model."""
    appeal = measured.sel(metric="GM-Appeal")
    # Rows of panels, panels, lines and x, in the order in which `plots.panels` takes dimensions.
    dims = ("assignment", "question", "aggregation", "round")
    mean, error = (appeal[name].transpose(*dims) for name in ("mean", "standard error"))
    how: dict[str, Any] = {"xlabel": "round", "style": "-"}
    drawn = [
        plots.panels(*pair, ylabel=f"{pair[0].assignment.item()}: GM-Appeal in percent", **how)
        for pair in zip(mean, error, strict=True)
    ]
    about = result.attrs["manifest"]
    return plots.draw(
        drawn,
        title=f"{about['datasets'][0]} ({about['data']} data), {config.num_clients} clients, "
        f"{len(QUESTIONS)} models at once",
        caption=f"Means over {config.num_seeds} seeds with clients of their own, with standard "
        f"errors; {config.flipped:.0%} of the clients have flipped labels. From round "
        f"{config.appealing_from} on only clients train a model to whom it appeals.",
    )


ITEMS = (
    Item(
        id="multi-maxfl",
        title="Three models at once, each of which wants to appeal",
        settings=MultiAppeal(),
        run=run_multi,
        measure=measure,
        claims=claims,
        table=table,
        figure=figure,
    ),
)
"""Multi-model MaxFL."""
