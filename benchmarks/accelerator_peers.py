"""Other systems and ours on one card: W1 to W5 in PyTorch, DrJAX, FedJAX and `fedjax_mm`.

`python -m benchmarks.accelerator_peers --out DIR` measures all rows on the first device that JAX
sees, and writes `DIR/peers.json` and `DIR/peers.md` after each row. Rows, processes, `--budget` and
`--limit` are those of `benchmarks.accelerator`: a second call goes on with the rows that are left.

- W1's peers train one model on all 24 clients in each round, which are as many client updates as
  ours of twelve models.
- Set-up seconds are those of making the data, building, compiling, and the first run. Examples are
  drawn while it runs.
- Products have JAX's default precision, which is TF32 on an H100, as PyTorch's here.
- *difference* is the largest one between any parameter and ours after a few rounds, in float32,
  of the workload without draws (`Workload.alike`), at a rate of 0.01, because W5's rate magnifies
  rounding. *moved* is how far a parameter got. Our own are compared with NumPy in float64.
- W5's *recipe* is pfl-research's: dropout, and epochs instead of random examples. All other rows of
  W5 have neither.
"""

import fcntl
import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import accelerator
from benchmarks.accelerator import Row, device_of
from benchmarks.accelerator_report import Found, markdown_line
from fedjax_mm.tools.files import save_json, write_aside

MODULE = "benchmarks.accelerator_peers"
ROUNDS_ALIKE = {"W1": 50}  # of the comparison; 2 elsewhere
MODULES = {
    "fedjax_mm": "benchmarks.programs",
    "PyTorch": "benchmarks.torch_peers",
    "DrJAX": "drjax",
    "FedJAX": "fedjax",
}
RATE_ALIKE = 0.01  # of the comparison, but for W1


class Sizes(NamedTuple):
    """How large the rows are.

    Attributes:
      works: the workloads, with changes to their settings.
      rounds: of one run, by workload: of programs, of loops over clients on the host, and of many
        replicas.
      replicas: the largest number, by workload.
      compiled: workloads that PyTorch compiles.
      seconds: of the runs of a row, at least.
    """

    works: Mapping[str, Mapping[str, Any]]
    rounds: Mapping[str, tuple[int, int, int]]
    replicas: Mapping[str, int]
    compiled: Sequence[str]
    seconds: float


FULL = Sizes(
    works={name: {} for name in ("W5", "W2", "W1", "W3", "W4")},
    rounds={
        "W1": (1000, 20, 1000),
        "W2": (500, 3, 200),
        "W3": (50, 5, 10),
        "W4": (4, 1, 2),
        "W5": (20, 1, 10),
    },
    replicas={"W1": 4096, "W2": 256, "W3": 512, "W4": 8, "W5": 8},
    compiled=("W2", "W1", "W3", "W5", "W4"),
    seconds=1.0,
)
TINY = Sizes(
    works={
        "W1": {"num_clients": 12},
        "W2": {"num_clients": 6, "num_examples": 10, "cohort_size": 3, "batch_size": 4},
        "W3": {"num_clients": 6, "num_examples": 10, "cohort_size": 3, "batch_size": 4},
        "W4": {"num_clients": 2, "num_examples": 4, "cohort_size": 2, "batch_size": 2},
        "W5": {"num_clients": 2, "num_examples": 4, "cohort_size": 2, "batch_size": 2},
    },
    rounds={
        "W1": (4, 2, 2),
        "W2": (3, 1, 2),
        "W3": (2, 1, 2),
        "W4": (2, 1, 2),
        "W5": (2, 1, 2),
    },
    replicas={"W1": 2},
    compiled=(),
    seconds=0.0,
)


class Made(NamedTuple):
    """A system, ready to run a workload.

    Attributes:
      run: plays all rounds, and waits for them.
      num_rounds: of each replica.
      updates: of all replicas in a run.
      num_steps: of a client's update.
      initial: the parameters of the comparison at first.
      compared: returns the parameters of the comparison and what they should be; None if its draws
        cannot be left out.
    """

    run: Callable[[], Any]
    num_rounds: int
    updates: int
    num_steps: int
    initial: Sequence[np.ndarray] = ()
    compared: Callable[[Path], tuple[Any, Any]] | None = None


def rows(sizes: Sizes) -> Iterator[Row]:
    """Yields all rows, the most important first."""

    def each(system: str, form: str, make: Callable[..., Made], works: Sequence[str]) -> Any:
        for name in works:
            yield Row(system, name, partial(make, name), variant=form)

    works = list(sizes.works)
    if "W5" in works:
        yield Row("fedjax_mm", "W5", _recipe, variant="recipe")
    yield from each("fedjax_mm", "one replica", _ours, works)
    for form, options in (("CUDA graph of vmap", {"graphed": True}), ("vmap", {})):
        yield from each("PyTorch", form, partial(_torch, "vmap_rounds", options), works)
    yield from each("DrJAX", "vmap", partial(_jax, "drjax_rounds"), works)
    yield from each("FedJAX", "lean loop", partial(_jax, "fedjax_rounds"), works)
    yield from each("PyTorch", "loop", partial(_torch, "loop_rounds", {}), works)
    for name, number in sizes.replicas.items():
        yield Row("fedjax_mm", name, partial(_ours, name, number=number), number, "replicas")
    for form, options in (
        ("compiled vmap", {"compiled": True}),
        ("CUDA graph of compiled vmap", {"compiled": True, "graphed": True}),
    ):
        make = partial(_torch, "vmap_rounds", options)
        yield from each("PyTorch", form, make, sizes.compiled)
    learning = [name for name in works if name != "W1"]
    yield from each("FedJAX", "its own fed_avg", partial(_jax, "fedjax_own_rounds"), learning)


# The functions that make rows import JAX and PyTorch late, as those of `accelerator` do.


def _workload(name: str, sizes: Sizes) -> Any:
    """Returns the workload for the peers: of W1, one model that all clients train."""
    from benchmarks.learning import WORKLOADS
    from benchmarks.peers import Quadratic

    workload = Quadratic(num_models=1) if name == "W1" else WORKLOADS[name]
    return workload._replace(**sizes.works[name])


def _ours(name: str, sizes: Sizes, number: int = 1) -> Made:
    from fedjax_mm.cli.workloads import WORKLOADS

    workload: Any = WORKLOADS[name]._replace(**sizes.works[name])
    num_steps = 5 if name == "W1" else workload.num_steps
    rounds = sizes.rounds[name][2 if number > 1 else 0]
    made = _rounds_alone(workload, rounds, number, num_steps)
    if number > 1:
        return made
    plain = _workload(name, sizes)
    return made._replace(initial=_initial(plain), compared=partial(_ours_compared, plain))


def _recipe(sizes: Sizes) -> Made:
    from fedjax_mm.cli.workloads import WORKLOADS

    workload: Any = WORKLOADS["W5"]._replace(**sizes.works["W5"])
    model = workload.model._replace(dropout_rates=(0.25, 0.5))
    num_steps = -(-workload.num_examples // workload.batch_size)
    workload = workload._replace(model=model, num_steps=None)  # one epoch
    return _rounds_alone(workload, sizes.rounds["W5"][0], 1, num_steps)


def _rounds_alone(workload: Any, rounds: int, number: int, num_steps: int) -> Made:
    from benchmarks.programs import rounds_alone

    made = rounds_alone(workload._replace(num_rounds=rounds), number)
    return Made(made.program.run, made.num_rounds, made.updates, num_steps)


def _ours_compared(workload: Any, directory: Path) -> tuple[Any, Any]:
    from benchmarks.learning import numpy_rounds

    ours = _reference(workload, directory)
    if workload.name == "W1":
        return ours, [_quadratic("numpy_rounds", workload, ROUNDS_ALIKE["W1"])()]
    if workload.model.channels:
        return ours, None
    alike = _alike(workload)
    return ours, _flat(numpy_rounds(alike, alike.all_examples(2))())


def _alike(workload: Any) -> Any:
    return workload.alike()._replace(learning_rate=RATE_ALIKE)


def _jax(build: str, name: str, sizes: Sizes) -> Made:
    import jax

    from benchmarks import learning_peers

    workload = _workload(name, sizes)
    is_loop, has_own_draws = build != "drjax_rounds", build == "fedjax_own_rounds"

    def built(workload: Any, num_rounds: int, batches: Any = None) -> Callable[[], Any]:
        if name == "W1":
            return _quadratic(build, workload, num_rounds)
        # Our own draws shuffle all examples, when a batch has all of them.
        options = {} if has_own_draws else {"batches": batches}
        return getattr(learning_peers, build)(workload, num_rounds, **options)

    def in_full_precision(run: Callable[[], Any]) -> Any:
        with jax.default_matmul_precision("highest"), learning_peers.tree_map_restored():
            return run()

    num_rounds = sizes.rounds[name][is_loop]
    timed = built(workload, num_rounds)

    def run() -> Any:
        with learning_peers.tree_map_restored():
            return timed()

    return _made(workload, run, num_rounds, built, in_full_precision)


def _torch(build: str, options: Mapping[str, Any], name: str, sizes: Sizes) -> Made:
    import jax
    import torch

    from benchmarks import torch_peers

    workload = _workload(name, sizes)
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if options.get("graphed") and device == "cpu":
        raise ValueError("a CPU has no CUDA graphs")
    if device == "cuda":
        torch.cuda.empty_cache()  # that of the row before

    def built(workload: Any, num_rounds: int, batches: Any = None) -> Callable[[], Any]:
        build_it = getattr(torch_peers, build)
        return build_it(workload, num_rounds, batches=batches, device=device, **options)

    def in_full_precision(run: Callable[[], Any]) -> Any:
        with torch_peers.precision("highest"):
            return run()

    num_rounds = sizes.rounds[name][build == "loop_rounds"]
    with torch_peers.precision("high"):
        timed = built(workload, num_rounds)

    def run() -> Any:
        with torch_peers.precision("high"):
            return timed()

    return _made(workload, run, num_rounds, built, in_full_precision)


def _made(
    workload: Any,
    run: Callable[[], Any],
    num_rounds: int,
    built: Callable[..., Callable[[], Any]],
    in_full_precision: Callable[[Callable[[], Any]], Any],
) -> Made:
    def compared(directory: Path) -> tuple[Any, Any]:
        rounds = ROUNDS_ALIKE.get(workload.name, 2)
        if workload.name == "W1":
            found = [in_full_precision(lambda: built(workload, rounds)())]
        else:
            alike = _alike(workload)
            batches = alike.all_examples(rounds)
            found = _flat(in_full_precision(lambda: built(alike, rounds, batches)()))
        return found, _reference(workload, directory)

    updates = num_rounds * workload.cohort_size
    return Made(run, num_rounds, updates, workload.num_steps, _initial(workload), compared)


def _initial(workload: Any) -> list[np.ndarray]:
    # The quadratics start at 0.
    return [np.zeros(1)] if workload.name == "W1" else _flat(workload.params(0))


def _quadratic(build: str, workload: Any, num_rounds: int) -> Callable[[], np.ndarray]:
    from benchmarks import peers

    how = {"num_clients": workload.num_clients, "num_models": workload.num_models}
    return getattr(peers, build)(num_rounds, **how)


def _reference(workload: Any, directory: Path) -> list[np.ndarray]:
    """Returns our parameters of the comparison, computed once and kept in a file."""
    path = directory / f"reference-{workload.name}.npz"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # because several workers would compile it
        if not path.exists():
            arrays = _computed_reference(workload)
            write_aside(path, partial(_save_arrays, arrays))
    with np.load(path) as file:
        return [file[name] for name in file.files]


def _save_arrays(arrays: Sequence[np.ndarray], path: Path) -> None:
    with path.open("wb") as file:  # because NumPy would change the name
        np.savez(file, *arrays)


def _computed_reference(workload: Any) -> list[np.ndarray]:
    import jax

    from benchmarks import learning
    from benchmarks.programs import rounds_alone
    from fedjax_mm.cli.workloads import WORKLOADS

    rounds = ROUNDS_ALIKE.get(workload.name, 2)
    with jax.default_matmul_precision("highest"):
        if workload.name == "W1":
            sizes = {"num_clients": workload.num_clients, "num_models": 1, "num_rounds": rounds}
            made = rounds_alone(WORKLOADS["W1"]._replace(**sizes))
            return [np.asarray(made.program.run())[0]]
        run = learning.ours_rounds(_alike(workload), rounds, devices=jax.devices()[:1])
        return _flat(run())


def _flat(params: Any) -> list[np.ndarray]:
    return [array for layer in params for array in layer]


def measure(row: Row, sizes: Sizes, out: Path) -> dict[str, Any]:
    """Measures a row in this process, alone on the device."""
    import jax

    assert row.make is not None
    importlib.import_module(MODULES[row.group])  # before the clock starts
    # Make and compare it beside rows that are timed, which would wait for compilers otherwise; both
    # use the device for a moment only.
    clock = time.perf_counter()
    made: Made = row.make(sizes)
    setup = time.perf_counter() - clock
    with device_of(out, alone=False):
        clock = time.perf_counter()
        made.run()
        setup += time.perf_counter() - clock
    with device_of(out, alone=True):
        seconds = list[float]()
        while not seconds or (len(seconds) < 20 and sum(seconds) < sizes.seconds):
            clock = time.perf_counter()
            made.run()
            seconds.append(time.perf_counter() - clock)
    found = {
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "setup_seconds": setup,
        "seconds": statistics.median(seconds),
        "num_runs": len(seconds),
        "num_rounds": made.num_rounds,
        "updates": made.updates,
        "steps": made.updates * made.num_steps,
    }
    if made.compared is None:
        return found
    # Keep the time, even if the comparison fails.
    try:
        arrays, wanted = made.compared(out / "rows")
        found["moved"] = _largest(arrays, made.initial)
        return found if wanted is None else found | {"difference": _largest(arrays, wanted)}
    except Exception as error:
        return found | {"not_compared": f"{type(error).__name__}: {error}"[:500]}


def _largest(arrays: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    pairs = zip(arrays, wanted, strict=True)
    return float(max(np.abs(one - other).max() for one, other in pairs))


def versions() -> dict[str, str]:
    """Returns those of Python and of the systems that are installed."""
    found = {"python": platform.python_version()}
    for name in ("jax", "torch", "drjax", "fedjax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


HEADER = ("work", "system", "form", "replicas", "updates/s", "steps/s", "set-up s", "run s")
MORE = ("rounds", "difference", "moved")


def write_report(found: Sequence[Found], out: Path) -> None:
    """Writes `peers.json` and `peers.md` from the rows so far."""
    about = {key: row[key] for row in found for key in ("device", "versions") if key in row}
    shown = [
        {key: value for key, value in (dict(row) | _speeds(row)).items() if key not in about}
        for row in found
    ]
    save_json({**about, "rows": shown}, out / "peers.json")
    title = ", ".join(f"{key} {value}" for key, value in about.get("versions", {}).items())
    head = (*HEADER, *MORE)
    lines = [f"# {about.get('device', 'no device')}, {title}", "", markdown_line(head)]
    lines.append(markdown_line(["---"] * len(head)))
    works = sorted({row["work"] for row in shown})
    lines += [_line(row) for name in works for row in shown if row["work"] == name]
    text = "\n".join([*lines, ""])
    write_aside(out / "peers.md", lambda path: path.write_text(text))


def _speeds(row: Found) -> dict[str, float]:
    if "error" in row:
        return {}
    names = {"updates/s": "updates", "steps/s": "steps"}
    return {name: row[key] / row["seconds"] for name, key in names.items()}


def _line(row: Found) -> str:
    first = [row["work"], row["group"], row["variant"], str(max(1, row["size"]))]
    if "error" in row:
        error = row["error"].splitlines()[0].replace("|", "/")[:120]
        return markdown_line([*first, error, *[""] * (len(HEADER) + len(MORE) - len(first) - 1)])
    speeds = [format(row[name], ",.0f" if row[name] >= 100 else ".3g") for name in HEADER[4:6]]
    times = [format(row[name], ".3g") for name in ("setup_seconds", "seconds")]
    ends = [format(row[name], ".1e") if name in row else "" for name in MORE[1:]]
    return markdown_line([*first, *speeds, *times, str(row["num_rounds"]), *ends])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what is left, and writes the tables."""
    parser = accelerator.options(MODULE, budget=280, limit=140)
    given = parser.parse_args(arguments)
    sizes = TINY if given.tiny else FULL
    every = list(rows(sizes))
    accelerator.carry_out(MODULE, given, every, sizes, measure, write_report, report_each=True)


if __name__ == "__main__":
    main()
