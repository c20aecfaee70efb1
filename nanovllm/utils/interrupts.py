"""Defer Ctrl-C during a block that must not be left half done, or a drawing of a bar."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from tqdm.auto import tqdm


@contextlib.contextmanager
def holding_interrupts() -> Iterator[None]:
    """Defer Ctrl-C until the end of the block. A second Ctrl-C is not deferred.

    Only the main thread receives Python's signals; in another thread this does nothing.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    held = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal held
        if held:
            previous(number, frame)
        held = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if held:
            signal.raise_signal(signal.SIGINT)


class Bar(tqdm):  # type: ignore[type-arg]
    """A bar that Ctrl-C interrupts only between drawings. `make_bar` makes it.

    tqdm has a lock of the whole process while it draws. If an exception is raised there, the lock
    stays locked, and every later bar would wait forever. tqdm starts no thread to watch this bar.
    """

    monitor_interval = 0

    def refresh(self, *args: Any, **options: Any) -> Any:
        with holding_interrupts():
            return super().refresh(*args, **options)

    def close(self) -> None:
        with holding_interrupts():
            super().close()


def make_bar(**options: Any) -> Bar:
    """A bar with tqdm's `options`, drawn once."""
    with holding_interrupts():
        return Bar(**options)
