"""PoolsWithStates: the memory of KV in blocks and of states in slots, on one rank."""

from collections.abc import Sequence

import torch

from nanovllm.engine.cache.caches import CacheLayout
from nanovllm.engine.cache.pools import CacheBytes, CachePools, KVPool, NewMemory
from nanovllm.engine.cache.state_part import StatePart
from nanovllm.engine.cache.state_pool import StatePool
from nanovllm.engine.cache.state_slots import StateLayout
from nanovllm.engine.run.step_part import StepPart
from nanovllm.layers.mixer import Mixer
from nanovllm.layers.state_mixer import StateMixer


class PoolsWithStates(CachePools):
    """The pools of a model with layers that keep states."""

    def __init__(
        self,
        kv: KVPool,
        mixers: Sequence[Mixer],
        dtype: torch.dtype,
        slots_per_sequence: int,
        caches_prefixes: bool,
    ) -> None:
        super().__init__(kv)
        self.slots_per_sequence = slots_per_sequence
        states = [mixer for mixer in mixers if isinstance(mixer, StateMixer)]
        self.states = StatePool(states, dtype, kv.device, slots_per_sequence, caches_prefixes)
        self._num_groups = max(1, len(kv.groups.groups))

    def step_parts(self) -> list[StepPart]:
        """The part with the slots that layers read and write, and that steps copy."""
        return [StatePart(self.states)]

    def _state_layout(self, num_blocks: int) -> StateLayout:
        number, size = self._num_groups, self.kv.block_bytes * self._num_groups
        return self.states.layout(num_blocks // number, self.kv.block_size, size)

    def num_bytes(self, num_running: int) -> CacheBytes:
        """The bytes of a block with its share of checkpoints, and of the slots of sequences."""
        of_block, layout = self.kv.block_bytes, self._state_layout(0)
        if layout.interval:
            num_tokens = layout.interval * self._num_groups  # in blocks, for each checkpoint
            of_block += -(-self.states.slot_bytes * self.kv.block_size // num_tokens)
        return CacheBytes(of_block, layout.num_slots(num_running) * self.states.slot_bytes)

    def allocate(
        self, num_blocks: int, num_running: int, new_memory: NewMemory | None = None
    ) -> None:
        """Make a KV pool of `num_blocks`, and slots for the states of `num_running` sequences."""
        super().allocate(num_blocks, num_running, new_memory)
        layout = self._state_layout(num_blocks)
        self.layout = CacheLayout(self.groups.windows, layout)
        self.states.allocate(layout.num_slots(num_running), new_memory)

    def log(self) -> None:
        """Log how many slots for states there are."""
        num_blocks, num_running = self.size
        self.states.log(self._state_layout(num_blocks), num_running)

    def release(self) -> None:
        """Free all memory until the next `allocate`."""
        super().release()
        self.states.release()
