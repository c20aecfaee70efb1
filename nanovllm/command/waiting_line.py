"""A line on a terminal while something takes long that shows nothing itself."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

AFTER = 1.0  # seconds without a line
ERASE = "\r\x1b[K"


@contextlib.contextmanager
def waiting_line(text: str) -> Iterator[None]:
    """Show a text on stderr if the block takes more than a second, until it ends."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield
        return
    is_shown, has_ended = threading.Event(), threading.Event()

    def show() -> None:
        if not has_ended.wait(AFTER):
            is_shown.set()
            os.write(2, text.encode())

    thread = threading.Thread(target=show, name="nanovllm-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        if is_shown.is_set():
            os.write(2, ERASE.encode())
