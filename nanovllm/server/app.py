"""The application: its routes, and the handling that they share."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from nanovllm import __version__
from nanovllm.async_llm import AsyncLLM
from nanovllm.engine.errors import EngineEndedError, NotReadyError, RankError
from nanovllm.openai.request import CHAT, COMPLETIONS
from nanovllm.openai.vectors import EMBEDDINGS, RERANK, SCORE
from nanovllm.server.adapters import ServedModels
from nanovllm.server.answering import Answering
from nanovllm.server.chats.api import ChatAPI
from nanovllm.server.clients import Clients
from nanovllm.server.described.endpoints import Described, fields_of
from nanovllm.server.errors import APIError, raise_own
from nanovllm.server.guard import Guard, known_hosts
from nanovllm.server.messages.endpoints import Messages
from nanovllm.server.metrics import metrics_text
from nanovllm.server.options import ServerOptions
from nanovllm.server.pooling import PoolingAnswering
from nanovllm.server.responses.endpoints import Responses
from nanovllm.server.sleeping import Sleeping
from nanovllm.server.state import ServerState
from nanovllm.server.tokens import TokenAnswering
from nanovllm.server.vectors import VectorAnswering

PAGE = Path(__file__).with_name("page.html")
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def make_app(
    llm: AsyncLLM, options: ServerOptions, defaults: Mapping[str, Mapping[str, Any]]
) -> tuple[Starlette, Guard]:
    """The ASGI application that serves `llm`, and the guard in it.

    `defaults` are sampling parameters, by URL, for bodies without them.
    """
    names = tuple(options.served_model_name or (llm.config.model,))
    models = ServedModels(llm, names, options)
    answering = Answering(llm, models, options, defaults)
    chats = ChatAPI(llm, models, options, defaults)
    vectors = VectorAnswering(llm, models, options)
    pooling = PoolingAnswering(llm, models, options)
    tokens = TokenAnswering(llm, models, options)
    server = ServerEndpoints(llm, models, options.health_seconds)
    clients = Clients(options)
    state = ServerState(llm, models, options, clients, server.health)
    routes = [
        Route(CHAT, answering.handle, methods=["POST"]),
        Route(COMPLETIONS, answering.handle, methods=["POST"]),
        *Responses(chats).routes,
        *Messages(chats).routes,
        *(Route(url, vectors.handle, methods=["POST"]) for url in (EMBEDDINGS, *SCORE, *RERANK)),
        Route("/v1/load_lora_adapter", models.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", models.unload, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokens.info),
        Route("/start_profile", server.start_profile, methods=["POST"]),
        Route("/stop_profile", server.stop_profile, methods=["POST"]),
        Route("/health", server.health),
        Route("/version", server.version),
        Route("/metrics", server.metrics),
        Route("/", server.page),
        *pooling.routes,
        *state.routes,
        *Described(options, llm.model_config.vocab_size).routes,
        *(Sleeping(llm).routes if options.sleep_endpoints else ()),
    ]
    origins = list(options.cors_origin or ())
    guard = Guard(tuple(options.api_key or ()), origins, known_hosts(options), clients, fields_of)
    around: Any = [Middleware(guard.around)]
    if origins:  # outermost, so that a page on another site can also read errors
        allowed: Any = dict(allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        around.insert(0, Middleware(CORSMiddleware, **allowed))
    handlers: Any = {HTTPException: raise_own}
    app = Starlette(routes=routes, middleware=around, exception_handlers=handlers)
    app.router.redirect_slashes = False  # to a host, and a scheme, that only a proxy would know
    return app, guard


class ServerEndpoints:
    """The endpoints that describe the server."""

    def __init__(self, llm: AsyncLLM, models: ServedModels, health_seconds: float) -> None:
        self._llm, self._models, self._health_seconds = llm, models, health_seconds

    async def models(self, _: Request) -> JSONResponse:
        """The model by all its names, and its adapters."""
        return JSONResponse({"object": "list", "data": self._models.descriptions()})

    async def model(self, request: Request) -> JSONResponse:
        """The model, or an adapter, by one of its names."""
        return JSONResponse(self._models.description(request.path_params["name"]))

    async def health(self, _: Request) -> Response:
        """Status 200 as long as the engine answers."""
        try:
            await self._llm.ping(self._health_seconds)
        except asyncio.TimeoutError:
            raise APIError(
                503, f"the engine has not answered for {self._health_seconds:g} s", "engine_hangs"
            ) from None
        return Response(status_code=200)

    async def start_profile(self, _: Request) -> Response:
        """Start the engine's profiler."""
        with self._refusals():
            await self._llm.start_profile()
        return Response(status_code=200)

    async def stop_profile(self, _: Request) -> JSONResponse:
        """Stop the profiler; the answer has the names of the traces."""
        with self._refusals():
            return JSONResponse({"traces": [str(p) for p in await self._llm.stop_profile()]})

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Answer the errors of an engine with status 400, unless it has ended."""
        try:
            yield
        except (NotReadyError, EngineEndedError, RankError):
            raise
        except (RuntimeError, OSError) as error:
            raise APIError(400, str(error)) from None

    async def version(self, _: Request) -> JSONResponse:
        """The version of nanovllm."""
        return JSONResponse({"version": __version__})

    async def metrics(self, _: Request) -> Response:
        """The engine's metrics."""
        text = metrics_text(await self._llm.get_metrics(), self._models.names[0])
        return Response(text, media_type=PROMETHEUS)

    async def page(self, _: Request) -> Response:
        """The page for chats that also shows the state of the engine."""
        return FileResponse(PAGE, media_type="text/html")
