"""Several ranks give the output of one: real processes, with shared memory or, on GPUs, NCCL.

It costs more than 20 seconds: each test starts ranks, and the models are compared in full.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import edit_config, make_model, need_gpus
from reference import (
    SMALL_POOL,
    Case,
    assert_same,
    audit_at_rest,
    check_logits,
    generate,
    make_case,
    make_crowd_case,
    make_llm,
    make_some_prompts,
)

from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems
from nanovllm.models.config import ModelConfig

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

# Like reference.HARD, but with fewer steps: small machines have fewer cores than ranks.
HARD = SMALL_POOL | dict(max_num_batched_tokens=48)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

# A model, and sizes that work with it. None of them divides the 259 tokens of the vocabulary.
MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "2 kv heads": ({}, (2, 4)),  # 4: each kv head on two ranks
    "3 kv heads, tied": (
        dict(num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=True), (3,)
    ),
    "biased": (dict(attention_bias=True), (2,)),
    "Llama": (dict(family="Llama", mlp_bias=True), (2,)),
    "Mistral": (dict(family="Mistral", sliding_window=90), (2,)),
    "Qwen2": (dict(family="Qwen2"), (2,)),
    "Phi3": (dict(family="Phi3"), (2,)),
    "Qwen2, a window in one layer": (
        dict(family="Qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1), (2,)
    ),
    "MoE": (
        dict(
            family="Qwen3Moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
            decoder_sparse_step=2,
        ),
        (2,),
    ),
    "MoE, whole experts": (
        dict(
            family="Qwen3Moe", num_attention_heads=6, num_key_value_heads=6, num_experts=7,
            num_experts_per_tok=3, moe_intermediate_size=28, decoder_sparse_step=2,
        ),
        (2, 3),
    ),
}  # fmt: skip
RUNS = [(name, size) for name, (_, sizes) in MODELS.items() for size in sizes]


class Cases(dict[str, Case]):
    """Cases by the names of `MODELS`, made when the first test needs them."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._make_path = tmp_path_factory.mktemp

    def __missing__(self, name: str) -> Case:
        path = make_model(self._make_path("model"), seed=1, **MODELS[name][0])
        self[name] = case = make_case(path, make_some_prompts())
        return case


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory)


def parallel_options(device: str, size: int, name: str = "") -> dict[str, Any]:
    """Options for kernels whose float32 sums differ from transformers' only by their order."""
    options: dict[str, Any] = dict(device=device, tensor_parallel_size=size)
    options |= dict(enable_expert_parallel=True) if "whole experts" in name else {}
    if device == "cuda":
        need_gpus(size)
        options |= dict(attention_backend="torch", num_kvcache_blocks=2000)
    return options


@pytest.mark.sampled(share=0.25)
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "size"), RUNS)
def test_logits_of_ranks_equal_transformers(
    name: str, size: int, device: str, cases: Cases
) -> None:
    """Logits and tokens of every step."""
    check_logits(cases[name], **parallel_options(device, size, name))


@pytest.mark.sampled(share=0.25)
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "size"), RUNS)
def test_ranks_equal_transformers_with_chunks_hits_and_preemptions(
    name: str, size: int, device: str, cases: Cases
) -> None:
    """All ranks compute the same step as rank 0."""
    case = cases[name]
    with make_llm(case.path, **parallel_options(device, size, name) | HARD) as llm:
        outputs = generate(llm, case)
        assert_same(outputs, case.expected)
        assert llm.scheduler.num_preemptions >= 5  # 7 with a window in one layer, 9 on two GPUs
        assert sum(out["num_cached_tokens"] for out in outputs) > 0
        audit_at_rest(llm)


@pytest.mark.sampled(share=0.35)
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, dict(scheduling="mixed"), dict(enforce_eager=True)])
def test_pending_tokens_reach_every_rank(
    options: dict[str, Any], device: str, cases: Cases
) -> None:
    """When steps overlap, rank 0 has them on its device and must send them to the others."""
    case = cases["2 kv heads"]
    shared = parallel_options(device, 2) | dict(attention_backend="auto") | HARD | options
    with make_llm(case.path, overlap=True, **shared) as llm:
        assert_same(generate(llm, case), case.expected)
        audit_at_rest(llm)


@pytest.mark.sampled(share=0.35)
@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_survive_a_hundred_preemptions(model_dir: Path, overlap: bool) -> None:
    """Only changes of block tables are sent; sequences come, go and move all the time here."""
    case = make_crowd_case(model_dir, every=2)
    parallel = dict(tensor_parallel_size=2, overlap=overlap)
    with make_llm(model_dir, **SMALL_POOL, **parallel) as llm:
        assert_same(generate(llm, case), case.expected)
        assert llm.scheduler.num_preemptions >= 100


@pytest.mark.sampled(share=0.35)
@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_read_no_block_behind_the_window(overlap: bool, tmp_path: Path) -> None:
    """The longest prompts are three times as long as the pool."""
    make_model(tmp_path, family="Mistral", seed=1, sliding_window=21, num_hidden_layers=3)
    case = make_crowd_case(tmp_path, every=2)
    options: dict[str, Any] = dict(kvcache_block_size=4, num_kvcache_blocks=18)
    options |= dict(max_num_batched_tokens=64, tensor_parallel_size=2, overlap=overlap)
    with make_llm(tmp_path, **options) as llm:
        assert_same(generate(llm, case), case.expected)
        assert llm.scheduler.num_preemptions >= 50
        audit_at_rest(llm)


@pytest.mark.slow
def test_ranks_agree_after_aborted_requests(cases: Cases) -> None:
    case = cases["2 kv heads"]
    with make_llm(case.path, **SMALL_POOL, tensor_parallel_size=2) as llm:
        for num_steps in (3, 20):
            ids = [llm.add_request(*pair) for pair in zip(case.prompts, case.params, strict=True)]
            finished = {out["request_id"] for _ in range(num_steps) for out in llm.step()}
            for request_id in set(ids) - finished:
                llm.abort_request(request_id)
        assert_same(generate(llm, case), case.expected)


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("options", [{}, dict(max_num_batched_tokens=50, kvcache_block_size=4)])
def test_ranks_can_add(options: dict[str, Any], size: int, device: str) -> None:
    """The trained model, which fails if anything is wrong: 4 ranks share its 2 kv heads."""
    options |= parallel_options(device, size) | dict(attention_backend="auto")
    problems = sample_problems(300)
    with make_llm(EMBEDDED_MODEL, max_model_len=512, **options) as llm:
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate(
                [prompt for prompt, _ in problems],
                SamplingParams(temperature=0, max_tokens=12),
                use_tqdm=False,
            )
            answers = zip(outputs, problems, strict=True)
            assert sum(out["text"] == answer for out, (_, answer) in answers) >= 299


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_ranks_equal_transformers_on_every_backend(backend: str, cases: Cases) -> None:
    case = cases["biased"]
    options = dict(HARD, tensor_parallel_size=2, attention_backend=backend)
    with make_llm(case.path, **options) as llm:
        assert llm.config.attention_backend == ("torch" if backend == "torch" else "cpu")
        assert_same(generate(llm, case), case.expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dummy_weights_do_not_depend_on_the_number_of_ranks(
    device: str, dtype: str, model_dir: Path
) -> None:
    """Nor do seeded draws, which depend on rank 0's logits alone."""
    shared = dict(dtype=dtype, load_format="dummy")
    parallel = parallel_options(device, 2) | shared
    prompts = [[i, 2 * i, 3] for i in range(40)]
    params = [SamplingParams(temperature=i % 3 / 2, max_tokens=16, seed=i) for i in range(40)]

    def tokens(size: int) -> list[list[int]]:
        with make_llm(model_dir, **parallel | dict(tensor_parallel_size=size)) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [out["token_ids"] for out in outputs]

    same = sum(a == b for a, b in zip(tokens(1), tokens(2), strict=True))
    assert same >= (38 if dtype == "float32" else 10)


def test_rows_that_pad_the_vocabulary_are_never_sampled(model_dir: Path) -> None:
    """259 tokens have 260 rows; 1,536 uniform draws would miss the last one in 0.3% of cases."""
    with make_llm(model_dir, tensor_parallel_size=2) as llm:
        hot = SamplingParams(temperature=1e6, max_tokens=24, ignore_eos=True)
        outputs = llm.generate([[i] for i in range(64)], hot, use_tqdm=False)
    drawn = {token for out in outputs for token in out["token_ids"]}
    assert max(drawn) == 258 and len(drawn) > 250


# The KV pool


@pytest.mark.slow
def test_all_ranks_have_pools_of_one_size(cases: Cases) -> None:
    """On the CPU all ranks share `cpu_kvcache_gib`."""
    path = cases["2 kv heads"].path
    with make_llm(path) as one, make_llm(path, tensor_parallel_size=2) as two:
        assert two.config.num_kvcache_blocks == one.config.num_kvcache_blocks
        assert (
            two.model_runner.shard.caches.kv.block_bytes * 2
            == one.model_runner.shard.caches.kv.block_bytes
        )
    with make_llm(path, tensor_parallel_size=4) as four:  # each kv head twice
        assert one.config.num_kvcache_blocks is not None
        assert four.config.num_kvcache_blocks == one.config.num_kvcache_blocks // 2


@pytest.mark.slow
def test_the_rank_with_the_least_memory_decides(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here rank 0 could hold more than the others."""
    with make_llm(model_dir, tensor_parallel_size=2) as llm:
        fair = llm.config.num_kvcache_blocks
    monkeypatch.setattr("nanovllm.engine.start.sizing.GIB", 1 << 34)  # in this process alone
    with make_llm(model_dir, tensor_parallel_size=2) as llm:
        assert llm.config.num_kvcache_blocks == fair


# Sizes


def test_sizes_that_cannot_work_are_refused_with_those_that_can(
    tmp_path: Path,
) -> None:
    """14 heads, 2 kv heads, width 4,864: only 1 and 2 divide all of them."""
    heads = dict(num_attention_heads=14, num_key_value_heads=2, hidden_size=28, head_dim=2)
    config = ModelConfig.from_dir(make_model(tmp_path, intermediate_size=4864, **heads))
    for size in (1, 2):
        config.check_parallel_size(size)
    for size in (3, 4, 5, 6, 7, 8):
        with pytest.raises(ValueError, match=f"tensor_parallel_size={size} .* 1, 2 can"):
            config.check_parallel_size(size)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fit"),
    [(8, 8, "1, 2, 4, 8"), (8, 1, "1, 2, 4, 8"), (6, 2, "1, 2, 6"), (6, 3, "1, 3, 6"), (7, 7, "1")],
)
def test_the_error_lists_the_sizes_that_work(
    heads: int, kv_heads: int, fit: str, tmp_path: Path
) -> None:
    """Width 96. With 6 heads and 2 kv heads, three ranks would split the queries of a kv head."""
    overrides = dict(num_attention_heads=heads, num_key_value_heads=kv_heads)
    config = ModelConfig.from_dir(make_model(tmp_path, **overrides))
    with pytest.raises(ValueError, match=f"intermediate_size=96; {fit} can"):
        config.check_parallel_size(5)


def test_sizes_that_work_with_whole_experts(tmp_path: Path, model_dir: Path) -> None:
    """Each rank needs one expert, of any width; a dense model has none."""
    path = make_model(tmp_path, **MODELS["MoE, whole experts"][0])
    edit_config(path, num_attention_heads=12, num_key_value_heads=12)
    config = ModelConfig.from_dir(path)
    for size in (2, 3, 4, 6):
        config.check_parallel_size(size, whole_experts=True)
    for size, way_out in ((3, ", and 3 can with enable_expert_parallel=True"), (5, "")):
        says = f"moe_intermediate_size=28 and .* 1, 2, 4 can{way_out}$"
        with pytest.raises(ValueError, match=says):
            config.check_parallel_size(size)
    edit_config(path, num_experts=3, num_local_experts=None)
    config = ModelConfig.from_dir(path)
    says = "intermediate_size=96 and num_experts=3; 1, 2, 3 can"
    with pytest.raises(ValueError, match=says):
        config.check_parallel_size(4, whole_experts=True)
    for size in (1, 2):
        with pytest.raises(ValueError, match="enable_expert_parallel=True: this model has no"):
            LLM(model_dir, enable_expert_parallel=True, tensor_parallel_size=size)


def test_expert_parallel_works_with_one_rank(cases: Cases) -> None:
    """So that one set of options works on any number of GPUs."""
    case = cases["MoE, whole experts"]
    with make_llm(case.path, enable_expert_parallel=True) as llm:
        assert_same(generate(llm, case), case.expected)


@pytest.mark.cuda
def test_more_ranks_than_gpus_is_an_error_that_names_the_missing_one(model_dir: Path) -> None:
    there = torch.cuda.device_count()
    first = f"cuda:{there - 1}"
    with pytest.raises(ValueError, match=f"tensor_parallel_size=2 need 'cuda:{there}'"):
        LLM(model_dir, device=first, tensor_parallel_size=2)
