"""The contract: types and prose, almost no logic.

A federated method is *who trains what* (an `Assignment`), *what one client contributes* (the client
function of an `Algorithm`) and *what the server does with the sum of the contributions* (its server
function). What is learned, and from which data, is a `Task`. Tasks and algorithms are written for
one model, one client and one seed: `fedjax_mm.simulate` alone adds those axes. An assignment alone
sees all models and clients, since it deals them out. Functions are called by position.

Axes:  ``models`` M models · ``clients`` N clients · ``group`` n clients per model, padded with -1
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.checks import needs

Params: TypeAlias = Any  # a pytree of arrays
ServerState: TypeAlias = Any  # pytrees of an algorithm's own: of one model,
ClientState: TypeAlias = Any  # and of one pair of a model and a client
Scalar: TypeAlias = float | Float[Array, ""]
Index: TypeAlias = Int[Array, ""]  # the number of a client or a local step, from 0

Round: TypeAlias = int | Int[Array, ""]
"""The round t = 1, 2, ... of the papers: the first round is 1."""


class Batching(NamedTuple):
    """How a client's examples become the batches of its local steps.

    Attributes:
      size: B, the rows of a batch; None takes all of the client's examples, in an array as long as
        the largest client's: full gradients of clients of very different sizes cost accordingly.
      order: "iid" draws every row independently and uniformly; "epochs" gives every example once
        per epoch of ``ceil(n_k / B)`` steps, in an order of its own, its last batch filled with
        rows that do not count.
      limit: N_s(t), or None; with a size of None: as many of the client's examples are drawn
        without replacement for each step, but not more than it has; the other rows do not count.
    """

    size: int | None = None
    order: Literal["iid", "epochs"] = "iid"
    limit: Int[Array, ""] | None = None


@runtime_checkable
class Task(Protocol):
    """What one model learns, and every client's data. A pytree, so that data is an argument.

    Numbers and data are leaves (they can be vmapped over); shapes are static fields.
    """

    @property
    def num_clients(self) -> int:
        """N, the clients that may train."""

    def init(self, rng_key: PRNGKeyArray) -> Params:
        """Initial parameters of one model."""

    def weight(self, client: Index) -> Float[Array, ""]:
        """The client's weight in weighted averages: n_k, its number of examples."""

    def batch(self, rng_key: PRNGKeyArray, client: Index, step: Index, how: Batching) -> Any:
        """The examples of local step `step` (from 0).

        `rng_key` is the same for all steps of one client and round.
        """

    def loss(self, params: Params, batch: Any) -> Float[Array, ""]:
        """The loss that a client's local step descends."""

    def metrics(self, rng_key: PRNGKeyArray, params: Params) -> dict[str, Float[Array, ""]]:
        """What is recorded of one global model; `rng_key` is for metrics that draw."""


@runtime_checkable
class EpochTask(Task, Protocol):
    """A task with num_batches(client, size), as many batches as make an epoch."""

    def num_batches(self, client: Index, size: int | None) -> int | Int[Array, ""]:
        """Steps of one epoch, ``ceil(n_k / B)``; a plain int where all clients take as many."""


@runtime_checkable
class MeasuredTask(Task, Protocol):
    """A task with client_loss(params, client), the loss F_k(w) of one client."""

    def client_loss(self, params: Params, client: Index) -> Float[Array, ""]:
        """F_k(w): the mean loss of the client's training examples, as evaluated: no dropout."""


@runtime_checkable
class DemandingTask(MeasuredTask, Protocol):
    """A task whose clients have thresholds; wrap a task with `requiring` to make one."""

    def threshold(self, client: Index) -> Float[Array, ""]:
        """rho_k: a model with ``F_k(w) < rho_k`` appeals to the client."""

    def appeals(self, params: Params) -> Bool[Array, " clients"]:
        """Whether each client would take part, given the choice: the model appeals to it."""


@runtime_checkable
class AnalyticTask(Task, Protocol):
    """A task that brings its own closed form of full-gradient local SGD."""

    def local_sgd(
        self, params: Params, client: Index, learning_rate: Scalar, num_steps: int
    ) -> Any:
        """Local minus global parameters after full-gradient steps, or a `SparseUpdate` of them."""


class LocalProblem(NamedTuple):
    """Client k in round t: all that its local training may look at.

    Attributes:
      rng_key: of this client, model and round.
      round: t.
      task: what is learned.
      client: k.
      params: w, the global parameters.
      scale: what the client's weight is multiplied by: 1, unless `Groups.scale` says otherwise.
    """

    rng_key: PRNGKeyArray
    round: Round
    task: Task
    client: Index
    params: Params
    scale: Scalar = 1.0

    def weight(self) -> Float[Array, ""]:
        """n_k times the scale."""
        return self.task.weight(self.client) * self.scale

    def loss(self) -> Float[Array, ""]:
        """F_k(w), at the global parameters; `ValueError` if the task does not give it."""
        return needs(self.task, MeasuredTask).client_loss(self.params, self.client)

    def threshold(self) -> Float[Array, ""]:
        """rho_k; `ValueError` if clients require nothing."""
        return needs(self.task, DemandingTask).threshold(self.client)


class Contribution(NamedTuple):
    """What one client sends. The server sees only the sums over the participants of three fields.

    Attributes:
      update: a pytree of arrays or `SparseUpdate`s, as the algorithm likes; counted as uploaded.
      weight: a number.
      num_gradients: the gradients that the client computed.
      report: a small pytree that is not summed, but handed to the assignment's `observe`: here
        ``{"loss": mean loss of the batches while training}``. Models must report alike.
    """

    update: Any
    weight: Float[Array, ""]
    num_gradients: Int[Array, ""]
    report: Any = ()


class InitFn(Protocol):
    """The states before round 1."""

    def __call__(self, task: Task, params: Params) -> tuple[ServerState, ClientState]:
        """The server's state, and that of one client, of which each gets its own copy."""


class ClientFn(Protocol):
    """Local training."""

    def __call__(
        self, local: LocalProblem, server_state: ServerState, client_state: ClientState
    ) -> tuple[Contribution, ClientState]:
        """What one client sends, and its new state."""


class ServerFn(Protocol):
    """Aggregation of the round's contributions; a model that nobody trained stays as it is."""

    def __call__(
        self,
        round: Round,
        task: Task,
        params: Params,
        server_state: ServerState,
        client_states: ClientState,
        total: Contribution,
    ) -> tuple[Params, ServerState]:
        """The new parameters and state.

        Args:
          round: t.
          task: what the model learns.
          params: w.
          server_state: as the round before left it.
          client_states: of all N clients, after those that trained came home.
          total: the sum of the participants' contributions; updates are dense, the report ``()``.
        """


class Algorithm(NamedTuple):
    """How clients train and how the server aggregates.

    Attributes:
      init: the states before round 1; use ``()`` where there is none.
      client: what one client contributes.
      server: what the server does with the sum of the contributions.
      num_steps: the local steps that a client is going to take, where they differ: those that take
        about as many are then computed together. A plain int, of any value, where all take as many.
    """

    init: InitFn
    client: ClientFn
    server: ServerFn
    num_steps: Callable[[Task, Index, ServerState], int | Int[Array, ""]] = lambda *_: 1


class Groups(NamedTuple):
    """Who trains which model in a round.

    Attributes:
      clients: client numbers; -1 is padding, at any place of a row, and contributes nothing. A
        client may be in several rows, but only once in a row.
      scale: what their weights are multiplied by, such as 1/p of unbiased sampling; None is 1.
    """

    clients: Int[Array, "models group"]
    scale: Float[Array, "models group"] | None = None


class Look(NamedTuple):
    """What an assignment may ask of the models before a round: one call is a pass over all data.

    What is not called is not computed.

    Attributes:
      losses: F_k of every model, ``float[models, clients]``.
      appeals: to whom every model appeals, ``bool[models, clients]``; see `requiring`.
    """

    losses: Callable[[], Float[Array, "models clients"]]
    appeals: Callable[[], Bool[Array, "models clients"]]


class AssignFn(Protocol):
    """The choice of who trains what."""

    def __call__(
        self, rng_key: PRNGKeyArray, round: Round, state: Any, look: Look
    ) -> tuple[Groups, Any]:
        """The groups of round t, of the same shape in all rounds, and the new state."""


class ObserveFn(Protocol):
    """The lesson of a round."""

    def __call__(self, round: Round, groups: Groups, reports: Any, state: Any) -> Any:
        """From the state that `assign` returned, the new one; reports ``[models, group, ...]``.

        Each report stands where its client stands in the groups; padding has zeros.
        """


class Assignment(NamedTuple):
    """Who trains what.

    Attributes:
      num_clients: N, the clients to draw from.
      num_models: M.
      init: from a key to the state before round 1.
      assign: who trains what in a round.
      observe: what the assignment learns from those that trained, if it does.
    """

    num_clients: int
    num_models: int
    init: Callable[[PRNGKeyArray], Any]
    assign: AssignFn
    observe: ObserveFn | None = None
