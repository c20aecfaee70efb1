"""GGUF files of families with experts: names and metadata as of llama.cpp's converter.

The names come from the `gguf` package; what the converter does to tensors is written here again.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from families.describe import write
from families.experts import LONGROPE, PHI_ROPE, SAMPLES
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import add_metadata, tokenizer_metadata
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread", "cache")

Tensors = dict[str, torch.Tensor]
NAMES = {
    "Mixtral": "llama", "Qwen2-MoE": "qwen2moe", "OLMoE": "olmoe", "GraniteMoE": "granitemoe",
    "Phi-3.5-MoE": "phimoe",
}  # fmt: skip
FACTORS = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))


def converted(tensors: Tensors, architecture: str, config: dict[str, Any]) -> Tensors:
    """The tensors in the converter's order: stacks of experts, by the names that it gives them."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            if match[2] == "0":
                stack = [
                    tensors[f"{match[1]}.{i}.{match[3]}"]
                    for i in range(config.get("num_experts", config.get("num_local_experts")))
                ]
                found[f"{match[1]}.{match[3]}"] = torch.stack(stack)
        elif name.endswith("input_linear.weight"):
            above = name.removesuffix("input_linear.weight")
            gate, up = tensor.chunk(2, dim=1)
            found |= {
                f"{above}input_linear.gate.weight": gate,
                f"{above}input_linear.up.weight": up,
            }
        elif architecture in ("llama", "granitemoe") and (m := re.search(r"\.([qk])_proj\.", name)):
            heads = config["num_attention_heads" if m[1] == "q" else "num_key_value_heads"]
            found[name] = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        elif name.endswith("shared_expert_gate.weight") and ".0." in name:
            found[name] = tensor[0]  # old versions of the converter squeeze it
        else:
            found[name] = tensor
    return found


SPELT = {"input_linear.gate": "ffn_gate_exps", "input_linear.up": "ffn_up_exps",
         "output_linear": "ffn_down_exps"}  # fmt: skip


def spelt(name: str, names: Any) -> str:
    """The name that the converter gives to a tensor."""
    for module, part in SPELT.items():
        if f".{module}." in name:
            return f"blk.{name.split('.')[2]}.{part}.weight"
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """The keys that the converter of each architecture writes."""
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"], "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "expert_count": config.get("num_experts", config.get("num_local_experts")),
        "expert_used_count": config["num_experts_per_tok"],
    }  # fmt: skip
    if architecture == "qwen2moe":
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
        shared = config["shared_expert_intermediate_size"]
        values["expert_shared_feed_forward_length"] = shared
    if architecture == "phimoe":
        values |= phi_metadata(config)
    if architecture == "granitemoe":
        values |= {key: float(config[name]) for key, name in FACTORS.items()}
    return {f"{architecture}.{key}": value for key, value in values.items()}


def phi_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """The converter computes longrope's factor of cosines and sines, whatever the config says."""
    trained = config["rope_parameters"]["original_max_position_embeddings"]
    stretched = math.log(config["max_position_embeddings"] / trained)
    return {
        "attention.sliding_window": config["sliding_window"] or 0,
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "rope.scaling.original_context_length": trained,
        "rope.scaling.attn_factor": math.sqrt(1 + stretched / math.log(trained)),
    }


def write_file(
    model: Path, architecture: str, kind: str, decoded: bool = False, **changes: Any
) -> Path:
    """The model as a GGUF file with matrices of this type, or the values of this type as F32."""
    config = json.loads((model / "config.json").read_text())
    file = model / f"{kind} {decoded} {len(changes)}.gguf"
    writer = GGUFWriter(file, architecture)
    values = metadata(config, architecture) | tokenizer_metadata(model, "gpt-2")
    add_metadata(writer, values | {f"{architecture}.{n}": v for n, v in changes.items()})
    names = gguf.get_tensor_name_map(
        next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), 8
    )
    tensors = load_file(model / "model.safetensors")
    if architecture == "phimoe":
        tensors |= {
            f"rope_factors_{n}": torch.tensor(config["rope_parameters"][f"{n}_factor"])
            for n in ("short", "long")
        }
    for name, tensor in converted(tensors, architecture, config).items():
        there = f"{name}.weight" if name.startswith("rope") else spelt(name, names)
        is_matrix = tensor.dim() > 1 and "gate_inp" not in there
        stored = GGMLQuantizationType[kind if is_matrix else "F32"]
        data = gguf.quants.quantize(tensor.contiguous().numpy(), stored)
        if decoded:
            data, stored = gguf.quants.dequantize(data, stored), GGMLQuantizationType.F32
        writer.add_tensor(there, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def written(name: str, path: Path) -> Path:
    """A model with rows of 32 weights or more, which blocks need."""
    sample, fields = SAMPLES[name], dict[str, Any](num_attention_heads=4)
    if name == "Phi-3.5-MoE":
        scales = dict.fromkeys(("short_mscale", "long_mscale"), PHI_ROPE["short_mscale"])
        fields |= dict(rope_parameters=LONGROPE | scales, router_jitter_noise=0.01)
    return write(path, replace(sample, fields=sample.fields | fields))


@pytest.mark.sampled(share=0.35)
@pytest.mark.parametrize("name", NAMES)
def test_files_have_the_models_outputs(name: str, tmp_path: Path) -> None:
    """And files with blocks have those of the values that the blocks stand for."""
    model = written(name, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts, outputs = [[*range(40, 40 + n)] for n in (3, 30)], []
    options: dict[str, Any] = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.01)
    plain, blocks = (write_file(model, NAMES[name], kind) for kind in ("F32", "Q8_0"))
    values = write_file(model, NAMES[name], "Q8_0", decoded=True)
    for path in (model, plain, blocks, values):
        with LLM(str(path), max_model_len=64, **options) as llm:
            outputs.append(llm.generate(prompts, params, use_tqdm=False))
            experts: Any = llm.model_runner.shard.model.get_submodule("model.layers.0.mlp.experts")
            scheme = experts.formats["down_proj"].scheme
            assert (scheme is not None) == (path is blocks)
    tokens = [[out["token_ids"] for out in each] for each in outputs]
    assert tokens[1] == tokens[0]
    assert [each[:4] for each in tokens[2]] == [each[:4] for each in tokens[3]]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Mixtral", {"expert_gating_func": 2}), ("Mixtral", {"expert_weights_norm": False}),
        ("OLMoE", {"expert_weights_scale": 2.5}), ("OLMoE", {"expert_shared_count": 1}),
        ("Qwen2-MoE", {"leading_dense_block_count": 1}), ("OLMoE", {"attention.clamp_kqv": 8.0}),
        ("Phi-3.5-MoE", {"expert_weights_norm": True}),
        ("GraniteMoE", {"expert_shared_feed_forward_length": 64}),
    ],
)  # fmt: skip
def test_what_no_family_computes_is_refused(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    file = write_file(written(name, tmp_path), NAMES[name], "F32", **changes)
    with pytest.raises(ValueError, match=next(iter(changes))):
        LLM(str(file), device="cpu")
