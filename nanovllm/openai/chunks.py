"""The chunks of a streamed response in OpenAI's API."""

import time
from typing import Any

from nanovllm.openai.logprobs import chat_logprobs, completion_logprobs
from nanovllm.openai.request import CHAT, APIRequest
from nanovllm.openai.response import finish_reason, response_id, usage
from nanovllm.outputs import StreamEvent
from nanovllm.utils.slices import finish


class ChunkWriter:
    """Makes the chunks of one sample from its events.

    Every chunk has something new: text, a part of a call, log-probabilities or the end.
    """

    def __init__(
        self, name: str, request: APIRequest, index: int, model: str, tokenizer: Any, first_id: int
    ) -> None:
        is_chat = request.url == CHAT
        self._head = {
            "id": response_id(name, request),
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": request.model or model,
        }
        self._request, self._index, self._tokenizer = request, index, tokenizer
        self._reader = request.answer.reader() if is_chat else None
        self._first_id = first_id
        self._begun = self._has_calls = False
        self._offset = 0  # where the next token's text begins
        self.num_tokens = 0

    def chunk(self, event: StreamEvent) -> dict[str, Any] | None:
        """The chunk of an event; None if there is nothing to send yet."""
        self.num_tokens += len(event["token_ids"])
        write = self._completion_choice if self._reader is None else self._chat_choice
        choice = write(event)
        return None if choice is None else self._whole([choice])

    def echo(self, text: str) -> dict[str, Any]:
        """A first chunk with the text of the prompt."""
        self._offset += len(text)
        choice = {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}
        return self._whole([choice])

    def usage_chunk(self, prompt_tokens: int, num_tokens: int, cached: int) -> dict[str, Any]:
        """The last chunk of a response that includes its usage."""
        return {**self._head, "choices": [], "usage": usage(prompt_tokens, num_tokens, cached)}

    def _whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        return {**chunk, "usage": None} if self._request.includes_usage else chunk

    def _chat_choice(self, event: StreamEvent) -> dict[str, Any] | None:
        assert self._reader is not None
        reason = event["finish_reason"]
        delta = self._reader.feed(event["text"], reason is not None, event["token_ids"])
        if not delta and reason is None and event["logprobs"] is None:
            return None
        if not self._begun:
            delta = {"role": "assistant", "content": "", **delta}
            self._begun = True
        self._has_calls |= "tool_calls" in delta
        choice = {
            "index": self._index,
            "delta": delta,
            "logprobs": finish(
                chat_logprobs(event["logprobs"], self._request.params.logprobs, self._tokenizer)
            ),
            "finish_reason": finish_reason(reason, self._has_calls),
        }
        return choice if reason is None else {**choice, "stop_reason": event["stop_reason"]}

    def _completion_choice(self, event: StreamEvent) -> dict[str, Any] | None:
        reason = event["finish_reason"]
        if not event["text"] and reason is None and event["logprobs"] is None:
            return None
        likely = finish(
            completion_logprobs(
                event["logprobs"], self._request.params.logprobs, self._tokenizer, self._first_id,
                self._offset,
            )
        )  # fmt: skip
        self._offset += 0 if likely is None else sum(map(len, likely["tokens"]))
        choice = {
            "index": self._index,
            "text": event["text"],
            "logprobs": likely,
            "finish_reason": reason,
        }
        return choice if reason is None else {**choice, "stop_reason": event["stop_reason"]}
