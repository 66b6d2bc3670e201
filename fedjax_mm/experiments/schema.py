"""The JSON schema of experiment files, with which editors complete, explain and check them.

Files are read and validated in `overrides.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedjax_mm.experiments.axes import NEVER_SWEPT, NOT_SWEPT
from fedjax_mm.experiments.experiment import Experiment
from fedjax_mm.experiments.methods import DEFAULT_DELAYS, DEFAULT_METHOD

Schema = dict[str, Any]

FILE = "experiment.schema.json"
"""The name of the schema's file, to which the first line of an experiment file refers."""

MADE_BY = "made by fedjax-mm init"
_DIALECT = "http://json-schema.org/draft-07/schema#"  # the newest that Taplo supports
_WHOLE = {"type": "array", "minItems": 1}


def schema() -> Schema:
    """Makes the JSON schema of experiment files.

    It accepts every valid file, and rejects unknown keys and values of a wrong type or range. What
    concerns several keys at once is checked only when the file is read.

    Example:
      >>> made = schema()
      >>> made["properties"]["num_rounds"]["description"]
      'T, the number of rounds.'
    """
    made: Schema = _plain(Experiment.model_json_schema(ref_template="#/definitions/{model}"))
    tables = made.pop("$defs")
    for default in (DEFAULT_METHOD, DEFAULT_DELAYS):  # as in `named`
        tables[default]["required"].remove("name")
    made["properties"]["axes"] = _axes(made, tables)
    made["required"].remove("num_models")
    has_axis = {"required": ["axes"], "properties": {"axes": {"required": ["num_models"]}}}
    counted = {"anyOf": [{"required": [key]} for key in ("num_models", "tasks")] + [has_axis]}
    one = {"oneOf": [{"required": ["task"]}, {"required": ["tasks"]}]}
    return {
        "$schema": _DIALECT,
        "$comment": MADE_BY,
        **made,
        "allOf": [counted, one],
        "definitions": tables,
    }


def _plain(schema: Any) -> Any:
    """Rewrites pydantic's schema for TOML, which has no null, and for draft 7 of JSON Schema."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema if each != {"type": "null"}]
    if not isinstance(schema, dict):
        return schema
    left_out = {"discriminator"} if "propertyName" in schema.get("discriminator", ()) else set()
    left_out |= {"default"} if schema.get("default", ...) is None else set()
    left_out |= {"title"} if isinstance(schema.get("title"), str) else set()
    made = {key: _plain(value) for key, value in schema.items() if key not in left_out}
    if "prefixItems" in made:
        made["items"] = made.pop("prefixItems")
    if len(made.get("anyOf", ())) == 1:
        made |= made.pop("anyOf")[0]
    if "$ref" in made and len(made) > 1:  # draft 7 ignores keys next to a reference
        made["allOf"] = [{"$ref": made.pop("$ref")}]
    return made


def _axes(experiment: Schema, tables: dict[str, Schema]) -> Schema:
    """Makes the schema of the axes, after adding those of inner tables to the definitions."""
    heads = dict(experiment["properties"])
    methods = heads["algorithms"]["additionalProperties"]
    of_all = _by_key(_alternatives(methods, tables))
    values = {key: [value] for key, value in heads.items() if key not in NOT_SWEPT}
    values |= {key: value for key, value in of_all.items() if key not in values}
    made = _axes_of("axes", values, tables)
    dotted = {"anyOf": [_WHOLE, {"$ref": "#/definitions/Range"}, {"const": "seed"}]}
    made["patternProperties"] = {r"\.": dotted}  # quoted, as in "task.mu" = [0.1, 1.0]
    return made | {"description": heads["axes"]["description"]}


def _by_key(tables: Iterable[Schema]) -> dict[str, list[Schema]]:
    """The different schemas of each key in tables, of which a file has one."""
    found: dict[str, list[Schema]] = {}
    for table in tables:
        for key, value in table.get("properties", {}).items():
            same = found.setdefault(key, [])
            same += [] if value in same else [value]
    return found


def _axes_of(name: str, values: Mapping[str, list[Schema]], tables: dict[str, Schema]) -> Schema:
    """Makes the schema of a table of axes, for keys with these schemas of values."""
    keys = {
        key: _axis(f"{name}.{key}", schemas, tables)
        for key, schemas in values.items()
        if key not in NEVER_SWEPT
    }
    return {"type": "object", "additionalProperties": False, "properties": keys}


def _axis(name: str, values: list[Schema], tables: dict[str, Schema]) -> Schema:
    """Makes the schema of an axis: a list, a range, or a table of axes inside."""
    item = values[0] if len(values) == 1 else {"anyOf": values}
    kinds: list[Schema] = [_WHOLE | {"items": item}]
    found = [each for value in values for each in _alternatives(value, tables)]
    if any(each.get("type") in ("integer", "number") for each in found):
        kinds.append({"$ref": "#/definitions/Range"})
    if name.endswith(".data_seed"):
        kinds.append({"const": "seed"})
    if inside := _by_key(found):
        table = _axes_of(name, inside, tables)
        # Equal tables are one definition, because all algorithms have an `assignment`, for example.
        same = next((key for key, each in tables.items() if each == table), name)
        tables[same] = table
        kinds.append({"$ref": f"#/definitions/{same}"})
    each = [each["additionalProperties"] for each in found if each.get("additionalProperties")]
    if each and name.endswith(".algorithms"):
        one = _axes_of(name, _by_key(_alternatives(each[0], tables)), tables)
        kinds.append({"type": "object", "additionalProperties": one})
    about = {"description": values[0]["description"]} if "description" in values[0] else {}
    return {"anyOf": kinds} | about


def _alternatives(schema: dict[str, Any], definitions: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the alternatives in the JSON schema of a value, without references."""
    if "$ref" in schema:
        yield from _alternatives(definitions[schema["$ref"].rpartition("/")[2]], definitions)
        return
    kinds = [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key, ())]
    for each in kinds:
        yield from _alternatives(each, definitions)
    if not kinds:
        yield schema
