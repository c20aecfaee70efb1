"""Frames: messages as bytes, each after its length."""

import pickle
import socket
import struct
from typing import Any

HEAD = struct.Struct("<Q")


def frame(message: Any) -> bytes:
    """A message as it goes through a socket."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEAD.pack(len(data)) + data


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
    """Sends messages without waiting for a slow reader; what does not fit now is sent later."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unsent = bytearray()

    def send(self, message: Any) -> None:
        """Send a message, or keep what there is no room for."""
        self._unsent += frame(message)
        self.flush()

    def flush(self) -> bool:
        """Send what was kept, as far as there is room; whether nothing is left."""
        while self._unsent:
            try:
                sent = self._connection.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            del self._unsent[:sent]
        return True
