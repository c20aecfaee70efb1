"""Configs and old files of families with LayerNorm: what is read, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from families import PUBLISHED, SAMPLES
from families.describe import write
from safetensors.torch import load_file, save_file
from torch import ones

from nanovllm import LLM, SamplingParams
from nanovllm.models.config import ModelConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def config(name: str, **fields: Any) -> ModelConfig:
    return ModelConfig.parse(PUBLISHED[name].file | fields)


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("falcon-7b", dict(alibi=True), "alibi=True"),
        ("falcon-7b", dict(num_ln_in_parallel_attn=2), "num_ln_in_parallel_attn=2 needs"),
        ("falcon-7b", dict(num_ln_in_parallel_attn=3), "num_ln_in_parallel_attn must be in [1, 2]"),
        ("falcon-7b", dict(multi_query=False, num_kv_heads=8), "num_kv_heads=8 without"),
        ("falcon-7b", dict(n_embed=64), "n_embed=64 and hidden_size=4544 differ"),
        ("falcon-40b", dict(parallel_attn=False), "exclude each other"),
        ("gpt2", dict(add_cross_attention=True), "add_cross_attention=True"),
        ("gpt2", dict(hidden_size=64), "n_embd=768 and hidden_size=64 differ"),
        ("gpt2", dict(activation_function="mish"), "activation_function must be one of 'gelu'"),
        ("gpt2", dict(n_head=0), "n_head must be >= 1"),
        ("gpt2", dict(scale_attn_weights=1), "scale_attn_weights"),
        ("pythia-70m", dict(rotary_pct=0.3), "rotary_pct=0.3 of head_dim=64 is 19"),
        ("pythia-70m", dict(partial_rotary_factor=0.5), "rotary_pct=0.25 and partial_rotary_f"),
        ("Apertus-8B", dict(hidden_act="silu"), "hidden_act must be 'xielu'"),
        ("stablelm-3b-4e1t", dict(hidden_act="gelu"), "hidden_act must be 'silu'"),
        ("starcoder2-3b", dict(norm_epsilon=0), "norm_epsilon must be finite and > 0"),
    ],
)  # fmt: skip
def test_bad_fields_are_refused(name: str, fields: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        config(name, **fields)


def test_which_part_of_heads_is_rotated() -> None:
    """The default of the family, unless a field says it: at the top, or with the rope."""
    nested = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    bare = {n: v for n, v in PUBLISHED["phi-2"].file.items() if n != "partial_rotary_factor"}
    for fields, part in (
        ({}, 0.5), (dict(partial_rotary_factor=None), 0.5),
        (dict(partial_rotary_factor=0.25), 0.25), (dict(rope_parameters=nested), 0.75),
    ):  # fmt: skip
        assert ModelConfig.parse(bare | fields).rope_parameters["partial_rotary_factor"] == part


def test_the_table_of_positions_limits_contexts() -> None:
    assert config("gpt2", n_positions=77).max_context == 77
    assert config("gpt2").num_outside == 768 * 1025


def test_old_files_of_gpt2_have_no_prefix_and_have_masks(tmp_path: Path) -> None:
    """The names of the published files of 2019."""
    path = write(tmp_path, SAMPLES["GPT-2"])
    expected = output_of(path)
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    tensors |= {"h.0.attn.bias": ones(1, 1, 512, 512), "h.0.attn.masked_bias": ones(())}
    save_file(tensors, path / "model.safetensors")
    assert output_of(path) == expected


def output_of(path: Path) -> list[int]:
    with LLM(path, device="cpu", dtype="float32", cpu_kvcache_gib=0.01) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        return list(llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]["token_ids"])


def test_contexts_longer_than_the_table_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, SAMPLES["GPT-2"])
    with pytest.raises(ValueError, match="max_model_len"):
        LLM(path, device="cpu", max_model_len=513)


def test_quantized_files_in_groups_of_heads_are_refused(tmp_path: Path) -> None:
    """Their codes would be read in the wrong order."""
    path = write(tmp_path, SAMPLES["GPT-NeoX"])
    file = json.loads((path / "config.json").read_text())
    file["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match="heads in groups, are not supported"):
        LLM(path, device="cpu", load_format="dummy")


@pytest.mark.parametrize("name", ["GPT-NeoX", "GPT-2", "Falcon, new"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_are_quantized_while_they_are_loaded(
    name: str, quantization: str, tmp_path: Path
) -> None:
    """Rules for plain weights match our names, and not those of the files."""
    path = write(tmp_path, SAMPLES[name])
    with LLM(path, device="cpu", quantization=quantization, cpu_kvcache_gib=0.01) as llm:
        model = llm.model_runner.shard.model
        linear = model.get_submodule("model.layers.0.mlp.down_proj")
        assert linear.weight_format.scheme is not None
