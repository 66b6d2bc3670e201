"""Clustered federated learning: each client trains the model that fits its data best."""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from fedjax_mm.assignments.sampling import no_state
from fedjax_mm.base import Assignment, Cohort, Look, Round
from fedjax_mm.base.shuffles import permutation
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import Count, part


@part
def ifca(
    num_clients: Count,
    num_models: Count,
    *,
    cohort_size: Count | None = None,
    average: Literal["models", "gradients"] = "models",
) -> Assignment:
    """IFCA: each client of the cohort trains the model with the smallest loss on its data.

    Client i joins cluster ``j_i = argmin_j F_i(w_j)``, and ties go to the lowest number. All models
    must share a task, because their losses are compared, and start from different parameters,
    because otherwise all clients would join model 1. A model that no client joins does not change.
    Every round evaluates each model on all training examples.

    With ``fedavg(local, weighted=False)`` the new model is the mean of its cluster's local models.
    With ``average="gradients"`` use ``fedavg(local_sgd(rate, steps=1), server_scale="1/N",
    weighted=False)``. The model then moves by ``-rate / m`` times the sum of its cluster's
    gradients, where m is the size of the cohort, not of the cluster. With the default server scale,
    which divides by the participants' weights, the factors would cancel and models would be
    averaged.

    Args:
      num_clients: N.
      num_models: p, the number of clusters.
      cohort_size: m of the N clients, drawn uniformly each round; None means all of them.
      average: "models" leaves clients' weights unchanged. "gradients" multiplies them by N/m, so
        that the server's division by N becomes a division by m.

    Raises:
      ValueError: if a size is not positive, `cohort_size` is larger than N or `average` is unknown.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> losses = jnp.array([[0.5, 2.0, 1.0], [0.7, 0.1, 1.0]])
      >>> look = Look(losses=lambda: losses)
      >>> cohort, _ = ifca(3, 2).assign(jax.random.key(0), 1, (), look)
      >>> cohort.clients.tolist(), cohort.models.tolist()
      ([0, 1, 2], [0, 1, 0])

    Reference: Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated
    Learning" (2020).
    """
    number = num_clients if cohort_size is None else cohort_size
    checks.check_between("cohort_size", number, 1, num_clients, "num_clients")

    def assign(rng_key: PRNGKeyArray, round: Round, state: Any, look: Look) -> tuple[Cohort, Any]:
        del round
        clients = jnp.arange(num_clients, dtype=jnp.int32)
        if number < num_clients:
            clients = permutation(rng_key, num_clients, number)
        losses = look.losses()[:, clients]
        # Replace NaN with infinity, because `argmin` would assign every client to a diverged model.
        models = jnp.argmin(jnp.where(jnp.isnan(losses), jnp.inf, losses), axis=0)
        scale = None
        if average == "gradients":
            # Keep the dtype weak, so that float32 contributions stay float32.
            scale = jnp.broadcast_to(jnp.asarray(num_clients / number), clients.shape)
        return Cohort(clients, models.astype(jnp.int32), scale), state

    return Assignment(num_clients, num_models, no_state, assign)
