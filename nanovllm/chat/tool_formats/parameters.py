"""The parameters of a tool one by one, for formats that do not write its arguments as JSON."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from nanovllm.chat.tools import Tool

DEFINITIONS = ("$defs", "definitions")
# Keywords of the whole object that a list of parameters cannot follow.
REFUSED = (
    "allOf", "anyOf", "oneOf", "const", "enum", "maxProperties", "minProperties",
    "patternProperties",
)  # fmt: skip
WHOLE = ("properties", "required")  # next to a reference
ANYTHING = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
FIRSTS = {
    '"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null",
}  # fmt: skip
MOST_REFERENCES = 100  # the longest chain of references


class Parameter(NamedTuple):
    """A property of a tool's arguments. `schema` has the definitions that it may refer to."""

    name: str
    schema: Mapping[str, Any]
    is_required: bool


def parameters_of(format_name: str, tool: Tool, names: re.Pattern[str]) -> list[Parameter]:
    """The parameters in the order of `properties`, then others that are required.

    A name that `names` does not match is a ValueError, and so is a schema of the whole object that
    requires more than the schemas of its parameters.
    """
    schema = resolved(tool.parameters, tool.parameters)
    where = f"the tool parser {format_name!r} cannot call {tool.name!r}"
    found = [name for name in REFUSED if name in schema]
    if "$ref" in tool.parameters:
        found += [name for name in (*REFUSED, *WHOLE) if name in tool.parameters]
    if found:
        raise ValueError(f"{where}: its parameters have the keyword {found[0]}")
    required = schema.get("required", [])
    parts = dict(schema.get("properties", {}))
    for name in required:
        parts.setdefault(name, schema.get("additionalProperties", {}))
    for name in (tool.name, *parts):
        if not name or not names.fullmatch(name):
            raise ValueError(f"{where}: it has no way to write the name {name!r}")
        if name in required and parts[name] is False:
            raise ValueError(f"{where}: {name!r} is required and not allowed")
    return [
        Parameter(name, _with_definitions(part, tool.parameters), name in required)
        for name, part in parts.items()
        if part is not False
    ]


def others_of(tool: Tool) -> Mapping[str, Any] | None:
    """The schema of any parameter, if `tool` names none and allows some; else None."""
    schema = resolved(tool.parameters, tool.parameters)
    others = schema.get("additionalProperties", True)
    if others is False or schema.get("properties") or schema.get("required"):
        return None
    return _with_definitions(others, tool.parameters)


def parameter_types(tool: Tool | None, name: str) -> frozenset[str]:
    """The JSON types that the value of a parameter may have; all if the schema names none."""
    if tool is None:
        return ANYTHING
    if name not in tool.types:  # an answer may repeat a parameter, and its schema may be long
        schema = resolved(tool.parameters, tool.parameters)
        others = schema.get("additionalProperties", {})
        found = schema.get("properties", {}).get(name, others)
        tool.types[name] = types_of(found, tool.parameters)
    return tool.types[name]


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; `root` has what it refers to."""
    return _types(schema, root, {})


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema, or the schema that it refers to."""
    for _ in range(MOST_REFERENCES):
        if "$ref" not in schema:
            return schema
        schema = pointed_at(schema["$ref"], root)
    return {}


def pointed_at(reference: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema at a JSON pointer; one without keywords if there is none."""
    place: Any = root
    for part in str(reference).removeprefix("#").split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place if isinstance(place, Mapping) else {}


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parameter's schema by itself. Definitions are copied only if it refers to something."""
    if schema is True:
        return {}
    if '"$ref"' not in json.dumps(schema):
        return dict(schema)
    return {**schema, **{name: root[name] for name in DEFINITIONS if name in root}}


def _types(
    schema: Any, root: Mapping[str, Any], by_reference: dict[str, frozenset[str]]
) -> frozenset[str]:
    """The types that a schema allows. What it refers to is looked at once."""
    if not isinstance(schema, Mapping):
        return ANYTHING
    allowed = [ANYTHING]
    if "type" in schema:
        named = schema["type"]
        allowed.append(frozenset([named] if isinstance(named, str) else map(str, named)))
    if "const" in schema:
        allowed.append(frozenset([type_of(json.dumps(schema["const"]))]))
    if "enum" in schema:
        allowed.append(frozenset(type_of(json.dumps(value)) for value in schema["enum"]))
    for name in ("anyOf", "oneOf"):
        if name in schema:
            parts = [_types(part, root, by_reference) for part in schema[name]]
            allowed.append(frozenset().union(*parts))
    allowed += [_types(part, root, by_reference) for part in schema.get("allOf", ())]
    if "$ref" in schema:
        reference = str(schema["$ref"])
        if reference not in by_reference:
            by_reference[reference] = ANYTHING  # until it is known, if it refers to itself
            target = pointed_at(reference, root)
            by_reference[reference] = _types(target, root, by_reference)
        allowed.append(by_reference[reference])
    return frozenset.intersection(*(_with_integers(types) for types in allowed))


def _with_integers(types: frozenset[str]) -> frozenset[str]:
    return types | {"integer"} if "number" in types else types


def type_of(text: str) -> str:
    """The type of a JSON value, by its text."""
    if text[0] in FIRSTS:
        return FIRSTS[text[0]]
    return "number" if set(text) & set(".eE") else "integer"
