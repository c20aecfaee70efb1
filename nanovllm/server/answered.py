"""Answer a request with the result of work that ends when its client disconnects."""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from nanovllm.server.bodies import Bodies
from nanovllm.server.gone import unless_gone
from nanovllm.server.log import CLIENT_LEFT, RequestLine

Asked = TypeVar("Asked")
Work = Response | Coroutine[Any, Any, Any]  # a response, or the body of one


async def answered(
    request: Request,
    bodies: Bodies,
    parse: Callable[[str, dict[str, Any]], Asked],
    work: Callable[[RequestLine, Asked], Work],
) -> Response:
    """Answer a request with the result of `work` for what `parse` makes of its URL and body.

    If the client disconnects before it is complete, the work is cancelled.
    """
    line: RequestLine = request.scope["line"]
    found = work(line, await bodies.read(request, functools.partial(parse, line.url)))
    if isinstance(found, Response):
        return found
    body = await unless_gone(request.receive, found, bodies.limits.timeout)
    return Response(status_code=CLIENT_LEFT) if body is None else json_response(body)


def json_response(value: Any) -> Response:
    """A whole answer, which may be JSON already.

    Numbers that are not finite become null, in streams too: JSON has none.
    """
    data = value if isinstance(value, bytes) else orjson.dumps(value)
    return Response(data, media_type="application/json")
