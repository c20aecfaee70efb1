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
import threading
import time
from collections.abc import Callable

import numpy as np

CAPACITY = 1 << 22  # bytes; a message that is longer goes through in pieces
CACHE_LINE = 64  # bytes: a counter each, so that no two processes write to one cache line
SPIN_SECONDS = 1e-3
NAP_SECONDS = 0.05  # how long it sleeps at most: what a bell costs that was not heard
LENGTH = struct.Struct("<q")
_fence = threading.Lock()


def fence() -> None:
    """Keep memory accesses on either side of it in order.

    Taking a lock is such a barrier on x86; elsewhere leaving one and then taking it again.
    """
    for _ in range(2):
        with _fence:
            pass


def ring_bytes(num_readers: int) -> int:
    """The size of a ring's memory."""
    return (1 + 2 * num_readers) * CACHE_LINE + CAPACITY


class Ring:
    """The memory: how much was written, how much each reader has read, who sleeps, and the bytes.

    Counters count bytes from the start of the channel. State space, for every reader:
    `0 <= written - read <= CAPACITY`; written is the writer's to change, the others each reader's.
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
    """Rank 0's end. `fd` and `bells[i].reader` are for the process that reads as number i.

    `check` is called while the ring is full, and raises if a reader will never read again.
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
        """Write a message; returns as soon as its last bytes are in the ring."""
        self._put(LENGTH.pack(len(message)) + message)
        self._wake()

    def close(self) -> None:
        """Free the memory and the bells. The readers' copies are theirs to close."""
        self._resources.close()

    @property
    def room(self) -> int:
        """How many bytes can be written at once."""
        return CAPACITY - int((self.ring.written - self.ring.read).max())

    def _put(self, message: bytes) -> None:
        ring, start = self.ring, 0
        view = memoryview(message)
        while start < len(view):
            written = int(ring.written[0])
            at = written % CAPACITY
            size = min(self.room, CAPACITY - at, len(view) - start)
            if size == 0:
                self._wake()
                self._wait_for_room()
                continue
            ring.data[at : at + size] = view[start : start + size]
            fence()  # the bytes first, then their number
            ring.written[0] = written + size
            start += size

    def _wait_for_room(self) -> None:
        while not self.room:
            self.check()
            time.sleep(1e-4)

    def _wake(self) -> None:
        fence()  # a reader says that it sleeps and looks again; we write and look who sleeps
        for asleep, (_, bell) in zip(self.ring.asleep.tolist(), self.bells, strict=True):
            if asleep:
                with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
                    os.write(bell, b"!")


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
