"""Each architecture's config: published files, what they leave out, and what is refused."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families.describe import config_class

from nanovllm.layers.ranks import Ranks
from nanovllm.models import model_size
from nanovllm.models.check import check_model
from nanovllm.models.config import ModelConfig
from nanovllm.models.experts import SparseConfig
from nanovllm.models.family import MODELS
from nanovllm.models.parts import build_model

LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [1.05] * 48, "long_factor": [1.5] * 48}


def published(
    architecture: str, hidden: int, layers: int, heads: int, kv_heads: int | None,
    intermediate: int, vocab: int, tied: bool, **others: Any,
) -> dict[str, Any]:  # fmt: skip
    """A file as transformers 4 wrote it; None is a field that it left out."""
    raw = {
        "architectures": [architecture], "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_act": "silu",
        "intermediate_size": intermediate, "vocab_size": vocab, "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16", **others,
    }  # fmt: skip
    return {name: value for name, value in raw.items() if value is not None}


# The fields of config.json that matter, and how many parameters the files hold.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7b": (
        published("LlamaForCausalLM", 4096, 32, 32, None, 11008, 32000, False,
                  max_position_embeddings=4096, rms_norm_eps=1e-5, pretraining_tp=1),
        6_738_415_616,
    ),
    "Llama-3.1-8B": (
        published("LlamaForCausalLM", 4096, 32, 32, 8, 14336, 128256, False, rope_theta=5e5,
                  rope_scaling=LLAMA3, max_position_embeddings=131072, attention_bias=False,
                  mlp_bias=False, rms_norm_eps=1e-5, eos_token_id=[128001, 128008, 128009]),
        8_030_261_248,
    ),
    "SmolLM2-135M": (
        published("LlamaForCausalLM", 576, 30, 9, 3, 1536, 49152, True, rope_theta=1e5,
                  max_position_embeddings=8192, rms_norm_eps=1e-5, eos_token_id=0),
        134_515_008,
    ),
    "SmolLM3-3B": (
        published("SmolLM3ForCausalLM", 2048, 36, 16, 4, 11008, 128256, True, rope_theta=5e6,
                  max_position_embeddings=65536, rms_norm_eps=1e-6, eos_token_id=128012,
                  use_sliding_window=False, attention_bias=False, mlp_bias=False,
                  no_rope_layers=[1, 1, 1, 0] * 9, no_rope_layer_interval=4),
        3_075_098_624,
    ),
    "TinyLlama-1.1B": (
        published("LlamaForCausalLM", 2048, 22, 32, 4, 5632, 32000, False,
                  max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=1e4),
        1_100_048_384,
    ),
    "Mistral-7B-v0.1": (
        published("MistralForCausalLM", 4096, 32, 32, 8, 14336, 32000, False, rope_theta=1e4,
                  max_position_embeddings=32768, rms_norm_eps=1e-5, sliding_window=4096),
        7_241_732_096,
    ),
    "Mistral-Nemo": (
        published("MistralForCausalLM", 5120, 40, 32, 8, 14336, 131072, False, rope_theta=1e6,
                  max_position_embeddings=131072, rms_norm_eps=1e-5, head_dim=128),
        12_247_782_400,
    ),
    "Qwen2.5-0.5B": (
        published("Qwen2ForCausalLM", 896, 24, 14, 2, 4864, 151936, True, rope_theta=1e6,
                  max_position_embeddings=32768, max_window_layers=21, rms_norm_eps=1e-6,
                  sliding_window=32768, use_sliding_window=False),
        494_032_768,
    ),
    "Qwen2.5-7B": (
        published("Qwen2ForCausalLM", 3584, 28, 28, 4, 18944, 152064, False, rope_theta=1e6,
                  max_position_embeddings=131072, max_window_layers=28, rms_norm_eps=1e-6,
                  sliding_window=131072, use_sliding_window=False),
        7_615_616_512,
    ),
    "Phi-3-mini-4k": (
        published("Phi3ForCausalLM", 3072, 32, 32, 32, 8192, 32064, False, rope_theta=1e4,
                  max_position_embeddings=4096, original_max_position_embeddings=4096,
                  rms_norm_eps=1e-5, sliding_window=2047, attention_bias=False),
        3_821_079_552,
    ),
    "Phi-3-mini-128k": (
        published("Phi3ForCausalLM", 3072, 32, 32, 32, 8192, 32064, False, rope_theta=1e4,
                  max_position_embeddings=131072, original_max_position_embeddings=4096,
                  rms_norm_eps=1e-5, sliding_window=262144, rope_scaling=LONGROPE),
        3_821_079_552,
    ),
    "Phi-4-mini": (
        published("Phi3ForCausalLM", 3072, 32, 24, 8, 8192, 200064, True, rope_theta=1e4,
                  max_position_embeddings=131072, original_max_position_embeddings=4096,
                  rms_norm_eps=1e-5, sliding_window=262144, partial_rotary_factor=0.75,
                  rope_scaling=LONGROPE),
        3_836_021_760,
    ),
    "Qwen3-30B-A3B": (
        published("Qwen3MoeForCausalLM", 2048, 48, 32, 4, 6144, 151936, False, rope_theta=1e6,
                  head_dim=128, max_position_embeddings=40960, max_window_layers=48,
                  rms_norm_eps=1e-6, use_sliding_window=False, attention_bias=False,
                  num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
                  norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
        30_532_122_624,
    ),
}  # fmt: skip


NEEDS_5 = pytest.mark.skipif(
    transformers.__version__ < "5", reason="transformers 4 keeps its defaults elsewhere"
)


# The field that decides about each bias, or whether there is one.
ATTENTION = dict(qkv_bias="attention_bias", o_bias="attention_bias")
BIASES: dict[str, dict[str, str | bool]] = {
    "Qwen3ForCausalLM": dict(ATTENTION, mlp_bias=False),
    "Qwen3MoeForCausalLM": dict(ATTENTION, mlp_bias=False),
    "Qwen2ForCausalLM": dict(qkv_bias=True, o_bias=False, mlp_bias=False),
    "LlamaForCausalLM": dict(ATTENTION, mlp_bias="mlp_bias"),
    "MistralForCausalLM": dict(qkv_bias=False, o_bias=False, mlp_bias=False),
    "SmolLM3ForCausalLM": dict(ATTENTION, mlp_bias="mlp_bias"),
    "Phi3ForCausalLM": dict(qkv_bias=False, o_bias=False, mlp_bias=False),
}


def family(architecture: str) -> str:
    return architecture.removesuffix("ForCausalLM")


def read(path: Path, raw: dict[str, Any]) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_dir(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_number_of_parameters(tmp_path: Path, name: str) -> None:
    """In the model and in the roofline's count."""
    raw, count = PUBLISHED[name]
    config = read(tmp_path, raw)
    with torch.device("meta"):
        model = build_model(config, max_positions=16)
    assert sum(param.numel() for param in model.parameters()) == count
    assert model_size.num_params(config) == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_keep_what_the_config_says(tmp_path: Path, name: str) -> None:
    """Memory is planned by the config. At run time only families from outside are checked."""
    config = read(tmp_path, PUBLISHED[name][0])
    for ranks in Ranks(), Ranks(0, 3 if config.num_attention_heads % 2 else 2):
        config.check_parallel_size(ranks.size)
        with torch.device("meta"):
            check_model(config, build_model(config, 16, ranks), ranks)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read_as_by_transformers(tmp_path: Path, name: str) -> None:
    """In this spelling, and as transformers writes the file again."""
    raw, _ = PUBLISHED[name]
    config = read(tmp_path, raw)
    config_class = getattr(transformers, f"{family(raw['architectures'][0])}Config")
    theirs = config_class.from_pretrained(tmp_path)
    fields = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
              "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
              "max_position_embeddings", "tie_word_embeddings"]  # fmt: skip
    assert {n: getattr(config, n) for n in fields} == {n: getattr(theirs, n) for n in fields}
    derived = theirs.hidden_size // theirs.num_attention_heads
    assert config.head_dim == (getattr(theirs, "head_dim", None) or derived)
    ends = theirs.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    assert config.eos_token_ids == set(ends)
    theirs.save_pretrained(tmp_path)
    again = json.loads((tmp_path / "config.json").read_text())
    assert ("rope_theta" in again) == (int(transformers.__version__.partition(".")[0]) < 5)
    rewritten = ModelConfig.from_dir(tmp_path)
    added = {"partial_rotary_factor": 1.0, **rewritten.rope_parameters}
    assert added == {"partial_rotary_factor": 1.0, **config.rope_parameters} | {
        n: v for n, v in added.items() if n == "original_max_position_embeddings"
    }
    object.__setattr__(rewritten, "rope_parameters", config.rope_parameters)
    assert rewritten == config


@NEEDS_5
@pytest.mark.parametrize("architecture", [n for n in MODELS if hasattr(transformers, n)])
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    """For fields that old files leave out."""
    theirs = config_class(architecture)()
    fields = type(theirs).__dataclass_fields__
    for name, value in importlib.import_module(
        f"nanovllm.models.{MODELS[architecture]}"
    ).DEFAULTS.items():
        if name == "rope_theta":
            assert theirs.rope_parameters["rope_theta"] == value
        elif name in fields:
            assert fields[name].default == value, name
        else:
            assert (name, value) == ("head_dim", None), "derived from the hidden size"


@NEEDS_5
@pytest.mark.parametrize("architecture", BIASES)
def test_absent_fields_are_read_as_by_transformers(tmp_path: Path, architecture: str) -> None:
    """A file with only the fields that have no default."""
    raw = {
        "architectures": [architecture], "vocab_size": 100, "hidden_size": 256,
        "intermediate_size": 300, "num_hidden_layers": 2, "num_attention_heads": 32,
    }  # fmt: skip
    if "Qwen3" in architecture:  # its files always have these
        raw |= {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 512}
    if "Moe" in architecture:
        raw |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = read(tmp_path, raw)
    theirs = getattr(transformers, f"{family(architecture)}Config").from_pretrained(tmp_path)
    assert config.num_key_value_heads == theirs.num_key_value_heads
    assert config.head_dim == getattr(theirs, "head_dim", 8)
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope_parameters["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert config.eos_token_ids == {theirs.eos_token_id} - {None}
    assert set(config.sliding_windows) == {getattr(theirs, "sliding_window", None)}
    for name, says in BIASES[architecture].items():
        expected = getattr(theirs, says) if isinstance(says, str) else says
        assert getattr(config, name) == expected


# Windows


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("MistralForCausalLM", dict(sliding_window=64), (64,) * 4),
        ("MistralForCausalLM", dict(sliding_window=None), (None,) * 4),
        ("Phi3ForCausalLM", dict(sliding_window=64, max_window_layers=3), (64,) * 4),
        ("LlamaForCausalLM", dict(sliding_window=64), (None,) * 4),
        ("Qwen2ForCausalLM", dict(sliding_window=64), (None,) * 4),
        ("Qwen2ForCausalLM", dict(sliding_window=64, use_sliding_window=True), (None,) * 4),
        (
            "Qwen2ForCausalLM",
            dict(sliding_window=64, use_sliding_window=True, max_window_layers=3),
            (None, None, None, 64),
        ),
        (
            "Qwen3ForCausalLM",
            dict(sliding_window=64, use_sliding_window=True, max_window_layers=0),
            (64,) * 4,
        ),
        (
            "Qwen3ForCausalLM",
            dict(sliding_window=64, use_sliding_window=True,
                 layer_types=["full_attention", "sliding_attention"] * 2),
            (None, 64, None, 64),
        ),
        (
            "Qwen3MoeForCausalLM",
            dict(sliding_window=64, use_sliding_window=True, max_window_layers=3),
            (64,) * 4,
        ),
    ],
)  # fmt: skip
def test_which_layers_have_a_window(
    tmp_path: Path, architecture: str, fields: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    raw = PUBLISHED["Qwen3-30B-A3B"][0] | dict(num_hidden_layers=4, max_window_layers=28)
    raw |= {"architectures": [architecture], **fields}
    config = read(tmp_path, raw)
    assert config.sliding_windows == expected
    assert config.longest_window == (None if None in expected else 64)


# Experts


@pytest.mark.parametrize(
    ("fields", "rotated"),
    [
        ({}, (True, True, True, False)),
        (dict(no_rope_layers=None), (True, True, True, False)),
        (dict(no_rope_layers=None, no_rope_layer_interval=2), (True, False, True, False)),
        (dict(no_rope_layers=[0, 1, 1, 0, 1]), (False, True, True, False)),
    ],
)
def test_the_config_says_which_layers_rotate(
    tmp_path: Path, fields: dict[str, Any], rotated: tuple[bool, ...]
) -> None:
    raw = PUBLISHED["SmolLM3-3B"][0] | dict(num_hidden_layers=4) | fields
    assert read(tmp_path, raw).rotated_layers == rotated


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (dict(no_rope_layers=[1, 0]), "no_rope_layers must be a list of 36 numbers, got [1, 0]"),
        (dict(no_rope_layers=5), "no_rope_layers must be a list of 36 numbers, got 5"),
        (dict(no_rope_layers=[2] * 36), "no_rope_layers must be in [0, 1], got 2"),
        (dict(no_rope_layers=None, no_rope_layer_interval=0), "no_rope_layer_interval must be"),
    ],
)
def test_bad_unrotated_layers_are_refused(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        read(tmp_path, PUBLISHED["SmolLM3-3B"][0] | fields)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, {0, 1, 2, 3}),
        (dict(mlp_only_layers=[1, 2]), {0, 3}),
        (dict(decoder_sparse_step=2), {1, 3}),
        (dict(decoder_sparse_step=2, mlp_only_layers=[3]), {1}),
        (dict(decoder_sparse_step=3, mlp_only_layers=None), {2}),
    ],
)
def test_which_layers_have_experts(
    tmp_path: Path, fields: dict[str, Any], layers: set[int]
) -> None:
    raw = PUBLISHED["Qwen3-30B-A3B"][0] | dict(num_hidden_layers=4) | fields
    config = read(tmp_path, raw)
    assert isinstance(config, SparseConfig) and config.experts.layers == layers
    raw["num_local_experts"] = raw.pop("num_experts")  # as transformers 5 writes it
    assert read(tmp_path, raw) == config


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (dict(num_experts_per_tok=129), "num_experts_per_tok must be in [1, 128], got 129"),
        (dict(num_experts=0), "num_experts must be"),
        (dict(decoder_sparse_step=0), "decoder_sparse_step"),
        (dict(mlp_only_layers="all"), "mlp_only_layers"),
        (dict(norm_topk_prob=1), "norm_topk_prob"),
        (dict(moe_intermediate_size=None), "moe_intermediate_size"),
    ],
)
def test_impossible_experts_are_refused(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        read(tmp_path, PUBLISHED["Qwen3-30B-A3B"][0] | fields)


def test_sizes_that_divide_the_experts(tmp_path: Path) -> None:
    """Experts of width 768 and 32 heads: 3 divides the experts, but not the heads."""
    config = read(tmp_path, PUBLISHED["Qwen3-30B-A3B"][0] | dict(intermediate_size=7))
    config.check_parallel_size(8)
    with pytest.raises(ValueError, match="moe_intermediate_size=768; 1, 2, 4, 8 can"):
        config.check_parallel_size(3)
    mixed = read(tmp_path, PUBLISHED["Qwen3-30B-A3B"][0] | dict(mlp_only_layers=[0]))
    with pytest.raises(ValueError, match="moe_intermediate_size=768 and intermediate_size=6144"):
        mixed.check_parallel_size(3)


# Rope


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("Llama-3.1-8B", dict(partial_rotary_factor=0.5), "LlamaForCausalLM rotates whole heads"),
        (
            "Phi-4-mini",
            dict(partial_rotary_factor=0.5),
            "short_factor must have 32 numbers",
        ),
        ("Phi-4-mini", dict(partial_rotary_factor=1.5), "is 192, which must be"),
        ("Phi-4-mini", dict(partial_rotary_factor=0.26), "is 33, which must be"),
        (
            "Phi-4-mini",
            dict(rope_scaling=LONGROPE | {"long_factor": 2.0}),
            "long_factor must be a list",
        ),
        ("Phi-4-mini", dict(rope_scaling=LONGROPE | {"long_factor": [0.0]}), "long_factor must be"),
        ("Phi-4-mini", dict(rope_scaling=LONGROPE | {"mrope_section": [1]}), "'mrope_section'"),
        ("Phi-3-mini-4k", dict(rope_scaling={"type": "linear"}), "'linear' needs a factor"),
    ],
)
def test_impossible_rope_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        read(tmp_path, PUBLISHED[name][0] | changes)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Phi-4-mini", "Qwen2.5-7B"])
def test_null_in_rope_means_absent(tmp_path: Path, name: str) -> None:
    raw = PUBLISHED[name][0]
    nulls = dict.fromkeys(["partial_rotary_factor", "attention_factor", "beta_fast"])
    scaling = {**nulls, **raw.get("rope_scaling", {"type": "default"})}
    spelt = raw | {"rope_scaling": scaling, "rope_parameters": None}
    assert read(tmp_path, spelt) == read(tmp_path, raw)


def test_phis_old_names_of_longrope_are_read(tmp_path: Path) -> None:
    """ "su" and "yarn" in old files mean longrope."""
    raw = PUBLISHED["Phi-3-mini-128k"][0]
    for old in ("su", "yarn", "longrope"):
        config = read(tmp_path, raw | {"rope_scaling": LONGROPE | {"type": old}})
        assert config.rope_parameters["rope_type"] == "longrope"
        assert config.rope_parameters["original_max_position_embeddings"] == 4096
