"""Answer chats and completions: whole, or as server-sent events while tokens come."""

import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nanovllm.async_llm import AsyncLLM
from nanovllm.engine.remote.open_request import OpenRequest
from nanovllm.engine.remote.readers import params_size
from nanovllm.openai.chunks import ChunkWriter
from nanovllm.openai.guided import OWN
from nanovllm.openai.request import APIRequest
from nanovllm.openai.response import echoed_text, response_body
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.adapters import ServedModels
from nanovllm.server.answer_json import answer_json, packed
from nanovllm.server.answered import Work, answered
from nanovllm.server.bodies import Bodies
from nanovllm.server.body_parser import BodyParser
from nanovllm.server.chats.fields import named_as
from nanovllm.server.errors import request_error
from nanovllm.server.event_stream import DONE, EventStream, Part, sse
from nanovllm.server.generation import Generation, merged_events
from nanovllm.server.log import RequestLine, record_first_of
from nanovllm.server.options import ServerOptions
from nanovllm.utils.slices import in_slices


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
        self._bodies = Bodies(llm.readers, options)
        self._generation = Generation(llm, models, options)
        self._parser = BodyParser(llm, models, options, defaults)

    async def handle(self, request: Request) -> Response:
        """Answer a request."""
        return await answered(request, self._bodies, self._parser.parse, self._work)

    def _work(self, line: RequestLine, asked: APIRequest) -> Work:
        line.rename(asked.name)
        line.add_samples(len(asked.prompts) * asked.params.n)
        if asked.streams:
            return EventStream(self._chunks(line, asked), self._options.timeout, line)
        return self._body(line, asked)

    async def _body(self, line: RequestLine, asked: APIRequest) -> bytes:
        """The body of a whole response. Other tasks run while a long one is made."""
        asked, outputs = await self._generation.outputs(asked)
        with named_as({OWN: asked.constraint}):
            _check_begun(outputs)
        record_first_of(line, [output.metrics for output in outputs])
        if asked.echo:
            asked = await self._with_echoes(asked, outputs)
        name, tokenizer = self._models.names[0], self._llm.tokenizer
        body = await in_slices(response_body(line.name, asked, outputs, name, tokenizer, packed))
        line.count(body["usage"], outputs[0]["outputs"][0]["finish_reason"])
        return await in_slices(answer_json(body))

    async def _chunks(self, line: RequestLine, asked: APIRequest) -> AsyncIterator[Part]:
        """A streamed response. Requests end with the iterator."""
        async with self._generation.requests(asked) as (asked, requests):
            writers = self._writers(line.name, asked, requests)
            begun: set[int] = set()
            echoes: dict[int, str] = {}
            num_open, last = len(writers), b""
            async for place, event in merged_events(requests):
                if event["finish_reason"] == "error" and not begun:
                    raise request_error(str(event["stop_reason"]))
                index = place * asked.params.n + event["sample"]
                if asked.echo and index not in begun:
                    if place not in echoes:
                        echoes[place] = await self._prompt_text(requests[place])
                    yield sse(writers[index].echo(echoes[place])), False
                begun.add(index)
                chunk = writers[index].chunk(event)
                num_open -= event["finish_reason"] is not None
                if not num_open and requests[place].is_over:  # the end is sent with the last event
                    last = b"" if chunk is None else sse(chunk)
                elif chunk is not None:
                    yield sse(chunk), False
                line.reason = event["finish_reason"]
            counts = (
                sum(request.num_prompt_tokens for request in requests),
                sum(writer.num_tokens for writer in writers),
                sum(request.num_cached_tokens for request in requests),
            )
        usage = writers[0].usage_chunk(*counts)
        line.count(usage["usage"], line.reason)
        yield last + (sse(usage) if asked.form.includes_usage else b"") + DONE, True

    def _writers(
        self, name: str, asked: APIRequest, requests: Sequence[OpenRequest]
    ) -> list[ChunkWriter]:
        """A writer for each sample of each prompt."""
        n, model, tokenizer = asked.params.n, self._models.names[0], self._llm.tokenizer
        writers = []
        for place, request in enumerate(requests):
            ids = request.prompt_token_ids if asked.form.returns_ids else ()
            about_prompt = request.first_token_id, request.num_prompt_tokens, ids
            writers += [
                ChunkWriter(name, asked, place * n + sample, model, tokenizer, *about_prompt)
                for sample in range(n)
            ]
        return writers

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
        ids = request.prompt_token_ids
        return await self._echo(copied.prompt, ids, copied.seqs[0].params)

    async def _echo(self, prompt: str | None, ids: list[int], params: SamplingParams) -> str:
        """The text of a prompt. A thread decodes a long one."""
        text = functools.partial(echoed_text, prompt, ids, params, self._llm.tokenizer)
        return await self._llm.readers.run(text, len(ids))


def _check_begun(outputs: Sequence[RequestOutput]) -> None:
    """Raise the error of the first sample if all have ended with one."""
    samples = [sample for output in outputs for sample in output["outputs"]]
    if all(sample["finish_reason"] == "error" for sample in samples):
        raise request_error(str(samples[0]["stop_reason"]))
