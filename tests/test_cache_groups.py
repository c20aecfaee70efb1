"""Models with full attention in some layers and windows in the others: each kind has own blocks.

It costs more than 20 seconds: transformers computes the answers, to long prompts.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from families.gemma import PUBLISHED
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
    make_prompts,
)

from nanovllm import LLM, SamplingParams
from nanovllm.engine.cache.divide import divide
from nanovllm.engine.cache.windows import WindowedBlocks
from nanovllm.models.config import ModelConfig
from nanovllm.models.parts import build_model

most_held = WindowedBlocks.most_held
pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

WINDOW = 21
FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = [SLIDING] * 3 + [FULL] + [SLIDING] * 2
# Each layer is a group, and has the option's number of blocks. The longest request has 224 tokens:
# 56 blocks of 4 of the full layer, and 6 of each other layer.
SMALLEST: dict[str, Any] = dict(kvcache_block_size=4, num_kvcache_blocks=15)
SMALL: dict[str, Any] = dict(kvcache_block_size=4, num_kvcache_blocks=26)
NGRAMS = dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=2)

SCENARIOS: dict[str, dict[str, Any]] = {
    "a pool for everything": {},
    "the smallest pool": SMALLEST,
    "the smallest pool, budget 5": dict(SMALLEST, max_num_batched_tokens=5),
    "the smallest pool, plain PyTorch": dict(SMALLEST, attention_backend="torch"),
    "small pool": SMALL,
    "small pool, no prefix cache": dict(SMALL, enable_prefix_caching=False),
    "small pool, budget 16, overlap": dict(SMALL, max_num_batched_tokens=16, overlap=True),
    "small pool, mixed, overlap": dict(
        SMALL, scheduling="mixed", max_num_batched_tokens=30, overlap=True
    ),
    "blocks of 1": dict(kvcache_block_size=1, num_kvcache_blocks=70, max_num_batched_tokens=32),
    "blocks of 16": dict(kvcache_block_size=16, num_kvcache_blocks=7, max_num_batched_tokens=50),
    "n-grams": dict(speculative_config=NGRAMS),
    "n-grams in the table": dict(SMALL, speculative_config=NGRAMS, attention_backend="torch"),
    "n-grams, small pool, overlap": dict(SMALL, speculative_config=NGRAMS, overlap=True),
    "two ranks, small pool": dict(SMALL, tensor_parallel_size=2),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Prompts of up to 200 tokens, and 24 tokens of output each."""
    path = tmp_path_factory.mktemp("groups")
    make_mixed(path)
    return make_case(path, make_prompts())


def make_mixed(path: Path, **overrides: Any) -> None:
    make_model(
        path, seed=1, use_sliding_window=True, sliding_window=WINDOW,
        num_hidden_layers=len(KINDS), layer_types=KINDS, **overrides,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled(share=0.4)
@pytest.mark.parametrize("name", SCENARIOS)
def test_greedy_output_equals_transformers_with(name: str, case: Case) -> None:
    with make_llm(case.path, **SCENARIOS[name]) as llm:
        assert llm.scheduler.layout.windows == (None, *[WINDOW] * 5)
        assert_same(generate(llm, case), case.expected)
        audit_at_rest(llm)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options",
    [
        {}, dict(enforce_eager=True), dict(attention_backend="torch"), SMALL, SMALLEST,
        dict(SMALL, speculative_config=NGRAMS), dict(SMALL, scheduling="mixed"),
    ],
)  # fmt: skip
def test_greedy_output_equals_transformers_on_a_device(options: dict[str, Any], case: Case) -> None:
    """Steps overlap there: a freed block may have a new owner while a table still names it."""
    with make_llm(case.path, device="cuda", **options) as llm:
        assert_same(generate(llm, case), case.expected)
        audit_at_rest(llm)


@pytest.mark.sampled(share=1 / 3)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(overlap=True), dict(enable_prefix_caching=False)])
def test_preemptions_keep_the_output(options: dict[str, Any], case: Case) -> None:
    """Preempted sequences are computed again, shorter and longer than the window."""
    check_preemptions(case, 100, **SMALL, **options, max_num_batched_tokens=64)


def test_hits_keep_the_output(case: Case) -> None:
    """In a pool that holds everything, so that blocks behind a window are still cached."""
    check_hits(case, kvcache_block_size=4, num_kvcache_blocks=1500)


@pytest.mark.sampled(share=0.5)
@pytest.mark.slow
@pytest.mark.parametrize("options", [SMALL, dict(SMALL, overlap=True, max_num_batched_tokens=16)])
def test_greedy_samples_of_a_prompt_are_equal(options: dict[str, Any], case: Case) -> None:
    """They share the prompt's blocks in all groups, and copy the last one of each."""
    check_samples(case, **options)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("budget", [16, 16384])
def test_freed_blocks_are_never_read(budget: int, case: Case) -> None:
    check_freed_blocks(case, **SMALL, attention_backend="cpu", max_num_batched_tokens=budget)


def test_output_is_the_same_after_sleep(case: Case) -> None:
    with make_llm(case.path, enable_sleep_mode=True, **SMALL) as llm:
        assert_same(generate(llm, case), case.expected)
        llm.sleep()
        llm.wake_up()
        assert_same(generate(llm, case), case.expected)


def test_an_aborted_request_frees_the_blocks_of_all_groups(case: Case) -> None:
    with make_llm(case.path, **SMALL) as llm:
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        ids = [llm.add_request([start] * 60, params) for start in range(3)]
        for _ in range(5):
            llm.step()
        for request_id in ids:
            llm.abort_request(request_id)
        audit_at_rest(llm)


def most_blocks(llm: LLM, length: int) -> int:
    """The most blocks that one request of `length` tokens has had."""
    used = []
    params = SamplingParams(temperature=0, max_tokens=length - 10, ignore_eos=True)
    llm.add_request([1] * 10, params)
    while not llm.is_finished():
        llm.step()
        used.append(llm.stats()["blocks_used"])
    return max(used)


def test_no_block_is_kept_that_no_later_token_reads(case: Case) -> None:
    """500 tokens take 125 blocks of the full layer, and a window of each other layer."""
    with make_llm(case.path, kvcache_block_size=4, num_kvcache_blocks=70) as llm:
        assert most_blocks(llm, 500) == 125 + 5 * most_held(WINDOW, 4)


def tokens_of_pool(path: Path, gib: float, length: int) -> int:
    """How many tokens of sequences of this length a pool holds."""
    with make_llm(path, cpu_kvcache_gib=gib, max_model_len=length) as llm:
        blocks, size = llm.config.num_kvcache_blocks, llm.config.kvcache_block_size
        windows = llm.scheduler.layout.windows
        each = sum(min(-(-length // size), most_held(window, size)) for window in windows)
        return blocks * length // each


def test_a_pool_holds_more_long_sequences(tmp_path: Path) -> None:
    """Five layers with a window of 512 to one without: over 4 times as many at 32,768 tokens."""
    sizes = []
    for name, kinds in (("mixed", KINDS), ("full", [FULL] * 6)):
        make_model(
            tmp_path / name, use_sliding_window=True, sliding_window=512, num_hidden_layers=6,
            layer_types=kinds, max_position_embeddings=32_768,
        )  # fmt: skip
        sizes.append(tokens_of_pool(tmp_path / name, 0.5, 32_768))
    assert sizes[0] > 4 * sizes[1]


def test_a_window_as_long_as_the_longest_sequence_is_none(tmp_path: Path) -> None:
    make_mixed(tmp_path)
    with make_llm(tmp_path, max_model_len=WINDOW) as llm:
        assert llm.scheduler.layout.windows == (None,)


def test_the_pool_of_a_model_with_windows_bounds_its_length(tmp_path: Path) -> None:
    """Each layer with a window takes six blocks, the others go to the one without."""
    make_mixed(tmp_path)
    with make_llm(tmp_path, kvcache_block_size=4, num_kvcache_blocks=10) as llm:
        assert llm.config.max_model_len == 4 * (60 - 5 * 6)
        params = SamplingParams(max_tokens=999, ignore_eos=True)
        (out,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        assert len(out["token_ids"]) == 120 - 3
    with pytest.raises(ValueError, match="max_model_len=121 does not fit"):
        make_llm(tmp_path, kvcache_block_size=4, num_kvcache_blocks=10, max_model_len=121)


def test_a_pool_with_less_than_a_block_for_each_group_is_refused(tmp_path: Path) -> None:
    """Memory for one block of the pool, where a token needs six."""
    make_mixed(tmp_path)
    with make_llm(tmp_path, num_kvcache_blocks=10) as llm:
        block_gib = llm.model_runner.shard.caches.kv.block_bytes / 2**30
    with pytest.raises(ValueError, match="the KV pool has 1 block, too few for 6 groups of layers"):
        make_llm(tmp_path, cpu_kvcache_gib=1.5 * block_gib)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("Gemma 3 ")])
def test_published_models_with_windows_hold_a_quarter_of_the_kv(name: str, tmp_path: Path) -> None:
    """Of a sequence of 32,768 tokens, relative to the same layers without windows."""
    length, size = 32_768, 16
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name].file))
    with torch.device("meta"):
        layers = build_model(ModelConfig.from_dir(tmp_path), 16).attentions
    groups = divide(layers, length)
    blocks = sum(min(length // size, most_held(window, size)) for window in groups.windows)
    slots = sum(layer.cache.num_tensors * layer.cache.row_size for layer in layers)
    assert blocks * groups.num_slots * groups.slot_size <= 0.25 * slots * length // size
