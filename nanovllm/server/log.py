"""RequestLine: the line in the log for each request, without prompts and answers."""

import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Scope

from nanovllm.outputs import RequestMetrics
from nanovllm.server.clients import ClientRequest

logger = logging.getLogger("nanovllm.server")
CLIENT_LEFT = 499  # the status if the client has disconnected, as in nginx's logs
# The text after one of these in a message may be part of a prompt.
VALUE = re.compile(r"\n|, got |['\"{]|(?<=template fails for messages): ")
MOST_SHOWN = 200  # characters


class RequestLine:
    """The logged values of a request: its path and id, how it ended, its tokens and times.

    Guard makes it, as `scope["line"]`, and writes it when the request has ended. It also has the
    part of the counts of its `client` that belongs to this request, if it is counted, and the API
    key that it came with, which is not written.
    """

    def __init__(self, scope: Scope) -> None:
        self.url, self.name, self._is_named = path_of(scope), uuid.uuid4().hex, False
        self.start = time.perf_counter()
        self.status: int | None = None  # None until the response begins
        self.first: float | None = None  # seconds until the first token
        self.reason: str | None = None
        self.client: ClientRequest | None = None
        self.key: bytes | None = None
        self._tokens = ""

    def rename(self, name: str | None) -> None:
        """Take the client's id of the request: that of the header, else that of the body."""
        if name is not None and not self._is_named:
            self.name, self._is_named = name, True

    def add_samples(self, number: int) -> None:
        """Count samples of the request's client; raise if they are too many."""
        if self.client is not None:
            self.client.add_samples(number)

    def record_first_token(self, seconds_ago: float = 0.0) -> None:
        """Record that the first token has come, now or some time ago."""
        self.first = time.perf_counter() - self.start - seconds_ago

    def count(self, usage: Mapping[str, Any], reason: str | None) -> None:
        """Record the numbers of tokens, and how the first sample ended."""
        self._tokens = f" {usage['prompt_tokens']}+{usage['completion_tokens']} tokens"
        self.reason = reason

    def fail(self, status: int, message: str, code: str | None) -> None:
        """Record an error: its code, or its message without the values in it."""
        self.status = status
        self.reason = code or _shown(VALUE.split(message, maxsplit=1)[0].rstrip())

    def write(self) -> None:
        """Write the line: the request has ended."""
        status = CLIENT_LEFT if self.status is None else self.status
        first = "" if self.first is None else f" first {1000 * self.first:.1f} ms,"
        whole = 1000 * (time.perf_counter() - self.start)
        ending = f" {self.reason}" if self.reason else ""
        logger.info(
            "%s %s %d%s%s %.1f ms%s",
            _shown(self.url), self.name, status, self._tokens, first, whole, ending,
        )  # fmt: skip


def record_first_of(line: RequestLine, times: Sequence[RequestMetrics]) -> None:
    """Record when whole outputs, which have just ended, had their first token."""
    since = [
        one.end_to_end_time - one.time_to_first_token
        for one in times
        if one.time_to_first_token is not None
    ]
    if since:
        line.record_first_token(max(since))


def path_of(scope: Scope) -> str:
    """The path of a request without `root_path`, as Starlette's routes match it."""
    path: str = scope["path"]
    rest = path.removeprefix(scope.get("root_path", ""))
    return (rest or "/") if rest[:1] in ("", "/") else path


def _shown(text: str) -> str:
    """A client's text as the log shows it: shortened, without control characters."""
    return repr(text[:MOST_SHOWN])[1:-1]
