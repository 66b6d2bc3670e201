"""Clients whose updates the assignment sees."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_mm.base import Algorithm, ClientContext, Contribution
from fedjax_mm.base.sums import dense_update
from fedjax_mm.checks.annotations import part
from fedjax_mm.wrap import wrap_algorithm


@part
def reporting(algorithm: Algorithm) -> Algorithm:
    """Wraps an algorithm whose clients also report their updates to the assignment, as for `cfl`.

    The report ``update`` is what the client sends, divided by its weight; in `fedavg` the change of
    the parameters. An assignment that keeps the reports needs memory for all clients' updates.

    Args:
      algorithm: the algorithm, which reports a dict, as all of the library do.

    Raises:
      TypeError: if `algorithm` is not an algorithm.

    Example:
      >>> from fedjax_mm import fedavg
      >>> reporting(fedavg(0.1, local_steps=1))
      reporting(fedavg(0.1, local_steps=1))
    """

    def send(
        context: ClientContext, sent: Contribution, server: Any, client: Any
    ) -> tuple[Contribution, Any]:
        del server
        dense = dense_update(sent._replace(report=()), context.params)
        factor = jnp.where(dense.weight > 0, 1 / jnp.where(dense.weight > 0, dense.weight, 1), 0)
        update = jax.tree.map(lambda x: (factor * x).astype(x.dtype), dense.update)
        return sent._replace(report={**sent.report, "update": update}), client

    return wrap_algorithm(algorithm, "reporting", send=send)
