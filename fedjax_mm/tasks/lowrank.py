"""Low-rank adaptation: frozen parameters, and factors of changes of their matrices, as in LoRA."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fedjax_mm.base import Index, Metrics, Params
from fedjax_mm.base.calls import in_short
from fedjax_mm.base.paths import Where, chosen, replaced
from fedjax_mm.checks.annotations import Count, Positive, checked
from fedjax_mm.checks.instances import check_instance
from fedjax_mm.data.clients import ClientData
from fedjax_mm.tasks.supervised import Supervised
from fedjax_mm.tasks.view import View


@checked
def low_rank(
    task: Supervised,
    params: Params,
    *,
    rank: Count,
    where: Where | None = None,
    scale: Positive = 1.0,
) -> "LowRank":
    """Trains only factors of a change of each chosen matrix, and freezes all else, as LoRA does.

    The network has the matrices ``W + s A B``, where W is that of `params`, A is ``[inputs, r]``
    and B ``[r, outputs]``. Clients train, send and average A and B alone. A is drawn with the
    deviation ``1 / sqrt(inputs)`` and B starts at 0, so that training starts at `params`. The
    kernel of a convolution is the matrix with its last axis as outputs.

    The parameters of the task are a dict by path, such as ``{"Dense_0/kernel": {"A": ..., "B":
    ...}}``, so that ``personal(algorithm, where="B")`` lets clients keep their own B.

    Args:
      task: a task from `classification` or `supervised`; apply other wrappers afterwards.
      params: the parameters of the trained network, as `params_of` returns them.
      rank: r, the rank of each change.
      where: which arrays change, as in `personal`, of which only matrices do; all by default.
      scale: s, often ``alpha / r``; it may be traced.

    Raises:
      TypeError: if the task is not from `classification` or `supervised`.
      ValueError: if `params` are not those of the task's network, or `where` has no matrix.

    Example:
      >>> from fedjax_mm import fedavg, local_sgd, mfa_rr, params_of, simulate
      >>> from fedjax_mm.data import synthetic
      >>> from fedjax_mm.tasks import MLP, classification
      >>> task = classification(synthetic(6, dim=4, num_classes=3), MLP(3, hidden=(8,)))
      >>> run = fedavg(local_sgd(0.1, steps=2)), mfa_rr(6, 1), 5
      >>> state, trace = simulate(0, task, *run)
      >>> small = low_rank(task, params_of(state)[0], rank=1)
      >>> _, other = simulate(1, small, *run)
      >>> trace.upload_size, other.upload_size
      ((67,), (23,))
      >>> bool(other.metrics["loss"][0, 0] == trace.metrics["loss"][-1, 0])
      True

    Reference: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2022, section 4.1.
    """
    check_instance("task", task, Supervised, "give one of classification, and wrap the result")
    wanted = jax.eval_shape(task.init, jax.random.key(0))
    shapes = [
        (jax.tree.structure(each), [jnp.shape(x) for x in jax.tree.leaves(each)])
        for each in (params, wanted)
    ]
    if shapes[0] != shapes[1]:
        known = jax.tree.map(jnp.shape, wanted)
        raise ValueError(f"params have other names or shapes than the network's, {known}")
    every = chosen((lambda path: True) if where is None else where, params)
    matrices = {path: x for path, x in every.items() if jnp.ndim(x) > 1}
    if not matrices:
        raise ValueError(f"where has no matrix, but {', '.join(every) or 'nothing'}")
    frozen = jax.tree.map(jnp.asarray, params)
    return LowRank(task, task.num_clients, frozen, jnp.asarray(scale, float), rank, (*matrices,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank(View):
    """A task whose parameters are factors, built by `low_rank`.

    Attributes:
      frozen: the parameters of the trained network.
      scale: s.
      rank: r.
      paths: the paths of the matrices that change.
    """

    frozen: Params
    scale: Any
    rank: int = dataclasses.field(metadata={"static": True})
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    __repr__ = in_short

    @property
    def train(self) -> ClientData:
        """Training examples."""
        data: ClientData = self.task.train
        return data

    @property
    def test(self) -> ClientData:
        """Test examples."""
        data: ClientData = self.task.test
        return data

    def init(self, rng_key: PRNGKeyArray) -> Params:
        """Random A, and B = 0."""
        matrices = chosen(self.paths.__contains__, self.frozen)
        return {
            path: self._factors(jax.random.fold_in(rng_key, i), matrices[path])
            for i, path in enumerate(self.paths)
        }

    def _factors(self, rng_key: PRNGKeyArray, matrix: Array) -> dict[str, Array]:
        inputs, outputs = matrix.size // matrix.shape[-1], matrix.shape[-1]
        drawn = jax.random.normal(rng_key, (inputs, self.rank), jnp.float32) / inputs**0.5
        zeros = jnp.zeros((self.rank, outputs), matrix.dtype)
        return {"A": drawn.astype(matrix.dtype), "B": zeros}

    def merged(self, params: Params) -> Params:
        """Parameters of the network, W + s A B."""
        matrices = chosen(self.paths.__contains__, self.frozen)
        changed = {
            path: x + (self.scale * (params[path]["A"] @ params[path]["B"])).reshape(x.shape)
            for path, x in matrices.items()
        }
        return replaced(self.paths.__contains__, self.frozen, changed)

    def loss(self, params: Params, batch: Any) -> Float[Array, ""]:
        """Loss of a batch."""
        return super().loss(self.merged(params), batch)

    def examples(self, params: Params, batch: Any) -> tuple[Any, Float[Array, " batch"]]:
        """Batches of one example, and the examples' weights."""
        return super().examples(self.merged(params), batch)

    def features(
        self, params: Params, batch: Any
    ) -> tuple[Float[Array, "batch features"], Float[Array, " batch"]]:
        """Features of a batch, and the weights of its examples."""
        return super().features(self.merged(params), batch)

    def client_loss(self, params: Params, client: Index) -> Float[Array, ""]:
        """Loss F_k(w) of the client."""
        return super().client_loss(self.merged(params), client)

    def client_losses(self, params: Params, num_clients: int) -> Float[Array, " clients"]:
        """Losses F_k(w) of the first clients, in one pass."""
        return super().client_losses(self.merged(params), num_clients)

    def client_metrics(self, params: Params, client: Index, data: ClientData) -> Metrics:
        """Loss and metrics of one client."""
        metrics: Metrics = self.task.client_metrics(self.merged(params), client, data)
        return metrics

    def evaluate(self, params: Params, data: ClientData, **options: Any) -> Metrics:
        """Loss and metrics over all examples."""
        metrics: Metrics = self.task.evaluate(self.merged(params), data, **options)
        return metrics

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> Metrics:
        """Metrics of one model."""
        return super().metrics(rng_key, self.merged(params))
