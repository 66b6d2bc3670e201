"""Clients that ask something of a model: thresholds, appeal, tuning, unseen clients.

Wraps any algorithm, so that MaxFL and those that it is compared with are measured alike.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.algorithms.local import train_locally
from fedjax_mm.algorithms.views import View, appeals, client_losses, measured
from fedjax_mm.base import (
    Algorithm,
    Batching,
    ClientState,
    Contribution,
    Params,
    Round,
    Scalar,
    ServerState,
    Task,
    TestedTask,
)
from fedjax_mm.checks import check_count, check_positive

_TUNED_AT_ONCE = 16  # clients


class Demands(NamedTuple):
    """What one client asks of one model, and the algorithm's own client state.

    Attributes:
      threshold: rho_k.
      own_accuracy: of the client's own model w_hat_k on its test examples; NaN where there is none.
      state: the algorithm's.
    """

    threshold: Float[Array, ""]
    own_accuracy: Float[Array, ""]
    state: ClientState


def requiring(
    algorithm: Algorithm,
    *,
    learning_rate: Scalar | None = None,
    batch_size: int | None = None,
    num_steps: int = 100,
    thresholds: Any = None,
    own_accuracies: Any = None,
    num_unseen: int = 0,
    tuning_steps: int = 0,
) -> Algorithm:
    """The algorithm, for clients who want a model better than their own.

    Before round 1 each client trains a model of its own, w_hat_k, from the common start by
    `num_steps` steps of local SGD; its loss on the training examples is what the client requires,
    ``rho_k = F_k(w_hat_k)``. A model appeals to the client if ``F_k(w) < rho_k``. Records are then
    means over clients, apart for those that train and those that are never seen (``unseen_...``):

    - ``loss`` and ``accuracy`` on the clients' test examples, ``train_loss`` on those for training;
    - ``appeal`` (GM-Appeal), the share of clients with ``f_k(w) < rho_k`` on test examples, and
      ``train_appeal``, on training examples;
    - ``preferred_accuracy``, where a client to whom the model does not appeal uses its own.

    Of a task without examples for testing they are ``train_loss``, ``train_appeal`` and the task's
    own metrics.

    Args:
      algorithm: any; those that need thresholds find them in ``task.threshold(client)``.
      learning_rate: of the warm-up and of tuning; it may be traced.
      batch_size: examples of a step of both, drawn independently; None takes all.
      num_steps: of the warm-up.
      thresholds: ``[clients]``, rho_k of all clients, the unseen ones too, instead of a warm-up;
        then `learning_rate` is that of tuning alone.
      own_accuracies: ``[clients]``, with `thresholds`, of the clients' own models on their test
        examples; without them no model is preferred.
      num_unseen: the task's last clients never train; the assignment is for the others.
      tuning_steps: local steps that each client takes from the model before it is measured.

    Raises:
      ValueError: if a number is not positive, or neither a rate nor thresholds are given.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedavg, full_participation, quadratic, requiring, simulate
      >>> algorithm = requiring(fedavg(0.1, local_steps=5), learning_rate=0.1, num_steps=2)
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> trace.metrics["train_appeal"].shape  # records, models
      (11, 1)

    Reference: Cho et al., sections 2 and 4, and Table 3 for tuning.
    """
    _check_options(learning_rate, thresholds, tuning_steps)
    if own_accuracies is not None and thresholds is None:
        raise ValueError("own_accuracies are given, but no thresholds; give both, or a warm-up")
    given = _given(thresholds=thresholds, own_accuracies=own_accuracies)
    check_positive("learning_rate", learning_rate)
    check_count("batch_size", batch_size)
    check_count("num_steps", num_steps)
    if num_unseen < 0 or tuning_steps < 0:
        raise ValueError(
            f"num_unseen is {num_unseen}, tuning_steps is {tuning_steps}; neither may be negative"
        )

    def seen(task: Task, threshold: Float[Array, "*clients"]) -> "_Seen":
        _check_task(task, given)
        return _Seen(task, task.num_clients - num_unseen, threshold)

    def trained(
        rng_key: PRNGKeyArray, task: Task, client: Int[Array, ""], params: Params, num_steps: int
    ) -> Params:
        optimizer, how = optax.sgd(learning_rate), Batching(batch_size)
        return train_locally(rng_key, task, client, params, optimizer, num_steps, how)

    def on_test(task: Task, params: Params, client: Int[Array, ""]) -> dict[str, Float[Array, ""]]:
        if not isinstance(task, TestedTask):
            return {}
        return task.client_metrics(params, client, task.test)

    def init(task: Task, params: Params) -> tuple[ServerState, Demands]:
        unknown = jnp.full((), jnp.nan)
        server_state, state = algorithm.init(seen(task, unknown), params)
        return server_state, Demands(unknown, unknown, state)

    def start(
        rng_key: PRNGKeyArray, task: Task, client: Int[Array, ""], params: Params, state: Demands
    ) -> Demands:
        inner = state.state
        if given:
            own = given.get("own_accuracies")
            state = state._replace(
                threshold=given["thresholds"][client],
                own_accuracy=state.own_accuracy if own is None else own[client],
            )
        else:
            own = trained(rng_key, task, client, params, num_steps)
            state = state._replace(threshold=measured(task).client_loss(own, client))
            test = on_test(task, own, client)
            state = state._replace(own_accuracy=test.get("accuracy", state.own_accuracy))
        if algorithm.start is not None:
            view = seen(task, state.threshold)
            inner = algorithm.start(jax.random.fold_in(rng_key, 1), view, client, params, inner)
        return state._replace(state=inner)

    def client(
        rng_key: PRNGKeyArray,
        round: Round,
        task: Task,
        client: Int[Array, ""],
        params: Params,
        server_state: ServerState,
        state: Demands,
    ) -> tuple[Contribution, Demands]:
        view = seen(task, state.threshold)
        contribution, inner = algorithm.client(
            rng_key, round, view, client, params, server_state, state.state
        )
        return contribution, state._replace(state=inner)

    def appeal(
        task: Task, params: Params, server_state: ServerState, states: Demands
    ) -> Bool[Array, " clients"]:
        view = seen(task, states.threshold)
        if algorithm.appeal is not None:
            return algorithm.appeal(view, params, server_state, states.state)
        return appeals(view, params)

    def evaluated(
        rng_key: PRNGKeyArray, task: Task, params: Params
    ) -> tuple[Float[Array, " clients"], dict[str, Float[Array, " clients"]]]:
        """Every client's loss on training examples, and what there is on test examples."""

        def of_tuned(client: Int[Array, ""]) -> tuple[Array, dict[str, Array]]:
            key = jax.random.fold_in(rng_key, client)
            tuned = trained(key, task, client, params, tuning_steps)
            return measured(task).client_loss(tuned, client), on_test(task, tuned, client)

        if tuning_steps:
            return lax.map(of_tuned, jnp.arange(task.num_clients), batch_size=_TUNED_AT_ONCE)
        if not isinstance(task, TestedTask):
            return client_losses(task, params), {}
        return client_losses(task, params), task.evaluate(params, task.test, per_client=True)

    def metrics(
        rng_key: PRNGKeyArray, task: Task, params: Params, states: Demands
    ) -> dict[str, Float[Array, ""]]:
        train_loss, test = evaluated(rng_key, task, params)
        values = {"train_loss": train_loss, "train_appeal": train_loss < states.threshold}
        if test:
            is_preferred = test["loss"] < states.threshold
            values |= test | {"appeal": is_preferred}
        if test and (not given or "own_accuracies" in given):
            accuracy = jnp.where(is_preferred, test["accuracy"], states.own_accuracy)
            values["preferred_accuracy"] = accuracy
        means = _means(values, task.num_clients - num_unseen)
        return means if test else task.metrics(params) | means

    return Algorithm(
        init,
        client,
        algorithm.server,
        _num_steps_of(algorithm, seen),
        start=start,
        begin=_begin_of(algorithm, seen),
        output=algorithm.output,
        appeal=appeal,
        metrics=metrics,
        num_unseen=num_unseen,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Seen(View):
    """A task as the algorithm sees it: with thresholds, without the clients that never train."""

    thresholds: Float[Array, "*clients"]

    def threshold(self, client: Int[Array, ""]) -> Float[Array, ""]:
        """rho_k; where there is one client, there is one number."""
        return self.thresholds if self.thresholds.ndim == 0 else self.thresholds[client]


def _num_steps_of(algorithm: Algorithm, seen: Any) -> Any:
    """The algorithm's, if it has its own; steps do not depend on thresholds but by the server."""
    inner = algorithm.num_steps
    if inner is None:
        return None

    def num_steps(
        task: Task, client: Int[Array, ""], server_state: ServerState
    ) -> int | Int[Array, ""]:
        return inner(seen(task, jnp.full((), jnp.nan)), client, server_state)

    return num_steps


def _begin_of(algorithm: Algorithm, seen: Any) -> Any:
    """The algorithm's, if it has its own."""
    inner = algorithm.begin
    if inner is None:
        return None

    def begin(
        round: Round, task: Task, params: Params, server_state: ServerState, states: Demands
    ) -> ServerState:
        return inner(round, seen(task, states.threshold), params, server_state, states.state)

    return begin


def _means(values: dict[str, Array], num_seen: int) -> dict[str, Float[Array, ""]]:
    """Over the clients that train, and over the others."""
    parts = {"": slice(num_seen), "unseen_": slice(num_seen, None)}
    return {
        prefix + name: jnp.mean(value[part], dtype=float)
        for prefix, part in parts.items()
        for name, value in values.items()
        if len(value[part])
    }


def _check_options(learning_rate: Any, thresholds: Any, tuning_steps: int) -> None:
    if learning_rate is None and (thresholds is None or tuning_steps > 0):
        raise ValueError(
            f"learning_rate is None, thresholds are {thresholds}, tuning_steps is {tuning_steps}; "
            "give the rate of a warm-up or thresholds, and the rate of tuning"
        )
    if learning_rate is not None and thresholds is not None and tuning_steps == 0:
        raise ValueError(
            "a learning_rate and thresholds are given; give the rate of a warm-up, or thresholds"
        )


def _given(**arrays: Any) -> dict[str, Float[Array, " clients"]]:
    """Those that are given."""
    return {name: jnp.asarray(x, float) for name, x in arrays.items() if x is not None}


def _check_task(task: Task, given: dict[str, Float[Array, " clients"]]) -> None:
    """Whether the task tells what its clients lose, and all sizes fit."""
    num_clients = task.num_clients
    measured(task)
    for name, values in given.items():
        if values.shape != (num_clients,):
            raise ValueError(
                f"{name} have shape {values.shape}; give one number for each of {num_clients} "
                "clients"
            )
    if isinstance(task, TestedTask) and task.test.num_clients != num_clients:
        raise ValueError(
            f"{task.test.num_clients} clients have test examples and {num_clients} train; give "
            "every client its own"
        )
