"""Linear layers of few rows, with norms, activation and sums inside, against their twins.

On a device, or interpreted where there is none.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import kernel_settings, make_model
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.engine.inputs import StepInputs
from nanovllm.kernels import few_rows as module
from nanovllm.kernels import plain
from nanovllm.kernels.few_rows import FewRows, few_rows_for
from nanovllm.kernels.plain import Scaled
from nanovllm.kernels.table import triton_kernels
from nanovllm.layers import linear
from nanovllm.models.decoder import MLP, Decoder, SparseMLP

pytestmark = pytest.mark.usefixtures("one_thread", "four_processors")

EPS = 1e-6
bf16 = torch.bfloat16


@pytest.fixture(scope="module")
def four_processors() -> Iterator[None]:
    """On a GPU too: small products fill so few with tiles of either width."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "num_multiprocessors", lambda device: 4)
        yield


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


# Tiles have 16 to 64 outputs, and up to 4 programs share one where the inputs are many.
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
    found = few_rows_for(list(weights))
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
    assert few_rows_for(weights) is None
    assert few_rows_for([torch.zeros(64, 64, dtype=bf16)]) is not None


def test_tiles_of_all_widths_are_shared_and_not() -> None:
    """By the shapes above, lest they test one way alone."""
    sizes = [(t, k, n) for t in (1, 17, 64, 128) for k in (64, 1024) for n in (16, 96, 256)]
    made = {module._tiles(*size, False, add, 4) for size in sizes for add in (False, True)}
    assert {tiles.outputs for tiles in made} == {16, 32, 64}
    assert {tiles.programs for tiles in made} == {1, 2, 4}
    assert {16, 32} <= {tiles.rows for tiles in made if tiles.outputs == 64}, "turned products"


@pytest.mark.parametrize(("rows", "most"), [(1024, 128), (16384, 64)])
def test_large_layers_leave_more_rows_to_others(rows: int, most: int) -> None:
    few = few_rows_for([torch.zeros(rows, 2048, dtype=bf16, device="meta")])
    assert few is not None and few.most_rows == few.warmup_rows[-1] == most


@pytest.mark.parametrize("most_rows", [64, 128])
def test_a_tile_is_compiled_while_serving(most_rows: int) -> None:
    """One that the rows of the warm-up do not take, in layers as Qwen3-0.6B and 8B have them."""
    sizes = [(1024, 4096), (2048, 1024), (1024, 3072), (4096, 6144), (4096, 4096), (12288, 4096)]
    ways = [(False, False), (True, False), (False, True)]

    def tiles(rows: Iterable[int]) -> set[Any]:
        made = itertools.product(rows, sizes, ways)
        return {(size, *way, module._tiles(n, *size, *way, 132)) for n, size, way in made}

    warm = FewRows(most_rows, torch.empty(0)).warmup_rows
    assert tiles(warm) == tiles(range(1, most_rows + 1))


def test_the_warm_up_leaves_rows_out(
    tmp_path: Path, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda _: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    options: dict[str, Any] = dict(dtype="bfloat16", attention_backend="triton", enforce_eager=True)
    sizes: list[int] = []
    small = dict(max_num_batched_tokens=100, max_model_len=128, num_kvcache_blocks=10)

    def forward(inputs: StepInputs) -> torch.Tensor:
        sizes.append(len(inputs.input_ids))
        return torch.zeros(sizes[-1], hidden_size, dtype=bf16, device=kernel_device)

    with LLM(make_model(tmp_path), device=kernel_device, **options | small) as llm:
        hidden_size = llm.model_config.hidden_size
        monkeypatch.setattr(llm._runner, "_forward", forward)
        llm._runner._warm_up()
    assert sizes == [1, 16, 32, 64, 100]


PROMPTS = [[3, 14, 15, 92, 65, 35], [89, 79, 32], list(range(100, 170))]
# The token is given, so that all compute the same; what is said of it is said before.
PARAMS = SamplingParams(
    temperature=0, max_tokens=4, prompt_logprobs=0, logprobs=0, allowed_token_ids=[7]
)


def told(path: Path, device: str, **options: Any) -> tuple[list[float], list[float]]:
    """What an engine says of its prompts' tokens, and of those that it decodes."""
    with LLM(path, device=device, max_model_len=256, num_kvcache_blocks=40, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        llm.generate([[5] * 150], PARAMS, use_tqdm=False)  # too many rows
    prefilled = [entry for out in outputs for entry in out["prompt_logprobs"][1:]]
    decoded = [entry for out in outputs for entry in out["logprobs"][1:]]
    return tuple([e[0]["logprob"] for e in entries] for entries in (prefilled, decoded))


BIASES = dict(attention_bias=True, mlp_bias=True)


@pytest.mark.parametrize(("family", "overrides"), [("Qwen3", {}), ("Llama", BIASES), ("Qwen2", {})])
def test_a_model_computes_something_else(
    family: str,
    overrides: dict[str, Any],
    tmp_path: Path,
    kernel_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Next to float32, whose rounding is far below that of bfloat16."""
    path = make_model(tmp_path, family=family, **overrides)
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
    assert max(calls) <= 128, "more rows do not"
    monkeypatch.setattr(Decoder, "bind_few_rows", lambda *_: None)
    ordinary = told(path, kernel_device, **options)
    for off, usual, right in zip(few, ordinary, exact, strict=True):
        assert 0 < math.dist(off, right) < 1.5 * math.dist(usual, right)


@pytest.mark.parametrize("why", ["two ranks", "experts"])
def test_a_model_that_it_cannot_compute_goes_that_way(why: str) -> None:
    """Two ranks, each of which has a part of a sum; experts, whose weights are others."""
    weight = torch.zeros(64, 64, dtype=bf16)

    def decoder(why: str) -> Any:
        part = SimpleNamespace(weight=weight, ranks=SimpleNamespace(size=1 + (why == "two ranks")))
        layer = SimpleNamespace(
            self_attn=SimpleNamespace(o_proj=part), linears=[part] * 4,
            mlp=SparseMLP.__new__(SparseMLP) if why == "experts" else MLP.__new__(MLP),
        )  # fmt: skip
        return SimpleNamespace(layers=[layer], few_rows=None)

    for case in (why, "neither"):
        made = decoder(case)
        Decoder.bind_few_rows(made, triton_kernels())
        assert (made.few_rows is None) == (case == why)
