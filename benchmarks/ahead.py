"""Kernels per round on a GPU that need not be there: XLA compiles for it ahead of time.

`python -m benchmarks.ahead [WORK ...]` compiles workloads for an H100, without running them, and
prints their kernels per round and the lines of the source with the most. It needs JAX's CUDA
plugin, as `pip install 'jax[cuda12]'` brings it, but neither a GPU nor a driver.
"""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from benchmarks.kernels import Module, most_launches
from benchmarks.programs import parts
from fedjax_mm import fedavg, init, params_of, simulate
from fedjax_mm.base.keys import seed_keys
from fedjax_mm.cli.workloads import ASSIGNMENTS, WORKLOADS, SweepWorkload, Workload
from fedjax_mm.simulator.preflight import run_of
from fedjax_mm.sweeps.devices import layout
from fedjax_mm.sweeps.program import Block, programs_of
from fedjax_mm.tasks import quadratic

TARGET = Path(__file__).with_name("h100.txtpb")


def target(path: Path = TARGET) -> Any:
    """Returns a device that programs can be compiled for, but not run on."""
    config = path.read_text()
    jax.config.update("jax_platforms", "cpu")
    # The plugin would refuse to be loaded, because it finds no driver.
    with patch.dict(os.environ, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"):
        jax.devices()
    try:
        found = topologies.get_topology_desc("", "cuda", target_config=config, topology="1x1x1")
    except NotImplementedError as error:
        raise SystemExit("JAX's CUDA plugin is missing: pip install 'jax[cuda12]'") from error
    return found.devices[0]


def compile_for(device: Any, function: Callable[..., Any], *arguments: Any) -> str:
    """Returns the optimized HLO of a function on a device, from the shapes of its arguments."""
    where = SingleDeviceSharding(device)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), arguments
    )
    with _on_gpus():
        traced = jax.jit(function, in_shardings=where, out_shardings=where).trace(*shapes)
        text: str = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    return text


def _on_gpus() -> Any:
    # The package decides by the default backend, which is the CPU here.
    return patch.object(jax, "default_backend", return_value="gpu")


def works(name: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], int, int | None]]:
    """Yields a workload's programs: title, function, arguments, depth of the rounds and trips."""
    workload = WORKLOADS[name]
    if isinstance(workload, SweepWorkload):
        where = layout(1, jax.devices()[:1])
        for number, program in enumerate(programs_of(workload.grid())):
            block = Block(*program.shape, 0)
            arguments = program.inputs(where, block, 0)
            with _on_gpus():
                trips = program.rounds_at_once
            segment = partial(program.segment, None, block)
            yield f"{name}, program {number}", segment, arguments, 3, trips
        return
    rounds = workload.num_rounds
    if not isinstance(workload, Workload):
        task, algorithm, assignment = parts(workload)

        def train(words: Any, task: Any) -> Any:
            state = init(jax.random.wrap_key_data(words), task, algorithm, assignment)
            return params_of(run_of(task, algorithm, assignment).rounds(state, rounds)[0])

        yield name, train, (jax.random.key_data(jax.random.key(0)), task), 1, rounds
        return
    keys = jax.random.key_data(seed_keys(0, np.arange(workload.num_seeds)))
    for label in workload.labels:
        assignment = ASSIGNMENTS[label](workload.num_clients, workload.num_models)

        def run(words: Any, task: Any, rate: Any, assignment: Any = assignment) -> Any:
            algorithm = fedavg(rate, local_steps=5)
            return simulate(jax.random.wrap_key_data(words), task, algorithm, assignment, rounds)[1]

        quadratics = quadratic(workload.num_clients, 4, mu=2e-4)
        arguments = keys, quadratics, np.float32(0.1)
        yield f"{name} {label}", jax.vmap(run, (0, None, None)), arguments, 1, rounds


def main() -> None:
    """Compiles, counts and prints."""
    device, console = target(), Console(width=160)
    table = Table("work", "kernels", "KiB", title=f"{device.device_kind}, jax {jax.__version__}")
    for name in sys.argv[1:] or ("W1", "W1b", "W2", "W3", "S1"):
        for title, function, arguments, depth, trips in works(name):
            module = Module(compile_for(device, function, *arguments))
            counted = module.rounds(depth, trips)
            table.add_row(title, f"{counted.kernels:,}", f"{counted.num_bytes / 1024:,.0f}")
            console.print(most_launches(title, module, counted))
    console.print(table)


if __name__ == "__main__":
    main()
