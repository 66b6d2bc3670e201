"""The contract: types and prose, no logic.

A federated method is *who trains what* (an `Assignment`), *what one client contributes* (the client
function of an `Algorithm`) and *what the server does with the sum of the contributions* (its server
function). What is learned, and from which data, is a `Task`. Everything here is written for one
model, one client and one seed; `fedjax_mm.simulate` alone adds those axes.

Axes:  ``models`` M models · ``clients`` N clients · ``group`` n clients per model, padded
       ``chunk`` clients computed at once · ``steps`` E local steps · ``records`` recorded rounds
       ``dim`` d parameters of a flat model · ``block`` p + 1 coordinates that one client touches
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

Params: TypeAlias = Any  # a pytree of arrays
ServerState: TypeAlias = Any
ClientState: TypeAlias = Any
AssignmentState: TypeAlias = Any
Batch: TypeAlias = Any

Round: TypeAlias = int | Int[Array, ""]
"""The round t = 1, 2, ... of the papers: the first round is 1."""

Scalar: TypeAlias = float | Float[Array, ""]
Schedule: TypeAlias = Callable[[Any], Any]
"""An optax schedule, always evaluated at the round t (or the frame l): constant inside a round."""


class Batching(NamedTuple):
    """How a client's examples become the batches of its local steps.

    Attributes:
      size: B, the rows of a batch; None takes all of the client's examples, in an array as long as
        the largest client's: full gradients of clients of very different sizes cost accordingly.
      order: "iid" draws every row independently and uniformly; "epochs" gives every example once
        per epoch of ``ceil(n_k / B)`` steps, in an order of its own, its last batch filled with
        rows that do not count.
      limit: N_s(t), if it is not None: as many of the client's examples are drawn without
        replacement for each step, but not more than it has; the other rows do not count.
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
        """N, the size of the client population."""

    def init(self, rng_key: PRNGKeyArray) -> Params:
        """Initial parameters of one model."""

    def weight(self, client: Int[Array, ""]) -> Float[Array, ""]:
        """The client's weight in weighted averages: n_k, its number of examples."""

    def batch(
        self, rng_key: PRNGKeyArray, client: Int[Array, ""], step: Int[Array, ""], how: Batching
    ) -> Batch:
        """The examples of local step `step` (from 0).

        `rng_key` is the same for all steps of one client and round.
        """

    def loss(self, params: Params, batch: Batch) -> Float[Array, ""]:
        """The loss that a client's local step descends."""

    def metrics(self, params: Params) -> dict[str, Float[Array, ""]]:
        """What is recorded of one global model."""


@runtime_checkable
class EpochTask(Task, Protocol):
    """A task whose clients' examples make epochs."""

    def num_batches(self, client: Int[Array, ""], size: int | None) -> int | Int[Array, ""]:
        """Steps of one epoch, ``ceil(n_k / B)``; a plain int where all clients take as many."""


@runtime_checkable
class MeasuredTask(Task, Protocol):
    """A task that tells what its clients lose, as algorithms that look at losses ask."""

    def client_loss(self, params: Params, client: Int[Array, ""]) -> Float[Array, ""]:
        """F_k(w): the mean loss of the client's training examples, as evaluated: no dropout."""


@runtime_checkable
class TestedTask(MeasuredTask, Protocol):
    """A measured task whose clients have examples for testing, and what is right and wrong."""

    @property
    def train(self) -> Any:
        """Every client's training examples."""

    @property
    def test(self) -> Any:
        """The same for testing."""

    def client_metrics(
        self, params: Params, client: Int[Array, ""], data: Any
    ) -> dict[str, Float[Array, ""]]:
        """The mean ``loss`` and ``accuracy`` over one client's examples in `data`."""

    def evaluate(
        self,
        params: Params,
        data: Any,
        *,
        per_client: bool = False,
        num_clients: int | None = None,
    ) -> dict[str, Float[Array, "*clients"]]:
        """The same of all clients' examples, or of each client's, in one pass over the data.

        With `num_clients`, of the first so many clients.
        """


@runtime_checkable
class DemandingTask(MeasuredTask, Protocol):
    """A task whose clients ask for a loss below a threshold of their own."""

    def threshold(self, client: Int[Array, ""]) -> Float[Array, ""]:
        """rho_k: a model with ``F_k(w) < rho_k`` appeals to the client."""


@runtime_checkable
class AnalyticTask(Task, Protocol):
    """A task that brings its own closed form of full-gradient local SGD."""

    def local_sgd(
        self,
        params: Params,
        client: Int[Array, ""],
        learning_rate: Scalar,
        num_steps: int,
    ) -> "Params | SparseUpdate":
        """The update (local minus global parameters) of `num_steps` full-gradient steps."""


class SparseUpdate(NamedTuple):
    """The update ``scale * params + sum_i values[i] e_indices[i]`` of a flat parameter array.

    It may stand where an array of `params` would stand in `Contribution.update`. A client that
    touches few coordinates of a large model then costs what it touches, not what the model holds.
    """

    scale: Float[Array, ""]
    indices: Int[Array, " block"]
    values: Float[Array, " block"]


class Contribution(NamedTuple):
    """What one client sends. The server sees only the sum over the participants, field by field."""

    update: Any  # pytree of arrays or `SparseUpdate`s, as the algorithm likes; counted as uploaded
    weight: Float[Array, ""]
    num_gradients: Int[Array, ""]  # gradients that the client computed


class Algorithm(NamedTuple):
    """How clients train and how the server aggregates.

    Attributes:
      init: ``(task, params) -> (server_state, client_state)``; the client state is that of one
        client, and each (model, client) pair gets its own copy. Use ``()`` where there is none.
      client: ``(rng_key, round, task, client, params, server_state, client_state) -> (Contribution,
        client_state)``; `client` is the client's number.
      server: ``(round, params, server_state, total) -> (params, server_state)``; `total` is the sum
        of the participants' contributions with dense updates. A model that nobody trained
        stays as it is.
      num_steps: ``(task, client, server_state) -> steps``, where clients take different numbers of
        local steps: those that take about as many are then computed together. A plain int, or
        None, where all take as many.
      start: ``(rng_key, task, client, params, client_state) -> client_state``, where the states of
        clients differ from the first round on.
      begin: ``(round, task, params, server_state, client_states) -> server_state``, the first thing
        in a round; `client_states` are those of all clients.
      output: ``(params, server_state) -> params``, where another model is recorded than the one
        that clients get.
      appeal: ``(task, params, server_state, client_states) -> bool[clients]``, to which clients the
        model appeals.
      metrics: ``(rng_key, task, params, client_states) -> metrics``, instead of the task's own;
        `params` are the output.
      num_unseen: so many of the task's clients, the last ones, never train; the assignment does
        not know of them.
    """

    init: Callable[[Task, Params], tuple[ServerState, ClientState]]
    client: Callable[
        [PRNGKeyArray, Round, Task, Int[Array, ""], Params, ServerState, ClientState],
        tuple[Contribution, ClientState],
    ]
    server: Callable[
        [Round, Params, ServerState, Contribution],
        tuple[Params, ServerState],
    ]
    num_steps: Callable[[Task, Int[Array, ""], ServerState], int | Int[Array, ""]] | None = None
    start: (
        Callable[[PRNGKeyArray, Task, Int[Array, ""], Params, ClientState], ClientState] | None
    ) = None
    begin: Callable[[Round, Task, Params, ServerState, ClientState], ServerState] | None = None
    output: Callable[[Params, ServerState], Params] | None = None
    appeal: Callable[[Task, Params, ServerState, ClientState], Bool[Array, " clients"]] | None = (
        None
    )
    metrics: (
        Callable[[PRNGKeyArray, Task, Params, ClientState], dict[str, Float[Array, ""]]] | None
    ) = None
    num_unseen: int = 0


class Assignment(NamedTuple):
    """Who trains what.

    Attributes:
      num_clients: N, the clients to draw from.
      num_models: M.
      init: ``(rng_key) -> state``.
      assign: ``(rng_key, round, state) -> (groups, state)``; `groups` is ``int32[models, group]``
        with client numbers, and -1 for padding, which contributes nothing.
      select: ``(rng_key, round, groups, appeal) -> groups``, where clients may stay away; `appeal`
        is ``bool[models, clients]``, from the algorithm. Rows may become shorter.
    """

    num_clients: int
    num_models: int
    init: Callable[[PRNGKeyArray], AssignmentState]
    assign: Callable[
        [PRNGKeyArray, Round, AssignmentState],
        tuple[Int[Array, "models group"], AssignmentState],
    ]
    select: (
        Callable[
            [PRNGKeyArray, Round, Int[Array, "models group"], Bool[Array, "models clients"]],
            Int[Array, "models cohort"],
        ]
        | None
    ) = None
