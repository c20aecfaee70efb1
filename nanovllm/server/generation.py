"""Generation: the outputs of parsed requests, whole or as events. It writes no bodies."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeVar

from nanovllm.async_llm import AsyncLLM
from nanovllm.engine.remote.open_request import OpenRequest
from nanovllm.engine.remote.readers import prompt_size
from nanovllm.lora_request import LoRARequest
from nanovllm.openai.guided import OWN
from nanovllm.openai.plain_prompts import without_special
from nanovllm.openai.request import CHAT, APIRequest
from nanovllm.outputs import RequestOutput, StreamEvent
from nanovllm.server.adapters import ServedModels
from nanovllm.server.chats.fields import named_as
from nanovllm.server.options import ServerOptions
from nanovllm.utils.tasks import all_of, cancel

T = TypeVar("T")


class Generation:
    """Queues the requests in parsed bodies. All that answers chats and completions uses it.

    A chat's parameters, and how its answer is read, are known when its prompt is made: so both
    methods return the request with these. Errors name the field that constrains the answer.
    """

    def __init__(self, llm: AsyncLLM, models: ServedModels, options: ServerOptions) -> None:
        self._llm, self._models, self._options = llm, models, options

    async def outputs(self, asked: APIRequest) -> tuple[APIRequest, list[RequestOutput]]:
        """The whole outputs of all prompts, with log-probabilities to iterate over."""
        with named_as({OWN: asked.constraint}):
            asked, prompts = await self._prepare(asked)
            adapter = self._models.adapter(asked.model)
            complete = self._complete if asked.beams is None else self._search
            outputs = await all_of(
                _named(prompts, place, complete(adapter, prompt, asked))
                for place, prompt in enumerate(prompts)
            )
            return asked, outputs

    async def num_prompt_tokens(self, asked: APIRequest) -> int:
        """The tokens of a chat's prompt."""
        _, (prompt,) = await self._prepare(asked)
        return len(prompt["prompt_token_ids"])

    @contextlib.asynccontextmanager
    async def requests(
        self, asked: APIRequest
    ) -> AsyncIterator[tuple[APIRequest, list[OpenRequest]]]:
        """A request for each prompt, whose `merged_events` can be read during the block."""
        with named_as({OWN: asked.constraint}):
            asked, prompts = await self._prepare(asked)
            adapter = self._models.adapter(asked.model)
            request = functools.partial(self._llm.request, lora_request=adapter)
            async with AsyncExitStack() as stack:
                yield (
                    asked,
                    [
                        await _named(
                            prompts, place, stack.enter_async_context(request(prompt, asked.params))
                        )
                        for place, prompt in enumerate(prompts)
                    ],
                )

    async def _prepare(self, asked: APIRequest) -> tuple[APIRequest, list[Any]]:
        """The prompts of a request; for chats, the chat template makes them."""
        if asked.url != CHAT:
            return asked, asked.prompts if asked.adds_special else await self._plain(asked)
        (messages,) = asked.prompts
        options, unread = divided_fields(self._llm, self._options, asked.chat_options)
        turn = await self._llm.chat_turn(messages, asked.params, **options)
        asked = replace(asked, params=turn.params, answer=turn.answer, no_effect=unread)
        return asked, [turn.prompt]

    async def _plain(self, asked: APIRequest) -> list[Any]:
        """The prompts as token ids without the tokenizer's special tokens."""
        longest = self._llm.config.max_model_len
        encode = functools.partial(without_special, self._llm.tokenizer, asked.params, longest)
        return [
            await self._llm.readers.run(functools.partial(encode, prompt), prompt_size(prompt))
            for prompt in asked.prompts
        ]

    async def _complete(
        self, adapter: LoRARequest | None, prompt: Any, asked: APIRequest
    ) -> RequestOutput:
        whole: Any = dict(lora_request=adapter, is_whole=True)
        async with self._llm.request(prompt, asked.params, **whole) as request:
            return await request.output(is_lazy=True)

    async def _search(
        self, adapter: LoRARequest | None, prompt: Any, asked: APIRequest
    ) -> RequestOutput:
        from nanovllm.beams.async_beams import AsyncBeams

        assert asked.beams is not None
        if asked.params.structured_outputs is not None:
            raise ValueError("use_beam_search: this chat's tools constrain the answer")
        return await AsyncBeams(self._llm).search(prompt, asked.beams, asked.params, adapter)


def divided_fields(
    llm: AsyncLLM, options: ServerOptions, given: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of a chat, and the names of those left out: the template does not read them.

    If the server does not let such fields pass, none is left out: they are errors.
    """
    unread = tuple(llm.unread_fields(**given)) if options.allow_unread_fields else ()
    return {name: value for name, value in given.items() if name not in unread}, unread


async def _named(prompts: Sequence[Any], place: int, work: Coroutine[Any, Any, T]) -> T:
    """Do the work for one prompt. If there are several, an error names the prompt."""
    try:
        return await work
    except (TypeError, ValueError) as error:
        if len(prompts) == 1:
            raise
        raise type(error)(f"prompt[{place}]: {error}") from None


async def merged_events(requests: Sequence[OpenRequest]) -> AsyncIterator[tuple[int, StreamEvent]]:
    """The events of several requests as they come, each with its request's place."""
    if len(requests) == 1:
        async for event in requests[0].events():
            yield 0, event
        return
    queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)

    async def follow(place: int, request: OpenRequest) -> None:
        async for event in request.events():
            await queue.put((place, event))

    async def follow_all() -> None:
        try:
            await all_of(follow(place, request) for place, request in enumerate(requests))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    task = asyncio.ensure_future(follow_all())
    try:
        while (item := await queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        await cancel(task)
