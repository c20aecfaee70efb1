"""HTTPServer: listens, and gives each client a Connection; uvicorn runs and ends it."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from nanovllm.server.connection import Connection
from nanovllm.server.exchange import Service
from nanovllm.server.options import ServerOptions

BACKLOG = 4096  # connections that wait to be accepted
KEEP_ALIVE_SECONDS = 75  # longer than a proxy's, which must not reuse a connection that closes


class HTTPServer(uvicorn.Server):
    """A server of an ASGI application. It leaves signals alone."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, lifespan="off", ws="none",
                root_path=options.root_path or "", ssl_certfile=options.ssl_certfile,
                ssl_keyfile=options.ssl_keyfile, timeout_graceful_shutdown=1,
                timeout_keep_alive=KEEP_ALIVE_SECONDS, backlog=BACKLOG,
            )
        )  # fmt: skip
        self._limits = options

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Accept connections at these sockets, which are bound."""
        config = self.config
        service = Service(
            config.loaded_app, self._limits, self.server_state, config.root_path,
            config.timeout_keep_alive,
        )  # fmt: skip
        tls: dict[str, Any] = {}
        if config.ssl is not None:
            tls = dict(ssl=config.ssl, ssl_handshake_timeout=self._limits.request_seconds)
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                lambda: Connection(service), sock=one, backlog=config.backlog, **tls
            )
            for one in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: `serve` handles signals."""
        yield
