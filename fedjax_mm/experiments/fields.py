"""Fields of configurations: plain data, and the types that validate them."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cache, reduce
from operator import or_
from types import GenericAlias, NoneType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
)

import numpy as np
from annotated_types import Interval
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    create_model,
    model_validator,
)
from pydantic_core import SchemaValidator, core_schema

from fedjax_mm.checks import annotations as checked
from fedjax_mm.checks.annotations import limits_of, members_of
from fedjax_mm.experiments.own import own_function
from fedjax_mm.sweeps.grid import check_records

_STRICT, _FINITE = Field(strict=True), Field(strict=True, allow_inf_nan=False)

Number = Annotated[float, _FINITE]
"""A finite number."""

Positive = Annotated[float, limits_of(checked.Positive), _FINITE]
"""A positive number."""

NonNegative = Annotated[float, limits_of(checked.NonNegative), _FINITE]
"""A nonnegative number."""

Fraction = Annotated[checked.Fraction, _FINITE]
"""A fraction strictly between 0 and 1."""

Share = Annotated[checked.Share, _FINITE]
"""A fraction from 0 to 1, inclusive."""

BelowOne = Annotated[float, Interval(ge=0, lt=1), _FINITE]
"""A fraction from 0, and below 1."""

Percent = Annotated[checked.Percent, _FINITE]
"""A percentage, from 0 to 100."""

Count = Annotated[checked.Count, _STRICT]
"""A positive whole number."""

CountOrZero = Annotated[checked.CountOrZero, _STRICT]
"""A whole number, 0 or more."""

TwoOrMore = Annotated[checked.TwoOrMore, _STRICT]
"""A whole number, 2 or more."""

Seed = Annotated[checked.Seed, _STRICT]
"""An integer seed."""

Flag = Annotated[bool, _STRICT]
"""True or false."""


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError(f"{list(values)} repeats a value; give each once")
    return values


Distinct = AfterValidator(_distinct)
"""Annotates a tuple that must not contain duplicates."""


class Replicas(TypedDict):
    """The arguments of `sweep` that describe seeds."""

    num_seeds: int
    seed: int
    first_seed: int


FINISHED = "finished"
"""The validation context for the settings of a finished result, whose data files may be gone."""


class Config(BaseModel):
    """Immutable validated settings that reject unknown keys.

    Attributes:
      factory: the function that `call` calls, whose docstring gives the meaning of the keys.
      renamed: the parameter's name for each key that has another name.
      like: makes the table of another function, as a file may name one of your own.
    """

    # Build validators on first use, because a table is part of many others, each of which would
    # build its own.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    factory: ClassVar[Any] = None
    renamed: ClassVar[Mapping[str, str]] = {}
    like: ClassVar[Callable[..., Any] | None] = None

    @property
    def changed(self) -> Set[str]:
        """The keys whose values are not the defaults."""
        fields = type(self).model_fields
        return {key for key, value in self if value != fields[key].default}

    def arguments(self, factory: Callable[..., Any]) -> dict[str, Any]:
        """The settings that are parameters of a function."""
        renamed, takes = type(self).renamed, parameters_of(factory)
        named = {renamed.get(key, key): value for key, value in self}
        return {key: value for key, value in named.items() if key in takes}

    def call(self, **given: Any) -> Any:
        """Calls the factory with the settings that are among its parameters.

        Args:
          **given: arguments that a file cannot express, which override the settings.

        Example:
          >>> from fedjax_mm.experiments.methods import ASSIGNMENT_TABLES
          >>> table = ASSIGNMENT_TABLES["mfa_rand"](name="mfa_rand", cohort_size=4)
          >>> table.call(num_clients=6, num_models=2).num_models
          2
        """
        factory = type(self).factory
        return factory(**self.arguments(factory) | given)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> Any:
        """Adds the meaning of the table and of its keys to its JSON schema."""
        made = handler(core_schema)
        table = handler.resolve_ref_schema(made)
        own = inspect.cleandoc(cls.__doc__ or cls.factory.__doc__ or "")
        table["description"] = " ".join(own.partition("\n\n")[0].split())
        for key, meaning in meanings(cls).items():
            table["properties"][key]["description"] = meaning
        return made


def meanings(table: type[Config]) -> dict[str, str]:
    """The meaning of each key, from the docstrings of a table's classes and factories.

    Example:
      >>> from fedjax_mm.experiments.methods import ASSIGNMENT_TABLES
      >>> meanings(ASSIGNMENT_TABLES["mfa_rr"])["cohort_size"]
      'K of the N clients; None means all of them.'
    """
    found: dict[str, str] = {}
    for kind in reversed(table.__mro__):
        if vars(kind).get("factory"):
            of_factory = _arguments(vars(kind)["factory"])
            keys = {key: table.renamed.get(key, key) for key in table.model_fields}
            found |= {key: of_factory[x] for key, x in keys.items() if x in of_factory}
        found |= _arguments(kind) if issubclass(kind, Config) else {}
    return {key: meaning for key, meaning in found.items() if key in table.model_fields}


def _arguments(described: Any) -> dict[str, str]:
    """Reads the sections Args and Attributes of a docstring in Google's style, by name."""
    text = inspect.cleandoc(described.__doc__ or "")
    entries = r"^  (\w+)(?: \(.*?\))?: (.*(?:\n {3,}.*)*)"
    return {
        name: " ".join(meaning.split())
        for section in re.findall(r"^(?:Args|Attributes):\n((?: .*\n?)+)", text, re.MULTILINE)
        for name, meaning in re.findall(entries, section, re.MULTILINE)
    }


class WithFiles(Config):
    """Settings that may name data files, which must exist before a run but not after it.

    Attributes:
      checker: raises `OSError` if files are missing, or `ValueError` if they do not fit.
    """

    checker: ClassVar[Any] = None

    def check_files(self) -> None:
        """Checks the data files."""
        checker = type(self).checker
        if checker is not None:
            checker(**self.arguments(checker))

    def with_files(self, info: ValidationInfo) -> Self:
        """Checks the files, except for a finished result.

        Validators call this last, so that wrong settings are reported before missing files.
        """
        if info.context != FINISHED:
            try:
                self.check_files()
            except OSError as error:
                raise ValueError(str(error)) from error
        return self


@cache
def parameters_of(factory: Callable[..., Any]) -> Set[str]:
    """The names of a function's parameters."""
    return frozenset(inspect.signature(factory).parameters)


class Recorded(Config):
    """Settings of runs with records.

    Attributes:
      num_rounds: T, the number of rounds.
      record_every: the number of rounds between two records, which must divide `num_rounds`.
    """

    num_rounds: Count
    record_every: Count = 1

    @model_validator(mode="after")
    def _records_fit(self) -> Self:
        check_records(self.num_rounds, self.record_every)
        return self


class Seeded(WithFiles):
    """Settings of runs with several seeds, to which more seeds can be added later.

    Attributes:
      num_seeds: the number of runs of each algorithm at each point.
      seed: the seed of all draws, from which the seeds of the runs are made.
    """

    num_seeds: Count
    seed: Seed = 0
    _first_seed: int = 0

    @property
    def first_seed(self) -> int:
        """The number of the first seed, which only `with_seeds` can set."""
        return self._first_seed

    def with_seeds(self, first: int, num_seeds: int) -> Self:
        """Replaces the seeds, which are numbered from 0."""
        others = self.model_copy(update={"num_seeds": num_seeds})
        others._first_seed = first
        return others

    @property
    def replicas(self) -> Replicas:
        """The arguments of `sweep` that describe the seeds."""
        return {"num_seeds": self.num_seeds, "seed": self.seed, "first_seed": self.first_seed}

    @property
    def data_seeds(self) -> list[int]:
        """The seeds of all data draws, which depend on `seed`."""
        # Adding seeds does not change the first ones, because the state is generated one number at
        # a time.
        states = np.random.SeedSequence(self.seed).generate_state(self.first_seed + self.num_seeds)
        seeds: list[int] = states[self.first_seed :].tolist()
        return seeds


Table = TypeVar("Table", bound=Config)

_FROM_FACTORY = "from the factory"

FromFactory = Annotated[Any, _FROM_FACTORY]
"""Annotates a key of which `keys_of` fills in the type and the default, and keeps the place."""

# An int without bounds always means a count.
_FROM_FILE: dict[Any, Any] = {float: Number, int: Count, bool: Flag, str: str}


def _field_type(annotation: Any, limits: Any = None) -> Any:
    """The type of a parameter's field, or None if a file cannot express it.

    Args:
      annotation: the annotation of a parameter.
      limits: the bounds of all numbers in it, if there are any.
    """
    members = members_of(annotation)
    if complex in members:  # in a file, an array-like value is a number
        members = tuple(each for each in members if each not in (bool, int))
    types = [
        None if each is NoneType else type_
        for each in members
        if (type_ := _member_type(each, limits)) is not None or each is NoneType
    ]
    return reduce(or_, types) if any(types) else None


def _member_type(annotation: Any, limits: Any) -> Any:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return annotation
    if origin is Annotated:
        return _field_type(inner[0], limits_of(annotation))
    if origin in (tuple, Sequence):
        types = tuple(each if each is ... else _field_type(each, limits) for each in inner)
        types += (...,) if origin is Sequence else ()
        return None if None in types else GenericAlias(tuple, types)
    if limits is None or annotation not in (int, float):
        return _FROM_FILE.get(annotation)
    return Annotated[annotation, limits, _FINITE if annotation is float else _STRICT]


def columns_of(function: Callable[..., Any], *given: str, **types: Any) -> dict[str, Any]:
    """The type and default of each function parameter that a file can set.

    Args:
      function: a factory, whose parameters without a default are required.
      given: parameters that a file cannot set.
      types: the types of fields that annotations do not have, or the types and defaults.
    """
    columns: dict[str, Any] = {}
    for key, parameter in inspect.signature(function, eval_str=True).parameters.items():
        type_ = types.get(key) or _field_type(parameter.annotation)
        default = ... if parameter.default is parameter.empty else parameter.default
        if type_ is not None and key not in given:
            columns[key] = type_ if isinstance(type_, tuple) else (type_, default)
    return columns


def keys_of(
    factory: Callable[..., Any], *given: str, **types: Any
) -> Callable[[type[Table]], type[Table]]:
    """Decorator that adds the keys of a factory to a table, after its own and `FromFactory`.

    Args:
      factory: the function that `call` calls.
      given: parameters that a file cannot set.
      types: the types of fields that annotations do not have, or the types and defaults.
    """

    def add(table: type[Table]) -> type[Table]:
        key_of = {parameter: key for key, parameter in table.renamed.items()}
        columns = {key_of.get(x, x): y for x, y in columns_of(factory, *given, **types).items()}
        own = {key for key, x in table.model_fields.items() if _FROM_FACTORY not in x.metadata}
        new: Any = {key: x for key, x in columns.items() if key not in own}
        new |= {"__doc__": table.__doc__, "__module__": table.__module__}
        made = create_model(table.__name__, __base__=table, **new)
        made.factory = factory
        return made

    return add


def table_of(
    base: type[Table], function: Callable[..., Any], *given: str, **types: Any
) -> type[Table]:
    """Makes the class of a function's table in a file, which has the function's name.

    Args:
      base: the fields shared by all such tables.
      function: a factory, which gives the table its other keys, see `columns_of`.
      given: parameters that a file cannot set.
      types: the types of fields that annotations do not have.
    """

    def like(function: Callable[..., Any], **more: Any) -> type[Table]:
        name: Any = Literal[function.__name__], ...
        table = create_model(function.__name__, __base__=base, name=name)
        made = keys_of(function, *given, **types | more)(table)
        made.like = like
        return made

    return like(function)


def tables_of(
    base: type[Table], functions: Iterable[Callable[..., Any]], *given: str, **types: Any
) -> dict[str, type[Table]]:
    """Makes the tables of several functions, by name."""
    return {each.__name__: table_of(base, each, *given, **types) for each in functions}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


_WHOLE = Annotated[int, _STRICT]
_PLAIN = Annotated[Flag | _WHOLE | Number | str | tuple[Any, ...], BeforeValidator(_frozen)]
"""A value for a parameter of your own whose annotation says nothing about files."""


class OneOf:
    """Annotates a field that holds one of several tables, or that of a function of your own."""

    def __init__(
        self, tables: Iterable[type[Config]], choice: Any, like: Callable[..., Any] | None = None
    ) -> None:
        """Keeps the tables for messages, and the type from which pydantic reads a value."""
        self.tables, self._choice, self._like = list(tables), choice, like
        self._own = dict[str, type[Config]]()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        chosen = handler.generate_schema(self._choice)
        if self._like is None:
            return chosen
        as_it_is = core_schema.simple_ser_schema("any")  # the table of an own function, too
        return core_schema.no_info_wrap_validator_function(
            self._read, chosen, serialization=as_it_is
        )

    def __get_pydantic_json_schema__(self, source: Any, handler: GetJsonSchemaHandler) -> Any:
        schema = handler(source)
        if self._like is not None:
            own = {"name": {"type": "string", "pattern": ":"}}
            table = {"type": "object", "required": ["name"], "properties": own}
            if "oneOf" not in schema:
                return {"anyOf": [schema, table]}
            schema["oneOf"].append(table)
        return schema

    def _read(self, value: Any, known: ValidatorFunctionWrapHandler) -> Any:
        if isinstance(value, tuple(self._own.values())):
            return value
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or ":" not in name:
            return known(value)
        function, digest = own_function(name)
        if value.get("code", digest) != digest:
            raise ValueError(
                f"the code of {name} has changed: its file has the digest {digest[:12]}..., and "
                f"these settings are for {str(value['code'])[:12]}...; take that file, or run anew"
            )
        table = self._own.get(name) or self._add(function, name)
        # A union of one, so that errors have the name in their places, as those of other tables.
        schema = core_schema.tagged_union_schema({name: table.__pydantic_core_schema__}, "name")
        return SchemaValidator(schema).validate_python({**value, "code": digest})

    def _add(self, function: Callable[..., Any], name: str) -> type[Config]:
        """Makes the table of a function of your own."""
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        usual = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        plain: dict[str, Any] = {
            each.name: _WHOLE if each.annotation is int else _PLAIN
            for each in parameters
            if each.kind in usual
            and (each.annotation is int or _field_type(each.annotation) is None)
        }
        own: Any = {"name": (Literal[name], ...), "code": (Annotated[str, Field(repr=False)], ...)}
        base: Any = self._like
        table: type[Config] = create_model(name, __base__=base(function, **plain), **own)
        table.model_rebuild()
        self.tables.append(table)
        self._own[name] = table
        return table


def one_of(
    tables: Mapping[str, type[Config]] | type[Config], like: Callable[..., Any] | None = None
) -> OneOf:
    """Annotates a field that holds a table, or one of several, distinguished by `name`.

    Args:
      tables: the table or tables.
      like: makes the table of a function of your own; by default as that of the first of `tables`.
    """
    # Annotate such fields with the tables' base class, because type checkers cannot read classes
    # built at run time.
    if not isinstance(tables, Mapping):
        return OneOf([tables], tables)
    choice: Any = Annotated[reduce(or_, tables.values()), Field(discriminator="name")]
    return OneOf(tables.values(), choice, like or next(iter(tables.values())).like)


def tables_in(annotation: Any) -> list[type[Config]]:
    """Lists the tables that a value, or an item of it, may be."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    inner = get_args(annotation)
    chosen = [each.tables for each in inner if isinstance(each, OneOf)]
    return chosen[0] if chosen else [table for each in inner for table in tables_in(each)]


def named(default: str) -> BeforeValidator:
    """Annotates a field whose table may omit its `name`."""
    return BeforeValidator(
        lambda table: {"name": default} | table if isinstance(table, dict) else table
    )
