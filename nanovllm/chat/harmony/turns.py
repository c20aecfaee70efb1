"""HarmonyTurns: the parameters of chats in harmony, and how their answers are read."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from nanovllm.chat.harmony.grammar import HarmonyGrammar
from nanovllm.chat.harmony.history import shows_harmony
from nanovllm.chat.harmony.marked_text import MARKERS, MarkedText, special_tokens
from nanovllm.chat.harmony.opening import Opening, opening_of
from nanovllm.chat.harmony.reader import HarmonyReader
from nanovllm.chat.tool_formats.base import ToolFormat
from nanovllm.chat.tool_formats.parser import Delta
from nanovllm.chat.tools import ToolChoice
from nanovllm.structured_outputs import StructuredOutputs

NAMES = ("harmony", "openai", "openai_gptoss")  # the last two are vLLM's


def uses_harmony(template: str, tool_parser: str | None, reasoning_parser: str | None) -> bool:
    """Whether answers are in harmony, by the options, or else by the chat template."""
    given = [parser for parser in (tool_parser, reasoning_parser) if parser not in (None, "none")]
    if not given:
        shown = shows_harmony(template)
        return shown and not tool_parser == reasoning_parser == "none"
    named = [parser in NAMES for parser in given]
    if any(named) and not all(named):
        raise ValueError(
            "harmony writes reasoning and calls: tool_parser and reasoning_parser must both be"
            f" 'harmony', or 'none'; got {tool_parser!r} and {reasoning_parser!r}"
        )
    return all(named)


class HarmonyAnswer(NamedTuple):
    """How an answer in harmony is read: after which opening, with which kinds of parts."""

    tokenizer: Any
    special: dict[int, str]
    opening: Opening
    reads_calls: bool
    reasons: bool

    def reader(self, early: bool) -> "HarmonyText":
        """A reader of one answer."""
        return HarmonyText(self, early)

    def tokens_of(self, text: str) -> list[int]:
        """The tokens of a text in which all that look like markers are markers."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


class HarmonyText:
    """Reads the text and the tokens of one answer as they come."""

    def __init__(self, answer: HarmonyAnswer, early: bool) -> None:
        self._marked = MarkedText(answer.tokenizer, answer.special)
        self._reader = HarmonyReader(
            ToolFormat().new_id,
            reads_calls=answer.reads_calls,
            reasons=answer.reasons,
            early=early,
        )
        self._reader.begin_after(answer.opening.pieces)

    def feed(self, text: str, token_ids: Iterable[int], ended: bool) -> list[Delta]:
        """The deltas that one more part makes certain; `ended`: it is the last one."""
        return self._reader.feed(self._marked.feed(text, token_ids, ended), ended)


class HarmonyTurns:
    """Makes turns for the model of a tokenizer, with the parsers of these names."""

    def __init__(
        self, tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None
    ) -> None:
        self._tokenizer, self._tool_parser = tokenizer, tool_parser
        self._reasons = reasoning_parser != "none"

    def answer(self, prompt_token_ids: list[int], choice: ToolChoice) -> HarmonyAnswer:
        """How the answer to a prompt is read."""
        reads_calls = bool(choice.tools) and self._tool_parser != "none"
        if choice.required and not reads_calls:
            raise ValueError("calls are not read (tool_parser='none'), and cannot be required")
        opening = opening_of(self._tokenizer, self._special, prompt_token_ids)
        return HarmonyAnswer(self._tokenizer, self._special, opening, reads_calls, self._reasons)

    def constraint(
        self, answer: HarmonyAnswer, choice: ToolChoice, asked: StructuredOutputs | None
    ) -> StructuredOutputs | None:
        """The constraint of this answer."""
        ids = {text: i for i, text in self._special.items() if text in MARKERS}
        shown = choice if answer.reads_calls else ToolChoice()
        return HarmonyGrammar(ids).constraint(shown, asked, answer.opening.place)

    @functools.cached_property
    def _special(self) -> dict[int, str]:
        return special_tokens(self._tokenizer)
