"""Errors as OpenAI's API writes them: a status, and a body with a type, a message and a code."""

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nanovllm.engine.errors import (
    AsleepError,
    EngineEndedError,
    EngineFullError,
    NotReadyError,
    RankError,
)
from nanovllm.engine.requests.prompt_length import PromptTooLongError
from nanovllm.server.messages.errors import has_own_errors, messages_error
from nanovllm.server.named_field import NO_FIELDS, Fields, named_field
from nanovllm.utils.checks import did_you_mean, shorten

logger = logging.getLogger("nanovllm.server")
SLEEP_PATHS = ("/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/reload_weights")
TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 405: "invalid_request_error", 408: "timeout_error",
    409: "conflict_error", 413: "invalid_request_error", 415: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error", 501: "not_implemented_error", 503: "service_unavailable_error",
}  # fmt: skip
RETRY = {"Retry-After": "1"}  # seconds
NO_RETRY = {"X-Should-Retry": "false"}  # OpenAI's clients repeat other requests with these statuses
HEADERS: Mapping[int, Mapping[str, str]] = {408: NO_RETRY, 429: RETRY, 500: NO_RETRY, 503: RETRY}


class APIError(Exception):
    """An error with its status."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


def error_body(error: APIError, fields: Fields = NO_FIELDS) -> dict[str, Any]:
    """The body of an error of a request whose body may have these fields."""
    kind, param = TYPES.get(error.status, "server_error"), error_param(error, fields)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.code}}


def error_param(error: APIError, fields: Fields) -> str | None:
    """The field of a request's body that is wrong, or that names what does not exist."""
    return named_field(str(error), fields) if error.status in (400, 404) else None


def request_error(reason: str) -> APIError:
    """The status of a request that has ended with an error, by its `stop_reason`."""
    from nanovllm.engine.schedule.failures import NOT_FINITE  # after the engine has started

    return APIError(500 if reason == NOT_FINITE else 400, reason)


def as_api_error(error: Exception) -> APIError:
    """The status and the message of an exception. The traceback of an internal error is logged."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, EngineFullError):
        return APIError(429, str(error), "engine_full")
    if isinstance(error, asyncio.TimeoutError):
        return APIError(408, "the request took longer than the server allows (timeout)", "timeout")
    if isinstance(error, PromptTooLongError):
        return APIError(400, _with_limit(str(error)), "context_length_exceeded")
    if isinstance(error, ValueError | TypeError):
        from nanovllm.server.json_words import in_json_words

        return APIError(400, in_json_words(str(error)))
    if isinstance(error, AsleepError):
        return APIError(503, "the engine sleeps; POST /wake_up ends it", "not_ready")
    if isinstance(error, NotReadyError):
        return APIError(503, str(error), "not_ready")
    if isinstance(error, RankError | EngineEndedError):
        return APIError(503, f"the engine has ended: {error}", "engine_dead")
    logger.error("a request has failed", exc_info=error)
    message = f"internal server error: {type(error).__name__}: {error}"
    return APIError(500, message, "internal_error")


def _with_limit(message: str) -> str:
    """The message with the words by which clients that read no codes know that a prompt is long."""
    limit = re.search(r"max_model_len=(\d+)", message)
    words = f"; this model's maximum context length is {limit[1]} tokens" if limit else ""
    return message + words


def error_response(error: APIError, url: str = "", fields: Fields = NO_FIELDS) -> JSONResponse:
    """The response to a request for this path that has failed; its body may have these fields."""
    if has_own_errors(url):
        body = messages_error(error.status, str(error))
    else:
        body = error_body(error, fields)
    return JSONResponse(
        body, status_code=error.status, headers=error.headers or HEADERS.get(error.status)
    )


async def raise_own(request: Request, error: HTTPException) -> Response:
    """Raise an error of Starlette as an APIError.

    Its message says what is wrong with the path or the method; Starlette's does not.
    """
    path = request.scope["line"].url
    if error.status_code == 405:
        found = (error.headers or {}).get("Allow", "other methods").split(", ")  # in any order
        allowed = ", ".join(sorted(found))
        message = f"{path} takes {allowed}, got {request.method}"
        raise APIError(405, message, headers={"Allow": allowed})
    if error.status_code != 404:
        raise APIError(error.status_code, error.detail)
    known = [route.path for route in request.app.routes if isinstance(route, Route)]
    is_off = path in SLEEP_PATHS
    hint = " (--sleep-endpoints adds it)" if is_off else did_you_mean(path, known)
    raise APIError(404, f"there is no path {shorten(path)}{hint}")
