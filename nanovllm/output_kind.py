"""RequestOutputKind: which outputs of a request vLLM's engines return before its end."""

from enum import Enum
from typing import Any

from nanovllm.utils.checks import shorten


class RequestOutputKind(Enum):
    """Everything so far, the new part alone, or one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def check_output_kind(name: str, value: Any, allowed: str) -> RequestOutputKind:
    """Return the kind; a text may name it. `allowed` completes "must be"."""
    if isinstance(value, RequestOutputKind):
        return value
    if isinstance(value, str) and value.upper() in RequestOutputKind.__members__:
        return RequestOutputKind[value.upper()]
    raise ValueError(f"{name} must be {allowed}, got {shorten(value)}")
