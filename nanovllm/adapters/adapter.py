"""Adapter: a LoRA adapter that requests use, identified by its files."""

import hashlib
import os
from pathlib import Path

from nanovllm.models.file_errors import file_error

NO_SLOT = -1


class Adapter:
    """An adapter that a request has named. Sequences, slots and the store share one object.

    `number` depends on the directory and on the state of its files: files that have changed are
    another adapter. `slot` is its slot on the device. `error` says why it could not be read again.
    """

    __slots__ = ("__weakref__", "error", "number", "path", "slot")

    def __init__(self, number: int, path: Path) -> None:
        self.number, self.path = number, path
        self.slot = NO_SLOT
        self.error: Exception | None = None

    def __repr__(self) -> str:
        return f"Adapter({str(self.path)!r}, slot {self.slot})"


def number_of(path: Path) -> int:
    """The number of the adapter in a directory, from its files' present state: 1 to 2^63 - 1."""
    stamps = []
    for entry in os.scandir(path) if path.is_dir() else ():
        if entry.name.startswith("adapter_"):
            try:
                state = entry.stat()
            except OSError:
                raise file_error(Path(entry.path)) from None
            stamps.append((entry.name, state.st_size, state.st_mtime_ns, state.st_ino))
    text = repr((str(path), sorted(stamps)))
    digest = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 1) or 1
