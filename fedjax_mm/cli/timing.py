"""The command that benchmarks workloads."""

import math
from collections.abc import Sequence
from pathlib import Path

import jax
from rich import box

from fedjax_mm.cli import costs, workloads
from fedjax_mm.cli import speed as benchmarks
from fedjax_mm.cli.terminal import show_table, shown_progress
from fedjax_mm.plots.drawing import save_figure
from fedjax_mm.sweeps.errors import refusing
from fedjax_mm.tools.files import prepare_directory, save_json

CAPABILITIES = "capabilities"
"""The name that stands for all capabilities, before names of their workloads."""


def bench(
    names: Sequence[str],
    repeats: int | None = None,
    only: Sequence[str] = (),
    rounds: int | None = None,
    out: Path | None = None,
) -> None:
    """Times workloads, all by default, or what capabilities add to them."""
    with refusing():
        if repeats is not None and repeats < 1:
            raise ValueError(f"--repeats is {repeats}; it must be at least 1")
        if CAPABILITIES not in names and (only or rounds is not None or out is not None):
            raise ValueError(
                "--only, --rounds and --out are for `bench capabilities`; leave them out"
            )
    if CAPABILITIES in names:
        on = [name for name in names if name != CAPABILITIES]
        _bench_capabilities(only, on, rounds, 7 if repeats is None else repeats, out)
    else:
        _bench_workloads(names, 5 if repeats is None else repeats)


def _bench_capabilities(
    only: Sequence[str], on: Sequence[str], rounds: int | None, repeats: int, out: Path | None
) -> None:
    """Prints tables, and writes the numbers to `out` and a figure next to it."""
    with refusing():
        plan = costs.plan(only, on, rounds, repeats)
        if out is not None:
            if out.suffix != ".json":
                raise ValueError(f"--out is {out}; give a file that ends in .json")
            prepare_directory(out.parent)
    with shown_progress() as report:
        found = plan.run(report)
    costs.show(found)
    if out is not None:
        save_json(found.json, out)
        save_figure(costs.draw(found), out.with_suffix(".png"))


def _bench_workloads(names: Sequence[str], repeats: int) -> None:
    """Prints one table per kind of workload, with medians."""
    known = workloads.WORKLOADS
    with refusing():
        for name in names:
            if name not in known:
                allowed = ", ".join([*known, CAPABILITIES])
                raise ValueError(f"unknown workload {name!r}; choose from {allowed}")
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
