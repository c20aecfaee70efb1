"""With `batch_invariant=True` answers are the same bits in all ways that neighbours.py has."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.neighbours import WAYS, changed, compute, requests_of

SMALL = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_act="silu", hidden_size=64,
    intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=21_001, tie_word_embeddings=True, max_position_embeddings=4096,
    rms_norm_eps=1e-6, rope_theta=1_000_000, attention_bias=False, torch_dtype="bfloat16",
)  # fmt: skip
LARGER = SMALL | dict(
    hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128,
)  # fmt: skip
PROJECTIONS = {  # random values of types with mins give all prompts one answer
    "Q4_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    "Q8_0": ("mlp.gate_proj", "mlp.up_proj"), "Q6_K": ("mlp.down_proj",),
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "long inputs of few outputs": dict(intermediate_size=12_288),
    "biases": dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
    "windows": dict(
        architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=100
    ),
    "soft caps and norms after parts": dict(
        architectures=["Gemma2ForCausalLM"], model_type="gemma2", head_dim=256, sliding_window=100,
        query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh",
    ),
    "experts": dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=32,
        num_experts_per_tok=4, moe_intermediate_size=256, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "gated delta nets": dict(
        architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4,
    ),
    "gated delta nets and experts": dict(
        architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next",
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=4,
        linear_num_value_heads=8, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, num_experts=32, num_experts_per_tok=4,
        moe_intermediate_size=256, shared_expert_intermediate_size=256, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "state spaces": dict(
        architectures=["GraniteMoeHybridForCausalLM"], model_type="granitemoehybrid",
        num_hidden_layers=3, layer_types=["mamba", "attention", "mamba"], mamba_n_heads=32,
        mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, mamba_d_head=64,
        shared_intermediate_size=1024, num_local_experts=0, num_experts_per_tok=0,
        position_embedding_type="nope",
    ),
    "short convolutions": dict(
        architectures=["Lfm2ForCausalLM"], model_type="lfm2", num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"], conv_L_cache=3, block_multiple_of=256,
    ),
    "experts in MXFP4": dict(
        architectures=["GptOssForCausalLM"], model_type="gpt_oss", num_local_experts=16,
        num_experts_per_tok=4, sliding_window=100, swiglu_limit=7.0, attention_bias=True,
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                "lm_head",
            ],
        },
    ),
    "GGUF": dict(
        quantization_config={
            "quant_method": "gguf",
            "types": {
                kind: [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in names]
                for kind, names in PROJECTIONS.items()
            },
        },
    ),
    "streams": dict(
        architectures=["Gemma3nForCausalLM"], model_type="gemma3n_text", num_hidden_layers=3,
        hidden_act="gelu_pytorch_tanh", num_kv_shared_layers=1, sliding_window=100,
        activation_sparsity_pattern=[0.95, 0.0, 0.9], vocab_size_per_layer_input=21_001,
        hidden_size_per_layer_input=64, laurel_rank=64, altup_num_inputs=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}  # fmt: skip
# Smaller sizes of these for a CPU.
SMALL_STATES: dict[str, dict[str, Any]] = {
    "gated delta nets": dict(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=8,
    ),
    "state spaces": dict(
        mamba_n_heads=8, mamba_d_state=16, mamba_d_head=16, shared_intermediate_size=160
    ),
    "short convolutions": dict(block_multiple_of=16),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "dense, FP8 weights": dict(quantization="fp8"),
    "dense, int8 weights": dict(quantization="int8"),
    "dense, int4 weights": dict(quantization="int4"),
    "dense, room for adapters": dict(enable_lora=True),
    "windows, FP8 cache": dict(kv_cache_dtype="fp8"),
    "experts, FP8 weights": dict(quantization="fp8"),
    "experts, room for adapters": dict(enable_lora=True),
    "experts, int4 weights": dict(quantization="int4"),
}


FEW = ("batches of 16", "among 192 others", "prefix hits of 16", "without graphs", "all of it")


def check(
    folder: Path, config: dict[str, Any], options: dict[str, Any], ways: Iterable[str], *sizes: int
) -> None:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    prompts, params = requests_of(*sizes)
    options = {"batch_invariant": True} | options
    alone = dict(options, enable_prefix_caching=False)
    ((_, expected),) = compute(str(folder), {"alone": dict(size=1)}, alone, prompts, params)
    assert len({tokens for tokens, _ in expected}) > len(prompts) // 2
    chosen = {name: WAYS[name] for name in ways}
    for name, found in compute(str(folder), chosen, options, prompts, params):
        different = [one for one, other in zip(expected, found, strict=True) if one != other]
        assert not different, f"{name}: {len(different)} of {len(prompts)} answers differ"


@pytest.mark.usefixtures("compiler", "one_thread")
def test_answers_on_a_cpu_are_the_same_in_any_company(tmp_path: Path) -> None:
    options = dict(device="cpu", dtype="bfloat16", cpu_kvcache_gib=0.02, max_model_len=256)
    check(tmp_path, SMALL, options, WAYS, 8, 80, 6)


@pytest.mark.usefixtures("compiler", "one_thread")
@pytest.mark.sampled(share=0.4)
@pytest.mark.parametrize("name", SMALL_STATES)
def test_answers_of_states_on_a_cpu_are_the_same_in_any_company(name: str, tmp_path: Path) -> None:
    options = dict(device="cpu", dtype="bfloat16", cpu_kvcache_gib=0.02, max_model_len=256)
    config = SMALL | MODELS[name] | SMALL_STATES[name]
    check(tmp_path, config, options, ["prefix hits of 16", "all of it"], 8, 80, 6)


def test_configs_have_fields_of_ones_own_and_the_first_layers() -> None:
    """Lists of kinds are as long as there are layers; a model that also sees has a text model."""
    text = dict(num_hidden_layers=4, layer_types=["a", "b", "b", "b"], hidden_size=64)
    expected = dict(num_hidden_layers=2, layer_types=["a", "b"], hidden_size=32)
    assert changed(text, 2, {"hidden_size": 32}) == expected
    whole = dict(architectures=["Both"], text_config=text)
    assert changed(whole, 2, {"hidden_size": 32}) == whole | {"text_config": expected}
    assert changed(dict(hybrid_override_pattern="M*M-"), 3, {}) == {
        "hybrid_override_pattern": "M*M"
    }
    assert changed(text, 0, {}) == text


@pytest.mark.cuda
@pytest.mark.parametrize("name", [*MODELS, *OPTIONS])
def test_answers_on_a_gpu_are_the_same_in_any_company(name: str, tmp_path: Path) -> None:
    model, _, _ = name.partition(", ")
    options = dict(num_kvcache_blocks=2000, max_num_seqs=256) | OPTIONS.get(name, {})
    ways = WAYS if name == "dense" else FEW
    check(tmp_path, LARGER | MODELS[model], options, ways, 40, 700, 24)
