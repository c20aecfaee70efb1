"""GGUF files of small models, written with the `gguf` package from what transformers saves.

The names, the order of rows and the metadata follow llama.cpp's converter, not the code under test.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from dense_gguf import DENSE_PARTS, dense_metadata
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file

MODEL_TYPES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "phi3": "phi3", "smollm3": "smollm3", "olmo2": "olmo2",
    "olmo3": "olmo2", "granite": "granite", "seed_oss": "seed_oss", "exaone4": "exaone4",
    "ernie4_5": "ernie4_5", "glm4": "glm4", "hunyuan_v1_dense": "hunyuan-dense",
    "cohere": "command-r", "cohere2": "cohere2",
}  # fmt: skip
TOP = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip
PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip
# The places of scales (float16) in blocks of types that `gguf` does not quantize to.
SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
CONTROL, USER_DEFINED, NORMAL, BYTE, UNKNOWN = 3, 4, 1, 6, 2

Types = Callable[[str, tuple[int, ...]], str]  # of a tensor by its GGUF name and shape


def every_matrix(kind: str) -> Types:
    """This type for all matrices, and float32 for vectors."""
    return lambda name, shape: kind if len(shape) > 1 else "F32"


def write_gguf(
    model: Path, path: Path, types: Types | str = "F32", *, pre: str = "gpt-2",
    split: int = 0, changes: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Write the model in a directory as a GGUF file; return what its tensors stand for.

    The result has the usual names and the usual order of rows, in float32. `pre` is the way in
    which the tokenizer splits texts. With `split`, no part has more tensors than that. `changes`
    are other values for metadata; None leaves a key out.
    """
    config = json.loads((model / "config.json").read_text())
    architecture = MODEL_TYPES[config["model_type"]]
    types = every_matrix(types) if isinstance(types, str) else types
    writer = GGUFWriter(path, architecture, split_max_tensors=split)
    metadata = model_metadata(config, architecture) | tokenizer_metadata(model, pre)
    add_metadata(writer, metadata | (changes or {}))
    exact: dict[str, torch.Tensor] = {}
    for name, (tensor, parts, heads) in _tensors(model, config, architecture).items():
        values = _interleaved(tensor, heads) if heads else tensor
        kind = GGMLQuantizationType[types(name, tuple(values.shape))]
        data = _encoded(values.numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        decoded = torch.from_numpy(_decoded(data, kind)).view(values.shape)
        decoded = _deinterleaved(decoded, heads) if heads else decoded
        exact |= dict(zip(parts, decoded if len(parts) > 1 else [decoded], strict=True))
    for name, factors in rope_factors(config).items():
        writer.add_tensor(name, np.array(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


def add_metadata(writer: GGUFWriter, metadata: dict[str, Any]) -> None:
    """Add values by their Python types: whole numbers in 32 bits."""
    for key, value in metadata.items():
        if key == "general.architecture" or value is None:
            continue
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def model_metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """What the converter writes of a config.json."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    values: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(theta),
        "rope.dimension_count": int(head_dim * rotated),
    }
    if "num_experts" in config or "num_local_experts" in config:
        values["expert_count"] = config.get("num_experts", config.get("num_local_experts"))
        values["expert_used_count"] = config["num_experts_per_tok"]
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if architecture == "phi3" or config["model_type"] == "mistral":
        values["attention.sliding_window"] = config.get("sliding_window") or 0
    values |= dense_metadata(config, architecture)
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn", "longrope"):
        values["rope.scaling.type"] = kind
    if kind in ("linear", "yarn"):
        values["rope.scaling.factor"] = float(rope["factor"])
    if kind in ("yarn", "longrope"):
        trained = rope.get("original_max_position_embeddings")
        values["rope.scaling.original_context_length"] = int(
            trained or config["original_max_position_embeddings"]
        )
    if kind == "longrope":
        trained = values["rope.scaling.original_context_length"]
        scale = max(config["max_position_embeddings"] / trained, 1.0)
        values["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(trained))
    return {f"{architecture}.{key}": value for key, value in values.items()}


def rope_factors(config: dict[str, Any]) -> dict[str, list[float]]:
    """The tensors with factors of the rotation's frequencies."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type") == "longrope":
        ends = ("long", "short")
        return {f"rope_factors_{end}.weight": rope[f"{end}_factor"] for end in ends}
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim, factors = config["head_dim"], []
    trained, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < trained / high:
            factors.append(1.0)
        elif wavelength > trained / low:
            factors.append(factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": factors}


def tokenizer_metadata(model: Path, pre: str) -> dict[str, Any]:
    """What the converter writes of a tokenizer of bytes; nothing if there is none."""
    file = model / "tokenizer.json"
    if not file.exists():
        return {}
    raw = json.loads(file.read_text())
    config = json.loads((model / "tokenizer_config.json").read_text())
    tokens = {i: (text, NORMAL) for text, i in raw["model"]["vocab"].items()}
    for added in raw["added_tokens"]:
        kind = CONTROL if added["special"] else USER_DEFINED
        tokens[added["id"]] = (added["content"], kind)
    ids = {text: i for i, (text, _) in tokens.items()}
    merges = [m if isinstance(m, str) else " ".join(m) for m in raw["model"]["merges"]]
    values = {
        "model": "gpt2", "pre": pre, "add_bos_token": False,
        "tokens": [tokens[i][0] for i in range(len(tokens))],
        "token_type": [tokens[i][1] for i in range(len(tokens))],
    }  # fmt: skip
    values |= {"merges": merges} if merges else {}
    for name, field in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        if config.get(field):
            values[f"{name}_token_id"] = ids[config[field]]
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


Tensors = dict[str, tuple[torch.Tensor, list[str], int]]


def _tensors(model: Path, config: dict[str, Any], architecture: str) -> Tensors:
    """The tensors by their GGUF names: the usual names of their parts, and the heads to permute."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found: Tensors = {}
    files = sorted(model.glob("*.safetensors"))
    loaded = {name: tensor.float() for file in files for name, tensor in load_file(file).items()}
    for name, tensor in loaded.items():
        if name in TOP:
            found[TOP[name]] = tensor, [name], 0
            continue
        _, _, layer, *module, leaf = name.split(".")
        parts, value = [name], tensor
        if "experts" in module:
            if module[2] != "0":
                continue
            experts = range(config.get("num_experts", config.get("num_local_experts")))
            parts = [name.replace("experts.0.", f"experts.{i}.") for i in experts]
            module.remove("0")
            value = torch.stack([loaded[part] for part in parts])
        part = (PARTS | DENSE_PARTS.get(architecture, {}))[".".join(module)]
        permuted = heads.get(part, 0) if architecture in ("llama", "smollm3", "granite") else 0
        found[f"blk.{layer}.{part}.{leaf}"] = value, parts, permuted
    return found


def _interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def _deinterleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)


def _encoded(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The values in a type, or random blocks where `gguf` cannot quantize."""
    if kind.name in SCALES:
        return random_blocks(values.shape, kind)
    if kind.name == "F64":
        return values.astype(np.float64)
    return np.asarray(gguf.quants.quantize(np.ascontiguousarray(values), kind))


def _decoded(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The float32 values that the data stand for."""
    if kind.name == "F64":
        return data.astype(np.float32)
    return np.array(gguf.quants.dequantize(data, kind))


def random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType) -> np.ndarray:
    """Blocks [..., N, bytes] of random codes with scales of about the same size."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(abs(hash((shape, kind.value))))
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // size, num_bytes), dtype=np.uint8)
    for place in SCALES[kind.name]:
        scales = random.uniform(5e-5, 2e-4, blocks.shape[:-1]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
