"""GGUF files of hybrid models, with names and metadata as of llama.cpp's converter.

The names come from the `gguf` package; what the converter does to tensors is written here again.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import add_metadata, tokenizer_metadata
from safetensors.torch import load_file

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


def usual_metadata(config: Config) -> Config:
    """The keys of the converter of all models with attention."""
    get = config.get
    rope = get("rope_parameters") or {}
    return {
        "block_count": config["num_hidden_layers"], "vocab_size": config["vocab_size"],
        "context_length": get("max_position_embeddings"),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": get("intermediate_size"),
        "attention.head_count": get("num_attention_heads"),
        "attention.head_count_kv": get("num_key_value_heads"),
        "attention.key_length": get("head_dim"), "attention.value_length": get("head_dim"),
        "attention.layer_norm_rms_epsilon": get("norm_eps", get("rms_norm_eps")),
        "rope.freq_base": float(rope.get("rope_theta", 1e4)), "general.file_type": 0,
        "expert_count": get("num_experts"), "expert_used_count": get("num_experts_per_tok"),
    }  # fmt: skip


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


LFM2 = Converter(_lfm2_metadata, _lfm2_tensors)
CONVERTERS = {"lfm2": LFM2, "lfm2moe": LFM2}


def converted(tensors: Tensors, architecture: str, config: Config) -> Tensors:
    """The tensors of a file, by the names that it has for them. Experts are stacks."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    found: Tensors = {}
    for name, tensor in stacked(tensors).items():
        for there, value in CONVERTERS[architecture].convert(name, tensor, config).items():
            spelt = names.get_name(there, try_suffixes=(".weight", ".bias"))
            spelt = there if there.startswith("blk.") else spelt
            assert spelt is not None, there
            found[spelt] = value
    return found


def stacked(tensors: Tensors) -> Tensors:
    """The tensors, with those of all experts of a layer as one."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if (match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)) is None:
            found[name] = tensor
        elif match[2] == "0":
            number = sum(bool(re.fullmatch(rf"{match[1]}\.\d+\.{match[3]}", n)) for n in tensors)
            stack = [tensors[f"{match[1]}.{i}.{match[3]}"] for i in range(number)]
            found[f"{match[1]}.{match[3]}"] = torch.stack(stack)
    return found


SMALL = re.compile(r"norm|ssm_(a|d|conv1d)|shortconv\.conv|gate_inp")  # always in float32


def write_file(
    model: Path, architecture: str, kind: str = "F32", decoded: bool = False, **changes: Any
) -> Path:
    """The model as a GGUF file with matrices of this type, or the values of this type as F32."""
    config = json.loads((model / "config.json").read_text())
    file = model / f"{architecture} {kind} {decoded} {len(changes)}.gguf"
    writer = GGUFWriter(file, architecture)
    values = usual_metadata(config) | CONVERTERS[architecture].metadata(config) | changes
    keys = {k if k.startswith("general.") else f"{architecture}.{k}": v for k, v in values.items()}
    add_metadata(writer, keys | tokenizer_metadata(model, "gpt-2"))
    tensors = load_file(model / "model.safetensors")
    for name, tensor in converted(tensors, architecture, config).items():
        is_matrix = tensor.dim() > 1 and not SMALL.search(name)
        stored = GGMLQuantizationType[kind if is_matrix else "F32"]
        data = gguf.quants.quantize(tensor.float().contiguous().numpy(), stored)
        if decoded:
            data, stored = gguf.quants.dequantize(data, stored), GGMLQuantizationType.F32
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
