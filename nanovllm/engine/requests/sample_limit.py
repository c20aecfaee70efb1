"""SampleLimit: bounds how many samples of a request run while other requests run or wait."""

import bisect
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nanovllm.engine.schedule.admission import order
from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.engine.schedule.scheduler import Scheduler

PART = 4  # while others wait, no samples begin next to those that have more than 1 / PART of memory
PATIENCE = 64  # steps until a request counts as alone: clients may send their next requests soon


class SampleLimit:
    """Gives the samples of one request at most `share` places while others run or wait.

    If all others have such limits too, they divide the places evenly, where this gives each more.
    Others with higher priority numbers do not count: they wait for this request in any case. A
    request that is alone has all places; after others have ended, only `PATIENCE` steps later.
    While others wait, it gives up memory, too.

    `begin_step` counts, and preempts the youngest samples above the limits. Then `most` samples
    may have places in the step, so `num_left` may begin in it. The first sample in order never
    waits for the others. In a queue, the samples of a request follow each other.
    """

    def __init__(self, seqs: list[Sequence], num_places: int, share: int) -> None:
        self.most = self.num_left = self._share = share
        self._num_places = num_places
        self._first, self._last = seqs[0].order, seqs[-1].order
        self._num_alone = PATIENCE  # steps in a row
        self._ran = False  # whether samples ran in the step before, while others waited

    @staticmethod
    def begin_step(scheduler: "Scheduler") -> None:
        """Find how many samples of each request may run in the next step; drop ended requests."""
        waiting, limits = scheduler.waiting, scheduler.admission.limits
        own: dict[SampleLimit, list[Sequence]] = {limit: [] for limit in limits}
        ordinary = []  # priorities of requests without a limit
        for seq in scheduler.running:
            if (limit := seq.parts.samples) is None:
                ordinary.append(seq.order[0])
            else:
                own[limit].append(seq)
        limits[:] = [limit for limit in limits if own[limit] or limit._waits(waiting)]
        first = _first_ordinary(waiting)
        ordinary += first
        before = sorted(limit._first[0] for limit in limits)
        for limit in limits:
            priority = limit._first[0]
            limit._set_most(
                min(ordinary, default=priority + 1) <= priority, bisect.bisect(before, priority)
            )
            staying = [seq for seq in own[limit] if not seq.ends_in_flight]
            limit.num_left = max(0, limit.most - len(staying))
            for seq in staying[: limit.most - 1 : -1]:
                scheduler.preempt(seq)
            begin = (o for o in limits if o is not limit and not own[o] and o.num_left)
            others = first + [other._first[0] for other in begin]
            if min(others, default=priority + 1) <= priority:
                limit._share_memory(scheduler, staying[: limit.most])

    @staticmethod
    def candidates(waiting: deque[Sequence]) -> Iterator[Sequence]:
        """The waiting sequences that may begin in this step, in order.

        Each is taken when the one before it runs, or was refused.
        """
        index = 0
        while index < len(waiting):
            seq = waiting[index]
            limit: SampleLimit | None = seq.parts.samples
            if limit is not None and not limit.num_left:
                index = limit._end(waiting)
                continue
            yield seq
            index += 1
            if limit is not None:
                limit.num_left -= seq.status is SequenceStatus.RUNNING

    def _set_most(self, has_ordinary: bool, num_limited: int) -> None:
        """Set `most`, next to requests without a limit, or to limited ones, itself included."""
        is_alone = not has_ordinary and num_limited == 1
        self._num_alone = self._num_alone + 1 if is_alone else 0
        if not is_alone or self._num_alone > PATIENCE:  # else it keeps what it has
            self.most = max(self._share, 0 if has_ordinary else self._num_places // num_limited)

    def _share_memory(self, scheduler: "Scheduler", samples: list[Sequence]) -> None:
        """Let no sample begin if those that run have much of the memory, or if the last has ended.

        Preempt the youngest one if a request of others was refused: it lacks memory.
        """
        others_first, self._ran = self._ran and not samples, bool(samples)
        most = scheduler.caches.blocks.num_blocks // PART
        if not others_first and not _hold_more(samples, most):
            return
        self.num_left, refused = 0, scheduler.admission.refused
        if refused is None or refused.parts.samples is self or len(samples) < 2:
            return
        if refused.order[0] <= self._first[0]:
            scheduler.preempt(samples[-1])

    def _waits(self, waiting: deque[Sequence]) -> bool:
        """Whether a sample waits in the queue."""
        index = bisect.bisect_left(waiting, self._first, key=order)
        return index < len(waiting) and waiting[index].parts.samples is self

    def _end(self, waiting: deque[Sequence]) -> int:
        """The index after the samples in the queue."""
        return bisect.bisect(waiting, self._last, key=order)


def _hold_more(samples: list[Sequence], most: int) -> bool:
    """Whether the samples hold more than `most` blocks, each counted once."""
    if sum(len(table) for seq in samples for table in seq.block_tables) <= most:
        return False
    return len({block for seq in samples for block in seq.held_blocks}) > most


def _first_ordinary(waiting: deque[Sequence]) -> list[int]:
    """The priority of the first waiting request without a limit, if there is one."""
    index = 0
    while index < len(waiting):
        seq = waiting[index]
        if (limit := seq.parts.samples) is None:
            return [seq.order[0]]
        index = limit._end(waiting)
    return []


def limit_samples(seqs: list[Sequence], num_places: int, share: int) -> None:
    """Bound the samples of a request: see `SampleLimit`."""
    limit = SampleLimit(seqs, num_places, share)
    for seq in seqs:
        seq.parts.samples = limit
