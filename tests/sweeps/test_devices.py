"""Runs split over 1, 2 and 8 devices agree with one device without a mesh."""

import functools
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, local_sgd, mfa_rand, mfa_rr, scaffold, simulate
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.sweeps import Grid, Setup, join_processes, layout, use_cpu_devices
from fedjax_mm.sweeps.plan import make_plan
from fedjax_mm.tasks import quadratic
from tests.helpers import slow_unless

N = 13  # divisible by neither the number of models nor that of devices


ASSIGNMENTS = {"mfa_rand": mfa_rand(N, 3), "mfa_rr": mfa_rr(N, 3, cohort_size=11)}


ALGORITHMS = {"mfa_rand": fedavg(0.1, local_steps=3), "mfa_rr": scaffold(local_sgd(0.1, steps=3))}


LAYOUTS = [(1, "clients"), (2, "clients"), (8, "clients"), (2, "replicas")]


def close(actual, expected, tolerance):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            scale = np.abs(b).max()
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)
        elif not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)


def quadratic_run(name, client_axis=None):
    """`simulate` of several replicas."""

    def one(rng_key, task):
        return simulate(
            rng_key,
            task,
            ALGORITHMS[name],
            ASSIGNMENTS[name],
            20,
            client_map=2,
            client_axis=client_axis,
        )

    return jax.vmap(one, (0, None))


@functools.cache
def alone(name, precision):
    """Four replicas on one device."""
    with jax.enable_x64(precision == "float64"):
        program = jax.jit(quadratic_run(name))
        return jax.device_get(program(seed_keys(0, range(4)), quadratic(N, 2, mu=0.01)))


QUICK = {("mfa_rand", "float32"): LAYOUTS[3:], ("mfa_rr", "float64"): LAYOUTS[1:2]}


@pytest.mark.parametrize(
    ("count", "axis", "name", "precision"),
    [
        slow_unless(where in QUICK.get((name, precision), ()), *where, name, precision)
        for where in LAYOUTS
        for name in ASSIGNMENTS
        for precision in ("float32", "float64")
    ],
)
def test_devices_agree(count, axis, name, precision):
    where = layout(3, jax.devices()[:count], axis)
    replicas = where.padded(3)
    expected = jax.tree.map(lambda x: x[:replicas], alone(name, precision))
    with jax.enable_x64(precision == "float64"):
        task, keys = quadratic(N, 2, mu=0.01), seed_keys(0, range(replicas))
        program = where.over(quadratic_run(name, where.client_axis), (0, None))
        actual = jax.jit(program)(keys, task)
        close(actual, expected, 1e-6 if precision == "float32" else 1e-12)


def test_the_replica_axis_has_no_more_devices_than_replicas():
    assert [layout(n, axis="replicas").mesh.size for n in (1, 7, 8, 9)] == [1, 7, 8, 8]
    assert [layout(n, axis="replicas").padded(n) for n in (1, 7, 8, 9)] == [1, 7, 8, 16]
    assert [layout(n).axis for n in (1, 7, 8, 9)] == ["clients", "clients", "replicas", "replicas"]
    assert layout(1, axis="clients").mesh.size == 8
    assert layout(3, axis="clients").padded(3) == 3


"""Maps the name of an assignment to an experiment with one algorithm."""


"""Runs several commands in turn."""


"""Wraps a function so that the process first sends itself a signal."""


SLURM = {"SLURM_LOCALID": "3", "SLURM_NODEID": "1"}
EIGHT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.mark.parametrize(
    ("environ", "ids"),
    [
        ({}, None),
        ({**SLURM, "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"} | EIGHT, []),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x4)"} | EIGHT, [3]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, [3]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8,1"}, []),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1,8"}, [3]),
        # Slurm shows a task only its own GPUs, which CUDA numbers from 0.
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x4)", "CUDA_VISIBLE_DEVICES": "0"}, []),
        (
            {
                **SLURM,
                "SLURM_STEP_TASKS_PER_NODE": "4(x4)",
                "SLURM_GPUS_PER_TASK": "h100:4",
                "CUDA_VISIBLE_DEVICES": "0,1,2,3",
            },
            [],
        ),
        # With --gpu-bind=none it shows all of them to each task.
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x4)", "SLURM_GPUS_PER_TASK": "2"} | EIGHT, [3]),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, []),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"} | EIGHT, [1]),
        (
            # The step of Open MPI's daemon has one task per node.
            {
                **SLURM,
                "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            [1],
        ),
        ({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"} | EIGHT, []),
        ({"MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"} | EIGHT, [2]),
        ({"PMI_LOCAL_RANK": "2", "PMI_LOCAL_SIZE": "4", "ROCR_VISIBLE_DEVICES": "2"}, []),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "JAX_LOCAL_DEVICE_IDS": "0,1"}, None),
    ],
)
@pytest.mark.parametrize("address", [None, "0/2@localhost:9911"])
def test_a_process_alone_on_its_node_uses_all_devices(monkeypatch, environ, ids, address):
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **more: given.update(more))
    for name in EIGHT:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    join_processes(address)
    assert given["local_device_ids"] == ids


def test_jax_hides_no_device_of_the_only_process_on_a_node():
    """JAX itself would show a process of Slurm only the GPU of its local rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    slurm = {"JOB_ID": 1, "STEP_NODELIST": "localhost", "NTASKS": 1, "PROCID": 0, "LOCALID": 0}
    environ = {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    code = (
        "import jax; from fedjax_mm.sweeps import join_processes; join_processes()\n"
        "print(jax.config.values['jax_cuda_visible_devices'])"
    )
    for tasks, shown in (("1", "all"), ("2", "0")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ
            | environ
            | {"SLURM_STEP_TASKS_PER_NODE": tasks, "JAX_COORDINATOR_PORT": str(port)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split()[-1] == shown


def test_a_plan_counts_the_devices_that_jax_does_not_see(monkeypatch):
    setup = Setup(quadratic(6, 2, mu=0.1), fedavg(0.1, local_steps=2), mfa_rr(6, 2))
    grid = Grid(setup, {}, num_rounds=1, num_seeds=9)
    assert "on 8 of 8 devices on 1 host (cpu)" in make_plan(grid, compiles=False).lines[0]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "64")
    with pytest.warns(UserWarning, match="JAX sees 8 of 64 devices on 1 host; .*ntasks-per-node"):
        plan = make_plan(grid, compiles=False)
    assert "on 8 of 64 devices on 1 host (cpu)" in plan.lines[0]


def test_the_address_of_a_process_is_checked():
    for address in [
        "",
        "0/2",
        "2/2@host:1",
        "x/2@host:1",
        "0/2@host",
        "0/2@host:0",
        "0/2@host:65536",
    ]:
        with pytest.raises(ValueError, match="write it as I/N@HOST:PORT"):
            join_processes(address)


def test_an_unknown_host_is_refused_without_waiting():
    with pytest.raises(ValueError, match="its host is unknown"):
        join_processes("0/2@nowhere.invalid:9911")


def test_the_number_of_devices_is_checked():
    for count in [0, -1, 513, 10**6]:
        with pytest.raises(
            ValueError, match=f"the number of devices is {count}; it must be 1 to 512"
        ):
            use_cpu_devices(count)
