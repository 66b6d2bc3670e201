"""Counts the keys and the random numbers of a round in what JAX has traced."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from jax.extend.core import ClosedJaxpr, Jaxpr

_KEYS = ("random_fold_in", "random_seed", "random_split")


class Draws(NamedTuple):
    """Work of JAX's random number generator, on one device.

    Hashes of `fedjax_mm.base.shuffles`, by which rows of batches are drawn, are not counted.

    Attributes:
      keys: the number of keys that were made from others.
      words: the number of random words of 32 bits.
      is_open: whether a loop without a known number of steps draws; one step of it is counted.
    """

    keys: int = 0
    words: int = 0
    is_open: bool = False

    def plus(self, other: "Draws") -> "Draws":
        """The sum."""
        return Draws(
            self.keys + other.keys, self.words + other.words, self.is_open or other.is_open
        )

    def times(self, number: int) -> "Draws":
        """The same, several times."""
        return self._replace(keys=self.keys * number, words=self.words * number)


def count_draws(jaxpr: ClosedJaxpr | Jaxpr) -> Draws:
    """Counts the draws of a whole program, in which both branches of a condition count.

    Example:
      >>> import jax
      >>> def draw(key):
      ...     one, two = jax.random.split(key)
      ...     return jax.random.uniform(one, (5,)), jax.random.normal(two)
      >>> count_draws(jax.make_jaxpr(jax.vmap(draw))(jax.random.split(jax.random.key(0), 3)))
      Draws(keys=6, words=18, is_open=False)
    """
    total = Draws()
    for eqn in jaxpr.eqns:
        name, made = eqn.primitive.name, cast("Any", [x.aval for x in eqn.outvars])
        if name in _KEYS:
            total = total.plus(Draws(keys=math.prod(made[0].shape)))
        elif name == "random_bits":
            bits = math.prod(made[0].shape) * eqn.params["bit_width"]
            total = total.plus(Draws(words=-(-bits // 32)))
        inside = Draws()
        for each in _inside(eqn.params):
            inside = inside.plus(count_draws(each))
        if name == "while" and inside != Draws():
            inside = inside._replace(is_open=True)
        total = total.plus(inside.times(eqn.params["length"] if name == "scan" else 1))
    return total


def draws_of_a_round(jaxpr: ClosedJaxpr | Jaxpr, num_rounds: int) -> Draws | None:
    """Counts the draws in a step of the outermost loop of `num_rounds` steps, if there is one.

    The last of several loops counts, because a state is made before the rounds.
    """
    level: list[Any] = [jaxpr]
    while level:
        eqns = [eqn for each in level for eqn in each.eqns]
        for eqn in reversed(eqns):
            if eqn.primitive.name == "scan" and eqn.params["length"] == num_rounds:
                return count_draws(eqn.params["jaxpr"])
        level = [each for eqn in eqns for each in _inside(eqn.params)]
    return None


def _inside(params: dict[str, Any]) -> Iterator[ClosedJaxpr | Jaxpr]:
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr | Jaxpr):
                yield each
