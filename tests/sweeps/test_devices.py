"""Runs split over 1, 2 and 8 devices agree with one device without a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mm import fedavg, mfa_rand, mfa_rr, simulate
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.sweeps import join_processes, layout, use_cpu_devices
from fedjax_mm.tasks import quadratic
from tests.helpers import slow_unless

N = 13  # divisible by neither the number of models nor that of devices


ASSIGNMENTS = {"mfa_rand": mfa_rand(N, 3), "mfa_rr": mfa_rr(N, 3, cohort_size=11)}


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
            fedavg(0.1, local_steps=3),
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


QUICK = {("mfa_rand", "float32"): LAYOUTS[2:], ("mfa_rr", "float64"): LAYOUTS[1:2]}


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
