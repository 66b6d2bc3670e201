"""Jobs: models that arrive after the first round, and models that finish when they are good enough.

Both wrappers pass the active models to the assignment as `Look.active`. A `Dispatch` deals the
jobs itself, see `asynchrony/lifetimes.py`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedjax_mm.asynchrony.dispatch import Dispatch
from fedjax_mm.asynchrony.lifetimes import Lifetime
from fedjax_mm.base import Assignment, Cohort, Look, Metrics, Params, Round, Scalar
from fedjax_mm.base.contract import ACTIVE
from fedjax_mm.checks import values as checks
from fedjax_mm.checks.annotations import TracedCount, part
from fedjax_mm.checks.instances import check_assignment
from fedjax_mm.wrap import names_of

Rule = TypeVar("Rule", Assignment, Dispatch)

Targets: TypeAlias = Scalar | Sequence[float] | Float[Array, " models"]
"""A number for all models, or one for each."""


_MOST_JOBS = 26_754  # 3 R^2 < 2^31


class Job(NamedTuple):
    """State of a wrapper.

    Attributes:
      inner: the state of the assignment inside.
      event: the round after which each model arrived or finished; NaN before.
      active: the active models in the last round.
    """

    inner: Any
    event: Float[Array, " models"]
    active: Bool[Array, " models"]


@part
def finishing(
    assignment: Rule,
    metric: str,
    *,
    at_least: Targets | None = None,
    at_most: Targets | None = None,
    every: TracedCount = 1,
) -> Rule:
    """Models finish when a metric meets its target, and the others get their clients.

    A model that meets its target after round t gets no client from round t + 1 on, so that its
    parameters and states do not change any more. A model that meets it at the start never trains.
    NaN meets no target, so a model that has diverged keeps its clients to the end.

    In asynchronous runs, a round is `arrivals_per_round` arrivals. When model f finishes, its jobs
    in progress are deleted and its buffer is dropped. Model i of the active ones gets
    ``floor(R_f R_i / sum R)`` more jobs, and the rest go to different models, drawn uniformly. As
    many jobs as were deleted begin at once, on new clients. When all have finished, rounds go on
    without arrivals, and time stands still.

    Records have ``active``, which is 1 for an active model in the round of the record, and
    ``finished_at``, the number of rounds after which the model finished, or NaN until the next
    round. `metrics.completion` computes the models' times from them.

    Args:
      assignment: mfa_rand, mfa_rr, sequential, scheduled, variance_reduced, bandit, fedfair,
        power_of_choice, oort, or any other that deals clients to the models of ``look.active()``
        alone. Or the dispatch of an asynchronous run, `fedast`.
      metric: the name of a recorded metric that every task has, such as "test_accuracy".
      at_least: the target; one for all models, or one for each.
      at_most: the same for metrics such as the loss. Give one of the two.
      every: the number of rounds between two evaluations, usually `record_every`.

    Raises:
      TypeError: if a target is not a number.
      ValueError: unless there is one finite target. When a run starts: if the assignment does not
        ask which models are active.

    Example: the third model finishes after one round, and the second after three.
      >>> from fedjax_mm import fedavg, mfa_rand, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> task, algorithm = quadratic(6, 4, mu=0.5), fedavg(0.1, local_steps=5)
      >>> assignment = finishing(mfa_rand(6, 3), "loss", at_most=[-9.0, -0.001, -0.001])
      >>> _, trace = simulate(0, task, algorithm, assignment, 4)
      >>> trace.client_updates.tolist()
      [[0, 0, 0], [2, 2, 2], [3, 3, 0], [3, 3, 0], [6, 0, 0]]

    Reference: in asynchronous runs, the code of Askin et al., "FedAST" (2024). At a finish, it
    rounds ``b_m = R_m / ratio`` to the nearest number, and later up. Here b_m is always rounded up.
    """
    size = _size_of(assignment)
    checks.check_name("a metric", metric)
    targets = _one_each("at_least", at_least, size), _one_each("at_most", at_most, size)
    for name, target in zip(("at_least", "at_most"), targets, strict=True):
        if target is not None:
            checks.check_numbers(name, target, np.isfinite, "be finite", ndim=np.ndim(target))
    meets = checks.target_of(*targets)
    if "arriving" in _names_of(assignment):
        raise ValueError(
            "finishing wraps arriving, but models finish after their arrival; write "
            "arriving(finishing(...), ...)"
        )

    def event(round: Int[Array, ""], before: Array, look: Look) -> Array:
        is_seen = round % every == 0
        nobody = jnp.zeros(size, bool)
        reached = lax.cond(is_seen, lambda: meets(look.metric(metric)), lambda: nobody)
        active = look.active()
        reached = reached if active is None else reached & active
        return jnp.where(jnp.isnan(before) & reached, round, before)

    def first() -> Array:
        return jnp.full(size, jnp.nan)

    return _wrapped(assignment, Lifetime("finishing", "finished_at", first, event, jnp.isnan))


@part
def arriving(assignment: Rule, rounds: Sequence[int] | Int[Array, " models"]) -> Rule:
    """Models arrive over time, and get clients from then on.

    In asynchronous runs, the jobs of time 0 belong to the models of round 1, as if the others
    had finished. A model that arrives as one of A active models gets ``R_m = floor(R / A)``, from
    the others in proportion to their R_m, and the rest from the largest. Its jobs begin as theirs
    end, or at once if nobody else is active.

    Records have ``active``, as in `finishing`, and ``arrived_at``, which is NaN before.

    Args:
      assignment: as in `finishing`, or the result of it.
      rounds: the number of completed rounds after which each model arrives, ``int[models]``; a
        model that arrives after round a first trains in round a + 1.

    Raises:
      ValueError: unless there is a nonnegative round for each model; or as for `finishing`.

    Example: the second model arrives after round 2.
      >>> from fedjax_mm import fedavg, mfa_rand, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> task, algorithm = quadratic(6, 4, mu=0.5), fedavg(0.1, local_steps=5)
      >>> _, trace = simulate(0, task, algorithm, arriving(mfa_rand(6, 2), [0, 2]), 4)
      >>> trace.client_updates.tolist()
      [[0, 0], [6, 0], [6, 0], [3, 3], [3, 3]]
    """
    size = _size_of(assignment)
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

    first = partial(after, 0)
    return _wrapped(assignment, Lifetime("arriving", "arrived_at", first, event, has_arrived))


def _size_of(assignment: Rule) -> int:
    is_async = isinstance(assignment, Dispatch)
    return assignment.num_models if is_async else check_assignment(assignment).num_models


def _names_of(assignment: Rule) -> list[str]:
    if isinstance(assignment, Dispatch):
        return [each.name for each in assignment.lifetimes]
    return names_of(assignment)


def _wrapped(assignment: Rule, lifetime: Lifetime) -> Rule:
    """Adds a lifetime to a dispatch, or to an assignment."""
    if isinstance(assignment, Dispatch):
        _check_few(assignment)
        return assignment._replace(lifetimes=(*assignment.lifetimes, lifetime))
    name, recorded = lifetime.name, lifetime.recorded

    def active_at(event: Array, look: Look) -> Bool[Array, " models"]:
        others, is_active = look.active(), lifetime.is_active(event)
        return is_active if others is None else is_active & others

    def start(rng_key: PRNGKeyArray, look: Look) -> Job:
        now = lifetime.first()
        active = active_at(now, look)
        return Job(assignment.init(rng_key, look._replace(active=lambda: active)), now, active)

    def assign(rng_key: PRNGKeyArray, round: Round, state: Job, look: Look) -> tuple[Cohort, Job]:
        now = lifetime.event(jnp.asarray(round, jnp.int32) - 1, state.event, look)
        active, asks = active_at(now, look), []

        def ask() -> Bool[Array, " models"]:
            asks.append(name)
            return active

        given = look._replace(active=ask)
        cohort, inside = assignment.assign(rng_key, round, state.inner, given)
        if not asks:
            raise ValueError(
                f"{name} needs an assignment that can leave models out, and {assignment!r} does "
                "not call look.active(); give one that does, such as mfa_rand or mfa_rr"
            )
        return cohort, Job(inside, now, active)

    def observe(round: Round, cohort: Cohort, reports: Any, state: Job) -> Job:
        learn: Any = assignment.observe
        return state._replace(inner=learn(round, cohort, reports, state.inner))

    def mixed(round: Round, state: Job, old: Params | None, new: Params) -> Params:
        mix: Any = assignment.mix
        return mix(round, state.inner, old, new)

    def measured(state: Job) -> Metrics:
        inside = assignment.metrics(state.inner) if assignment.metrics else {}
        return {ACTIVE: state.active.astype(float), recorded: state.event} | inside

    return assignment._replace(
        init=start,
        assign=assign,
        observe=observe if assignment.observe else None,
        metrics=measured,
        mix=mixed if assignment.mix else None,
        name=name,
        inner=assignment,
    )


def _check_few(dispatch: Dispatch) -> None:
    if dispatch.num_jobs > _MOST_JOBS:
        raise ValueError(
            f"at_work is {dispatch.num_jobs:,} in all; jobs are dealt again in int32, which holds "
            f"products of numbers up to {_MOST_JOBS:,}: give fewer jobs"
        )


def _one_each(name: str, given: Any, size: int) -> Any:
    values = np.asarray(given) if isinstance(given, list | tuple) else given
    if np.ndim(values) and np.shape(values) != (size,):
        raise ValueError(
            f"{name} has the shape {np.shape(values)}; give one number, or {size}, one each"
        )
    return values
