"""Errors as Anthropic's API writes them."""

from typing import Any

PATH = "/v1/messages"
KEY_HEADER = "x-api-key"  # in which this API's clients send keys
TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 405: "invalid_request_error", 408: "timeout_error",
    413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip


def has_own_errors(url: str) -> bool:
    """Whether the errors of requests for this path have this form."""
    return url == PATH or url.startswith(f"{PATH}/")


def messages_error(status: int, message: str) -> dict[str, Any]:
    """The body of an error."""
    return {"type": "error", "error": {"type": TYPES.get(status, "api_error"), "message": message}}
