"""Models with gated delta nets: Qwen3-Next, Qwen3.5, OLMo Hybrid."""

from typing import Any

from families.describe import Published, Sample

FULL, LINEAR = "full_attention", "linear_attention"
# Two heads of values share each head of keys, and all sizes differ.
DELTA: dict[str, Any] = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=12, linear_conv_kernel_dim=4,
)  # fmt: skip
SAMPLES = {
    "Qwen3.5": Sample("Qwen3_5ForCausalLM", dict(DELTA, layer_types=[LINEAR, FULL])),
}
PUBLISHED: dict[str, Published] = {}
