"""The machine's measured peak in float32 matrix products, against which work is compared.

python -m benchmarks.gemm
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def _gflops(product: Callable[[], Any], operations: float, repeats: int) -> float:
    product()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - start)
    return operations / best / 1e9


def gemm_peak(
    sizes: tuple[int, ...] = (512, 1024, 2048, 4096), repeats: int = 10
) -> dict[str, float]:
    """Returns the best GFLOP/s over `sizes` of an n x n product, 2 n^3 operations, by form.

    Forms: `NumPy`, `jax` on one device, and, where there are more, `jax, all devices`: one product
    on each. The largest of them is the peak.
    """
    peak: dict[str, float] = {}
    devices = np.array(jax.devices())
    mesh = jax.sharding.Mesh(devices, ("device",))
    by_device = NamedSharding(mesh, PartitionSpec("device"))
    product = jax.jit(jnp.matmul)
    for size in sizes:
        a = np.random.default_rng(0).standard_normal((size, size), np.float32)
        one = jax.device_put(a, devices[0])
        forms = {
            "NumPy": (lambda a=a: a @ a, 1),
            "jax": (lambda a=one: product(a, a).block_until_ready(), 1),
        }
        if len(devices) > 1:
            each = jax.device_put(np.stack([a] * len(devices)), by_device)
            forms["jax, all devices"] = (
                lambda a=each: product(a, a).block_until_ready(),
                len(devices),
            )
        for form, (run, count) in forms.items():
            speed = _gflops(run, 2.0 * count * size**3, repeats)
            peak[form] = max(peak.get(form, 0.0), speed)
    return peak


if __name__ == "__main__":
    for form, speed in gemm_peak().items():
        print(f"{form}: {speed:,.0f} GFLOP/s")
