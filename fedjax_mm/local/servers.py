"""Methods whose server adds a mean of the clients' updates."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Steps, Task
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.instances import check_optimizer
from fedjax_mm.local.training import LocalUpdate


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
      mean: the server's change of w, and its state ``()``; defaults to the mean update.

    Example: the simplest method, with one gradient step at a rate of 0.1.
      >>> import jax
      >>> from fedjax_mm import full_participation, local_sgd, simulate
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
      mean: the server's change of w, and its new state.
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
    """Adds a mean to the parameters, or gives minus the mean to an optimizer as its gradient."""
    if optimizer is not None:
        gradient = jax.tree.map(lambda x, w: (-x).astype(w.dtype), added, params)
        added, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, added), state
