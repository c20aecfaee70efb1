"""Assignments to fields of frozen dataclasses: refused, or checked as when the object is made."""

import dataclasses
from collections.abc import Collection
from typing import Any

from nanovllm.utils.checks import did_you_mean


def change_field(
    instance: Any, name: str, value: Any, fields: Collection[str], can_change: bool
) -> None:
    """Set a field, if the class `can_change` and the object is valid afterwards; raise if not."""
    kind = type(instance).__name__
    if name not in fields:
        hint = f"{kind} has no field {name!r}{did_you_mean(name, fields)}"
        if can_change:
            raise AttributeError(hint)
        hint = hint.removeprefix(kind)
        raise dataclasses.FrozenInstanceError(f"{kind} cannot be changed and{hint}")
    if not can_change:
        raise dataclasses.FrozenInstanceError(
            f"{kind} cannot be changed; dataclasses.replace(..., {name}=...) makes a changed copy"
        )
    changed = dataclasses.replace(instance, **{name: value})
    object.__setattr__(instance, name, getattr(changed, name))
