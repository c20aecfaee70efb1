"""Every field of config.json, with every kind of value: an error names it, or it is transformers'.

The reference is the config that transformers' `AutoConfig` reads from the same file.
"""

import importlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import SHAPE, make_model
from reference import assert_same, generate, make_case, make_llm, make_prompts
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from waiting import little_work

from nanovllm import LLM
from nanovllm.command.info import describe
from nanovllm.layers.rope_types import ROPE_TYPES
from nanovllm.layers.rotary_embedding import rope_frequencies
from nanovllm.models.config import ModelConfig
from nanovllm.models.experts import SparseConfig
from nanovllm.models.family import MODELS
from nanovllm.models.fields import DEFAULTS
from nanovllm.models.rope import NEEDS

pytestmark = pytest.mark.usefixtures("one_thread")

NEEDS_5 = pytest.mark.skipif(
    transformers.__version__ < "5", reason="transformers 4 keeps its defaults elsewhere"
)
HUGE = 10**30
VALUES: list[Any] = [
    None, "x", "", 5, 2.5, True, False, -1, 0, HUGE, math.nan, math.inf, [1], [], ["x"], [[1]],
    {"a": 1}, {},
]  # fmt: skip
COMMON = (
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "max_position_embeddings", "tie_word_embeddings", "hidden_act", "rope_theta", "rope_scaling",
    "rope_parameters", "dtype", "torch_dtype", "eos_token_id", "quantization_config", "layer_types",
)  # fmt: skip
WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers")
BIASES = ("attention_bias", "mlp_bias")
EXPERTS = (
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
    "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob",
)  # fmt: skip
OTHERS: dict[str, tuple[str, ...]] = {
    "Qwen3ForCausalLM": ("attention_bias", *WINDOWS),
    "Qwen3MoeForCausalLM": ("attention_bias", *EXPERTS, *WINDOWS[:2]),
    "Qwen2ForCausalLM": WINDOWS,
    "LlamaForCausalLM": BIASES,
    "MistralForCausalLM": ("sliding_window",),
    "SmolLM3ForCausalLM": (*BIASES, "no_rope_layers", "no_rope_layer_interval"),
    "Phi3ForCausalLM": ("sliding_window", "partial_rotary_factor"),
    "MixtralForCausalLM": (*EXPERTS[1:3], "sliding_window"),
    "Qwen2MoeForCausalLM": (
        "qkv_bias", *EXPERTS, "shared_expert_intermediate_size", *WINDOWS
    ),
    "GraniteMoeForCausalLM": (
        "attention_bias", *EXPERTS[1:3], "embedding_multiplier", "logits_scaling",
        "residual_multiplier", "attention_multiplier",
    ),
    "OlmoeForCausalLM": ("attention_bias", *EXPERTS[:3], "norm_topk_prob", "clip_qkv"),
    "PhimoeForCausalLM": (
        "attention_bias", *EXPERTS[1:3], "sliding_window", "lm_head_bias", "router_jitter_noise"
    ),
}  # fmt: skip
FIELDS = [(name, field) for name in OTHERS for field in (*COMMON, *OTHERS[name])]


def model_type(architecture: str) -> str:
    return str(getattr(transformers, architecture).config_class.model_type)


def base(architecture: str, **changes: Any) -> dict[str, Any]:
    """A file with a value for every size."""
    raw = {**SHAPE, "architectures": [architecture], "model_type": model_type(architecture)}
    del raw["pad_token_id"], raw["bos_token_id"], raw["attention_bias"]
    if "num_experts" in OTHERS[architecture]:
        raw |= dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    elif "num_local_experts" in OTHERS[architecture]:
        raw |= dict(num_local_experts=8, num_experts_per_tok=2)
    return raw | changes


def defaults(architecture: str) -> dict[str, Any]:
    """The values that its family gives to fields that a file leaves out."""
    family = importlib.import_module(f"nanovllm.models.{MODELS[architecture]}")
    return {**DEFAULTS, **family.DEFAULTS}


def write(path: Path, raw: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(raw))
    return path


def read(path: Path, raw: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dir(write(path, raw))


def reference(path: Path) -> dict[str, Any] | None:
    """What transformers makes of the file; None if it refuses it."""
    try:
        theirs = AutoConfig.from_pretrained(path)
    except Exception:  # of many kinds
        return None
    layers = theirs.num_hidden_layers
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None)
    if theirs.model_type == "llama":
        window = types = None
    if theirs.model_type in ("qwen3_moe", "phi3", "mistral"):
        types = None
    windows = [window] * layers
    if types:
        windows = [window if kind == "sliding_attention" else None for kind in types]
    ends = theirs.eos_token_id
    rope = theirs.rope_parameters
    values = dict(
        vocab_size=theirs.vocab_size, hidden_size=theirs.hidden_size, num_hidden_layers=layers,
        intermediate_size=theirs.intermediate_size, rms_norm_eps=theirs.rms_norm_eps,
        num_attention_heads=theirs.num_attention_heads,
        num_key_value_heads=theirs.num_key_value_heads or theirs.num_attention_heads,
        head_dim=getattr(theirs, "head_dim", None)
        or theirs.hidden_size // theirs.num_attention_heads,
        max_position_embeddings=theirs.max_position_embeddings,
        tie_word_embeddings=theirs.tie_word_embeddings, rope_theta=float(rope["rope_theta"]),
        rope_type=rope["rope_type"], dtype=str(theirs.dtype or "torch.float32")[6:],
        eos_token_ids=set() if ends is None else set(ends) if isinstance(ends, list) else {ends},
        sliding_windows=windows, mlp_bias=getattr(theirs, "mlp_bias", False),
        rotated_layers=list(map(bool, getattr(theirs, "no_rope_layers", None) or [1] * layers)),
    )  # fmt: skip
    if "attention_bias" in OTHERS[theirs.architectures[0]]:
        values["o_bias"] = theirs.attention_bias
    if theirs.model_type == "qwen3_moe":
        values |= dict(
            experts=theirs.num_experts, per_token=theirs.num_experts_per_tok,
            intermediate=theirs.moe_intermediate_size, norm=theirs.norm_topk_prob,
            sparse={
                i for i in range(layers)
                if i not in theirs.mlp_only_layers and (i + 1) % theirs.decoder_sparse_step == 0
            },
        )  # fmt: skip
    return values


def ours(config: ModelConfig, names: dict[str, Any]) -> dict[str, Any]:
    """The same values of our config."""
    values = {**vars(config), **config.rope_parameters}
    values["sliding_windows"] = list(config.sliding_windows)
    values["rotated_layers"] = list(config.rotated_layers)
    if isinstance(config, SparseConfig):
        values |= dict(
            experts=config.experts.num_experts, per_token=config.experts.routing.per_token,
            intermediate=config.experts.intermediate_size, norm=config.experts.routing.normalized,
            sparse=set(config.experts.layers),
        )  # fmt: skip
    return {name: values[name] for name in names}


# Every field, and every kind of value


def means_what_transformers_does_not_say(architecture: str, field: str, value: Any) -> bool:
    """Values that transformers' types refuse, and that have one meaning only."""
    if (field, value) == ("hidden_size", 5):
        return architecture == "LlamaForCausalLM"  # there is a head_dim, so it need not be divided
    if (field, value) == ("partial_rotary_factor", None):
        return True
    if field in ("rms_norm_eps", "rope_theta", "clip_qkv", "router_jitter_noise"):
        return type(value) is int  # a number is a number
    if field == "num_key_value_heads":
        return value is None  # as in the other architectures: as many as there are heads
    if field in WINDOWS:
        return architecture != "MistralForCausalLM"  # not read unless there is a window
    return field == "torch_dtype" or (field, value) == ("rope_scaling", {})


@NEEDS_5
@pytest.mark.parametrize(("architecture", "field"), FIELDS)
def test_a_value_is_refused_by_name_or_read_as_by_transformers(
    tmp_path: Path, architecture: str, field: str
) -> None:
    for value in VALUES:
        raw = base(architecture, **{field: value})
        with little_work(1.0):
            try:
                config = read(tmp_path, raw)
            except (TypeError, ValueError) as error:
                message = str(error)
                other = field.replace("num_local_experts", "num_experts")
                assert (field in message or other in message) and str(
                    tmp_path / "config.json"
                ) in message, (value, message)
                # One about architectures names all that are known.
                assert len(message) < (2000 if field == "architectures" else 1000)
            else:
                theirs = reference(tmp_path)
                if theirs is None:
                    assert means_what_transformers_does_not_say(architecture, field, value), value
                else:
                    assert ours(config, theirs) == theirs, value


def frequencies(path: Path) -> tuple[torch.Tensor, float] | None:
    """transformers' frequencies and factor of cosines and sines; None if it refuses the file."""
    try:
        config = AutoConfig.from_pretrained(path)
        rope_type = config.rope_parameters["rope_type"]
        if rope_type == "default":
            return Qwen3RotaryEmbedding.compute_default_rope_parameters(config)
        return ROPE_INIT_FUNCTIONS[rope_type](config, seq_len=512)
    except Exception:  # of many kinds
        return None


@NEEDS_5
@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_a_rope_parameter_is_refused_by_name_or_read_as_by_transformers(
    tmp_path: Path, rope_type: str
) -> None:
    given: dict[str, Any] = dict(
        rope_theta=1e4, factor=4.0, original_max_position_embeddings=128, low_freq_factor=1.0,
        high_freq_factor=4.0, attention_factor=0.5, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
        mscale_all_dim=0.5, truncate=True, short_factor=[1.0] * 8, long_factor=[2.0] * 8,
        partial_rotary_factor=1.0,
    )  # fmt: skip
    scaling = {"rope_type": rope_type, **{name: given[name] for name in NEEDS[rope_type]}}
    for field, value in itertools.product([*given, "rope_type", "type"], VALUES):
        raw = base("Qwen3ForCausalLM", rope_parameters={**scaling, field: value})
        try:
            config = read(tmp_path, raw)
        except (TypeError, ValueError) as error:
            message = str(error)
        else:
            inv_freq, factor = rope_frequencies(config.head_dim, 512, 512, config.rope_parameters)
            if theirs := frequencies(tmp_path):
                torch.testing.assert_close(inv_freq, theirs[0])
                assert factor == pytest.approx(theirs[1])
                continue
            message = field if value is None or value == HUGE else ""  # null is absent
        assert field in message, (field, value, message)


def test_every_rope_type_has_its_needs() -> None:
    assert set(NEEDS) == set(ROPE_TYPES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", 0), ("rms_norm_eps", 0.0), ("head_dim", None), ("architectures", 5),
        ("layer_types", 5), ("layer_types", [{}, {}]), ("max_position_embeddings", None),
        ("rope_parameters", {"rope_type": "yarn"}), ("rope_parameters", {"rope_type": "llama3"}),
        ("rope_parameters", 0),
    ],
)  # fmt: skip
def test_a_bad_config_is_not_blamed_on_the_tokenizer(
    model_dir: Path, tmp_path: Path, field: str, value: Any
) -> None:
    """The tokenizer's loader reads config.json too; the model's own check comes first."""
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path, raw | {field: value})
    for load in (LLM, lambda path: describe({"model": str(path)})):
        with pytest.raises((TypeError, ValueError)) as caught:
            load(tmp_path)
        message = str(caught.value).replace("rope_type", "rope_parameters")
        assert field in message and "tokenizer" not in message


# Sizes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 10**12), ("vocab_size", 10**15), ("num_hidden_layers", 10**9),
        ("intermediate_size", 10**13), ("num_attention_heads", 10**13), ("head_dim", 10**13),
        ("max_position_embeddings", 10**9), ("moe_intermediate_size", 10**14),
        ("num_experts", 10**14),
    ],
)  # fmt: skip
def test_sizes_that_no_memory_holds_are_refused(tmp_path: Path, field: str, value: int) -> None:
    """At once, and by name, before anything is allocated."""
    architecture = "Qwen3MoeForCausalLM" if field in EXPERTS else "Qwen3ForCausalLM"
    write(tmp_path, base(architecture, **{field: value}))
    with little_work(1.0), pytest.raises(ValueError, match=field) as caught:
        LLM(tmp_path, device="cpu", load_format="dummy")
    assert str(value) in str(caught.value)


def test_a_model_larger_than_memory_is_a_memory_error_with_its_sizes(tmp_path: Path) -> None:
    """Of a terabyte for each matrix, no system gives several."""
    write(tmp_path, base("Qwen3ForCausalLM", intermediate_size=10**11))
    with pytest.raises(MemoryError) as caught:
        LLM(tmp_path, device="cpu", load_format="dummy", max_model_len=64)
    for says in ("vocab_size=259", "hidden_size=64", "intermediate_size=100000000000"):
        assert says in str(caught.value)


def test_an_error_of_another_kind_is_not_one_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch raises RuntimeError for nearly everything."""

    def broken(*_: object) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr("nanovllm.engine.start.load.build_model", broken)
    write(tmp_path, base("Qwen3ForCausalLM"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        LLM(tmp_path, device="cpu", load_format="dummy", max_model_len=64)


# Absent fields


@NEEDS_5
@pytest.mark.parametrize("architecture", OTHERS)
def test_defaults_equal_transformers(architecture: str) -> None:
    """Of all fields that we read and that this version knows."""
    theirs = getattr(transformers, f"{architecture.removesuffix('ForCausalLM')}Config")()
    known = type(theirs).__dataclass_fields__
    ours = defaults(architecture)
    missing = {f for f in (*COMMON, *OTHERS[architecture]) if f in known} - set(ours)
    assert missing <= {"architectures", "dtype", "rope_parameters"}
    assert theirs.rope_parameters["rope_theta"] == ours["rope_theta"]
    compared = {name: value for name, value in ours.items() if name in known}
    assert compared == {name: known[name].default for name in compared}
    assert len(compared) >= 12


@NEEDS_5
@pytest.mark.parametrize("architecture", OTHERS)
def test_a_file_with_a_name_alone_is_read_as_by_transformers(
    tmp_path: Path, architecture: str
) -> None:
    raw = {"architectures": [architecture], "model_type": model_type(architecture)}
    theirs = reference(write(tmp_path, raw))
    assert theirs is not None
    assert ours(ModelConfig.from_dir(tmp_path), theirs) == theirs


@NEEDS_5
@pytest.mark.parametrize("architecture", OTHERS)
def test_a_model_without_optional_fields_equals_transformers(
    tmp_path: Path, architecture: str
) -> None:
    """Greedy tokens of a model whose file has nothing but its sizes."""
    default = defaults(architecture)
    # fmt: off
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
             "num_attention_heads", "num_key_value_heads", "num_experts", "pad_token_id",
             "num_local_experts", "moe_intermediate_size", "architectures", "model_type")
    # fmt: on
    path = make_model(
        tmp_path,
        seed=3,
        family=architecture.removesuffix("ForCausalLM"),
        **{n: v for n, v in default.items() if n not in (*sizes, "eos_token_id", "rope_theta")},
        **dict(num_experts=8, moe_intermediate_size=32) if "num_experts" in default else {},
    )  # fmt: skip
    raw = json.loads((path / "config.json").read_text())
    write(path, {name: value for name, value in raw.items() if name in sizes})
    case = make_case(path, make_prompts())
    with make_llm(path, max_model_len=512) as llm:
        assert_same(generate(llm, case), case.expected)


# EOS


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [259, [257, 300], HUGE])
def test_an_eos_id_outside_the_vocabulary_is_refused(tmp_path: Path, file: str, value: Any) -> None:
    """It could never end a text."""
    write(tmp_path, base("Qwen3ForCausalLM"))
    raw = json.loads((tmp_path / "config.json").read_text()) if file == "config.json" else {}
    (tmp_path / file).write_text(json.dumps(raw | {"eos_token_id": value}))
    with pytest.raises(ValueError, match="eos_token_id") as caught:
        ModelConfig.from_dir(tmp_path)
    bad = value if isinstance(value, int) else value[-1]
    for says in (str(bad), "vocab_size=259", str(tmp_path / file)):
        assert says in str(caught.value)


@pytest.mark.parametrize("value", ["257", -1, [257, None], {}])
def test_a_bad_eos_id_of_generation_config_names_the_file(tmp_path: Path, value: Any) -> None:
    write(tmp_path, base("Qwen3ForCausalLM"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises((TypeError, ValueError), match=r"generation_config\.json: eos_token_id"):
        ModelConfig.from_dir(tmp_path)


@NEEDS_5
def test_a_default_eos_id_outside_the_vocabulary_ends_nothing(tmp_path: Path) -> None:
    """SmolLM3's default is 128,001, which a smaller model does not have; nor its tokenizer's."""
    path = make_model(
        tmp_path, family="SmolLM3", vocab_size=200, eos_token_id=None, pad_token_id=None
    )
    raw = json.loads((path / "config.json").read_text())
    raw.pop("eos_token_id", None)
    (path / "generation_config.json").unlink(missing_ok=True)
    write(path, raw)
    with make_llm(path) as llm:
        assert llm.tokenizer.eos_token_id == 257
        assert llm.eos_token_ids == set()
