"""Executes a sweep in segments, with callbacks in between, and labels its result."""

import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import Literal

import jax
import numpy as np
import xarray as xr

from fedjax_mm.base import Params
from fedjax_mm.results.dataset import check_counts
from fedjax_mm.simulator.record import Record
from fedjax_mm.sweeps.checkpoint import KeptState, Saving, claim_program, identity
from fedjax_mm.sweeps.client_files import ClientFiles
from fedjax_mm.sweeps.devices import agree
from fedjax_mm.sweeps.errors import DivergenceError, refusing
from fedjax_mm.sweeps.execution import Callback, Execution, check_callbacks
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.plan import Plan, Segment, make_plan
from fedjax_mm.sweeps.program import Block, Program
from fedjax_mm.sweeps.result import Result, divergence, no_records
from fedjax_mm.tools.interrupts import noted_signals

_SEGMENT_SECONDS = 1.0  # target duration of a segment
_GROWTH = 16  # limits the growth of segments, because later rounds may take longer


@refusing((ValueError, OverflowError))
def plan_for(grid: Grid, how: Execution, programs: Sequence[Program] | None = None) -> Plan:
    """Compiles the plan, which repeats the unfinished run's plan when resuming.

    Args:
      grid: the runs.
      how: how to execute the sweep.
      programs: the runs of a part; defaults to all runs.

    Raises:
      RefusedError: if the grid is invalid, does not fit in memory, or differs from the unfinished
        run.
    """
    check_callbacks(how.callbacks)
    if how.keep_state and not how.checkpoints:
        raise ValueError("keep_state needs checkpoints; give Checkpoints(DIRECTORY), or a part")
    saved, kept, blocks, begun, choices = how.checkpoints, kept_state(how), None, None, None
    if how.client_states is not None and (how.keep_state or kept):
        raise ValueError(
            "states of clients in files are deleted at the end, so that no longer run can go on "
            "from them; leave out keep_state and continue_from, or client_states"
        )
    if saved or kept:
        how.report("looking for what was saved")
        mine = identity(grid, how.split, programs, how.client_states)
        begun = saved.claim(mine) if saved else None
        choices = kept.claim(mine, grid.num_rounds) if kept else begun
        choices = begun or choices
        blocks = [Block(*each) for each in choices["blocks"]] if choices else None
    plan = make_plan(
        grid,
        split=how.split,
        limit=how.memory,
        blocks=blocks,
        report=how.report,
        approve=partial(claim_program, saved, kept) if saved or kept else None,
        programs=programs,
        client_states=how.client_states,
    )
    now = [each.block for each in plan.compiled]
    if blocks not in (None, now):
        old, new = (", ".join(each.words for each in some) for some in (blocks, now))
        raise ValueError(
            f"the unfinished run has batches of {old}, and now {new} fit the memory; use the "
            "memory limit of the unfinished run"
        )
    number = plan.where.mesh.size
    if choices and choices["devices"] != number:
        warnings.warn(
            f"the number of devices was {choices['devices']} and is {number}; they add in another "
            "order, so the result is that of an uninterrupted run up to rounding",
            stacklevel=2,
        )
    if saved and begun is None:
        now_chosen = {"blocks": now, "devices": number, "num_rounds": grid.num_rounds}
        saved.begin(now_chosen | {"continues": kept is not None})
    return plan


def kept_state(how: Execution) -> KeptState | None:
    """The kept state from which a sweep goes on, if any."""
    if how.continue_from is not None:
        return KeptState(how.continue_from)
    return how.checkpoints.kept if how.checkpoints else None


def carry_out(
    plan: Plan, how: Execution, *, on_divergence: Literal["mark", "stop"] = "mark"
) -> tuple[xr.Dataset, list[Params] | None]:
    """Runs a plan and returns the Dataset, and the parameters or None if they are not kept.

    Raises:
      DivergenceError, InterruptedRunError, OSError: as in `sweep`.
    """
    result = Result(plan)
    try:
        with closing(batches(plan, how, on_divergence)) as computed:
            for last in computed:
                result.clock -= last.earlier_seconds
                result.place(last.program, last.replicas, last.records, last.params)
    except DivergenceError as error:
        raise DivergenceError(str(error), result.dataset(stopped=str(error))) from None
    return result.dataset(), result.params


def batches(
    plan: Plan, how: Execution, on_divergence: Literal["mark", "stop"]
) -> Generator[Segment]:
    """Computes a plan batch by batch, yielding the last segment of each.

    Raises:
      DivergenceError, InterruptedRunError, OSError: as in `sweep`.
    """
    callbacks = list(how.callbacks)
    with noted_signals(how.checkpoints is not None, "saving after this segment") as signals:
        kept = kept_state(how)
        # A run that goes on from the state in its own directory replaces it.
        keeps = how.keep_state or bool(how.checkpoints and how.checkpoints.kept)
        saving = Saving(plan, how.checkpoints, kept, how.save_every, signals, keep_state=keeps)
        if how.checkpoints:
            # Save after other callbacks, so that a signal raised by them takes effect immediately.
            callbacks.append(Callback(on_segment=saving.save))
        for callback in callbacks:
            callback.on_start(plan)
        for batch in range(len(plan.batches)):
            records = no_records(plan.batches[batch][0])
            last = first = _first(plan, batch, records, how, saving)
            if first.rounds < plan.grid.num_rounds:  # otherwise loaded as finished
                for callback in callbacks:
                    callback.on_batch(first)
            with closing(first.files) if first.files else nullcontext():
                for last in _segments(first, records):
                    if on_divergence == "stop" and (words := divergence(last)):
                        yield last
                        raise DivergenceError(words, None)
                    for callback in callbacks:
                        callback.on_segment(last)
            yield last
        saving.end()


def _first(plan: Plan, batch: int, records: Record, how: Execution, saving: Saving) -> Segment:
    """A batch as it was saved, or before its first segment if nothing was saved."""
    compiled, number = plan.batches[batch]
    rounds, replica, states = saving.load(batch, records)
    so_far, label, files = _up_to(rounds, records, plan), compiled.label(number), None
    if compiled.program.in_files and plan.client_states is not None:
        saved = saving.checkpoints
        name = None if saved is None else f"{saved.digest[:16]}-{batch}"
        files = ClientFiles(plan.client_states, name, states)
        if rounds == plan.grid.num_rounds:
            files.remove()
    seconds = saving.seconds[batch]
    label = how.in_words(label)
    return Segment(
        label, plan, batch, rounds, so_far, replica, earlier_seconds=seconds, files=files
    )


def _segments(first: Segment, records: Record) -> Iterator[Segment]:
    """Computes the remaining segments of a batch, filling in its records."""
    plan, done = first.plan, first.rounds
    (compiled, number), where, grid = plan.batches[first.batch], plan.where, plan.grid
    given, _, replica = compiled.program.inputs(where, compiled.block, number, first.replica)
    every, step = grid.record_every, compiled.program.rounds_at_once
    call = compiled.call if first.files is None else partial(compiled.call, first.files)
    count = step  # start with few rounds to measure their duration
    while done < grid.num_rounds:
        clock = time.perf_counter()
        most = compiled.program.records_kept * every - done % every
        count = min(count, most, grid.num_rounds - done)
        rounds = where.put((np.int32(done), np.int32(count)), None)
        replica, rows = call(given, rounds, replica)
        rows = where.fetch(rows)
        start = 0 if done == 0 else 1 + done // every
        _write(records, slice(start, 1 + (done + count) // every), rows)
        check_counts(rows.counts)
        done += count
        # Stop once all replicas have reached the target, because further segments would be empty.
        if grid.until is not None and np.all(where.fetch(replica.has_ended)):
            done = grid.num_rounds
        (seconds,) = agree(time.perf_counter() - clock)
        so_far = _up_to(done, records, plan)
        yield first._replace(rounds=done, records=so_far, replica=replica, seconds=seconds)
        # Make segments last about a second, to react to signals promptly and hide the host's work.
        count = step * max(1, int(count // step * min(_GROWTH, _SEGMENT_SECONDS / seconds)))


def _up_to(rounds: int, records: Record, plan: Plan) -> Record:
    count = 1 + rounds // plan.grid.record_every if rounds else 0
    so_far: Record = jax.tree.map(lambda x: x[:count], records)
    return so_far


def _write(records: Record, where: slice, rows: Record) -> None:
    """Writes rows at `where`, dropping rows that do not fit."""
    for array, new in zip(jax.tree.leaves(records), jax.tree.leaves(rows), strict=True):
        place = array[where]
        place[:] = new[: len(place)]
