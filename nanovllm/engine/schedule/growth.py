"""Growth: how many blocks sequences will have, and the first step at which a pool is full."""

import bisect
import math


def steps_until_full(
    room: int, block_size: int, limits: list[tuple[int, int]], lengths: list[int], ends: list[int]
) -> float:
    """How many steps fit in `room` blocks; infinity if all do.

    Sequences have these lengths and grow by a token a step until their ends. `limits` are pairs:
    the most blocks of a sequence in a cache group, and the number of groups with this limit.
    """
    growing: list[Growth] = []  # for each limit, the sequences that have not reached it
    # For each sequence and limit: the step at which it stops growing, the index in `growing`, its
    # length now if it is in that Growth, and the room that this frees.
    events: list[tuple[int, int, int | None, int]] = []
    for index, (most, groups) in enumerate(limits):
        still: list[int] = []
        for end, num_tokens in zip(ends, lengths, strict=True):
            grown = (most - 1) * block_size + 2 - num_tokens
            if grown <= 0:
                room -= most * groups
                events.append((end, index, None, most * groups))
                continue
            still.append(num_tokens)
            if grown < end:
                events.append((grown, index, num_tokens, -most * groups))
                events.append((end, index, None, most * groups))
            else:
                events.append((end, index, num_tokens, 0))
        growing.append(Growth(still, block_size, groups))

    def wanted(step: int) -> int:
        return sum(growth.blocks(step) for growth in growing)

    start = 0
    for end, index, length, more in sorted(events, key=lambda event: event[0]):
        if wanted(end) > room:  # demand is highest right before a sequence ends
            while end - start > 1:  # and rises from `start` to `end`: bisect
                middle = (start + end) // 2
                is_full = wanted(middle) > room
                start, end = (start, middle) if is_full else (middle, end)
            return start
        if length is not None:
            growing[index].remove(length)
        room += more
        start = end
    return math.inf


class Growth:
    """The blocks of sequences that grow by one token a step, counted together for any step.

    Sequences are sorted by how full their last block is: bisection then finds those that enter a
    new block within a given number of steps. They grow equally in `groups` cache groups.
    """

    def __init__(self, lengths: list[int], block_size: int, groups: int = 1) -> None:
        self.block_size, self.groups = block_size, groups
        # A step samples a token and computes the one before it: (length + step - 1) tokens have KV.
        self._filled = sorted((length + block_size - 2) % block_size for length in lengths)
        self._full = sum((length + block_size - 2) // block_size for length in lengths)

    def remove(self, length: int) -> None:
        """Remove a sequence that had this length at step 0."""
        full, filled = divmod(length + self.block_size - 2, self.block_size)
        del self._filled[bisect.bisect_left(self._filled, filled)]
        self._full -= full

    def blocks(self, step: int) -> int:
        """The blocks that all the sequences hold at that step."""
        full, more = divmod(step, self.block_size)
        num_new = len(self._filled) - bisect.bisect_left(self._filled, self.block_size - more)
        return (self._full + len(self._filled) * full + num_new) * self.groups
