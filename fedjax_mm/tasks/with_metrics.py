"""User-defined metrics, recorded in addition to those of a task."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from fedjax_mm.base import Index, Metrics, Params, Scalar, Steps, Task
from fedjax_mm.base.calls import in_short
from fedjax_mm.base.capabilities import AnalyticTask
from fedjax_mm.tasks.view import View

Own: TypeAlias = Mapping[str, Callable[[Params], Any]] | Callable[[Any, Params], Mapping[str, Any]]
"""Functions of a model's parameters by name, or one function of the task and the parameters."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithMetrics(View):
    """A task with additional metrics, built by `with_metrics`.

    Attributes:
      own: one function of the task and the parameters, or functions of the parameters by name.
      of_clients: names of the additional metrics with one number per client.
    """

    own: Any = dataclasses.field(metadata={"static": True})
    of_clients: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    __repr__ = in_short

    @property
    def divides(self) -> bool:
        """Whether devices may divide the examples, which a function of the task may read."""
        return getattr(self.own, "divides", not callable(self.own))

    @property
    def per_client(self) -> tuple[str, ...]:
        """Names of all metrics with one number per client."""
        return (*super().per_client, *self.of_clients)

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> Metrics:
        """Metrics of the task, followed by the additional ones."""
        metrics = self.task.metrics(rng_key, params)
        if callable(self.own):
            own = dict(self.own(self.task, params))
        else:
            own = {name: function(params) for name, function in self.own}
        for name in self.of_clients:
            if name not in own:
                raise ValueError(
                    f"per_client has {name!r}, which is not a task metric; the metrics are "
                    f"{', '.join(map(repr, own)) or 'none'}"
                )
        for name in metrics.keys() & own.keys():
            raise ValueError(f"the task has a metric {name!r} already; give yours another name")
        return metrics | {name: jnp.asarray(value, float) for name, value in own.items()}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AnalyticWithMetrics(WithMetrics):
    """A task with additional metrics and a closed form of local SGD."""

    __repr__ = in_short

    def local_sgd(
        self, params: Params, client: Index, learning_rate: Scalar, num_steps: Steps
    ) -> Any:
        """Update of the task's closed form, local minus global parameters."""
        return self.task.local_sgd(params, client, learning_rate, num_steps)


def with_metrics(task: Task, metrics: Own, *, per_client: Sequence[str] = ()) -> WithMetrics:
    """Adds metrics to a task, which `simulate` and `sweep` record by name.

    Training is not affected. A metric may be a number or an array.

    Args:
      task: any task; apply other wrappers, such as `requiring`, first.
      metrics: functions of one model's parameters, by name; or one function of the task and the
        parameters that returns all metrics by name, so that the data are arguments of the compiled
        program rather than constants.
      per_client: names of the metrics with one number per client, which get a dimension ``client``
        in `to_dataset` and in the result of `sweep`.

    Raises:
      ValueError: if `metrics` has the wrong form or a name is already in use, which is checked
        before compilation.

    Example:
      >>> import jax
      >>> import optax
      >>> from fedjax_mm import fedavg, mfa_rr, simulate, to_dataset
      >>> from fedjax_mm.tasks import client_losses, quadratic, with_metrics
      >>> run = fedavg(0.1, local_steps=5), mfa_rr(6, 2), 20
      >>> task = with_metrics(quadratic(6, 4, mu=0.1), {"norm": optax.tree.norm})
      >>> simulate(jax.random.key(0), task, *run)[1].metrics["norm"].shape  # records, models
      (21, 2)
      >>> def more(task, params):
      ...     return {"client_loss": client_losses(task, params)}
      >>> task = with_metrics(quadratic(6, 4, mu=0.1), more, per_client=["client_loss"])
      >>> to_dataset(simulate(jax.random.key(0), task, *run)[1]).client_loss.dims
      ('round', 'model', 'client')
    """
    if isinstance(metrics, Mapping):
        for name, function in metrics.items():
            if not callable(function):
                raise ValueError(
                    f"metrics[{name!r}] is {function!r}; give a function of the parameters"
                )
    elif not callable(metrics):
        raise ValueError(f"metrics are {metrics!r}; give functions of the parameters by name")
    own = tuple(metrics.items()) if isinstance(metrics, Mapping) else metrics
    kind = AnalyticWithMetrics if isinstance(task, AnalyticTask) else WithMetrics
    return kind(task, task.num_clients, own, tuple(per_client))
