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
        "Qwen3NextForCausalLM", DELTA | SPARSE | dict(layer_types=[LINEAR, FULL]), adjust=remember
    ),
    "Qwen3-Next partly dense": Sample(
        "Qwen3NextForCausalLM",
        DELTA
        | SPARSE
        | dict(
            mlp_only_layers=[1], layer_types=[FULL, LINEAR], norm_topk_prob=False,
            linear_num_value_heads=6,
        ),
        adjust=remember,
    ),
    "OLMo Hybrid": Sample("OlmoHybridForCausalLM", DELTA | MANY | EQUAL, adjust=remember),
    "OLMo Hybrid rotated": Sample(
        "OlmoHybridForCausalLM",
        dict(
            num_hidden_layers=3, layer_types=[LINEAR, FULL, FULL],
            linear_allow_neg_eigval=False, linear_value_head_dim=12, tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=10_000.0),
        ),
        adjust=remember,
    ),
}  # fmt: skip
PUBLISHED: dict[str, Published] = {}
