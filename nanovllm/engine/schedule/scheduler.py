"""Scheduler: chooses the sequences and tokens of the next step.

Plain Python over integers: it knows no tensors and no text.
"""

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nanovllm.engine.cache.block_manager import BlockManager
from nanovllm.engine.cache.caches import CacheLayout, Caches
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.schedule.admission import Admission, enter, schedule_tokens
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.drafting import Drafting
from nanovllm.engine.schedule.forecast import Lengths
from nanovllm.engine.schedule.sequence import FINISHED, Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.engine.schedule.admission_filter import AdmissionFilter


class Scheduler:
    """Prefill first, then one token for each running sequence; or both in one step if it `mixes`.

    Both queues are sorted by priority, then by age. Every admitted sequence finishes: the first in
    order gets blocks before all others, the last is preempted when blocks run out, and the engine
    accepts only requests that fit in all blocks, so the first always advances. `layout` says what
    the model's layers keep of a sequence.

    `drafting` adds guessed tokens to steps, and says which tokens of a step count.

    With an `admission_filter`, sequences may be admitted before others that may not run yet. The
    same holds for parts of a request that bound its share of a step, or its places.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: CacheLayout = CacheLayout(),  # noqa: B008
        drafting: Drafting | None = None,
        admission_filter: "AdmissionFilter | None" = None,
    ) -> None:
        self.config, self.layout = config, layout
        self.num_blocks, self.block_size = config.num_kvcache_blocks, config.kvcache_block_size
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.lengths = Lengths()
        self.drafting = Drafting() if drafting is None else drafting
        mixing = ("mixed", "fair") if self.drafting.fits_mixed_steps else ("mixed",)
        self.mixes = config.scheduling in mixing
        self.admission_filter = admission_filter
        self.num_preemptions = 0
        self.restart([])

    def restart(self, seqs: Iterable[Sequence]) -> None:
        """Start over with the unfinished `seqs` waiting and nothing cached.

        For use after an interrupt, which may have left anything half done.
        """
        places = self.config.max_num_running
        self.caches = class_of_caches(self.layout)(
            self.layout, self.num_blocks, self.block_size, places, self.config.enable_prefix_caching
        )
        self.drafting.reset()
        self.running: deque[Sequence] = deque()
        self.admission = class_of_admission(self.config)(
            seqs, self.caches, self.lengths, self.config, self.admission_filter
        )
        if self.waiting:
            from nanovllm.engine.schedule.interruptions import start_over

            start_over(self.waiting)

    @property
    def waiting(self) -> deque[Sequence]:
        """The sequences that wait, in order."""
        return self.admission.waiting

    @property
    def block_manager(self) -> BlockManager:
        """The KV blocks of the caches."""
        return self.caches.blocks

    def draft_with(self, drafting: Drafting) -> None:
        """Let `drafting` add guessed tokens to the steps from now on."""
        self.drafting = drafting

    def add(self, seq: Sequence) -> None:
        """Queue a sequence with its siblings; none is longer than `longest_sequence` allows."""
        enter(self.waiting, seq)
        if seq.parts.samples is not None:
            self.admission.limits.append(seq.parts.samples)

    def is_finished(self) -> bool:
        """Whether there is nothing left to run."""
        return not self.waiting and not self.running

    def schedule(self) -> Batch | None:
        """Choose the next step's work; None if all sequences wait for tokens in flight."""
        if (batch := self._next_batch()) is not None:
            self.caches.plan(batch)
        return batch

    def _next_batch(self) -> Batch | None:
        before = self.num_preemptions
        if limits := self.admission.limits:
            limits[0].begin_step(self)  # for all of them
        are_due = self.mixes or self.admission.turns.are_due(self.running)
        decodes = self._schedule_decode() if are_due else []
        if decodes and not self.mixes:
            return self._batch(decodes, [], [])
        budget = self.max_num_batched_tokens - len(decodes)
        seqs, budget = self._schedule_prefill(self.admission.budget(budget, self.running), decodes)
        # Admit nothing in a step that preempted: the preempted sequence's token may be in flight.
        if budget and self.waiting and self.num_preemptions == before:
            self.admission.admit(self.running, seqs, budget)
        if seqs:
            return self._batch(decodes, seqs, self.admission.fork(self.running, seqs))
        seqs = decodes if self.mixes else self._schedule_decode()
        return self._batch(seqs, [], []) if seqs else None

    def _batch(
        self,
        decodes: list[Sequence],
        prompts: list[Sequence],
        forks: list[tuple[Sequence, Sequence]],
    ) -> Batch | None:
        """Make a step, with drafts if they pay; None if it must wait for tokens in flight."""
        drafts = self.drafting.plan(decodes, prompts, self.max_num_batched_tokens, self.caches)
        if drafts is None:
            for seq in decodes:
                seq.num_scheduled_tokens = 0
            return None
        self.admission.turns.count(bool(decodes), prompts, self.running)
        seqs = decodes + prompts if prompts else decodes
        return Batch(seqs, bool(prompts), forks, len(decodes), *drafts)

    def must_wait(self, batch: Batch) -> bool:
        """Whether the next step can be scheduled only when the tokens of `batch` are known."""
        return self.drafting.must_wait(batch, self.running, self._has_prompts, self.caches)

    def _has_prompts(self) -> bool:
        """Whether the next step is likely to compute prompts."""
        running = self.running
        return self.admission.may_admit(running) or any(seq.is_prefilling for seq in running)

    def advance(self, batch: Batch) -> None:
        """Account for a launched step, so that the next one can be scheduled before it ends.

        Tokens that it computes count as cached, and full blocks of prompts can be shared; tokens
        that it samples are pending.
        """
        caches, ends, is_prefill = self.caches, batch.ends, batch.is_prefill
        passes_by = caches.has_windows
        for seq in batch.all_seqs:
            if seq.status is FINISHED:  # by a token of the step before
                ends.append(0)
                continue
            seq.num_cached_tokens = end = seq.num_cached_tokens + seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
            ends.append(end)
            if is_prefill:  # later steps run after this one on the device
                caches.publish(seq, min(end, seq.num_known_tokens))
            if passes_by:
                caches.pass_by(seq)
        batch.await_tokens()

    def postprocess(self, batch: Batch, token_ids: list[int]) -> list[Sequence]:
        """Append a step's tokens, one for each of `batch.sampling_seqs`.

        Where the device guesses, `token_ids` are its results, which `drafting` reads. At most one
        later step may be in flight. Returns the sequences that finished; their blocks are free.
        """
        if not batch.ends:
            self.advance(batch)
        if not batch.num_drafts:  # else the tokens show how many were computed
            for seq, end in zip(batch.all_seqs, batch.ends, strict=True):
                if end % self.block_size == 0 and seq.room:  # `advance` publishes those of prompts
                    self.caches.publish(seq, end)
        finished = batch.append_tokens(self.drafting.collect(batch, token_ids, self.caches))
        if finished:
            self._remove_finished(finished)
        return finished

    def preempt(self, seq: Sequence) -> None:
        """Free the blocks of a running sequence and move it back to `waiting`."""
        self.running.remove(seq)
        seq.status = SequenceStatus.WAITING
        self.caches.free(seq)
        enter(self.waiting, seq)
        self.admission.retry()  # the next in line may be another sequence, which fits
        self.num_preemptions += 1
        seq.num_preemptions += 1

    def abort(self, *seqs: Sequence) -> None:
        """Remove unfinished sequences and their siblings, waiting or running."""
        from nanovllm.engine.schedule.interruptions import abort

        self._remove_finished(abort(seqs, self.waiting))

    def clear_cache(self) -> None:
        """Empty the prefix cache. Running sequences do not publish their blocks later."""
        self.caches.clear(self.running)

    def _schedule_prefill(self, budget: int, decodes: list[Sequence]) -> tuple[list[Sequence], int]:
        """Continue the prompts that have begun, in order; returns them and the budget left.

        If blocks run out, preempt from the tail of `running`; a preempted sequence is also removed
        from `decodes`.
        """
        seqs: list[Sequence] = []
        for seq in [seq for seq in self.running if seq.is_prefilling]:
            share = self.admission.share(seq, budget, seqs, self.running)
            if not share or seq.status is SequenceStatus.WAITING:  # it was preempted in this step
                continue
            while not schedule_tokens(seq, share, self.caches):
                if decodes and decodes[-1] is self.running[-1]:
                    decodes.pop()
                self.preempt(self.running[-1])  # maybe this sequence
                if seq.status is SequenceStatus.WAITING:  # type: ignore[comparison-overlap]
                    return seqs, 0
            budget -= seq.num_scheduled_tokens
            seqs.append(seq)
        return seqs, budget

    def _schedule_decode(self) -> list[Sequence]:
        """One token for every decoding sequence; preempt from the tail until the rest have blocks.

        Sequences with their last token in flight are left out.
        """
        caches = self.caches
        seqs = []
        growing = []  # in the order of `running`, so that a preempted sequence is the last
        for seq in self.running:
            num_tokens = len(seq.token_ids)
            # `ends_in_flight` and `is_prefilling`, without the time that properties take.
            if num_tokens >= seq.max_num_tokens:
                continue
            if num_tokens - seq.num_cached_tokens > 1 or seq.siblings:
                continue
            seq.num_scheduled_tokens = 1
            seqs.append(seq)
            if num_tokens > seq.room:
                growing.append(seq)
        if growing and not caches.can_grow(growing):
            self.drafting.give_back(self.running, caches)
        while growing and not caches.can_grow(growing):
            if growing[-1] is self.running[-1]:
                growing.pop()
            if seqs and seqs[-1] is self.running[-1]:
                seqs.pop()
            self.preempt(self.running[-1])
        for seq in growing:
            caches.grow(seq, len(seq.token_ids))
        return seqs

    def _remove_finished(self, finished: list[Sequence]) -> None:
        self.admission.retry()
        for seq in finished:
            if not seq.room:  # it was preempted while its last token was in flight
                self.waiting.remove(seq)
            self.caches.free(seq)
            if seq.finish_reason != "abort":
                self.lengths.learn(seq)
        self.running = deque(s for s in self.running if s.status is SequenceStatus.RUNNING)


def class_of_admission(config: EngineConfig) -> type[Admission]:
    """The class that decides what prompts get of steps."""
    if config.scheduling != "fair" and not config.long_prefill_token_threshold:
        return Admission
    from nanovllm.engine.schedule.fairness import FairAdmission

    return FairAdmission


def class_of_caches(layout: CacheLayout) -> type[Caches]:
    """The class of the caches for a model of this layout."""
    if layout.states is None:
        return Caches
    from nanovllm.engine.cache.caches_with_states import CachesWithStates

    return CachesWithStates
