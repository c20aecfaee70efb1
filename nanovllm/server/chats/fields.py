"""Fields of bodies that are translated into chats, and errors that name them as their API does."""

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nanovllm.server.errors import APIError
from nanovllm.utils.checks import check_name, check_text
from nanovllm.utils.json_text import shorten_json


def given_fields(
    value: Any, known: Collection[str], refused: Mapping[str, str], place: str = ""
) -> dict[str, Any]:
    """The fields of an object that are not null; others than `known` ones are errors.

    `refused` says why a field of the API is an error here, or what to use instead.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{place} must be an object, got {shorten_json(value)}")
    given = {name: item for name, item in value.items() if item is not None}
    for name in given:
        where = f"{place}.{name}" if place else name
        if name in refused and name not in known:
            raise ValueError(f"{where} is not supported: {refused[name]}")
        check_name(name, known, f"{place}: " if place else "")
    return given


def check_fixed(
    given: Mapping[str, Any], fixed: Mapping[str, tuple[Any, str]], place: str = ""
) -> None:
    """Raise for fields with another than their only value; each says why."""
    for name, (value, why) in fixed.items():
        if name in given and (given[name] != value or type(given[name]) is not type(value)):
            only, got = shorten_json(value), shorten_json(given[name])
            raise ValueError(f"{place}{name} must be {only} here, got {got}: {why}")


def text_in(value: Any, place: str) -> str:
    """The value, which must be a text."""
    if not isinstance(value, str):
        raise TypeError(f"{place} must be a text, got {shorten_json(value)}")
    check_text(place, value)
    return value


def list_in(value: Any, place: str) -> list[Any]:
    """The value, which must be a list."""
    if not isinstance(value, list):
        raise TypeError(f"{place} must be a list, got {shorten_json(value)}")
    return value


def kind_of(value: Any, place: str, kinds: Collection[str], default: str | None = None) -> str:
    """The `type` of an object, which must be one of `kinds`."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{place} must be an object, got {shorten_json(value)}")
    kind = value.get("type", default)
    if kind not in kinds:
        allowed = f"one of {', '.join(kinds)}" if len(kinds) > 1 else next(iter(kinds))
        raise ValueError(f"{place}.type must be {allowed}, got {shorten_json(kind)}")
    return str(kind)


def joined_texts(content: Any, place: str, kinds: Collection[str], known: Collection[str]) -> str:
    """A content that is a text, or a list of parts with one: one line for each part.

    The text of a `refusal` has this name, all others are `text`.
    """
    if isinstance(content, str):
        return text_in(content, place)
    texts = []
    for index, part in enumerate(list_in(content, place)):
        where = f"{place}[{index}]"
        name = "refusal" if kind_of(part, where, kinds) == "refusal" else "text"
        part = given_fields(part, (*known, "type", name), {}, where)
        texts.append(text_in(part.get(name), f"{where}.{name}"))
    return "\n".join(texts)


@contextlib.contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Replace the names of a chat's fields in errors by those of an API's own fields.

    `names` has patterns and what replaces them, in the order of their use.
    """
    try:
        yield
    except (APIError, ValueError, TypeError) as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (renamed(error.args[0], names), *error.args[1:])
        raise


def renamed(message: str, names: Mapping[str, str]) -> str:
    """The message with other names, up to the value that it may quote.

    A name of one word is one only where the message begins: elsewhere it may be a plain word.
    """
    head, got, value = message.partition(", got ")
    for pattern, own in names.items():
        start = r"(?<![\w.])" if "_" in pattern else "^"
        head = re.sub(rf"{start}{pattern}(?=[ .,\[:]|$)", own, head)
    return head + got + value
