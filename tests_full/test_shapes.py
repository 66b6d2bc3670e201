"""Annotated shapes of arrays are checked in every test."""

import dataclasses

import jax.numpy as jnp
import jaxtyping
import pytest
from jaxtyping import Array, Float, TypeCheckError

from fedjax_mm.base.shuffles import fold_words
from fedjax_mm.tasks import mean_estimation
from tests import check_shapes

check = jaxtyping.jaxtyped(typechecker=check_shapes)


def half(x: Float[Array, " n"]):
    return x / 2


def later(x: 'Float[Array, " n"]'):
    return x / 2


def pair(x) -> Float[Array, "2"]:
    return x


class Method:
    @property
    def pair(self) -> Float[Array, "2"]:
        return jnp.zeros(3)


@dataclasses.dataclass
class Sides:
    left: Float[Array, " n"]
    right: Float[Array, " n"]


@pytest.mark.parametrize("function", [half, later, pair])
def test_a_function_of_arrays_is_checked(function):
    assert check(function)(jnp.ones(2)).shape == (2,)
    with pytest.raises(TypeCheckError):
        check(function)(jnp.ones((2, 2)))


def test_classes_are_checked():
    check(Sides)(jnp.ones(2), jnp.ones(2))
    with pytest.raises(TypeCheckError):
        Sides(jnp.ones(2), jnp.ones(3))
    with pytest.raises(TypeCheckError):
        check(Method.pair).fget(Method())


def test_a_function_without_array_annotations_is_not_decorated():
    """Decorating it and binding its arguments would take a fifth of the tests' time."""

    def plain(x: int, *, y: list[Array] | None = None) -> dict[str, Array]:
        return {"x": jnp.full(3, x)}

    assert check(plain) is plain
    assert check(half) is not half


def test_the_package_is_checked():
    with pytest.raises(TypeCheckError):
        fold_words(jnp.zeros(3, jnp.uint32), jnp.int32(1))
    with pytest.raises(TypeCheckError):
        mean_estimation(jnp.zeros(2), jnp.zeros(2)).appeals(jnp.zeros(2))
