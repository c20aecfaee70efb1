"""Outbox: how the engine's process sends messages while it computes.

Imported without PyTorch.
"""

import select
import socket
import threading
from typing import Any

from nanovllm.engine.ranks.frames import frame


class Outbox:
    """Sends messages in order without waiting for a slow reader.

    A thread sends what the socket has no room for, as soon as there is room: the caller may compute
    for long meanwhile, and a message may be larger than a socket's buffer.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unsent = bytearray()
        self._changed = threading.Condition()  # guards all of this
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def send(self, message: Any) -> None:
        """Send a message; an OSError if the reader has ended."""
        data = frame(message)
        with self._changed:
            if self._error is not None:
                raise self._error
            self._unsent += data
            if len(self._unsent) > len(data) or self._send_some():
                return  # the thread is sending, or there is nothing left
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_rest, daemon=True, name="outbox")
                self._thread.start()
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until everything is sent, but no longer than this."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._unsent, seconds)

    def _send_some(self) -> bool:
        """Send as much as there is room for. Returns whether nothing is left."""
        while self._unsent:
            try:
                sent = self._connection.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            del self._unsent[:sent]
        return True

    def _send_rest(self) -> None:
        """Send what is unsent whenever the socket has room, until the reader ends."""
        while self._error is None:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent)
            select.select([], [self._connection], [])
            with self._changed:
                try:
                    self._send_some()
                except OSError as error:
                    self._error = error
                self._changed.notify_all()
