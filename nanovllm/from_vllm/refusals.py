"""Checks of what vLLM's calls take: arguments without a meaning here, and objects with options."""

from collections.abc import Iterable
from typing import Any, Protocol

from nanovllm.utils.checks import shorten

# What vLLM's arguments ask for that is done anyway, in addition to None.
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "enable_log_requests": (False,), "disable_log_requests": (True,),
    "disable_log_stats": (True, False), "enable_multiprocessing": (False,),
    "start_engine_loop": (True,), "tokenization_kwargs": ({},),
}  # fmt: skip


class MakesEngines(Protocol):
    """An `EngineArgs`, for modules that its own module imports."""

    def make_llm(self) -> Any:
        """An `LLM`."""

    def make_async(self) -> Any:
        """An `AsyncLLMEngine`."""


def refuse_others(call: str, given: dict[str, Any], ignored: Iterable[str] = ()) -> None:
    """Raise for arguments of vLLM's that nothing here reads, unless they change nothing."""
    for name, value in given.items():
        allowed = (None, *DEFAULTS.get(name, ()))
        is_allowed = any(type(value) is type(one) and value == one for one in allowed)
        if not is_allowed and name not in ignored:
            words = " or ".join(map(repr, allowed))
            raise ValueError(f"{call}: {name} must be {words}, got {shorten(value)}")


def made_by(engine_args: MakesEngines, maker: str) -> Any:
    """What this method of an `EngineArgs` makes; a TypeError for another object."""
    make = getattr(engine_args, maker, None)
    if not callable(make):
        raise TypeError(f"engine_args must be an EngineArgs, got {type(engine_args).__name__}")
    return make()
