"""Memory of a rank's GPU that the GPUs of other processes write to.

It calls CUDA's driver: PyTorch's public functions need the default group. The memory has no name,
and a mapping ends with its process, so nothing remains.
"""

import contextlib
import ctypes

import torch

from nanovllm.engine.ranks.driver import call, driver

HANDLE_BYTES = 64
ENABLE_PEER_ACCESS = ctypes.c_uint(1)
Address = ctypes.c_uint64


class Handle(ctypes.Structure):
    """The handle by which another process maps the memory."""

    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class PeerMemory:
    """A buffer on this rank's device, and the mapped buffers of the other ranks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._own: Address | None = None
        self._others: list[Address] = []

    def allocate(self, num_bytes: int, fill: int) -> None:
        """Allocate the buffer, and fill it with the number `fill` of 16 bits."""
        with torch.cuda.device(self.device):
            own = Address()
            call("cuMemAlloc_v2", ctypes.byref(own), ctypes.c_size_t(num_bytes))
            self._own, count = own, ctypes.c_size_t(num_bytes // 2)
            call("cuMemsetD16_v2", own, ctypes.c_ushort(fill), count)
            torch.cuda.synchronize()

    def handle(self) -> bytes:
        """The handle by which the other ranks map the buffer."""
        handle = Handle()
        with torch.cuda.device(self.device):
            call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
        return bytes(handle.bytes)

    def open(self, rank: int, handles: list[bytes]) -> list[int]:
        """Map the buffers of all ranks except this one. Returns the addresses of all of them."""
        addresses = []
        with torch.cuda.device(self.device):
            for other, data in enumerate(handles):
                address, handle = self._own or Address(), Handle.from_buffer_copy(data)
                if other != rank:
                    address = Address()
                    to = ctypes.byref(address)
                    call("cuIpcOpenMemHandle_v2", to, handle, ENABLE_PEER_ACCESS)
                    self._others.append(address)
                addresses.append(address.value)
        return addresses

    def unmap(self) -> None:
        """Unmap the other ranks' buffers, in any state of the device. No kernel may use them."""
        with contextlib.suppress(RuntimeError), torch.cuda.device(self.device):
            for address in self._others:
                driver().cuIpcCloseMemHandle(address)
        self._others = []

    def close(self) -> None:
        """Unmap and free all memory. The other ranks have unmapped this rank's buffer, or ended."""
        self.unmap()
        with contextlib.suppress(RuntimeError), torch.cuda.device(self.device):
            if self._own is not None:
                driver().cuMemFree_v2(self._own)
        self._own = None
