"""Per-FedAvg: parameters from which one local step gives each client a good model."""

from typing import Any, Literal

import jax
from jaxtyping import Array, Float

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Params, Scalar
from fedjax_mm.checks import check_choice, check_not_negative, check_positive
from fedjax_mm.local import Change, averaging, equal_weight, local_sgd
from fedjax_mm.schedules import Schedule


def perfedavg(
    learning_rate: Scalar | Schedule,
    *,
    local_steps: base.Steps,
    batch_size: base.BatchSize = None,
    alpha: Scalar = 1e-2,
    variant: Literal["FO", "HF"] = "FO",
    delta: Scalar = 1e-3,
) -> Algorithm:
    """Per-FedAvg: local steps on ``F_k(w - alpha grad F_k(w))``, then the unweighted mean.

    Each step draws batches D, D', D'' and sets ``u = w - alpha grad(w; D)``. It descends along
    ``g' = grad(u; D')`` (first order, "FO"), or along ``g' - alpha (grad(w + delta g'; D'') -
    grad(w - delta g'; D'')) / (2 delta)``, with a Hessian-vector product by differences ("HF").

    Args:
      learning_rate: beta, a number (it may be traced) or a schedule of the round t = 1, 2, ...
      local_steps: E, meta steps of every client.
      batch_size: B examples per batch, drawn independently; None takes all examples.
      alpha: the rate of the inner step; 0 is FedAvg, unweighted.
      variant: "FO" (2 gradients a step) or "HF" (4).
      delta: the length of the differences of "HF".

    Raises:
      ValueError: if `alpha` is negative, another number is not positive, or `variant` is unknown.

    Example:
      >>> import jax
      >>> from fedjax_mm import full_participation, perfedavg, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = perfedavg(0.1, local_steps=5)
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical
    Guarantees" (2020), Algorithm 1 and section 5.
    """
    sgd = local_sgd(learning_rate, local_steps, batch_size)
    check_not_negative("alpha", alpha)
    check_positive("delta", delta)
    check_choice("variant", variant, "FO", "HF")
    num_batches, gradients_per_step = (2, 2) if variant == "FO" else (3, 4)

    def change(local: ClientContext) -> Change:
        gradient = jax.grad(local.task.loss)

        def direction(
            own: Params, inner: Any, outer: Any, *third: Any
        ) -> tuple[Float[Array, ""], Params]:
            loss, inner_gradient = jax.value_and_grad(local.task.loss)(own, inner)
            outer_gradient = gradient(_plus(own, -alpha, inner_gradient), outer)
            if variant == "FO":
                return loss, outer_gradient
            ahead, behind = (
                gradient(_plus(own, side * delta, outer_gradient), *third) for side in (1, -1)
            )
            bend = jax.tree.map(lambda x, y: (x - y) / (2 * delta), ahead, behind)
            return loss, _plus(outer_gradient, -alpha, bend)

        # D, D' and D'' are consecutive batches of the task, so that their draws are independent.
        return sgd.train(local, direction=direction, num_batches=num_batches)

    return averaging(change, equal_weight, num_gradients=local_steps * gradients_per_step)


def _plus(tree: Params, factor: Scalar, other: Params) -> Params:
    return jax.tree.map(lambda x, y: x + factor * y, tree, other)
