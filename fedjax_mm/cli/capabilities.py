"""The capabilities that `fedjax-mm bench capabilities` times, each added to federated averaging.

In every row all clients train in every round, so that rows differ only in the added part.
"""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_mm import (
    asynchrony,
    availability,
    compression,
    optimizers,
    privacy,
    robust,
    schedules,
    tasks,
    topologies,
)
from fedjax_mm.algorithms.afl import afl
from fedjax_mm.algorithms.apfl import apfl
from fedjax_mm.algorithms.attackers import attacked, noisy
from fedjax_mm.algorithms.ditto import ditto
from fedjax_mm.algorithms.fedavg import fedavg
from fedjax_mm.algorithms.feddyn import feddyn
from fedjax_mm.algorithms.fednova import fednova
from fedjax_mm.algorithms.fedprox import fedprox
from fedjax_mm.algorithms.gradient_tracking import gradient_tracking
from fedjax_mm.algorithms.maxfl import maxfl
from fedjax_mm.algorithms.mifa import mifa
from fedjax_mm.algorithms.moon import moon
from fedjax_mm.algorithms.mwfed import mwfed
from fedjax_mm.algorithms.perfedavg import perfedavg
from fedjax_mm.algorithms.pfedme import pfedme
from fedjax_mm.algorithms.prsgd import prsgd
from fedjax_mm.algorithms.qffl import qffl
from fedjax_mm.algorithms.reporting import reporting
from fedjax_mm.algorithms.scaffold import scaffold
from fedjax_mm.algorithms.sharing import personal
from fedjax_mm.algorithms.stalevr import stalevr
from fedjax_mm.assignments.appealing import appealing
from fedjax_mm.assignments.bandits import bandit
from fedjax_mm.assignments.clusters import cfl, ifca, soft_clusters
from fedjax_mm.assignments.fairness import fedfair
from fedjax_mm.assignments.informed import oort, power_of_choice
from fedjax_mm.assignments.partitions import (
    fedcluster,
    full_participation,
    mfa_rand,
    mfa_rr,
    sequential,
)
from fedjax_mm.assignments.peers import edges, peers
from fedjax_mm.assignments.rotating import dma_fl, mdh
from fedjax_mm.assignments.scheduling import scheduled
from fedjax_mm.assignments.variance_reduced import variance_reduced
from fedjax_mm.base import Algorithm, Assignment, Task
from fedjax_mm.cli.workloads import WORKLOADS, LearningWorkload
from fedjax_mm.local import LocalSGD, local_sgd
from fedjax_mm.sweeps.grid import Setup
from fedjax_mm.tasks.classification import classification

Kind = Literal[
    "method",
    "server optimizer",
    "schedule",
    "task",
    "wrapper",
    "compressor",
    "rule",
    "attack",
    "assignment",
    "availability",
    "asynchrony",
]
Operation = Literal["sort", "krum", "top-k"]
"""What NumPy and PyTorch do for a row; see `costs.OPERATIONS`."""

BASELINE = "fedavg"


class Problem:
    """A workload in which all clients train in every round.

    Attributes:
      workload: the model, the clients and their local training.
      num_clients: N.
      attackers: the number of clients that attack, and that rules tolerate.
    """

    def __init__(self, workload: LearningWorkload) -> None:
        """Limits the clients to those of a round."""
        self.workload = workload._replace(num_clients=workload.cohort_size)
        self.num_clients = workload.cohort_size
        self.attackers = self.num_clients // 10

    @cached_property
    def task(self) -> Any:
        """The classifier."""
        return classification(self.workload.data(), self.workload.model.module())

    @cached_property
    def demanding(self) -> Task:
        """The workload with thresholds that models nearly always meet."""
        return tasks.requiring(self.task, jnp.full(self.num_clients, 1e3))

    @property
    def attacks(self) -> Any:
        """Which clients attack."""
        return np.arange(self.num_clients) < self.attackers

    @property
    def steps(self) -> int:
        """The number of local steps."""
        steps = self.workload.num_steps
        return 1 if steps is None else steps

    def local(self, learning_rate: Any = None, **changed: Any) -> LocalSGD:
        """Local training of the workload."""
        rate = self.workload.learning_rate if learning_rate is None else learning_rate
        given = {"steps": self.steps, "batch_size": self.workload.batch_size, **changed}
        return local_sgd(rate, **given)

    @property
    def everybody(self) -> Assignment:
        """One model, which all clients train."""
        return mfa_rand(self.num_clients, 1)

    @property
    def plain(self) -> Algorithm:
        """Federated averaging."""
        return fedavg(self.local())

    @property
    def num_rounds(self) -> int:
        """T, the number of rounds."""
        return self.workload.num_rounds

    def lasting(self, num_rounds: int | None) -> "Problem":
        """The workload with another number of rounds, unless it is None."""
        return (
            self if num_rounds is None else Problem(self.workload._replace(num_rounds=num_rounds))
        )

    @property
    def num_parameters(self) -> int:
        """The number of numbers in an update."""
        model = self.workload.model
        return sum(map(math.prod, model.kernel_shapes)) + sum((*model.channels, *model.widths))

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self.workload.model.widths[-1]

    @cached_property
    def few_examples(self) -> Task:
        """One client with the examples of one batch, which the server of a rule may have."""
        few = self.workload._replace(num_clients=1, num_examples=self.workload.batch_size)
        return classification(few.data(), few.model.module())

    def private(self, local: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> Algorithm:
        """Federated averaging with noise."""
        return privacy.private(
            fedavg(self.local(**local)), clip=1.0, noise_multiplier=1.0, **options
        )

    def sample_size(self) -> Any:
        """Numbers of examples that grow from about half a batch to a batch."""
        rate, size = schedules.inverse_time(10.0, 100.0), self.workload.batch_size
        return schedules.growing_sample_size(
            rate,
            num_examples=size,
            local_steps=self.steps,
            gradient_bound=1.0,
            noise=(0.0, 1.0),
            growth=self.steps * 10.0,
        )

    @property
    def delay(self) -> Any:
        """Random durations of local trainings."""
        return asynchrony.shifted_exponential(self.num_clients)

    def asynchronous(self, **options: Any) -> Any:
        """One job for each client, and a step at every tenth arrival."""
        options = {"delay": self.delay, "reallocate": False, **options}
        n = self.num_clients
        return asynchrony.fedast(n, 1, at_work=n, ratio=min(n, 10), **options)

    def transfer_time(self) -> Any:
        """Durations of devices that compute and send."""
        size = 4.0 * self.num_parameters
        work = self.workload.model.flops() * self.workload.batch_size
        return asynchrony.device_time(
            self.num_clients,
            steps=self.steps,
            flops=work,
            bytes_down=size,
            bytes_up=size,
            speed=1e10,
            down=2e7,
        )

    def with_part(self, part: Any) -> Setup:
        """The parts of the baseline's run, one of which is another one."""
        if isinstance(part, Setup):
            return part
        plain = Setup(self.task, self.plain, self.everybody)
        if isinstance(part, Algorithm):
            return plain._replace(algorithm=part)
        is_choice = isinstance(part, Assignment | asynchrony.Dispatch)
        return plain._replace(assignment=part) if is_choice else plain._replace(tasks=part)


class Capability(NamedTuple):
    """A row of the benchmark.

    Attributes:
      kind: the kind of the added part.
      build: makes the part that differs from the baseline, or all parts of a run.
      operation: the arithmetic that NumPy and PyTorch do in the same shapes, if any.
    """

    kind: Kind
    build: Callable[[Problem], Any]
    operation: Operation | None = None


_METHODS: dict[str, Callable[[Problem], Any]] = {
    BASELINE: lambda p: p.plain,
    "afl": lambda p: afl(p.local(), mixture_rate=0.01),
    "apfl": lambda p: apfl(p.local(), alpha=0.5),
    "ditto": lambda p: ditto(p.local(), lam=0.1),
    "feddyn": lambda p: feddyn(p.local(), alpha=0.1),
    "fednova": lambda p: fednova(p.local()),
    "fedprox": lambda p: fedprox(p.local(), mu=0.1),
    "gradient_tracking": lambda p: gradient_tracking(p.local()),
    "maxfl": lambda p: Setup(p.demanding, maxfl(p.local()), p.everybody),
    "mifa": lambda p: mifa(p.local()),
    "moon": lambda p: moon(p.local(), mu=0.1),
    "mwfed": lambda p: Setup(p.demanding, mwfed(p.local()), p.everybody),
    "perfedavg": lambda p: perfedavg(p.local(), alpha=0.01),
    "pfedme": lambda p: pfedme(p.local(), inner_rate=0.01, lam=1.0),
    "prsgd": lambda p: prsgd(p.local()),
    "qffl": lambda p: qffl(p.local(), q=1.0),
    "scaffold": lambda p: scaffold(p.local()),
    "stalevr": lambda p: Setup(
        p.task, stalevr(p.local()), mfa_rand(p.num_clients, 1, unbiased=True)
    ),
}
_SERVER_OPTIMIZERS: dict[str, Callable[[Problem], Any]] = {
    "fedadagrad": lambda p: fedavg(p.local(), server_optimizer=optimizers.fedadagrad(0.01)),
    "fedadam": lambda p: fedavg(p.local(), server_optimizer=optimizers.fedadam(0.01)),
    "fedyogi": lambda p: fedavg(p.local(), server_optimizer=optimizers.fedyogi(0.01)),
}
_SCHEDULES: dict[str, Callable[[Problem], Any]] = {
    "inverse_time": lambda p: fedavg(p.local(schedules.inverse_time(10.0, 100.0))),
    "per_frame": lambda p: fedavg(
        p.local(schedules.per_frame(schedules.inverse_time(10.0, 100.0), 2))
    ),
    "growing_sample_size": lambda p: fedavg(p.local(batch_size=p.sample_size())),
}
_TASKS: dict[str, Callable[[Problem], Any]] = {
    "requiring": lambda p: p.demanding,
    "attacked": lambda p: attacked(p.task, p.attacks),
    "drifting": lambda p: tasks.drifting(p.task, np.roll(np.arange(p.num_classes), 1), length=10),
}
_WRAPPERS: dict[str, Callable[[Problem], Any]] = {
    "noisy": lambda p: noisy(p.plain, p.attacks),
    "personal": lambda p: personal(p.plain, lambda path: path.endswith("bias")),
    "reporting": lambda p: reporting(p.plain),
    "private": lambda p: p.private(clients_per_round=float(p.num_clients)),
    "private adaptive": lambda p: p.private(
        clients_per_round=float(p.num_clients), adaptive=privacy.AdaptiveClip(count_noise=5.0)
    ),
    "private examples": lambda p: p.private(local={"order": "epochs"}, per="example"),
}
_COMPRESSORS: dict[str, Callable[[Problem], Any]] = {
    "top_k": lambda p: compression.compressed(p.plain, compression.top_k(0.1)),
    "random_k": lambda p: compression.compressed(p.plain, compression.random_k(0.1)),
    "qsgd": lambda p: compression.compressed(p.plain, compression.qsgd(4)),
    "sign": lambda p: compression.compressed(p.plain, compression.sign()),
}
_RULES: dict[str, Callable[[Problem], robust.Rule]] = {
    "mean": lambda p: robust.mean(),
    "median": lambda p: robust.median(),
    "trimmed_mean": lambda p: robust.trimmed_mean(p.attackers),
    "krum": lambda p: robust.krum(p.attackers),
    "multi_krum": lambda p: robust.multi_krum(p.attackers),
    "bulyan": lambda p: robust.bulyan(p.attackers),
    "geometric_median": lambda p: robust.geometric_median(),
    "centered_clipping": lambda p: robust.centered_clipping(1.0),
    "fltrust": lambda p: robust.fltrust(p.few_examples),
    "bucketing": lambda p: robust.bucketing(robust.median(), 2),
    "nearest_neighbor_mixing": lambda p: robust.nearest_neighbor_mixing(
        robust.median(), p.attackers
    ),
}
_ATTACKS: dict[str, Callable[[Problem], robust.Attack]] = {
    "sign_flip": lambda p: robust.sign_flip(),
    "scaling": lambda p: robust.scaling(-2.0),
    "gaussian": lambda p: robust.gaussian(0.1),
    "alie": lambda p: robust.alie(1.5),
    "ipm": lambda p: robust.ipm(0.5),
}
_ASSIGNMENTS: dict[str, Callable[[Problem], Any]] = {
    "full_participation": lambda p: full_participation(p.num_clients),
    "mfa_rand": lambda p: mfa_rand(p.num_clients, 2),
    "mfa_rr": lambda p: mfa_rr(p.num_clients, 2),
    "fedcluster": lambda p: fedcluster(p.num_clients, 1),
    "sequential": lambda p: sequential(p.num_clients, 2, rounds_per_model=3),
    "appealing": lambda p: Setup(
        p.demanding, p.plain, appealing(p.everybody, cohort_size=p.num_clients)
    ),
    "bandit": lambda p: bandit(p.num_clients, 2, cohort_size=p.num_clients),
    "ifca": lambda p: ifca(p.num_clients, 2),
    "soft_clusters": lambda p: soft_clusters(p.num_clients, 2, temperature=1.0),
    "cfl": lambda p: Setup(
        p.task, reporting(p.plain), cfl(p.num_clients, 2, eps_1=0.01, eps_2=1e3)
    ),
    "edges": lambda p: edges(p.num_clients, 2),
    "peers": lambda p: peers(p.num_clients),
    "mixing": lambda p: topologies.mixing(edges(p.num_clients, 2), topologies.ring()),
    "share": lambda p: topologies.share(edges(p.num_clients, 2), lambda path: "bias" in path),
    "merging": lambda p: topologies.merging(ifca(p.num_clients, 2), 1e-6),
    "fedfair": lambda p: fedfair(p.num_clients, 2),
    "power_of_choice": lambda p: power_of_choice(
        p.num_clients, 2, cohort_size=p.num_clients, candidates=p.num_clients // 2
    ),
    "oort": lambda p: oort(p.num_clients, 2, cohort_size=p.num_clients),
    "mdh": lambda p: mdh(
        p.num_clients, 2, cohort_size=p.num_clients, heterogeneous=[True, False], from_round=2
    ),
    "dma_fl": lambda p: dma_fl(p.num_clients, 2, cohort_size=p.num_clients),
    "scheduled": lambda p: scheduled(p.num_clients, 2, demand=p.num_clients // 2),
    "variance_reduced": lambda p: variance_reduced(
        p.num_clients, 2, expected_trainings=p.num_clients
    ),
    "variance_reduced update": lambda p: variance_reduced(
        p.num_clients, 2, expected_trainings=p.num_clients, by="update"
    ),
    "bods": lambda p: asynchrony.bods(p.num_clients, 2, cohort_size=p.num_clients // 2),
}
_AVAILABILITY: dict[str, Callable[[Problem], Any]] = {
    "bernoulli": lambda p: availability.available(p.everybody, availability.bernoulli(0.99)),
    "bernoulli replaced": lambda p: availability.available(
        p.everybody, availability.bernoulli(0.99), when_absent="replace"
    ),
    "markov": lambda p: availability.available(p.everybody, availability.markov(0.99, 0.01)),
    "cyclic": lambda p: availability.available(p.everybody, availability.cyclic(1)),
    "timetable": lambda p: availability.available(
        p.everybody, availability.timetable([[(0.0, 9.0)]] * p.num_clients, period=9.0)
    ),
    "dropping": lambda p: availability.dropping(p.everybody, 0.01),
    "finishing": lambda p: availability.finishing(mfa_rand(p.num_clients, 2), "loss", at_most=-1.0),
    "arriving": lambda p: availability.arriving(mfa_rand(p.num_clients, 2), [0, 1]),
}
_ASYNCHRONY: dict[str, Callable[[Problem], Any]] = {
    "on_clock": lambda p: asynchrony.on_clock(p.everybody, p.delay),
    "fedast": lambda p: p.asynchronous(),
    "fedast reallocated": lambda p: p.asynchronous(reallocate=True),
    "device_time": lambda p: p.asynchronous(delay=p.transfer_time()),
    "polynomial": lambda p: p.asynchronous(weight=asynchrony.polynomial(0.5)),
    "hinge": lambda p: p.asynchronous(weight=asynchrony.hinge()),
}
_OPERATIONS: dict[str, Operation] = {
    "median": "sort",
    "trimmed_mean": "sort",
    "krum": "krum",
    "multi_krum": "krum",
    "top_k": "top-k",
}


def _ruled(rule: Callable[[Problem], robust.Rule]) -> Callable[[Problem], Algorithm]:
    return lambda p: robust.robust(p.plain, rule(p))


def _attacking(attack: Callable[[Problem], robust.Attack]) -> Callable[[Problem], Algorithm]:
    return lambda p: robust.attacking(robust.robust(p.plain, robust.mean()), p.attacks, attack(p))


_KINDS: dict[Kind, Mapping[str, Callable[[Problem], Any]]] = {
    "method": _METHODS,
    "server optimizer": _SERVER_OPTIMIZERS,
    "schedule": _SCHEDULES,
    "task": _TASKS,
    "wrapper": _WRAPPERS,
    "compressor": _COMPRESSORS,
    "rule": {name: _ruled(rule) for name, rule in _RULES.items()},
    "attack": {name: _attacking(attack) for name, attack in _ATTACKS.items()},
    "assignment": _ASSIGNMENTS,
    "availability": _AVAILABILITY,
    "asynchrony": _ASYNCHRONY,
}
CAPABILITIES = {
    name: Capability(kind, build, _OPERATIONS.get(name))
    for kind, rows in _KINDS.items()
    for name, build in rows.items()
}
"""All rows by name, of which the baseline is the first."""

ABSENT = {("W2", "moon"): "logistic regression has no features"}
"""Rows that a workload cannot have, with the reason."""

UNTIMED = {
    "averaging": "builds a method from a client function of yours",
    "backdoored": "needs images, and costs what reading a batch costs",
    "low_rank": "trains other parameters, the factors of matrices",
    "with_clients": "costs time at records only",
    "with_metrics": "costs time at records only",
}
"""Public factories of parts that have no row, with the reason."""


def problems() -> dict[str, Problem]:
    """The workloads, with the rounds that federated averaging computes in a tenth of a second."""
    found: Any = {name: WORKLOADS[name] for name in ("W2", "W3")}
    rounds = {"W2": 200, "W3": 4}
    return {name: Problem(each._replace(num_rounds=rounds[name])) for name, each in found.items()}
