"""Drift, in which clients' labels or examples change over rounds."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedjax_mm.base import Index, Metrics, Params, Round, Scalar
from fedjax_mm.base.calls import in_short
from fedjax_mm.checks.annotations import NonNegative, Positive, Share, checked
from fedjax_mm.checks.instances import check_instance, key_of
from fedjax_mm.data.arrays import check_labels, is_known, plain_array
from fedjax_mm.data.clients import ClientData
from fedjax_mm.tasks.supervised import Supervised
from fedjax_mm.tasks.view import View


class Times(NamedTuple):
    """The timing of a drift in rounds, as in `drifting`."""

    start: Any
    length: Any
    period: Any  # or None

    def share(self, round: Round) -> Float[Array, ""]:
        """s(t), which rises from 0 before the drift to 1 after it."""
        since = jnp.asarray(round, float) - self.start
        phase = since if self.period is None else since % self.period
        moved = self._risen(phase)
        if self.period is not None:
            moved = moved - self._risen(phase - self.period / 2)
        return jnp.where(since < 0, 0, moved)

    def _risen(self, since: Scalar) -> Float[Array, ""]:
        return jnp.clip((since + 1) / self.length, 0, 1)


class Origin(NamedTuple):
    """The data before any drift, for training or for testing.

    Attributes:
      labels: the labels of all examples.
      draws: ``float32[examples]``, uniform. An example's label changes once ``draw < s(t)``. None
        means no concept drift.
      store: the store of all clients, sorted by client and label; None means no label shift.
    """

    labels: Array
    draws: Array | None
    store: ClientData | None


@checked
def drifting(
    task: Supervised,
    concept: Any = None,
    *,
    window: Share | None = None,
    start: NonNegative = 1,
    length: Positive = 1,
    period: Positive | None = None,
    seed: Any = 0,
) -> "Drifting":
    """Makes a task's training and test data drift over rounds.

    The drift progresses from s(t) = 0 to 1. Before round `start`, s(t) is 0; then it rises by
    ``1 / length`` per round, so a length of 1 makes the drift abrupt. With a `period` the drift
    recurs. Half a period after `start`, s(t) falls at the same rate, and so on. Training, losses
    and metrics of round t all use the data of round t.

    *Concept drift* changes P(y | x): a fraction s(t) of all examples, in a fixed random order, has
    labels ``concept[y]`` instead of y. A rotation, ``np.roll(np.arange(C), 1)``, also rotates
    clients' label distributions.

    *Label shift* changes P(y) but not P(x | y): each client has a window over its examples, which
    moves from its smallest labels to its largest. With a client's n_k examples sorted by label, the
    window contains the n examples after the first ``s(t) (n_k - n)``, rounded, where n is ``window
    n_k``, rounded. Weighted means use n as n_k. A client with a single label does not shift.
    Test examples shift in the same way if every client has its own.

    Args:
      task: a task from `classification`; apply other wrappers, such as `requiring`, afterwards.
      concept: the new label of each class, ``int[C]``, which may be traced; None means no concept
        drift.
      window: the fraction of a client's examples in its window, which must be static. None means no
        label shift.
      start: the first round of the drift. This and the numbers below may be traced.
      length: the number of rounds until the drift is complete; at most half of `period`.
      period: the number of rounds after which the drift repeats; None means it does not recur.
      seed: the seed of the order in which examples change, an integer or a key.

    Raises:
      TypeError: if the task is not from `classification`.
      ValueError: if neither `concept` nor `window` is given, `concept` has too few labels or labels
        out of range, a number is out of range, or `length` is longer than half a period.

    Example:
      >>> from fedjax_mm import fedavg, mfa_rr, simulate
      >>> from fedjax_mm.data import synthetic
      >>> from fedjax_mm.tasks import LogisticRegression, classification
      >>> plain = classification(synthetic(6, dim=4, num_classes=3), LogisticRegression(3))
      >>> task = drifting(plain, [1, 2, 0], start=11)
      >>> algorithm = fedavg(0.1, local_steps=5)
      >>> _, trace = simulate(0, task, algorithm, mfa_rr(6, 1), 20)
      >>> bool(trace.metrics["loss"][11, 0] > 1.1 * trace.metrics["loss"][10, 0])
      True
    """
    check_instance("task", task, Supervised, "give one of classification, and wrap the result")
    if not task.has_labels:
        raise ValueError(
            "the targets are no labels; give one of classification, and wrap the result"
        )
    if concept is None and window is None:
        raise ValueError("the data do not drift; give a concept, such as [1, 2, 0], or a window")
    if window == 0:
        raise ValueError("window is 0; each client needs examples: give more, up to 1")
    is_known_period = not any(isinstance(x, jax.core.Tracer) for x in (length, period))
    if period is not None and is_known_period and 2 * length > period:
        raise ValueError(f"length is {length}; it must be at most half of the period, {period}")
    times = Times(*(None if x is None else jnp.asarray(x, float) for x in (start, length, period)))
    if concept is not None:
        concept = _checked_concept(concept, task)
    stores, origins = [], []
    for i, data in enumerate((task.train, task.test)):
        _, labels = data.examples
        draws, store = None, None
        if concept is not None:
            key = jax.random.fold_in(key_of(seed, "seed"), i)
            draws = jax.random.uniform(key, (len(labels),), jnp.float32)
        if window is not None and data.num_clients == task.num_clients:
            store = _by_label(data, labels if task.column is None else labels[:, task.column])
            data = _windows(store, window)
        stores.append(data)
        origins.append(Origin(jnp.asarray(labels), draws, store))
    now = dataclasses.replace(task, train=stores[0], test=stores[1])
    made = Drifting(now, task.num_clients, times, concept, tuple(origins))
    return made.at(0)  # makes new labels, because models with different drifts must not share them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drifting(View):
    """A classification task on one round's data, built by `drifting`.

    Attributes:
      times: the timing of the drift.
      concept: the new label of each class, or None.
      origins: the training data and the test data before any drift.
    """

    times: Times
    concept: Array | None
    origins: tuple[Origin, ...]

    __repr__ = in_short

    @property
    def train(self) -> ClientData:
        """Training examples of the round."""
        data: ClientData = self.task.train
        return data

    @property
    def test(self) -> ClientData:
        """Test examples of the round."""
        data: ClientData = self.task.test
        return data

    def at(self, round: Round) -> "Drifting":
        """The task of round t."""
        share = self.times.share(round)
        train = self._at(share, self.train, self.origins[0])
        test = self._at(share, self.test, self.origins[1])
        return dataclasses.replace(
            self, task=dataclasses.replace(self.task, train=train, test=test)
        )

    def client_metrics(self, params: Params, client: Index, data: ClientData) -> Metrics:
        """Loss and accuracy of one client."""
        metrics: Metrics = self.task.client_metrics(params, client, data)
        return metrics

    def evaluate(self, params: Params, data: ClientData, **options: Any) -> Metrics:
        """Loss and accuracy over all examples."""
        metrics: Metrics = self.task.evaluate(params, data, **options)
        return metrics

    def _at(self, share: Float[Array, ""], data: ClientData, origin: Origin) -> ClientData:
        if origin.draws is not None and self.concept is not None:
            # Compare in float32, so that the same examples change with or without x64.
            changes = origin.draws < share.astype(jnp.float32)
            changes = changes.reshape(-1, *[1] * (origin.labels.ndim - 1))
            labels = jnp.where(changes, self.concept[origin.labels], origin.labels)
            data = dataclasses.replace(data, examples=(data.examples[0], labels))
        whole, places = origin.store, jnp.arange(data.num_places, dtype=jnp.int32)
        if whole is None or whole.order is None:
            return data
        behind = jnp.round(share * (whole.counts - data.counts)).astype(jnp.int32)
        owner = jnp.searchsorted(data.offsets, places, side="right") - 1
        source = (whole.offsets + behind - data.offsets)[owner] + places
        # Clamp places after the last window, because they are unused.
        return dataclasses.replace(data, order=whole.order[jnp.minimum(source, len(places) - 1)])


def _checked_concept(concept: Any, task: Supervised) -> Int[Array, " classes"]:
    if isinstance(concept, jax.Array) and not is_known(concept):
        return concept.astype(jnp.int32)
    values = plain_array("concept", concept, "the new label of each class, 0 ... C - 1")
    if values.ndim != 1 or not len(values):
        raise ValueError(f"concept has shape {values.shape}; give the new label of each class")
    check_labels("concept", values, len(values))
    for data in (task.train, task.test):
        labels = data.examples[1]
        if is_known(labels) and np.max(labels) >= len(values):
            raise ValueError(
                f"concept has {len(values)} labels, but the data have a label {np.max(labels)}; "
                "give the new label of each class"
            )
    return jnp.asarray(values, jnp.int32)


def _by_label(data: ClientData, labels: Array) -> ClientData:
    """Sorts each client's places by label."""
    places = jnp.arange(data.num_places, dtype=jnp.int32)
    rows = places if data.order is None else data.order
    owner = jnp.searchsorted(data.offsets, places, side="right")
    # Keep the places after the last client's at the end.
    owner = jnp.where(places < data.offsets[-1] + data.counts[-1], owner, len(data.counts) + 1)
    order = jnp.lexsort((jnp.asarray(labels)[rows], owner)).astype(jnp.int32)
    return dataclasses.replace(data, order=rows[order])


def _windows(store: ClientData, window: float) -> ClientData:
    """Restricts the store to a window of each client's places."""
    least, most = (max(1, round(window * n)) for n in (store.min_count, store.max_count))
    # Clip to the static bounds, because the float32 product may round differently.
    counts = jnp.clip(jnp.round(window * store.counts), least, most).astype(jnp.int32)
    return dataclasses.replace(
        store,
        offsets=jnp.cumsum(counts, dtype=jnp.int32) - counts,
        counts=counts,
        min_count=least,
        max_count=most,
        num_examples=min(store.num_examples, store.num_clients * most),
    )
