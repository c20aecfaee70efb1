"""Chat templates that a caller gives: a text, a name among the tokenizer's, or a file to read."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.utils.checks import shorten

NAME, OPTIONS = "chat_template", "chat_template_kwargs"
MARKS = ("{{", "{%", "{#")  # a template has one of them


def with_template_texts(tokenizer: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a chat, in which a template given as a file's path is the file's text."""
    return _each(keywords, lambda value: _read(tokenizer, value))


def check_templates(tokenizer: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a chat with the texts of named templates. Raises for other values."""
    return _each(keywords, lambda value: _checked(tokenizer, value))


def _each(keywords: Mapping[str, Any], change: Any) -> dict[str, Any]:
    changed = dict(keywords)
    if changed.get(NAME) is not None:
        changed[NAME] = change(changed[NAME])
    inner = changed.get(OPTIONS)
    if isinstance(inner, Mapping) and inner.get(NAME) is not None:
        changed[OPTIONS] = {**inner, NAME: change(inner[NAME])}
    return changed


def _read(tokenizer: Any, value: Any) -> Any:
    is_path = isinstance(value, os.PathLike)
    if not is_path and (not isinstance(value, str) or _is_known(tokenizer, value)):
        return value
    wrong = f"{NAME} must be a Jinja template, which has {{{{ or {{%, or a file with one, got"
    if value == "":  # as a path, the working directory
        raise ValueError(f"{wrong} ''")
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{wrong} {shorten(str(value))}: {error}") from None


def _is_known(tokenizer: Any, value: str) -> bool:
    """Whether a text is a template, or the name of one."""
    return any(mark in value for mark in MARKS) or value in _named(tokenizer)


def _named(tokenizer: Any) -> Mapping[str, str]:
    named = getattr(tokenizer, NAME, None)
    return named if isinstance(named, Mapping) else {}


def _checked(tokenizer: Any, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{NAME} must be a text, got {shorten(value)}")
    text = _named(tokenizer).get(value, value)
    if not any(mark in text for mark in MARKS):
        raise ValueError(
            f"{NAME} must be a Jinja template, which has {{{{ or {{%, got {shorten(value)}"
        )
    return text
