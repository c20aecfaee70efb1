"""Prompts: a text, token ids, or a dict with one of them, as in vLLM."""

import numbers
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from nanovllm.utils.checks import as_list


class _Salted(TypedDict, total=False):
    cache_salt: str  # cached prefixes are shared only with prompts that have the same one


class TextPrompt(_Salted):
    """A prompt that the tokenizer encodes."""

    prompt: str


class _TokenIds(_Salted):
    prompt_token_ids: Iterable[int]


class TokensPrompt(_TokenIds, total=False):
    """A prompt of token ids. Their text `prompt`, if it is known, is only for the output."""

    prompt: str


Prompt = str | Iterable[int] | TextPrompt | TokensPrompt
PromptType = Prompt  # vLLM's name


def split_prompt(prompt: Any) -> tuple[Any, str | None, int]:
    """The text or token ids to encode, the text if there is one, and the number of the salt."""
    if isinstance(prompt, Mapping):
        from nanovllm.prompt_dicts import split_dict

        return split_dict(prompt)
    return prompt, prompt if isinstance(prompt, str) else None, 0


def prompt_list(name: str, prompts: Any) -> list[Any]:
    """A list of prompts, from one or several prompts. Errors call them `name`."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = as_list(name, prompts)
    is_one_prompt = bool(items) and isinstance(items[0], numbers.Number)
    return [items] if is_one_prompt else items
