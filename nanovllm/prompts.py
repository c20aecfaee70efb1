"""Prompts: a text, token ids, or a dict with one of them, as in vLLM."""

import numbers
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from nanovllm.utils.checks import as_list, shorten


class TextPrompt(TypedDict):
    """A prompt that the tokenizer encodes."""

    prompt: str


class _TokenIds(TypedDict):
    prompt_token_ids: Iterable[int]


class TokensPrompt(_TokenIds, total=False):
    """A prompt of token ids. Their text `prompt`, if it is known, is only for the output."""

    prompt: str


Prompt = str | Iterable[int] | TextPrompt | TokensPrompt
FIELDS = ("prompt", "prompt_token_ids")


def split_prompt(prompt: Any) -> tuple[Any, str | None]:
    """The text or token ids to encode, and the prompt's text if it has one."""
    if isinstance(prompt, str):
        return prompt, prompt
    if not isinstance(prompt, Mapping):
        return prompt, None
    given = {name: value for name, value in prompt.items() if value is not None}
    unknown = next((f"with {shorten(name)}" for name in given if name not in FIELDS), None)
    if unknown or not given:
        raise TypeError(
            "prompt must be a str, a list of token ids, or a dict with one of"
            f" {', '.join(FIELDS)}, got a dict {unknown or 'without them'}"
        )
    text = given.get("prompt")
    if not isinstance(text, str | None):
        raise TypeError(f"the prompt's field 'prompt' must be a str, got {shorten(text)}")
    token_ids = given.get("prompt_token_ids")
    if isinstance(token_ids, str):
        raise TypeError(
            "the prompt's field 'prompt_token_ids' must be a list of token ids, got"
            f" {shorten(token_ids)}"
        )
    return text if token_ids is None else token_ids, text


def prompt_list(name: str, prompts: Any) -> list[Any]:
    """A list of prompts, from one or several prompts. Errors call them `name`."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = as_list(name, prompts)
    is_one_prompt = bool(items) and isinstance(items[0], numbers.Number)
    return [items] if is_one_prompt else items
