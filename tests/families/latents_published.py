"""Published models with latent attention: the fields of their files, and their parameters."""

from typing import Any

from families.describe import Published

COMMON = dict(
    attention_bias=False, attention_dropout=0.0, hidden_act="silu", initializer_range=0.02,
    tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rms_norm_eps=1e-6,
)  # fmt: skip
OF_V2 = dict(
    aux_loss_alpha=0.001, bos_token_id=100_000, eos_token_id=100_001, first_k_dense_replace=1,
    model_type="deepseek_v2", moe_layer_freq=1, n_shared_experts=2, norm_topk_prob=False,
    num_experts_per_tok=6, max_position_embeddings=163_840, pretraining_tp=1, rope_theta=10_000,
    scoring_func="softmax", seq_aux=True, vocab_size=102_400,
)  # fmt: skip
OF_V3 = dict(
    ep_size=1, model_type="deepseek_v3", moe_layer_freq=1, norm_topk_prob=True,
    scoring_func="sigmoid", topk_method="noaux_tc", aux_loss_alpha=0.001, seq_aux=True,
)  # fmt: skip
LARGE = dict(
    hidden_size=7168, intermediate_size=18_432, moe_intermediate_size=2048, num_hidden_layers=61,
    n_shared_experts=1, num_experts_per_tok=8, q_lora_rank=1536,
    quantization_config=dict(
        activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]
    ),
)  # fmt: skip
LONGROPE = [1.0 + i / 16 for i in range(16)]


def yarn(factor: int, mscale: float, **others: Any) -> dict[str, Any]:
    return dict(
        beta_fast=32, beta_slow=1, factor=factor, mscale=mscale, mscale_all_dim=mscale,
        original_max_position_embeddings=4096, type="yarn",
    ) | others  # fmt: skip


def published(architecture: str, num_parameters: int, *parts: Any, **file: Any) -> Published:
    fields: dict[str, Any] = dict(COMMON, architectures=[architecture])
    for part in (*parts, file):
        fields |= part
    return Published(fields, num_parameters)


PUBLISHED = {
    "DeepSeek-V3": published(
        "DeepseekV3ForCausalLM", 671_026_419_200, OF_V3, LARGE, bos_token_id=0, eos_token_id=1,
        first_k_dense_replace=3, max_position_embeddings=163_840, n_group=8, n_routed_experts=256,
        num_attention_heads=128, num_key_value_heads=128, num_nextn_predict_layers=1,
        rope_scaling=yarn(40, 1.0), rope_theta=10_000, routed_scaling_factor=2.5, topk_group=4,
        vocab_size=129_280,
    ),
    "Kimi-K2": published(
        "DeepseekV3ForCausalLM", 1_026_408_232_448, OF_V3, LARGE, model_type="kimi_k2",
        bos_token_id=163_584, eos_token_id=163_585, first_k_dense_replace=1,
        max_position_embeddings=131_072, n_group=1,
        n_routed_experts=384, num_attention_heads=64, num_key_value_heads=64,
        num_nextn_predict_layers=0, rope_scaling=yarn(32, 1.0, beta_fast=1.0, beta_slow=1.0),
        rope_theta=50_000.0, routed_scaling_factor=2.827, topk_group=1, vocab_size=163_840,
    ),
    "Moonlight-16B-A3B": published(
        "DeepseekV3ForCausalLM", 15_960_110_208, OF_V3, bos_token_id=163_584, eos_token_id=163_585,
        first_k_dense_replace=1, hidden_size=2048, intermediate_size=11_264,
        max_position_embeddings=8192, moe_intermediate_size=1408, n_group=1, n_routed_experts=64,
        n_shared_experts=2, num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27,
        num_key_value_heads=16, num_nextn_predict_layers=0, q_lora_rank=None, rms_norm_eps=1e-5,
        rope_theta=50_000.0, routed_scaling_factor=2.446, topk_group=1, vocab_size=163_840,
    ),
    "DeepSeek-V2": published(
        "DeepseekV2ForCausalLM", 235_741_434_880, OF_V2, hidden_size=5120,
        intermediate_size=12_288, moe_intermediate_size=1536, n_group=8, n_routed_experts=160,
        num_attention_heads=128, num_hidden_layers=60, num_key_value_heads=128, q_lora_rank=1536,
        rope_scaling=yarn(40, 0.707), routed_scaling_factor=16.0, topk_group=3,
        topk_method="group_limited_greedy",
    ),
    "DeepSeek-V2-Lite": published(
        "DeepseekV2ForCausalLM", 15_706_484_224, OF_V2, hidden_size=2048,
        intermediate_size=10_944, moe_intermediate_size=1408, n_group=1, n_routed_experts=64,
        num_attention_heads=16, num_hidden_layers=27, num_key_value_heads=16, q_lora_rank=None,
        rope_scaling=yarn(40, 0.707), routed_scaling_factor=1.0, topk_group=1,
        topk_method="greedy",
    ),
    "GLM-4.7-Flash": published(
        "Glm4MoeLiteForCausalLM", 29_943_393_920, eos_token_id=[154_820, 154_827, 154_829],
        first_k_dense_replace=1, hidden_size=2048, intermediate_size=10_240,
        max_position_embeddings=202_752, model_type="glm4_moe_lite", moe_intermediate_size=1536,
        n_group=1, n_routed_experts=64, n_shared_experts=1, norm_topk_prob=True,
        num_attention_heads=20, num_experts_per_tok=4, num_hidden_layers=47,
        num_key_value_heads=20, num_nextn_predict_layers=1, partial_rotary_factor=1.0,
        q_lora_rank=768, qk_nope_head_dim=192, rms_norm_eps=1e-5, rope_scaling=None,
        rope_theta=1_000_000, routed_scaling_factor=1.8, topk_group=1, topk_method="noaux_tc",
        v_head_dim=256, vocab_size=154_880,
    ),
    "MiniCPM3-4B": published(
        "MiniCPM3ForCausalLM", 4_073_875_968, bos_token_id=1, eos_token_id=[2, 73_440],
        dim_model_base=256,
        hidden_size=2560, intermediate_size=6400, kv_lora_rank=256, max_position_embeddings=32_768,
        model_type="minicpm3", num_attention_heads=40, num_hidden_layers=62,
        num_key_value_heads=40, q_lora_rank=768, qk_nope_head_dim=64, qk_rope_head_dim=32,
        rms_norm_eps=1e-5, scale_depth=1.4, scale_emb=12, tie_word_embeddings=True,
        rope_scaling=dict(
            type="longrope", long_factor=LONGROPE, short_factor=LONGROPE,
            original_max_position_embeddings=32_768,
        ),
        v_head_dim=64, vocab_size=73_448,
    ),
    "Mistral-Small-4-119B": published(
        "Mistral4ForCausalLM", 118_972_826_624, eos_token_id=2, first_k_dense_replace=0,
        hidden_size=4096,
        intermediate_size=12_288, kv_lora_rank=256, max_position_embeddings=1_048_576,
        model_type="mistral4", moe_intermediate_size=2048, n_group=1, n_routed_experts=128,
        n_shared_experts=1, norm_topk_prob=True, num_attention_heads=32, num_experts_per_tok=4,
        num_hidden_layers=36, num_key_value_heads=32, q_lora_rank=1024, qk_nope_head_dim=64,
        rope_interleave=True, rope_parameters=yarn(
            128, 1.0, rope_theta=10_000.0, original_max_position_embeddings=8192,
            llama_4_scaling_beta=0.1, max_position_embeddings=1_048_576,
        ),
        routed_scaling_factor=1.0, topk_group=1, vocab_size=131_072,
    ),
}  # fmt: skip
