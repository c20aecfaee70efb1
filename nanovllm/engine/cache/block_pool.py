"""BlockPool: which KV blocks are free, and which hold a prefix that later requests can find."""

from collections import OrderedDict
from collections.abc import Iterable

from nanovllm.engine.cache.prefixes import Prefix, Prefixes

Window = int | None  # how many tokens back a group's layers attend; None for all


class BlockPool:
    """Blocks that tables share by counted references.

    A block is free (ref_count 0, in the queue once) or used (ref_count tables have it). A published
    block keeps its prefix until it is allocated again. The free queue (OrderedDict, a doubly linked
    list) is in the order of allocation: first the blocks that no request can find, last freed
    first; then those that were never used, for which a CPU has no memory yet; then published ones,
    least recently used first. Of a group's blocks with equal prefixes, at most one is free and
    published.
    """

    def __init__(self, num_blocks: int, windows: tuple[Window, ...]) -> None:
        self.num_blocks, self.windows = num_blocks, windows  # of the cache groups
        self.ref_counts = [0] * num_blocks
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.prefixes = Prefixes()
        self.published: list[Prefix | None] = [None] * num_blocks
        self.group_of = [0] * num_blocks  # of a published block

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return len(self.free_queue)

    def clear(self) -> None:
        """Remove all blocks from the cache. Sequences keep theirs."""
        for block, prefix in enumerate(self.published):
            if prefix is not None:
                self._unpublish(block)

    def _num_free(self, blocks: list[int]) -> int:
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def _hold(self, blocks: list[int]) -> None:
        """Take a reference to each of these cached blocks."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.free_queue[block]
            self.ref_counts[block] += 1

    def _renew(self, blocks: Iterable[int]) -> None:
        """Move the free ones of these blocks to the end of the queue, as if they were freed now."""
        for block in reversed([*blocks]):
            if self.ref_counts[block] == 0:
                self.free_queue.move_to_end(block)

    def _release(self, blocks: list[int]) -> None:
        """Drop a reference to each, last first. Of equal cached blocks only one stays free."""
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_queue[block] = None
                prefix = self.published[block]
                if prefix is None:
                    self.free_queue.move_to_end(block, last=False)
                elif len(prefix.blocks[group := self.group_of[block]]) > 1:
                    self._unpublish(block)
                    self._renew(prefix.blocks[group][:1])

    def _unpublish(self, block: int) -> None:
        """Remove a block from the cache."""
        prefix = self.published[block]
        assert prefix is not None
        self.prefixes.remove(prefix, self.group_of[block], block)
        self.published[block] = None
        if self.ref_counts[block] == 0:
            self.free_queue.move_to_end(block, last=False)

    def _take_free(self) -> int:
        """Allocate the first free block, and remove it from the cache."""
        block, _ = self.free_queue.popitem(last=False)
        self.ref_counts[block] = 1
        if self.published[block] is not None:
            self._unpublish(block)
        return block
