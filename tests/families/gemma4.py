"""Gemma 4: layers that share keys and values, per-layer embeddings, experts beside a dense part."""

from typing import Any

import torch
from conftest import SHAPE

from families.describe import Published, Sample

FULL, SLIDING = "full_attention", "sliding_attention"
TEXT: dict[str, Any] = dict(
    num_hidden_layers=6, layer_types=[SLIDING, FULL] * 3, sliding_window=21, head_dim=16,
    global_head_dim=32, tie_word_embeddings=True, hidden_size_per_layer_input=0,
    final_logit_softcapping=30.0,
)  # fmt: skip
PER_LAYER: dict[str, Any] = dict(vocab_size_per_layer_input=270, hidden_size_per_layer_input=10)


@torch.no_grad()
def scale_outputs(model: Any) -> None:
    """Give each layer another factor of its output, which is a buffer in transformers."""
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)


def causal(seed: int = 1, **fields: Any) -> Sample:
    return Sample("Gemma4ForCausalLM", TEXT | fields, seed, scale_outputs)


SAMPLES = {
    "Gemma 4 shared": causal(
        **PER_LAYER, num_kv_shared_layers=3, use_double_wide_mlp=True, num_key_value_heads=1
    ),
    "Gemma 4 experts": causal(
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=24,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        num_hidden_layers=3,
        layer_types=[SLIDING, FULL, FULL],
    ),
    "Gemma 4 whole": Sample(
        "Gemma4ForConditionalGeneration",
        dict.fromkeys(SHAPE)
        | dict(  # the fields of `SHAPE` belong to the text
            text_config=SHAPE
            | TEXT
            | PER_LAYER
            | dict(
                num_kv_shared_layers=2, use_bidirectional_attention="vision", attention_bias=True
            ),
            vision_config=None,
            audio_config=None,
        ),
        adjust=scale_outputs,
    ),
}
PUBLISHED: dict[str, Published] = {}
