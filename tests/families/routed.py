"""Families with experts that a bias helps to choose, or next to layers that all tokens use."""

from typing import Any

import torch

from families.describe import Published, Sample
from families.experts import smaller_biases

BIAS = "e_score_correction_bias"
GLM, DOTS, SOLAR = "Glm4MoeForCausalLM", "Dots1ForCausalLM", "SolarOpenForCausalLM"
ERNIE, HUNYUAN = "Ernie4_5_MoeForCausalLM", "HunYuanMoEV1ForCausalLM"
ROUTED = dict(
    n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1
)
TWO_GROUPS = dict(n_group=3, topk_group=2, routed_scaling_factor=1.7)


@torch.no_grad()
def spread(model: Any) -> None:
    """Biases that change the choice of experts."""
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith(BIAS):
            tensor.normal_(0.0, 0.3)


@torch.no_grad()
def spread_softly(model: Any) -> None:
    """The same for a softmax, with smaller differences among experts."""
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith(BIAS):
            tensor.normal_(0.0, 0.1)


SAMPLES = {
    "GLM-4.5": Sample(GLM, dict(ROUTED, attention_bias=True, num_hidden_layers=3), adjust=spread),
    "GLM-4.5, norms of heads, groups, two shared": Sample(
        GLM,
        dict(ROUTED, **TWO_GROUPS, use_qk_norm=True, first_k_dense_replace=0, n_shared_experts=2,
             norm_topk_prob=False, rope_parameters={"rope_type": "default", "rope_theta": 5000.0,
             "partial_rotary_factor": 0.25}),
        adjust=spread,
    ),
    "dots.llm1": Sample(
        DOTS,
        dict(ROUTED, first_k_dense_replace=1, n_shared_experts=2, norm_topk_prob=True,
             routed_scaling_factor=2.5, sliding_window=None),
        adjust=spread,
    ),
    "dots.llm1, with a window and biases": Sample(
        DOTS,
        dict(ROUTED, **TWO_GROUPS, sliding_window=20, max_window_layers=1, attention_bias=True,
             hidden_size=48, head_dim=12),
        adjust=spread,
    ),
    "Solar Open": Sample(SOLAR, dict(ROUTED, intermediate_size=None), adjust=spread),
    "Solar Open, scaled, with biases and yarn": Sample(
        SOLAR,
        dict(ROUTED, n_routed_experts=5, num_experts_per_tok=3, attention_bias=True,
             routed_scaling_factor=0.6, rope_parameters={
                 "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0,
                 "original_max_position_embeddings": 256}),
        adjust=spread,
    ),
    "ERNIE 4.5 MoE": Sample(
        ERNIE,
        dict(moe_num_experts=6, moe_k=2, moe_intermediate_size=24, moe_num_shared_experts=2),
        adjust=spread_softly,
    ),
    "ERNIE 4.5 MoE, every other layer, no shared, tied": Sample(
        ERNIE,
        dict(moe_num_experts=5, moe_k=3, moe_intermediate_size=32, moe_num_shared_experts=0,
             moe_layer_interval=2, moe_layer_start_index=0, moe_layer_end_index=2,
             num_hidden_layers=4, moe_norm_min=0.7, tie_word_embeddings=True),
        adjust=spread_softly,
    ),
    "HunYuan MoE": Sample(
        HUNYUAN, dict(num_experts=6, moe_topk=2, intermediate_size=48, attention_bias=True),
        adjust=smaller_biases,
    ),
    "HunYuan MoE, tied, lists, alpha": Sample(
        HUNYUAN,
        dict(num_experts=4, moe_topk=[3, 3], intermediate_size=64, tie_word_embeddings=True,
             rope_parameters={"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0,
                              "rope_theta": 1e4}),
    ),
}  # fmt: skip


def published(architecture: str, num_parameters: int, **file: Any) -> Published:
    """A model with the fields that all files have."""
    common = dict(architectures=[architecture], hidden_act="silu", torch_dtype="bfloat16")
    return Published({**common, **file}, num_parameters)


GLM_45: dict[str, Any] = dict(
    attention_bias=True, eos_token_id=[151329, 151336, 151338], head_dim=128,
    max_position_embeddings=131072, n_group=1, n_shared_experts=1, norm_topk_prob=True,
    num_attention_heads=96, num_experts_per_tok=8, num_key_value_heads=8,
    num_nextn_predict_layers=1, partial_rotary_factor=0.5, rms_norm_eps=1e-5, rope_scaling=None,
    rope_theta=1e6, tie_word_embeddings=False, topk_group=1, vocab_size=151552,
)  # fmt: skip
ERNIE_45: dict[str, Any] = dict(
    eos_token_id=2, max_position_embeddings=131072, moe_layer_interval=1, moe_num_experts=64,
    num_nextn_predict_layers=1, rms_norm_eps=1e-5, rope_theta=500000.0, use_bias=False,
    vocab_size=103424,
)  # fmt: skip
ALPHA: dict[str, Any] = dict(
    alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=1.0,
    type="dynamic",
)  # fmt: skip
PUBLISHED: dict[str, Published] = {
    "GLM-4.5-Air": published(
        GLM, 106_852_251_264,
        **GLM_45, first_k_dense_replace=1, hidden_size=4096, intermediate_size=10944,
        moe_intermediate_size=1408, n_routed_experts=128, num_hidden_layers=46,
        routed_scaling_factor=1.0, use_qk_norm=False,
    ),
    "GLM-4.5": published(
        GLM, 352_797_829_024,
        **GLM_45, first_k_dense_replace=3, hidden_size=5120, intermediate_size=12288,
        moe_intermediate_size=1536, n_routed_experts=160, num_hidden_layers=92,
        routed_scaling_factor=2.5, use_qk_norm=True,
    ),
    "dots.llm1": published(
        DOTS, 142_774_381_696,
        attention_bias=False, eos_token_id=151645, first_k_dense_replace=1,
        hidden_size=4096, intermediate_size=10944, max_position_embeddings=32768,
        max_window_layers=62, moe_intermediate_size=1408, n_group=1, n_routed_experts=128,
        n_shared_experts=2, norm_topk_prob=True, num_attention_heads=32, num_experts_per_tok=6,
        num_hidden_layers=62, num_key_value_heads=32, rms_norm_eps=1e-5, rope_scaling=None,
        rope_theta=1e7, routed_scaling_factor=2.5, sliding_window=None, tie_word_embeddings=False,
        topk_group=1, use_sliding_window=False, vocab_size=152064,
    ),
    "Solar-Open-100B": published(
        SOLAR, 102_651_799_552,
        attention_bias=False, eos_token_id=2, first_k_dense_replace=0, head_dim=128,
        hidden_size=4096, intermediate_size=10240, max_position_embeddings=131072,
        moe_intermediate_size=1280, n_group=1, n_routed_experts=128, n_shared_experts=1,
        norm_topk_prob=True, num_attention_heads=64, num_experts_per_tok=8, num_hidden_layers=48,
        num_key_value_heads=8, partial_rotary_factor=1.0, rms_norm_eps=1e-5, rope_theta=1e6,
        rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
        routed_scaling_factor=1.0, tie_word_embeddings=False, topk_group=1, use_qk_norm=False,
        vocab_size=196608,
    ),
    "ERNIE-4.5-21B-A3B": published(
        ERNIE, 21_825_437_888,
        **ERNIE_45, hidden_size=2560, intermediate_size=12288, moe_intermediate_size=1536,
        moe_k=6, moe_layer_start_index=1, moe_num_shared_experts=2, num_attention_heads=20,
        num_hidden_layers=28, num_key_value_heads=4, tie_word_embeddings=True,
    ),
    "ERNIE-4.5-300B-A47B": published(
        ERNIE, 299_484_163_264,
        **ERNIE_45, hidden_size=8192, intermediate_size=28672, moe_intermediate_size=3584,
        moe_k=8, moe_layer_start_index=3, moe_num_shared_experts=0, num_attention_heads=64,
        num_hidden_layers=54, num_key_value_heads=8, tie_word_embeddings=False,
    ),
    "Hunyuan-A13B": published(
        HUNYUAN, 80_393_183_232,
        attention_bias=False, eos_token_id=127960, head_dim=128, hidden_size=4096,
        intermediate_size=3072, max_position_embeddings=32768, moe_intermediate_size=[3072] * 32,
        moe_layer_num_skipped=0, moe_topk=[8] * 32, norm_topk_prob=True, num_attention_heads=32,
        num_experts=64, num_hidden_layers=32, num_key_value_heads=8, num_shared_expert=[1] * 32,
        rms_norm_eps=1e-5, rope_scaling=ALPHA, rope_theta=10000.0, tie_word_embeddings=True,
        use_cla=False, use_mixed_mlp_moe=True, use_qk_norm=True, vocab_size=128167,
    ),
}  # fmt: skip
