"""Many devices: the replicas of a program, or the clients of its groups, split over a mesh."""

import os
import re
import socket
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fedjax_mm.results.dataset import cpu_cores

_MOST_DEVICES = 512  # of a CPU, because each device has threads and memory of its own
_HEARTBEAT_SECONDS = 30  # of silence after which a process counts as lost; 100 in JAX

# By the extra of this package, the file of a driver, and the package of JAX's plugin for it.
_ACCELERATORS = {
    "cuda12": ("/proc/driver/nvidia/version", "jax_plugins"),
    "tpu": ("/dev/accel0", "libtpu"),
}

# Let XLA wait 30 years, because it aborts the process when a device has waited 40 seconds for
# another, which is normal if clients take very different numbers of local steps. An unknown flag
# would abort the process, too, but every jaxlib from 0.9 on has these, and a test starts a process
# with them.
_PATIENT = " ".join(
    f"--xla_cpu_collective_{name}_seconds={10**9}"
    for name in ("call_warn_stuck_timeout", "call_terminate_timeout", "timeout")
)


def flags_of_user() -> str:
    """Returns XLA's flags without the flags of `use_cpu_devices`, which do not affect results."""
    return os.environ.get("XLA_FLAGS", "").replace(_PATIENT, "").strip()


def use_cpu_devices(count: int | None = None) -> None:
    """Makes JAX see the CPU as `count` devices, by default one per core.

    Each device has threads of its own, whereas XLA does not use several threads for small matrices
    on one device. The command line calls this; elsewhere call it once, before anything is computed.
    Devices then wait for each other without a time limit; XLA's default is to abort after 40
    seconds.

    Raises:
      ValueError: if `count` is not positive, or above 512.
      RuntimeError: if JAX has already started its devices.

    Example:
      >>> use_cpu_devices(2)  # doctest: +SKIP
    """
    count = cpu_cores() if count is None else count
    if not 1 <= count <= _MOST_DEVICES:
        raise ValueError(f"the number of devices is {count}; it must be 1 to {_MOST_DEVICES}")
    jax.config.update("jax_num_cpu_devices", count)
    given = os.environ.get("XLA_FLAGS", "")
    if _PATIENT not in given:
        os.environ["XLA_FLAGS"] = f"{_PATIENT} {given}".strip()  # the last, the user's, win


def missing_plugin() -> str | None:
    """Returns the extra whose plugin JAX lacks to see this machine's accelerator, if it does."""
    # A plugin that fails to start, or a platform that was chosen, is no plugin that is missing.
    if jax.default_backend() != "cpu" or jax.config.values["jax_platforms"]:
        return None
    for extra, (driver, plugin) in _ACCELERATORS.items():
        if Path(driver).exists() and find_spec(plugin) is None:
            return extra
    return None


def join_processes(address: str | None = None) -> None:
    """Makes this process one of several that compute together, so that JAX sees all their devices.

    Call it once in every process, before anything is computed. JAX aborts a process that has waited
    for the others for five minutes, or has not heard of one of them for half a minute.

    Args:
      address: ``I/N@HOST:PORT``, with this process's number, the number of processes, and the
        address at which all can reach process 0. None takes them from the cluster's scheduler
        (Slurm, Open MPI, Kubernetes, TPU pods).

    Raises:
      ValueError: if the address has another form, its host is unknown, or no scheduler is found.

    Example:
      >>> join_processes("0/2@localhost:9911")  # doctest: +SKIP
    """
    # Disable JAX's handler of SIGTERM, because a run itself saves its state and ends on SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    if address is None:
        try:
            jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT_SECONDS)
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
    jax.distributed.initialize(
        f"{host}:{port}", int(count), int(number), heartbeat_timeout_seconds=_HEARTBEAT_SECONDS
    )


class Layout(NamedTuple):
    """Layout of a program of many replicas over devices, which `layout` makes.

    Attributes:
      mesh: the devices, of one or of many processes, along one axis.
      axis: "replicas", which need no communication, or "clients", whose contributions are summed
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
        """Whether the devices share the host's memory and cores."""
        return bool(self.mesh.devices.flat[0].platform == "cpu")

    def padded(self, num_replicas: int) -> int:
        """Returns the number of replicas, rounded up so that all devices have the same number."""
        devices = self.mesh.size if self.axis == "replicas" else 1
        return -(-num_replicas // devices) * devices

    def over(self, program: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0) -> Any:
        """Returns a program of many replicas, each device computing its share of them.

        Args:
          program: a function of arrays that have a replicas axis, and of others that all replicas
            share, most simply ``jax.vmap(one_replica, in_axes)``. With the client axis take
            gradients outside, because inside a device does not see the gradients of others.
          in_axes: for each argument the position of its replicas axis, or None, as in `jax.vmap`.
          out_axes: likewise for the result.
        """
        # Disable the check, because carries that start as zeros would need casts to varying ones.
        return jax.shard_map(
            program,
            mesh=self.mesh,
            in_specs=self._specs(in_axes),
            out_specs=self._specs(out_axes),
            check_vma=False,
        )

    def put(self, tree: Any, axis: int | None) -> Any:
        """Puts arrays of the host, equal in all processes, on the devices as `over` needs them."""
        sharding = NamedSharding(self.mesh, self._specs(axis))

        def place(array: Any) -> jax.Array:
            array = np.asarray(array)
            return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

        return jax.tree.map(place, tree)

    def fetch(self, tree: Any) -> Any:
        """Returns arrays of the host, whole in every process."""
        if jax.process_count() == 1:
            return jax.device_get(tree)
        return multihost_utils.process_allgather(tree, tiled=True)

    def _specs(self, axes: Any) -> Any:
        """Returns the partition of each axis over the devices."""
        # Split only replicas, because `chunks.in_chunks` shares out clients inside the program.

        def spec(axis: int | None) -> PartitionSpec:
            if axis is None or self.axis == "clients":
                return PartitionSpec()
            return PartitionSpec(*[None] * axis, "replicas")

        return jax.tree.map(spec, axes, is_leaf=lambda axis: axis is None)


def layout(
    num_replicas: int,
    devices: Sequence[Any] | None = None,
    axis: Literal["replicas", "clients"] | None = None,
) -> Layout:
    """Chooses the replica axis, or the client axis if replicas are fewer than devices.

    Args:
      num_replicas: seeds times swept numbers.
      devices: all devices if None, including the devices of other processes.
      axis: "replicas" or "clients" to force an axis. With fewer replicas than devices, "replicas"
        leaves devices idle. It may yet be faster if a round is short, because "clients" adds up
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
    """Returns the largest of each number over all processes, in all of them.

    Example: of one process.
      >>> agree(2, 0.5)
      [2.0, 0.5]
    """
    if jax.process_count() == 1:
        return [float(number) for number in numbers]
    return np.max(multihost_utils.process_allgather(np.array(numbers)), axis=0).tolist()
