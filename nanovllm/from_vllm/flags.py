"""Flags of options that nanovllm does not have, for parsers of vLLM's names."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from nanovllm.utils.other_names import OtherName


class WithoutEffect(argparse.Action):
    """An option that nanovllm does not have: it takes the values that ask for what is done anyway.

    It sets nothing, so that the namespace has only options of our own. `spelled` makes the text of
    an error of what to use instead.
    """

    def __init__(self, other: OtherName, spelled: Callable[[str], str] = str, **given: Any) -> None:
        is_switch = _is_switch(other)
        super().__init__(**given, nargs=0 if is_switch else None, default=argparse.SUPPRESS)
        self._other, self._is_switch, self._spelled = other, is_switch, spelled

    def __call__(
        self,
        _: argparse.ArgumentParser,
        __: argparse.Namespace,
        text: Any,
        flag: str | None = None,
    ) -> None:
        """Raise unless the value is accepted."""
        found = [not (flag or "").startswith("--no-")] if self._is_switch else [_value(text), text]
        if not any(_takes(self._other, value) for value in found):
            got = "" if self._is_switch else f" {text}"
            raise argparse.ArgumentError(
                None, f"{flag}{got}: {self._spelled(self._other.why.replace('`', ''))}"
            )


def flags_of(name: str, other: OtherName) -> list[str]:
    """The flags of an option that nanovllm does not have: a switch has two."""
    flag = "--" + name.replace("_", "-")
    return [flag, flag.replace("--", "--no-", 1)] if _is_switch(other) else [flag]


def _is_switch(other: OtherName) -> bool:
    return any(isinstance(value, bool) for value in other.accepts)


def _value(text: str) -> Any:
    """A value as vLLM's command line takes it: JSON, `None` or a text."""
    if text.lower() in ("none", "null"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _takes(other: OtherName, value: Any) -> bool:
    """Whether a value is accepted; 0 is the same as 0.0, but 1 is not True."""
    return other.takes(value) or any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in other.accepts
    )
