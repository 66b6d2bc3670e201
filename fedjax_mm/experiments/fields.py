"""Fields of configurations: plain data, checked when it is read, and the types that check it."""

import inspect
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    create_model,
)

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Percent = Annotated[float, Field(strict=True, ge=0, le=100)]
Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Flag = Annotated[bool, Field(strict=True)]


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError(f"{list(values)} repeats a value; give each once")
    return values


Distinct = AfterValidator(_distinct)
"""Annotates a tuple in which no value may come twice."""

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


Table = TypeVar("Table", bound=Config)

_FROM_FILE = {float: Number, int: Count, bool: Flag, NoneType: None}


def _field_type(annotation: Any) -> Any:
    """Returns the type of a field for a parameter; None, if a file can say no such thing."""
    is_union = get_origin(annotation) in (Union, UnionType)
    members = get_args(annotation) if is_union else [annotation]
    literals = [each for each in members if get_origin(each) is Literal]
    # An int is a count everywhere; bounds of floats are checked by the function itself.
    types = [*literals, *(_FROM_FILE[each] for each in members if each in _FROM_FILE)]
    return reduce(or_, types) if any(types) else None


def table_of(
    base: type[Table], function: Callable[..., Any], *given: str, **types: Any
) -> type[Table]:
    """Returns a function's table in a file, a field for each parameter that a file can give.

    Args:
      base: fields that all such tables have.
      function: its name is the table's.
      given: parameters that are not the file's to give.
      types: of fields, where the annotation says less.
    """
    columns: dict[str, Any] = {"name": (Literal[function.__name__], ...)}
    for key, parameter in inspect.signature(function, eval_str=True).parameters.items():
        type_ = types.get(key) or _field_type(parameter.annotation)
        if type_ is not None and key not in (*given, *base.model_fields):
            columns[key] = type_, ... if parameter.default is parameter.empty else parameter.default
    return create_model(function.__name__, __base__=base, **columns)


def one_of(tables: Mapping[str, type[Config]]) -> GetPydanticSchema:
    """Annotates a field that is one of some tables, distinguished by `name`."""
    # Checkers cannot read a union made at run time: the annotated type is what all have in common.
    choice: Any = Annotated[reduce(or_, tables.values()), Field(discriminator="name")]
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(choice))


def named(default: str) -> BeforeValidator:
    """Annotates a field whose table may leave out its `name`."""
    return BeforeValidator(
        lambda table: {"name": default} | table if isinstance(table, dict) else table
    )
