"""FedNova: normalized averaging for clients with different numbers of local steps."""

import jax
import jax.numpy as jnp
import optax

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params
from fedjax_mm.base.sums import Joint, scale_update
from fedjax_mm.checks.annotations import part
from fedjax_mm.local import LocalSGD, adding, check_local, weighing


@part
def fednova(
    local: LocalSGD,
    *,
    server_optimizer: optax.GradientTransformation | None = None,
    weighted: bool = True,
) -> Algorithm:
    """FedNova: ``w <- w + a_eff sum_k p_k Delta_k / a_k`` with ``a_eff = sum_k p_k a_k``.

    Client k moves by ``Delta_k = w_k - w``, -eta times a sum of gradients whose weights sum up to
    a_k, which is its number of local steps without momentum. The weights ``p_k = n_k / sum n`` are
    those of the participants. FedAvg favours clients that take more steps; FedNova does not, and
    equals FedAvg if all a_k are equal. They differ with `epochs`, because clients with more
    examples take more steps.

    Wrappers that change what clients send are refused, because the server multiplies two sums.

    Args:
      local: eta, the epochs (or the steps) and the other settings of `local_sgd`. The optimizer is
        SGD, with or without momentum.
      server_optimizer: an optimizer that gets minus the mean update as its gradient; None adds it.
      weighted: whether client k has weight n_k rather than 1.

    Raises:
      ValueError: if a number is not positive, or the optimizer is not SGD.

    Example:
      >>> import jax, numpy as np
      >>> from fedjax_mm import fednova, full_participation, local_sgd, simulate
      >>> from fedjax_mm.tasks import least_squares
      >>> task = least_squares([np.ones((1, 1)), np.ones((4, 1))], [np.zeros(1), np.ones(4)],
      ...     ridge=0.1)
      >>> algorithm = fednova(local_sgd(0.1, epochs=1, batch_size=1))
      >>> _, trace = simulate(jax.random.key(0), task, algorithm, full_participation(2), 10)
      >>> trace.gradients[1].tolist()  # one step, and four
      [5]
      >>> bool(trace.metrics["loss"][-1, 0] < trace.metrics["loss"][0, 0])
      True

    Reference: Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in
    Heterogeneous Federated Optimization" (2020), where a_k is the 1-norm of a vector of this name.
    """
    check_local("fednova", local)
    weight_of = weighing(weighted)

    def client(
        context: ClientContext, server_state: base.ServerState, client_state: base.ClientState
    ) -> tuple[Contribution, base.ClientState]:
        del server_state
        trained, weight = local.train(context), weight_of(context)
        a = local.normalizer(context.task, context.client)
        num_gradients = jnp.int32(local.num_steps(context.task, context.client))
        sent = Joint(scale_update(trained.update, weight / a), weight * a)
        return Contribution(sent, weight, num_gradients, trained.report), client_state

    def mean(context: base.ServerContext) -> tuple[Params, base.ServerState]:
        total = context.total
        length = total.update.factor / total.weight  # a_eff
        added = jax.tree.map(lambda x: length / total.weight * x, total.update.update)
        return added, context.server_state

    return adding(client, mean, server_optimizer, num_steps=local.num_steps)
