"""quantization_config: which layers it means, what is refused, what files may not contradict."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import edit_config, make_model
from quantization_variants import MOE, VARIANTS
from quantized_checkpoints import write_quantized
from safetensors.torch import load_file, save_file
from waiting import little_work

from nanovllm import LLM
from nanovllm.formats.choice import QuantizedFormats
from nanovllm.formats.format import DENSE
from nanovllm.formats.methods import METHODS, choose_quantization, read_quantization
from nanovllm.formats.quantization import Quantization
from nanovllm.formats.scheme import DEQUANTIZE, ONLINE
from nanovllm.models.config import ModelConfig
from nanovllm.utils.option import QUANTIZATIONS

AWQ = VARIANTS["awq"].config
GPTQ = VARIANTS["gptq"].config
FP8 = VARIANTS["fp8, blocks of 128"].config
STATIC = VARIANTS["fp8, static"].config
PACKED = VARIANTS["ct, 4 bits"].config
INT8 = VARIANTS["ct, int8"].config


def read(config: Any) -> Quantization:
    return read_quantization({"quantization_config": config})


def with_group(config: dict[str, Any], field: str, **changes: Any) -> dict[str, Any]:
    """A compressed-tensors config with other arguments in its group."""
    group = config["config_groups"]["group_0"]
    changed = {**group, field: {**(group[field] or {}), **changes}}
    return {**config, "config_groups": {"group_0": changed}}


def in_group(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A compressed-tensors config with other fields in its group."""
    return {**config, "config_groups": {"g": {**config["config_groups"]["group_0"], **changes}}}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("fp8", ["must be an object", "'fp8'"]),
        ({"quant_method": "bitsandbytes"}, ["quant_method='bitsandbytes'", "'gptq'"]),
        ({**FP8, "fmt": "e5m2"}, ["fmt='e5m2'", "'e4m3'"]),
        ({**FP8, "scale_fmt": "ue4m3"}, ["scale_fmt='ue4m3'", "'ue8m0'"]),
        ({**FP8, "activation_scheme": "none"}, ["activation_scheme", "'none'", "'dynamic'"]),
        ({**FP8, "activation_scheme": "static"}, ["activation_scheme='static'", "'dynamic'"]),
        ({**FP8, "weight_block_size": [128]}, ["2 sizes", "[128]"]),
        ({**FP8, "weight_block_size": [1, 128]}, ["size of a block", "1"]),
        ({**FP8, "modules_to_not_convert": "lm_head"}, ["modules_to_not_convert", "'lm_head'"]),
        ({**STATIC, "modules_to_convert": ["model.norm"]}, ["modules_to_convert"]),
        ({**AWQ, "bits": 8}, ["bits=8", "4"]),
        ({**AWQ, "zero_point": False}, ["zero_point=False"]),
        ({**AWQ, "version": "gemv"}, ["version='gemv'", "'gemm'"]),
        ({**AWQ, "group_size": 0}, ["group_size", "0"]),
        ({k: v for k, v in AWQ.items() if k != "group_size"}, ["no field 'group_size'"]),
        ({**GPTQ, "bits": 3}, ["bits=3", "4, 8"]),
        ({**GPTQ, "checkpoint_format": "marlin"}, ["checkpoint_format='marlin'", "'gptq_v2'"]),
        ({**GPTQ, "is_marlin_format": True}, ["is_marlin_format=True"]),
        ({**GPTQ, "desc_act": 1}, ["desc_act", "1"]),
        ({**GPTQ, "dynamic": {".*down.*": {"bits": 2}}}, ["bits=2"]),
        (with_group(PACKED, "weights", num_bits=3), ["3-bit int", "4-bit int"]),
        (with_group(PACKED, "weights", strategy="tensor_group"), ["strategy='tensor_group'"]),
        (with_group(INT8, "weights", num_bits=4), ["4-bit int", "8-bit int"]),
        (with_group(INT8, "input_activations", symmetric=False), ["symmetric"]),
        (with_group(INT8, "input_activations", num_bits=4), ["4-bit int", "8-bit int"]),
        (with_group(PACKED, "input_activations", num_bits=8, type="int"), ["input_activations"]),
        ({**PACKED, "format": "marlin-24"}, ["format='marlin-24'", "'pack-quantized'"]),
        ({**PACKED, "sparsity_config": {"format": "sparse-bitmask"}}, ["sparsity_config"]),
        ({**PACKED, "transform_config": {"R1": {}}}, ["transform_config"]),
        ({**PACKED, "kv_cache_scheme": {"num_bits": 4, "type": "int"}}, ["kv_cache_scheme"]),
        # What would have another meaning than the files
        ({k: v for k, v in AWQ.items() if k != "bits"}, ["no field 'bits'"]),
        ({**FP8, "dequantize": True}, ["dequantize=True"]),
        ({**FP8, "is_checkpoint_fp8_serialized": False}, ["is_checkpoint_fp8_serialized=False"]),
        ({**STATIC, "kv_cache_scheme": "xx"}, ["kv_cache_scheme", "'xx'"]),
        ({**STATIC, "kv_cache_scheme": {"num_bits": 4, "type": "int"}}, ["kv_cache_scheme"]),
        ({**GPTQ, "dynamic": {".*": {"checkpoint_format": "gptq_v2"}}}, ["'.*'", "_format"]),
        ({**GPTQ, "dynamic": {".*": {"pack_dtype": "int8"}}}, ["'.*'", "'pack_dtype'"]),
        (with_group(INT8, "weights", dynamic=True), ["dynamic=True"]),
        ({**PACKED, "quantization_status": "initialized"}, ["quantization_status='initialized'"]),
        # Values of a wrong type
        ({**AWQ, "quant_method": ["awq"]}, ["quant_method=['awq']", "'gptq'"]),
        ({**AWQ, "bits": 4.0}, ["bits=4.0", "supported: 4"]),
        ({**AWQ, "group_size": 32.0}, ["group_size must be an int", "32.0"]),
        ({**GPTQ, "bits": 8.0}, ["bits=8.0", "supported: 4, 8"]),
        ({**GPTQ, "dynamic": [{}]}, ["dynamic must be an object", "[{}]"]),
        ({**GPTQ, "dynamic": {"-:x": 1}}, ["dynamic['-:x'] must be an object", "1"]),
        ({**GPTQ, "dynamic": {"-:(": {}}}, ["dynamic", "regular expression", "'('"]),
        ({**FP8, "weight_block_size": [128.7, 128]}, ["weight_block_size", "an int", "128.7"]),
        ({**FP8, "weight_block_size": "axb"}, ["weight_block_size", "an int", "'a'"]),
        ({**FP8, "weight_block_size": 128}, ["weight_block_size", "2 sizes", "128"]),
        ({**PACKED, "sparsity_config": "x"}, ["sparsity_config must be an object", "'x'"]),
        ({**PACKED, "kv_cache_scheme": "fp8"}, ["kv_cache_scheme must be an object", "'fp8'"]),
        ({**PACKED, "config_groups": ["g"]}, ["config_groups must be an object", "['g']"]),
        ({**PACKED, "config_groups": {"g": None}}, ["config_groups['g'] must be an object"]),
        ({**PACKED, "ignore": ["re:("]}, ["ignore", "regular expression", "'('"]),
        (with_group(PACKED, "weights", num_bits=4.0), ["num_bits must be an int", "4.0"]),
        (with_group(PACKED, "weights", actorder="sorted"), ["actorder='sorted'", "'group'"]),
        (with_group(INT8, "input_activations", dynamic="yes"), ["dynamic must be True", "'yes'"]),
        (with_group(INT8, "input_activations", symmetric=1), ["symmetric must be True", "1"]),
        (in_group(PACKED, weights="int4"), ["weights must be an object", "'int4'"]),
        (in_group(PACKED, input_activations=8), ["input_activations must be an object", "8"]),
        (in_group(PACKED, targets="Linear"), ["targets must be a list of names", "'Linear'"]),
        (in_group(PACKED, targets=None), ["targets must be a list of names", "None"]),
        (in_group(PACKED, targets=["re:["]), ["targets", "regular expression", "'['"]),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(config: Any, says: list[str]) -> None:
    with pytest.raises(ValueError, match="quantization_config") as error:
        read(config)
    message = str(error.value)
    assert [text for text in says if text not in message] == [], message


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (FP8, {"is_checkpoint_fp8_serialized": True, "dequantize": None}),
        (STATIC, {"kv_cache_scheme": "static"}),  # AutoFP8's
        (STATIC, {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}),
        (GPTQ, {"damp_percent": 0.1, "meta": {}, "dynamic": {".*": {"bits": 4, "mse": 0.1}}}),
        (PACKED, {"quantization_status": "frozen"}),  # of 2024
        (PACKED, {"global_compression_ratio": 1.5, "version": "9"}),
    ],
    ids=str,
)
def test_fields_that_do_not_change_the_meaning_are_accepted(
    config: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert read({**config, **fields}).schemes == read(config).schemes


def test_a_block_may_be_a_text() -> None:
    block = VARIANTS["ct, fp8, blocks"].config
    as_text = with_group(block, "weights", block_structure="64x32")
    assert read(as_text).schemes == read(block).schemes


Q, HEAD, GATE, GATE_PROJ = (
    "model.layers.0.self_attn.q_proj", "lm_head", "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        ({**AWQ, "modules_to_not_convert": None}, {HEAD}),
        ({**AWQ, "modules_to_not_convert": ["gate"]}, {HEAD, GATE}),  # words, not their parts
        ({**AWQ, "modules_to_not_convert": ["mlp"]}, {HEAD, GATE, GATE_PROJ}),
        ({**FP8, "modules_to_not_convert": ["model.layers.0"]}, {HEAD, Q}),
        ({**FP8, "modules_to_not_convert": [], "ignored_layers": [Q]}, {HEAD, Q}),
        ({**FP8, "modules_to_not_convert": [GATE], "ignored_layers": [Q]}, {HEAD, Q, GATE}),
        ({**FP8, "modules_to_not_convert": ["layers.1.mlp.gate_proj"]}, {HEAD, GATE_PROJ}),
        ({**GPTQ, "lm_head": True}, set()),
        ({**GPTQ, "lm_head": False, "dynamic": {"-:.*mlp.gate$": {}}}, {HEAD, GATE}),
        ({**PACKED, "ignore": []}, set()),
        ({**PACKED, "ignore": ["lm_head", "re:.*mlp.gate$"]}, {HEAD, GATE}),
        ({**PACKED, "ignore": ["model.layers.0"]}, set()),  # a whole name, not its beginning
        ({**PACKED, "ignore": ["Linear"]}, {Q, HEAD, GATE, GATE_PROJ}),
    ],
)
def test_which_layers_are_left_alone(config: dict[str, Any], plain: set[str]) -> None:
    found = read(config)
    assert {name for name in (Q, HEAD, GATE, GATE_PROJ) if found.scheme(name) is None} == plain


@pytest.mark.parametrize(("config", "field"), [(PACKED, "ignore"), (AWQ, "modules_to_not_convert")])
def test_many_names_are_matched_at_once(config: dict[str, Any], field: str) -> None:
    """48 layers of 128 experts and 500 names take about 0.1 s, and one by one several seconds."""
    names = [f"model.visual.blocks.{i}.attn.qkv_proj.{j}" for i in range(113) for j in range(4)]
    names += [f"model.layers.{i}.mlp.gate" for i in range(48)]
    found = read({**config, field: names})
    experts = (f"model.layers.{i}.mlp.experts.{j}" for i in range(48) for j in range(128))
    with little_work(1.0):
        for expert in experts:
            for projection in ("gate_proj", "up_proj", "down_proj"):
                assert found.scheme(f"{expert}.{projection}") is not None
    assert [found.scheme(f"model.layers.{i}.mlp.gate") for i in (0, 4, 47)] == [None] * 3
    assert found.scheme("model.layers.48.mlp.gate") is not None


def test_names_of_fused_projections_count_where_checkpoints_have_them(tmp_path: Path) -> None:
    """Phi3's, with and without files."""
    path = make_model(tmp_path / "model", family="Phi3")
    ignore = ["lm_head", "re:.*qkv_proj", "model.layers.1.mlp.gate_up_proj"]
    edit_config(path, quantization_config={**INT8, "ignore": ignore})
    found = ModelConfig.from_dir(path).quantization
    plain = {
        name
        for name in ("0.self_attn.k_proj", "0.self_attn.o_proj", "0.mlp.up_proj", "1.mlp.up_proj")
        if found.scheme(f"model.layers.{name}") is None
    }
    assert plain == {"0.self_attn.k_proj", "1.mlp.up_proj"}
    formats = QuantizedFormats(quantization=found).inside("model.layers.1")
    chosen = [formats.inside("self_attn").of("qkv_proj"), formats.inside("mlp").of("gate_up_proj")]
    assert chosen == [DENSE, DENSE]
    assert formats.inside("self_attn").of("o_proj") != DENSE


def test_the_option_lists_what_there_is() -> None:
    assert tuple(dict.fromkeys([*ONLINE, DEQUANTIZE, *METHODS])) == QUANTIZATIONS


def test_only_gguf_files_are_dequantized() -> None:
    assert choose_quantization({"nanovllm_dequantized": True}, DEQUANTIZE) is None
    for config, words in (({}, "has plain weights"), ({"quantization_config": FP8}, "by 'fp8'")):
        with pytest.raises(ValueError, match=f"is for GGUF files; .*{words}"):
            choose_quantization(config, DEQUANTIZE)


def test_routers_and_in_fp8_the_head_are_not_quantized_while_loading() -> None:
    found = {online: choose_quantization({}, online) for online in ONLINE}
    plain = {
        online: {name for name in (Q, HEAD, GATE, GATE_PROJ) if each.scheme(name) is None}
        for online, each in found.items()
    }
    assert plain == {"fp8": {GATE, HEAD}, "int8": {GATE}, "int4": {GATE}}


def test_the_first_override_that_matches_holds() -> None:
    found = read({**GPTQ, "dynamic": {r".*\.0\..*": {"bits": 8}, ".*q_proj": {"group_size": -1}}})
    first, second = found.scheme(Q), found.scheme(Q.replace("0", "1"))
    assert first is not None and second is not None
    assert (first.bits, first.columns) == (8, GPTQ["group_size"])
    assert (second.bits, second.columns) == (4, None)


def test_a_layers_name_decides_before_its_class() -> None:
    group = PACKED["config_groups"]["group_0"]
    exact = {**group, "targets": [Q], "weights": {**group["weights"], "num_bits": 8}}
    found = read({**PACKED, "config_groups": {"group_0": group, "group_1": exact}})
    schemes = found.scheme(Q), found.scheme(GATE_PROJ)
    assert [scheme and scheme.bits for scheme in schemes] == [8, 4]


@pytest.mark.parametrize("turned", [False, True])
def test_of_targets_names_come_before_patterns_and_those_before_classes(turned: bool) -> None:
    """Patterns in the order of the alphabet, as in the library."""
    group = PACKED["config_groups"]["group_0"]
    other = {**group, "weights": {**group["weights"], "num_bits": 8}}
    pairs = [
        ([Q], ["re:.*_proj$"]),
        (["re:.*q_proj"], ["Linear"]),
        (["re:.*[0-9].*"], ["re:.*q_proj"]),
    ]
    for first, second in pairs:
        groups = [{**other, "targets": first}, {**group, "targets": second}]
        named = {f"group_{i}": each for i, each in enumerate(groups[::-1] if turned else groups)}
        scheme = read({**PACKED, "config_groups": named}).scheme(Q)
        assert scheme is not None and scheme.bits == 8, (first, second)


@pytest.mark.parametrize(
    ("layout", "changes", "given", "supported"),
    [
        (
            "int-quantized", dict(weights=dict(num_bits=4)),
            "weights='4-bit int (int-quantized)'", "'8-bit int', '8-bit float'",
        ),
        (
            "pack-quantized", dict(weights=dict(num_bits=2)),
            "weights='2-bit int (pack-quantized)'", "'4-bit int', '8-bit int'",
        ),
        (
            "pack-quantized", dict(input_activations=dict(num_bits=8)),
            "input_activations='8-bit int'", "'none'",
        ),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_not_listed_as_supported(
    layout: str, changes: dict[str, Any], given: str, supported: str
) -> None:
    group = {**PACKED["config_groups"]["group_0"], "format": layout}
    for name, values in changes.items():
        group[name] = {**(group.get(name) or {}), **values}
    expected = f"quantization_config: {given} is not supported; supported: {supported}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        read({**PACKED, "config_groups": {"group_0": group}})


# What the config says, and the files contradict


def error_of(path: Path, **options: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as error:
        LLM(path, device="cpu", dtype="float32", cpu_kvcache_gib=0.01, **options)
    return str(error.value)


def edit_tensors(path: Path, **changes: Any) -> None:
    """Change the tensors whose names end in a key, with a function, or drop them (None)."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in list(tensors.items()):
        for end, change in changes.items():
            if name.endswith(end):
                del tensors[name]
                if change is not None:
                    tensors[name] = change(tensor)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("ct, 4 bits", dict(weight_scale=None), ["lack", "weight_scale"]),
        ("ct, 4 bits", dict(weight_scale=lambda x: x[:, :1].clone()), ["weight_scale", "shape"]),
        ("ct, 4 bits", dict(weight_packed=lambda x: x.long()), ["weight_packed", "I64", "I32"]),
        ("ct, 4 bits", dict(weight_shape=lambda x: x + 1), ["qkv_proj", "weight_shape", "65"]),
        ("ct, int8", {"q_proj.weight": lambda x: x.float()}, ["F32", "I8"]),
        ("ct, 4 bits", dict(weight_shape=lambda x: x + 1), ["(q_proj, k_proj, v_proj)"]),
        ("ct, kv scales", dict(k_scale=None), ["lack", "layers.0.self_attn.k_scale"]),
        ("ct, kv scales", dict(v_scale=None), ["lack", "layers.0.self_attn.v_scale"]),
        ("ct, kv scales of 2024", {"k_proj.output_scale": None}, ["lack", "self_attn.k_scale"]),
        ("awq", dict(qzeros=None), ["lack", "qzeros"]),
        ("awq", {"o_proj.qweight": None}, ["lack", "0.self_attn.o_proj.qweight"]),
        ("gptq", {"q_proj.qweight": None}, ["lack", "0.self_attn.q_proj.qweight"]),
        ("fp8, static", {"down_proj.weight": None}, ["lack", "0.mlp.down_proj.weight"]),
        ("gptq", dict(g_idx=lambda x: x + 99), ["g_idx", "groups of"]),
        ("gptq", dict(g_idx=lambda x: x - 1), ["g_idx", "from -1 to", "groups of"]),
        ("gptq, act-order", dict(g_idx=None), ["lack", "0.self_attn.q_proj.g_idx"]),
        ("gptq, act-order", {"1.self_attn.o_proj.g_idx": None}, ["lack", "1.self_attn.o_proj.g_"]),
        ("gptq, zero biases", {".bias": lambda x: x + 1}, ["unexpected tensor", "bias"]),
        ("fp8, static", dict(input_scale=None), ["lack", "input_scale"]),
        ("fp8, blocks of 128", dict(weight_scale_inv=None), ["lack", "weight_scale"]),
        ("gptq", dict(scales=lambda x: x[1:].clone()), ["for 4-bit, GPTQ, groups of 32 with"]),
    ],
)
def test_tensors_that_contradict_the_config_are_errors(
    name: str, changes: dict[str, Any], says: list[str], tmp_path: Path
) -> None:
    path = write_quantized(tmp_path / "model", VARIANTS[name])
    edit_tensors(path, **changes)
    message = error_of(path)
    assert [text for text in says if text not in message] == [], message
    assert message.startswith(f"{path}: ") and message.count(str(path)) == 1


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gptq, static groups", {}),  # whose columns are in order
        ("gptq, rows", {"desc_act": True}),  # which have one group
    ],
)
def test_g_idx_may_be_missing_where_it_has_no_effect(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    path = write_quantized(tmp_path / "model", VARIANTS[name])
    edit_config(path, quantization_config={**VARIANTS[name].config, **fields})
    options: dict[str, Any] = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.01)

    def tokens() -> list[int]:
        with LLM(path, **options) as llm:
            return list(llm.generate([[5]], use_tqdm=False)[0]["token_ids"])

    before = tokens()
    edit_tensors(path, g_idx=None)
    assert tokens() == before


@pytest.mark.parametrize(
    ("name", "tensor", "scale", "says"),
    [
        ("ct, fp8", "weight_scale", math.nan, "weight_scale must be finite, got nan"),
        ("ct, 4 bits", "weight_scale", math.inf, "weight_scale must be finite, got inf"),
        ("fp8, blocks of 128", "weight_scale_inv", -math.inf, "weight_scale_inv must be finite"),
        ("awq", "scales", math.nan, "scales must be finite"),
        ("gptq", "scales", math.nan, "scales must be finite"),
        ("fp8, static", "input_scale", math.nan, "input_scale must be finite and above 0, got nan"),
        ("ct, int8, static", "input_scale", 0.0, "input_scale must be finite and above 0, got 0.0"),
    ],
)
def test_a_scale_that_no_weight_can_have_is_an_error(
    name: str, tensor: str, scale: float, says: str, tmp_path: Path
) -> None:
    """One bad scale of one layer, which would make all logits NaN."""
    path = write_quantized(tmp_path / "model", VARIANTS[name])

    def spoil(scales: torch.Tensor) -> torch.Tensor:
        scales.view(-1)[-1] = scale
        return scales

    edit_tensors(path, **{f"layers.1.self_attn.o_proj.{tensor}": spoil})
    message = error_of(path)
    assert says in message and "model.layers.1.self_attn.o_proj: " in message


def test_scales_of_experts_are_checked_too(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "model", VARIANTS["ct, 4 bits"], **MOE)
    edit_tensors(path, **{"layers.1.mlp.experts.5.up_proj.weight_scale": lambda x: x * math.nan})
    message = error_of(path)
    assert "model.layers.1.mlp.experts: weight_scale must be finite" in message


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_scales_of_the_kv_cache_are_checked_with_every_cache(
    options: dict[str, Any], tmp_path: Path
) -> None:
    path = write_quantized(tmp_path / "model", VARIANTS["ct, kv scales"])
    edit_tensors(path, **{"layers.1.self_attn.k_scale": lambda x: x * math.nan})
    message = error_of(path, **options)
    assert "model.layers.1.self_attn.attn: k_scale must be above 0, got nan" in message


def test_a_layer_that_the_config_excludes_must_be_plain(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "model", VARIANTS["awq"])
    edit_config(path, quantization_config={**AWQ, "modules_to_not_convert": ["down_proj"]})
    message = error_of(path)
    assert re.search(r"layers\.0\.mlp\.down_proj is quantized in the files", message), message
    assert message.startswith(f"{path}: ")


def test_experts_must_be_quantized_alike(tmp_path: Path) -> None:
    """The error names both experts, and how they differ."""
    path = write_quantized(tmp_path / "model", VARIANTS["ct, 4 bits"], **MOE)
    ignore = [*PACKED["ignore"], "re:.*layers.1.*experts.3.up_proj"]
    edit_config(path, quantization_config={**PACKED, "ignore": ignore})
    says = ["layers.1.mlp.experts.0.up_proj has 4-bit", "expert 3 has plain weights", "alike"]
    message = error_of(path, load_format="dummy")
    assert [text for text in says if text not in message] == [], message


@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_scales_of_the_kv_cache_must_be_positive(which: str, value: float, tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "model", VARIANTS["ct, kv scales"])
    edit_tensors(path, **{f"1.self_attn.{which}": lambda x: x * 0 + value})
    message = error_of(path, kv_cache_dtype="fp8")
    assert re.search(rf"layers\.1\..*{which} must be above 0", message), message


@pytest.mark.parametrize("name", ["ct, int8", "ct, kv scales alone", "gptq", "awq", "fp8, static"])
def test_quantized_tensors_need_a_config(name: str, tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "model", VARIANTS[name])
    edit_config(path, quantization_config=None)
    message = error_of(path)
    assert "unexpected tensor" in message and ".attn." not in message
    assert "which quantization_config in config.json must describe" in message


def test_a_null_config_does_not_hide_the_one_of_the_old_name() -> None:
    assert read_quantization({"quantization_config": None, "compression_config": INT8}).schemes


@pytest.mark.parametrize(
    ("quantized", "option", "says"),
    [
        ("awq", "int4", ["'int4'", "already", "'awq'"]),
        ("awq", "gptq", ["'gptq'", "already", "'awq'"]),
        (None, "awq", ["'awq'", "plain weights", "'int4'"]),
    ],
)
def test_the_option_must_fit_the_checkpoint(
    quantized: str | None, option: str, says: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "model"
    if quantized is None:
        make_model(path)
    else:
        write_quantized(path, VARIANTS[quantized])
    message = error_of(path, quantization=option)
    assert [text for text in says if text not in message] == [], message


def test_the_option_may_name_the_checkpoints_method(tmp_path: Path) -> None:
    """As scripts for vLLM do."""
    path = write_quantized(tmp_path / "model", VARIANTS["awq"])
    options: dict[str, Any] = dict(device="cpu", dtype="float32", cpu_kvcache_gib=0.01)
    with LLM(path, quantization="awq", **options) as llm:
        assert len(llm.generate([[5]], use_tqdm=False)) == 1
