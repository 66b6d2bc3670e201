"""Multiple devices: splits a program's replicas, or the clients of a cohort, over a mesh."""

import dataclasses
import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from fedjax_mm.results.manifest import cpu_cores
from fedjax_mm.tools.compiler import PATIENT, add_flags


@dataclasses.dataclass(frozen=True)
class Clients:
    """The axis, in `Layout.over`, of arrays with something of all clients.

    Attributes:
      axis: its position.
    """

    axis: int


CLIENTS = Clients(2)
"""The axis of the states of all clients, ``[replicas, models, clients, ...]``."""

_MOST_DEVICES = 512  # limits CPU devices, because each has its own threads and memory
_HEARTBEAT_SECONDS = 30  # after which a silent process counts as lost; JAX's default is 100

# The variables for a process's rank on its node, and for the number of processes there. Open MPI is
# first, because inside a Slurm job its processes inherit the variables of the step of its daemon.
_RANKS = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

# The extras of this package, each with a file of the driver and the package of its JAX plugin.
_ACCELERATORS = {
    "cuda12": ("/proc/driver/nvidia/version", "jax_plugins"),
    "tpu": ("/dev/accel0", "libtpu"),
}


def use_cpu_devices(count: int | None = None) -> None:
    """Makes JAX see the CPU as `count` devices, one per core by default.

    Each device has its own threads, whereas on a single device XLA uses one thread for small
    matrices. The command line calls this function; elsewhere, call it once before any computation.
    Devices then wait for each other without a time limit, whereas XLA by default aborts after 40
    seconds.

    Raises:
      ValueError: if `count` is not positive, or above 512.
      RuntimeError: if JAX's backends are already initialized.

    Example:
      >>> use_cpu_devices(2)  # doctest: +SKIP
    """
    count = cpu_cores() if count is None else count
    if not 1 <= count <= _MOST_DEVICES:
        raise ValueError(f"the number of devices is {count}; it must be 1 to {_MOST_DEVICES}")
    jax.config.update("jax_num_cpu_devices", count)
    add_flags(PATIENT)


def missing_plugin() -> str | None:
    """The extra that installs this machine's missing accelerator plugin, if any."""
    # A plugin that fails to start is not missing, and none is if a platform is selected explicitly.
    if jax.default_backend() != "cpu" or jax.config.values["jax_platforms"]:
        return None
    for extra, (driver, plugin) in _ACCELERATORS.items():
        if Path(driver).exists() and find_spec(plugin) is None:
            return extra
    return None


def join_processes(address: str | None = None) -> None:
    """Joins a multi-process run, so that JAX sees the devices of all its processes.

    Call it once in every process, before any computation. JAX aborts a process that has waited five
    minutes for the others, or has not heard from one of them for half a minute.

    A process that is alone on its node uses all of the node's devices. Each of several uses the
    GPUs that the scheduler reserved for it (``--gpus-per-task``), or else the one with its local
    rank. JAX_LOCAL_DEVICE_IDS, such as "0,1", overrides this.

    Args:
      address: ``I/N@HOST:PORT``, with this process's index, the number of processes, and the
        address of process 0. None takes them from the cluster's scheduler (Slurm, Open MPI,
        Kubernetes, TPU pods).

    Raises:
      ValueError: if the address is malformed, its host is unknown, or no scheduler is found.

    Example:
      >>> join_processes("0/2@localhost:9911")  # doctest: +SKIP
    """
    # Disable JAX's SIGTERM handler, because a run saves its state on SIGTERM and exits.
    jax.config.update("jax_enable_preemption_service", False)
    settings: dict[str, Any] = {
        "local_device_ids": _local_ids(os.environ),
        "heartbeat_timeout_seconds": _HEARTBEAT_SECONDS,
    }
    if address is None:
        try:
            jax.distributed.initialize(**settings)
        except ValueError as error:
            raise ValueError(
                f"no cluster's scheduler was found ({error}); give every process its I/N@HOST:PORT"
            ) from error
        return
    parts = re.fullmatch(r"(\d{1,6})/(\d{1,6})@(.+):(\d{1,5})", address)
    if parts is None or not int(parts[1]) < int(parts[2]) or not 0 < int(parts[4]) < 2**16:
        raise ValueError(
            f"the process is {address!r}; write it as I/N@HOST:PORT with 0 <= I < N and a port "
            "below 65536"
        )
    number, count, host, port = parts.groups()
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except OSError as error:
        raise ValueError(f"the process is {address!r}; its host is unknown: {error}") from error
    jax.distributed.initialize(f"{host}:{port}", int(count), int(number), **settings)


def _local_ids(environ: Mapping[str, str]) -> list[int] | None:
    """Numbers of this process's visible GPUs: all if empty, and JAX's choice if None."""
    # By default JAX gives every process of Slurm and Open MPI one GPU, also if it is alone on its
    # node. An empty list is neither replaced by that default, nor does it hide any device.
    found = [names for names in _RANKS if environ.keys() >= {*names}]
    if environ.get("JAX_LOCAL_DEVICE_IDS") or not found:
        return None
    rank, tasks = found[0]
    # Slurm's "2(x3),1" means two tasks on each of the first three nodes, and one on the last.
    numbers = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ[tasks])
    per_node = [int(each) for each, times in numbers for _ in range(int(times or 1))]
    node = int(environ.get("SLURM_NODEID", "0")) if len(per_node) > 1 else 0
    if node >= len(per_node):  # a heterogeneous job, whose components count their own nodes
        return None
    visible = _num_visible(environ)
    reserved = re.search(r"\d+$", environ.get("SLURM_GPUS_PER_TASK", ""))
    is_bound = visible is not None and (
        visible < per_node[node] or (reserved is not None and int(reserved[0]) == visible)
    )
    return [] if per_node[node] == 1 or is_bound else [int(environ[rank])]


def _num_visible(environ: Mapping[str, str]) -> int | None:
    """The number of GPUs that the environment makes visible to this process, if it is limited."""
    given = next((environ[name] for name in _VISIBLE if name in environ), None)
    return None if given is None else len([each for each in given.split(",") if each])


def hosts_and_devices() -> tuple[int, int]:
    """The numbers of hosts of this run and of their devices, including those hidden from JAX.

    All processes must call it, because they exchange their numbers.
    """
    here = jax.local_device_count()
    if jax.default_backend() == "gpu" and jax.distributed.is_initialized():
        visible = _num_visible(os.environ)
        installed = len([*Path("/proc/driver/nvidia/gpus").glob("*")])
        here = int(os.environ.get("SLURM_GPUS_ON_NODE", installed if visible is None else visible))
    host = zlib.crc32(socket.gethostname().encode())
    row = np.array([host, jax.local_device_count(), here], np.uint32)
    rows = row[None] if jax.process_count() == 1 else multihost_utils.process_allgather(row)
    hosts = [rows[rows[:, 0] == host] for host in np.unique(rows[:, 0])]
    return len(hosts), sum(int(max(own[:, 1].sum(), own[:, 2].max())) for own in hosts)


class Layout(NamedTuple):
    """The layout of a program's replicas over devices, as chosen by `layout`.

    Attributes:
      mesh: the devices of one or more processes along one axis.
      axis: "replicas", which needs no communication, or "clients", whose contributions are summed
        over devices.
    """

    mesh: Mesh
    axis: Literal["replicas", "clients"]

    @property
    def client_axis(self) -> str | None:
        """The argument `client_axis` of `simulate`."""
        return "clients" if self.axis == "clients" else None

    @property
    def is_cpu(self) -> bool:
        """Whether the devices share the host's memory and cores, as CPU devices do."""
        return bool(self.mesh.devices.flat[0].platform == "cpu")

    def padded(self, num_replicas: int) -> int:
        """Rounds a number of replicas up to a multiple of the number of devices."""
        devices = self.mesh.size if self.axis == "replicas" else 1
        return -(-num_replicas // devices) * devices

    def over(self, program: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0) -> Any:
        """Makes a program in which each device computes its share of the replicas.

        Args:
          program: a function of arrays with a replicas axis and of arrays that all replicas share,
            most simply ``jax.vmap(one_replica, in_axes)``. With the client axis, take gradients
            outside the function, because inside it a device does not see the gradients of others.
          in_axes: the position of each argument's replicas axis, or None, as in `jax.vmap`.
            `CLIENTS` are arrays ``[replicas, models, clients, ...]``, of which each device has its
            own clients if these are split.
          out_axes: the same for the result.
        """
        # Disable the check, because carries initialized with zeros would need casts to varying
        # types.
        return jax.shard_map(
            program,
            mesh=self.mesh,
            in_specs=self._specs(in_axes),
            out_specs=self._specs(out_axes),
            check_vma=False,
        )

    def put(self, tree: Any, axes: Any) -> Any:
        """Puts host arrays, equal in all processes, on the devices with the sharding for `over`.

        Python's floats are kept, because only they are weakly typed.
        """

        def place(axis: Any, array: Any) -> Any:
            if type(array) is float:
                return array
            array = np.asarray(array)
            shape = array.shape
            if isinstance(axis, Clients) and self.client_axis:  # pad to blocks of equal size
                *first, number = shape[: axis.axis + 1]
                number = -(-number // self.mesh.size) * self.mesh.size
                shape = (*first, number, *shape[axis.axis + 1 :])

            def part(index: Any) -> np.ndarray:
                some = array[index]
                ends = zip(index, shape, some.shape, strict=True)
                pad = [(0, len(range(*each.indices(size))) - old) for each, size, old in ends]
                return np.pad(some, pad) if np.any(pad) else some

            sharding = NamedSharding(self.mesh, self._specs(axis))
            return jax.make_array_from_callback(shape, sharding, part)

        return _over_parts(place, axes, tree)

    def fetch(self, tree: Any, axes: Any = 0) -> Any:
        """Fetches whole arrays, with the padding of `put`, to the host.

        Every process gets them, except those of `CLIENTS`, which only the first process keeps, so
        that no device and no other host has to hold the states of all clients.
        """
        if jax.process_count() == 1:
            return jax.device_get(tree)

        def of_part(axis: Any, array: Any) -> Any:
            if axis != CLIENTS or not self.client_axis:
                return multihost_utils.process_allgather(array, tiled=True)
            blocks = []
            for device in range(self.mesh.size):
                block = np.asarray(self._block_of(array, device).addressable_data(0))
                blocks.append(block if jax.process_index() == 0 else block[:, :, :0])
            return np.concatenate(blocks, 2)

        return _over_parts(of_part, axes, tree)

    def _block_of(self, array: Array, device: int) -> Array:
        """One device's clients, on every device."""

        def send(own: Array, device: Array) -> Array:
            # Add integers, because adding 0 changes the sign of -0.0.
            is_bool = own.dtype == bool
            bits = own.astype(np.uint8) if is_bool else lax.bitcast_convert_type(own, np.uint8)
            is_mine = lax.axis_index(self.client_axis) == device
            bits = lax.psum(jnp.where(is_mine, bits, 0), self.client_axis)
            return bits.astype(bool) if is_bool else lax.bitcast_convert_type(bits, own.dtype)

        return jax.jit(self.over(send, (CLIENTS, None), None))(array, jnp.int32(device))

    def _specs(self, axes: Any) -> Any:
        """The partition of each axis over the devices."""
        # Split only the states of clients and the data, because `chunks.in_chunks` distributes
        # those that train inside the program.

        def spec(axis: Any) -> PartitionSpec:
            of_clients = isinstance(axis, Clients)
            if axis is None or (self.axis == "clients" and not of_clients):
                return PartitionSpec()
            if self.axis == "clients":
                return PartitionSpec(*[None] * axis.axis, "clients")
            return PartitionSpec(*[None] * (0 if of_clients else axis), "replicas")

        return jax.tree.map(spec, axes, is_leaf=lambda axis: axis is None)


def _over_parts(function: Callable[[Any, Any], Any], axes: Any, tree: Any) -> Any:
    """Maps a function over the axis of each array, given by a prefix of the tree, and the array."""

    def of_part(axis: Any, part: Any) -> Any:
        return jax.tree.map(partial(function, axis), part)

    return jax.tree.map(of_part, axes, tree, is_leaf=lambda axis: axis is None)


def layout(
    num_replicas: int,
    devices: Sequence[Any] | None = None,
    axis: Literal["replicas", "clients"] | None = None,
) -> Layout:
    """Chooses the replica axis, or the client axis if there are fewer replicas than devices.

    Args:
      num_replicas: the number of replicas, which is seeds times swept numbers.
      devices: the devices; None uses all, including those of other processes.
      axis: "replicas" or "clients" to force an axis. With fewer replicas than devices, "replicas"
        leaves some devices idle. It may still be faster for short rounds, because "clients" sums
        contributions over devices in every round.

    Raises:
      ValueError: if `axis` is unknown.

    Example:
      >>> layout(20, axis="replicas").axis
      'replicas'
    """
    if axis not in ("replicas", "clients", None):
        raise ValueError(f"axis is {axis!r}; it must be 'replicas', 'clients' or None")
    devices = jax.devices() if devices is None else devices
    if axis is None:
        axis = "replicas" if num_replicas >= len(devices) else "clients"
    if axis == "replicas":
        devices = devices[:num_replicas]
    return Layout(Mesh(np.array(devices), (axis,), axis_types=(AxisType.Auto,)), axis)


def agree(*numbers: float) -> list[float]:
    """The elementwise maximum of some numbers over all processes.

    Example: in a single process.
      >>> agree(2, 0.5)
      [2.0, 0.5]
    """
    if jax.process_count() == 1:
        return [float(number) for number in numbers]
    return np.max(multihost_utils.process_allgather(np.array(numbers)), axis=0).tolist()
