"""Quantizers: nearest codes, by a definition in NumPy, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from conftest import make_model
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from waiting import LIMIT

from nanovllm import LLM
from nanovllm.formats.choice import QuantizedFormats
from nanovllm.formats.quantize import GROUP, LARGE, QUANTIZERS, to_fp8, to_int4, to_int8
from nanovllm.formats.scheme import ONLINE
from nanovllm.layers.ranks import Ranks
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import load_model
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")

Array = NDArray[np.float64]
SHAPES = [(5, 256), (3, 200), (4, 1), (1, 129), (2, 8), (2, 7)]


def e4m3_values() -> Array:
    """The value of each e4m3 code, from sign, exponent and mantissa."""
    codes = np.arange(127)
    exponents, mantissas = codes >> 3, codes & 7
    normal = (1 + mantissas / 8) * 2.0 ** (exponents - 7)
    values = np.where(exponents > 0, normal, mantissas / 8 * 2.0**-6)
    return np.concatenate([-values[:0:-1], values])


def matrix(
    rows: int,
    columns: int,
    kind: str = "normal",
    seed: int = 0,
    exponents: tuple[int, int] = (-6, 3),
) -> torch.Tensor:
    """Weights of several sizes and signs, in bfloat16's values."""
    rng = np.random.default_rng(seed)
    drawn = {
        "normal": rng.standard_normal, "heavy": lambda size: rng.standard_t(2.5, size),
        "positive": lambda size: 1 + rng.random(size),
        "negative": lambda size: -1 - rng.random(size),
    }[kind]((rows, columns))  # fmt: skip
    sizes = 10.0 ** np.linspace(*exponents, rows)[:, None]
    return torch.from_numpy(drawn * sizes).bfloat16()


def wide(tensor: torch.Tensor) -> Array:
    return tensor.double().numpy()


def unpacked(words: torch.Tensor, columns: int) -> Array:
    """4-bit codes [N, K] of 32-bit words, the lowest bits first."""
    values = words.numpy().view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    return values.reshape(len(words), -1)[:, :columns].astype(np.float64)


def int4_values(tensors: dict[str, torch.Tensor], columns: int) -> Array:
    """The matrix that the tensors of the 4-bit format stand for."""
    scales = np.repeat(wide(tensors["weight_scale"]), GROUP, axis=1)[:, :columns]
    return (unpacked(tensors["weight_packed"], columns) - 8) * scales


def q4_0(weights: Array) -> Array:
    """Weights [N, K] rounded to ggml's Q4_0, by the package gguf; zeros pad the last group."""
    padded = np.pad(weights, ((0, 0), (0, -weights.shape[1] % GROUP))).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_0
    found = gguf.quants.dequantize(gguf.quants.quantize(padded, kind), kind)
    return found[:, : weights.shape[1]].astype(np.float64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["normal", "heavy", "positive", "negative"])
def test_fp8_and_int8_codes_are_the_nearest(kind: str, shape: tuple[int, int]) -> None:
    weights = matrix(*shape, kind)
    largest = np.abs(wide(weights)).max(axis=1, keepdims=True)
    for quantizer, codes in ((to_fp8, e4m3_values()), (to_int8, np.arange(-127, 128))):
        tensors = quantizer(weights)
        scales = wide(tensors["weight_scale"])
        assert scales.shape == (shape[0], 1)
        np.testing.assert_allclose(scales, largest / codes.max(), rtol=1e-6)
        exact = wide(weights) / scales
        nearest = np.abs(exact[..., None] - codes).min(axis=-1)
        chosen = np.abs(exact - wide(tensors["weight"]))
        assert (chosen <= nearest + 1e-5 * np.abs(exact)).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["normal", "heavy", "positive", "negative"])
def test_int4_codes_are_the_nearest(kind: str, shape: tuple[int, int]) -> None:
    weights = matrix(*shape, kind)
    tensors = to_int4(weights)
    num_groups = -(-shape[1] // GROUP)
    assert tensors["weight_packed"].shape == (shape[0], -(-shape[1] // 8))
    scales = wide(tensors["weight_scale"])
    assert scales.shape == (shape[0], num_groups) and (scales != 0).all()
    possible = np.arange(-8, 8) * np.repeat(scales, GROUP, axis=1)[:, : shape[1], None]
    nearest = np.abs(possible - wide(weights)[..., None]).min(axis=-1)
    chosen = np.abs(int4_values(tensors, shape[1]) - wide(weights))
    assert (chosen <= nearest + 1e-5 * np.abs(wide(weights))).all()


@given(
    rows=st.integers(1, 4), columns=st.integers(1, 300), seed=st.integers(0, 10**6),
    kind=st.sampled_from(["normal", "heavy", "positive", "negative"]),
)  # fmt: skip
def test_int4_never_errs_more_than_q4_0(rows: int, columns: int, seed: int, kind: str) -> None:
    """In no row, except for the rounding of a scale to bfloat16: 2**-9 of each weight."""
    weights = matrix(rows, columns, kind, seed, exponents=(-2, 2))  # float16 has Q4_0's scales
    exact = wide(weights)
    found = ((int4_values(to_int4(weights), columns) - exact) ** 2).sum(1)
    most = ((q4_0(exact) - exact) ** 2).sum(1)
    assert (found <= most * 1.01 + 2.0**-18 * (exact**2).sum(1)).all()


@pytest.mark.parametrize(("outliers", "least", "most"), [(0, 0.86, 0.92), (0.02, 0.92, 0.96)])
def test_the_int4_search_errs_less_than_q4_0_in_as_many_bits(
    outliers: float, least: float, most: float
) -> None:
    """Normal weights, some of them 8 times as large. The scales take half a bit a weight."""
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal((250, 576)) * np.where(rng.random((250, 576)) < outliers, 8, 1)
    weights = torch.from_numpy(0.02 * drawn).bfloat16()
    tensors = to_int4(weights)
    assert 8 * sum(tensor.nbytes for tensor in tensors.values()) <= 4.5 * weights.numel()
    exact = wide(weights)
    found = ((int4_values(tensors, 576) - exact) ** 2).sum()
    assert least < found / ((q4_0(exact) - exact) ** 2).sum() < most


def test_int4_gives_the_largest_weight_of_either_sign_the_code_of_larger_magnitude() -> None:
    weights = torch.zeros(2, GROUP)
    weights[0, 5], weights[1, 7] = 8, -8
    weights[:, 0] = 1
    np.testing.assert_array_equal(int4_values(to_int4(weights), GROUP), wide(weights))


@pytest.mark.parametrize("quantizer", [to_fp8, to_int8, to_int4])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40])
def test_rows_of_zeros_stay_zeros(quantizer: Any, value: float) -> None:
    """Also weights so small that their scale has no reciprocal."""
    weights = torch.full((3, 150), value)
    weights[1] = 1.0
    tensors = quantizer(weights)
    if quantizer is to_int4:
        values = int4_values(tensors, 150)
    else:
        values = wide(tensors["weight"]) * wide(tensors["weight_scale"])
    np.testing.assert_array_equal(values[[0, 2]], 0)
    np.testing.assert_allclose(values[1], 1.0, rtol=0.01)
    assert (tensors["weight_scale"] != 0).all()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_parts_of_a_matrix_do_not_change_it(name: str) -> None:
    """A rank quantizes whole rows, and rows are quantized some at a time."""
    weights, quantizer = matrix(5000, 300), QUANTIZERS[name]
    assert weights.numel() > LARGE
    before = weights.clone()
    whole = quantizer(weights)
    parts = [quantizer(part) for part in weights.split([1, 2700, 2299])]
    for key, tensor in whole.items():
        joined = torch.cat([part[key] for part in parts])
        assert torch.equal(joined.view(torch.uint8), tensor.view(torch.uint8)), key
    assert torch.equal(weights, before)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(name: str, value: float) -> None:
    weights = matrix(20, 300)
    weights[11, 170] = value
    with pytest.raises(ValueError, match="NaN, infinite or too large to be quantized"):
        QUANTIZERS[name](weights)


# In a model


def damage(path: Path, tensor: str) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors[tensor][5, 7] = torch.nan
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("online", ONLINE)
def test_the_error_names_the_tensor(online: str, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    path = make_model(tmp_path / "model")
    damage(path, name)
    with pytest.raises(ValueError, match=rf"tensor '{name}' has weights that are NaN"):
        LLM(str(path), device="cpu", quantization=online)


def test_the_error_of_a_tied_head_names_its_tensor(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", tie_word_embeddings=True)
    damage(path, "model.embed_tokens.weight")
    with pytest.raises(
        ValueError, match=r"tensor 'model.embed_tokens.weight' in model.safetensors"
    ):
        LLM(str(path), device="cpu", quantization="int8")


def codes_of(path: Path, online: str, ranks: Ranks) -> dict[str, torch.Tensor]:
    """A rank's tensors of the layers, quantized."""
    config = ModelConfig.from_dir(path, online)
    with torch.no_grad():
        model = build_model(
            config, 64, ranks, formats=QuantizedFormats(quantization=config.quantization)
        )
        load_model(model, path)
    return {name: tensor for name, tensor in model.named_buffers() if "quantized" in name}


@pytest.mark.parametrize("online", ONLINE)
def test_ranks_and_the_order_of_files_do_not_change_codes(online: str, tmp_path: Path) -> None:
    """Inputs of 256, so that ranks have whole groups of the layers whose columns they split."""
    shape = dict(hidden_size=256, intermediate_size=256, num_attention_heads=16)
    path = make_model(tmp_path / "model", shards=True, **shape)
    whole = codes_of(path, online, Ranks(0, 1))
    files = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    old = sorted(set(files.values()))
    new = dict(zip(old, reversed(old), strict=True))
    reversed_ = tmp_path / "reversed"
    reversed_.mkdir()
    for file in path.iterdir():
        (reversed_ / new.get(file.name, file.name)).write_bytes(file.read_bytes())
    index = {"weight_map": {name: new[file] for name, file in files.items()}}
    (reversed_ / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(old) > 3
    for name, tensor in codes_of(reversed_, online, Ranks(0, 1)).items():
        assert torch.equal(tensor.view(torch.uint8), whole[name].view(torch.uint8)), name
    for rank in range(2):
        for name, part in codes_of(path, online, Ranks(rank, 2)).items():
            if "o_proj" not in name and "down_proj" not in name:
                continue
            tensor = whole[name]
            if tensor.shape[1] > 1:
                tensor = tensor.chunk(2, dim=1)[rank].contiguous()
            assert torch.equal(part.view(torch.uint8), tensor.view(torch.uint8)), name


MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 1000, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 16, "head_dim": 64, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
LOAD = """
import sys, threading
from pathlib import Path
import torch
from nanovllm.models.parts import build_model
from nanovllm.models.config import ModelConfig
from nanovllm.formats.choice import QuantizedFormats
from nanovllm.models.loader import load_model

def kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

path, online = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.set_default_dtype(torch.bfloat16)
peak, done, before = 0, threading.Event(), kib("RssAnon")
def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, kib("RssAnon"))
thread = threading.Thread(target=watch)
thread.start()
with torch.no_grad():
    config = ModelConfig.from_dir(path, online)
    model = build_model(config, 16, formats=QuantizedFormats(quantization=config.quantization))
    load_model(model, path)
done.set()
thread.join()
print((peak - before) << 10)
"""


@pytest.mark.sampled(share=0.4)
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("online", "bits"), [("int8", 8), ("fp8", 8), ("int4", 4.5)])
def test_loading_takes_the_memory_of_the_codes(online: str, bits: float, tmp_path: Path) -> None:
    """Besides the codes, a few matrices are held. Mapped pages of the files are not counted."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with torch.device("meta"):
        params = dict(build_model(ModelConfig.from_dir(tmp_path), 16).named_parameters())
    weights = {name: torch.empty(p.shape).bfloat16().normal_() for name, p in params.items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), online],
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    num_weights = sum(p.numel() for p in params.values())
    largest = max(p.numel() for p in params.values())
    assert num_weights > 100e6
    limit = num_weights * bits / 8 + 4 * 5 * largest
    assert limit < 2 * num_weights, "less than the files' weights"
    assert int(done.stdout) < limit
