"""Benchmark workloads: what `fedjax-mm bench` times, and `benchmarks/` beside other systems."""

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
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.assignment import mfa_rand, mfa_rr
from fedjax_mm.base import Algorithm, Assignment, Params, Task
from fedjax_mm.chunks import ClientMap, chunk_size_of, in_chunks, longest_first
from fedjax_mm.data.clients import flat_client_data
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.data.synthetic import synthetic
from fedjax_mm.simulate import init, round_of, simulate
from fedjax_mm.stacks import stacks_of
from fedjax_mm.sweeps.devices import Layout, layout
from fedjax_mm.sweeps.execute import Execution, carry_out
from fedjax_mm.sweeps.grid import Grid, Setup, seed_keys
from fedjax_mm.sweeps.plan import make_plan, memory_of
from fedjax_mm.tasks.quadratic import quadratic

ASSIGNMENTS: dict[str, Callable[[int, int], Assignment]] = {"MFA-Rand": mfa_rand, "MFA-RR": mfa_rr}


class Workload(NamedTuple):
    """A quadratic (p = 4, E = 5, eta = 0.1); all clients train, each one of all the models."""

    name: str
    num_clients: int
    num_models: int
    num_rounds: int
    num_seeds: int
    labels: tuple[str, ...] = tuple(ASSIGNMENTS)  # each is timed by itself

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
    labels: tuple[str, ...] = ("sweep of both",)  # each is timed by itself

    @property
    def client_updates(self) -> int:
        """Local trainings in the sweep."""
        points = len(ASSIGNMENTS) * len(self.num_models) * self.num_rates
        return points * self.num_seeds * self.num_rounds * self.num_clients

    def grid(self) -> Grid:
        """Returns all runs."""

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
        """Shapes by layer: `[5, 5, in, out]` of a convolution, `[in, out]` of a dense one."""
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
        """Builds the flax module."""
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
      num_examples: n of every client; None for Synthetic(1, 1), with 45 to very many examples.
      cohort_size: S, clients in a round.
      num_steps: E, SGD steps of a client in a round; None for one epoch.
      batch_size: B examples drawn for each step; all of them if it is n.
      num_rounds: of a run of `fedjax_mm`.
      learning_rate: eta.
    """

    name: str
    model: Model
    num_clients: int
    num_examples: int | None
    cohort_size: int
    num_steps: int | None
    batch_size: int
    num_rounds: int = 1
    learning_rate: float = 0.1
    labels: tuple[str, ...] = ("FedAvg",)  # each is timed by itself

    @property
    def client_updates(self) -> int:
        """Local trainings in a run."""
        return self.cohort_size * self.num_rounds

    @property
    def flops(self) -> float:
        """Floating-point operations of one client update, in the mean."""
        if self.num_steps is None:
            return self.data().train.num_examples / self.num_clients * self.model.flops()
        return self.num_steps * self.batch_size * self.model.flops()

    def examples(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws inputs `[K, n, *example_shape]`, float32, and classes `[K, n]`, int32."""
        rng = np.random.default_rng(seed)
        shape = (self.num_clients, self.num_examples or 0)
        inputs = rng.standard_normal((*shape, *self.model.example_shape), np.float32)
        return inputs, rng.integers(self.model.widths[-1], size=shape, dtype=np.int32)

    def data(self) -> FederatedData:
        """Draws the examples of seed 0, for training and for testing."""
        if self.num_examples is None:
            return synthetic(self.num_clients)
        inputs, labels = self.examples(0)
        rows = inputs.reshape(-1, *self.model.example_shape), labels.ravel()
        clients = flat_client_data(rows, [self.num_examples] * self.num_clients)
        return FederatedData("random", "synthetic", self.model.widths[-1], clients, clients)

    def algorithm(self) -> Algorithm:
        """Federated averaging."""
        size = None if self.batch_size == self.num_examples else self.batch_size
        epochs = 1 if self.num_steps is None else None
        how: Any = {"local_steps": self.num_steps, "epochs": epochs, "batch_size": size}
        return fedavg(self.learning_rate, **how)

    def assignment(self) -> Assignment:
        """Uniform cohorts."""
        return mfa_rand(self.num_clients, 1, cohort_size=self.cohort_size)


AnyWorkload = Workload | SweepWorkload | LearningWorkload

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
        LearningWorkload("A8", LOGISTIC, 100, None, 100, None, 10, 10, learning_rate=0.01),
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
    if isinstance(workload, LearningWorkload):
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
    """Returns what `build` compiles of a quadratic: all seeds' traces."""
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
    workload: LearningWorkload,
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
    computed, counted = count_steps(
        range(workload.cohort_size),
        uncompiled.arguments[1],
        workload.algorithm(),
        workload.assignment(),
        client_map=client_map,
        num_devices=uncompiled.where.mesh.size,
    )
    return _compile(uncompiled)._replace(steps=computed / counted)


def learning_program(
    workload: LearningWorkload,
    client_map: ClientMap = "auto",
    devices: Sequence[Any] | None = None,
    params: Params | None = None,
) -> Uncompiled:
    """Returns what `build_learning` compiles."""
    from fedjax_mm.tasks.classification import classification

    task: Task = classification(workload.data(), workload.model.module())
    algorithm, assignment = workload.algorithm(), workload.assignment()
    where = layout(1, devices)

    def run(words: Any, task: Task, params: Params) -> Any:
        # `simulate` would evaluate the model; rounds alone are what is timed.
        state = init(jax.random.wrap_key_data(words), task, algorithm, assignment, params)
        stacks = stacks_of(task, algorithm, assignment)
        one_round = round_of(stacks, assignment, client_map, where.client_axis)
        state, _ = lax.scan(one_round, state, length=workload.num_rounds)
        return jax.tree.map(itemgetter(0), state.models.params)

    key = jax.random.key(0)
    start = task.init(key) if params is None else params
    # Data are arguments: as constants XLA would fold and copy them.
    arguments = where.put((jax.random.key_data(key), task, start), None)
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
    """Counts the local steps that one round of one model computes, and those that count.

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
    models, clients = init(jax.random.key(0), task, algorithm, assignment).models, jnp.array(group)
    server = jax.tree.map(itemgetter(0), models.server)
    size = chunk_size_of(client_map, task, models.params, len(group))
    order = longest_first(algorithm, task, server, clients)
    steps = jax.vmap(algorithm.num_steps, (None, 0, None))(task, clients, server)

    def of_device(_: Any) -> Any:
        # `in_chunks` asks for the axis of the devices, which `jax.vmap` names here.
        rows = in_chunks(jnp.broadcast_to(steps, clients.shape), order, size, "devices")
        return sum(each.shape[1] * jnp.sum(each.max(axis=1)) for each in rows)

    computed = jax.vmap(of_device, axis_name="devices")(jnp.arange(num_devices))
    return int(computed.sum()), int(jnp.broadcast_to(steps, clients.shape).sum())


def _compile(uncompiled: Uncompiled) -> Program:
    function, arguments, where = uncompiled
    clock = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - clock
    mebibytes = memory_of(compiled) * where.mesh.size / 2**20
    return Program(lambda: jax.block_until_ready(compiled(*arguments)), seconds, mebibytes)


def seconds_of(run: Callable[[], Any], repeats: int) -> list[float]:
    """Times `repeats` runs, after one to warm up."""
    run()  # loads constants and fills caches
    times = []
    for _ in range(repeats):
        clock = time.perf_counter()
        run()
        times.append(time.perf_counter() - clock)
    return times


def median_seconds(program: Program, repeats: int) -> float:
    """Returns the median over `repeats` runs, after one to warm up."""
    return statistics.median(seconds_of(program.run, repeats))


def gemm_peak(sizes: tuple[int, ...] = (512, 1024, 2048), repeats: int = 10) -> dict[str, float]:
    """Measures the best GFLOP/s of an n x n float32 product, 2 n^3 operations, by form.

    Forms: `NumPy`, `jax` on one device, and `jax, all devices`, one product on each. The largest of
    them is the peak that work is compared with.
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
