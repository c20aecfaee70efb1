"""Linear layers of few rows, with norms, activation and sums inside, against their twins.

On a device, or interpreted where there is none.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import kernel_settings, make_model
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.kernels import plain
from nanovllm.kernels.few_rows import FewRows, few_rows
from nanovllm.kernels.plain import Scaled
from nanovllm.layers import linear
from nanovllm.models.decoder import Decoder

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = 1e-6
bf16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """Rows, and the sizes of a linear layer. The input's squares come in so many parts."""

    rows: int
    size_in: int
    size_out: int
    bias: bool = False
    parts: int = 1
    scale: float = 1.0
    seed: int = 0


# Up to 4 programs share a tile where the inputs are many and the tiles few.
SHAPES = st.builds(
    Shape,
    rows=st.sampled_from([1, 2, 15, 16, 17, 40, 64, 65, 128]),
    size_in=st.sampled_from([16, 48, 64, 256, 512, 640, 1024]),
    size_out=st.sampled_from([16, 48, 64, 96, 256]),
    bias=st.booleans(),
    parts=st.sampled_from([1, 3, 4, 40]),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 2**31),
)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(shape: Shape, rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A matrix whose products are about as large as what it multiplies, and its bias."""
    weight = random(shape.seed + 1, rows, shape.size_in) / shape.size_in**0.5
    bias = random(shape.seed + 2, rows).to(device, bf16) if shape.bias else None
    return weight.to(device, bf16), bias


def scaled_of(shape: Shape, device: str) -> Scaled:
    x = (random(shape.seed, shape.rows, shape.size_in) * shape.scale).to(device, bf16)
    x[-1] = 0
    norm = (random(shape.seed + 3, shape.size_in) + 2).to(device, bf16)
    squares = x.float().square().sum(dim=1, keepdim=True)
    return Scaled(x * norm, squares.expand(-1, shape.parts).contiguous() / shape.parts, EPS)


def made(*weights: torch.Tensor) -> FewRows:
    found = few_rows(list(weights))
    assert found is not None
    return found


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Rounded once, of sums in another order: off by a rounding, or by what the sums' terms are."""
    assert out.dtype == expected.dtype and out.shape == expected.shape
    size = expected.float().abs()
    bound = 2.0**-7 * size + 2.0**-16 * (1 + size.amax(dim=-1, keepdim=True))
    assert bool(((out.float() - expected.float()).abs() <= bound).all())


@kernel_settings(60)
@given(SHAPES)
@example(Shape(128, 1024, 256, bias=True, parts=40))
def test_normed_rows_differ_from_the_twin(kernel_device: str, shape: Shape) -> None:
    x = scaled_of(shape, kernel_device)
    weight, bias = weight_of(shape, shape.size_out, kernel_device)
    expected = plain.scaled_linear(x, weight, bias)
    assert_close(made(weight).linear(x, weight, bias), expected)


@kernel_settings(60)
@given(SHAPES)
@example(Shape(128, 1024, 256, bias=True, parts=40))
def test_gated_rows_differ_from_the_twin(kernel_device: str, shape: Shape) -> None:
    x = scaled_of(shape, kernel_device)
    weight, bias = weight_of(shape, 2 * shape.size_out, kernel_device)
    expected = plain.scaled_gated(x, weight, bias)
    assert_close(made(weight).gated(x, weight, bias), expected)


@kernel_settings(60)
@given(SHAPES)
@example(Shape(1, 1024, 64, bias=True))
@example(Shape(128, 1024, 256))
def test_sums_differ_from_the_twin(kernel_device: str, shape: Shape) -> None:
    """And counters that are left above 0 let the next sum be read before all of it is there."""
    x = random(shape.seed, shape.rows, shape.size_in).to(kernel_device, bf16)
    residual = (random(shape.seed + 4, shape.rows, shape.size_out) * shape.scale).to(x)
    norm = (random(shape.seed + 3, shape.size_out) + 2).to(x)
    weight, bias = weight_of(shape, shape.size_out, kernel_device)
    before = residual.clone()
    expected, _ = plain.add_linear(x, weight, bias, residual, norm, EPS)
    few = made(weight)
    for _ in range(2):
        total, scaled = few.add(x, weight, bias, residual, norm, EPS)
        assert_close(total, expected)
        assert torch.equal(scaled.product, total * norm) and scaled.eps == EPS
        squares = scaled.squares.sum(dim=1)
        torch.testing.assert_close(squares, total.float().square().sum(dim=1))
        assert not few.arrivals.any()
    assert torch.equal(residual, before)


def test_the_factor_is_not_that_of_the_norm(kernel_device: str) -> None:
    shape = Shape(5, 256, 64, scale=30.0)
    x = (random(0, 5, 256) * 30).to(kernel_device, bf16)
    norm = (random(3, 256) + 2).to(x)
    squares = x.float().square().sum(dim=1, keepdim=True)
    scaled = Scaled(x * norm, squares, EPS)
    weight, _ = weight_of(shape, 64, kernel_device)
    out = made(weight).linear(scaled, weight)
    expected = plain.rms_norm(x.float(), norm.float(), EPS) @ weight.float().T
    assert float((out.float() - expected).abs().max() / expected.abs().max()) < 2.0**-7


@pytest.mark.parametrize(
    "weights",
    [
        [torch.zeros(64, 64, dtype=torch.float16)],
        [torch.zeros(64, 64)],
        [torch.zeros(64, 64, dtype=bf16), torch.zeros(64, 72, dtype=bf16)],
        [torch.zeros(64, 64, dtype=bf16), None],
    ],
    ids=["float16", "float32", "a size of 72", "packed"],
)
def test_what_it_cannot_do_is_tried(kernel_device: str, weights: list[torch.Tensor | None]) -> None:
    assert few_rows(weights) is None
    assert few_rows([torch.zeros(64, 64, dtype=bf16)]) is not None


PROMPTS = [[3, 14, 15, 92, 65, 35], [89, 79, 32], list(range(100, 170))]
PARAMS = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0, logprobs=0, ignore_eos=True)


def told(path: Path, device: str, **options: Any) -> list[float]:
    """What an engine says of its prompts' tokens, and of the first of its own."""
    with LLM(path, device=device, max_model_len=128, num_kvcache_blocks=40, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    entries = (out["prompt_logprobs"][1:] + out["logprobs"][:1] for out in outputs)
    return [entry[0]["logprob"] for some in entries for entry in some]


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Qwen2"])
def test_a_model_computes_something_else(
    family: str, tmp_path: Path, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to float32, whose rounding is far below that of bfloat16."""
    path = make_model(tmp_path, family=family)
    exact = told(path, kernel_device, dtype="float32", attention_backend="torch")
    options: dict[str, Any] = dict(dtype="bfloat16", attention_backend="triton", enforce_eager=True)
    monkeypatch.setattr(linear, "can_pack", lambda _: False)  # as on a GPU
    calls: list[int] = []
    add = FewRows.add
    monkeypatch.setattr(
        FewRows, "add", lambda self, x, *rest: calls.append(len(x)) or add(self, x, *rest)
    )
    few = told(path, kernel_device, **options)
    assert {79, 3} <= set(calls), "prompts and decoding take that way"
    monkeypatch.setattr(Decoder, "bind_few_rows", lambda *_: None)
    ordinary = told(path, kernel_device, **options)

    def error(other: list[float]) -> float:
        return math.dist(exact, other)

    assert 0 < error(few) < 1.3 * error(ordinary)
