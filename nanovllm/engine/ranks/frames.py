"""Frames: pickled messages between processes, each with its length before it.

Imported without PyTorch.
"""

import functools
import pickle
import select
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

HEAD = struct.Struct("<Q")


def frame(message: Any) -> bytes:
    """The bytes of a message for a socket: length and pickle."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEAD.pack(len(data)) + data


def by_value(value: Any) -> bytes:
    """Pickle for a process that does not run the caller's script.

    With the package cloudpickle, functions of that script are pickled by value. Without it, only
    functions of importable modules can be pickled.
    """
    data: bytes = _pickler().dumps(value, pickle.HIGHEST_PROTOCOL)
    return data


@functools.cache
def _pickler() -> Any:
    """The module that pickles. The result is kept, as the search for a missing one takes long."""
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


def sendable(error: BaseException) -> Exception:
    """The error; or one with its text, if it cannot be pickled or would end a process."""
    if isinstance(error, Exception):
        with suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def receive(connection: socket.socket) -> Any:
    """Wait for the next message; EOFError if the other end is closed."""
    (length,) = HEAD.unpack(_receive_bytes(connection, HEAD.size))
    return pickle.loads(_receive_bytes(connection, length))


def _receive_bytes(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        try:
            number = connection.recv_into(view)
        except ConnectionError:
            number = 0
        if number == 0:
            raise EOFError("the connection is closed")
        view = view[number:]
    return bytes(data)


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
