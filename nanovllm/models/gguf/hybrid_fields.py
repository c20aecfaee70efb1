"""The fields of families with states in some layers, from a GGUF file's metadata."""

from collections.abc import Callable

from nanovllm.models.gguf.metadata import Metadata
from nanovllm.models.gguf.usual_fields import Config

CONV, ATTENTION = "conv", "full_attention"  # the layers of LFM2
SIGMOID = 2  # a gating function


def _lfm2(metadata: Metadata) -> Config:
    """The converter adjusts the intermediate size. Layers without key heads have convolutions."""
    kv_heads = metadata.of_each("attention.head_count_kv")
    return {
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": metadata.size("shortconv.l_cache"), "conv_bias": False,
        "layer_types": [ATTENTION if heads else CONV for heads in kv_heads],
    }  # fmt: skip


def _lfm2moe(metadata: Metadata) -> Config:
    """The shares of a token's experts add up to 1: files do not say it."""
    metadata.only("expert_gating_func", (SIGMOID,))
    metadata.only("expert_weights_norm", (True,))
    metadata.only("expert_weights_scale", (0.0, 1.0))
    dense = metadata.get("leading_dense_block_count", 0)
    return _lfm2(metadata) | {
        "model_type": "lfm2_moe",
        "num_dense_layers": dense,
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "use_expert_bias": f"blk.{dense}.exp_probs_b.bias" in metadata.model.tensors,
        "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    }  # fmt: skip


HYBRIDS: dict[str, Callable[[Metadata], Config]] = {"lfm2": _lfm2, "lfm2moe": _lfm2moe}
