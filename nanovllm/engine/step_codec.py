"""How a step's arrays travel to the other ranks: bytes of a fixed layout, as pickling takes longer.

A prompt's tokens are told once, as they are computed, and each new token once. Block tables hold
what a sequence was given from its start: they are told as what differs from the last step's.
"""

import struct
from typing import Any

import numpy as np

from nanovllm.engine.inputs import Array, StepInputs

# The arrays of a message, one behind the other. The wide ones come first, so that all are aligned.
LAYOUT: dict[str, Any] = {
    "input_ids": np.int64, "positions": np.int64, "slot_mapping": np.int64,
    "sample_rows": np.int64, "shared_rows": np.int64, "prompt_rows": np.int64,
    "cu_seqlens_q": np.int32, "cu_seqlens_k": np.int32, "context_lens": np.int32,
    "copied_blocks": np.int32, "changed": np.int32, "values": np.int32,
}  # fmt: skip
FIELDS = tuple(LAYOUT)[:-2]  # the last two are the block tables
# Their lengths, NONE for one that is not there; rows and columns of the block tables.
HEADER = struct.Struct(f"{len(LAYOUT) + 2}q")
NONE = -1


class StepCodec:
    """Steps to bytes at one end, bytes to steps at the other; both must see every step."""

    def __init__(self) -> None:
        self._last: Array | None = None  # block tables

    def encode(self, inputs: StepInputs) -> bytes:
        """A step as bytes."""
        tables = inputs.block_tables
        arrays = [getattr(inputs, name) for name in FIELDS]
        arrays += (None, None) if tables is None else self._difference(tables)
        lengths = [NONE if array is None else array.size for array in arrays]
        shape = (0, 0) if tables is None else tables.shape
        parts = [array.tobytes() for array in arrays if array is not None]
        return b"".join([HEADER.pack(*lengths, *shape), *parts])

    def decode(self, message: bytearray) -> StepInputs:
        """The step, in the message's memory; block tables change with the next one's."""
        *lengths, num_rows, num_columns = HEADER.unpack_from(message)
        arrays, offset = [], HEADER.size
        for length, dtype in zip(lengths, LAYOUT.values(), strict=True):
            array = None
            if length != NONE:
                array = np.frombuffer(message, dtype, length, offset)
                offset += array.nbytes
            arrays.append(array)
        *fields, changed, values = arrays
        named: dict[str, Any] = dict(zip(FIELDS, fields, strict=True))
        inputs = StepInputs(**named)
        if values is not None:
            inputs.block_tables = self._apply(changed, values, (num_rows, num_columns))
        return inputs

    def _difference(self, tables: Array) -> tuple[Array | None, Array]:
        """Where the tables differ from the last ones, and their values there; None is everywhere.

        The last ones are taken as cut, or filled up with zeros, to the shape of these.
        """
        last, self._last = self._last, tables
        if last is None:
            return None, tables
        changed = np.flatnonzero(_reshaped(last, tables.shape) != tables)
        if 2 * len(changed) > tables.size:
            return None, tables
        return changed.astype(np.int32), tables.ravel()[changed]

    def _apply(self, changed: Array | None, values: Array, shape: tuple[int, int]) -> Array:
        if changed is None:
            tables = values.reshape(shape)
        else:
            assert self._last is not None
            tables = _reshaped(self._last, shape)
            tables.ravel()[changed] = values
        self._last = tables
        return tables


def _reshaped(matrix: Array, shape: tuple[int, ...]) -> Array:
    if matrix.shape == shape:
        return matrix
    rows, columns = np.minimum(matrix.shape, shape)
    new = np.zeros(shape, matrix.dtype)
    new[:rows, :columns] = matrix[:rows, :columns]
    return new
