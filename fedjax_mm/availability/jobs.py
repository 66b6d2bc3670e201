"""Jobs: models that arrive after the first round, and models that finish when they are good enough.

Both wrappers deal the clients to the models at work, by the assignment's argument `active`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.base import Assignment, Cohort, Look, Metrics, Round, Scalar
from fedjax_mm.base.calls import Wraps
from fedjax_mm.base.contract import ACTIVE
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import TracedCount, checked
from fedjax_mm.checks.instances import check_assignment
from fedjax_mm.wrap import names_of

Targets: TypeAlias = Scalar | Sequence[float] | Float[Array, " models"]
"""A number for all models, or one for each."""


class Job(NamedTuple):
    """State of a wrapper.

    Attributes:
      inner: the state of the assignment inside.
      event: the round after which each model arrived or finished; NaN before.
      active: the models at work in the last round.
    """

    inner: Any
    event: Float[Array, " models"]
    active: Bool[Array, " models"]


@checked
def finishing(
    assignment: Assignment,
    metric: str,
    *,
    at_least: Targets | None = None,
    at_most: Targets | None = None,
    every: TracedCount = 1,
    active: Bool[Array, " models"] | None = None,
) -> Assignment:
    """Models finish when a metric meets its target, and the others get their clients.

    A model that meets its target after round t gets no client from round t + 1 on, so that its
    parameters and states do not change any more. A model that meets it at the start never trains.
    NaN meets no target.

    Records have ``active``, which is 1 for a model at work in the round of the record, and
    ``finished_at``, the number of rounds after which the model finished, or NaN until the next
    round. `metrics.completion` computes the models' times from them.

    Args:
      assignment: mfa_rand, mfa_rr, sequential, scheduled, variance_reduced, bandit or fedfair,
        which deal clients to the models at work alone. Wrap the result with all other wrappers.
      metric: the name of a recorded metric that every task has, such as "test_accuracy".
      at_least: the target; one for all models, or one for each.
      at_most: the same for metrics such as the loss. Give one of the two.
      every: the number of rounds between two evaluations, usually `record_every`.
      active: the models that may work, ``bool[models]``, which `arriving` gives; None means all.

    Raises:
      ValueError: if the assignment cannot leave models out, or unless there is one target.

    Example: the third model finishes after one round, and the second after three.
      >>> from fedjax_mm import fedavg, mfa_rand, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> task, algorithm = quadratic(6, 4, mu=0.5), fedavg(0.1, local_steps=5)
      >>> assignment = finishing(mfa_rand(6, 3), "loss", at_most=[-9.0, -0.001, -0.001])
      >>> _, trace = simulate(0, task, algorithm, assignment, 4)
      >>> trace.client_updates.tolist()
      [[0, 0, 0], [2, 2, 2], [3, 3, 0], [3, 3, 0], [6, 0, 0]]
    """
    size = check_assignment(assignment).num_models
    targets = _one_each("at_least", at_least, size), _one_each("at_most", at_most, size)
    meets = checks.target_of(*targets)
    if "arriving" in names_of(assignment):
        raise ValueError(
            "finishing wraps arriving, but models finish after their arrival; write "
            "arriving(finishing(...), ...)"
        )

    def event(round: Int[Array, ""], before: Array, look: Look) -> Array:
        is_seen = round % every == 0
        nobody = jnp.zeros(size, bool)
        reached = lax.cond(is_seen, lambda: meets(look.metric(metric)), lambda: nobody)
        reached = reached if active is None else reached & active
        return jnp.where(jnp.isnan(before) & reached, round, before)

    def first() -> Array:
        return jnp.full(size, jnp.nan)

    return _wrapped(assignment, ("finishing", "finished_at"), first, event, jnp.isnan, active)


@checked
def arriving(
    assignment: Assignment,
    rounds: Sequence[int] | Int[Array, " models"],
    *,
    active: Bool[Array, " models"] | None = None,
) -> Assignment:
    """Models arrive over time, and get clients from then on.

    Records have ``active``, as in `finishing`, and ``arrived_at``, which is NaN before.

    Args:
      assignment: as in `finishing`, or the result of it.
      rounds: the number of completed rounds after which each model arrives, ``int[models]``; a
        model that arrives after round a first trains in round a + 1.
      active: the models that may work, ``bool[models]``; None means all.

    Raises:
      ValueError: if the assignment cannot leave models out, or unless there is a nonnegative round
        for each model.

    Example: the second model arrives after round 2.
      >>> from fedjax_mm import fedavg, mfa_rand, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> task, algorithm = quadratic(6, 4, mu=0.5), fedavg(0.1, local_steps=5)
      >>> _, trace = simulate(0, task, algorithm, arriving(mfa_rand(6, 2), [0, 2]), 4)
      >>> trace.client_updates.tolist()
      [[0, 0], [6, 0], [6, 0], [3, 3], [3, 3]]
    """
    size = check_assignment(assignment).num_models
    at = _one_each("rounds", rounds, size)
    if np.ndim(at) == 0:
        raise ValueError(f"rounds is {at}; give a list of {size} rounds, one for each model")
    checks.check_numbers("rounds", at, lambda x: x >= 0, "not be negative", ndim=1)

    def after(round: Int[Array, ""] | int) -> Array:
        return jnp.where(round >= jnp.asarray(at), jnp.asarray(at), jnp.nan)

    def event(round: Int[Array, ""], before: Array, look: Look) -> Array:
        del before, look
        return after(round)

    def has_arrived(arrived_at: Array) -> Bool[Array, " models"]:
        return ~jnp.isnan(arrived_at)

    names, first = ("arriving", "arrived_at"), partial(after, 0)
    return _wrapped(assignment, names, first, event, has_arrived, active)


def _wrapped(
    assignment: Assignment,
    names: tuple[str, str],
    first: Callable[[], Array],
    event: Callable[[Any, Array, Look], Array],
    is_at_work: Callable[[Array], Bool[Array, " models"]],
    active: Any,
) -> Assignment:
    """Wraps an assignment, which is made again in every round for the models at work.

    Args:
      assignment: the assignment.
      names: the wrapper's name, and that of the event in records.
      first: returns the event before round 1.
      event: returns the event after a number of rounds, given the one before.
      is_at_work: tells from the event which models are at work, among those that may work.
      active: the models that may work; None means all.
    """
    name, recorded = names
    deal, everyone = _dealing(assignment, name), np.ones(assignment.num_models, bool)

    def at_work(event: Array) -> Bool[Array, " models"]:
        return is_at_work(event) if active is None else is_at_work(event) & active

    def start(rng_key: PRNGKeyArray) -> Job:
        now = first()
        return Job(deal(everyone).init(rng_key), now, at_work(now))

    def assign(rng_key: PRNGKeyArray, round: Round, state: Job, look: Look) -> tuple[Cohort, Job]:
        now = event(jnp.asarray(round, jnp.int32) - 1, state.event, look)
        active = at_work(now)
        cohort, inside = deal(active).assign(rng_key, round, state.inner, look)
        return cohort, Job(inside, now, active)

    def observe(round: Round, cohort: Cohort, reports: Any, state: Job) -> Job:
        learn: Any = deal(state.active).observe
        return state._replace(inner=learn(round, cohort, reports, state.inner))

    def measured(state: Job) -> Metrics:
        inner = deal(everyone).metrics
        inside = inner(state.inner) if inner else {}
        return {ACTIVE: state.active.astype(float), recorded: state.event} | inside

    mine: Any = partial(Wraps, name, assignment)
    return assignment._replace(
        init=mine(start),
        assign=mine(assign),
        observe=mine(observe) if assignment.observe else None,
        metrics=mine(measured),
    )


def _dealing(assignment: Assignment, name: str) -> Callable[[Any], Assignment]:
    """A function of the models at work that makes the assignment again for them."""
    call = assignment.call
    if call is None or "active" not in call.arguments:
        raise ValueError(
            f"{name} needs an assignment that can leave models out, and {assignment!r} cannot; "
            "give mfa_rand, mfa_rr, sequential, scheduled, variance_reduced, bandit or fedfair, "
            "and wrap the result"
        )
    recipe = call.recipe
    return lambda active: recipe.made(active=active)


def _one_each(name: str, given: Any, size: int) -> Any:
    values = np.asarray(given) if isinstance(given, list | tuple) else given
    if np.ndim(values) and np.shape(values) != (size,):
        raise ValueError(
            f"{name} has the shape {np.shape(values)}; give one number, or {size}, one each"
        )
    return values
