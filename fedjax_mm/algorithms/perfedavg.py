"""Per-FedAvg: an initialization that one local step adapts to each client."""

from typing import Any, Literal

import jax
import optax
from jaxtyping import Array, Float

from fedjax_mm.base import Algorithm, ClientContext, Index, Params, Scalar, Steps, Task
from fedjax_mm.checks.annotations import NonNegative, Positive, part
from fedjax_mm.local import (
    LocalSGD,
    LocalUpdate,
    averaging,
    check_local,
    keeping,
    loss_and_gradient,
    weighing,
)


@part
def perfedavg(
    local: LocalSGD,
    *,
    alpha: NonNegative = 1e-2,
    variant: Literal["FO", "HF"] = "FO",
    delta: Positive = 1e-3,
    server_optimizer: optax.GradientTransformation | None = None,
    weighted: bool = False,
) -> Algorithm:
    """Per-FedAvg: local steps on ``F_k(w - alpha grad F_k(w))``, then the unweighted mean.

    Each step draws batches D, D', D'' and sets ``u = w - alpha grad(w; D)``. It descends along
    ``g' = grad(u; D')`` (first order, "FO"), or along ``g' - alpha (grad(w + delta g'; D'') -
    grad(w - delta g'; D'')) / (2 delta)``, which replaces a Hessian-vector product with finite
    differences ("HF").

    Args:
      local: beta, E meta steps and the other settings of `local_sgd`. Each batch of a step has B
        examples, so an epoch of ``ceil(n_k / B)`` steps passes over the examples several times.
      alpha: the learning rate of the inner step; 0 is unweighted FedAvg.
      variant: "FO" (2 gradients per step) or "HF" (4).
      delta: the finite-difference step of "HF".
      server_optimizer: an optimizer that gets minus the mean update as its gradient; None adds it.
      weighted: whether client k has weight n_k in the mean, rather than 1.

    Raises:
      ValueError: if `alpha` is negative, another number is not positive, or `variant` is unknown.

    Example:
      >>> import jax
      >>> from fedjax_mm import full_participation, local_sgd, perfedavg, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = perfedavg(local_sgd(0.1, steps=5))
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical
    Guarantees" (2020).
    """
    check_local("perfedavg", local)
    num_batches, gradients_per_step = (2, 2) if variant == "FO" else (3, 4)

    def train(context: ClientContext) -> LocalUpdate:
        both = loss_and_gradient(context.task)

        def gradient_fn(
            own: Params, inner: Any, outer: Any, *third: Any
        ) -> tuple[Float[Array, ""], Params]:
            loss, inner_gradient = both(own, inner)
            _, outer_gradient = both(_plus(own, -alpha, inner_gradient), outer)
            if variant == "FO":
                return loss, outer_gradient
            ahead, behind = (
                both(_plus(own, side * delta, outer_gradient), *third)[1] for side in (1, -1)
            )
            bend = jax.tree.map(lambda x, y: (x - y) / (2 * delta), ahead, behind)
            return loss, _plus(outer_gradient, -alpha, bend)

        # D, D' and D'' are consecutive batches of the task, so that their draws are independent.
        return local.train(context, gradient_fn=gradient_fn, num_batches=num_batches)

    def num_gradients(task: Task, client: Index) -> Steps:
        return local.num_steps(task, client) * gradients_per_step

    weight = weighing(weighted)
    return keeping(averaging(train, weight, server_optimizer, num_gradients=num_gradients), local)


def _plus(tree: Params, factor: Scalar, other: Params) -> Params:
    return jax.tree.map(lambda x, y: x + factor * y, tree, other)
