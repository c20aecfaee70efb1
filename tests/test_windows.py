"""Models with a sliding window in every layer: blocks behind the window are freed, and not read.

It costs more than 20 seconds: transformers computes each model's answers, to long prompts.
"""

from typing import Any

import pytest
from conftest import make_model
from reference import (
    Case,
    assert_same,
    audit_at_rest,
    check_freed_blocks,
    check_hits,
    check_preemptions,
    check_samples,
    generate,
    make_case,
    make_llm,
    make_some_prompts,
)

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

WINDOW = 21
# 21 tokens are in at most 6 blocks of 4; the longest request has 224 tokens, in 56 blocks.
TINY: dict[str, Any] = dict(kvcache_block_size=4, num_kvcache_blocks=6)
SMALL: dict[str, Any] = dict(kvcache_block_size=4, num_kvcache_blocks=18)

SCENARIOS: dict[str, dict[str, Any]] = {
    "tiny pool": TINY,
    "tiny pool, plain PyTorch": dict(TINY, attention_backend="torch"),
    "tiny pool, budget 5": dict(TINY, max_num_batched_tokens=5),
    "tiny pool, overlap": dict(TINY, overlap=True),
    "tiny pool, overlap, no prefix cache": dict(TINY, overlap=True, enable_prefix_caching=False),
    "small pool": SMALL,
    "small pool, plain PyTorch": dict(SMALL, attention_backend="torch"),
    "small pool, budget 16": dict(SMALL, max_num_batched_tokens=16),
    "small pool, budget 16, plain PyTorch": dict(
        SMALL, max_num_batched_tokens=16, attention_backend="torch"
    ),
    "small pool, overlap": dict(SMALL, overlap=True),
    "small pool, mixed": dict(SMALL, scheduling="mixed", max_num_batched_tokens=30),
    "small pool, mixed, overlap": dict(
        SMALL, scheduling="mixed", max_num_batched_tokens=30, overlap=True
    ),
    "blocks of 1": dict(kvcache_block_size=1, num_kvcache_blocks=60, max_num_batched_tokens=32),
    "blocks of 1, tiny pool": dict(kvcache_block_size=1, num_kvcache_blocks=21),
    "blocks of 16": dict(kvcache_block_size=16, num_kvcache_blocks=6, max_num_batched_tokens=50),
    "blocks of 32, more than a window": dict(
        kvcache_block_size=32, num_kvcache_blocks=3, max_num_batched_tokens=50
    ),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Prompts of up to 200 tokens, and 24 tokens of output each."""
    path = tmp_path_factory.mktemp("windows")
    make_model(path, family="Mistral", seed=1, sliding_window=WINDOW, num_hidden_layers=3)
    return make_case(path, make_some_prompts())


def pool_tokens(llm: LLM) -> int:
    return llm.scheduler.num_blocks * llm.scheduler.block_size


@pytest.mark.sampled(share=0.4)
@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_freeing_blocks_behind_the_window_keeps_the_output_with(name: str, case: Case) -> None:
    """The longest requests are two to nine times as long as the pool."""
    with make_llm(case.path, **SCENARIOS[name]) as llm:
        assert llm.config.max_model_len == 512 and pool_tokens(llm) <= 96
        assert_same(generate(llm, case), case.expected)
        audit_at_rest(llm)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, dict(enforce_eager=True), dict(attention_backend="torch")])
def test_freeing_blocks_behind_the_window_keeps_the_output_on_a_device(
    options: dict[str, Any], case: Case
) -> None:
    """Steps overlap there: a freed block may have a new owner while a table still names it."""
    with make_llm(case.path, device="cuda", **SMALL, **options) as llm:
        assert_same(generate(llm, case), case.expected)
        audit_at_rest(llm)


@pytest.mark.sampled(share=1 / 3)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(overlap=True), dict(enable_prefix_caching=False)])
def test_preemptions_keep_the_output(options: dict[str, Any], case: Case) -> None:
    """Preempted sequences are computed again, shorter and longer than the window."""
    check_preemptions(case, 100, **SMALL, **options, max_num_batched_tokens=64)


def test_hits_behind_the_window_keep_the_output(case: Case) -> None:
    """In a pool that holds everything, so that freed blocks are still cached."""
    check_hits(case, kvcache_block_size=4, num_kvcache_blocks=3000)


@pytest.mark.slow
@pytest.mark.parametrize("options", [SMALL, dict(SMALL, overlap=True, max_num_batched_tokens=16)])
def test_greedy_samples_of_a_prompt_are_equal(options: dict[str, Any], case: Case) -> None:
    """They share the prompt's blocks in the window, and copy its last block."""
    check_samples(case, **options)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("budget", [16, 16384])
def test_freed_blocks_are_never_read(budget: int, case: Case) -> None:
    check_freed_blocks(case, **SMALL, attention_backend="cpu", max_num_batched_tokens=budget)


def test_blocks_in_use_do_not_grow_with_the_context(case: Case) -> None:
    """Four sequences of 400 tokens hold a window each, not 100 blocks."""
    params = SamplingParams(temperature=0, max_tokens=390, ignore_eos=True)
    with make_llm(case.path, kvcache_block_size=4, num_kvcache_blocks=400) as llm:
        for start in range(4):
            llm.add_request([start] * 10, params)
        used = []
        while not llm.is_finished():
            llm.step()
            used.append(llm.stats()["blocks_used"])
        assert max(used) == 4 * 6


def test_a_pool_smaller_than_the_window_bounds_the_length(case: Case) -> None:
    """Five blocks hold 20 tokens, one less than the window."""
    with make_llm(case.path, kvcache_block_size=4, num_kvcache_blocks=5) as llm:
        assert llm.config.max_model_len == 20
        (out,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=99, ignore_eos=True))
        assert len(out["token_ids"]) == 17
    refusal = "max_model_len=22 does not fit.*; 6 blocks are enough for any length"
    with pytest.raises(ValueError, match=refusal):
        make_llm(case.path, kvcache_block_size=4, num_kvcache_blocks=5, max_model_len=22)
