"""JSON schemas of the fields of bodies, by name: made from what checks them.

Those of `SamplingParams` are made from its fields, others from the kinds that the parser of the
body has. A field without either takes any value here.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.chat.message_fields import MESSAGE
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.described.bodies import Body
from nanovllm.server.json_words import in_json_words
from nanovllm.utils.option import NOTHING, Option, options_of
from nanovllm.utils.other_names import OtherName

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def listed(items: Schema) -> Schema:
    """The schema of a list of these."""
    return {"type": "array", "items": items}


COMPONENTS: dict[str, Schema] = {
    "Prompt": {"description": "a text, or token ids", "anyOf": [TEXT, IDS]},
    "Prompts": {
        "description": "a text, token ids, or a list of either",
        "anyOf": [TEXT, IDS, listed({"$ref": "#/components/schemas/Prompt"})],
    },
    "Message": {
        "description": "it may also have fields that the chat template reads",
        "type": "object",
        "properties": {
            **{name: {} for name in MESSAGE},
            "role": TEXT,
            "content": {"anyOf": [TEXT, listed(OBJECT), {"type": "null"}]},
        },
        "required": ["role"],
    },
    "Error": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": TEXT,
                    "type": TEXT,
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
                "required": ["message", "type"],
            }
        },
        "required": ["error"],
    },
    "MessagesError": {  # of Anthropic's API
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["error"]},
            "error": {
                "type": "object",
                "properties": {"type": TEXT, "message": TEXT},
                "required": ["type", "message"],
            },
        },
        "required": ["type", "error"],
    },
}
# The types of JSON for those of annotations; their keywords do not disturb one another.
TYPES: dict[Any, Schema] = {
    int: {"type": "integer"}, float: {"type": "number"}, bool: {"type": "boolean"}, str: TEXT,
    Iterable[int]: IDS, Iterable[str]: listed(TEXT),
    Mapping[int, float]: OBJECT | {"additionalProperties": {"type": "number"}},
}  # fmt: skip
RANGE = re.compile(r"(>=?) (\S+)|in ([\[(])(\S+), (\S+)\]")  # as `allowed_range` writes it


def field_schemas(body: Body, limits: Mapping[str, Schema]) -> dict[str, Schema]:
    """The schema of each field that a body may have. Names that only Python takes are left out.

    `limits` are keywords, by names of fields, for what this server allows.
    """
    options, kinds = options_of(SamplingParams), _annotations()
    found: dict[str, Schema] = {}
    for name in body.names:
        if name in options and options[name].only_python:
            continue
        schema = _of_option(options[name], kinds[name]) if name in options else {}
        if name in body.kinds:
            schema = {key: schema[key] for key in schema if key == "description"}
            schema |= body.kinds[name].schema
        schema = schema | limits.get(name, {})
        found[name] = schema if name in body.required else or_null(schema)
    return found | _other_schemas(body.others)


def or_null(schema: Schema) -> Schema:
    """The schema of a field that may be null, which counts as missing."""
    if "enum" in schema:
        schema = schema | {"enum": [*schema["enum"], None]}
    if "type" in schema:
        kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        return schema | {"type": [*kinds, "null"]}
    return {"anyOf": [schema, {"type": "null"}]} if "$ref" in schema else schema


def _other_schemas(others: Mapping[str, OtherName]) -> dict[str, Schema]:
    """The schemas of fields that accept few values; null counts as a missing field."""
    return {
        name: {
            "description": other.why.replace("`", ""),
            "enum": [None, *(value for value in other.accepts if value is not None)],
        }
        for name, other in others.items()
    }


def _annotations() -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(SamplingParams)}


def _of_option(option: Option, annotation: Any) -> Schema:
    """The schema of a field: its type and its range, and in words what it does."""
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else [annotation]
    schemas = [TYPES.get(part, OBJECT) for part in parts if part is not types.NoneType]
    names = list(dict.fromkeys(schema["type"] for schema in schemas))
    says = f"{option.help.replace('`', '')}; must be {in_json_words(option.rule.allowed)}"
    if option.none not in (None, NOTHING):
        says += f"; null: {option.none}".replace("`", "")
    found: Schema = {"description": says}
    for schema in schemas:
        found |= schema
    found["type"] = names[0] if len(names) == 1 else names
    return found | bounds(option.rule.allowed)


def bounds(allowed: str) -> Schema:
    """The keywords of a range, which a rule says in words; none if it is no range."""
    if (found := RANGE.fullmatch(allowed)) is None:
        return {}
    sign, only, opening, low, high = found.groups()
    if only is not None:
        return {"exclusiveMinimum" if sign == ">" else "minimum": _number(only)}
    lowest = "exclusiveMinimum" if opening == "(" else "minimum"
    return {lowest: _number(low), "maximum": _number(high)}


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)
