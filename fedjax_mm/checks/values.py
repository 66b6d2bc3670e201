"""Argument checks, made before any compilation."""

import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool

from fedjax_mm.base.programs import NO_VALUE, TracedInt

_MOST = 2**31 - 1  # counts are int32
_LONGEST = 40  # most characters of a value to show in a message
_NAME = re.compile(r"(?=.{1,250}\Z)[\w\u0080-\U0010ffff][^/\x00-\x1f\x7f]*(?<! )")
"""Matches names valid in NetCDF: no slashes, control characters or trailing spaces."""
_LARGEST = float(np.finfo(np.float32).max)
_SHAPES = ("one number", "one number for each, [clients]")


def check_numbers(
    name: str, value: Any, is_allowed: Callable[[Any], Any], allowed: str, *, ndim: int = 0
) -> None:
    """Raises an error if a number in `value`, or as JAX rounds it, is not finite or not allowed.

    Args:
      name: the argument's name, for error messages.
      value: a number or an array. For tracers only the shape is checked.
      is_allowed: maps an array to an array of bools.
      allowed: completes the message "it must ...".
      ndim: the number of axes that `value` must have; 0 is a scalar.

    Raises:
      TypeError: if it is not a number but, for example, None or a string.
      ValueError: if it has the wrong number of axes, or contains a number that is not allowed.
    """
    # Most numbers are plain floats, for which NumPy takes longer.
    if type(value) is float and ndim == 0 and abs(value) < _LARGEST and is_allowed(value):
        rounded = float(np.float32(value))
        if rounded != 0 or is_allowed(rounded):
            return
    _check_unmasked(name, value)
    is_array = isinstance(value, jax.Array)  # includes traced arrays
    if not is_array and np.asarray(value).dtype.kind not in "iuf":
        raise TypeError(f"{name} is {described(value)}; it must be a number, and {allowed}")
    if np.ndim(value) != ndim:
        more = "; vmap or sweep over several" if ndim == 0 else ""
        raise ValueError(f"{name} is of shape {np.shape(value)}; give {_SHAPES[ndim]}{more}")
    # Accept tracers, because they have no values and are checked by the code that vmaps or jits.
    if isinstance(value, jax.core.Tracer):
        return
    held = numbers = np.asarray(value)
    if numbers.dtype.kind == "f":
        with np.errstate(over="ignore", under="ignore"):
            held = numbers.astype(jax.dtypes.canonicalize_dtype(numbers.dtype))
    if not np.all(np.isfinite(numbers) & is_allowed(numbers)):
        raise ValueError(f"{name} is {value}; it must {allowed}")
    if not np.all(np.isfinite(held) & (is_allowed(held) | (held != 0))):
        raise ValueError(f"{name} is {value}, which is {held} in {held.dtype}; it must {allowed}")


def _check_unmasked(name: str, value: Any) -> None:
    if np.ma.is_masked(value):  # JAX ignores masks
        masked = np.ma.count_masked(value)
        raise ValueError(f"{name} has {masked} masked entries; fill them, as by .filled(0)")


def target_of(at_least: Any, at_most: Any) -> Callable[[Any], Any]:
    """Makes a predicate of the values that meet a target, which NaN never does.

    Args:
      at_least: the smallest value that meets it, or None.
      at_most: the largest value that meets it, or None.

    Raises:
      ValueError: unless exactly one of them is given.
    """
    if (at_least is None) == (at_most is None):
        raise ValueError(
            f"at_least is {at_least} and at_most is {at_most}; give one of them, the target"
        )
    return lambda values: values <= at_most if at_least is None else values >= at_least


def check_positive(name: str, value: Any) -> None:
    """Checks with `check_numbers` that every number in `value` is positive."""
    check_numbers(name, value, lambda numbers: numbers > 0, "be positive")


def check_not_negative(name: str, value: Any) -> None:
    """Checks with `check_numbers` that every number in `value` is at least 0."""
    check_numbers(name, value, lambda numbers: numbers >= 0, "not be negative")


def check_between(name: str, value: Any, least: int, most: int, most_name: str = "") -> None:
    """Checks with `check_numbers` that ``least <= value <= most``."""
    limit = f"{most_name} = {most}" if most_name else f"{most}"
    allowed = f"lie between {least} and {limit}"
    check_numbers(name, value, lambda x: (x >= least) & (x <= most), allowed)


def check_known(name: str, value: Any, because: str = "Python needs its value") -> None:
    """Raises `TypeError` if a number is traced."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} is traced, but {because}; close over it, give it to jax.jit in "
            "static_argnames, or sweep over whole numbers without `together`"
        )


def check_count(
    name: str, value: Any, *, optional: bool = False, may_be_traced: bool = False
) -> Any:
    """Checks that a value is a positive 31-bit integer of any integer type, and returns an int.

    A tracer is returned unchanged, and so are None if `optional`, and a `TracedInt` if it may be
    traced.

    Raises:
      ValueError: if it is anything else.
    """
    if isinstance(value, jax.core.Tracer) or (optional and value is None):
        return value
    number = whole(value)
    if number is None or not 1 <= number <= _MOST:
        below = "" if number is None or number < 1 else f", at most {_MOST}"
        raise ValueError(f"{name} is {described(value)}; it must be a positive whole number{below}")
    return number if may_be_traced else int(number)


def check_epochs(epochs: int, num_batches: int, where: str = "") -> None:
    """Raises `ValueError` if the local steps in a client's epochs do not fit in int32.

    Args:
      epochs: passes over the client's examples.
      num_batches: the maximum number of batches per epoch over clients.
      where: the beginning of the error message.
    """
    if (steps := epochs * num_batches) > _MOST:
        raise ValueError(
            f"{where}epochs = {epochs:,} of {num_batches:,} batches are {steps:,} local steps; at "
            f"most {_MOST:,} can be counted: take fewer epochs or a larger batch_size"
        )


def whole(value: Any) -> int | None:
    """A number of any integer type as an int, or None for anything else.

    Example:
      >>> whole(np.uint8(3)), whole(3.0), whole(True)
      (3, None, None)
    """
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, TracedInt):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return None


def described(value: Any) -> str:
    """Describes an invalid argument briefly, for error messages.

    Example:
      >>> described(described), described(int), described([1, 2]), described("x")
      ('the function described', 'the class int', 'a list of 2', "'x'")
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, str | bytes | bool | int | float | complex | np.generic):
        text = repr(value) if isinstance(value, str | bytes) else str(value)
        return text if len(text) < _LONGEST else f"{text[: _LONGEST - 3]}..."
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    kind = type(value).__name__
    article = "an" if kind[0] in "AEIOaeio" else "a"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)}"
    if isinstance(value, optax.GradientTransformation):
        return "an optax optimizer"
    size = f" of {len(value)}" if type(value) in (list, tuple, dict, set) else ""
    return f"{article} {kind}{size}"


def check_choice(name: str, value: Any, *choices: Any) -> None:
    """Raises `ValueError` if `value` is not one of the choices."""
    if not isinstance(value, str | None) or value not in choices:
        *first, last = map(repr, choices)
        raise ValueError(f"{name} is {described(value)}; it must be {', '.join(first)} or {last}")


def check_name(what: str, name: Any) -> None:
    """Raises `ValueError` if a result could not be saved with a metric or axis of this name.

    Example:
      >>> check_name("a metric", "test/acc")
      Traceback (most recent call last):
        ...
      ValueError: a metric is called 'test/acc', a name that NetCDF files cannot have; rename it, \
for example to 'test_acc'
    """
    if isinstance(name, str) and _NAME.fullmatch(name):
        return
    words = re.sub(r"\W+", "_", str(name)).strip("_")[:_LONGEST]
    raise ValueError(
        f"{what} is called {described(name)}, a name that NetCDF files cannot have; rename it"
        + (f", for example to {words!r}" if words else "")
    )


def check_flags(name: str, flags: Any, size: int | None = None) -> Bool[Array, " clients"]:
    """Checks that `flags` contains one bool per client, and returns them as an array."""
    is_traced = any(isinstance(flag, jax.Array) for flag in jax.tree.leaves(flags))
    given = jnp.asarray(flags) if is_traced else np.asarray(flags)
    _check_unmasked(name, flags)
    if given.ndim != 1 or given.dtype != jnp.bool_:
        is_number = given.dtype.kind in "biufc"
        held = f"{given.dtype}{list(given.shape)}" if is_number else described(flags)
        raise ValueError(f"{name} are {held}; give one bool for each client that trains")
    flags = jnp.asarray(given)
    if size is not None and len(flags) != size:
        raise ValueError(
            f"{name} has {len(flags)} entries; give one for each of the {size} clients that train"
        )
    return flags


def check_per_client(name: str, tree: Any, num_clients: int) -> None:
    """Raises `ValueError` if an array does not have one number per client."""
    for values in jax.tree.leaves(tree):
        if values.shape != (num_clients,):
            raise ValueError(
                f"{name} has shape {values.shape}; give one number for each of {num_clients} "
                "clients"
            )


def check_tested_clients(num_tested: int, num_clients: int) -> None:
    """Raises `ValueError` if some clients have no test examples."""
    if num_tested != num_clients:
        raise ValueError(
            f"{num_tested} clients have test examples and {num_clients} for training; give every "
            "client its own"
        )


def check_rounds(num_rounds: Any, record_every: Any) -> tuple[int, int]:
    """Checks that `record_every` divides `num_rounds`, and returns both as ints.

    Raises:
      TypeError: if one is traced.
      ValueError: if one is not a positive whole number, or `num_rounds` is not a multiple of the
        other.
    """
    for name, value in (("num_rounds", num_rounds), ("record_every", record_every)):
        check_known(name, value, "it sets the length of the trace")
    num_rounds, every = check_count("num_rounds", num_rounds), whole(record_every)
    if every is None or every < 1 or num_rounds % every:
        raise ValueError(
            f"record_every is {described(record_every)}; it must be a divisor of "
            f"num_rounds = {num_rounds}"
        )
    return num_rounds, every


def check_client_map(client_map: Any) -> Any:
    """Checks a `ClientMap` and returns it, with a chunk size as an int."""
    size = whole(client_map)
    if size is None and isinstance(client_map, str) and client_map in ("auto", "vmap", "scan"):
        return client_map
    if size is None or size < 1:
        raise ValueError(
            f"client_map is {client_map!r}; it must be 'auto', 'vmap', 'scan' or a positive chunk "
            "size"
        )
    return size


def check_client_axis(client_axis: Any) -> Any:
    """Checks that `client_axis` is None or a mesh axis of the surrounding `jax.shard_map`."""
    if client_axis is None:
        return None
    try:
        lax.axis_size(client_axis)
    except (NameError, TypeError, ValueError) as error:
        raise ValueError(
            f"client_axis is {described(client_axis)}, but no such axis is bound here; call this "
            "inside jax.shard_map, over a mesh that has the axis, or leave it out"
        ) from error
    return client_axis


def one_each(
    name: str, items: Any, *, is_one: bool, num_models: int, by: str = "assignment"
) -> list[Any]:
    """One item per model, given a single item or a sequence.

    Raises:
      ValueError: if the number of items is not the number of models.
    """
    items = [items] * num_models if is_one else list(items)
    if len(items) != num_models:
        raise ValueError(
            f"there are {len(items)} {name} but the {by} has {num_models} models; give one "
            "for all models or one per model"
        )
    return items


def check_num_clients(of_tasks: Sequence[int], drawn_from: int, by: str = "assignment") -> None:
    """Raises `ValueError` if a task does not have the assignment's number of clients."""
    if set(of_tasks) != {drawn_from}:
        raise ValueError(
            f"the tasks have {sorted(set(of_tasks))} clients to train but the {by} draws "
            f"from {drawn_from}; make them equal"
        )


def given_params(params: Any, stacks: Sequence[Any]) -> list[Any]:
    """The user's initial parameters for each stack, or None for each if not given."""
    if params is None or len(stacks) == 1:
        return [params] * len(stacks)
    num_models = sum(len(stack.models) for stack in stacks)
    if not isinstance(params, Sequence) or len(params) != num_models:
        raise ValueError(
            f"the models differ in structure; give a list of {num_models} initial parameters"
        )
    return [[params[model] for model in stack.models] for stack in stacks]


def are_moderate(params: Any) -> bool:
    """Whether all parameters are known floats, and finite in every precision."""
    most = float(jnp.finfo(jnp.float16).max)

    def is_moderate(x: Any) -> bool:
        is_known = not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)
        is_float = jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.floating)
        return is_known and is_float and bool(np.all(np.abs(np.asarray(x)) <= most))

    return all(map(is_moderate, jax.tree.leaves(params)))


def fit_params(params: Any, like: Any) -> Any:
    """Adds a models axis to the user's initial parameters, after checking them.

    Args:
      params: one model's parameters, shared by all; arrays ``[models, ...]``; or a list with one
        entry per model.
      like: the shapes ``[models, ...]`` and types of the parameters that the tasks would draw.
    """

    def fit(given: Any, wanted: jax.ShapeDtypeStruct) -> Array:
        is_known = not isinstance(given, jax.Array) or (
            not isinstance(given, jax.core.Tracer) and given.is_fully_addressable
        )
        if is_known and np.asarray(given).dtype.kind in "OSU":
            words = f"{described(given)} and of type {np.asarray(given).dtype}"
            raise TypeError(f"initial parameters have {words}; give arrays of numbers")
        with np.errstate(over="ignore"):  # out-of-range numbers become infinite
            if is_known and not np.isfinite(np.asarray(given).astype(wanted.dtype)).all():
                raise ValueError(
                    "initial parameters have entries that are not finite; give those of a run that "
                    "did not diverge"
                )
        given = jnp.asarray(given, wanted.dtype)
        if given.shape not in (wanted.shape, wanted.shape[1:]):
            raise ValueError(
                f"initial parameters have shape {given.shape}; give {wanted.shape[1:]} (of one "
                f"model) or {wanted.shape} (with a models axis)"
            )
        return jnp.broadcast_to(given, wanted.shape)

    words = "initial parameters must have the structure of "
    num_models = max((len(x.shape) and x.shape[0] for x in jax.tree.leaves(like)), default=0)
    # A list may also be one model's parameters, if it has the task's structure.
    structures = {jax.tree.structure(tree) for tree in (params, like)}
    if isinstance(params, list | tuple) and len(structures) > 1:
        if len(params) == num_models:
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), like)
            each = [fit_params(model, one) for model in params]
            return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *each)
        words = f"a list of {len(params)} is not one for each of {num_models} models, nor has it "
    check_alike(f"{words}the task's", params, like)
    return jax.tree.map(fit, params, like)


def check_alike(problem: str, *trees: Any, shapes: bool = False) -> None:
    """Raises a `ValueError` that shows the difference if pytrees differ in structure.

    Args:
      problem: the beginning of the error message.
      trees: the pytrees to compare.
      shapes: whether arrays must also have equal shapes and types.
    """
    structures = dict.fromkeys(jax.tree.structure(tree) for tree in trees)
    if len(structures) > 1:
        raise ValueError(f"{problem}: {' and '.join(map(str, structures))}")
    if shapes and len(trees) > 1:  # chex does not accept a single tree
        try:
            chex.assert_trees_all_equal_shapes_and_dtypes(*trees)
        except AssertionError as error:
            raise ValueError(f"{problem}: {error}") from error


def check_cohort_size(num_clients: int, cohort_size: int | None) -> int:
    """Checks that K <= N, and returns the cohort size K, which is N by default."""
    cohort = num_clients if cohort_size is None else cohort_size
    check_between("cohort_size", cohort, 1, num_clients, "num_clients")
    return cohort


def check_sizes(
    num_clients: int, num_models: int, cohort_size: int | None, parts: str = "models"
) -> int:
    """Checks that M <= K <= N, and returns the cohort size K."""
    cohort = check_cohort_size(num_clients, cohort_size)
    if num_models > cohort:
        whose, more = "a cohort has", "a larger cohort"
        if cohort_size is None:
            whose, more = "there are", "more clients"
        raise ValueError(
            f"num_{parts} is {num_models}, more than the clients {whose} ({cohort}); "
            f"use at most {cohort} {parts}, or {more}"
        )
    return cohort


@contextlib.contextmanager
def tracing(what: str) -> Iterator[None]:
    """Adds a note to JAX's concretization errors that names the traced function and a remedy.

    Args:
      what: the traced function, such as "a round".
    """
    try:
        yield
    except NO_VALUE as error:
        error.add_note(
            f"{what} is compiled once and then serves all rounds, clients, models and seeds: the "
            "round, keys, clients' numbers, numbers on axes, parameters and states have no value "
            "while Python runs. Instead of `if` use jax.numpy.where or jax.lax.cond, instead of "
            "`for ... in range(n)` jax.lax.fori_loop, instead of numpy jax.numpy."
        )
        raise
