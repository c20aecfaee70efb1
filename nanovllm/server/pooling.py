"""Answer /pooling: vectors of inputs, or the last hidden states of their tokens; and /classify."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanovllm.openai.pooling import POOLING, VECTOR, parse_pooling, pooling_body, pooling_entry
from nanovllm.openai.vectors import VectorRequest
from nanovllm.server.answered import answered
from nanovllm.server.errors import APIError
from nanovllm.server.log import RequestLine
from nanovllm.server.vectors import VectorAnswering, entries_of

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

    async def _pooled(self, line: RequestLine, asked: Asked) -> dict[str, Any]:
        task, request = asked
        self._count(line, request)
        call = self._llm.embed if task == VECTOR else self._llm.encode
        outputs: Any = await call(*request.arguments, **self._settings(request))
        data = await entries_of(pooling_entry, request, outputs)
        answer = pooling_body(line.name, request, outputs, self._models.names[0], data)
        line.count({**answer["usage"], "completion_tokens": 0}, None)
        return answer
