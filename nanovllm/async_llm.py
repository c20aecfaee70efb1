"""AsyncLLM: an engine for asyncio, in a process of its own. Many callers, one engine."""

import contextlib
import functools
import os
from collections.abc import AsyncIterator
from typing import Any

from nanovllm.chat.answers import AnswerReader
from nanovllm.chat.chat_format import ChatFormat, Turn
from nanovllm.chat.conversation import has_chat_template
from nanovllm.config import MAX_WAITING
from nanovllm.engine.remote.async_engine import params_of
from nanovllm.engine.remote.readers import SMALL, prompt_size
from nanovllm.features import AllFeatures
from nanovllm.lora_request import LoRARequest
from nanovllm.outputs import RequestOutput, StreamEvent
from nanovllm.prompts import Prompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.vectors.async_calls import AsyncVectorCalls


class AsyncLLM(AsyncVectorCalls):
    """A model, ready to generate for many callers of one event loop.

    `AsyncLLM(model, **options)` takes the options of `LLM`, and blocks until the model is loaded.
    At most `max_waiting` samples wait beside those that can run: a call beyond is an
    EngineFullError. Close it, or use it in an `async with` block.
    """

    features = AllFeatures()

    def __init__(
        self, model: str | os.PathLike[str], *, max_waiting: int = MAX_WAITING, **options: Any
    ) -> None:
        super().__init__(model, max_waiting=max_waiting, **options)
        asked = self._asked
        self._chat_format = ChatFormat(self.tokenizer, asked.tool_parser, asked.reasoning_parser)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: Any = None,
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[StreamEvent]:
        """Complete a prompt, and yield what is new whenever the caller asks for more.

        A slow caller gets several tokens in an event. Leaving the loop, or cancelling the task,
        aborts the request. `request_id` names it for `abort`, and `priority` replaces that of the
        parameters. `lora_request` is an adapter, which is read beside the engine's steps. A bad
        prompt or adapter raises at the first event.
        """
        asked: Any = dict(request_id=request_id, priority=priority, lora_request=lora_request)
        async with self.request(prompt, sampling_params, **asked) as call:
            async for event in call.events():
                yield event

    async def chat(
        self,
        messages: list[Any],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: Any = None,
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> AsyncIterator[StreamEvent]:
        """Answer a conversation; each event has a `delta`, as those of `LLM.stream_chat`.

        Options are the keywords of `LLM.chat`. Otherwise as `generate`.
        """
        params = params_of(sampling_params, priority)
        turn = await self.chat_turn(messages, params, **options)
        readers = [AnswerReader(turn.answer) for _ in range(params.n)]
        asked: Any = dict(request_id=request_id, lora_request=lora_request)
        events = self.generate(turn.prompt, turn.params, **asked)
        async with contextlib.aclosing(events):  # type: ignore[type-var]
            async for event in events:
                ended = event["finish_reason"] is not None
                event["delta"] = readers[event["sample"]].feed(event["text"], ended)
                yield event

    async def complete(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: Any = None,
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """Complete a prompt, and return the whole output. Otherwise as `generate`."""
        asked: Any = dict(request_id=request_id, priority=priority, lora_request=lora_request)
        async with self.request(prompt, sampling_params, **asked, is_whole=True) as call:
            return await call.output()

    async def chat_turn(
        self, messages: list[Any], params: SamplingParams | None = None, **options: Any
    ) -> Turn:
        """The prompt of a conversation, its parameters, and how the answer is read."""
        given = params or SamplingParams()
        turns = functools.partial(
            self._chat_format.turns, [messages], lambda number: [given] * number, **options
        )
        size = prompt_size(messages) + SMALL * bool(options)  # such as tools
        self.check()
        (turn,) = await self._readers.run(turns, size)
        return turn

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template for `chat`."""
        return has_chat_template(self.tokenizer)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
