"""Settings of local training."""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from annotated_types import Interval
from jaxtyping import Array, Bool, Int

from fedjax_mm import base
from fedjax_mm.base import (
    Batching,
    BatchSize,
    ClientContext,
    Padded,
    Params,
    Scalar,
    Steps,
    Task,
    needs,
)
from fedjax_mm.base.calls import Part
from fedjax_mm.base.capabilities import AnalyticTask, EpochTask
from fedjax_mm.checks.annotations import NonNegative, Positive, part
from fedjax_mm.checks.instances import check_optimizer_factory, check_rate, check_schedule
from fedjax_mm.checks.values import (
    check_choice,
    check_count,
    check_epochs,
    check_known,
    check_positive,
    described,
    whole,
)
from fedjax_mm.local.gradients import GradientFn, StepGradient
from fedjax_mm.local.training import LocalUpdate, descend
from fedjax_mm.schedules import Schedule, value_at

LocalOptimizer: TypeAlias = Callable[[Scalar], optax.GradientTransformation]
"""Makes an optax optimizer from the round's learning rate, such as `optax.sgd`."""


STATE = "optimizer"
"""Where the report of `LocalSGD.train` has the optimizer's state, if it is kept."""


class Kept(NamedTuple):
    """State of a local optimizer between rounds.

    Attributes:
      is_known: whether there is one; otherwise training starts from a fresh state.
      state: the state; None while its structure is looked for.
    """

    is_known: bool | Bool[Array, ""]
    state: Any

    def or_fresh(self, fresh: Any) -> Any:
        """The state to start from."""
        if self.state is None:
            return fresh
        return jax.tree.map(partial(jnp.where, jnp.asarray(self.is_known)), self.state, fresh)


class Epochs(NamedTuple):
    """A number of local steps, given as passes over a client's examples."""

    number: int | float
    batch_size: int | None

    def num_steps(self, task: Task, client: base.Index) -> int | Int[Array, ""]:
        """``ceil(n_k / B)`` steps for each whole epoch, and ``ceil(f n_k / B)`` for a fraction f.

        Raises:
          ValueError: if the task does not define epochs, or the steps do not fit in int32.
        """
        (number, size), counted = self, needs(task, EpochTask)
        batches = counted.num_batches(client, size)
        check_epochs(
            math.ceil(number), batches if isinstance(batches, int) else _most_batches(task, size)
        )
        steps = int(number) * batches
        if number == int(number):
            return steps
        # Products of floats would round up beyond whole numbers, as that of 0.1 and 30.
        part = Fraction(number % 1).limit_denominator(1000)
        examples = 1 if size is None else counted.num_batches(client, 1)
        return steps - -part.numerator * examples // (part.denominator * (size or 1))


class _LocalSGDFields(NamedTuple):
    learning_rate: Scalar | Schedule
    steps: Steps | Epochs | None
    batch_size: BatchSize | Schedule
    order: Literal["iid", "epochs"]
    optimizer: LocalOptimizer
    momentum: Scalar | None = None
    weight_decay: Scalar | None = None
    clip: Scalar | None = None
    keeps: Literal["client", "mean"] | None = None


class LocalSGD(Part, _LocalSGDFields):
    """Settings of local training, built and documented by `local_sgd`.

    Attributes:
      learning_rate: a number, or a schedule over rounds.
      steps: E, epochs, or None if the method determines the number of steps.
      batch_size: a number, a schedule over rounds, or None for all examples.
      order: the order in which batches are drawn.
      optimizer: makes the optimizer from the round's learning rate.
      momentum: of SGD, or None.
      weight_decay: times the parameters is added to gradients, or None.
      clip: the global norm to which gradients are clipped, or None.
      keeps: who keeps the optimizer's state between rounds, or None.
    """

    def rate(self, round: base.Round) -> Scalar:
        """Learning rate in a round."""
        rate: Scalar = value_at(self.learning_rate, round)
        return rate

    def num_steps(
        self, task: Task, client: base.Index, server_state: base.ServerState = ()
    ) -> int | Int[Array, ""]:
        """Number of local steps K_k, as `Algorithm.num_steps`: E, or the steps of the epochs.

        Raises:
          ValueError: if neither steps nor epochs are given, the task does not define epochs, or
            the epochs' steps do not fit in int32.
        """
        del server_state
        if self.steps is None:
            raise ValueError("neither local steps nor epochs are given; give one of the two")
        if isinstance(self.steps, Epochs):
            return self.steps.num_steps(task, client)
        return self.steps

    @property
    def is_linear(self) -> bool:
        """Whether steps are sums of gradients, as those of SGD with or without momentum."""
        called: Any = self.optimizer
        if isinstance(called, partial) and not called.args:
            called = called.func
        return called is optax.sgd

    def normalizer(self, task: Task, client: base.Index) -> Scalar | Steps:
        """FedNova's a_k: an update is -eta times a sum of gradients whose weights sum up to a_k.

        It is K_k without momentum, and ``sum_j (1 - beta^j) / (1 - beta)`` with momentum beta.
        Clipping and weight decay change the gradients before they are summed.

        Raises:
          ValueError: if the optimizer is not SGD.
        """
        if not self.is_linear:
            raise ValueError(f"optimizer is {described(self.optimizer)}, and only SGD has a_k")
        num_steps = self.num_steps(task, client)
        if self.momentum is None and self.optimizer is optax.sgd:
            return num_steps
        # Take the steps with gradients of 1 and a rate of 1.
        sgd, start = self._rule(1.0), jnp.zeros(())

        def step(_: Any, carry: Any) -> Any:
            moved, state = carry
            update, state = sgd.update(jnp.ones(()), state)
            return moved - update, state

        length: Array = jax.lax.fori_loop(0, num_steps, step, (start, sgd.init(start)))[0]
        return length

    def optimizer_at(self, round: base.Round) -> optax.GradientTransformation:
        """The optimizer of a round, after clipping and weight decay."""
        first: list[Any] = [] if self.clip is None else [optax.clip_by_global_norm(self.clip)]
        if self.weight_decay is not None:
            first += [optax.add_decayed_weights(self.weight_decay)]
        rule = self._rule(self.rate(round))
        return optax.chain(*first, rule) if first else rule

    def _rule(self, rate: Scalar) -> optax.GradientTransformation:
        if self.momentum is None:
            return self.optimizer(rate)
        return optax.sgd(rate, momentum=self.momentum)

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
        gradient_fn: GradientFn | StepGradient | None = None,
        num_batches: int = 1,
        num_steps: Int[Array, ""] | None = None,
        start: Params | None = None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> LocalUpdate:
        """Trains a client with `train_locally` and returns its update.

        `num_steps` and `optimizer` override those of the settings.
        """
        start = context.params if start is None else start
        optimizer = self.optimizer_at(context.round) if optimizer is None else optimizer
        steps = self.num_steps(context.task, context.client) if num_steps is None else num_steps
        params, loss, state = descend(
            *(context, optimizer, steps, self.batching(context.round)),
            gradient_fn=gradient_fn,
            num_batches=num_batches,
            start=start,
            state=None if self.keeps is None else self._state(context, optimizer.init(start)),
        )
        update = LocalUpdate.between(start, params, loss)
        return (
            update if self.keeps is None else update._replace(report={"loss": loss, STATE: state})
        )

    def _state(self, context: ClientContext, fresh: Any) -> Any:
        if not isinstance(context.kept, Kept):
            raise ValueError(
                f"keeps is {self.keeps!r}, but this method does not keep the optimizer's state; "
                "return keeping(algorithm, local) from it, of fedjax_mm.local"
            )
        return context.kept.or_fresh(fresh)

    def train_or_solve(self, context: ClientContext) -> LocalUpdate:
        """Trains a client, using the task's closed form of local SGD if it has one.

        The update may then be sparse, and the report is the loss at the global parameters, or NaN
        if the task does not provide its clients' losses.
        """
        task, others = context.task, (self.batch_size, self.momentum, self.weight_decay, self.clip)
        is_plain = others == (None,) * 4 and self.optimizer is optax.sgd
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
    epochs: int | float | None = None,
    batch_size: BatchSize | Schedule = None,
    order: Literal["iid", "epochs"] | None = None,
    momentum: Annotated[Scalar, Interval(ge=0, lt=1)] | None = None,
    weight_decay: NonNegative | None = None,
    clip: Positive | None = None,
    optimizer: LocalOptimizer = optax.sgd,
    keeps: Literal["client", "mean"] | None = None,
) -> LocalSGD:
    """Settings of local training, the first argument of every method.

    Args:
      learning_rate: eta, a number (which may be traced) or a schedule over rounds t = 1, 2, ...
      steps: E local steps per client; cannot be combined with `epochs`. Only `afl` needs neither.
      epochs: passes over the client's examples, each of ``ceil(n_k / B)`` local steps. The last
        may be a fraction f, of ``ceil(f n_k / B)`` steps.
      batch_size: B examples per local step; None uses the full gradient. With a schedule N_s(t),
        each step of round t draws N_s(t) of the client's examples without replacement, at most all.
      order: "iid" draws every example of a batch independently; "epochs" visits all examples in a
        new order each epoch. Defaults to "epochs" if `epochs` is given, and otherwise to "iid".
      momentum: beta of SGD, whose steps are ``m <- beta m + g`` and ``w <- w - eta m``.
      weight_decay: times the parameters is added to gradients, after clipping.
      clip: the global norm to which gradients are clipped.
      optimizer: makes an optax optimizer from the round's learning rate. With `optax.sgd` and full
        gradients, a task may use its closed form.
      keeps: who keeps the optimizer's state, such as momentum, between rounds. None starts each
        local training from a fresh one. With "client", each client keeps the state of its last
        training of a model. With "mean", clients start from the mean of the states at the end of
        the last round, which is averaged like their updates and sent both ways. Integers, such as
        counts of steps, become the largest of any client.

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
    epochs = _checked_epochs(epochs)
    if momentum is not None and optimizer is not optax.sgd:
        raise ValueError(
            f"momentum is that of SGD, but optimizer is {described(optimizer)}; leave out one of "
            "the two"
        )
    if keeps is not None and momentum is None and optimizer is optax.sgd:
        raise ValueError(
            f"keeps is {keeps!r}, but SGD has no state to keep; give momentum, another optimizer, "
            "or no keeps"
        )
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
    each = momentum, weight_decay, clip, keeps
    return LocalSGD(learning_rate, length, batch_size, order, optimizer, *each)


def _checked_epochs(epochs: Any) -> Any:
    if epochs is None or whole(epochs) is not None:
        return check_count("epochs", epochs, optional=True)
    check_known("epochs", epochs)
    check_positive("epochs", epochs)
    return int(epochs) if epochs == int(epochs) else float(epochs)
