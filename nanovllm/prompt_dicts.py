"""Prompts that are dicts, as in vLLM: their fields, and the number of their `cache_salt`."""

import hashlib
from collections.abc import Mapping
from typing import Any

from nanovllm.utils.checks import check_text, shorten

FIELDS = ("prompt", "prompt_token_ids")
MOST_CHARACTERS = 256  # of a salt
DIGEST_BYTES = 16  # enough that nobody can find a second text with the number of a salt


def split_dict(prompt: Mapping[str, Any]) -> tuple[Any, str | None, int]:
    """The text or token ids to encode, the text if there is one, and the number of the salt."""
    given = {name: value for name, value in prompt.items() if value is not None}
    salt = 0
    if "cache_salt" in given:
        salt = salt_number(given.pop("cache_salt"), "the prompt's field 'cache_salt'")
    if not given.keys() <= {*FIELDS}:
        from nanovllm.from_vllm.names.calls import PROMPT

        for name in given.keys() & PROMPT.keys():
            PROMPT[name].check(f"the prompt's field {name!r}", given.pop(name))
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
    return text if token_ids is None else token_ids, text, salt


def salt_number(salt: Any, name: str = "cache_salt") -> int:
    """The number of a `cache_salt`, above those that adapters have. Equal ones mean equal texts.

    Errors call the salt `name`.
    """
    if not isinstance(salt, str):
        raise TypeError(f"{name} must be a text, got {shorten(salt)}")
    if not 1 <= len(salt) <= MOST_CHARACTERS:
        raise ValueError(f"{name} must have 1 to {MOST_CHARACTERS} characters, got {len(salt)}")
    check_text(name, salt)
    digest = hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()
    return int.from_bytes(b"\1" + digest, "big")
