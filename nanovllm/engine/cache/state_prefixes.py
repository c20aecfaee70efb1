"""The prefixes that checkpoints of states belong to: of published KV blocks, or without KV."""

from nanovllm.engine.cache.block_manager import BlockManager
from nanovllm.engine.cache.prefixes import Prefix, block_hashes, block_tokens
from nanovllm.engine.schedule.sequence import Sequence


class PrefixesOfBlocks:
    """A checkpoint's prefix is that of a published block."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks, self.block_size = blocks, blocks.block_size
        self.tree = blocks.prefixes

    def begin(self, seq: Sequence) -> Prefix | None:
        """The cached prefix that an admitted sequence begins with; None if there is none."""
        return self.enter(seq, seq.num_cached_tokens) if seq.num_cached_tokens else None

    def fork(self, seq: Sequence, sibling: Sequence) -> None:
        """Let `sibling`, which has the same tokens, enter prefixes as `seq` does."""

    def enter(self, seq: Sequence, length: int) -> Prefix | None:
        """The prefix of the first `length` tokens; None if it has left the cache."""
        return self.blocks.published[seq.block_tables[0][length // self.block_size - 1]]

    def give_up(self, prefix: Prefix) -> None:
        """Give up a use of a prefix."""
        self.tree.give_up(prefix)

    def drop(self, seq_id: int) -> None:
        """Forget a sequence that no longer runs."""

    def clear(self) -> None:
        """Let sequences that run now enter no prefixes later."""


class PrefixesAlone(PrefixesOfBlocks):
    """Without KV: prefixes are entered with their checkpoints.

    `tips` has the last prefix that each running sequence has entered, and so keeps it in use.
    """

    def __init__(self, blocks: BlockManager) -> None:
        super().__init__(blocks)
        self.tips: dict[int, tuple[Prefix, int]] = {}  # with numbers of blocks, by `seq_id`

    def begin(self, seq: Sequence) -> Prefix | None:
        """The prefix that an admitted sequence begins with; None if there is none."""
        prefix = self.blocks.prefix_of(seq, seq.num_cached_tokens)
        num_blocks = seq.num_cached_tokens // self.block_size
        self._set(seq, prefix or self.tree.root(seq.root), num_blocks)
        return prefix

    def fork(self, seq: Sequence, sibling: Sequence) -> None:
        """Let `sibling`, which has the same tokens, enter prefixes after those of `seq`."""
        if seq.seq_id in self.tips:
            self._set(sibling, *self.tips[seq.seq_id])

    def enter(self, seq: Sequence, length: int) -> Prefix | None:
        """The prefix of the first `length` tokens, made if there is none. It becomes the tip."""
        if seq.seq_id not in self.tips:
            return None
        prefix, start = self.tips[seq.seq_id]
        end = length // self.block_size
        hashes = block_hashes(seq, end, self.block_size)
        for index in range(start, end):
            tokens = block_tokens(seq, index, self.block_size)
            prefix = self.tree.enter(prefix, hashes[index], tokens, [])
        self._set(seq, prefix, end)
        return prefix

    def drop(self, seq_id: int) -> None:
        """Give up the tip of a sequence that no longer runs."""
        if seq_id in self.tips:
            prefix, _ = self.tips.pop(seq_id)
            self.tree.give_up(prefix)

    def clear(self) -> None:
        """Let sequences that run now enter no prefixes later."""
        for seq_id in [*self.tips]:
            self.drop(seq_id)

    def _set(self, seq: Sequence, prefix: Prefix, num_blocks: int) -> None:
        prefix.num_uses += 1
        self.drop(seq.seq_id)
        self.tips[seq.seq_id] = prefix, num_blocks
