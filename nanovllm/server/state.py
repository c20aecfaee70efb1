"""/ping, /load and /server_info: the state of the server for load balancers and people."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nanovllm import __version__
from nanovllm.async_llm import AsyncLLM
from nanovllm.server.adapters import ServedModels
from nanovllm.server.clients import Clients
from nanovllm.server.options import ServerOptions

NOT_SHOWN = ("api_key", "ssl_certfile", "ssl_keyfile")


class ServerState:
    """`health` answers /ping too, the path of SageMaker."""

    def __init__(
        self,
        llm: AsyncLLM,
        models: ServedModels,
        options: ServerOptions,
        clients: Clients,
        health: Callable[[Request], Awaitable[Response]],
    ) -> None:
        self._llm, self._models, self._options = llm, models, options
        self._clients, self._health = clients, health

    @property
    def routes(self) -> list[Route]:
        """The routes of these endpoints."""
        return [
            Route("/ping", self.ping, methods=["GET", "POST"]),
            Route("/load", self.load),
            Route("/server_info", self.server_info),
        ]

    async def ping(self, request: Request) -> Response:
        """Status 200 as long as the engine answers, as /health."""
        return await self._health(request)

    async def load(self, _: Request) -> JSONResponse:
        """How many requests that may do work are being answered, streams included."""
        counts = self._clients.counts.values()
        return JSONResponse({"server_load": sum(one.requests for one in counts)})

    async def server_info(self, _: Request) -> JSONResponse:
        """The version, the names of the model, and all options but keys and certificates."""
        config, shown = self._llm.config, dataclasses.asdict(self._options)
        for name in NOT_SHOWN:
            del shown[name]
        return JSONResponse(
            {
                "version": __version__,
                "models": list(self._models.names),
                "engine": _plain(dataclasses.asdict(config)),
                "server": _plain(shown),
            }
        )


def _plain(value: Any) -> Any:
    """The value as JSON can have it."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(one) for one in value]
    return value if isinstance(value, int | float | str | None) else str(value)
