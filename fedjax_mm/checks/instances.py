"""Checks of an experiment's parts: tasks, algorithms, assignments, optimizers, rates and seeds.

Arguments of public functions are checked here once, before tracing. Arrays of examples are checked
in `fedjax_mm.data.arrays`, and the results of the parts' functions in `returned.py`.
"""

from collections.abc import Callable, Sequence
from inspect import getattr_static
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PRNGKeyArray

from fedjax_mm.base import Algorithm, Assignment, Task
from fedjax_mm.base.programs import NO_VALUE
from fedjax_mm.checks.values import check_numbers, check_positive, described, whole

T = TypeVar("T")

_MOST = 2**32 - 1  # JAX silently drops higher bits of a seed
_ROUNDS = (1, 2, 3)  # the rounds at which schedules are checked
_ORDER = "simulate takes (rng_key, tasks, algorithm, assignment, num_rounds)"
_TASK = ("num_clients", "init", "weight", "batch", "loss", "metrics")


def check_task(value: Any, name: str = "task") -> Any:
    """Passes a task on, and raises a `TypeError` with a remedy for other values."""
    task = _check(name, value, "a task", Task, "tasks.quadratic(24, 4, mu=2e-4)")
    if jax.tree_util.all_leaves([task]):
        raise TypeError(
            f"{name} is {described(task)}, whose class JAX does not know; register it, by "
            "@jax.tree_util.register_dataclass if it holds arrays, and else by "
            "@jax.tree_util.register_static"
        )
    return task


def check_algorithm(value: Any, name: str = "algorithm") -> Algorithm:
    """Passes an algorithm on, and raises a `TypeError` with a remedy for other values."""
    example = "fedavg(local_sgd(0.1, steps=5))"
    algorithm: Algorithm = _check(name, value, "an algorithm", Algorithm, example)
    others = "num_steps", "metrics", "personal", "download"
    _check_functions("algorithm", algorithm, ("init", "client", "server"), others)
    idle: Any = algorithm.steps_idle
    if not isinstance(idle, bool):
        raise TypeError(
            f"the algorithm's steps_idle is {described(idle)}; it must be True or False"
        )
    return algorithm


def check_assignment(value: Any, name: str = "assignment") -> Assignment:
    """Passes an assignment on, and raises a `TypeError` with a remedy for other values."""
    example = "full_participation(num_clients)"
    assignment: Assignment = _check(name, value, "an assignment", Assignment, example)
    _check_functions("assignment", assignment, ("init", "assign"), ("observe", "metrics", "mix"))
    return assignment


def _check_functions(what: str, part: Any, needed: Sequence[str], others: Sequence[str]) -> None:
    """Raises `TypeError` if a field is not a function. Fields in `others` may also be None."""
    for field in (*needed, *others):
        given = getattr(part, field)
        if not callable(given) and (given is not None or field in needed):
            raise TypeError(f"the {what}'s {field} is {described(given)}; give a function")


def check_trained(tasks: Any, algorithm: Any) -> None:
    """Raises `TypeError` if the arguments are not tasks and algorithms, single or in a list."""
    several = (("tasks", tasks, check_task), ("algorithm", algorithm, check_algorithm))
    for name, given, check in several:
        if type(given) not in (list, tuple):
            check(given, name)
            continue
        for i, each in enumerate(given):
            check(each, f"{name}[{i}]")


def check_instance(name: str, value: Any, kind: type[T], remedy: str) -> T:
    """Passes a `kind` on, and raises a `TypeError` with a remedy for other values."""
    if not isinstance(value, kind):
        article = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
        raise TypeError(f"{name} is {described(value)}, not {article}; {remedy}")
    return value


def check_where(value: Any) -> None:
    """Raises `TypeError` if `value` does not choose parameters by path."""
    has_names = isinstance(value, Sequence) and all(isinstance(name, str) for name in value)
    if not has_names and not callable(value):
        raise TypeError(
            f"where is {described(value)}; give a name of the parameters, several, or a function "
            "of a path"
        )


def check_optimizer(name: str, value: Any) -> None:
    """Raises `TypeError` if `value` is not an optax optimizer."""
    if not isinstance(value, optax.GradientTransformation):
        call = f"; call it, as in {value.__name__}(0.1)" if hasattr(value, "__name__") else ""
        remedy = call or "; give one, such as optax.sgd(1.0)"
        raise TypeError(f"{name} is {described(value)}, not an optax optimizer{remedy}")


def check_optimizer_factory(name: str, value: Any) -> None:
    """Raises `TypeError` if `value` does not make an optax optimizer from a learning rate."""
    remedy = "give a function of the round's rate, such as optax.sgd"
    if isinstance(value, optax.GradientTransformation):
        raise TypeError(f"{name} is {described(value)}; {remedy}, without calling it")
    if not callable(value):
        raise TypeError(f"{name} is {described(value)}; {remedy}")
    made = value(0.1)
    if not isinstance(made, optax.GradientTransformation):
        raise TypeError(f"{name} makes {described(made)}, not an optax optimizer; {remedy}")


def check_rate(name: str, value: Any) -> None:
    """Raises an error if a rate is not a positive number or a schedule of nonnegative numbers.

    Raises:
      TypeError: if it is not a number, or a schedule that does not return one.
      ValueError: if it is out of range.
    """
    if isinstance(value, optax.GradientTransformation):
        raise TypeError(
            f"{name} is {described(value)}; give a number, or a function of the round t; clients' "
            "optimizers go to local_sgd, as in local_sgd(0.1, steps=5, optimizer=optax.adam)"
        )
    if callable(value):
        check_schedule(name, value)
    else:
        check_positive(name, value)


def check_schedule(name: str, schedule: Callable[[Any], Any]) -> None:
    """Raises an error if a schedule's first values are not nonnegative numbers.

    Values that depend on tracers are not checked. Errors are those of `check_rate`.
    """
    for t in _ROUNDS:
        words = f"{name} in round {t}"
        try:
            # Within an outer trace, a call would leave operations in that program. Trace the
            # schedule separately, and evaluate it only if it closes over no tracers.
            closed = jax.make_jaxpr(schedule)(np.int32(t))
        except NO_VALUE as error:
            raise TypeError(
                f"{words} needs the value of the round, which is traced and has none; instead of "
                "`if` use jax.numpy.where"
            ) from error
        except TypeError as error:
            remedy = "give a number, or a function of the round t that returns one"
            raise TypeError(f"{words} is not a number; {remedy}") from error
        if not any(isinstance(x, jax.core.Tracer) for x in closed.consts):
            with jax.ensure_compile_time_eval():
                value = schedule(np.int32(t))
            check_numbers(words, value, lambda rate: rate >= 0, "not be negative")


def key_of(seed: Any, name: str = "rng_key") -> PRNGKeyArray:
    """The random key for a seed, or the given key.

    Args:
      seed: a key, or an integer from 0 to 2^32 - 1; either may be traced.
      name: the argument's name, for error messages.

    Raises:
      TypeError: if it is neither.
      ValueError: if it is a number out of range, or an array of several.

    Example:
      >>> key_of(3) == jax.random.key(3)
      Array(True, dtype=bool)
    """
    remedy = "give a seed, such as 0, or a key, such as jax.random.key(0)"
    is_array = isinstance(seed, jax.Array | np.ndarray)
    if is_array and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        shape = seed.shape
    elif is_array and seed.dtype == np.uint32 and seed.ndim:  # legacy keys
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
    """Checks that a seed is an integer from 0 to 2^32 - 1, and returns it as an int."""
    number = whole(seed)
    if number is None or not 0 <= number <= _MOST:
        raise ValueError(f"{name} is {described(seed)}; it must be a whole number, 0 ... {_MOST}")
    return number


def _check(name: str, value: Any, wanted: str, kind: type, example: str) -> Any:
    if not isinstance(value, type) and isinstance(value, kind):
        return value
    remedy = f"give one, such as {example}"
    found = [field for field in _TASK if hasattr(value, field)]
    lacks = [field for field in _TASK if getattr_static(value, field, None) is None]
    if isinstance(value, Task | Algorithm | Assignment) and not isinstance(value, type):
        remedy += f"; {_ORDER}"
    elif isinstance(value, type):
        remedy = f"give an instance, such as {example}"
    elif callable(value) and hasattr(value, "__name__"):
        remedy = f"call it, as in {value.__name__}(...)"
    elif isinstance(value, optax.GradientTransformation):
        remedy += "; a server's optimizer goes to fedavg, as server_optimizer=optax.sgd(1.0)"
    elif kind is Task and _is_data(value):
        remedy = "make one of it, by data.federate and tasks.classification(data, module)"
    elif kind is Task and found:
        remedy = f"it lacks {', '.join(lacks)}"
        if set(lacks) & set(found):
            remedy += "; define them in its class, because attributes from __getattr__ are ignored"
    raise TypeError(f"{name} is {described(value)}, not {wanted}; {remedy}")


def _is_data(value: Any) -> bool:
    """Whether a value is clients' data, a pool, arrays, or a network without data."""
    names = ("train", "examples", "shape", "apply", "columns")
    return isinstance(value, tuple | dict) or any(hasattr(value, name) for name in names)
