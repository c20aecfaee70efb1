"""Methods of an engine's parts that no other call may interrupt."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def exclusive(method: Callable[..., T]) -> Callable[..., T]:
    """Make a method of a part with an `engine` run in `LLMEngine.alone`."""

    @functools.wraps(method)
    def run(self: Any, *args: Any) -> T:
        result: T = self.engine.alone(method, self, *args)
        return result

    return run
