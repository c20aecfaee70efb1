"""JSON schemas whose objects have no properties but those that are named."""

from typing import Any

NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
VALUES = ("const", "default", "enum", "example", "examples")  # they contain no schemas


def closed(schema: Any) -> Any:
    """The schema, with `additionalProperties: false` where objects with properties say nothing."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _closed_part(name, part) for name, part in schema.items()}
    says = "additionalProperties" in made or "unevaluatedProperties" in made
    if not says and ("properties" in made or "patternProperties" in made):
        made["additionalProperties"] = False
    return made


def _closed_part(name: str, part: Any) -> Any:
    if name in VALUES:
        return part
    if name in NAMED and isinstance(part, dict):
        return {key: closed(one) for key, one in part.items()}
    return closed(part)
