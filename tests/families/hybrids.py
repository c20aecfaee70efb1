"""Models with gated delta nets: Qwen3-Next, Qwen3.5, OLMo Hybrid."""

from typing import Any

import torch
from conftest import EXPERTS, SHAPE

from families.describe import Published, Sample

FULL, LINEAR = "full_attention", "linear_attention"
# Two heads of values share each head of keys, and all sizes differ. With a small eps, the norms
# after the delta rule multiply the rounding of outputs near zero: transformers' float32 would then
# be farther from its float64 than the limit.
DELTA: dict[str, Any] = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=12, linear_conv_kernel_dim=4, rms_norm_eps=1e-3,
)  # fmt: skip
SPARSE: dict[str, Any] = EXPERTS | dict(shared_expert_intermediate_size=40)
# transformers divides convolutions into three equal tensors, whatever the sizes are.
EQUAL = dict(linear_key_head_dim=12, linear_value_head_dim=6)
MANY: dict[str, Any] = dict(num_hidden_layers=4, layer_types=[LINEAR, LINEAR, FULL, LINEAR])


@torch.no_grad()
def remember(model: Any) -> None:
    """Memories that last, and keys that are not orthogonal to queries.

    Else outputs are so small that the norms after them multiply the errors of any float32.
    """
    for name, param in model.named_parameters():
        if "conv1d" in name:
            param.normal_(0.0, 1.5)
        elif name.endswith("A_log"):
            param.uniform_(-4.0, 1.0)


def whole(architecture: str, **text: Any) -> Sample:
    """A model that also sees. The fields of `SHAPE` belong to its text."""
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=64,
        num_position_embeddings=16,
    )  # fmt: skip
    fields = dict(text_config=SHAPE | DELTA | text, vision_config=vision)
    return Sample(architecture, dict.fromkeys(SHAPE) | fields, adjust=remember)


SAMPLES = {
    "Qwen3.5": Sample(
        "Qwen3_5ForCausalLM", DELTA | dict(layer_types=[LINEAR, FULL]), adjust=remember
    ),
    "Qwen3.5 tied": Sample(
        "Qwen3_5ForCausalLM",
        dict(
            linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=16,
            linear_value_head_dim=8, linear_conv_kernel_dim=3, rms_norm_eps=1e-3,
            num_hidden_layers=3, layer_types=[FULL, LINEAR, LINEAR],
            tie_word_embeddings=True, attention_bias=True,
            num_key_value_heads=1, head_dim=32,
            rope_parameters=dict(
                rope_type="default", rope_theta=5000.0, partial_rotary_factor=0.5,
                mrope_section=[3, 3, 2], mrope_interleaved=True,
            ),
        ),
        adjust=remember,
    ),
    "Qwen3.5 experts": Sample(
        "Qwen3_5MoeForCausalLM", DELTA | SPARSE | dict(layer_types=[LINEAR, FULL]), adjust=remember
    ),
    "Qwen3.5 whole": whole("Qwen3_5ForConditionalGeneration", **MANY),
    "Qwen3.5 experts whole": whole(
        "Qwen3_5MoeForConditionalGeneration", **SPARSE, layer_types=[LINEAR, FULL]
    ),
    "Qwen3-Next": Sample(
        "Qwen3NextForCausalLM", DELTA | SPARSE | dict(layer_types=[LINEAR, FULL]), 2, remember
    ),
    "Qwen3-Next partly dense": Sample(
        "Qwen3NextForCausalLM",
        DELTA
        | SPARSE
        | dict(
            mlp_only_layers=[1], layer_types=[FULL, LINEAR], norm_topk_prob=False,
            linear_num_value_heads=6,
        ),
        seed=3,
        adjust=remember,
    ),
    "OLMo Hybrid": Sample(
        "OlmoHybridForCausalLM",
        DELTA
        | EQUAL
        | dict(
            layer_types=[LINEAR, FULL],
            rope_parameters=dict(rope_type="default", rope_theta=None),
        ),
        2,
        remember,
    ),
    "OLMo Hybrid rotated": Sample(
        "OlmoHybridForCausalLM",
        dict(
            num_hidden_layers=3, layer_types=[LINEAR, FULL, FULL],
            linear_allow_neg_eigval=False, linear_value_head_dim=12, tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=500_000.0),
        ),
        adjust=remember,
    ),
}  # fmt: skip
ROPE: dict[str, Any] = dict(
    rope_type="default", rope_theta=10_000_000, partial_rotary_factor=0.25,
    mrope_section=[11, 11, 10], mrope_interleaved=True,
)  # fmt: skip


def published(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, value_heads: int,
    tied: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The config of a dense model; the other fields have their defaults."""
    text = dict(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads,
        linear_num_value_heads=value_heads, attn_output_gate=True, full_attention_interval=4,
        mtp_num_hidden_layers=1, rope_parameters=ROPE, tie_word_embeddings=tied,
    )  # fmt: skip
    name = "Qwen3_5ForConditionalGeneration"
    return dict(architectures=[name], text_config=text, tie_word_embeddings=tied)


# The numbers are those of transformers' text models on the meta device.
PUBLISHED: dict[str, Published] = {
    "Qwen3.5-0.8B": Published(published(1024, 3584, 24, 8, 2, 16, True), 752_393_024),
    "Qwen3.5-4B": Published(published(2560, 9216, 32, 16, 4, 32, True), 4_205_751_296),
    "Qwen3.5-9B": Published(published(4096, 12_288, 32, 16, 4, 32), 8_953_803_264),
    "Qwen3.5-27B": Published(published(5120, 17_408, 64, 24, 4, 48), 26_895_998_464),
    "Qwen3.5-35B-A3B": Published(
        dict(
            architectures=["Qwen3_5MoeForConditionalGeneration"],
            text_config=dict(rope_parameters=ROPE),
        ),
        34_660_610_688,
    ),
    "Qwen3-Next-80B-A3B": Published(
        dict(architectures=["Qwen3NextForCausalLM"], rope_theta=10_000_000, rope_scaling=None),
        79_674_391_296,
    ),
    "OLMo Hybrid 7B": Published(dict(architectures=["OlmoHybridForCausalLM"]), 7_430_870_688),
}
