"""`response_format`: whether an answer is text or JSON."""

from collections.abc import Mapping
from typing import Any

from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.utils.checks import check_name
from nanovllm.utils.json_text import check_json_bool, shorten_json

TYPES = ("text", "json_object", "json_schema", "structural_tag")
FIELDS = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "json_schema"),
    "structural_tag": ("type", "triggers", "structures", "format"),
}
SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def structured_of(given: Any) -> StructuredOutputs | None:
    """The constraint of a `response_format`; None for any text.

    A schema applies whether it is `strict` or not.
    """
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind not in TYPES:
        raise ValueError(
            f"response_format must be an object whose type is one of {', '.join(TYPES)},"
            f" got {shorten_json(given)}"
        )
    for name in given:
        check_name(name, FIELDS[kind], "response_format: ")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputs(structural_tag=given)
    schema = _schema(given.get("json_schema"))
    try:
        return StructuredOutputs(json=schema)
    except (TypeError, ValueError) as error:
        raise type(error)(f"response_format: {error}") from None


def _schema(described: Any) -> Any:
    """The schema of a `json_schema`."""
    place = "response_format.json_schema"
    if not isinstance(described, Mapping) or "schema" not in described:
        raise ValueError(
            f'{place} must be {{"name": ..., "schema": {{...}}}}, got {shorten_json(described)}'
        )
    for name in described:
        check_name(name, SCHEMA_FIELDS, f"{place}: ")
    if described.get("strict") is not None:
        check_json_bool(f"{place}.strict", described["strict"])
    return described["schema"]
