"""Partial sharing: clients keep a part of the model, as in FedPer, FedRep and LG-FedAvg."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedjax_mm.base import (
    Algorithm,
    Batching,
    ClientContext,
    Contribution,
    Index,
    Params,
    ServerContext,
    Task,
)
from fedjax_mm.base.calls import in_short
from fedjax_mm.base.paths import Where, marked
from fedjax_mm.base.sums import dense_update
from fedjax_mm.checks.annotations import Count, part
from fedjax_mm.checks.instances import check_algorithm, check_where
from fedjax_mm.tasks.view import View
from fedjax_mm.wrap import Hidden, layers, names_of, wrap_algorithm

_NOT_MEANS = ("qffl", "afl")  # their updates are no multiples of local changes
_STATES = (
    "personal cannot be around a method whose server reads the clients' states, such as mifa or "
    "stalevr; use one that averages updates, such as fedavg"
)


@part
def personal(
    algorithm: Algorithm,
    where: Where,
    *,
    named: Literal["own", "shared"] = "own",
    own_steps: Count | None = None,
) -> Algorithm:
    """Lets every client keep a part of the model, and share only the rest.

    A client trains the shared part of w together with its own part v_k. It downloads and sends the
    shared part only, and keeps v_k until it participates again. The v_k start from the initial
    parameters, and the global model keeps these as its own part, so nobody uses it, and its metrics
    such as ``test_accuracy`` say little. ``personal_accuracy`` and ``personal_loss`` are those of
    the models that clients use; in a result, other methods have them, too. With ``d = w_k - w`` the
    algorithm inside must send a multiple of d, with this multiple as weight, as `fedavg`, `fedprox`
    and `maxfl` do.

    - FedPer: `where` names the last layers.
    - LG-FedAvg: `where` names the last layers, and `named` is "shared".
    - FedRep: as FedPer, with `own_steps`.
    - FedBN: `where` names the batch norms, whose running statistics are then own, too.
    - FedAvg: nothing is a client's own, as by ``lambda path: False``.

    Args:
      algorithm: the algorithm inside.
      where: which arrays of the parameters: a name or several, of which one is part of the array's
        path; or a function of paths. Names are separated by "/" in a path.
      named: whether these arrays are the clients' "own" or the "shared" ones.
      own_steps: the number of local steps, the first ones, that train only v_k; the others train
        only the shared part. None trains both in all steps. A frozen part has gradient 0, so a
        local optimizer with weight decay still moves it. Derivatives of a whole run, such as those
        with respect to a rate, do not pass through a frozen part either, and so are incomplete.

    Raises:
      TypeError: if `algorithm` is not an algorithm, or `where` neither names nor a function.
      ValueError: if the parameters have no such names, or the algorithm sends other updates.

    Example: FedPer.
      >>> import jax, numpy as np
      >>> from fedjax_mm import fedavg, full_participation, local_sgd, personal, simulate
      >>> from fedjax_mm.data import FederatedData, client_data
      >>> from fedjax_mm.tasks import MLP, classification
      >>> clients = client_data([(np.eye(2), np.arange(2)), (np.eye(2), 1 - np.arange(2))])
      >>> data = FederatedData("two", "synthetic", 2, clients, clients)
      >>> task = classification(data, MLP(2, (3,)))
      >>> algorithm = personal(fedavg(local_sgd(0.5, steps=5)), where="classes")
      >>> _, trace = simulate(0, task, algorithm, full_participation(2), 40)
      >>> trace.download_size, trace.upload_size  # 17 numbers, of which a client keeps 8
      ((9,), (9,))
      >>> bool(trace.metrics["personal_loss"][-1, 0] < 0.5 * trace.metrics["loss"][-1, 0])
      True

    Reference: Arivazhagan et al., "Federated Learning with Personalization Layers" (2019); Collins
    et al., "Exploiting Shared Representations for Personalized Federated Learning" (2021); Liang
    et al., "Think Locally, Act Globally" (2020); Li et al., "FedBN: Federated Learning on Non-IID
    Features via Local Batch Normalization" (2021).
    """
    check_algorithm(algorithm)
    _check_inner(algorithm)
    check_where(where)

    def mask(params: Params) -> Any:
        return jax.tree.map(lambda one: one == (named == "own"), marked(where, params))

    def own_part(params: Params) -> Any:
        return jax.tree.map(lambda own, w: w if own else None, mask(params), params)

    def shared_part(params: Params) -> Any:
        return jax.tree.map(lambda own, w: None if own else w, mask(params), params)

    def merged(params: Params, own: Any) -> Params:
        return jax.tree.map(lambda keep, w, v: v if keep else w, mask(params), params, own)

    def init(task: Task, params: Params, server: Any, client: Any) -> tuple[Any, Any]:
        del task, server, client
        return (), own_part(params)

    def receive(context: ClientContext, own: Any) -> ClientContext:
        task = context.task
        if own_steps is not None:
            task = Phased(task, task.num_clients, mask, own_steps)
        return context._replace(params=merged(context.params, own), task=task)

    def send(
        context: ClientContext, sent: Contribution, server: Any, own: Any
    ) -> tuple[Contribution, Any]:
        del server
        # A sparse update refers to the parameters that the client started from.
        start = merged(context.params, own)
        update = dense_update(sent._replace(report=()), start).update
        _check_update(update, start)
        is_active = jnp.asarray(context.takes_part) & (sent.weight > 0)
        factor = jnp.where(is_active, 1 / jnp.where(sent.weight > 0, sent.weight, 1), 0)

        def moved(keep: bool, v: Array, d: Array) -> Array | None:
            return v + (factor * d).astype(v.dtype) if keep else None

        kept = jax.tree.map(moved, mask(start), own, update)
        return sent._replace(update=shared_part(update)), kept

    def serve(context: ServerContext, own: Any) -> tuple[ServerContext, Any]:
        params, hidden = context.params, cast("Any", Hidden(_STATES))

        def whole(keep: bool, w: Array, x: Array) -> Array:
            return jnp.zeros_like(w) if keep else x

        update = jax.tree.map(whole, mask(params), params, context.total.update)
        total = context.total._replace(update=update)
        return context._replace(total=total, client_states=hidden), own

    return wrap_algorithm(
        algorithm,
        "personal",
        send=send,
        receive=receive,
        serve=serve,
        init=init,
        personal=merged,
        download=shared_part,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Phased(View):
    """A task whose first local steps train only clients' own parts, and the others only the rest.

    Attributes:
      mask: maps parameters to whether each array is a client's own.
      own_steps: the number of the first steps.
    """

    mask: Callable[[Params], Any] = dataclasses.field(metadata={"static": True})
    own_steps: int = dataclasses.field(metadata={"static": True})

    __repr__ = in_short

    def batch(self, rng_key: Any, client: Index, step: Index, how: Batching) -> Any:
        """The examples of a local step, and the step."""
        return self.task.batch(rng_key, client, step, how), step

    def loss(self, params: Params, batch: Any) -> Float[Array, ""]:
        """The loss, whose gradient is 0 for the frozen part."""
        examples, step = batch
        loss: Array = self.task.loss(self._live(params, step), examples)
        return loss

    def examples(self, params: Params, batch: Any) -> tuple[Any, Float[Array, " batch"]]:
        """Batches of one example with the step, and the examples' weights."""
        batch, step = batch
        ones, weights = super().examples(params, batch)
        return (ones, jnp.broadcast_to(step, weights.shape)), weights

    def features(
        self, params: Params, batch: Any
    ) -> tuple[Float[Array, "batch features"], Float[Array, " batch"]]:
        """The features, whose gradient is 0 for the frozen part."""
        examples, step = batch
        return super().features(self._live(params, step), examples)

    def _live(self, params: Params, step: Index) -> Params:
        is_own_turn = step < self.own_steps

        def frozen(keep: bool, w: Array) -> Array:
            return jnp.where(is_own_turn == keep, w, jax.lax.stop_gradient(w))

        return jax.tree.map(frozen, self.mask(params), params)


def _check_inner(algorithm: Algorithm) -> None:
    """Raises `ValueError` if an algorithm's updates have no parts of their own."""
    for name in ("private", "compressed"):
        if name in names_of(algorithm):
            raise ValueError(
                f"personal is around {name}; put it inside, as in "
                f"{name}(personal(algorithm, ...), ...)"
            )
    if algorithm.personal is not None:
        raise ValueError(
            "the algorithm has personal models already; use one without, such as fedavg"
        )
    for each in layers(algorithm):
        if each.name in _NOT_MEANS:
            raise ValueError(
                f"{each.name} does not send weighted local changes; use an algorithm that does, "
                "such as fedavg"
            )


def _check_update(update: Any, params: Params) -> None:
    found: Any = jax.tree.structure(update)
    if found != jax.tree.structure(params):
        raise ValueError(
            f"the algorithm sends {found}, which is not like the parameters; "
            "personal needs one that sends weighted local changes, such as fedavg"
        )
