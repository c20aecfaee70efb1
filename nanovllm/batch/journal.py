"""The journal: a job's output file, which also says which lines are done.

Each line of the file is one record. A half-written last line is cut off when the file is opened
again. The lock is the operating system's, on the file itself: it is released when the process ends,
in whatever way.
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

from nanovllm.batch.digests import digest_of
from nanovllm.batch.records import ID, START

SYNC_SECONDS = 1.0  # the work that a power failure may cost
NUMBERED = re.compile(re.escape(START) + rb"[0-9]*")
AFTER_NUMBER = b'", "custom_id": '


class Journal:
    """The records of lines, by their numbers. Memory: 8 bytes for each line of the input.

    `num_failed` is the number of error records in the file when it was opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_failed = 0
        self._digests = array("Q")  # by line number: the digest of its id; 0: not done
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
        """Whether line `number` is done; ValueError if its record is of another request."""
        digest = self._digests[number] if number < len(self._digests) else 0
        if digest and digest != digest_of(custom_id):
            raise ValueError(
                f"{self.path} has the results of another input, where line {number} is not"
                f" {custom_id!r}; choose another output"
            )
        return bool(digest)

    def append(self, records: Iterable[bytes]) -> None:
        """Write records of lines that are not done, each line once.

        They are safe from the end of the process now, and from a power failure after the next sync.
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
        """Wait until everything is on the disk. Costs milliseconds."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        """Sync, close the file and release its lock."""
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
        """Read the records; cut off a half-written last one, and blank lines at the end."""
        place = end = 0
        if not START.startswith(self._file.read(len(START))):
            self._refuse(1)
        self._file.seek(0)
        for number, data in enumerate(self._file, 1):
            if not data.endswith(b"\n") and _begins_a_record(data):
                break
            place += len(data)
            if data.strip():  # an editor may have left a blank line
                self._read_record(number, data)
                end = place
        self._file.seek(end)
        self._file.truncate()

    def _read_record(self, number: int, data: bytes) -> None:
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
            f"{self.path}, line {number}, is not a record of a batch job; choose another output"
        ) from None


def _begins_a_record(data: bytes) -> bool:
    """Whether `data` may be the start of a record."""
    if (match := NUMBERED.match(data)) is None:
        return START.startswith(data)
    rest = data[match.end() :]
    return AFTER_NUMBER.startswith(rest[: len(AFTER_NUMBER)])
