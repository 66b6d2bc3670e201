"""Docstrings and signatures as the reference shows them."""

import re
from collections.abc import Iterator
from typing import Any

from griffe import Extension, Function, Module, Object, Parameter, ParameterKind


class Docstrings(Extension):
    """Shows doctests as code, and the fields of `**keywords: Unpack[Fields]` as parameters."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Names the section of an example as griffe knows it."""
        if obj.docstring:
            section = re.compile(r"^( *)Example:(?: (.+))?$", re.MULTILINE)
            obj.docstring.value = section.sub(_examples, obj.docstring.value)

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Puts the fields of typed dictionaries into signatures."""
        for function in _functions(pkg):
            for given in list(function.parameters):
                if not str(given.annotation).startswith("Unpack["):
                    continue
                del function.parameters[given.name]
                fields = pkg.modules_collection[given.annotation.slice.canonical_path]
                for field in fields.attributes.values():
                    is_required = str(field.annotation).startswith("Required[")
                    kind = field.annotation.slice if is_required else field.annotation
                    default = None if is_required else "..."
                    named = Parameter(
                        field.name,
                        annotation=kind,
                        kind=ParameterKind.keyword_only,
                        default=default,
                    )
                    function.parameters.add(named)


def _examples(match: re.Match[str]) -> str:
    indent, words = match[1], match[2]
    return f"{indent}Examples:" + (f"\n{indent}  {words}\n" if words else "")


def _functions(module: Module) -> Iterator[Function]:
    for member in module.members.values():
        if member.is_alias:
            continue
        if member.is_module:
            yield from _functions(member)
        elif member.is_function:
            yield member
