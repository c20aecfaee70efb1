"""Copies of tensors into a rank's memory: small ones are collected, and copied together.

Launching a copy takes the host about as long as a GPU needs to copy 10 MB. PyTorch copies a group
of tensors by a few kernels. These do not reach the memory's bandwidth, but they are much faster for
small tensors.
"""

from collections.abc import Iterable

import torch

from nanovllm.formats.stored import Loaded
from nanovllm.utils.resources import MIB
from nanovllm.weights.places import Place

SMALL = 4 * MIB  # copies with fewer bytes are collected
MOST_WAITING = 64 * MIB


class Copies:
    """Copies that `make` makes later; two copies to the same memory stay in order.

    A group has tensors of one device and type, for memory of one type, all dense: others would keep
    PyTorch from copying them together.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[object, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._parts: set[str] = set()  # parts of weights that the groups fill
        self._bytes = 0

    def add(self, parts: Iterable[str], places: Iterable[Place], tensor: Loaded) -> None:
        """Copy a tensor to its places, now or later. It fills these `parts` of the weights."""
        if not self._parts.isdisjoint(parts):
            self.make()
        for place in places:
            memory, part = place.memory, place.part(tensor)
            size = part.nbytes
            if size >= SMALL or not (memory.is_contiguous() and part.is_contiguous()):
                memory.copy_(part, non_blocking=True)
                continue
            key = part.device, part.dtype, memory.dtype
            targets, sources = self._groups.setdefault(key, ([], []))
            targets.append(memory)
            sources.append(part)
            self._parts.update(parts)
            # A part keeps the whole tensor.
            self._bytes += tensor.nbytes if isinstance(tensor, torch.Tensor) else size
        if self._bytes > MOST_WAITING:
            self.make()

    def make(self) -> None:
        """Make the collected copies."""
        for targets, sources in self._groups.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)
        self._groups.clear()
        self._parts.clear()
        self._bytes = 0
