"""The calibration text: files, cut into samples of token ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.utils.checks import shorten

WORD = "word"


def read_samples(
    tokenizer: Any, files: Sequence[Path], num_samples: int, max_length: int
) -> list[list[int]]:
    """Up to `num_samples` parts of the files, evenly chosen, of up to `max_length` tokens.

    Each begins with the tokens that the tokenizer puts before a prompt. A part is in one file.
    """
    first = _before_prompts(tokenizer)
    size = max_length - len(first)
    if size < 1:
        raise ValueError(f"max_length must be > {len(first)}, the tokens before each prompt")
    parts = []
    for file in files:
        ids = tokenizer.encode(_text_of(file), add_special_tokens=False, verbose=False)
        parts += [[*first, *ids[start : start + size]] for start in range(0, len(ids), size)]
    if not parts:
        raise ValueError(f"the text has no tokens: {shorten([str(file) for file in files])}")
    whole = [part for part in parts if len(part) == max_length] or parts
    chosen = min(num_samples, len(whole))
    return [whole[i * len(whole) // chosen] for i in range(chosen)]


def _before_prompts(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer puts before a prompt. It may put others after it."""
    word = list(tokenizer.encode(WORD, add_special_tokens=False))
    whole = list(tokenizer.encode(WORD))
    for start in range(len(whole)):
        if word and whole[start : start + len(word)] == word:
            return whole[:start]
    raise ValueError(f"the tokenizer does not find the tokens of {WORD!r} in a prompt")


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not valid UTF-8: {error}") from None
