"""Reasoning: separates the text between `<think>` and `</think>` from the answer."""

from dataclasses import dataclass
from typing import NamedTuple

from nanovllm.chat.tool_formats.source import overlap

START, END = "<think>", "</think>"


class Divided(NamedTuple):
    """New parts of an answer: reasoning, and the text after it."""

    reasoning: str
    rest: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How an answer begins: `inside` reasoning, or with `<think>` if there is any.

    If it is `sure`, the model writes `</think>` at some time. If it is `over`, the prompt ends with
    `</think>`.
    """

    inside: bool = False
    sure: bool = False
    over: bool = False


class ReasoningReader:
    """Takes an answer in pieces. The joined parts do not depend on the division into pieces.

    An answer that begins `inside` reasoning may still begin with `<think>`.
    White space around the reasoning belongs to neither part. Reasoning that does not end is
    reasoning to the end of the answer.
    """

    def __init__(self, inside: bool) -> None:
        self._begun, self._inside = False, inside
        self._is_blank = True  # only white space since the last marker
        self._space: list[str] = []  # held back, before `_held`, which may begin a marker
        self._held = ""

    def feed(self, text: str, ended: bool = False) -> Divided:
        """The parts that one more piece makes certain; `ended`: it is the last piece."""
        self._held += text
        if not self._begun and not self._find_start(ended):
            return Divided("", "")
        reasoning = self._reasoning(ended) if self._inside else ""
        return Divided(reasoning, "" if self._inside else self._rest())

    def _find_start(self, ended: bool) -> bool:
        """Whether it is known how the answer begins."""
        text = self._held.lstrip()
        self._space.append(self._held[: len(self._held) - len(text)])
        self._held = text
        if text.startswith(START):
            self._held, self._inside = text[len(START) :], True
        elif START.startswith(text) and not ended:
            return False
        elif not self._inside:
            self._is_blank = False  # keep white space at the start of an answer without reasoning
            self._held = self._take_space() + text
        self._space.clear()
        self._begun = True
        return True

    def _reasoning(self, ended: bool) -> str:
        before, end, self._held = self._held.partition(END)
        if end:
            self._inside = False
        elif not ended:
            cut = len(before) - overlap(before, END)
            before, self._held = before[:cut], before[cut:]
        found = before.rstrip()
        space = before[len(found) :]
        if self._is_blank:
            found = found.lstrip()
            self._is_blank = not found
        if found:
            found = self._take_space() + found
        if end:
            self._is_blank = True
            self._space.clear()
        elif not self._is_blank:
            self._space.append(space)
        return found

    def _take_space(self) -> str:
        """The white space that was held back, which is in the answer after all."""
        space = "".join(self._space)
        self._space.clear()
        return space

    def _rest(self) -> str:
        rest, self._held = self._held, ""
        if self._is_blank:
            rest = rest.lstrip()
            self._is_blank = not rest
        return rest


def reasoning_of(template: str, prompt: str, parser: str | None) -> Reasoning | None:
    """How the answer to a prompt of this chat template begins; None if there is no reasoning.

    `parser` is the option `reasoning_parser`, or None to read it from the template.
    """
    if parser == "none" or (parser is None and END not in template):
        return None
    end_of_prompt = prompt.rstrip()
    if end_of_prompt.endswith(END):
        return Reasoning(over=True)
    inside = parser == "deepseek_r1" or end_of_prompt.endswith(START)
    return Reasoning(inside, inside or parser is not None or "enable_thinking" in template)
