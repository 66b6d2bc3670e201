"""Parts of a sweep, which are computed separately, saved, and joined into its result.

`part_of` computes one in a job array on Slurm, and `experiments/executors.py` submits all.
"""

import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from fedjax_mm.base import Params
from fedjax_mm.base.calls import in_short
from fedjax_mm.checks.values import check_choice, check_count, described
from fedjax_mm.results.finished import differences
from fedjax_mm.results.manifest import manifest
from fedjax_mm.sweeps.checkpoint import Saved, arrays_in, data_of, identity, write_arrays
from fedjax_mm.sweeps.errors import (
    DivergenceError,
    InterruptedRunError,
    RefusedError,
    refusing,
)
from fedjax_mm.sweeps.execute import batches, plan_for
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.plan import check_fits, make_outline
from fedjax_mm.sweeps.program import Program, programs_of
from fedjax_mm.sweeps.result import Result
from fedjax_mm.tools.files import plain, read_regular, write_aside
from fedjax_mm.tools.interrupts import noted_signals

_ENDLESS, _LISTED_BYTES = 2.0**60, 64  # unlimited memory, and bytes per listed run

# Identity entries that parts must share. Devices may differ, because they affect only the last
# bits.
_ALIKE = (
    *("config", "axes", "num_rounds", "num_seeds", "seed", "record_every", "until"),
    *("first_seed", "precision", "versions", "prng", "data", "keep", "client_map"),
)


class Part(NamedTuple):
    """One of several parts of a sweep that are computed separately.

    Attributes:
      number: K, starting at 1.
      of: N, the number of parts.
    """

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


class Share(NamedTuple):
    """The runs of one program that a part computes.

    Attributes:
      program: the index of the program in `programs_of`.
      replicas: the indices of its replicas.
    """

    program: int
    replicas: np.ndarray


def shares_of(programs: Sequence[Program], part: Part) -> list[Share]:
    """Returns the consecutive runs of a part, balanced by cost.

    Every run belongs to exactly one part. A part may be empty, and its runs need only a few
    programs, because every part compiles the programs that it needs. The split depends only on the
    grid and the number of parts, so all machines agree on it.
    """
    costs = [
        np.asarray(each.grid.costs(each.index)) * each.traced.facts.updates_per_round
        for each in programs
    ]
    cost = np.concatenate(costs)
    middle = np.cumsum(cost) - cost / 2
    of = np.minimum((middle / cost.sum() * part.of).astype(int), part.of - 1)
    owners = np.split(of == part.number - 1, np.cumsum([len(each) for each in costs])[:-1])
    found = [Share(i, np.flatnonzero(mine)) for i, mine in enumerate(owners)]
    return [share for share in found if len(share.replicas)]


class Runs(NamedTuple):
    """The finished runs of one program in one batch.

    Attributes:
      program: the index of the program in `programs_of`.
      replicas: the indices of its replicas.
      arrays: the leaves of their records ``[records, replicas, ...]`` and, if the grid keeps them,
        of their parameters ``[replicas, ...]``.
    """

    program: int
    replicas: np.ndarray
    arrays: list[np.ndarray]

    def __repr__(self) -> str:
        return in_short(self)


class Piece(NamedTuple):
    """The result of a part.

    Attributes:
      about: the part, the runs' identity, the devices and the run time, as plain values.
      runs: the finished runs of each batch.
    """

    about: Mapping[str, Any]
    runs: list[Runs]

    def __repr__(self) -> str:
        return in_short(self)

    @property
    def part(self) -> Part:
        """The part."""
        return Part(*self.about["part"])

    @property
    def content(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """All arrays, and what they are."""
        arrays = [x for each in self.runs for x in (each.replicas, *each.arrays)]
        return arrays, {**self.about, "runs": [(x.program, len(x.arrays)) for x in self.runs]}

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray], about: Mapping[str, Any]) -> Self:
        """Rebuilds a piece from its `content`."""
        rest, runs = iter(arrays), list[Runs]()
        for program, count in about["runs"]:
            runs.append(Runs(program, next(rest), [next(rest) for _ in range(count)]))
        return cls({key: x for key, x in about.items() if key != "runs"}, runs)


def part_of(text: str, environ: Mapping[str, str] = os.environ) -> Part:
    """Parses a part: "K/N", or "slurm" for a task of a Slurm job array.

    Raises:
      ValueError: if the text is neither, or the environment does not describe a complete array.

    Example:
      >>> part_of("3/7")
      Part(number=3, of=7)
      >>> part_of("slurm", {"SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_TASK_MIN": "0",
      ...                   "SLURM_ARRAY_TASK_MAX": "6", "SLURM_ARRAY_TASK_COUNT": "7"})
      Part(number=5, of=7)
    """
    if text == "slurm":
        return _part_of_array(environ)
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    number, of = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= of:
        raise ValueError(f"part is {text!r}; give K/N with K from 1 to N, such as 1/4, or slurm")
    return Part(number, of)


def _part_of_array(environ: Mapping[str, str]) -> Part:
    names = [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "COUNT")]
    if missing := [name for name in names if name not in environ]:
        raise ValueError(
            f"part is 'slurm', but {missing[0]} is not set; submit an array (sbatch --array=1-4), "
            "or give K/N"
        )
    here, first, last, count = (int(environ[name]) for name in names)
    step = int(environ.get("SLURM_ARRAY_TASK_STEP", "1"))
    # An array with only some tasks of a larger array does not reveal the number of parts.
    if first not in (0, 1) or 1 + (last - first) // step != count:
        raise ValueError(
            f"part is 'slurm', but the array has {count} tasks from {first} to {last}, and not all "
            "from 0 or 1 on, so that the number of parts is unknown; give it: --part "
            "${SLURM_ARRAY_TASK_ID}/N"
        )
    return Part(1 + (here - first) // step, count)


def compute_part(
    grid: Grid,
    part: Part,
    execution: Execution | None = None,
    *,
    on_divergence: Literal["mark", "stop"] = "mark",
) -> Piece:
    """Computes the runs of one part of a sweep, with the same result on every machine.

    If there are more parts than runs, some parts are empty.

    Raises:
      ValueError, InterruptedRunError, OSError: as in `sweep`.
      DivergenceError: as in `sweep`, but without a partial result.

    Example:
      >>> from fedjax_mm import fedavg, mfa_rr
      >>> from fedjax_mm.sweeps import Grid, Setup
      >>> from fedjax_mm.tasks import quadratic
      >>> def build(learning_rate):
      ...     algorithm = fedavg(learning_rate, local_steps=5)
      ...     return Setup(quadratic(6, 4, mu=0.1), algorithm, mfa_rr(6, 2))
      >>> grid = Grid(build, {"learning_rate": [0.05, 0.1]}, num_rounds=3, num_seeds=2)
      >>> piece = compute_part(grid, Part(1, 2))
      >>> piece.part, [each.replicas.tolist() for each in piece.runs]
      (Part(number=1, of=2), [[0, 1]])
    """
    how, clock = execution or Execution(), time.perf_counter()
    check_choice("on_divergence", on_divergence, "mark", "stop")
    if not 1 <= part.number <= part.of:
        raise ValueError(f"part is {part}; give Part(K, N) with K from 1 to N")
    with refusing():
        whole = all_programs(grid, how.memory)
        mine = runs_of(whole, part)
    about = _about(grid, whole) | {"part": tuple(part)}
    if not mine:
        return Piece(plain(about | {"seconds": {"compile": 0.0, "run": 0.0}}), [])
    plan = plan_for(grid, how, [program for _, program in mine])
    shares = [share for share, _ in mine]
    runs = list[Runs]()
    with closing(batches(plan, how, on_divergence)) as computed:
        for last in computed:
            share = shares[plan.programs.index(last.program)]
            each, first = np.unique(last.replicas, return_index=True)  # excludes the padding
            records = [x[:, first] for x in jax.tree.leaves(last.records)]
            params = [x[first] for x in jax.tree.leaves(last.params)]
            replicas = share.replicas[each]
            runs.append(Runs(share.program, replicas, records + params))
    spent = time.perf_counter() - clock - plan.compile_seconds
    seconds = {"compile": plan.compile_seconds, "run": spent}
    return Piece(plain(about | {"seconds": seconds}), runs)


def all_programs(grid: Grid, limit: float | None = _ENDLESS) -> list[Program]:
    """Returns the programs of a grid.

    Raises:
      ValueError: if the grid has more runs than can be listed.
    """
    number = math.prod(grid.shape)
    what = f"{number:,} runs (num_seeds = {grid.num_seeds:,})"
    check_fits(what, _LISTED_BYTES * number, limit, "take fewer seeds or points")
    return programs_of(grid)


def runs_of(programs: Sequence[Program], part: Part) -> list[tuple[Share, Program]]:
    """Returns the shares of a part, each with a program restricted to its runs."""
    shares = shares_of(programs, part)
    return [(share, programs[share.program].some(share.replicas)) for share in shares]


def _about(grid: Grid, programs: Sequence[Program]) -> dict[str, Any]:
    """Returns a piece's identity: runs, data, code and device."""
    made = manifest({}, seed=grid.seed, data="")
    about = identity(grid, None) | data_of(programs)
    return about | {"revision": made["git_revision"], "made on": made["device"]}


def save_piece(piece: Piece, path: Path) -> None:
    """Writes the result of a part atomically, with a digest.

    Raises:
      OSError: if it cannot be written.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as directory:
      ...     save_piece(Piece({"part": (2, 3)}, []), path := Path(directory, "2-of-3.npz"))
      ...     load_piece(path).part
      Part(number=2, of=3)
    """
    write_aside(path, partial(write_arrays, *piece.content, path.name))


def load_piece(path: Path) -> Piece:
    """Reads a piece written by `save_piece`.

    Raises:
      ValueError: if the file is damaged or renamed.
      OSError: if it cannot be read.

    Example:
      >>> from tempfile import NamedTemporaryFile
      >>> with NamedTemporaryFile(suffix="1-of-3.npz") as file:
      ...     load_piece(Path(file.name))  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ValueError: ...1-of-3.npz is damaged; compute this part again
    """
    content = read_regular(path)
    try:
        return Piece.of(*arrays_in(content, path.name))
    except Exception as error:  # damaged content can raise any exception
        raise ValueError(f"{path} is damaged; compute this part again") from error


def join_parts(grid: Grid, pieces: Iterable[Piece]) -> tuple[xr.Dataset, list[Params] | None]:
    """Joins the pieces of all parts into the sweep's result, and parameters if kept.

    If a generator provides the pieces, only one is in memory at a time.

    Args:
      grid: the runs of the sweep.
      pieces: the pieces of all parts, in any order.

    Raises:
      ValueError: if a piece belongs to another grid, version or number of parts, or if one is
        missing or duplicated.

    Example:
      >>> from fedjax_mm import fedavg, mfa_rr
      >>> from fedjax_mm.sweeps import Grid, Setup
      >>> from fedjax_mm.tasks import quadratic
      >>> def build(learning_rate):
      ...     algorithm = fedavg(learning_rate, local_steps=5)
      ...     return Setup(quadratic(6, 4, mu=0.1), algorithm, mfa_rr(6, 2))
      >>> grid = Grid(build, {"learning_rate": [0.05, 0.1]}, num_rounds=3, num_seeds=2)
      >>> pieces = [compute_part(grid, Part(number, 2)) for number in (1, 2)]
      >>> result, _ = join_parts(grid, pieces)
      >>> dict(result.sizes)
      {'learning_rate': 2, 'seed': 2, 'round': 4, 'model': 2}
    """
    # Plan without a memory limit, because no runs are computed.
    programs = all_programs(grid)
    plan = make_outline(grid, limit=_ENDLESS, programs=programs)
    what = f"the results of {math.prod(grid.shape):,} runs"
    check_fits(what, plan.result_bytes, None, "record less often (record_every)")
    result, wanted = Result(plan), _about(grid, programs)
    seconds, devices = {"compile": 0.0, "run": 0.0}, list[Mapping[str, Any]]()
    found, of = set[int](), 0
    times = [np.zeros(len(program), int) for program in programs]
    for piece in pieces:
        _check_alike(piece, wanted)
        of = of or piece.part.of
        if piece.part.of != of or piece.part.number in found:
            raise ValueError(f"part {piece.part} comes twice, or with parts of {of}")
        found.add(piece.part.number)
        for each in piece.runs:
            program = programs[each.program]
            result.place(program, each.replicas, *_placed(program, each.arrays))
            times[each.program][each.replicas] += 1
        devices += [piece.about["made on"]] * bool(piece.runs)
        seconds = {name: seconds[name] + piece.about["seconds"][name] for name in seconds}
    if not of:
        raise ValueError("no parts were given; compute them first")
    if missing := sorted(set(range(1, of + 1)) - found):
        raise ValueError(f"parts {listed(missing)} of {of} are missing; compute them")
    if any((each != 1).any() for each in times):
        raise ValueError("the parts do not contain every run once; compute all of them again")
    kinds = " and ".join(sorted({each["kind"] for each in devices}))
    device = {**devices[0], "kind": kinds}
    return result.dataset(wall_seconds=seconds, device=device, parts=of), result.params


def _check_alike(piece: Piece, wanted: Mapping[str, Any]) -> None:
    """Raises `ValueError` if a piece belongs to another run."""
    names = [name for name in (*_ALIKE, "revision") if name in wanted]
    mine = {name: piece.about.get(name) for name in names}
    changes = list(differences(mine, plain({name: wanted[name] for name in names})))
    if changes:
        raise ValueError(
            f"part {piece.part} is from another run: {'; '.join(changes[:3])}; compute it again"
        )


def _placed(program: Program, arrays: Sequence[np.ndarray]) -> Iterator[Any]:
    """Yields the records and, if any, the parameters of some runs."""
    leaves, records = jax.tree.flatten(program.traced.record)
    yield jax.tree.unflatten(records, arrays[: len(leaves)])
    if program.grid.keep is not None:
        models = [state.params for state in program.traced.replica.models]
        yield jax.tree.unflatten(jax.tree.structure(models), arrays[len(leaves) :])


def listed(numbers: Sequence[int]) -> str:
    """Returns at most eight of the numbers as text."""
    shown = ", ".join(map(str, numbers[:8]))
    return shown + (f" and {len(numbers) - 8:,} more" if len(numbers) > 8 else "")


TRIES = 3
"""The number of times a part is submitted before the sweep fails."""

_POLL_SECONDS = 0.1


class Job(Protocol):
    """A call submitted to an executor, such as a `concurrent.futures.Future`."""

    def done(self) -> bool:
        """Returns whether the call has ended."""
        ...

    def result(self) -> Any:
        """Returns the result of the call, or raises its error."""
        ...


class Executor(Protocol):
    """Executes calls elsewhere, such as a `concurrent.futures.Executor` or submitit's executor."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Job:
        """Submits a call."""
        ...


class _Failure(NamedTuple):
    """An error that would recur on every worker, as a value that any executor can return."""

    words: str
    is_divergence: bool


def compute_parts(
    compute: Callable[[Part], Piece],
    parts: Sequence[Part],
    executor: Executor,
    report: Callable[[int], None] = lambda done: None,
    at_once: int | None = None,
) -> Generator[Piece]:
    """Computes parts on an executor, and yields their results as they finish.

    If a worker dies, its part is submitted again, at most three times including the first.

    Args:
      compute: computes one part; it is pickled for the workers with everything it references.
      parts: the parts.
      executor: distributes parts to workers, on which this package must be installed.
      report: called with the number of finished parts.
      at_once: the maximum number of parts submitted at a time; defaults to all of them.

    Raises:
      RefusedError, DivergenceError: if a part itself fails, which cancels the others.
      ChildProcessError: if a part's workers died three times, or the executor rejected it.
    """
    sent, is_double = _pickled(compute), jnp.result_type(float) == np.float64
    left, running = list(parts), list[tuple[Part, Job]]()
    tries, ended = Counter[Part](), 0
    try:
        while left or running:
            while left and (at_once is None or len(running) < at_once):
                part = left.pop(0)
                tries[part] += 1
                running.append((part, _given(executor, sent, part, is_double)))
            report(ended)
            over = [each for each in running if each[1].done()]
            running = [each for each in running if each not in over]
            problem: Exception | None = None
            for part, job in over:  # check all of them, because good results are saved
                try:
                    piece = job.result()
                except Exception as error:  # executors raise different errors for dead workers
                    left.append(part)
                    if tries[part] == TRIES:
                        words = f"part {part} was submitted {TRIES} times, but its workers died"
                        problem = ChildProcessError(f"{words}: {error}")
                    continue
                if isinstance(piece, _Failure):
                    kind = partial(DivergenceError, partial=None)
                    problem = (kind if piece.is_divergence else RefusedError)(piece.words)
                    continue
                ended += 1
                yield piece
            if problem:
                raise problem
            time.sleep(_POLL_SECONDS if running and not over else 0)
        report(ended)
    finally:
        for _, job in running:
            if cancel := getattr(job, "cancel", None):
                cancel()


def _given(executor: Executor, sent: bytes, part: Part, is_double: bool) -> Job:
    """Submits a part.

    Raises:
      ChildProcessError: if the executor rejects it.
    """
    try:
        return executor.submit(_work, sent, part, is_double)
    except Exception as error:  # raised by a pool with killed processes, or by a scheduler
        raise ChildProcessError(f"the executor rejected part {part}: {error}") from error


def _work(sent: bytes, part: Part, is_double: bool) -> Piece | _Failure:
    """Computes a part in a worker."""
    import cloudpickle

    with jax.enable_x64(is_double):
        try:
            piece: Piece = cloudpickle.loads(sent)(part)
        except OSError:  # a disk or connection error may not recur on other workers
            raise
        except Exception as error:  # any other error would recur on every worker
            # Send only the message, because an error may reference objects that cannot be pickled.
            name = "" if isinstance(error, ValueError | DivergenceError) else type(error).__name__
            words = ": ".join(filter(None, (f"part {part}", name, str(error))))
            return _Failure(words, isinstance(error, DivergenceError))
    return piece


def _pickled(compute: Callable[[Part], Piece]) -> bytes:
    """Pickles a function to bytes, which any executor can send.

    Raises:
      ImportError: if cloudpickle is not installed.
      TypeError: if the function references something that cannot be pickled.
    """
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError("executors need pip install 'fedjax-mm[cluster]'") from error
    try:
        sent: bytes = cloudpickle.dumps(compute)
    except Exception as error:  # pickling calls methods of arbitrary objects
        raise TypeError(f"the sweep cannot be sent to workers: {error}") from error
    return sent


def by_executor(
    grid: Grid, how: Execution, compute: Callable[[Part], Piece]
) -> tuple[xr.Dataset, list[Params] | None]:
    """Computes a sweep in parts on an executor and returns the result, and parameters if kept.

    With checkpoints, finished parts are saved and not recomputed.

    Args:
      grid: the runs.
      how: how to execute the sweep, with the executor and the number of parts.
      compute: computes a part in a worker.

    Raises:
      DivergenceError, ChildProcessError: as in `compute_parts`.
      InterruptedRunError: if SIGINT or SIGTERM arrived, and there are checkpoints.
      RefusedError: if a part was rejected, or the unfinished run is a different one.
    """
    of, saved = check_count("num_parts", how.num_parts), how.checkpoints
    at_once = None if how.at_once is None else check_count("at_once", how.at_once)
    parts = [Part(number, of) for number in range(1, of + 1)]
    if jax.process_count() > 1:
        raise ValueError("an executor is for one process; leave out --distributed and --process")
    if not callable(getattr(how.executor, "submit", None)):
        raise TypeError(
            f"executor is {described(how.executor)}; give an object with submit(fn, *args), such "
            "as a concurrent.futures.Executor"
        )
    done = dict[Part, Piece]()
    if saved:
        with refusing():
            about = identity(grid, how.split) | data_of(programs_of(grid)) | {"parts": of}
            if saved.claim(about) is None:
                saved.begin({})
        found = {part: saved.load(part.number, _check) for part in parts}
        done = {part: Piece.of(each.arrays, each.about) for part, each in found.items() if each}

    def report(ended: int) -> None:
        ended += len(done)
        for callback in how.callbacks:
            callback.on_parts(ended, of)
        if signals:
            raise InterruptedRunError(signals[-1], ended / of if ended else None)

    left = [part for part in parts if part not in done]
    given = compute_parts(compute, left, how.executor, report, at_once)

    def pieces() -> Iterator[Piece]:
        yield from done.values()
        for piece in given:
            if saved:
                saved.save(piece.part.number, grid.num_rounds, *piece.content)
            yield piece

    until = "stopping; parts that have ended are saved"
    with noted_signals(saved is not None, until) as signals, closing(given):
        return join_parts(grid, pieces())


def _check(saved: Saved) -> None:
    """Raises an error if the arrays of a saved part do not form a piece."""
    Piece.of(saved.arrays, saved.about)
