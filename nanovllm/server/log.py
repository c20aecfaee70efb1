"""RequestLine: the line that the log has of each request. It never has prompts or answers."""

import logging
import time
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("nanovllm.server")


class RequestLine:
    """Collects what is logged of a request: its id, tokens and times."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        self.start = time.perf_counter()
        self.first: float | None = None  # seconds until the first token
        self.reason: str | None = None
        self._tokens = ""

    def count(self, usage: Mapping[str, Any], reason: str | None) -> None:
        """Take the numbers of tokens, and how the first sample ended."""
        self._tokens = f" {usage['prompt_tokens']}+{usage['completion_tokens']} tokens"
        self.reason = reason

    def write(self, status: int) -> None:
        """Write the line: the request has ended."""
        first = "" if self.first is None else f" first {1000 * self.first:.1f} ms,"
        whole = 1000 * (time.perf_counter() - self.start)
        ending = f" {self.reason}" if self.reason else ""
        logger.info(
            "%s %s %d%s%s %.1f ms%s",
            self.url, self.name, status, self._tokens, first, whole, ending,
        )  # fmt: skip
