"""ChatAPI: answers requests of an API that are translated into chats."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from nanovllm.async_llm import AsyncLLM
from nanovllm.engine.remote.open_request import OpenRequest
from nanovllm.openai.request import CHAT, APIRequest
from nanovllm.server.adapters import ServedModels
from nanovllm.server.answered import Work
from nanovllm.server.body_parser import BodyParser
from nanovllm.server.chats.blocks import BlockReader, blocks_of
from nanovllm.server.chats.fields import named_as
from nanovllm.server.chats.form import Ending, Form, Usage
from nanovllm.server.errors import request_error
from nanovllm.server.event_stream import EventStream, Part
from nanovllm.server.generation import Generation
from nanovllm.server.log import RequestLine, record_first_of
from nanovllm.server.options import ServerOptions


class ChatAPI:
    """Parses chats, and answers them in the form of each.

    A chat has one sample. Parameters that it does not set are those of /v1/chat/completions.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        models: ServedModels,
        options: ServerOptions,
        defaults: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.llm, self.models, self.options = llm, models, options
        self._parser = BodyParser(llm, models, options, defaults)
        self._generation = Generation(llm, models, options)

    def parse(self, chat: Mapping[str, Any], names: Mapping[str, str]) -> APIRequest:
        """The request in the body of a chat, with the server's limits; `names` are for errors."""
        with named_as(names):
            return self._parser.parse(CHAT, chat)

    def work(self, line: RequestLine, form: Form) -> Work:
        """The response to a request, or its body."""
        line.add_samples(1)
        if form.asked.streams:
            return EventStream(self._events(line, form), self.options.timeout, line, form.fail)
        return self._body(line, form)

    async def count(self, asked: APIRequest, names: Mapping[str, str]) -> int:
        """The tokens of a chat's prompt."""
        with named_as(names):
            return await self._generation.num_prompt_tokens(asked)

    async def _body(self, line: RequestLine, form: Form) -> Mapping[str, Any]:
        with named_as(form.names):
            form.asked, (output,) = await self._generation.outputs(form.asked)
        (sample,) = output["outputs"]
        if sample["finish_reason"] == "error":
            raise request_error(str(sample["stop_reason"]))
        record_first_of(line, [output.metrics])
        message = form.asked.answer.message(sample["text"], sample["token_ids"])
        blocks = blocks_of(message)
        usage = Usage(
            output["num_prompt_tokens"],
            output["num_cached_tokens"],
            len(sample["token_ids"]),
            await self._num_tokens(message.get("reasoning_content", "")),
        )
        reason = _reason(sample["finish_reason"], "tool_calls" in message)
        _count(line, usage, reason)
        return form.body(blocks, Ending(reason, sample["stop_reason"], usage))

    async def _events(self, line: RequestLine, form: Form) -> AsyncIterator[Part]:
        """A streamed answer. The request ends with the iterator."""
        with named_as(form.names):
            async with self._generation.requests(form.asked) as (form.asked, (request,)):
                reader, blocks, num_tokens = form.asked.answer.reader(), BlockReader(), 0
                data = form.begin(request.num_prompt_tokens)
                async for event in request.events():
                    reason = event["finish_reason"]
                    if reason == "error" and not num_tokens:
                        raise request_error(str(event["stop_reason"]))
                    num_tokens += len(event["token_ids"])
                    delta = reader.feed(event["text"], reason is not None, event["token_ids"])
                    data += b"".join(map(form.write, blocks.feed(delta)))
                    if data and reason is None:
                        yield data, False
                        data = b""
                usage = await self._usage(request, blocks, num_tokens)
        has_calls = any(block.kind == "call" for block in blocks.blocks)
        ending = Ending(_reason(reason, has_calls), event["stop_reason"], usage)
        _count(line, usage, ending.reason)
        yield data + form.end(blocks.blocks, ending), True

    async def _usage(self, request: OpenRequest, blocks: BlockReader, num_tokens: int) -> Usage:
        reasoning = "".join(block.text for block in blocks.blocks if block.kind == "reasoning")
        num_reasoning = await self._num_tokens(reasoning)
        return Usage(
            request.num_prompt_tokens, request.num_cached_tokens, num_tokens, num_reasoning
        )

    async def _num_tokens(self, text: str) -> int:
        """The tokens of a text by itself. A thread counts those of a long one."""
        encode = self.llm.tokenizer.encode

        def count() -> int:
            return len(encode(text, add_special_tokens=False, verbose=False))

        return await self.llm.readers.run(count, len(text)) if text else 0


def _reason(reason: str | None, has_calls: bool) -> str:
    return "tool_calls" if has_calls and reason == "stop" else str(reason)


def _count(line: RequestLine, usage: Usage, reason: str) -> None:
    line.count({"prompt_tokens": usage.prompt, "completion_tokens": usage.answer}, reason)
