"""Argument checks derived from the ranges and choices in annotations.

A number's annotation states its range, as in ``mu: Annotated[Scalar, Ge(0)]``, and a choice is a
``Literal``. `checked` rejects other values when the factory is called, experiment files enforce the
same limits, and the reference documentation shows them.
"""

import dataclasses
import difflib
import dis
import functools
import inspect
import math
import operator
from collections.abc import Callable
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import jax
import numpy as np
from annotated_types import Ge, GroupedMetadata, Gt, Interval, Le, Lt

from fedjax_mm.base import Scalar, Steps
from fedjax_mm.base.calls import Call, with_call
from fedjax_mm.base.programs import TracedInt
from fedjax_mm.checks.values import check_choice, check_known, check_numbers, described, whole

P = ParamSpec("P")
T = TypeVar("T")

_COUNTS = Interval(ge=1, lt=2**31)

Count: TypeAlias = Annotated[int, _COUNTS]
"""A positive whole number of any integer type; counts are int32."""

TracedCount: TypeAlias = Annotated[Steps, _COUNTS]
"""A count that may be traced."""

CountOrZero: TypeAlias = Annotated[int, Interval(ge=0, lt=2**31)]
"""A count that may be 0."""

TwoOrMore: TypeAlias = Annotated[int, Interval(ge=2, lt=2**31)]
"""A count of at least 2, for example of classes."""

Seed: TypeAlias = Annotated[int, Interval(ge=0, lt=2**32)]
"""An integer seed, as opposed to a key."""

Positive: TypeAlias = Annotated[Scalar, Gt(0)]
"""A positive number, which may be traced."""

NonNegative: TypeAlias = Annotated[Scalar, Ge(0)]
"""A nonnegative number, which may be traced."""

Fraction: TypeAlias = Annotated[float, Interval(gt=0, lt=1)]
"""A fraction strictly between 0 and 1."""

Mixture: TypeAlias = Annotated[Scalar, Interval(ge=0, le=1)]
"""A share from 0 to 1, which may be traced."""

Share: TypeAlias = Annotated[float, Interval(ge=0, le=1)]
"""A fraction from 0 to 1, inclusive."""

Percent: TypeAlias = Annotated[float, Interval(ge=0, le=100)]
"""A percentage, from 0 to 100."""

Rule: TypeAlias = Callable[[str, Any], Any]
"""Checks a value, given an argument's name, and returns it, with whole numbers as ints.

Raises an error if the value is not allowed.
"""

_BELONGS = {  # where arguments are for that a function with such a first one does not have
    "local": "those of local training are for local_sgd, as in local_sgd(0.1, steps=5)",
}
_TESTS = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}


def brief(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator that drops the frames of this package from the tracebacks of its refusals.

    ``JAX_TRACEBACK_FILTERING=off`` shows them, like those of JAX.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True  # for IPython and pytest
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            shows_all = getattr(jax.config, "jax_traceback_filtering", None) == "off"
            if shows_all or not _is_refusal(error):
                raise
            # A note of JAX says that its own frames are left out.
            notes = [x for x in getattr(error, "__notes__", []) if "TRACEBACK_FILTERING" not in x]
            error.__notes__ = notes
            raise error.with_traceback(None) from error.__cause__

    return call


def _is_refusal(error: Exception) -> bool:
    """Whether a `raise` of this package raised an error, rather than a call that failed."""
    at: Any = error.__traceback__
    while at.tb_next is not None:
        at = at.tb_next
    is_ours = at.tb_frame.f_globals.get("__name__", "").startswith("fedjax_mm")
    return is_ours and at.tb_frame.f_code.co_code[at.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator that checks a function's arguments against its annotations.

    ``Annotated`` numbers are checked against their limits, ``Literal`` and ``bool`` against their
    values. Counts of any integer type become ints. Traced numbers, which have no value yet, are
    accepted where the annotation has an array type. Other annotations are ignored.
    Unknown arguments raise an error that names them.

    Example:
      >>> @checked
      ... def rule(num_steps: Count, *, mu: Positive = 1.0, by: Literal["loss", "size"] = "loss"):
      ...     return num_steps, mu, by
      >>> rule(np.int8(3), mu=0.5)
      (3, 0.5, 'loss')
      >>> rule(3, mu=-0.5)
      Traceback (most recent call last):
        ...
      ValueError: mu is -0.5; it must be positive
    """
    return _checking(function, lambda made, args, kwargs: made)


def part(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a factory whose results are declared to be pure, as `jax.jit` of a function.

    Its arguments are checked against their annotations, as far as these have ranges or choices.
    Its results print as the call, are pickled as the call, and can be swept by path. Calls that
    differ only in numbers share compiled programs, because the factory is called again inside a
    program, with traced numbers. Floats and JAX arrays are numbers, except where an annotation
    without an array type, such as ``float``, demands known values.

    You promise that the factory depends on its arguments alone, as do the functions that it makes:
    a list, an object, a file or a module's attribute that they read must not change afterwards.
    Numbers, strings and functions that they read as global names may change.

    Args:
      function: returns an `Algorithm`, an `Assignment`, a function such as a schedule, an optimizer
        of optax, or any other part or NamedTuple.

    Example:
      >>> from fedjax_mm import fedavg, local_sgd, mfa_rr, part, simulate
      >>> from fedjax_mm.tasks import quadratic
      >>> @part
      ... def halving(rate, every: Count):
      ...     return lambda t: rate * 0.5 ** (t // every)
      >>> halving(0.1, every=10)
      halving(0.1, every=10)
      >>> for rate in (0.1, 0.2):  # one program
      ...     algorithm = fedavg(local_sgd(halving(rate, every=10), steps=5))
      ...     _, trace = simulate(0, quadratic(24, 4, mu=0.1), algorithm, mfa_rr(24, 2), 20)
    """

    def with_its_call(made: T, args: Any, kwargs: dict[str, Any]) -> T:
        made_again: T = with_call(made, Call.of(make, args, kwargs))
        return made_again

    make = _checking(function, with_its_call)
    return make


def _checking(function: Callable[P, T], finish: Callable[[T, Any, Any], T]) -> Callable[P, T]:
    """A function that checks its arguments, and finishes its result."""
    # Most functions of a module are never called. Read annotations on the first call.
    rules = functools.cache(lambda: _rules(function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        by_place, by_name, known = rules()
        for name in kwargs:
            if known and name not in known:
                raise TypeError(_unknown(function, name, known))
        if known and len(args) > len(by_place):
            raise TypeError(_by_name(function, known[: len(by_place)], known[len(by_place) :]))
        first: Any = [rule(value) for rule, value in zip(by_place, args, strict=False)]
        rest: Any = args[len(first) :]
        named: Any = {
            name: by_name[name](value) if name in by_name else value
            for name, value in kwargs.items()
        }
        return finish(function(*first, *rest, **named), args, kwargs)

    return brief(call)


def refusing_unknown(kind: type[T]) -> type[T]:
    """Makes a class reject unknown arguments by name.

    Example:
      >>> @refusing_unknown
      ... @dataclasses.dataclass
      ... class Run:
      ...     num_rounds: int
      >>> Run(num_round=3)
      Traceback (most recent call last):
        ...
      TypeError: Run has no argument 'num_round'; did you mean 'num_rounds'?
    """
    init: Callable[..., None] = kind.__init__
    known = [*inspect.signature(kind).parameters]

    @brief
    @functools.wraps(init)
    def checked_init(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise TypeError(_unknown(kind, name, known))
        init(self, *args, **kwargs)

    type.__setattr__(kind, "__init__", checked_init)
    return kind


def check_argument(name: str, value: Any, annotation: Any) -> Any:
    """Checks a value against an annotation and returns it, with counts as ints.

    Args:
      name: the argument's name, for error messages.
      value: any value.
      annotation: an annotation with a range or choices.

    Raises:
      TypeError: if a number is expected but the value is, for example, None, a string or traced.
      ValueError: if the value is not allowed.

    Example:
      >>> check_argument("alpha", 2.5, Annotated[float, Interval(ge=0, le=1)])
      Traceback (most recent call last):
        ...
      ValueError: alpha is 2.5; it must lie between 0 and 1
    """
    rule = rule_of(annotation)
    return value if rule is None else rule(name, value)


def members_of(annotation: Any) -> tuple[Any, ...]:
    """Members of a union, or the type itself.

    Example:
      >>> members_of(float | None), members_of(float)
      ((<class 'float'>, <class 'NoneType'>), (<class 'float'>,))
    """
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


def limits_of(annotation: Any) -> Interval:
    """Bounds of an annotated number, or an interval without bounds.

    Example:
      >>> limits_of(Share), limits_of(float)
      (Interval(gt=None, ge=0, lt=None, le=1), Interval(gt=None, ge=None, lt=None, le=None))
    """
    bounds: dict[str, Any] = {}
    for each in getattr(annotation, "__metadata__", ()):
        for bound in each if isinstance(each, GroupedMetadata) else [each]:
            if isinstance(bound, Gt | Ge | Lt | Le):
                bounds |= dataclasses.asdict(bound)
    return Interval(**bounds)


@functools.lru_cache(1024)
def rule_of(annotation: Any) -> Rule | None:
    """Rule for an annotation, or None if there is nothing to check."""
    members = members_of(annotation)
    choices = [value for each in members if get_origin(each) is Literal for value in get_args(each)]
    ranges = [each for each in members if limits_of(each) != Interval()]
    if {*members} <= {bool, NoneType} and bool in members:
        rule: Rule = _flag
    elif ranges:
        rule = _range_or_choice(ranges[0], choices)
    elif choices:
        rule = _choice([*choices, None] if NoneType in members else choices)
    else:
        return None
    read = (*ranges, bool)
    others = [get_origin(x) or x for x in members if x not in read and get_origin(x) != Literal]
    if not others:
        return rule
    # The range does not apply to values of the union's other types.
    return lambda name, value: value if isinstance(value, (*others,)) else rule(name, value)


def _unknown(function: Callable[..., Any], name: str, known: list[str]) -> str:
    """Error message about an argument that a function does not have."""
    # Do not suggest `server_optimizer` for `optimizer`. Their similarity is 0.72.
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    hint = f"did you mean {close[0]!r}?" if close else f"its arguments are {', '.join(known)}"
    if not close and known[0] in _BELONGS:
        hint += f"; {_BELONGS[known[0]]}"
    return f"{function.__name__} has no argument {name!r}; {hint}"


def _by_name(function: Callable[..., Any], first: list[str], others: list[str]) -> str:
    """Error message about too many arguments by position."""
    taken = f"only {', '.join(first)}" if first else "no argument"
    hint = f"; give the others by name: {', '.join(others)}" if others else ""
    return f"{function.__name__} takes {taken} by position{hint}"


def _rules(
    function: Callable[..., Any],
) -> tuple[list[Callable[[Any], Any]], dict[str, Any], list[str]]:
    """The checks of a function's arguments, by position and by name, and all their names.

    The list of names is empty if the function accepts arbitrary arguments.
    """
    parameters = inspect.signature(function, eval_str=True).parameters
    found = {name: rule_of(each.annotation) for name, each in parameters.items()}
    by_name = {name: functools.partial(rule, name) for name, rule in found.items() if rule}
    by_place = [
        by_name.get(name, lambda value: value)
        for name, each in parameters.items()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    takes_any = any(
        each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters.values()
    )
    return by_place, by_name, [] if takes_any else [*parameters]


def _range_or_choice(annotation: Any, choices: list[Any]) -> Rule:
    limits, base = limits_of(annotation), members_of(get_args(annotation)[0])
    arrays = [each.dims for each in base if hasattr(each, "dims")]
    if int in base and float not in base:
        number = _whole_number(limits)
    else:
        number = _number(limits, max(map(len, arrays), default=0))
    if not arrays:
        number = _known(number)
    if not choices:
        return number
    choice = _choice(choices)
    return lambda name, value: (choice if isinstance(value, str) else number)(name, value)


def _known(number: Rule) -> Rule:
    def rule(name: str, value: Any) -> Any:
        check_known(name, value)
        found = number(name, value)
        return int(found) if isinstance(found, TracedInt) else found

    return rule


def _number(limits: Interval, ndim: int) -> Rule:
    is_inside, words = _inside(limits), _words(limits)

    def rule(name: str, value: Any) -> Any:
        check_numbers(name, value, is_inside, words, ndim=ndim)
        return value

    return rule


def _whole_number(limits: Interval) -> Rule:
    least, most = _ends(limits)
    words = "a positive whole number" if least == 1 else f"a whole number, {least} or more"

    def rule(name: str, value: Any) -> Any:
        if isinstance(value, jax.core.Tracer):
            return value
        number = whole(value)
        if number is None or not least <= number <= most:
            below = "" if number is None or number < least else f", at most {most}"
            raise ValueError(f"{name} is {described(value)}; it must be {words}{below}")
        return number

    return rule


def _choice(choices: list[Any]) -> Rule:
    def rule(name: str, value: Any) -> Any:
        check_choice(name, value, *choices)
        return value

    return rule


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise ValueError(f"{name} is {described(value)}; it must be True or False")


def _inside(limits: Interval) -> Callable[[Any], Any]:
    """Predicate that tests whether all numbers are within the limits."""
    bounds = [(_TESTS[key], x) for key, x in dataclasses.asdict(limits).items() if x is not None]
    return lambda value: functools.reduce(operator.and_, (test(value, x) for test, x in bounds))


def _ends(limits: Interval) -> tuple[Any, Any]:
    """Smallest and largest integer within the limits, infinite if unbounded."""
    low: Any = limits.gt
    high: Any = limits.lt
    least = limits.ge if low is None else low + 1
    most = limits.le if high is None else high - 1
    return -math.inf if least is None else least, math.inf if most is None else most


def _words(limits: Interval) -> str:
    """Completes the message "it must ...", for example with "be positive"."""
    low = limits.gt if limits.ge is None else limits.ge
    high = limits.lt if limits.le is None else limits.le
    opening, closing = "(" if limits.ge is None else "[", ")" if limits.le is None else "]"
    if low is None:
        return f"be less than {high}" if limits.le is None else f"be at most {high}"
    if high is not None:
        between = {"[]": f"lie between {low} and {high}"}
        between["()"] = f"{between['[]']}, both excluded"
        return between.get(opening + closing, f"be in {opening}{low}, {high}{closing}")
    if low == 0:
        return "be positive" if limits.ge is None else "not be negative"
    return f"be greater than {low}" if limits.ge is None else f"be at least {low}"
