"""The state pool: one tensor with the states of all layers, in slots.

`StateLayout` says how many slots there are; `StateSlots` knows what they are used for.
"""

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nanovllm.engine.cache.pools import NewMemory, zeros_of
from nanovllm.engine.cache.state_slots import StateLayout
from nanovllm.engine.run.transfer import Array
from nanovllm.layers.state_mixer import StateMixer
from nanovllm.utils.resources import memory_text

logger = logging.getLogger("nanovllm")

ALIGNMENT = 256  # bytes
# Bytes of KV for each byte of checkpoints: checkpoints get a quarter of the memory of both.
KV_PER_CHECKPOINT_BYTE = 3
NO_KV_INTERVAL = 256  # tokens between checkpoints, if there is no KV to compare with


class _Place(NamedTuple):
    start: int  # in a slot, in bytes
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class StatePool:
    """One tensor `[slots, bytes]`. Each slot has the states of all layers.

    A running sequence has `slots_per_sequence` slots. With `checkpoints` there are slots for these.
    """

    def __init__(
        self,
        mixers: Sequence[StateMixer],
        dtype: torch.dtype,
        device: torch.device,
        slots_per_sequence: int,
        checkpoints: bool,
    ) -> None:
        self.mixers = mixers
        self.device = device
        self.slots_per_sequence = slots_per_sequence
        self.checkpoints = checkpoints
        self._places: list[list[_Place]] = []
        self.slot_bytes = 0
        for mixer in mixers:
            self._places.append(places := [])
            for shape, in_float32 in mixer.cache.tensors:
                type_here = torch.float32 if in_float32 else dtype
                start = -(-self.slot_bytes // ALIGNMENT) * ALIGNMENT
                end = start + math.prod(shape) * type_here.itemsize
                places.append(_Place(start, end, type_here, shape))
                self.slot_bytes = -(-end // ALIGNMENT) * ALIGNMENT
        self.release()

    def layout(self, num_blocks: int, block_size: int, block_bytes: int) -> StateLayout:
        """The slots for a pool with `num_blocks` of KV in each group.

        `block_bytes` is the KV of a block's tokens in all groups; 0 without KV.
        """
        if not self.checkpoints:
            return StateLayout(self.slots_per_sequence, 0, 0)
        interval = NO_KV_INTERVAL
        if block_bytes:
            interval = -(-KV_PER_CHECKPOINT_BYTE * self.slot_bytes * block_size // block_bytes)
        interval = -(-interval // block_size) * block_size
        return StateLayout(self.slots_per_sequence, num_blocks * block_size // interval, interval)

    def allocate(self, num_slots: int, new_memory: NewMemory | None = None) -> None:
        """Make the tensor, zeroed, and hand out its parts."""
        shape = (num_slots, self.slot_bytes)
        try:
            self.slots = zeros_of(shape, torch.uint8, self.device, new_memory)
        except (MemoryError, RuntimeError, TypeError, ValueError) as error:  # for too large a size
            share = "cpu_kvcache_gib" if self.device.type == "cpu" else "gpu_memory_utilization"
            raise MemoryError(
                f"states in {num_slots} slots take {memory_text(num_slots * self.slot_bytes)}, more"
                f" than {self.device} has free; lower max_num_seqs, num_kvcache_blocks or {share}"
            ) from error
        for mixer, places in zip(self.mixers, self._places, strict=True):
            mixer.set_states(
                self.slots[:, start:end].view(dtype).view(num_slots, *shape)
                for start, end, dtype, shape in places
            )

    def log(self, layout: StateLayout, num_running: int) -> None:
        """Say how many slots there are, and warn if prefixes should be cached and have none."""
        prefixes = "prefixes are not cached"
        if layout.num_checkpoints:
            prefixes = f"{layout.num_checkpoints} for prefixes, every {layout.interval} tokens"
        elif self.checkpoints:
            logger.warning("the pool has no room for checkpoints of states: no prefix is cached")
        logger.info(
            "States in %d slots for %d sequences, %s; %s",
            layout.slots_per_sequence * num_running, num_running, prefixes,
            memory_text(len(self.slots) * self.slot_bytes),
        )  # fmt: skip

    def copy(self, pairs: Array) -> None:
        """Copy slots, one after another: `pairs` has the numbers of the first two, and so on."""
        for source, target in pairs.reshape(-1, 2).tolist():
            self.slots[target] = self.slots[source]

    def release(self) -> None:
        """Free the memory: there are no slots until the next `allocate`."""
        self.allocate(0)
