"""Decide what Ctrl-C does to the process of the command.

While libraries are imported and the engine starts, it ends the process at once. A
KeyboardInterrupt would not: some libraries swallow it and fail later, others print it. Nothing is
left behind, as after `kill -9`: other ranks notice the end of their caller, and the output of a
batch job is valid at any time. When the engine runs, Ctrl-C is a KeyboardInterrupt.

`main` imports this file before anything else, so it imports almost nothing.
"""

import _signal as signal  # type: ignore[import-not-found]  # `signal` takes milliseconds for enums
import atexit
import os
import sys

TYPE_CHECKING = False  # `typing` takes milliseconds too
if TYPE_CHECKING:
    from collections.abc import Callable

INTERRUPTED = 130  # the exit status
cleanups: "list[Callable[[], object]]" = []  # called before the process ends at once
_is_reported = False


def take_over() -> None:
    """Make Ctrl-C end this process at once from now on, unless the process ignores it."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    # Python's last steps run no handlers, and the command has done its work then.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGINT, end_at_once)


def end_at_once(*_: object) -> None:
    """Clean up, write the line, and end the process."""
    for act in (*cleanups, sys.stdout.flush, report):
        _attempt(act)
    os._exit(INTERRUPTED)


def _attempt(act: "Callable[[], object]") -> None:
    try:
        act()
    except Exception:
        return  # the process ends in any case


class Interruptible:
    """A context in which Ctrl-C raises KeyboardInterrupt instead of ending the process at once."""

    def __enter__(self) -> None:
        self.before = signal.getsignal(signal.SIGINT)
        if self.before is end_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *error: object) -> None:
        if self.before is end_at_once:
            signal.signal(signal.SIGINT, end_at_once)


def report(line: str = "nanovllm: interrupted") -> None:
    """Write a line about the interruption to stderr, once in a process.

    On a terminal it replaces the current line, which has `^C` and perhaps a progress bar.
    """
    global _is_reported
    if _is_reported:
        return
    _is_reported = True
    has_codes = os.isatty(2) and os.environ.get("TERM", "dumb") != "dumb"
    try:
        os.write(2, f"{chr(13) + chr(27) + '[K' if has_codes else ''}{line}\n".encode())
    except OSError:
        return  # the reader of a pipe has ended, perhaps because of the same Ctrl-C
