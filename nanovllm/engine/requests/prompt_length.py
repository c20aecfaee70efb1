"""Prompts that are cut, and errors for those of a length that the model does not take.

Imported for such a prompt.
"""

from typing import NoReturn


class PromptTooLongError(ValueError):
    """The model takes no prompt of this length, or not with the tokens that must follow it."""


def last_tokens(token_ids: list[int], kept: int, most: int, why: str) -> list[int]:
    """The last `kept` tokens, or with -1 the last `most`, which `why` explains."""
    if kept > most:
        raise ValueError(f"truncate_prompt_tokens must be at most {most} ({why}), got {kept}")
    return token_ids[-(most if kept == -1 else kept) :]


def refuse_prompt(number: int, most: int, why: str, min_tokens: int, max_model_len: int) -> None:
    """Raise for a prompt with this number of tokens: it has a wrong length, or leaves no room."""
    if 1 <= number <= most:
        _refuse_minimum(min_tokens, number, max_model_len)
    kind = PromptTooLongError if number else ValueError
    raise kind(f"prompt must have 1 to {most} tokens ({why}), got {number}")


def _refuse_minimum(min_tokens: int, number: int, max_model_len: int) -> NoReturn:
    """Raise for a prompt with this number of tokens, which leaves no room for `min_tokens`."""
    room, why = max_model_len - number, f"max_model_len={max_model_len} less {number} prompt tokens"
    raise PromptTooLongError(f"min_tokens must be at most {room} ({why}), got {min_tokens}")
