"""Adds seeds to a sweep until its claims are decided."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Unpack

import numpy as np
import xarray as xr
from annotated_types import Interval

from fedjax_mm.checks.annotations import Count, checked
from fedjax_mm.claims.judging import Claim, Verdicts, evidence_of, judge
from fedjax_mm.results.dataset import join_some
from fedjax_mm.sweeps.devices import agree
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Grid, Settings, Setup
from fedjax_mm.sweeps.sweep import grid_from, sweep

Tell = Callable[[Verdicts], Any]
Run = Callable[[int, np.ndarray | None], xr.Dataset]
"""Computes a block from its first seed and the points that need it, a mask over the axes."""


@checked
def settle(
    what: Grid | Setup | Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]] | None,
    claims: Claim | Sequence[Claim],
    *,
    max_seeds: Count = 512,
    max_seconds: float | None = None,
    block: Count = 16,
    level: Annotated[float, Interval(gt=0, lt=1)] = 0.05,
    execution: Execution | None = None,
    on_look: Tell | None = None,
    **settings: Unpack[Settings],
) -> tuple[xr.Dataset, Verdicts]:
    """Adds seeds to a sweep until every claim is decided, or a limit is reached.

    Claims are judged after 1, 2, 4, 8, ... blocks of seeds. Look j = 0, 1, ... spends the share
    1 / ((j + 1) (j + 2)) of the level, so that the probability of a wrong verdict at any look is at
    most the level, see `claims.judge`. Verdicts are final. Blocks have equal sizes, so that they
    share compiled programs, and from the second look on they have only the points that open
    comparisons are about (the smallest grid with all of those).

    Args:
      what: the runs, as in `sweep`.
      axes: names and values, unless there is a `Grid`.
      claims: functions of the result that yield comparisons, such as those of `claims.more`. The
        points of a comparison are found by replacing each point by NaN.
      max_seeds: the most seeds of a point, of which whole blocks are used.
      max_seconds: the time after which no block starts.
      block: the number of seeds in a block. A level of 5 % takes 12 seeds or more to decide a mean.
      level: the probability that any verdict is wrong.
      execution: the execution of each block. Checkpoints have a stage for each, so that a resumed
        run repeats no saved block.
      on_look: called with the verdicts at each look.

    Other arguments, such as `num_rounds`, are settings of `Grid`.

    Returns:
      The joined result, in which points have NaN for seeds that they did not need, and the
      verdicts.

    Raises:
      TypeError: if `num_seeds` is given.
      ValueError: if there is no room for a block, or the number of comparisons changes.

    Example:
      >>> from fedjax_mm import claims, fedavg, mfa_rand, mfa_rr, settle
      >>> from fedjax_mm.metrics import final
      >>> from fedjax_mm.sweeps import Setup
      >>> from fedjax_mm.tasks import quadratic
      >>> task = quadratic(24, 4, mu=2e-4)
      >>> def build(assignment):
      ...     return Setup(task, fedavg(0.1, local_steps=5), assignment(24, 4))
      >>> def round_robin_is_better(result):
      ...     '''MFA-RR has the smaller excess loss.'''
      ...     loss = final(result, "excess_loss")
      ...     yield claims.first(loss, "assignment", "mfa_rr", largest=False)
      >>> axes = {"assignment": [mfa_rand, mfa_rr]}
      >>> result, verdicts = settle(build, axes, round_robin_is_better, num_rounds=40)
      >>> verdicts.claims[0].verdict, verdicts.is_settled
      ('supported', True)
    """
    if "num_seeds" in settings:
        raise TypeError("num_seeds is what settle finds; give max_seeds, and block if it matters")
    grid, how = grid_from(what, axes, None, settings), execution or Execution()

    def run(first: int, points: np.ndarray | None) -> xr.Dataset:
        points = np.ones(grid.shape[:-1], bool) if points is None else points
        over = range(points.ndim)
        kept: list[Any] = [points.any(axis=tuple(x for x in over if x != axis)) for axis in over]
        some = {
            name: [value for value, is_kept in zip(values, which, strict=True) if is_kept]
            for (name, values), which in zip(grid.axes.items(), kept, strict=True)
        }
        seeds: Any = {"first_seed": grid.first_seed + first, "num_seeds": block}
        with how.stage(f"seeds-{first}") as saving:
            return sweep(dataclasses.replace(grid, axes=some, **seeds), saving)

    limits: Any = {"max_seeds": max_seeds, "max_seconds": max_seconds, "block": block}
    return add_seeds(run, claims, tuple(grid.axes), **limits, level=level, on_look=on_look)


def add_seeds(
    run: Run,
    claims: Claim | Sequence[Claim],
    axes: Sequence[str],
    *,
    max_seeds: int,
    max_seconds: float | None,
    block: int,
    level: float = 0.05,
    on_look: Tell | None = None,
) -> tuple[xr.Dataset, Verdicts]:
    """Runs blocks of seeds until claims are decided, see `settle`.

    Args:
      run: computes a block.
      claims: the claims.
      axes: the names of the axes with the points that a block may leave out.
      max_seeds: the most seeds.
      max_seconds: the time after which no block starts.
      block: the number of seeds in a block.
      level: the probability that any verdict is wrong.
      on_look: called with the verdicts at each look.
    """
    if max_seeds < block:
        raise ValueError(
            f"max_seeds is {max_seeds}, and a block has {block} seeds; give more, or block="
        )
    clock, most, done, look = time.perf_counter(), max_seeds // block, 1, 0
    functions = [claims] if callable(claims) else list(claims)

    def is_time() -> bool:
        # Agree on the answer, because all processes must stop at the same time.
        spent = agree(time.perf_counter() - clock)[0]
        return max_seconds is None or spent < max_seconds

    result = run(0, None)
    needs = _needs(result, functions, axes)
    verdicts = judge(result, functions, level=level, look=look)
    while True:
        if on_look:
            on_look(verdicts)
        if verdicts.is_settled or done == most or not is_time():
            return result, verdicts
        parts = [part for each in verdicts.claims for part in each.parts]
        is_open = [part.verdict == "not settled" for part in parts]
        points = needs[np.array(is_open)].any(axis=0)
        for _ in range(min(done, most - done)):
            if not is_time():
                break
            more = run(done * block, points)
            result = join_some(result, more)
            done += 1
        look += 1
        verdicts = judge(result, functions, level=level, look=look).after(verdicts)


def _needs(result: xr.Dataset, claims: Sequence[Claim], axes: Sequence[str]) -> np.ndarray:
    """The points whose NaN would change each comparison, ``[comparisons, *axes]``."""

    def texts(given: xr.Dataset) -> list[tuple[str, float]]:
        found = [test for claim in claims for test in evidence_of(claim, given)]
        return [(test.text, test.center) for test in found]

    shape, usual = tuple(result.sizes[axis] for axis in axes), texts(result)
    needs = np.ones((len(usual), *shape), bool)
    if needs[0].size > 1:
        of_points = [name for name, x in result.items() if {*axes} <= {*x.dims}]
        for at in np.ndindex(shape):
            keep = np.ones(shape, bool)
            keep[at] = False
            lacks = {name: result[name].where(xr.DataArray(keep, dims=axes)) for name in of_points}
            there = texts(result.assign(lacks))
            needs[(slice(None), *at)] = [
                str(x) != str(y) for x, y in zip(usual, there, strict=True)
            ]
    return needs
