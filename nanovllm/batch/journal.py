"""The journal: a job's output file, which is also its memory of what is done.

A record is a line; it is there as a whole or not at all, because a half-written last line is cut
off when the file is opened again. The lock is the system's, on the file itself: it ends with the
process, however that ends.
"""

import fcntl
import json
import os
import re
import stat
import time
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import numpy as np
import xxhash

from nanovllm.openai.response import ID, START

SYNC_SECONDS = 1.0  # of work that a power failure may cost
NUMBERED = re.compile(re.escape(START) + rb"[0-9]*")
AFTER_NUMBER = b'", "custom_id": '


class Journal:
    """Records of lines by their numbers. Memory: 8 bytes for each line of the input.

    `num_failed` counts the records of errors that it had when it was opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_failed = 0
        self._digests = array("Q")  # by line: the digest of its id once it is done, 0 before
        self._synced = time.monotonic()
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise OSError(f"{path} is not a regular file; choose another output")
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def has(self, number: int, custom_id: str) -> bool:
        """Whether line `number` is done; ValueError if another request was at its place then."""
        digest = self._digests[number] if number < len(self._digests) else 0
        if digest and digest != digest_of(custom_id):
            raise ValueError(
                f"{self.path} has the results of another input: line {number} was not"
                f" {custom_id!r} there; choose another output"
            )
        return bool(digest)

    def append(self, records: Iterable[bytes]) -> None:
        """Write records; from here on they outlive the process, and from the next sync the power.

        Records are of lines that are not done, and of no line twice: `has` says which are.
        """
        try:
            for record in records:
                self._file.write(record)
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Wait until the disk has it all. Costs milliseconds."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        """Sync, and let the next job have the file."""
        if not self._file.closed:
            self.sync()
            self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"another job is writing {self.path}") from None

    def _read(self) -> None:
        """Take in the records that are there; cut off what an end left half written, and blanks."""
        place = end = 0
        if not START.startswith(self._file.read(len(START))):
            self._refuse(1)
        self._file.seek(0)
        for number, data in enumerate(self._file, 1):
            if not data.endswith(b"\n") and _begins_a_record(data):
                break
            place += len(data)
            if data.strip():  # an editor may have left a blank line
                self._take_in(number, data)
                end = place
        self._file.seek(end)
        self._file.truncate()

    def _take_in(self, number: int, data: bytes) -> None:
        try:
            record = json.loads(data)
            line = int(record["id"].removeprefix(ID))
            digest, failed = digest_of(record["custom_id"]), record["error"] is not None
            if line < 1:
                raise ValueError(line)
        except (ValueError, TypeError, KeyError, AttributeError):
            self._refuse(number)
        if line >= len(self._digests):
            self._digests.frombytes(bytes(8 * (line + 1 - len(self._digests))))
        self._digests[line] = digest
        self.num_failed += failed

    def _refuse(self, number: int) -> NoReturn:
        raise ValueError(
            f"{self.path}, line {number}, is no record of a batch job; choose another output"
        ) from None


def _begins_a_record(data: bytes) -> bool:
    """Whether `data` may be what is left of a record that was cut off."""
    if (match := NUMBERED.match(data)) is None:
        return START.startswith(data)
    rest = data[match.end() :]
    return AFTER_NUMBER.startswith(rest[: len(AFTER_NUMBER)])


def digest_of(custom_id: str, seed: int = 0) -> int:
    """64 bits for an id, and never 0."""
    return xxhash.xxh64_intdigest(custom_id.encode(errors="surrogatepass"), seed) or 1


class Seen:
    """A set of digests that grows for as long as a job reads. Memory: 8 bytes for each.

    That two of a hundred million ids have one digest has a chance of 1 in 3,700.
    """

    MERGE = 1 << 20  # so many are held in a set, which takes ten times the memory, at most

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._sorted = np.empty(0, np.uint64)

    def add(self, digest: int) -> bool:
        """Take `digest` in; whether it is new."""
        wanted = np.uint64(digest)  # beside an int NumPy may compare as floats
        place = int(np.searchsorted(self._sorted, wanted))
        is_old = place < len(self._sorted) and self._sorted[place] == wanted
        if is_old or digest in self._recent:
            return False
        self._recent.add(digest)
        if len(self._recent) >= self.MERGE:
            recent = np.fromiter(self._recent, np.uint64, len(self._recent))
            self._sorted = np.sort(np.concatenate([self._sorted, recent]))
            self._recent.clear()
        return True
