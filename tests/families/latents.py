"""Families with DeepSeek's latent attention."""

from typing import Any

import torch

from families.describe import Sample
from families.experts import smaller_biases
from families.mistral3 import whole

LATENT = dict(
    num_key_value_heads=4, head_dim=None, kv_lora_rank=24, q_lora_rank=20, qk_nope_head_dim=12,
    qk_rope_head_dim=8, v_head_dim=10,
)  # fmt: skip
EXPERTS = dict(
    n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=2,
    n_group=4, topk_group=2, first_k_dense_replace=1, num_hidden_layers=3,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64,
    beta_fast=32, beta_slow=1, mscale=0.7, mscale_all_dim=1.1,
)  # fmt: skip
LONGROPE = dict(
    rope_type="longrope", rope_theta=1e4, short_factor=[1.0 + i / 8 for i in range(4)],
    long_factor=[2.0 + i for i in range(4)], original_max_position_embeddings=512,
)  # fmt: skip


@torch.no_grad()
def with_choices(model: Any) -> None:
    """Biases of the choice of experts, which decide many of them."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.3, 0.3)


SAMPLES = {
    "DeepSeek-V3": Sample("DeepseekV3ForCausalLM", LATENT | EXPERTS, adjust=with_choices),
    "DeepSeek-V3, plain queries, yarn, with biases": Sample(
        "DeepseekV3ForCausalLM",
        LATENT | EXPERTS
        | dict(q_lora_rank=None, rope_parameters=YARN, attention_bias=True, n_group=1, topk_group=1,
               rope_interleave=False, norm_topk_prob=False, hidden_size=48, n_shared_experts=1,
               first_k_dense_replace=0, num_hidden_layers=2, v_head_dim=20, kv_lora_rank=40),
        adjust=with_choices,
    ),
    "DeepSeek-V2": Sample(
        "DeepseekV2ForCausalLM",
        LATENT | EXPERTS
        | dict(topk_method="group_limited_greedy", routed_scaling_factor=3.0, attention_bias=True,
               rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707)),
        adjust=smaller_biases,
    ),
    "DeepSeek-V2, plain queries, greedy": Sample(
        "DeepseekV2ForCausalLM",
        LATENT | EXPERTS | dict(q_lora_rank=None, n_group=1, topk_group=1, n_shared_experts=1),
    ),
    "GLM-4.7-Flash": Sample(
        "Glm4MoeLiteForCausalLM",
        LATENT | EXPERTS
        | dict(mlp_layer_types=["dense", "sparse", "sparse"]),
        adjust=with_choices,
    ),
    "MiniCPM3": Sample(
        "MiniCPM3ForCausalLM",
        LATENT | dict(tie_word_embeddings=True, scale_emb=3, scale_depth=0.9, dim_model_base=32),
    ),
    "MiniCPM3, plain queries, longrope, with biases": Sample(
        "MiniCPM3ForCausalLM",
        LATENT
        | dict(q_lora_rank=None, v_head_dim=None, scale_depth=None, dim_model_base=None,
               scale_emb=2, attention_bias=True, mlp_bias=True, rope_parameters=LONGROPE),
        adjust=smaller_biases,
    ),
    "Mistral 4": Sample(
        "Mistral4ForCausalLM",
        LATENT | EXPERTS | dict(rope_parameters=YARN | dict(llama_4_scaling_beta=0.4)),
    ),
    "Mistral 3 whole, Mistral 4": whole(
        False, **LATENT | EXPERTS | dict(head_dim=20, n_group=1, topk_group=1),
        model_type="mistral4",
        rope_parameters=YARN | dict(llama_4_scaling_beta=0.2, mscale=1.0, mscale_all_dim=1.0),
    ),
    "Youtu": Sample("YoutuForCausalLM", LATENT | dict(tie_word_embeddings=True, pad_token_id=None)),
}  # fmt: skip
SPARSE = [name for name in SAMPLES if not name.startswith(("MiniCPM3", "Youtu"))]
