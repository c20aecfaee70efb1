"""The channel from rank 0 to the others: messages of any length through a ring in shared memory.

One writes, every reader reads everything, and a message is written once however many read it. The
ring is a file without a name, which the readers' processes inherit: nothing is left of it when they
are gone, whatever way they went. What the bytes mean is not known here.
"""

import contextlib
import mmap
import os
import select
import struct
import tempfile
import threading
import time
from collections.abc import Callable

import numpy as np

CAPACITY = 1 << 22  # bytes; a message that is longer goes through in pieces
LINE = 64  # bytes: a counter each, so that no two processes write to one cache line
SPIN_SECONDS = 1e-3
NAP_SECONDS = 0.05  # how long it sleeps at most: what a bell costs that was not heard
LENGTH = struct.Struct("<q")
_fence = threading.Lock()


def fence() -> None:
    """Keep memory accesses on either side of it in order, as taking and leaving a lock does."""
    with _fence:
        pass


class Ring:
    """The memory: how much was written, how much each reader has read, who sleeps, and the bytes.

    Counters count bytes from the start of the channel. State space, for every reader:
    `0 <= written - read <= CAPACITY`; written is the writer's to change, the others each reader's.
    """

    def __init__(self, fd: int, num_readers: int) -> None:
        lines = 1 + 2 * num_readers
        self.memory = mmap.mmap(fd, lines * LINE + CAPACITY)
        counters = np.ndarray((lines, LINE // 8), np.int64, self.memory)[:, 0]
        self.written = counters[:1]
        self.read = counters[1 : 1 + num_readers]
        self.asleep = counters[1 + num_readers :]
        self.data = memoryview(self.memory)[lines * LINE :]

    @staticmethod
    def create(num_readers: int) -> int:
        """Make the memory, zeroed, and return its file descriptor."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("nanovllm")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, (1 + 2 * num_readers) * LINE + CAPACITY)
        return fd

    def close(self) -> None:
        """Unmap the memory."""
        self.data.release()
        del self.written, self.read, self.asleep
        self.memory.close()


class Writer:
    """Rank 0's end. `fd` and `bells[i].reader` are for the process that reads as number i.

    `check` is called while the ring is full, and raises if a reader will never read again.
    """

    def __init__(self, num_readers: int, check: Callable[[], None]) -> None:
        self.check = check
        self.fd = Ring.create(num_readers)
        self.ring = Ring(self.fd, num_readers)
        self.bells = [os.pipe() for _ in range(num_readers)]
        for _, bell in self.bells:
            os.set_blocking(bell, False)

    def send(self, message: bytes) -> None:
        """Write a message; returns as soon as its last bytes are in the ring."""
        self._put(LENGTH.pack(len(message)) + message)
        self._wake()

    def close(self) -> None:
        """Free the memory and the bells. The readers' copies are theirs to close."""
        self.ring.close()
        for fd in (self.fd, *(end for bell in self.bells for end in bell)):
            os.close(fd)

    def _put(self, message: bytes) -> None:
        ring, start = self.ring, 0
        view = memoryview(message)
        while start < len(view):
            written = int(ring.written[0])
            room = CAPACITY - (written - int(ring.read.min()))
            at = written % CAPACITY
            size = min(room, CAPACITY - at, len(view) - start)
            if size == 0:
                self._wake()
                self._wait_for_room(written)
                continue
            ring.data[at : at + size] = view[start : start + size]
            fence()  # the bytes first, then their number
            ring.written[0] = written + size
            start += size

    def _wait_for_room(self, written: int) -> None:
        while written - int(self.ring.read.min()) == CAPACITY:
            self.check()
            time.sleep(1e-4)

    def _wake(self) -> None:
        fence()  # a reader says that it sleeps and looks again; we write and look who sleeps
        for reader in np.flatnonzero(self.ring.asleep):
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
                os.write(self.bells[reader][1], b"!")


class Reader:
    """Another rank's end: reader number `index` of the ring in `fd`, which `bell` wakes."""

    def __init__(self, fd: int, bell: int, index: int, num_readers: int) -> None:
        self.ring = Ring(fd, num_readers)
        self.bell = bell
        self.mine = self.ring.read[index : index + 1]
        self.asleep = self.ring.asleep[index : index + 1]
        os.set_blocking(bell, False)
        self._poll = select.poll()
        self._poll.register(bell, select.POLLIN)

    def receive(self) -> bytearray:
        """Read the next message; waits for it, first awake and then asleep."""
        return self._take(LENGTH.unpack(self._take(LENGTH.size))[0])

    def _take(self, length: int) -> bytearray:
        ring, out, start = self.ring, bytearray(length), 0
        while start < length:
            read = int(self.mine[0])
            size = min(self._wait(read), CAPACITY - read % CAPACITY, length - start)
            at = read % CAPACITY
            out[start : start + size] = ring.data[at : at + size]
            fence()  # copied first, then given back
            self.mine[0] = read + size
            start += size
        return out

    def _wait(self, read: int) -> int:
        """How many bytes there are after `read`; at least one."""
        written = self.ring.written
        until = time.perf_counter() + SPIN_SECONDS
        while int(written[0]) == read:
            if time.perf_counter() > until:
                self._sleep(read)
            os.sched_yield()  # ranks may outnumber cores
        fence()  # their number first, then the bytes
        return int(written[0]) - read

    def _sleep(self, read: int) -> None:
        self.asleep[0] = 1
        fence()
        if int(self.ring.written[0]) == read and self._poll.poll(NAP_SECONDS * 1e3):
            os.read(self.bell, 4096)
        self.asleep[0] = 0
