"""`kv_cache_dtype="fp8"`: the output of transformers with a cache that rounds in the same way.

The definition is `reference.as_fp8`. Everything is float32 on the CPU, except where a test says so.

Float32's last bit decides between two codes where a value is halfway between them. Two right
programs then differ in that code, and by up to `ONE_CODE` in the logits. That happens to a quarter
of the prompts with kernels that add up in another order; all others have the reference's logits.

It costs more than 20 seconds: transformers computes each model's answers with such a cache.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LogitRecorder, make_model
from reference import (
    HARD,
    MAX_LOGIT_ERROR,
    SMALL_POOL,
    Case,
    audit_at_rest,
    generate,
    make_case,
    make_crowd_case,
    make_llm,
    make_prompts,
)

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

ONE_CODE = 0.1
FP8: dict[str, Any] = dict(kv_cache_dtype="fp8")
TORCH: dict[str, Any] = dict(FP8, attention_backend="torch")
SCENARIOS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "plain PyTorch": TORCH,
    "plain PyTorch, small pool, budget 16": HARD | TORCH,
    "chunks, blocks of 1": dict(max_num_batched_tokens=16, kvcache_block_size=1),
    "chunks, blocks of 256": dict(max_num_batched_tokens=100, kvcache_block_size=256),
    "no prefix cache": dict(enable_prefix_caching=False),
    "small pool": SMALL_POOL,
    "overlap, small pool, budget 16": dict(HARD, overlap=True),
    "mixed, overlap, small pool, budget 16": dict(HARD, scheduling="mixed", overlap=True),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "4 heads per kv head": dict(num_attention_heads=8, num_key_value_heads=2, head_dim=8),
    "7 heads, 1 kv head, head_dim 40": dict(
        num_attention_heads=7, num_key_value_heads=1, head_dim=40
    ),
    "Llama": dict(family="Llama"),
    "Mistral, a short window": dict(family="Mistral", sliding_window=21, num_hidden_layers=3),
    "SmolLM3, every other layer without rotation": dict(
        family="SmolLM3", num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0]
    ),
    "Phi3": dict(family="Phi3", partial_rotary_factor=0.5),
}


@pytest.fixture(scope="module")
def standard(model_dir: Path) -> Case:
    return make_case(model_dir, make_prompts(), fp8=True)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Triton's tiles hold pairs of codes, of heads of 32 or more."""
    path = tmp_path_factory.mktemp("wide")
    make_model(path, head_dim=32)
    return make_case(path, make_prompts(), fp8=True)


def first_difference(out: RequestOutput, expected: list[int]) -> int | None:
    """The index of the first token that is not the reference's."""
    pairs = zip(out["token_ids"], expected, strict=True)
    return next((i for i, (token, other) in enumerate(pairs) if token != other), None)


def assert_near(outputs: list[RequestOutput], case: Case) -> None:
    """A few outputs may differ, from a step on where the reference's best two logits are close."""
    assert len(outputs) == len(case.prompts)
    different = 0
    for index, (out, expected) in enumerate(zip(outputs, case.expected, strict=True)):
        if (step := first_difference(out, expected)) is not None:
            best, second = case.logits[index, step].topk(2).values.tolist()
            assert best - second < ONE_CODE, f"prompt {index} differs at {step}"
            different += 1
    assert different <= len(outputs) // 15, f"{different} of {len(outputs)} differ"


def check(case: Case, **options: Any) -> LLM:
    """Run the case: most logits are the reference's, the others of one code at most."""
    with make_llm(case.path, **FP8 | options) as llm:
        recorder = LogitRecorder(llm)
        outputs = generate(llm, case)
        assert_near(outputs, case)
        errors = []
        for index, out in enumerate(outputs):
            step = first_difference(out, case.expected[index])
            seen = recorder.of(out)[: None if step is None else step + 1]
            errors.append(float((seen - case.logits[index, : len(seen)]).abs().amax()))
        assert max(errors) < ONE_CODE
        same = sum(error < MAX_LOGIT_ERROR for error in errors)
        assert same >= len(errors) * 3 // 5, f"logits of {same} of {len(errors)} are right"
        audit_at_rest(llm)
    return llm


def test_the_reference_differs_from_an_exact_cache(standard: Case) -> None:
    """Else no test here would show anything."""
    exact = make_case(standard.path, standard.prompts)
    assert sum(a != b for a, b in zip(exact.tokens, standard.tokens, strict=False)) > 5


@pytest.mark.parametrize("name", SCENARIOS)
def test_output_is_the_references_with(name: str, standard: Case) -> None:
    llm = check(standard, **SCENARIOS[name])
    if "small pool" in name:
        assert llm.scheduler.num_preemptions >= 10


def test_one_request_at_a_time_equals_the_reference(standard: Case) -> None:
    """Later requests hit the cached blocks of earlier ones."""
    with make_llm(standard.path, **FP8) as llm:
        outputs = [
            llm.generate(prompt, params, use_tqdm=False)[0]
            for prompt, params in zip(standard.prompts, standard.params, strict=True)
        ]
        assert_near(outputs, standard)
        assert sum(out["num_cached_tokens"] > 0 for out in outputs) >= 14


@pytest.mark.parametrize("block_size", [1, 16])
def test_prefix_hits_equal_the_reference(block_size: int, standard: Case) -> None:
    with make_llm(standard.path, **FP8, kvcache_block_size=block_size) as llm:
        first, again = generate(llm, standard), generate(llm, standard)
        assert_near(first, standard)
        assert [out["token_ids"] for out in again] == [out["token_ids"] for out in first]
    for prompt, out in zip(standard.prompts, again, strict=True):
        assert out["num_cached_tokens"] == (len(prompt) - 1) // block_size * block_size


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_samples_of_a_prompt_copy_codes_and_scales(backend: str, standard: Case) -> None:
    """A prompt's last block is not full: each greedy sample continues on a copy of it."""
    order = sorted(range(len(standard.prompts)), key=lambda index: -len(standard.prompts[index]))
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, n=3)] * 12
    with make_llm(standard.path, **FP8, attention_backend=backend) as llm:
        prompts = [standard.prompts[index] for index in order[:12]]
        for index, out in zip(order, llm.generate(prompts, params, use_tqdm=False), strict=False):
            assert [sample["token_ids"] for sample in out["outputs"]] == [
                standard.tokens[index]
            ] * 3
        audit_at_rest(llm)


@pytest.mark.sampled(share=0.4)
@pytest.mark.slow
@pytest.mark.parametrize("options", [HARD, HARD | TORCH])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_equals_the_reference(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    make_model(tmp_path, **{"seed": 1, **VARIANTS[name]})
    check(make_case(tmp_path, make_prompts(), fp8=True), **options)


@pytest.mark.slow
def test_hundreds_of_preemptions_keep_the_output(model_dir: Path) -> None:
    case = make_crowd_case(model_dir, fp8=True)
    with make_llm(case.path, **FP8, **SMALL_POOL) as llm:
        assert_near(generate(llm, case), case)
        assert llm.scheduler.num_preemptions >= 170
        audit_at_rest(llm)


@pytest.mark.slow
def test_two_ranks_equal_the_reference(standard: Case) -> None:
    llm = check(standard, **HARD, tensor_parallel_size=2)
    assert llm.scheduler.num_preemptions >= 10


@pytest.mark.slow
def test_triton_equals_the_reference(wide: Case, kernel_device: str) -> None:
    """With chunks and prefix hits; interpreted where there is no GPU."""
    options = dict(FP8, device=kernel_device, attention_backend="triton", enforce_eager=True)
    index = next(i for i, prompt in enumerate(wide.prompts) if 30 < len(prompt) < 40)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with make_llm(wide.path, **options, max_num_batched_tokens=24) as llm:
        for _ in range(2):
            (out,) = llm.generate(wide.prompts[index], params, use_tqdm=False)
            assert out["token_ids"] == wide.tokens[index][:5]


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, dict(enforce_eager=True), TORCH, HARD])
def test_a_device_equals_the_reference(options: dict[str, Any], wide: Case) -> None:
    """With graphs and without."""
    on_device = dict(FP8, device="cuda", num_kvcache_blocks=2000)
    with make_llm(wide.path, **on_device | options) as llm:
        assert_near(generate(llm, wide), wide)
        audit_at_rest(llm)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_models_have_fp8_caches(backend: str, dtype: str, model_dir: Path) -> None:
    """Chunks and hits make attention read the cache, or the step's own keys: nearly the same."""
    prompts = make_prompts()[:12]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0)
    found = []
    for budget in (16384, 16):
        options = dict(FP8, dtype=dtype, attention_backend=backend, max_num_batched_tokens=budget)
        with make_llm(model_dir, **options) as llm:
            assert llm.model_runner.shard.caches.kv.cache.dtype == torch.float8_e4m3fn
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([out["logprobs"][0][0]["logprob"] for out in outputs])
    torch.testing.assert_close(*map(torch.tensor, found), atol=0.15, rtol=0)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_pool_holds_nearly_twice_the_tokens(head_dim: int, tmp_path: Path) -> None:
    make_model(tmp_path, head_dim=head_dim)
    blocks = []
    for name in ("auto", "fp8"):
        with make_llm(tmp_path, dtype="bfloat16", kv_cache_dtype=name) as llm:
            pool = llm.model_runner.shard.caches.kv
            blocks.append(llm.config.num_kvcache_blocks)
            num_bytes = sum(tensor.nbytes for tensor in pool.tensors)
            assert num_bytes == blocks[-1] * pool.block_bytes <= 0.05 * 2**30
    assert blocks[1] >= 1.9 * blocks[0]
