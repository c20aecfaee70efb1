"""Names and metadata of dense families in GGUF files, as llama.cpp's converter writes them."""

from typing import Any

POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
# By the names of llama.cpp's architectures, what differs from Llama's names.
DENSE_PARTS: dict[str, dict[str, str]] = {
    "olmo2": POST_NORMS, "exaone4": POST_NORMS,
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    },
    "hunyuan-dense": {
        "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm",
    },
}  # fmt: skip
MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip


def dense_metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """The keys of a config.json that not all models have."""
    values: dict[str, Any] = {}
    if "layer_norm_eps" in config:
        values["attention.layer_norm_epsilon"] = float(config["layer_norm_eps"])
    else:
        values["attention.layer_norm_rms_epsilon"] = float(config["rms_norm_eps"])
    if architecture == "granite":
        values |= {key: float(config[name]) for key, name in MULTIPLIERS.items()}
    if "logit_scale" in config:
        values["logit_scale"] = float(config["logit_scale"])
    if config["model_type"] in ("olmo3", "exaone4", "cohere2") and config["sliding_window"]:
        values["attention.sliding_window"] = config["sliding_window"]
        if architecture != "cohere2":
            flags = [kind == "sliding_attention" for kind in config["layer_types"]]
            values["attention.sliding_window_pattern"] = flags
    if architecture in ("command-r", "cohere2", "hunyuan-dense"):
        values["rope.scaling.type"] = "none"
    return values
