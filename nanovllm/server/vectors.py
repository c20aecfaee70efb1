"""Answer /v1/embeddings, /score and /rerank: vectors of prompts, and scores of documents."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from nanovllm.async_llm import AsyncLLM
from nanovllm.openai.vectors import (
    EMBEDDINGS,
    RERANK,
    VectorRequest,
    embedding_entry,
    embeddings_body,
    parse_embeddings,
    parse_rerank,
    parse_score,
    score_body,
)
from nanovllm.server.adapters import ServedModels
from nanovllm.server.answered import answered
from nanovllm.server.bodies import Bodies
from nanovllm.server.log import RequestLine
from nanovllm.server.options import ServerOptions
from nanovllm.server.refusals import check_truncated
from nanovllm.vectors.outputs import PooledOutput


class VectorAnswering:
    """Answers requests' bodies with an engine that offers these models."""

    def __init__(self, llm: AsyncLLM, models: ServedModels, options: ServerOptions) -> None:
        self._llm, self._models, self._options = llm, models, options
        self._bodies = Bodies(llm.readers, options)

    async def handle(self, request: Request) -> Response:
        """Answer a request."""
        return await answered(request, self._bodies, self._parse, self._body)

    def _parse(self, url: str, body: Mapping[str, Any]) -> VectorRequest:
        if url == EMBEDDINGS:
            asked = parse_embeddings(body)
        else:
            asked = parse_rerank(body) if url in RERANK else parse_score(body)
        return self._checked(asked)

    def _checked(self, asked: VectorRequest) -> VectorRequest:
        """The request with the name of its model here, if its inputs are within the limits."""
        asked = replace(asked, model=self._models.answering(asked.model))
        self._check_number(asked)
        kept = asked.options.get("truncate_prompt_tokens")
        for texts in asked.arguments:
            check_truncated(texts, kept, self._options)
        return asked

    def _count(self, line: RequestLine, asked: VectorRequest) -> None:
        """Take the client's id of the request, and count the inputs for the client's limit."""
        line.rename(asked.name)
        line.add_samples(max(map(_number, asked.arguments)))

    async def _body(self, line: RequestLine, asked: VectorRequest) -> dict[str, Any]:
        """The body of the response."""
        self._count(line, asked)
        model = self._models.names[0]
        if line.url == EMBEDDINGS:
            vectors = await self._llm.embed(*asked.arguments, **self._settings(asked))
            data = await entries_of(embedding_entry, asked, vectors)
            answer = embeddings_body(asked, vectors, model, data)
        else:
            scores = await self._llm.score(*asked.arguments, **self._settings(asked))
            answer = score_body(line.name, asked, scores, model)
        line.count({**answer["usage"], "completion_tokens": 0}, None)
        return answer

    def _settings(self, asked: VectorRequest) -> dict[str, Any]:
        """The options of a call, with its adapter."""
        return dict(asked.options, lora_request=self._models.adapter(asked.model))

    def _check_number(self, asked: VectorRequest) -> None:
        """Raise if there are too many inputs: a short body can ask for much work."""
        number, most = max(map(_number, asked.arguments)), self._options.max_inputs
        if number > most:
            raise ValueError(
                f"a request must have at most {most} inputs (max_inputs), got {number}"
            )


async def entries_of(
    entry: Callable[[VectorRequest, int, Any], dict[str, Any]],
    asked: VectorRequest,
    outputs: Sequence[PooledOutput],
) -> list[orjson.Fragment]:
    """The entries of an answer as JSON. Other tasks run between them: thousands take long."""
    entries = []
    for index, output in enumerate(outputs):
        entries.append(orjson.Fragment(orjson.dumps(entry(asked, index, output))))
        await asyncio.sleep(0)
    return entries


def _number(texts: Any) -> int:
    return len(texts) if isinstance(texts, list) else 1
