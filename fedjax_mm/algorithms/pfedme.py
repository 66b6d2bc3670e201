"""pFedMe: personal models are proximal points, and the global model follows them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from fedjax_mm.base import (
    Algorithm,
    ClientContext,
    Contribution,
    Params,
    ServerContext,
    ServerState,
    Task,
)
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import Count, Positive, part
from fedjax_mm.local import (
    LocalSGD,
    adding,
    check_local,
    each_by,
    keeping,
    loss_and_gradient,
    weighing,
)


@part
def pfedme(
    local: LocalSGD,
    *,
    inner_rate: Positive,
    inner_steps: Count = 5,
    lam: Positive = 15.0,
    server_rate: Positive = 1.0,
    server_optimizer: optax.GradientTransformation | None = None,
    weighted: bool = False,
) -> Algorithm:
    """pFedMe: ``theta_k = argmin F_k(theta) + lam/2 |theta - w_k|^2``, and w_k moves towards it.

    In every local step, theta_k takes K steps ``theta_k <- theta_k - a (grad F_k(theta_k) + lam
    (theta_k - w_k))`` on the same batch, from its last value, and then ``w_k <- w_k - eta lam (w_k
    - theta_k)``. The server sets ``w <- (1 - beta) w + beta mean w_k``, unweighted. Clients
    evaluate with theta_k, which starts from the initial parameters, and does not change while a
    client does not participate.

    Args:
      local: eta, E and the other settings of `local_sgd`. Momentum, clipping, weight decay and the
        optimizer are those of w_k, whose gradient is ``lam (w_k - theta_k)``.
      inner_rate: a, the rate of the steps of theta_k.
      inner_steps: K, the number of these steps.
      lam: the strength of the pull of theta_k towards w_k.
      server_rate: beta.
      server_optimizer: an optimizer that gets minus ``beta mean (w_k - w)`` as its gradient; None
        adds it.
      weighted: whether client k has weight n_k in the mean, rather than 1.

    Raises:
      ValueError: if a number is not positive.

    Example:
      >>> import jax
      >>> from fedjax_mm import full_participation, local_sgd, pfedme, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = pfedme(local_sgd(0.1, steps=5), inner_rate=0.1, lam=1.0)
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["personal_loss"][-1, 0] < trace.metrics["loss"][-1, 0])
      True

    Reference: Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes" (2020).
    """
    check_local("pfedme", local)
    weight_of = weighing(weighted)

    def init(task: Task, params: Params) -> tuple[ServerState, Params]:
        del task
        return (), params

    def client(
        context: ClientContext, server_state: ServerState, client_state: Params
    ) -> tuple[Contribution, Params]:
        del server_state
        both = loss_and_gradient(context.task)

        def gradient_fn(own: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
            def inner(theta: Params, _: None) -> tuple[Params, Array]:
                loss, gradient = both(theta, batch)

                def step(x: Array, g: Array, w: Array) -> Array:
                    return (x - inner_rate * (g + lam * (x - w))).astype(x.dtype)

                return jax.tree.map(step, theta, gradient, own["w"]), loss

            theta, losses = lax.scan(inner, own["theta"], length=inner_steps)
            pull = jax.tree.map(lambda w, x: (lam * (w - x)).astype(w.dtype), own["w"], theta)
            return losses[0], {"w": pull, "theta": jax.tree.map(jnp.subtract, own["theta"], theta)}

        start = {"w": context.params, "theta": client_state}
        optimizer = each_by(local.optimizer_at(context.round), "w")
        trained = local.train(context, gradient_fn=gradient_fn, start=start, optimizer=optimizer)
        new = jax.tree.map(jnp.add, client_state, trained.update["theta"])
        weight = weight_of(context)
        new = context.next_state(new, client_state)
        sent = scale_update(trained.update["w"], weight)
        num_gradients = jnp.int32(local.num_steps(context.task, context.client) * inner_steps)
        return Contribution(sent, weight, num_gradients, trained.report), new

    def mean(context: ServerContext) -> tuple[Params, ServerState]:
        total = context.total
        step = jax.tree.map(lambda x: server_rate / total.weight * x, total.update)
        return step, context.server_state

    def personal(params: Params, state: Params) -> Params:
        del params
        return state

    made = adding(client, mean, server_optimizer, init=init, num_steps=local.num_steps)
    return keeping(made._replace(personal=personal), local)
