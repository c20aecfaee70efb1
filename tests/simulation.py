"""The scheduler side against an independent model of the KV memory.

The model has no hashes, references or queues. For each slot of the pool it notes which token, after
which tokens, was computed there. Before each step it checks that every scheduled sequence reads its
own KV. Two drivers run it: hypothesis, which shrinks what it finds, and long random walks.
"""

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import selection
from audits import audit_caches, audit_scheduler, audit_sequence
from drafts import Eager, RandomProposer
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from nanovllm.adapters.adapter import Adapter
from nanovllm.config import Config
from nanovllm.drafting.grammar_proposer import GrammarProposer
from nanovllm.drafting.host_drafting import HostDrafting
from nanovllm.drafting.table_drafting import TableDrafting
from nanovllm.engine.cache import prefixes
from nanovllm.engine.cache.caches import CacheLayout
from nanovllm.engine.cache.state_part import states_before_and_after
from nanovllm.engine.cache.state_slots import StateLayout
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.requests.intake import SHARE
from nanovllm.engine.requests.logprobs import Logprobs
from nanovllm.engine.requests.report_limit import ReportLimit, wants_reports
from nanovllm.engine.requests.sample_limit import SampleLimit, limit_samples
from nanovllm.engine.run.reports import scheduled_of
from nanovllm.engine.schedule.admission import MOST_PREFILLS, MOST_STARTS
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.drafting import Drafting
from nanovllm.engine.schedule.fairness import PART, FairAdmission
from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus
from nanovllm.prompt_dicts import salt_number
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZES = (1, 2, 3, 4, 16)
EOS, STOP = 3, 4
NUM_TOKENS = 5  # so few that prompts share prefixes all the time
MOST_DRAFTS = 5
LEAST_FAIR = 3  # tokens of prompts in a fair step, while sequences wait for their next token
MOST_REPORTED = 3  # tokens of prompts in a step, while other requests wait

SALTS = salt_number("a"), salt_number("b")
EMPTY = -1  # the number of the prefix without tokens
UNWRITTEN = -(1 << 70)  # the states in a slot that no step has computed: those of no prefix

Slot = tuple[int, int]


class Forcing:
    """A constraint that says which tokens come next: right ones as often as tokens are drawn."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def forced(self, seq: Sequence, most: int) -> list[int]:
        assert most > 0 and not seq.num_pending_tokens
        return self.rng.choices([0, 1], k=self.rng.randint(0, most))

    def update(self, seq: Sequence) -> None:
        pass

    def reset(self) -> None:
        pass


class Keeper:
    """Wants the states of a prompt's tokens, all except the last one, without gaps."""

    generates = True

    def __init__(self, num_prompt_tokens: int) -> None:
        self.wanted = range(num_prompt_tokens - 1)

    def add(self, tokens: range) -> None:
        assert tokens.start == self.wanted.start < tokens.stop, "a gap, or twice the same"
        self.wanted = range(tokens.stop, self.wanted.stop)


class Reports(Logprobs):
    """Wants the log-probabilities of a prompt's tokens, without gaps."""

    generates = True
    add = Keeper.add


def first_prompts() -> list[list[int]]:
    """Prefixes of the first prompts; later prompts begin like any earlier request."""
    return [[0] * 80, [0, 1] * 40]


class Simulation:
    """A scheduler, a device that only records what was written where, and all checks."""

    def __init__(
        self,
        overlap: bool = False,
        windows: tuple[int | None, ...] = (None,),
        draft_seed: int | None = None,
        in_table: bool = False,
        forces: bool = False,
        states: StateLayout | None = None,
        **options: Any,
    ) -> None:
        self.overlap = overlap
        self.rng = random.Random(draft_seed or 0)  # the same in each run
        self.windows = [window or sys.maxsize for window in windows]
        self.in_flight: tuple[Batch, list[int], dict[Sequence, list[int]]] | None = None
        self.block_size = size = options["kvcache_block_size"]
        num_blocks: int = options["num_kvcache_blocks"]
        self.num_slots = num_blocks * size
        config = Config(
            "m", overlap=overlap, **{"max_num_batched_tokens": 16384, "max_num_seqs": 512} | options
        )
        self.config = EngineConfig.settle(config, num_blocks, self.num_slots)
        self.share = max(2, self.config.max_num_running // SHARE)  # of the places, for a request
        drafting: Drafting | None = None
        self.forces = forces
        if draft_seed is not None:  # few tokens, so that many drafts are right
            proposer = RandomProposer(draft_seed, 2)
            proposer.on_propose = self.touch
            if in_table:
                mixes = self.config.scheduling == "mixed"
                drafting = TableDrafting(MOST_DRAFTS, Eager, mixes=mixes)
            else:
                drafting = HostDrafting(proposer, MOST_DRAFTS, Eager)
        if forces and not in_table:
            drafting = HostDrafting(
                None if draft_seed is None else proposer, 0 if draft_seed is None else 3, Eager,
                grammar=GrammarProposer(), most_forced=MOST_DRAFTS,
            )  # fmt: skip
        self.scheduler = Scheduler(self.config, CacheLayout(windows, states), drafting)
        self.set_least()
        self.states = {0: EMPTY}  # what a slot holds, as the number of a prefix
        self.num_restored = 0
        self.arriving: dict[int, list[tuple[Keeper | Reports, range]]] = {}  # by id of a batch
        # With a window a sequence that decodes holds the blocks of that, and two tokens more than
        # a block's at least, wherever they begin; if the pool has so many, there is no end to it.
        self.most_held = [
            max(len({(p + i) // size for i in range(max(w, size + 2))}) for p in range(size))
            if w < sys.maxsize
            else sys.maxsize
            for w in self.windows
        ]
        lengths = range(1, 4 * num_blocks + 1)
        needed = (sum(min(n, most) for most in self.most_held) for n in lengths)
        self.longest = size * sum(blocks <= num_blocks for blocks in needed)
        self.limit = ReportLimit(MOST_REPORTED)
        self.live: list[Sequence] = []  # in order of arrival
        self.tokens: dict[Sequence, list[int]] = {}  # prompt and what was sampled
        self.computed: dict[Sequence, list[int]] = {}  # and what the device has sampled already
        self.asked: dict[Sequence, tuple[SamplingParams, int]] = {}  # and the longest it may get
        self.touched: set[int] = set()  # blocks that a sequence has ever had
        self.memory: dict[Slot, int] = {}  # what a slot holds, as the number of a prefix
        self.since_clear: set[Slot] = set()  # slots written since the cache was emptied
        self.prefixes: dict[
            tuple[int, int], int
        ] = {}  # (number of all but the last, last) -> number
        self.num_steps = 0
        self.waited: dict[Sequence, int] = {}  # steps since it could have decoded
        self.ran: set[Sequence] = set()  # in the last step

    def add(self, prompt: list[int], max_model_len: int, **params: Any) -> None:
        """Queue a request that the pool can hold, as the engine sees to it."""
        asked = SamplingParams(**params)
        options: dict[str, Any] = dict(eos_token_ids=frozenset({EOS}), max_model_len=max_model_len)
        adapter = self.adapter()
        constrained = self.forces and self.rng.random() < 0.5
        keeps, reports = (sum(prompt) % 3 == i for i in range(2))  # as good as at random
        salt = self.rng.choice([0, 0, 0, *SALTS])
        seqs = [
            Sequence(prompt, asked, index=index, parts=SequenceParts(
                constraint=Forcing(self.rng) if constrained else None,
                keeper=Keeper(len(prompt)) if keeps and index == 0 else None, adapter=adapter,
                logprobs=Reports(len(prompt), self.limit) if reports and index == 0 else None,
                salt=salt,
            ), **options)
            for index in range(asked.n)
        ]  # fmt: skip
        if asked.n > self.share:
            limit_samples(seqs, self.config.max_num_running, self.share)
        seqs[0].siblings = seqs[1:]
        self.scheduler.add(seqs[0])
        for seq in seqs:
            self.live.append(seq)
            self.tokens[seq], self.computed[seq] = list(prompt), list(prompt)
            self.asked[seq] = asked, min(len(prompt) + asked.max_tokens, max_model_len)

    def adapter(self) -> Adapter | None:
        """The adapter of the next request."""
        return None

    def waits_for_adapter(self) -> bool:
        """Whether the last step had to wait until an adapter was read."""
        return False

    def restart(self) -> None:
        """Start over after an interrupt."""
        self.ran = set()
        self.scheduler.restart(reversed(self.live))
        self.set_least()

    def set_least(self) -> None:
        """Let fair steps have few tokens of prompts, as the whole steps here are small."""
        if isinstance(self.scheduler.admission, FairAdmission):
            self.scheduler.admission.least = LEAST_FAIR

    def step(self, tokens: list[int]) -> None:
        """A step, or where steps overlap the beginning of one and the end of the one before."""
        self.num_steps += 1
        before, self.in_flight = self.in_flight, None
        if before is not None and self.scheduler.must_wait(before[0]):
            self.postprocess_late(*before)
            if not self.live:
                return
            before = None
        batch = self.scheduler.schedule()
        if batch is not None:
            self.check_batch(batch)
            self.note_states(batch)
            sampled = [tokens[index % len(tokens)] for index in range(len(batch.sampling_seqs))]
            self.copy_states(batch.copies.before)
            self.num_restored += len(batch.copies.before)
            if batch.num_drafts:
                sampled, drawn = self.verify(batch, sampled)
            else:
                self.write(batch)
                drawn = self.drawn(batch, sampled)
            self.copy_states(batch.copies.after)
            for seq, more in drawn.items():
                self.computed[seq] += more
            if not self.overlap:
                self.book(batch, sampled, drawn)
                return
            if before is not None and (batch.draws_wait or tokens[-1] == 0):  # it is drawn late
                self.postprocess_late(*before)
                before = None
            self.scheduler.advance(batch)
            self.in_flight = batch, sampled, drawn
        assert batch is not None or before is not None or self.waits_for_adapter(), "no progress"
        if before is not None:
            self.postprocess_late(*before)

    def note_states(self, batch: Batch) -> None:
        """Note which states the step computes for sequences that keep them."""
        kept = [
            (part, scheduled_of(seq, part.wanted))
            for seq in (batch.seqs[batch.num_decodes :] if batch.is_prefill else ())
            if (part := seq.parts.keeper or seq.parts.logprobs) is not None
        ]
        self.arriving[id(batch)] = [(part, tokens) for part, tokens in kept if tokens]

    def deliver_states(self, batch: Batch) -> None:
        """The states of a step arrive; a sequence that has sampled a token lacks none."""
        for part, tokens in self.arriving.pop(id(batch)):
            part.add(tokens)
        for seq in batch.sampling_seqs:
            assert not seq.parts.first_wanted

    def interrupted_step(self, computed: bool, restart: bool) -> None:
        """A step that is not booked, whether or not the device computed it, and what follows."""
        if self.in_flight is not None and self.scheduler.must_wait(self.in_flight[0]):
            computed = False  # which tokens come before it is not known
        batch = self.scheduler.schedule()
        if batch is not None:
            self.check_batch(batch)
            self.copy_states(batch.copies.before if computed else [])
            if computed and batch.num_drafts:
                self.verify(batch, [0] * len(batch.sampling_seqs))
            elif computed:
                self.write(batch)
            self.copy_states(batch.copies.after if computed else [])
        # These are scheduled once; states are changed in place.
        once = batch is None or batch.forks or batch.drafts or batch.num_drafts
        once = once or self.scheduler.layout.states is not None
        if restart or self.overlap or once:
            self.in_flight = None
            self.restart()
            self.computed |= {seq: list(self.tokens[seq]) for seq in self.live}

    def abort(self, index: int) -> None:
        siblings = self.siblings()
        seqs = [seq for seq in self.live if seq not in siblings]
        seq = seqs[index % len(seqs)]
        gone = [seq, *seq.siblings]
        self.scheduler.abort(seq)
        for seq in gone:
            assert (seq.finish_reason, seq.token_ids) == ("abort", self.tokens[seq])
            self.live.remove(seq)

    def clear_cache(self) -> None:
        """Empty the prefix cache, between any two steps."""
        self.scheduler.clear_cache()
        self.since_clear.clear()
        assert not any(self.scheduler.block_manager.published)
        states = self.scheduler.caches.states
        assert states is None or not states.checkpoints

    def siblings(self) -> set[Sequence]:
        """Those that wait for another sequence to compute their prompt."""
        return {sibling for seq in self.live for sibling in seq.siblings}

    def drain(self) -> None:
        """Every request finishes, and then every block is free.

        The bound: the oldest gets a token in each decode step, and between two of them each of the
        others is prefilled once at most.
        """
        decodes = sum(seq.max_num_tokens - seq.num_tokens + 1 for seq in self.live)
        prefills = sum(seq.max_num_tokens for seq in self.live) + 1
        for _ in range(decodes * prefills):
            if self.scheduler.is_finished() and self.in_flight is None:
                break
            if self.scheduler.is_finished():  # the tokens in flight are dropped
                self.postprocess_late(*self.in_flight)
                self.in_flight = None
                break
            self.step([0])
            self.check_state()
        assert self.scheduler.is_finished() and not self.live
        manager = self.scheduler.block_manager
        assert manager.num_free_blocks == manager.num_blocks
        audit_caches(self.scheduler.caches, [])

    def touch(self, seqs: Iterable[Sequence]) -> None:
        """Note the blocks that these have, some of them only until they have fewer drafts."""
        for seq in seqs:
            self.touched.update(seq.held_blocks)

    def check_batch(self, batch: Batch) -> None:
        """Scheduled work keeps the limits, reads the right KV and writes no other KV."""
        seqs, config = batch.seqs, self.config
        assert seqs, "no progress"
        self.touch(self.scheduler.running)
        assert len({seq.seq_id for seq in seqs}) == len(seqs) <= config.max_num_seqs
        staying = [seq for seq in self.scheduler.running if not seq.ends_in_flight]
        assert len(staying) <= config.max_num_seqs
        num_tokens = [
            seq.num_scheduled_tokens + (batch.num_drafts or len(batch.drafts.get(seq, ())))
            for seq in seqs
        ]
        assert sum(num_tokens) <= config.max_num_batched_tokens
        others = (s for s in self.scheduler.running if s not in batch.all_seqs)
        if batch.num_decodes or any(not (s.is_prefilling or s.ends_in_flight) for s in others):
            prompts = filter(wants_reports, seqs[batch.num_decodes :])
            assert sum(seq.num_scheduled_tokens for seq in prompts) <= MOST_REPORTED
        self.check_samples(staying)
        assert {*batch.drafts} <= {*seqs[: batch.num_decodes]}
        assert all(batch.drafts.values()) and not (batch.drafts and batch.num_drafts)
        for seq, drafts in batch.drafts.items():
            assert len(drafts) <= min(MOST_DRAFTS, self.asked[seq][1] - seq.num_tokens - 1)
            assert not seq.num_pending_tokens and seq.num_uncached_tokens == 1
        for seq in seqs:
            audit_sequence(seq)
            assert seq.status is SequenceStatus.RUNNING
            assert seq.num_scheduled_tokens >= 1
            assert config.enable_prefix_caching or not seq.num_hit_tokens
            assert batch.is_prefill or seq.num_scheduled_tokens == seq.num_uncached_tokens == 1
            self.check_reads(seq)
        complete = [
            seq
            for seq in seqs
            if seq.num_cached_tokens + seq.num_scheduled_tokens == seq.num_tokens
        ]
        sampling = complete + [seq for _, seq in batch.forks]
        places = [
            (seq, place)
            for seq in sampling
            for place in range(1 + (batch.num_drafts or len(batch.drafts.get(seq, ()))))
        ]
        assert [*zip(batch.sampling_seqs, batch.offsets, strict=True)] == places
        self.check_forks(batch)
        self.check_writes(batch)
        self.check_waits(batch)

    def check_samples(self, staying: list[Sequence]) -> None:
        """Samples begin only while their request has fewer places than others leave to it."""
        most, queued = self.config.max_num_running, [*staying, *self.scheduler.waiting]
        begun = {s for s in staying if s not in self.ran and s.parts.samples is not None}
        self.ran = {*self.scheduler.running}
        limits: set[SampleLimit] = {seq.parts.samples for seq in begun}
        for limit in limits:
            priority = next(s for s in begun if s.parts.samples is limit).params.priority
            others = [s for s in queued if s.parts.samples is not limit]
            others = [s for s in others if s.params.priority <= priority]
            requests = {s.parts.samples for s in others}
            most_of_it = self.share if None in requests else most // (1 + len(requests))
            number = sum(seq.parts.samples is limit for seq in staying)
            assert number <= max(self.share, most_of_it), "other requests are held up"

    def check_waits(self, batch: Batch) -> None:
        """No sequence waits long for its decode step, whatever prompts there are."""
        config = self.config
        waiting = (seq for seq in self.scheduler.running if seq not in batch.all_seqs)
        self.waited = {
            seq: self.waited.get(seq, 0) + 1
            for seq in waiting
            if not seq.is_prefilling and not seq.ends_in_flight
        }
        most = MOST_PREFILLS + (0 if config.scheduling == "fair" else MOST_STARTS)
        most = 0 if self.scheduler.mixes else most
        assert max(self.waited.values(), default=0) <= most, "no turn to decode"
        numbers = [seq.num_scheduled_tokens for seq in batch.seqs[batch.num_decodes :]]
        if config.scheduling == "fair" and (self.waited or batch.num_decodes):
            assert sum(numbers) <= max(LEAST_FAIR, config.max_num_batched_tokens // PART)
        if config.long_prefill_token_threshold:
            assert max(numbers, default=0) <= config.long_prefill_token_threshold

    def check_forks(self, batch: Batch) -> None:
        """What a fork is sampled from is computed in this step, and what it shares is full."""
        for seq, sibling in batch.forks:
            assert seq in batch.seqs and seq.samples and sibling not in batch.seqs
            assert sibling.token_ids == seq.token_ids
            assert sibling.num_scheduled_tokens == seq.num_tokens
            num_full = seq.num_tokens // self.block_size
            for table, other in zip(seq.block_tables, sibling.block_tables, strict=True):
                own, shared = other[num_full:], other[:num_full]
                assert shared == table[:num_full]
                assert len(own) == (seq.num_tokens % self.block_size > 0)
                assert all(self.scheduler.block_manager.ref_counts[block] == 1 for block in own)

    def check_reads(self, seq: Sequence) -> None:
        """Each cached position holds its token, computed after just the tokens before it.

        As far back as the first of the scheduled tokens attends.
        """
        end = seq.num_cached_tokens
        if seq.num_possible_tokens:  # only the device knows
            end = len(self.computed[seq]) - 1
            assert 0 <= end - seq.num_cached_tokens <= seq.num_possible_tokens
        numbers = self.numbered(seq)
        for group, window in enumerate(self.windows):
            first = max(0, end + 1 - window)
            assert first >= seq.num_passed_blocks[group] * self.block_size, "given back too early"
            for position in range(first, end):
                assert self.memory.get(self.slot(seq, position, group)) == numbers[position]

    def check_writes(self, batch: Batch) -> None:
        """No slot is written twice, none that others read, none that could be found as a hit."""
        manager = self.scheduler.block_manager
        if batch.num_drafts:
            slots = [slot for seq in batch.seqs for slot in self.slots_of_drafts(batch, seq)]
        else:
            slots = [slot for seq in batch.seqs for slot in self.written(batch, seq)]
        assert len(set(slots)) == len(slots)
        for block in {block for block, _ in slots}:
            shared = sum(block in sibling.held_blocks for _, sibling in batch.forks)
            assert manager.ref_counts[block] == 1 + shared  # they read it in later steps
            assert manager.published[block] is None

    def check_state(self) -> None:
        """Between steps: counts agree, order is kept, and published blocks hold their tokens."""
        scheduler = self.scheduler
        audit_scheduler(scheduler)  # audits each sequence, too
        queued, siblings = [*scheduler.running, *scheduler.waiting], self.siblings()
        assert sorted(queued, key=lambda seq: seq.seq_id) == [
            seq for seq in self.live if seq not in siblings
        ]
        plain = (1, 0, None)
        if all((s.params.n, s.params.priority, s.parts.adapter) == plain for s in self.live):
            first_come = [seq for seq in queued if seq.parts.logprobs is None]
            assert first_come == sorted(first_come, key=lambda seq: seq.seq_id), "not first come"
        for seq in self.live:
            assert seq.token_ids[: seq.num_known_tokens] == self.tokens[seq]
            assert self.overlap or not seq.num_pending_tokens
            if self.in_flight is None or not (
                seq in self.in_flight[0].drafts or self.in_flight[0].num_drafts
            ):
                for table, start, most in zip(
                    seq.block_tables, seq.num_passed_blocks, self.most_held, strict=False
                ):
                    assert seq.num_uncached_tokens > 1 or len(table) - start <= most
        manager = scheduler.block_manager
        assert sum(count > 0 for count in manager.ref_counts) + manager.num_free_blocks == (
            manager.num_blocks
        )
        for block, published in enumerate(manager.published):
            if published is not None:
                prefix = self.memory[block, 0]
                slots = {(block, offset) for offset in range(self.block_size)}
                assert slots <= self.since_clear, "computed before the cache was emptied"
                for offset, token_id in enumerate(published.token_ids[1:], start=1):
                    prefix = self.prefixes[prefix, token_id]
                    assert self.memory[block, offset] == prefix
                assert len(published.token_ids) == self.block_size
        if scheduler.caches.states is not None:
            for slot, prefix in scheduler.caches.states.checkpoints.items():
                assert self.states[slot] == self.number_of(prefix), "the states of another prefix"
        self.check_order()

    def number_of(self, prefix: prefixes.Prefix) -> int:
        """The number by which this file knows a prefix."""
        if prefix.parent is None:
            return EMPTY + prefix.hash
        number = self.number_of(prefix.parent)
        for token_id in prefix.token_ids:
            number = self.prefixes[number, token_id]
        return number

    def copy_states(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.states[target] = self.states.get(source, UNWRITTEN)

    def compute_states(
        self, batch: Batch, of_seqs: list[tuple[Sequence, list[int], list[int]]]
    ) -> None:
        """Find the states of each sequence, and leave those after its tokens, by prefix numbers.

        Of a sequence: the numbers of all its tokens, and the slots of those that are computed.
        """
        if self.scheduler.layout.states is None:
            return
        found, left = [], []
        for seq, numbers, slots in of_seqs:
            start = len(numbers) - len(slots)
            before = numbers[start - 1] if start else EMPTY
            own = seq.state_slots[(start - 1) % len(seq.state_slots)] if start else 0
            assert self.states[own] == before or not start, "not the states before its tokens"
            found += [own] if start else []
            left += [(slot, n) for slot, n in zip(slots, numbers[start:], strict=True) if slot >= 0]
            mine = {slot for slot in slots if slot >= 0}
            assert mine <= {*seq.state_slots, *seq.checkpoints.values()}
        targets = [slot for slot, _ in left]
        assert len(set(targets)) == len(targets) and 0 not in targets
        assert len(set(found)) == len(found)
        copied = [slot for _, slot in batch.copies.before]
        assert len(set(copied)) == len(copied)
        self.states |= dict(left)

    def check_order(self) -> None:
        """The next blocks are those that nothing can be found in, then new ones, then cached ones.

        New memory is touched in order, so that a scheduler that starts over knows it, too.
        """
        manager = self.scheduler.block_manager
        free = list(manager.free_queue)
        cached = [block for block in free if manager.published[block] is not None]
        new = [block for block in range(manager.num_blocks) if block not in self.touched]
        used = {*free} - {*cached} - {*new}
        assert {*free[: len(used)]} == used and free[len(used) :] == new + cached

    def write(self, batch: Batch) -> None:
        """The device computes: all of a step's writes happen together, after the reads."""
        if self.scheduler.layout.states is not None:
            lengths = [
                seq.num_scheduled_tokens + len(batch.drafts.get(seq, [])) for seq in batch.seqs
            ]
            ends = np.cumsum([0, *lengths])
            slots = states_before_and_after(batch, ends)["states_after"].tolist()
            self.compute_states(
                batch,
                [
                    (seq, self.computed_numbers(seq, batch), slots[start : start + length])
                    for seq, start, length in zip(batch.seqs, ends.tolist(), lengths, strict=False)
                ],
            )
        for seq in batch.seqs:
            numbers = self.numbered(seq, batch.drafts.get(seq, []))[seq.num_cached_tokens :]
            self.keep(self.written(batch, seq), numbers)
        for seq, sibling in batch.forks:  # a last block that is not full is copied
            for offset in range(seq.num_tokens % self.block_size):
                for table, other in zip(seq.block_tables, sibling.block_tables, strict=True):
                    self.memory[other[-1], offset] = self.memory[table[-1], offset]
                    if (table[-1], offset) in self.since_clear:
                        self.since_clear.add((other[-1], offset))

    def keep(self, slots: list[Slot], numbers: list[int]) -> None:
        """Write the prefixes `numbers` to slots, which are those of one group after the other."""
        size = len(slots) // max(1, len(self.windows))
        for start in range(0, len(slots), size or 1):
            for slot, prefix in zip(slots[start : start + size], numbers, strict=False):
                self.memory[slot] = prefix
                self.since_clear.add(slot)

    def postprocess_late(
        self, batch: Batch, sampled: list[int], drawn: dict[Sequence, list[int]]
    ) -> None:
        """Postprocess while the next step is in flight: finished sequences get nothing."""
        expected = []
        for seq, more in drawn.items():
            if seq in self.live and more:
                self.tokens[seq] += self.until_end(seq, more)
                if (ending := self.ending(seq, self.tokens[seq]))[0] is not None:
                    expected.append((seq, ending))
        self.deliver_states(batch)
        finished = self.scheduler.postprocess(batch, sampled)
        assert [(seq, (seq.finish_reason, seq.stop_reason)) for seq in finished] == expected
        for seq in finished:
            assert seq.token_ids == self.tokens[seq]
            audit_sequence(seq)
        self.live = [seq for seq in self.live if seq not in finished]
        self.check_drafted(batch)

    def until_end(self, seq: Sequence, more: list[int]) -> list[int]:
        """The tokens that count: none after the one that ends the request."""
        token_ids = list(self.tokens[seq])
        for count, token_id in enumerate(more, start=1):
            token_ids.append(token_id)
            if self.ending(seq, token_ids)[0] is not None:
                return more[:count]
        return more

    def slots_of_drafts(self, batch: Batch, seq: Sequence) -> list[Slot]:
        """Where the device writes a row's last token and its drafts, at most: in each group."""
        start, end = self.places_of_drafts(batch, seq)
        for table in seq.block_tables:
            assert seq.room == len(table) * self.block_size
        groups = range(len(self.windows))
        return [self.slot(seq, place, group) for group in groups for place in range(start, end)]

    def places_of_drafts(self, batch: Batch, seq: Sequence) -> tuple[int, int]:
        """The first position of a row's last token and its drafts, and the end of them."""
        start = len(self.computed[seq]) - 1
        return start, min(start + 1 + batch.num_drafts, seq.room, seq.max_num_tokens - 1)

    def verify(
        self, batch: Batch, sampled: list[int]
    ) -> tuple[list[int], dict[Sequence, list[int]]]:
        """The device guesses, computes and accepts: what it reports, and each one's tokens.

        It does not know how a request ends, except by its length.
        """
        outcome, drawn, width = [], {}, 1 + batch.num_drafts
        states = []
        for index, seq in enumerate(batch.seqs):
            slots, tokens = self.slots_of_drafts(batch, seq), sampled[index * width :][:width]
            start, end = self.places_of_drafts(batch, seq)
            num_places = end - start
            drafts = self.guess(seq, slots[:num_places], batch.num_drafts)[: max(0, num_places - 1)]
            numbers = self.numbered(seq, drafts)[len(self.computed[seq]) - 1 :]
            self.keep(slots, numbers)
            count = 1 if num_places else 0
            if num_places and seq.state_slots:
                own = [seq.state_slots[place % len(seq.state_slots)] for place in range(start, end)]
                own = own[: 1 + len(drafts)]
                states.append((seq, self.numbered(seq, drafts)[: start + len(own)], own))
            while 0 < count <= len(drafts) and tokens[count - 1] == drafts[count - 1]:
                count += 1
            drawn[seq] = tokens[:count]
            outcome += [count, len(drafts), *tokens]
        self.compute_states(batch, states)
        return outcome, drawn

    def guess(self, seq: Sequence, slots: list[Slot], most: int) -> list[int]:
        """Drafts, `most` of them at most, for a row that may write to these slots."""
        del seq, slots
        return self.rng.choices([0, 1], k=self.rng.randint(0, most))

    def check_drafted(self, batch: Batch) -> None:
        """A sequence whose drafts are verified is as if its tokens had come one by one."""
        for seq in batch.drafts:
            if seq in self.live:
                assert seq.num_cached_tokens == seq.num_tokens - 1
                num_blocks = -(-seq.num_cached_tokens // self.block_size)
                assert all(len(table) == num_blocks for table in seq.block_tables)

    def drawn(self, batch: Batch, sampled: list[int]) -> dict[Sequence, list[int]]:
        """The tokens that each sequence gets: up to the first wrong draft, or to its end."""
        drawn: dict[Sequence, list[int]] = {}
        rows = iter(sampled)
        for seq in dict.fromkeys(batch.sampling_seqs):
            drafts = batch.drafts.get(seq, [])
            got = [next(rows) for _ in range(1 + len(drafts))]
            count, before = 1, self.computed[seq]
            while count < len(got) and got[count - 1] == drafts[count - 1]:
                if self.ending(seq, before + got[:count])[0] is not None:
                    break
                count += 1
            drawn[seq] = got[:count]
        return drawn

    def book(self, batch: Batch, sampled: list[int], drawn: dict[Sequence, list[int]]) -> None:
        """Postprocess, and compare with what should have become of each sequence."""
        expected = {}
        booked = batch.seqs + [seq for _, seq in batch.forks]
        for seq in booked:
            cached = seq.num_cached_tokens + seq.num_scheduled_tokens
            expected[seq] = (list(seq.token_ids), cached, None, None)
        for seq, more in drawn.items():
            assert more, "nothing is in flight, so that it has a block"
            self.tokens[seq] += self.until_end(seq, more)
            token_ids = list(self.tokens[seq])
            reason, stop_reason = self.ending(seq, token_ids)
            cached = 0 if reason else len(token_ids) - 1
            expected[seq] = (token_ids, cached, reason, stop_reason)
        self.deliver_states(batch)
        finished = self.scheduler.postprocess(batch, sampled)
        for seq in booked:
            state = (seq.token_ids, seq.num_cached_tokens, seq.finish_reason, seq.stop_reason)
            assert state == expected[seq]
            assert seq.num_scheduled_tokens == 0
            audit_sequence(seq)
        assert finished == [seq for seq in booked if expected[seq][2]]
        self.live = [seq for seq in self.live if seq not in finished]
        self.check_drafted(batch)

    def ending(self, seq: Sequence, token_ids: list[int]) -> tuple[str | None, int | None]:
        """How a request with these tokens ends, if it does."""
        params, max_num_tokens = self.asked[seq]
        if token_ids[-1] == EOS and not params.ignore_eos:
            return "stop", None
        if params.stop_token_ids and token_ids[-1] in params.stop_token_ids:
            return "stop", token_ids[-1]
        return ("length", None) if len(token_ids) == max_num_tokens else (None, None)

    def numbered(self, seq: Sequence, drafts: list[int] | None = None) -> list[int]:
        """For each position the number of the prefix that ends there: equal iff all of it is."""
        numbers, number = [], -1
        if seq.parts.adapter is not None:  # adapters and salts have prefixes of their own
            number -= seq.parts.adapter.number
        number += seq.parts.salt
        for token_id in self.computed[seq] + (drafts or []):
            number = self.prefixes.setdefault((number, token_id), len(self.prefixes))
            numbers.append(number)
        return numbers

    def computed_numbers(self, seq: Sequence, batch: Batch) -> list[int]:
        """Those of all tokens that a step leaves computed, with its drafts."""
        drafts = batch.drafts.get(seq, [])
        end = seq.num_cached_tokens + seq.num_scheduled_tokens + len(drafts)
        return self.numbered(seq, drafts)[:end]

    def slot(self, seq: Sequence, position: int, group: int = 0) -> Slot:
        table = seq.block_tables[group]
        return table[position // self.block_size], position % self.block_size

    def written(self, batch: Batch, seq: Sequence) -> list[Slot]:
        start = seq.num_cached_tokens
        number = seq.num_scheduled_tokens + len(batch.drafts.get(seq, ()))
        groups = range(len(self.windows))
        return [self.slot(seq, start + i, group) for group in groups for i in range(number)]


def state_layout(
    num_checkpoints: int | None, interval: int, block_size: int, options: dict[str, Any]
) -> StateLayout | None:
    """Slots for states, with `interval` blocks between checkpoints; None if there are none."""
    if num_checkpoints is None:
        return None
    if not options["enable_prefix_caching"]:
        num_checkpoints = 0
    drafts = options["draft_seed"] is not None or options["forces"]
    slots_each = 1 + MOST_DRAFTS if drafts else 1
    return StateLayout(slots_each, num_checkpoints, interval * block_size)


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis decides what happens next."""

    @initialize(
        block_size=st.sampled_from(BLOCK_SIZES),
        num_blocks=st.integers(2, 12),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 40),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        overlap=st.booleans(),
        windows=st.one_of(
            st.tuples(st.one_of(st.none(), st.integers(1, 20))),
            st.tuples(st.none(), st.integers(1, 12)),
            st.tuples(st.none(), st.none(), st.integers(1, 8)),
            st.tuples(st.integers(6, 20), st.integers(1, 6)),
            st.just(()),
        ),
        num_checkpoints=st.one_of(st.none(), st.integers(0, 6)),
        interval=st.integers(1, 4),
        scheduling=st.sampled_from(["prefill-first", "fair", "mixed"]),
        long_prefill_token_threshold=st.sampled_from([0, 0, 0, 5]),
        draft_seed=st.one_of(st.none(), st.integers(0, 99)),
        in_table=st.booleans(),
        forces=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        windows: Any,
        num_checkpoints: int | None,
        interval: int,
        **options: Any,
    ) -> None:
        least = 2 * len(windows)  # a request has two tokens at least
        if not windows and num_checkpoints is None:
            num_checkpoints = 3
        self.simulation = Simulation(
            kvcache_block_size=block_size, num_kvcache_blocks=max(least, num_blocks),
            windows=windows, states=state_layout(num_checkpoints, interval, block_size, options),
            **options,
        )  # fmt: skip
        self.prompts = first_prompts()

    @rule(
        copies=st.integers(1, 3),
        origin=st.integers(0, 20),
        keep=st.integers(0, 40),
        more=st.lists(st.integers(0, 1), max_size=6),
        max_model_len=st.integers(2, 120),
        params=st.fixed_dictionaries(
            {
                "max_tokens": st.integers(1, 60),
                "ignore_eos": st.booleans(),
                "stop_token_ids": st.sampled_from([None, [STOP]]),
                "n": st.sampled_from([1, 1, 2, 4, 9]),
                "priority": st.sampled_from([0, 0, 0, 1, -1]),
                "presence_penalty": st.sampled_from([0.0, 0.0, 1.0]),  # waits for its tokens
            }
        ),
    )
    def add(
        self,
        copies: int,
        origin: int,
        keep: int,
        more: list[int],
        max_model_len: int,
        params: dict[str, Any],
    ) -> None:
        max_model_len = min(max_model_len, self.simulation.longest)
        tokens = self.prompts[origin % len(self.prompts)][:keep] + more or [0]
        for _ in range(copies):
            self.simulation.add(tokens[: max_model_len - 1], max_model_len, **params)
        self.prompts.append(self.simulation.tokens[self.simulation.live[-1]])

    @precondition(lambda self: self.simulation.live)
    @rule(tokens=st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=4))
    def step(self, tokens: list[int]) -> None:
        self.simulation.step(tokens)

    @precondition(lambda self: self.simulation.live)
    @rule(count=st.integers(1, 30))
    def steps_without_a_stop(self, count: int) -> None:
        for _ in range(count):
            if self.simulation.live:
                self.simulation.step([0, 1])
                self.simulation.check_state()

    @precondition(lambda self: self.simulation.live)
    @rule(computed=st.booleans(), restart=st.booleans())
    def interrupted_step(self, computed: bool, restart: bool) -> None:
        self.simulation.interrupted_step(computed, restart)

    @precondition(lambda self: self.simulation.live)
    @rule(index=st.integers(0, 20))
    def abort(self, index: int) -> None:
        self.simulation.abort(index)

    @rule()
    def clear_cache(self) -> None:
        self.simulation.clear_cache()

    @invariant()
    def state(self) -> None:
        self.simulation.check_state()

    def teardown(self) -> None:
        # Not after a failure, which would be hidden by what follows from it.
        if hasattr(self, "simulation") and sys.exc_info()[0] is None:
            self.simulation.drain()


def walk(
    seed: int,
    num_actions: int = 300,
    make: Callable[..., Simulation] = Simulation,
    with_states: bool = False,
    guesses: bool = False,
) -> Simulation:
    """A random walk that ends in a drain. If it `guesses`, all drafts are those of a device."""
    rng = random.Random(seed)
    block_size = rng.choice(BLOCK_SIZES)
    num_blocks = rng.randint(2, 8) if block_size > 1 else rng.randint(4, 24)
    one: tuple[int | None, ...] = (rng.choice([None, rng.randint(1, 12), rng.randint(1, 60)]),)
    few, many = rng.randint(1, 9), rng.randint(1, 60)
    mixes: list[tuple[int | None, ...]] = [(None, few), (None, many, few, few), (many + few, few)]
    windows = rng.choice([one, one, *mixes])
    options: dict[str, Any] = dict(
        max_num_seqs=rng.randint(2, 8),
        max_num_batched_tokens=rng.choice([1, 4, 16, 64]),
        enable_prefix_caching=rng.random() < 0.9,
        overlap=rng.random() < 0.5,
        scheduling=rng.choice(["prefill-first", "fair", "mixed"]),
        long_prefill_token_threshold=rng.choice([0, 0, 0, 0, 7]),
        draft_seed=rng.choice([None, seed]),
        in_table=seed % 2 == 0,
        forces=seed % 3 == 0,
    )
    if with_states:
        if rng.random() < (0.75 if guesses else 0.25):
            windows = ()
        if guesses:
            options |= dict(
                in_table=True, draft_seed=seed, scheduling=rng.choice(["prefill-first", "fair"]),
                enable_prefix_caching=True, max_num_batched_tokens=64,
            )  # fmt: skip
        most = rng.choice([1, 4, 20])
        options["states"] = state_layout(
            rng.randint(0, most), rng.randint(1, 4), block_size, options
        )
    simulation = make(
        kvcache_block_size=block_size, num_kvcache_blocks=num_blocks * max(1, len(windows)),
        windows=windows, **options,
    )  # fmt: skip
    num_slots = simulation.longest
    prompts = first_prompts()
    arrivals, num_tokens = rng.choice([0.05, 0.2, 0.5]), rng.choice([2, 2, NUM_TOKENS])
    samples, priorities = rng.choice([[1], [1, 3], [1, 9]]), rng.choice([[0], [0, 1, -1]])
    for _ in range(num_actions):
        action = rng.random()
        if not simulation.live or (action < arrivals and len(simulation.live) < 12):
            max_model_len = rng.randint(2, max(2, num_slots))
            tokens = rng.choice(prompts)[: rng.randint(0, num_slots // 2)]
            tokens = tokens + rng.choices([0, 1], k=rng.randint(1, block_size))
            simulation.add(
                tokens[: max_model_len - 1],
                max_model_len,
                max_tokens=rng.randint(1, num_slots),
                ignore_eos=rng.random() < 0.5,
                stop_token_ids=rng.choice([None, [STOP]]),
                n=rng.choice(samples),
                presence_penalty=rng.choice([0.0, 0.0, 1.0]),
                priority=rng.choice(priorities),
            )
            prompts.append(simulation.tokens[simulation.live[-1]])
        elif action < 0.93:
            simulation.step(rng.choices(range(num_tokens), k=4))
        elif action < 0.97:
            simulation.interrupted_step(rng.random() < 0.5, restart=rng.random() < 0.2)
        elif action < 0.99:
            simulation.abort(rng.randrange(len(simulation.live)))
        else:
            simulation.clear_cache()
        simulation.check_state()
    simulation.drain()
    return simulation


SETTINGS = settings(
    deadline=None,
    max_examples=selection.examples(200),
    stateful_step_count=40,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
