"""The endpoints for sleep, with vLLM's paths. They exist if the server's options say so."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nanovllm.async_llm import AsyncLLM
from nanovllm.engine.errors import AsleepError, NotReadyError
from nanovllm.server.errors import SLEEP_PATHS, APIError
from nanovllm.utils.checks import shorten


class Sleeping:
    """`/sleep`, `/wake_up`, `/is_sleeping`, `/reset_prefix_cache` and `/reload_weights`."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    @property
    def routes(self) -> list[Route]:
        """The routes of these endpoints."""
        sleep, wake_up, is_sleeping, reset_prefix_cache, reload_weights = SLEEP_PATHS
        return [
            Route(sleep, self.sleep, methods=["POST"]),
            Route(wake_up, self.wake_up, methods=["POST"]),
            Route(is_sleeping, self.is_sleeping),
            Route(reset_prefix_cache, self.reset_prefix_cache, methods=["POST"]),
            Route(reload_weights, self.reload_weights, methods=["POST"]),
        ]

    async def sleep(self, request: Request) -> Response:
        """Free memory: `level` is 1 or 2, `running` is "refuse" or "abort"."""
        await _check(request, "level", "running")
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise APIError(400, f"level must be 1 or 2, got {level!r}")
        running: Any = request.query_params.get("running", "refuse")
        try:
            await self._llm.sleep(int(level), running=running)
        except AsleepError as error:
            raise APIError(409, str(error), "asleep") from None
        except NotReadyError as error:  # requests are running, or weights are missing
            raise APIError(409, str(error), "busy") from None
        return Response(status_code=200)

    async def wake_up(self, request: Request) -> Response:
        """Get memory back: of `tags`, which may be repeated, or all."""
        await _check(request, "tags")
        await self._llm.wake_up(request.query_params.getlist("tags") or None)
        return Response(status_code=200)

    async def is_sleeping(self, request: Request) -> JSONResponse:
        """Whether memory is freed."""
        await _check(request)
        return JSONResponse({"is_sleeping": await self._llm.is_sleeping()})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Empty the prefix cache."""
        await _check(request)
        await self._llm.reset_prefix_cache()
        return Response(status_code=200)

    async def reload_weights(self, request: Request) -> Response:
        """Load the checkpoint again, such as after level 2; `running` is that of `sleep`."""
        await _check(request, "running")
        running: Any = request.query_params.get("running", "refuse")
        await self._llm.reload_weights(running=running)
        return Response(status_code=200)


async def _check(request: Request, *allowed: str) -> None:
    """Raise for parameters that the endpoint does not have, and for a body."""
    if (await request.body()).strip() not in (b"", b"{}"):
        raise APIError(400, "this endpoint has no body: parameters are in the URL, /sleep?level=2")
    unknown = sorted(set(request.query_params) - set(allowed))
    if unknown:
        known = " and ".join(allowed) or "no parameters"
        path = request.scope["line"].url
        raise APIError(400, f"{path} takes {known}, got {shorten(unknown[0])}")
