"""What checkpoints call the tensors of a model."""

from collections.abc import Mapping

# A checkpoint's module, the layer of ours that it is a part of, and its place there.
FUSED: Mapping[str, tuple[str, int]] = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
