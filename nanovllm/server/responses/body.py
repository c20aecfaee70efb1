"""Responses and their items, in the form of OpenAI's Responses API."""

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.server.chats.blocks import Block
from nanovllm.server.chats.form import Ending, Usage
from nanovllm.server.errors import APIError, error_param
from nanovllm.server.named_field import Fields
from nanovllm.server.responses.request import KNOWN

FIELDS = Fields(KNOWN, "input")
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


def item_of(block: Block, name: str, status: str) -> dict[str, Any]:
    """A block as an item of output; `name` makes its id unique."""
    head = {"id": item_id(block, name), "status": status}
    if block.kind == "call":
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return {**head, "type": "function_call", **call}
    content = [] if status == "in_progress" else [part_of(block, block.text)]
    if block.kind == "text":
        return {**head, "type": "message", "role": "assistant", "content": content}
    return {**head, "type": "reasoning", "summary": [], "content": content}


def part_of(block: Block, text: str) -> dict[str, Any]:
    """The only part in the content of an item."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def item_id(block: Block, name: str) -> str:
    """The id of a block's item."""
    return f"{PREFIXES[block.kind]}_{name}{block.index:02x}"


def items_of(blocks: Sequence[Block], name: str, is_whole: bool) -> list[dict[str, Any]]:
    """The items of an answer. If it is not whole, its last item is incomplete."""
    items = [item_of(block, name, "completed") for block in blocks]
    if items and not is_whole:
        items[-1]["status"] = "incomplete"
    return items


def is_complete(ending: Ending) -> bool:
    """Whether the model has ended the answer."""
    return ending.reason in ("stop", "tool_calls")


def ending_fields(ending: Ending) -> dict[str, Any]:
    """The status of a response that has ended, what was wrong, and its usage."""
    fields: dict[str, Any] = {"status": "completed", "usage": usage_of(ending.usage)}
    if ending.reason == "length":
        details = {"reason": "max_output_tokens"}
        return {**fields, "status": "incomplete", "incomplete_details": details}
    if (why := ending.failure) is not None:
        return {**fields, "status": "failed", "error": failure(500, why)}
    return fields


def failure(status: int, message: str) -> dict[str, Any]:
    """The error of a failed response, by the status that the error has without a stream."""
    codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
    return {"code": codes.get(status, "server_error"), "message": message}


def error_event(error: APIError) -> Mapping[str, Any]:
    """The event of an error, before that of the failed response."""
    param = error_param(error, FIELDS)
    return {"code": error.code, "message": str(error), "param": param}


def usage_of(usage: Usage) -> dict[str, Any]:
    """How many tokens a response had."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.answer,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.answer,
    }
