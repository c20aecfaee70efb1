"""The quantized checkpoints of the tests are what the formats' own libraries read and write.

compressed-tensors is among the tests' requirements. The other libraries want another PyTorch; what
is theirs is skipped where they are missing. Versions that agreed: compressed-tensors 0.20.0 (0.18.0
for act-order), AutoAWQ 0.2.9, GPTQModel 7.7.0, transformers 5.23.0 with accelerate 1.15.0.
"""

import importlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quantization_variants import (
    AWQ,
    COMPRESSED_TENSORS,
    FP8,
    GPTQ,
    MOE,
    ODD,
    VARIANTS,
    gptq_config,
)
from quantized_checkpoints import (
    Codes,
    Kind,
    Variant,
    as_gptq,
    dequantized,
    encode,
    pack,
    write_quantized,
)
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "odd sizes": ODD,
    "biases": dict(family="Qwen2"),
    "tied": dict(family="Llama", tie_word_embeddings=True),
    "experts": MOE,
}
ACT_ORDER = "ct, 4 bits, act-order"
Tensors = dict[str, torch.Tensor]


def tensors(path: Path) -> Tensors:
    return {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}


def modules(stored: Tensors, suffix: str) -> list[str]:
    return [name.removesuffix(suffix) for name in stored if name.endswith(suffix)]


def assert_equal(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    wrong = [name for name, value in expected.items() if not torch.equal(actual[name], value)]
    assert not wrong


def owner(module: str) -> Any:
    """A module of a library, or a skip that names the library."""
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"needs {library} ({error})")


def matrices(variant: Variant, **model: Any) -> Iterator[tuple[str, Kind, Codes]]:
    """Some matrices of a variant, as codes."""
    torch.manual_seed(0)
    for module, shape in {
        "model.layers.0.self_attn.q_proj": (96, 64), "model.layers.1.mlp.up_proj": (160, 96),
    }.items():  # fmt: skip
        if (kind := variant.kind_of(module)) is not None:
            yield module, kind, encode(torch.randn(shape), kind)


# By definition


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_float_weights_are_near_those_that_were_quantized(name: str, tmp_path: Path) -> None:
    """And exactly those of the matrices that the config leaves alone."""
    weights = dequantized(write_quantized(tmp_path / "a", VARIANTS[name], **ODD))
    original = dequantized(write_quantized(tmp_path / "b", Variant({}, ()), **ODD))
    assert weights.keys() == original.keys()
    changed = 0
    for module, value in weights.items():
        kind = VARIANTS[name].kind_of(module.removesuffix(".weight")) if value.dim() == 2 else None
        if kind is None:
            assert torch.equal(value, original[module])
            continue
        error = (value - original[module]).square().mean() / original[module].square().mean()
        assert 0 < error.sqrt() < (0.04 if kind.bits == 8 else 0.2)
        changed += 1
    assert changed > 0 or name == "ct, kv scales alone"


@pytest.mark.parametrize("name", ["ct, 4 bits", "gptq", "awq", "fp8, small blocks"])
def test_parts_of_a_matrix_are_in_two_files(name: str, tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "two", VARIANTS[name], shards=True)
    whole = write_quantized(tmp_path / "one", VARIANTS[name])
    assert_equal(tensors(path), tensors(whole))
    files = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    parts = [file for name, file in files.items() if "layers.0.mlp.up_proj." in name]
    assert len(parts) > len(set(parts)) == 2 or len(parts) == len(set(parts)) == 2


@pytest.mark.parametrize("bits", [4, 8])
def test_a_word_holds_the_first_value_in_its_lowest_bits(bits: int) -> None:
    torch.manual_seed(0)
    values = torch.randint(1 << bits, (3, 21))
    words = pack(values, bits)
    for row, column in torch.cartesian_prod(torch.arange(3), torch.arange(21)).tolist():
        word = int(words[row, column * bits // 32]) % (1 << 32)
        assert word >> (column * bits % 32) & ((1 << bits) - 1) == values[row, column]
    assert words.shape == (3, -(-21 * bits // 32))


def field(words: torch.Tensor, row: int, column: int, shift: int, bits: int, add: int = 0) -> int:
    """A code of a word, to which `add` is added first."""
    word = (int(words[row, column]) + add) % (1 << 32)
    return word >> shift & ((1 << bits) - 1)


def some_elements(codes: Codes) -> list[list[int]]:
    size_out, size_in = codes.exact.shape
    return torch.cartesian_prod(torch.arange(size_out), torch.arange(size_in))[::37].tolist()


@pytest.mark.parametrize("name", AWQ)
def test_awq_bit_by_bit(name: str) -> None:
    """A weight is `(q - z) * s`; of eight outputs in a word, this order of shifts."""
    shifts = [0, 16, 4, 20, 8, 24, 12, 28]
    for _, kind, codes in matrices(AWQ[name]):
        qweight, qzeros, scales = kind.store(codes).values()
        for n, k in some_elements(codes):
            group = int(codes.groups[k])
            q = field(qweight, k, n // 8, shifts[n % 8], 4)
            z = field(qzeros, group, n // 8, shifts[n % 8], 4)
            assert scales[group, n].float() * (q - z) == codes.exact[n, k]


@pytest.mark.parametrize("name", GPTQ)
def test_gptq_bit_by_bit(name: str) -> None:
    """A weight is `(q - z) * s` with those of its group; version 1 stores z less one."""
    is_first = GPTQ[name].config["checkpoint_format"] == "gptq"
    for _, kind, codes in matrices(GPTQ[name]):
        qweight, qzeros, scales, *_ = kind.store(codes).values()
        bits, count = kind.bits, 32 // kind.bits
        one = sum(1 << shift for shift in range(0, 32, bits)) if is_first else 0
        for n, k in some_elements(codes):
            group = int(codes.groups[k])
            q = field(qweight, k // count, n, k % count * bits, bits)
            z = field(qzeros, group, n // count, n % count * bits, bits, one)
            assert scales[group, n].float() * (q - z) == codes.exact[n, k]


PACKED = [name for name in COMPRESSED_TENSORS if "bits" in name]


@pytest.mark.parametrize("name", PACKED)
def test_packed_integers_bit_by_bit(name: str) -> None:
    """A weight is `(q - z) * s`; a word holds inputs of q, and outputs of z."""
    for _, kind, codes in matrices(COMPRESSED_TENSORS[name]):
        stored, bits, count = kind.store(codes), kind.bits, 32 // kind.bits
        assert stored["weight_shape"].tolist() == list(codes.exact.shape)
        for n, k in some_elements(codes):
            group = int(stored.get("weight_g_idx", codes.groups)[k])
            q = field(stored["weight_packed"], n, k // count, k % count * bits, bits)
            z = 1 << (bits - 1)
            if not kind.symmetric:
                z = field(stored["weight_zero_point"], n // count, group, n % count * bits, bits)
            assert stored["weight_scale"][n, group] * (q - z) == codes.exact[n, k]


def test_a_zero_point_of_zero_borrows_from_the_next_one() -> None:
    """In version 1 of GPTQ, ones are subtracted from words, not from each zero point."""
    weight = torch.cat([torch.rand(1, 32), torch.randn(7, 32)])
    kind = Kind(as_gptq(), (1, 32), bits=4, symmetric=False)
    codes = encode(weight, kind)
    assert codes.zeros is not None and codes.zeros[0, 0] == -8
    qzeros = kind.store(codes)["qzeros"]
    zeros = [field(qzeros, 0, 0, 4 * n, 4, 0x11111111) - 8 for n in range(8)]
    assert zeros == codes.zeros[:, 0].tolist()


# compressed-tensors


@pytest.mark.sampled(share=0.3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", COMPRESSED_TENSORS)
def test_compressed_tensors_reads_the_same_weights(name: str, model: str, tmp_path: Path) -> None:
    """It finds the schemes of modules by name, and unpacks. It computes in the type of scales."""
    converters = owner("compressed_tensors.entrypoints.convert.converters.ct_dequantizer")
    refuse_act_order(name)
    path = write_quantized(tmp_path / "model", COMPRESSED_TENSORS[name], **MODELS[model])
    stored = {k: v.float() if k.endswith("_scale") else v for k, v in tensors(path).items()}
    options = dict(
        ignore=["model.embed_tokens"], dtype=torch.float32
    )  # "Linear" is every name here
    reader = converters.CompressedTensorsDequantizer(path, **options)
    weights = reader.process(stored)
    names = dequantized(path)
    assert_equal({name: weights[name] for name in names}, names)


@pytest.mark.parametrize("name", COMPRESSED_TENSORS)
def test_compressed_tensors_reads_and_writes_the_same_tensors(name: str) -> None:
    compressors = owner("compressed_tensors.compressors")
    quantization = owner("compressed_tensors.quantization")
    refuse_act_order(name)
    variant = COMPRESSED_TENSORS[name]
    config = quantization.QuantizationConfig.model_validate(variant.config)
    for module, kind, codes in matrices(variant):
        scheme = scheme_of(config, module)
        state = kind.store(codes)
        if (scheme.format or config.format) != "pack-quantized":
            state["weight"] = codes.exact
        elif codes.zeros is not None:
            state["weight_zero_point"] = codes.zeros.to(torch.int8)
        state = {k: v for k, v in state.items() if k not in ("weight_packed", "weight_shape")}
        state["weight"] = codes.exact.to(codes.scales.dtype)
        compressor = compressors.BaseCompressor.get_value_from_registry(
            scheme.format or config.format
        )
        assert_equal(compressor.compress(state, scheme), kind.store(codes))
        floats = kind.store(codes) | {"weight_scale": codes.scales.float()}
        assert torch.equal(compressor.decompress(floats, scheme)["weight"], codes.exact)


@pytest.mark.parametrize("name", COMPRESSED_TENSORS)
def test_compressed_tensors_means_the_same_modules(name: str, tmp_path: Path) -> None:
    """Its `targets` and `ignore` match these modules of transformers' model, by class too."""
    quantization = owner("compressed_tensors.quantization")
    refuse_act_order(name)
    variant = COMPRESSED_TENSORS[name]
    path = write_quantized(tmp_path / "model", variant)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    config = quantization.QuantizationConfig.model_validate(
        variant.config | {"kv_cache_scheme": None}
    )
    quantization.apply_quantization_config(model, config)
    quantized = [
        name
        for name, module in model.named_modules()
        if getattr(module, "quantization_scheme", None) is not None
    ]
    assert quantized == [
        name for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and variant.kind_of(name) is not None
    ]  # fmt: skip


def refuse_act_order(name: str) -> None:
    """Skip what newer versions do not read any more."""
    if name != ACT_ORDER:
        return
    quantization = owner("compressed_tensors.quantization")
    try:
        quantization.QuantizationConfig.model_validate(COMPRESSED_TENSORS[name].config)
    except ValueError:
        pytest.skip("compressed-tensors 0.19 and later do not read actorder='group'")


def scheme_of(config: Any, module: str) -> Any:
    """The scheme that compressed-tensors means for a linear layer."""
    match = owner("compressed_tensors.utils.match").match_targets
    for scheme in config.config_groups.values():
        if match(module, torch.nn.Linear(1, 1), scheme.targets):
            return scheme
    raise AssertionError(f"no scheme for {module}")


# AWQ


@pytest.mark.parametrize("model", ["Qwen3", "odd sizes", "biases"])
@pytest.mark.parametrize("name", ["awq", "awq, some layers"])
def test_compressed_tensors_converts_awq_to_the_same_weights(
    name: str, model: str, tmp_path: Path
) -> None:
    """Its converter reads AutoAWQ's files; its substrings of names are those of AutoAWQ."""
    converters = owner("compressed_tensors.entrypoints.convert.converters.autoawq")
    compressors = owner("compressed_tensors.compressors")
    path = write_quantized(tmp_path / "model", AWQ[name], **MODELS[model])
    converter = converters.AutoAWQConverter.from_autoawq_config(AWQ[name].config)
    stored, weights = converter.process(tensors(path)), {}
    scheme = converter._build_quant_config().config_groups["config_group_0"]
    packed = compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    for module in modules(stored, ".weight_packed"):
        parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
        state = {part: stored.pop(f"{module}.{part}") for part in parts}
        state["weight_scale"] = state["weight_scale"].float()
        weights[f"{module}.weight"] = packed.decompress(state, scheme)["weight"]
    assert_equal(stored | weights, dequantized(path))


@pytest.mark.parametrize("name", AWQ)
def test_autoawq_reads_and_writes_the_same_tensors(name: str) -> None:
    linear_class = owner("awq.modules.linear.gemm").WQLinear_GEMM
    dequantize = owner("awq.utils.packing_utils").dequantize_gemm
    for _, kind, codes in matrices(AWQ[name]):
        assert codes.zeros is not None
        size = kind.block[1] or codes.exact.shape[1]
        linear = torch.nn.Linear(*codes.exact.T.shape, bias=False)
        linear.weight.data = codes.exact
        stored = kind.store(codes)
        zeros = (codes.zeros + 8).T
        written = linear_class.from_linear(linear, 4, size, False, stored["scales"].float(), zeros)
        assert_equal(dict(written.named_buffers()), stored)
        parts = stored["qweight"], stored["qzeros"], stored["scales"].float()
        assert torch.equal(dequantize(*parts, 4, size).T, codes.exact)


# GPTQ


@pytest.mark.parametrize("name", GPTQ)
def test_gptqmodel_reads_and_writes_the_same_tensors(name: str) -> None:
    linear_class = owner("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    convert = owner("gptqmodel.utils.model")
    config = GPTQ[name].config
    for _, kind, codes in matrices(GPTQ[name]):
        size_out, size_in = codes.exact.shape
        make = partial(
            linear_class, kind.bits, kind.block[1] or -1, config["sym"], config["desc_act"],
            size_in, size_out,
        )  # fmt: skip
        stored = kind.store(codes)
        reader = make()
        reader.load_state_dict({"g_idx": reader.g_idx} | stored)
        reader.scales = reader.scales.float()
        if config["checkpoint_format"] == "gptq":
            convert.convert_gptq_v1_to_v2_format_module(reader, kind.bits, torch.int32)
        assert torch.equal(reader.dequantize_weight().T, codes.exact)

        half = 1 << (kind.bits - 1)
        zeros = torch.zeros_like(codes.scales) if codes.zeros is None else codes.zeros
        linear = torch.nn.Linear(size_in, size_out, bias=False)
        linear.weight.data = codes.exact
        writer = make()
        writer.pack_original(linear, codes.scales.float(), zeros.float() + half, codes.groups.int())
        if config["checkpoint_format"] == "gptq":
            options = convert.QuantizeConfig(bits=kind.bits)
            convert.convert_gptq_v2_to_v1_format_module(writer, options)
        written = {name: getattr(writer, name) for name in stored}
        assert_equal(written, stored)


@pytest.mark.parametrize(
    "module",
    [
        "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj",
        "model.layers.0.mlp.gate", "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj", "model.layers.0.mlp.experts.0.down_proj",
    ],
)  # fmt: skip
def test_gptqmodel_means_the_same_by_dynamic(module: str) -> None:
    dynamic_get = owner("gptqmodel.quantization.config").dynamic_get
    variant = GPTQ["gptq, dynamic"]
    override = dynamic_get(variant.config["dynamic"], module)
    kind = variant.kind_of(module)
    if override is False:
        assert kind is None
    else:
        assert kind is not None
        config = gptq_config(4, 32) | (override or {})
        assert (config["bits"], config["group_size"]) == (kind.bits, kind.block[1] or -1)


# FP8 of transformers


@pytest.mark.parametrize("name", FP8)
def test_transformers_dequantizes_to_the_same_weights(name: str) -> None:
    """It wants matrices that consist of whole blocks."""
    dequantize = owner("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)
    for rows, columns in [(128, 256), (256, 128)]:
        kind = FP8[name].kind_of("model.layers.0.self_attn.q_proj")
        assert kind is not None
        codes = encode(torch.randn(rows, columns), kind)
        weight, scale, *_ = kind.store(codes).values()
        parts = {"weight": weight, "weight_scale_inv": scale.reshape(codes.scales.shape).float()}
        assert torch.equal(dequantize.convert(parts)["weight"], codes.exact)


@pytest.mark.parametrize("model", ["Qwen3", "biases", "tied", "experts"])
@pytest.mark.parametrize(
    "name", ["fp8, by transformers", "fp8, some layers", "fp8, static, by transformers"]
)
def test_transformers_loads_the_same_weights(name: str, model: str, tmp_path: Path) -> None:
    """As a whole: it needs accelerate, and dequantizes where there is no GPU for it."""
    owner("accelerate")
    path = write_quantized(tmp_path / "model", FP8[name], **MODELS[model])
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    expected = AutoModelForCausalLM.from_pretrained(path / "dequantized").state_dict()
    assert_equal(loaded, expected)
