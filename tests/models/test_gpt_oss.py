"""gpt-oss: what its config may say, and what its layers refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import write_adapter
from families import SAMPLES
from families.describe import write
from families.gpt_oss import FILE, layers
from reference import make_llm

from nanovllm import LoRARequest, SamplingParams
from nanovllm.formats.format import Formats
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.layer import Build
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.layers.sink_attention import SinkSelfAttention
from nanovllm.models.config import ModelConfig

PLAIN = {n: v for n, v in layers(4, 8).items() if n not in ("quantization_config", "rope_scaling")}


def test_absent_fields_have_the_published_meaning() -> None:
    """Windows from the first layer on, and yarn without truncation."""
    file = {n: v for n, v in PLAIN.items() if n != "layer_types"}
    config = ModelConfig.parse(file)
    assert config.sliding_windows == (128, None, 128, None)
    expected = dict(FILE["rope_scaling"], rope_theta=150_000.0)
    assert dict(config.rope_parameters) == expected
    assert all(layer.needs == {"sinks"} for layer in config.layers)
    assert config.dtype == "float32"
    assert ModelConfig.parse(layers(4, 8)).dtype == "bfloat16"
    assert ModelConfig.parse(layers(4, 8) | {"dtype": "float16"}).dtype == "float16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be .* 8"),
        ({"swiglu_limit": 0}, "swiglu_limit must be"),
        ({"swiglu_alpha": "1"}, "swiglu_alpha must be"),
        ({"sliding_window": None}, "sliding_window is not set"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries"),
        ({"attention_bias": 1}, "attention_bias must be"),
    ],
)
def test_a_value_that_is_not_supported_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ModelConfig.parse(PLAIN | changes)


def test_ranks_must_divide_the_experts_or_have_whole_ones() -> None:
    config = ModelConfig.parse(PLAIN | {"intermediate_size": 2881})
    with pytest.raises(ValueError, match=r"intermediate_size=2881.*enable_expert_parallel=True"):
        config.check_parallel_size(2)
    config.check_parallel_size(2, whole_experts=True)


def test_each_rank_has_the_sinks_of_its_heads() -> None:
    sinks = torch.arange(6.0)
    for rank in (0, 1):
        make = Build(Ranks(rank, 2), Formats(), 8)
        layer = SinkSelfAttention(make, 16, KeysAndValues(6, 2, 8)).attn
        layer.weight_loader(layer.sinks, sinks, None)
        assert layer.sinks.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]][rank]
        assert layer.whole_shape(layer.sinks, None) == (6,)


def test_scales_of_the_kv_cache_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Formats, "has_kv_scales", lambda self: True)
    with pytest.raises(ValueError, match="scales for the KV cache of attention with sinks"):
        SinkSelfAttention(Build(ALONE, Formats(), 8), 16, KeysAndValues(2, 2, 8))


def test_adapters_of_single_experts_are_refused(tmp_path: Path) -> None:
    """Files have stacks of all experts alone, and so have adapters."""
    path = write(tmp_path / "model", SAMPLES["gpt-oss"])
    name = "model.layers.0.mlp.experts.0.gate_proj"
    adapter = write_adapter(tmp_path / "adapter", {name: (56, 64)})
    request = LoRARequest("a", str(adapter))
    with (
        make_llm(path, enable_lora=True, attention_backend="torch") as llm,
        pytest.raises(ValueError, match=r"mlp\.experts\.0\.gate_proj.* can have no adapter"),
    ):
        llm.generate([[1]], SamplingParams(max_tokens=1), False, request)
