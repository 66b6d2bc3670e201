"""Prints the table of `benchmarks/README.md` after a run."""

import platform

import jax
import pytest
from rich.console import Console
from rich.table import Table


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(config):
    """Client updates per second (medians), and how many times those of FedJAX."""
    rows = [b for b in config._benchmarksession.benchmarks if "row" in b.extra_info]
    if not rows:
        return
    speed = {
        tuple(b.extra_info["row"]): b.extra_info["client_updates"] / b.stats.median for b in rows
    }
    fedjax = next((value for row, value in speed.items() if row[1] == "FedJAX"), None)
    device = jax.devices()[0].device_kind
    title = f"{device}, {jax.device_count()} device, jax {jax.__version__}, {platform.machine()}"
    header = ("work", "system", "form", "updates/s", "x FedJAX", "run s", "compile s", "MiB")
    table = Table(*header, title=title, box=None)
    for b in rows:
        row, info = tuple(b.extra_info["row"]), b.extra_info
        table.add_row(
            *row,
            f"{speed[row]:,.0f}",
            f"{speed[row] / fedjax:,.0f}" if fedjax else "",
            f"{b.stats.median:.3f}",
            f"{info['compile_seconds']:.2f}" if "compile_seconds" in info else "",
            f"{info['mebibytes']:.0f}" if "mebibytes" in info else "",
        )
    Console(width=120).print(table)
