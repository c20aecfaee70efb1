"""Errors as OpenAI's API writes them: a status, and a body with a type, a message and a code."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from nanovllm.async_llm import EngineFullError
from nanovllm.engine.errors import EngineEndedError, NotReadyError
from nanovllm.engine.ranks.errors import RankError
from nanovllm.utils.checks import did_you_mean, shorten

logger = logging.getLogger("nanovllm.server")
RETRY_SECONDS = "1"
SLEEP_PATHS = ("/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache")
TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 405: "invalid_request_error", 408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error", 501: "not_implemented_error", 503: "service_unavailable_error",
}  # fmt: skip


class APIError(Exception):
    """An error with its status."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    kind = TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def as_api_error(error: BaseException) -> APIError:
    """The status and the message of an exception."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):
        return APIError(error.status_code, str(error.detail))
    if isinstance(error, EngineFullError):
        return APIError(429, str(error), "engine_full")
    if isinstance(error, asyncio.TimeoutError):
        return APIError(408, "the request took longer than the server's timeout", "timeout")
    if isinstance(error, ValueError | TypeError):
        return APIError(400, str(error))
    if isinstance(error, NotReadyError):
        return APIError(503, f"{error}{_way_out(str(error))}", "not_ready")
    if isinstance(error, RankError | EngineEndedError):
        return APIError(503, f"the engine has ended: {error}", "engine_dead")
    logger.error("a request has failed", exc_info=error)
    return APIError(500, f"an error of the server's own: {type(error).__name__}: {error}")


def error_response(error: BaseException) -> JSONResponse:
    """The response to a request that has failed."""
    found = as_api_error(error)
    headers: Mapping[str, str] = {}
    if found.status in (429, 503):
        headers = {"Retry-After": RETRY_SECONDS}
    body = error_body(found.status, str(found), found.code)
    return JSONResponse(body, status_code=found.status, headers=dict(headers))


async def handle_error(request: Request, error: Exception) -> JSONResponse:
    """The response to an exception of Starlette's or of ours."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        error = _misdirected(request, error)
    return error_response(error)


def _misdirected(request: Request, error: HTTPException) -> APIError:
    """What is wrong with the path or the method, of which Starlette's message says nothing."""
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "other methods").split(", ")  # in any order
        return APIError(405, f"{path} takes {', '.join(sorted(allowed))}, got {request.method}")
    known = [route.path for route in request.app.routes if isinstance(route, Route)]
    is_off = path in SLEEP_PATHS
    hint = " (--sleep-endpoints adds it)" if is_off else did_you_mean(path, known)
    return APIError(404, f"there is no path {shorten(path)}{hint}")


def _way_out(message: str) -> str:
    """What a client can send where a message names a call in Python."""
    named = "wake_up()" in message or "reload_weights()" in message
    return "; over HTTP: POST /wake_up" if named else ""
