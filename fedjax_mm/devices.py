"""Many devices: the replicas of a program, or the clients of its groups, split over a mesh."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec


def use_cpu_devices(count: int | None = None) -> None:
    """Makes JAX see the CPU as `count` devices, by default one per core.

    Each device has threads of its own, which XLA does not give to small matrices on one device. The
    command line calls this; elsewhere call it once, before anything is computed.

    Raises:
      ValueError: if `count` is not positive.
      RuntimeError: if JAX has already started its devices.

    Example:
      >>> use_cpu_devices(2)  # doctest: +SKIP
    """
    count = os.cpu_count() or 1 if count is None else count
    if count < 1:
        raise ValueError(f"the number of devices is {count}; it must be at least 1")
    jax.config.update("jax_num_cpu_devices", count)


def use_compilation_cache() -> Path:
    """Keeps compiled programs in the user's cache directory, and returns the place.

    A later process with the same program, devices and versions reads them instead of compiling.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = Path(home) / "fedjax_mm" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return place


class Layout(NamedTuple):
    """How a program of many replicas is laid out over devices; make it with `layout`.

    Attributes:
      mesh: the devices, along one axis.
      axis: "replicas", which need no communication, or "clients", whose contributions are summed
        over devices.
    """

    mesh: Mesh
    axis: Literal["replicas", "clients"]

    @property
    def client_axis(self) -> str | None:
        """What `simulate` is given as `client_axis`."""
        return "clients" if self.axis == "clients" else None

    def padded(self, num_replicas: int) -> int:
        """The replicas to run so that every device has as many; the last ones are to be dropped."""
        devices = self.mesh.size if self.axis == "replicas" else 1
        return -(-num_replicas // devices) * devices

    def over(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """``program(one_replica, shared)`` over a leading axis of replicas, on all devices.

        With the client axis take gradients outside: inside, devices do not see each other's.
        """
        split = PartitionSpec("replicas") if self.axis == "replicas" else PartitionSpec()
        # Without the check, carries that start as zeros need not be cast to varying ones.
        return jax.shard_map(
            jax.vmap(program, (0, None)),
            mesh=self.mesh,
            in_specs=(split, PartitionSpec()),
            out_specs=split,
            check_vma=False,
        )


def layout(
    num_replicas: int,
    devices: Sequence[Any] | None = None,
    axis: Literal["replicas", "clients"] = "replicas",
) -> Layout:
    """The replica axis, on at most as many devices as replicas; the client axis on request.

    Args:
      num_replicas: seeds times swept numbers.
      devices: all of them if None.
      axis: "clients" pays off where one replica's clients are many or its model is large.

    Example:
      >>> layout(20).axis
      'replicas'
    """
    devices = jax.devices() if devices is None else devices
    if axis == "replicas":
        devices = devices[:num_replicas]
    return Layout(Mesh(np.array(devices), (axis,), axis_types=(AxisType.Auto,)), axis)
