"""Where a round's time goes on the first device: its kernels, and the gaps between them.

`python -m benchmarks.timeline [WORK ...]` profiles one run of each workload, and prints the kernels
that take the most time in a round, and the share of the time in which one runs.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
from jax.profiler import ProfileData
from rich.console import Console
from rich.table import Table

from benchmarks.programs import Made, compiled_all


class Timeline(NamedTuple):
    """The events of a device.

    Attributes:
      times: how often each kernel ran, by name.
      nanoseconds: of each kernel, by name.
      busy: nanoseconds in which at least one kernel ran.
      span: nanoseconds from the first kernel to the last one.
    """

    times: Counter[str]
    nanoseconds: Counter[str]
    busy: float
    span: float


def timeline(data: ProfileData) -> Timeline:
    """Returns the events of the first device of a profile, or of the CPU's threads."""
    planes = {plane.name: plane for plane in data.planes}
    devices = ("/device:GPU", "/device:TPU")
    name = next((name for name in planes if name.startswith(devices)), "/host:CPU")
    streams = [line for line in planes[name].lines if name == "/host:CPU" or "Stream" in line.name]
    events = sorted(
        (each.start_ns, each.duration_ns, each.name)
        for line in streams
        for each in line.events
        if not each.name.startswith(("$", "ThunkExecutor"))  # because these contain others
    )
    times, nanoseconds, busy, end = Counter[str](), Counter[str](), 0.0, 0.0
    for start, duration, kernel in events:
        times[kernel] += 1
        nanoseconds[kernel] += duration
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return Timeline(times, nanoseconds, busy, end - events[0][0] if events else 0.0)


def profiled(made: Made) -> Timeline:
    """Profiles one run, after a first one."""
    made.program.run()
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            made.program.run()
        (path,) = Path(directory).rglob("*.xplane.pb")
        return timeline(ProfileData.from_file(str(path)))


def main() -> None:
    """Profiles and prints."""
    console = Console(width=160)
    for name in sys.argv[1:] or ("W1", "W2", "W3"):
        for label, made in compiled_all(name):
            found, rounds = profiled(made), made.num_rounds
            table = Table("times a round", "us a round", "us each", "kernel", box=None)
            share, span = found.busy / max(1.0, found.span), found.span / 1000 / rounds
            number = sum(found.times.values()) / rounds
            table.title = f"{name} {label}: {span:.1f} us a round, {number:.1f} kernels, "
            table.title += f"{share:.0%} busy, {jax.devices()[0].device_kind}"
            for kernel, nanoseconds in found.nanoseconds.most_common(30):
                times, each = found.times[kernel], nanoseconds / 1000
                numbers = times / rounds, each / rounds, each / times
                table.add_row(*(f"{x:.2f}" for x in numbers), kernel)
            console.print(table)


if __name__ == "__main__":
    main()
