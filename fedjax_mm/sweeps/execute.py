"""Carries out a sweep's plan in segments, with progress, checkpoints and a labelled result."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from fedjax_mm.base import Params
from fedjax_mm.interrupts import noted_signals
from fedjax_mm.results.dataset import check_counts, manifest
from fedjax_mm.sweeps.checkpoint import Checkpoints
from fedjax_mm.sweeps.devices import flags_of_user
from fedjax_mm.sweeps.errors import DivergenceError, refusing
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Grid, Runs, Setup
from fedjax_mm.sweeps.journal import Journal
from fedjax_mm.sweeps.labelled import Result, divergence, no_records
from fedjax_mm.sweeps.plan import Plan, make_plan
from fedjax_mm.sweeps.program import Record, Rounds, without_keys

_SEGMENT_SECONDS = 1.0  # aim of a segment's duration


@overload
def sweep(
    build: Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]],
    *,
    on_divergence: Literal["mark", "stop"] = "mark",
    data: str = "synthetic",
    execution: Execution | None = None,
    keep: None = None,
    **runs: Unpack[Runs],
) -> xr.Dataset: ...


@overload
def sweep(
    build: Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]],
    *,
    on_divergence: Literal["mark", "stop"] = "mark",
    data: str = "synthetic",
    execution: Execution | None = None,
    keep: Literal["params"],
    **runs: Unpack[Runs],
) -> tuple[xr.Dataset, list[Params]]: ...


def sweep(
    build: Callable[..., Setup],
    axes: Mapping[str, Sequence[Any]],
    *,
    on_divergence: Literal["mark", "stop"] = "mark",
    data: str = "synthetic",
    execution: Execution | None = None,
    keep: Literal["params"] | None = None,
    **runs: Unpack[Runs],
) -> xr.Dataset | tuple[xr.Dataset, list[Params]]:
    """Simulates every point of a grid with every seed, in one compiled program per structure.

    The values on axes of floats are arguments of a compiled program. Every value on another axis
    has a separate program, unless `together` groups it. The replicas of a program run on all
    devices, in batches that fit the memory. The last batch is padded, so that nothing is compiled
    twice.

    Args:
      build: called with one value of every axis and with the shared arguments, by name; returns the
        `Setup` to simulate. It is traced, so that values of numeric axes are tracers.
      axes: names and values, in the order of the result's dimensions. A value may be any object
        that `build` understands.
      num_rounds: T. With a `Dispatch`, a round is `arrivals_per_round` arrivals (see `fedast`).
      num_seeds: replicas of each point. All points have the same seeds.
      first_seed: the number of the first seed, with which a run can add seeds to an earlier one.
      seed: the root of all draws.
      shared: further arguments of `build`, by name, as pytrees of arrays, such as a task with its
        data. They are arguments of the compiled program instead of constants in it.
      per_seed: further arguments of `build`, by name, with one number for each seed, such as the
        index of its draw of the data.
      prepare: computes a pytree of arrays once for every replica, before its first round, such as
        the models that clients train on their own. It is called with the replica's key and all
        arguments of `build`, and `build` gets its result as `prepared`. It should use the keys of
        `keys.preparation_key`.
      record_every: rounds between records; it divides `num_rounds`.
      client_map: "auto", "vmap", "scan" or a chunk size, as in `simulate`.
      until: a target at which a run ends before its last round. Up to the target the records are,
        bit for bit, those of a run without it. After the target metrics are NaN and counts stay.
        Runs that are computed side by side go on until all have ended.
      together: a function for each axis whose values may share a program. Values for which it
        returns equal results share one, and `build` gets a `OneOf`, whose number is traced.
      cost: the relative work of a local training at a point, for the forecast of the time.
      on_divergence: "mark" a run whose loss or parameters stop being finite and go on with the
        others, or "stop" the sweep.
      data: "real", "synthetic" or "surrogate", for the manifest.
      execution: devices, memory, progress reports and checkpoints of the sweep.
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
      >>> from fedjax_mm.sweeps import Setup
      >>> from fedjax_mm.tasks import quadratic
      >>> def build(assignment, num_models, learning_rate):
      ...     algorithm = fedavg(learning_rate, local_steps=5)
      ...     return Setup(quadratic(24, 4, mu=2e-4), algorithm, assignment(24, num_models))
      >>> result = sweep(
      ...     build,
      ...     {"assignment": [mfa_rand, mfa_rr], "num_models": [2], "learning_rate": [0.05, 0.1]},
      ...     num_rounds=20, num_seeds=3)
      >>> result.sel(assignment="mfa_rr", learning_rate=0.1).isel(round=-1).excess_loss.dims
      ('num_models', 'seed', 'model')
      >>> result, params = sweep(
      ...     build,
      ...     {"assignment": [mfa_rr], "num_models": [2], "learning_rate": [0.05, 0.1]},
      ...     num_rounds=20, num_seeds=3, keep="params")
      >>> params[0].shape  # assignments, numbers of models, rates, seeds, w
      (1, 1, 2, 3, 97)
    """
    if on_divergence not in ("mark", "stop"):
        raise ValueError(f"on_divergence is {on_divergence!r}; it must be 'mark' or 'stop'")
    grid, how = Grid(build, axes, **runs, keep=keep), execution or Execution()
    done = finish(plan_for(grid, how), how, data=data, on_divergence=on_divergence)
    return done.dataset if done.params is None else (done.dataset, done.params)


@refusing((ValueError, OverflowError))
def plan_for(grid: Grid, how: Execution, config: Any = None) -> Plan:
    """Returns the compiled plan, which is that of the unfinished run if one is continued.

    Raises:
      RefusedError: if the grid is wrong, does not fit the memory, or differs from the unfinished
        run.
    """

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
        approve=partial(_claim_program, how.checkpoints) if how.checkpoints else None,
    )
    sizes = [each.batch_size for each in plan.compiled]
    if batch_sizes not in (None, sizes):
        raise ValueError(
            f"the unfinished run has batches of {batch_sizes} runs, and now {sizes} fit the "
            "memory; use the memory limit of the unfinished run"
        )
    if how.checkpoints and batch_sizes is None:
        how.checkpoints.begin({"batch_sizes": sizes})
    return plan


def _claim_program(checkpoints: Checkpoints, label: str, text: str) -> None:
    """Checks that a program is that of the unfinished run."""
    # Hash the text, because it has the code and, as constants, the data that it closes over.
    checkpoints.claim({f"program {label}": hashlib.sha256(text.encode()).hexdigest()})


def _identity(grid: Grid, how: Execution, config: Any) -> dict[str, Any]:
    """Returns everything but the programs on which the bits of the results depend."""
    # Include versions, devices, threads and flags of XLA, because each may change the last bit of a
    # sum.
    about = manifest({}, seed=grid.seed, data="")
    device = about["device"]
    shared = hashlib.sha256()
    for leaf in jax.tree.leaves(without_keys(grid.shared)):
        shared.update(np.asarray(leaf).tobytes())
    names = ("num_rounds", "num_seeds", "seed", "record_every", "client_map")
    described = {name: getattr(grid, name) for name in names} | {
        "axes": grid.labels,
        "per_seed": {name: np.asarray(x).tolist() for name, x in grid.per_seed.items()},
        "until": grid.until and grid.until._asdict(),
    }
    return {
        **({"config": config} if config else described),
        "first_seed": grid.first_seed,
        "split": how.split,
        "precision": str(jnp.result_type(float)),
        **{name: about[name] for name in ("versions", "prng")},
        "device": {name: device[name] for name in ("platform", "kind")},
        "--devices": device["count"],
        # XLA's CPU client has a thread for each core, and for each device if they are more.
        "threads": device["platform"] == "cpu" and max(device["cpu_cores"], device["count"]),
        "XLA_FLAGS": flags_of_user(),
        "shared data": shared.hexdigest(),
        "keep": grid.keep,
    }


class Finished(NamedTuple):
    """The dataset of a sweep, and the final parameters of every model if they are kept."""

    dataset: xr.Dataset
    params: list[Params] | None


def carry_out(
    plan: Plan,
    how: Execution,
    *,
    data: str,
    config: Any = None,
    on_divergence: Literal["mark", "stop"],
) -> xr.Dataset:
    """Runs a plan to its end, and returns the dataset that `sweep` describes."""
    return finish(plan, how, data=data, config=config, on_divergence=on_divergence).dataset


def finish(
    plan: Plan,
    how: Execution,
    *,
    data: str,
    config: Any = None,
    on_divergence: Literal["mark", "stop"],
) -> Finished:
    """Runs a plan to its end."""
    clock, result = time.perf_counter(), Result(plan)

    def labelled() -> xr.Dataset:
        return result.dataset(data, config, time.perf_counter() - clock)

    with noted_signals(how.checkpoints is not None, "saving after this segment") as signals:
        if how.announce:
            how.announce(plan)
        journal = Journal(plan, how, signals)
        for part, (compiled, batch) in enumerate(plan.batches):
            program, replicas = compiled.program, compiled.replicas(batch)
            records = no_records(compiled)
            for done in _segments(result, part, records, journal):
                if on_divergence == "mark":
                    continue
                words = divergence(program, replicas, records, done)
                if words:
                    result.place(program, replicas, records, done)
                    partial_result = labelled()
                    partial_result.attrs["manifest"] |= {"stopped": words}
                    raise DivergenceError(words, partial_result)
            result.place(program, replicas, records, plan.grid.num_rounds)
    return Finished(labelled(), result.params)


def _segments(result: Result, part: int, records: Record, journal: Journal) -> Iterator[int]:
    """Fills the records of a batch segment by segment, and yields the rounds done."""
    plan = result.plan
    (compiled, batch), where, grid = plan.batches[part], plan.where, plan.grid
    done, carry = journal.load(part, records)
    given, carry, _ = compiled.program.inputs(where, compiled.replicas(batch), carry)
    every, count = grid.record_every, 1  # one round at first, to time it
    while done < grid.num_rounds:
        clock = time.perf_counter()
        most = compiled.program.records_kept * every - done % every
        count = min(count, most, grid.num_rounds - done)
        rounds = where.put(Rounds(np.int32(done), np.int32(count)), None)
        carry, rows = compiled.call(given, carry, rounds)
        rows = where.fetch(rows)
        first = 0 if done == 0 else 1 + done // every
        _write(records, slice(first, 1 + (done + count) // every), rows)
        check_counts(rows.counts)
        done += count
        # Stop once all replicas have met the target, because further segments would be empty.
        if carry.ending and np.all(where.fetch(carry.ending.is_met)):
            done = grid.num_rounds
        yield done
        # Make segments of about a second, so that signals are handled in time and the host's work
        # is hidden.
        seconds = journal.note(part, done, records, carry, time.perf_counter() - clock)
        count = max(1, int(count * min(4, _SEGMENT_SECONDS / seconds)))
    if grid.keep is not None:
        params = where.fetch([state.params for state in carry.models])
        result.keep(compiled.program, compiled.replicas(batch), params, records)


def _write(records: Record, where: slice, rows: Record) -> None:
    """Writes the rows that fit into the place `where`."""
    for array, new in zip(jax.tree.leaves(records), jax.tree.leaves(rows), strict=True):
        place = array[where]
        place[:] = new[: len(place)]
