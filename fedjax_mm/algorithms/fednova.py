"""FedNova: normalized averaging for clients with different numbers of local steps."""

import jax
import jax.numpy as jnp
import optax

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Params, Task
from fedjax_mm.base.sums import Joint, scale_update
from fedjax_mm.checks.annotations import part
from fedjax_mm.local import LocalSGD, check_local, check_only_sgd, plain_server


@part
def fednova(local: LocalSGD) -> Algorithm:
    """FedNova: ``w <- w + tau_eff sum_k p_k Delta_k / tau_k`` with ``tau_eff = sum_k p_k tau_k``.

    Client k takes tau_k local steps and moves by ``Delta_k = w_k - w``. The weights ``p_k = n_k /
    sum n`` are those of the participants. FedAvg favours clients that take more steps; FedNova
    does not, and equals FedAvg if all tau_k are equal. They differ with `epochs`, because clients
    with more examples take more steps.

    Wrappers that change what clients send are refused, because the server multiplies two sums.

    Args:
      local: eta, the epochs (or the steps) and the other settings of `local_sgd`, except
        `optimizer`.

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
    Heterogeneous Federated Optimization" (2020), with the a_k of plain SGD, whose norm is tau_k.
    """
    check_only_sgd("fednova", check_local("fednova", local))
    if local.steps is None:
        raise ValueError("neither local steps nor epochs are given; give one of the two")

    def init(task: Task, params: Params) -> tuple[base.ServerState, base.ClientState]:
        del task, params
        return (), ()

    def client(
        context: ClientContext, server_state: base.ServerState, client_state: base.ClientState
    ) -> tuple[Contribution, base.ClientState]:
        del server_state
        trained, weight = local.train(context), context.weight()
        tau = jnp.int32(local.num_steps(context.task, context.client))
        sent = Joint(scale_update(trained.update, weight / tau), weight * tau)
        return Contribution(sent, weight, tau, trained.report), client_state

    def step(params: Params, total: Contribution) -> Params:
        length = total.update.factor / total.weight  # tau_eff
        mean = jax.tree.map(lambda x: length / total.weight * x, total.update.update)
        return optax.apply_updates(params, mean)

    return Algorithm(init, client, plain_server(step), lambda task, k, _: local.num_steps(task, k))
