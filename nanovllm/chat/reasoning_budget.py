"""`thinking_token_budget`: a bound for the tokens of an answer's reasoning."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nanovllm.chat.reasoning import END, Reasoning
from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.utils.checks import check_int

NAME = "thinking_token_budget"


def budget_of(given: Any, thinking: Any) -> int | None:
    """The bound that a chat asks for, also by `budget_tokens` of an object `thinking`."""
    inner = thinking.get("budget_tokens") if isinstance(thinking, Mapping) else None
    if given is not None and inner is not None:
        raise ValueError(f"give one of {NAME} and thinking.budget_tokens")
    if inner is not None:
        return check_int("thinking.budget_tokens", inner, 0)
    return None if given is None else check_int(NAME, given, 0)


def bounded_reasoning(
    reasoning: Reasoning | None, asked: StructuredOutputs | None, budget: int
) -> StructuredOutputs | None:
    """The constraint of an answer whose reasoning has at most `budget` tokens.

    `</think>` is forced after them. An answer that certainly has no reasoning keeps its constraint,
    `asked`.
    """
    if reasoning is None:
        raise ValueError(f"{NAME}: it is not known how the model ends its reasoning")
    if not (reasoning.inside or reasoning.sure):
        if reasoning.over:
            return asked
        raise ValueError(
            f"{NAME}: the chat template does not show whether an answer begins with reasoning; the"
            " option reasoning_parser does"
        )
    if asked is None:
        return StructuredOutputs(after=END, after_tokens=budget)
    if asked.after != END:
        raise ValueError(f"{NAME}: structured_outputs must begin after {END}")
    if asked.after_tokens is not None:
        raise ValueError(f"give one of {NAME} and structured_outputs.after_tokens")
    return dataclasses.replace(asked, after_tokens=budget)
