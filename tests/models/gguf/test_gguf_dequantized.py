"""GGUF files whose blocks become plain weights: `quantization="dequantize"`, or another method."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from converted_files import File, output, write_file
from gguf_files import write_gguf
from reference import make_llm
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.models.config import ModelConfig
from nanovllm.models.model_size import WeightBytes, model_bytes

pytestmark = pytest.mark.usefixtures("one_thread", "cache")

SHAPE = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, num_hidden_layers=1,
)  # fmt: skip
MOE = dict(moe_intermediate_size=256, norm_topk_prob=True)
QUERY = "model.layers.0.self_attn.q_proj.weight"
Written = tuple[Path, Path]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))


def mixed(name: str, shape: tuple[int, ...]) -> str:
    if len(shape) < 2:
        return "F32"
    return "Q6_K" if "attn_v" in name or "token_embd" in name else "Q4_K"


def written(path: Path, family: str = "Llama", **fields: Any) -> Written:
    """A file, and a checkpoint with the values of its blocks."""
    model = make_model(path / "model", family=family, **SHAPE | fields)
    exact = write_gguf(model, path / "m.gguf", mixed)
    tensors = {name: tensor.contiguous() for name, tensor in exact.items()}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return path / "m.gguf", model


def same(one: Any, other: Any) -> bool:
    """Whether two results of `output` are equal, bit for bit."""
    logits = zip(one[1], other[1], strict=True)
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_logits_are_those_of_the_values(family: str, dtype: str, tmp_path: Path) -> None:
    """Of fused layers, a tied head and experts, bit for bit; and the file itself is as before."""
    fields = MOE if family == "Qwen3Moe" else {}
    file, plain = written(tmp_path, family, tie_word_embeddings=True, **fields)
    found = output(file, dtype=dtype, quantization="dequantize")
    assert same(found, output(plain, dtype=dtype))
    with make_llm(file, max_model_len=64) as llm:
        assert llm.model_config.quantization is not None


def test_ranks_decode_their_parts(tmp_path: Path) -> None:
    """Columns of a part begin inside of a block."""
    file, plain = written(tmp_path, intermediate_size=768)
    found = output(file, quantization="dequantize", tensor_parallel_size=2)
    assert same(found, output(plain, tensor_parallel_size=2))


def test_heads_in_another_order(tmp_path: Path) -> None:
    """Rows and columns of a hybrid model are in the file's own order."""
    file = File("qwen35", "Qwen3.5", dict(linear_num_value_heads=4, linear_value_head_dim=32))
    model = file.write_model(tmp_path)
    values = output(write_file(model, file.architecture, "Q8_0", decoded=True))
    blocks = write_file(model, file.architecture, "Q8_0")
    assert same(output(blocks, quantization="dequantize"), values)


def test_another_method_quantizes_the_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, plain = written(tmp_path)
    found = output(file, quantization="int8")
    assert "rounds them once more" in caplog.text
    assert same(found, output(plain, quantization="int8"))


def test_plain_weights_can_be_read_and_changed(tmp_path: Path) -> None:
    file, plain = written(tmp_path)
    values = load_file(plain / "model.safetensors")
    with make_llm(file, max_model_len=64, quantization="dequantize") as llm:
        weights = llm.get_weights()
        assert all(torch.equal(weights[name], values[name]) for name in values)
        llm.update_weights({QUERY: values[QUERY] * 2})
        assert torch.equal(llm.get_weights(QUERY)[QUERY], values[QUERY] * 2)
        llm.reload_weights()
        assert torch.equal(llm.get_weights(QUERY)[QUERY], values[QUERY])


def test_weights_in_blocks_name_the_way_out(tmp_path: Path) -> None:
    """They can be replaced by blocks, but not be read, or replaced by plain weights."""
    file, plain = written(tmp_path)
    values = load_file(plain / "model.safetensors")
    with make_llm(file, max_model_len=64) as llm:
        with pytest.raises(ValueError, match='quantization="dequantize" makes plain'):
            llm.get_weights(QUERY)
        with pytest.raises(ValueError, match='quantization="dequantize" makes plain'):
            llm.update_weights({QUERY: values[QUERY]})


def test_only_blocks_can_be_dequantized(tmp_path: Path) -> None:
    """Plain weights need no option; other methods are refused, and name their own."""
    file, plain = written(tmp_path)
    with pytest.raises(ValueError, match="the checkpoint has plain weights: leave the option out"):
        ModelConfig.from_dir(plain, "dequantize")
    raw = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    with pytest.raises(ValueError, match="for GGUF files; the checkpoint is quantized by 'fp8'"):
        ModelConfig.parse({**_fields(plain), **raw}, "dequantize")
    with LLM(str(file), device="cpu", max_model_len=64, quantization="dequantize") as llm:
        info = llm.model_config
        assert llm.model_path.name.endswith("-plain") and info.dtype == "bfloat16"
        assert model_bytes(info, WeightBytes(2, info.quantization)) > file.stat().st_size * 2


def _fields(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((path / "config.json").read_text())
    return fields
