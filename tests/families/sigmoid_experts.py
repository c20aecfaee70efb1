"""MiniMax-M2, Trinity, Laguna, MiMo-V2: experts that sigmoids choose, next to other attention."""

from typing import Any

import torch

from families.describe import Published, Sample

FULL, SLIDING = "full_attention", "sliding_attention"
MINIMAX, AFMOE, LAGUNA = "MiniMaxM2ForCausalLM", "AfmoeForCausalLM", "LagunaForCausalLM"
MIMO = "MiMoV2FlashForCausalLM"


@torch.no_grad()
def spread(model: Any) -> None:
    """Biases of experts that change the choice, and sinks above, among and below the scores."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            tensor.normal_(0.0, 0.3)
        elif name.endswith("sinks"):
            tensor.normal_(0.0, 2.0)


LOCAL = dict(num_local_experts=6, num_experts_per_tok=2)
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, sliding_window=9)
ROUTED = dict(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, sliding_window=9)
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0,
}  # fmt: skip
OTHERS = "all but shared experts"  # with adapters: transformers renames these twice
PLAIN = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}
SAMPLES = {
    "MiniMax-M2": Sample(MINIMAX, dict(LOCAL, rotary_dim=8), adjust=spread),
    "MiniMax-M2, one key head, rotated whole": Sample(
        MINIMAX,
        dict(num_local_experts=5, num_experts_per_tok=3, num_key_value_heads=1, head_dim=24,
             hidden_size=48, intermediate_size=72, tie_word_embeddings=True),
        adjust=spread,
    ),
    "Trinity": Sample(
        AFMOE,
        dict(EXPERTS, num_hidden_layers=3, layer_types=[SLIDING, FULL, FULL], mup_enabled=True,
             num_shared_experts=2, route_scale=2.5),
        adjust=spread,
    ),
    "Trinity, every second layer, none dense, tied": Sample(
        AFMOE,
        dict(EXPERTS, global_attn_every_n_layers=2, num_dense_layers=0, num_shared_experts=1,
             num_attention_heads=6, head_dim=24, hidden_size=48, tie_word_embeddings=True),
        adjust=spread,
    ),
    "Laguna": Sample(
        LAGUNA,
        dict(EXPERTS, num_hidden_layers=3, layer_types=[FULL, SLIDING, FULL],
             num_attention_heads_per_layer=[4, 8, 6], shared_expert_intermediate_size=48,
             moe_router_logit_softcapping=0.7, moe_routed_scaling_factor=2.5,
             rope_parameters={FULL: YARN, SLIDING: PLAIN}),
        adjust=spread, adapters=OTHERS,
    ),
    "Laguna, gates for elements, its ropes, all sparse": Sample(
        LAGUNA,
        dict(EXPERTS, gating="per-element", mlp_layer_types=["sparse"] * 2,
             shared_expert_intermediate_size=32, layer_types=[SLIDING, FULL],
             num_key_value_heads=1, tie_word_embeddings=True),
        adjust=spread, adapters=OTHERS,
    ),
    "MiMo-V2": Sample(
        MIMO, dict(ROUTED, head_dim=24, v_head_dim=16, num_key_value_heads=1), adjust=spread
    ),
    "MiMo-V2, groups, biases, other ropes": Sample(
        MIMO,
        dict(ROUTED, num_hidden_layers=3, layer_types=[SLIDING, FULL, FULL], v_head_dim=8,
             mlp_layer_types=["sparse", "dense", "sparse"], n_routed_experts=8, n_group=4,
             topk_group=2, norm_topk_prob=False, routed_scaling_factor=1.7, attention_bias=True,
             attention_value_scale=None, rope_parameters={FULL: YARN, SLIDING: PLAIN}),
        adjust=spread,
    ),
}  # fmt: skip


def published(architecture: str, num_parameters: int, **file: Any) -> Published:
    """A model with the fields that all files have."""
    common = dict(architectures=[architecture], hidden_act="silu", tie_word_embeddings=False)
    return Published({**common, **file}, num_parameters)


TRINITY = dict(
    global_attn_every_n_layers=4, head_dim=128, max_position_embeddings=131072, mup_enabled=True,
    n_group=1, num_dense_layers=2, num_expert_groups=1, num_experts=128, num_experts_per_tok=8,
    num_limited_groups=1, num_shared_experts=1, rms_norm_eps=1e-5, rope_scaling=None,
    rope_theta=10000, route_norm=True, route_scale=2.826, score_func="sigmoid",
    sliding_window=2048, topk_group=1, vocab_size=200192,
)  # fmt: skip
BLOCKS = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128])
PUBLISHED = {
    "MiniMax-M2": published(
        MINIMAX, 228_689_764_864, attn_type_list=[1] * 62, head_dim=128, hidden_size=3072,
        intermediate_size=1536, max_position_embeddings=196608, mtp_transformer_layers=1,
        num_attention_heads=48, num_experts_per_tok=8, num_hidden_layers=62,
        num_key_value_heads=8, num_local_experts=256, num_mtp_modules=3,
        qk_norm_type="per_layer", rms_norm_eps=1e-6, rope_theta=5000000, rotary_dim=64,
        scoring_func="sigmoid", shared_intermediate_size=0, use_mtp=True, use_qk_norm=True,
        use_routing_bias=True, vocab_size=200064,
        quantization_config=dict(
            BLOCKS, fmt="float8_e4m3fn",
            modules_to_not_convert=["gate", "e_score_correction_bias", "lm_head"],
        ),
    ),
    "Trinity-Nano": published(
        AFMOE, 6_120_003_328, **TRINITY, hidden_size=1024, intermediate_size=3072,
        moe_intermediate_size=256, num_attention_heads=8, num_hidden_layers=56,
        num_key_value_heads=2,
    ),
    "Trinity-Mini": published(
        AFMOE, 26_123_974_400, **TRINITY, hidden_size=2048, intermediate_size=6144,
        moe_intermediate_size=1024, num_attention_heads=32, num_hidden_layers=32,
        num_key_value_heads=4,
        layer_types=[*[SLIDING] * 3, FULL] * 8,
    ),
    "Laguna-S-2.1": published(
        LAGUNA, 117_561_977_600, attention_bias=False, decoder_sparse_step=1, eos_token_id=[2, 24],
        gating="per-head", gating_types=["per_head"] * 48, head_dim=128, hidden_size=3072,
        intermediate_size=12288, layer_types=[FULL, *[SLIDING] * 3] * 12,
        max_position_embeddings=1048576, mlp_layer_types=["dense", *["sparse"] * 47],
        mlp_only_layers=[0], moe_apply_router_weight_on_input=False, moe_intermediate_size=1024,
        moe_routed_scaling_factor=2.5, moe_router_logit_softcapping=0.0, norm_topk_prob=True,
        num_attention_heads=48, num_attention_heads_per_layer=[48, *[72] * 3] * 12,
        num_experts=256, num_experts_per_tok=10, num_hidden_layers=48, num_key_value_heads=8,
        rms_norm_eps=1e-6, shared_expert_intermediate_size=1024, sliding_window=512,
        vocab_size=100352,
        rope_parameters={
            FULL: dict(
                rope_type="yarn", rope_theta=500000.0, factor=128.0, beta_slow=1.0,
                beta_fast=32.0, original_max_position_embeddings=8192,
                attention_factor=1.4852030263919618, partial_rotary_factor=0.5,
            ),
            SLIDING: dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0),
        },
    ),
    "MiMo-V2-Flash": published(
        MIMO, 308_778_780_864, add_full_attention_sink_bias=False, add_swa_attention_sink_bias=True,
        attention_bias=False, attention_chunk_size=128, attention_value_scale=0.707,
        head_dim=192, hidden_size=4096, intermediate_size=16384, layernorm_epsilon=1e-5,
        hybrid_layer_pattern=[0, *[1] * 4, *[0, *[1] * 5] * 7, 0], max_position_embeddings=262144,
        moe_intermediate_size=2048, moe_layer_freq=[0, *[1] * 47], n_group=1,
        n_routed_experts=256, n_shared_experts=None, norm_topk_prob=True, num_attention_heads=64,
        num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4,
        partial_rotary_factor=0.334, rope_theta=5000000, routed_scaling_factor=None,
        scoring_func="sigmoid", sliding_window=128, sliding_window_size=128, swa_head_dim=192,
        swa_num_attention_heads=64, swa_num_key_value_heads=8, swa_rope_theta=10000,
        swa_v_head_dim=128, topk_group=1, topk_method="noaux_tc", v_head_dim=128,
        vocab_size=152576,
        quantization_config=dict(
            BLOCKS, fmt="e4m3",
            ignored_layers=[f"model.layers.{i}.self_attn.o_proj" for i in range(48)],
        ),
    ),
}  # fmt: skip
