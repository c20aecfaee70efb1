"""ModelConfig: both spellings of config.json, and the shapes of all published dense models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from nanovllm.models.config import ModelConfig
from nanovllm.models.parts import build_model

# Qwen3-*/config.json as published: hidden, layers, heads, intermediate, tied; then the number of
# parameters, which the model cards round to 0.6, 1.7, 4.0, 8.2, 14.8 and 32.8 billion.
PUBLISHED: dict[str, tuple[int, int, int, int, bool, int]] = {
    "0.6B": (1024, 28, 16, 3072, True, 596_049_920),
    "1.7B": (2048, 28, 16, 6144, True, 1_720_574_976),
    "4B": (2560, 36, 32, 9728, True, 4_022_468_096),
    "8B": (4096, 36, 32, 12288, False, 8_190_735_360),
    "14B": (5120, 40, 40, 17408, False, 14_768_307_200),
    "32B": (5120, 64, 64, 25600, False, 32_762_123_264),
}
KV_HEADS, HEAD_DIM, VOCAB = 8, 128, 151936


def published(size: str) -> dict[str, Any]:
    """The file as transformers 4 wrote it."""
    hidden, layers, heads, intermediate, tied, _ = PUBLISHED[size]
    return {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": HEAD_DIM, "hidden_act": "silu",
        "hidden_size": hidden, "initializer_range": 0.02, "intermediate_size": intermediate,
        "max_position_embeddings": 40960, "max_window_layers": layers, "model_type": "qwen3",
        "num_attention_heads": heads, "num_hidden_layers": layers, "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": tied, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": VOCAB,
    }  # fmt: skip


def read(path: Path, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_dir(path)


def spelt_as_5(raw: dict[str, Any]) -> dict[str, Any]:
    """The same file as transformers 5 writes it."""
    new = {k: v for k, v in raw.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    scaling = dict(raw["rope_scaling"] or {"rope_type": "default"})
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    new["rope_parameters"] = {"rope_theta": raw["rope_theta"], **scaling}
    new["dtype"] = raw["torch_dtype"]
    new["layer_types"] = ["full_attention"] * raw["num_hidden_layers"]
    return new


def num_parameters(hidden: int, layers: int, heads: int, intermediate: int, tied: bool) -> int:
    """By hand: embedding and head, and in each layer attention, feed-forward and norms."""
    attention = hidden * HEAD_DIM * (heads + KV_HEADS + KV_HEADS + heads)  # q, k, v, o
    norms = 2 * hidden + 2 * HEAD_DIM
    layer = attention + 3 * hidden * intermediate + norms
    return (1 if tied else 2) * VOCAB * hidden + layers * layer + hidden


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_configs_are_read_in_both_spellings(tmp_path: Path, size: str) -> None:
    hidden, layers, heads, intermediate, tied, _ = PUBLISHED[size]
    expected = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000},
        dtype="bfloat16",
        eos_token_ids=frozenset({151645}),
        qk_norm=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        sliding_windows=(None,) * layers,
        rotated_layers=(True,) * layers,
    )
    assert read(tmp_path, published(size)) == expected
    assert read(tmp_path, spelt_as_5(published(size))) == expected


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_models_have_their_number_of_parameters(tmp_path: Path, size: str) -> None:
    """As computed by hand; a tied head counts once."""
    *shape, count = PUBLISHED[size]
    assert num_parameters(*shape) == count
    config = read(tmp_path, published(size))
    with torch.device("meta"):
        model = build_model(config, max_positions=16)
    assert sum(param.numel() for param in model.parameters()) == count


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
    ],
    ids=lambda scaling: next(iter(scaling.items()))[0] + " " + next(iter(scaling.values())),
)  # fmt: skip
def test_spellings_of_rope_scaling_are_equal(tmp_path: Path, scaling: dict[str, Any]) -> None:
    """Scaling is read in every spelling."""
    raw = published("0.6B") | {"rope_scaling": scaling}
    old, new = read(tmp_path, raw), read(tmp_path, spelt_as_5(raw))
    assert old == new
    parameters = {k: v for k, v in scaling.items() if k != "type"}
    rope_type = scaling.get("type") or scaling["rope_type"]
    assert old.rope_parameters == {**parameters, "rope_type": rope_type, "rope_theta": 1000000}


def test_the_installed_transformers_spelling_is_read(tmp_path: Path) -> None:
    """With values that differ from every default."""
    written = Qwen3Config(
        vocab_size=1000, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-5,
        max_position_embeddings=777, tie_word_embeddings=True, attention_bias=True,
        eos_token_id=[7, 9], rope_theta=12345.0, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    written.save_pretrained(tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
             "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
             "max_position_embeddings", "tie_word_embeddings"]  # fmt: skip
    assert {n: getattr(config, n) for n in names} == {n: getattr(written, n) for n in names}
    assert config.qkv_bias and config.o_bias and not config.mlp_bias
    assert config.rope_parameters["rope_theta"] == 12345.0
    assert config.rope_parameters["rope_type"] == "default"
    assert config.eos_token_ids == {7, 9}


@pytest.mark.parametrize(
    ("field", "name", "default"),
    [
        ("attention_bias", "qkv_bias", False),
        ("attention_bias", "o_bias", False),
        ("tie_word_embeddings", "tie_word_embeddings", False),
        ("torch_dtype", "dtype", "float32"),
        ("eos_token_id", "eos_token_ids", frozenset()),
    ],
)
def test_absent_fields_have_their_defaults(
    tmp_path: Path, field: str, name: str, default: Any
) -> None:
    """The defaults of transformers."""
    raw = published("8B")
    del raw[field]
    assert getattr(read(tmp_path, raw), name) == default


@pytest.mark.parametrize("field", ["torch_dtype", "eos_token_id", "rope_scaling", "layer_types"])
def test_null_means_absent(tmp_path: Path, field: str) -> None:
    raw = published("8B")
    absent = read(tmp_path, {k: v for k, v in raw.items() if k != field})
    assert read(tmp_path, raw | {field: None}) == absent


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (5, None, {5}),
        ([5, 6], None, {5, 6}),
        (5, {"eos_token_id": 6}, {5, 6}),
        (5, {"eos_token_id": [7, 8]}, {5, 7, 8}),
        (None, {"eos_token_id": [7]}, {7}),
        (5, {"eos_token_id": None}, {5}),
        (0, {}, {0}),
        (None, {}, set()),
    ],
)
def test_eos_ids_of_both_files_are_joined(
    tmp_path: Path, in_config: Any, in_generation: dict[str, Any] | None, expected: set[int]
) -> None:
    """A number or a list in each of them; 0 is an id."""
    raw = published("0.6B") | {"eos_token_id": in_config}
    assert read(tmp_path, raw, in_generation).eos_token_ids == expected


def test_the_config_is_immutable(tmp_path: Path) -> None:
    config = read(tmp_path, published("8B"))
    with pytest.raises(AttributeError):
        config.vocab_size = 5  # type: ignore[misc]
