"""A task seen changed, and the questions that algorithms and assignments ask of all clients."""

import dataclasses
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.base import Batching, DemandingTask, EpochTask, Index, MeasuredTask, Params, Task
from fedjax_mm.checks import needs


@runtime_checkable
class TestedTask(MeasuredTask, Protocol):
    """A task whose clients have examples for training and for testing, with losses and accuracy.

    Attributes:
      train: every client's training examples.
      test: every client's examples for testing.
    """

    train: Any
    test: Any

    def client_metrics(self, params: Params, client: Index, data: Any) -> dict[str, Array]:
        """The mean ``loss`` and ``accuracy`` over one client's examples in `data`."""

    def evaluate(self, params: Params, data: Any, **options: Any) -> dict[str, Array]:
        """The same of all clients' examples in one pass over the data.

        With ``per_client=True`` of each client's, with `num_clients` of the first so many clients.
        """


def client_losses(
    task: Task, params: Params, num_clients: int | None = None
) -> Float[Array, " clients"]:
    """F_k(w) of the first clients, or of all, in one pass over their data if the task has one."""
    num_clients = task.num_clients if num_clients is None else num_clients
    if isinstance(task, View):
        return task.client_losses(params, num_clients)
    if isinstance(task, TestedTask):
        first = None if num_clients == task.num_clients else num_clients
        return task.evaluate(params, task.train, per_client=True, num_clients=first)["loss"]
    loss = partial(needs(task, MeasuredTask).client_loss, params)
    return jax.vmap(loss)(jnp.arange(num_clients))


def thresholds(task: Task) -> Float[Array, " clients"]:
    """rho_k of all clients."""
    return jax.vmap(needs(task, DemandingTask).threshold)(jnp.arange(task.num_clients))


def appeals(task: Task, params: Params) -> Bool[Array, " clients"]:
    """Whether the model appeals to each client; `ValueError` if clients require nothing."""
    return needs(task, DemandingTask).appeals(params)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """A task that passes everything on to another one, but for what a subclass changes.

    Attributes:
      task: the other one.
      num_clients: N, of the clients that may train: the other one's first clients.
    """

    task: Any
    num_clients: int = dataclasses.field(metadata={"static": True})

    def init(self, rng_key: PRNGKeyArray) -> Params:
        """Initial parameters of one model."""
        return self.task.init(rng_key)

    def weight(self, client: Index) -> Float[Array, ""]:
        """n_k."""
        return self.task.weight(client)

    def batch(self, rng_key: PRNGKeyArray, client: Index, step: Index, how: Batching) -> Any:
        """The examples of a local step."""
        return self.task.batch(rng_key, client, step, how)

    def num_batches(self, client: Index, size: int | None) -> int | Int[Array, ""]:
        """Steps of an epoch, if the clients' examples make epochs."""
        return needs(self.task, EpochTask).num_batches(client, size)

    def loss(self, params: Params, batch: Any) -> Float[Array, ""]:
        """The loss of a batch."""
        return self.task.loss(params, batch)

    def client_loss(self, params: Params, client: Index) -> Float[Array, ""]:
        """F_k(w)."""
        return needs(self.task, MeasuredTask).client_loss(params, client)

    def client_losses(self, params: Params, num_clients: int) -> Float[Array, " clients"]:
        """F_k(w) of the first clients, in one pass."""
        return client_losses(self.task, params, num_clients)

    def threshold(self, client: Index) -> Float[Array, ""]:
        """rho_k."""
        return needs(self.task, DemandingTask).threshold(client)

    def appeals(self, params: Params) -> Bool[Array, " clients"]:
        """Whether the model appeals to each client."""
        return appeals(self.task, params)

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> dict[str, Float[Array, ""]]:
        """What is recorded of one model."""
        return self.task.metrics(rng_key, params)
