"""Programs of all workloads on the first device, for `benchmarks.kernels` and the accelerator."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import asynchronous
from benchmarks.asynchronous import NUM_ARRIVALS
from benchmarks.kernels import Counted, Module
from fedjax_mm import fedavg, init, params_of
from fedjax_mm.base import Algorithm, Assignment, Task
from fedjax_mm.base.chunks import ClientMap
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.cli import speed as bench
from fedjax_mm.cli.workloads import (
    ASSIGNMENTS,
    LOGISTIC,
    WORKLOADS,
    AnyWorkload,
    LearningWorkload,
    SweepWorkload,
    Workload,
)
from fedjax_mm.simulator.preflight import run_of
from fedjax_mm.sweeps import Callback, Execution
from fedjax_mm.sweeps.devices import layout
from fedjax_mm.sweeps.plan import Plan, make_plan
from fedjax_mm.tasks import classification, layers, networks, quadratic

ASYNCHRONOUS_STEPS = {"F2": 5, "F3": 1}  # of 20 examples, whose products are counted


class Made(NamedTuple):
    """A compiled workload, and the work of one run.

    Attributes:
      program: the workload.
      num_rounds: of all its replicas together, one after the other if they are not side by side.
      updates: local trainings.
      flops: of matrix products; 0 if there are none, or their number is unknown.
      depth: how many loops surround a round.
      trips: of the innermost of them; None if unknown.
      seconds: of the run, if it is over.
      is_batched: whether the loop goes through batches of arrivals instead of rounds.
      is_compared: whether the final parameters are compared with those of other variants.
    """

    program: bench.Program
    num_rounds: int
    updates: int
    flops: float = 0.0
    depth: int = 1
    trips: int | None = None
    seconds: float | None = None
    is_batched: bool = False
    is_compared: bool = False

    def counted(self) -> list[Counted]:
        """Returns the launches of a round, of each of its programs."""
        modules = [Module(compiled.as_text()) for compiled in self.program.compiled]
        return [module.rounds(self.depth, self.trips) for module in modules]


class How(NamedTuple):
    """A variant of a program.

    Attributes:
      options: XLA's, of this program alone.
      client_map: as in `simulate`.
      unroll: rounds in the body of the loop.
      precision: of matrix products, as in `jax.default_matmul_precision`.
      form: one of `FORMS`, which replaces a layer's function on all platforms.
    """

    options: Mapping[str, Any] | None = None
    client_map: ClientMap = "auto"
    unroll: int = 1
    precision: str | None = None
    form: str | None = None


def _multiply_and_sum(kernel: Any, x: Any, _: Any) -> Any:
    return (kernel[:, None] * x).sum(2)


AS_IT_IS = How()
FORMS: Mapping[str, tuple[Any, str, Any]] = {
    "grouped convolutions": (layers, "_convolved", layers._conv),
    "patches": (layers, "_convolved", layers._conv_patches),
    "outer products": (networks, "matmul", layers._matmul_cpu),
    "multiply and sum": (networks, "lax", SimpleNamespace(dot_general=_multiply_and_sum)),
}


def whole(workload: AnyWorkload, label: str, client_map: ClientMap = "auto") -> Made:
    """Compiles a workload as `fedjax-mm bench` does, on one device."""
    if isinstance(workload, SweepWorkload):
        return _of_sweep(make_plan(workload.grid()), workload.num_rounds, workload.client_updates)
    program = bench.build(workload, label, client_map, jax.devices()[:1])
    updates, rounds = workload.client_updates, workload.num_rounds
    flops = updates * workload.flops if isinstance(workload, LearningWorkload) else 0.0
    return Made(program, rounds, updates, flops, trips=rounds)


def _of_sweep(plan: Plan, num_rounds: int, updates: int) -> Made:
    rounds = num_rounds * len(plan.batches)
    # Accelerators compute several rounds in a loop of their own.
    depth = 2 if all(each.rounds_at_once == 1 for each in plan.programs) else 3
    return Made(bench.program_of(plan), rounds, updates, depth=depth)


def arrivals(name: str, num_arrivals: int = NUM_ARRIVALS) -> Made:
    """Compiles F1, F2 or F3, whose rounds are arrivals."""
    program = bench.compile_program(asynchronous.program(name, num_arrivals))
    steps = ASYNCHRONOUS_STEPS.get(name, 0)
    flops = num_arrivals * steps * 20 * LOGISTIC.flops()
    return Made(program, num_arrivals, num_arrivals, flops, is_batched=True)


def parts(workload: Workload | LearningWorkload) -> tuple[Task, Algorithm, Assignment]:
    """Returns what a workload trains, and how."""
    if isinstance(workload, Workload):
        task: Task = quadratic(workload.num_clients, 4, mu=2e-4)
        assignment = ASSIGNMENTS["MFA-Rand"](workload.num_clients, workload.num_models)
        return task, fedavg(0.1, local_steps=5), assignment
    rngs = ("dropout",) if any(workload.model.dropout_rates) else ()
    task = classification(workload.data(), workload.model.module(), rngs=rngs)
    return task, workload.algorithm(), workload.assignment()


def rounds_alone(
    workload: Workload | LearningWorkload, num_replicas: int = 1, how: How = AS_IT_IS
) -> Made:
    """Compiles the rounds of a workload, without records, for replicas side by side."""
    task, algorithm, assignment = parts(workload)
    trips = max(2, workload.num_rounds // how.unroll)  # because XLA would remove a loop of one trip
    num_rounds = trips * how.unroll

    def of_replica(words: Any, task: Task) -> Any:
        run = run_of(task, algorithm, assignment, None, how.client_map)

        def several(state: Any, _: None) -> tuple[Any, None]:
            for _ in range(how.unroll):
                state, _ = run.rounds(state, 1)
            return state, None

        state = init(jax.random.wrap_key_data(words), task, algorithm, assignment)
        return params_of(lax.scan(several, state, length=trips)[0])

    each = jax.vmap(of_replica, (0, None)) if num_replicas > 1 else of_replica
    words = jax.random.key_data(seed_keys(0, np.arange(num_replicas)))
    given = jax.device_put((words if num_replicas > 1 else words[0], task), jax.devices()[0])
    uncompiled = bench.Uncompiled(each, given, layout(1, jax.devices()[:1]))
    form = patch.object(*FORMS[how.form]) if how.form else nullcontext()
    precision = jax.default_matmul_precision(how.precision) if how.precision else nullcontext()
    with form, precision:
        program = bench.compile_program(uncompiled, how.options)
    if isinstance(workload, Workload):
        updates, flops = num_replicas * num_rounds * workload.num_clients, 0.0
    else:
        updates = num_replicas * num_rounds * workload.cohort_size
        flops = updates * workload.flops
    return Made(program, num_rounds, updates, flops, trips=trips)


def checksums(params: Any) -> list[float]:
    """Returns a few weighted sums of parameters, which tell whether two results are equal."""
    flat = np.concatenate([np.ravel(x).astype(float) for x in jax.tree.leaves(params)])
    return [float(np.cos(k * np.arange(len(flat))) @ flat) for k in range(4)]


def table_1(changes: Mapping[str, Any]) -> Made:
    """Compiles and runs the programs of Table 1's grid, which choose the methods' points.

    Args:
      changes: to the settings of `maxfl-table1`.
    """
    # Import the papers here alone, because they take seconds.
    from fedjax_mm.papers import ITEMS
    from fedjax_mm.papers.cho2022.runs import draw, run_grid

    settings = ITEMS["maxfl-table1"].settings
    settings = type(settings).model_validate(settings.model_dump() | dict(changes))
    grid, clock = settings.selecting, 0.0
    grid = grid if grid.methods else settings
    drawn, plans = draw(grid, Execution()), list[Plan]()

    def note(plan: Plan) -> None:
        nonlocal clock
        plans.append(plan)
        clock = time.perf_counter()

    run_grid(grid, drawn, Execution(callbacks=[Callback(on_start=note)]))
    seconds = time.perf_counter() - clock
    (plan,) = plans
    return _of_sweep(plan, grid.num_rounds, plan.client_updates)._replace(seconds=seconds)


def ceilings(side: int, num_bytes: int) -> dict[str, float]:
    """Measures the device: products of two matrices, a copy, and the time of a launch.

    Args:
      side: n of an n x n product.
      num_bytes: of the array that is copied.
    """

    def fastest(function: Callable[..., Any], *arguments: Any) -> float:
        call = jax.jit(function)
        return min(bench.seconds_of(lambda: jax.block_until_ready(call(*arguments)), 5))

    found = {}
    for name in ("float32", "bfloat16"):
        x = jnp.ones((side, side), name)
        found[f"{name} GFLOP/s"] = 2e-9 * side**3 / fastest(lambda x: x @ x, x)
    x = jnp.ones(num_bytes // 4)
    found["GB/s"] = 2e-9 * x.nbytes / fastest(lambda x: x + 1, x)

    # Sum each time, because XLA would fuse the steps of several trips otherwise.
    def step(x: Any, _: None) -> tuple[Any, None]:
        return x + x.sum(), None

    trips, x = 1000, jnp.ones(1024)
    compiled = jax.jit(lambda x: lax.scan(step, x, length=trips)[0]).lower(x).compile()
    seconds = min(bench.seconds_of(lambda: jax.block_until_ready(compiled(x)), 5))
    launches = trips * Module(compiled.as_text()).rounds(num_rounds=trips).kernels
    return found | {"microseconds a launch": 1e6 * seconds / launches}


def compiled_all(name: str, client_map: ClientMap = "auto") -> Iterator[tuple[str, Made]]:
    """Compiles a workload with each of its labels, or an asynchronous one."""
    if name not in WORKLOADS:
        yield "FedAST", arrivals(name)
        return
    workload = WORKLOADS[name]
    for label in workload.labels:
        yield label, whole(workload, label, client_map)
