"""gpt-oss: sinks, windows in every other layer, experts with biases."""

from typing import Any

from families.describe import Published, Sample


def spread(model: Any) -> None:
    """Sinks above, among and below the scores, and biases that are as large as the products."""
    for layer in model.model.layers:
        layer.self_attn.sinks.normal_(0.0, 2.0)
        layer.mlp.experts.gate_up_proj_bias.normal_(0.0, 1.0)
        layer.mlp.experts.down_proj_bias.normal_(0.0, 0.5)


CLASS = "GptOssForCausalLM"
SMALL = dict(num_local_experts=5, num_experts_per_tok=2, sliding_window=9)
SAMPLES = {
    # Its config's defaults decide windows and rope. The limit is one that many gates reach.
    "gpt-oss": Sample(
        CLASS,
        dict(SMALL, attention_bias=True, intermediate_size=56,
             swiglu_limit=1.5),
        adjust=spread, adapters="stacks",
    ),
    "gpt-oss, the other way": Sample(
        CLASS,
        dict(
            SMALL, num_local_experts=3, num_experts_per_tok=1, num_attention_heads=6, head_dim=24,
            hidden_size=40, intermediate_size=40, layer_types=["full_attention"] * 2,
            tie_word_embeddings=True, swiglu_alpha=0.9,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        adjust=spread, adapters="stacks",
    ),
}  # fmt: skip
FILE: dict[str, Any] = {
    "architectures": [CLASS], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200_002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "max_position_embeddings": 131_072, "model_type": "gpt_oss",
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_key_value_heads": 8,
    "output_router_logits": False, "pad_token_id": 199_999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
        "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150_000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201_088,
}  # fmt: skip


def layers(count: int, experts: int) -> dict[str, Any]:
    """The fields of a published model with this many layers and experts."""
    kinds = ["sliding_attention", "full_attention"] * (count // 2)
    return dict(FILE, num_hidden_layers=count, layer_types=kinds, num_local_experts=experts)


PUBLISHED = {
    "gpt-oss-20b": Published(layers(24, 32), 20_914_757_184),
    "gpt-oss-120b": Published(layers(36, 128), 116_829_156_672),
}
