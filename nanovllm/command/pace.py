"""Pace: how fast an answer comes, in a line for a terminal."""

import sys
import time

from nanovllm.command.answer_writer import DIM, USUAL, has_codes


class Pace:
    """Times the tokens of one answer, from the request on."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._first = self._last = 0.0
        self._num_first = self._num_tokens = 0

    def add(self, num_tokens: int) -> None:
        """Count tokens that have come now."""
        self._last = time.perf_counter()
        if not self._num_tokens:
            self._first, self._num_first = self._last, num_tokens
        self._num_tokens += num_tokens

    def line(self) -> str:
        """The number of tokens, the time of the first one, and the rate of those after it."""
        count = f"{self._num_tokens} token{'' if self._num_tokens == 1 else 's'}"
        parts = [count, f"the first after {self._first - self._begin:.2f} s"]
        later, seconds = self._num_tokens - self._num_first, self._last - self._first
        if later and seconds > 0:
            parts.append(f"{later / seconds:.1f} tok/s")
        return ", ".join(parts)

    def show(self) -> None:
        """Write the line to stderr if that and stdout are a terminal."""
        if self._num_tokens and sys.stdout.isatty() and sys.stderr.isatty():
            dim, usual = (DIM, USUAL) if has_codes() else ("", "")
            print(f"{dim}({self.line()}){usual}", file=sys.stderr)
