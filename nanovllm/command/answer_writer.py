"""AnswerWriter: writes answers to stdout as they come, without a model's markers."""

import os
import sys
from typing import Any

DIM, USUAL = "\x1b[2m", "\x1b[0m"  # a terminal's codes
GAP = "\n\n"  # between reasoning and content


def has_codes() -> bool:
    """Whether a terminal of this process knows codes such as DIM."""
    return os.environ.get("TERM") != "dumb"


class AnswerWriter:
    """Writes the deltas of an answer to stdout: the content, and on a terminal the reasoning."""

    def __init__(self) -> None:
        self._shows_reasoning = sys.stdout.isatty() and has_codes()
        self._is_dim = False

    def write(self, delta: dict[str, Any]) -> None:
        """Write what is new."""
        reasoning, content = delta.get("reasoning_content"), delta.get("content")
        if reasoning and self._shows_reasoning:
            self._set_dim(True)
            sys.stdout.write(reasoning)
        if content:
            if self._is_dim:
                self._set_dim(False)
                sys.stdout.write(GAP)
            sys.stdout.write(content)
        sys.stdout.flush()

    def end(self, text: str) -> None:
        """Write a last text, as usual."""
        self._set_dim(False)
        sys.stdout.write(text)
        sys.stdout.flush()

    def _set_dim(self, is_dim: bool) -> None:
        if is_dim != self._is_dim:
            sys.stdout.write(DIM if is_dim else USUAL)
            self._is_dim = is_dim
