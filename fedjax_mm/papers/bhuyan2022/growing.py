"""Theorem 2 with V > 0: the bound and the measured errors of MFA-RR with growing samples."""

from collections.abc import Iterator, Sequence

import xarray as xr
from matplotlib.figure import Figure

from fedjax_mm import plots
from fedjax_mm.claims import at_least, at_most, more
from fedjax_mm.papers.bhuyan2022 import bounds
from fedjax_mm.papers.bhuyan2022.regression import Growing, known, run_growing, theorem_2
from fedjax_mm.papers.item import Item
from fedjax_mm.papers.rulings import Ruling, check, finding, ruling, untested
from fedjax_mm.papers.schema import Check, Table
from fedjax_mm.papers.tables import cells, rows
from fedjax_mm.results.labels import describe
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.theory.rates import MFA_RR_EXPONENT
from fedjax_mm.theory.validation import ROUND_OFF, exponents

_CASE = ("sample", "M", "E", "left_out")
_CONSTANT = 0.05  # largest relative growth of (t/M + gamma) E|w_t - w*| that counts as none


def run(config: Growing, execution: Execution | None = None) -> xr.Dataset:
    """Measured errors and the bound of Theorem 2 for growing samples."""
    result = run_growing(config, lambda task: task, execution=execution)
    dataset = bounds.distances(result).assign(farthest=result.distance.max())
    t = dataset["round"] + 1  # round t produces w_{t+1}
    return dataset.assign(bound=theorem_2(t, config, dataset.coords.to_dataset()))


def measure(result: xr.Dataset, config: Growing) -> xr.Dataset:
    """The constants, errors and bounds, and the growth of (t/M + gamma) times the error."""
    constants, result = known(config), result.rename(bounds.NAMES)
    time = (result["round"] + 1) / result.M + constants.rate.gamma
    # Average over the third and the last quarter of the rounds, because single records are noisy.
    end = result.sizes["round"]
    quarters = slice(end // 2, 3 * end // 4), slice(3 * end // 4, end)
    third, last = ((result.distance * time).isel(round=each).mean("round") for each in quarters)
    measured = bounds.against_bound(result).assign(
        constants.numbers() | exponents(result.distance, time)
    )
    return measured.assign(
        growth=last / third.mean("seed") - third / third.mean("seed"),
        first_bound=result.bound.isel(round=0, drop=True),
        farthest=result.farthest,
        V=constants.variance(result.left_out, result.E),
    )


def judge(measured: xr.Dataset, config: Growing) -> Iterator[Ruling | Check]:
    """Rules on Theorem 2 and its order 1/t, and checks other sample sizes."""
    keys = "theorem-2", "order-one-over-t", "more-models-more-rounds"
    if "growing" in config.samples:
        yield from _judge_growing(measured.sel(sample="growing", drop=True))
    else:
        yield from (untested(key, "growing samples were not run") for key in keys)
    if "fixed" in config.samples:
        share = max(config.left_out)
        fixed = measured.growth.sel(sample="fixed", left_out=share, drop=True).mean(("M", "E"))
        text = "with samples of fixed size, (t/M + gamma) times the error grows by more than 5 %"
        yield finding(f"{text} ({share:g} left out, mean over M and E)", more(fixed, by=_CONSTANT))
    evidence = f"farthest {measured.farthest:.3g}, radius {measured.radius:.3g}"
    ball = "no model leaves the ball around w* on which G, beta_1 and beta_2 hold"
    yield check(ball, measured.farthest <= measured.radius, evidence)


def _judge_growing(here: xr.Dataset) -> Iterator[Ruling | Check]:
    least, most = (here[f"{end}_ratio"] for end in ("least", "largest"))
    range_ = f"bound / error {least.min():.3g} to {most.max():.3g}"
    about = f"1 - error / bound at the tightest round; {range_}"
    yield ruling(
        "theorem-2",
        at_least(here.room, -ROUND_OFF, form=".3g"),
        about=about,
        looseness=least.min(),
    )
    about = (
        "relative growth from the third to the last quarter of the rounds; an error of the order "
    )
    about += "1/sqrt(t) would have 0.18"
    yield ruling("order-one-over-t", at_most(here.growth, _CONSTANT, form=".3f"), about=about)
    yield bounds.needs_more_rounds(here, MFA_RR_EXPONENT, here.M)
    # Check that a model that never moves fails, because otherwise the check is vacuous.
    frozen = bounds.rounds_to_bound(1.0, here, MFA_RR_EXPONENT, here.M)
    text = f"a model frozen at its start would violate Theorem 2 within {bounds.FROZEN:,} rounds"
    yield check(text, frozen <= bounds.FROZEN, f"in the round {describe(frozen, form=',.0f')}")
    text = "errors fall at least as (t/M + gamma)^-1 in the later half"
    passed = here.exponent_high >= MFA_RR_EXPONENT
    yield finding(text, passed.where(here.exponent_high.notnull()), describe(here.exponent))


def table(measured: xr.Dataset, config: Growing) -> Sequence[Table]:
    """The final errors, the bounds and the constants."""
    last = measured.isel(round=-1)
    main = {
        "V": cells(last.V, form=".3g"),
        "error at the end": cells(last.error, last.standard_error, form=".3g"),
        "bound": cells(last.bound, form=".3g"),
        "bound / error": bounds.ratios(measured),
        "exponent": cells(measured.exponent, published=xr.DataArray(MFA_RR_EXPONENT)),
    }
    # The bound applies only to growing samples.
    grows = measured.sample == "growing"
    main |= {name: main[name].where(grows, "none") for name in ("V", "bound", "bound / error")}
    constants = {name: cells(measured[name], form=".4g") for name in known(config).numbers()}
    title = "Constants: mu and L are exact, G and beta_1 are bounds on the ball of the radius"
    return [rows(main, _CASE), rows(constants, (), title)]


def figure(result: xr.Dataset, measured: xr.Dataset, config: Growing) -> Figure:
    """Draws how many times as large as the largest error the bound is, with one panel per M, E."""
    ratio = measured.ratio.stack(run=("sample", "left_out"))
    names = [f"{sample}, first {1 - share:.0%}" for sample, share in ratio.run.values]
    ratio = ratio.drop_vars(("run", "sample", "left_out")).assign_coords(run=names)
    return plots.draw(
        [bounds.ratio_panels(ratio, "run", "M", "E")],
        title="Theorem 2 with V > 0: MFA-RR with growing samples, ridge regression, "
        f"N = {config.num_clients}, {config.num_seeds} seeds",
        caption="The bound divided by the largest error of a model; above 1 the bound holds. "
        "Samples begin as a share of the examples, and grow as in Theorem 2 or stay constant. The "
        "start is round 1.",
    )


ITEMS = (Item("theory-mfa-growing", Growing(), run, measure, judge, table, figure),)
"""Theorem 2."""
