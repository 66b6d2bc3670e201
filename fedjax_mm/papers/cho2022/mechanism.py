"""Mechanism of MaxFL: the share and the weight of flipped clients among participants."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedjax_mm.base import Metrics, Params
from fedjax_mm.tasks.view import View, thresholds

METRICS = ("flipped", "available", "available_flipped", "weight", "weight_flipped")
"""Means over the clients that may train. Multiply by their number to count clients."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Watched(View):
    """A task with thresholds that also records which clients would participate in the next round.

    - ``available`` and ``available_flipped``: the clients to which the model appeals, according to
      the participation rule, and the flipped clients among them;
    - ``weight`` and ``weight_flipped``: their weights in MaxFL, ``q_k`` of eq. (4);
    - ``flipped``: all flipped clients.

    Attributes:
      is_flipped: ``bool[clients]``, including clients that never train.
    """

    is_flipped: Array

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> Metrics:
        """Adds means over the clients that may train to the task's metrics."""
        is_there, is_flipped = self.appeals(params), self.is_flipped[: self.num_clients]
        excess = self.client_losses(params, self.num_clients) - thresholds(self)
        weight = jnp.where(is_there, jax.nn.sigmoid(excess) * jax.nn.sigmoid(-excess), 0)
        return self.task.metrics(rng_key, params) | {
            "flipped": _mean(is_flipped),
            "available": _mean(is_there),
            "available_flipped": _mean(is_there & is_flipped),
            "weight": _mean(weight),
            "weight_flipped": _mean(jnp.where(is_flipped, weight, 0)),
        }


def _mean(values: Float[Array, " clients"] | Bool[Array, " clients"]) -> Float[Array, ""]:
    return jnp.mean(values, dtype=float)
