"""Answer chats and completions: whole, or as server-sent events while tokens come."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.async_llm import AsyncLLM
from nanovllm.chat.conversation import given_template
from nanovllm.engine.remote.open_request import OpenRequest
from nanovllm.engine.remote.readers import params_size
from nanovllm.lora_request import LoRARequest
from nanovllm.openai.chunks import ChunkWriter
from nanovllm.openai.request import CHAT, APIRequest, parse_body
from nanovllm.openai.response import echoed_text, response_body
from nanovllm.outputs import RequestMetrics, RequestOutput, StreamEvent
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.adapters import ServedModels
from nanovllm.server.answer_json import answer_json, packed
from nanovllm.server.bodies import Bodies
from nanovllm.server.errors import APIError, as_api_error, error_body, request_error
from nanovllm.server.gone import unless_gone
from nanovllm.server.log import CLIENT_LEFT, RequestLine
from nanovllm.server.options import ServerOptions
from nanovllm.server.refusals import (
    check_asked,
    check_body,
    check_tokens,
    check_truncated,
    refuse_priority,
)
from nanovllm.utils.slices import in_slices
from nanovllm.utils.tasks import all_of, cancel

T = TypeVar("T")
Asked = TypeVar("Asked")
LAST_SECONDS = 1.0  # the time to send an error
DONE = b"data: [DONE]\n\n"
Part = tuple[bytes, bool]  # a part of a stream: events, and whether they are the last
Work = Response | Coroutine[Any, Any, Any]  # a response, or the body of one


class Answering:
    """Answers requests' bodies with an engine. `defaults` are sampling parameters for each URL."""

    def __init__(
        self,
        llm: AsyncLLM,
        models: ServedModels,
        options: ServerOptions,
        defaults: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._llm, self._models, self._options = llm, models, options
        self._defaults, self._bodies = defaults, Bodies(llm.readers, options)

    async def handle(self, request: Request) -> Response:
        """Answer a request."""
        return await answered(request, self._bodies, self._parse, self._work)

    def _work(self, line: RequestLine, asked: APIRequest) -> Work:
        line.add_samples(len(asked.prompts) * asked.params.n)
        if asked.streams:
            return EventStream(self._chunks(line, asked), self._options.timeout, line)
        return self._body(line, asked)

    def _parse(self, url: str, body: Mapping[str, Any]) -> APIRequest:
        check_body(body, self._options)
        asked = parse_body(url, body, self._defaults[url])
        self._models.adapter(asked.model)  # an error, if there is no such model
        if not self._options.trust_request_chat_template:
            refuse_templates(asked)
        if not self._options.allow_priority:
            refuse_priority(asked, self._defaults[url])
        most = self._llm.config.max_num_seqs + self._llm.max_waiting
        if len(asked.prompts) * asked.params.n > most:
            raise APIError(
                400, f"prompts times n must be at most {most} (max_num_seqs and max_waiting), got"
                f" {len(asked.prompts)} times {asked.params.n}"
            )  # fmt: skip
        check_truncated(asked.prompts, asked.params.truncate_prompt_tokens, self._options)
        check_tokens(asked, self._options, self._llm.config.max_model_len)
        check_asked(asked, self._options, self._llm.model_config.vocab_size)
        return asked

    async def _prepare(self, asked: APIRequest) -> tuple[APIRequest, list[Any]]:
        """The prompts of a request; for chats, the chat template makes them."""
        if asked.url != CHAT:
            return asked, asked.prompts
        (messages,) = asked.prompts
        turn = await self._llm.chat_turn(messages, asked.params, **asked.chat_options)
        return replace(asked, params=turn.params, answer=turn.answer), [turn.prompt]

    async def _body(self, line: RequestLine, asked: APIRequest) -> bytes:
        """The body of a whole response. Other tasks run while a long one is made."""
        asked, prompts = await self._prepare(asked)
        adapter = self._models.adapter(asked.model)
        complete = functools.partial(self._complete, adapter)
        outputs = await all_of(
            _named(prompts, place, complete(prompt, asked.params))
            for place, prompt in enumerate(prompts)
        )
        _record_first_token(line, [output.metrics for output in outputs])
        samples = [sample for output in outputs for sample in output["outputs"]]
        if all(sample["finish_reason"] == "error" for sample in samples):
            raise request_error(str(samples[0]["stop_reason"]))
        if asked.echo:
            asked = await self._with_echoes(asked, outputs)
        name, tokenizer = self._models.names[0], self._llm.tokenizer
        body = await in_slices(response_body(line.name, asked, outputs, name, tokenizer, packed))
        line.count(body["usage"], samples[0]["finish_reason"])
        return await in_slices(answer_json(body))

    async def _complete(
        self, adapter: LoRARequest | None, prompt: Any, params: SamplingParams
    ) -> RequestOutput:
        """The output of a prompt, with log-probabilities to iterate over."""
        asked: Any = dict(lora_request=adapter, is_whole=True)
        async with self._llm.request(prompt, params, **asked) as request:
            return await request.output(is_lazy=True)

    async def _chunks(self, line: RequestLine, asked: APIRequest) -> AsyncIterator[Part]:
        """A streamed response. Requests end with the iterator."""
        asked, prompts = await self._prepare(asked)
        adapter = self._models.adapter(asked.model)
        request = functools.partial(self._llm.request, lora_request=adapter)
        async with AsyncExitStack() as stack:
            requests = [
                await _named(
                    prompts, place, stack.enter_async_context(request(prompt, asked.params))
                )
                for place, prompt in enumerate(prompts)
            ]
            writers = self._writers(line.name, asked, requests)
            begun: set[int] = set()
            echoes: dict[int, str] = {}
            num_open, last = len(writers), b""
            async for place, event in _merged(requests):
                if event["finish_reason"] == "error" and not begun:
                    raise request_error(str(event["stop_reason"]))
                index = place * asked.params.n + event["sample"]
                if asked.echo and index not in begun:
                    if place not in echoes:
                        echoes[place] = await self._prompt_text(requests[place])
                    yield _sse(writers[index].echo(echoes[place])), False
                begun.add(index)
                chunk = writers[index].chunk(event)
                num_open -= event["finish_reason"] is not None
                if not num_open and requests[place].is_over:  # the end is sent with the last event
                    last = b"" if chunk is None else _sse(chunk)
                elif chunk is not None:
                    yield _sse(chunk), False
                line.reason = event["finish_reason"]
            counts = (
                sum(request.num_prompt_tokens for request in requests),
                sum(writer.num_tokens for writer in writers),
                sum(request.num_cached_tokens for request in requests),
            )
        usage = writers[0].usage_chunk(*counts)
        line.count(usage["usage"], line.reason)
        yield last + (_sse(usage) if asked.includes_usage else b"") + DONE, True

    def _writers(
        self, name: str, asked: APIRequest, requests: Sequence[OpenRequest]
    ) -> list[ChunkWriter]:
        """A writer for each sample of each prompt."""
        n, model, tokenizer = asked.params.n, self._models.names[0], self._llm.tokenizer
        return [
            ChunkWriter(name, asked, place * n + sample, model, tokenizer, request.first_token_id)
            for place, request in enumerate(requests)
            for sample in range(n)
        ]

    async def _with_echoes(self, asked: APIRequest, outputs: Sequence[RequestOutput]) -> APIRequest:
        """Set the text of each prompt to what was computed; returns the request as if not cut."""
        for output in outputs:
            ids = output["prompt_token_ids"]
            output["prompt"] = await self._echo(output["prompt"], ids, asked.params)
        if asked.params.truncate_prompt_tokens is None:
            return asked
        whole = functools.partial(replace, asked.params, truncate_prompt_tokens=None)
        params = await self._llm.readers.run(whole, params_size(asked.params))  # checks all again
        return replace(asked, params=params)

    async def _prompt_text(self, request: OpenRequest) -> str:
        copied = request.copy.request
        ids = copied.seqs[0].token_ids[: request.num_prompt_tokens]
        return await self._echo(copied.prompt, ids, copied.seqs[0].params)

    async def _echo(self, prompt: str | None, ids: list[int], params: SamplingParams) -> str:
        """The text of a prompt. A thread decodes a long one."""
        text = functools.partial(echoed_text, prompt, ids, params, self._llm.tokenizer)
        return await self._llm.readers.run(text, len(ids))


async def _named(prompts: Sequence[Any], place: int, work: Coroutine[Any, Any, T]) -> T:
    """Do the work for one prompt. If there are several, an error names the prompt."""
    try:
        return await work
    except (TypeError, ValueError) as error:
        if len(prompts) == 1:
            raise
        raise type(error)(f"prompt[{place}]: {error}") from None


def _record_first_token(line: RequestLine, times: Sequence[RequestMetrics]) -> None:
    """Log when whole outputs, which have just ended, had their first token."""
    since = [
        one.end_to_end_time - one.time_to_first_token
        for one in times
        if one.time_to_first_token is not None
    ]
    if since:
        line.record_first_token(max(since))


def refuse_templates(asked: APIRequest) -> None:
    """Raise if a chat brings its own template."""
    if given_template(asked.chat_options) is not None:
        raise APIError(
            400, "chat_template: this server takes no templates (--trust-request-chat-template)"
        )


class EventStream(Response):
    """A response that sends events as they come, and ends when the client disconnects.

    Its status is sent with the first event, so that an error before this can have another status.
    """

    def __init__(
        self, chunks: AsyncIterator[Part], timeout: float | None, line: RequestLine
    ) -> None:
        self._chunks, self._timeout, self._line = chunks, timeout, line
        self.background = None
        self._begun = False

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            if not await unless_gone(receive, self._pump(send), self._timeout):
                self._line.status = CLIENT_LEFT
        except Exception as error:
            if not self._begun:  # then the error becomes the response
                raise
            with contextlib.suppress(asyncio.TimeoutError):  # the client does not read
                await asyncio.wait_for(self._end_with(as_api_error(error), send), LAST_SECONDS)

    async def _pump(self, send: Send) -> bool:
        """Send the events; True at the end."""
        async with aclosing(self._chunks) as chunks:  # type: ignore[type-var]
            async for chunk, is_last in chunks:
                if not self._begun:
                    self._line.record_first_token()
                    await self._begin(send)
                await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})
        return True

    async def _begin(self, send: Send) -> None:
        self._begun = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would collect events
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _end_with(self, error: APIError, send: Send) -> None:
        """Send an error as the last event."""
        self._line.fail(error.status, str(error), error.code)
        event = _sse(error_body(error.status, str(error), error.code))
        await send({"type": "http.response.body", "body": event, "more_body": False})


def _sse(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


async def _merged(requests: Sequence[OpenRequest]) -> AsyncIterator[tuple[int, StreamEvent]]:
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


async def answered(
    request: Request,
    bodies: Bodies,
    parse: Callable[[str, dict[str, Any]], Asked],
    work: Callable[[RequestLine, Asked], Work],
) -> Response:
    """Answer a request with the result of `work` for what `parse` makes of its URL and body.

    If the client disconnects before it is complete, the work is cancelled.
    """
    line: RequestLine = request.scope["line"]
    found = work(line, await bodies.read(request, functools.partial(parse, line.url)))
    if isinstance(found, Response):
        return found
    body = await unless_gone(request.receive, found, bodies.limits.timeout)
    return Response(status_code=CLIENT_LEFT) if body is None else json_response(body)


def json_response(value: Any) -> Response:
    """A whole answer, which may be JSON already.

    Numbers that are not finite become null, in streams too: JSON has none.
    """
    data = value if isinstance(value, bytes) else orjson.dumps(value)
    return Response(data, media_type="application/json")
