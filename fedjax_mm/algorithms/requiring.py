"""Clients that ask something of a model: thresholds, appeal, tuning, unseen clients.

Wraps any algorithm, so that MaxFL and those that it is compared with are measured alike.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.algorithms.local import train_locally
from fedjax_mm.base import (
    Algorithm,
    Batch,
    Batching,
    ClientState,
    Contribution,
    EpochTask,
    MeasuredTask,
    Params,
    Round,
    Scalar,
    ServerState,
)
from fedjax_mm.checks import check_count, check_positive


class Demands(NamedTuple):
    """What one client asks of one model, and the algorithm's own client state.

    Attributes:
      threshold: rho_k.
      own: loss and accuracy of the client's own model w_hat_k on its test examples; NaN where
        thresholds are given.
      state: the algorithm's.
    """

    threshold: Float[Array, ""]
    own: dict[str, Float[Array, ""]]
    state: ClientState


def requiring(
    algorithm: Algorithm,
    *,
    learning_rate: Scalar | None = None,
    batch_size: int | None = None,
    num_steps: int = 100,
    thresholds: Any = None,
    num_unseen: int = 0,
    tuning_steps: int = 0,
) -> Algorithm:
    """The algorithm, for clients who want a model better than their own.

    Before round 1 each client trains a model of its own, w_hat_k, from the common start by
    `num_steps` steps of local SGD; its loss on the training examples is what the client requires,
    ``rho_k = F_k(w_hat_k)``. A model appeals to the client if ``F_k(w) < rho_k``. Records are then
    made of all clients' losses, apart for those that train and those that are never seen:

    - ``loss`` and ``accuracy``, means over clients, on test examples;
    - ``appeal`` (GM-Appeal), the share of clients with ``f_k(w) < rho_k`` on test examples, and
      ``train_appeal``, on training examples;
    - ``preferred_accuracy``, where a client to whom the model does not appeal uses its own.

    Args:
      algorithm: any; those that need thresholds find them in ``task.threshold(client)``.
      learning_rate: of the warm-up and of tuning; it may be traced.
      batch_size: examples of a step of both, drawn independently; None takes all.
      num_steps: of the warm-up.
      thresholds: ``[clients]``, rho_k, instead of a warm-up; then no model is preferred.
      num_unseen: the task's last clients never train; they are measured apart, as ``unseen_...``.
      tuning_steps: local steps that each client takes from the model before it is measured.

    Raises:
      ValueError: if a number is not positive, or neither a rate nor thresholds are given.

    Reference: Cho et al., sections 2 and 4, and Table 3 for tuning.
    """
    if (learning_rate is None) == (thresholds is None):
        raise ValueError(
            f"learning_rate is {learning_rate}, thresholds are {thresholds}; give the rate of a "
            "warm-up, or thresholds"
        )
    check_positive("learning_rate", learning_rate)
    check_count("batch_size", batch_size)
    check_count("num_steps", num_steps)
    if num_unseen < 0 or tuning_steps < 0:
        raise ValueError(
            f"num_unseen is {num_unseen}, tuning_steps is {tuning_steps}; neither may be negative"
        )
    if tuning_steps and learning_rate is None:
        raise ValueError(f"tuning_steps is {tuning_steps}; give its learning_rate")

    def seen(task: Any, demands: Demands) -> "_Seen":
        _check(task, thresholds)
        return _Seen(task, demands.threshold, task.num_clients - num_unseen)

    def trained(
        rng_key: PRNGKeyArray, task: Any, client: Int[Array, ""], params: Params, num_steps: int
    ) -> Params:
        optimizer = optax.sgd(learning_rate)
        how = Batching(batch_size)
        return train_locally(rng_key, task, client, params, optimizer, num_steps, how)

    def init(task: Any, params: Params) -> tuple[ServerState, Demands]:
        nothing = jnp.full((), jnp.nan)
        server, state = algorithm.init(seen(task, Demands(nothing, {}, ())), params)
        return server, Demands(nothing, {"loss": nothing, "accuracy": nothing}, state)

    def start(
        rng_key: PRNGKeyArray, task: Any, client: Int[Array, ""], params: Params, state: Demands
    ) -> Demands:
        if thresholds is not None:
            state = state._replace(threshold=jnp.asarray(thresholds, float)[client])
        else:
            own = trained(rng_key, task, client, params, num_steps)
            on_test = task.client_metrics(own, client, task.test)
            state = Demands(task.client_loss(own, client), on_test, state.state)
        if algorithm.start is None:
            return state
        key = jax.random.fold_in(rng_key, 1)
        return state._replace(
            state=algorithm.start(key, seen(task, state), client, params, state.state)
        )

    def client(
        rng_key: PRNGKeyArray,
        round: Round,
        task: Any,
        client: Int[Array, ""],
        params: Params,
        server_state: ServerState,
        state: Demands,
    ) -> tuple[Contribution, Demands]:
        contribution, inner = algorithm.client(
            rng_key, round, seen(task, state), client, params, server_state, state.state
        )
        return contribution, state._replace(state=inner)

    def begin(
        round: Round, task: Any, params: Params, server_state: ServerState, states: Demands
    ) -> ServerState:
        assert algorithm.begin is not None
        return algorithm.begin(round, seen(task, states), params, server_state, states.state)

    def appeal(task: Any, params: Params, states: Demands) -> Bool[Array, " clients"]:
        num_clients = task.num_clients - num_unseen
        return (client_losses(task, params) < states.threshold)[:num_clients]

    def num_steps_of(task: Any, client: Int[Array, ""]) -> int | Int[Array, ""]:
        assert algorithm.num_steps is not None
        nothing = jnp.full((), jnp.nan)
        return algorithm.num_steps(seen(task, Demands(nothing, {}, ())), client)

    def metrics(
        rng_key: PRNGKeyArray, task: Any, params: Params, states: Demands
    ) -> dict[str, Float[Array, ""]]:
        def of_tuned(client: Int[Array, ""]) -> tuple[Any, Any]:
            key = jax.random.fold_in(rng_key, client)
            tuned = trained(key, task, client, params, tuning_steps)
            return task.client_loss(tuned, client), task.client_metrics(tuned, client, task.test)

        if tuning_steps:
            clients = jnp.arange(task.num_clients)
            train_loss, test = lax.map(of_tuned, clients, batch_size=_TUNED_AT_ONCE)
        else:
            train_loss = client_losses(task, params)
            test = task.evaluate(params, task.test, per_client=True)
        appeals = test["loss"] < states.threshold
        values = test | {
            "appeal": appeals,
            "train_appeal": train_loss < states.threshold,
            "preferred_accuracy": jnp.where(appeals, test["accuracy"], states.own["accuracy"]),
        }
        parts = {"": slice(task.num_clients - num_unseen)}
        if num_unseen:
            parts["unseen_"] = slice(task.num_clients - num_unseen, None)
        return {
            prefix + name: jnp.mean(value[part], dtype=float)
            for prefix, part in parts.items()
            for name, value in values.items()
        }

    return Algorithm(
        init,
        client,
        algorithm.server,
        None if algorithm.num_steps is None else num_steps_of,
        start=start,
        begin=None if algorithm.begin is None else begin,
        output=algorithm.output,
        appeal=appeal,
        metrics=metrics,
        num_unseen=num_unseen,
    )


_TUNED_AT_ONCE = 16  # clients


def client_losses(task: Any, params: Params) -> Float[Array, " clients"]:
    """F_k(w) of all clients, in one pass where the task has one."""
    if hasattr(task, "evaluate"):
        return task.evaluate(params, task.train, per_client=True)["loss"]
    return jax.vmap(partial(task.client_loss, params))(jnp.arange(task.num_clients))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Seen:
    """A task as the algorithm sees it: with thresholds, without the clients that never train."""

    task: Any
    thresholds: Float[Array, "*clients"]
    num_clients: int = dataclasses.field(metadata={"static": True})

    def threshold(self, client: Int[Array, ""]) -> Float[Array, ""]:
        """rho_k; where there is one client, there is one number."""
        return self.thresholds if self.thresholds.ndim == 0 else self.thresholds[client]

    def init(self, rng_key: PRNGKeyArray) -> Params:
        return self.task.init(rng_key)

    def weight(self, client: Int[Array, ""]) -> Float[Array, ""]:
        return self.task.weight(client)

    def batch(
        self, rng_key: PRNGKeyArray, client: Int[Array, ""], step: Int[Array, ""], how: Batching
    ) -> Batch:
        return self.task.batch(rng_key, client, step, how)

    def num_batches(self, client: Int[Array, ""], size: int | None) -> int | Int[Array, ""]:
        if not isinstance(self.task, EpochTask):
            raise ValueError(f"{type(self.task).__name__} has no num_batches; give local_steps")
        return self.task.num_batches(client, size)

    def loss(self, params: Params, batch: Batch) -> Float[Array, ""]:
        return self.task.loss(params, batch)

    def client_loss(self, params: Params, client: Int[Array, ""]) -> Float[Array, ""]:
        return self.task.client_loss(params, client)

    def metrics(self, params: Params) -> dict[str, Float[Array, ""]]:
        return self.task.metrics(params)


def _check(task: Any, thresholds: Any) -> None:
    """Whether the task tells what its clients lose, and has as many thresholds as clients."""
    if not isinstance(task, MeasuredTask):
        raise ValueError(f"{type(task).__name__} has no client_loss, by which models would appeal")
    if thresholds is not None and jnp.shape(thresholds) != (task.num_clients,):
        raise ValueError(
            f"thresholds have shape {jnp.shape(thresholds)}; give one number for each of "
            f"{task.num_clients} clients"
        )
