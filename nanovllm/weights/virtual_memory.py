"""VirtualMemory: memory of a GPU at fixed addresses, which can be freed and mapped again.

Addresses are reserved once. Physical memory is mapped there in chunks, and unmapped while the
engine sleeps. So addresses do not change, and decode graphs stay valid.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nanovllm.engine.ranks.driver import call, driver
from nanovllm.utils.resources import MIB

CHUNK = 256 * MIB  # a multiple of the driver's granularity, and a size in which the host pins pages
DEVICE, PINNED, READ_AND_WRITE = 1, 1, 3  # the driver's numbers
Address = ctypes.c_uint64


class Location(ctypes.Structure):
    """Where memory is."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", Location),
        ("metadata", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class VirtualMemory:
    """A range of addresses on a device. `mapped` bytes of it, from the start on, have memory."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device = device
        self.num_bytes = max(1, -(-num_bytes // CHUNK)) * CHUNK
        self.mapped = 0
        self._location = Location(DEVICE, device.index)
        self._host: list[torch.Tensor] = []  # saved copies
        self._start = Address()
        with self._context():
            call(
                "cuMemAddressReserve", ctypes.byref(self._start), ctypes.c_size_t(self.num_bytes),
                ctypes.c_size_t(0), Address(0), ctypes.c_ulonglong(0),
            )  # fmt: skip

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface by which PyTorch reads the memory; its start must be mapped."""
        data = (self._start.value, False)
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": data, "version": 3}

    @property
    def bytes(self) -> torch.Tensor:
        """The whole range as a tensor; only the mapped part may be used."""
        self.map(1)
        return torch.as_tensor(self, device=self.device)

    def map(self, num_bytes: int | None = None) -> None:
        """Map the first `num_bytes` bytes, or all. Values are not defined.

        Does not wait for the device.
        """
        needed = self.num_bytes if num_bytes is None else num_bytes
        if self.mapped < needed:
            with self._context():
                while self.mapped < needed:
                    self._map_chunk()

    @contextmanager
    def _context(self) -> Iterator[None]:
        """The device's context in this thread, which the driver's calls need. Does not wait.

        PyTorch does not set a thread's device if it is already the current one. CUDA makes a
        context current in the first call that needs one, such as this query of a stream.
        """
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().query()
            yield

    def _map_chunk(self) -> None:
        handle, size = ctypes.c_ulonglong(), ctypes.c_size_t(CHUNK)
        properties = Properties(type=PINNED, location=self._location)
        start = Address((self._start.value or 0) + self.mapped)
        try:
            call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties),
                 ctypes.c_ulonglong(0))  # fmt: skip
        except RuntimeError as error:
            raise torch.OutOfMemoryError(
                f"{CHUNK} bytes on {self.device}, which other processes may use: {error}"
            ) from None
        access = Access(self._location, READ_AND_WRITE)
        try:
            call("cuMemMap", start, size, ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
            try:
                call("cuMemSetAccess", start, size, ctypes.byref(access), ctypes.c_size_t(1))
            except RuntimeError:
                call("cuMemUnmap", start, size)
                raise
            self.mapped += CHUNK
        finally:
            call("cuMemRelease", handle)  # mapped memory is freed when it is unmapped

    def unmap(self) -> None:
        """Return the memory to the device; its values are lost. Nothing may use it meanwhile.

        If this fails, `mapped` is the rest, and another call continues.
        """
        with self._context():
            torch.cuda.synchronize()
            while self.mapped:
                start = Address((self._start.value or 0) + self.mapped - CHUNK)
                call("cuMemUnmap", start, ctypes.c_size_t(CHUNK))
                self.mapped -= CHUNK

    def save(self) -> None:
        """Copy the mapped memory to pinned memory of the host, in place of earlier copies."""
        memory, parts = self.bytes, []
        self._host = []
        for start in range(0, self.mapped, CHUNK):
            part = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True)
            parts.append(part.copy_(memory[start : start + CHUNK], non_blocking=True))
        torch.cuda.synchronize(self.device)
        self._host = parts

    def drop_saved(self) -> None:
        """Free the saved copies."""
        self._host = []

    def restore(self) -> None:
        """Map everything, with the saved values or zeros. Does not wait for the device.

        A chunk is copied while the next chunks are mapped, also those of other regions. If there is
        not enough memory, another call continues.
        """
        saved = self._host
        while self.mapped < self.num_bytes:
            start = self.mapped
            self.map(start + CHUNK)
            part = self.bytes[start : start + CHUNK]
            if saved:
                part.copy_(saved[start // CHUNK], non_blocking=True)
            else:
                part.zero_()
        self._host = []

    def close(self) -> None:
        """Free memory and addresses; tensors in this memory must not be used any more."""
        self.unmap()
        with self._context():
            driver().cuMemAddressFree(self._start, ctypes.c_size_t(self.num_bytes))
