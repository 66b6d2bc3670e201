"""Beyond the papers: several models at once, each of which wants to appeal to its clients.

MFA-Rand or MFA-RR decides who trains which model, MaxFL how each model aggregates, and a client to
whom the model of its group does not appeal stays away in that round.
"""

import dataclasses
from collections.abc import Mapping
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
from fedjax_mm.experiments.tasks import Config, Count, Positive, Seed, Share
from fedjax_mm.papers.bhuyan2022.accuracy import verdict
from fedjax_mm.papers.cho2022.clients import POPULATIONS, classifier, draw_clients
from fedjax_mm.papers.old import Claim, Judgement, Reproduction
from fedjax_mm.results import plots
from fedjax_mm.results.metrics import standard_error
from fedjax_mm.sweeps.execute import Execution, sweep
from fedjax_mm.sweeps.plan import Setup
from fedjax_mm.tasks.requirements import OwnModels, own_models, requiring

QUESTIONS = ("which digit", "digit modulo 5", "5 or more")
"""What the three models learn of the same images."""

_ASSIGNMENTS: Mapping[str, Any] = {"MFA-Rand": mfa_rand, "MFA-RR": mfa_rr}
_AGGREGATIONS: Mapping[str, Any] = {"FedAvg": fedavg, "MaxFL": maxfl}


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
    """The same clients with one column of labels for each question."""

    def columns(store: ClientData) -> ClientData:
        x, y = store.examples
        y = np.asarray(y)
        answers = np.stack([y, y % 5, y // 5], axis=1).astype(np.int32)
        return dataclasses.replace(store, examples=(x, answers))

    return dataclasses.replace(data, train=columns(data.train), test=columns(data.test))


def run_multi(config: MultiAppeal, execution: Execution | None = None) -> xr.Dataset:
    """Every assignment with every aggregation, over the rounds; each seed has its own clients."""
    population = POPULATIONS["digits"]._replace(
        num_clients=config.num_clients, num_unseen=config.num_unseen
    )
    words = np.random.SeedSequence(config.seed).generate_state(config.num_seeds)
    data = ask(
        draw_clients(
            "digits",
            None,
            population,
            partition="dirichlet",
            flipped=config.flipped,
            seeds=[int(word) for word in words],
        )
    )

    def prepare(rng_key: Any, data: FederatedData, draw: Any, **point: str) -> OwnModels:
        """The clients' own models for every question."""
        del point
        mine = data.select(draw)

        def of_question(column: Any) -> OwnModels:
            task = classifier(mine, dropout_rate=0.5, column=column)
            return own_models(
                rng_key,
                task,
                model=column,
                learning_rate=config.learning_rate,
                num_steps=config.warm_up_steps,
                batch_size=config.batch_size,
            )

        return lax.map(of_question, jnp.arange(len(QUESTIONS)))

    def build(
        assignment: str, aggregation: str, data: FederatedData, draw: Any, prepared: OwnModels
    ) -> Setup:
        mine = data.select(draw)
        tasks: list[Any] = [
            classifier(mine, dropout_rate=0.5, column=column) for column in range(len(QUESTIONS))
        ]
        tasks = [
            requiring(
                task, jax.tree.map(itemgetter(column), prepared), num_unseen=config.num_unseen
            )
            for column, task in enumerate(tasks)
        ]
        algorithm = _AGGREGATIONS[aggregation](
            config.learning_rate, local_steps=config.local_steps, batch_size=config.batch_size
        )
        groups = _ASSIGNMENTS[assignment](config.num_clients, len(QUESTIONS))
        staying = appealing(
            groups, cohort_size=config.num_clients, from_round=config.appealing_from
        )
        return Setup(tasks, algorithm, staying)

    result = sweep(
        build,
        {"assignment": list(_ASSIGNMENTS), "aggregation": list(_AGGREGATIONS)},
        num_rounds=config.num_rounds,
        num_seeds=config.num_seeds,
        seed=config.seed,
        shared={"data": data},
        per_seed={"draw": np.arange(config.num_seeds)},
        prepare=prepare,
        record_every=config.record_every,
        data=data.kind,
        execution=execution,
    )
    result.attrs["manifest"] |= {
        "config": config.model_dump(mode="json"),
        "datasets": [data.name],
        "population": population._asdict(),
    }
    return result.assign_coords(question=("model", list(QUESTIONS)))


def judge_multi(dataset: xr.Dataset, config: MultiAppeal) -> Judgement:
    """Appeal and accuracy of every model at the end, and whether MaxFL's appeal is ahead."""
    del config
    last = 100 * dataset.isel(round=-1)[["appeal", "unseen_appeal", "accuracy"]]
    skipped = dataset["idle_rounds"].isel(round=-1).mean("seed")
    table: list[tuple[str, ...]] = [
        ("assignment, aggregation", "model", "GM-Appeal", "unseen", "test accuracy", "skipped")
    ]
    for who in dataset["assignment"].values:
        for how in dataset["aggregation"].values:
            for model, question in enumerate(QUESTIONS):
                here = last.sel(assignment=who, aggregation=how).isel(model=model)
                idle = skipped.sel(assignment=who, aggregation=how).isel(model=model).item()
                cells = [_cell(here[name].values) for name in here.data_vars]
                table.append((f"{who}, {how}", question, *cells, f"{idle:.0f}"))
    measured = {str(name): last[name].mean("seed").values for name in last.data_vars}
    claims = []
    for who in dataset["assignment"].values:
        appeal = last["appeal"].sel(assignment=who).mean("model")
        ahead = (appeal.sel(aggregation="MaxFL") - appeal.sel(aggregation="FedAvg")).values
        error = standard_error(ahead)  # NaN for one seed, of which nothing holds
        claims.append(
            Claim(
                f"{who}: MaxFL's mean appeal exceeds FedAvg's by more than 2 standard errors",
                bool(ahead.mean() - 2 * error > 0),
                f"MaxFL minus FedAvg {ahead.mean():+.1f} ± {error:.1f} points",
            )
        )
    return Judgement(measured, tuple(claims), tuple(table))


def _cell(values: np.ndarray) -> str:
    error = standard_error(values)
    return f"{values.mean():.1f}" + (f" ± {error:.1f}" if np.isfinite(error) else "")


def plot_multi(dataset: xr.Dataset, config: MultiAppeal, judgement: Judgement) -> Figure:
    """Appeal over the rounds: a panel for each assignment and model."""
    rows = []
    for who in dataset["assignment"].values:
        row = []
        for model, question in enumerate(QUESTIONS):
            lines = []
            for how in dataset["aggregation"].values:
                curve = 100 * dataset["appeal"].sel(assignment=who, aggregation=how)
                curve = curve.isel(model=model).transpose("round", "seed")
                error = standard_error(curve.values, axis=1)
                lines.append(
                    plots.Line(
                        str(how),
                        curve["round"].values,
                        curve.mean("seed").values,
                        error if np.isfinite(error).all() else None,
                    )
                )
            title = f"{who}: {question}"
            row.append(plots.Panel(title, "round", "GM-Appeal in percent", lines))
        rows.append(row)
    about = dataset.attrs["manifest"]
    return plots.line_panels(
        rows,
        title=f"{about['datasets'][0]} ({about['data']} data), {config.num_clients} clients, "
        f"{len(QUESTIONS)} models at once",
        caption=f"Means over {config.num_seeds} seeds with clients of their own, with standard "
        f"errors; {config.flipped:.0%} of the clients have flipped labels. From round "
        f"{config.appealing_from} on only clients train a model to whom it appeals. "
        + verdict(judgement),
    )


REPRODUCTIONS = (
    Reproduction(
        id="multi-maxfl",
        paper={
            "shows": "an example of our own, which no paper has: MFA's assignments with MaxFL",
            "open": ["all settings are ours; the digits are few"],
        },
        config=MultiAppeal(),
        run=run_multi,
        judge=judge_multi,
        plot=plot_multi,
    ),
)
"""Multi-model MaxFL."""
