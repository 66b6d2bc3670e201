"""Helpers of several tests: assignments by name, replayed assignments, toy tasks and algorithms."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_mm import Experiment, fedcluster, full_participation, mfa_rand, mfa_rr, sequential
from fedjax_mm.base import Algorithm, Assignment, Cohort, Contribution, Look, keys
from fedjax_mm.base.cohorts import by_rows, places_of
from fedjax_mm.data import ClientData, client_data
from fedjax_mm.data.federated import FederatedData
from fedjax_mm.experiments.grid_of import grid_of
from fedjax_mm.sweeps import plan
from fedjax_mm.tasks.networks import LogisticRegression
from fedjax_mm.tasks.view import View

NOTHING_TO_SEE = Look(losses=None, appeals=None, metric=None)
"""The `look` argument of assignments that ignore it."""

ASSIGNMENTS = {
    "mfa_rand": lambda num_clients: mfa_rand(num_clients, 5),
    "mfa_rand cohort": lambda num_clients: mfa_rand(num_clients, 3, cohort_size=num_clients // 2),
    "mfa_rr": lambda num_clients: mfa_rr(num_clients, 5),
    "mfa_rr cohort": lambda num_clients: mfa_rr(num_clients, 3, cohort_size=num_clients // 2),
    "mfa_rr redrawn": lambda num_clients: mfa_rr(
        num_clients, 3, cohort_size=num_clients // 2, redraw="round"
    ),
    "fedcluster": lambda num_clients: fedcluster(num_clients, 5),
    "full participation": full_participation,
    "sequential": lambda num_clients: sequential(num_clients, 3, rounds_per_model=2),
}
"""Assignments by name, as functions of the number of clients."""


def slow_unless(is_quick: bool, *values: Any) -> Any:
    """One case of a parametrization, marked slow unless `is_quick`."""
    return pytest.param(*values, marks=() if is_quick else pytest.mark.slow)


def rows_of(cohort: Cohort, num_models: int, width: int | None = None) -> Any:
    """The clients of each model ``[M, n]``, padded with -1."""
    places = places_of(cohort.clients, cohort.models, num_models, width)
    return by_rows(cohort.clients, places)


def rounds_of(assignment: Assignment, rng_key: Any, num_rounds: int) -> Any:
    """The cohorts ``[T, M, n]`` that `simulate` draws with this key, as a traceable function."""

    def one_round(state: Any, t: Any) -> Any:
        key = keys.assignment_key(keys.round_key(rng_key, t))
        cohort, state = assignment.assign(key, t, state, NOTHING_TO_SEE)
        return state, rows_of(cohort, assignment.num_models)

    start = assignment.init(keys.assignment_key(keys.round_key(rng_key, 0)), NOTHING_TO_SEE)
    return lax.scan(one_round, start, jnp.arange(1, num_rounds + 1))[1]


_one_roll = jax.jit(rounds_of, static_argnums=(0, 2))


def roll_out(assignment: Assignment, rng_key: Any, num_rounds: int) -> np.ndarray:
    """The compiled result of `rounds_of` as a NumPy array."""
    return np.asarray(_one_roll(assignment, rng_key, num_rounds))


def replay(groups: Any, num_clients: int) -> Assignment:
    """An assignment that replays cohorts ``[T, M, n]``, with scale 1 for every client."""
    groups = jnp.asarray(groups, jnp.int32)
    ones = jnp.broadcast_to(jnp.asarray(1.0), groups.shape[1:])  # weakly typed
    return Assignment(
        num_clients,
        groups.shape[1],
        lambda rng_key, look: (),
        lambda rng_key, t, state, look: (Cohort.of_rows(groups[t - 1], ones), state),
    )


def remembering(assignment, num_rounds, width=None):
    """Wraps an assignment so that its state records the cohorts and losses of all rounds.

    The recorded rows have length `width`, by default the number of clients.
    """

    def init(rng_key, look):
        shape = num_rounds, assignment.num_models, width or assignment.num_clients
        return assignment.init(rng_key, look), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)

    def assign(rng_key, t, state, look):
        groups, inner = assignment.assign(rng_key, t, state[0], look)
        return groups, (inner, *state[1:])

    def observe(t, groups, reports, state):
        inner, clients, losses = state
        if assignment.observe is not None:
            inner = assignment.observe(t, groups, reports, inner)
        places = places_of(
            groups.clients, jnp.asarray(groups.models), assignment.num_models, clients.shape[-1]
        )
        rows, told = by_rows((groups.clients, reports["loss"]), places)
        told = jnp.where(places >= 0, told, 0)
        clients, losses = clients.at[t - 1].set(rows), losses.at[t - 1].set(told)
        return inner, clients, losses

    return assignment._replace(init=init, assign=assign, observe=observe)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Towards:
    """F_k(w) = 1/2 |w - target_k|^2, a task with one target per client."""

    targets: jax.Array
    dim: int = dataclasses.field(default=3, metadata={"static": True})

    @property
    def num_clients(self) -> int:
        return len(self.targets)

    def init(self, rng_key):
        return {"w": jax.random.normal(rng_key, (self.dim,), jnp.float32)}

    def weight(self, client):
        return jnp.float32(1)

    def batch(self, rng_key, client, step, how):
        return self.targets[client]

    def loss(self, params, batch):
        return jnp.sum((params["w"] - batch) ** 2) / 2

    def metrics(self, rng_key, params):
        return {"norm": jnp.sqrt(jnp.sum(params["w"] ** 2))}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Featured(View):
    """Least squares with the products ``x_i * w`` of an example as its features."""

    def features(self, params, batch):
        rows, weights = batch
        inputs, _ = self.task.data.take(rows)
        return inputs * params, weights / weights.sum()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Measured(Towards):
    """`Towards` with a client loss, and features ``target * w``."""

    def features(self, params, batch):
        return (batch * params["w"])[None], jnp.ones(1, params["w"].dtype)

    def client_loss(self, params, client):
        return self.loss(params, self.targets[client])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Precise(Towards):
    """`Towards` with the dtype of its targets, starting from ones."""

    def init(self, rng_key):
        return {"w": jnp.ones(self.dim, self.targets.dtype)}

    def weight(self, client):
        return jnp.ones((), self.targets.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bowls:
    """F_k(w) = a_k/2 |w - c_k|^2 for one number w, with n_k equal examples and epochs."""

    centers: jax.Array
    curvatures: jax.Array
    counts: jax.Array

    @classmethod
    def of(cls, centers, curvatures=None, counts=None):
        ones = jnp.ones(len(centers))
        each = [ones if x is None else jnp.asarray(x, float) for x in (curvatures, counts)]
        return cls(jnp.asarray(centers, float), *each)

    @property
    def num_clients(self) -> int:
        return len(self.centers)

    def init(self, rng_key):
        return jnp.zeros(1)

    def weight(self, client):
        return self.counts[client]

    def num_batches(self, client, size):
        return 1 if size is None else jnp.ceil(self.counts[client] / size).astype(jnp.int32)

    def batch(self, rng_key, client, step, how):
        return client

    def loss(self, params, batch):
        return self.client_loss(params, batch)

    def client_loss(self, params, client):
        return self.curvatures[client] * jnp.sum((params - self.centers[client]) ** 2) / 2

    def metrics(self, rng_key, params):
        losses = jax.vmap(lambda k: self.client_loss(params, k))(jnp.arange(self.num_clients))
        return {"loss": losses.mean()}


class Visits(NamedTuple):
    """Client state of `counting`."""

    count: jax.Array
    last_round: jax.Array


def counting() -> Algorithm:
    """An algorithm whose clients count their trainings and whose model adds up client ids."""

    def client(local, server_state, client_state):
        state = Visits(client_state.count + 1, jnp.int32(local.round))
        update = {"w": jnp.full_like(local.params["w"], local.client)}
        return Contribution(update, jnp.float32(1), jnp.int32(1)), state

    def server(given):
        return jax.tree.map(jnp.add, given.params, given.total.update), given.server_state + 1

    return Algorithm(
        lambda task, params: (jnp.int32(0), Visits(jnp.int32(0), jnp.int32(0))), client, server
    )


def share_grids(patch) -> None:
    """Patches `grid_of` to reuse the grid of an equal experiment, which saves tracing."""
    grids = {}

    def grid(experiment: Experiment, limit: float | None = None) -> Any:
        name = experiment.model_dump_json()
        if name not in grids:
            grids[name] = grid_of(experiment, limit)
        return grids[name]

    patch.setattr("fedjax_mm.experiments.run.grid_of", grid)


def plain(num_classes: int, *_: Any) -> LogisticRegression:
    """Logistic regression, a stand-in for networks that take several times longer to trace."""
    return LogisticRegression(num_classes)


@contextlib.contextmanager
def traced_once(lowered: dict[Any, Any] | None = None) -> Iterator[None]:
    """Traces the programs of a sweep once for all its runs, because tracing dominates their cost.

    Lowered programs are kept in `lowered`, so that later blocks can reuse them.
    """
    lower, lowered = plan._lower, {} if lowered is None else lowered

    def once(program: Any, size: int, where: Any) -> Any:
        key = program.label, size
        if key not in lowered:
            lowered[key] = lower(program, size, where)
        return lowered[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_lower", once)
        yield


def labelled_data(
    num_clients: int = 7, dim: int = 4, num_classes: int = 3, seed: int = 0, columns: int = 0
) -> FederatedData:
    """Random data of clients with 1 to 9 training and 1 to 4 test examples."""
    rng = np.random.default_rng(seed)

    def store(most: int) -> ClientData:
        def one(count: int) -> tuple[np.ndarray, np.ndarray]:
            shape = (count, columns) if columns else (count,)
            labels = rng.integers(0, num_classes, shape).astype(np.int32)
            return rng.normal(size=(count, dim)).astype(np.float32), labels

        return client_data([one(n) for n in rng.integers(1, most + 1, num_clients)])

    return FederatedData("labelled", "synthetic", num_classes, store(9), store(4))


def once_for_each_grid(programs_of):
    """Keeps the programs of every grid, with their traced functions."""
    known = functools.cache(programs_of)
    return lambda grid, report=None: known(grid)
