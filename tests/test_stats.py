"""The engine's counts, and the times of its requests."""

import time
from pathlib import Path

import pytest
from drafts import Adversary, speculate
from reference import SMALL_POOL, make_llm, make_prompts

from nanovllm import SamplingParams
from nanovllm.engine.requests.measures import StepCounter

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_counts_by_hand(model_dir: Path) -> None:
    """Blocks of 4; the second prompt hits two blocks of the first."""
    with make_llm(model_dir, kvcache_block_size=4, num_kvcache_blocks=150) as llm:
        assert set(llm.stats().values()) == {0, 150} and llm.stats().cache_usage == 0
        llm.generate([1] * 9, GREEDY, use_tqdm=False)
        llm.add_request([*[1] * 8, 2, 3], GREEDY)
        llm.add_request([5, 6, 7], GREEDY)
        assert (llm.stats()["num_waiting"], llm.stats()["num_running"]) == (2, 0)
        llm.step()
        third = llm.add_request([8], GREEDY)
        assert llm.stats() == dict(
            num_waiting=1, num_running=2, num_finished=1, num_aborted=0, num_preemptions=0,
            prefill_tokens=9 + 2 + 3, decode_tokens=7, drafted_tokens=0,
            accepted_tokens=0, prefix_cache_queries=9 + 10 + 3,
            prefix_cache_hits=8, blocks_used=3 + 1, num_blocks=150,
            state_slots_used=0, checkpoints_used=0, num_state_slots=0,
        )  # fmt: skip
        assert llm.stats().cache_usage == 4 / 150
        llm.abort_request(third)
        while not llm.is_finished():
            llm.step()
        stats = llm.stats()
        assert (stats["num_finished"], stats["num_aborted"], stats["blocks_used"]) == (3, 1, 0)
        assert stats["decode_tokens"] == 3 * 7


def test_accepted_drafts_count_as_decoded(model_dir: Path) -> None:
    """Rejected ones are no tokens. The first output shows which drafts are right."""
    prompt = [1, 2, 3]
    with make_llm(model_dir) as llm:
        (out,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        before = llm.stats()
        drafting = speculate(llm, Adversary(1, 259, {((1, 2, 3), 0): out.token_ids}))
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].token_ids == out.token_ids
        stats = llm.stats()
        assert stats.decode_tokens - before.decode_tokens == 7
        assert stats.drafted_tokens == drafting.num_drafted
        assert 0 < stats.accepted_tokens == sum(drafting.accepted_at) < stats.drafted_tokens
        assert 1 < llm.counter.tokens_per_step(StepCounter()) < 6


def test_preemptions_are_counted(model_dir: Path) -> None:
    with make_llm(model_dir, **SMALL_POOL) as llm:
        llm.generate(make_prompts(), GREEDY, use_tqdm=False)
        stats = llm.stats()
        assert stats["num_preemptions"] == llm.scheduler.num_preemptions > 0
        assert stats["num_finished"] == len(make_prompts())
        assert stats["prefix_cache_queries"] == sum(map(len, make_prompts())), (
            "a preempted prompt was counted again"
        )


def test_times_of_two_requests_in_turn(model_dir: Path) -> None:
    """The second request waits until the first has finished."""
    with make_llm(model_dir, max_num_seqs=1) as llm:
        start = time.perf_counter()
        asked = [llm.add_request(prompt, GREEDY) for prompt in ([1, 2, 3], [4])]
        asking = time.perf_counter() - start  # the second one has come so much later at most
        outputs = {}
        while not llm.is_finished():
            outputs |= {out["request_id"]: out["metrics"] for out in llm.step()}
        first, second = (outputs[request_id] for request_id in asked)
        seconds = time.perf_counter() - start
    for metrics in (first, second):
        queue, token, each, end, prefill, decode, preemptions = metrics.values()
        assert preemptions == 0 and queue + prefill == pytest.approx(token)
        assert token + decode == pytest.approx(end)
        assert queue is not None and token is not None and each is not None
        assert 0 <= queue < token < end <= seconds
        assert token + 7 * each == pytest.approx(end)
    assert second["queue_time"] + asking >= first["end_to_end_time"]  # type: ignore[operator]


def test_a_request_that_never_ran_has_no_times(model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        metrics = llm.abort_request(llm.add_request([1], GREEDY))["metrics"]
        assert [*metrics.values()][:3] == [None] * 3
        (out,) = llm.generate([1], SamplingParams(max_tokens=1), use_tqdm=False)
        assert out["metrics"]["time_per_output_token"] is None


@pytest.mark.parametrize("scheduling", ["prefill-first", "mixed"])
def test_a_prompt_that_ends_in_a_decode_step_has_a_first_token(
    scheduling: str, model_dir: Path
) -> None:
    """Its last chunk has one token."""
    options = dict(max_num_batched_tokens=16, scheduling=scheduling)
    with make_llm(model_dir, **options) as llm:
        (out,) = llm.generate([3] * 17, GREEDY, use_tqdm=False)
    assert out["metrics"]["time_to_first_token"] and out["metrics"]["time_per_output_token"]
