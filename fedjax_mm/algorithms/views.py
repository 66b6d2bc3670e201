"""What clients lose and ask for, and tasks that are seen changed."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.base import (
    Batch,
    Batching,
    DemandingTask,
    EpochTask,
    MeasuredTask,
    Params,
    Task,
    TestedTask,
)


def measured(task: Task) -> MeasuredTask:
    """The task, if it tells what its clients lose; or else `ValueError`."""
    if not isinstance(task, MeasuredTask):
        raise ValueError(
            f"{type(task).__name__} has no client_loss(params, client), by which its clients are "
            "told apart; add it"
        )
    return task


def demanding(task: Task) -> DemandingTask:
    """The task, if its clients have thresholds; or else `ValueError`."""
    if not isinstance(task, DemandingTask):
        raise ValueError(
            f"the clients of {type(task).__name__} have no thresholds; wrap the algorithm with "
            "`requiring`"
        )
    return task


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
    loss = partial(measured(task).client_loss, params)
    return jax.vmap(loss)(jnp.arange(num_clients))


def thresholds(task: Task) -> Float[Array, " clients"]:
    """rho_k of all clients."""
    return jax.vmap(demanding(task).threshold)(jnp.arange(task.num_clients))


def appeals(task: Task, params: Params) -> Bool[Array, " clients"]:
    """To which clients a model appeals: ``F_k(w) < rho_k``."""
    return client_losses(task, params) < thresholds(task)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """A task as an algorithm sees it: passes everything on that it does not change.

    Attributes:
      task: the task itself.
      num_clients: N, of the clients that are seen: the first ones.
    """

    task: Any
    num_clients: int = dataclasses.field(metadata={"static": True})

    def init(self, rng_key: PRNGKeyArray) -> Params:
        """Of the task."""
        return self.task.init(rng_key)

    def weight(self, client: Int[Array, ""]) -> Float[Array, ""]:
        """Of the task."""
        return self.task.weight(client)

    def batch(
        self, rng_key: PRNGKeyArray, client: Int[Array, ""], step: Int[Array, ""], how: Batching
    ) -> Batch:
        """Of the task."""
        return self.task.batch(rng_key, client, step, how)

    def num_batches(self, client: Int[Array, ""], size: int | None) -> int | Int[Array, ""]:
        """Of the task, if its examples make epochs."""
        if not isinstance(self.task, EpochTask):
            raise ValueError(f"{type(self.task).__name__} has no num_batches; give local_steps")
        return self.task.num_batches(client, size)

    def loss(self, params: Params, batch: Batch) -> Float[Array, ""]:
        """Of the task."""
        return self.task.loss(params, batch)

    def client_loss(self, params: Params, client: Int[Array, ""]) -> Float[Array, ""]:
        """F_k(w)."""
        return measured(self.task).client_loss(params, client)

    def client_losses(self, params: Params, num_clients: int) -> Float[Array, " clients"]:
        """F_k(w) of the first clients, in one pass."""
        return client_losses(self.task, params, num_clients)

    def threshold(self, client: Int[Array, ""]) -> Float[Array, ""]:
        """rho_k."""
        return demanding(self.task).threshold(client)

    def metrics(self, params: Params) -> dict[str, Float[Array, ""]]:
        """Of the task."""
        return self.task.metrics(params)
