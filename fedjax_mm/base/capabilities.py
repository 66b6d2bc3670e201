"""Protocols of tasks that can do more than every `Task`."""

from typing import Any, Self

from jaxtyping import Array, Float, Int
from typing_extensions import Protocol, runtime_checkable

from fedjax_mm.base import Index, Params, Round, Scalar, Steps, Task

__all__ = [
    "AnalyticTask",
    "EpochTask",
    "ExamplesTask",
    "FeaturesTask",
    "GradientTask",
    "RoundTask",
]


@runtime_checkable
class AnalyticTask(Task, Protocol):
    """A task with a closed form of full-gradient local SGD."""

    def local_sgd(
        self, params: Params, client: Index, learning_rate: Scalar, num_steps: Steps
    ) -> Any:
        """The (possibly sparse) update after full-gradient local steps."""


@runtime_checkable
class EpochTask(Task, Protocol):
    """A task with num_batches(client, size), the number of batches per epoch."""

    def num_batches(self, client: Index, size: int | None) -> int | Int[Array, ""]:
        """Steps per epoch, ``ceil(n_k / B)``, as an int if equal for all clients."""


@runtime_checkable
class ExamplesTask(Task, Protocol):
    """A task with examples(params, batch), which takes a batch apart into single examples."""

    def examples(self, params: Params, batch: Any) -> tuple[Any, Float[Array, " batch"]]:
        """Batches of one example, along a leading axis, and the examples' weights, 0 for padding.

        The loss of the batch is the weighted mean of theirs. In private training every positive
        weight counts as 1.
        """


@runtime_checkable
class GradientTask(Task, Protocol):
    """A task with loss_and_gradient(params, batch), its own estimate of the gradient."""

    def loss_and_gradient(self, params: Params, batch: Any) -> tuple[Float[Array, ""], Params]:
        """Loss of a batch, and the estimate of its gradient."""


@runtime_checkable
class FeaturesTask(Task, Protocol):
    """A task with features(params, batch), the inputs of its network's last layer."""

    def features(
        self, params: Params, batch: Any
    ) -> tuple[Float[Array, "batch features"], Float[Array, " batch"]]:
        """Features of the examples of a batch, and the weights of their losses in its loss."""


@runtime_checkable
class RoundTask(Task, Protocol):
    """A task that changes over rounds, for example because the clients' data drift.

    At the beginning of round t the task is replaced with that of round t, which is used by
    local training, the server step, the functions of `Look` and the metrics recorded after the
    round. Initial parameters, states and metrics use the task of round 0. Asynchronous runs do not
    support such tasks, because jobs overlap rounds.
    """

    def at(self, round: Round) -> Self:
        """Task of round t, with the same structure, shapes and types."""
