"""Compilers: the threads that check requests while the steps go on."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nanovllm.engine.errors import EngineFullError

COMPILERS, READERS = 2, 2  # threads that compile constraints; threads for all other work
TICK_SECONDS = 0.1  # how exactly the limit of time is kept when nothing else happens


class Waiting:
    """A request that a thread checks, or will check, and until when its caller waits."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self.begun = seconds, False
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def error(self) -> Exception | None:
        """Why the request is refused, if it has waited too long."""
        if self._deadline is None or time.monotonic() < self._deadline:
            return None
        limit = f"{self.seconds:g} seconds (grammar_seconds)"
        if self.begun:
            return ValueError(f"structured_outputs take longer than {limit} to compile")
        return EngineFullError(
            f"structured_outputs of other requests were compiled for {limit}; try again later"
        )


class Compilers:
    """Threads that compile constraints, and others that read adapters and bad words.

    A constraint that compiles cannot be stopped. Its thread is occupied until it is compiled, and
    the next ones wait; but no caller waits longer than its request says.
    """

    def __init__(self) -> None:
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="nanovllm-compile")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="nanovllm-read")
        self._waiting: dict[int, Waiting] = {}  # by the caller's number; without dropped ones

    def check(self, number: int, work: Callable[[], Any], seconds: float | None) -> None:
        """Check a request in a thread. `seconds` limit the time; None: it compiles nothing."""
        waiting = self._waiting[number] = Waiting(seconds)

        def begin() -> None:
            if self._waiting.get(number) is waiting:  # its caller still waits
                waiting.begun = True
                work()

        (self._readers if seconds is None else self._compilers).submit(begin)

    def read(self, work: Callable[..., Any], *args: Any) -> None:
        """Run other work in a thread."""
        self._readers.submit(work, *args)

    def drop(self, number: int) -> bool:
        """Wait for a request no longer. Returns whether it was waited for."""
        return self._waiting.pop(number, None) is not None

    def late(self) -> Iterator[tuple[int, Exception]]:
        """The requests that have waited too long, with their errors; they are dropped."""
        for number, waiting in [*self._waiting.items()]:
            if (error := waiting.error()) is not None:
                del self._waiting[number]
                yield number, error

    @property
    def tick(self) -> float | None:
        """Seconds until `late` should be asked again; None: there is nothing to wait for."""
        return TICK_SECONDS if self._waiting else None

    def close(self) -> None:
        """End the threads that have nothing to do, and begin no more work."""
        for pool in (self._compilers, self._readers):
            pool.shutdown(wait=False, cancel_futures=True)
