"""The chunks of a streamed response in OpenAI's API."""

import time
from collections.abc import Sequence
from typing import Any

from nanovllm.openai.logprobs import chat_logprobs, completion_logprobs
from nanovllm.openai.request import CHAT, APIRequest
from nanovllm.openai.response import finish_reason, response_id, usage
from nanovllm.outputs import StreamEvent
from nanovllm.utils.slices import finish


class ChunkWriter:
    """Makes the chunks of one sample from its events.

    Every chunk has something new: text, a part of a call, log-probabilities or the end.
    `first_id` is the prompt's first token; all its `prompt_token_ids` are only needed for chunks
    that have them.
    """

    def __init__(
        self,
        name: str,
        request: APIRequest,
        index: int,
        model: str,
        tokenizer: Any,
        first_id: int,
        num_prompt_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        is_chat = request.url == CHAT
        self._head = {
            "id": response_id(name, request),
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": request.model or model,
            **({"fields_without_effect": request.no_effect} if request.no_effect else {}),
        }
        self._request, self._index, self._tokenizer = request, index, tokenizer
        self._reader = request.answer.reader() if is_chat else None
        self._first_id, self._form = first_id, request.form
        self._num_prompt_tokens, self._prompt_ids = num_prompt_tokens, prompt_token_ids
        self._begun = self._has_calls = self._has_sent_ids = False
        self._unsent_ids: list[int] = []
        self._offset = 0  # where the next token's text begins
        self.num_tokens = 0

    def chunk(self, event: StreamEvent) -> dict[str, Any] | None:
        """The chunk of an event; None if there is nothing to send yet."""
        if self._form.prompt_only and event["finish_reason"] != "error":
            event = _without_tokens(event)
        self.num_tokens += len(event["token_ids"])
        write = self._completion_choice if self._reader is None else self._chat_choice
        choice = write(event)
        if self._form.returns_ids:
            self._unsent_ids += event["token_ids"]
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
        if self._form.returns_ids:
            self._add_ids(chunk)
        if self._form.usage_each:
            used = usage(self._num_prompt_tokens, self.num_tokens, None)
            return {**chunk, "usage": used}
        return {**chunk, "usage": None} if self._form.includes_usage else chunk

    def _add_ids(self, chunk: dict[str, Any]) -> None:
        """Add the new token ids, and to a sample's first chunk those of the prompt."""
        (choice,) = chunk["choices"]
        choice["token_ids"], self._unsent_ids = self._unsent_ids, []
        if not self._has_sent_ids:
            place = chunk if self._reader is not None else choice
            place["prompt_token_ids"] = list(self._prompt_ids)
            self._has_sent_ids = True

    def _chat_choice(self, event: StreamEvent) -> dict[str, Any] | None:
        assert self._reader is not None
        reason = event["finish_reason"]
        delta = self._reader.feed(event["text"], reason is not None, event["token_ids"])
        if self._form.hides_reasoning:
            delta.pop("reasoning_content", None)
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
                chat_logprobs(
                    event["logprobs"],
                    self._request.params.logprobs,
                    self._tokenizer,
                    by_id=self._form.ids_as_tokens,
                )
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
                self._offset, by_id=self._form.ids_as_tokens,
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


def _without_tokens(event: StreamEvent) -> StreamEvent:
    """An event without what was generated."""
    changed = StreamEvent(**event)
    changed.update(text="", token_ids=[], logprobs=None, stop_reason=None)
    if event["finish_reason"] is not None:
        changed["finish_reason"] = "length"
    return changed
