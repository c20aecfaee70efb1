"""Answering /v1/embeddings, /score and /rerank: vectors of prompts, and scores of documents."""

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nanovllm.async_llm import AsyncLLM
from nanovllm.openai.vectors import (
    EMBEDDINGS,
    RERANK,
    VectorRequest,
    embeddings_body,
    parse_embeddings,
    parse_rerank,
    parse_score,
    score_body,
)
from nanovllm.server.adapters import ServedModels
from nanovllm.server.answering import CLIENT_LEFT, unless_gone
from nanovllm.server.bodies import read_object
from nanovllm.server.errors import as_api_error
from nanovllm.server.log import RequestLine
from nanovllm.server.options import ServerOptions


class Vectors:
    """Answers bodies by an engine, which offers these models."""

    def __init__(self, llm: AsyncLLM, models: ServedModels, options: ServerOptions) -> None:
        self._llm, self._models, self._options = llm, models, options

    async def handle(self, request: Request) -> Response:
        """Answer a request."""
        url = request.url.path.removeprefix(request.scope.get("root_path", ""))
        line = RequestLine(url, uuid.uuid4().hex)
        try:
            body = await read_object(request, self._options.max_body_mib)
            work = self._body(line.name, url, body)
            answer = await unless_gone(request.receive, work, self._options.timeout)
        except asyncio.CancelledError:  # by what runs the application
            line.write(CLIENT_LEFT)
            raise
        except Exception as error:
            line.write(as_api_error(error).status)
            raise
        if answer is None:
            line.write(CLIENT_LEFT)
            return Response(status_code=CLIENT_LEFT)
        line.count({**answer["usage"], "completion_tokens": 0}, None)
        line.write(200)
        return JSONResponse(answer)

    async def _body(self, name: str, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The body of the response."""
        model, adapter = self._models.names[0], self._models.adapter
        if url == EMBEDDINGS:
            asked = parse_embeddings(body)
            self._check_number(asked)
            using = dict(asked.options, lora_request=adapter(asked.model))
            vectors = await self._llm.embed(*asked.arguments, **using)
            return embeddings_body(asked, vectors, model)
        asked = parse_rerank(body) if url in RERANK else parse_score(body)
        self._check_number(asked)
        using = dict(asked.options, lora_request=adapter(asked.model))
        scores = await self._llm.score(*asked.arguments, **using)
        return score_body(name, asked, scores, model)

    def _check_number(self, asked: VectorRequest) -> None:
        """Raise if there are too many inputs: a short body can ask for much work."""
        number, most = max(map(_number, asked.arguments)), self._options.max_inputs
        if number > most:
            raise ValueError(
                f"a request must have at most {most} inputs (max_inputs), got {number}"
            )


def _number(texts: Any) -> int:
    return len(texts) if isinstance(texts, list) else 1
