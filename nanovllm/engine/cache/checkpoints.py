"""Checkpoints: the slots with states after prefixes, and the order in which they are dropped.

It knows slot numbers and prefixes, and no sequences.
"""

from collections import OrderedDict

from nanovllm.engine.cache.prefixes import Prefix

MOST_SHARED = 0.75  # of all checkpoints, for which others are dropped first


class Checkpoints(dict[int, Prefix]):
    """The prefix of each slot with a checkpoint.

    If a slot is needed, the least recently used checkpoint is dropped, of the first kind of these
    that there is:

    1. superseded: it was made at the end of a prompt or of a sequence, and the only sequence that
       has begun with it, or that has made it, has a checkpoint further on
    2. others with which at most one sequence has begun
    3. shared: several sequences have begun with it, as with a system prompt

    So many conversations do not drop the prompt that they share. But if most are shared, the least
    recently used one of these goes first, as it may be shared no longer. So does one that cannot be
    restored, as its KV has left the cache.
    """

    def __init__(self) -> None:
        super().__init__()
        self._superseded: OrderedDict[int, None] = OrderedDict()
        self._single: OrderedDict[int, None] = OrderedDict()
        self._shared: OrderedDict[int, None] = OrderedDict()
        self._begun: set[int] = set()  # slots with which a sequence has begun
        self._passing: set[int] = set()  # slots that may be superseded

    def enter(self, slot: int, prefix: Prefix, is_passing: bool) -> None:
        """Add a checkpoint; one that `is_passing` may be superseded."""
        prefix.checkpoint = slot
        prefix.num_uses += 1
        self[slot] = prefix
        self._single[slot] = None
        if is_passing:
            self._passing.add(slot)

    def enter_again(self, slot: int, is_passing: bool) -> None:
        """Count a use of a checkpoint that a sequence has computed once more."""
        if not is_passing:
            self._passing.discard(slot)
        queue = self._shared if slot in self._shared else self._single
        self._superseded.pop(slot, None)
        queue[slot] = None
        queue.move_to_end(slot)

    def begin(self, slot: int) -> None:
        """Count a use by a sequence that begins with the checkpoint."""
        if slot in self._begun and slot not in self._shared:
            self._single.pop(slot, None)
            self._shared[slot] = None
        self._begun.add(slot)
        self.enter_again(slot, True)

    def is_unused(self, slot: int) -> bool:
        """Whether it was made for one sequence, and none has begun with it."""
        return slot in self._passing and slot not in self._begun

    def supersede(self, slot: int) -> None:
        """Drop the checkpoint before others, unless it is shared or was made to be shared."""
        if slot in self._passing and slot in self._single:
            del self._single[slot]
            self._superseded[slot] = None

    def remove(self, slot: int) -> Prefix:
        """Remove a checkpoint; the caller gives up the use of its prefix."""
        prefix = self.pop(slot)
        prefix.checkpoint = None
        for queue in (self._superseded, self._single, self._shared):
            queue.pop(slot, None)
        self._begun.discard(slot)
        self._passing.discard(slot)
        return prefix

    def next_to_drop(self) -> int:
        """The slot of the checkpoint that is dropped first.

        Of the oldest ones of each kind, one whose KV has left the cache goes before the others.
        """
        queues = (self._superseded, self._single, self._shared)
        oldest = [next(iter(queue)) for queue in queues if queue]
        if len(self._shared) > MOST_SHARED * len(self):
            return oldest[-1]
        without_kv = (slot for slot in oldest if not all(self[slot].blocks))
        return next(without_kv, oldest[0])
