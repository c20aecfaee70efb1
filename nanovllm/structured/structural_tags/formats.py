"""The formats of structural tags: their fields, and checks of these."""

from collections.abc import Iterator, Mapping
from typing import Any

from nanovllm.utils.checks import did_you_mean, shorten

# The fields of each format: those that it must have, and others.
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "const_string": (("value",), ()),
    "json_schema": (("json_schema",), ("style", "any_order")),
    "grammar": (("grammar",), ()),
    "regex": (("pattern",), ()),
    "any_text": ((), ("excludes",)),
    "sequence": (("elements",), ()),
    "or": (("elements",), ()),
    "optional": (("content",), ()),
    "plus": (("content",), ()),
    "star": (("content",), ()),
    "repeat": (("content", "min", "max"), ()),
    "tag": (("begin", "content", "end"), ()),
    "triggered_tags": (("triggers", "tags"), ("at_least_one", "stop_after_first", "excludes")),
    "tags_with_separator": (("tags", "separator"), ("at_least_one", "stop_after_first")),
    "dispatch": (("rules",), ("loop", "excludes")),
    "token": (("token",), ()),
    "exclude_token": ((), ("exclude_tokens",)),
    "any_tokens": ((), ("exclude_tokens", "max_tokens")),
    "token_triggered_tags": (
        ("trigger_tokens", "tags"), ("at_least_one", "stop_after_first", "exclude_tokens"),
    ),
    "token_dispatch": (("rules",), ("loop", "exclude_tokens")),
}  # fmt: skip
Mark = str | int  # a text, or a token by its id
Format = Mapping[str, Any]


def schemas_in(described: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The schemas of a structural tag, with their places."""
    if isinstance(described, dict | list):
        items = described.items() if isinstance(described, dict) else enumerate(described)
        for name, value in items:
            inner = f"{path}/{name}" if path else str(name)
            if name in ("schema", "json_schema"):
                yield inner, value
            else:
                yield from schemas_in(value, inner)


def older_form(described: Format) -> Format:
    """Convert the form with triggers and structures to a format."""
    tags = []
    for index, part in enumerate(listed("structures", described["structures"], dict)):
        if set(part) != {"begin", "schema", "end"}:
            raise ValueError(
                f"structures/{index} must have texts `begin` and `end` and a `schema`,"
                f" got {shorten(part)}"
            )
        content = {"type": "json_schema", "json_schema": part["schema"]}
        tags.append({"begin": part["begin"], "content": content, "end": part["end"]})
    return {"type": "triggered_tags", "triggers": described["triggers"], "tags": tags}


def kind_of(place: str, node: Any) -> str:
    """The type of a format; its fields are checked."""
    if not isinstance(node, dict) or "type" not in node:
        raise TypeError(f"{place} must be an object with a `type`, got {shorten(node)}")
    kind = node["type"]
    if not isinstance(kind, str) or kind not in FORMATS:
        hint = did_you_mean(kind, FORMATS) if isinstance(kind, str) else ""
        known = hint or f"; there are {', '.join(FORMATS)}"
        raise ValueError(f"{place}: no format has the type {shorten(kind)}{known}")
    needed, others = FORMATS[kind]
    missing = [name for name in needed if name not in node]
    if missing:
        raise ValueError(f"{place}: {kind} must have {missing[0]!r}")
    fields = ("type", *needed, *others)
    unknown = [name for name in node if name not in fields]
    if unknown:
        hint = did_you_mean(unknown[0], fields)
        raise ValueError(f"{place}: {kind} has no {unknown[0]!r}{hint or ' here'}")
    return kind


def as_list(value: Any) -> list[Any]:
    """A list as it is, another value as a list of one."""
    return value if isinstance(value, list) else [value]


def listed(place: str, values: Any, kind: Any, empty: bool = False) -> list[Any]:
    """The list, after a check that its items are of this kind."""
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        what = {str: "texts", dict: "objects", list: "pairs"}.get(kind, "tokens")
        raise TypeError(f"{place} must be a list of {what}, got {shorten(values)}")
    if not values and not empty:
        raise ValueError(f"{place} must not be empty")
    return values


def text_of(place: str, value: Any) -> str:
    """The value, after a check that it is a text."""
    if not isinstance(value, str):
        raise TypeError(f"{place} must be a text, got {shorten(value)}")
    return value


def texts_of(place: str, node: Format, name: str) -> list[str]:
    """The texts of a field, which may be missing."""
    texts = listed(f"{place}/{name}", node.get(name, []), str, empty=True)
    if "" in texts:
        raise ValueError(f"{place}/{name} must be texts that are not empty, got {shorten(texts)}")
    return texts


def flag_of(place: str, node: Format, name: str, default: bool = False) -> bool:
    """The value of a field that is true or false."""
    value = node.get(name, default)
    if not isinstance(value, bool):
        raise TypeError(f"{place}/{name} must be true or false, got {shorten(value)}")
    return value


def count_of(place: str, value: Any, least: int = 0) -> int:
    """The value, after a check that it is an int."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{place} must be an int >= {least}, got {shorten(value)}")
    return value
