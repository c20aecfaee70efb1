"""CachePools: the memory of all that layers keep of sequences, on one rank."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from nanovllm.engine.cache.caches import CacheLayout
from nanovllm.engine.cache.groups import CacheGroups
from nanovllm.engine.cache.kv_pool import KVPool, NewMemory
from nanovllm.engine.run.step_part import StepPart
from nanovllm.layers.mixer import StateMixer

if TYPE_CHECKING:
    from nanovllm.engine.cache.state_pool import StatePool


class CacheBytes(NamedTuple):
    """What a block takes, with its share of checkpoints, and what is needed before the first."""

    of_block: int  # 0 if the model has no KV and prefixes are not cached
    before: int


class CachePools:
    """KV in blocks, and states in slots if the model has some. `layout` says what was made.

    The pools of draft models are `linked` to the model's.
    """

    def __init__(
        self,
        groups: CacheGroups,
        mixers: Sequence[StateMixer],
        block_size: int,
        types: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        linked: Sequence[KVPool],
        slots_per_sequence: int,
        caches_prefixes: bool,
    ) -> None:
        """`types` are that of KV and that of the model."""
        kv_dtype, dtype = types
        self.kv = KVPool(groups, block_size, kv_dtype, device, linked)
        self.states: StatePool | None = None
        if mixers:
            from nanovllm.engine.cache import state_pool

            self.states = state_pool.StatePool(
                mixers, dtype, device, slots_per_sequence, caches_prefixes
            )
        self.layout = CacheLayout(groups.windows)
        self._num_groups = max(1, len(groups.groups))
        self._size = 0, 0  # the numbers of blocks and of sequences that there is memory for
        self._asleep: tuple[int, int] | None = None  # the same before `sleep`

    @property
    def groups(self) -> CacheGroups:
        """Which of the model's layers share block tables."""
        return self.kv.groups

    @property
    def slots_per_sequence(self) -> int:
        """Slots of a running sequence, for the states of its last tokens."""
        return 0 if self.states is None else self.states.slots_per_sequence

    def step_parts(self) -> list[StepPart]:
        """What steps need of the caches besides block tables."""
        if self.states is None:
            return []
        from nanovllm.engine.cache.state_part import StatePart

        return [StatePart(self.states)]

    def _layout(self, num_blocks: int) -> CacheLayout:
        if self.states is None:
            return self.layout
        number, size = self._num_groups, self.kv.block_bytes * self._num_groups
        states = self.states.layout(num_blocks // number, self.kv.block_size, size)
        return self.layout._replace(states=states)

    def num_bytes(self, num_running: int) -> CacheBytes:
        """Of a block with its share of checkpoints, and of the slots that sequences need."""
        of_block, states = self.kv.block_bytes, self._layout(0).states
        if states is None or self.states is None:
            return CacheBytes(of_block, 0)
        if states.interval:
            num_tokens = states.interval * self._num_groups  # of blocks, for each checkpoint
            of_block += -(-self.states.slot_bytes * self.kv.block_size // num_tokens)
        before = states.num_slots(num_running) * self.states.slot_bytes
        return CacheBytes(of_block, before)

    def allocate(
        self, num_blocks: int, num_running: int, new_memory: NewMemory | None = None
    ) -> None:
        """Make a KV pool of `num_blocks`, and slots for the states of `num_running` sequences."""
        self._size = num_blocks, num_running
        self.kv.allocate(num_blocks, new_memory)
        self.layout = self._layout(num_blocks)
        if self.states is not None and self.layout.states is not None:
            self.states.allocate(self.layout.states.num_slots(num_running), new_memory)

    def log_states(self) -> None:
        """Log how many slots for states there are, if the model has some."""
        if self.states is not None and self.layout.states is not None:
            self.states.log(self.layout.states, self._size[1])

    def release(self) -> None:
        """Free all memory until the next `allocate`."""
        self._size = 0, 0
        self.kv.release()
        if self.states is not None:
            self.states.release()

    def sleep(self) -> None:
        """Free all memory until `wake_up`."""
        if self._asleep is None:
            self._asleep = self._size
            self.release()

    def wake_up(self) -> None:
        """Have as much as before `sleep`; nothing happens if that has not run."""
        if self._asleep is not None:
            self.allocate(*self._asleep)
            self._asleep = None
