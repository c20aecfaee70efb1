"""What llama.cpp's converter does to metadata and tensors, for each architecture.

It is written here again, and shares nothing with the code under test.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from latent_converters import (
    as_it_is,
    deepseek_metadata,
    deepseek_tensors,
    minicpm3_metadata,
)
from sigmoid_converters import SIGMOID_PARTS

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Converter:
    """What llama.cpp's converter does for an architecture.

    `metadata` makes the keys of a config, besides the usual ones. `convert` makes the tensors of a
    file of one of a checkpoint, by the names that the converter then maps.
    """

    metadata: Callable[[Config], Config]
    convert: Callable[[str, torch.Tensor, Config], Tensors]


def _lfm2_metadata(config: Config) -> Config:
    kinds, kv_heads = config["layer_types"], config["num_key_value_heads"]
    values = {
        "attention.head_count_kv": [kv_heads * (kind != "conv") for kind in kinds],
        "shortconv.l_cache": config["conv_L_cache"],
    }
    if "num_experts" in config:
        return values | {
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2,
        }  # fmt: skip
    size = config["intermediate_size"]
    if config["block_auto_adjust_ff_dim"]:
        size = int(config["block_ffn_dim_multiplier"] * int(2 * size / 3))
        multiple = config["block_multiple_of"]
        size = multiple * ((size + multiple - 1) // multiple)
    return values | {"feed_forward_length": size}


def _lfm2_tensors(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    if "conv.conv" in name:
        return {name: tensor.squeeze(1)}
    if "experts" in name:
        name = name.removeprefix("model.")
    return {name.replace(".expert_bias", ".expert_bias.bias"): tensor}


def _space_metadata(config: Config, names: str, heads: str) -> Config:
    """The keys of state spaces. `names` has those of the config, in this order."""
    keys = ("conv_kernel", "state_size", "group_count")
    values = dict(zip(keys, (config[name] for name in names.split()), strict=True))
    return {f"ssm.{key}": value for key, value in values.items()} | {
        "ssm.time_step_rank": config[heads]
    }


def _space_tensors(name: str, tensor: torch.Tensor, groups: int) -> Tensors:
    """What Mamba 2's converter does. Others inherit it."""
    if name.endswith("A_log"):
        tensor = -torch.exp(tensor)
    if name.endswith(("A_log", ".D")):
        tensor = tensor.reshape(-1, 1)
    elif name.endswith("conv1d.weight"):
        tensor = tensor.squeeze(1)
    elif name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        tensor = tensor.reshape(groups, -1)
    return {name.replace(".dt_bias", ".dt_proj.bias"): tensor}


NO_ATTENTION = dict.fromkeys(("head_count_kv", "key_length", "value_length"))


def _mamba2_metadata(config: Config) -> Config:
    return _space_metadata(config, "conv_kernel state_size n_groups", "num_heads") | {
        "context_length": 1 << 20, "feed_forward_length": 0, "attention.head_count": 0,
        **{f"attention.{key}": None for key in NO_ATTENTION}, "rope.freq_base": None,
        "ssm.inner_size": config["expand"] * config["hidden_size"], "vocab_size": None,
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
    }  # fmt: skip


def _mamba2_tensors(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    return _space_tensors(name, tensor, config["n_groups"])


MAMBA = "mamba_d_conv mamba_d_state mamba_n_groups"
FACTORS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip


def _granite_metadata(config: Config) -> Config:
    kv_heads, hidden = config["num_key_value_heads"], config["hidden_size"]
    kinds, experts = config["layer_types"], config["num_local_experts"]
    return _space_metadata(config, MAMBA, "mamba_n_heads") | {
        **{key: float(config[name]) for key, name in FACTORS.items()},
        "expert_count": experts or None, "attention.key_length": None, "context_length": 1 << 20,
        "attention.value_length": None, "rope.dimension_count": hidden // 4,
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "ssm.inner_size": config["mamba_expand"] * hidden, "rope.scaling.finetuned": False,
        "attention.head_count_kv": [kv_heads * (kind != LINEAR) for kind in kinds],
    }  # fmt: skip


LINEAR = "linear_attention"


def _granite_tensors(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    shared = "_shexp" if config["num_local_experts"] else ""
    if name.endswith("input_linear.weight"):
        kind = shared if "shared_mlp" in name else "_exps"
        gate, up = tensor.chunk(2, dim=-2)
        return {f"{block}.ffn_gate{kind}.weight": gate, f"{block}.ffn_up{kind}.weight": up}
    if name.endswith("output_linear.weight"):
        kind = shared if "shared_mlp" in name else "_exps"
        return {f"{block}.ffn_down{kind}.weight": tensor}
    if match := re.search(r"\.([qk])_proj\.", name):
        heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        turned = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        return {name: turned}
    return _space_tensors(name, tensor, config["mamba_n_groups"])


def _falcon_metadata(config: Config) -> Config:
    return _space_metadata(config, MAMBA, "mamba_n_heads") | {
        "ssm.inner_size": config["mamba_d_ssm"]
    }


def _falcon_tensors(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    """All factors are multiplied into the weights."""
    gate, down = config["mlp_multipliers"]
    attention = config["attention_in_multiplier"]
    factors = {
        "down_proj": down, "gate_proj": gate, "k_proj": config["key_multiplier"] * attention,
        "q_proj": attention, "v_proj": attention, "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"], "in_proj": config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    for part, factor in factors.items():
        if f".{part}." in f".{name}":
            tensor = tensor * factor
    if ".in_proj." in name:
        inner, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        widths = [inner, inner, groups, groups, config["mamba_n_heads"]]
        parts = zip(tensor.split(widths), config["ssm_multipliers"], strict=True)
        tensor = torch.cat([part * factor for part, factor in parts])
    return _space_tensors(name, tensor, config["mamba_n_groups"])


def _nemotron_metadata(config: Config) -> Config:
    kinds, has_experts = config["layers_block_type"], "moe" in config["layers_block_type"]
    inner = config["moe_intermediate_size" if has_experts else "intermediate_size"]
    kv_heads, head_dim = config["num_key_value_heads"], config["mamba_head_dim"]
    values = _space_metadata(config, "conv_kernel ssm_state_size n_groups", "mamba_num_heads") | {
        "feed_forward_length": [inner * (kind in ("mlp", "moe")) for kind in kinds],
        "attention.head_count_kv": [kv_heads * (kind == "full_attention") for kind in kinds],
        "ssm.inner_size": config["mamba_num_heads"] * head_dim, "rope.scaling.finetuned": False,
        "rope.dimension_count": 6, "expert_used_count": None, "block_count": len(kinds),
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
    }  # fmt: skip
    return values | ({
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_count": config["n_routed_experts"], "expert_shared_count": 1,
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"],
        "moe_latent_size": config["moe_latent_size"],
    } if has_experts else {})  # fmt: skip


def _nemotron_tensors(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    name = re.sub(r"^model\.", "backbone.", name)
    if ".mixer.experts." in name:
        layer, _, rest = name.removeprefix("backbone.layers.").partition(".mixer.experts.")
        return {f"model.layers.{layer}.mlp.experts.{rest}": tensor}
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if "moe" in config["layers_block_type"]:
        name = name.replace("dt_bias", "dt.bias")
    return _space_tensors(name, tensor, config["n_groups"])


def _qwen35_metadata(config: Config) -> Config:
    get, heads = config.get, config["linear_num_value_heads"]
    rope = config["rope_parameters"]
    rotated = int(config["head_dim"] * rope.get("partial_rotary_factor", 0.25))
    names = "linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads"
    sizes = _space_metadata(config, names, "linear_num_value_heads")
    return sizes | {
        "ssm.inner_size": config["linear_value_head_dim"] * heads, "full_attention_interval": 4,
        "rope.dimension_count": rotated, "rope.dimension_sections": [11, 11, 10, 0],
        "expert_feed_forward_length": get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": get("shared_expert_intermediate_size"),
    }  # fmt: skip


def _next_tensors(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    """What the converter of Qwen3-Next does; that of Qwen3.5 inherits it."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if name.endswith("A_log"):
        tensor = -torch.exp(tensor)
    elif name.endswith("norm.weight") and "linear_attn" not in name:
        tensor = tensor + 1
    elif "conv1d" in name:
        tensor = tensor.squeeze()
    if "in_proj_qkvz" in name:
        block, values = f"blk.{name.split('.')[2]}", heads // keys * value_dim
        parts = tensor.unflatten(0, (keys, -1)).split([key_dim, key_dim, values, values], dim=1)
        q, k, v, z = (part.flatten(0, 1) for part in parts)
        return {f"{block}.attn_qkv.weight": torch.cat([q, k, v]), f"{block}.attn_gate.weight": z}
    if name.endswith("mlp.experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        above = name.removesuffix("gate_up_proj")
        return {f"{above}gate_proj.weight": gate, f"{above}up_proj.weight": up}
    if name.endswith("mlp.experts.down_proj"):
        name = f"{name}.weight"
    return {name.replace(".dt_bias", ".dt_proj.bias"): tensor}


def _qwen35_tensors(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    """The first head of values of each group of heads, then the second of each."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"]

    def tiled(values: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        parts = values.unflatten(dim, (keys, heads // keys, size))
        return parts.transpose(dim, dim + 1).flatten(dim, dim + 2)

    if "linear_attn." in name and keys != heads:
        if re.search(r"in_proj_qkv|conv1d", name):
            before = 2 * keys * config["linear_key_head_dim"]
            tensor = torch.cat([tensor[:before], tiled(tensor[before:], 0, size)])
        elif "in_proj_z" in name:
            tensor = tiled(tensor, 0, size)
        elif re.search(r"in_proj_[ab]|A_log|dt_bias", name):
            tensor = tiled(tensor, 0, 1)
        elif "out_proj" in name:
            tensor = tiled(tensor, 1, size)
    return _next_tensors(name, tensor, config)


def _gemma_metadata(config: Config) -> Config:
    """Gemma 2 has soft caps, and Gemma 3 a rope of its own in layers with a window."""
    get, ropes = config.get, config["rope_parameters"]
    if get("attn_logit_softcapping") is not None:
        return {
            name: config[name] for name in ("attn_logit_softcapping", "final_logit_softcapping")
        } | {"attention.sliding_window": config["sliding_window"]}
    if "full_attention" not in ropes:
        return {}
    full, local = ropes["full_attention"], ropes["sliding_attention"]
    return {
        "rope.freq_base": full["rope_theta"], "rope.freq_base_swa": local["rope_theta"],
        "rope.scaling.type": "linear", "rope.scaling.factor": full["factor"],
        "attention.sliding_window": config["sliding_window"],
    }  # fmt: skip


def _gemma_tensors(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    return {name: tensor + 1 if name.endswith("norm.weight") else tensor}


def _routed_metadata(config: Config) -> Config:
    """GLM-4.5, Solar Open and dots.llm1: experts chosen by sigmoids."""
    get, rope = config.get, config["rope_parameters"]
    is_glm, part = "max_window_layers" not in config, rope.get("partial_rotary_factor", 1.0)
    yarn = {
        "rope.scaling.type": "yarn", "rope.scaling.factor": rope.get("factor"),
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
    }  # fmt: skip
    return {
        "expert_count": config["n_routed_experts"], "expert_gating_func": 2 if is_glm else None,
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "feed_forward_length": get("intermediate_size", config["moe_intermediate_size"]),
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": get("first_k_dense_replace", 0),
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"],
        "rope.dimension_count": int(config["head_dim"] * part) if is_glm else None,
        **(yarn if "factor" in rope else {}),
    }  # fmt: skip


def _ernie_metadata(config: Config) -> Config:
    shared = config["moe_num_shared_experts"]
    size = config["intermediate_size"] // config["num_key_value_heads"]
    return {
        "expert_count": config["moe_num_experts"], "expert_used_count": config["moe_k"],
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": shared,
        "expert_shared_feed_forward_length": size if shared else None,
    }  # fmt: skip


def _hunyuan_metadata(config: Config) -> Config:
    """An alpha is multiplied into the base."""
    rope, dim, taken = config["rope_parameters"], config["head_dim"], config["moe_topk"]
    inner = config["intermediate_size"]
    scaled = {
        "rope.freq_base": rope["rope_theta"] * rope.get("alpha", 1.0) ** (dim / (dim - 2)),
        "rope.scaling.type": "none", "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 512,
    }  # fmt: skip
    return {
        "expert_used_count": taken[0] if isinstance(taken, list) else taken,
        "expert_feed_forward_length": inner, "expert_shared_feed_forward_length": inner,
        "expert_shared_count": 1, **(scaled if "alpha" in rope else {}),
    }  # fmt: skip


def _routed_tensors(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    return {name.replace("e_score_correction_bias", "e_score_correction.bias"): tensor}


GEMMA = Converter(_gemma_metadata, _gemma_tensors)
ROUTED = Converter(_routed_metadata, _routed_tensors)
LFM2 = Converter(_lfm2_metadata, _lfm2_tensors)
NEMOTRON = Converter(_nemotron_metadata, _nemotron_tensors)
QWEN35 = Converter(_qwen35_metadata, _qwen35_tensors)
CONVERTERS = {
    "lfm2": LFM2, "lfm2moe": LFM2, "mamba2": Converter(_mamba2_metadata, _mamba2_tensors),
    "granitehybrid": Converter(_granite_metadata, _granite_tensors),
    "falcon-h1": Converter(_falcon_metadata, _falcon_tensors),
    "nemotron_h": NEMOTRON, "nemotron_h_moe": NEMOTRON, "qwen35": QWEN35, "qwen35moe": QWEN35,
    "glm4moe": ROUTED, "dots1": ROUTED,
    "ernie4_5-moe": Converter(_ernie_metadata, _routed_tensors),
    "hunyuan-moe": Converter(_hunyuan_metadata, _routed_tensors),
    "gemma": GEMMA, "gemma2": GEMMA, "gemma3": GEMMA,
    "deepseek2": Converter(deepseek_metadata, deepseek_tensors),
    "minicpm3": Converter(minicpm3_metadata, as_it_is),
    "qwen3next": Converter(_qwen35_metadata, _next_tensors),
    **{name: Converter(*parts) for name, parts in SIGMOID_PARTS.items()},
}  # fmt: skip
