"""Dense families that differ from Llama in norms, ropes, windows or factors."""

from typing import Any

import torch

from families.describe import Sample

YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128)
GROWING = {**YARN, "llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 50}
FULL, SLIDING = "full_attention", "sliding_attention"
MULTIPLIERS = dict(
    embedding_multiplier=3.0, logits_scaling=2.5, residual_multiplier=0.4, attention_multiplier=0.1
)


@torch.no_grad()
def varied(model: Any) -> None:
    """Small biases, as large ones would make all tokens equal, and larger factors of heads."""
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            param.mul_(0.1)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            param.uniform_(0.7, 2.0)


SAMPLES = {
    "Olmo2": Sample("Olmo2ForCausalLM", dict(num_hidden_layers=3), adjust=varied),
    "Olmo2, biases and one key head": Sample(
        "Olmo2ForCausalLM", dict(attention_bias=True, num_key_value_heads=1, hidden_size=72,
                                 head_dim=18), adjust=varied,
    ),
    "Olmo3": Sample(
        "Olmo3ForCausalLM", dict(num_hidden_layers=4, sliding_window=24), adjust=varied
    ),
    "Olmo3, a scaled rope": Sample(
        "Olmo3ForCausalLM", dict(
            num_hidden_layers=3, sliding_window=9, layer_types=[FULL, SLIDING, FULL],
            rope_parameters={FULL: YARN, SLIDING: dict(rope_type="default", rope_theta=5e3)},
        ), adjust=varied,
    ),
    "Granite": Sample("GraniteForCausalLM", MULTIPLIERS),
    "Granite, tied, with biases": Sample(
        "GraniteForCausalLM", {**MULTIPLIERS, "tie_word_embeddings": True, "attention_bias": True,
                               "mlp_bias": True, "embedding_multiplier": 0.7},
        seed=4, adjust=varied,
    ),
    "SeedOss": Sample("SeedOssForCausalLM", dict(attention_bias=True)),
    "SeedOss, biases of outputs": Sample(
        "SeedOssForCausalLM", dict(attention_bias=True, attention_out_bias=True, mlp_bias=True),
        adjust=varied,
    ),
    "Ministral3": Sample("Ministral3ForCausalLM", dict(rope_parameters=GROWING)),
    "Ministral3, windows": Sample(
        "Ministral3ForCausalLM", dict(rope_parameters=GROWING, sliding_window=30)
    ),
    "HunYuan": Sample("HunYuanDenseV1ForCausalLM"),
    "HunYuan, alpha": Sample(
        "HunYuanDenseV1ForCausalLM", dict(
            head_dim=12, num_attention_heads=6, attention_bias=True,
            rope_parameters=dict(rope_type="dynamic", rope_theta=1e3, alpha=50.0, factor=1.0),
        ), adjust=varied,
    ),
    "Exaone4": Sample("Exaone4ForCausalLM", dict(num_hidden_layers=4, sliding_window=20)),
    "Exaone4, no windows": Sample(
        "Exaone4ForCausalLM", dict(sliding_window=None, layer_types=[FULL] * 2)
    ),
    "Ernie4.5": Sample("Ernie4_5ForCausalLM"),
    "Ernie4.5, biases": Sample(
        "Ernie4_5ForCausalLM", dict(use_bias=True, head_dim=20, tie_word_embeddings=True),
        adjust=varied,
    ),
    "Glm4": Sample("Glm4ForCausalLM", dict(attention_bias=True)),
    "Glm4, a quarter rotated": Sample(
        "Glm4ForCausalLM", dict(
            rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.25)
        ),
    ),
    "Helium": Sample("HeliumForCausalLM", dict(num_key_value_heads=4)),
    "Helium, biases": Sample(
        "HeliumForCausalLM", dict(attention_bias=True, mlp_bias=True), adjust=varied
    ),
    "NanoChat": Sample("NanoChatForCausalLM", dict(hidden_act="relu2")),
    "NanoChat, a scaled rope": Sample(
        "NanoChatForCausalLM", dict(
            hidden_act="relu2", final_logit_softcapping=4.0, attention_bias=True,
            rope_parameters=YARN, num_key_value_heads=4,
        ), adjust=varied,
    ),
    "Cohere": Sample("CohereForCausalLM"),
    "Cohere, norms of heads": Sample(
        "CohereForCausalLM", dict(use_qk_norm=True, attention_bias=True, tie_word_embeddings=True,
                                  logit_scale=0.3), adjust=varied,
    ),
    "Cohere2": Sample("Cohere2ForCausalLM", dict(num_hidden_layers=4, sliding_window=25), seed=3),
    "Cohere2, biases": Sample(
        "Cohere2ForCausalLM", dict(
            num_hidden_layers=3, sliding_window=7, layer_types=[FULL, FULL, SLIDING],
            attention_bias=True,
        ), adjust=varied,
    ),
}  # fmt: skip
