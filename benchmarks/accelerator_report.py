"""The report of `benchmarks.accelerator`: all numbers as JSON, tables, and figures."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedjax_mm.tools.files import save_json, write_aside

Found = Mapping[str, Any]

HEADER = (
    *("work", "size", "variant", "compile s", "run s", "us a round", "kernels", "in graphs"),
    *("us a kernel", "updates/s", "GFLOP/s", "of matrix peak", "GB/s", "of bandwidth", "MiB"),
)
NOTES = (
    "*Kernels* are the launches of one round, read in the compiled program, and those among them "
    "that command buffers hold; of F1 to F3 they are those of one batch of arrivals, whose *round* "
    "is an arrival. GFLOP/s are those of matrix products. GB/s is an estimate from the sizes of "
    "what the kernels read and write."
)


def write_report(found: Sequence[Found], out: Path) -> None:
    """Writes `accelerator.json`, `accelerator.md` and the figures from the rows so far."""
    ceilings = next((row["ceilings"] for row in found if "ceilings" in row), {})
    rows = [dict(row) | derived(row, ceilings) for row in found if "ceilings" not in row]
    about = {key: row[key] for row in found for key in ("device", "jax") if key in row}
    save_json({**about, "ceilings": ceilings, "rows": rows}, out / "accelerator.json")
    text = markdown(rows, ceilings, about)
    write_aside(out / "accelerator.md", lambda path: path.write_text(text))
    done = [row for row in rows if "error" not in row]
    for name, draw in (("growth", growth), ("variants", variants), ("launches", launches)):
        figure = draw(done) if draw is not launches else launches(done, ceilings)
        save = partial(figure.savefig, dpi=110, format="png")
        write_aside(out / f"{name}.png", save)


def derived(row: Found, ceilings: Mapping[str, float]) -> dict[str, float]:
    """Returns speeds and shares of the ceilings, as far as they are known."""
    if "error" in row:
        return {}
    seconds, rounds = row["seconds"], row["num_rounds"]
    made = {
        "microseconds a round": 1e6 * seconds / rounds,
        "updates/s": row["updates"] / seconds,
    }
    if not row["is_batched"]:
        made["microseconds a kernel"] = made["microseconds a round"] / max(1, row["kernels"])
    if row["flops"]:
        made["GFLOP/s"] = 1e-9 * row["flops"] / seconds
        name = "bfloat16" if row["variant"].startswith("bfloat16") else "float32"
        if ceilings:
            made["of matrix peak"] = made["GFLOP/s"] / ceilings[f"{name} GFLOP/s"]
    if row["round_bytes"]:
        made["GB/s"] = 1e-9 * row["round_bytes"] * rounds / seconds
        if ceilings:
            made["of bandwidth"] = made["GB/s"] / ceilings["GB/s"]
    return made


def markdown(rows: Sequence[Found], ceilings: Mapping[str, float], about: Mapping[str, str]) -> str:
    """Returns a table for each group."""
    title = f"{about.get('device', 'no device')}, jax {about.get('jax', '?')}"
    limits = ", ".join(f"{value:,.1f} {name}" for name, value in ceilings.items())
    lines = [f"# {title}", "", f"Ceilings: {limits or 'not measured'}.", "", NOTES, ""]
    for group in dict.fromkeys(row["group"] for row in rows):
        lines += [
            f"## {group.capitalize()}",
            "",
            markdown_line(HEADER),
            markdown_line(["---"] * len(HEADER)),
        ]
        lines += [markdown_line(_cells(row)) for row in rows if row["group"] == group]
        lines.append("")
    return "\n".join(lines)


def markdown_line(cells: Sequence[str]) -> str:
    """Returns a line of a table."""
    return f"| {' | '.join(cells)} |"


def _cells(row: Found) -> list[str]:
    first = [row["work"], f"{row['size']:,}" if row["size"] else "", row["variant"]]
    if "error" in row:
        # The first line, without the table's own sign.
        error = row["error"].splitlines()[0].replace("|", "/")[:120]
        return [*first, error] + [""] * (len(HEADER) - len(first) - 1)

    def number(name: str, form: str = "") -> str:
        value = row.get(name)
        if value is None:
            return ""
        return format(value, form or (",.0f" if value >= 100 else ".3g"))

    names = ["compile_seconds", "seconds", "microseconds a round", "kernels", "in_graphs"]
    names += ["microseconds a kernel", "updates/s"]
    rest = [number("GFLOP/s"), number("of matrix peak", ".1%")]
    rest += [number("GB/s"), number("of bandwidth", ".1%"), number("mebibytes")]
    return [*first, *map(number, names), *rest]


def growth(rows: Sequence[Found]) -> Figure:
    """Draws updates per second against replicas and against clients."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, group in zip(figure.subplots(1, 2), ("replicas", "clients"), strict=True):
        here = [row for row in rows if row["group"] == group]
        for work, marker in zip(dict.fromkeys(row["work"] for row in here), "os^d", strict=False):
            mine = [row for row in here if row["work"] == work]
            sizes, speeds = ([row[key] for row in mine] for key in ("size", "updates/s"))
            axes.loglog(sizes, speeds, marker=marker, label=work)
        axes.set(xlabel=group, ylabel="client updates per second")
        axes.grid(True, alpha=0.3)
        if here:
            axes.legend()
    return figure


def variants(rows: Sequence[Found]) -> Figure:
    """Draws the time of a round of each variant."""
    here = [row for row in rows if row["group"] == "variants"]
    works = list(dict.fromkeys(row["work"] for row in here)) or [""]
    figure = Figure(figsize=(4 * len(works), 4), layout="constrained")
    for axes, work in zip(figure.subplots(1, len(works), squeeze=False)[0], works, strict=True):
        mine = [row for row in here if row["work"] == work]
        names = [row["variant"] for row in mine]
        axes.barh(names, [row["microseconds a round"] for row in mine])
        axes.invert_yaxis()
        axes.set(title=work, xlabel="microseconds a round")
    return figure


def launches(rows: Sequence[Found], ceilings: Mapping[str, float]) -> Figure:
    """Draws the time of a round against its kernels, and the time of these as empty launches."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    here = [row for row in rows if not row["is_batched"] and row["kernels"]]
    for group, marker in zip(dict.fromkeys(row["group"] for row in here), "os^dv", strict=False):
        mine = [row for row in here if row["group"] == group]
        points = ([row[key] for row in mine] for key in ("kernels", "microseconds a round"))
        axes.loglog(*points, marker, label=group)
    if ceilings and here:
        ends = [pick(row["kernels"] for row in here) for pick in (min, max)]
        each = ceilings["microseconds a launch"]
        axes.loglog(ends, [each * x for x in ends], "k--", label=f"{each:.2g} us a launch")
    axes.set(xlabel="kernels a round", ylabel="microseconds a round")
    axes.grid(True, alpha=0.3)
    if here:
        axes.legend()
    return figure
