"""Guard: keys, and what a server that ends still does."""

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm.server.errors import APIError, error_response

OPEN_PATHS = ("/", "/health", "/version", "/metrics")  # without a key
ENDING_PATHS = ("/metrics", "/version")  # while it drains


class Guard:
    """Lets requests with a key pass, and none while the server drains."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]
        self.is_draining = False
        self.num_active = 0  # requests that are being answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await error_response(error)(scope, receive, send)
            return
        self.num_active += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_active -= 1

    def _refusal(self, scope: Scope) -> APIError | None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        if self.is_draining and path not in ENDING_PATHS:
            return APIError(503, "the server is ending; try another one", "draining")
        if not self._keys or path in OPEN_PATHS:
            return None
        given = Headers(scope=scope).get("authorization", "")
        kind, _, key = given.partition(" ")
        matches = [hmac.compare_digest(key.strip().encode(), one) for one in self._keys]
        if kind.lower() == "bearer" and any(matches):
            return None
        return APIError(401, "a key is needed: Authorization: Bearer KEY", "invalid_api_key")
