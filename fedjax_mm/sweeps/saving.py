"""Saves a sweep's unfinished work and resumes from it."""

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mm.checks.values import check_alike
from fedjax_mm.results.manifest import manifest
from fedjax_mm.simulator.record import Record
from fedjax_mm.simulator.stacks import with_params
from fedjax_mm.sweeps.checkpoint import Checkpoints, Saved
from fedjax_mm.sweeps.devices import agree
from fedjax_mm.sweeps.errors import InterruptedRunError, RefusedError
from fedjax_mm.sweeps.execution import Segment
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.plan import Compiled, Plan
from fedjax_mm.sweeps.program import Program, Replica
from fedjax_mm.tools.compiler import flags_of_results

_UNSAVED_BYTES = 128 * 2**20  # maximum size of finished batches that wait to be saved


def identity(
    grid: Grid, split: str | None, programs: Sequence[Program] | None = None
) -> dict[str, Any]:
    """Returns everything except code that determines the exact bits of a sweep's result.

    Args:
      grid: the runs.
      split: the requested axis to split over devices.
      programs: the runs of a part; defaults to all runs.
    """
    # Include versions, devices, threads and XLA flags, because each may change the last bit of a
    # sum.
    about = manifest({}, seed=grid.seed, data="")
    device = about["device"]
    runs = hashlib.sha256()
    for program in programs or ():
        runs.update(f"{program.label} {[places.tolist() for places in program.index]}".encode())
    names = ("num_rounds", "num_seeds", "seed", "record_every", "client_map")
    described = {name: getattr(grid, name) for name in names} | {
        "axes": grid.labels,
        "until": grid.until and dataclasses.asdict(grid.until),
    }
    return {
        **({"config": grid.config} if grid.config else described),
        "first_seed": grid.first_seed,
        "split": split,
        "precision": str(jnp.result_type(float)),
        **{name: about[name] for name in ("versions", "prng")},
        "device": {name: device[name] for name in ("platform", "kind")},
        "--devices": device["count"],
        # XLA's CPU client has one thread per core, or per device if there are more devices.
        "threads": device["platform"] == "cpu" and max(device["cpu_cores"], device["count"]),
        "XLA_FLAGS": flags_of_results(),
        "keep": grid.keep,
        "share": None if programs is None else runs.hexdigest(),
    }


def data_of(programs: Sequence[Program]) -> dict[str, str]:
    """Returns a digest of the numbers and arrays of all runs."""
    digests = "".join(program.digest for program in programs)
    return {"data": hashlib.sha256(digests.encode()).hexdigest()}


def claim_program(checkpoints: Checkpoints, program: Program, code: str) -> None:
    """Checks that a program and its data are the same as in the unfinished run."""
    label = program.label
    checkpoints.claim({f"program {label}": code, f"data of {label}": program.digest})


class Saving:
    """Saves the work of a plan, and ends the sweep after a segment when a signal arrives.

    Batches are numbered as in `Plan.batches`. Finished batches are saved together with the current
    one, every `save_every` seconds.
    """

    def __init__(
        self, plan: Plan, checkpoints: Checkpoints, save_every: float, signals: list[int]
    ) -> None:
        """Starts with nothing saved."""
        self.plan, self.checkpoints = plan, checkpoints
        self.save_every, self.signals = save_every, signals
        self.finished: dict[int, list[np.ndarray]] = {}
        self.last_save = time.perf_counter()

    def load(self, batch: int, records: Record) -> tuple[int, Replica | None]:
        """Loads a batch's finished rounds and state, and fills in its records."""
        rows, (compiled, _) = jax.tree.leaves(records), self.plan.batches[batch]
        saved = self.checkpoints.load(batch, partial(self._check_records, rows))
        if not saved:
            return 0, None
        for row, array in zip(rows, saved.arrays, strict=False):  # the state follows
            row[: len(array)] = array
        rest = saved.arrays[len(rows) :]
        if saved.rounds < self.plan.grid.num_rounds:
            return saved.rounds, _unfinished(compiled, rest)
        return saved.rounds, _finished(compiled, rest) if self.plan.grid.keep else None

    def _check_records(self, rows: list[np.ndarray], saved: Saved) -> None:
        """Raises `ValueError` if a saved batch does not begin with the records up to its round."""
        grid = self.plan.grid
        wanted = [x[: 1 + saved.rounds // grid.record_every].shape for x in rows]
        # The records are followed by the state of an unfinished batch, or by the parameters of a
        # finished one if they are kept.
        is_all = saved.rounds == grid.num_rounds and grid.keep is None
        given = saved.arrays if is_all else saved.arrays[: len(rows)]
        if wanted != [x.shape for x in given]:
            raise ValueError("its records are not those of the batch")

    def save(self, segment: Segment) -> None:
        """Saves finished work if it is due, or everything if a signal ends the sweep.

        Raises:
          InterruptedRunError: if a signal arrived.
        """
        is_due = time.perf_counter() - self.last_save >= self.save_every
        number = self.signals[-1] if self.signals else 0
        # Agree first, because saving is collective but a signal may reach only one process.
        due, stop = agree(is_due, number)
        grid, fetch = self.plan.grid, self.plan.where.fetch
        rows = jax.tree.leaves(segment.records)
        is_last = segment.rounds == grid.num_rounds
        # Keep finished batches for the next save, because short ones finish many times a second.
        if is_last:
            self.finished[segment.batch] = [*rows, *jax.tree.leaves(segment.params)]
        is_much = sum(x.nbytes for rows in self.finished.values() for x in rows) > _UNSAVED_BYTES
        if due or stop or is_much:
            for each, arrays in self.finished.items():
                self.checkpoints.save(each, grid.num_rounds, arrays)
            self.finished.clear()
            if not is_last:
                state = jax.tree.leaves(fetch(segment.replica))
                self.checkpoints.save(segment.batch, segment.rounds, [*rows, *state])
            self.last_save = time.perf_counter()
        if stop:
            raise InterruptedRunError(int(stop), segment.work_done / segment.total_work)


def _unfinished(compiled: Compiled, arrays: list[np.ndarray]) -> Replica:
    """Restores the state of a batch from its saved arrays."""
    wanted = jax.eval_shape(lambda: compiled.program.no_replica(compiled.batch_size))
    try:
        replica: Replica = jax.tree.unflatten(jax.tree.structure(wanted), arrays)
        check_alike("states have other shapes", replica, wanted, shapes=True)
    except ValueError as error:
        raise RefusedError(f"the saved state is from another run: {error}") from error
    return replica


def _finished(compiled: Compiled, params: list[np.ndarray]) -> Replica:
    """Restores a finished batch from its parameters, because its state is not saved."""
    replica = compiled.program.no_replica(compiled.batch_size)
    structure = jax.tree.structure([state.params for state in replica.models])
    kept = with_params(replica.models, jax.tree.unflatten(structure, params))
    return replica._replace(models=kept)
