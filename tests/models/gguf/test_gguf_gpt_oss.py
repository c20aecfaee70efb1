"""gpt-oss in GGUF files: its names, what its metadata leave out, and its experts in MXFP4."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import gguf
import pytest
import torch
from conftest import edit_config
from families import SAMPLES
from families.describe import write
from gguf import GGMLQuantizationType
from gguf_files import TOP, add_metadata, model_metadata, tokenizer_metadata
from reference import Case, check_logits, make_case, make_prompts
from safetensors.torch import load_file, save_file
from saved_checkpoints import outputs, quantized, stands_for

from nanovllm.models.config import ModelConfig
from nanovllm.models.gguf.directory import gguf_directory
from nanovllm.models.gguf.vocabulary import CONTROL, Vocabulary

pytestmark = pytest.mark.usefixtures("one_thread", "compiler")

PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.router": "ffn_gate_inp",
}  # fmt: skip
MXFP4 = GGMLQuantizationType.MXFP4


def tensors_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by the names of llama.cpp's converter: gate and up are stacks of their own."""
    found = {}
    for name, tensor in weights.items():
        if name in TOP:
            found[TOP[name]] = tensor
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        block = f"blk.{layer}."
        if rest == "self_attn.sinks":
            found[f"{block}attn_sinks.weight"] = tensor
        elif rest.startswith("mlp.experts."):
            matrix, _, leaf = rest.removeprefix("mlp.experts.").partition("_proj")
            leaf = leaf.removeprefix("_") or "weight"
            rows = tensor if leaf == "bias" else tensor.transpose(1, 2)
            parts = (
                {"gate": rows[:, ::2], "up": rows[:, 1::2]} if "up" in matrix else {"down": rows}
            )
            found |= {f"{block}ffn_{n}_exps.{leaf}": part for n, part in parts.items()}
        else:
            module, _, leaf = rest.rpartition(".")
            found[f"{block}{PARTS[module]}.{leaf}"] = tensor
    return found


def write_file(model: Path, path: Path, **changes: Any) -> None:
    """Write a model as a GGUF file, its experts in MXFP4 and all other tensors in float32."""
    config = json.loads((model / "config.json").read_text())
    config["moe_intermediate_size"] = config["intermediate_size"]
    writer = gguf.GGUFWriter(path, "gpt-oss")
    window = {"gpt-oss.attention.sliding_window": config["sliding_window"]}
    metadata = model_metadata(config, "gpt-oss") | window | tokenizer_metadata(model, "gpt-2")
    add_metadata(writer, metadata | changes)
    for name, tensor in tensors_of(load_file(model / "model.safetensors")).items():
        kind = MXFP4 if name.endswith("exps.weight") else GGMLQuantizationType.F32
        data = gguf.quants.quantize(tensor.contiguous().numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """What experts [E, in, out] are in MXFP4."""
    rows = tensor.transpose(1, 2).contiguous().numpy()
    values = gguf.quants.dequantize(gguf.quants.quantize(rows, MXFP4), MXFP4)
    return torch.tensor(values).transpose(1, 2).contiguous()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model with experts that MXFP4 represents, and what transformers makes of it."""
    sizes = dict(intermediate_size=64, num_hidden_layers=2, swiglu_limit=7.0)
    sample = replace(SAMPLES["gpt-oss"], fields=SAMPLES["gpt-oss"].fields | sizes)
    path = write(tmp_path_factory.mktemp("model"), sample)
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            weights[name] = rounded(weights[name])
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    write_file(path, path / "model.gguf")
    return make_case(path, make_prompts()[::2] * 2)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
def test_the_config_is_the_originals(case: Case, tmp_path: Path) -> None:
    original = ModelConfig.from_dir(case.path)
    found = ModelConfig.from_dir(gguf_directory(case.path / "model.gguf"))
    assert [*found.quantization.descriptions] == ["GGUF's MXFP4, 4.25 bits a weight"]  # type: ignore[union-attr]
    rope = {"beta_fast": 32.0, "beta_slow": 1.0, **found.rope_parameters}  # with the defaults
    found = replace(found, quantization=None, dtype="float32", experts_in_turn=True)
    assert replace(found, rope_parameters=rope) == original


@pytest.mark.usefixtures("cache")
def test_a_file_without_scaling_has_none(case: Case, tmp_path: Path) -> None:
    """A config.json without it would have yarn's."""
    model = shutil.copytree(case.path, tmp_path / "model")
    edit_config(model, rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
    write_file(model, tmp_path / "plain.gguf")
    found = ModelConfig.from_dir(gguf_directory(tmp_path / "plain.gguf"))
    assert found.rope_parameters == {"rope_type": "default", "rope_theta": 1000.0}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "options",
    [dict(attention_backend="torch"), {}, dict(quantization="dequantize")],
    ids=["torch", "auto", "dequantized"],
)
def test_a_file_equals_transformers(case: Case, options: dict[str, Any]) -> None:
    check_logits(replace(case, path=case.path / "model.gguf"), **options)


@pytest.mark.usefixtures("cache")
def test_quantized_again_its_experts_stay_plain(case: Case, tmp_path: Path) -> None:
    """Gate and up are stacks of their own in the file, like those of experts without biases."""
    file = tmp_path / "model.gguf"
    shutil.copyfile(case.path / "model.gguf", file)
    path, summary = quantized(file, dequantize=True)
    assert summary.by_gptq == 8
    assert summary.of_experts == 0
    assert not [name for name in summary.plain if "bias" in name]
    assert outputs(path) == outputs(stands_for(path))


def test_the_end_of_a_message_does_not_end_an_answer() -> None:
    """<|end|> is an end of answers in other models."""
    tokens = ["<|return|>", "<|end|>", "<|call|>", "<|endoftext|>", "a"]

    class Model:
        metadata: ClassVar = {"tokenizer.ggml.eos_token_id": 0}

        def items(self, key: str) -> list[Any]:
            return tokens if key.endswith("tokens") else [CONTROL] * 4 + [1]

    assert Vocabulary(Model()).end_ids == [0, 2, 3]  # type: ignore[arg-type]
    tokens[2] = "<|other|>"
    assert Vocabulary(Model()).end_ids == [0, 1, 3]  # type: ignore[arg-type]
