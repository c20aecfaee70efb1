"""Families with experts: their routers, shared experts, and the names of their files."""

from typing import Any

from families.describe import Published, Sample

LOCAL = dict(num_local_experts=6, num_experts_per_tok=2)
LONGROPE = dict(
    rope_type="longrope", rope_theta=1e4, short_mscale=1.2, long_mscale=1.4,
    short_factor=[1.0 + i / 8 for i in range(8)], long_factor=[2.0 + i for i in range(8)],
    original_max_position_embeddings=512,
)  # fmt: skip
QWEN2 = dict(
    num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
    shared_expert_intermediate_size=64,
)  # fmt: skip
GRANITE = dict(
    embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.6,
    attention_multiplier=0.2,
)  # fmt: skip


def published(architecture: str, num_parameters: int, **file: Any) -> Published:
    """A model with the fields that all files have."""
    common = dict(architectures=[architecture], hidden_act="silu", tie_word_embeddings=False)
    return Published({**common, **file}, num_parameters)


NO_ADAPTERS = {"adapters": "PEFT cannot add to the output of this router, which is a tuple"}


def smaller_biases(model: Any) -> None:
    """With larger ones, every token's successor would be the same."""
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            param.mul_(0.2)


SAMPLES = {
    "Mixtral": Sample("MixtralForCausalLM", LOCAL),
    "Mixtral, one of three, with a window": Sample(
        "MixtralForCausalLM",
        dict(num_local_experts=3, num_experts_per_tok=1, sliding_window=20, intermediate_size=72,
             hidden_size=48, head_dim=12),
    ),
    "Qwen2-MoE": Sample("Qwen2MoeForCausalLM", QWEN2),
    "Qwen2-MoE, some dense, normalized": Sample(
        "Qwen2MoeForCausalLM",
        dict(QWEN2, num_hidden_layers=3, mlp_only_layers=[1], norm_topk_prob=True,
             num_experts=5, num_experts_per_tok=3, qkv_bias=False),
    ),
    "Qwen2-MoE, with a window": Sample(
        "Qwen2MoeForCausalLM",
        dict(QWEN2, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    ),
    "GraniteMoE": Sample("GraniteMoeForCausalLM", dict(LOCAL, **GRANITE)),
    "GraniteMoE, tied, with biases": Sample(
        "GraniteMoeForCausalLM",
        dict(GRANITE, num_local_experts=5, num_experts_per_tok=3, attention_bias=True,
             tie_word_embeddings=True, hidden_size=96, head_dim=24, embedding_multiplier=0.3,
             attention_multiplier=1.0),
    ),
    "OLMoE": Sample("OlmoeForCausalLM", dict(num_experts=6, num_experts_per_tok=3)),
    "OLMoE, normalized, clipped, one key head": Sample(
        "OlmoeForCausalLM",
        dict(num_experts=5, num_experts_per_tok=2, norm_topk_prob=True, clip_qkv=1.5,
             num_key_value_heads=1),
    ),
    "Phi-3.5-MoE": Sample(
        "PhimoeForCausalLM",
        dict(LOCAL, attention_bias=True, lm_head_bias=True, rope_parameters=LONGROPE,
             router_jitter_noise=0.3),
        adjust=smaller_biases, refuses=NO_ADAPTERS,
    ),
    "Phi-3.5-MoE, with a window, without biases": Sample(
        "PhimoeForCausalLM", dict(LOCAL, num_local_experts=3, sliding_window=30),
        refuses=NO_ADAPTERS,
    ),
}  # fmt: skip
PHI_ROPE = dict(
    type="longrope", short_mscale=1.243163121016122, long_mscale=1.243163121016122,
    short_factor=[1.0 + i / 100 for i in range(64)], long_factor=[1.0 + i for i in range(64)],
    original_max_position_embeddings=4096,
)  # fmt: skip
GRANITE_3 = dict(
    attention_bias=False, attention_multiplier=0.015625, embedding_multiplier=12.0, eos_token_id=0,
    intermediate_size=512, logits_scaling=6.0, max_position_embeddings=4096,
    num_experts_per_tok=8, num_key_value_heads=8, residual_multiplier=0.22, rms_norm_eps=1e-6,
    rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=True, vocab_size=49155,
)  # fmt: skip
PUBLISHED = {
    "Mixtral-8x7B-v0.1": published(
        "MixtralForCausalLM", 46_702_792_704, eos_token_id=2, hidden_size=4096,
        intermediate_size=14336, max_position_embeddings=32768, num_attention_heads=32,
        num_experts_per_tok=2, num_hidden_layers=32, num_key_value_heads=8, num_local_experts=8,
        rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, vocab_size=32000,
    ),
    "Mixtral-8x22B-v0.1": published(
        "MixtralForCausalLM", 140_620_634_112, eos_token_id=2, hidden_size=6144,
        intermediate_size=16384, max_position_embeddings=65536, num_attention_heads=48,
        num_experts_per_tok=2, num_hidden_layers=56, num_key_value_heads=8, num_local_experts=8,
        rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, vocab_size=32000,
    ),
    "Qwen1.5-MoE-A2.7B": published(
        "Qwen2MoeForCausalLM", 14_315_784_192, decoder_sparse_step=1, eos_token_id=151643,
        hidden_size=2048, intermediate_size=5632, max_position_embeddings=8192,
        max_window_layers=21, moe_intermediate_size=1408, norm_topk_prob=False,
        num_attention_heads=16, num_experts=60, num_experts_per_tok=4, num_hidden_layers=24,
        num_key_value_heads=16, rms_norm_eps=1e-6, rope_theta=1e6,
        shared_expert_intermediate_size=5632, sliding_window=32768, use_sliding_window=False,
        vocab_size=151936,
    ),
    "OLMoE-1B-7B-0924": published(
        "OlmoeForCausalLM", 6_919_161_856, attention_bias=False, clip_qkv=None,
        eos_token_id=50279, hidden_size=2048, intermediate_size=1024,
        max_position_embeddings=4096, norm_topk_prob=False, num_attention_heads=16,
        num_experts=64, num_experts_per_tok=8, num_hidden_layers=16, num_key_value_heads=16,
        rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0, vocab_size=50304,
    ),
    "granite-3.0-1b-a400m": published(
        "GraniteMoeForCausalLM", 1_334_628_352, **GRANITE_3, hidden_size=1024,
        num_attention_heads=16, num_hidden_layers=24, num_local_experts=32,
    ),
    "granite-3.0-3b-a800m": published(
        "GraniteMoeForCausalLM", 3_298_793_472, **GRANITE_3, hidden_size=1536,
        num_attention_heads=24, num_hidden_layers=32, num_local_experts=40,
    ),
    "Phi-3.5-MoE": published(
        "PhiMoEForCausalLM", 41_873_153_344, attention_bias=True, eos_token_id=32000,
        hidden_size=4096, input_jitter_noise=0.01, intermediate_size=6400, lm_head_bias=True,
        max_position_embeddings=131072, num_attention_heads=32, num_experts_per_tok=2,
        num_hidden_layers=32, num_key_value_heads=8, num_local_experts=16,
        original_max_position_embeddings=4096, rms_norm_eps=1e-5, rope_scaling=PHI_ROPE,
        rope_theta=10000.0, router_jitter_noise=0.01, sliding_window=131072, vocab_size=32064,
    ),
}  # fmt: skip
