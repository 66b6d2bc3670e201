"""Fields of configurations: plain data, checked when it is read, and the types that check it."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Percent = Annotated[float, Field(strict=True, ge=0, le=100)]
Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Flag = Annotated[bool, Field(strict=True)]

Numbers = Mapping[str, Any]
"""Swept numbers by the names of fields; those of an inner table are a mapping of their own."""


class Config(BaseModel):
    """Settings: unknown keys are errors, values are checked, nothing changes after construction.

    Swept numbers are traced by JAX and never become fields: methods take them as `Numbers`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    def with_numbers(self, numbers: Numbers) -> Any:
        """Returns the fields as attributes of a plain object, with numbers in their places."""
        return SimpleNamespace(**(dict(self) | dict(numbers)))
