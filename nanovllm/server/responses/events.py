"""ResponseForm: writes a response, whole or as events with numbers."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.openai.request import APIRequest
from nanovllm.server.chats.blocks import Block, Step
from nanovllm.server.chats.form import Ending, named_event, without_effect
from nanovllm.server.errors import APIError
from nanovllm.server.responses.body import (
    ending_fields,
    error_event,
    failure,
    is_complete,
    item_id,
    item_of,
    items_of,
    part_of,
)
from nanovllm.server.responses.items import messages_of
from nanovllm.server.responses.request import NAMES, ResponseRequest
from nanovllm.server.responses.store import ResponseStore

EMPTY = Block("text", 0)  # a message, so that every response has an item
ARGUMENTS = "response.function_call_arguments"
TEXTS = {"text": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseForm:
    """Writes one response, and stores it when it has ended, for its `owner`."""

    names: Mapping[str, str] = NAMES

    def __init__(
        self,
        request: ResponseRequest,
        asked: APIRequest,
        model: str,
        store: ResponseStore,
        owner: Any,
    ) -> None:
        self.asked = asked
        self._request, self._store, self._owner = request, store, owner
        self._name, self._number = uuid.uuid4().hex, 0
        self._blocks: list[Block] = []
        self._head = {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": asked.model or model,
            "output": [],
            "usage": None,
            "temperature": asked.params.temperature,
            "top_p": asked.params.top_p,
            **request.shown,
        }

    def body(self, blocks: Sequence[Block], ending: Ending) -> Mapping[str, Any]:
        """The response, which is stored, unless it has failed or is too large."""
        items = items_of(blocks or [EMPTY], self._name, is_complete(ending))
        body = {**self._head, **ending_fields(ending), "output": items, **without_effect(self)}
        stores = self._request.stores and body["status"] != "failed"
        if stores:
            messages = [*self._request.messages, *messages_of(_whole(items), "output")]
            stores = self._store.put(self._owner, self._head["id"], body, messages)
        return {**body, "store": stores}

    def begin(self, num_prompt_tokens: int) -> bytes:  # noqa: ARG002
        """The response without output."""
        return b"".join(
            self._event(f"response.{name}", response={**self._head, **without_effect(self)})
            for name in ("created", "in_progress")
        )

    def write(self, step: Step) -> bytes:
        """The events of an item that begins, grows or ends."""
        block = step.block
        if step.what == "open":
            self._blocks.append(block)
            return self._opened(block)
        if step.what == "close":
            return self._closed(block, "completed")
        if block.kind == "call":
            return self._part_event(f"{ARGUMENTS}.delta", block, delta=step.piece)
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        return self._text_event("delta", block, delta=step.piece, **more)

    def end(self, blocks: Sequence[Block], ending: Ending) -> bytes:
        """The end of the last item, and the response."""
        status = "completed" if is_complete(ending) else "incomplete"
        data = b"" if blocks else self._opened(EMPTY)
        data += self._closed(blocks[-1] if blocks else EMPTY, status)
        body = self.body(blocks, ending)
        return data + self._event(f"response.{body['status']}", response=body)

    def fail(self, error: APIError) -> bytes:
        """The error, and the failed response with what there was of it."""
        items = items_of(self._blocks, self._name, is_whole=False)
        why = failure(error.status, str(error))
        failed = {"status": "failed", "error": why, "output": items, "store": False}
        data = self._event("error", **error_event(error))
        return data + self._event("response.failed", response={**self._head, **failed})

    def _opened(self, block: Block) -> bytes:
        item = item_of(block, self._name, "in_progress")
        data = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return data
        return data + self._text_part("added", block, "")

    def _closed(self, block: Block, status: str) -> bytes:
        text = block.text
        if block.kind == "call":
            done = self._part_event(f"{ARGUMENTS}.done", block, name=block.name, arguments=text)
        else:
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            done = self._text_event("done", block, text=text, **more)
            done += self._text_part("done", block, text)
        item = item_of(block, self._name, status)
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def _text_part(self, what: str, block: Block, text: str) -> bytes:
        part = part_of(block, text)
        return self._part_event(f"response.content_part.{what}", block, content_index=0, part=part)

    def _text_event(self, what: str, block: Block, /, **fields: Any) -> bytes:
        return self._part_event(f"{TEXTS[block.kind]}.{what}", block, content_index=0, **fields)

    def _part_event(self, name: str, block: Block, /, **fields: Any) -> bytes:
        own = {"item_id": item_id(block, self._name), "output_index": block.index}
        return self._event(name, **own, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        """An event with the next number."""
        number, self._number = self._number, self._number + 1
        return named_event(name, {"sequence_number": number, **fields})


def _whole(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The items that a conversation can go on after: a call that was cut has no valid arguments."""
    return [one for one in items if one["type"] != "function_call" or one["status"] == "completed"]
