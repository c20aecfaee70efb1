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
    shared_expert_intermediate_size=48,
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
PUBLISHED: dict[str, Published] = {}
