"""Answer /pooling: vectors of inputs, or the last hidden states of their tokens; and /classify."""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanovllm.openai.pooling import (
    POOLING,
    VECTOR,
    joined_body,
    parse_pooling,
    pooled_values,
    pooling_entry,
    pooling_head,
)
from nanovllm.openai.vectors import VectorRequest
from nanovllm.server.answered import answered
from nanovllm.server.errors import APIError
from nanovllm.server.log import RequestLine
from nanovllm.server.vectors import VectorAnswering

Asked = tuple[str, VectorRequest]


class PoolingAnswering(VectorAnswering):
    """Answers requests' bodies by their tasks."""

    @property
    def routes(self) -> list[Route]:
        """The routes of these endpoints."""
        return [
            Route(POOLING, self.pooling, methods=["POST"]),
            Route("/classify", self.classify, methods=["POST"]),
        ]

    async def pooling(self, request: Request) -> Response:
        """Vectors of inputs, or the last hidden states of all their tokens."""
        return await answered(request, self._bodies, self._parse_pooling, self._pooled)

    async def classify(self, _: Request) -> Response:
        """Classes of inputs, by a classification head, which no model here has: an error."""
        raise APIError(
            400, "this model has no classification head. /score has how likely a yes is, and a"
            " completion with structured_outputs {\"choice\": [...]} chooses one of some texts",
        )  # fmt: skip

    def _parse_pooling(self, _: str, body: Mapping[str, Any]) -> Asked:
        task, asked = parse_pooling(body)
        return task, self._checked(asked)

    async def _pooled(self, line: RequestLine, asked: Asked) -> bytes:
        task, request = asked
        self._count(line, request)
        settings = self._settings(request)
        if task == VECTOR:
            outputs: Any = await self._llm.embed(*request.arguments, **settings)
        else:
            most = self._options.max_state_numbers
            outputs = await self._llm.encode(*request.arguments, max_numbers=most, **settings)
        head = pooling_head(line.name, request, outputs, self._models.names[0])
        line.count({**head["usage"], "completion_tokens": 0}, None)
        return await self._body_of(request, head, outputs)

    async def _body_of(
        self, request: VectorRequest, head: Mapping[str, Any], outputs: Sequence[Any]
    ) -> bytes:
        """The body as JSON. Threads write what has many numbers."""
        run, entries, size = self._llm.readers.run, [], 0
        for index, output in enumerate(outputs):
            values = pooled_values(output)
            size += values.size
            write = functools.partial(_entry, request, index, values)
            entries.append(await run(write, values.size))
            await asyncio.sleep(0)
        return await run(functools.partial(joined_body, head, entries), size)


def _entry(request: VectorRequest, index: int, values: Any) -> list[bytes]:
    return list(pooling_entry(request, index, values))
