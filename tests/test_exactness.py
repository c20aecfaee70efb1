"""Greedy output equals transformers' token for token, in float32 on the CPU.

It costs more than 20 seconds: transformers computes each model's answers, and pools are small.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audits import audit_scheduler
from conftest import edit_config, make_model
from reference import (
    HARD,
    NUM_STEPS,
    SMALL_POOL,
    Case,
    assert_same,
    audit_at_rest,
    check_logits,
    generate,
    load_reference,
    make_case,
    make_crowd_case,
    make_llm,
    make_prompts,
    make_some_prompts,
)
from transformers import Qwen3ForCausalLM

from nanovllm import SamplingParams
from nanovllm.engine.run.launched import Begun
from nanovllm.engine.schedule.batch import Batch

pytestmark = pytest.mark.usefixtures("one_thread", "crowded")

SCENARIOS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "plain PyTorch": dict(attention_backend="torch"),
    "plain PyTorch, small pool, budget 16": dict(HARD, attention_backend="torch"),
    "budget 7": dict(max_num_batched_tokens=7),
    "budget 16": dict(max_num_batched_tokens=16),
    "budget 16, blocks of 1": dict(max_num_batched_tokens=16, kvcache_block_size=1),
    "budget 100, blocks of 256": dict(max_num_batched_tokens=100, kvcache_block_size=256),
    "blocks of 1": dict(kvcache_block_size=1),
    "blocks of 4": dict(kvcache_block_size=4),
    "blocks of 16": dict(kvcache_block_size=16),
    "blocks of 256": dict(kvcache_block_size=256),
    "no prefix cache": dict(enable_prefix_caching=False),
    "no prefix cache, budget 16": dict(enable_prefix_caching=False, max_num_batched_tokens=16),
    "three at a time": dict(max_num_seqs=3),
    "small pool": SMALL_POOL,
    "small pool, blocks of 16": dict(kvcache_block_size=16, num_kvcache_blocks=14),
    "small pool, budget 16": HARD,
    "overlap": dict(overlap=True),
    "fair, budget 16": dict(HARD, scheduling="fair"),
    "fair, overlap, at most 5 of a prompt": dict(
        scheduling="fair", overlap=True, max_num_batched_tokens=16, long_prefill_token_threshold=5
    ),
    "mixed": dict(scheduling="mixed"),
    "mixed, budget 60": dict(scheduling="mixed", max_num_batched_tokens=60),
    "mixed, overlap, small pool, budget 16": dict(HARD, scheduling="mixed", overlap=True),
    "overlap, small pool, budget 16": dict(HARD, overlap=True),
}

# With the prompts of `crowd`, each of these forces hundreds of preemptions.
CROWDED: dict[str, dict[str, Any]] = {
    "blocks of 1": dict(kvcache_block_size=1, num_kvcache_blocks=224),
    "blocks of 4": SMALL_POOL,
    "overlap": dict(SMALL_POOL, overlap=True),
    "mixed": dict(SMALL_POOL, scheduling="mixed", max_num_batched_tokens=64),
    "blocks of 2": dict(kvcache_block_size=2, num_kvcache_blocks=112),
    "budget 64": dict(SMALL_POOL, max_num_batched_tokens=64),
    "no prefix cache": dict(SMALL_POOL, enable_prefix_caching=False),
    "no prefix cache, budget 64": dict(
        SMALL_POOL, enable_prefix_caching=False, max_num_batched_tokens=64
    ),
}

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip

LONGROPE = dict(
    rope_type="longrope", short_factor=[1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    long_factor=[1.0, 1.5, 3.0, 7.0, 9.0, 12.0],
)  # fmt: skip
MOE = dict(family="Qwen3Moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)

# Keyword arguments of `make_model`: what makes each one differ from the standard model.
VARIANTS: dict[str, dict[str, Any]] = {
    "as many kv heads as heads": dict(num_key_value_heads=4),
    "4 heads per kv head": dict(num_attention_heads=8, num_key_value_heads=2, head_dim=8),
    "8 heads per kv head": dict(num_attention_heads=8, num_key_value_heads=1, head_dim=8),
    "7 heads, 1 kv head": dict(num_attention_heads=7, num_key_value_heads=1),
    "head_dim 40, not hidden / heads": dict(head_dim=40),
    "one layer": dict(num_hidden_layers=1),
    "tied": dict(tie_word_embeddings=True),
    "attention bias": dict(attention_bias=True),
    "theta 1e6, eps 1e-3": dict(rope_theta=1e6, rms_norm_eps=1e-3),
    "linear rope": dict(rope_scaling=dict(rope_type="linear", factor=4.0)),
    "dynamic rope": dict(rope_scaling=dict(rope_type="dynamic", factor=4.0)),
    "yarn rope": dict(rope_theta=1e5, rope_scaling=YARN),
    "llama3 rope": dict(rope_theta=5e5, rope_scaling=LLAMA3),
    "shards with an index": dict(shards=True),
    "Llama": dict(family="Llama"),
    "Llama, biases": dict(family="Llama", seed=2, attention_bias=True, mlp_bias=True),
    "Llama, tied": dict(family="Llama", tie_word_embeddings=True),
    "Llama, llama3 rope": dict(family="Llama", rope_theta=5e5, rope_scaling=LLAMA3),
    "Mistral": dict(family="Mistral", sliding_window=512),
    "Mistral, a short window": dict(family="Mistral", sliding_window=37),
    "Qwen2": dict(family="Qwen2"),
    "Qwen2, a window in one layer": dict(
        family="Qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "Qwen3, a window in every other layer": dict(
        use_sliding_window=True,
        sliding_window=64,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "SmolLM3, every other layer without rotation": dict(
        family="SmolLM3", num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0]
    ),
    "SmolLM3, biases, tied": dict(
        family="SmolLM3", num_hidden_layers=4, attention_bias=True, tie_word_embeddings=True
    ),
    "Phi3": dict(family="Phi3"),
    "Phi3, longrope within the trained length": dict(
        family="Phi3",
        rope_scaling=LONGROPE,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=512,
    ),
    # The reference computes all prompts in one batch of more than 128 tokens: the long factors.
    "Phi3, longrope, three quarters of a head": dict(
        family="Phi3",
        rope_scaling=LONGROPE,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=128,
    ),
    "Qwen3 MoE": dict(MOE, norm_topk_prob=True),
    "Qwen3 MoE, some dense": dict(
        MOE, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3], shards=True
    ),
}


@pytest.fixture(scope="module")
def standard(model_dir: Path) -> Case:
    return make_case(model_dir, make_prompts())


@pytest.fixture(scope="module")
def crowd(model_dir: Path) -> Case:
    return make_crowd_case(model_dir)


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp("variant")
    return make_case(
        make_model(path, **{"seed": 1, **VARIANTS[request.param]}), make_some_prompts()
    )


# The standard model, every scenario


def test_the_reference_itself_is_what_transformers_generates(standard: Case) -> None:
    model = load_reference(standard.path)
    model.generation_config.eos_token_id = None
    for prompt, tokens in list(zip(standard.prompts, standard.tokens, strict=True))[::10]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_STEPS
        )
        assert out[0, len(prompt) :].tolist() == tokens


@pytest.mark.sampled(share=0.5)
@pytest.mark.parametrize("name", SCENARIOS)
def test_greedy_equals_transformers_with(name: str, standard: Case) -> None:
    with make_llm(standard.path, **SCENARIOS[name]) as llm:
        assert_same(generate(llm, standard), standard.expected)
        audit_at_rest(llm)


@pytest.mark.sampled(share=0.25)
@pytest.mark.slow
@pytest.mark.parametrize("name", CROWDED)
def test_hundreds_of_preemptions_keep_the_output_with(name: str, crowd: Case) -> None:
    with make_llm(crowd.path, **CROWDED[name]) as llm:
        begin, num_sampled = llm.model_runner.begin, 0

        def counting(batch: Batch) -> Begun:
            nonlocal num_sampled
            num_sampled += len(batch.sampling_seqs)
            return begin(batch)

        llm.model_runner.begin = counting  # type: ignore[method-assign]
        assert_same(generate(llm, crowd), crowd.expected)
        assert llm.scheduler.num_preemptions >= 170
        assert num_sampled == sum(map(len, crowd.expected)), "a token was generated again"
        audit_at_rest(llm)


@pytest.mark.slow
def test_known_lengths_avoid_recomputation(crowd: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forecast delays requests that would be preempted: less is computed twice."""
    computed = []
    for _ in range(2):
        with make_llm(crowd.path, **SMALL_POOL, enable_prefix_caching=False) as llm:
            assert_same(generate(llm, crowd), crowd.expected)
            computed.append(llm.stats()["prefill_tokens"] - sum(map(len, crowd.prompts)))
            audit_at_rest(llm)
        monkeypatch.undo()  # of the fixture `crowded`: the second engine looks ahead
    assert computed[1] < computed[0] / 4, "too many tokens were computed again"


def test_greedy_equals_transformers_one_by_one(standard: Case) -> None:
    """One request at a time; later ones hit the cached blocks of earlier ones."""
    with make_llm(standard.path) as llm:
        outputs = [
            llm.generate(prompt, params, use_tqdm=False)[0]
            for prompt, params in zip(standard.prompts, standard.params, strict=True)
        ]
        assert_same(outputs, standard.expected)
        assert sum(out["num_cached_tokens"] > 0 for out in outputs) >= 14


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("budget", [16, 16384])
def test_prefix_hits_keep_the_output(block_size: int, budget: int, standard: Case) -> None:
    options = dict(kvcache_block_size=block_size, max_num_batched_tokens=budget)
    with make_llm(standard.path, **options) as llm:
        first = generate(llm, standard)
        second = generate(llm, standard)
        assert_same(first, standard.expected)
        assert_same(second, standard.expected)
    for prompt, out in zip(standard.prompts, second, strict=True):
        # All full blocks of the prompt, except one that holds its last token.
        assert out["num_cached_tokens"] == (len(prompt) - 1) // block_size * block_size


def test_running_requests_share_prefixes(standard: Case) -> None:
    with make_llm(standard.path, max_num_batched_tokens=64) as llm:
        outputs = generate(llm, standard)
        assert_same(outputs, standard.expected)
        assert sum(out["num_cached_tokens"] for out in outputs) >= 5 * 96


def test_aborted_requests_leave_correct_kv(standard: Case) -> None:
    """The next requests hit the blocks that the aborted ones left in the cache."""
    with make_llm(standard.path, **SMALL_POOL, max_num_batched_tokens=32) as llm:
        for round_ in range(4):
            ids = [
                llm.add_request(prompt, params)
                for prompt, params in zip(standard.prompts, standard.params, strict=True)
            ]
            finished: set[int] = set()
            for _ in range(20 + 7 * round_):
                finished |= {out["request_id"] for out in llm.step()}
                audit_scheduler(llm.scheduler)
            for request_id in set(ids) - finished:
                llm.abort_request(request_id)
            audit_at_rest(llm)
        assert_same(generate(llm, standard), standard.expected)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_only_the_computed_part_of_an_aborted_prompt_is_cached(
    num_steps: int, standard: Case
) -> None:
    """The other blocks still hold KV of earlier requests."""
    longest = sorted(range(len(standard.prompts)), key=lambda i: -len(standard.prompts[i]))[:6]
    with make_llm(standard.path, max_num_batched_tokens=16, kvcache_block_size=4) as llm:
        for index in longest:
            prompt, params = standard.prompts[index], standard.params[index]
            request_id = llm.add_request(prompt, params)
            for _ in range(num_steps):
                llm.step()
            num_computed = llm.scheduler.running[0].num_cached_tokens
            llm.abort_request(request_id)
            out = llm.generate(prompt, params, use_tqdm=False)[0]
            assert out["token_ids"] == standard.expected[index]
            assert 0 < out["num_cached_tokens"] <= num_computed


def unchanged(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A callable that changes nothing, and so all rows are drawn as with one."""
    assert len(output) < NUM_STEPS and logits.dtype == torch.float32
    return logits


@pytest.mark.parametrize(
    "options", [{}, HARD, dict(HARD, overlap=True), dict(HARD, scheduling="mixed", overlap=True)]
)
def test_requests_with_states_and_callables_equal_transformers(
    options: dict[str, Any], standard: Case
) -> None:
    """Beside others, in the same steps."""
    params = [
        replace(
            params, hidden_states=index % 3 == 0,
            logits_processors=[unchanged] if index % 4 == 0 else None,
        )
        for index, params in enumerate(standard.params)
    ]  # fmt: skip
    with make_llm(standard.path, **options) as llm:
        for _ in range(2):  # again, with what is cached
            outputs = llm.generate(standard.prompts, params, use_tqdm=False)
            assert_same(outputs, standard.expected)
            for asked, output in zip(params, outputs, strict=True):
                if asked.hidden_states:
                    assert output.prompt_hidden_states is not None
                    assert len(output.prompt_hidden_states) == output.num_prompt_tokens
                    assert output.hidden_states is not None
                    assert len(output.hidden_states) == len(output.token_ids)
        audit_at_rest(llm)


# Logits


@pytest.mark.parametrize("options", [{}, dict(max_num_batched_tokens=7), HARD])
def test_logits_equal_transformers(options: dict[str, Any], standard: Case) -> None:
    check_logits(standard, **options)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, dict(max_num_batched_tokens=7), HARD])
def test_float32_logits_on_the_device_equal_transformers(
    options: dict[str, Any], standard: Case
) -> None:
    on_device = dict(device="cuda", attention_backend="torch", num_kvcache_blocks=2000)
    check_logits(standard, **on_device | options)


# Every variant of the model, with the defaults and with the hardest options


@pytest.mark.sampled(share=0.25)
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_logits_of_a_variant_equal_transformers(backend: str, variant: Case) -> None:
    check_logits(variant, attention_backend=backend)


@pytest.mark.sampled(share=0.25)
@pytest.mark.slow
def test_a_variant_equals_transformers_with_chunks_and_preemptions(variant: Case) -> None:
    with make_llm(variant.path, **HARD) as llm:
        assert_same(generate(llm, variant), variant.expected)
        # A short window needs fewer blocks: test_windows.py has smaller pools.
        assert llm.scheduler.num_preemptions >= 5 or llm.model_config.longest_window == 37
        audit_at_rest(llm)


@pytest.mark.cuda
def test_a_variant_equals_transformers_on_a_device(variant: Case) -> None:
    """With the default backend of the device; the case has no near-ties."""
    with make_llm(variant.path, device="cuda", num_kvcache_blocks=2000) as llm:
        assert_same(generate(llm, variant), variant.expected)
        audit_at_rest(llm)


# What a checkpoint may look like on disk


def spell_as_transformers_4(path: Path, rope_type_key: str = "rope_type") -> None:
    """Rewrite `config.json` with the field names of transformers 4."""
    config = json.loads((path / "config.json").read_text())
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or config["rope_theta"]
    dtype = config.get("dtype") or config["torch_dtype"]
    rope_type = scaling.pop("rope_type", "default")
    edit_config(
        path,
        rope_parameters=None,
        dtype=None,
        rope_theta=theta,
        rope_scaling=None if rope_type == "default" else scaling | {rope_type_key: rope_type},
        torch_dtype=dtype,
    )


def spell_as_transformers_5(path: Path) -> None:
    """Rewrite `config.json` with the field names of transformers 5."""
    config = json.loads((path / "config.json").read_text())
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta"))
    rope.setdefault("rope_type", "default")
    edit_config(
        path,
        rope_parameters=rope,
        dtype=config.get("dtype") or config["torch_dtype"],
        rope_theta=None,
        rope_scaling=None,
        torch_dtype=None,
    )


SPELLINGS: dict[str, Callable[[Path], None]] = {
    "transformers 4": spell_as_transformers_4,
    "transformers 4, legacy type": lambda path: spell_as_transformers_4(path, "type"),
    "transformers 5": spell_as_transformers_5,
}


@pytest.fixture(scope="module", params=["theta", "yarn", "linear", "Llama", "Phi3"])
def roped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model whose output depends on what its config says about rope."""
    overrides: dict[str, Any] = {
        "theta": dict(rope_theta=1e6),
        "yarn": dict(rope_theta=1e6, rope_scaling=YARN),
        "linear": dict(rope_theta=1e6, rope_scaling=dict(rope_type="linear", factor=4.0)),
        "Llama": dict(family="Llama", rope_theta=1e6, rope_scaling=LLAMA3),
        "Phi3": VARIANTS["Phi3, longrope, three quarters of a head"] | dict(rope_theta=1e5),
    }
    path = tmp_path_factory.mktemp("roped")
    return make_case(make_model(path, seed=2, **overrides[request.param]), make_some_prompts())


@pytest.mark.sampled(share=0.5)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rope_is_read_in_the_spelling_of(spelling: str, roped: Case, tmp_path: Path) -> None:
    path = shutil.copytree(roped.path, tmp_path / "copy")
    SPELLINGS[spelling](path)
    config = json.loads((path / "config.json").read_text())
    assert ("rope_theta" in config) == spelling.startswith("transformers 4")
    with make_llm(path) as llm:
        assert_same(generate(llm, roped), roped.expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_computed_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    make_model(tmp_path, seed=3)
    Qwen3ForCausalLM.from_pretrained(tmp_path).to(dtype).save_pretrained(tmp_path)
    spell_as_transformers_5(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype)[6:]
    check_logits(make_case(tmp_path, make_some_prompts()))


# Stops


@pytest.fixture(scope="module")
def stopping(standard: Case, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The standard model with two EOS ids that it generates: one is in both config files."""
    path = shutil.copytree(standard.path, tmp_path_factory.mktemp("stopping") / "copy")
    firsts: dict[int, int] = {}  # how many outputs have a token in their middle
    for tokens in standard.tokens:
        for token in set(tokens[3:15]) - set(tokens[:3]):
            firsts[token] = firsts.get(token, 0) + 1
    common = sorted(firsts, key=lambda token: -firsts[token])[:2]
    edit_config(path, eos_token_id=common[0])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [*common, 257]}))
    return Case(path, standard.prompts, standard.tokens, standard.logits)


@pytest.fixture(scope="module")
def stopped(stopping: Case) -> list[list[int]]:
    """What transformers generates with EOS, prompt by prompt."""
    model = load_reference(stopping.path)
    expected = []
    for prompt, params in zip(stopping.prompts, stopping.params, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=256,
            max_new_tokens=params.max_tokens,
        )  # fmt: skip
        expected.append(out[0, len(prompt) :].tolist())
    return expected


@pytest.mark.parametrize("options", [{}, HARD])
def test_eos_stops_at_the_token_of_transformers(
    options: dict[str, Any], stopping: Case, stopped: list[list[int]]
) -> None:
    eos = set(json.loads((stopping.path / "generation_config.json").read_text())["eos_token_id"])
    early = [i for i, tokens in enumerate(stopped) if tokens != stopping.expected[i]]
    assert 10 <= len(early) < len(stopped), "the reference must stop early for some, not all"
    assert len({stopped[i][-1] for i in early}) >= 2, "both EOS ids must occur"
    params = [SamplingParams(temperature=0, max_tokens=p.max_tokens) for p in stopping.params]
    with make_llm(stopping.path, **options) as llm:
        outputs = llm.generate(stopping.prompts, params, use_tqdm=False)
        assert_same(outputs, stopped)
        audit_at_rest(llm)
    for out in outputs:
        assert out["finish_reason"] == ("stop" if out["token_ids"][-1] in eos else "length")
        assert out["stop_reason"] is None
