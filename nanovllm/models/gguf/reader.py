"""Reader: numbers, texts and arrays of a GGUF file, from mapped memory.

Each read is checked against the end of the file before anything is allocated. It knows no keys and
no tensors.
"""

import struct
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

MAX_TEXT = 1 << 26  # bytes; the longest published texts are tokenizers in JSON, of 20 MB
MAX_ITEMS = 1 << 24  # of an array; published vocabularies have up to 300 thousand tokens
MAX_DEPTH = 4  # of arrays in arrays

LENGTH = struct.Struct("<Q")
BOOL, TEXT, ARRAY = 7, 8, 9
FLOAT32 = 6
# The types of numbers by their numbers in files, by NumPy's names.
NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"),
    4: np.dtype("<u4"), 5: np.dtype("<i4"), FLOAT32: np.dtype("<f4"), BOOL: np.dtype("u1"),
    10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8"),
}  # fmt: skip


def damaged(path: Path, what: str) -> OSError:
    """The error for a file that does not have the form of its format."""
    return OSError(f"{path} is truncated or damaged ({what}); copy or download it again")


class Reader:
    """Reads a file from its start on; `pos` is the byte that comes next."""

    def __init__(self, path: Path, data: mmap) -> None:
        self.path, self.data, self.size, self.pos = path, data, len(data), 0

    def fail(self, what: str) -> NoReturn:
        """Raise the error that says what is wrong with the file."""
        raise damaged(self.path, what)

    def take(self, num_bytes: int, what: str) -> int:
        """The position of the next `num_bytes` bytes, which are then behind."""
        start, end = self.pos, self.pos + num_bytes
        if end > self.size:
            self.fail(f"{what} ends at byte {end:,}, the file has {self.size:,}")
        self.pos = end
        return start

    def number(self, kind: int, what: str) -> Any:
        """The next number, of the type `kind`. A float32 becomes the shortest decimal for it."""
        dtype = NUMBERS[kind]
        start = self.take(dtype.itemsize, what)
        value = np.frombuffer(self.data, dtype, 1, start)[0]
        if kind == BOOL:
            if value > 1:
                self.fail(f"{what} is a truth value of {value}")
            return bool(value)
        return float(str(value)) if kind == FLOAT32 else value.item()

    def count(self, what: str, min_bytes: int, most: int = MAX_ITEMS) -> int:
        """The next number, which counts parts of at least `min_bytes` bytes that follow."""
        (value,) = LENGTH.unpack_from(self.data, self.take(8, what))
        if value * min_bytes > self.size - self.pos or value > most:
            self.fail(f"{what} is {value:,}, at byte {self.pos - 8:,} of {self.size:,}")
        return int(value)

    def text(self, what: str, most: int = MAX_TEXT) -> str:
        """The next text."""
        length = self.count(f"the length of {what}", 1, most)
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is no text: {error.reason}")

    def value(self, kind: int, what: str) -> Any:
        """The next value, of the type `kind`. Of an array, where it is."""
        if kind in NUMBERS:
            return self.number(kind, what)
        if kind == TEXT:
            return self.text(what)
        if kind != ARRAY:
            self.fail(f"{what} has the unknown type {kind}")
        return self._array(what, 1)

    def _array(self, what: str, depth: int) -> "Array":
        if depth > MAX_DEPTH:
            self.fail(f"{what} has arrays in arrays, more than {MAX_DEPTH} levels")
        kind = self.number(4, what)
        size = NUMBERS[kind].itemsize if kind in NUMBERS else 12 if kind == ARRAY else 8
        count = self.count(f"the number of items of {what}", size)
        array = Array(self, what, kind, count, self.pos)
        if kind in NUMBERS:
            self.take(count * size, what)
        elif kind == TEXT:
            self._skip_texts(count, what)
        elif kind == ARRAY:
            for _ in range(count):
                self._array(what, depth + 1)
        else:
            self.fail(f"{what} has items of the unknown type {kind}")
        return array

    def _skip_texts(self, count: int, what: str) -> None:
        unpack, data, pos, last = LENGTH.unpack_from, self.data, self.pos, self.size - 8
        for _ in range(count):
            if pos > last:
                break
            pos += 8 + unpack(data, pos)[0]
        else:
            last += 8
        if pos > last:
            self.fail(f"{what} ends behind the end of the file, which has {self.size:,} bytes")
        self.pos = pos


@dataclass(frozen=True, eq=False)
class Array:
    """An array of a file, which is decoded when `values` is called. Its place was checked."""

    reader: Reader
    what: str
    kind: int
    count: int
    start: int

    def values(self) -> list[Any]:
        """The items: numbers or texts."""
        if self.kind == TEXT:
            return self._texts()
        if self.kind == ARRAY:
            self.reader.fail(f"{self.what} has arrays as items")
        items = np.frombuffer(self.reader.data, NUMBERS[self.kind], self.count, self.start)
        if self.kind == FLOAT32:
            return [float(str(item)) for item in items]
        return [*(items != 0).tolist()] if self.kind == BOOL else [*items.tolist()]

    def _texts(self) -> list[str]:
        """Decoded in one pass: the vocabulary's arrays have hundreds of thousands of items."""
        unpack, data, pos = LENGTH.unpack_from, self.reader.data, self.start
        texts = []
        try:
            for _ in range(self.count):
                end = pos + 8 + unpack(data, pos)[0]
                texts.append(data[pos + 8 : end].decode())
                pos = end
        except UnicodeDecodeError as error:
            self.reader.fail(f"item {len(texts)} of {self.what} is no text: {error.reason}")
        return texts
