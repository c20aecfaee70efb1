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


def published(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, pattern: int, **others: Any
) -> dict[str, Any]:
    """A file as Google published it; each layer number `pattern` has no window."""
    kinds = [SLIDING if (index + 1) % pattern else FULL for index in range(layers)]
    text = dict(
        vocab_size=262_144, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=256, layer_types=kinds,
        global_head_dim=512, final_logit_softcapping=30.0, rms_norm_eps=1e-6, eos_token_id=1,
        hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True, **others,
    )  # fmt: skip
    return dict(
        architectures=["Gemma4ForConditionalGeneration"], dtype="bfloat16", text_config=text,
        eos_token_id=[1, 106], tie_word_embeddings=True,
    )  # fmt: skip


LARGE: dict[str, Any] = dict(
    attention_k_eq_v=True, sliding_window=1024, hidden_size_per_layer_input=0,
    use_bidirectional_attention="vision",
)  # fmt: skip
# With the factors of the layers' outputs, which transformers counts as buffers.
PUBLISHED = {
    "Gemma 4 E2B": Published(
        published(1536, 6144, 35, 8, 1, 5, num_kv_shared_layers=20, use_double_wide_mlp=True),
        4_628_569_379,
    ),
    "Gemma 4 E4B": Published(
        published(2560, 10_240, 42, 8, 2, 6, num_kv_shared_layers=18), 7_463_013_418
    ),
    "Gemma 4 26B-A4B": Published(
        published(
            2816, 2112, 30, 16, 8, 6, num_global_key_value_heads=2, enable_moe_block=True,
            num_experts=128, top_k_experts=8, moe_intermediate_size=704, **LARGE,
        ),
        25_233_141_790,
    ),
    "Gemma 4 31B": Published(
        published(5376, 21_504, 60, 32, 16, 6, num_global_key_value_heads=4, **LARGE),
        30_697_345_340,
    ),
}  # fmt: skip
