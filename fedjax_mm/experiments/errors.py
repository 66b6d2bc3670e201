"""Error messages for invalid settings, with the key, the value and the allowed values."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError

from fedjax_mm.experiments.fields import Config, tables_in

_MOST_PROBLEMS, _MOST_LETTERS = 10, 200  # limits on one message, and on one value in it


def in_words(error: ValidationError, kind: type[Config], values: Any) -> list[str]:
    """Lists the problems, one per key, as ``path = value: message``.

    If a value may have several types, pydantic reports an error for each of them. Only problems
    inside a table are kept or, for a plain value, the message of our own validator or else the
    first one. Long lists are truncated.
    """
    problems: dict[str, Any] = {}
    for problem in error.errors():
        path = _path(problem, values)
        if path not in problems or problem["type"] == "value_error":
            problems[path] = problem
    keys = [path.split(".") for path in problems]
    outer = {".".join(each[:depth]) for each in keys for depth in range(1, len(each))}
    inner = [path for path in problems if not path or path not in outer]
    rest = len(inner) - _MOST_PROBLEMS
    first = [_one_line(path, problems[path], kind, values) for path in inner[:_MOST_PROBLEMS]]
    return [*first, f"and {rest:,} more"] if rest > 0 else first


def _path(problem: Any, values: Any) -> str:
    """Joins the keys that lead to a problem, without the type names that pydantic inserts."""
    path = []
    for part in problem["loc"]:
        is_whole = isinstance(part, int) or not isinstance(values, dict) or part in values
        for key in [part] if is_whole else part.split("."):  # an axis may be a nested table
            if isinstance(values, dict):
                inside = key in values
            else:  # lists may be too short
                is_item = isinstance(values, list | tuple) and isinstance(key, int)
                inside = is_item and key < len(values)
            if inside:
                path.append(str(key))
                values = values[key]
    if problem["type"] in ("missing", "extra_forbidden"):
        last = str(problem["loc"][-1])
        if path[-1:] != [last]:  # missing, or implied by an axis
            path.append(last)
    if problem["type"].startswith("union_tag"):
        # The discriminator is the key that distinguishes tables, or a function with that name.
        path.append(str(problem["ctx"]["discriminator"]).strip("'()"))
    return ".".join(path)


def _one_line(path: str, problem: Any, kind: type[Config], values: Any) -> str:
    """Writes one problem as ``path = value: message``."""
    message = str(problem["msg"]).removeprefix("Value error, ").replace("tuple", "list")
    value = problem["input"]
    shown = (
        repr(value) if len(repr(value)) <= _MOST_LETTERS else f"{repr(value)[:_MOST_LETTERS]}..."
    )
    match problem["type"]:
        case "missing" | "union_tag_not_found":
            return f"{path}: missing"
        case "extra_forbidden":
            key, (names, keys) = str(problem["loc"][-1]), _table(kind, problem["loc"][:-1])
            owner = f" of {names[0]}" if len(names) == 1 else ""
            # Search only this table, because the keys of other tables would be wrong here too.
            close = [f"num_{key}"] if f"num_{key}" in keys else closest(key, keys)
            known = f"known keys{owner} are {', '.join(keys)}"
            hint = f"did you mean {close[0]!r}?" if close else known
            # Suggest full paths, because a key without its table is valid on axes and may be tried
            # here too.
            elsewhere = _elsewhere(key, values, alike=not close) if path == key else []
            if elsewhere:
                hint = f"give {' or '.join(elsewhere[:3])}"
            return f"{path} = {shown}: unknown key, {hint}"
        case "dict_type":
            return f"{path} = {shown}: give a table"
        case "model_type" | "model_attributes_type":
            names, keys = _table(kind, problem["loc"])
            inside = f" with {', '.join(keys)}" if keys else ""
            inside = f', such as {{ name = "{names[0]}" }}' if names else inside
            return f"{path} = {shown}: give a table{inside}"
        case "list_type" | "tuple_type":
            return f"{path} = {shown}: give a list"
        case "too_short":
            return f"{path} = {shown}: give at least {problem['ctx']['min_length']} value"
        case "union_tag_invalid":
            context = problem["ctx"]
            close = closest(str(context["tag"]), re.findall(r"'(.*?)'", context["expected_tags"]))
            like = f"did you mean {close[0]!r}? Or " if close else ""
            return f"{path} = {context['tag']!r}: {like}choose from {context['expected_tags']}"
        case "value_error" if isinstance(value, dict):  # the message lists the table's values
            return f"{path}: {message}" if path else message
    return f"{path} = {shown}: {message[0].lower()}{message[1:]}" if path else message


def _inside(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the keys in the tables of a file, including nested ones, and their paths."""
    for name, table in values.items():
        if isinstance(table, dict):
            yield from ((key, f"{name}.{key}") for key in table)
            yield from ((key, f"{name}.{path}") for key, path in _inside(table))


def _elsewhere(key: str, values: Mapping[str, Any], *, alike: bool) -> list[str]:
    """Finds the paths to a key in the tables of a file, or to the key most similar to it."""
    places = [*_inside(values)]
    known = {name for name, _ in places}
    names = [key] if key in known or not alike else closest(key, sorted(known))
    return [path for name, path in places if name in names]


def _table(kind: type[Config], location: Sequence[str | int]) -> tuple[list[str], list[str]]:
    """Finds the names of tables allowed at a location, if all have one, and their keys."""
    tables, is_label = [kind], False
    for part in location:
        if isinstance(part, int) or is_label:  # an item, whose tables all have the same type
            is_label = False
            continue
        chosen = [table for table in tables if part in (table.__name__, *_names(table))]
        inner = [table.model_fields[part] for table in tables if part in table.model_fields]
        if not chosen:
            is_label = any(get_origin(each.annotation) is dict for each in inner)
            found = [Annotated[each.annotation, *each.metadata, None] for each in inner]
            chosen = [table for each in found for table in tables_in(each)]
        tables = chosen or tables
    names = [name for table in tables for name in _names(table)]
    keys = sorted({key for table in tables for key in table.model_fields})
    return names if len(names) == len(tables) else [], keys


def _names(table: type[Config]) -> list[str]:
    """Lists the `name` that distinguishes a table from its alternatives, if it has one."""
    fields = table.model_fields
    return [*get_args(fields["name"].annotation)] if "name" in fields else []


def closest(key: str, keys: Sequence[str]) -> list[str]:
    """Finds the key most similar to a given one, or nothing if none is similar."""
    return difflib.get_close_matches(key, keys, n=1, cutoff=0.7)
