"""Bytes that devices exchange in a round, and the memory of each, if they share out the clients.

`python -m benchmarks.traffic FILE.json` compiles one round for 1 to 32 host devices, without
running it, and counts the collectives of the compiled program. It writes a JSON file, whose rows it
does not compute again, and prints them in Markdown. Nothing is timed.
"""

import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from fedjax_mm import apfl, fedavg, init, local_sgd, mfa_rand, mifa, scaffold
from fedjax_mm.base import Algorithm, Task
from fedjax_mm.cli.workloads import PERCEPTRON, LearningWorkload
from fedjax_mm.simulator.preflight import run_of
from fedjax_mm.simulator.round import State
from fedjax_mm.simulator.stacks import StackState
from fedjax_mm.sweeps.devices import layout, use_cpu_devices
from fedjax_mm.sweeps.plan import memory_of
from fedjax_mm.tasks import classification

DEVICES = (1, 2, 4, 32)
SGD = local_sgd(0.1, steps=5, batch_size=10)
ALGORITHMS = {
    "FedAvg": fedavg(SGD),
    "FedAvg, clients keep their momentum": fedavg(
        local_sgd(0.1, steps=5, batch_size=10, momentum=0.9, keeps="client")
    ),
    "SCAFFOLD": scaffold(SGD),
    "APFL": apfl(SGD, alpha=0.5),
    "MIFA": mifa(SGD),
}
WORKLOAD = LearningWorkload("W3", PERCEPTRON, 1000, 10, 64, 5, 10)
KINDS = ("all-gather", "all-to-all", "all-reduce", "reduce-scatter", "collective-permute")


class Collective(NamedTuple):
    """A collective of a program, and the bytes of its result on one device in all executions."""

    kind: str
    num_bytes: int

    def sent(self, num_devices: int) -> float:
        """The bytes that one device sends, and receives, in the usual ring algorithms."""
        share = (num_devices - 1) / num_devices
        match self.kind:
            case "all-reduce":
                return 2 * share * self.num_bytes
            case "reduce-scatter":
                return (num_devices - 1) * self.num_bytes
            case "collective-permute":
                return self.num_bytes
        return share * self.num_bytes


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program, given its text.

    Those in loops are multiplied by the number of iterations, which XLA writes into the text.

    Raises:
      ValueError: if a loop with collectives has an unknown number of iterations.
    """
    found = re.findall(r"^(ENTRY )?%?([\w.-]+) \(.*?\{$(.*?)^\}$", text, re.MULTILINE | re.DOTALL)
    bodies = {name: body for _, name, body in found}
    (entry,) = (name for is_entry, name, _ in found if is_entry)

    def of_body(name: str) -> Iterator[Collective]:
        pattern = r"^ +(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\((.*)$"
        for shapes, operation, rest in re.findall(pattern, bodies[name], re.MULTILINE):
            kind = operation.removesuffix("-start")
            if kind in KINDS:
                yield Collective(kind, _num_bytes(shapes))
            inner = [
                each
                for called in re.findall(
                    r"(?:body|calls|true_computation|false_computation)=%?([\w.-]+)", rest
                )
                + (re.findall(r"to_apply=%?([\w.-]+)", rest) if operation == "call" else [])
                + re.findall(r"%?([\w.-]+)", "".join(re.findall(r"branch_comp.*?\{(.*?)\}", rest)))
                for each in of_body(called)
            ]
            times = re.findall(r'known_trip_count":\{"n":"(\d+)"', rest)
            if operation == "while" and inner and not times:
                raise ValueError(f"the loop {rest[:200]} has an unknown number of iterations")
            number = int(times[0]) if operation == "while" and times else 1
            yield from (each._replace(num_bytes=each.num_bytes * number) for each in inner)

    return list(of_body(entry))


def _num_bytes(shapes: str) -> int:
    """Bytes of one array, or of a tuple of arrays, in XLA's notation."""
    total = 0
    for name, bits, sizes in re.findall(r"\b(pred|bf|[fsuc])(\d*)[a-z\d]*\[([\d,]*)\]", shapes):
        width = 1 if name == "pred" else int(bits) // 8
        total += width * math.prod(map(int, filter(None, sizes.split(","))))
    return total


def compile_round(
    task: Task, algorithm: Algorithm, num_clients: int, cohort_size: int, devices: Sequence[Any]
) -> Any:
    """Compiles one round of one model whose clients are split over devices."""
    assignment = mfa_rand(num_clients, 1, cohort_size=cohort_size)
    where = layout(1, devices, "clients")
    axis, whole, split = where.client_axis, PartitionSpec(), PartitionSpec(None, "clients")

    def one_round(task: Task, state: State) -> State:
        run = run_of(task, algorithm, assignment, None, "vmap", axis)
        return run.rounds(state, 1)[0]

    state = jax.eval_shape(lambda task: init(0, task, algorithm, assignment), task)
    (models,) = state.models
    padded = -(-num_clients // len(devices)) * len(devices)
    clients = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((1, padded, *x.shape[2:]), x.dtype), models.clients
    )
    models = StackState(models.params, models.server, clients, models.models)
    specs = State(whole, whole, (StackState(whole, whole, split, models.models),), whole)
    program = jax.shard_map(
        one_round, mesh=where.mesh, in_specs=(whole, specs), out_specs=specs, check_vma=False
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), task)
    given = shapes, state._replace(models=(models,))
    return jax.jit(program, donate_argnums=1).lower(*given).compile()


def measure(name: str, num_devices: int) -> dict[str, Any]:
    """A row of the table."""
    task = classification(WORKLOAD.data(), WORKLOAD.model.module())
    sizes = WORKLOAD.num_clients, WORKLOAD.cohort_size
    compiled = compile_round(task, ALGORITHMS[name], *sizes, jax.devices()[:num_devices])
    sent = dict.fromkeys(KINDS, 0.0)
    for each in collectives(compiled.as_text()):
        sent[each.kind] += each.sent(num_devices)
    params = jax.eval_shape(task.init, jax.random.key(0))
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "algorithm": name,
        "clients": WORKLOAD.num_clients,
        "cohort": WORKLOAD.cohort_size,
        "devices": num_devices,
        "sent": {kind: round(value) for kind, value in sent.items() if value},
        "memory": round(memory_of(compiled)),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown, in MiB of each device."""

    def mib(num_bytes: float) -> str:
        return f"{num_bytes / 2**20:,.2f}"

    kinds = [kind for kind in KINDS if any(kind in row["sent"] for row in rows)]
    lines = [
        f"| method | devices | memory | sent | {' | '.join(kinds)} |",
        f"|---|---:|---:|---:|{'---:|' * len(kinds)}",
    ]
    for row in rows:
        sent = [mib(row["sent"][kind]) if kind in row["sent"] else "" for kind in kinds]
        numbers = row["devices"], mib(row["memory"]), mib(sum(row["sent"].values())), *sent
        lines.append(f"| {row['algorithm']} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def main(path: str) -> None:
    """Writes the rows to a JSON file, and prints them in Markdown."""
    use_cpu_devices(max(DEVICES))
    file = Path(path)
    rows = json.loads(file.read_text()) if file.exists() else []
    known = {(row["algorithm"], row["devices"]): row for row in rows}
    for each in itertools.product(ALGORITHMS, DEVICES):
        known[each] = known.get(each) or measure(*each)
        file.write_text(json.dumps(list(known.values()), indent=1) + "\n")
    print(table([known[each] for each in itertools.product(ALGORITHMS, DEVICES)]))


if __name__ == "__main__":
    main(sys.argv[1])
