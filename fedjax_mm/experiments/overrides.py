"""Reads configurations from files and applies overrides."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fedjax_mm.experiments.errors import in_words
from fedjax_mm.experiments.fields import Config
from fedjax_mm.experiments.own import allowing_code
from fedjax_mm.tools.files import check_regular

SomeConfig = TypeVar("SomeConfig", bound=Config)

_DEEPEST = 50  # levels of tables and lists; no setting needs a tenth of them
_TOO_DEEP = "lists or tables are nested too deeply; no setting is nested that deeply"


def load(
    path: Path,
    kind: type[SomeConfig],
    overrides: Sequence[str] = (),
    *,
    allow_code: bool = False,
) -> SomeConfig:
    """Reads a configuration file.

    Args:
      path: a TOML file.
      kind: the configuration's class.
      overrides: ``key.path=value`` settings that override the file.
      allow_code: whether the file may name functions of any module, as in
        ``name = "my_package.tasks:make"``, which are imported and called.

    Raises:
      ValueError: if the file is invalid, with a one-line message that names the file, the line or
        key path, the error, and the allowed values.
    """
    try:
        check_regular(path)
        values = tomllib.loads(path.read_text("utf-8-sig"))  # skips a byte order mark
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: {_TOO_DEEP}") from error
    try:
        with allowing_code(allow_code):
            return validate(kind, values, overrides)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def validate(
    kind: type[SomeConfig],
    values: dict[str, Any],
    overrides: Sequence[str] = (),
    context: Any = None,
) -> SomeConfig:
    """Builds a configuration from plain values, or raises a one-line `ValueError`.

    In the context `FINISHED`, data files may be missing.

    Example:
      >>> from fedjax_mm.experiments.axes import Range
      >>> validate(Range, {"start": 1, "stop": 100, "num": 3}, ["scale=log"]).values()
      [1.0, 10.0, 100.0]
      >>> validate(Range, {"start": 1, "stpo": 100, "num": 3})
      Traceback (most recent call last):
      ValueError: stop: missing; stpo = 100: unknown key, did you mean 'stop'?
    """
    try:
        for override in overrides:
            values = _with_override(values, override)
        if _is_too_deep(values):
            raise ValueError(_TOO_DEEP)
        try:
            return kind.model_validate(values, context=context)
        except ValidationError as error:
            words = "; ".join(in_words(error, kind, values))
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    raise ValueError(" ".join(words.split()))  # keys may contain line breaks


def _is_too_deep(values: Mapping[str, Any]) -> bool:
    # Do not rely on RecursionError, because its depth depends on the version of Python.
    level: list[Any] = [values]
    for _ in range(_DEEPEST):
        contents = (each.values() if isinstance(each, Mapping) else each for each in level)
        level = [each for inner in contents for each in inner if isinstance(each, Mapping | list)]
    return bool(level)


def _with_override(values: dict[str, Any], override: str) -> dict[str, Any]:
    """Applies one ``key.path=value``, whose value is TOML or a plain word."""
    path, equals, text = override.partition("=")
    if not (path and equals):
        raise ValueError(f"--set {override}: write it as key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # TOML has no bare words, and shells remove quotes
    return replaced(values, path.strip().split("."), value)


def replaced(values: Mapping[str, Any] | Config, path: Sequence[str], value: Any) -> dict[str, Any]:
    """Sets a new value at a path of some settings, adding missing tables.

    Tables on the path become dictionaries, and other tables are unchanged.
    """
    head, *rest = path
    plain = settings_of(values) if isinstance(values, Config) else values
    if rest:
        inner = plain.get(head)
        value = replaced(inner if isinstance(inner, Mapping | Config) else {}, rest, value)
    return {**plain, head: value}


def settings_of(table: Config) -> dict[str, Any]:
    """The settings given explicitly in a table, without converting inner tables."""
    return {key: value for key, value in table if key in table.model_fields_set}


def changes(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Lists the overrides ``key.path=value`` that turn the defaults into these values.

    None is omitted, because a file cannot express it.

    Example:
      >>> defaults = {"num_rounds": 9, "task": {"mu": 0.1, "start": "normal"}}
      >>> changes({"num_rounds": 5, "task": {"mu": 0.1, "start": "zeros"}}, defaults)
      ['num_rounds=5', 'task.start=zeros']
    """
    found = []
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping) and {*value} >= {*default}:
            found += [f"{key}.{change}" for change in changes(value, default)]
        elif value != default and value is not None:
            is_word = isinstance(value, str) and _with_override({}, f"key={value}") == {
                "key": value
            }
            found.append(f"{key}={value if is_word else _in_toml(value)}")
    return found


def _in_toml(value: Any) -> str:
    if isinstance(value, Mapping):
        given = {json.dumps(key): each for key, each in value.items() if each is not None}
        entries = (f"{key} = {_in_toml(each)}" for key, each in given.items())
        return f"{{ {', '.join(entries)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_in_toml, value))}]"
    # Use JSON for other values, because it matches TOML except for infinities and NaN.
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
