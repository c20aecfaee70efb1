"""Caches: what layers keep of sequences between steps, as the scheduler sees it."""

from collections.abc import Callable, Iterable, Set
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.engine.cache.block_manager import BlockManager, FreeBlocks
from nanovllm.engine.cache.block_pool import Window
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import Sequence

if TYPE_CHECKING:
    from collections import deque

    from nanovllm.engine.cache.state_slots import StateLayout, StateSlots


class CacheLayout(NamedTuple):
    """What a model's layers keep: the windows of the groups of KV blocks, and states if any."""

    windows: tuple[Window, ...] = (None,)
    states: "StateLayout | None" = None


class Caches:
    """The KV blocks of all sequences, for a model without states.

    `CachesWithStates` is for models with states.
    """

    states: "StateSlots | None" = None

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        block_size: int,
        num_running: int,  # noqa: ARG002
        enable_prefix_caching: bool = True,
    ) -> None:
        manager = block_manager_for(layout.windows)
        self.blocks = manager(  # without groups no sequence takes a block
            num_blocks if layout.windows else 0, block_size, enable_prefix_caching, layout.windows,
            has_states=layout.states is not None,
        )  # fmt: skip
        self.has_windows = self.blocks.has_windows  # whether `pass_by` has to be called

    def admit(
        self,
        seq: Sequence,
        in_progress: Set[int] = frozenset(),
        admits: Callable[[Sequence, int], bool] | None = None,
        waiting: "deque[Sequence] | None" = None,  # noqa: ARG002
    ) -> bool:
        """Give `seq` room for all its tokens, with a cached prefix; if False, nothing has changed.

        See `BlockManager.allocate`. `waiting` has later sequences, which may share the prefix.
        """
        return self.blocks.allocate(seq, in_progress, admits)

    def in_progress(self, seq: Sequence) -> list[int]:
        """The hashes of the blocks of `seq`, computed or not, that other sequences could reuse."""
        return self.blocks.full_block_hashes(seq)

    def free_blocks(self) -> FreeBlocks:
        """The blocks that sequences may take now."""
        blocks = self.blocks
        return FreeBlocks(blocks.num_free_blocks, blocks.block_size, blocks.most_kept)

    def can_grow(self, seqs: list[Sequence]) -> bool:
        """Whether all of these sequences can get room for their last token, which they lack."""
        return self.blocks.num_needed(seqs) <= self.blocks.num_free_blocks

    def any_can_grow(self, num_seqs: int, num_tokens: int) -> bool:
        """Whether any `num_seqs` sequences can get room for `num_tokens` more each."""
        blocks = self.blocks
        blocks_each = 1 + -(-num_tokens // blocks.block_size)  # the first tokens may end a block
        return num_seqs * blocks_each * blocks.num_groups <= blocks.num_free_blocks

    def grow(self, seq: Sequence, num_tokens: int) -> int:
        """Make room for the first `num_tokens` of `seq`; returns how many of them have room."""
        return self.blocks.grow(seq, num_tokens)

    def rewind(self, seq: Sequence, num_tokens: int) -> None:
        """Give up what `seq` has for tokens after its first `num_tokens`; none is published."""
        self.blocks.shrink(seq, num_tokens)

    def fork(self, seq: Sequence, sibling: Sequence) -> bool:
        """Let `sibling`, which has the same tokens, go on from what is kept of `seq`.

        If it returns False, nothing has changed.
        """
        return self.blocks.fork(seq, sibling)

    def plan(self, batch: Batch) -> None:
        """Plan what a scheduled step must copy. Blocks need no copies here."""

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Enter the full blocks among the first `num_computed` tokens of `seq` in the cache."""
        self.blocks.publish(seq, num_computed)

    def accept(self, seq: Sequence, batch: Batch, start: int, end: int) -> None:
        """Keep what a step with guessed drafts left after the tokens `start` to `end` of `seq`."""

    def pass_by(self, seq: Sequence) -> None:
        """Free the blocks of `seq` with tokens that no later token attends to."""
        self.blocks.pass_by(seq)

    def release_ended(self, running: Iterable[Sequence]) -> None:
        """Free what sequences that end with the tokens in flight no longer need."""

    def free(self, seq: Sequence) -> None:
        """Free all that `seq` has."""
        self.blocks.free(seq)

    def clear(self, running: Iterable[Sequence]) -> None:
        """Forget all prefixes. Running sequences keep their blocks, and do not publish them."""
        self.blocks.clear()
        for seq in running:  # the block after one that has left the cache is not published
            seq.num_published_blocks = max(1, seq.num_published_blocks)

    def counts(self) -> dict[str, int]:
        """How many blocks there are and how many are used, by their names in `EngineStats`."""
        blocks = self.blocks
        return dict(
            blocks_used=blocks.num_blocks - blocks.num_free_blocks, num_blocks=blocks.num_blocks,
            state_slots_used=0, checkpoints_used=0, num_state_slots=0,
        )  # fmt: skip


def block_manager_for(windows: tuple[Window, ...]) -> type[BlockManager]:
    """The class that manages the blocks of groups with these windows."""
    if all(window is None for window in windows):
        return BlockManager
    from nanovllm.engine.cache.windows import WindowedBlocks

    return WindowedBlocks
