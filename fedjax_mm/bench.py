"""Benchmark workloads: what `fedjax-mm bench` times, and `benchmarks/` beside other systems."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PRNGKeyArray

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignment import mfa_rand, mfa_rr
from fedjax_mm.base import Algorithm, Assignment, Params, Task
from fedjax_mm.chunks import ClientMap, chunk_size_of, chunks_of, is_lockstep
from fedjax_mm.data.clients import flat_client_data
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.data.synthetic import synthetic
from fedjax_mm.simulate import init, simulate
from fedjax_mm.sweeps.devices import Layout, layout
from fedjax_mm.sweeps.execute import Execution, carry_out
from fedjax_mm.sweeps.grid import Grid, Setup, seed_keys
from fedjax_mm.sweeps.plan import make_plan
from fedjax_mm.tasks.quadratic import quadratic
from fedjax_mm.tasks.view import View

ASSIGNMENTS: dict[str, Callable[[int, int], Assignment]] = {"MFA-Rand": mfa_rand, "MFA-RR": mfa_rr}


class Workload(NamedTuple):
    """A quadratic (p = 4, E = 5, eta = 0.1); all clients train, each one of all the models."""

    name: str
    num_clients: int
    num_models: int
    num_rounds: int
    num_seeds: int

    @property
    def labels(self) -> tuple[str, ...]:
        """What is timed one by one."""
        return tuple(ASSIGNMENTS)

    @property
    def client_updates(self) -> int:
        """Local trainings in one run."""
        return self.num_clients * self.num_rounds * self.num_seeds


class SweepWorkload(NamedTuple):
    """A sweep on that quadratic over both algorithms, numbers of models and learning rates."""

    name: str
    num_clients: int
    num_models: tuple[int, ...]
    num_rates: int
    num_rounds: int
    num_seeds: int
    record_every: int

    @property
    def labels(self) -> tuple[str, ...]:
        """What is timed: all at once."""
        return ("sweep of both",)

    @property
    def client_updates(self) -> int:
        """Local trainings in the sweep."""
        points = len(ASSIGNMENTS) * len(self.num_models) * self.num_rates
        return points * self.num_seeds * self.num_rounds * self.num_clients

    def grid(self) -> Grid:
        """All its runs."""

        def setup(algorithm: str, num_models: int, learning_rate: Any) -> Setup:
            assignment = ASSIGNMENTS[algorithm](self.num_clients, num_models)
            task = quadratic(self.num_clients, 4, mu=2e-4)
            return Setup(task, fedavg(learning_rate, local_steps=5), assignment)

        axes: dict[str, Sequence[Any]] = {
            "algorithm": list(ASSIGNMENTS),
            "num_models": self.num_models,
            "learning_rate": list(np.geomspace(0.01, 0.3, self.num_rates)),
        }
        return Grid(setup, axes, self.num_rounds, self.num_seeds, record_every=self.record_every)


class Model(NamedTuple):
    """A classifier: convolutions 5 x 5 that keep the size, each with ReLU and 2 x 2 max; dense.

    Attributes:
      example_shape: `[features]`, or `[height, width, channels]` for convolutions.
      channels: outputs of each convolution.
      widths: outputs of each dense layer, ReLU between them; the last are the classes.
    """

    example_shape: tuple[int, ...]
    channels: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def kernel_shapes(self) -> list[tuple[int, ...]]:
        """Of every layer: `[5, 5, in, out]` of a convolution, `[in, out]` of a dense one."""
        inputs = (self.example_shape[-1], *self.channels)
        shapes: list[tuple[int, ...]] = [
            (5, 5, i, o) for i, o in zip(inputs, self.channels, strict=False)
        ]
        shrunk = [size // 2 ** len(self.channels) for size in self.example_shape[:-1]]
        inputs = (math.prod(shrunk) * inputs[-1], *self.widths)
        return shapes + [(i, o) for i, o in zip(inputs, self.widths, strict=False)]

    def flops(self) -> int:
        """Floating-point operations of one example's gradient, those of matrix products only.

        A layer is a product of `[m, k]` and `[k, n]`: for a dense one m = 1, k = in, n = out; for
        a convolution m = height x width, k = 25 in, n = out. It costs 2 m n k forward, 2 m n k for
        the gradient of the kernel, and, but in the first layer, 2 m n k for that of its input.
        """
        total = 0
        for layer, shape in enumerate(self.kernel_shapes):
            m = math.prod(self.example_shape[:-1]) // 4**layer if len(shape) == 4 else 1
            total += (2 if layer == 0 else 3) * 2 * m * math.prod(shape)
        return total

    def module(self) -> Any:
        """The flax module."""
        from fedjax_mm.tasks.networks import MLP, LogisticRegression, McMahanCNN

        *hidden, num_classes = self.widths
        if self.channels:
            if (self.channels, hidden) != ((32, 64), [512]):
                raise ValueError(f"{self} is not McMahan's network, the only one with convolutions")
            return McMahanCNN(num_classes)
        return MLP(num_classes, tuple(hidden)) if hidden else LogisticRegression(num_classes)


LOGISTIC = Model((60,), (), (5,))
PERCEPTRON = Model((784,), (), (64, 30, 10))
MCMAHAN_CNN = Model((28, 28, 1), (32, 64), (512, 10))


class LearningWorkload(NamedTuple):
    """Federated averaging of a classifier: S of K clients a round, E steps of B of n examples each.

    The examples are random, of the model's shape: the work does not depend on their values.

    Attributes:
      name: W2, ...
      model: what is trained.
      num_clients: K.
      num_examples: n of every client.
      cohort_size: S, clients in a round.
      num_steps: E, SGD steps of a client in a round.
      batch_size: B examples drawn for each step; all of them if it is n.
      num_rounds: of a run of `fedjax_mm`.
      learning_rate: eta.
    """

    name: str
    model: Model
    num_clients: int
    num_examples: int
    cohort_size: int
    num_steps: int
    batch_size: int
    num_rounds: int = 1
    learning_rate: float = 0.1

    @property
    def labels(self) -> tuple[str, ...]:
        """What is timed."""
        return ("FedAvg",)

    @property
    def client_updates(self) -> int:
        """Local trainings in a run."""
        return self.cohort_size * self.num_rounds

    @property
    def flops(self) -> float:
        """Floating-point operations of one client update: E B times those of `Model.flops`."""
        return self.num_steps * self.batch_size * self.model.flops()

    def examples(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs `[K, n, *example_shape]`, float32, and classes `[K, n]`, int32."""
        rng = np.random.default_rng(seed)
        shape = (self.num_clients, self.num_examples)
        inputs = rng.standard_normal((*shape, *self.model.example_shape), np.float32)
        return inputs, rng.integers(self.model.widths[-1], size=shape, dtype=np.int32)

    def data(self) -> FederatedData:
        """The examples of seed 0, for training and for testing."""
        inputs, labels = self.examples(0)
        rows = inputs.reshape(-1, *self.model.example_shape), labels.ravel()
        clients = flat_client_data(rows, [self.num_examples] * self.num_clients)
        return FederatedData("random", "synthetic", self.model.widths[-1], clients, clients)

    def algorithm(self) -> Algorithm:
        """Federated averaging."""
        size = None if self.batch_size == self.num_examples else self.batch_size
        return fedavg(self.learning_rate, local_steps=self.num_steps, batch_size=size)


class EpochWorkload(NamedTuple):
    """One local epoch on Synthetic(1, 1), whose clients have from 45 to very many examples.

    All of them train in every round. Attributes as in `LearningWorkload`.
    """

    name: str
    num_clients: int
    batch_size: int
    num_rounds: int
    learning_rate: float = 0.01
    model: Model = LOGISTIC

    @property
    def labels(self) -> tuple[str, ...]:
        """What is timed."""
        return ("FedAvg",)

    @property
    def cohort_size(self) -> int:
        """S = K."""
        return self.num_clients

    @property
    def client_updates(self) -> int:
        """Local trainings in a run."""
        return self.num_clients * self.num_rounds

    @property
    def flops(self) -> float:
        """Floating-point operations of one client update, in the mean."""
        return self.data().train.num_examples / self.num_clients * self.model.flops()

    def data(self) -> FederatedData:
        """FedProx's data."""
        return synthetic(self.num_clients)

    def algorithm(self) -> Algorithm:
        """Federated averaging."""
        return fedavg(self.learning_rate, epochs=1, batch_size=self.batch_size)


AnyWorkload = Workload | SweepWorkload | LearningWorkload | EpochWorkload

WORKLOADS: dict[str, AnyWorkload] = {
    workload.name: workload
    for workload in (
        Workload("W1", 24, 12, 1000, 20),
        Workload("W1b", 1000, 10, 200, 20),
        Workload("W1c", 1_000_000, 10, 20, 1),
        SweepWorkload("S1", 24, (2, 12), 16, 1000, 64, 10),
        # A run takes about a second.
        LearningWorkload("W2", LOGISTIC, 100, 200, 100, 5, 20, num_rounds=2000),
        LearningWorkload("W2b", LOGISTIC, 10_000, 40, 1000, 5, 20, num_rounds=200),
        LearningWorkload("W3", PERCEPTRON, 100, 300, 10, 30, 32, num_rounds=50),
        LearningWorkload("W3b", PERCEPTRON, 100, 300, 100, 30, 32, num_rounds=10),
        LearningWorkload("W4", MCMAHAN_CNN, 10, 600, 10, 60, 10, num_rounds=1),
        EpochWorkload("A8", 100, 10, num_rounds=10),
    )
}


class Uncompiled(NamedTuple):
    """A workload that has not been traced.

    Attributes:
      function: does all the work on all devices; it can be jitted.
      arguments: of the function.
      where: the devices.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    where: Layout


class Program(NamedTuple):
    """A compiled workload.

    Attributes:
      run: does all the work and waits for it.
      compile_seconds: of tracing and compiling.
      mebibytes: memory of the arguments, the results and the temporaries, on all devices.
      steps: local steps that are computed for each one that counts.
    """

    run: Callable[[], Any]
    compile_seconds: float
    mebibytes: float
    steps: float = 1.0


def build(
    workload: AnyWorkload,
    label: str,
    client_map: ClientMap = "auto",
    devices: Sequence[Any] | None = None,
) -> Program:
    """Compiles a workload for some devices, by default all; `label` is one of its labels."""
    if isinstance(workload, LearningWorkload | EpochWorkload):
        return build_learning(workload, client_map, devices)
    if isinstance(workload, SweepWorkload):
        plan = make_plan(workload.grid())

        def follow() -> Any:
            return carry_out(plan, Execution(), data="synthetic", on_divergence="mark")

        return Program(follow, plan.compile_seconds, plan.batch_bytes / 2**20)
    return _compile(quadratic_program(workload, label, client_map, devices))


def quadratic_program(
    workload: Workload,
    label: str,
    client_map: ClientMap = "auto",
    devices: Sequence[Any] | None = None,
) -> Uncompiled:
    """What `build` compiles of a quadratic; it returns the trace of the rounds."""
    assignment = ASSIGNMENTS[label](workload.num_clients, workload.num_models)
    task = quadratic(workload.num_clients, 4, mu=2e-4)
    where = layout(workload.num_seeds, devices, axis="replicas")
    keys = seed_keys(0, where.padded(workload.num_seeds))

    def run(rng_key: Any, task: Any, learning_rate: Any) -> Any:
        algorithm = fedavg(learning_rate, local_steps=5)
        return simulate(
            rng_key, task, algorithm, assignment, workload.num_rounds, client_map=client_map
        )[1]

    everywhere = where.over(jax.vmap(run, (0, None, None)), (0, None, None))
    return Uncompiled(everywhere, (keys, task, 0.1), where)


def build_learning(
    workload: LearningWorkload | EpochWorkload,
    client_map: ClientMap = "auto",
    devices: Sequence[Any] | None = None,
    params: Params | None = None,
) -> Program:
    """Compiles a learning workload; its run returns the last parameters.

    Nothing is evaluated. The clients of one replica are shared out over the devices.

    Args:
      workload: what to do.
      client_map: as in `simulate`.
      devices: all if None.
      params: initial parameters; drawn if None.
    """
    uncompiled = learning_program(workload, client_map, devices, params)
    program = _compile(uncompiled)
    computed, counted = count_steps(
        range(workload.cohort_size),
        uncompiled.arguments[1],
        workload.algorithm(),
        _cohorts(workload),
        client_map=client_map,
        num_devices=uncompiled.where.mesh.size,
    )
    return program._replace(run=lambda: program.run()[0], steps=computed / counted)


def learning_program(
    workload: LearningWorkload | EpochWorkload,
    client_map: ClientMap = "auto",
    devices: Sequence[Any] | None = None,
    params: Params | None = None,
) -> Uncompiled:
    """What `build_learning` compiles; it returns the last parameters and the gradients taken."""
    from fedjax_mm.tasks.classification import classification

    task: Task = classification(workload.data(), workload.model.module())
    task = _Unmeasured(task, task.num_clients)
    algorithm, assignment = workload.algorithm(), _cohorts(workload)
    where = layout(1, devices)

    def run(words: Any, task: Task, params: Params) -> Any:
        state, trace = simulate(
            jax.random.wrap_key_data(words),
            task,
            algorithm,
            assignment,
            workload.num_rounds,
            client_map=client_map,
            record_every=workload.num_rounds,
            params=params,
            client_axis=where.client_axis,
        )
        return jax.tree.map(lambda x: x[0], state.models.params), trace.gradients

    key = jax.random.key(0)
    start = task.init(key) if params is None else params
    arguments = where.put((jax.random.key_data(key), task, start), None)
    return Uncompiled(where.over(run, (None, None, None), None), arguments, where)


def _cohorts(workload: LearningWorkload | EpochWorkload) -> Assignment:
    return mfa_rand(workload.num_clients, 1, cohort_size=workload.cohort_size)


def count_steps(
    group: Sequence[int],
    task: Task,
    algorithm: Algorithm,
    assignment: Assignment,
    *,
    client_map: ClientMap = "auto",
    num_devices: int = 1,
) -> tuple[int, int]:
    """Local steps that one round of one model computes, and how many of them count.

    The others are of padding, and of clients that are done before the longest of their chunk.

    Args:
      group: the clients that train.
      task: what they learn.
      algorithm: how they train.
      assignment: as in `simulate`.
      client_map: as in `simulate`.
      num_devices: that share the group, as with `client_axis`.

    Example:
      >>> from fedjax_mm import fedavg, full_participation, quadratic
      >>> algorithm, assignment = fedavg(0.1, local_steps=5), full_participation(24)
      >>> count_steps(range(24), quadratic(24, 4, mu=1), algorithm, assignment, client_map=7)
      (120, 120)
      >>> count_steps(range(24), quadratic(24, 4, mu=1), algorithm, assignment, client_map=11)
      (120, 120)
      >>> count_steps(range(24), quadratic(24, 4, mu=1), algorithm, assignment, client_map=5)
      (125, 120)
    """
    models = init(jax.random.key(0), task, algorithm, assignment).models
    server = jax.tree.map(itemgetter(0), models.server)
    chunk_size = chunk_size_of(client_map, task, models.params, len(group))
    count_of = jax.vmap(algorithm.num_steps, (None, 0, None))
    steps = np.asarray(count_of(task, jnp.asarray(group), server))
    growing = not is_lockstep(algorithm, task, server)
    shares = np.pad(-np.sort(-steps), (0, -len(steps) % num_devices)).reshape(-1, num_devices)
    computed = first = 0
    for size, count in chunks_of(len(shares), chunk_size or len(shares), growing=growing):
        longest = shares[first : first + size * count : size]
        computed += size * int(longest.sum())
        first += size * count
    return computed, int(steps.sum())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Unmeasured(View):
    """A task of which nothing is recorded."""

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> dict[str, Any]:
        del rng_key, params
        return {}


def _compile(uncompiled: Uncompiled) -> Program:
    function, arguments, where = uncompiled
    clock = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - clock
    mebibytes = _mebibytes(compiled) * where.mesh.size
    return Program(lambda: jax.block_until_ready(compiled(*arguments)), seconds, mebibytes)


def _mebibytes(compiled: Any) -> float:
    """Arguments, results and temporaries on one device; NaN where the backend does not say."""
    memory = compiled.memory_analysis()
    if memory is None:
        return math.nan
    sizes = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    return sum(getattr(memory, size) for size in sizes) / 2**20


def median_seconds(program: Program, repeats: int) -> float:
    """The median over `repeats` runs, after one to warm up."""
    program.run()
    times = []
    for _ in range(repeats):
        clock = time.perf_counter()
        program.run()
        times.append(time.perf_counter() - clock)
    return statistics.median(times)


def gemm_peak(sizes: tuple[int, ...] = (512, 1024, 2048), repeats: int = 10) -> dict[str, float]:
    """The best GFLOP/s over `sizes` of an n x n float32 product, 2 n^3 operations, by form.

    Forms: `NumPy`, `jax` on one device, and, where there are more, `jax, all devices`: one product
    on each. The largest of them is the peak that work is compared with.
    """
    peak: dict[str, float] = {}
    devices = np.array(jax.devices())
    by_device = NamedSharding(Mesh(devices, ("device",)), PartitionSpec("device"))
    product = jax.jit(jnp.matmul)
    for size in sizes:
        a = np.random.default_rng(0).standard_normal((size, size), np.float32)
        forms: dict[str, tuple[Any, Callable[[Any], Any], int]] = {
            "NumPy": (a, lambda a: a @ a, 1),
            "jax": (jax.device_put(a, devices[0]), lambda a: product(a, a).block_until_ready(), 1),
        }
        if len(devices) > 1:
            each = jax.device_put(np.stack([a] * len(devices)), by_device)
            forms["jax, all devices"] = each, forms["jax"][1], len(devices)
        for form, (matrix, multiply, count) in forms.items():
            speed = _gflops(partial(multiply, matrix), 2.0 * count * size**3, repeats)
            peak[form] = max(peak.get(form, 0.0), speed)
    return peak


def _gflops(product: Callable[[], Any], operations: float, repeats: int) -> float:
    product()
    best = math.inf
    for _ in range(repeats):
        clock = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - clock)
    return operations / best / 1e9
