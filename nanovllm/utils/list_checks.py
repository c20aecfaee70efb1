"""Checks of lists that users pass: of token ids, and of texts. Loaded when one is given."""

from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.utils.checks import check_int, check_text, shorten


def check_ids(name: str, value: Any) -> tuple[int, ...]:
    """Copy token ids out of the caller's container: later changes to it have no effect."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of token ids, got {shorten(value)}")
    ids = tuple(value)
    are_valid = {*map(type, ids)} <= {int} and min(ids, default=0) >= 0  # the fast case
    return ids if are_valid else tuple(check_int(name, token_id, 0) for token_id in ids)


def check_texts(name: str, value: Any) -> tuple[str, ...]:
    """Copy texts out of the caller's container; none may be empty."""
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of texts, got {shorten(value)}")
    texts = tuple(value)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a list of texts, got {shorten(text)} in it")
        if not text:
            raise ValueError(f"{name} must be a list of texts that are not empty, got ''")
        check_text(name, text)
    return texts
