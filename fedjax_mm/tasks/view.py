"""Views, which change part of a task, and functions that cover all clients of a task."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from typing_extensions import Protocol, runtime_checkable

from fedjax_mm.base import (
    Batching,
    DemandingTask,
    Index,
    MeasuredTask,
    Metrics,
    Params,
    Round,
    Task,
    needs,
)
from fedjax_mm.base.calls import in_short
from fedjax_mm.base.capabilities import EpochTask, ExamplesTask, FeaturesTask, RoundTask
from fedjax_mm.local.gradients import differentiated, loss_and_gradient


@runtime_checkable
class TestedTask(MeasuredTask, Protocol):
    """A task whose clients have training and test examples, with losses and accuracy.

    Attributes:
      train: the clients' training examples.
      test: the clients' test examples.
    """

    train: Any
    test: Any

    def client_metrics(self, params: Params, client: Index, data: Any) -> dict[str, Array]:
        """Mean ``loss`` and ``accuracy`` over one client's examples in `data`."""

    def evaluate(self, params: Params, data: Any, **options: Any) -> dict[str, Array]:
        """Mean ``loss`` and ``accuracy`` over all examples, in one pass over the data.

        With ``per_client=True`` means are per client. `num_clients` restricts them to the first
        clients.
        """


def client_losses(
    task: Task, params: Params, num_clients: int | None = None
) -> Float[Array, " clients"]:
    """Computes F_k(w) of the first clients, or of all, in one pass over the data if possible.

    Args:
      task: a task that provides its clients' losses.
      params: one model's parameters.
      num_clients: the number of clients, starting with the first; None means all.

    Raises:
      ValueError: if the task does not provide its clients' losses.

    Example:
      >>> from fedjax_mm.tasks import client_losses, quadratic
      >>> client_losses(quadratic(6, 4, mu=0.1), jnp.zeros(25)).shape
      (6,)
    """
    num_clients = task.num_clients if num_clients is None else num_clients
    # A view may change losses, as it does for attackers. Call its method.
    if isinstance(task, View):
        return task.client_losses(params, num_clients)
    if isinstance(task, TestedTask):
        first = None if num_clients == task.num_clients else num_clients
        return task.evaluate(params, task.train, per_client=True, num_clients=first)["loss"]
    loss = partial(needs(task, MeasuredTask).client_loss, params)
    return jax.vmap(loss)(jnp.arange(num_clients))


def client_weights(task: Task) -> Float[Array, " clients"]:
    """Weights n_k of all clients."""
    return jax.vmap(task.weight)(jnp.arange(task.num_clients))


def thresholds(task: Task) -> Float[Array, " clients"]:
    """Thresholds rho_k of all clients."""
    return jax.vmap(needs(task, DemandingTask).threshold)(jnp.arange(task.num_clients))


def per_client(task: Task) -> tuple[str, ...]:
    """Names of the task's metrics with one number per client."""
    names = getattr(task, "per_client", ())
    if isinstance(names, str):
        raise ValueError(f"per_client is {names!r}; give a tuple of names, ({names!r},)")
    return tuple(names)


def changes(task: Task) -> bool:
    """Whether the task, or the task behind a view, changes over rounds."""
    return isinstance(task, RoundTask) or (isinstance(task, View) and changes(task.task))


def divides(task: Any) -> bool:
    """Whether devices may divide the clients' examples: the task declares it by `divides`.

    Functions of one client must read that client's examples only, and metrics may read others by
    `ClientData.total` and `ClientData.joined`. A subclass must declare it again.
    """
    declares = "divides" in vars(type(task)) and task.divides
    return declares and (not isinstance(task, View) or divides(task.task))


def at_round(task: Any, round: Round) -> Any:
    """The task at round t, which is the task itself unless it changes."""
    if isinstance(task, RoundTask):
        return task.at(round)
    if isinstance(task, View):
        return dataclasses.replace(task, task=at_round(task.task, round))
    return task


def appeals(task: Task, params: Params) -> Bool[Array, " clients"]:
    """Marks the clients to which the model appeals, for a task with thresholds."""
    return needs(task, DemandingTask).appeals(params)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """A task that forwards calls to another task, except for methods that subclasses override.

    Attributes:
      task: the other task.
      num_clients: N, the number of clients that may train, which are the other task's first ones.
    """

    task: Any
    num_clients: int = dataclasses.field(metadata={"static": True})

    __repr__ = in_short

    @property
    def per_client(self) -> tuple[str, ...]:
        """Names of metrics with one number per client, if the task has the same clients."""
        return per_client(self.task) if self.num_clients == self.task.num_clients else ()

    def init(self, rng_key: PRNGKeyArray) -> Params:
        """Initial parameters of one model."""
        return self.task.init(rng_key)

    def weight(self, client: Index) -> Float[Array, ""]:
        """Weight n_k of the client."""
        return self.task.weight(client)

    def batch(self, rng_key: PRNGKeyArray, client: Index, step: Index, how: Batching) -> Any:
        """Examples of a local step."""
        return self.task.batch(rng_key, client, step, how)

    def num_batches(self, client: Index, size: int | None) -> int | Int[Array, ""]:
        """Steps per epoch, or raises `ValueError` if the task has no epochs."""
        return needs(self.task, EpochTask).num_batches(client, size)

    def loss(self, params: Params, batch: Any) -> Float[Array, ""]:
        """Loss of a batch."""
        return self.task.loss(params, batch)

    def loss_and_gradient(self, params: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
        """Loss of a batch and its gradient: those of the task, unless the loss is another."""
        is_same = type(self).loss is View.loss
        gradient_fn = loss_and_gradient(self.task) if is_same else differentiated(self)
        return gradient_fn(params, batch)

    def examples(self, params: Params, batch: Any) -> tuple[Any, Float[Array, " batch"]]:
        """Batches of one example, and the examples' weights."""
        return needs(self.task, ExamplesTask).examples(params, batch)

    def features(
        self, params: Params, batch: Any
    ) -> tuple[Float[Array, "batch features"], Float[Array, " batch"]]:
        """Features of a batch, and the weights of its examples."""
        return needs(self.task, FeaturesTask).features(params, batch)

    def client_loss(self, params: Params, client: Index) -> Float[Array, ""]:
        """Loss F_k(w) of the client."""
        return needs(self.task, MeasuredTask).client_loss(params, client)

    def client_losses(self, params: Params, num_clients: int) -> Float[Array, " clients"]:
        """Losses F_k(w) of the first clients, in one pass."""
        return client_losses(self.task, params, num_clients)

    def threshold(self, client: Index) -> Float[Array, ""]:
        """Threshold rho_k of the client."""
        return needs(self.task, DemandingTask).threshold(client)

    def appeals(self, params: Params) -> Bool[Array, " clients"]:
        """Whether the model appeals to each client."""
        return appeals(self.task, params)

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> Metrics:
        """Metrics of one model."""
        return self.task.metrics(rng_key, params)
