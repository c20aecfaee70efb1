"""GGUF files of small models, as llama.cpp's converter writes them, and a check of their outputs.

The names of tensors come from the `gguf` package.
"""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import torch
from conftest import LogitRecorder
from converters import CONVERTERS, Config, Tensors
from families import SAMPLES
from families.describe import write
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import add_metadata, tokenizer_metadata
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.models.config import ModelConfig
from nanovllm.models.gguf.directory import gguf_directory


@dataclass(frozen=True)
class File:
    """An architecture of GGUF, the sample of a model, and other values for some of its fields.

    Rows must have a multiple of 32 weights, to be stored in blocks.
    """

    architecture: str
    sample: str
    fields: dict[str, Any] = field(default_factory=dict)

    def write_model(self, path: Path) -> Path:
        sample = SAMPLES[self.sample]
        return write(path, replace(sample, fields=sample.fields | self.fields))


PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[*range(40, 40 + n)] for n in (3, 30)]


def output(path: Path, **options: Any) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The tokens and logits of the prompts."""
    defaults: dict[str, Any] = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.01)
    with LLM(str(path), max_model_len=64, **defaults | options) as llm:
        recorder = LogitRecorder(llm)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        return [out["token_ids"] for out in outputs], [recorder.of(out) for out in outputs]


def check_outputs(file: File, path: Path) -> None:
    """A file has the model's outputs, one with blocks those of the values that these stand for."""
    model = file.write_model(path)
    tokens, logits = output(model)
    found, found_logits = output(write_file(model, file.architecture))
    assert found == tokens
    for one, other in zip(logits, found_logits, strict=True):
        assert (one - other).abs().max() < 1e-4
    values, logits = output(write_file(model, file.architecture, "Q8_0", decoded=True))
    blocks, found_logits = output(write_file(model, file.architecture, "Q8_0"))
    assert [each[:4] for each in blocks] == [each[:4] for each in values]
    for one, other in zip(logits, found_logits, strict=True):
        assert (one[:1] - other[:1]).abs().max() < 1e-3
    config = ModelConfig.from_dir(gguf_directory(write_file(model, file.architecture, "Q8_0")))
    original = ModelConfig.from_dir(model)
    kept = [[(layer.cache, layer.num_others) for layer in c.layers] for c in (config, original)]
    assert kept[0] == kept[1] and config.eos_token_ids == original.eos_token_ids


def usual_metadata(config: Config) -> Config:
    """The keys of the converter of all models with attention."""
    get = config.get
    rope = get("rope_parameters") or {}
    return {
        "block_count": get("num_hidden_layers"), "vocab_size": config["vocab_size"],
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


def converted(tensors: Tensors, architecture: str, config: Config) -> Tensors:
    """The tensors of a file, by the names that it has for them. Experts are stacks."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, 8)
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


SMALL = re.compile(
    r"norm|ssm_(a|d|conv1d)|shortconv\.conv|gate_inp|exp_probs_b"
)  # always in float32


def write_file(
    model: Path, architecture: str, kind: str = "F32", decoded: bool = False,
    more: Tensors | None = None, num_tensors: int = 0, **changes: Any,
) -> Path:  # fmt: skip
    """The model as a GGUF file with matrices of this type, or the values of this type as F32.

    The file also has the tensors `more`, and `changes` in its metadata. It is the first of several
    ones if each has at most `num_tensors`.
    """
    config = json.loads((model / "config.json").read_text())
    file = model / f"{architecture} {kind} {decoded} {len(changes)}.gguf"
    writer = GGUFWriter(file, architecture, split_max_tensors=num_tensors)
    values = usual_metadata(config) | CONVERTERS[architecture].metadata(config) | changes
    keys = {k if k.startswith("general.") else f"{architecture}.{k}": v for k, v in values.items()}
    add_metadata(writer, keys | tokenizer_metadata(model, "gpt-2"))
    tensors = load_file(model / "model.safetensors")
    for name, tensor in (converted(tensors, architecture, config) | (more or {})).items():
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
    return next(model.glob(f"{file.stem}-00001-of-*.gguf")) if num_tensors else file
