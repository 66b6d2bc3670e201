"""Sweeps: a plan carried out in segments, watched, saved, continued, and labelled."""

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from fedjax_mm.checks import check_alike
from fedjax_mm.chunks import ClientMap
from fedjax_mm.record import Counts, Trace
from fedjax_mm.results.dataset import check_counts, manifest, to_dataset
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.devices import agree
from fedjax_mm.sweeps.errors import DivergenceError, InterruptedRunError, RefusedError
from fedjax_mm.sweeps.plan import (
    Compiled,
    Grid,
    Plan,
    Program,
    Record,
    Replica,
    Setup,
    label_of,
    make_plan,
    without_keys,
)
from fedjax_mm.sweeps.until import Until

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how much of how much is done."""

_SEGMENT_SECONDS = 1.0  # between two looks at what was computed
_UNSAVED_BYTES = 128 * 2**20  # of finished batches that wait to be saved


class Execution(NamedTuple):
    """How a sweep is carried out, as opposed to what is computed: results do not depend on it.

    Attributes:
      progress: called with what is being done, and the local trainings done and to do.
      checkpoints: where to save unfinished work; the caller opens it, and discards it at the end.
      save_every: seconds between two saves.
      split: "replicas" or "clients", the devices' axis; see `layout`.
      memory: bytes that may be used; by default 60 % of what is free.
      announce: called with the plan before the first run.
    """

    progress: Progress | None = None
    checkpoints: Checkpoints | None = None
    save_every: float = 30.0
    split: Literal["replicas", "clients"] | None = None
    memory: float | None = None
    announce: Callable[[Plan], None] | None = None


def sweep(
    build: Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]],
    *,
    num_rounds: int,
    num_seeds: int = 1,
    seed: int = 0,
    shared: Mapping[str, Any] | None = None,
    per_seed: Mapping[str, Any] | None = None,
    prepare: Callable[..., Any] | None = None,
    record_every: int = 1,
    client_map: ClientMap = "auto",
    until: Until | None = None,
    on_divergence: Literal["mark", "stop"] = "mark",
    data: str = "synthetic",
    execution: Execution | None = None,
) -> xr.Dataset:
    """Simulates every point of a grid with every seed, in as few programs as there are structures.

    Axes of floats are arguments of one compiled program; on every other axis each value is a
    program of its own. The replicas of a program run in batches that fit the memory, on all
    devices; the last one is padded, and nothing is compiled twice.

    Args:
      build: called with one value of every axis, by name, and with what is shared; returns the
        `Setup` to simulate. It is traced: values of numeric axes are tracers.
      axes: names and values; their order is the order of the result's dimensions. A value may be
        any object that `build` understands.
      num_rounds: T.
      num_seeds: replicas of each point; all points have the same seeds.
      seed: the root of all draws.
      shared: further arguments of `build`, by name: pytrees of arrays, for instance a task with its
        data, which should be an argument of the compiled program and not a constant in it.
      per_seed: further arguments of `build`, by name: a number for each seed, for instance which of
        several draws of the data it has.
      prepare: computes something once for every replica, before its first round, such as the
        models that clients train of their own: called with the replica's key and all arguments that
        `build` gets, it returns a pytree of arrays, which `build` then gets as `prepared`. The keys
        to use are those of `keys.preparation_key`.
      record_every: rounds between records; it divides `num_rounds`.
      client_map: "auto", "vmap", "scan" or a chunk size, as in `simulate`.
      until: a target at which a run ends before its last round. What is recorded up to there is,
        bit for bit, what is recorded without a target; then metrics are NaN and counts stay. Runs
        that are computed side by side go on until all have ended.
      on_divergence: where a model's loss or parameters stop being finite, "mark" its run and go on
        with the others, or "stop".
      data: "real", "synthetic" or "surrogate", for the manifest.
      execution: how to carry it out; what is reported, saved and continued.

    Returns:
      A Dataset over ``(*axes, "seed", "round", "model")`` with what `to_dataset` gives, and
      ``diverged``, the first recorded round in which a model was not finite, or -1; with a target
      also ``ended``, the first recorded round that met it, or -1. Where the
      number of models varies, metrics of models that are not there are NaN. The attribute
      ``manifest`` holds versions, devices, seed, axes, and wall seconds of compiling and running.

    Raises:
      ValueError: if the grid is wrong, does not fit the memory, or is not the one to be continued.
      DivergenceError: if a model diverged and that is to stop the sweep.
      InterruptedRunError: if there are checkpoints and SIGINT or SIGTERM came.
      OSError: if a checkpoint cannot be written.

    Example:
      >>> from fedjax_mm import Setup, fedavg, mfa_rand, mfa_rr, quadratic, sweep
      >>> def build(assignment, num_models, learning_rate):
      ...     algorithm = fedavg(learning_rate, local_steps=5)
      ...     return Setup(quadratic(24, 4, mu=2e-4), algorithm, assignment(24, num_models))
      >>> result = sweep(
      ...     build,
      ...     {"assignment": [mfa_rand, mfa_rr], "num_models": [2], "learning_rate": [0.05, 0.1]},
      ...     num_rounds=20, num_seeds=3)
      >>> result.sel(assignment="mfa_rr", learning_rate=0.1).isel(round=-1).excess_loss.dims
      ('num_models', 'seed', 'model')
    """
    if on_divergence not in ("mark", "stop"):
        raise ValueError(f"on_divergence is {on_divergence!r}; it must be 'mark' or 'stop'")
    grid = Grid(
        build,
        axes,
        num_rounds,
        num_seeds,
        seed,
        shared or {},
        per_seed or {},
        record_every,
        client_map,
        prepare,
        until,
    )
    how = execution or Execution()
    return carry_out(plan_for(grid, how), how, data=data, on_divergence=on_divergence)


def plan_for(grid: Grid, how: Execution, config: Any = None) -> Plan:
    """The compiled plan; that of the unfinished run, if there is one to continue.

    Raises:
      RefusedError: in one line, what is wrong with the grid, the memory, or the unfinished run.
    """
    try:
        return _plan_for(grid, how, config)
    except ValueError as error:
        raise RefusedError(str(error)) from error


def _plan_for(grid: Grid, how: Execution, config: Any) -> Plan:
    def report(what: str) -> None:
        if how.progress:
            how.progress(what, 0, 1)

    batch_sizes = None
    if how.checkpoints:
        report("looking for what was saved")
        choices = how.checkpoints.claim(_identity(grid, how, config))
        batch_sizes = choices["batch_sizes"] if choices else None
    plan = make_plan(
        grid,
        split=how.split,
        limit=how.memory,
        batch_sizes=batch_sizes,
        report=report,
        approve=partial(_claim_programs, how.checkpoints) if how.checkpoints else None,
    )
    sizes = [each.batch_size for each in plan.compiled]
    if batch_sizes not in (None, sizes):
        raise ValueError(
            f"the unfinished run has batches of {batch_sizes} runs, and now {sizes} fit the "
            "memory; allow as much as then"
        )
    if how.checkpoints and batch_sizes is None:
        how.checkpoints.begin({"batch_sizes": sizes})
    return plan


def _claim_programs(checkpoints: Checkpoints, texts: Mapping[str, str]) -> None:
    """What is compiled must be what was: code, constants, and data that was not shared."""
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    checkpoints.claim({"program": hashes})


def _identity(grid: Grid, how: Execution, config: Any) -> dict[str, Any]:
    """All that results depend on to the last bit, but for the programs themselves."""
    about = manifest({}, seed=grid.seed, data="")
    shared = hashlib.sha256()
    for leaf in jax.tree.leaves(without_keys(grid.shared)):
        shared.update(np.asarray(leaf).tobytes())
    described = {
        "axes": {name: [label_of(v) for v in values] for name, values in grid.axes.items()},
        "num_rounds": grid.num_rounds,
        "num_seeds": grid.num_seeds,
        "per_seed": {name: np.asarray(x).tolist() for name, x in grid.per_seed.items()},
        "seed": grid.seed,
        "record_every": grid.record_every,
        "client_map": grid.client_map,
        "until": grid.until and grid.until._asdict(),
    }
    return {
        **({"config": config} if config else described),
        "split": how.split,
        "precision": str(jnp.result_type(float)),
        **{name: about[name] for name in ("versions", "device", "prng")},
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "shared data": shared.hexdigest(),
    }


def carry_out(
    plan: Plan,
    how: Execution,
    *,
    data: str,
    config: Any = None,
    on_divergence: Literal["mark", "stop"],
) -> xr.Dataset:
    """Runs a plan to its end; `sweep` explains the result."""
    clock, last = time.perf_counter(), plan.grid.num_rounds
    result = _Result(plan)

    def labelled() -> xr.Dataset:
        return result.dataset(data, config, time.perf_counter() - clock)

    with _signals(how.checkpoints is not None) as signals:
        if how.announce:
            how.announce(plan)
        journal = _Journal(plan, how, signals)
        for part, (compiled, batch) in enumerate(plan.batches):
            replicas, records = compiled.replicas(batch), _no_records(compiled)
            for done in _segments(plan, part, records, journal):
                if on_divergence == "mark":
                    continue
                up_to_ends, _ = _cut(records, plan.grid, done)
                divergence = _first_divergence(compiled.program, replicas, up_to_ends, done)
                if divergence:
                    result.place(compiled.program, replicas, records, done)
                    partial_result = labelled()
                    partial_result.attrs["manifest"]["stopped"] = divergence
                    raise DivergenceError(divergence, partial_result)
            result.place(compiled.program, replicas, records, last)
    return labelled()


def _no_records(compiled: Compiled) -> Record:
    """Zeros ``[1 + records, replicas, models]``."""
    program = compiled.program
    shape = (1 + program.grid.num_records, compiled.batch_size)
    return jax.tree.map(lambda x: np.zeros(shape + x.shape, x.dtype), program.record)


def _segments(plan: Plan, part: int, records: Record, journal: "_Journal") -> Iterator[int]:
    """Fills the records of a batch segment by segment, and yields the rounds done."""
    compiled, batch = plan.batches[part]
    program, where, last = compiled.program, plan.where, plan.grid.num_rounds
    done, replica = journal.load(part, records)
    seeds, numbers, replica, shared, _ = program.inputs(where, compiled.replicas(batch), replica)
    every, count = plan.grid.record_every, 1
    while done < last:
        clock = time.perf_counter()
        count = min(count, program.records_kept * every - done % every, last - done)
        control = where.put(program.control(done, count), None)
        replica, before, rows = compiled.call(seeds, numbers, replica, shared, control)
        before, rows = where.fetch((before, rows))
        if done == 0:
            _write(records, slice(1), jax.tree.map(lambda x: x[None], before))
        _write(records, slice(1 + done // every, 1 + (done + count) // every), rows)
        check_counts(rows.counts)
        done += count
        if plan.grid.until and np.all(_ends(records, plan.grid, done) >= 0):
            done = last
        yield done
        seconds = journal.note(part, done, records, replica, time.perf_counter() - clock)
        count = max(1, int(count * min(4, _SEGMENT_SECONDS / seconds)))


def _ends(records: Record, grid: Grid, done: int) -> np.ndarray:
    """The first record of every replica that met the target, or -1, up to a round."""
    if grid.until is None:
        return np.full(records.is_finite.shape[1], -1)
    rows = slice(1 + done // grid.record_every)
    values = {name: x[rows] for name, x in records.metrics.items()}
    values |= {name: x[rows].cumsum(0) for name, x in records.counts._asdict().items()}
    return grid.until.first_record(values)


def _cut(records: Record, grid: Grid, done: int) -> tuple[Record, np.ndarray]:
    """The records with nothing after each replica's end, and the ends."""
    ends = _ends(records, grid, done)
    if np.all(ends < 0):
        return records, ends
    is_over = (np.arange(len(records.is_finite))[:, None] > ends) & (ends >= 0)
    is_over = is_over[..., None]
    metrics = {name: np.where(is_over, np.nan, x) for name, x in records.metrics.items()}
    counts = jax.tree.map(lambda x: np.where(is_over, 0, x), records.counts)
    return Record(metrics, counts, records.is_finite | is_over), ends


def _write(records: Record, where: slice, rows: Record) -> None:
    """Writes as many of the rows as there is place for."""
    for array, new in zip(jax.tree.leaves(records), jax.tree.leaves(rows), strict=True):
        place = array[where]
        place[:] = new[: len(place)]


class _Journal:
    """What happens between segments: progress, saving, and stopping for a signal.

    Finished batches are saved together with the one under way, every so many seconds.
    """

    def __init__(self, plan: Plan, how: Execution, signals: list[int]) -> None:
        self.plan, self.how, self.signals = plan, how, signals
        self.finished: dict[int, list[np.ndarray]] = {}
        self.last_save = time.perf_counter()
        self.work = [compiled.updates_per_round(batch) for compiled, batch in plan.batches]

    def load(self, part: int, records: Record) -> tuple[int, Replica | None]:
        """The rounds done of a batch, whose records are written down, and its replicas."""
        saved = self.how.checkpoints and self.how.checkpoints.load(part)
        if not saved:
            return self._report(part, 0), None
        rows, compiled = jax.tree.leaves(records), self.plan.batches[part][0]
        for row, array in zip(rows, saved.arrays, strict=False):
            row[: len(array)] = array
        done, rest = saved.rounds, saved.arrays[len(rows) :]
        if done == self.plan.grid.num_rounds:  # nothing to report: it took no time
            return done, None
        self._report(part, done)
        program, size = compiled.program, compiled.batch_size
        wanted = jax.eval_shape(lambda: program.no_replicas(size))
        try:
            replica: Replica = jax.tree.unflatten(jax.tree.structure(wanted), rest)
            check_alike("states have other shapes", replica, wanted, shapes=True)
        except ValueError as error:
            raise RefusedError(f"what was saved is not of this run: {error}") from error
        return done, replica

    def note(
        self, part: int, done: int, records: Record, replica: Replica, seconds: float
    ) -> float:
        """Reports and saves after a segment; the seconds it took, by the slowest process."""
        self._report(part, done)
        if not self.how.checkpoints:
            return agree(seconds)[0]
        grid = self.plan.grid
        is_due = time.perf_counter() - self.last_save >= self.how.save_every
        number = self.signals[-1] if self.signals else 0
        seconds, due, stop = agree(seconds, is_due, number)
        rows = [x[: 1 + done // grid.record_every] for x in jax.tree.leaves(records)]
        is_last = done == grid.num_rounds
        if is_last:
            self.finished[part] = rows
        is_much = sum(x.nbytes for rows in self.finished.values() for x in rows) > _UNSAVED_BYTES
        if due or stop or is_much:
            for each, arrays in self.finished.items():
                self.how.checkpoints.save(each, grid.num_rounds, arrays)
            self.finished.clear()
            if not is_last:
                rest = jax.tree.leaves(self.plan.where.fetch(replica))
                self.how.checkpoints.save(part, done, [*rows, *rest])
            self.last_save = time.perf_counter()
        if stop:
            raise InterruptedRunError(int(stop), self._done(part, done) / self._done())
        return seconds

    def _done(self, part: int | None = None, rounds: int = 0) -> int:
        """Local trainings up to a round of a part; all of them if None."""
        if part is None:
            return self.plan.grid.num_rounds * sum(self.work)
        return self.plan.grid.num_rounds * sum(self.work[:part]) + rounds * self.work[part]

    def _report(self, part: int, done: int) -> int:
        compiled, batch = self.plan.batches[part]
        if self.how.progress:
            self.how.progress(compiled.label(batch), self._done(part, done), self._done())
        return done


@contextmanager
def _signals(is_saving: bool) -> Iterator[list[int]]:
    """Notes SIGINT and SIGTERM instead of dying of them; the second one has its usual effect."""
    noted: list[int] = []
    if not is_saving or threading.current_thread() is not threading.main_thread():
        yield noted
        return
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        noted.append(number)
        restore()
        print("\nsaving after this segment; once more stops at once", file=sys.stderr)

    for number in usual:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        restore()


class _Result:
    """Arrays for all points, ``[*axes, seeds, records, models]``, filled batch by batch."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        programs = [each.program for each in plan.compiled]
        num_models = max(program.num_models for program in programs)
        self.shape = (*plan.grid.shape, plan.grid.num_records + 1, num_models)
        # Where a model is not there its metrics are NaN, so that counts and truths become floats.
        types = {
            name: x.dtype if x.dtype.kind == "f" else np.float64
            for p in programs
            for name, x in p.record.metrics.items()
        }
        self.metrics = {name: np.full(self.shape, np.nan, dtype) for name, dtype in types.items()}
        self.counts = Counts(*np.zeros((len(Counts._fields), *self.shape), np.int32))
        self.diverged = np.full(self.shape[:-2] + self.shape[-1:], -1, np.int32)
        self.ended = np.full(self.shape[:-2], -1, np.int32)
        self.upload_size, self.download_size = np.zeros(
            (2, *plan.grid.shape, 1, num_models), np.int64
        )

    def place(self, program: Program, replicas: np.ndarray, records: Record, done: int) -> None:
        """Writes the records of a batch's first rounds where they belong."""
        every = self.plan.grid.record_every
        rows, index = slice(1 + done // every), tuple(each[replicas] for each in program.index)
        models = slice(program.num_models)
        cells = (*index, rows, models)
        records, ends = _cut(records, self.plan.grid, done)
        self.ended[index] = np.where(ends < 0, -1, ends * every)
        for name, values in records.metrics.items():
            self.metrics[name][cells] = np.swapaxes(values[rows], 0, 1)
        for counts, values in zip(self.counts, records.counts, strict=True):
            counts[cells] = np.swapaxes(values[rows], 0, 1)
        record = _first_not_finite(records, done // every)
        self.diverged[(*index, models)] = np.where(record < 0, -1, record * every)
        self.upload_size[(*index, 0, models)] = program.message_sizes.up
        self.download_size[(*index, 0, models)] = program.message_sizes.down

    def dataset(self, data: str, config: Any, run_seconds: float) -> xr.Dataset:
        """The labelled result."""
        grid = self.plan.grid
        rounds: Any = np.arange(grid.num_records + 1) * grid.record_every
        metrics: Any = self.metrics
        sizes: Any = {"upload_size": self.upload_size, "download_size": self.download_size}
        trace = Trace(rounds, metrics, *self.counts, **sizes)
        dims = (*grid.axes, "seed")
        coords = {name: [label_of(v) for v in values] for name, values in grid.axes.items()}
        dataset = to_dataset(trace, dims).assign_coords(
            {**coords, "seed": np.arange(grid.num_seeds)}
        )
        dataset["diverged"] = (*dims, "model"), self.diverged
        dataset["diverged"].attrs["long_name"] = "first recorded round that is not finite, or -1"
        if grid.until is not None:
            dataset["ended"] = dims, self.ended
            dataset["ended"].attrs["long_name"] = "first recorded round that met the target, or -1"
        about = {"axes": coords} if config is None else config
        dataset.attrs["manifest"] = manifest(about, seed=grid.seed, data=data) | {
            "wall_seconds": {"compile": self.plan.compile_seconds, "run": run_seconds}
        }
        return dataset


def _first_not_finite(records: Record, last: int) -> np.ndarray:
    """The first record up to the last that is not finite, or -1; ``int[replicas, models]``."""
    finite = records.is_finite[: last + 1]
    return np.where(finite.all(0), -1, np.argmin(finite, axis=0))


def _first_divergence(
    program: Program, replicas: np.ndarray, records: Record, done: int
) -> str | None:
    """Which model stopped being finite first, in words."""
    record = _first_not_finite(records, done // program.grid.record_every)
    if np.all(record < 0):
        return None
    first = np.where(record < 0, np.iinfo(record.dtype).max, record)
    row, model = np.unravel_index(np.argmin(first), first.shape)
    point = "".join(f", {n}={x[replicas[row]]:g}" for n, x in program.numbers.items())
    return (
        f"{program.label}{point} diverged: the loss or a parameter of model {model + 1}, "
        f"seed {program.index[-1][replicas[row]]}, is not finite in round "
        f"{record[row, model] * program.grid.record_every}; lower the learning rate"
    )
