"""GGUF files of families with LayerNorm: names, orders and metadata as of llama.cpp's converter.

The names come from the `gguf` package; what the converter does to tensors is written here again.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import SAMPLES
from families.describe import write
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import add_metadata, rope_factors, tokenizer_metadata
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread", "cache")

Tensors = dict[str, torch.Tensor]
MODELS = SAMPLES | {
    "sequential": replace(
        SAMPLES["GPT-NeoX"], fields=SAMPLES["GPT-NeoX"].fields | dict(use_parallel_residual=False)
    )
}
NAMES = {
    "GPT-NeoX": "gptneox", "sequential": "gptneox", "GPT-2": "gpt2", "Phi": "phi2",
    "StableLM": "stablelm", "StableLM, parallel, norms of heads": "stablelm",
    "Starcoder2, no biases": "starcoder2", "Nemotron": "nemotron",
    "Falcon": "falcon", "Falcon, new": "falcon", "Falcon, new, one norm": "falcon",
    "Arcee": "arcee", "Apertus": "apertus",
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))


def converted(tensors: Tensors, architecture: str, config: dict[str, Any]) -> Tensors:
    """The values of a checkpoint in the converter's order, by the checkpoint's names."""
    heads, found = config.get("num_attention_heads", config.get("n_head")), {}
    for name, tensor in tensors.items():
        if architecture == "gptneox" and "query_key_value" in name:
            tensor = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        elif architecture == "falcon" and "query_key_value" in name and config["num_kv_heads"] > 1:
            groups = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
            grouped = tensor.unflatten(0, (groups, heads // groups + 2 if groups > 1 else -1, 16))
            kinds = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
            tensor = torch.cat([kind.reshape(-1, *tensor.shape[1:]) for kind in kinds])
        elif architecture == "gpt2" and ".c_" in name and tensor.dim() == 2:
            tensor = tensor.t().contiguous()
        elif architecture == "nemotron" and name.endswith("norm.weight"):
            tensor = tensor + 1
        elif architecture == "arcee" and re.search(r"\.[qk]_proj\.weight", name):
            number = heads if ".q_" in name else config["num_key_value_heads"]
            tensor = tensor.unflatten(0, (number, 2, -1)).transpose(1, 2).flatten(0, 2)
        elif ".norms." in name:  # StableLM's norms of heads are stacked
            name, head = re.sub(r"norms\.\d+\.", "", name), int(name.split(".norms.")[1][0])
            found[name] = torch.cat([found[name], tensor[None]]) if head else tensor[None]
            continue
        found[name] = tensor
    return found


def metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """The keys that the converter of each architecture writes."""
    get, heads = config.get, config.get("num_attention_heads", config.get("n_head"))
    hidden = get("hidden_size", get("n_embd"))
    inner = get("intermediate_size") or get("ffn_hidden_size") or 4 * hidden
    names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "rms_norm_eps")
    rope, kv_heads = get("rope_parameters") or {}, get("num_key_value_heads", heads)
    values: dict[str, Any] = {
        "block_count": get("num_hidden_layers", get("n_layer")),
        "context_length": get("max_position_embeddings", get("n_positions")),
        "embedding_length": hidden, "feed_forward_length": inner, "attention.head_count": heads,
        f"attention.layer_norm_{'rms_' * (architecture in ('arcee', 'apertus'))}epsilon":
            next(float(config[name]) for name in names if name in config),
    }  # fmt: skip
    if architecture not in ("gptneox", "gpt2"):
        values["attention.head_count_kv"] = kv_heads
    if architecture == "falcon":
        kv_heads = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
        values["attention.head_count_kv"] = kv_heads
    if part := rope.get("partial_rotary_factor"):
        values["rope.dimension_count"] = int(hidden // heads * part)
    if architecture == "apertus":
        values["rope.freq_base"] = float(rope["rope_theta"])
    if architecture == "gptneox":
        values["use_parallel_residual"] = config["use_parallel_residual"]
    if architecture == "stablelm":
        values["use_parallel_residual"] = True
    if architecture == "falcon":
        values["tensor_data_layout"] = "jploski"
    return {f"{architecture}.{key}": value for key, value in values.items()}


def xielu(model: Path) -> dict[str, Any]:
    """The parameters of Apertus' activations, which are lists in the metadata."""
    found: dict[str, list[float]] = {}
    for name, tensor in sorted(load_file(model / "model.safetensors").items()):
        if "act_fn" in name:
            found.setdefault(f"apertus.xielu.{name.rpartition('.')[2]}", []).append(tensor.item())
    return found


def write_file(model: Path, architecture: str, kind: str, decoded: bool = False) -> Path:
    """The model as a GGUF file with matrices of this type, or the values of this type as F32."""
    config = json.loads((model / "config.json").read_text())
    file = model / f"{kind} {decoded}.gguf"
    writer = GGUFWriter(file, architecture)
    values = metadata(config, architecture) | xielu(model)
    add_metadata(writer, values | tokenizer_metadata(model, "gpt-2"))
    if architecture == "apertus":
        for name, factors in rope_factors(config).items():
            writer.add_tensor(name, np.array(factors, dtype=np.float32))
    names = gguf.get_tensor_name_map(
        next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), 8
    )
    tensors = load_file(model / "model.safetensors")
    for name, tensor in converted(tensors, architecture, config).items():
        if "act_fn" in name:
            continue
        spelt = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert spelt is not None, name
        is_matrix = tensor.dim() == 2 and not re.search("norm|wpe", name)
        stored = GGMLQuantizationType[kind if is_matrix else "F32"]
        data = gguf.quants.quantize(tensor.contiguous().numpy(), stored)
        if decoded:
            data, stored = gguf.quants.dequantize(data, stored), GGMLQuantizationType.F32
        writer.add_tensor(spelt, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.sampled(share=0.35)
@pytest.mark.parametrize("name", NAMES)
def test_files_have_the_models_outputs(name: str, tmp_path: Path) -> None:
    """And files with blocks have those of the values that the blocks stand for."""
    model = write(tmp_path, MODELS[name])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts, outputs = [[*range(40, 40 + n)] for n in (3, 30)], []
    options: dict[str, Any] = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.01)
    plain, blocks = (write_file(model, NAMES[name], kind) for kind in ("F32", "Q8_0"))
    values = write_file(model, NAMES[name], "Q8_0", decoded=True)
    for path in (model, plain, blocks, values):
        with LLM(str(path), max_model_len=64, **options) as llm:
            outputs.append(llm.generate(prompts, params, use_tqdm=False))
            model_here = llm.model_runner.shard.model
            linear: Any = model_here.get_submodule("model.layers.0.mlp.down_proj")
            assert (linear.weight_format.scheme is not None) == (path is blocks)
    tokens = [[out["token_ids"] for out in each] for each in outputs]
    assert tokens[1] == tokens[0]
    assert [each[:4] for each in tokens[2]] == [each[:4] for each in tokens[3]]
