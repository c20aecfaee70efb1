"""Commands: what all ranks do between two steps, such as changing weights.

Imported without PyTorch. A message of the ring is a step or a command; its first bytes say which.
"""

import functools
import pickle
import struct
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nanovllm.engine.run.shard import Shard

MARK = struct.pack("<q", -2)  # no step begins with this: its first number is a length, or -1


class Command(Protocol):
    """A picklable object that every rank runs with its own shard.

    Ranks exchange tensors in `run` only if all of them do, in the same order. What it returns is
    pickled, except on rank 0. The device's work is waited for, too, unless the command has a false
    `waits_for_device`: then the steps that follow come after it.
    """

    def run(self, shard: "Shard") -> Any:
        """Do this rank's part, and return its result."""


def pack(command: Command) -> bytes:
    """A command as a message of the ring."""
    return MARK + by_value(command)


def by_value(value: Any) -> bytes:
    """Pickle for a process that does not run the caller's script.

    With the package cloudpickle, functions of that script are pickled by value. Without it, only
    those of importable modules can be.
    """
    data: bytes = _pickler().dumps(value, pickle.HIGHEST_PROTOCOL)
    return data


@functools.cache
def _pickler() -> Any:
    """The module that pickles; looking for one that is missing takes long."""
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


def unpack(message: bytearray) -> Command | None:
    """The command in a message; None if that is a step."""
    if not message.startswith(MARK):
        return None
    command: Command = pickle.loads(memoryview(message)[len(MARK) :])
    return command
