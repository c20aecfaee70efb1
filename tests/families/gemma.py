"""Gemma 1 to 3: soft caps, alternating windows, two ropes, a text model inside of a larger one."""

from typing import Any

import torch
from conftest import SHAPE

from families.describe import Published, Sample

FULL, SLIDING = "full_attention", "sliding_attention"
TIED: dict[str, Any] = dict(tie_word_embeddings=True)
CAPS: dict[str, Any] = dict(attn_logit_softcapping=2.0, final_logit_softcapping=9.0)
ROPES = {
    FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
}
SMALL_VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    image_size=28, patch_size=14, model_type="siglip_vision_model",
)  # fmt: skip


@torch.no_grad()
def shift_norms(model: Any) -> None:
    """Let the factors of norms, 1 + weight, be those that other families have as weights.

    With larger ones, the logits of Gemma 1 are so large that float32 rounds them by 1e-4.
    """
    for name, param in model.named_parameters():
        if name.endswith("norm.weight"):
            param.sub_(1)


SAMPLES = {
    "Gemma": Sample(
        "GemmaForCausalLM", TIED | dict(head_dim=24, hidden_act="gelu"), adjust=shift_norms
    ),
    "Gemma biased": Sample(
        "GemmaForCausalLM", dict(attention_bias=True, num_key_value_heads=1, head_dim=40),
        adjust=shift_norms,
    ),
    "Gemma 2": Sample(
        "Gemma2ForCausalLM",
        CAPS | dict(num_hidden_layers=3, query_pre_attn_scalar=7, sliding_window=21),
    ),
    "Gemma 2 without caps": Sample(
        "Gemma2ForCausalLM",
        dict(attn_logit_softcapping=None, final_logit_softcapping=None, head_dim=32,
             attention_bias=True, sliding_window=5, num_key_value_heads=4,
             layer_types=[FULL, SLIDING]),
    ),
    "Gemma 3": Sample(
        "Gemma3ForCausalLM",
        TIED | dict(num_hidden_layers=4, sliding_window_pattern=3, sliding_window=21,
                    num_key_value_heads=1, query_pre_attn_scalar=30, rope_parameters=ROPES),
    ),
    "Gemma 3 capped": Sample(
        "Gemma3ForCausalLM",
        dict(layer_types=[FULL, SLIDING], sliding_window=40, final_logit_softcapping=9.0,
             head_dim=256, num_attention_heads=2, attention_bias=True),
    ),
    "Gemma 3 whole": Sample(
        "Gemma3ForConditionalGeneration",
        dict.fromkeys(SHAPE)
        | dict(  # the fields of `SHAPE` belong to the text
            text_config=SHAPE | dict(sliding_window=15, layer_types=[SLIDING, FULL]),
            tie_word_embeddings=False,
            vision_config=SMALL_VISION,
            mm_tokens_per_image=4,
        ),
    ),
}  # fmt: skip


def published(
    architecture: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int,
    **others: Any,
) -> dict[str, Any]:  # fmt: skip
    """A file as Google published it, with transformers 4."""
    return dict(
        architectures=[architecture], hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        torch_dtype="bfloat16", **others,
    )  # fmt: skip


def gemma(*sizes: int, **others: Any) -> dict[str, Any]:
    return published(
        "GemmaForCausalLM", *sizes, head_dim=256, hidden_act="gelu", hidden_activation=None,
        eos_token_id=1, max_position_embeddings=8192, rms_norm_eps=1e-6, rope_scaling=None,
        rope_theta=10_000.0, vocab_size=256_000, attention_bias=False, **others,
    )  # fmt: skip


def gemma2(*sizes: int, **others: Any) -> dict[str, Any]:
    return published(
        "Gemma2ForCausalLM", *sizes, attention_bias=False, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, hidden_act="gelu_pytorch_tanh", sliding_window=4096,
        hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192, eos_token_id=1,
        rope_theta=10_000.0, vocab_size=256_000, sliding_window_size=4096, **others,
    )  # fmt: skip


def gemma3(*sizes: int, **others: Any) -> dict[str, Any]:
    return published(
        "Gemma3ForCausalLM", *sizes, attention_bias=False, attn_logit_softcapping=None,
        final_logit_softcapping=None, head_dim=256, hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=32_768, query_pre_attn_scalar=256, rope_local_base_freq=10_000,
        rope_scaling=None, rope_theta=1_000_000, sliding_window=512, vocab_size=262_144,
        eos_token_id=[1, 106], **others,
    )  # fmt: skip


def gemma3_whole(hidden: int, inner: int, layers: int, **others: Any) -> dict[str, Any]:
    """The files leave out what is a default of transformers."""
    text = dict(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        rope_scaling={"factor": 8.0, "rope_type": "linear"}, sliding_window=1024,
        model_type="gemma3_text", **others,
    )  # fmt: skip
    return dict(
        architectures=["Gemma3ForConditionalGeneration"], torch_dtype="bfloat16", text_config=text,
        eos_token_id=[1, 106],
    )  # fmt: skip


PUBLISHED = {
    "Gemma 2B": Published(gemma(2048, 16_384, 18, 8, 1), 2_506_172_416),
    "Gemma 7B": Published(gemma(3072, 24_576, 28, 16, 16), 8_537_680_896),
    "Gemma 2 2B": Published(
        gemma2(2304, 9216, 26, 8, 4, head_dim=256, query_pre_attn_scalar=256), 2_614_341_888
    ),
    "Gemma 2 9B": Published(
        gemma2(3584, 14_336, 42, 16, 8, head_dim=256, query_pre_attn_scalar=256), 9_241_705_984
    ),
    "Gemma 2 27B": Published(
        gemma2(4608, 36_864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144), 27_227_128_320
    ),
    "Gemma 3 270M": Published(
        gemma3(640, 2048, 18, 4, 1, layer_types=([SLIDING] * 5 + [FULL]) * 3,
               _sliding_window_pattern=6),
        268_098_176,
    ),
    "Gemma 3 1B": Published(gemma3(1152, 6912, 26, 4, 1, sliding_window_pattern=6), 999_885_952),
    "Gemma 3 4B": Published(gemma3_whole(2560, 10_240, 34), 3_880_263_168),
    "Gemma 3 12B": Published(
        gemma3_whole(3840, 15_360, 48, num_attention_heads=16, num_key_value_heads=8),
        11_766_034_176,
    ),
    "Gemma 3 27B": Published(
        gemma3_whole(5376, 21_504, 62, head_dim=128, num_attention_heads=32,
                     num_key_value_heads=16, query_pre_attn_scalar=168),
        27_009_346_304,
    ),
}  # fmt: skip
