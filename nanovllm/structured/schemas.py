"""Check JSON schemas: refuse what llguidance would silently ignore, with its place."""

import json
import re
from collections.abc import Iterator
from typing import Any

from nanovllm.structured.costs import check_pattern
from nanovllm.utils.checks import did_you_mean, shorten

# Keywords with a schema or a list of schemas; keywords with schemas by names.
PARTS = (
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items",
    "not", "oneOf", "prefixItems", "propertyNames", "then", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip
NAMED_PARTS = (
    "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties",
)  # fmt: skip
VALUES = (
    "$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$ref", "$schema", "const",
    "dependentRequired", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxContains",
    "maxItems", "maxLength", "maxProperties", "maximum", "minContains", "minItems", "minLength",
    "minProperties", "minimum", "multipleOf", "pattern", "required", "type", "uniqueItems",
)  # fmt: skip
NOTES = (
    "$comment", "$vocabulary", "contentEncoding", "contentMediaType", "contentSchema", "default",
    "deprecated", "description", "discriminator", "example", "examples", "id", "nullable",
    "readOnly", "title", "writeOnly",
)  # fmt: skip
REFUSED = {
    "disallow": "the keyword of draft 3 is not supported",
    "divisibleBy": "the keyword of draft 3 is not supported; see multipleOf",
    "extends": "the keyword of draft 3 is not supported; see allOf",
    "x-guidance": "it is not supported; see the whitespace options of structured_outputs",
}
# For keywords that llguidance does not know: values with which they have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dependencies": ({},), "dependentRequired": ({},), "dependentSchemas": ({},), "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}), "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}), "uniqueItems": (False,),
}  # fmt: skip
# Strings may have only those control characters for which JSON has a letter.
CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00(?:[01].|7f)")
# llguidance uses stack for each level, and overflows at two to three times this number.
MOST_LEVELS = 1_000
MOST_NAME = 200  # characters of a name in a place
# Properties of an object: the time to compile them grows by their square. llguidance refuses more
# than 500 that may be left out, but only after this time.
MOST_OPTIONAL, MOST_PROPERTIES = 1_000, 10_000
MOST_ANNOTATIONS = 1_000  # names that are compared with all keywords
HOME = re.compile(r"#.*?/(?:\$defs|definitions)/[^/]*|#")
KNOWN = (*PARTS, *NAMED_PARTS, *VALUES, *NOTES)


def subschemas(schema: Any, path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all schemas within it that are objects, with their places."""
    left = [(path, schema)]
    while left:
        path, schema = left.pop()
        if not isinstance(schema, dict):
            continue
        yield path, schema
        left += [(place, holder[key]) for place, holder, key in children(schema, path)]


def children(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any, Any]]:
    """The schemas directly within a schema: for each its place, its container, and its key."""
    for name in PARTS:
        part = schema.get(name)
        if isinstance(part, list):
            yield from ((f"{path}/{name}/{index}", part, index) for index in range(len(part)))
        elif name in schema:
            yield f"{path}/{name}", schema, name
    for name in NAMED_PARTS:
        parts = schema.get(name)
        if isinstance(parts, dict):
            yield from (
                (f"{path}/{name}/{_short(key, number)}", parts, key)
                for number, key in enumerate(parts)
            )


def _short(key: str, number: int) -> str:
    """A name in a place. Long ones get a number: places of 10,000 parts in it need memory, too."""
    return key if len(key) <= MOST_NAME else f"{key[:MOST_NAME]}...({number})"


def without_neutral(schema: Any) -> Any:
    """The schema without keywords that llguidance does not know, if they have no effect."""
    if not any(_neutral(part) for _, part in subschemas(schema)):
        return schema
    schema = json.loads(json.dumps(schema))  # a copy
    for _, part in subschemas(schema):
        for name in _neutral(part):
            del part[name]
    return schema


def _neutral(part: dict[str, Any]) -> list[str]:
    """The names of such keywords. A keyword of a pair has no meaning without the other one."""
    names = [
        name
        for name, values in NEUTRAL.items()
        if any(type(part.get(name)) is type(one) and part[name] == one for one in values)
    ]
    if "contains" not in part:
        names += ["minContains", "maxContains"]
    elif part.get("minContains") == 0 and "maxContains" not in part:
        names += ["contains", "minContains"]
    if "if" not in part:
        names += ["then", "else"]
    elif "then" not in part and "else" not in part:
        names.append("if")
    return [name for name in names if name in part]


def check_schema(schema: Any, root: str = "#") -> None:
    """Refuse keywords that would have no effect, and numbers of properties that it cannot count.

    Other names that JSON Schema does not know are annotations, unless they look like typing errors.
    """
    if _levels(schema) > MOST_LEVELS:
        raise ValueError(f"{root}: its definitions have more than {MOST_LEVELS} levels")
    annotations = set[str]()
    for path, part in subschemas(schema, root):
        for name in part.keys() - annotations:
            if name in REFUSED:
                raise ValueError(f"{path}/{name}: {REFUSED[name]}")
            if name in KNOWN or name.startswith("x-"):
                continue
            if hint := did_you_mean(name, KNOWN):
                raise ValueError(f"{path}: JSON Schema has no {shorten(name)}{hint}")
            annotations.add(name)
            if len(annotations) > MOST_ANNOTATIONS:
                raise ValueError(
                    f"{path}: at most {MOST_ANNOTATIONS} names that JSON Schema does not know are"
                    " allowed, if they do not begin with x-"
                )
        for name in ("const", "enum"):
            found = CONTROL.search(json.dumps(part.get(name)).replace("\x7f", "\\u007f"))
            if found:
                raise ValueError(f"{path}/{name}: no string is written with {found[0][-6:]}")
        least, required = part.get("minProperties"), part.get("required")
        required = set(map(str, required) if isinstance(required, list) else ())
        _check_costs(path, part, required)
        countable = 1 + len(required)
        if isinstance(least, int) and least > countable:
            raise ValueError(
                f"{path}/minProperties: must be <= {countable}, got {least}: of properties that"
                " are not in required, names could occur twice"
            )


def _check_costs(path: str, part: dict[str, Any], required: set[str]) -> None:
    """Refuse patterns and objects that llguidance would compile for minutes."""
    properties, patterns = part.get("properties"), part.get("patternProperties")
    names = properties.keys() if isinstance(properties, dict) else set[str]()
    if len(names - required) > MOST_OPTIONAL:
        raise ValueError(
            f"{path}: at most {MOST_OPTIONAL} properties may be left out, got"
            f" {len(names - required)}; others must be in required"
        )
    if len(names | required) > MOST_PROPERTIES:
        raise ValueError(
            f"{path}: at most {MOST_PROPERTIES} properties are possible, got"
            f" {len(names | required)}"
        )
    for pattern in (part.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
        if isinstance(pattern, str):
            try:
                check_pattern(pattern)
            except ValueError as error:
                raise ValueError(f"{path}/pattern: {error}") from None


def _levels(schema: Any) -> int:
    """An upper bound of the depth of nested schemas, if definitions refer to the next ones."""
    deepest: dict[str, int] = {}
    others = set()
    for path, part in subschemas(schema):
        found = HOME.match(path)
        home = found[0] if found else "#"
        deepest[home] = max(deepest.get(home, 0), 1 + path.count("/") - home.count("/"))
        reference = part.get("$ref", "")
        if isinstance(reference, str) and HOME.fullmatch(reference) is None:
            others.add(reference)
    return sum(deepest.values()) + len(others - {""}) * max(deepest.values(), default=0)
