"""Parts of a sweep, which are computed separately, saved, and joined into its result.

`part_of` computes one in a job array on Slurm, and `experiments/executors.py` submits all.
"""

import math
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from fedjax_mm.base import Params
from fedjax_mm.checks.values import check_choice, check_count, described
from fedjax_mm.results.dataset import load_dataset, nobody
from fedjax_mm.results.manifest import differences, manifest
from fedjax_mm.simulator.record import Record
from fedjax_mm.sweeps.checkpoint import Saved, data_of, identity, saved_in, write_saved
from fedjax_mm.sweeps.errors import (
    DivergenceError,
    InterruptedRunError,
    RefusedError,
    refusing,
)
from fedjax_mm.sweeps.execute import batches, kept_state, plan_for
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Grid
from fedjax_mm.sweeps.plan import Plan, check_fits, make_plan
from fedjax_mm.sweeps.program import Program, programs_of
from fedjax_mm.sweeps.result import Result
from fedjax_mm.sweeps.store import Store
from fedjax_mm.tools.files import plain, read_regular, write_aside
from fedjax_mm.tools.interrupts import noted_signals

_ENDLESS, _LISTED_BYTES = 2.0**60, 64  # unlimited memory, and bytes per listed run

# Identity entries that parts must share. Devices may differ, because they affect only the last
# bits.
_ALIKE = (
    *("config", "axes", "num_rounds", "num_seeds", "seed", "record_every", "until"),
    *("first_seed", "precision", "versions", "prng", "data", "keep", "client_map", "revision"),
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


def shares_of(programs: Sequence[Program], part: Part) -> list[np.ndarray]:
    """Splits runs into consecutive parts of equal cost: a part's replicas of each program.

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
    return [np.flatnonzero(mine) for mine in owners]


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
    programs: Sequence[Program] | None = None,
) -> Saved:
    """Computes the runs of one part of a sweep, with the same result on every machine.

    If there are more parts than runs, some parts are empty.

    Args:
      grid: the runs of the sweep.
      part: the part to compute.
      execution: how to execute the part.
      on_divergence: as in `sweep`.
      programs: the grid's programs, if they are known.

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
      >>> saved = compute_part(grid, Part(1, 2))
      >>> saved.about["part"], saved.arrays[0].shape  # records, runs, models
      ([1, 2], (4, 2, 2))
    """
    how, clock = execution or Execution(), time.perf_counter()
    check_choice("on_divergence", on_divergence, "mark", "stop")
    if not 1 <= part.number <= part.of:
        raise ValueError(f"part is {part}; give Part(K, N) with K from 1 to N")
    if programs is None:
        with refusing():
            programs = all_programs(grid, how.memory)
    mine, compile_seconds = programs_in(programs, part), 0.0
    runs = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), list(map(_shapes, mine)))
    if mine:
        plan = plan_for(grid, how, mine)
        compile_seconds = plan.compile_seconds
        with closing(batches(plan, how, on_divergence)) as computed:
            for last in computed:
                clock -= last.earlier_seconds
                records, params = runs[plan.programs.index(last.program)]
                # Padding repeats the last replica, so it only writes the same values again.
                for x, new in zip(*map(jax.tree.leaves, (records, last.records)), strict=True):
                    x[:, last.replicas] = new
                for x, new in zip(*map(jax.tree.leaves, (params, last.params)), strict=True):
                    x[last.replicas] = new
    spent = time.perf_counter() - clock - compile_seconds
    seconds = {"compile": compile_seconds, "run": spent if mine else 0.0}
    about = _about(grid, programs) | {"part": part, "seconds": seconds}
    return Saved(grid.num_rounds, jax.tree.leaves(runs), plain(about))


def all_programs(grid: Grid, limit: float | None = _ENDLESS) -> list[Program]:
    """Builds and groups the points of a grid, if its runs can be listed.

    Raises:
      ValueError: if the grid has more runs than can be listed.
    """
    number = math.prod(grid.shape)
    what = f"{number:,} runs (num_seeds = {grid.num_seeds:,})"
    check_fits(what, _LISTED_BYTES * number, limit, "take fewer seeds or points")
    return programs_of(grid)


def programs_in(programs: Sequence[Program], part: Part) -> list[Program]:
    """Restricts a grid's programs to the runs of a part, and drops programs without any."""
    shares = zip(programs, shares_of(programs, part), strict=True)
    return [program.some(share) for program, share in shares if len(share)]


def _shapes(program: Program) -> tuple[Record, list[Params] | None]:
    """The shapes of the records ``[1 + records, replicas, ...]`` and of any kept parameters."""

    def shaped(tree: Any, *size: int) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*size, *x.shape), x.dtype), tree)

    grid, traced = program.grid, program.traced
    kept = [state.params for state in traced.replica.models] if grid.keep else None
    return shaped(traced.record, 1 + grid.num_records, len(program)), shaped(kept, len(program))


def _about(grid: Grid, programs: Sequence[Program]) -> dict[str, Any]:
    """The identity of a part's runs, data, code and device."""
    made = manifest({}, seed=grid.seed, data="")
    about = identity(grid, None) | data_of(programs)
    return about | {"revision": made["git_revision"], "made on": made["device"]}


def save_part(saved: Saved, path: Path) -> None:
    """Writes the result of a part atomically, with a digest.

    Raises:
      OSError: if it cannot be written.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as directory:
      ...     save_part(Saved(5, [], {"part": (2, 3)}), path := Path(directory, "2-of-3.npz"))
      ...     load_part(path)
      Saved(rounds=5, arrays=[], about={'part': [2, 3]})
    """
    write_saved(saved, path, path.name)


def load_part(path: Path) -> Saved:
    """Reads a file written by `save_part`.

    Raises:
      ValueError: if the file is damaged or renamed.
      OSError: if it cannot be read.

    Example:
      >>> from tempfile import NamedTemporaryFile
      >>> with NamedTemporaryFile(suffix="1-of-3.npz") as file:
      ...     load_part(Path(file.name))  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ValueError: ...1-of-3.npz is damaged; compute this part again
    """
    content = read_regular(path)
    try:
        return saved_in(content, path.name)
    except Exception as error:  # damaged content can raise any exception
        raise ValueError(f"{path} is damaged; compute this part again") from error


def join_parts(
    grid: Grid, parts: Iterable[Saved], programs: Sequence[Program] | None = None
) -> tuple[xr.Dataset, list[Params] | None]:
    """Joins all parts into the sweep's result, and parameters if kept.

    If a generator provides the parts, only one is in memory at a time.

    Args:
      grid: the runs of the sweep.
      parts: the results of all parts, in any order.
      programs: the grid's programs, if they are known.

    Raises:
      ValueError: if a part belongs to another grid, version or number of parts, or if one is
        missing or duplicated.

    Example:
      >>> from fedjax_mm import fedavg, mfa_rr
      >>> from fedjax_mm.sweeps import Grid, Setup
      >>> from fedjax_mm.tasks import quadratic
      >>> def build(learning_rate):
      ...     algorithm = fedavg(learning_rate, local_steps=5)
      ...     return Setup(quadratic(6, 4, mu=0.1), algorithm, mfa_rr(6, 2))
      >>> grid = Grid(build, {"learning_rate": [0.05, 0.1]}, num_rounds=3, num_seeds=2)
      >>> parts = [compute_part(grid, Part(number, 2)) for number in (1, 2)]
      >>> result, _ = join_parts(grid, parts)
      >>> dict(result.sizes)
      {'learning_rate': 2, 'seed': 2, 'round': 4, 'model': 2}
    """
    programs = all_programs(grid) if programs is None else programs
    plan = _outline(grid, programs)
    what = f"the results of {math.prod(grid.shape):,} runs"
    remedy = "record less often (record_every), or merge into a file: merge(..., to=FILE)"
    check_fits(what, plan.result_bytes, None, remedy)
    result = Result(plan)
    about = _fill(result, programs, parts)
    return result.dataset(**about), result.params


def store_parts(
    grid: Grid, parts: Iterable[Saved], path: Path, before: xr.Dataset | None = None
) -> tuple[xr.Dataset, list[Params] | None]:
    """Joins all parts as `join_parts` does, into a file that is written run by run.

    Args:
      grid: the runs of the sweep.
      parts: the results of all parts, in any order.
      path: the file, which is replaced once it is complete.
      before: the result of the seeds before those of the grid, if they are to be in it as well.

    Returns:
      The result in the file, which is read lazily if it is large, and parameters if kept.

    Raises:
      ValueError: as in `join_parts`, or if `before` is not of the same run.
      OSError: if the file cannot be written.
    """
    programs = all_programs(grid)
    plan, found = _outline(grid, programs), list[list[Params] | None]()

    def write(aside: Path) -> None:
        try:
            with Store(plan, aside, before) as store:
                store.finish(**_fill(store, programs, parts))
                found.append(store.params)
        except RuntimeError as error:  # NetCDF's error for a full disk
            raise OSError(str(error)) from error

    write_aside(path, write)
    dataset = load_dataset(path)
    if words := nobody(dataset):
        warnings.warn(words, stacklevel=2)
    return dataset, found[0]


def _outline(grid: Grid, programs: Sequence[Program]) -> Plan:
    # Plan without a memory limit, because no runs are computed.
    return make_plan(grid, limit=_ENDLESS, programs=programs, compiles=False)


def _fill(
    result: Result | Store, programs: Sequence[Program], parts: Iterable[Saved]
) -> dict[str, Any]:
    """Places the runs of all parts, and returns the entries of the manifest about them."""
    wanted = alike(programs[0].grid, programs)
    seconds, devices = {"compile": 0.0, "run": 0.0}, list[Mapping[str, Any]]()
    found, of = set[int](), 0
    for saved in parts:
        part = Part(*saved.about["part"])
        if changes := changes_of(saved, wanted):
            raise ValueError(f"part {part} is from another run: {changes}; compute it again")
        of = of or part.of
        if part.of != of or part.number in found:
            raise ValueError(f"part {part} comes twice, or with parts of {of}")
        found.add(part.number)
        mine = programs_in(programs, part)
        leaves, structure = jax.tree.flatten(list(map(_shapes, mine)))
        if [x.shape for x in leaves] != [x.shape for x in saved.arrays]:
            raise ValueError(f"part {part} does not contain its runs; compute it again")
        for program, runs in zip(mine, jax.tree.unflatten(structure, saved.arrays), strict=True):
            result.place(program, np.arange(len(program)), *runs)
        devices += [saved.about["made on"]] * bool(saved.arrays)
        seconds = {name: seconds[name] + saved.about["seconds"][name] for name in seconds}
    if not of:
        raise ValueError("no parts were given; compute them first")
    if missing := sorted(set(range(1, of + 1)) - found):
        raise ValueError(f"parts {listed(missing)} of {of} are missing; compute them")
    kinds = " and ".join(sorted({each["kind"] for each in devices}))
    device = {**devices[0], "kind": kinds}
    return {"wall_seconds": seconds, "device": device, "parts": of}


def alike(grid: Grid, programs: Sequence[Program]) -> dict[str, Any]:
    """The identity that all parts of a grid share."""
    about = _about(grid, programs)
    return {name: about[name] for name in _ALIKE if name in about}


def changes_of(saved: Saved, wanted: Mapping[str, Any]) -> str:
    """At most three entries in which a part is not as wanted, as text."""
    mine = {name: saved.about.get(name) for name in wanted}
    return "; ".join(islice(differences(mine, plain(wanted)), 3))


def listed(numbers: Sequence[int]) -> str:
    """At most eight of the numbers, as text."""
    shown = ", ".join(map(str, numbers[:8]))
    return shown + (f" and {len(numbers) - 8:,} more" if len(numbers) > 8 else "")


TRIES = 3
"""The number of times a part is submitted before the sweep fails."""

_POLL_SECONDS = 0.1


def compute_parts(
    compute: Callable[[Part], Saved],
    parts: Sequence[Part],
    executor: Any,
    report: Callable[[int], None] = lambda done: None,
    at_once: int | None = None,
) -> Generator[Saved]:
    """Computes parts on an executor, and yields their results as they finish.

    Executors of submitit submit them as one job array, with the pickled sweep in a file in their
    folder, and a Dask client sends it to its workers once. Others send it with each part.

    If a worker dies, its part is submitted again, at most three times including the first.

    Args:
      compute: computes one part; it is pickled for the workers with everything it references.
      parts: the parts.
      executor: has ``submit(fn, *args)``, as a `concurrent.futures.Executor` has; its workers need
        this package, and those of submitit its folder.
      report: called with the number of finished parts.
      at_once: the maximum number of parts submitted at a time, or of tasks that run in an array on
        Slurm; defaults to all of them.

    Raises:
      RefusedError, DivergenceError: if a part itself fails, which cancels the others.
      ChildProcessError: if a part's workers died three times, or the executor rejected it.
    """
    sent, is_double = _pickled(compute), jnp.result_type(float) == np.float64
    left, running = list(parts), list[tuple[Part, Any]]()
    tries, ended = Counter[Part](), 0
    if at_once is not None and getattr(executor, "cluster", None) == "slurm":
        executor.update_parameters(slurm_array_parallelism=at_once)
        at_once = None
    with _shared(executor, sent) as shared, _cancelling(running):
        while left or running:
            room = len(left) if at_once is None else at_once - len(running)
            now, left = left[:room], left[room:]
            tries.update(now)
            running.extend(_submitted(executor, shared, now, is_double))
            report(ended)
            over = [each for each in running if each[1].done()]
            running[:] = [each for each in running if each not in over]
            problem: Exception | None = None
            for part, job in over:  # check all of them, because good results are saved
                try:
                    saved = job.result()
                except Exception as error:  # executors raise different errors for dead workers
                    left.append(part)
                    if tries[part] == TRIES:
                        words = f"part {part} was submitted {TRIES} times, but its workers died"
                        problem = ChildProcessError(f"{words}: {error}")
                    continue
                if isinstance(saved, Exception):
                    problem = saved
                    continue
                ended += 1
                yield saved
            if problem:
                raise problem
            time.sleep(_POLL_SECONDS if running and not over else 0)
        report(ended)


@contextmanager
def _cancelling(running: list[tuple[Part, Any]]) -> Iterator[None]:
    """Cancels the jobs that still run on exit."""
    try:
        yield
    finally:
        for _, job in running:
            if cancel := getattr(job, "cancel", None):
                cancel()


@contextmanager
def _shared(executor: Any, sent: bytes) -> Iterator[Any]:
    """Yields the pickled sweep as the argument of every job: a Dask future, a file, or itself."""
    if _is_dask(executor):
        # A task, because Dask computes lost tasks again, but cannot restore lost scattered data.
        yield executor.submit(bytes, sent, pure=False)
    elif folder := getattr(executor, "folder", None):
        # Submitit replaces %j in the folder's name by the job's number.
        places = (Path(folder).absolute(), *Path(folder).absolute().parents)
        place = next(each for each in places if "%" not in str(each))
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"sweep-{os.urandom(8).hex()}.pkl"
        path.write_bytes(sent)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
    else:
        yield sent


def _is_dask(executor: Any) -> bool:
    return hasattr(executor, "scatter")


def _submitted(
    executor: Any, shared: Any, parts: Sequence[Part], is_double: bool
) -> Iterator[tuple[Part, Any]]:
    """Submits parts, as one job array if the executor has `batch`.

    Raises:
      ChildProcessError: if the executor rejects them.
    """
    submit = partial(executor.submit, **{"pure": False} if _is_dask(executor) else {})
    try:
        if parts and (batch := getattr(executor, "batch", None)):
            with batch():
                jobs = [submit(_work, shared, part, is_double) for part in parts]
            yield from zip(parts, jobs, strict=True)
        else:
            for part in parts:
                yield part, submit(_work, shared, part, is_double)
    except Exception as error:  # raised by a pool with killed processes, or by a scheduler
        numbers = listed([part.number for part in parts])
        raise ChildProcessError(f"the executor rejected parts {numbers}: {error}") from error


def _work(shared: bytes | Path, part: Part, is_double: bool) -> Saved | Exception:
    """Computes a part in a worker, or returns an error that would recur on every worker."""
    with jax.enable_x64(is_double):
        try:
            return _received(shared)(part)
        except OSError:  # a disk or connection error may not recur on other workers
            raise
        except Exception as error:
            # Send only the message, because an error may reference objects that cannot be pickled.
            name = "" if isinstance(error, ValueError | DivergenceError) else type(error).__name__
            words = ": ".join(filter(None, (f"part {part}", name, str(error))))
            is_divergence = isinstance(error, DivergenceError)
            return DivergenceError(words) if is_divergence else RefusedError(words)


# Keep one, because a worker gets many parts of one sweep, and loading its data and building its
# points may take longer than a part.
@lru_cache(1)
def _received(shared: bytes | Path) -> Callable[[Part], Saved]:
    import cloudpickle

    sent = shared.read_bytes() if isinstance(shared, Path) else shared
    compute: Callable[[Part], Saved] = cloudpickle.loads(sent)
    return compute


def _pickled(compute: Callable[[Part], Saved]) -> bytes:
    """Pickles a function to bytes, which any executor can send and which differ in each sweep.

    Raises:
      ImportError: if cloudpickle is not installed.
      TypeError: if the function references something that cannot be pickled.
    """
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError("executors need pip install 'fedjax-mm[cluster]'") from error
    try:
        # Bytes after a pickle are ignored. Random ones keep a worker from computing with a grid
        # that it built for an earlier sweep, from modules that may have changed since.
        sent: bytes = cloudpickle.dumps(compute) + os.urandom(8)
    except Exception as error:  # pickling calls methods of arbitrary objects
        raise TypeError(f"the sweep cannot be sent to workers: {error}") from error
    return sent


class _Compute:
    """Computes parts of a grid, which each worker makes and groups once."""

    def __init__(
        self, make: Callable[[], Grid], how: Execution, on_divergence: Literal["mark", "stop"]
    ) -> None:
        self._make, self._on_divergence = make, on_divergence
        self._how = how._replace(callbacks=(), checkpoints=None, executor=None)

    @cached_property
    def _programs(self) -> list[Program]:
        with refusing():
            return all_programs(self._make(), self._how.memory)

    def __call__(self, part: Part) -> Saved:
        programs, on_divergence = self._programs, self._on_divergence
        return compute_part(
            programs[0].grid, part, self._how, on_divergence=on_divergence, programs=programs
        )


def by_executor(
    grid: Grid,
    how: Execution,
    on_divergence: Literal["mark", "stop"],
    make: Callable[[], Grid] | None = None,
) -> tuple[xr.Dataset, list[Params] | None]:
    """Computes a sweep in parts on an executor and returns the result, and parameters if kept.

    With checkpoints, finished parts are saved and not recomputed.

    Args:
      grid: the runs.
      how: how to execute the sweep, with the executor and the number of parts.
      on_divergence: as in `sweep`.
      make: makes the grid in a worker; defaults to sending it.

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
    if how.keep_state or kept_state(how):
        raise RefusedError(
            "an executor keeps no states of runs; keep and continue them without one, or in parts "
            "(--part K/N, in Python part and out)"
        )
    programs, done = all_programs(grid), dict[Part, Saved]()
    if saved:
        with refusing():
            if saved.claim(identity(grid, how.split) | data_of(programs) | {"parts": of}) is None:
                saved.begin({})
        done = {part: each for part in parts if (each := saved.load(part.number))}

    def report(ended: int) -> None:
        ended += len(done)
        for callback in how.callbacks:
            callback.on_parts(ended, of)
        if signals:
            raise InterruptedRunError(signals[-1], ended / of if ended else None)

    left = [part for part in parts if part not in done]
    compute = _Compute(make or (lambda: grid), how, on_divergence)
    computed = compute_parts(compute, left, how.executor, report, at_once)

    def all_parts() -> Iterator[Saved]:
        yield from done.values()
        for each in computed:
            if saved:
                saved.save(each.about["part"][0], each.rounds, each.arrays, each.about)
            yield each

    until = "stopping; parts that have ended are saved"
    with noted_signals(saved is not None, until) as signals, closing(computed):
        return join_parts(grid, all_parts(), programs)
