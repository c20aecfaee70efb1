"""Small quantized checkpoints in the formats that others publish, and the weights they stand for.

A checkpoint is quantized by its format's definition, and the exact weights are computed before
anything is packed, so that nothing here unpacks. `test_quantized_checkpoints.py` compares both with
what the formats' own libraries read and write. `quantization_variants.py` has the configs.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from conftest import edit_config, make_model
from safetensors.torch import load_file, save_file

DEQUANTIZED = "dequantized"  # the folder of the float checkpoint, in that of the quantized one
WEIGHTS = "model.safetensors"
INPUT_SCALE = 64.0  # of a matrix, by the scale of its weights: all differ
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight outputs is in each four bits of a word
ONES = {4: 0x11111111, 8: 0x01010101}  # a one in each code of a word


@dataclass(frozen=True)
class Codes:
    """A weight [N, K] as codes: `(codes - zeros) * scales`, which `exact` is in float32."""

    codes: torch.Tensor  # [N, K], float8_e4m3fn or signed int64
    scales: torch.Tensor  # [blocks of outputs, blocks of inputs]
    zeros: torch.Tensor | None  # of the shape of `scales`, signed int64
    bits: int
    groups: torch.Tensor  # [K]: the block of inputs that each input belongs to
    exact: torch.Tensor  # [N, K]


@dataclass(frozen=True)
class Kind:
    """How a matrix is quantized: a scale for each block of [outputs, inputs], 0 being all."""

    store: Callable[[Codes], dict[str, torch.Tensor]]
    block: tuple[int, int]
    bits: int = 8
    is_float: bool = False
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float32
    act_order: bool = False  # groups of any inputs, not of neighbours
    shared_order: bool = False  # the same groups in all matrices of the same inputs


@dataclass(frozen=True)
class Variant:
    """A quantization_config, and the kind of each module: that of the first pattern found in it."""

    config: dict[str, Any]
    kinds: tuple[tuple[str, Kind | None], ...]
    kv_scales: tuple[str, str] | None = None  # names of a layer's scales of keys and values
    zero_biases: bool = False  # also where the model has no bias

    def kind_of(self, module: str) -> Kind | None:
        return next((kind for pattern, kind in self.kinds if re.search(pattern, module)), None)


def write_quantized(path: Path, variant: Variant, *, shards: bool = False, **model: Any) -> Path:
    """Save a random model quantized, and below it in float32 what it stands for.

    `model` is for `make_model`. With `shards`, the parts of a matrix are in two files.
    """
    return quantize(make_model(path, **model), variant, shards)


def quantize(path: Path, variant: Variant, shards: bool = False) -> Path:
    """Quantize the model in a directory, and save below it in float32 what it then stands for."""
    shutil.copytree(path, path / DEQUANTIZED)
    stored: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    torch.manual_seed(1)  # for `act_order`
    for name, tensor in load_file(path / WEIGHTS).items():
        module = name.removesuffix(".weight")
        kind = variant.kind_of(module) if tensor.dim() == 2 else None
        exact[name] = tensor
        if kind is None:
            stored[name] = tensor
            continue
        if kind.shared_order:
            torch.manual_seed(crc32(module.rpartition(".")[0].encode()))
        codes = encode(tensor, kind)
        exact[name] = codes.exact
        stored |= {f"{module}.{part}": value for part, value in kind.store(codes).items()}
        if variant.zero_biases:
            stored.setdefault(f"{module}.bias", torch.zeros(len(tensor), dtype=torch.float16))
    stored |= _kv_scales(variant, exact)
    save_file(exact, path / DEQUANTIZED / WEIGHTS, {"format": "pt"})
    _save(path, stored, shards)
    edit_config(path, quantization_config=variant.config)
    return path


def dequantized(path: Path) -> dict[str, torch.Tensor]:
    """The weights that a checkpoint of `write_quantized` stands for, in float32."""
    return load_file(path / DEQUANTIZED / WEIGHTS)


def encode(weight: torch.Tensor, kind: Kind) -> Codes:
    """Round a matrix to the nearest codes of `kind`."""
    size_out, size_in = weight.shape
    block = (kind.block[0] or size_out, kind.block[1] or size_in)
    order = torch.randperm(size_in) if kind.act_order else torch.arange(size_in)
    weight = weight[:, order]
    scales, zeros = _scales(weight, block, kind)

    def of_each(values: torch.Tensor) -> torch.Tensor:
        rows = values.float().repeat_interleave(block[0], 0)[:size_out]
        return rows.repeat_interleave(block[1], 1)[:, :size_in]

    shift = 0 if zeros is None else of_each(zeros)
    scaled = weight / of_each(scales) + shift
    if kind.is_float:
        codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
    else:
        half = 1 << (kind.bits - 1)
        codes = scaled.round().clamp(-half, half - 1).long()
    exact = (codes.float() - shift) * of_each(scales)
    back = order.argsort()
    groups = torch.arange(size_in)[back] // block[1]
    return Codes(codes[:, back], scales, zeros, kind.bits, groups, exact[:, back])


def _scales(
    weight: torch.Tensor, block: tuple[int, int], kind: Kind
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scales of blocks, and their zero points unless the codes are symmetric."""
    padding = (0, -weight.shape[1] % block[1], 0, -weight.shape[0] % block[0])
    blocks = F.pad(weight, padding).unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    low, high = blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)
    steps = 2.0**kind.bits - 1
    if kind.symmetric:
        scales = torch.maximum(-low, high) / (448 if kind.is_float else steps / 2)
        if kind.scale_dtype == torch.float8_e8m0fnu:  # up, so that no code is clamped
            scales = scales.log2().ceil().exp2()
        return scales.to(kind.scale_dtype), None
    scales = ((high - low) / steps).to(kind.scale_dtype)
    lowest = -float(1 << (kind.bits - 1))
    zeros = (lowest - low / scales.float()).round().clamp(lowest, lowest + steps)
    return scales, zeros.long()


def pack(values: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Words of 32 bits from unsigned values along the last axis, the first in the lowest bits."""
    per_word = 32 // bits
    words = F.pad(values, (0, -values.shape[-1] % per_word)).unflatten(-1, (-1, per_word))
    words = words[..., order] if order else words
    whole = (words << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


# What each format stores for a matrix


def as_weight(
    scale: str = "weight_scale", *, shape: list[int] | None = None, input_scale: str | None = None
) -> Callable[[Codes], dict[str, torch.Tensor]]:
    """Codes of 8 bits as they are, with a scale of that name: FP8, and compressed-tensors' INT8."""

    def store(codes: Codes) -> dict[str, torch.Tensor]:
        values = codes.codes if codes.codes.is_floating_point() else codes.codes.to(torch.int8)
        scales = codes.scales if shape is None else codes.scales.reshape(shape)
        tensors = {"weight": values, scale: scales}
        if input_scale is not None:
            tensors[input_scale] = scales * INPUT_SCALE
        return tensors

    return store


def as_powers(in_bytes: bool) -> Callable[[Codes], dict[str, torch.Tensor]]:
    """FP8 with scales that are powers of two, in a byte each or in float32."""
    name, of_weight = "weight_scale_inv", as_weight("weight_scale_inv")

    def store(codes: Codes) -> dict[str, torch.Tensor]:
        tensors = of_weight(codes)
        return tensors if in_bytes else tensors | {name: tensors[name].float()}

    return store


def as_packed(codes: Codes) -> dict[str, torch.Tensor]:
    """compressed-tensors' packed integers: weights along the inputs, zero points the outputs."""
    half = 1 << (codes.bits - 1)
    tensors = {
        "weight_packed": pack(codes.codes + half, codes.bits),
        "weight_scale": codes.scales,
        "weight_shape": torch.tensor(codes.codes.shape),
    }
    if codes.zeros is not None:
        zeros = pack((codes.zeros + half).T, codes.bits).T
        tensors["weight_zero_point"] = zeros.contiguous()
    return tensors


def as_packed_with_groups(codes: Codes) -> dict[str, torch.Tensor]:
    """The same, and the group of each input."""
    return as_packed(codes) | {"weight_g_idx": codes.groups.to(torch.int32)}


def as_awq(codes: Codes) -> dict[str, torch.Tensor]:
    """AutoAWQ's GEMM layout: both along the outputs, in an order of its own."""
    assert codes.zeros is not None
    return {
        "qweight": pack(codes.codes.T + 8, 4, AWQ_ORDER),
        "qzeros": pack(codes.zeros.T + 8, 4, AWQ_ORDER),
        "scales": codes.scales.T.contiguous(),
    }


def as_gptq(
    *, less_one: bool = True, g_idx: bool = True
) -> Callable[[Codes], dict[str, torch.Tensor]]:
    """GPTQ: weights along the inputs, zero points along the outputs, and less one in version 1."""

    def store(codes: Codes) -> dict[str, torch.Tensor]:
        half = 1 << (codes.bits - 1)
        zeros = torch.zeros_like(codes.scales).long() if codes.zeros is None else codes.zeros
        qzeros = pack((zeros + half).T, codes.bits)
        tensors = {
            "qweight": pack(codes.codes + half, codes.bits).T.contiguous(),
            "qzeros": qzeros - ONES[codes.bits] if less_one else qzeros,
            "scales": codes.scales.T.contiguous(),
        }
        return tensors | ({"g_idx": codes.groups.to(torch.int32)} if g_idx else {})

    return store


def _kv_scales(variant: Variant, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A scale of keys and one of values for each layer, all different."""
    if variant.kv_scales is None:
        return {}
    layers = 1 + max(int(n.split(".")[2]) for n in weights if n.startswith("model.layers."))
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor([0.01 * (1 + 2 * layer + which)])
        for layer in range(layers)
        for which, name in enumerate(variant.kv_scales)
    }


def _save(path: Path, tensors: dict[str, torch.Tensor], shards: bool) -> None:
    if not shards:
        save_file(tensors, path / WEIGHTS, {"format": "pt"})
        return
    (path / WEIGHTS).unlink()
    weight_map = {}
    for index in range(2):
        file = f"model-{index + 1:05}-of-00002.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[index::2]}
        save_file(part, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index_file))
