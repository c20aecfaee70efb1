"""LFM2: gated short convolutions next to attention, dense and with experts."""

from typing import Any

import torch

from families.describe import Published, Sample

CONV, FULL = "conv", "full_attention"


@torch.no_grad()
def spread(model: Any) -> None:
    """Filters that read all their tokens, and biases of experts that change the choice."""
    for layer in model.model.layers:
        if hasattr(layer, "conv"):
            layer.conv.conv.weight.normal_(0.0, 0.7)
        if hasattr(layer.feed_forward, "expert_bias"):
            layer.feed_forward.expert_bias.normal_(0.0, 0.3)


def spread_with_biases(model: Any, zero: int) -> None:
    """The same, with biases of two of the three parts of each `in_proj`.

    transformers pads prompts, and sees `b * x` of the biases of b and x before their first token.
    """
    spread(model)
    for layer in model.model.layers:
        if hasattr(layer, "conv"):
            layer.conv.in_proj.bias.data.unflatten(0, (3, -1))[zero] = 0.0


def without_b(model: Any) -> None:
    spread_with_biases(model, 0)


def without_x(model: Any) -> None:
    spread_with_biases(model, 2)


DENSE, SPARSE = "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)
SAMPLES = {
    "LFM2": Sample(
        DENSE, dict(layer_types=[CONV, FULL, CONV], num_hidden_layers=3, block_multiple_of=16),
        adjust=spread,
    ),
    "LFM2, width 5, biases, untied, other sizes": Sample(
        DENSE,
        dict(full_attn_idxs=[0], conv_L_cache=5, conv_bias=True, hidden_size=48, head_dim=12,
             block_auto_adjust_ff_dim=False, norm_eps=1e-3, tie_embedding=False,
             rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
        adjust=without_b,
    ),
    "LFM2-MoE": Sample(
        SPARSE,
        dict(EXPERTS, layer_types=[CONV, FULL, CONV], num_hidden_layers=3, num_dense_layers=1),
        adjust=spread,
    ),
    "LFM2-MoE, no biases of experts, scaled, not normalized": Sample(
        SPARSE,
        dict(EXPERTS, layer_types=[FULL, CONV], num_experts=5, num_experts_per_tok=3,
             use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=1.7,
             num_dense_layers=0, conv_bias=True, conv_L_cache=2),
        adjust=without_x,
    ),
}  # fmt: skip
COMMON: dict[str, Any] = {
    "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "eos_token_id": 7,
    "initializer_range": 0.02, "max_position_embeddings": 128_000, "norm_eps": 1e-05,
    "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1_000_000.0,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 65_536,
}  # fmt: skip
ATTENDING = [2, 5, 8, 10, 12, 14]


def dense(hidden: int, inner: int, heads: int, attending: list[int], **file: Any) -> dict[str, Any]:
    """The fields of a published model with attention in these layers."""
    sizes = {
        "block_dim": hidden, "conv_dim": hidden, "conv_dim_out": hidden, "hidden_size": hidden,
        "block_ff_dim": inner, "num_attention_heads": heads, "num_heads": heads,
    }  # fmt: skip
    return COMMON | {
        "architectures": [DENSE], "model_type": "lfm2", "num_hidden_layers": 16,
        "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05,
        "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True,
        "conv_use_xavier_init": True, "use_pos_enc": True, "full_attn_idxs": attending,
    } | sizes | file  # fmt: skip


PUBLISHED = {
    "LFM2-350M": Published(dense(1024, 6656, 16, ATTENDING), 354_483_968),
    "LFM2-700M": Published(dense(1536, 10_240, 24, ATTENDING), 742_489_344),
    "LFM2-1.2B": Published(dense(2048, 12_288, 32, ATTENDING), 1_170_340_608),
    "LFM2-2.6B": Published(
        dense(
            2048, 10_752, 32, [2, 5, 9, 12, 15, 18, 22, 26],
            num_hidden_layers=30, block_auto_adjust_ff_dim=False,
        ),
        2_569_272_320,
    ),
    # With the 704 biases of experts.
    "LFM2-8B-A1B": Published(
        COMMON | {
            "architectures": [SPARSE], "model_type": "lfm2_moe", "hidden_size": 2048,
            "intermediate_size": 7168, "moe_intermediate_size": 1792, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32,
            "num_experts_per_tok": 4, "num_hidden_layers": 24, "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
            "layer_types": [FULL if i in (2, 6, 10, 14, 18, 21) else CONV for i in range(24)],
        },
        8_339_930_560,
    ),
}  # fmt: skip
