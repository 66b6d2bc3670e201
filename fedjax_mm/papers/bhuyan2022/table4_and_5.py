"""Tables 4 and 5: different models trained together, each to be as good as FedAvg alone made it."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Self

import jax.numpy as jnp
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm import plots
from fedjax_mm.assignments.partitions import mfa_rr, sequential
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.metrics import gain
from fedjax_mm.papers.bhuyan2022 import accuracy
from fedjax_mm.papers.bhuyan2022.accuracy import PARTS, TARGETS, Trainings
from fedjax_mm.papers.bhuyan2022.learners import (
    ATTRIBUTES,
    FacesLearner,
    Learner,
    SyntheticLearner,
    check_files,
)
from fedjax_mm.papers.claims import Claim, claim, estimate
from fedjax_mm.papers.figures import points
from fedjax_mm.papers.item import Item, published
from fedjax_mm.papers.tables import Table, cells, rows
from fedjax_mm.results.labels import describe
from fedjax_mm.sweeps.execute import Execution, sweep
from fedjax_mm.sweeps.grid import Setup

_ALONE, _TOGETHER = "FedAvg, one by one", "MFA-RR"
_WHEN = {"T_1": "FedAvg alone, $T_1$", "T_M": "MFA-RR, $T_M$", "majority": "most frequent class"}


class Together(Trainings):
    """Settings of Tables 4 and 5."""

    learners: Annotated[tuple[Learner, ...], Field(min_length=1)]

    @property
    def models(self) -> list[tuple[str, int, int]]:
        """Returns every model's name, its learner, and its column of the labels."""
        return [
            (name, i, column)
            for i, learner in enumerate(self.learners)
            for column, name in enumerate(learner.models)
        ]

    @model_validator(mode="after")
    def _models_fit(self) -> Self:
        mfa_rr(self.num_clients, len(self.models))
        check_files(self.directory, *self.learners)
        return self

    def setup(self, algorithm: str, data: Sequence[FederatedData], draw: Any) -> Setup:
        """Returns FedAvg on one model after the other, or MFA-RR on all."""
        draws = [accuracy.draw_of(stack, jnp.asarray(draw, int)) for stack in data]
        tasks = [self.learners[i].task(draws[i], column) for _, i, column in self.models]
        training = [learner.algorithm() for learner in self.learners]
        which = [i for _, i, _ in self.models]
        starts = [self.learners[i].start(task) for i, task in zip(which, tasks, strict=True)]
        one_by_one = partial(sequential, rounds_per_model=self.num_rounds)
        assign = one_by_one if algorithm == _ALONE else mfa_rr
        # Models of one learner start alike, and are stacked; those of several have a start each.
        start = starts if len(self.learners) > 1 else starts[0]
        return Setup(
            tasks, [training[i] for i in which], assign(self.num_clients, len(tasks)), start
        )


def run_together(config: Together, execution: Execution | None = None) -> xr.Dataset:
    """Returns accuracies of FedAvg and of MFA-RR, for equally many rounds."""
    stacks = [learner.data(config) for learner in config.learners]
    kinds = [stack.kind for stack in stacks]
    result = sweep(
        config.setup,
        {"algorithm": [_ALONE, _TOGETHER]},
        num_rounds=len(config.models) * config.num_rounds,
        **config.replicas,
        shared={"data": stacks},
        per_seed={"draw": np.arange(config.num_seeds)},
        record_every=config.resolution,
        data=min(kinds, key=("surrogate", "real", "synthetic").index),
        execution=execution,
    )
    found = accuracy.accuracies_of(result, stacks)
    for part in PARTS:
        shares = [
            accuracy.majorities(stacks[i], part, config.num_seeds, column)
            for _, i, column in config.models
        ]
        found[f"{part}_majority"] = ("model", "seed"), shares
    return found.assign_coords(name=("model", [name for name, _, _ in config.models]))


def measure(paper: Mapping[str, Any], result: xr.Dataset, config: Together) -> xr.Dataset:
    """Returns accuracies in percent, and T_M, when every model has the accuracy of FedAvg alone."""
    names, curves = result.name.values.tolist(), accuracy.by_part(result, "accuracy")
    # Each model's curve is that of its own turn of T_1 rounds.
    before = xr.DataArray(config.num_rounds * np.arange(len(names)), dims="model")
    turn = curves["round"].sel(round=slice(config.num_rounds))
    alone = curves.sel(algorithm=_ALONE, drop=True).sel(round=before + turn.drop_vars("round"))
    alone = alone.assign_coords(round=turn)
    together = curves.sel(algorithm=_TOGETHER, drop=True)
    single, rounds = accuracy.rounds_to_all(alone, together, config.records_in_window)
    # Models differ: M T_1 is the sum of their rounds.
    ratios = xr.apply_ufunc(partial(gain, 1), single.sum("model"), rounds)
    gains = ratios.transpose("target", "part", "seed")
    last = rounds.sel(target="g", drop=True).fillna(together["round"][-1]).astype(int)
    at_last = together.sel(round=last).drop_vars("round")
    at_end = alone.isel(round=-1, drop=True)
    majority = accuracy.by_part(result, "majority")
    shares = [each.mean("seed") for each in (at_end, at_last, majority)]
    ours = xr.concat([100 * each for each in shares], xr.IndexVariable("when", list(_WHEN)))
    ours = ours.transpose("part", "when", "model").drop_vars("name")
    values = [paper["values"].get(name, 4 * [np.nan]) for name in names]
    known = ours.isel(when=slice(2)).copy(data=np.reshape(values, (-1, 2, 2)).transpose(1, 2, 0))
    mean, error = estimate(gains)
    measured = xr.Dataset(
        {
            "accuracy": ours,
            "published": known.reindex_like(ours),
            "rounds_alone": single,
            "rounds": rounds,
            "gain_per_seed": gains,
            "gain": mean,
            "gain_standard_error": error,
            "reached": gains.notnull().sum("seed"),
            "published_gain": ("part", [paper["gain"][part] for part in PARTS]),
        }
    )
    labels = [f"{n} {i}" if names.count(n) > 1 else n for i, n in enumerate(names, 1)]
    return measured.assign_coords(model=labels)


def claims(measured: xr.Dataset, config: Together) -> Sequence[Claim]:
    """All models together are as good as alone, in fewer rounds; and alone they learn."""
    text, found = "every model is at least as good as FedAvg alone made it, with a gain above 1", []
    for part, target in itertools.product(PARTS, TARGETS):
        here = measured.sel(part=part, target=target)
        rounds = describe(here.rounds.mean("seed", skipna=False), form=".0f")
        evidence = f"gain {describe(here.gain, here.gain_standard_error)}, T_M = {rounds}, "
        evidence += f"reached in {here.reached:d} of {config.num_seeds} "
        evidence += f"(published {here.published_gain:g})"
        found.append(claim(f"{part}, {target}: {text}", here.gain_per_seed > 1, evidence))
    ahead = measured.accuracy.sel(when="T_1") - measured.accuracy.sel(when="majority")
    return [*found, accuracy.beats_majority("FedAvg alone", ahead, describe(ahead, form="+.1f"))]


def table(measured: xr.Dataset, config: Together) -> Sequence[Table]:
    """Returns accuracies in percent and gains, with what is published."""
    text = cells(measured.accuracy, published=measured.published, form=".1f")
    found = {f"{part}, {at}": text.sel(part=part, when=at) for part in PARTS for at in _WHEN}
    # The paper's gain is g.
    known = measured.published_gain.where(measured.target == "g")
    gains = {
        "gain": cells(measured.gain, measured.gain_standard_error, known),
        "T_1": cells(measured.rounds_alone.mean(("seed", "model")), form=".0f"),
        "T_M": cells(measured.rounds.mean("seed", skipna=False), form=".0f"),
        "reached": measured.reached.astype(str) + f" of {config.num_seeds}",
    }
    until = rows(gains, ("part", "target"), "Rounds until all are as good")
    return [rows(found, ("model",)), until]


def figure(result: xr.Dataset, measured: xr.Dataset, config: Together) -> Figure:
    """Draws every model's accuracy alone and together, ours and the paper's."""
    about, names = result.attrs["manifest"], measured.model.values.tolist()
    panels = []
    for part in PARTS:
        here = measured.sel(part=part)
        series = {label: here.accuracy.sel(when=when) for when, label in _WHEN.items()}
        series |= {f"published, ${w}$": here.published.sel(when=w) for w in ("T_1", "T_M")}
        title = f"{part}: gains (published g: {here.published_gain:g})\n{describe(here.gain)}"
        panels.append(points(names, title, series, "accuracy in percent"))
    return plots.draw(
        [panels],
        title=f"{' and '.join(about['datasets'])} ({about['data']} data), "
        f"N = {config.num_clients}, M = {len(names)}, $T_1$ = {config.num_rounds}",
        caption=f"Means over {config.num_seeds} seeds. {config.about_gains(TARGETS)} Without a "
        f"T_M, MFA-RR's accuracies are those after all {len(names) * config.num_rounds} rounds.",
    )


def _table(settings: Together, id: str, title: str) -> Item:
    of_paper = partial(measure, published(__name__, id))
    return Item(id, title, settings, run_together, of_paper, claims, table, figure)


_MANY: dict[str, Any] = {"num_clients": 96, "num_seeds": 2}
_NINE = (FacesLearner(attributes=ATTRIBUTES),)
_MIXED = (SyntheticLearner(), FacesLearner())
_TABLE4 = Together(learners=_NINE, num_rounds=50, record_every=5, **_MANY)
_TABLE5 = Together(learners=_MIXED, num_rounds=100, record_every=2, **_MANY)

ITEMS = (
    _table(_TABLE4, id="mfa-table4", title="MFA-RR on nine CNNs, one for each facial attribute"),
    _table(_TABLE5, id="mfa-table5", title="MFA-RR on a logistic regression and a CNN together"),
)
"""Tables 4 and 5."""
