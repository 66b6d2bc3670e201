"""Clients' requirements on a model: thresholds, appeal, fine-tuning and unseen clients."""

import dataclasses
from functools import partial
from operator import itemgetter
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedjax_mm.base import (
    Batching,
    ClientContext,
    Index,
    MeasuredTask,
    Params,
    Scalar,
    Steps,
    Task,
    keys,
    needs,
)
from fedjax_mm.base.calls import in_short
from fedjax_mm.base.chunks import chunk_size_of
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import (
    Count,
    CountOrZero,
    Positive,
    TracedCount,
    check_argument,
    checked,
)
from fedjax_mm.checks.instances import check_task, key_of
from fedjax_mm.local import train_locally
from fedjax_mm.tasks.view import TestedTask, View, client_losses

_TUNED_AT_ONCE = 16  # clients to fine-tune at a time


class OwnModels(NamedTuple):
    """Quality of the clients' own models, w_hat_k.

    Attributes:
      threshold: rho_k = F_k(w_hat_k), on training examples.
      accuracy: the accuracy on test examples, if there are any.
    """

    threshold: Float[Array, "*clients"]
    accuracy: Float[Array, "*clients"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tuning:
    """SGD settings for training a client's own model, or fine-tuning a given one, on its examples.

    Attributes:
      learning_rate: the learning rate, which may be traced.
      num_steps: the number of SGD steps, which may be traced.
      batch_size: the number of examples per step, drawn independently; None means all.
      limit: the number of these examples to use, if not all; it may be traced.
    """

    learning_rate: Positive
    num_steps: TracedCount
    batch_size: Count | None = dataclasses.field(default=None, metadata={"static": True})
    limit: Steps | None = None

    __repr__ = in_short

    def __post_init__(self) -> None:
        """Raises `ValueError` if a number is not positive."""
        # Check only numbers, because JAX rebuilds the dataclass with other leaves, such as None.
        if type(self.learning_rate) in (int, float):
            check_argument("learning_rate", self.learning_rate, Positive)
        if type(self.num_steps) in (int, float):
            check_argument("num_steps", self.num_steps, TracedCount)
        check_argument("batch_size", self.batch_size, Count | None)

    def of_client(self, rng_key: PRNGKeyArray, task: Task, client: Index, params: Params) -> Params:
        """Fine-tunes the client's parameters, with an `rng_key` shared by all clients."""
        local = ClientContext(keys.client_key(rng_key, client), 0, task, client, params)
        optimizer, how = optax.sgd(self.learning_rate), Batching(self.batch_size, limit=self.limit)
        return train_locally(local, optimizer, self.num_steps, how)[0]


def own_models(
    rng_key: PRNGKeyArray | int,
    task: Task,
    params: Params | None = None,
    *,
    learning_rate: Scalar,
    num_steps: Steps = 100,
    batch_size: int | None = None,
    model: int | Index = 0,
) -> OwnModels:
    """Trains each client's own model by local SGD from the global model's initial parameters.

    Args:
      rng_key: a key or an integer seed; use the same one in `simulate`.
      task: the learning problem of all clients, including unseen ones.
      params: the initial parameters of one model, if any are passed to `simulate`.
      learning_rate: the learning rate, which may be traced.
      num_steps: the number of local SGD steps, which may be traced.
      batch_size: the number of examples per step, drawn independently; None means all.
      model: the index of the global model, which may be traced.

    Raises:
      ValueError: if a number is not positive, or the task does not provide its clients' losses.

    Example:
      >>> import jax
      >>> from fedjax_mm.tasks import own_models, quadratic
      >>> task, key = quadratic(24, 4, mu=2e-4), jax.random.key(0)
      >>> own_models(key, task, learning_rate=0.1, num_steps=2).threshold.shape
      (24,)

    Reference: Cho et al., section 2.
    """
    tuning = Tuning(learning_rate, num_steps, batch_size)
    measured, rng_key = needs(check_task(task), MeasuredTask), key_of(rng_key)
    (start_key,), size = keys.start_keys(rng_key, jnp.asarray(model)[None]), task.num_clients
    start = jax.tree.map(lambda x: x[None], task.init(start_key))
    start = start if params is None else checks.fit_params(params, start)
    at_once = chunk_size_of("auto", task, start, size) or size
    start = jax.tree.map(itemgetter(0), start)

    def of_client(client: Index) -> OwnModels:
        own = tuning.of_client(keys.preparation_key(start_key), task, client, start)
        values = _measured(measured, own, client)
        return OwnModels(values["train_loss"], values.get("accuracy"))

    return lax.map(of_client, jnp.arange(size), batch_size=at_once)


def _measured(task: MeasuredTask, params: Params, client: Index) -> dict[str, Array]:
    # Compute the loss on training examples, and the metrics on test examples if there are any.
    test = task.client_metrics(params, client, task.test) if isinstance(task, TestedTask) else {}
    return {"train_loss": task.client_loss(params, client)} | test


@checked
def requiring(
    task: Task,
    own: OwnModels | Float[Array, " clients"],
    *,
    num_unseen: CountOrZero = 0,
    tuning: Tuning | None = None,
    participation: Literal["training", "test"] = "training",
) -> "Requiring":
    """Makes a task's clients require a model that is better than their own.

    A model appeals to a client if ``F_k(w) < rho_k`` or, if `participation` is "test", if
    ``f_k(w) < rho_k`` on test examples. Metrics are means over the clients that may train and,
    prefixed by ``unseen_``, means over unseen clients:

    - ``loss`` and ``accuracy`` on the clients' test examples, ``train_loss`` on training examples;
    - ``appeal`` (GM-Appeal), the fraction of clients with ``f_k(w) < rho_k`` on test examples, and
      ``train_appeal``, on training examples;
    - ``preferred_accuracy``, the accuracy of the model if it appeals, or else of the client's own.

    A task without test examples has ``train_loss``, ``train_appeal`` and its own metrics.

    Args:
      task: any task that provides its clients' losses.
      own: the result of `own_models` for all clients, including unseen ones; or only the thresholds
        rho_k, in which case ``preferred_accuracy`` is left out.
      num_unseen: the number of clients that never train, counted from the last; the assignment
        covers the others.
      tuning: the local steps with which each client fine-tunes the model before evaluation.
      participation: the examples whose loss decides whether a client participates.

    Raises:
      ValueError: if sizes do not fit, the task does not provide its clients' losses, or it has no
        test examples for `participation="test"`.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedavg, full_participation, simulate
      >>> from fedjax_mm.tasks import own_models, quadratic, requiring
      >>> task, key = quadratic(24, 4, mu=2e-4), jax.random.key(0)
      >>> own = own_models(key, task, learning_rate=0.1, num_steps=2)
      >>> algorithm, everybody = fedavg(0.1, local_steps=5), full_participation(24)
      >>> _, trace = simulate(key, requiring(task, own), algorithm, everybody, 10)
      >>> trace.metrics["train_appeal"].shape  # records, models
      (11, 1)

    Reference: Cho et al., sections 2 and 4, and Table 3 for fine-tuning.
    """
    needs(check_task(task), MeasuredTask)
    models = own if isinstance(own, OwnModels) else OwnModels(own)
    models = jax.tree.map(lambda values: jnp.asarray(values, float), models)
    checks.check_per_client("what the clients require", models, task.num_clients)
    if isinstance(task, TestedTask):
        checks.check_tested_clients(task.test.num_clients, task.num_clients)
    checks.check_between("num_unseen", num_unseen, 0, task.num_clients - 1)
    if participation == "test" and not isinstance(task, TestedTask):
        raise ValueError(
            "participation is 'test', but the task has no test examples; choose 'training'"
        )
    return Requiring(task, task.num_clients - num_unseen, models, tuning, participation)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Requiring(View):
    """A task with clients' requirements, built by `requiring`.

    Attributes:
      own: the quality of all clients' own models, including those of unseen clients.
      tuning: each client's fine-tuning before evaluation.
      participation: the examples whose loss decides whether a client participates.
    """

    own: OwnModels
    tuning: Tuning | None
    participation: Literal["training", "test"] = dataclasses.field(metadata={"static": True})

    __repr__ = in_short

    @property
    def divides(self) -> bool:
        """Whether devices may divide the examples, which fine-tuning of all clients reads."""
        return self.tuning is None

    def threshold(self, client: Index) -> Float[Array, ""]:
        """The client's threshold, rho_k."""
        return self.own.threshold[client]

    def appeals(self, params: Params) -> Bool[Array, " clients"]:
        """Marks the clients that may train and whose loss is below rho_k."""
        if self.participation == "test":
            first = None if self.num_clients == self.task.num_clients else self.num_clients
            how = {"per_client": True, "num_clients": first}
            losses = self.task.evaluate(params, self.task.test, **how)["loss"]
        else:
            losses = client_losses(self, params)
        return losses < self.own.threshold[: self.num_clients]

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> dict[str, Float[Array, ""]]:
        """Means over the clients that may train, and over the unseen clients."""
        values, (threshold, own_accuracy) = self._evaluated(rng_key, params), self.own
        values["train_appeal"] = values["train_loss"] < threshold
        if "loss" in values:
            values["appeal"] = prefers = values["loss"] < threshold
            if own_accuracy is not None:
                values["preferred_accuracy"] = jnp.where(prefers, values["accuracy"], own_accuracy)
        parts = {"": slice(self.num_clients), "unseen_": slice(self.num_clients, None)}
        means = {
            prefix + name: jnp.mean(value[part], dtype=float)
            for prefix, part in parts.items()
            for name, value in values.items()
            if len(value[part])
        }
        return means if "loss" in values else self.task.metrics(rng_key, params) | means

    def _evaluated(self, rng_key: PRNGKeyArray, params: Params) -> dict[str, Array]:
        # Without fine-tuning all clients have the same parameters, so one pass over the data is
        # enough.
        task, clients = self.task, jnp.arange(self.task.num_clients)
        if self.tuning is not None:
            tune = partial(self.tuning.of_client, rng_key, task, params=params)

            def of_client(client: Index) -> dict[str, Array]:
                return _measured(task, tune(client), client)

            return lax.map(of_client, clients, batch_size=_TUNED_AT_ONCE)
        is_tested = isinstance(task, TestedTask)
        test = task.evaluate(params, task.test, per_client=True) if is_tested else {}
        return {"train_loss": client_losses(task, params)} | test
