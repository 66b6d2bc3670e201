"""Local training: what every federated method runs on a client."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from fedjax_mm.base import (
    Algorithm,
    AnalyticTask,
    Batching,
    ClientState,
    Contribution,
    EpochTask,
    Index,
    LocalProblem,
    MeasuredTask,
    Params,
    Round,
    Scalar,
    ServerFn,
    ServerState,
    Task,
)
from fedjax_mm.checks import check_count, check_positive, needs
from fedjax_mm.schedules import Schedule
from fedjax_mm.sums import scale_update

LocalOptimizer: TypeAlias = Callable[[Scalar], optax.GradientTransformation]
"""From the round's learning rate to an optax optimizer, for example `optax.sgd`."""

Direction: TypeAlias = Callable[..., tuple[Float[Array, ""], Params]]
"""``(params, *batches) -> (loss, direction)``: what a local step descends along, and the loss of a
batch that is reported; `jax.value_and_grad` of the task's loss is one."""

_LARGE_BYTES = 2**20  # of parameters


class Change(NamedTuple):
    """The result of local training.

    Attributes:
      update: local minus global parameters.
      report: ``{"loss": the mean loss of the batches while training}``.
    """

    update: Any
    report: dict[str, Float[Array, ""]]

    @classmethod
    def between(cls, start: Params, params: Params, loss: Float[Array, ""]) -> "Change":
        """From one point to another, with the mean loss on the way."""
        return cls(jax.tree.map(jnp.subtract, params, start), {"loss": loss})


def train_locally(
    local: LocalProblem,
    optimizer: optax.GradientTransformation,
    num_steps: int | Int[Array, ""],
    how: Batching,
    *,
    direction: Direction | None = None,
    num_batches: int = 1,
    start: Params | None = None,
) -> tuple[Params, Float[Array, ""]]:
    """A client's parameters after `num_steps` optimizer steps, and the mean loss of its batches.

    Args:
      local: the client's problem.
      optimizer: a fresh optimizer, its learning rate fixed.
      num_steps: E; where it is traced, gradients of the result cannot be taken.
      how: which of the client's examples each batch has.
      direction: what the optimizer gets in place of the gradient of the task's loss.
      num_batches: batches that each step sees, one after the other those of the task.
      start: parameters to start from instead of the global ones.
    """
    step_along = jax.value_and_grad(local.task.loss) if direction is None else direction

    def batches_of(step: int | Int[Array, ""]) -> list[Any]:
        first = jnp.asarray(step, jnp.int32) * num_batches
        steps = [first + i for i in range(num_batches)]
        return [local.task.batch(local.rng_key, local.client, step, how) for step in steps]

    # Each step draws the batch of the next one: what is carried is computed once, where XLA would
    # else draw a row's number again for every feature that it reads.
    def step(step: Int[Array, ""], carry: Any) -> Any:
        params, state, batches, losses = carry
        loss, gradients = step_along(params, *batches)
        gradients = _all_at_once(gradients) if is_large else gradients
        updates, state = optimizer.update(gradients, state, params)
        losses = losses + loss.astype(losses.dtype)
        return optax.apply_updates(params, updates), state, batches_of(step + 1), losses

    start = local.params if start is None else start
    is_large = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(start)) >= _LARGE_BYTES
    carry = start, optimizer.init(start), batches_of(0), jnp.zeros(())
    params, _, _, losses = lax.fori_loop(0, num_steps, step, carry)
    return params, losses / num_steps


def _all_at_once(gradients: Params) -> Params:
    """The gradients behind a data dependency on all of them.

    Else XLA copies the parameters in every step: it does not see that those of one layer may be
    overwritten while a gradient of another one is still to come. (It removes optimization barriers
    too early; that nothing is above infinity it does not know.)
    """
    leaves = [leaf for leaf in jax.tree.leaves(gradients) if leaf.size]
    zero = sum((leaf.ravel()[0] > jnp.inf).astype(leaf.dtype) for leaf in leaves)
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), gradients)


class LocalSGD(NamedTuple):
    """What most methods let clients do; build it with `local_sgd`, which explains the fields."""

    learning_rate: Scalar | Schedule
    local_steps: int | None
    epochs: int | None
    batch_size: int | Schedule | None
    order: Literal["iid", "epochs"]
    optimizer: LocalOptimizer

    def rate(self, round: Round) -> Scalar:
        """The learning rate in a round."""
        return self.learning_rate(round) if callable(self.learning_rate) else self.learning_rate

    def num_steps(self, task: Task, client: Index) -> int | Int[Array, ""]:
        """E, or as many steps as make up the epochs; `ValueError` if the task knows no epochs."""
        if self.local_steps is not None:
            return self.local_steps
        assert self.epochs is not None
        assert not callable(self.batch_size)
        return self.epochs * needs(task, EpochTask).num_batches(client, self.batch_size)

    def batching(self, round: Round) -> Batching:
        """Which of its examples a client's batches have in a round."""
        if callable(self.batch_size):
            return Batching(limit=self.batch_size(round))
        return Batching(self.batch_size, self.order)

    def train(
        self,
        local: LocalProblem,
        *,
        direction: Direction | None = None,
        num_batches: int = 1,
        num_steps: Int[Array, ""] | None = None,
        start: Params | None = None,
    ) -> Change:
        """The change of a client's parameters; arguments as of `train_locally`.

        `num_steps` is for clients that take steps of their own number.
        """
        start = local.params if start is None else start
        trained = train_locally(
            local,
            self.optimizer(self.rate(local.round)),
            self.num_steps(local.task, local.client) if num_steps is None else num_steps,
            self.batching(local.round),
            direction=direction,
            num_batches=num_batches,
            start=start,
        )
        return Change.between(start, *trained)

    def train_or_solve(self, local: LocalProblem) -> Change:
        """The change of a client's parameters, by the task's own closed form where it has one.

        It may be sparse, and then reports the loss at the global parameters, if the task gives it.
        """
        task, is_plain = local.task, self.batch_size is None and self.optimizer is optax.sgd
        if self.local_steps is None or not is_plain or not isinstance(task, AnalyticTask):
            return self.train(local)
        rate = self.rate(local.round)
        update = task.local_sgd(local.params, local.client, rate, self.local_steps)
        loss = local.loss() if isinstance(task, MeasuredTask) else jnp.full((), jnp.nan)
        return Change(update, {"loss": loss})


def local_sgd(
    learning_rate: Scalar | Schedule,
    local_steps: int | None,
    batch_size: int | Schedule | None = None,
    *,
    epochs: int | None = None,
    order: Literal["iid", "epochs"] | None = None,
    optimizer: LocalOptimizer = optax.sgd,
) -> LocalSGD:
    """The options of local training, checked.

    Args:
      learning_rate: eta, a number (it may be traced) or a schedule of the round t = 1, 2, ...
      local_steps: E, for every client; or else give `epochs`.
      batch_size: B examples per local step; None takes the full gradient. A schedule N_s(t) takes,
        in round t, that many of the client's examples without replacement for each step, at most
        all of them.
      epochs: passes over the client's examples, of ``ceil(n_k / B)`` local steps each.
      order: "iid" draws every example of a batch independently, "epochs" goes through all in a
        fresh order again and again; by default "epochs" where `epochs` is given, else "iid".
      optimizer: from the round's rate to an optax optimizer, restarted every round.

    Raises:
      ValueError: if a number is not positive, or options do not go together.
    """
    check_positive("learning_rate", learning_rate)
    check_count("local_steps", local_steps)
    check_count("epochs", epochs)
    if (local_steps is None) == (epochs is None):
        raise ValueError(f"local_steps is {local_steps}, epochs is {epochs}; give one of the two")
    if not callable(batch_size):
        check_count("batch_size", batch_size)
    if order not in ("iid", "epochs", None):
        raise ValueError(f"order is {order!r}; it must be 'iid', 'epochs' or None")
    if callable(batch_size) and (epochs is not None or order is not None):
        raise ValueError(
            "a schedule of sample sizes draws a sample for each step: give local_steps, and no "
            "epochs or order"
        )
    if order is not None and batch_size is None:
        raise ValueError(f"order is {order!r}, but steps take all examples; give a batch_size")
    if order == "iid" and epochs is not None:
        raise ValueError("epochs of iid draws would not see every example; give local_steps")
    order = order or ("iid" if epochs is None else "epochs")
    return LocalSGD(learning_rate, local_steps, epochs, batch_size, order, optimizer)


def proximal(local: LocalProblem, strength: Scalar) -> Direction:
    """Along ``grad F_k(w_k) + strength (w_k - w)``: held to the global parameters."""

    def direction(own: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
        loss, gradient = jax.value_and_grad(local.task.loss)(own, batch)
        held = jax.tree.map(lambda g, x, w: g + strength * (x - w), gradient, own, local.params)
        return loss, held

    return direction


def one(local: LocalProblem) -> Float[Array, ""]:
    """The weight of clients that all count the same: 1 times the scale."""
    return jnp.ones(()) * local.scale


def add_mean(params: Params, total: Contribution) -> Params:
    """The plain server's step: ``w <- w + (sum of weighted changes) / (sum of weights)``."""
    mean = jax.tree.map(lambda x: x / total.weight, total.update)
    return optax.apply_updates(params, mean)


def averaging(
    change: Callable[[LocalProblem], Change],
    weight: Callable[[LocalProblem], Float[Array, ""]] = LocalProblem.weight,
    *,
    num_gradients: int,
    server: Callable[[Params, Contribution], Params] = add_mean,
) -> Algorithm:
    """The method whose clients send a weighted change and whose server takes the weighted mean.

    Args:
      change: what a client's local training changes.
      weight: of a client's change; by default n_k.
      num_gradients: that a client computes in a round.
      server: from w and the sums to the new w, where it is not their quotient that is added.

    Example: the plainest method there is, one gradient step at a rate of 0.1.
      >>> import jax
      >>> from fedjax_mm import full_participation, quadratic, simulate
      >>> algorithm = averaging(local_sgd(0.1, local_steps=1).train, num_gradients=1)
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True
    """

    def client(local: LocalProblem) -> Contribution:
        factor, trained = weight(local), change(local)
        update = scale_update(trained.update, factor)
        return Contribution(update, factor, jnp.int32(num_gradients), trained.report)

    return stateless(client, server)


def stateless(
    client: Callable[[LocalProblem], Contribution],
    server: Callable[[Params, Contribution], Params],
) -> Algorithm:
    """The method that remembers nothing, neither at the clients nor at the server.

    Args:
      client: what one client contributes.
      server: from w and the sum of the contributions to the new w.
    """

    def init(task: Task, params: Params) -> tuple[ServerState, ClientState]:
        del task, params
        return (), ()

    def contribute(
        local: LocalProblem, server_state: ServerState, client_state: ClientState
    ) -> tuple[Contribution, ClientState]:
        del server_state
        return client(local), client_state

    return Algorithm(init, contribute, plain_server(server))


def plain_server(step: Callable[[Params, Contribution], Params] = add_mean) -> ServerFn:
    """The server that keeps no state: its step looks at nothing but w and the sums."""

    def server(
        round: Round,
        task: Task,
        params: Params,
        server_state: ServerState,
        client_states: ClientState,
        total: Contribution,
    ) -> tuple[Params, ServerState]:
        del round, task, client_states
        return step(params, total), server_state

    return server
