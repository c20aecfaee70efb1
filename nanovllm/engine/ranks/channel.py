"""The channel from rank 0 to the other ranks: byte messages through a ring in shared memory.

There is one writer. Each message is written once, is read by every reader, and may have any length.
The ring is an unnamed file that the readers' processes inherit: however they end, nothing remains.
"""

import contextlib
import mmap
import os
import select
import struct
import threading
import time
from collections.abc import Callable

import numpy as np

from nanovllm.engine.ranks.spin import Spin

CAPACITY = 1 << 22  # bytes; a longer message is sent in pieces
CACHE_LINE = 64  # bytes, with one counter each: no two processes write to the same line
SPIN_SECONDS = 1e-3  # how long a reader polls before it sleeps, at most
NAP_SECONDS = 0.05  # the longest sleep: the delay if a wake-up is missed
LENGTH = struct.Struct("<q")
_fence = threading.Lock()


def fence() -> None:
    """Memory barrier: accesses before the call take effect before those after it.

    On x86 acquiring a lock is a barrier; elsewhere, releasing a lock and acquiring it again is one.
    """
    for _ in range(2):
        with _fence:
            pass


def ring_bytes(num_readers: int) -> int:
    """The size of the shared memory of a ring."""
    return (1 + 2 * num_readers) * CACHE_LINE + CAPACITY


class Ring:
    """The shared memory: the `written` counter; `read` and `asleep` for each reader; the data.

    Counters are in bytes since the channel was opened. Invariant, for every reader:
    `0 <= written - read <= CAPACITY`. Only the writer changes `written`, and only reader i changes
    `read[i]` and `asleep[i]`.
    """

    def __init__(self, fd: int, num_readers: int) -> None:
        num_counters = 1 + 2 * num_readers
        self.memory = mmap.mmap(fd, ring_bytes(num_readers))
        counters = np.ndarray((num_counters, CACHE_LINE // 8), np.int64, self.memory)[:, 0]
        self.written = counters[:1]
        self.read = counters[1 : 1 + num_readers]
        self.asleep = counters[1 + num_readers :]
        self.data = memoryview(self.memory)[num_counters * CACHE_LINE :]

    def close(self) -> None:
        """Unmap the memory."""
        self.data.release()
        del self.written, self.read, self.asleep
        self.memory.close()


class Writer:
    """Rank 0's end. Reader i's process inherits `fd` and `bells[i][0]`.

    A bell is a pipe that wakes a sleeping reader: a pair, its reading end and its writing end.
    `check` is called while the ring is full; it raises if a reader has ended.
    """

    def __init__(self, num_readers: int, check: Callable[[], None]) -> None:
        self.check = check
        self.bells: list[tuple[int, int]] = []
        with contextlib.ExitStack() as stack:
            self.fd = os.memfd_create("nanovllm")
            stack.callback(os.close, self.fd)
            os.ftruncate(self.fd, ring_bytes(num_readers))
            self.ring = Ring(self.fd, num_readers)
            stack.callback(self.ring.close)
            for _ in range(num_readers):
                self.bells.append(os.pipe())
                for end in self.bells[-1]:
                    stack.callback(os.close, end)
                os.set_blocking(self.bells[-1][1], False)
            self._resources = stack.pop_all()

    def send(self, message: bytes) -> None:
        """Write a message. Returns when its last bytes are in the ring."""
        self._put(LENGTH.pack(len(message)) + message)
        self._wake()

    def close(self) -> None:
        """Free the memory and the bells. Each reader closes its own copies."""
        self._resources.close()

    @property
    def room(self) -> int:
        """How many bytes can be written without waiting."""
        return CAPACITY - int((self.ring.written - self.ring.read).max())

    def _put(self, message: bytes) -> None:
        ring, start = self.ring, 0
        view = memoryview(message)
        while start < len(view):
            written = int(ring.written[0])
            offset = written % CAPACITY
            size = min(self.room, CAPACITY - offset, len(view) - start)
            if size == 0:
                self._wake()
                self._wait_for_room()
                continue
            ring.data[offset : offset + size] = view[start : start + size]
            fence()  # write the bytes before the counter
            ring.written[0] = written + size
            start += size

    def _wait_for_room(self) -> None:
        while not self.room:
            self.check()
            time.sleep(1e-4)

    def _wake(self) -> None:
        # A reader sets `asleep`, then checks `written`; we set `written`, then check `asleep`.
        fence()
        for asleep, (_, bell) in zip(self.ring.asleep.tolist(), self.bells, strict=True):
            if asleep:
                with contextlib.suppress(BlockingIOError):  # a full pipe also wakes the reader
                    os.write(bell, b"!")


class Reader:
    """Another rank's end: reader `index` of the ring in `fd`. `bell` is the pipe that wakes it."""

    def __init__(self, fd: int, bell: int, index: int, num_readers: int) -> None:
        self.ring = Ring(fd, num_readers)
        self.bell = bell
        self.read = self.ring.read[index : index + 1]
        self.asleep = self.ring.asleep[index : index + 1]
        os.set_blocking(bell, False)
        self._spin = Spin(SPIN_SECONDS)
        self._poll = select.poll()
        self._poll.register(bell, select.POLLIN)

    def receive(self) -> bytearray:
        """Wait for the next message and read it. Polls first, then sleeps."""
        return self._receive_bytes(LENGTH.unpack(self._receive_bytes(LENGTH.size))[0])

    def _receive_bytes(self, length: int) -> bytearray:
        ring, out, start = self.ring, bytearray(length), 0
        while start < length:
            read = int(self.read[0])
            offset = read % CAPACITY
            size = min(self._wait(read), CAPACITY - offset, length - start)
            out[start : start + size] = ring.data[offset : offset + size]
            fence()  # copy the bytes before freeing their space
            self.read[0] = read + size
            start += size
        return out

    def _wait(self, read: int) -> int:
        """Wait for bytes after `read`; returns how many there are."""
        written = self.ring.written
        if int(written[0]) == read:
            until = self._spin.begin()
            while int(written[0]) == read:
                if time.perf_counter() > until:
                    self._sleep(read)
                os.sched_yield()  # ranks may outnumber cores
            self._spin.end()
        fence()  # read the counter before the bytes
        return int(written[0]) - read

    def _sleep(self, read: int) -> None:
        self.asleep[0] = 1
        fence()
        if int(self.ring.written[0]) == read and self._poll.poll(NAP_SECONDS * 1e3):
            os.read(self.bell, 4096)
        self.asleep[0] = 0
