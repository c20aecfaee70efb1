"""The journal: a job's output file, which also says which lines are done.

Each line of the file is one record. A half-written last line is cut off when the file is opened
again. The operating system locks the file itself, and releases it when the process ends in any way.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn

from nanovllm.batch.digests import digest_of
from nanovllm.batch.records import FIELDS, JournalRecord, begins_a_record, parse_record

SYNC_SECONDS = 1.0  # a power failure loses at most the work of this time
HEAD_BYTES = 1 << 16  # if these have no newline and do not begin a record, no more is read
REMEDIES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EFBIG: "raise the limit on the size of files",
}


class Journal:
    """The records of lines, by their numbers. Memory: 8 bytes for each line of the input.

    `num_lines` is the number of the input's lines, if it is known: a record of a later line is an
    error. `num_failed` is the number of error records in the file when it was opened. A `with`
    block that fails before anything is written leaves no new file.
    """

    def __init__(self, path: Path, num_lines: int | None = None) -> None:
        self.path = path
        self.num_lines = num_lines
        self.num_failed = 0
        self._digests = array("Q")  # by line number: the digest of its id; 0: not done, or taken
        self._synced = time.monotonic()
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise OSError(f"{path} is not a regular file; choose another output")
        self._is_new = not (path.exists() or path.is_symlink())
        # Unbuffered: closing must not try again to write what could not be written.
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        try:
            self._lock()
            self._read()
            self._sync_name()
        except BaseException:
            self._file.close()
            raise

    def take(self, number: int, custom_id: str) -> bool:
        """Whether line `number` is done; ValueError if its record is of another request.

        Call it once for each line of the input.
        """
        digest = self._digests[number] if number < len(self._digests) else 0
        if not digest:
            return False
        if digest != digest_of(custom_id):
            raise ValueError(
                f"{self.path} has the results of another input, where line {number} is not"
                f" {custom_id!r}; choose another output"
            )
        self._digests[number] = 0
        return True

    def check_taken(self) -> None:
        """Raise ValueError if the file had a record of a line that the input does not have."""
        lost = next((line for line, digest in enumerate(self._digests) if digest), None)
        if lost is None:
            return
        with self.path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if (record := parse_record(data)) is not None and record.line == lost:
                    self._refuse_line(number, lost)

    def append(self, records: Iterable[bytes]) -> None:
        """Write records of lines that are not done, each line once.

        They are safe from the end of the process now, and from a power failure after the next sync.
        """
        self._write(b"".join(records))
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Wait until everything is on the disk. Costs milliseconds."""
        with self._naming_errors():
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _sync_name(self) -> None:
        """Wait until the directory has the file's name on the disk, unless there are records.

        Otherwise a power failure could lose a new file with everything that was synced to it.
        """
        if len(self._digests):
            return
        try:
            folder = os.open(self.path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:  # it can be written, but not read
            return
        try:
            with self._naming_errors():
                os.fsync(folder)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # its system syncs no directories
                raise
        finally:
            os.close(folder)

    def remove_unused(self) -> None:
        """Remove the file if it was made here and nothing has been written; `close` comes next."""
        is_ours = self._is_new and not self._file.closed and self._is_at_path()
        if is_ours and not self.path.stat().st_size:
            self.path.unlink()

    def _is_at_path(self) -> bool:
        """Whether the open file still has its name."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        return False

    def close(self) -> None:
        """Sync, close the file and release its lock."""
        if not self._file.closed:
            try:
                self.sync()
            finally:
                with self._naming_errors():
                    self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file. An error of closing does not replace the error that ended the block."""
        if error is not None:
            with contextlib.suppress(OSError):
                self.remove_unused()  # still locked, so that no other job has begun to use it
        with contextlib.suppress(*([OSError] if error else [])):
            self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"another job is writing {self.path}") from None
        if not self._is_at_path():  # removed between opening and locking
            raise OSError(f"another job has just removed {self.path}; try again")

    def _read(self) -> None:
        """Read the records; cut off a half-written last one, and blank lines at the end."""
        with open(self._file.fileno(), "rb", closefd=False) as file:
            end, has_newline = self._read_lines(file)
        with self._naming_errors():
            self._file.truncate(end)
            self._file.seek(end)
        if not has_newline:  # an editor has left it out
            self._write(b"\n")

    def _read_lines(self, file: BinaryIO) -> tuple[int, bool]:
        """Where the last record ends, and whether a newline ends it."""
        place = end = 0
        last = b"\n"
        head = file.read(HEAD_BYTES)
        if len(head) == HEAD_BYTES and b"\n" not in head and not begins_a_record(head):
            self._refuse(1, place)
        file.seek(0)
        for number, data in enumerate(file, 1):
            place += len(data)
            if not data.strip():  # an editor may have left a blank line
                continue
            record = parse_record(data)
            if record is None:
                # A file of one unfinished line is a job's only if the line begins with its id.
                is_cut = begins_a_record(data, FIELDS if end else FIELDS[:1])
                if data.endswith(b"\n") or not is_cut:
                    self._refuse(number, end)
                break
            self._enter(number, record)
            end, last = place, data
        return end, last.endswith(b"\n")

    def _enter(self, number: int, record: JournalRecord) -> None:
        """Enter the record of line `number` of the file."""
        if self.num_lines is not None and record.line > self.num_lines:
            self._refuse_line(number, record.line)
        if record.line >= len(self._digests):
            self._digests.frombytes(bytes(8 * (record.line + 1 - len(self._digests))))
        if self._digests[record.line]:
            raise ValueError(
                f"{self.path}, line {number}, is a second record of line {record.line} of the"
                " input; remove one of the two, or choose another output"
            )
        self._digests[record.line] = digest_of(record.custom_id)
        self.num_failed += record.failed

    def _refuse(self, number: int, end: int) -> NoReturn:
        """Raise an error: a line is not a record. With records up to `end`, the file is a job's."""
        hint = "remove that line, or " if end else ""
        raise ValueError(
            f"{self.path}, line {number}, is not a record of a batch job; {hint}choose another"
            " output"
        )

    def _refuse_line(self, number: int, line: int) -> NoReturn:
        raise ValueError(
            f"{self.path}, line {number}, is a record of line {line}, where the input has no"
            " request; remove that record, or choose another output"
        )

    def _write(self, data: bytes) -> None:
        """Write all of `data`; a full disk may write only a part."""
        rest = memoryview(data)
        with self._naming_errors():
            while rest:
                rest = rest[self._file.write(rest) :]

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """A context that adds the file's name, and how to continue, to errors."""
        try:
            yield
        except OSError as error:
            remedy = REMEDIES.get(error.errno or 0, "solve that")
            named = OSError(
                f"{self.path}: {error.strerror}; {remedy}, and the same command goes on where it"
                " stopped"
            )
            named.errno = error.errno
            raise named from None
