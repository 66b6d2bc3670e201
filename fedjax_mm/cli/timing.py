"""The command that benchmarks workloads."""

import math
from collections.abc import Sequence

import jax
from rich import box

from fedjax_mm.cli import speed as benchmarks
from fedjax_mm.cli import workloads
from fedjax_mm.cli.terminal import show_table, shown_progress
from fedjax_mm.sweeps.errors import refusing


def bench(names: Sequence[str], repeats: int) -> None:
    """Times workloads, all by default, and prints one table per kind."""
    known = workloads.WORKLOADS
    with refusing():
        if repeats < 1:
            raise ValueError(f"--repeats is {repeats}; it must be at least 1")
        for name in names:
            if name not in known:
                raise ValueError(f"unknown workload {name!r}; choose from {', '.join(known)}")
    points = [(known[name], label) for name in names or known for label in known[name].labels]
    quadratic, learning, peak = list[list[str]](), list[list[str]](), math.nan
    with shown_progress() as report:
        if any(isinstance(each, workloads.LearningWorkload) for each, _ in points):
            report("matrix products", 0, len(points))
            peak = max(benchmarks.gemm_peak().values())
        for number, (workload, label) in enumerate(points):
            report(f"{workload.name} {label}", number, len(points))
            program = benchmarks.build(workload, label)
            seconds = benchmarks.median_seconds(program, repeats)
            speed = workload.client_updates / seconds
            times = [f"{program.compile_seconds:.2f}", f"{seconds:.3f}"]
            memory = f"{program.mebibytes:.0f}"
            if isinstance(workload, workloads.LearningWorkload):
                gflops = workload.flops * speed / 1e9
                rounds = f"{workload.num_rounds / seconds:,.1f}"
                updates = f"{speed:,.1f}" if speed < 100 else f"{speed:,.0f}"
                cells = [rounds, updates, f"{gflops:.1f}", f"{gflops / peak:.1%}"]
                learning.append([workload.name, *times, *cells, f"{program.steps:.2f}", memory])
            else:
                cells = [f"{1e3 * seconds / workload.num_rounds:.3f}", f"{speed:,.0f}"]
                quadratic.append([workload.name, label, *times, *cells, memory])
    title = f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}"
    if quadratic:
        names = ("workload", "algorithm", "compile s", "run s", "ms a round", "updates/s", "MiB")
        show_table(names, quadratic, title=title, box=box.HEAVY_HEAD)
    if learning:
        names = ("work", "compile s", "run s", "rounds/s", "updates/s", "GFLOP/s", "peak", "steps")
        title = f"{title}, peak {peak:,.0f} GFLOP/s"
        show_table((*names, "MiB"), learning, title=title, box=None)
