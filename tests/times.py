"""``pytest --times`` prints the cost of each test file, also with several workers.

CPU seconds are those of the process and of the child processes that it waited for, so the table
hardly depends on other load. A test is charged from the end of the test before it in the same
worker, fixtures and their teardown included.
"""

import contextlib
import ctypes
import gc
import json
import resource
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import psutil
import pytest

_COMPILATION = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_ROOM = 1400 * 2**20  # above this a worker clears the caches of JAX at the end of a file,
_MOST = 1600 * 2**20  # and above this at the end of a test


class Cost(NamedTuple):
    """Cost of some tests, with the peak memory of their worker so far."""

    tests: int = 0
    seconds: float = 0.0
    compiled: int = 0
    read: int = 0
    megabytes: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        sums = (a + b for a, b in zip(self[:4], other[:4], strict=True))
        return Cost(*sums, max(self.megabytes, other.megabytes))


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("times")
    group.addoption("--times", action="store_true", help="print what each file costs")
    group.addoption(
        "--times-json", metavar="FILE", help="the same, and write what each test costs to a file"
    )


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Times(_report(config)), "fedjax-mm-times")


def _report(config: Any) -> str | None:
    """The file to write, "" to print only, or None."""
    return config.getoption("times_json") or ("" if config.getoption("times") else None)


class Times:
    """Measures in every worker and adds up in the process that gets the reports."""

    def __init__(self, report: str | None):
        self.report = report
        self.compiled = self.read = self.held = 0
        self.module, self.before, self.costs = "", self._now(), {}
        jax.monitoring.register_event_duration_secs_listener(self._note_duration)
        jax.monitoring.register_event_listener(self._note_event)

    def _note_duration(self, event: str, duration: float, **about: Any) -> None:
        self.compiled += event == _COMPILATION

    def _note_event(self, event: str, **about: Any) -> None:
        self.read += event == _CACHE_HIT

    def _now(self) -> Cost:
        usages = [
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return Cost(0, seconds, self.compiled, self.read, usages[0].ru_maxrss / unit)

    def pytest_collection_finish(self, session: Any) -> None:
        # Imported objects are never garbage, so freeze them, and collect the others less often.
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)
        self.before = self._now()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        if call.when == "teardown":
            now = self._now()
            spent = [b - a for a, b in zip(self.before[1:4], now[1:4], strict=True)]
            item.user_properties.append(("cost", [1, *spent, now.megabytes]))
            self.before = now
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Any:
        result = yield
        is_last = nextitem is None or nextitem.path != item.path
        if _resident() > (_ROOM if is_last else max(_MOST, self.held + 300 * 2**20)):
            jax.clear_caches()
            gc.collect()
            with contextlib.suppress(
                OSError, AttributeError
            ):  # not every C library has malloc_trim
                ctypes.CDLL(None).malloc_trim(0)
            self.held = _resident()
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "teardown" and self.report is not None:
            costs = [Cost(*each) for name, each in report.user_properties if name == "cost"]
            self.costs[report.nodeid] = sum(costs, Cost())

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.report is None:
            return
        files: dict[str, Cost] = {}
        for nodeid, cost in self.costs.items():
            name = nodeid.partition("::")[0]
            files[name] = files.get(name, Cost()) + cost
        write = terminalreporter.write_line
        terminalreporter.section("CPU seconds")
        write(f"{'file':42}{'tests':>7}{'CPU s':>8}{'compiled':>10}{'read':>7}{'peak MiB':>10}")
        ordered = sorted(files.items(), key=lambda each: -each[1].seconds)
        for name, cost in [*ordered, ("all", sum(files.values(), Cost()))]:
            numbers = (
                f"{cost.tests:7}{cost.seconds:8.1f}{cost.compiled - cost.read:10}{cost.read:7}"
            )
            write(f"{name:42}{numbers}{cost.megabytes:10.0f}")
        if self.report:
            table = {nodeid: cost._asdict() for nodeid, cost in self.costs.items()}
            Path(self.report).write_text(json.dumps(table, indent=1))


def _resident() -> int:
    """Resident memory of this process in bytes."""
    return psutil.Process().memory_info().rss
