"""MessageForm: writes a message, whole or as events."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from nanovllm.openai.request import APIRequest
from nanovllm.server.chats.blocks import Block, Step
from nanovllm.server.chats.form import Ending, Usage, named_event, without_effect
from nanovllm.server.errors import APIError
from nanovllm.server.messages.errors import messages_error
from nanovllm.server.messages.request import NAMES

DELTAS = {"text": "text", "reasoning": "thinking", "call": "partial_json"}
DELTA_TYPES = {"text": "text_delta", "reasoning": "thinking_delta", "call": "input_json_delta"}


class MessageForm:
    """Writes the answer to one request."""

    names: Mapping[str, str] = NAMES

    def __init__(self, asked: APIRequest, model: str) -> None:
        self.asked = asked
        self._head: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": asked.model or model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def body(self, blocks: Sequence[Block], ending: Ending) -> Mapping[str, Any]:
        """The message; raises if the request has failed."""
        if (why := ending.failure) is not None:
            raise APIError(500, why)
        content = [_content(block) for block in blocks]
        usage = _usage(ending.usage)
        head = {**self._head, **without_effect(self)}
        return {**head, "content": content, **self._stop(ending), "usage": usage}

    def begin(self, num_prompt_tokens: int) -> bytes:
        """The message without content. Which tokens were cached is known at the end."""
        message = {
            **self._head,
            **without_effect(self),
            "usage": _usage(Usage(num_prompt_tokens, 0, 0, 0)),
        }
        return named_event("message_start", {"message": message}) + named_event("ping", {})

    def write(self, step: Step) -> bytes:
        """The event of a block that begins, grows or ends."""
        block = step.block
        if step.what == "open":
            new = _begun(block)
            return named_event("content_block_start", {"index": block.index, "content_block": new})
        if step.what == "close":
            return named_event("content_block_stop", {"index": block.index})
        delta = {"type": DELTA_TYPES[block.kind], DELTAS[block.kind]: step.piece}
        return named_event("content_block_delta", {"index": block.index, "delta": delta})

    def end(self, blocks: Sequence[Block], ending: Ending) -> bytes:
        """The end of the last block, and of the message; or why the request has failed."""
        if (why := ending.failure) is not None:
            return self.fail(APIError(500, why))
        data = self.write(Step("close", blocks[-1])) if blocks else b""
        delta = {"delta": self._stop(ending), "usage": _usage(ending.usage)}
        return data + named_event("message_delta", delta) + named_event("message_stop", {})

    def fail(self, error: APIError) -> bytes:
        """The error as an event."""
        return named_event("error", messages_error(error.status, str(error)))

    def _stop(self, ending: Ending) -> dict[str, Any]:
        """Why the answer has ended."""
        reason, text = ending.reason, None
        if reason == "stop" and isinstance(ending.stop, str):
            reason, text = "stop_sequence", ending.stop
        elif reason == "length":
            is_cut = ending.usage.answer >= (self.asked.params.max_tokens or 0)
            reason = "max_tokens" if is_cut else "model_context_window_exceeded"
        else:
            reason = "tool_use" if reason == "tool_calls" else "end_turn"
        return {"stop_reason": reason, "stop_sequence": text}


def _begun(block: Block) -> dict[str, Any]:
    """A block without what its deltas will add."""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _content(block: Block) -> dict[str, Any]:
    """A whole block."""
    if block.kind == "call":
        return {**_begun(block), "input": _arguments(block)}
    return {**_begun(block), DELTAS[block.kind]: block.text}


def _arguments(block: Block) -> orjson.Fragment:
    """The arguments of a call as the model wrote them, if that is JSON.

    They are not converted: they may have an integer of any length, or half a character.
    """
    text = block.text or "{}"
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse_constant)
        return orjson.Fragment(text.encode())
    except (ValueError, RecursionError) as error:
        why = f"the arguments of the model's call of {block.name} are not valid JSON: {error}"
        raise APIError(500, why) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _usage(usage: Usage) -> dict[str, int]:
    """How many tokens a request had: cached ones are not counted twice."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.answer,
    }
