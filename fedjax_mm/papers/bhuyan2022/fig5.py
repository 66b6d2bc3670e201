"""Figure 5: the gain over sequential FedAvg against M on the quadratic."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Self

import xarray as xr
from matplotlib.figure import Figure
from pydantic import Field, model_validator

from fedjax_mm import plots
from fedjax_mm.claims import more
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.fields import Count, Positive
from fedjax_mm.experiments.optimizers import InverseTime
from fedjax_mm.experiments.run import run
from fedjax_mm.metrics import estimate, gain
from fedjax_mm.papers.bhuyan2022.gains import Limits, Models, gain_panels, rounds_to
from fedjax_mm.papers.bhuyan2022.quadratic import BothOnQuadratic, rate_text
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import Ruling, ruling
from fedjax_mm.papers.schema import Table
from fedjax_mm.papers.tables import cells, columns, rows
from fedjax_mm.papers.values import Several
from fedjax_mm.sweeps.execution import Execution


class GainSweep(BothOnQuadratic):
    """Settings of Figure 5: rounds to a target for several M and E."""

    learning_rate: Positive | InverseTime = 0.1
    num_models: Annotated[Models, Field(min_length=2)] = (1, 2, 3, 4, 6, 8, 12)
    local_steps: Several[Count] = (1, 5, 10)
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.75
    num_rounds: Count = 400

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.sweep()
        return self

    def sweep(self) -> Experiment:
        """The experiment of both algorithms at every M and E."""
        axes = {"local_steps": list(self.local_steps), "num_models": list(self.num_models)}
        swept = {"axes": axes, "together": list(axes)}
        return self.at(max(self.num_models), self.local_steps[0], **swept)


def run_gain(config: GainSweep, execution: Execution | None = None) -> xr.Dataset:
    """Distances to the minimizer, averaged over the exchangeable models."""
    result = run(config.sweep(), execution, on_divergence="stop")
    return result[["distance"]].mean("model", keep_attrs=True)


def measure(result: xr.Dataset, config: GainSweep) -> xr.Dataset:
    """The gain g = M T_1 / T_M, where T is the first round with mean error below the threshold.

    T_1 is also the first such round of FedAvg, as in the gain g' of Figures 6 and 7.
    """
    distance = result.distance.rename(local_steps="E", num_models="M")
    distance = distance.transpose("algorithm", "E", "seed", "M", "round")
    target = config.threshold * distance.isel(round=0).mean().item()
    both = [rounds_to(target, curves) for curves in (distance.mean("seed"), distance)]
    of_mean, per_seed = (each.copy(data=gain(each.M, each[..., :1], each)) for each in both)
    mean, error = estimate(per_seed)
    return xr.Dataset(
        {
            "rounds": both[0],
            "gain": of_mean,
            "gain_per_seed": per_seed,
            "rounds_per_seed": both[1],
            "gain_per_seed_mean": mean,
            "gain_per_seed_standard_error": error,
            "resolution": of_mean / both[0],
            "target_distance": target,
        }
    )


def judge(measured: xr.Dataset, config: GainSweep) -> Iterable[Ruling]:
    """Rules on the growth of the gain with M, with an upper limit on gains of unreached targets."""
    gains, alone = measured.gain_per_seed, measured.rounds_per_seed.sel(M=1, drop=True)
    limits = Limits(gains.fillna(0.0), gains.fillna(gains.M * alone / config.num_rounds))
    yield ruling("increases", more(limits.trend.decided(0.5), by=0.5, of="median"))


def table(measured: xr.Dataset, config: GainSweep) -> Sequence[Table]:
    """The gains and the rounds to the target."""
    took = xr.where(measured.rounds.isnull(), "", "\nT=" + cells(measured.rounds, form=".0f"))
    return [rows(columns(cells(measured.gain) + took, "M"), ("algorithm", "E"))]


def figure(result: xr.Dataset, measured: xr.Dataset, config: GainSweep) -> Figure:
    """Draws the gain against M, with one panel per algorithm and one line per E."""
    return plots.draw(
        [gain_panels(measured.gain, measured.gain_per_seed_standard_error)],
        title=f"Gain over sequential FedAvg, quadratic, N = {config.task.num_clients}, "
        + rate_text(config.learning_rate),
        caption="Gains by the rounds until the mean distance to the minimizer over "
        f"{config.num_seeds} seeds is {config.threshold:g} of the initial one, with standard "
        "errors of the gain per seed.",
    )


ITEMS = (Item("mfa-fig5", GainSweep(), run_gain, measure, judge, table, figure),)
"""Figure 5."""
