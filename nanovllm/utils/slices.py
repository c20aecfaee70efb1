"""Slices of long work: an event loop does one, then runs its other tasks, then does the next.

Work is divided by generators that yield after each small piece. A piece is counted in units of
about a microsecond, such as the log-probability of one token.
"""

import asyncio
from collections.abc import Generator
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
Steps = Generator[int, None, T]  # yields how much work it has done since the last time
SLICE = 1024  # the least work after which other tasks run

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def finish(steps: Steps[T]) -> T:
    """Do all the work at once; returns its result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


async def in_slices(steps: Steps[T]) -> T:
    """Do the work in slices, with the loop's other tasks in between; returns its result."""
    pace = Pace()
    while True:
        try:
            work = next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if pace.is_due(work):
            await next_turn()


class Pace:
    """Counts the work of one task until a slice is done."""

    def __init__(self) -> None:
        self._done = 0

    def is_due(self, work: int) -> bool:
        """Count more work; returns whether other tasks are to run now."""
        self._done += work
        if self._done < SLICE:
            return False
        self._done = 0
        return True


async def next_turn() -> None:
    """Let the loop's other tasks run. Of all tasks that wait here only one goes on each time."""
    lock = _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    async with lock:
        await asyncio.sleep(0)
