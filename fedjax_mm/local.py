"""Local training, and building blocks shared by federated methods.

The task draws each batch; for data in memory, `ClientData` does (`data/clients.py`).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
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
    needs,
)
from fedjax_mm.base.calls import Part
from fedjax_mm.base.capabilities import AnalyticTask, EpochTask
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import part
from fedjax_mm.checks.instances import check_optimizer_factory, check_rate, check_schedule
from fedjax_mm.checks.values import check_choice, check_count, check_epochs, described
from fedjax_mm.schedules import Schedule, value_at
from fedjax_mm.tools.loops import local_steps

LocalOptimizer: TypeAlias = Callable[[Scalar], optax.GradientTransformation]
"""Makes an optax optimizer from the round's learning rate, such as `optax.sgd`."""

GradientFn: TypeAlias = Callable[..., tuple[Float[Array, ""], Params]]
"""``(params, *batches) -> (loss, gradient)``: the loss to report, and the vector that a local step
descends along, as returned for example by `jax.value_and_grad` of the task's loss."""

_LARGE_BYTES = 2**20  # bytes of parameters above which a model is large


class LocalUpdate(NamedTuple):
    """Result of local training.

    Attributes:
      update: local minus global parameters.
      report: ``{"loss": the mean training loss of the batches}``.
    """

    update: Any
    report: dict[str, Float[Array, ""]]

    @classmethod
    def between(cls, start: Params, params: Params, loss: Float[Array, ""]) -> "LocalUpdate":
        """Update from one point to another, with the mean loss along the way."""
        return cls(jax.tree.map(jnp.subtract, params, start), {"loss": loss})


def loss_and_gradient(task: Task) -> GradientFn:
    """Returns the function ``(params, batch) -> (loss, gradient)`` of a task.

    It raises `TypeError` if the loss is not one float, or if parameters are integers.
    """
    name = type(task).__name__

    def loss(params: Params, batch: Any) -> Float[Array, ""]:
        found: Any = task.loss(params, batch)
        is_array = isinstance(found, jax.Array)
        if not is_array or found.shape or not jnp.issubdtype(found.dtype, jnp.floating):
            given = jax.typeof(found).str_short() if is_array else described(found)
            raise TypeError(f"{name}.loss returns {given}; return one float, such as a jnp.mean")
        return found

    def both(params: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
        for leaf in jax.tree.leaves(params):
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                given = jax.typeof(leaf).str_short()
                raise TypeError(f"{name}.init returns {given}; gradients need parameters of floats")
        return jax.value_and_grad(loss)(params, batch)

    return both


def train_locally(
    context: ClientContext,
    optimizer: optax.GradientTransformation,
    num_steps: int | Int[Array, ""],
    how: Batching,
    *,
    gradient_fn: GradientFn | None = None,
    num_batches: int = 1,
    start: Params | None = None,
) -> tuple[Params, Float[Array, ""]]:
    """Returns a client's parameters after `num_steps` steps, and the mean loss of its batches.

    Args:
      context: the client's inputs.
      optimizer: an optax optimizer with a fixed learning rate.
      num_steps: E. If it is traced, the result cannot be differentiated in reverse.
      how: how batches are drawn.
      gradient_fn: replaces the gradient of the task's loss.
      num_batches: the number of batches per step.
      start: the parameters to start from; defaults to the global parameters.
    """
    value_and_gradient = loss_and_gradient(context.task) if gradient_fn is None else gradient_fn

    def batches_of(step: int | Int[Array, ""]) -> list[Any]:
        first = jnp.asarray(step, jnp.int32) * num_batches
        steps = [first + i for i in range(num_batches)]
        return [context.task.batch(context.rng_key, context.client, step, how) for step in steps]

    # Draw the next step's batch in each step, because XLA would otherwise fuse the draw of a row
    # index into the gather and repeat it for every feature, whereas a loop-carried value is
    # computed once.
    def step(step: Int[Array, ""], carry: Any) -> Any:
        params, state, batches, losses = carry
        loss, gradients = value_and_gradient(params, *batches)
        gradients = _all_at_once(gradients) if is_large else gradients
        updates, state = optimizer.update(gradients, state, params)
        losses = losses + loss.astype(losses.dtype)
        return optax.apply_updates(params, updates), state, batches_of(step + 1), losses

    start = context.params if start is None else start
    is_large = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(start)) >= _LARGE_BYTES
    carry = start, optimizer.init(start), batches_of(0), jnp.zeros(())
    params, _, _, losses = local_steps(num_steps, step, carry, is_small=not is_large)
    return params, losses / num_steps


def unit_steps(rate: Scalar) -> optax.GradientTransformation:
    """Returns SGD of rate 1, for gradients that a method has multiplied by the rate itself."""
    del rate
    return optax.sgd(1.0)


def _all_at_once(gradients: Params) -> Params:
    # XLA copies all parameters in every step if it may update one layer before computing another
    # layer's gradient. Make every update depend on all gradients, by a comparison with infinity,
    # which XLA does not simplify. `lax.optimization_barrier` is removed too early.
    leaves = [leaf for leaf in jax.tree.leaves(gradients) if leaf.size]
    zero = sum((leaf.ravel()[0] > jnp.inf).astype(leaf.dtype) for leaf in leaves)
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), gradients)


class Epochs(NamedTuple):
    """A number of local steps, given as passes over a client's examples."""

    number: int
    batch_size: int | None


class _LocalSGDFields(NamedTuple):
    learning_rate: Scalar | Schedule
    steps: Steps | Epochs | None
    batch_size: BatchSize | Schedule
    order: Literal["iid", "epochs"]
    optimizer: LocalOptimizer


class LocalSGD(Part, _LocalSGDFields):
    """Settings of local training, built and documented by `local_sgd`.

    Attributes:
      learning_rate: a number, or a schedule over rounds.
      steps: E, epochs, or None if the method determines the number of steps.
      batch_size: a number, a schedule over rounds, or None for all examples.
      order: the order in which batches are drawn.
      optimizer: makes the optimizer from the round's learning rate.
    """

    def rate(self, round: base.Round) -> Scalar:
        """Learning rate in a round."""
        rate: Scalar = value_at(self.learning_rate, round)
        return rate

    def num_steps(self, task: Task, client: base.Index) -> int | Int[Array, ""]:
        """Number of local steps: E, or the steps of the epochs.

        Raises:
          ValueError: if neither steps nor epochs are given, the task does not define epochs, or
            the epochs' steps do not fit in int32.
        """
        if self.steps is None:
            raise ValueError("neither local steps nor epochs are given; give one of the two")
        if not isinstance(self.steps, Epochs):
            return self.steps
        epochs, size = self.steps
        batches = needs(task, EpochTask).num_batches(client, size)
        check_epochs(epochs, batches if isinstance(batches, int) else _most_batches(task, size))
        return epochs * batches

    def batching(self, round: base.Round) -> Batching:
        """Settings by which clients' batches are drawn in a round."""
        if callable(self.batch_size):
            return Batching(limit=self.batch_size(round))
        if isinstance(self.batch_size, Padded):
            return Batching(self.batch_size.size, self.order, self.batch_size.number)
        return Batching(self.batch_size, self.order)

    def train(
        self,
        context: ClientContext,
        *,
        gradient_fn: GradientFn | None = None,
        num_batches: int = 1,
        num_steps: Int[Array, ""] | None = None,
        start: Params | None = None,
    ) -> LocalUpdate:
        """Trains a client with `train_locally` and returns its update.

        `num_steps` overrides the number of steps in the settings.
        """
        start = context.params if start is None else start
        trained = train_locally(
            context,
            self.optimizer(self.rate(context.round)),
            self.num_steps(context.task, context.client) if num_steps is None else num_steps,
            self.batching(context.round),
            gradient_fn=gradient_fn,
            num_batches=num_batches,
            start=start,
        )
        return LocalUpdate.between(start, *trained)

    def train_or_solve(self, context: ClientContext) -> LocalUpdate:
        """Trains a client, using the task's closed form of local SGD if it has one.

        The update may then be sparse, and the report is the loss at the global parameters, or NaN
        if the task does not provide its clients' losses.
        """
        task, is_plain = context.task, self.batch_size is None and self.optimizer is optax.sgd
        steps = self.steps if is_plain else None
        if isinstance(steps, Epochs | None) or not isinstance(task, AnalyticTask):
            return self.train(context)
        update = task.local_sgd(context.params, context.client, self.rate(context.round), steps)
        loss = context.loss() if isinstance(task, base.MeasuredTask) else jnp.full((), jnp.nan)
        return LocalUpdate(update, {"loss": loss})


def _most_batches(task: Task, size: int | None) -> int:
    """Number of batches per epoch of the largest client, or 1 if unknown."""
    # Counts may be traced. Read the static bound of the first data store, which holds the training
    # data.
    parts = jax.tree.leaves(task, is_leaf=lambda x: hasattr(x, "max_count"))
    counts = [part.max_count for part in parts if hasattr(part, "max_count")]
    return -(-counts[0] // (size or counts[0])) if counts else 1


@part
def local_sgd(
    learning_rate: Scalar | Schedule,
    *,
    steps: Steps | None = None,
    epochs: int | None = None,
    batch_size: BatchSize | Schedule = None,
    order: Literal["iid", "epochs"] | None = None,
    optimizer: LocalOptimizer = optax.sgd,
) -> LocalSGD:
    """Settings of local training, the first argument of every method.

    Args:
      learning_rate: eta, a number (which may be traced) or a schedule over rounds t = 1, 2, ...
      steps: E local steps per client; cannot be combined with `epochs`. Only `afl` needs neither.
      epochs: passes over the client's examples, each of ``ceil(n_k / B)`` local steps.
      batch_size: B examples per local step; None uses the full gradient. With a schedule N_s(t),
        each step of round t draws N_s(t) of the client's examples without replacement, at most all.
      order: "iid" draws every example of a batch independently; "epochs" visits all examples in a
        new order each epoch. Defaults to "epochs" if `epochs` is given, and otherwise to "iid".
      optimizer: makes an optax optimizer from the round's learning rate. Its state is reset every
        round. With `optax.sgd` and full gradients, a task may use its closed form.

    Raises:
      ValueError: if a number is not positive, or settings contradict each other.

    Example:
      >>> import jax
      >>> import optax
      >>> from fedjax_mm import ditto, fedprox, local_sgd, mfa_rr, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> local = local_sgd(lambda t: 1 / (9 + t), steps=5, optimizer=optax.adam)
      >>> for algorithm in (fedprox(local, mu=1.0), ditto(local, lam=1.0)):
      ...     _, trace = simulate(
      ...         jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, mfa_rr(24, 2), 10)
      ...     print(bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0]))
      True
      True
    """
    check_rate("learning_rate", learning_rate)
    check_optimizer_factory("optimizer", optimizer)
    check_choice("order", order, "iid", "epochs", None)
    steps = check_count("steps", steps, optional=True, may_be_traced=True)
    epochs = check_count("epochs", epochs, optional=True)
    if steps is not None and epochs is not None:
        raise ValueError(
            f"{steps} local steps and epochs = {epochs} are given; give one of the two"
        )
    length: Steps | Epochs | None = steps
    if callable(batch_size):
        check_schedule("batch_size", batch_size)
        if epochs is not None or order is not None:
            raise ValueError(
                "a schedule of sample sizes draws a sample for each step: give a number of local "
                "steps, and no epochs or order"
            )
    elif isinstance(batch_size, Padded):
        check_count("batch_size", batch_size.size)
        if epochs is not None or order == "epochs":
            raise ValueError(
                "padded batches have no epochs; give a number of local steps, and no order or 'iid'"
            )
    else:
        batch_size = size = check_count("batch_size", batch_size, optional=True)
        length = steps if epochs is None else Epochs(epochs, size)
    if order is not None and batch_size is None:
        raise ValueError(f"order is {order!r}, but steps take all examples; give a batch_size")
    if order == "iid" and epochs is not None:
        raise ValueError(
            "epochs of iid draws would not see every example; give a number of local steps"
        )
    order = order or ("iid" if epochs is None else "epochs")
    return LocalSGD(learning_rate, length, batch_size, order, optimizer)


def check_local(method: str, local: Any) -> LocalSGD:
    """Returns a method's first argument, or raises `TypeError` if it is not from `local_sgd`."""
    if not isinstance(local, LocalSGD):
        raise TypeError(
            f"local is {described(local)}; give the settings of local_sgd, as in "
            f"{method}(local_sgd(0.1, steps=5))"
        )
    return local


def check_only_sgd(method: str, local: LocalSGD) -> None:
    """Raises `ValueError` if clients of a method for SGD alone have another optimizer."""
    if local.optimizer is not optax.sgd:
        raise ValueError(
            f"optimizer is {described(local.optimizer)}, but local steps of {method} are those of "
            "SGD: leave out optimizer, and in a file weight_decay and clip"
        )


def steps_of(method: str, local: LocalSGD, *, only_sgd: bool = False) -> Steps:
    """Returns E for a method whose clients all take E local steps.

    Args:
      method: the method's name, for error messages.
      local: the method's first argument.
      only_sgd: whether the method supports only SGD as optimizer.

    Raises:
      TypeError: if `local` is not from `local_sgd`.
      ValueError: if it has epochs, no number of steps, or an unsupported optimizer.
    """
    steps = check_local(method, local).steps
    if steps is None:
        raise ValueError(f"{method} needs a number of local steps, and none is given")
    if only_sgd:
        check_only_sgd(method, local)
    if isinstance(steps, Epochs):
        raise ValueError(
            f"epochs is {steps.number}, but clients of {method} take equally many local steps; "
            "give their number"
        )
    return steps


def proximal(context: ClientContext, strength: Scalar) -> GradientFn:
    """Proximal gradient function ``grad F_k(w_k) + strength (w_k - w)``."""

    def gradient_fn(own: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
        loss, gradient = loss_and_gradient(context.task)(own, batch)
        held = jax.tree.map(lambda g, x, w: g + strength * (x - w), gradient, own, context.params)
        return loss, held

    return gradient_fn


def equal_weight(context: ClientContext) -> Float[Array, ""]:
    """Weight of a client in an unweighted mean, which is its scale."""
    return jnp.ones(()) * context.scale


def add_mean(params: Params, total: Contribution) -> Params:
    """Plain server step, ``w + (sum of weighted updates) / (sum of weights)``."""
    mean = jax.tree.map(lambda x: x / total.weight, total.update)
    return optax.apply_updates(params, mean)


def averaging(
    train: Callable[[ClientContext], LocalUpdate],
    weight: Callable[[ClientContext], Float[Array, ""]] = ClientContext.weight,
    *,
    num_gradients: Steps,
    server: Callable[[Params, Contribution], Params] = add_mean,
) -> Algorithm:
    """Builds an algorithm whose clients send weighted updates and whose server adds their mean.

    Args:
      train: trains a client, as `LocalSGD.train` does.
      weight: returns a client's weight; defaults to n_k.
      num_gradients: the number of gradients that a client computes per round.
      server: returns the new w from w and the sum of the contributions; defaults to adding the
        weighted mean update.

    Example: the simplest method, with one gradient step at a rate of 0.1.
      >>> import jax
      >>> from fedjax_mm import full_participation, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = averaging(local_sgd(0.1, steps=1).train, num_gradients=1)
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True
    """

    def client(context: ClientContext) -> Contribution:
        factor, trained = weight(context), train(context)
        update = scale_update(trained.update, factor)
        return Contribution(update, factor, jnp.int32(num_gradients), trained.report)

    return stateless(client, server)


def stateless(
    client: Callable[[ClientContext], Contribution],
    server: Callable[[Params, Contribution], Params],
) -> Algorithm:
    """Builds an algorithm without client or server states.

    Args:
      client: returns one client's contribution.
      server: returns the new w from w and the sum of the contributions.
    """

    def init(task: Task, params: Params) -> tuple[base.ServerState, base.ClientState]:
        del task, params
        return (), ()

    def contribute(
        context: ClientContext, server_state: base.ServerState, client_state: base.ClientState
    ) -> tuple[Contribution, base.ClientState]:
        del server_state
        return client(context), client_state

    return Algorithm(init, contribute, plain_server(server))


def plain_server(step: Callable[[Params, Contribution], Params] = add_mean) -> base.ServerFn:
    """Makes a stateless server function from a function of w and the sum of contributions."""

    def server(context: base.ServerContext) -> tuple[Params, base.ServerState]:
        return step(context.params, context.total), context.server_state

    return server
