"""quantization_config: which layers it means, what is refused, what files may not contradict."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import edit_config, make_model
from quantization_variants import MOE, VARIANTS
from quantized_checkpoints import write_quantized
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.models.quantization import Quantization, read_quantization

AWQ = VARIANTS["awq"].config
GPTQ = VARIANTS["gptq"].config
FP8 = VARIANTS["fp8, blocks of 128"].config
STATIC = VARIANTS["fp8, static"].config
PACKED = VARIANTS["ct, 4 bits"].config
INT8 = VARIANTS["ct, int8"].config


def read(config: Any) -> Quantization:
    found = read_quantization({"quantization_config": config})
    assert found is not None
    return found


def with_group(config: dict[str, Any], field: str, **changes: Any) -> dict[str, Any]:
    """A compressed-tensors config with other arguments in its group."""
    group = config["config_groups"]["group_0"]
    changed = {**group, field: {**(group[field] or {}), **changes}}
    return {**config, "config_groups": {"group_0": changed}}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("fp8", ["must be an object", "'fp8'"]),
        ({"quant_method": "bitsandbytes"}, ["quant_method='bitsandbytes'", "'gptq'"]),
        ({**FP8, "fmt": "e5m2"}, ["fmt='e5m2'", "'e4m3'"]),
        ({**FP8, "scale_fmt": "ue8m0"}, ["scale_fmt='ue8m0'"]),
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
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(config: Any, says: list[str]) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        read(config)
    message = str(error.value)
    assert [text for text in ["quantization_config", *says] if text not in message] == [], message


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
        ("awq", dict(qzeros=None), ["lack", "qzeros"]),
        ("gptq", dict(g_idx=lambda x: x + 99), ["g_idx", "groups of"]),
        ("gptq", dict(g_idx=lambda x: x - 1), ["g_idx", "from -1 to", "groups of"]),
        ("gptq, zero biases", {".bias": lambda x: x + 1}, ["unexpected tensor", "bias"]),
        ("fp8, static", dict(input_scale=None), ["lack", "input_scale"]),
        ("fp8, blocks of 128", dict(weight_scale_inv=None), ["lack", "weight_scale"]),
    ],
)
def test_tensors_that_contradict_the_config_are_errors(
    name: str, changes: dict[str, Any], says: list[str], tmp_path: Path
) -> None:
    path = write_quantized(tmp_path / "model", VARIANTS[name])
    edit_tensors(path, **changes)
    message = error_of(path)
    assert [text for text in says if text not in message] == [], message


def test_a_layer_that_the_config_excludes_must_be_plain(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "model", VARIANTS["awq"])
    edit_config(path, quantization_config={**AWQ, "modules_to_not_convert": ["down_proj"]})
    message = error_of(path)
    assert re.search(r"layers\.0\.mlp\.down_proj is quantized in the files", message), message


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


def test_quantized_tensors_need_a_config(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "model", VARIANTS["ct, int8"])
    edit_config(path, quantization_config=None)
    assert "type I8" in error_of(path) or "unexpected tensor" in error_of(path)


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
