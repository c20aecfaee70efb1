"""Scheduler: which tokens of which sequences run in the next step.

Plain Python over integers: it knows no tensors and no text.
"""

import bisect
import sys
from collections import deque
from collections.abc import Iterable

from nanovllm.config import Config
from nanovllm.engine.batch import Batch
from nanovllm.engine.block_manager import BlockManager, most_held
from nanovllm.engine.forecast import Forecast, Lengths
from nanovllm.engine.sequence import PENDING, Sequence, SequenceStatus


class Scheduler:
    """Prefill first, then one token for each running sequence; or both in one step.

    Both queues stand in order: by priority, then by age. Every sequence that is admitted finishes:
    blocks go to the first in order, the last gives its own up, and the engine admits only what the
    whole pool can hold, so the first always advances. `window` is how far back the model attends,
    if no layer attends to all: blocks behind it are given back.
    """

    def __init__(self, config: Config, window: int | None = None) -> None:
        assert config.num_kvcache_blocks is not None and config.kvcache_block_size is not None
        self.num_blocks = config.num_kvcache_blocks
        self.block_size = config.kvcache_block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_running = config.max_num_running
        self.window = window
        self.most_blocks = sys.maxsize if window is None else most_held(window, self.block_size)
        self.mixes = config.scheduling == "mixed"
        self.lengths = Lengths()
        self.num_preemptions = 0
        self.restart([])

    def restart(self, seqs: Iterable[Sequence]) -> None:
        """Begin anew with unfinished `seqs` waiting and nothing cached.

        For use after an interrupt, which may have struck anywhere and left anything half done.
        """
        self.block_manager = BlockManager(
            self.num_blocks, self.block_size, self.enable_prefix_caching, self.window
        )
        self.running: deque[Sequence] = deque()
        self.refused: Sequence | None = None
        self.waiting = deque(sorted(seqs, key=_order))
        for seq in self.waiting:
            seq.followers = []  # they are among `seqs`, each for itself
            seq.drop_pending()
            seq.status = SequenceStatus.WAITING
            seq.forget_cache()
            # Appended, but not yet seen to be the last: it will be sampled again.
            if seq.num_tokens > seq.num_prompt_tokens and (
                seq.token_ids[-1] in seq.stop_token_ids
                or seq.num_tokens >= seq.max_num_tokens
                or (seq.text is not None and seq.text.update(seq) is not None)
            ):
                seq.token_ids.pop()

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, with its followers; none is longer than `longest_sequence` allows."""
        _enter(self.waiting, seq)

    def is_finished(self) -> bool:
        """Whether there is nothing left to run."""
        return not self.waiting and not self.running

    def schedule(self) -> Batch | None:
        """Choose the next step's work; None if all wait for tokens that are on their way."""
        before = self.num_preemptions
        decodes = self._schedule_decode() if self.mixes else []
        seqs, budget = self._schedule_prefill(self.max_num_batched_tokens - len(decodes), decodes)
        # None begins in a step that has sent another back, whose tokens may be on their way.
        if budget and self.waiting and self.num_preemptions == before:
            self._admit(seqs, budget)
        if seqs:
            forks = self._fork(seqs)
            return Batch(decodes + seqs, True, forks, num_decodes=len(decodes))
        seqs = decodes if self.mixes else self._schedule_decode()
        return Batch(seqs, is_prefill=False) if seqs else None

    def advance(self, batch: Batch) -> None:
        """Book that a step is on its way, so that the next one can be scheduled meanwhile.

        What it computes is cached for whatever comes later; what it samples is pending.
        """
        for seq in batch.all_seqs:
            seq.num_cached_tokens = end = seq.num_cached_tokens + seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
            batch.ends.append(end)
            if self.window is not None:
                self.block_manager.pass_by(seq)
        for seq in batch.sampling_seqs:
            seq.token_ids.append(PENDING)
            seq.num_pending_tokens += 1

    def postprocess(self, batch: Batch, token_ids: list[int]) -> list[Sequence]:
        """Book what a step yielded: one token for each of `batch.sampling_seqs`.

        At most one step may be on its way behind it. A token of a sequence that has ended is
        dropped, one that was preempted meanwhile keeps it. Returns the sequences that finished;
        their blocks are free.
        """
        if not batch.ends:
            self.advance(batch)
        block_size = self.block_size
        for seq, end in zip(batch.all_seqs, batch.ends, strict=True):
            if (batch.is_prefill or end % block_size == 0) and seq.block_table:
                self.block_manager.publish(seq, end)
        finished = []
        for seq, token_id in zip(batch.sampling_seqs, token_ids, strict=True):
            if not seq.num_pending_tokens:
                continue
            index = len(seq.token_ids) - seq.num_pending_tokens
            seq.token_ids[index] = token_id
            seq.num_pending_tokens -= 1
            if token_id in seq.stop_token_ids:
                seq.finish("stop", None if token_id in seq.eos_token_ids else token_id)
                finished.append(seq)
            elif seq.text is not None and (stop := seq.text.update(seq)) is not None:
                seq.finish("stop", stop)
                finished.append(seq)
            elif index + 1 >= seq.max_num_tokens:
                seq.finish("length")
                finished.append(seq)
        if finished:
            self._remove_finished(finished)
        return finished

    def preempt(self) -> None:
        """Send the last running sequence back to `waiting`, without its blocks."""
        seq = self.running.pop()
        seq.status = SequenceStatus.WAITING
        self.block_manager.free(seq)
        _enter(self.waiting, seq)
        self.refused = None  # if it is not the next in line, there may be room for that one
        self.num_preemptions += 1

    def abort(self, *seqs: Sequence) -> None:
        """Take unfinished sequences out, wherever they are, and their followers."""
        running = []
        for seq in seqs:
            for follower in seq.followers:
                follower.finish("abort")
            seq.followers = []
            if seq.status is SequenceStatus.WAITING:
                self.waiting.remove(seq)
            elif seq.status is SequenceStatus.RUNNING:
                running.append(seq)
            seq.finish("abort")
        self._remove_finished(running)

    def audit(self) -> None:
        """Assert that queues, sequences and blocks agree. Called between steps."""
        assert len(self.running) <= self.max_num_running
        assert all(seq.status is SequenceStatus.WAITING for seq in self.waiting)
        assert all(seq.status is SequenceStatus.RUNNING for seq in self.running)
        for queue in (self.waiting, self.running):
            assert list(queue) == sorted(queue, key=_order)
        for seq in (*self.waiting, *self.running):
            seq.audit()
            assert all(f.status is SequenceStatus.WAITING for f in seq.followers)
            assert len(seq.block_table) * self.block_size >= seq.num_cached_tokens
            if seq.num_passed_blocks and self.enable_prefix_caching:
                assert seq.num_passed_blocks < seq.num_published_blocks, "the next one's parent"
        self.block_manager.audit([seq.held_blocks for seq in self.running])

    def _schedule_prefill(self, budget: int, decodes: list[Sequence]) -> tuple[list[Sequence], int]:
        """Those whose prompts have begun, in order, and what is left of the budget.

        One that there is no block for takes those of the last in order, which leave `decodes`.
        """
        seqs: list[Sequence] = []
        for seq in [seq for seq in self.running if seq.num_uncached_tokens > 1 or seq.followers]:
            if not budget:
                break
            while not self._schedule_tokens(seq, budget):
                if decodes and decodes[-1] is self.running[-1]:
                    decodes.pop()
                self.preempt()
                if seq.status is SequenceStatus.WAITING:
                    return seqs, 0
            budget -= seq.num_scheduled_tokens
            seqs.append(seq)
        return seqs, budget

    def _admit(self, seqs: list[Sequence], budget: int) -> None:
        """Let waiting sequences begin, in order, as far as budget and pool reach, beside `seqs`.

        One that begins with a block that another is computing waits for it, and finds it cached.
        Room is kept for the followers of those that run. One that is refused with nothing else to
        do is not looked at again before a sequence has ended.
        """
        if self.waiting[0] is self.refused:
            return
        manager = self.block_manager
        in_progress: set[int] = set()
        for seq in seqs:
            in_progress.update(manager.full_block_hashes(seq))
        num_running = sum(1 + len(seq.followers) for seq in self.running)
        forecast = Forecast(
            self.lengths, self.running, manager.num_free_blocks, self.block_size, self.most_blocks
        )
        while budget and self.waiting and num_running < self.max_num_running:
            seq = self.waiting[0]
            if not manager.allocate(seq, in_progress, forecast.admits):
                self.refused = None if seqs else seq
                return
            in_progress.update(manager.full_block_hashes(seq))
            self.waiting.popleft()
            seq.status = SequenceStatus.RUNNING
            _enter(self.running, seq)
            num_running += 1 + len(seq.followers)
            budget -= self._schedule_tokens(seq, budget)
            seqs.append(seq)

    def _fork(self, seqs: list[Sequence]) -> list[tuple[Sequence, Sequence]]:
        """Let followers join those that complete their prompts in this step.

        Those that there is no room for wait by themselves, and find in the cache what is there.
        """
        forks = []
        for seq in seqs:
            if not seq.followers or not seq.samples:
                continue
            for follower in seq.followers:
                has_room = len(self.running) < self.max_num_running
                if has_room and self.block_manager.fork(seq, follower):
                    follower.num_scheduled_tokens = follower.num_tokens
                    follower.status = SequenceStatus.RUNNING
                    _enter(self.running, follower)
                    forks.append((seq, follower))
                else:
                    _enter(self.waiting, follower)
            seq.followers = []
        return forks

    def _schedule_tokens(self, seq: Sequence, budget: int) -> int:
        """As many of its tokens as there is budget for, and blocks."""
        start = seq.num_cached_tokens
        end = start + min(seq.num_uncached_tokens, budget)
        seq.num_scheduled_tokens = self.block_manager.grow(seq, end) - start
        return seq.num_scheduled_tokens

    def _schedule_decode(self) -> list[Sequence]:
        """All that decode, less the last ones of the running that there are no blocks for.

        Less those whose last token is on its way, too.
        """
        block_size = self.block_size
        seqs = []
        growing = []  # in the order of `running`: what is preempted stands at its end
        for seq in self.running:
            num_tokens = len(seq.token_ids)
            if num_tokens >= seq.max_num_tokens:
                continue
            if num_tokens - seq.num_cached_tokens > 1 or seq.followers:
                continue
            seq.num_scheduled_tokens = 1
            seqs.append(seq)
            if num_tokens > len(seq.block_table) * block_size:
                growing.append(seq)
        while len(growing) > self.block_manager.num_free_blocks:
            if growing[-1] is self.running[-1]:
                growing.pop()
            if seqs and seqs[-1] is self.running[-1]:
                seqs.pop()
            self.preempt()
        for seq in growing:
            self.block_manager.append_block(seq)
        return seqs

    def _remove_finished(self, finished: list[Sequence]) -> None:
        self.refused = None
        for seq in finished:
            if not seq.block_table:  # it was preempted while its last token was on its way
                self.waiting.remove(seq)
            self.block_manager.free(seq)
            if seq.finish_reason != "abort":
                self.lengths.learn(seq)
        self.running = deque(s for s in self.running if s.status is SequenceStatus.RUNNING)


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order


def _enter(queue: deque[Sequence], seq: Sequence) -> None:
    """Put `seq` in its place: at an end, but for priorities."""
    if not queue or queue[-1].order < seq.order:
        queue.append(seq)
    elif seq.order < queue[0].order:
        queue.appendleft(seq)
    else:
        bisect.insort(queue, seq, key=_order)
