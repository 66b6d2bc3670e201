"""Work between two segments: reporting progress, saving, and stopping for a signal."""

import time
from functools import partial

import jax
import numpy as np

from fedjax_mm.checks import check_alike
from fedjax_mm.stacks import with_params
from fedjax_mm.sweeps.checkpoint import Saved
from fedjax_mm.sweeps.devices import agree
from fedjax_mm.sweeps.errors import InterruptedRunError, RefusedError
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.plan import Plan
from fedjax_mm.sweeps.program import Carry, Program, Record

_UNSAVED_BYTES = 128 * 2**20  # of finished batches that wait to be saved


class Journal:
    """Progress of a plan, reported and saved.

    Batches are numbered as in `Plan.batches`. Finished batches are saved together with the current
    one, every `save_every` seconds.
    """

    def __init__(self, plan: Plan, how: Execution, signals: list[int]) -> None:
        """Begins with nothing done or saved."""
        self.plan, self.how, self.signals = plan, how, signals
        self.finished: dict[int, list[np.ndarray]] = {}
        self.last_save = time.perf_counter()

    def load(self, part: int, records: Record) -> tuple[int, Carry | None]:
        """Returns a batch's finished rounds and its carry, and fills in its records."""
        rows, compiled = jax.tree.leaves(records), self.plan.batches[part][0]
        check = partial(self._check_records, rows)
        saved = self.how.checkpoints and self.how.checkpoints.load(part, check)
        if not saved:
            return self._report(part, 0), None
        for row, array in zip(rows, saved.arrays, strict=False):  # then comes the carry
            row[: len(array)] = array
        done, rest = saved.rounds, saved.arrays[len(rows) :]
        program, size = compiled.program, compiled.batch_size
        if done == self.plan.grid.num_rounds:  # not reported, because it took no time
            return done, _ended(program, size, rest) if self.plan.grid.keep else None
        self._report(part, done)
        wanted = jax.eval_shape(lambda: program.no_carry(size))
        try:
            carry: Carry = jax.tree.unflatten(jax.tree.structure(wanted), rest)
            check_alike("states have other shapes", carry, wanted, shapes=True)
        except ValueError as error:
            raise RefusedError(f"the saved state is of another run: {error}") from error
        return done, carry

    def _check_records(self, rows: list[np.ndarray], saved: Saved) -> None:
        """Raises `ValueError` unless a saved batch begins with its records up to its round."""
        grid = self.plan.grid
        wanted = [x[: 1 + saved.rounds // grid.record_every].shape for x in rows]
        # An unfinished batch has its carry after its records, and a finished one has its parameters
        # there if they are kept.
        is_all = saved.rounds == grid.num_rounds and grid.keep is None
        given = saved.arrays if is_all else saved.arrays[: len(rows)]
        if wanted != [x.shape for x in given]:
            raise ValueError("its records are not those of the batch")

    def note(self, part: int, done: int, records: Record, carry: Carry, seconds: float) -> float:
        """Reports and saves after a segment, and returns its seconds in the slowest process."""
        self._report(part, done)
        if not self.how.checkpoints:
            return agree(seconds)[0]
        grid = self.plan.grid
        is_due = time.perf_counter() - self.last_save >= self.how.save_every
        number = self.signals[-1] if self.signals else 0
        # Agree first, because saving is collective but a signal may reach one process only.
        seconds, due, stop = agree(seconds, is_due, number)
        rows = [x[: 1 + done // grid.record_every] for x in jax.tree.leaves(records)]
        is_last = done == grid.num_rounds
        # Keep finished batches for the next save, because short batches end many times a second.
        if is_last:
            params = [state.params for state in carry.models]
            kept = self.plan.where.fetch(params) if grid.keep else ()
            self.finished[part] = [*rows, *jax.tree.leaves(kept)]
        is_much = sum(x.nbytes for rows in self.finished.values() for x in rows) > _UNSAVED_BYTES
        if due or stop or is_much:
            for each, arrays in self.finished.items():
                self.how.checkpoints.save(each, grid.num_rounds, arrays)
            self.finished.clear()
            if not is_last:
                rest = jax.tree.leaves(self.plan.where.fetch(carry))
                self.how.checkpoints.save(part, done, [*rows, *rest])
            self.last_save = time.perf_counter()
        if stop:
            raise InterruptedRunError(int(stop), self._done(part, done) / sum(self.plan.work))
        return seconds

    def _done(self, part: int, rounds: int) -> float:
        """Returns the work up to a round of a batch."""
        work = self.plan.work
        return sum(work[:part]) + rounds * work[part] / self.plan.grid.num_rounds

    def _report(self, part: int, done: int) -> int:
        compiled, batch = self.plan.batches[part]
        if self.how.progress:
            self.how.progress(
                compiled.label(batch), int(self._done(part, done)), int(sum(self.plan.work))
            )
        return done


def _ended(program: Program, size: int, params: list[np.ndarray]) -> Carry:
    """Returns the carry of a finished batch from its parameters, the only part that was saved."""
    carry = program.no_carry(size)
    structure = jax.tree.structure([state.params for state in carry.models])
    kept = with_params(carry.models, jax.tree.unflatten(structure, params))
    return carry._replace(models=kept)
