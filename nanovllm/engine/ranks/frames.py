"""Frames: pickled messages between processes, each with its length before it.

Imported without PyTorch.
"""

import functools
import pickle
import socket
import struct
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
