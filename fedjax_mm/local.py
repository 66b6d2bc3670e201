"""Local training, and building blocks shared by federated methods.

The task draws each batch; for data in memory, `ClientData` does (`data/clients.py`).
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial, wraps
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from annotated_types import Interval
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
from fedjax_mm.checks.annotations import NonNegative, Positive, part
from fedjax_mm.checks.instances import (
    check_optimizer,
    check_optimizer_factory,
    check_rate,
    check_schedule,
)
from fedjax_mm.checks.values import (
    check_choice,
    check_count,
    check_epochs,
    check_known,
    check_positive,
    described,
    whole,
)
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


def each_by(optimizer: optax.GradientTransformation, *names: str) -> optax.GradientTransformation:
    """Optimizes the named entries of a dict one by one, and subtracts the gradients of others."""

    def init(params: Params) -> dict[str, Any]:
        return {name: optimizer.init(params[name]) for name in names}

    def update(gradients: Params, state: dict[str, Any], params: Any) -> tuple[Params, Any]:
        steps = jax.tree.map(jnp.negative, gradients)
        for name in names:
            each = gradients[name], state[name], params[name]
            steps[name], new = optimizer.update(*each)
            state = {**state, name: new}
        return steps, state

    return optax.GradientTransformation(init, update)


def _all_at_once(gradients: Params) -> Params:
    # XLA copies all parameters in every step if it may update one layer before computing another
    # layer's gradient. Make every update depend on all gradients, by a comparison with infinity,
    # which XLA does not simplify. `lax.optimization_barrier` is removed too early.
    leaves = [leaf for leaf in jax.tree.leaves(gradients) if leaf.size]
    zero = sum((leaf.ravel()[0] > jnp.inf).astype(leaf.dtype) for leaf in leaves)
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), gradients)


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
    """

    def rate(self, round: base.Round) -> Scalar:
        """Learning rate in a round."""
        rate: Scalar = value_at(self.learning_rate, round)
        return rate

    def num_steps(
        self, task: Task, client: base.Index, server_state: base.ServerState = ()
    ) -> int | Int[Array, ""]:
        """Number of local steps K_k: E, or the steps of the epochs; for `Algorithm.num_steps`, too.

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
        gradient_fn: GradientFn | None = None,
        num_batches: int = 1,
        num_steps: Int[Array, ""] | None = None,
        start: Params | None = None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> LocalUpdate:
        """Trains a client with `train_locally` and returns its update.

        `num_steps` and `optimizer` override those of the settings.
        """
        start = context.params if start is None else start
        trained = train_locally(
            context,
            self.optimizer_at(context.round) if optimizer is None else optimizer,
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
      momentum: beta of SGD, whose steps are ``m <- beta m + g`` and ``w <- w - eta m``. It is reset
        every round.
      weight_decay: times the parameters is added to gradients, after clipping.
      clip: the global norm to which gradients are clipped.
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
    epochs = _checked_epochs(epochs)
    if momentum is not None and optimizer is not optax.sgd:
        raise ValueError(
            f"momentum is that of SGD, but optimizer is {described(optimizer)}; leave out one of "
            "the two"
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
    each = momentum, weight_decay, clip
    return LocalSGD(learning_rate, length, batch_size, order, optimizer, *each)


def _checked_epochs(epochs: Any) -> Any:
    if epochs is None or whole(epochs) is not None:
        return check_count("epochs", epochs, optional=True)
    check_known("epochs", epochs)
    check_positive("epochs", epochs)
    return int(epochs) if epochs == int(epochs) else float(epochs)


_SUMS = "leave out optimizer, or give local_sgd momentum, weight_decay or clip instead"

REFUSED = {
    ("prsgd", "epochs"): "Problem 1 counts iterations, and all clients take I of them between "
    "averages: give their number as steps",
    ("prsgd", "optimizer"): f"its step is x - gamma G: {_SUMS}",
    ("scaffold, option II", "optimizer"): "the control variate is a mean gradient, which only a "
    f"sum of gradients gives: {_SUMS}, or take option I",
    ("fednova", "optimizer"): "it divides updates by a_k, the sum of the weights of their "
    f"gradients: {_SUMS}",
}
"""Why the paper of a method gives a setting of `local_sgd` no meaning, by method and setting."""


def check_local(method: str, local: Any, *, default: Steps | None = None) -> LocalSGD:
    """Returns a method's first argument.

    Args:
      method: the method's name, as in `REFUSED`.
      local: the argument.
      default: E if `local` has no number of steps; None if the method needs one.

    Raises:
      TypeError: if the argument is not from `local_sgd`.
      ValueError: if it has no number of steps, or the method's paper gives it no meaning.
    """
    if not isinstance(local, LocalSGD):
        name, _, _ = method.partition(",")
        raise TypeError(
            f"local is {described(local)}; give the settings of local_sgd, as in "
            f"{name}(local_sgd(0.1, steps=5))"
        )
    if local.steps is None:
        if default is None:
            raise ValueError("neither local steps nor epochs are given; give one of the two")
        local = local._replace(steps=default)
    given = {
        "epochs": local.steps.number if isinstance(local.steps, Epochs) else None,
        "optimizer": None if local.is_linear else local.optimizer,
    }
    for setting, value in given.items():
        reason = REFUSED.get((method, setting))
        if reason is not None and value is not None:
            raise ValueError(f"{setting} is {described(value)}, which {method} refuses: {reason}")
    return local


def proximal(context: ClientContext, strength: Scalar) -> GradientFn:
    """Proximal gradient function ``grad F_k(w_k) + strength (w_k - w)``."""

    def gradient_fn(own: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
        loss, gradient = loss_and_gradient(context.task)(own, batch)
        held = jax.tree.map(lambda g, x, w: g + strength * (x - w), gradient, own, context.params)
        return loss, held

    return gradient_fn


def weighing(weighted: bool) -> Callable[[ClientContext], Float[Array, ""]]:
    """Returns the function of a client's weight: n_k or 1, times the scale."""
    return ClientContext.weight if weighted else equal_weight


def equal_weight(context: ClientContext) -> Float[Array, ""]:
    """Weight of a client in an unweighted mean, which is its scale."""
    return jnp.ones(()) * context.scale


MeanFn: TypeAlias = Callable[[base.ServerContext], tuple[Params, base.ServerState]]
"""Returns what a server adds to w, and its new state."""


def mean_update(context: base.ServerContext) -> tuple[Params, base.ServerState]:
    """The mean update, ``(sum of weighted updates) / (sum of weights)``."""
    total = context.total
    return jax.tree.map(lambda x: x / total.weight, total.update), context.server_state


def averaging(
    train: Callable[[ClientContext], LocalUpdate],
    weight: Callable[[ClientContext], Float[Array, ""]] = ClientContext.weight,
    server_optimizer: optax.GradientTransformation | None = None,
    *,
    num_gradients: Steps | Callable[[Task, base.Index], Steps],
    mean: MeanFn = mean_update,
) -> Algorithm:
    """Builds an algorithm whose clients send weighted updates and whose server adds their mean.

    Args:
      train: trains a client, as `LocalSGD.train` does.
      weight: returns a client's weight; defaults to n_k.
      server_optimizer: an optax optimizer that gets minus the mean as its gradient; None adds it.
      num_gradients: the number of gradients that a client computes per round; or a function of the
        task and the client that returns it, such as `LocalSGD.num_steps`.
      mean: returns what the server adds to w, and its state ``()``; defaults to the mean update.

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
    count = num_gradients if callable(num_gradients) else None

    def client(
        context: ClientContext, server_state: base.ServerState, client_state: base.ClientState
    ) -> tuple[Contribution, base.ClientState]:
        del server_state
        factor, trained = weight(context), train(context)
        update = scale_update(trained.update, factor)
        number = count(context.task, context.client) if count else num_gradients
        return Contribution(update, factor, jnp.int32(number), trained.report), client_state

    steps = None if count is None else lambda task, client, _: count(task, client)
    return adding(client, mean, server_optimizer, num_steps=steps)


def no_states(task: Task, params: Params) -> tuple[base.ServerState, base.ClientState]:
    """Empty states of the server and of one client."""
    del task, params
    return (), ()


class Optimized(NamedTuple):
    """State of a server with an optimizer.

    Attributes:
      own: the method's state.
      optimizer: the optimizer's state.
    """

    own: base.ServerState
    optimizer: Any


def adding(
    client: base.ClientFn,
    mean: MeanFn = mean_update,
    server_optimizer: optax.GradientTransformation | None = None,
    *,
    init: base.InitFn = no_states,
    num_steps: Callable[[Task, base.Index, base.ServerState], Steps] | None = None,
    after: Callable[[base.ServerContext, Params, base.ServerState], base.ServerState] | None = None,
) -> Algorithm:
    """Builds an algorithm whose server adds a mean to w, or gives minus the mean to an optimizer.

    Args:
      client: the client function; see `Algorithm`.
      mean: returns what the server adds to w, and its new state.
      server_optimizer: an optax optimizer; None adds the mean.
      init: makes the states; by default there are none.
      num_steps: the number of local steps, if they differ between clients.
      after: changes the server's state from `mean`, given the context and the new w.
    """
    optimizer = server_optimizer

    def server(context: base.ServerContext) -> tuple[Params, base.ServerState]:
        inside, state = context, ()
        if optimizer is not None:
            own, state = context.server_state
            inside = context._replace(server_state=own)
        added, own = mean(inside)
        params, state = optimized(optimizer, context.params, added, state)
        own = after(inside, params, own) if after else own
        return params, own if optimizer is None else Optimized(own, state)

    if optimizer is None:
        return Algorithm(init, client, server, num_steps)
    check_optimizer("server_optimizer", optimizer)

    def start(task: Task, params: Params) -> tuple[Optimized, base.ClientState]:
        server_state, client_state = init(task, params)
        return Optimized(server_state, optimizer.init(params)), client_state

    @wraps(client)  # errors name the method
    def train(
        context: ClientContext, server_state: Optimized, client_state: base.ClientState
    ) -> tuple[Contribution, base.ClientState]:
        return client(context, server_state.own, client_state)

    count = num_steps and (lambda task, client, state: num_steps(task, client, state.own))
    return Algorithm(start, train, server, count)


def optimized(
    optimizer: optax.GradientTransformation | None, params: Params, added: Params, state: Any
) -> tuple[Params, Any]:
    """Adds to the parameters; or takes an optimizer's step, with minus the same as its gradient."""
    if optimizer is not None:
        gradient = jax.tree.map(lambda x, w: (-x).astype(w.dtype), added, params)
        added, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, added), state
