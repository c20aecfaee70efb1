"""Read the body of a request: JSON of limited size."""

from typing import Any

from starlette.requests import ClientDisconnect, Request

from nanovllm.server.errors import APIError
from nanovllm.server.log import CLIENT_LEFT
from nanovllm.utils.checks import shorten
from nanovllm.utils.json_text import parse_json, shorten_json

MIB = 1 << 20


async def read_object(request: Request, max_mib: int) -> dict[str, Any]:
    """The JSON object in a body; other bodies are errors."""
    data = await _read(request, max_mib)
    try:
        value = parse_json(data.decode())
    except UnicodeDecodeError as error:
        raise APIError(400, f"the body is not valid UTF-8: {error}") from None
    except ValueError as error:
        raise APIError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise APIError(400, f"the body must be a JSON object, got {shorten_json(value)}")
    return value


async def _read(request: Request, max_mib: int) -> bytes:
    """The bytes of a body. One that is too large is not read into memory."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise APIError(415, f"the body must not be compressed, got {shorten(encoding)}")
    data = bytearray()
    length = request.headers.get("content-length", "0")
    is_large = length.isdigit() and int(length) > max_mib * MIB
    try:
        if not is_large:
            async for part in request.stream():
                data += part
                if is_large := len(data) > max_mib * MIB:
                    break
    except ClientDisconnect:
        raise APIError(CLIENT_LEFT, "the client left before the end of the body") from None
    if is_large:
        raise APIError(413, f"the body must have at most {max_mib} MiB", "body_too_large")
    return bytes(data)
