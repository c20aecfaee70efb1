"""What llama.cpp's converter does for MiniMax-M2, Trinity and MiMo-V2, written here again."""

from collections.abc import Callable
from typing import Any

import torch

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
SLIDING = "sliding_attention"


def _tensors(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    if name.endswith(".expert_bias"):
        name += ".bias"
    if name.endswith("attention_sink_bias"):
        name += ".weight"
    return {name.replace("e_score_correction_bias", "e_score_correction.bias"): tensor}


def _minimax_metadata(config: Config) -> Config:
    rope, inner = config["rope_parameters"], config["intermediate_size"]
    rotated = int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    return {
        "expert_count": config["num_local_experts"], "expert_feed_forward_length": inner,
        "expert_gating_func": 2, "rope.dimension_count": rotated,
    }  # fmt: skip


def _minimax_tensors(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    """The gate is w1, the down projection w2. The `gguf` package knows them as one stack's."""
    for ours, stack in {"w1": "gate", "w2": "down", "w3": "up"}.items():
        if name.endswith(f"experts.{ours}.weight"):
            return {f"blk.{name.split('.')[2]}.ffn_{stack}_exps.weight": tensor}
    return _tensors(name, tensor, config)


def _afmoe_metadata(config: Config) -> Config:
    return {
        "expert_shared_count": config["num_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_weights_norm": True, "expert_weights_scale": float(config["route_scale"]),
        "attention.sliding_window": config["sliding_window"],
        "rope.dimension_count": config["head_dim"],
    }  # fmt: skip


def _mimo_metadata(config: Config) -> Config:
    """Of the layers that predict later tokens, too, in new files."""
    ropes, kv_heads = config["rope_parameters"], config["num_key_value_heads"]
    windowed = [int(kind == SLIDING) for kind in config["layer_types"]]
    full = ropes["full_attention"]
    return {
        "attention.head_count_kv": [kv_heads * (1 + has) for has in windowed],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windowed,
        "attention.value_length": config["v_head_dim"],
        "attention.value_scale": config["attention_value_scale"],
        "expert_count": config["n_routed_experts"], "expert_gating_func": 2,
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "rope.dimension_count": int(config["head_dim"] * full["partial_rotary_factor"]),
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": ropes[SLIDING]["rope_theta"],
    }  # fmt: skip


Parts = tuple[Callable[[Config], Config], Callable[[str, torch.Tensor, Config], Tensors]]
SIGMOID_PARTS: dict[str, Parts] = {
    "minimax-m2": (_minimax_metadata, _minimax_tensors), "afmoe": (_afmoe_metadata, _tensors),
    "mimo2": (_mimo_metadata, _tensors),
}  # fmt: skip
