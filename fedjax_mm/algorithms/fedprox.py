"""FedProx: FedAvg with a proximal term that keeps clients near the global model."""

import optax

from fedjax_mm.base import Algorithm, ClientContext
from fedjax_mm.checks.annotations import NonNegative, part
from fedjax_mm.local import (
    LocalSGD,
    LocalUpdate,
    averaging,
    check_local,
    keeping,
    proximal,
    weighing,
)


@part
def fedprox(
    local: LocalSGD,
    *,
    mu: NonNegative,
    server_optimizer: optax.GradientTransformation | None = None,
    weighted: bool = True,
) -> Algorithm:
    """FedProx: local steps ``w_k <- w_k - eta (grad F_k(w_k) + mu (w_k - w))``, then FedAvg's mean.

    Args:
      local: eta, E and the other settings of `local_sgd`.
      mu: the strength of the pull towards the global model; 0 is FedAvg.
      server_optimizer: an optimizer that gets minus the mean update as its gradient; None adds it.
      weighted: whether client k has weight n_k in the mean, rather than 1.

    Raises:
      ValueError: if `mu` is negative or another number is not positive.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedprox, full_participation, local_sgd, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = fedprox(local_sgd(0.1, steps=5), mu=1.0)
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Li et al., "Federated Optimization in Heterogeneous Networks" (2020).
    """
    check_local("fedprox", local)

    def train(context: ClientContext) -> LocalUpdate:
        return local.train(context, gradient_fn=proximal(context, mu))

    weight = weighing(weighted)
    made = averaging(train, weight, server_optimizer, num_gradients=local.num_steps)
    return keeping(made, local)
