"""Strategies for wrong inputs: corrupted bytes, corrupted JSON, and tables from a schema."""

import copy
import gzip

from hypothesis import strategies as st

WORDS = [
    "",
    "x",
    "[/x]",
    "\ud83d",
    "é\n",
    "../..",
    "1e999",
    "name",
    "seed",
    "a" * 300,
    "0",
    "{}",
    "%s",
]
NUMBERS = [0, 1, 2, 3, -1, 0.5, 0.0, -0.5, 1e-300, 1e300, 2**31 - 1, 2**31, 2**63, 10**30]
LEAVES = st.sampled_from(
    [*WORDS, *NUMBERS, float("nan"), float("inf"), True, False, None, [], {}, [[]], [0, "x"]]
).map(copy.deepcopy)  # because `changed` modifies values in place
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3)
    ),
    max_leaves=4,
)


@st.composite
def spoilt(draw, content: bytes) -> bytes:
    """The content with some bytes removed, changed, doubled or inserted."""
    is_gz = content[:2] == b"\x1f\x8b" and draw(
        st.booleans()
    )  # corrupt the content below the checksum
    content = gzip.decompress(content) if is_gz else content
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(content)))
        size = draw(st.sampled_from([0, 1, 1, 2, 8, 50]))
        kind = draw(st.sampled_from(["cut", "end", "put", "double"]))
        if kind == "end":
            content = content[:place]
        elif kind == "double":
            content = content[:place] + content[place : place + size] + content[place:]
        else:
            new = b"" if kind == "cut" else draw(st.binary(min_size=size, max_size=size))
            content = content[:place] + new + content[place + size :]
    return gzip.compress(content, mtime=0) if is_gz else content


def places(value, path=()):
    """Yields the paths of all values inside, recursively."""
    yield path
    is_list = isinstance(value, list)
    items = enumerate(value) if is_list else value.items() if isinstance(value, dict) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@st.composite
def changed(draw, value, others=VALUES):
    """The value with some inner values deleted or replaced."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(value))))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return draw(others)
            continue
        *way, last = path
        inner = value
        for key in way:
            inner = inner[key]
        if draw(st.booleans()):
            inner[last] = draw(others)
        else:
            del inner[last]
    return value


def of_schema(schema, root, depth=4):
    """Mostly valid values of a JSON schema that cover all its tables and keys."""
    if "$ref" in schema:
        return of_schema(root["$defs"][schema["$ref"].rpartition("/")[2]], root, depth)
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if kinds := [*schema.get("anyOf", []), *schema.get("oneOf", [])]:
        each = [st.deferred(lambda kind=kind: of_schema(kind, root, depth)) for kind in kinds]
        return st.one_of(each) if depth else LEAVES
    more = depth - 1
    match schema.get("type"):
        case "object" if depth:
            own = {
                key: st.deferred(lambda inner=inner: of_schema(inner, root, more))
                for key, inner in schema.get("properties", {}).items()
            }
            needed = {key: x for key, x in own.items() if key in schema.get("required", [])}
            rest = {key: x for key, x in own.items() if key not in needed}
            table = st.fixed_dictionaries(needed, optional=rest)
            if not own and isinstance(schema.get("additionalProperties"), dict):
                inner = of_schema(schema["additionalProperties"], root, more)
                return st.dictionaries(st.sampled_from(["A", "B", *WORDS]), inner, max_size=2)
            return table
        case "array" if depth:
            return st.lists(of_schema(schema.get("items", {}), root, more), max_size=3)
        case "integer" | "number":
            return st.sampled_from([1, 2, 3, 0.1]) | st.sampled_from(NUMBERS)
        case "boolean":
            return st.booleans()
    return LEAVES
