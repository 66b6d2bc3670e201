"""StaleVR, StaleVRE and FedVARP: unbiased steps with variance reduced by stale updates."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from fedjax_mm import base
from fedjax_mm.algorithms.mifa import all_weights, weighted_sum
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Task
from fedjax_mm.base.sums import scale_update
from fedjax_mm.checks.annotations import part
from fedjax_mm.local import LocalSGD, adding, check_local, keeping, weighing


class Past(NamedTuple):
    """Memory of one client and model or, on the server, of all clients for one model."""

    update: Params  # h, the last update sent
    # The round in which h was sent or, if beta is exact, the last round of training; 0 if none.
    round: Int[Array, "*clients"]
    decline: Float[Array, "*clients"]  # last measured decline of beta per round
    is_measured: Bool[Array, "*clients"]


class Stale(NamedTuple):
    """Server state of one model for the next round, or zeros if beta is exact."""

    update: Params  # sum_k d_k beta_k h_k
    decline: Float[Array, ""]  # c, the mean decline of beta per round


@part
def stalevr(
    local: LocalSGD,
    *,
    beta: Literal["estimated", "exact", "one"] = "estimated",
    server_optimizer: optax.GradientTransformation | None = None,
    weighted: bool = True,
) -> Algorithm:
    """StaleVR and variants: ``w + sum d_k beta_k h_k + sum_active d_k s_k (G_k - beta_k h_k)``.

    ``d_k = n_k / sum n``, G_k is the client's update in this round, h_k is the last one it sent
    (initially 0), and s_k is the factor from the assignment (`Cohort.scale`), which is 1/p in
    `variance_reduced` and in ``mfa_rand(..., unbiased=True)``. In expectation over the draws of
    these assignments, the step equals that of full participation. An assignment without factors
    raises an error, because the step would be too small by a factor of p. The server also steps in
    rounds without participants. The h_k are the clients' states, which take the memory of N M
    models per run for N clients and M models. `noisy` does not change them.

    Args:
      local: eta, E and the other settings of `local_sgd`.
      beta: "exact" is StaleVR, ``beta_k = <G_k, h_k> / |h_k|^2``. All clients must train in every
        round, whether drawn or not, as with ``variance_reduced(inactive="train")``; otherwise the
        model becomes NaN. "estimated" is StaleVRE: participants measure ``(1 - beta_k) / age``, the
        decay of their beta per round since they sent h_k, and ``beta_k = 1 - c age_k``, clipped to
        [0, 1], where c is the mean of all clients' last measurements, or 0 before the first one.
        "one" is FedVARP, ``beta_k = 1``.
      server_optimizer: an optimizer that gets minus the step above as its gradient; None takes it.
      weighted: whether d_k is as above, or else 1 / N.

    Raises:
      ValueError: if a number is not positive or `beta` is unknown; in a run, if the assignment
        gives no factors.

    Example:
      >>> import jax
      >>> from fedjax_mm import local_sgd, simulate, stalevr, variance_reduced
      >>> from fedjax_mm.tasks import least_squares
      >>> xs = [jax.numpy.eye(2)] * 6
      >>> task = least_squares(xs, [jax.numpy.full(2, k) for k in range(6)], ridge=0.1)
      >>> assignment = variance_reduced(6, 2, expected_trainings=3)
      >>> algorithm = stalevr(local_sgd(0.1, steps=5))
      >>> _, trace = simulate(jax.random.key(0), task, algorithm, assignment, 50)
      >>> bool((trace.metrics["excess_loss"][-1] < 0.1 * trace.metrics["excess_loss"][0]).all())
      True

    Reference: Zhang et al., "Towards Optimal Heterogeneous Client Sampling in Multi-Model Federated
    Learning" (2025); Jhunjhunwala et al., "FedVARP: Tackling the Variance Due to Partial Client
    Participation in Federated Learning" (2022).
    """
    check_local("stalevr", local)
    weight_of = weighing(weighted)

    def init(task: Task, params: Params) -> tuple[Stale, Past]:
        del task
        zeros, zero = jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
        return Stale(zeros, zero), Past(zeros, jnp.int32(0), zero, jnp.asarray(False))

    def client(
        context: ClientContext, server_state: Stale, client_state: Past
    ) -> tuple[Contribution, Past]:
        _check_factors(context)
        (h, last, decline, is_measured), trained = client_state, local.train(context)
        t, is_active = jnp.asarray(context.round, jnp.int32), jnp.asarray(context.takes_part)
        measured, is_known = _regression(trained.update, h)
        beta_k = measured if beta == "exact" else _faded(server_state.decline, t - last)
        stale = scale_update(h, beta_k)
        fresh = jax.tree.map(jnp.subtract, trained.update, stale)
        weight = weight_of(context)
        sent = scale_update(fresh, weight)
        if beta == "exact":
            # Add the client's term of sum d_k beta_k h_k, because the server does not know beta_k.
            n_k = weight_of(context._replace(factor=None, takes_part=True))
            sent = jax.tree.map(jnp.add, sent, scale_update(stale, n_k))
        if beta == "estimated":
            now, measured = is_active & is_known, (1 - measured) / jnp.maximum(t - last, 1)
            decline = jnp.where(now, measured, decline).astype(decline.dtype)
            is_measured |= now
        new = context.next_state(trained.update, h)
        last = jnp.where(is_active | (beta == "exact"), t, last)
        num_gradients = jnp.int32(local.num_steps(context.task, context.client))
        message = Contribution(sent, weight, num_gradients, trained.report)
        return message, Past(new, last, decline, is_measured)

    def mean(context: base.ServerContext) -> tuple[Params, Stale]:
        t, past = jnp.asarray(context.round, jnp.int32), context.client_states
        old, weights = context.server_state, all_weights(context.task, weighted)
        weight = weights.sum()
        step = jax.tree.map(lambda s, x: s + x / weight, old.update, context.total.update)
        if beta == "exact":
            # Make the model NaN if a client is absent, because the sum would silently omit its h_k.
            weight = jnp.where(jnp.all(past.round == t), 1, jnp.nan)
            return scale_update(step, weight), old
        # Clients without a measurement do not affect the sum, because their decline is 0.
        decline = past.decline.sum() / jnp.maximum(past.is_measured.sum(), 1)
        decline = decline.astype(old.decline.dtype)
        stale = weighted_sum(past.update, weights, _faded(decline, t + 1 - past.round))
        return step, Stale(stale, decline)

    made = adding(client, mean, server_optimizer, init=init, num_steps=local.num_steps)
    return keeping(made._replace(steps_idle=True), local)


def _check_factors(context: ClientContext) -> None:
    if context.factor is None:
        raise ValueError(
            "stalevr needs the factors 1/p of its assignment, which gives none; use "
            "variance_reduced, or mfa_rand(num_clients, num_models, unbiased=True), even for one "
            "model and all clients"
        )


def _regression(g: Params, h: Params) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """``<g, h> / |h|^2``, or 0 if h is 0, and whether h is nonzero."""
    square = optax.tree.norm(h, squared=True)
    is_known = square > 0
    factor = optax.tree.vdot(g, h) / jnp.where(is_known, square, 1)
    return jnp.where(is_known, factor, 0), is_known


def _faded(decline: Float[Array, ""], age: Int[Array, "*clients"]) -> Float[Array, "*clients"]:
    """Beta for an update of this age in rounds."""
    return jnp.clip(1 - decline * age, 0, 1)
