"""What llama.cpp's converter does for models with latent attention."""

from typing import Any

import torch

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def deepseek_metadata(config: Config) -> Config:
    """A token's row is a key of one head; with `is_old_file`, heads have keys of their own."""
    get, rank, rotated = config.get, config["kv_lora_rank"], config["qk_rope_head_dim"]
    rope = config["rope_parameters"]
    yarn = {
        "type": "yarn", "factor": rope.get("factor"), "yarn_beta_slow": rope.get("beta_slow"),
        "original_context_length": rope.get("original_max_position_embeddings"),
        "yarn_beta_fast": rope.get("beta_fast"),
        "yarn_log_multiplier": 0.1 * rope.get("mscale_all_dim", 0.0),
    }  # fmt: skip
    values = {
        "attention.head_count_kv": 1, "attention.key_length": rank + rotated,
        "attention.value_length": rank, "attention.q_lora_rank": get("q_lora_rank"),
        "attention.kv_lora_rank": rank, "attention.value_length_mla": config["v_head_dim"],
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "rope.dimension_count": rotated,
        "leading_dense_block_count": get("first_k_dense_replace", config["num_hidden_layers"]),
        "expert_feed_forward_length": get("moe_intermediate_size", config["intermediate_size"]),
        "expert_shared_count": get("n_shared_experts", 0), "expert_count": get("n_routed_experts"),
        "expert_weights_scale": get("routed_scaling_factor"),
        "expert_group_count": get("n_group"), "expert_group_used_count": get("topk_group"),
    }  # fmt: skip
    if "topk_method" not in config and "n_routed_experts" in config:
        values |= {"expert_gating_func": 2, "expert_weights_norm": config["norm_topk_prob"]}
    if get("is_old_file"):
        size = config["qk_nope_head_dim"] + rotated
        values |= {
            "attention.key_length_mla": None, "attention.value_length_mla": None,
            "attention.head_count_kv": config["num_attention_heads"],
            "attention.key_length": size, "attention.value_length": config["v_head_dim"],
        }  # fmt: skip
    if rope["rope_type"] == "yarn":
        values |= {f"rope.scaling.{name}": value for name, value in yarn.items()}
    return values


def deepseek_tensors(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    """Keys and values of latents are apart, the former transposed."""
    if name.endswith("kv_b_proj.weight") and not config.get("is_old_file"):
        heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
        plain, block = config["qk_nope_head_dim"], f"blk.{name.split('.')[2]}"
        return {
            f"{block}.attn_k_b.weight": heads[:, :plain].mT,
            f"{block}.attn_v_b.weight": heads[:, plain:],
        }
    return {name.replace("e_score_correction_bias", "e_score_correction.bias"): tensor}


def minicpm3_metadata(config: Config) -> Config:
    """The factors, and the size of values, are not written."""
    rotated = config["qk_rope_head_dim"]
    return {
        "attention.q_lora_rank": config["q_lora_rank"], "rope.dimension_count": rotated,
        "attention.kv_lora_rank": config["kv_lora_rank"], "attention.value_length": None,
        "attention.key_length": config["qk_nope_head_dim"] + rotated,
    }  # fmt: skip


def as_it_is(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    """Only the name of a tensor changes."""
    return {name: tensor}
