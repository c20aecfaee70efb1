"""Waiting for other threads and processes, and bounds on work: a busy machine fails no test."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

LIMIT = 600.0  # seconds after which a thread, a process or a test is taken to hang
FOREVER = 10 * LIMIT  # seconds of what a test must end, or not wait for


def wait_until(what: str, condition: Callable[[], T]) -> T:
    """Wait until `condition` returns what is true, and return that; fail with `what` if it hangs.

    `what` says what is wrong if it never becomes true. A condition that takes work to look at is
    looked at less often, as what it waits for needs the processor.
    """
    end = time.monotonic() + LIMIT
    while True:
        start = time.thread_time()
        if found := condition():
            return found
        assert time.monotonic() < end, what
        time.sleep(min(max(0.005, 10 * (time.thread_time() - start)), 0.2))


@contextmanager
def little_work(seconds: float) -> Iterator[None]:
    """The block must take less than `seconds` of this thread's own time.

    Time of other processes does not count. The bound is at least ten times what the block takes on
    a usual machine, and still far below the time of the mistake that the test is for.
    """
    start = time.thread_time()
    yield
    assert (taken := time.thread_time() - start) < seconds, f"it took {taken:.3f} s of work"
