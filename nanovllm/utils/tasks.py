"""Runs and cancels asyncio's tasks that belong together."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all and return the results; if one raises, or this is cancelled, cancel the others.

    A single coroutine runs in the caller's task.
    """
    coroutines = list(coroutines)
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


class Stop:
    """A context in which others can cancel the current task, at most once.

    `reason` is the canceller's reason. Code that catches the CancelledError calls `is_ours`.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        self.reason: str | None = None
        self.is_over = False

    def cancel(self, reason: str) -> None:
        """Cancel the task for a reason, unless others have."""
        if self.reason is None and not self.is_over and not _num_cancels(self._task):
            self.reason = reason
            self._task.cancel()

    def is_ours(self) -> bool:
        """Whether only this has cancelled the task; then the task no longer counts as cancelled."""
        if self.reason is not None and hasattr(self._task, "uncancel"):  # since Python 3.11
            return not self._task.uncancel()
        return self.reason is not None


def _num_cancels(task: "asyncio.Task[Any]") -> int:
    """How often a task was cancelled; 0 before Python 3.11, which does not count."""
    return task.cancelling() if hasattr(task, "cancelling") else 0


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
