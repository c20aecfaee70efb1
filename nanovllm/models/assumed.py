"""Fields that a family does not read, as all of its published files have one value."""

from collections.abc import Mapping
from typing import Any

from nanovllm.utils.checks import shorten


def check_assumed(file: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise a ValueError for a field of the file that is not null and has another value."""
    for name, value in values.items():
        found = file.get(name)
        if found is not None and (
            found != value or isinstance(found, bool) != isinstance(value, bool)
        ):
            raise ValueError(f"{name} must be {value!r}, got {shorten(found)}")
