"""Compiles and times workloads, for `fedjax-mm bench` and `benchmarks/`."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter, sub
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.base import Algorithm, Assignment, Params, Task
from fedjax_mm.base.chunks import ClientMap, chunk_size_of, in_chunks, longest_first
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.cli.workloads import (
    ASSIGNMENTS,
    AnyWorkload,
    LearningWorkload,
    SweepWorkload,
    Workload,
)
from fedjax_mm.simulator.preflight import run_of
from fedjax_mm.simulator.round import State
from fedjax_mm.simulator.simulate import init, params_of, simulate
from fedjax_mm.sweeps.devices import Layout, layout
from fedjax_mm.sweeps.execute import carry_out
from fedjax_mm.sweeps.execution import Execution
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.sweeps.plan import Plan, make_plan, memory_of
from fedjax_mm.tasks.quadratic import quadratic


class Uncompiled(NamedTuple):
    """A workload before tracing.

    Attributes:
      function: computes the whole workload on all devices; it can be jitted.
      arguments: the arguments of the function.
      where: the devices.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    where: Layout


class Program(NamedTuple):
    """A compiled workload.

    Attributes:
      run: computes the workload and waits for it.
      compile_seconds: the time for tracing and compiling.
      mebibytes: the memory of arguments, results and temporaries on all devices.
      steps: the number of local steps computed per useful step.
      compiled: the executables.
      stages: the seconds for tracing, lowering and compiling, of a single executable.
      jaxpr: the traced program of a single executable.
    """

    run: Callable[[], Any]
    compile_seconds: float
    mebibytes: float
    steps: float = 1.0
    compiled: tuple[Any, ...] = ()
    stages: tuple[float, float, float] | None = None
    jaxpr: ClosedJaxpr | None = None


def build(
    workload: AnyWorkload,
    label: str,
    client_map: ClientMap = "auto",
    devices: Sequence[Any] | None = None,
    params: Params | None = None,
) -> Program:
    """Compiles a workload.

    Running a learning workload returns the final parameters. Nothing is evaluated, and the clients
    of a single replica are split over the devices.

    Args:
      workload: the workload.
      label: one of its labels.
      client_map: as in `simulate`.
      devices: the devices to use; None means all.
      params: the initial parameters of a learning workload; None draws them.
    """
    if isinstance(workload, SweepWorkload):
        return program_of(make_plan(workload.grid()))
    if isinstance(workload, Workload):
        return compile_program(quadratic_program(workload, label, client_map, devices))
    uncompiled = learning_program(workload, client_map, devices, params)
    computed, counted = count_steps(
        range(workload.cohort_size),
        uncompiled.arguments[1],
        workload.algorithm(),
        workload.assignment(),
        client_map=client_map,
        num_devices=uncompiled.where.mesh.size,
    )
    return compile_program(uncompiled)._replace(steps=computed / counted)


def quadratic_program(
    workload: Workload,
    label: str,
    client_map: ClientMap = "auto",
    devices: Sequence[Any] | None = None,
) -> Uncompiled:
    """Builds the program of a workload on quadratics, which computes the traces of all seeds."""
    assignment = ASSIGNMENTS[label](workload.num_clients, workload.num_models)
    task = quadratic(workload.num_clients, 4, mu=2e-4)
    where = layout(workload.num_seeds, devices, axis="replicas")
    keys = seed_keys(0, np.arange(where.padded(workload.num_seeds)))

    def run(rng_key: Any, task: Any, learning_rate: Any) -> Any:
        algorithm = fedavg(learning_rate, local_steps=5)
        return simulate(
            rng_key, task, algorithm, assignment, workload.num_rounds, client_map=client_map
        )[1]

    everywhere = where.over(jax.vmap(run, (0, None, None)), (0, None, None))
    return Uncompiled(everywhere, (keys, task, 0.1), where)


def learning_program(
    workload: LearningWorkload,
    client_map: ClientMap = "auto",
    devices: Sequence[Any] | None = None,
    params: Params | None = None,
) -> Uncompiled:
    """Builds the program of a workload on a classifier."""
    from fedjax_mm.tasks.classification import classification

    task: Task = classification(workload.data(), workload.model.module())
    start = task.init(jax.random.key(0)) if params is None else params
    setup = Setup(task, workload.algorithm(), workload.assignment(), start)
    first = partial(params_of, model=0)
    return rounds_program(setup, workload.num_rounds, first, client_map, devices)


def rounds_program(
    setup: Setup,
    num_rounds: int,
    result: Callable[[State], Any],
    client_map: ClientMap = "auto",
    devices: Sequence[Any] | None = None,
) -> Uncompiled:
    """Builds the program of a run's rounds alone, with the result of its last state.

    XLA may leave out everything that does not change the result.
    """
    where = layout(1, devices)

    def run(words: Any, tasks: Any, params: Params) -> Any:
        # Compose rounds by hand. `simulate` would also evaluate the model.
        parts = tasks, setup.algorithm, setup.assignment
        state = init(jax.random.wrap_key_data(words), *parts, params)
        run = run_of(*parts, None, client_map, where.client_axis)
        state, _ = run.rounds(state, num_rounds)
        return result(state)

    # Pass data as arguments. XLA would fold and copy constants.
    words = jax.random.key_data(jax.random.key(0))
    arguments = where.put((words, setup.tasks, setup.params), None)
    return Uncompiled(where.over(run, (None, None, None), None), arguments, where)


def count_steps(
    group: Sequence[int],
    task: Task,
    algorithm: Algorithm,
    assignment: Assignment,
    *,
    client_map: ClientMap = "auto",
    num_devices: int = 1,
) -> tuple[int, int]:
    """Counts the local steps that a round of one model computes, and the useful ones among them.

    Other steps are padding, or are computed for clients that have already finished while the
    longest one in their chunk continues.

    Args:
      group: the clients that train.
      task: the model's learning problem.
      algorithm: the algorithm that trains them.
      assignment: as in `simulate`.
      client_map: as in `simulate`.
      num_devices: the number of devices that share the group, as with `client_axis`.

    Example:
      >>> from fedjax_mm import fedavg, full_participation
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm, assignment = fedavg(0.1, local_steps=5), full_participation(24)
      >>> count_steps(range(24), quadratic(24, 4, mu=1), algorithm, assignment, client_map=7)
      (120, 120)
      >>> count_steps(range(24), quadratic(24, 4, mu=1), algorithm, assignment, client_map=11)
      (120, 120)
      >>> count_steps(range(24), quadratic(24, 4, mu=1), algorithm, assignment, client_map=5)
      (125, 120)
    """
    (state,), clients = (
        init(jax.random.key(0), task, algorithm, assignment).models,
        jnp.array(group),
    )
    server = jax.tree.map(itemgetter(0), state.server)
    size = chunk_size_of(client_map, task, state.params, len(group))
    (stack,) = run_of(task, algorithm, assignment).stacks
    count = algorithm.num_steps or (lambda *_: 1)

    def num_steps(client: Any) -> Any:
        return count(task, client, server)

    order = None if stack.has_equal_steps(server) else longest_first(num_steps, clients, clients)
    steps = jax.vmap(num_steps)(clients)

    def of_device(_: Any) -> Any:
        # Use `jax.vmap` to provide the named device axis that `in_chunks` needs.
        rows = in_chunks(jnp.broadcast_to(steps, clients.shape), order, size, "devices")
        return sum(each.shape[1] * jnp.sum(each.max(axis=1)) for each in rows)

    computed = jax.vmap(of_device, axis_name="devices")(jnp.arange(num_devices))
    return int(computed.sum()), int(jnp.broadcast_to(steps, clients.shape).sum())


def compile_program(uncompiled: Uncompiled, options: Mapping[str, Any] | None = None) -> Program:
    """Compiles a workload with extra XLA `options`, such as GPU flags."""
    function, arguments, where = uncompiled
    clocks = [time.perf_counter()]
    traced = jax.jit(function).trace(*arguments)
    clocks.append(time.perf_counter())
    lowered = traced.lower()
    clocks.append(time.perf_counter())
    compiled = lowered.compile(compiler_options=dict(options or {}))
    clocks.append(time.perf_counter())
    trace, lower, compile_ = map(sub, clocks[1:], clocks)
    mebibytes = memory_of(compiled) * where.mesh.size / 2**20

    def run() -> Any:
        return jax.block_until_ready(compiled(*arguments))

    return Program(
        run,
        trace + lower + compile_,
        mebibytes,
        compiled=(compiled,),
        stages=(trace, lower, compile_),
        jaxpr=traced.jaxpr,
    )


def program_of(plan: Plan) -> Program:
    """Combines all programs of a sweep into one."""

    def follow() -> Any:
        return carry_out(plan, Execution())[0]

    calls = tuple(each.call for each in plan.compiled)
    return Program(follow, plan.compile_seconds, plan.batch_bytes / 2**20, compiled=calls)


def seconds_of(run: Callable[[], Any], repeats: int) -> list[float]:
    """Times `repeats` runs, after a warm-up run."""
    run()  # loads constants and fills caches
    times = []
    for _ in range(repeats):
        clock = time.perf_counter()
        run()
        times.append(time.perf_counter() - clock)
    return times


def median_seconds(program: Program, repeats: int) -> float:
    """The median time of `repeats` runs, after a warm-up run."""
    return statistics.median(seconds_of(program.run, repeats))


def gemm_peak(sizes: tuple[int, ...] = (512, 1024, 2048), repeats: int = 10) -> dict[str, float]:
    """Measures the best GFLOP/s of n x n float32 matrix products (2 n^3 operations) in three forms.

    The forms are `NumPy`, `jax` on one device, and `jax, all devices`, with one product per device.
    The peak is the largest of the three.
    """
    devices = np.array(jax.devices())
    by_device = NamedSharding(Mesh(devices, ("device",)), PartitionSpec("device"))
    squared, peak = jax.jit(lambda x: x @ x), dict[str, float]()

    def product(x: jax.Array) -> jax.Array:
        return squared(x).block_until_ready()

    for size in sizes:
        a = np.random.default_rng(0).standard_normal((size, size), np.float32)
        one = jax.device_put(a, devices[0])
        each = jax.device_put(np.stack([a] * len(devices)), by_device)
        forms: dict[str, tuple[Callable[[], Any], int]] = {
            "NumPy": (partial(np.matmul, a, a), 1),
            "jax": (partial(product, one), 1),
            "jax, all devices": (partial(product, each), len(devices)),
        }
        for form, (multiply, count) in forms.items():
            speed = 2e-9 * count * size**3 / min(seconds_of(multiply, repeats))
            peak[form] = max(peak.get(form, 0.0), speed)
    return peak
