"""Read an input of any size line by line."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

MAX_LINE_BYTES = 1 << 26  # a longer line is not read into memory, and is an error
BOM = b"\xef\xbb\xbf"
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank. `number` counts all lines, from 1."""

    number: int
    data: bytes | None  # None: longer than MAX_LINE_BYTES


def read_lines(file: BinaryIO) -> Iterator[Line]:
    """Yield the lines of `file`, without a byte order mark and without line ends of any kind."""
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
            _skip_rest(file)
            yield Line(number, None)
            continue
        if number == 1:
            data = data.removeprefix(BOM)
        if data := data.strip():
            yield Line(number, data)


def _skip_rest(file: BinaryIO) -> None:
    while (data := file.readline(CHUNK)) and not data.endswith(b"\n"):
        pass


def count_lines(file: BinaryIO) -> int:
    """Count the lines from here on, including blank ones. Reads the whole `file`, and returns."""
    count, last, start = 0, b"\n", file.tell()
    while chunk := file.read(CHUNK):
        count, last = count + chunk.count(b"\n"), chunk[-1:]
    file.seek(start)
    return count + (last != b"\n")
