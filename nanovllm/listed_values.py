"""Checks, by name, of sampling parameters that have several values or special rules."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import Any

import numpy as np

from nanovllm.output_kind import check_output_kind
from nanovllm.structured_outputs import check_structured_outputs
from nanovllm.utils.checks import check_float, check_int, shorten
from nanovllm.utils.list_checks import check_ids, check_texts

POSITIONAL = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}

MAX_BIAS = 100.0


def _check_texts(name: str, value: Any, _: str) -> tuple[str, ...]:
    return check_texts(name, value)


def _check_stop(name: str, value: Any, allowed: str) -> tuple[str, ...]:
    if not isinstance(value, Iterable):
        raise TypeError(f"{name} must be {allowed}, got {shorten(value)}")
    return check_texts(name, [value] if isinstance(value, str) else value)


def _check_ids(name: str, value: Any, _: str) -> tuple[int, ...]:
    return check_ids(name, value)


def _check_some_ids(name: str, value: Any, allowed: str) -> tuple[int, ...]:
    ids = check_ids(name, value)
    if not ids:
        raise ValueError(f"{name} must be {allowed}, got []")
    return ids


def _check_biases(name: str, value: Any, allowed: str) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be {allowed}, got {shorten(value)}")
    ids, biases = value.keys(), value.values()
    kinds = {*map(type, ids)}, {*map(type, biases)}
    if kinds[0] == {int} and kinds[1] <= {int, float} and min(ids) >= 0:  # the fast case
        is_near = max(biases) <= MAX_BIAS and min(biases) >= -MAX_BIAS  # no int is too large
        numbers = np.fromiter(biases if is_near else (), np.float64)
        if is_near and np.isfinite(numbers).all():
            return dict(zip(ids, numbers.tolist(), strict=True))
    return {
        check_int(f"{name} token id", token_id, 0): check_float(name, bias, -MAX_BIAS, MAX_BIAS)
        for token_id, bias in value.items()
    }


def _check_kept(name: str, value: Any, allowed: str) -> int:
    """Return the number of tokens that a prompt keeps, -1 or at least 1; raise for others."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, {allowed}, got {shorten(value)}")
    if value < -1 or value == 0:
        raise ValueError(f"{name} must be {allowed}, got {value}")
    return int(value)


def _check_calls(name: str, value: Any, allowed: str) -> tuple[Callable[..., Any], ...]:
    """Raise unless the values are callables of two or three parameters."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be {allowed}, got {shorten(value)}")
    calls = tuple(value)
    for place, call in enumerate(calls):
        if not callable(call):
            raise TypeError(f"{name}[{place}] must be callable, got {shorten(call)}")
        try:
            parameters = inspect.signature(call).parameters
        except (TypeError, ValueError):
            raise TypeError(f"{name}[{place}] has no signature: {shorten(call)}") from None
        kinds = {parameter.kind for parameter in parameters.values()}
        if len(parameters) not in (2, 3) or not kinds <= POSITIONAL:
            raise TypeError(
                f"{name}[{place}] must take (token_ids, logits) or (prompt_token_ids, token_ids,"
                f" logits), got {shorten(call)} of ({', '.join(parameters)})"
            )
    return calls


CHECKS: dict[str, Callable[[str, Any, str], Any]] = {
    "stop": _check_stop,
    "stop_token_ids": _check_ids,
    "allowed_token_ids": _check_some_ids,
    "logit_bias": _check_biases,
    "bad_words": _check_texts,
    "structured_outputs": check_structured_outputs,
    "truncate_prompt_tokens": _check_kept,
    "logits_processors": _check_calls,
    "output_kind": check_output_kind,
}
