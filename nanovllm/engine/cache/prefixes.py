"""Prefixes: the tree of token blocks that have been computed, each found by a chained hash.

It knows token ids and hashes, and records for the block manager which KV blocks hold a prefix.
"""

from array import array
from collections.abc import Iterator

import xxhash

from nanovllm.engine.schedule.sequence import Sequence


def hash_block(parent_hash: int, token_ids: list[int]) -> int:
    """Hash a full block: its tokens, chained to the hash of all blocks before it."""
    data = parent_hash.to_bytes(8, "little") + array("i", token_ids).tobytes()
    return xxhash.xxh64_intdigest(data)


def block_hashes(seq: Sequence, num_blocks: int, block_size: int) -> list[int]:
    """The hashes of the first blocks of `seq`, or of more; each is computed once."""
    hashes = seq.block_hashes
    for index in range(len(hashes), num_blocks):
        parent = hashes[index - 1] if index else seq.root % (1 << 64)
        tokens = seq.token_ids[index * block_size : (index + 1) * block_size]
        hashes.append(hash_block(parent, tokens))
    return hashes


Blocks = tuple[tuple[int, ...], ...]  # of each cache group


class Prefix:
    """A block of tokens and all tokens before it.

    `blocks` has for each cache group the published KV blocks of these tokens, oldest first, and
    `checkpoint` is the slot with the states after them, if there is one. `num_uses` counts blocks,
    checkpoint and the prefixes that continue this one. Prefixes with equal hashes are linked by
    `next`. (Tuples of numbers cost Python's garbage collector nothing.)
    """

    __slots__ = ("blocks", "checkpoint", "hash", "next", "num_uses", "parent", "token_ids")

    def __init__(
        self,
        parent: "Prefix | None",
        value: int,
        token_ids: tuple[int, ...],
        column: list[int],
        next_equal: "Prefix | None" = None,
    ) -> None:
        self.parent = parent
        self.hash = value
        self.token_ids = token_ids
        self.blocks: Blocks = tuple([(block,) for block in column])
        self.checkpoint: int | None = None
        self.num_uses = len(column)
        self.next = next_equal

    def __repr__(self) -> str:
        return f"Prefix({self.hash}, {self.token_ids}, {self.blocks}, {self.num_uses})"


class Prefixes:
    """All prefixes in use. Equal prefixes are one object, even if hashes collide.

    A sequence's first block continues a root: 0, a number below it for an adapter, or one above it
    for a salt.
    """

    def __init__(self) -> None:
        self.roots: dict[int, Prefix] = {}
        self.by_hash: dict[int, Prefix] = {}

    def __iter__(self) -> Iterator[Prefix]:
        for first in self.by_hash.values():
            prefix: Prefix | None = first
            while prefix is not None:
                yield prefix
                prefix = prefix.next

    def root(self, number: int) -> Prefix:
        """The prefix without tokens for the root of sequences."""
        if (root := self.roots.get(number)) is None:
            root = self.roots[number] = Prefix(None, number, (), [])
        return root

    def find(self, parent: Prefix, value: int, token_ids: tuple[int, ...]) -> Prefix | None:
        """The prefix that continues `parent` with these tokens, which have the hash `value`."""
        prefix = self.by_hash.get(value)
        while prefix is not None:
            if prefix.parent is parent and prefix.token_ids == token_ids:
                return prefix
            prefix = prefix.next
        return None

    def enter(
        self, parent: Prefix, value: int, token_ids: tuple[int, ...], column: list[int]
    ) -> Prefix:
        """The prefix that continues `parent` with these tokens, made if there is none.

        `column` has for each group a block that holds it now. The prefix stays until its last use
        is given up.
        """
        first = self.by_hash.get(value)
        prefix = first and self.find(parent, value, token_ids)
        if prefix is not None:
            both = zip(prefix.blocks, column, strict=True)
            prefix.blocks = tuple((*blocks, block) for blocks, block in both)
            prefix.num_uses += len(column)
            return prefix
        parent.num_uses += 1
        prefix = self.by_hash[value] = Prefix(parent, value, token_ids, column, first)
        return prefix

    def remove(self, prefix: Prefix, group: int, block: int) -> None:
        """Remove a block from a prefix."""
        blocks = tuple(other for other in prefix.blocks[group] if other != block)
        prefix.blocks = (*prefix.blocks[:group], blocks, *prefix.blocks[group + 1 :])
        self.give_up(prefix)

    def give_up(self, prefix: Prefix) -> None:
        """Give up a use of a prefix.

        A prefix without uses is removed, and then the one before it may have none.
        """
        prefix.num_uses -= 1
        while not prefix.num_uses:
            if prefix.parent is None:
                del self.roots[prefix.hash]
                return
            self._unlink(prefix)
            prefix = prefix.parent
            prefix.num_uses -= 1

    def _unlink(self, prefix: Prefix) -> None:
        first = self.by_hash[prefix.hash]
        if first is prefix:
            if prefix.next is None:
                del self.by_hash[prefix.hash]
            else:
                self.by_hash[prefix.hash] = prefix.next
            return
        while first.next is not prefix:
            assert first.next is not None
            first = first.next
        first.next = prefix.next


def block_tokens(seq: Sequence, index: int, block_size: int) -> tuple[int, ...]:
    """The tokens of a full block of `seq`."""
    return tuple(seq.token_ids[index * block_size : (index + 1) * block_size])


def path_of(prefixes: Prefixes, seq: Sequence, num_blocks: int, block_size: int) -> list[Prefix]:
    """The known prefixes of `seq`, of up to `num_blocks` blocks; hashes one block more."""
    path: list[Prefix] = []
    prefix = prefixes.roots.get(seq.root)
    for index in range(num_blocks):
        value = block_hashes(seq, index + 1, block_size)[index]
        if prefix is not None:
            prefix = prefixes.find(prefix, value, block_tokens(seq, index, block_size))
        if prefix is None:
            break
        path.append(prefix)
    return path
