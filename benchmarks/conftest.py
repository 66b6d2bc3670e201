"""One XLA device per core, and the table of `benchmarks/README.md` after a run."""

import platform

import jax
import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.learning import WORKLOADS
from fedjax_mm.cli.speed import gemm_peak
from fedjax_mm.sweeps.devices import use_cpu_devices

use_cpu_devices()


def pytest_collection_modifyitems(items):
    """Rows that are compared are timed one after another: machines change their pace by the minute.

    Setup that is not timed comes first.
    """
    names = list(WORKLOADS)

    def place(item):
        if "benchmark" not in item.fixturenames:
            return -1
        name = item.callspec.params.get("name")
        return names.index(name) if name in names else len(names)

    items.sort(key=place)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(config):
    """Client updates per second (medians), and how many times those of FedJAX on the same work.

    FedJAX has two rows: its own algorithm, and a lean one on its `for_each_client`.
    """
    rows = [b for b in config._benchmarksession.benchmarks if "row" in b.extra_info]
    if not rows:
        return
    speed = {
        tuple(b.extra_info["row"]): b.extra_info["client_updates"] / b.stats.median for b in rows
    }
    own, lean = {}, {}
    for (work, system, form), value in speed.items():
        if system == "FedJAX":
            (own if form == "its own fed_avg" else lean)[work] = value
    with_flops = any("flops" in b.extra_info for b in rows)
    peak = max(gemm_peak().values()) if with_flops else None
    device = jax.devices()[0].device_kind
    title = f"{jax.device_count()} x {device}, jax {jax.__version__}, {platform.machine()}"
    if peak:
        title += f", peak {peak:,.0f} GFLOP/s"
    header = ("work", "system", "form", "updates/s", "x FedJAX's own", "x FedJAX, lean")
    more = ("GFLOP/s", "of peak", "run s", "compile s", "MiB")
    table = Table(*header, *more, title=title, box=None)
    for b in rows:
        row, info = tuple(b.extra_info["row"]), b.extra_info
        work = "W1" if row[0].startswith("W1") else row[0]
        gflops = info["flops"] / b.stats.median / 1e9 if "flops" in info else None
        table.add_row(
            *row,
            _number(speed[row]),
            *(_number(speed[row] / base[work]) if work in base else "" for base in (own, lean)),
            _number(gflops) if gflops else "",
            f"{gflops / peak:.1%}" if gflops else "",
            f"{b.stats.median:.3f}",
            f"{info['compile_seconds']:.2f}" if "compile_seconds" in info else "",
            f"{info['mebibytes']:.0f}" if "mebibytes" in info else "",
        )
    Console(width=140).print(table)


def _number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
