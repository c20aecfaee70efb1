"""Checks of what vLLM's calls take: arguments without a meaning here, and objects with options."""

from collections.abc import Iterable
from typing import Any, Protocol

from nanovllm.utils.checks import shorten


class MakesEngines(Protocol):
    """An `EngineArgs`, for modules that its own module imports."""

    def make_llm(self) -> Any:
        """An `LLM`."""

    def make_async(self) -> Any:
        """An `AsyncLLMEngine`."""


def refuse_others(call: str, given: dict[str, Any], ignored: Iterable[str] = ()) -> None:
    """Raise for arguments of vLLM's that nothing here reads, unless they are None."""
    for name, value in given.items():
        if value is not None and name not in ignored:
            raise ValueError(f"{call}: {name} must be None, got {shorten(value)}")


def made_by(engine_args: MakesEngines, maker: str) -> Any:
    """What this method of an `EngineArgs` makes; a TypeError for another object."""
    make = getattr(engine_args, maker, None)
    if not callable(make):
        raise TypeError(f"engine_args must be an EngineArgs, got {type(engine_args).__name__}")
    return make()
