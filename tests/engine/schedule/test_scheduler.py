"""Scheduler: which sequences run in a step, on how many tokens, and how a request ends.

The numbers are small enough to check by hand. The device is a list of token ids.
"""

import itertools
import subprocess
import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import selection
from audits import audit_scheduler
from conftest import byte_tokenizer
from drafts import Eager, RandomProposer

from nanovllm.config import Config
from nanovllm.drafting.host_drafting import HostDrafting
from nanovllm.engine.cache.caches import CacheLayout
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.requests.stop_text import TextUntilStop
from nanovllm.engine.schedule.admission import MOST_PREFILLS, MOST_STARTS
from nanovllm.engine.schedule.drafting import Drafting
from nanovllm.engine.schedule.forecast import MIN_ENDED
from nanovllm.engine.schedule.scheduler import Scheduler
from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

EOS = 2
TOKEN = 50  # what the device samples by default
serial = itertools.count(1000)


def make_scheduler(
    num_blocks: int = 100,
    block_size: int = 4,
    window: int | None = None,
    drafting: Drafting | None = None,
    **options: Any,
) -> Scheduler:
    options = dict(max_num_batched_tokens=16384, max_num_seqs=512) | options
    config = Config("m", kvcache_block_size=block_size, overlap=False, **options)
    layout = CacheLayout((window,))
    settled = EngineConfig.settle(config, num_blocks, num_blocks * block_size)
    return Scheduler(settled, layout, drafting)


def fresh(num_tokens: int) -> list[int]:
    """A prompt that shares nothing with any other."""
    return list(itertools.islice(serial, num_tokens))


def add(
    scheduler: Scheduler, prompt: list[int], max_model_len: int | None = None, **params: Any
) -> Sequence:
    """Queue a request; by default it may grow to the size of the pool."""
    if max_model_len is None:
        max_model_len = scheduler.block_manager.num_blocks * scheduler.block_size
    seq = Sequence(
        prompt,
        SamplingParams(**params),
        eos_token_ids=frozenset({EOS}),
        max_model_len=max_model_len,
    )
    scheduler.add(seq)
    return seq


def step(scheduler: Scheduler, *token_ids: int) -> list[tuple[Sequence, int]]:
    """Run one step; return which sequences ran, and on how many tokens."""
    batch = scheduler.schedule()
    work = [(seq, seq.num_scheduled_tokens) for seq in batch.seqs]
    num_samples = len(batch.sampling_seqs)
    tokens = list(token_ids) or [TOKEN] * num_samples
    assert len(tokens) == num_samples
    scheduler.postprocess(batch, tokens)
    audit_scheduler(scheduler)
    return work


def interrupt(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    """A step that is scheduled but not postprocessed: Ctrl-C while the device computed."""
    batch = scheduler.schedule()
    audit_scheduler(scheduler)
    return [(seq, seq.num_scheduled_tokens) for seq in batch.seqs]


def drain(scheduler: Scheduler, limit: int = 1000) -> None:
    """Run until all have finished, and check that all blocks are free."""
    for _ in range(limit):
        if scheduler.is_finished():
            assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks
            return
        step(scheduler)
    raise AssertionError(f"not finished after {limit} steps")


@pytest.mark.cold
def test_the_scheduler_side_does_not_import_torch() -> None:
    """A simulation of the scheduler need not wait seconds for PyTorch."""
    code = "import sys, nanovllm.engine.schedule.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Budgets and order


def test_prefill_fills_the_budget_in_order_of_arrival() -> None:
    """A prompt that does not fit is cut, so that the budget is full."""
    scheduler = make_scheduler(max_num_batched_tokens=10)
    a, b, c = add(scheduler, fresh(4)), add(scheduler, fresh(5)), add(scheduler, fresh(6))
    assert step(scheduler) == [(a, 4), (b, 5), (c, 1)]
    assert [len(seq.output_token_ids) for seq in (a, b, c)] == [1, 1, 0]
    assert step(scheduler) == [(c, 5)]
    assert [len(seq.output_token_ids) for seq in (a, b, c)] == [1, 1, 1]
    assert step(scheduler) == [(a, 1), (b, 1), (c, 1)]


@pytest.mark.parametrize(
    ("num_tokens", "chunks"), [(3, [3]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (10, [4, 4, 2])]
)
def test_a_long_prompt_is_prefilled_in_chunks(num_tokens: int, chunks: list[int]) -> None:
    """Only the last chunk samples a token."""
    scheduler = make_scheduler(max_num_batched_tokens=4)
    seq = add(scheduler, fresh(num_tokens))
    for index, chunk in enumerate(chunks):
        assert seq.output_token_ids == []
        assert step(scheduler) == [(seq, chunk)]
        assert seq.num_cached_tokens == sum(chunks[: index + 1])
    assert seq.output_token_ids == [TOKEN]


def test_tokens_go_to_sequences_that_completed_their_prompt() -> None:
    """Sequences with an unfinished prompt get none."""
    scheduler = make_scheduler(max_num_batched_tokens=6)
    a, b = add(scheduler, fresh(9)), add(scheduler, fresh(2))
    assert step(scheduler) == [(a, 6)]
    c = add(scheduler, fresh(7))
    assert step(scheduler, 61, 62) == [(a, 3), (b, 2), (c, 1)]
    assert [seq.output_token_ids for seq in (a, b, c)] == [[61], [62], []]
    assert step(scheduler, 63) == [(c, 6)]
    assert step(scheduler, 64, 65, 66) == [(a, 1), (b, 1), (c, 1)]
    assert [seq.output_token_ids for seq in (a, b, c)] == [[61, 64], [62, 65], [63, 66]]


def test_prefill_comes_first() -> None:
    """A new request does not wait for the running ones."""
    scheduler = make_scheduler()
    a = add(scheduler, fresh(3))
    step(scheduler)
    step(scheduler)
    b = add(scheduler, fresh(3))
    assert step(scheduler) == [(b, 3)]
    assert step(scheduler) == [(a, 1), (b, 1)]


@pytest.mark.parametrize("ending", [dict(max_tokens=1), dict(stop_token_ids=[TOKEN])])
def test_requests_that_end_with_their_prompt_do_not_stop_decoding(ending: dict[str, Any]) -> None:
    """They keep no places, so that there is always room for the next ones."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    chat = add(scheduler, fresh(3), max_tokens=10)
    step(scheduler)
    gaps = [0]
    while chat.status is not SequenceStatus.FINISHED:
        add(scheduler, fresh(8), **ending)
        if step(scheduler)[0][0] is chat:
            gaps.append(0)
        else:
            gaps[-1] += 1
        assert gaps[-1] <= MOST_PREFILLS
    assert len(gaps) == 10 and set(gaps[1:-1]) == {MOST_PREFILLS}, "prompts come first"


def test_prompts_that_come_together_are_computed_in_a_few_steps() -> None:
    """Then a decode step is for all that have begun, also for one that waited before."""
    scheduler = make_scheduler(num_blocks=3000, max_num_batched_tokens=100)
    seqs = [add(scheduler, fresh(100), max_tokens=20)]
    for _ in range(2):
        step(scheduler)
    seqs += [add(scheduler, fresh(100), max_tokens=20) for _ in range(8)]
    many = MOST_PREFILLS + MOST_STARTS
    for seq in seqs[1 : 1 + many]:
        assert step(scheduler) == [(seq, 100)]
    assert step(scheduler) == [(seq, 1) for seq in seqs[: 1 + many]]
    assert step(scheduler) == [(seqs[1 + many], 100)]


def test_chunks_of_a_long_prompt_do_not_count_as_beginnings() -> None:
    """Many that began together do not wait for many chunks of another prompt."""
    scheduler = make_scheduler(num_blocks=3000, max_num_batched_tokens=100)
    seqs = [add(scheduler, fresh(10), max_tokens=20) for _ in range(9)]
    long = add(scheduler, fresh(500))
    assert step(scheduler) == [*((seq, 10) for seq in seqs), (long, 10)]
    assert step(scheduler) == [(long, 100)]
    assert step(scheduler) == [(seq, 1) for seq in seqs]


def test_a_long_prompt_lets_others_decode_between_its_chunks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    a = add(scheduler, fresh(4), max_tokens=5)
    step(scheduler)
    step(scheduler)
    long = add(scheduler, fresh(4 * (2 * MOST_PREFILLS + 1)), max_tokens=2)
    work = [step(scheduler) for _ in range(2 * MOST_PREFILLS + 3)]
    decodes = [(a, 1)]
    assert work == [
        *[[(long, 4)]] * MOST_PREFILLS, decodes, *[[(long, 4)]] * MOST_PREFILLS, decodes,
        [(long, 4)],
    ]  # fmt: skip


def test_the_lowest_priority_number_runs_first() -> None:
    """Equal numbers run in order of arrival."""
    scheduler = make_scheduler(max_num_seqs=2)
    a, b = add(scheduler, fresh(3), priority=1), add(scheduler, fresh(3), priority=0)
    c, d = add(scheduler, fresh(3), priority=1), add(scheduler, fresh(3), priority=-5, max_tokens=2)
    assert step(scheduler) == [(d, 3), (b, 3)]
    assert step(scheduler) == [(d, 1), (b, 1)]
    assert step(scheduler) == [(a, 3)]
    assert step(scheduler) == [(b, 1), (a, 1)]
    assert list(scheduler.waiting) == [c]


def test_a_higher_priority_does_not_stop_running_sequences() -> None:
    """But when blocks run out, the older request of lower priority is preempted."""
    scheduler = make_scheduler(num_blocks=4)
    a = add(scheduler, fresh(6))
    step(scheduler)
    b = add(scheduler, fresh(8), priority=-1)
    assert step(scheduler) == [(b, 8)]
    assert list(scheduler.running) == [b, a]
    assert step(scheduler) == [(b, 1)]  # its third block
    assert list(scheduler.waiting) == [a]
    drain(scheduler)


def test_in_mixed_steps_a_long_prompt_does_not_delay_decodes() -> None:
    """Each running sequence gets a token in every step, the prompt gets the rest of the budget."""
    scheduler = make_scheduler(max_num_batched_tokens=8, scheduling="mixed")
    a, b = add(scheduler, fresh(3)), add(scheduler, fresh(2))
    assert step(scheduler) == [(a, 3), (b, 2)]
    c, d = add(scheduler, fresh(13)), add(scheduler, fresh(2))
    assert step(scheduler) == [(a, 1), (b, 1), (c, 6)]
    assert step(scheduler) == [(a, 1), (b, 1), (c, 6)]
    assert step(scheduler) == [(a, 1), (b, 1), (c, 1), (d, 2)]
    assert [len(seq.output_token_ids) for seq in (a, b, c, d)] == [4, 4, 1, 1]
    batch = scheduler.schedule()
    assert batch is not None and not batch.is_prefill


def test_a_preempted_sequence_does_not_restart_in_the_same_step() -> None:
    """Its blocks are for the sequences before it."""
    scheduler = make_scheduler(num_blocks=4, scheduling="mixed")
    a, b = add(scheduler, fresh(8)), add(scheduler, fresh(7))
    assert step(scheduler) == [(a, 8), (b, 7)]
    assert step(scheduler) == [(a, 1)], "the last block but one is its"
    assert list(scheduler.waiting) == [b]
    drain(scheduler)


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    """Not even what has room then: in general it could be the preempted sequence."""
    scheduler = make_scheduler(num_blocks=4, scheduling="mixed")
    a, b = add(scheduler, fresh(8)), add(scheduler, fresh(7), priority=5)
    assert step(scheduler) == [(a, 8), (b, 7)]
    small = add(scheduler, fresh(3), priority=1)
    assert step(scheduler) == [(a, 1)] and list(scheduler.waiting) == [small, b]
    assert step(scheduler) == [(a, 1), (small, 3)]
    drain(scheduler)


def test_a_refused_request_is_tried_again_after_a_preemption() -> None:
    """8 blocks of 4: b has no room beside a and c; once c is preempted, it has."""
    scheduler = make_scheduler(num_blocks=8)
    known = dict(ignore_eos=True)
    a = add(scheduler, fresh(12), priority=0, max_tokens=20, **known)
    c = add(scheduler, fresh(11), priority=5, max_tokens=20, **known)
    assert step(scheduler) == [(a, 12), (c, 11)]
    b = add(scheduler, fresh(4), priority=1, max_tokens=4, **known)
    while scheduler.num_preemptions == 0:
        assert b not in [seq for seq, _ in step(scheduler)]
    assert list(scheduler.waiting) == [b, c]
    assert step(scheduler) == [(b, 4)]
    drain(scheduler)


def test_max_num_seqs_bounds_all_running_sequences() -> None:
    """Not just those of one step: prefills must not add up to more than decode can take."""
    scheduler = make_scheduler(max_num_seqs=2)
    a, b, c = (add(scheduler, fresh(3), max_tokens=n) for n in (2, 4, 2))
    assert step(scheduler) == [(a, 3), (b, 3)]
    assert step(scheduler) == [(a, 1), (b, 1)]
    assert a.status is SequenceStatus.FINISHED
    assert step(scheduler) == [(c, 3)]
    assert step(scheduler) == [(b, 1), (c, 1)]
    assert list(scheduler.running) == [b]
    drain(scheduler)


def test_samples_take_places_before_they_are_forked() -> None:
    """3 places are full with a request of 3 samples, although only one of them runs yet."""
    scheduler = make_scheduler(max_num_seqs=3)
    parent, other = add(scheduler, fresh(3), max_tokens=2), add(scheduler, fresh(3))
    parent.siblings = [Sequence(parent.token_ids, parent.params, index=i) for i in (1, 2)]
    assert step(scheduler, 51, 52, 53) == [(parent, 3)]
    assert list(scheduler.waiting) == [other]
    drain(scheduler)


def test_sequences_that_end_in_flight_leave_their_places() -> None:
    """The next step begins with others, and need not wait until the host has read these."""
    scheduler = make_scheduler(max_num_seqs=2)
    a, pooled, parent = (add(scheduler, fresh(3), max_tokens=n) for n in (1, 1, 2))
    pooled.parts.keeper, pooled.generates = SimpleNamespace(wanted=range(2, 3)), False
    pooled.max_num_tokens = 3
    parent.siblings = [sibling := Sequence(parent.token_ids, parent.params, index=1)]
    first = scheduler.schedule()
    assert not a.ends_in_flight, "it is to be computed"
    assert not pooled.ends_in_flight
    scheduler.advance(first)
    second = scheduler.schedule()
    audit_scheduler(scheduler)
    assert (first.seqs, second.seqs) == ([a, pooled], [parent])
    assert second.forks == [(parent, sibling)]
    scheduler.advance(second)
    pooled.parts.keeper.wanted = range(3, 3)
    assert scheduler.postprocess(first, [TOKEN]) == [a, pooled]
    assert scheduler.postprocess(second, [TOKEN] * 2) == []
    assert step(scheduler) == [(parent, 1), (sibling, 1)]
    drain(scheduler)


def test_the_token_budget_also_bounds_decode_steps() -> None:
    """Five sequences decode, three in a step."""
    scheduler = make_scheduler(max_num_batched_tokens=3)
    seqs = [add(scheduler, fresh(1), max_tokens=3) for _ in range(5)]
    assert step(scheduler) == [(seq, 1) for seq in seqs[:3]]
    assert step(scheduler) == [(seq, 1) for seq in seqs[:3]]
    assert step(scheduler) == [(seq, 1) for seq in seqs[:3]]
    assert step(scheduler) == [(seq, 1) for seq in seqs[3:]]
    drain(scheduler)


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    """A large request must not starve behind small ones."""
    scheduler = make_scheduler(num_blocks=4)
    a = add(scheduler, fresh(8), max_tokens=2)
    large, small = add(scheduler, fresh(12)), add(scheduler, fresh(1))
    assert step(scheduler) == [(a, 8)]
    assert step(scheduler) == [(a, 1)]
    assert step(scheduler) == [(large, 12), (small, 1)]


# Prefix cache


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    """Hits cost no budget; the last token is always computed."""
    scheduler = make_scheduler(max_num_batched_tokens=24)
    prompt = fresh(20)
    a = add(scheduler, prompt)
    assert step(scheduler) == [(a, 20)]
    b, c = add(scheduler, prompt), add(scheduler, [*prompt, 7])
    d = add(scheduler, fresh(20))
    assert step(scheduler) == [(b, 4), (c, 1), (d, 19)]
    assert [seq.num_hit_tokens for seq in (a, b, c, d)] == [0, 16, 20, 0]
    assert b.block_table[:4] == a.block_table[:4] == c.block_table[:4]
    drain(scheduler)


def test_a_chunk_is_shared_as_soon_as_it_is_computed() -> None:
    """Not only when the whole prompt is complete, and not earlier."""
    scheduler = make_scheduler(max_num_batched_tokens=6, max_num_seqs=2)
    prompt = fresh(16)
    a = add(scheduler, prompt)
    assert step(scheduler) == [(a, 6)]
    assert step(scheduler) == [(a, 6)]
    b = add(scheduler, prompt)
    assert step(scheduler) == [(a, 4), (b, 2)]
    assert b.num_hit_tokens == 12


def test_of_equal_prompts_that_arrive_together_one_is_computed() -> None:
    """The second one waits for a step, and computes its last token."""
    scheduler = make_scheduler()
    prompt = fresh(9)
    a, b = add(scheduler, prompt), add(scheduler, prompt)
    assert step(scheduler) == [(a, 9)]
    assert step(scheduler) == [(b, 1)]


def test_blocks_filled_by_decode_are_shared() -> None:
    """The next turn of a conversation need not compute the answer again."""
    scheduler = make_scheduler()
    a = add(scheduler, [1001, 1002, 1003])
    step(scheduler)  # samples the fourth token
    early = add(scheduler, [1001, 1002, 1003, TOKEN, 9])
    assert interrupt(scheduler) == [(early, 5)]
    scheduler.abort(early)
    assert step(scheduler) == [(a, 1)]  # computes it: the block is full now
    late = add(scheduler, [1001, 1002, 1003, TOKEN, 9])
    assert step(scheduler) == [(late, 1)]


def test_without_prefix_caching_nothing_is_shared() -> None:
    """`enable_prefix_caching=False` reaches the block manager."""
    scheduler = make_scheduler(enable_prefix_caching=False)
    prompt = fresh(20)
    for _ in range(3):
        seq = add(scheduler, prompt, max_tokens=2)
        assert step(scheduler) == [(seq, 20)]
        assert seq.num_hit_tokens == 0
        drain(scheduler)


# KV pressure


def under_pressure() -> tuple[Scheduler, list[Sequence]]:
    """Three sequences with a full block each, in a pool of three; all need one more now."""
    scheduler = make_scheduler(num_blocks=3)
    seqs = [add(scheduler, fresh(4), max_tokens=3) for _ in range(3)]
    assert step(scheduler) == [(seq, 4) for seq in seqs]
    assert scheduler.block_manager.num_free_blocks == 0
    return scheduler, seqs


def test_preempted_sequences_are_the_youngest_and_wait_first() -> None:
    """They keep their tokens, and wait before later arrivals."""
    scheduler, (a, b, c) = under_pressure()
    d = add(scheduler, fresh(4))
    assert step(scheduler) == [(a, 1)]
    assert list(scheduler.waiting) == [b, c, d]
    assert scheduler.num_preemptions == 2
    for seq in (b, c):
        assert (seq.status, seq.block_table) == (SequenceStatus.WAITING, [])
        assert seq.output_token_ids == [TOKEN]
    drain(scheduler)
    assert [seq.output_token_ids for seq in (a, b, c)] == [[TOKEN] * 3] * 3


def test_no_more_sequences_are_preempted_than_needed() -> None:
    """A sequence with room in its block goes on."""
    scheduler = make_scheduler(num_blocks=3)
    a, b, c = add(scheduler, fresh(4)), add(scheduler, fresh(2)), add(scheduler, fresh(3))
    step(scheduler)
    assert step(scheduler) == [(a, 1), (b, 1)]
    assert (list(scheduler.waiting), len(a.block_table)) == ([c], 2)


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    """Blocks that were not evicted meanwhile are hits, which are not reported as such."""
    scheduler, (a, b, c) = under_pressure()
    block = b.block_table[0]
    assert step(scheduler) == [(a, 1)]
    assert step(scheduler) == [(a, 1)]
    assert a.finish_reason == "length"
    assert step(scheduler) == [(b, 1)]  # the block of C was the first to be evicted
    assert b.block_table[0] == block
    assert (b.output_token_ids, b.num_hit_tokens) == ([TOKEN] * 2, 0)
    drain(scheduler)
    assert c.output_token_ids == [TOKEN] * 3


def test_a_preempted_sequence_is_prefilled_in_chunks() -> None:
    """Prompt and output are computed again."""
    scheduler = make_scheduler(max_num_batched_tokens=4, enable_prefix_caching=False)
    seq = add(scheduler, fresh(6))
    for _ in range(5):
        step(scheduler)
    assert seq.output_token_ids == [TOKEN] * 4
    scheduler.preempt(scheduler.running[-1])
    assert [step(scheduler, *tokens) for tokens in ([], [], [51])] == [
        [(seq, 4)], [(seq, 4)], [(seq, 2)]
    ]  # fmt: skip
    assert seq.output_token_ids == [*[TOKEN] * 4, 51]


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("prompt_len", [1, 9, 15])
def test_a_request_as_large_as_the_pool(block_size: int, prompt_len: int) -> None:
    """Three of them run one after the other."""
    scheduler = make_scheduler(16 // block_size, block_size)
    seqs = [add(scheduler, fresh(prompt_len), max_model_len=16, max_tokens=1000) for _ in range(3)]
    drain(scheduler)
    assert [(seq.num_tokens, seq.finish_reason) for seq in seqs] == [(16, "length")] * 3


def test_block_size_one() -> None:
    """Every token fills a block and needs a new one."""
    scheduler = make_scheduler(num_blocks=8, block_size=1)
    prompt = fresh(3)
    a = add(scheduler, prompt, max_tokens=3)
    assert step(scheduler) == [(a, 3)]
    b = add(scheduler, prompt, max_tokens=5)
    assert step(scheduler) == [(b, 1)]
    assert (b.num_hit_tokens, scheduler.block_manager.num_free_blocks) == (2, 4)
    assert step(scheduler) == [(a, 1), (b, 1)]
    assert (a.block_table[:2], len(a.block_table)) == (b.block_table[:2], 4)
    assert step(scheduler) == [(a, 1), (b, 1)]  # the last two of the pool
    assert a.finish_reason == "length"
    drain(scheduler)
    assert b.output_token_ids == [TOKEN] * 5


# Windows


def test_sequences_hold_the_blocks_of_their_window_only() -> None:
    """Eight sequences of 200 tokens hold 40 blocks, not 400."""
    scheduler = make_scheduler(num_blocks=44, window=15)
    seqs = [add(scheduler, fresh(8), max_model_len=200, max_tokens=192) for _ in range(8)]
    for _ in range(150):
        step(scheduler)
    assert all(len(seq.held_blocks) in (4, 5) for seq in seqs)  # 15 tokens that begin anywhere
    assert scheduler.num_preemptions == 0
    drain(scheduler)
    assert all(seq.num_tokens == 200 for seq in seqs)


def test_requests_whose_windows_fit_run_together() -> None:
    """Four sequences of 200 tokens would need 200 blocks without a window."""
    scheduler = make_scheduler(num_blocks=44, window=15)
    seqs = [add(scheduler, fresh(100), max_model_len=200, max_tokens=100) for _ in range(4)]
    for _ in range(8):
        step(scheduler)
    assert all(seq.status is SequenceStatus.RUNNING for seq in seqs)
    drain(scheduler)
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [3, 16, 1000])
@pytest.mark.parametrize("num_blocks", [4, 5, 9])
def test_with_a_window_a_request_may_be_longer_than_the_pool(
    num_blocks: int, budget: int, overlap: bool
) -> None:
    """4 blocks hold a window and the next token."""
    scheduler = make_scheduler(num_blocks, window=10, max_num_batched_tokens=budget)
    seqs = [add(scheduler, fresh(150), max_model_len=300, max_tokens=150) for _ in range(2)]
    if not overlap:
        drain(scheduler)
    before = None
    while not scheduler.is_finished():
        batch = scheduler.schedule()
        if batch is not None:
            scheduler.advance(batch)
            audit_scheduler(scheduler)
        if before is not None:
            scheduler.postprocess(before, [TOKEN] * len(before.sampling_seqs))
        before = batch
    assert [seq.num_tokens for seq in seqs] == [300, 300]
    assert scheduler.num_preemptions <= 1, "as many as the pool can hold run"


def test_with_a_window_chunks_fill_the_free_blocks() -> None:
    """The prompt neither waits for room for all of it, nor gets one block in each step."""
    scheduler = make_scheduler(num_blocks=12, window=9, max_num_batched_tokens=1000)
    a = add(scheduler, fresh(100), max_model_len=101, max_tokens=1)
    chunks = [step(scheduler)[0][1] for _ in range(3)]
    # 12 blocks; then those that token 48 does not see, 0 to 9; then 0 to 9 of the next ones.
    assert chunks == [48, 40, 12]
    assert a.finish_reason == "length"


def test_a_chunk_may_preempt_a_sequence_of_the_same_batch() -> None:
    """In a mixed step it leaves the batch; else a waiting sequence would be computed."""
    scheduler = make_scheduler(
        14, 1, window=5, max_num_batched_tokens=8, scheduling="mixed", enable_prefix_caching=False
    )
    young = [add(scheduler, [1], max_tokens=13, priority=1) for _ in range(2)]
    step(scheduler)
    old = add(scheduler, fresh(20), max_model_len=40, max_tokens=3)
    for _ in range(3):
        assert step(scheduler)[-1][0] is old
    batch = scheduler.schedule()
    assert [(seq, seq.num_scheduled_tokens) for seq in batch.seqs] == [(young[0], 1), (old, 5)]
    assert batch.num_decodes == 1 and young[1].status is SequenceStatus.WAITING
    scheduler.postprocess(batch, [TOKEN] * len(batch.sampling_seqs))
    drain(scheduler)


# How a request ends


@pytest.mark.parametrize(
    ("params", "max_model_len", "sampled", "reason", "stop_reason"),
    [
        ({"max_tokens": 1}, 100, [5], "length", None),
        ({"max_tokens": 3}, 100, [5, 6, 7], "length", None),
        ({"max_tokens": 9}, 5, [5, 6], "length", None),
        ({"max_tokens": 9}, 4, [5], "length", None),
        ({"max_tokens": 9}, 100, [5, EOS], "stop", None),
        ({"max_tokens": 9, "stop_token_ids": [7, 8]}, 100, [5, 8], "stop", 8),
        ({"max_tokens": 9, "stop_token_ids": [7, 8]}, 100, [5, EOS], "stop", None),
        ({"max_tokens": 2}, 100, [5, EOS], "stop", None),
        ({"max_tokens": 1}, 100, [EOS], "stop", None),
        ({"max_tokens": 2, "stop_token_ids": [8]}, 100, [5, 8], "stop", 8),
        ({"max_tokens": 9}, 5, [5, EOS], "stop", None),
        ({"max_tokens": 3, "ignore_eos": True}, 100, [EOS, EOS, EOS], "length", None),
        ({"max_tokens": 9, "ignore_eos": True, "stop_token_ids": [8]}, 100, [EOS, 8], "stop", 8),
        ({"max_tokens": 9, "ignore_eos": True, "stop_token_ids": [EOS]}, 100, [EOS], "stop", EOS),
    ],
)
def test_how_a_request_ends(
    params: dict[str, Any], max_model_len: int, sampled: list[int], reason: str, stop_reason: Any
) -> None:
    """A stop on the last allowed token is "stop", with the id that stopped."""
    scheduler = make_scheduler()
    seq = add(scheduler, [EOS, 8, 3], max_model_len, **params)
    for index, token_id in enumerate(sampled):
        assert (seq.finish_reason, seq.output_token_ids) == (None, sampled[:index])
        step(scheduler, token_id)
    assert (seq.finish_reason, seq.stop_reason) == (reason, stop_reason)
    assert (seq.status, seq.output_token_ids) == (SequenceStatus.FINISHED, sampled)
    assert scheduler.is_finished()
    assert scheduler.block_manager.num_free_blocks == 100


def test_postprocess_returns_and_removes_finished_sequences() -> None:
    """The others stay in `running`."""
    scheduler = make_scheduler()
    a, b, c = (add(scheduler, fresh(3)) for _ in range(3))
    batch = scheduler.schedule()
    assert scheduler.postprocess(batch, [5, EOS, 5]) == [b]
    assert list(scheduler.running) == [a, c]
    batch = scheduler.schedule()
    assert scheduler.postprocess(batch, [EOS, EOS]) == [a, c]
    assert scheduler.is_finished()


# Abort


def waiting(scheduler: Scheduler) -> Sequence:
    for _ in range(2):
        add(scheduler, fresh(3))
    step(scheduler)
    return add(scheduler, fresh(3))


def running(scheduler: Scheduler) -> Sequence:
    seqs = [add(scheduler, fresh(3)) for _ in range(3)]
    for _ in range(3):
        step(scheduler)
    return seqs[1]


def mid_chunk(scheduler: Scheduler) -> Sequence:
    add(scheduler, fresh(5))
    seq = add(scheduler, fresh(20))
    step(scheduler)
    assert 0 < seq.num_cached_tokens < 20
    return seq


def preempted(scheduler: Scheduler) -> Sequence:
    seq = running(scheduler)
    scheduler.preempt(scheduler.running[-1])
    scheduler.preempt(scheduler.running[-1])
    assert scheduler.waiting[0] is seq
    return seq


def interrupted(scheduler: Scheduler) -> Sequence:
    seq = running(scheduler)
    interrupt(scheduler)
    return seq


@pytest.mark.parametrize("state", [waiting, running, mid_chunk, preempted, interrupted])
def test_abort_frees_blocks_wherever_a_sequence_is(state: Callable[[Scheduler], Sequence]) -> None:
    """In any state: its blocks are freed, and it does not run any more."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    seq = state(scheduler)
    others = {other for other in (*scheduler.waiting, *scheduler.running) if other is not seq}
    num_tokens = seq.num_tokens
    scheduler.abort(seq)
    audit_scheduler(scheduler)
    assert (seq.status, seq.finish_reason, seq.stop_reason) == (
        SequenceStatus.FINISHED, "abort", None
    )  # fmt: skip
    assert (seq.num_tokens, seq.block_table) == (num_tokens, [])
    assert {*scheduler.waiting, *scheduler.running} == others
    drain(scheduler)
    assert {other.finish_reason for other in others} == {"length"}
    assert seq.num_tokens == num_tokens


def test_aborting_one_of_two_that_share_a_prefix() -> None:
    """The shared blocks stay."""
    scheduler = make_scheduler(num_blocks=6)
    prompt = fresh(9)
    a = add(scheduler, prompt)
    step(scheduler)
    b = add(scheduler, prompt)
    step(scheduler)
    assert (a.block_table[:2], scheduler.block_manager.num_free_blocks) == (b.block_table[:2], 2)
    scheduler.abort(a)
    audit_scheduler(scheduler)
    assert scheduler.block_manager.num_free_blocks == 3
    drain(scheduler)


def test_no_length_is_learnt_from_aborted_requests() -> None:
    """They would have gone on: only those that ended by themselves tell how long others get."""
    scheduler = make_scheduler()
    seqs = [add(scheduler, fresh(3)) for _ in range(MIN_ENDED)]
    for _ in range(5):
        step(scheduler)
    scheduler.abort(*seqs)
    assert scheduler.lengths.steps_left(add(scheduler, fresh(3))) == 1, "no length is known"


def test_a_cleared_cache_gets_no_block_of_running_sequences() -> None:
    """A part of it was computed before, maybe with other weights."""
    scheduler = make_scheduler()
    seq = add(scheduler, prompt := fresh(3))
    step(scheduler)
    scheduler.clear_cache()
    for _ in range(6):
        step(scheduler)
    assert len(seq.block_table) == 3
    later = add(scheduler, [*prompt, *seq.output_token_ids])
    assert step(scheduler) == [(later, 10)]
    assert later.num_hit_tokens == 0
    drain(scheduler)


# A step that was scheduled but not postprocessed


def test_an_interrupted_prefill_is_done_again() -> None:
    """With the same blocks, the same tokens and the same budget."""
    scheduler = make_scheduler(max_num_batched_tokens=12)
    a, b = add(scheduler, fresh(4)), add(scheduler, fresh(5))
    assert interrupt(scheduler) == [(a, 4), (b, 5)]
    tables, num_free = [a.block_table, b.block_table], scheduler.block_manager.num_free_blocks
    assert interrupt(scheduler) == [(a, 4), (b, 5)]
    assert [a.block_table, b.block_table] == tables
    assert scheduler.block_manager.num_free_blocks == num_free == 97
    c = add(scheduler, fresh(6))
    assert step(scheduler) == [(a, 4), (b, 5), (c, 3)]
    assert step(scheduler) == [(c, 3)]
    assert [seq.output_token_ids for seq in (a, b, c)] == [[TOKEN]] * 3
    drain(scheduler)


def test_an_interrupted_prefill_publishes_nothing() -> None:
    """The next request with the same prompt must not hit KV that was never computed."""
    scheduler = make_scheduler()
    prompt = fresh(9)
    a = add(scheduler, prompt)
    interrupt(scheduler)
    scheduler.abort(a)
    b = add(scheduler, prompt)
    assert step(scheduler) == [(b, 9)]
    assert b.num_hit_tokens == 0


def test_an_interrupted_chunk_is_done_again() -> None:
    """A chunk counts as cached when it is computed, not when it is scheduled."""
    scheduler = make_scheduler(max_num_batched_tokens=4)
    seq = add(scheduler, fresh(10))
    assert step(scheduler) == [(seq, 4)]
    assert interrupt(scheduler) == [(seq, 4)]
    assert step(scheduler) == [(seq, 4)]
    assert seq.num_cached_tokens == 8
    assert step(scheduler) == [(seq, 2)]
    assert seq.output_token_ids == [TOKEN]


def test_an_interrupted_prefill_with_one_token_left_is_done_again() -> None:
    """All but its last token are cached, as for a decoding sequence."""
    scheduler = make_scheduler()
    prompt = fresh(9)
    a = add(scheduler, prompt)
    step(scheduler)
    b = add(scheduler, prompt)
    assert interrupt(scheduler) == [(b, 1)]
    assert step(scheduler, 51, 52) == [(a, 1), (b, 1)]
    assert (a.output_token_ids, b.output_token_ids) == ([TOKEN, 51], [52])
    drain(scheduler)


def test_an_interrupted_decode_is_done_again() -> None:
    """The attempts append one block, and no token."""
    scheduler = make_scheduler()
    a, b = add(scheduler, fresh(4)), add(scheduler, fresh(6))
    step(scheduler)
    for _ in range(3):
        assert interrupt(scheduler) == [(a, 1), (b, 1)]
        assert (len(a.block_table), len(b.block_table)) == (2, 2)
    c = add(scheduler, fresh(5))
    assert step(scheduler) == [(c, 5)]
    assert step(scheduler) == [(a, 1), (b, 1), (c, 1)]
    assert [seq.num_tokens for seq in (a, b, c)] == [6, 8, 7]
    drain(scheduler)


def test_an_interrupted_preemption_is_harmless() -> None:
    """The preempted sequences run later, to the same result."""
    scheduler, (a, b, c) = under_pressure()
    assert interrupt(scheduler) == [(a, 1)]
    assert list(scheduler.waiting) == [b, c]
    assert step(scheduler) == [(a, 1)]
    drain(scheduler)
    assert [seq.output_token_ids for seq in (a, b, c)] == [[TOKEN] * 3] * 3


@pytest.mark.parametrize("num_steps", range(6))
def test_aborting_everything_after_an_interrupted_step(num_steps: int) -> None:
    """As `generate` does on Ctrl-C: all blocks are free again."""
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=6, max_num_seqs=3)
    seqs = [add(scheduler, fresh(5)) for _ in range(4)]
    for _ in range(num_steps):
        step(scheduler)
    interrupt(scheduler)
    for seq in seqs:
        scheduler.abort(seq)
        audit_scheduler(scheduler)
    assert scheduler.is_finished()
    assert scheduler.block_manager.num_free_blocks == 6
    again = add(scheduler, fresh(5))
    assert step(scheduler) == [(again, 5)]


def test_a_token_that_completes_a_stop_is_sampled_again_after_an_interrupt() -> None:
    """It was appended, but did not end its sequence: else that would get one more token."""
    scheduler = make_scheduler()
    seq = add(scheduler, fresh(3), stop="b")
    tokenizer = byte_tokenizer()
    seq.followers = (TextUntilStop(tokenizer, seq.params),)
    a, b = tokenizer.encode("ab")
    step(scheduler, a)
    interrupt(scheduler)
    seq.token_ids.append(b)
    scheduler.restart([seq])
    assert seq.output_token_ids == [a]
    step(scheduler, b)
    assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == ([a, b], "stop", "b")


class Interrupter:
    """A tracer that raises KeyboardInterrupt before the n-th line of the scheduler side."""

    def __init__(self, num_lines: int) -> None:
        self.num_lines = num_lines

    def __call__(self, frame: FrameType, event: str, arg: object) -> "Interrupter | None":
        if not frame.f_globals.get("__name__", "").startswith("nanovllm.engine."):
            return None
        if event == "line":
            self.num_lines -= 1
            if self.num_lines == 0:
                raise KeyboardInterrupt
        return self


class NextTokens(RandomProposer):
    """The tokens of `run_with_an_interrupt`: right drafts, except for the last one, and EOS."""

    def guess(self, seq: Sequence, most: int) -> list[int]:
        return [100 + seq.num_tokens + place for place in range(most - 1)] + [0]


def run_with_an_interrupt(num_lines: int, drafts: bool) -> tuple[bool, list[Any]]:
    """Run four requests in a small pool; return whether the interrupt came, and how each ended."""
    scheduler = make_scheduler(5, 2, max_num_batched_tokens=7, max_num_seqs=3)
    if drafts:
        scheduler.drafting = HostDrafting(NextTokens(0, 0), 3, Eager)
    prompt = [11, 12, 13]
    asked = [{"max_tokens": 3}, {"max_tokens": 9}, {"stop_token_ids": [106]}, {"max_tokens": 1}]
    live = [add(scheduler, [*prompt, 20 + n], **params) for n, params in enumerate(asked)]
    seqs, tracer, interrupted = list(live), Interrupter(num_lines), False
    while not scheduler.is_finished():
        sys.settrace(tracer)
        try:
            batch = scheduler.schedule()
            # A token is 100 and its position; the second sequence ends with EOS.
            draws = zip(batch.sampling_seqs, batch.offsets, strict=True)
            places = [(seq, seq.num_tokens + offset) for seq, offset in draws]
            tokens = [
                EOS if seq is seqs[1] and place == 8 else 100 + place for seq, place in places
            ]
            scheduler.postprocess(batch, tokens)
        except KeyboardInterrupt:
            sys.settrace(None)
            interrupted = True
            scheduler.restart([s for s in live if s.status is not SequenceStatus.FINISHED])
        sys.settrace(None)
        live = [seq for seq in live if seq.status is not SequenceStatus.FINISHED]
        audit_scheduler(scheduler)
    assert scheduler.block_manager.num_free_blocks == 5
    return interrupted, [(s.output_token_ids, s.finish_reason, s.stop_reason) for s in seqs]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
def test_an_interrupt_before_any_line_changes_no_result(drafts: bool) -> None:
    """Ctrl-C in `schedule` or `postprocess`: blocks, queues, stops and reasons stay right."""
    _, expected = run_with_an_interrupt(0, drafts)
    assert expected == [
        ([104, 105, 106], "length", None),
        ([104, 105, 106, 107, EOS], "stop", None),
        ([104, 105, 106], "stop", 106),
        ([104], "length", None),
    ]
    # A third of the lines, others for each commit; all of them with --all.
    first, stride = (1, 1) if selection.everything else (1 + selection.NUMBER % 3, 3)
    for num_lines in itertools.count(first, stride):
        interrupted, result = run_with_an_interrupt(num_lines, drafts)
        assert result == expected, f"interrupted before line {num_lines}"
        if not interrupted:
            break


# Drafts


def with_drafts(drafts: int, **options: Any) -> Scheduler:
    """A scheduler whose sequences get `TOKEN` as many times, and more than fit if asked for."""

    class Same(RandomProposer):
        def guess(self, seq: Sequence, most: int) -> list[int]:
            return [TOKEN] * most

    scheduler = make_scheduler(**options)
    scheduler.drafting = HostDrafting(Same(0, 0), drafts, Eager)
    return scheduler


def test_right_drafts_are_followed_by_one_more_token() -> None:
    scheduler = with_drafts(3)
    seq = add(scheduler, fresh(2), max_tokens=20)
    assert scheduler.schedule().drafts == {}, "a prompt's first token comes without"
    step(scheduler)
    batch = scheduler.schedule()
    assert (batch.drafts, batch.sampling_seqs) == ({seq: [TOKEN] * 3}, [seq] * 4)
    assert (batch.is_prefill, batch.num_decodes) == (False, 1)
    scheduler.postprocess(batch, [TOKEN, TOKEN, TOKEN, 51])
    assert seq.output_token_ids == [TOKEN, TOKEN, TOKEN, TOKEN, 51]
    batch = scheduler.schedule()
    scheduler.postprocess(batch, [TOKEN, 52, TOKEN, TOKEN])
    assert seq.output_token_ids[5:] == [TOKEN, 52], "nothing after the first wrong draft"
    audit_scheduler(scheduler)


def test_a_stop_ends_the_accepted_drafts() -> None:
    scheduler = with_drafts(4)
    seq = add(scheduler, fresh(3), stop_token_ids=[TOKEN], min_tokens=0, max_tokens=20)
    step(scheduler, 60)
    batch = scheduler.schedule()
    assert scheduler.postprocess(batch, [TOKEN] * 5) == [seq]
    assert (seq.output_token_ids, seq.stop_reason) == ([60, TOKEN], TOKEN)
    assert scheduler.block_manager.num_free_blocks == 100


def test_drafts_take_only_blocks_that_nothing_else_needs() -> None:
    """The second sequence is not preempted, and after the step the pool is as without drafts."""
    scheduler = with_drafts(9, num_blocks=5, block_size=2)
    a, b = add(scheduler, fresh(4), max_tokens=6), add(scheduler, fresh(3), max_tokens=6)
    step(scheduler)
    batch = scheduler.schedule()
    assert [len(seq.block_table) for seq in (a, b)] == [3, 2]
    assert {seq: len(drafts) for seq, drafts in batch.drafts.items()} == {a: 1}
    scheduler.postprocess(batch, [1] * len(batch.sampling_seqs))
    assert scheduler.num_preemptions == 0
    scheduler = with_drafts(3, num_blocks=6, block_size=2)
    seq = add(scheduler, fresh(4), max_tokens=8)
    step(scheduler)
    batch = scheduler.schedule()
    assert len(seq.block_table) == 4
    scheduler.postprocess(batch, [1] * 4)
    assert (len(seq.block_table), scheduler.block_manager.num_free_blocks) == (3, 3)


def test_drafts_take_only_the_budget_that_is_left() -> None:
    scheduler = with_drafts(9, max_num_batched_tokens=8, scheduling="mixed")
    a = add(scheduler, fresh(3), max_tokens=30)
    step(scheduler)
    b = add(scheduler, fresh(5), max_tokens=30)
    batch = scheduler.schedule()
    assert batch.seqs == [a, b] and len(batch.drafts[a]) == 2
    assert batch.sampling_seqs == [a, a, a, b]
    scheduler.postprocess(batch, [TOKEN, 1, 1, 1])
    assert (a.output_token_ids[1:], b.output_token_ids) == ([TOKEN, 1], [1])


def test_blocks_of_accepted_drafts_are_found_by_later_requests() -> None:
    scheduler = with_drafts(5, block_size=2)
    seq = add(scheduler, fresh(2), max_tokens=20)
    step(scheduler)
    scheduler.postprocess(scheduler.schedule(), [TOKEN, TOKEN, 7, TOKEN, TOKEN, TOKEN])
    assert seq.num_cached_tokens == 5
    later = add(scheduler, [*seq.token_ids, 8, 9])
    scheduler.schedule()
    assert later.num_hit_tokens == 4, "not the block with a wrong draft"
