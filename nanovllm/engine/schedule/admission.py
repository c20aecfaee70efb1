"""Admission: decides which waiting sequences and which forks begin to run.

DecodeTurns: how many prefill steps the running ones wait for.
"""

import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from nanovllm.engine.cache.caches import Caches
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.schedule.forecast import Forecast, Lengths
from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.engine.schedule.admission_filter import AdmissionFilter

MOST_PREFILLS = 1  # in a row while sequences wait for their decode step
MOST_STARTS = 2  # more of them, if after each one new sequences decode


class Admission:
    """Moves sequences from `waiting` to `running`, as far as places, budget and blocks allow.

    Both queues are sorted by `order`. A sequence that is refused when no other prompt runs is not
    tried again until `retry`. Sequences that the `admission_filter` leaves out stay in the queue,
    and later ones may be admitted before them. `limits` bound the samples of unfinished requests.
    """

    def __init__(
        self,
        seqs: Iterable[Sequence],
        caches: Caches,
        lengths: Lengths,
        config: EngineConfig,
        admission_filter: "AdmissionFilter | None" = None,
    ) -> None:
        self.waiting = deque(sorted(seqs, key=order))
        self.limits = [*{seq.parts.samples for seq in self.waiting} - {None}]
        self.caches, self.lengths, self.config = caches, lengths, config
        self.num_places, self.admission_filter = config.max_num_running, admission_filter
        self.refused: Sequence | None = None
        self.turns = DecodeTurns()

    def num_places_left(self, running: Iterable[Sequence]) -> int:
        """How many more sequences may run. Those that end in flight have left their places."""
        return self.num_places - sum(not seq.ends_in_flight for seq in running)

    def may_admit(self, running: Iterable[Sequence]) -> bool:
        """Whether the next sequence is likely to be admitted."""
        may = bool(self.waiting) and self.waiting[0] is not self.refused
        return may and self.num_places_left(running) > 0

    def retry(self) -> None:
        """Try the refused sequence again: there may be room now, or another one may be first."""
        self.refused = None

    def budget(self, num_tokens: int, running: Iterable[Sequence]) -> int:  # noqa: ARG002
        """How many of `num_tokens` the next step may use for prompts."""
        return num_tokens

    def share(
        self, seq: Sequence, budget: int, prompts: list[Sequence], running: Iterable[Sequence]
    ) -> int:
        """How many tokens of a step's budget `seq` may get, after the step's other `prompts`."""
        logprobs = seq.parts.logprobs
        if logprobs is None:
            return budget
        return int(logprobs.share(budget, prompts, running, self.waiting))

    def admit(self, running: deque[Sequence], prompts: list[Sequence], budget: int) -> None:
        """Admit waiting sequences in order, with as many tokens as the budget allows.

        They are added to `prompts`, the sequences with prompts in this step. If another sequence
        is computing the next block of a waiting one, that one waits until the block is cached.
        Places are kept for the siblings of running sequences, as many as their requests may have.
        """
        if self.waiting[0] is self.refused:
            return
        num_places = self.num_places_left(running)
        num_places -= sum(seq.num_places - 1 for seq in running if seq.siblings)
        if num_places <= 0:
            return
        caches, num_begun, candidates = self.caches, len(prompts), self._candidates(running)
        forecast: Forecast | None = None
        while budget and num_places > 0:
            seq = next(candidates, None)
            if seq is None or seq is self.refused:
                break
            if not (share := self.share(seq, budget, prompts, running)):
                continue
            if forecast is None:
                caches.release_ended(running)
                in_progress = {block for seq in prompts for block in caches.in_progress(seq)}
                forecast = Forecast(self.lengths, running, caches.free_blocks())
            if not caches.admit(seq, in_progress, forecast.admits, self.waiting):
                self.refused = None if prompts else seq
                break
            in_progress.update(caches.in_progress(seq))
            begin(seq, running)
            num_places -= seq.num_places
            budget -= schedule_tokens(seq, share, caches)
            prompts.append(seq)
        for admitted in prompts[num_begun:]:
            self.waiting.remove(admitted)

    def _candidates(self, running: Iterable[Sequence]) -> Iterator[Sequence]:
        """The sequences to admit, in order. Each is taken when the one before it runs."""
        waiting = self.limits[0].candidates(self.waiting) if self.limits else iter(self.waiting)
        allowed = self.admission_filter
        return waiting if allowed is None else allowed.admissible(waiting, running)

    def fork(
        self, running: deque[Sequence], prompts: list[Sequence]
    ) -> list[tuple[Sequence, Sequence]]:
        """Fork the siblings of sequences that complete their prompts in this step.

        A sibling without room is queued, and finds the cached blocks when it is admitted.
        """
        forks: list[tuple[Sequence, Sequence]] = []
        parents = [seq for seq in prompts if seq.siblings and seq.samples]
        if not parents:
            return forks
        num_places = self.num_places_left(running)
        self.caches.release_ended(running)
        for seq in parents:
            most = min(num_places, len(forks) + seq.num_places - 1)
            for sibling in seq.siblings:
                if len(forks) < most and self.caches.fork(seq, sibling):
                    sibling.num_scheduled_tokens = sibling.num_tokens
                    begin(sibling, running)
                    forks.append((seq, sibling))
                else:
                    enter(self.waiting, sibling)
            seq.siblings = []
        return forks


def order(seq: Sequence) -> tuple[int, int]:
    """The key that queues are sorted by: priority, then age."""
    return seq.order


def enter(queue: deque[Sequence], seq: Sequence) -> None:
    """Insert `seq` in order; without priorities its place is at an end."""
    if not queue or queue[-1].order < seq.order:
        queue.append(seq)
    elif seq.order < queue[0].order:
        queue.appendleft(seq)
    else:
        bisect.insort(queue, seq, key=order)


def begin(seq: Sequence, running: deque[Sequence]) -> None:
    """Let a sequence that has room for its tokens run."""
    seq.status = SequenceStatus.RUNNING
    enter(running, seq)


def schedule_tokens(seq: Sequence, budget: int, caches: Caches) -> int:
    """Schedule as many tokens of `seq` as budget and blocks allow; returns their number."""
    start = seq.num_cached_tokens
    end = start + min(seq.num_uncached_tokens, budget)
    seq.num_scheduled_tokens = caches.grow(seq, end) - start
    return seq.num_scheduled_tokens


class DecodeTurns:
    """Counts prefill steps in a row for which sequences wait, and after which more decode.

    Chunks of long prompts let the others decode after each step. Prompts that come together are
    computed in a few steps, so that the next decode steps have more rows. Requests that end with
    their prompt never decode, and so do not count.
    """

    def __init__(self) -> None:
        self._num_prefills = self._num_starts = self._num_decoding = 0
        self.most_starts = MOST_STARTS

    def are_due(self, running: Iterable[Sequence]) -> bool:
        """Whether the next step must decode. To be asked once before each step."""
        if not self._num_prefills:
            return False
        before, self._num_decoding = self._num_decoding, num_decoding(running)
        self._num_starts += self._num_decoding > before
        return self._num_prefills >= MOST_PREFILLS + min(self._num_starts, self.most_starts)

    def count(self, decodes: bool, prompts: list[Sequence], running: Iterable[Sequence]) -> None:
        """Count a step of these `prompts`, or a step that decodes, which costs nothing here."""
        if not (decodes or self._num_prefills):
            self._num_decoding = num_decoding(running) - num_decoding(prompts)
            self._num_starts = 0
        self._num_prefills = 0 if decodes or not self._num_decoding else self._num_prefills + 1


def num_decoding(seqs: Iterable[Sequence]) -> int:
    """The sequences that a decode step would compute."""
    return sum(not (seq.is_prefilling or seq.ends_in_flight) for seq in seqs)
