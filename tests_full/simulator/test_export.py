"""Programs of all benchmarks lower for accelerators, on a machine that has none.

They are traced and lowered for arguments of given shapes, and never compiled. Compilers of GPUs
and TPUs, and kernels of their plugins, are not tested.
"""

import jax
import numpy as np
import pytest
from jax import export

from fedjax_mm.cli import speed as bench
from fedjax_mm.cli import workloads
from fedjax_mm.sweeps.devices import layout
from fedjax_mm.sweeps.plan import jitted
from fedjax_mm.sweeps.program import Block, programs_of
from fedjax_mm.tasks.classification import classification

S1 = workloads.WORKLOADS["S1"]
WORKLOADS = workloads.WORKLOADS | {"a part of S1": S1._replace(num_models=S1.num_models[:1])}
LIKE_OTHERS = ("W1b", "W1c", "S1", "W2b", "W3b")
"""Workloads that differ from others in sizes only."""
AT_ONCE = ("a part of S1", "W4", "A8")
"""Workloads that quick tests lower for all platforms, and the others for accelerators."""


def points(*names, slow=LIKE_OTHERS):
    """Parametrizes over workloads and their labels."""
    return [
        pytest.param(name, label, marks=[pytest.mark.slow] * (name in slow))
        for name in names
        for label in WORKLOADS[name].labels
    ]


REPLICAS = 8  # in the programs of a sweep, instead of a thousand


@pytest.fixture
def no_examples(monkeypatch):
    """Replaces examples by broadcast zeros, which take neither time nor memory."""

    def examples(self, seed):
        shape = (self.num_clients, self.num_examples)
        inputs = np.broadcast_to(np.float32(0), (*shape, *self.model.example_shape))
        return inputs, np.broadcast_to(np.int32(0), shape)

    monkeypatch.setattr(workloads.LearningWorkload, "examples", examples)


def shapes_of(tree):
    return jax.eval_shape(lambda tree: tree, tree)


def programs(workload, label, client_map, devices):
    """Yields the programs of a workload, each with the shapes of its arguments."""
    if isinstance(workload, workloads.SweepWorkload):
        where = layout(REPLICAS, devices, axis="replicas")
        block = Block(1, REPLICAS, 1)
        for each in programs_of(workload.grid()):
            yield jitted(each, block, where), shapes_of(each.inputs(where, block, 0))
        return
    if isinstance(workload, workloads.Workload):
        program = bench.quadratic_program(workload, label, client_map, devices)
    else:
        task = classification(workload.data(), workload.model.module())
        shapes = jax.eval_shape(task.init, jax.random.key(0))
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        program = bench.learning_program(workload, client_map, devices, zeros)
    yield jax.jit(program.function), shapes_of(program.arguments)


@pytest.mark.parametrize(("name", "label"), points(*WORKLOADS, slow=LIKE_OTHERS + AT_ONCE))
def test_a_workload_lowers_for_an_accelerator(no_examples, name, label):
    # On accelerators "auto" is all clients at once.
    for program, shapes in programs(WORKLOADS[name], label, "vmap", jax.devices()[:1]):
        exported = export.export(program, platforms=("cuda", "tpu"))(*shapes)
        assert (exported.platforms, exported.nr_devices) == (("cuda", "tpu"), 1)


@pytest.mark.parametrize(
    ("name", "label"), points("W1", "S1", "W2", *AT_ONCE, slow=("W1", "S1", "W2"))
)
def test_a_workload_lowers_for_all_platforms_at_once(no_examples, name, label):
    """Uses many devices and chunks of clients, as "auto" does on the CPU that traces.

    The other workloads differ from these only in sizes.
    """
    platforms = ("cpu", "cuda", "tpu")
    for program, shapes in programs(WORKLOADS[name], label, "auto", jax.devices()):
        exported = export.export(program, platforms=platforms)(*shapes)
        assert (exported.platforms, exported.nr_devices) == (platforms, jax.device_count())
