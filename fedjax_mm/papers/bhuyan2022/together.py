"""Bhuyan, Moharir, Joshi, section 7.2: different models trained together, Tables 4 and 5."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm.assignment import mfa_rr, sequential
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.tasks import Positive
from fedjax_mm.papers.bhuyan2022.accuracy import (
    ABOVE_MAJORITY,
    DRAWS,
    NOT_GIVEN,
    PARTS,
    SURROGATE,
    Trainings,
    accuracies_of,
    majority,
    rounds_to_targets,
    verdict,
)
from fedjax_mm.papers.bhuyan2022.learners import ATTRIBUTES, FacesLearner, Learner, SyntheticLearner
from fedjax_mm.papers.old import Claim, Judgement, Reproduction
from fedjax_mm.results import plots
from fedjax_mm.results.metrics import gain, standard_error
from fedjax_mm.sweeps.execute import Execution, sweep
from fedjax_mm.sweeps.grid import Setup


class Together(Trainings):
    """Settings of Tables 4 and 5: different models, each to be as good as FedAvg alone made it."""

    learners: Annotated[tuple[Learner, ...], Field(min_length=1)]
    published: Mapping[str, tuple[Positive, Positive, Positive, Positive]]
    """Of every model: train accuracy after T_1 and T_M, test accuracy after T_1 and T_M."""
    published_gain: tuple[Positive, Positive]

    @property
    def models(self) -> list[tuple[str, int, int]]:
        """Of every model: its name, its learner, and its column of the labels."""
        return [
            (name, i, column)
            for i, learner in enumerate(self.learners)
            for column, name in enumerate(_names(learner))
        ]

    @model_validator(mode="after")
    def _models_fit(self) -> Self:
        mfa_rr(self.num_clients, len(self.models))
        return self


def _names(learner: SyntheticLearner | FacesLearner) -> Sequence[str]:
    if isinstance(learner, FacesLearner):
        return learner.attributes
    return ("Logistic regression",)


def run_together(config: Together, execution: Execution | None = None) -> xr.Dataset:
    """FedAvg on one model after the other, and MFA-RR on all, for equally many rounds."""
    num_models = len(config.models)
    stacks = [
        learner.data(config.num_clients, config.num_seeds, config.seed, config.directory)
        for learner in config.learners
    ]
    assignments = {
        "FedAvg, one by one": sequential(
            config.num_clients, num_models, rounds_per_model=config.num_rounds
        ),
        "MFA-RR": mfa_rr(config.num_clients, num_models),
    }

    def build(algorithm: str, data: Sequence[FederatedData], **which: Any) -> Setup:
        mine = [stack.select(which[f"data_{i}"]) for i, stack in enumerate(data)]
        learners = config.learners
        tasks = [learners[i].task(mine[i], column) for _, i, column in config.models]
        training = [learner.algorithm() for learner in learners]
        starts = [
            learners[i].start(task) for (_, i, _), task in zip(config.models, tasks, strict=True)
        ]
        if len(learners) == 1:
            starts = starts[0]
        return Setup(
            tasks, [training[i] for _, i, _ in config.models], assignments[algorithm], starts
        )

    per_seed = {
        f"data_{i}": np.arange(config.num_seeds) % len(stack.train.counts)
        for i, stack in enumerate(stacks)
    }
    kinds = {stack.kind for stack in stacks}
    result = sweep(
        build,
        {"algorithm": list(assignments)},
        num_rounds=num_models * config.num_rounds,
        num_seeds=config.num_seeds,
        seed=config.seed,
        shared={"data": stacks},
        per_seed=per_seed,
        record_every=config.resolution,
        data="surrogate" if "surrogate" in kinds else "real" if "real" in kinds else "synthetic",
        execution=execution,
    )
    accuracies = accuracies_of(result, config, stacks)
    for part in PARTS:
        shares = [
            np.mean(
                [
                    majority(getattr(stacks[i].select(draw), part), column)
                    for draw in per_seed[f"data_{i}"]
                ]
            )
            for _, i, column in config.models
        ]
        accuracies[f"{part}_majority"] = "model", shares
    return accuracies.assign_coords(name=("model", [name for name, _, _ in config.models]))


def judge_together(dataset: xr.Dataset, config: Together) -> Judgement:
    """Each model's target is FedAvg's accuracy after its own T_1 rounds; T_M is when all got it."""
    names = [name for name, _, _ in config.models]
    parts = {part: _part_together(dataset, part, config) for part in PARTS}
    measured = {
        part: {name: value for name, value in values.items() if name != "text"}
        for part, values in parts.items()
    }
    claims = [
        Claim(
            f"{part}: every model is at least as good as FedAvg alone made it, with a gain above 1",
            bool((values["gain"] > 1).all()),
            f"gain {values['text']} (published {values['published_gain']:g})",
        )
        for part, values in parts.items()
    ]
    above = {part: values["alone"] - values["majority"] for part, values in parts.items()}
    claims.append(
        Claim(
            f"FedAvg alone is at least {ABOVE_MAJORITY} points above the most frequent class",
            all((points >= ABOVE_MAJORITY).all() for points in above.values()),
            "; ".join(
                f"{part} " + ", ".join(f"{x:+.1f}" for x in points)
                for part, points in above.items()
            ),
        )
    )
    header = (
        "model",
        *(f"{part}, {when}" for part in PARTS for when in ("T_1", "T_M", "majority")),
    )
    rows = [
        (
            name,
            *(
                cell
                for k, part in enumerate(PARTS)
                for cell in _cells(parts[part], m, config.published.get(name), k)
            ),
        )
        for m, name in enumerate(names)
    ]
    gains = ("gain", *(cell for part in PARTS for cell in (parts[part]["text"], "", "")))
    return Judgement(measured, tuple(claims), (header, *rows, gains))


def _part_together(dataset: xr.Dataset, part: str, config: Together) -> dict[str, Any]:
    accuracy = dataset[f"{part}_accuracy"]
    turns = xr.DataArray(config.num_rounds * (1 + np.arange(len(config.models))), dims="model")
    alone = accuracy.sel(algorithm="FedAvg, one by one").sel(round=turns).drop_vars("round")
    together = accuracy.sel(algorithm="MFA-RR")
    rounds = rounds_to_targets(together, alone.drop_vars("algorithm"))
    gains = gain(len(config.models), config.num_rounds, rounds.values)
    at_the_end = together["round"].values[-1]
    last = rounds.fillna(at_the_end).astype(int)
    reached = int(np.isfinite(gains).sum())
    text = f"not reached in {gains.size - reached} of {gains.size}"
    if reached == gains.size:
        text = f"{gains.mean():.2f} ± {standard_error(gains):.2f}, T_M = {rounds.values.mean():.0f}"
    return {
        "alone": 100 * alone.mean("seed").values,
        "together": 100 * together.sel(round=last).mean("seed").values,
        "majority": 100 * dataset[f"{part}_majority"].values,
        "rounds": rounds.values,
        "gain": gains,
        "reached": reached,
        "published_gain": config.published_gain[PARTS.index(part)],
        "text": text,
    }


def _cells(
    values: Mapping[str, Any], model: int, published: Sequence[float] | None, part: int
) -> list[str]:
    """Ours (published) alone and together, and the most frequent class."""
    paper = ["", ""] if published is None else [f" ({x:g})" for x in published[2 * part :][:2]]
    ours = [values["alone"][model], values["together"][model]]
    return [
        *(f"{x:.1f}{p}" for x, p in zip(ours, paper, strict=True)),
        f"{values['majority'][model]:.1f}",
    ]


def plot_together(dataset: xr.Dataset, config: Together, judgement: Judgement) -> Figure:
    """Every model's accuracy alone and together, ours and the paper's."""
    names = [name for name, _, _ in config.models]
    about = dataset.attrs["manifest"]
    bars: dict[str, dict[str, Any]] = {}
    for k, part in enumerate(PARTS):
        ours = judgement.measured[part]
        paper = np.array([config.published.get(name, (np.nan,) * 4) for name in names])
        bars[f"{part}: gain {_short(ours)} (published {ours['published_gain']:g})"] = {
            "FedAvg alone, $T_1$": ours["alone"],
            "MFA-RR, $T_M$": ours["together"],
            "published, $T_1$": paper[:, 2 * k],
            "published, $T_M$": paper[:, 2 * k + 1],
            "majority class": ours["majority"],
        }
    return plots.grouped_points(
        names,
        bars,
        ylabel="accuracy in percent",
        title=f"{' and '.join(about['datasets'])} ({about['data']} data), "
        f"N = {config.num_clients}, M = {len(names)}, $T_1$ = {config.num_rounds}",
        caption=f"Means over {config.num_seeds} seeds. T_M is the first recorded round at which "
        "every model has at least the accuracy that FedAvg alone gave it after T_1 rounds; where "
        f"that was not reached, the last of {len(names) * config.num_rounds} rounds. "
        + verdict(judgement),
    )


def _short(values: Mapping[str, Any]) -> str:
    gains = np.asarray(values["gain"], float)
    return f"{gains.mean():.2f}" if np.isfinite(gains).all() else "not reached"


_TABLE_4 = {
    "Eyeglasses": (74.7, 84.6, 69.1, 71.9),
    "Bald": (74.0, 74.5, 66.8, 69.4),
    "Goatee": (74.3, 83.5, 64.7, 68.7),
    "Wearing_Necklace": (73.3, 80.3, 66.2, 72.6),
    "Smiling": (72.0, 78.7, 76.0, 79.7),
    "Mustache": (74.1, 82.1, 65.4, 72.1),
    "Male": (77.1, 85.0, 58.7, 63.5),
    "Wearing_Lipstick": (75.4, 83.8, 65.9, 72.7),
    "Double_Chin": (75.3, 83.9, 63.9, 69.3),
}
_TABLE_5 = {
    "Logistic regression": (51.9, 52.4, 52.8, 55.6),
    "Eyeglasses": (86.7, 87.2, 75.8, 77.5),
}

REPRODUCTIONS = (
    Reproduction(
        id="mfa-table4",
        paper={
            "table": "Table 4: accuracies in percent, train after T_1 and T_M, test likewise",
            "values": _TABLE_4,
            "rounds": {"T_1": 50, "T_M": {"train": 117, "test": 126}},
            "gain": {"train": 3.846, "test": 3.571},
            "open": [
                NOT_GIVEN,
                SURROGATE,
                "the number of clients is not given: num_clients = 96, as in Figure 6(c)",
                "the accuracies imply balanced classes, but no selection of images balances nine "
                "attributes at once: the files' own shares are shown as the majority class",
            ],
        },
        config=Together(
            learners=(FacesLearner(attributes=ATTRIBUTES),),
            num_clients=96,
            num_rounds=50,
            num_seeds=2,
            record_every=5,
            published=_TABLE_4,
            published_gain=(3.846, 3.571),
        ),
        run=run_together,
        judge=judge_together,
        plot=plot_together,
    ),
    Reproduction(
        id="mfa-table5",
        paper={
            "table": "Table 5: accuracies in percent, train after T_1 and T_M, test likewise",
            "values": _TABLE_5,
            "rounds": {"T_1": 100, "T_M": {"train": 100, "test": 142}},
            "gain": {"train": 2.0, "test": 1.41},
            "open": [
                NOT_GIVEN,
                DRAWS,
                SURROGATE,
                "the number of clients is not given: num_clients = 96, as in Figure 6(c)",
            ],
        },
        config=Together(
            learners=(SyntheticLearner(), FacesLearner()),
            num_clients=96,
            num_rounds=100,
            num_seeds=2,
            record_every=2,
            published=_TABLE_5,
            published_gain=(2.0, 1.41),
        ),
        run=run_together,
        judge=judge_together,
        plot=plot_together,
    ),
)
"""Tables 4 and 5."""
