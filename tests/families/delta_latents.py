"""Families with channel delta nets next to latent attention: Kimi Linear, Ling 3."""

from typing import Any

import torch

from families.describe import Published, Sample
from families.hybrids import FULL, LINEAR, remember
from families.latents import EXPERTS, LATENT, with_choices

OTHERS = {
    n: v for n, v in EXPERTS.items() if n not in ("n_routed_experts", "first_k_dense_replace")
}
# With a small eps, the norms after the delta rule multiply the rounding of outputs near zero.
DELTA: dict[str, Any] = LATENT | OTHERS | dict(
    num_experts=8, rms_norm_eps=1e-3, linear_num_heads=4, linear_head_dim=12,
    linear_conv_kernel_dim=4, layer_types=[LINEAR, FULL, LINEAR],
)  # fmt: skip


@torch.no_grad()
def mixed(model: Any) -> None:
    """Memories that last, and biases that choose experts."""
    remember(model)
    with_choices(model)


SAMPLES = {
    "Kimi Linear": Sample("KimiLinearForCausalLM", DELTA | dict(q_lora_rank=None), adjust=mixed),
    "Kimi Linear, low-rank queries, with biases": Sample(
        "KimiLinearForCausalLM",
        DELTA
        | dict(linear_num_heads=2, linear_head_dim=16, linear_conv_kernel_dim=3, n_group=1,
               topk_group=1, attention_bias=True, layer_types=[FULL, LINEAR, LINEAR],
               mlp_layer_types=["sparse", "sparse", "dense"], norm_topk_prob=False),
        adjust=mixed,
    ),
}  # fmt: skip
# Names that Ling's config has, and the fields of these in the sample.
LING = {n: v for n, v in DELTA.items() if n not in ("q_lora_rank", "num_local_experts")} | dict(
    rope_theta=5000.0, short_conv_kernel_size=4, layer_group_size=2,
)  # fmt: skip
SAMPLES |= {
    "Ling 3": Sample("BailingHybridForCausalLM", LING | dict(head_dim=12), adjust=mixed),
    "Ling 3, without a bound": Sample(
        "BailingHybridForCausalLM",
        LING
        | dict(kda_safe_gate=False, kda_lower_bound=-4.0, linear_num_heads=2, linear_head_dim=16,
               linear_conv_kernel_dim=3, norm_topk_prob=False, n_group=1, topk_group=1,
               first_k_dense_replace=0, num_hidden_layers=2, layer_types=None,
               attention_bias=True),
        adjust=mixed,
    ),
}  # fmt: skip
PUBLISHED = {
    "Kimi-Linear-48B-A3B": Published(
        dict(
            architectures=["KimiLinearForCausalLM"], bos_token_id=163_584, dtype="bfloat16",
            eos_token_id=163_586, first_k_dense_replace=1, head_dim=72, hidden_act="silu",
            hidden_size=2304, intermediate_size=9216, kv_lora_rank=512,
            linear_attn_config=dict(
                full_attn_layers=[4, 8, 12, 16, 20, 24, 27], head_dim=128,
                kda_layers=[i for i in range(1, 27) if i % 4], num_heads=32,
                short_conv_kernel_size=4,
            ),
            mla_use_nope=True, model_max_length=1_048_576, model_type="kimi_linear",
            moe_intermediate_size=1024, moe_layer_freq=1, moe_renormalize=True,
            moe_router_activation_func="sigmoid", num_attention_heads=32, num_expert_group=1,
            num_experts=256, num_experts_per_token=8, num_hidden_layers=27, num_key_value_heads=32,
            num_nextn_predict_layers=0, num_shared_experts=1, q_lora_rank=None,
            qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-5, rope_scaling=None,
            rope_theta=10_000.0, routed_scaling_factor=2.446, tie_word_embeddings=False,
            topk_group=1, use_grouped_topk=True, v_head_dim=128, vocab_size=163_840,
        ),
        49_122_681_728,
    ),
    "Ling-3.0-Flash": Published(  # the config class's sizes
        dict(
            architectures=["BailingHybridForCausalLM"], head_dim=128, layer_group_size=6,
            num_experts=512, num_hidden_layers=42,
        ),
        124_414_211_552,
    ),
}  # fmt: skip
