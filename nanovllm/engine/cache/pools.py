"""Pools: the memory of one rank's caches. The KV of tokens is in blocks.

They know the size of a block and which layers read it; `sizing` finds how many blocks fit.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.cache.caches import CacheLayout
from nanovllm.engine.cache.groups import CacheGroups
from nanovllm.engine.run.step_part import StepPart
from nanovllm.kernels.kv_layer import CODES, SCALES
from nanovllm.utils.resources import memory_text

CACHE_LINE = 64
NewMemory = Callable[[int], torch.Tensor]  # zeroed memory of a number of bytes on a GPU


class KVPool:
    """The KV of all layers in one tensor `[slots, blocks, ...]`; quantized, a second has scales.

    All groups share the blocks. A layer's keys and values have places in slots, and scales are in
    the same slots. `linked` pools have blocks with the same numbers.
    """

    def __init__(
        self, groups: CacheGroups, block_size: int, dtype: torch.dtype, device: torch.device,
        linked: "Sequence[KVPool]" = (),
    ) -> None:  # fmt: skip
        self.groups = groups
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.linked = linked
        self._scales_size = 0
        if dtype == CODES:
            from nanovllm.engine.cache.codes import scales_of_slot

            self._scales_size = scales_of_slot(groups)
        self.release()

    @property
    def block_bytes(self) -> int:
        """The size of one block in all slots, with the same block of the linked pools."""
        of_token = self.groups.slot_size * self.dtype.itemsize + self._scales_size * SCALES.itemsize
        own = self.groups.num_slots * self.block_size * of_token
        return own + sum(other.block_bytes for other in self.linked)

    def allocate(self, num_blocks: int, new_memory: NewMemory | None = None) -> None:
        """Make the tensors, zeroed (masked keys are multiplied by 0), and hand out their slots."""
        slots, of_token = (self.groups.num_slots, num_blocks), self.groups.slot_size
        try:
            shape = (*slots, self.block_size * of_token)
            self.cache = zeros_of(shape, self.dtype, self.device, new_memory)
            self.tensors = [self.cache]
            if self._scales_size:
                shape = (*slots, self.block_size * self._scales_size)
                self.tensors.append(zeros_of(shape, SCALES, self.device, new_memory))
        except (MemoryError, RuntimeError, TypeError, ValueError) as error:  # for too large a size
            size = memory_text(num_blocks * self.block_bytes)
            raise MemoryError(
                f"a KV pool of {num_blocks} blocks takes {size}, more than {self.device} has free;"
                " lower num_kvcache_blocks, cpu_kvcache_gib or gpu_memory_utilization"
            ) from error
        for number, group in enumerate(self.groups.groups):
            for index, layer in enumerate(group.layers):
                of_head = (self.block_size, layer.num_kv_heads)
                count = len(group.layers)
                places = range(index, count * layer.cache.num_tensors, count)
                caches = [
                    self._part(self.cache, place, group.parts, (*of_head, layer.head_dim))
                    for place in places
                ]
                for scales in self.tensors[1:]:
                    caches += [self._part(scales, place, 1, of_head[::-1]) for place in places]
                layer.set_cache(number, *(caches if len(places) > 1 else caches * 2))
        for other in self.linked:
            other.allocate(num_blocks, new_memory)

    def _part(
        self, tensor: torch.Tensor, place: int, parts: int, of_block: tuple[int, ...]
    ) -> torch.Tensor:
        """The tensor [blocks * parts, ...] at a `place` of a group; a slot has `parts` places."""
        slot, index = divmod(place, parts)
        size = math.prod(of_block)
        return tensor[slot].flatten()[index * size :].view(-1, *of_block)

    def copy(self, source: int, target: int) -> None:
        """Copy one block to another, in all slots: `block_bytes` read and written."""
        for tensor in self.tensors:
            tensor[:, target] = tensor[:, source]
        for other in self.linked:
            other.copy(source, target)

    def release(self) -> None:
        """Free the memory: the layers have no blocks until the next `allocate`."""
        self.allocate(0)


class CacheBytes(NamedTuple):
    """The bytes of a block with its share of checkpoints, and the bytes needed before any block."""

    of_block: int  # 0 if the model has no KV and prefixes are not cached
    before: int


class CachePools:
    """The pools of a model without states. `layout` says what was made.

    `PoolsWithStates` is for models with states.
    """

    slots_per_sequence = 0  # of a running sequence, for the states of its last tokens

    def __init__(self, kv: KVPool) -> None:
        self.kv = kv
        self.layout = CacheLayout(kv.groups.windows)
        self.size = 0, 0  # the numbers of blocks and of sequences that there is memory for
        self._asleep: tuple[int, int] | None = None  # the same before `sleep`

    @property
    def groups(self) -> CacheGroups:
        """Which of the model's layers share block tables."""
        return self.kv.groups

    def step_parts(self) -> list[StepPart]:
        """The parts of steps that the caches need, in addition to block tables."""
        return []

    def num_bytes(self, num_running: int) -> CacheBytes:  # noqa: ARG002
        """The bytes of a block with its share of checkpoints, and of the slots of sequences."""
        return CacheBytes(self.kv.block_bytes, 0)

    def allocate(
        self, num_blocks: int, num_running: int, new_memory: NewMemory | None = None
    ) -> None:
        """Make a KV pool of `num_blocks`, and the slots that `num_running` sequences need."""
        self.size = num_blocks, num_running
        self.kv.allocate(num_blocks, new_memory)

    def log(self) -> None:
        """Log the memory that is not for KV."""

    def release(self) -> None:
        """Free all memory until the next `allocate`."""
        self.size = 0, 0
        self.kv.release()

    def sleep(self) -> None:
        """Free all memory until `wake_up`."""
        if self._asleep is None:
            self._asleep = self.size
            self.release()

    def wake_up(self) -> None:
        """Allocate as much as before `sleep`; without a `sleep` before, do nothing."""
        if self._asleep is not None:
            self.allocate(*self._asleep)
            self._asleep = None


def zeros_of(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    new_memory: NewMemory | None = None,
) -> torch.Tensor:
    """Zeroed memory, on a GPU from `new_memory` if given.

    On the CPU the system provides pages when they are first written.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu":
        if new_memory is not None and num_bytes:
            return new_memory(num_bytes).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)
