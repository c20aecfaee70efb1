"""How a step's arrays travel to the other ranks.

A prompt's tokens are told once, as they are computed, and each new token once. Block tables hold
what a sequence owns from its start: they are told as what differs from the last step's.
"""

import dataclasses
import pickle
from dataclasses import dataclass

import numpy as np

from nanovllm.engine.inputs import Array, StepInputs


@dataclass(slots=True)
class Difference:
    """What makes a matrix of another, cut or filled up with zeros to its shape."""

    shape: tuple[int, ...]
    where: Array  # in the flattened matrix
    values: Array


class StepCodec:
    """Steps to bytes at one end, bytes to steps at the other; both must see every step."""

    def __init__(self) -> None:
        self._last: Array | None = None  # block tables

    def encode(self, inputs: StepInputs) -> bytes:
        """A step as bytes."""
        tables = self._shrink(inputs.block_tables)
        return pickle.dumps((dataclasses.replace(inputs, block_tables=None), tables), protocol=5)

    def decode(self, message: bytes | bytearray) -> StepInputs:
        """The step; its block tables change in place when the next one is decoded."""
        inputs: StepInputs
        inputs, sent = pickle.loads(message)
        inputs.block_tables = self._expand(sent)
        return inputs

    def _shrink(self, tables: Array | None) -> Array | Difference | None:
        """What differs from the last tables, or all of them where that is less."""
        if tables is None:
            return None
        last, self._last = self._last, tables
        if last is None:
            return tables
        where = np.flatnonzero(_reshaped(last, tables.shape) != tables)
        if 2 * len(where) > tables.size:
            return tables
        return Difference(tables.shape, where.astype(np.int32), tables.ravel()[where])

    def _expand(self, sent: Array | Difference | None) -> Array | None:
        if sent is None:
            return None
        if isinstance(sent, Difference):
            assert self._last is not None
            tables = _reshaped(self._last, sent.shape)
            tables.ravel()[sent.where] = sent.values
            sent = tables
        self._last = sent
        return sent


def _reshaped(matrix: Array, shape: tuple[int, ...]) -> Array:
    if matrix.shape == shape:
        return matrix
    rows, columns = np.minimum(matrix.shape, shape)
    new = np.zeros(shape, matrix.dtype)
    new[:rows, :columns] = matrix[:rows, :columns]
    return new
