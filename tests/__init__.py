"""Tests. jaxtyping loads its type checker, `tests.check_shapes`, from here (pyproject.toml)."""

from tests.shapes import check_shapes

__all__ = ["check_shapes"]
