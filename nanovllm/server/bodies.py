"""Read the body of a request: JSON of limited size."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from nanovllm.engine.remote.readers import Readers
from nanovllm.server.errors import APIError
from nanovllm.server.gone import unless_gone
from nanovllm.server.limits import COST, Limits
from nanovllm.server.log import CLIENT_LEFT
from nanovllm.utils.checks import shorten
from nanovllm.utils.json_text import parse_json, shorten_json

T = TypeVar("T")
MIB = 1 << 20
LONG = 1 << 16  # bytes of a body from which a thread parses it, in pieces


class Bodies:
    """Reads the bodies of requests, within the limits of a server.

    `also` has how many bytes are parsed with a short body.
    """

    def __init__(
        self,
        readers: Readers,
        limits: Limits,
        also: Callable[[Request, Mapping[str, Any]], int] = lambda *_: 0,
    ) -> None:
        self._readers, self.limits, self._also = readers, limits, also

    async def read(self, request: Request, parse: Callable[[dict[str, Any]], T]) -> T:
        """The result of `parse` for the JSON object in a body; other bodies are errors.

        If the body is long, a thread parses it, unless the client leaves before.
        """
        data = await _read(request, self.limits.max_body_mib)
        parsed, size = functools.partial(self._parsed, data, parse), len(data)
        if size < LONG:
            body = self._object(data)
            size += self._also(request, body)
            if size < LONG:
                return parse(body)
            parsed = functools.partial(parse, body)
        work = self._readers.run(parsed, size)
        del data, parsed  # so that it is not kept longer than the work
        found = await unless_gone(request.receive, work, self.limits.timeout)
        if found is None:
            raise APIError(CLIENT_LEFT, "the client left before its body was parsed")
        return found

    def _parsed(self, data: bytes, parse: Callable[[dict[str, Any]], T]) -> T:
        return parse(self._object(data))

    def _object(self, data: bytes) -> dict[str, Any]:
        most, depth = self.limits.max_body_values, self.limits.max_body_depth
        # As values are counted, a body has less than COST / 2 for each byte.
        is_small = COST // 2 * len(data) <= most and data.count(b"[") + data.count(b"{") <= depth
        try:
            if is_small and len(data) < LONG:
                value = parse_json(data.decode())
            else:
                value = parsed_in_pieces(data, most, depth)
        except UnicodeDecodeError as error:
            raise APIError(400, f"the body is not valid UTF-8: {error}") from None
        except ValueError as error:
            raise APIError(400, f"the body is not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise APIError(400, f"the body must be a JSON object, got {shorten_json(value)}")
        return value


def parsed_in_pieces(data: bytes, max_values: int, max_depth: int, name: str = "the body") -> Any:
    """Parse JSON so that other threads run in between; an error about values has its `name`."""
    from nanovllm.server.long_json import TooManyValuesError, parse_long

    try:
        return parse_long(data, max_values, max_depth)
    except TooManyValuesError:
        raise APIError(
            413, f"{name} must have at most {max_values} values (max_body_values)",
            "body_too_large",
        ) from None  # fmt: skip


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
        raise APIError(
            413, f"the body must have at most {max_mib} MiB (max_body_mib)", "body_too_large"
        )
    return bytes(data)
