"""Local training, and the parts that federated methods share."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from fedjax_mm import base
from fedjax_mm.base import (
    Algorithm,
    Batching,
    BatchSize,
    ClientContext,
    Contribution,
    Padded,
    Params,
    Scalar,
    Steps,
    Task,
)
from fedjax_mm.checks import check_choice, check_count, check_epochs, needs
from fedjax_mm.parts import check_optimizer_factory, check_rate, check_schedule
from fedjax_mm.schedules import Schedule
from fedjax_mm.sums import scale_update

LocalOptimizer: TypeAlias = Callable[[Scalar], optax.GradientTransformation]
"""Function that makes an optax optimizer from the round's learning rate, such as `optax.sgd`."""

Direction: TypeAlias = Callable[..., tuple[Float[Array, ""], Params]]
"""``(params, *batches) -> (loss, direction)``: the loss to report, and the vector that a local step
descends along. `jax.value_and_grad` of the task's loss is one."""

_LARGE_BYTES = 2**20  # of parameters


class Change(NamedTuple):
    """Result of local training.

    Attributes:
      update: local minus global parameters.
      report: ``{"loss": the mean loss of the batches while training}``.
    """

    update: Any
    report: dict[str, Float[Array, ""]]

    @classmethod
    def between(cls, start: Params, params: Params, loss: Float[Array, ""]) -> "Change":
        """Returns the change between two points, with the mean loss on the way."""
        return cls(jax.tree.map(jnp.subtract, params, start), {"loss": loss})


def train_locally(
    local: ClientContext,
    optimizer: optax.GradientTransformation,
    num_steps: int | Int[Array, ""],
    how: Batching,
    *,
    direction: Direction | None = None,
    num_batches: int = 1,
    start: Params | None = None,
) -> tuple[Params, Float[Array, ""]]:
    """Returns a client's parameters after `num_steps` steps, and the mean loss of its batches.

    Args:
      local: the client's problem.
      optimizer: an optax optimizer with a fixed learning rate.
      num_steps: E. If it is traced, the result cannot be differentiated in reverse.
      how: the rule by which batches are drawn.
      direction: replaces the gradient of the task's loss.
      num_batches: the number of the task's batches that each step gets.
      start: the parameters to start from; by default the global ones.
    """
    step_along = jax.value_and_grad(local.task.loss) if direction is None else direction

    def batches_of(step: int | Int[Array, ""]) -> list[Any]:
        first = jnp.asarray(step, jnp.int32) * num_batches
        steps = [first + i for i in range(num_batches)]
        return [local.task.batch(local.rng_key, local.client, step, how) for step in steps]

    # XLA fuses the draw of a row's number into the gather, and repeats it for every feature. Values
    # that a loop carries are computed once: each step draws the batch of the next one.
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
    # XLA copies all parameters in every step if one layer's may be updated before another layer's
    # gradient is computed: a data dependency makes every update wait for all gradients. XLA removes
    # `lax.optimization_barrier` too early, but does not simplify a comparison with infinity.
    leaves = [leaf for leaf in jax.tree.leaves(gradients) if leaf.size]
    zero = sum((leaf.ravel()[0] > jnp.inf).astype(leaf.dtype) for leaf in leaves)
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), gradients)


class LocalSGD(NamedTuple):
    """Settings of plain local training; build them with `local_sgd`, which explains the fields."""

    learning_rate: Scalar | Schedule
    local_steps: Steps | None
    epochs: int | None
    batch_size: BatchSize | Schedule
    order: Literal["iid", "epochs"]
    optimizer: LocalOptimizer

    def rate(self, round: base.Round) -> Scalar:
        """Returns the learning rate in a round."""
        return self.learning_rate(round) if callable(self.learning_rate) else self.learning_rate

    def num_steps(self, task: Task, client: base.Index) -> int | Int[Array, ""]:
        """Returns E, or the steps of the epochs.

        Raises:
          ValueError: if the task has no epochs, or they have more steps than can be counted.
        """
        if self.local_steps is not None:
            return self.local_steps
        assert self.epochs is not None
        assert isinstance(self.batch_size, int | None)
        batches = needs(task, base.EpochTask).num_batches(client, self.batch_size)
        most = batches if isinstance(batches, int) else _most_batches(task, self.batch_size)
        check_epochs(self.epochs, most)
        return self.epochs * batches

    def equal_steps(self, task: Task) -> bool:
        """Returns whether all clients take equally many steps, traced ones included."""
        return self.epochs is None or isinstance(self.num_steps(task, jnp.int32(0)), int)

    def batching(self, round: base.Round) -> Batching:
        """Returns the rule by which clients' batches are drawn in a round."""
        if callable(self.batch_size):
            return Batching(limit=self.batch_size(round))
        if isinstance(self.batch_size, Padded):
            return Batching(self.batch_size.size, self.order, self.batch_size.number)
        return Batching(self.batch_size, self.order)

    def train(
        self,
        local: ClientContext,
        *,
        direction: Direction | None = None,
        num_batches: int = 1,
        num_steps: Int[Array, ""] | None = None,
        start: Params | None = None,
    ) -> Change:
        """Trains a client and returns the change of its parameters; see `train_locally`.

        `num_steps` replaces the number of steps of the settings.
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

    def train_or_solve(self, local: ClientContext) -> Change:
        """Trains a client, by the task's closed form of local SGD if it has one.

        The change may then be sparse, and the report is the loss at the global parameters, or NaN
        if the task does not give clients' losses.
        """
        task, is_plain = local.task, self.batch_size is None and self.optimizer is optax.sgd
        steps = self.local_steps if is_plain else None
        if steps is None or not isinstance(task, base.AnalyticTask):
            return self.train(local)
        update = task.local_sgd(local.params, local.client, self.rate(local.round), steps)
        loss = local.loss() if isinstance(task, base.MeasuredTask) else jnp.full((), jnp.nan)
        return Change(update, {"loss": loss})


def _most_batches(task: Task, size: int | None) -> int:
    """Returns the batches of an epoch of the largest client, as far as that is known."""
    # Clients' data know it without their values, which may be traced; the first are for training.
    parts = jax.tree.leaves(task, is_leaf=lambda x: hasattr(x, "max_count"))
    counts = [part.max_count for part in parts if hasattr(part, "max_count")]
    return -(-counts[0] // (size or counts[0])) if counts else 1


def local_sgd(
    learning_rate: Scalar | Schedule,
    local_steps: Steps | None,
    batch_size: BatchSize | Schedule = None,
    epochs: int | None = None,
    order: Literal["iid", "epochs"] | None = None,
    optimizer: LocalOptimizer = optax.sgd,
) -> LocalSGD:
    """Returns the settings of local training after checking them.

    Args:
      learning_rate: eta, a number (it may be traced) or a schedule of the round t = 1, 2, ...
      local_steps: E, for every client; give this or `epochs`.
      batch_size: B examples per local step; None takes the full gradient. With a schedule N_s(t),
        each step of round t draws N_s(t) of the client's examples without replacement, at most all.
      epochs: passes over the client's examples, of ``ceil(n_k / B)`` local steps each.
      order: "iid" draws every example of a batch independently; "epochs" goes through all examples
        in a new order for each epoch. The default is "epochs" if `epochs` is given, else "iid".
      optimizer: makes an optax optimizer from the round's rate, anew in every round.

    Raises:
      ValueError: if a number is not positive, or settings contradict each other.
    """
    check_rate("learning_rate", learning_rate)
    check_optimizer_factory("local_optimizer", optimizer)
    local_steps = check_count("local_steps", local_steps, optional=True)
    epochs = check_count("epochs", epochs, optional=True)
    if (local_steps is None) == (epochs is None):
        raise ValueError(f"local_steps is {local_steps}, epochs is {epochs}; give one of the two")
    if isinstance(batch_size, Padded) and (epochs is not None or order == "epochs"):
        raise ValueError("padded batches have no epochs; give local_steps, and no order or 'iid'")
    if isinstance(batch_size, Padded):
        check_count("batch_size", batch_size.size)
    elif callable(batch_size):
        check_schedule("batch_size", batch_size)
    else:
        batch_size = check_count("batch_size", batch_size, optional=True)
    check_choice("order", order, "iid", "epochs", None)
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


def proximal(local: ClientContext, strength: Scalar) -> Direction:
    """Returns the direction ``grad F_k(w_k) + strength (w_k - w)``, which stays near w."""

    def direction(own: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
        loss, gradient = jax.value_and_grad(local.task.loss)(own, batch)
        held = jax.tree.map(lambda g, x, w: g + strength * (x - w), gradient, own, local.params)
        return loss, held

    return direction


def equal_weight(local: ClientContext) -> Float[Array, ""]:
    """Returns 1 times the scale, the weight of a client in an unweighted mean."""
    return jnp.ones(()) * local.scale


def add_mean(params: Params, total: Contribution) -> Params:
    """Returns ``w + (sum of weighted changes) / (sum of weights)``, the plain server's step."""
    mean = jax.tree.map(lambda x: x / total.weight, total.update)
    return optax.apply_updates(params, mean)


def averaging(
    change: Callable[[ClientContext], Change],
    weight: Callable[[ClientContext], Float[Array, ""]] = ClientContext.weight,
    *,
    num_gradients: Steps,
    server: Callable[[Params, Contribution], Params] = add_mean,
) -> Algorithm:
    """Returns the method whose clients send weighted changes and whose server adds their mean.

    Args:
      change: trains a client and returns the change of its parameters.
      weight: returns the weight of a client's change; by default n_k.
      num_gradients: the number of gradients that a client computes in a round.
      server: returns the new w from w and the sums; by default w plus the weighted mean change.

    Example: the plainest method there is, one gradient step at a rate of 0.1.
      >>> import jax
      >>> from fedjax_mm import full_participation, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = averaging(local_sgd(0.1, local_steps=1).train, num_gradients=1)
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True
    """

    def client(local: ClientContext) -> Contribution:
        factor, trained = weight(local), change(local)
        update = scale_update(trained.update, factor)
        return Contribution(update, factor, jnp.int32(num_gradients), trained.report)

    return stateless(client, server)


def stateless(
    client: Callable[[ClientContext], Contribution],
    server: Callable[[Params, Contribution], Params],
) -> Algorithm:
    """Returns the method without states at the clients and at the server.

    Args:
      client: returns one client's contribution.
      server: returns the new w from w and the sum of the contributions.
    """

    def init(task: Task, params: Params) -> tuple[base.ServerState, base.ClientState]:
        del task, params
        return (), ()

    def contribute(
        local: ClientContext, server_state: base.ServerState, client_state: base.ClientState
    ) -> tuple[Contribution, base.ClientState]:
        del server_state
        return client(local), client_state

    return Algorithm(init, contribute, plain_server(server))


def plain_server(step: Callable[[Params, Contribution], Params] = add_mean) -> base.ServerFn:
    """Returns a server function without a state, from a step on w and the sums."""

    def server(given: base.ServerContext) -> tuple[Params, base.ServerState]:
        return step(given.params, given.total), given.server_state

    return server
