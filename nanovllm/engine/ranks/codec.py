"""Encodes steps and commands as bytes for the other ranks. The first bytes say which one it is.

A step is sent as its arrays, one after another, as pickling is slower. A prompt's tokens are sent
once, when they are computed, and each block once; sampled tokens go from device to device.

    header: the numbers of the step, the number of arrays, the length of the names
    for each array: its length, and the bytes of an element
    the names, and the arrays: wide ones first, so that all are aligned
"""

import dataclasses
import pickle
import struct
from typing import Any

import numpy as np

from nanovllm.engine.ranks.frames import by_value
from nanovllm.engine.run.device_table import TableChanges
from nanovllm.engine.run.other_ranks import Command
from nanovllm.engine.run.step_inputs import PrefillInputs, StepInputs

FLAGS = ("whole_logits", "is_marked", "catches_up", "keeps_hidden")
NUMBERS = ("num_seqs", "width", "num_queries", *FLAGS)
PREFILL = tuple(field.name for field in dataclasses.fields(PrefillInputs))
CHANGES = TableChanges._fields
OWN_NAMES = {*PREFILL, *CHANGES}  # other names are those of step parts' arrays
HEADER = struct.Struct(f"{len(NUMBERS) + 2}q")
TYPES: dict[int, Any] = {8: np.int64, 4: np.int32}  # by the bytes of an element
MARK = struct.pack("<q", -2)  # begins a command; a step begins with a count


def encode(inputs: StepInputs) -> bytes:
    """Encode a step as bytes."""
    assert inputs.arrays.keys().isdisjoint(OWN_NAMES), "a step part has the name of another array"
    arrays: dict[str, Any] = {**inputs.arrays, **inputs.changes._asdict()}
    if inputs.prefill is not None:
        arrays |= {name: getattr(inputs.prefill, name) for name in PREFILL}
    sent = [(name, array) for name, array in arrays.items() if array is not None]
    assert all(array.dtype == TYPES[array.itemsize] and array.ndim == 1 for _, array in sent)
    sent.sort(key=lambda named: -named[1].itemsize)
    names = ",".join(name for name, _ in sent).encode()
    names += b" " * (-len(names) % 8)
    numbers = [getattr(inputs, name) for name in NUMBERS]
    shapes = [number for _, array in sent for number in (array.size, array.itemsize)]
    head = struct.pack(
        f"{HEADER.size // 8 + len(shapes)}q", *numbers, len(sent), len(names), *shapes
    )
    return b"".join([head, names, *(array.tobytes() for _, array in sent)])


def decode(message: bytearray) -> StepInputs:
    """Decode a step; its arrays share the message's memory."""
    *numbers, count, length = HEADER.unpack_from(message)
    shapes = struct.unpack_from(f"{2 * count}q", message, HEADER.size)
    offset = HEADER.size + 16 * count
    names = message[offset : offset + length].decode().rstrip().split(",")
    offset += length
    arrays: dict[str, Any] = {}
    for name, size, itemsize in zip(names, shapes[::2], shapes[1::2], strict=True):
        arrays[name] = np.frombuffer(message, TYPES[itemsize], size, offset)
        offset += arrays[name].nbytes
    changes = TableChanges(*(arrays.pop(name) for name in CHANGES))
    prefill = None
    if PREFILL[0] in arrays:
        prefill = PrefillInputs(**{name: arrays.pop(name, None) for name in PREFILL})
    step = StepInputs(changes=changes, prefill=prefill, **dict(zip(NUMBERS, numbers, strict=True)))
    step.arrays = arrays
    for name in FLAGS:
        setattr(step, name, bool(getattr(step, name)))
    return step


def pack(command: Command) -> bytes:
    """Encode a command as bytes."""
    return MARK + by_value(command)


def unpack(message: bytearray) -> Command | None:
    """The command in a message; None if the message is a step."""
    if not message.startswith(MARK):
        return None
    command: Command = pickle.loads(memoryview(message)[len(MARK) :])
    return command
