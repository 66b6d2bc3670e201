"""Checks of an experiment's parts: tasks, algorithms, assignments, optimizers, rates, seeds.

Whatever enters through a public function is checked here once, before anything is traced; arrays of
examples are checked in `fedjax_mm.data.arrays`. What an assignment returns is checked while a round
is traced.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PRNGKeyArray

from fedjax_mm.base import Algorithm, Assignment, Cohort, Look, Round, Task
from fedjax_mm.checks import NO_VALUE, check_alike, check_numbers, check_positive, described, whole

T = TypeVar("T")

_MOST = 2**32 - 1  # JAX takes 32 bits of a seed, without a word
_ROUNDS = (1, 2, 3)  # at which schedules are looked at: every run has the first
_ORDER = "the order is simulate(rng_key, tasks, algorithm, assignment, num_rounds)"
_TASK = ("num_clients", "init", "weight", "batch", "loss", "metrics")


def check_task(value: Any, name: str = "task") -> Any:
    """Returns a task; else raises `TypeError`, which says what to do."""
    return _check(name, value, "a task", Task, "such as tasks.quadratic(24, 4, mu=2e-4)")


def check_algorithm(value: Any, name: str = "algorithm") -> Algorithm:
    """Returns an algorithm; else raises `TypeError`, which says what to do."""
    remedy = "such as fedavg(0.1, local_steps=5)"
    return _check(name, value, "an algorithm", Algorithm, remedy)


def check_assignment(value: Any, name: str = "assignment") -> Assignment:
    """Returns an assignment; else raises `TypeError`, which says what to do."""
    remedy = "such as full_participation(num_clients)"
    assignment: Assignment = _check(name, value, "an assignment", Assignment, remedy)
    for field in ("init", "assign", "observe", "metrics"):
        given, is_needed = getattr(assignment, field), field in ("init", "assign")
        if not callable(given) and (given is not None or is_needed):
            raise TypeError(f"the assignment's {field} is {described(given)}; give a function")
    return assignment


def assign(
    assignment: Assignment, rng_key: PRNGKeyArray, round: Round, state: Any, look: Look
) -> tuple[Cohort, Any]:
    """Returns the cohort of a round and the assignment's new state, both checked.

    What is traced has no value yet, so that clients' numbers are not looked at.

    Raises:
      TypeError: if `assign` returns something else.
      ValueError: if shapes do not fit.
    """
    what, wanted = _name_of(assignment), "return two from assign: a Cohort, and the state"
    match assignment.assign(rng_key, round, state, look):
        case Cohort() as found:
            raise TypeError(f"{what} returns {described(found)} alone; {wanted}")
        case Cohort() as cohort, new:
            pass
        case [first, _] as found if isinstance(found, tuple | list):  # jax's arrays are sequences
            raise TypeError(f"{what} returns as cohort {described(first)}; {wanted}")
        case found:
            raise TypeError(f"{what} returns {described(found)}; {wanted}")
    _check_cohort(what, cohort)
    if assignment.observe is None:  # which else makes the state of the next round
        _check_state(f"{what} returns", state, new)
    return cohort, new


def _check_cohort(what: str, cohort: Cohort) -> None:
    """Raises an error unless a cohort consists of arrays that fit each other."""
    numbers: dict[str, Any] = {"clients": cohort.clients, "models": cohort.models}
    for name, given in numbers.items():
        if not isinstance(given, jax.Array | np.ndarray) or given.dtype.kind not in "iu":
            kind = f", {given.dtype}" if hasattr(given, "dtype") else ""
            raise TypeError(
                f"{what} returns as {name} {described(given)}{kind}; give an array of their "
                "numbers, int32[slots]"
            )
    shape = cohort.clients.shape
    if len(shape) != 1 or cohort.models.shape != shape:
        raise ValueError(
            f"{what} returns clients of shape {shape} and models of shape {cohort.models.shape}; "
            "give a client and a model for each slot, or Cohort.of_rows(clients[models, width])"
        )
    if not shape[0]:
        raise ValueError(
            f"{what} returns no slots, room for nobody; give at least one, with the client -1 if "
            "nobody trains"
        )
    if cohort.scale is not None and np.shape(cohort.scale) != shape:
        raise ValueError(
            f"{what} returns a scale of shape {np.shape(cohort.scale)}; give one number for each "
            f"client, {shape}"
        )


def after_observing(
    assignment: Assignment, round: Round, cohort: Cohort, reports: Any, state: Any, *, like: Any
) -> Any:
    """Returns the state after an assignment observed a round; `ValueError` unless it is alike.

    Args:
      assignment: one that has `observe`.
      round: t.
      cohort: as `assign` returned it.
      reports: of the clients, in the order of the cohort.
      state: as `assign` returned it.
      like: the state before the round, whose form it keeps.
    """
    assert assignment.observe is not None
    new = assignment.observe(round, cohort, reports, state)
    _check_state(f"{_name_of(assignment)} returns from observe", like, new)
    return new


def check_parts(tasks: Any, algorithm: Any, assignment: Any) -> None:
    """Raises `TypeError` unless these are tasks, algorithms and an assignment, in this order."""
    check_assignment(assignment)
    check_trained(tasks, algorithm)


def check_trained(tasks: Any, algorithm: Any) -> None:
    """Raises `TypeError` unless these are tasks and algorithms; one or a list of each."""
    several = (("tasks", tasks, check_task), ("algorithm", algorithm, check_algorithm))
    for name, given, check in several:
        if type(given) not in (list, tuple):
            check(given, name)
            continue
        for i, each in enumerate(given):
            check(each, f"{name}[{i}]")


def check_instance(name: str, value: Any, kind: type[T], remedy: str) -> T:
    """Returns a value of a class; else raises `TypeError`, which ends with the remedy."""
    if not isinstance(value, kind):
        article = f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"
        raise TypeError(f"{name} is {described(value)}, not {article}; {remedy}")
    return value


def check_optimizer(name: str, value: Any) -> None:
    """Raises `TypeError` unless `value` is an optax optimizer."""
    if not isinstance(value, optax.GradientTransformation):
        call = f"; call it, as in {value.__name__}(1.0)" if hasattr(value, "__name__") else ""
        remedy = call or "; give one, such as optax.sgd(1.0)"
        raise TypeError(f"{name} is {described(value)}, not an optax optimizer{remedy}")


def check_optimizer_factory(name: str, value: Any) -> None:
    """Raises `TypeError` unless `value` makes an optax optimizer from a learning rate."""
    remedy = "give a function of the round's rate, such as optax.sgd"
    if isinstance(value, optax.GradientTransformation):
        raise TypeError(f"{name} is an optax optimizer; {remedy}, without calling it")
    if not callable(value):
        raise TypeError(f"{name} is {described(value)}; {remedy}")
    made = value(0.1)
    if not isinstance(made, optax.GradientTransformation):
        raise TypeError(f"{name} makes {described(made)}, not an optax optimizer; {remedy}")


def check_rate(name: str, value: Any) -> None:
    """Raises an error unless a rate is positive, or a schedule of rates that are not negative.

    Raises:
      TypeError: if it is no number, or the schedule does not return one.
      ValueError: if it is out of its range.
    """
    if isinstance(value, optax.GradientTransformation):
        raise TypeError(
            f"{name} is an optax optimizer; give a number, and local_optimizer=optax.sgd"
        )
    if callable(value):
        check_schedule(name, value)
    else:
        check_positive(name, value)


def check_schedule(name: str, schedule: Callable[[Any], Any]) -> None:
    """Raises an error unless the first values of a schedule are numbers that are not negative.

    Schedules of traced numbers pass. Errors are those of `check_rate`.
    """
    for t in _ROUNDS:
        words = f"{name} in round {t}"
        try:
            # Calling it where a program is traced would leave operations in that program: it is
            # traced by itself, and computed only if there is no traced number in it.
            closed = jax.make_jaxpr(schedule)(np.int32(t))
        except NO_VALUE as error:
            raise TypeError(
                f"{words} asks for the value of the round, which is traced and has none; in place "
                "of `if` use jax.numpy.where"
            ) from error
        except TypeError as error:
            remedy = "give a number, or a function of the round t that returns one"
            raise TypeError(f"{words} is not a number; {remedy}") from error
        if not any(isinstance(x, jax.core.Tracer) for x in closed.consts):
            with jax.ensure_compile_time_eval():
                value = schedule(np.int32(t))
            check_numbers(words, value, lambda rate: rate >= 0, "not be negative")


def key_of(seed: Any, name: str = "rng_key") -> PRNGKeyArray:
    """Returns the random key of a seed, or the key that is given.

    Args:
      seed: a key, or a whole number from 0 to 2^32 - 1; either may be traced.
      name: the argument's name, for messages.

    Raises:
      TypeError: if it is neither.
      ValueError: if it is a number out of that range, or there are several of them.

    Example:
      >>> key_of(3) == jax.random.key(3)
      Array(True, dtype=bool)
    """
    remedy = "give a seed, such as 0, or a key, such as jax.random.key(0)"
    is_array = isinstance(seed, jax.Array | np.ndarray)
    if is_array and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        shape = seed.shape
    elif is_array and seed.dtype == np.uint32 and seed.ndim:  # keys of the old kind
        shape = seed.shape[:-1]
    elif isinstance(seed, jax.core.Tracer) and jnp.issubdtype(seed.dtype, jnp.integer):
        shape = seed.shape
        seed = seed if shape else jax.random.key(seed)
    elif whole(seed) is not None:
        return jax.random.key(np.uint32(check_seed(name, seed)))
    else:
        raise TypeError(f"{name} is {described(seed)}; {remedy}")
    if shape:
        raise ValueError(f"{name} has shape {shape}; {remedy}, and jax.vmap over several")
    return seed


def check_seed(name: str, seed: Any) -> int:
    """Returns a seed as an int; `ValueError` unless it is a whole number from 0 to 2^32 - 1."""
    number = whole(seed)
    if number is None or not 0 <= number <= _MOST:
        raise ValueError(f"{name} is {described(seed)}; it must be a whole number, 0 ... {_MOST}")
    return number


def _name_of(assignment: Assignment) -> str:
    """Returns what to call an assignment in messages: by the function that made it, if one did."""
    name = getattr(assignment.assign, "__qualname__", type(assignment.assign).__name__)
    return f"the assignment {name.split('.<locals>')[0]}"


def _check_state(who: str, old: Any, new: Any) -> None:
    """Raises `ValueError` unless a round keeps the structure, shapes and types of a state."""
    check_alike(f"{who} a state of another structure than init", old, new)
    for one, other in zip(*map(jax.tree.leaves, (old, new)), strict=True):
        before, after = jax.typeof(one), jax.typeof(other)
        is_same = before.weak_type or before.dtype == after.dtype  # the loop widens Python numbers
        if before.shape != after.shape or not is_same:
            raise ValueError(
                f"{who} {after.str_short()} in its state where init returned {before.str_short()}; "
                "keep shapes and types"
            )


def _check(name: str, value: Any, wanted: str, kind: type, remedy: str) -> Any:
    if not isinstance(value, type) and isinstance(value, kind):
        return value
    lacks = [field for field in _TASK if not hasattr(value, field)]
    if isinstance(value, Task | Algorithm | Assignment) and not isinstance(value, type):
        remedy = _ORDER
    elif isinstance(value, type):
        remedy = f"give an instance, {remedy}"
    elif callable(value) and hasattr(value, "__name__"):
        remedy = f"call it, as in {value.__name__}(...)"
    elif kind is Task and _is_data(value):
        remedy = "make one of it, by data.federate and tasks.classification(data, module)"
    elif kind is Task and len(lacks) < len(_TASK):
        remedy = f"it lacks {', '.join(lacks)}"
    elif isinstance(value, optax.GradientTransformation):
        remedy = "give it to fedavg(0.1, local_steps=5, server_optimizer=...)"
    raise TypeError(f"{name} is {described(value)}, not {wanted}; {remedy}")


def _is_data(value: Any) -> bool:
    """Whether it is clients' data, a pool of examples, arrays, or a network without data."""
    names = ("train", "examples", "shape", "apply", "columns")
    return isinstance(value, tuple | dict) or any(hasattr(value, name) for name in names)
