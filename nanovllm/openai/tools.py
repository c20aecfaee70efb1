"""Tool: a function that a model may call."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function's name, and the JSON schema of its arguments, which is that of an object."""

    name: str
    parameters: Mapping[str, Any]
