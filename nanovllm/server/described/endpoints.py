"""/openapi.json and /docs."""

from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from nanovllm.server.named_field import NO_FIELDS, Fields
from nanovllm.server.options import ServerOptions
from nanovllm.server.refusals import limit_schemas


def fields_of(path: str) -> Fields:
    """The fields that a body for this path may have, for errors that name one."""
    from nanovllm.server.described.bodies import BODIES

    if (body := BODIES.get(path)) is None:
        return NO_FIELDS
    return Fields((*body.names, *body.others), *body.required[:1])


class Described:
    """Describes the application that answers a request; the description is made when asked for."""

    def __init__(self, options: ServerOptions, vocab_size: int) -> None:
        self._needs_key = bool(options.api_key)
        self._limits = limit_schemas(options, vocab_size)
        self._document: dict[str, Any] | None = None

    @property
    def routes(self) -> list[Route]:
        """The routes of these endpoints."""
        return [Route("/openapi.json", self.openapi), Route("/docs", self.docs)]

    async def openapi(self, request: Request) -> Response:
        """What this server answers, as OpenAPI 3.1."""
        return JSONResponse(self._of(request))

    async def docs(self, request: Request) -> Response:
        """The description as a page."""
        from nanovllm.server.described.page import docs_page

        return HTMLResponse(docs_page(self._of(request)))

    def _of(self, request: Request) -> dict[str, Any]:
        if self._document is None:
            from nanovllm.server.described.document import openapi

            self._document = openapi(request.app.routes, self._needs_key, self._limits)
        return self._document
