"""The tests; `tests.check_shapes` is named in pyproject.toml as jaxtyping's type checker."""

from tests.shapes import check_shapes

__all__ = ["check_shapes"]
