"""Local training: what every federated method runs on a client."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from fedjax_mm.base import (
    Algorithm,
    Batching,
    ClientState,
    Contribution,
    LocalProblem,
    Params,
    Round,
    Scalar,
    ServerFn,
    ServerState,
    Task,
)
from fedjax_mm.checks import check_count, check_positive
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
    """E local steps at the round's learning rate; build it with `local_sgd`.

    Attributes:
      learning_rate: eta, or its schedule.
      num_steps: E.
      how: which of the client's examples each batch has.
    """

    learning_rate: Scalar | Schedule
    num_steps: int
    how: Batching

    def rate(self, round: Round) -> Scalar:
        """The learning rate in a round."""
        return self.learning_rate(round) if callable(self.learning_rate) else self.learning_rate

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
            optax.sgd(self.rate(local.round)),
            self.num_steps if num_steps is None else num_steps,
            self.how,
            direction=direction,
            num_batches=num_batches,
            start=start,
        )
        return Change.between(start, *trained)


def local_sgd(
    learning_rate: Scalar | Schedule, local_steps: int, batch_size: int | None
) -> LocalSGD:
    """The checked options that most methods have, as `fedavg` documents them."""
    check_positive("learning_rate", learning_rate)
    check_count("local_steps", local_steps)
    check_count("batch_size", batch_size)
    if local_steps is None:
        raise ValueError("local_steps is None; give a positive whole number")
    return LocalSGD(learning_rate, local_steps, Batching(batch_size))


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


def add_mean(
    round: Round,
    task: Task,
    params: Params,
    server_state: ServerState,
    client_states: ClientState,
    total: Contribution,
) -> tuple[Params, ServerState]:
    """The plain server: ``w <- w + (sum of weighted changes) / (sum of weights)``."""
    del round, task, client_states
    mean = jax.tree.map(lambda x: x / total.weight, total.update)
    return optax.apply_updates(params, mean), server_state


def averaging(
    change: Callable[[LocalProblem], Change],
    weight: Callable[[LocalProblem], Float[Array, ""]] = LocalProblem.weight,
    *,
    num_gradients: int,
    server: ServerFn = add_mean,
) -> Algorithm:
    """The method whose clients send a weighted change and whose server takes the weighted mean.

    No state is kept, neither by clients nor by the server.

    Args:
      change: what a client's local training changes.
      weight: of a client's change; by default n_k.
      num_gradients: that a client computes in a round.
      server: what is done with the two sums, instead of their quotient.

    Example: the plainest method there is, one gradient step at a rate of 0.1.
      >>> import jax
      >>> from fedjax_mm import full_participation, quadratic, simulate
      >>> local = local_sgd(0.1, local_steps=1, batch_size=None)
      >>> algorithm = averaging(local.train, num_gradients=1)
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True
    """

    def init(task: Task, params: Params) -> tuple[ServerState, ClientState]:
        del task, params
        return (), ()

    def client(
        local: LocalProblem, server_state: ServerState, client_state: ClientState
    ) -> tuple[Contribution, ClientState]:
        del server_state
        # The weight comes first: it may be a pass over the client's data at the global parameters.
        factor, trained = weight(local), change(local)
        update = scale_update(trained.update, factor)
        sent = Contribution(update, factor, jnp.int32(num_gradients), trained.report)
        return sent, client_state

    return Algorithm(init, client, server)
