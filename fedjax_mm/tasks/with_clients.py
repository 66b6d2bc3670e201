"""Metrics of every client, and how they are distributed over clients."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

import jax.numpy as jnp
from annotated_types import Interval
from jaxtyping import Array, Float

from fedjax_mm.base import MeasuredTask, Metrics, Params, Task, needs
from fedjax_mm.checks.annotations import check_argument, checked
from fedjax_mm.checks.instances import check_task
from fedjax_mm.checks.values import described
from fedjax_mm.tasks.supervised import Supervised
from fedjax_mm.tasks.view import TestedTask, View, client_losses, client_weights
from fedjax_mm.tasks.with_metrics import WithMetrics, with_metrics

ClientMetric: TypeAlias = Literal["loss", "train_accuracy", "test_loss", "test_accuracy"]
"""A metric of one client: over its training examples, or over its own test examples."""

CLIENT_METRICS: tuple[ClientMetric, ...] = get_args(ClientMetric)


class ClientRecord(NamedTuple):
    """Metrics over clients that `with_clients` records.

    Attributes:
      metrics: their names.
      share: q, the share of clients among the worst and the best.
      weighted: whether clients are weighted by their numbers of examples.
      each: whether every client's number is recorded, too.
    """

    metrics: tuple[ClientMetric, ...]
    share: float
    weighted: bool
    each: bool

    @property
    def divides(self) -> bool:
        """True, because it reads examples through `Supervised.evaluate`."""
        return True

    @property
    def of_clients(self) -> tuple[str, ...]:
        """Names of the recorded metrics with one number per client."""
        return tuple(f"client_{name}" for name in self.metrics) if self.each else ()

    def __call__(self, task: Task, params: Params) -> Metrics:
        """Metrics over clients of one model."""
        made: Metrics = {}
        for name in self.metrics:
            values = client_values(task, params, name)
            made |= self.summary(task, name, values)
            if self.each:
                made[f"client_{name}"] = values
        return made

    def summary(self, task: Task, name: ClientMetric, values: Any, prefix: str = "") -> Metrics:
        """The fields of `Fairness` by name, given the numbers of all clients."""
        from fedjax_mm.metrics import fairness  # late, because it imports xarray

        found = fairness(
            values,
            share=self.share,
            weights=client_examples(task, name) if self.weighted else None,
            larger_is_better=name.endswith("accuracy"),
        )
        end = "_weighted" if self.weighted else ""
        return {f"{prefix}{name}_{of}{end}": x for of, x in found._asdict().items()}


@checked
def with_clients(
    task: Task,
    metrics: Sequence[ClientMetric],
    *,
    share: Annotated[float, Interval(gt=0, le=1)] = 0.1,
    weighted: bool = False,
    each: bool = True,
) -> WithMetrics:
    """Records metrics of every client, and how they are distributed over clients.

    For each named metric, such as ``test_accuracy``, there are the fields of `Fairness`:
    ``test_accuracy_worst`` is the mean over the worst share of clients. There are also
    ``test_accuracy_mean``, ``..._best``, ``..._variance``, ``..._jain``, ``..._entropy`` and
    ``..._evenness``. With weights, names end in ``_weighted``. Each metric costs one pass over its
    examples at every record. Personal models are measured likewise, see `personal`, with names that
    begin with ``personal_``.

    Args:
      task: any task that provides its clients' losses; apply other wrappers, such as `requiring`,
        first.
      metrics: "loss" is F_k(w) on the client's training examples. "train_accuracy", "test_loss" and
        "test_accuracy" need a task with examples, and the last two test examples of every client.
      share: q, above 0 and at most 1, the share of clients in the worst and the best.
      weighted: whether a client counts as its number of examples, rather than once.
      each: whether to record the number of every client, as ``client_test_accuracy``, with the
        dimension ``client``.

    Raises:
      TypeError: if `metrics` is not a list of names.
      ValueError: if `share` is out of range, a metric is unknown, or the task does not have it.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedavg, mfa_rr, simulate, to_dataset
      >>> from fedjax_mm.tasks import quadratic
      >>> task = with_clients(quadratic(6, 4, mu=0.1), ["loss"], share=0.5)
      >>> _, trace = simulate(0, task, fedavg(0.1, local_steps=5), mfa_rr(6, 2), 20)
      >>> result = to_dataset(trace)
      >>> result.client_loss.dims, result.loss_worst.dims
      (('round', 'model', 'client'), ('round', 'model'))
      >>> bool((result.loss_worst[-1] > result.loss_best[-1]).all())
      True
    """
    needs(check_task(task), MeasuredTask)
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise TypeError(f"metrics is {described(metrics)}; give a list of names, such as ['loss']")
    names = tuple(metrics)
    if not names:
        raise ValueError(f"metrics are empty; give some of {', '.join(CLIENT_METRICS)}")
    for i, name in enumerate(names):
        check_argument(f"metrics[{i}]", name, ClientMetric)
        check_has(task, name)
    record: Any = ClientRecord(names, share, weighted, each)
    return with_metrics(task, record, per_client=record.of_clients)


def check_has(task: Task, metric: str) -> None:
    """Raises `ValueError` if the task's clients do not have a metric."""
    if metric == "loss":
        return
    inside = examples_of(task)
    if inside is None:
        raise ValueError(
            f"{type(task).__name__} has no {metric!r} of clients, because it has no labelled "
            "examples; record 'loss'"
        )
    name = metric.partition("_")[2]
    means = [key for key, score in getattr(inside, "scores", ()) if score.is_mean]
    if isinstance(inside, Supervised) and name not in ("loss", *means):
        raise ValueError(
            f"the task has no {name}, so clients have no {metric!r}; record 'test_loss'"
        )
    if metric.startswith("test") and not has_own_tests(task):
        raise ValueError(
            f"clients have no {metric!r}, because one pool of test examples stands for all; give "
            "every client its own, as by federate(..., test_fraction=0.2)"
        )


def measures_clients(task: Any) -> bool:
    """Whether the task inside all views provides its clients' losses."""
    while isinstance(task, View):
        task = task.task
    return isinstance(task, MeasuredTask)


def examples_of(task: Any) -> TestedTask | None:
    """The task inside all views, if its clients have examples, or else None."""
    while isinstance(task, View):
        task = task.task
    return task if isinstance(task, TestedTask) else None


def has_own_tests(task: Task) -> bool:
    """Whether every client has test examples of its own."""
    inside = examples_of(task)
    return inside is not None and inside.test.num_clients == inside.num_clients


def client_values(task: Task, params: Params, metric: ClientMetric) -> Float[Array, " clients"]:
    """A metric of every client that may train, in one pass over its examples."""
    if metric == "loss":
        return client_losses(task, params)
    inside: Any = examples_of(task)
    part, _, name = metric.rpartition("_")
    first = None if task.num_clients == inside.num_clients else task.num_clients
    data = inside.test if part == "test" else inside.train
    values: Array = inside.evaluate(params, data, per_client=True, num_clients=first)[name]
    return values


def client_examples(task: Task, metric: ClientMetric) -> Float[Array, " clients"]:
    """The number of every client's examples that a metric is about."""
    inside = examples_of(task)
    if inside is None or metric == "loss":
        return client_weights(task)
    counts = inside.test.counts if metric.startswith("test") else inside.train.counts
    return jnp.asarray(counts, float)[: task.num_clients]


def record_of(task: Any) -> ClientRecord | None:
    """The metrics over clients that a task records, or None."""
    while isinstance(task, View):
        if isinstance(task, WithMetrics) and isinstance(task.own, ClientRecord):
            return task.own
        task = task.task
    return None
