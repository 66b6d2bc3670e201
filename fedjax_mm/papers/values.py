"""Settings with several values, which form the axes of figures and tables."""

from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, ValidationInfo

from fedjax_mm.experiments.fields import Distinct


def _increase(values: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
    if list(values) != sorted(set(values)):
        raise ValueError(f"{info.field_name} is {list(values)}; they must increase")
    return values


def _trend(values: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
    if len(values) < 3:
        raise ValueError(f"{info.field_name} is {list(values)}; a trend needs 3 or more")
    return _increase(values, info)


T = TypeVar("T")
Some = Annotated[tuple[T, ...], Field(min_length=1)]
Several = Annotated[Some[T], Distinct]
Increasing = Annotated[tuple[T, ...], AfterValidator(_increase)]
Trend = Annotated[tuple[T, ...], AfterValidator(_trend)]
