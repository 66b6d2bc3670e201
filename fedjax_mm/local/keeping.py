"""States of local optimizers that are kept between rounds."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from fedjax_mm import base
from fedjax_mm.base import Algorithm, ClientContext, Contribution, Metrics, Params, Steps, Task
from fedjax_mm.base.sums import scale_update
from fedjax_mm.local.settings import STATE, Kept, LocalSGD


class Keeping(NamedTuple):
    """State of a client or of a server, with kept states of local optimizers.

    Attributes:
      own: the method's state.
      kept: a `Kept` state; of a client whose model averages them, only the integers.
    """

    own: Any
    kept: Any


class Sent(NamedTuple):
    """A client's update, and the real numbers of its optimizer's state times its weight."""

    update: Any
    optimizer: list[Array]


def keeping(algorithm: Algorithm, local: LocalSGD) -> Algorithm:
    """Keeps the states of local optimizers between rounds, as `keeps` of `local_sgd` says.

    Args:
      algorithm: clients train by ``local.train``, send its report, and the weight of their update.
      local: the settings of local training.

    Example: FedAvg whose clients keep their momentum.
      >>> from fedjax_mm import averaging, local_sgd, mfa_rr, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> local = local_sgd(0.1, steps=5, momentum=0.9, keeps="client")
      >>> algorithm = keeping(averaging(local.train, num_gradients=5), local)
      >>> state, _ = simulate(0, quadratic(24, 4, mu=0.1), algorithm, mfa_rr(24, 2), 10)
      >>> jax.tree.map(jnp.shape, state.models[0].clients.kept.state[0].trace)
      (2, 24, 97)
    """
    if local.keeps is None:
        return algorithm
    inner, averages, count = algorithm, local.keeps == "mean", algorithm.num_steps

    def init(task: Task, params: Params) -> tuple[Any, Any]:
        server, client = inner.init(task, params)
        fresh = _unknown(inner, task, params, server, client)
        if not averages:
            return server, Keeping(client, fresh)
        _, integers = _parts(fresh.state)
        return Keeping(server, fresh), Keeping(client, integers) if integers else client

    def client(
        context: ClientContext, server_state: Any, client_state: Any
    ) -> tuple[Contribution, Any]:
        (server, mean), (own, kept) = _opened(server_state), _opened(client_state)
        sent, own = inner.client(context._replace(kept=mean if averages else kept), server, own)
        report = dict(sent.report)
        state, sent = report.pop(STATE), sent._replace(report=report)
        if not averages:
            new = context.next_state(Kept(jnp.asarray(True), state), kept)
            return sent, Keeping(own, new)
        reals, integers = _parts(state)
        update = Sent(sent.update, scale_update(reals, sent.weight))
        own = Keeping(own, context.next_state(integers, kept)) if integers else own
        return sent._replace(update=update), own

    def server(context: base.ServerContext) -> tuple[Params, Any]:
        (own, kept), states, total = _opened(context.server_state), context.client_states, None
        if averages:
            total = context.total
            context = context._replace(total=total._replace(update=total.update.update))
        inside = states.own if isinstance(states, Keeping) else states
        params, own = inner.server(context._replace(server_state=own, client_states=inside))
        if total is None:
            return params, own
        old, _ = _parts(kept.state)
        weight = jnp.where(total.weight > 0, total.weight, 1)
        reals = [
            jnp.where(total.weight > 0, x / weight, y).astype(y.dtype)
            for x, y in zip(total.update.optimizer, old, strict=True)
        ]
        # The server sees sums alone, so the largest integers are those of the clients' states.
        integers = [x.max(0) for x in states.kept] if _parts(kept.state)[1] else []
        known = kept.is_known | (total.weight > 0)
        return params, Keeping(own, Kept(known, _joined(kept.state, reals, integers)))

    def num_steps(task: Task, client: base.Index, state: Any) -> Steps:
        steps: Steps = count(task, client, _opened(state)[0]) if count else 0
        return steps

    def metrics(task: Task, params: Params, state: Any) -> Metrics:
        return inner.metrics(task, params, _opened(state)[0]) if inner.metrics else {}

    def personal(params: Params, state: Any) -> Params:
        return inner.personal(params, _opened(state)[0]) if inner.personal else params

    def download(params: Params) -> Any:
        received = params if inner.download is None else inner.download(params)
        return received, _parts(local.optimizer_at(1).init(params))

    return algorithm._replace(
        init=init,
        client=client,
        server=server,
        num_steps=num_steps if count else None,
        metrics=metrics if inner.metrics else None,
        personal=personal if inner.personal else None,
        download=download if averages else inner.download,
    )


def _opened(state: Any) -> tuple[Any, Any]:
    return (state.own, state.kept) if isinstance(state, Keeping) else (state, ())


def _unknown(algorithm: Algorithm, task: Task, params: Params, server: Any, client: Any) -> Kept:
    """Zeros like the state that a client function reports."""

    def reported(rng_key: PRNGKeyArray, params: Params, *states: Any) -> Any:
        context = ClientContext(rng_key, 1, task, jnp.int32(0), params, kept=Kept(False, None))
        sent, _ = algorithm.client(context, *states)
        if not isinstance(sent.report, dict) or STATE not in sent.report:
            raise ValueError(
                "keeps needs the report of local.train, which has the optimizer's state; send it, "
                "as in Contribution(update, weight, num_gradients, trained.report)"
            )
        return sent.report[STATE]

    rng_key = jax.eval_shape(jax.random.key, 0)
    shapes = jax.eval_shape(reported, rng_key, params, server, client)
    return Kept(jnp.asarray(False), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


def _parts(state: Any) -> tuple[list[Array], list[Array]]:
    """The arrays of a state that are averaged, and those of integers."""
    leaves = jax.tree.leaves(state)
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError("keeps='mean' cannot average the random keys of an optimizer")
    is_real = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    reals = [leaf for leaf, real in zip(leaves, is_real, strict=True) if real]
    return reals, [leaf for leaf, real in zip(leaves, is_real, strict=True) if not real]


def _joined(like: Any, reals: list[Array], integers: list[Array]) -> Any:
    of_kind = {True: iter(reals), False: iter(integers)}
    return jax.tree.map(lambda x: next(of_kind[jnp.issubdtype(x.dtype, jnp.inexact)]), like)
