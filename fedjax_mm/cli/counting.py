"""Counts the keys, random numbers, operations and moved bytes of a round in what JAX has traced."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

_KEYS = ("random_fold_in", "random_seed", "random_split")
_THREEFRY = 115  # operations of a block, which makes a key or two words
_OVER_INPUTS = ("reduce_", "arg", "cum", "top_k")  # primitives with more inputs than outputs
_MOVES = {"gather", "dynamic_slice", "all_gather", "all_to_all"}  # counted by outputs
_WRITES = {"dynamic_update_slice": 1, "scatter": 2}  # the argument that is written
_FREE = {
    *("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice", "split"),
    *("convert_element_type", "bitcast_convert_type", "concatenate", "pad", "iota", "rev", "copy"),
    *("select_n", "stop_gradient", "optimization_barrier", "axis_index", "pvary", "pcast"),
    *("platform_index", "random_wrap", "random_unwrap", "custom_lin"),
}


class Counted(NamedTuple):
    """Work of a program on one device.

    Hashes of `fedjax_mm.base.shuffles`, by which rows of batches are drawn, are operations.

    Attributes:
      keys: the number of keys that were made from others.
      words: the number of random words of 32 bits.
      operations: additions, products, comparisons and other arithmetic on numbers, also to make
        keys and words.
      moved: the bytes of rows that are read or written by index, such as examples, states of
        clients and updates, and of all rows over which a loop maps.
      is_open: whether a loop without a known number of steps does any of it; one step is counted.
    """

    keys: int = 0
    words: int = 0
    operations: int = 0
    moved: int = 0
    is_open: bool = False

    def plus(self, other: "Counted") -> "Counted":
        """The sum."""
        return Counted(
            self.keys + other.keys,
            self.words + other.words,
            self.operations + other.operations,
            self.moved + other.moved,
            self.is_open or other.is_open,
        )

    def times(self, number: int) -> "Counted":
        """The same, several times."""
        return Counted(
            self.keys * number,
            self.words * number,
            self.operations * number,
            self.moved * number,
            self.is_open,
        )


def count(jaxpr: ClosedJaxpr | Jaxpr) -> Counted:
    """Counts the work of a whole program, and of a condition the branch with most operations.

    Example:
      >>> import jax
      >>> def draw(key):
      ...     one, two = jax.random.split(key)
      ...     return jax.random.bits(one, (5,)) + jax.random.bits(two)
      >>> count(jax.make_jaxpr(jax.vmap(draw))(jax.random.split(jax.random.key(0), 3)))
      Counted(keys=6, words=18, operations=1739, moved=0, is_open=False)
    """
    total = Counted()
    for eqn in jaxpr.eqns:
        name, inside = eqn.primitive.name, [count(each) for each in _inside(eqn.params)]
        if name == "cond":
            inside = [max(inside, key=lambda each: each.operations)]
        if not inside:
            total = total.plus(_of_equation(eqn))
        for each in inside:
            if name == "while" and each != Counted():
                each = each._replace(is_open=True)
            total = total.plus(each.times(eqn.params["length"] if name == "scan" else 1))
        if name == "scan":
            first = eqn.params["num_consts"] + eqn.params["num_carry"]
            rows = eqn.invars[first:] + eqn.outvars[eqn.params["num_carry"] :]
            total = total.plus(Counted(moved=sum(map(_bytes, rows))))
    return total


def _of_equation(eqn: Any) -> Counted:
    """The work of an operation without an inner program."""
    name, made = eqn.primitive.name, eqn.outvars[0]
    if name in _KEYS:
        return Counted(keys=_size(made), operations=_THREEFRY * _size(made))
    if name == "random_bits":
        words = -(-_size(made) * eqn.params["bit_width"] // 32)
        return Counted(words=words, operations=_THREEFRY * words // 2)
    if name in _MOVES:
        return Counted(moved=_bytes(made))
    if name in _WRITES:
        return Counted(moved=_bytes(eqn.invars[_WRITES[name]]))
    if name in _FREE:
        return Counted()
    if name == "dot_general":
        ((contracted, _), _), shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
        return Counted(operations=2 * _size(made) * math.prod(shape[i] for i in contracted))
    if name.startswith("scatter"):  # additions of the updates
        return Counted(operations=_size(eqn.invars[2]), moved=_bytes(eqn.invars[2]))
    if name == "sort":
        length = eqn.invars[0].aval.shape[eqn.params["dimension"]]
        return Counted(operations=_size(made) * max(1, math.ceil(math.log2(max(1, length)))))
    return Counted(operations=_size(eqn.invars[0] if name.startswith(_OVER_INPUTS) else made))


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)


def _bytes(variable: Any) -> int:
    return _size(variable) * getattr(variable.aval.dtype, "itemsize", 0)


def count_round(jaxpr: ClosedJaxpr, num_rounds: int) -> Counted | None:
    """Counts the work in a step of the outermost loop of `num_rounds` steps, if there is one.

    The last of several loops counts, because states are made before the rounds. Unused values are
    left out, as by XLA.
    """
    used, _ = dce_jaxpr(cast("Any", jaxpr.jaxpr), [True] * len(jaxpr.jaxpr.outvars))
    level: list[Any] = [used]
    while level:
        eqns = [eqn for each in level for eqn in each.eqns]
        for eqn in reversed(eqns):
            if eqn.primitive.name == "scan" and eqn.params["length"] == num_rounds:
                return count(eqn.params["jaxpr"])
        level = [each for eqn in eqns for each in _inside(eqn.params)]
    return None


def _inside(params: dict[str, Any]) -> Iterator[ClosedJaxpr | Jaxpr]:
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr | Jaxpr):
                yield each
