"""FedProx: FedAvg with a proximal term that keeps clients near the global model."""

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Scalar
from fedjax_mm.checks import check_not_negative
from fedjax_mm.local import Change, averaging, local_sgd, proximal
from fedjax_mm.schedules import Schedule


def fedprox(
    learning_rate: Scalar | Schedule,
    *,
    mu: Scalar,
    local_steps: base.Steps,
    batch_size: base.BatchSize = None,
) -> Algorithm:
    """FedProx: local steps ``w_k <- w_k - eta (grad F_k(w_k) + mu (w_k - w))``, then FedAvg's mean.

    Args:
      learning_rate: eta, a number (it may be traced) or a schedule of the round t = 1, 2, ...
      mu: how strongly clients are pulled to the global model; 0 is FedAvg.
      local_steps: E, SGD steps of every client.
      batch_size: B examples per local step, drawn independently; None takes the full gradient.

    Raises:
      ValueError: if `mu` is negative or another number is not positive.

    Example:
      >>> import jax
      >>> from fedjax_mm import fedprox, full_participation, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> algorithm = fedprox(0.1, mu=1.0, local_steps=5)
      >>> _, trace = simulate(
      ...     jax.random.key(0), quadratic(24, 4, mu=2e-4), algorithm, full_participation(24), 10)
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Li et al., "Federated Optimization in Heterogeneous Networks" (2020), Algorithm 2.
    """
    sgd = local_sgd(learning_rate, local_steps, batch_size)
    check_not_negative("mu", mu)

    def change(local: ClientContext) -> Change:
        return sgd.train(local, direction=proximal(local, mu))

    return averaging(change, num_gradients=local_steps)
