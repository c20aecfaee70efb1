"""Constraints of answers in harmony: analysis is free, and the final channel or calls are not."""

import dataclasses
import json
from collections.abc import Mapping

from nanovllm.chat.harmony.marked_text import CHANNEL, CONSTRAIN, END, MESSAGE, START
from nanovllm.chat.tool_formats.lark import any_of, arguments_rule, quoted
from nanovllm.chat.tools import Tool, ToolChoice, checked_parameters
from nanovllm.structured.lark import JSON_OPTIONS, lark_of, literal, pattern_literal
from nanovllm.structured_outputs import StructuredOutputs

FINAL = f"{CHANNEL}final{MESSAGE}"
# What comes before the first header that a grammar writes, by the place where the prompt ends.
BEFORE = {
    "header": "",
    "start": f"{START} {quoted('assistant')}",
    "other": f"TEXT {END} {START} {quoted('assistant')}",
}


class HarmonyGrammar:
    """Writes the constraint of an answer. `ids` has the markers' tokens.

    Before the constrained part, the answer may have messages of the channel analysis with any text,
    and before a call also those of the channel commentary.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids

    def constraint(
        self, choice: ToolChoice, asked: StructuredOutputs | None, place: str
    ) -> StructuredOutputs | None:
        """The constraint of an answer that begins at this place of a message; None if it has none.

        `asked` is for the final channel, and tools are those whose calls are read.
        """
        if asked is not None and asked.after is not None:
            return asked
        is_free = choice.is_free
        if not choice.required and asked is None and (is_free or place == "final"):
            return None
        if not choice.required and asked is not None and place == "final":
            return asked
        if place not in BEFORE:
            raise ValueError(
                "the prompt ends inside of a header, or of an answer: there can be neither"
                " required or strict calls nor structured_outputs"
            )
        if asked is not None and asked.kind == "structural_tag":
            return dataclasses.replace(asked, after=FINAL)
        rules, ways = list[str](), list[str]()
        if choice.tools and (asked is None or asked.kind.startswith("json")):
            rules += self._call_rules(choice)
            ways.append("calls")
        if not choice.required:
            rules.append(self._final_rule(asked))
            ways.append("final")
        begin = f"start: {self._marked(BEFORE[place])} early* ({' | '.join(ways)})"
        # A preamble would be content, which must then be only what is asked for.
        channels = quoted("analysis") + (" | COMMENTARY" if asked is None else "")
        return StructuredOutputs(grammar=self._written(begin, channels, rules))

    def _written(self, begin: str, channels: str, rules: list[str]) -> str:
        """The whole grammar. Early messages are of these channels."""
        body = f"{MESSAGE} TEXT {END} {START} {quoted('assistant')}"
        return "\n".join(
            [
                "%llguidance {}",
                begin,
                self._marked(f"early: {CHANNEL} ({channels}) {body}"),
                "TEXT: /(?s:.*)/",
                f"COMMENTARY: {quoted('commentary')}",
                *rules,
            ]
        )

    def _call_rules(self, choice: ToolChoice) -> list[str]:
        """Calls, with the recipient before the channel or after it."""
        again = self._marked(f"{END} {START} {quoted('assistant')}")
        rules = [
            f"calls: call ({again} early* call)*" if choice.several else "calls: call",
            any_of("call", len(choice.tools)),
            self._marked(f"type: {quoted(' json')} | {quoted(' ')} {CONSTRAIN} {quoted('json')}"),
        ]
        for index, tool in enumerate(choice.tools):
            checked = Tool(tool.name, checked_parameters(tool))
            to = quoted(f" to=functions.{tool.name}")
            head = f"({to} {CHANNEL} COMMENTARY | {CHANNEL} COMMENTARY {to}) type? {MESSAGE}"
            rules.append(f"call_{index}: {self._marked(head)} arguments_{index}")
            rules.append(arguments_rule(f"arguments_{index}", checked))
        return rules

    def _final_rule(self, asked: StructuredOutputs | None) -> str:
        """A message of the final channel; that of JSON may say so in its header."""
        is_json = asked is not None and asked.kind.startswith("json")
        kind = f"({quoted(' ')}? {CONSTRAIN} {quoted('json')})?" if is_json else ""
        head = self._marked(f"{CHANNEL} {quoted('final')} {kind} {MESSAGE}")
        if asked is None:
            return f"final: {head} TEXT"
        if asked.kind in ("regex", "choice"):
            return f"final: {head} ANSWER\nANSWER: {_terminal(asked)}"
        return f"final: {head} answer\nanswer: {_answer(asked)}"

    def _marked(self, expression: str) -> str:
        """The expression with the markers as tokens."""
        for marker in (START, CHANNEL, MESSAGE, CONSTRAIN, END):
            expression = expression.replace(marker, f"<[{self._ids[marker]}]>")
        return expression


def _terminal(asked: StructuredOutputs) -> str:
    """The terminal of a pattern or of a choice."""
    if asked.regex is not None:
        return pattern_literal(asked.regex)
    return " | ".join(map(literal, asked.choice))


def _answer(asked: StructuredOutputs) -> str:
    """The expression of a grammar, or of JSON."""
    if asked.grammar is not None:
        return f"%lark {{\n{lark_of(asked.grammar)}\n}}"
    if asked.whitespace_pattern is not None:
        raise ValueError("whitespace_pattern cannot be given where an answer has several channels")
    schema = json.loads(asked.json or '{"type": "object"}')
    if schema is False:
        raise ValueError("there is nothing that the schema false allows")
    options = {**JSON_OPTIONS, "whitespace_flexible": not asked.disable_any_whitespace}
    fields = {} if schema is True else schema
    return f"%json {json.dumps({**fields, 'x-guidance': options}, ensure_ascii=False)}"
