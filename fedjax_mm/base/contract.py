"""The contract between tasks, algorithms, assignments and the simulator.

A federated method has three parts: an `Assignment` chooses which clients train which models, the
client function of an `Algorithm` computes one client's contribution, and its server function
applies the sum of contributions. A `Task` describes the learning problem and its data. Tasks and
algorithms are written for one model, one client and one seed; only `fedjax_mm.simulate` adds those
axes. An assignment sees all models and all clients. The simulator passes arguments by position.

Axes:  ``models`` M models · ``clients`` N clients · ``slots`` of a cohort, padded with -1
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

# These protocols ignore what `__getattr__` finds on Python 3.11 too, because a wrapper that changes
# the loss must not inherit the closed form of the task that it wraps.
from typing_extensions import Protocol, runtime_checkable

from fedjax_mm.base.calls import Part
from fedjax_mm.base.cohorts import Cohort, Sampling
from fedjax_mm.base.paths import Where

T = TypeVar("T")

Params: TypeAlias = Any
"""A pytree of arrays."""

ServerState: TypeAlias = Any
"""A pytree that an algorithm defines, for one model."""

ClientState: TypeAlias = Any
"""A pytree that an algorithm defines, for one model and one client."""

Scalar: TypeAlias = float | Float[Array, ""]
"""A real number, which may be traced."""

Index: TypeAlias = Int[Array, ""]
"""The index of a client or a local step."""

Metrics: TypeAlias = dict[str, Float[Array, "..."]]
"""Numbers or arrays, by name."""

Round: TypeAlias = int | Int[Array, ""]
"""The round t = 1, 2, ... as in the papers, where the first round is 1."""


Steps: TypeAlias = int | Int[Array, ""]
"""A number of local steps. If it is traced, reverse-mode differentiation is not possible."""


class Padded(NamedTuple):
    """A traced count with a static upper bound: `number` of `size` slots are in use.

    Attributes:
      size: the static upper bound on the number of examples in a batch, or of models.
      number: the count in use. Unused examples have weight 0. Unused models are not trained, so
        they keep their initial parameters.
    """

    size: int
    number: int | Int[Array, ""]


BatchSize: TypeAlias = int | Padded | None
"""B, the number of examples in a batch; None uses all of the client's examples."""


class Batching(NamedTuple):
    """How a client's examples are batched for its local steps.

    Attributes:
      size: B, the number of rows in a batch. None uses all of the client's examples, padded to the
        largest client, so every client's full gradient costs as much as the largest one's.
      order: "iid" draws every row independently and uniformly; "epochs" visits every example once
        per epoch of ``ceil(n_k / B)`` steps, in a new order each epoch. Padding rows of the last
        batch have weight 0.
      limit: N_s(t), or None. If `size` is None, each step draws this many of the client's examples
        without replacement, at most all of them; otherwise only the first `limit` rows of a batch,
        drawn according to `order`, are used. Other rows have weight 0.
    """

    size: int | None = None
    order: Literal["iid", "epochs"] = "iid"
    limit: Steps | None = None


@runtime_checkable
class Task(Protocol):
    """A model's learning problem, including the data of all clients.

    A task is a pytree, so its data are arguments of the compiled program. Numbers and data are
    leaves, over which you can vmap; shapes are static fields.
    """

    @property
    def num_clients(self) -> int:
        """N, the number of clients that may train."""

    def init(self, rng_key: PRNGKeyArray) -> Params:
        """Initial parameters of one model."""

    def weight(self, client: Index) -> Float[Array, ""]:
        """The client's weight in weighted means and number of examples, n_k."""

    def batch(self, rng_key: PRNGKeyArray, client: Index, step: Index, how: Batching) -> Any:
        """Examples of local step `step`, counted from 0.

        All steps of a client in a round get the same `rng_key`.
        """

    def loss(self, params: Params, batch: Any) -> Float[Array, ""]:
        """Loss that a client's local steps minimize."""

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> Metrics:
        """Metrics of a global model, by name.

        A metric is a number or an array, and `rng_key` is for metrics that draw random numbers. The
        task's tuple attribute `per_client`, if any, names metrics whose first axis is the clients
        axis.
        """


@runtime_checkable
class MeasuredTask(Task, Protocol):
    """A task with client_loss(params, client), the loss F_k(w) of one client."""

    def client_loss(self, params: Params, client: Index) -> Float[Array, ""]:
        """Mean loss F_k(w) over the client's training examples, without dropout."""


@runtime_checkable
class DemandingTask(MeasuredTask, Protocol):
    """A task whose clients have thresholds, made by wrapping a task with `requiring`."""

    def threshold(self, client: Index) -> Float[Array, ""]:
        """Threshold rho_k: a model with ``F_k(w) < rho_k`` appeals to the client."""

    def appeals(self, params: Params) -> Bool[Array, " clients"]:
        """Returns whether each client would participate, which is if F_k(w) < rho_k."""


class ClientContext(NamedTuple):
    """Inputs of one client's local training in one round.

    Attributes:
      rng_key: the key of this client, model and round.
      round: t.
      task: the learning problem.
      client: k.
      params: w, the global parameters.
      factor: the factor from `Cohort.scale`; None if the assignment does not set it.
      takes_part: whether the client participates; see `Cohort.takes_part`.
      kept: the state of the local optimizer, if it is kept between rounds; see `keeping`.
    """

    rng_key: PRNGKeyArray
    round: Round
    task: Task
    client: Index
    params: Params
    factor: Scalar | None = 1.0
    takes_part: bool | Bool[Array, ""] = True
    kept: Any = None

    @property
    def scale(self) -> Scalar:
        """The factor that multiplies the client's weight, 0 if the client does not participate."""
        factor = 1.0 if self.factor is None else self.factor
        return factor if self.takes_part is True else jnp.where(self.takes_part, factor, 0)

    def weight(self) -> Float[Array, ""]:
        """The client's weight, n_k times the scale."""
        return self.task.weight(self.client) * self.scale

    def next_state(self, new: Any, old: Any) -> Any:
        """The new state if the client participates, and else the old one."""
        return jax.tree.map(partial(jnp.where, jnp.asarray(self.takes_part)), new, old)

    def loss(self) -> Float[Array, ""]:
        """Loss F_k(w) at the global parameters.

        Raises:
          ValueError: if the task has no such loss.
        """
        return needs(self.task, MeasuredTask).client_loss(self.params, self.client)

    def threshold(self) -> Float[Array, ""]:
        """Threshold rho_k of the client.

        Raises:
          ValueError: if clients have no thresholds.
        """
        return needs(self.task, DemandingTask).threshold(self.client)


class Contribution(NamedTuple):
    """Message of one client.

    The server receives the sums of the first three fields over the participants.

    Attributes:
      update: a pytree of arrays or `SparseUpdate`s, whose size counts as uploaded; or a `Stacked`
        update, which is not summed.
      weight: the client's weight in the mean.
      num_gradients: the number of gradients computed by the client.
      report: a small pytree that is not summed but passed to the assignment's `observe`. The
        library's methods send ``{"loss": mean training loss of the batches}``. The reports of all
        models must have the same structure.
    """

    update: Any
    weight: Float[Array, ""]
    num_gradients: Int[Array, ""]
    report: Any = ()


class InitFn(Protocol):
    """A function that makes the initial states."""

    def __call__(self, task: Task, params: Params) -> tuple[ServerState, ClientState]:
        """Returns the server state and one client's state, which is copied to every client."""


class ClientFn(Protocol):
    """A function that trains one client."""

    def __call__(
        self, context: ClientContext, server_state: ServerState, client_state: ClientState
    ) -> tuple[Contribution, ClientState]:
        """Returns the client's message and its new state."""


class ServerContext(NamedTuple):
    """Inputs of the server step of one model in one round.

    Attributes:
      round: t.
      task: the model's learning problem.
      params: w.
      server_state: the server state before the step.
      client_states: the states of all N clients, updated for participants.
      total: the sum of the participants' contributions. Updates are dense, and reports are ``()``.
        `Stacked` updates are those of all slots.
      rng_key: the key of this model and round, for random draws such as noise.
    """

    round: Round
    task: Task
    params: Params
    server_state: ServerState
    client_states: ClientState
    total: Contribution
    rng_key: PRNGKeyArray


class ServerFn(Protocol):
    """A function that aggregates a round's contributions.

    Models without participants keep their parameters and state, unless `Algorithm.steps_idle` is
    set.
    """

    def __call__(self, context: ServerContext) -> tuple[Params, ServerState]:
        """Returns the new parameters and the new server state."""


@dataclasses.dataclass(frozen=True, repr=False)
class Algorithm(Part):
    """Functions for client training and server aggregation.

    Attributes:
      init: makes the initial states; ``()`` is an empty state.
      client: computes one client's contribution.
      server: applies the sum of the contributions.
      num_steps: returns the number of local steps that a client will take, so that clients with
        similar numbers can be computed together. None if all numbers are equal. They are also equal
        if it does not read the client, as in epochs over equally large clients.
      steps_idle: whether the server also steps in rounds without participants, with sums of 0, as
        in methods that use earlier updates.
      metrics: returns additional metrics by name, from a model and its server state, to record
        along with the task's metrics; None means no additional ones.
      personal: returns the parameters with which a client evaluates, from the global ones and the
        client's state. They are recorded as ``personal_loss`` and, if clients have their own test
        examples, ``personal_accuracy``. None means the global parameters, without further metrics.
      download: returns the part of the parameters that a client receives, whose size counts as
        downloaded; None means all.
      name: the name of the wrapper or of the factory, for messages.
      inner: the algorithm inside a wrapper; None without a wrapper.
    """

    init: InitFn
    client: ClientFn
    server: ServerFn
    num_steps: Callable[[Task, Index, ServerState], Steps] | None = None
    steps_idle: bool = False
    metrics: Callable[[Task, Params, ServerState], Metrics] | None = None
    personal: Callable[[Params, ClientState], Params] | None = None
    download: Callable[[Params], Any] | None = None
    name: str = ""
    inner: Self | None = None


class Updates(NamedTuple):
    """Updates that all clients would send in a round, for `Look.updates`.

    Attributes:
      norms: the norm of the part that `Cohort.scale` multiplies, divided by the total weight of all
        clients; ``d_k |w_k - w|`` in FedAvg.
      num_gradients: the number of gradients computed.
    """

    norms: Float[Array, "models clients"]
    num_gradients: Int[Array, " models"]


def _not_offered() -> Any:
    raise ValueError("this `Look` cannot answer; give it the function that does")


class Look(NamedTuple):
    """Functions that an assignment may use to evaluate the models before a round.

    Functions that are not called cost nothing.

    Attributes:
      losses: returns each model's F_k, ``float[models, clients]``, in one pass over all data.
      appeals: returns whether each model appeals to each client, ``bool[models, clients]``, in one
        pass over all data; see `requiring`.
      weights: returns n_k in each model's task, ``float[models, clients]``.
      updates: trains all models on all clients, using the keys of the round, so that the cohort
        will send exactly these updates.
      metric: returns a recorded metric of every model by name, ``float[models]``; given several
        names, the first one that a model's task has.
      active: returns which models may train, or None if all always may. `finishing` and `arriving`
        refuse assignments that do not call it.
    """

    losses: Callable[[], Float[Array, "models clients"]] = _not_offered
    appeals: Callable[[], Bool[Array, "models clients"]] = _not_offered
    weights: Callable[[], Float[Array, "models clients"]] = _not_offered
    updates: Callable[[], Updates] = _not_offered
    metric: Callable[..., Float[Array, " models"]] = _not_offered
    active: Callable[[], Bool[Array, " models"] | None] = lambda: None


class StateFn(Protocol):
    """A function that makes the initial state of an assignment."""

    def __call__(self, rng_key: PRNGKeyArray, look: Look) -> Any:
        """Returns the state before round 1."""


class AssignFn(Protocol):
    """A function that chooses which clients train which models."""

    def __call__(
        self, rng_key: PRNGKeyArray, round: Round, state: Any, look: Look
    ) -> tuple[Cohort, Any]:
        """Returns the cohort of round t, with the same shape in all rounds, and the new state."""


class ObserveFn(Protocol):
    """A function that updates the state of an assignment after a round."""

    def __call__(self, round: Round, cohort: Cohort, reports: Any, state: Any) -> Any:
        """Returns the new state, given the one that `assign` returned.

        Reports ``[slots, ...]`` are in the order of the cohort. They are zero for padding and for
        clients that do not participate, whose client index is also -1.
        """


class MixFn(Protocol):
    """A function that mixes the models after the server steps of a round."""

    def __call__(self, round: Round, state: Any, old: Params | None, new: Params) -> Params:
        """Returns the mixed parameters of all models.

        Arrays have a leading models axis. If models are alike, they form one tree with the
        structure of a model's parameters. With `Assignment.where` they are a dict by path.

        Args:
          round: t.
          state: the assignment's state after `observe`. Random choices, such as the links of the
            round, are made in `assign`.
          old: the parameters before the round; None for a `Mixed` state, which is mixed as `new`.
          new: the parameters after the server steps.
        """


class Mixed(NamedTuple):
    """A part of a server state that is mixed between models as the parameters are.

    Attributes:
      value: a pytree like the parameters, such as the tracked gradient of `gradient_tracking`.
    """

    value: Params


MESSAGES = "messages"
"""Name of an assignment's metric with the number of models that each model has sent so far."""

ACTIVE = "active"
"""Name of an assignment's metric that is 0 for inactive models, see `Assignment`."""


@dataclasses.dataclass(frozen=True, repr=False)
class Assignment(Part):
    """A rule that chooses which clients train which models.

    Attributes:
      num_clients: N, the number of clients to choose from.
      num_models: M, or the static upper bound of a traced M.
      init: makes the initial state.
      assign: chooses the cohort of a round.
      observe: updates the state with the participants' reports; None ignores them.
      metrics: returns additional metrics ``[models, ...]`` by name, from the state, to record along
        with the tasks' metrics; None means no additional ones. A model whose metric ``active`` is 0
        is not active: its server never steps, and its rounds are not idle.
      eligible: which clients may train each model; None means all.
      mix: mixes the parameters of all models after the server steps, for edges, peers, clusters and
        shared parts; None leaves models apart. Models that are not active are not changed. Its
        messages are counted by the metric ``messages``, see `MESSAGES`.
      where: the parameters that `mix` gets, as in `personal`; None means all, which must then have
        equal shapes in all models.
      peers: whether each client has a model of its own, so that training sends nothing.
      measured: the number of models with the task's metrics, spread evenly; None means all.
      name: the name of the wrapper or of the factory, for messages.
      inner: the assignment inside a wrapper; None without a wrapper.
      sampling: how clients are sampled, as stated by `sampled`; None if unknown or data-dependent.
        Privacy accounting relies on it, so ``assignment._replace(...)`` has none.
    """

    num_clients: int
    num_models: int
    init: StateFn
    assign: AssignFn
    observe: ObserveFn | None = None
    metrics: Callable[[Any], Metrics] | None = None
    eligible: Bool[np.ndarray, "models clients"] | None = dataclasses.field(
        default=None, compare=False
    )
    mix: MixFn | None = None
    where: Where | None = None
    peers: bool = False
    measured: int | None = None
    name: str = ""
    inner: Self | None = None
    sampling: ClassVar[Sampling | None] = None

    def sampled(self, sampling: Sampling | None) -> Self:
        """Returns the assignment with a statement of how it samples clients."""
        return self._replace().stating(sampling=sampling)


def needs(task: Any, capability: type[T]) -> T:
    """Returns the task if it implements the protocol, or raises `ValueError`.

    Example:
      >>> from fedjax_mm.tasks import quadratic
      >>> needs(quadratic(6, 4, mu=0.1), DemandingTask)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
        ...
      ValueError: Quadratic is not a task whose clients have thresholds, made by ...
    """
    if not isinstance(task, capability):
        words, *_ = (capability.__doc__ or f"A {capability.__name__}").splitlines()
        wanted = words[0].lower() + words[1:].rstrip(".")
        raise ValueError(f"{type(task).__name__} is not {wanted} ({capability.__name__})")
    return task
