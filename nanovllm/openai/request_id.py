"""A client's own id of its request."""

import re
from typing import Any

from nanovllm.utils.json_text import shorten_json

REQUEST_ID = re.compile(r"[!-~]{1,128}")


def check_request_id(name: str, value: Any) -> str:
    """A client's id of its request, which a header and a line of a log can have."""
    if not isinstance(value, str) or not REQUEST_ID.fullmatch(value):
        raise ValueError(
            f"{name} must be 1 to 128 letters, digits or signs of ASCII, got {shorten_json(value)}"
        )
    return value
