"""Carries out a sweep in segments, with callbacks between them, and labels its result."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, overload

import jax
import numpy as np
import xarray as xr

from fedjax_mm.base import Params
from fedjax_mm.checks import check_choice, described
from fedjax_mm.interrupts import noted_signals
from fedjax_mm.parts import check_instance
from fedjax_mm.record import Record
from fedjax_mm.results.dataset import check_counts
from fedjax_mm.sweeps.callbacks import Callback, Segment
from fedjax_mm.sweeps.devices import agree
from fedjax_mm.sweeps.errors import DivergenceError, refusing
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.labelled import Result, divergence, no_records
from fedjax_mm.sweeps.plan import Plan, make_plan
from fedjax_mm.sweeps.saving import Saving, claim_program, identity
from fedjax_mm.sweeps.structures import Share

_SEGMENT_SECONDS = 1.0  # aim of a segment's duration


@overload
def sweep(
    grid: Grid,
    execution: Execution | None = None,
    *,
    on_divergence: Literal["mark", "stop"] = "mark",
    keep: None = None,
) -> xr.Dataset: ...


@overload
def sweep(
    grid: Grid,
    execution: Execution | None = None,
    *,
    on_divergence: Literal["mark", "stop"] = "mark",
    keep: Literal["params"],
) -> tuple[xr.Dataset, list[Params]]: ...


def sweep(
    grid: Grid,
    execution: Execution | None = None,
    *,
    on_divergence: Literal["mark", "stop"] = "mark",
    keep: Literal["params"] | None = None,
) -> xr.Dataset | tuple[xr.Dataset, list[Params]]:
    """Simulates every point of a grid with every seed, in one compiled program per structure.

    The replicas of a program run on all devices, in batches that fit the memory. The last batch is
    padded, so that nothing is compiled twice.

    Args:
      grid: the runs.
      execution: devices, memory, callbacks and checkpoints of the sweep.
      on_divergence: "mark" a run whose loss or parameters stop being finite and go on with the
        others, or "stop" the sweep.
      keep: "params" returns the final parameters, too, as a list with one pytree of arrays
        ``[*axes, seeds, ...]`` per model, in the order of the tasks. With a target they are the
        parameters of the record that met it. Unused models have NaN, or 0 if they have no floats.

    Returns:
      A Dataset over ``(*axes, "seed", "round", "model")`` with the variables of `to_dataset`, and
      ``diverged``, the first recorded round in which a model was not finite, or -1. With a target
      it also has ``ended``, the first recorded round that met the target, or -1. If the number of
      models varies, the metrics of unused models are NaN and their counts 0, so that sums over
      models are right. The attribute ``manifest`` holds versions, devices, seed, axes, and wall
      seconds of compiling and running.

    Raises:
      ValueError: if the grid is wrong, does not fit the memory, or differs from the unfinished run.
      DivergenceError: if a model diverged and `on_divergence` is "stop".
      InterruptedRunError: if SIGINT or SIGTERM came, and there are checkpoints, or one of several
        processes was compiling.
      OSError: if a checkpoint cannot be written.

    Example:
      >>> from fedjax_mm import fedavg, mfa_rand, mfa_rr, sweep
      >>> from fedjax_mm.sweeps import Grid, Setup
      >>> from fedjax_mm.tasks import quadratic
      >>> def build(assignment, num_models, learning_rate):
      ...     algorithm = fedavg(learning_rate, local_steps=5)
      ...     return Setup(quadratic(24, 4, mu=2e-4), algorithm, assignment(24, num_models))
      >>> axes = {
      ...     "assignment": [mfa_rand, mfa_rr], "num_models": [2], "learning_rate": [0.05, 0.1]}
      >>> grid = Grid(build, axes, num_rounds=20, num_seeds=3)
      >>> result = sweep(grid)
      >>> result.sel(assignment="mfa_rr", learning_rate=0.1).isel(round=-1).excess_loss.dims
      ('num_models', 'seed', 'model')
      >>> result, params = sweep(grid, keep="params")
      >>> params[0].shape  # assignments, numbers of models, rates, seeds, w
      (2, 1, 2, 3, 97)
    """
    check_instance("grid", grid, Grid, "give Grid(build, axes, num_rounds=...)")
    check_choice("on_divergence", on_divergence, "mark", "stop")
    how = execution or Execution()
    if keep is not None and keep != grid.keep:
        grid = dataclasses.replace(grid, keep=keep)
    plan = plan_for(grid, how)
    dataset, params = carry_out(plan, how, on_divergence=on_divergence)
    return dataset if params is None else (dataset, params)


@refusing((ValueError, OverflowError))
def plan_for(grid: Grid, how: Execution, shares: Sequence[Share] | None = None) -> Plan:
    """Returns the compiled plan, which is that of the unfinished run if one is continued.

    Args:
      grid: the runs.
      how: the execution.
      shares: the runs of a part; by default all.

    Raises:
      RefusedError: if the grid is wrong, does not fit the memory, or differs from the unfinished
        run.
    """
    _check_callbacks(how.callbacks)
    saved, batch_sizes = how.checkpoints, None
    if saved:
        how.report("looking for what was saved")
        mine = [(each.program, each.replicas[[0, -1]].tolist()) for each in shares or ()]
        choices = saved.claim(identity(grid, how.split) | {"shares": mine})
        batch_sizes = choices["batch_sizes"] if choices else None
    plan = make_plan(
        grid,
        split=how.split,
        limit=how.memory,
        batch_sizes=batch_sizes,
        report=how.report,
        approve=partial(claim_program, saved) if saved else None,
        shares=shares,
    )
    sizes = [each.batch_size for each in plan.compiled]
    if batch_sizes not in (None, sizes):
        raise ValueError(
            f"the unfinished run has batches of {batch_sizes} runs, and now {sizes} fit the "
            "memory; use the memory limit of the unfinished run"
        )
    if saved and batch_sizes is None:
        saved.begin({"batch_sizes": sizes})
    return plan


def _check_callbacks(callbacks: Any) -> None:
    """Raises `ValueError` unless it is given a list of callbacks."""
    words = "give a list, such as [Callback(on_segment=report)] or [progress(report)]"
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Sequence):
        raise ValueError(f"execution.callbacks is {described(callbacks)}; {words}")
    for callback in callbacks:
        check_instance("one of execution.callbacks", callback, Callback, words)


def carry_out(
    plan: Plan, how: Execution, *, on_divergence: Literal["mark", "stop"] = "mark"
) -> tuple[xr.Dataset, list[Params] | None]:
    """Runs a plan to its end, and returns what `sweep` does, with None if no parameters are kept.

    Raises:
      DivergenceError, InterruptedRunError, OSError: as `sweep`.
    """
    result = Result(plan)
    try:
        for last in batches(plan, how, on_divergence):
            result.place(last.program, last.replicas, last.records, last.params)
    except DivergenceError as error:
        raise DivergenceError(str(error), result.dataset(stopped=str(error))) from None
    return result.dataset(), result.params


def batches(
    plan: Plan, how: Execution, on_divergence: Literal["mark", "stop"]
) -> Iterator[Segment]:
    """Computes a plan batch by batch, and yields the last segment of each.

    Raises:
      DivergenceError, InterruptedRunError, OSError: as `sweep`.
    """
    callbacks = list(how.callbacks)
    with noted_signals(how.checkpoints is not None, "saving after this segment") as signals:
        saving = None
        if how.checkpoints:
            saving = Saving(plan, how.checkpoints, how.save_every, signals)
            # Save after other callbacks, because a signal that they raise is to be obeyed at once.
            callbacks.append(Callback(on_segment=saving.save))
        for callback in callbacks:
            callback.on_start(plan)
        for batch in range(len(plan.batches)):
            records = no_records(plan.batches[batch][0])
            last = first = _first(plan, batch, records, how, saving)
            if first.rounds < plan.grid.num_rounds:  # else it is as it was saved
                for callback in callbacks:
                    callback.on_batch(first)
            for last in _segments(first, records):
                if on_divergence == "stop" and (words := divergence(last)):
                    yield last
                    raise DivergenceError(words, None)
                for callback in callbacks:
                    callback.on_segment(last)
            yield last


def _first(
    plan: Plan, batch: int, records: Record, how: Execution, saving: Saving | None
) -> Segment:
    """Returns a batch before its first segment, after filling in what was saved of it."""
    compiled, number = plan.batches[batch]
    rounds, replica = saving.load(batch, records) if saving else (0, None)
    so_far = _up_to(rounds, records, plan)
    return Segment(how.in_words(compiled.label(number)), plan, batch, rounds, so_far, replica)


def _segments(first: Segment, records: Record) -> Iterator[Segment]:
    """Computes a batch segment by segment after the first ones, and fills in its records."""
    plan, done = first.plan, first.rounds
    (compiled, number), where, grid = plan.batches[first.batch], plan.where, plan.grid
    given, _, replica = compiled.program.inputs(where, compiled.replicas(number), first.replica)
    every, count = grid.record_every, 1  # one round at first, to time it
    while done < grid.num_rounds:
        clock = time.perf_counter()
        most = compiled.program.records_kept * every - done % every
        count = min(count, most, grid.num_rounds - done)
        rounds = where.put((np.int32(done), np.int32(count)), None)
        replica, rows = compiled.call(given, rounds, replica)
        rows = where.fetch(rows)
        start = 0 if done == 0 else 1 + done // every
        _write(records, slice(start, 1 + (done + count) // every), rows)
        check_counts(rows.counts)
        done += count
        # Stop once all replicas have met the target, because further segments would be empty.
        if grid.until is not None and np.all(where.fetch(replica.has_ended)):
            done = grid.num_rounds
        (seconds,) = agree(time.perf_counter() - clock)
        so_far = _up_to(done, records, plan)
        yield first._replace(rounds=done, records=so_far, replica=replica, seconds=seconds)
        # Make segments of about a second, so that signals are handled in time and the host's work
        # is hidden.
        count = max(1, int(count * min(4, _SEGMENT_SECONDS / seconds)))


def _up_to(rounds: int, records: Record, plan: Plan) -> Record:
    """Returns the records of the first rounds, without a copy."""
    count = 1 + rounds // plan.grid.record_every if rounds else 0
    so_far: Record = jax.tree.map(lambda x: x[:count], records)
    return so_far


def _write(records: Record, where: slice, rows: Record) -> None:
    """Writes the rows that fit into the place `where`."""
    for array, new in zip(jax.tree.leaves(records), jax.tree.leaves(rows), strict=True):
        place = array[where]
        place[:] = new[: len(place)]
