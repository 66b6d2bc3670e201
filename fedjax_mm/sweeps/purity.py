"""Checks that `build` is a pure function, where a user's undeclared functions take part.

All points are built before the first program is traced. A function that reads what `build` changes,
such as a global variable, would compute every point with the values of the last one.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import PRNGKeyArray

from fedjax_mm.base.chunks import ClientMap
from fedjax_mm.base.programs import TracedInt
from fedjax_mm.simulator.simulate import simulate
from fedjax_mm.sweeps.grid import Setup

_ADDRESS = re.compile(r"0x[0-9a-f]+")


class Computed(NamedTuple):
    """The results of one round of a point, at the time of the call.

    Attributes:
      where: the name of the point.
      digest: is equal for equal programs with equal constants.
    """

    where: str
    digest: str


def computed(
    where: str,
    rebuild: Callable[[Sequence[Any]], Setup],
    leaves: Sequence[Any],
    client_map: ClientMap,
) -> Computed:
    """Traces one round of a point.

    Args:
      where: the name of the point.
      rebuild: makes the setup from its leaves.
      leaves: the leaves, of which only shapes matter.
      client_map: how clients are computed.
    """

    def run(rng_key: PRNGKeyArray, leaves: Sequence[Any]) -> Any:
        tasks, algorithm, assignment, params, *_ = rebuild(leaves).prepared(rng_key)
        given = rng_key, tasks, algorithm, assignment
        return simulate(*given, 1, client_map=client_map, params=params)

    leaves = [np.int32(x) if isinstance(x, TracedInt) else x for x in leaves]
    program = jax.make_jaxpr(run)(jax.random.key(0), leaves)
    found = hashlib.sha256(_ADDRESS.sub("", str(program)).encode())
    for x in _constants(program):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        found.update(np.asarray(jax.random.key_data(x) if is_key else x).tobytes())
    return Computed(where, found.hexdigest())


def check_pure(before: Sequence[Computed], after: Computed, undeclared: Sequence[str]) -> None:
    """Raises `ValueError` if a point's results differ from those right after its build.

    Args:
      before: what points of one structure computed then.
      after: their results after all builds.
      undeclared: names of the functions that may have read something else.
    """
    for each in before:
        if each.digest != after.digest:
            raise impure(each.where, undeclared)


def impure(where: str, readers: Sequence[str]) -> ValueError:
    """The error about a build that changes something that one of the readers reads."""
    return ValueError(
        f"build is not a pure function: the point {where} computed something else before later "
        "points were built. It changes a variable, an object or a file that one of these reads: "
        f"{', '.join(readers)}; give the value as an argument or in a closure, as in "
        "lambda t: rate / t"
    )


def _constants(program: ClosedJaxpr) -> Iterator[Any]:
    yield from program.consts
    inside = [x for eqn in program.jaxpr.eqns for x in jax.tree.leaves([*eqn.params.values()])]
    for each in inside:
        if isinstance(each, Jaxpr):
            each = ClosedJaxpr(each, [])
        if isinstance(each, ClosedJaxpr):
            yield from _constants(each)
