"""Proofs that a function is affine in some of its arguments, from the program that JAX traces."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Literal as Known

Kind: TypeAlias = Literal["constant", "affine"] | tuple[str]
"""How a value depends on the arguments; a tuple has the reason why it may not be affine."""

_SUMS = {
    *("add", "sub", "neg", "add_any", "reduce_sum", "cumsum", "copy", "copy_p", "pad", "slice"),
    *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev", "split"),
    "concatenate",
}
"""Operations that are linear in all their operands together."""

_DATA = {
    "select_n": slice(1, None),
    "dynamic_slice": slice(0, 1),
    "gather": slice(0, 1),
    "dynamic_update_slice": slice(0, 2),
    "scatter": slice(0, 3, 2),
    "scatter-add": slice(0, 3, 2),
}
"""Operands in which operations are linear; the others are predicates or indices."""


def dependence(
    function: Callable[..., Any], arguments: Sequence[Any], kinds: Sequence[Kind]
) -> list[Kind]:
    """How each leaf of the result of `function` depends on its arguments.

    JAX traces the function, and each operation must be linear in what depends on the arguments.
    So the answer "affine" is a proof for all values of the arguments, whereas some functions that
    are affine are not recognized.

    Args:
      function: a function of pytrees of arrays.
      arguments: examples of its arguments, or their shapes.
      kinds: how each argument itself depends on the varied ones.

    Example:
      >>> dependence(lambda x, y: (2 * x + y, x * y, x * x), (1.0, 1.0), ("affine", "constant"))
      ['affine', 'affine', ('a product (mul)',)]
    """
    closed = jax.make_jaxpr(function)(*arguments)
    each = [
        kind
        for argument, kind in zip(arguments, kinds, strict=True)
        for _ in jax.tree.leaves(argument)
    ]
    return _through(closed.jaxpr, each)


def _join(kinds: Sequence[Kind]) -> Kind:
    for kind in kinds:
        if isinstance(kind, tuple):
            return kind
    return "affine" if "affine" in kinds else "constant"


def _through(jaxpr: Any, kinds: Sequence[Kind]) -> list[Kind]:
    """Kinds of a program's results, given those of its inputs."""
    known: dict[Any, Kind] = dict.fromkeys(jaxpr.constvars, "constant")
    known |= dict(zip(jaxpr.invars, kinds, strict=True))

    def kind(atom: Any) -> Kind:
        return "constant" if isinstance(atom, Known) else known[atom]

    for equation in jaxpr.eqns:
        found = _operation(equation, [kind(x) for x in equation.invars])
        known |= dict(zip(equation.outvars, found, strict=True))
    return [kind(x) for x in jaxpr.outvars]


def _operation(equation: Any, kinds: list[Kind]) -> list[Kind]:
    name, params, number = equation.primitive.name, equation.params, len(equation.outvars)
    if set(kinds) <= {"constant"}:
        return ["constant"] * number
    if name == "scan":
        return _scan(params, kinds)
    if name == "while":
        return _while(params, kinds)
    if name == "cond":
        if kinds[0] != "constant":
            return [_reason(kinds[0], "a branch (cond)")] * number
        each = [_through(branch.jaxpr, kinds[1:]) for branch in params["branches"]]
        return [_join(same) for same in zip(*each, strict=True)]
    inner = next((params[x] for x in ("jaxpr", "call_jaxpr", "fun_jaxpr") if x in params), None)
    if inner is not None:
        return _through(getattr(inner, "jaxpr", inner), kinds)
    if name == "optimization_barrier":
        return kinds
    if name in _SUMS:
        return [_join(kinds)] * number
    if name == "convert_element_type" and jnp.issubdtype(params["new_dtype"], jnp.floating):
        return kinds
    if name in _DATA:
        data = kinds[_DATA[name]]
        if kinds.count("constant") - data.count("constant") == len(kinds) - len(data):
            return [_join(data)]
    if name in ("mul", "dot_general", "conv_general_dilated") and "constant" in kinds:
        return [_join(kinds)]
    if name == "div" and kinds[1] == "constant":
        return [kinds[0]]
    word = (
        "a product" if name in ("mul", "dot_general", "integer_pow", "square") else "an operation"
    )
    return [_reason(_join(kinds), f"{word} ({name})")] * number


def _reason(kind: Kind, words: str) -> Kind:
    return kind if isinstance(kind, tuple) else (words,)


def _until_stable(body: Callable[[list[Kind]], list[Kind]], carry: list[Kind]) -> list[Kind]:
    """Kinds of a loop's carry, which later iterations may not change."""
    while (found := [_join(pair) for pair in zip(carry, body(carry), strict=True)]) != carry:
        carry = found
    return carry


def _scan(params: dict[str, Any], kinds: list[Kind]) -> list[Kind]:
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]

    def body(carry: list[Kind]) -> list[Kind]:
        return _through(params["jaxpr"].jaxpr, [*kinds[:first], *carry, *kinds[last:]])

    length = last - first
    carry = _until_stable(lambda carry: body(carry)[:length], kinds[first:last])
    return [*carry, *body(carry)[length:]]


def _while(params: dict[str, Any], kinds: list[Kind]) -> list[Kind]:
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]

    def body(carry: list[Kind]) -> list[Kind]:
        return _through(params["body_jaxpr"].jaxpr, [*kinds[first:last], *carry])

    carry = _until_stable(body, kinds[last:])
    (stops,) = _through(params["cond_jaxpr"].jaxpr, [*kinds[:first], *carry])
    return carry if stops == "constant" else [_reason(stops, "a loop's end (while)")] * len(carry)
