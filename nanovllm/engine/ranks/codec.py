"""The bytes of a step, as rank 0 sends them: a fixed layout, because pickling takes longer.

A prompt's tokens are sent once, when they are computed, and each block of a sequence once; sampled
tokens go from device to device.
"""

import dataclasses
import struct
from typing import Any

import numpy as np

from nanovllm.engine.run.device_table import TableChanges
from nanovllm.engine.run.step_inputs import PrefillInputs, StepInputs

# The arrays of a message, one after the other. The wide ones come first, so that all are aligned.
LAYOUT: dict[str, Any] = {
    "offsets": np.int64,
    "input_ids": np.int64, "positions": np.int64, "slot_mapping": np.int64,
    "table_rows": np.int64, "sample_table_rows": np.int64,
    "sampled_tokens": np.int64, "shared_samples": np.int64, "reported_tokens": np.int64,
    "next_tokens": np.int64, "kept_tokens": np.int64,
    "states_before": np.int64, "states_after": np.int64,
    "cu_seqlens_q": np.int32, "cu_seqlens_k": np.int32, "copied_blocks": np.int32,
    "adapter_slots": np.int32, "copied_before": np.int32, "copied_after": np.int32,
    "words": np.int32,
}  # fmt: skip
PREFILL = tuple(field.name for field in dataclasses.fields(PrefillInputs))
FLAGS = ("whole_logits", "keeps_hidden", "adapts", "catches_up")
OF_STEP = ("copied_before", "copied_after")
NUMBERS = ("num_seqs", "width", "num_queries", *FLAGS)
HEADER = struct.Struct(f"{len(LAYOUT) + len(NUMBERS)}q")  # the arrays' lengths, then these
NONE = -1  # the length of an array that is None


def encode(inputs: StepInputs) -> bytes:
    """A step as bytes."""
    arrays: dict[str, Any] = dict.fromkeys(LAYOUT)
    arrays |= {"offsets": inputs.changes.offsets, "words": inputs.changes.words}
    arrays |= {name: getattr(inputs, name) for name in OF_STEP}
    if inputs.prefill is not None:
        arrays |= {name: getattr(inputs.prefill, name) for name in PREFILL}
    lengths = [NONE if array is None else array.size for array in arrays.values()]
    parts = [array.tobytes() for array in arrays.values() if array is not None]
    numbers = [getattr(inputs, name) for name in NUMBERS]
    return b"".join([HEADER.pack(*lengths, *numbers), *parts])


def decode(message: bytearray) -> StepInputs:
    """The step; its arrays share the message's memory."""
    header = HEADER.unpack_from(message)
    lengths, numbers = header[: len(LAYOUT)], header[len(LAYOUT) :]
    arrays: dict[str, Any] = {}
    offset = HEADER.size
    for (name, dtype), length in zip(LAYOUT.items(), lengths, strict=True):
        arrays[name] = None
        if length != NONE:
            arrays[name] = np.frombuffer(message, dtype, length, offset)
            offset += arrays[name].nbytes
    prefill = None
    if arrays["input_ids"] is not None:
        prefill = PrefillInputs(**{name: arrays[name] for name in PREFILL})
    changes = TableChanges(arrays["offsets"], arrays["words"])
    step = StepInputs(changes=changes, prefill=prefill, **dict(zip(NUMBERS, numbers, strict=True)))
    for name in FLAGS:
        setattr(step, name, bool(getattr(step, name)))
    for name in OF_STEP:
        setattr(step, name, arrays[name])
    return step
