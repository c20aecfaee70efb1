"""Turns of users and of the assistant, with their blocks, as messages of a chat."""

from collections.abc import Iterator, Mapping
from typing import Any

from nanovllm.server.chats.fields import given_fields, joined_texts, kind_of, list_in, text_in
from nanovllm.utils.checks import check_choice
from nanovllm.utils.json_text import check_json_bool, shorten_json

KINDS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use")}
FIELDS = {
    "text": ("text",),
    "thinking": ("thinking", "signature"),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
# How a client wants prompts to be cached; every prefix is.
COMMON = ("type", "cache_control")
REFUSED = {"citations": "there are no documents to cite"}
FAILED = "Error: "  # in front of the result of a call that has failed: chats have no field for it


def messages_of(turns: Any, system: Any) -> list[dict[str, Any]]:
    """The messages of all turns, after one of the system's."""
    found: list[dict[str, Any]] = []
    if system is not None:
        found.append({"role": "system", "content": _texts(system, "system")})
    for index, turn in enumerate(list_in(turns, "messages")):
        found += _messages(turn, f"messages[{index}]")
    return found


def _messages(turn: Any, place: str) -> Iterator[dict[str, Any]]:
    """The messages of one turn: results of calls are messages of their own."""
    given = given_fields(turn, ("role", "content"), {}, place)
    role = check_choice(f"{place}.role", given.get("role"), tuple(KINDS))
    content = given.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": text_in(content, f"{place}.content")}
        return
    blocks = list(_blocks(content, f"{place}.content", role))
    if role == "assistant":
        yield _answer(blocks, f"{place}.content")
        return
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            texts.append(block["text"])
            continue
        if texts:
            yield _said(texts)
            texts = []
        yield _result(block, f"{place}.content[{index}]")
    if texts or not blocks:
        yield _said(texts)


def _blocks(content: Any, place: str, role: str) -> Iterator[dict[str, Any]]:
    """The blocks of a turn, with the fields that they have."""
    for index, block in enumerate(list_in(content, place)):
        where = f"{place}[{index}]"
        kind = kind_of(block, where, KINDS[role])
        given = given_fields(block, (*FIELDS[kind], *COMMON), REFUSED, where)
        if kind in given:  # a block's text has the name of its type
            text_in(given[kind], f"{where}.{kind}")
        elif kind in FIELDS[kind]:
            raise ValueError(f"{where}.{kind} is missing")
        yield given


def _said(texts: list[str]) -> dict[str, Any]:
    return {"role": "user", "content": "\n".join(texts)}


def _result(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The message of a call's result."""
    text = _texts(block.get("content", ""), f"{place}.content")
    if check_json_bool(f"{place}.is_error", block.get("is_error", False)):
        text = FAILED + text
    call_id = text_in(block.get("tool_use_id"), f"{place}.tool_use_id")
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _answer(blocks: list[dict[str, Any]], place: str) -> dict[str, Any]:
    """The message of an answer, with its reasoning and its calls."""
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts := [block["thinking"] for block in blocks if block["type"] == "thinking"]:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls := [
        _call(block, f"{place}[{index}]")
        for index, block in enumerate(blocks)
        if block["type"] == "tool_use"
    ]:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    call_id, name = (text_in(block.get(field), f"{place}.{field}") for field in ("id", "name"))
    given = block.get("input", {})
    if not isinstance(given, Mapping):
        raise TypeError(f"{place}.input must be an object, got {shorten_json(given)}")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


def _texts(content: Any, place: str) -> str:
    """A text, or blocks of text."""
    return joined_texts(content, place, ("text",), ("cache_control",))
