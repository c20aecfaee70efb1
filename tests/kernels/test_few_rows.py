"""Linear layers of few rows, with norms, activation and sums inside, against their twins.

On a device, or interpreted where there is none.

It costs more than 20 seconds: kernels are interpreted, in some tests those of a whole model.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import kernel_settings, make_model
from hypothesis import example, given
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.operands.routing import Routing
from nanovllm.kernels.operands.scaled import Scaled
from nanovllm.kernels.plain.few_rows import (
    add_linear,
    scaled_gated,
    scaled_linear,
)
from nanovllm.kernels.plain.few_rows import weigh as plain_weigh
from nanovllm.kernels.table import PLAIN
from nanovllm.kernels.triton.common import ROOM, rows_with_room, with_room
from nanovllm.kernels.triton.experts.route import Router
from nanovllm.kernels.triton.linear import few_rows as module
from nanovllm.kernels.triton.linear import held_weights
from nanovllm.kernels.triton.linear.few_rows import FewRows, few_rows_for
from nanovllm.kernels.triton.linear.few_rows_tiles import tiles_for
from nanovllm.kernels.triton.linear.held_weights import can_hold_tiles, can_share_tiles
from nanovllm.kernels.triton.table import triton_kernels
from nanovllm.layers import few_rows as layers_few_rows
from nanovllm.layers.few_rows_forms import expert_weights

pytestmark = [
    pytest.mark.usefixtures("one_thread", "four_processors"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="tiles are copied on Hopper GPUs alone",
    ),
    # Interpreted, of memory after the rows; the results are not used.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

EPS = 1e-6
bf16 = torch.bfloat16


@pytest.fixture(scope="module")
def four_processors() -> Iterator[None]:
    """On a GPU too: small products fill four processors with tiles of both widths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "num_multiprocessors", lambda device: 4)
        yield


@dataclass(frozen=True)
class Shape:
    """Rows, the sizes of a linear layer, and the number of parts of the input's squares."""

    rows: int
    size_in: int
    size_out: int
    bias: bool = False
    parts: int = 1
    scale: float = 1.0
    seed: int = 0


# For four processors: tiles of all sizes, alone and two on a processor.
SHAPES = st.builds(
    Shape,
    rows=st.sampled_from([1, 2, 15, 16, 17, 40, 64, 65, 128, 129, 256]),
    size_in=st.sampled_from([16, 48, 64, 256, 512, 640, 1024]),
    size_out=st.sampled_from([16, 48, 64, 96, 256, 512]),
    bias=st.booleans(),
    parts=st.sampled_from([1, 3, 4, 40]),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 2**31),
)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(shape: Shape, rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A matrix that keeps the size of what it multiplies, and its bias."""
    weight = (random(shape.seed + 1, rows, shape.size_in) / shape.size_in**0.5).to(device, bf16)
    bias = random(shape.seed + 2, rows).to(device, bf16) if shape.bias else None
    if weight.is_cuda:  # a kernel may read weights before the kernel before it has ended
        torch.cuda.synchronize()
    return weight, bias


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("size_in", "size_out"), [(1024, 256), (640, 48), (3072, 64), (16, 16)])
def test_few_enough_rows_of_small_weights_hold_them(
    size_in: int, size_out: int, gated: bool, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the results of the other kernel, up to the order of sums."""
    monkeypatch.setattr(held_weights, "can_hold_tiles", lambda *_: False)
    launched = rows_of_launches(held_weights, monkeypatch)

    def computed(rows: int) -> torch.Tensor:
        shape = Shape(rows, size_in, size_out, bias=True, parts=3, seed=5)
        x = scaled_of(replace(shape, rows=4), kernel_device)
        x = Scaled(x.product[:rows], x.squares[:rows], EPS)
        weight, bias = weight_of(shape, size_out * (1 + gated), kernel_device)
        few = made(weight)
        return (few.gated if gated else few.linear)(x, weight, bias)

    held = [computed(1), computed(2)]
    assert launched == [1, 2]
    computed(3)
    monkeypatch.setattr(held_weights, "MOST_BYTES", 0)
    for rows, result in enumerate(held, 1):
        assert_close(result, computed(rows))
    assert launched == [1, 2]


@pytest.mark.cuda
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("size_in", "size_out"), [(1024, 256), (1024, 48), (2048, 64), (3072, 32), (4096, 16)]
)
def test_up_to_16_rows_of_small_weights_take_tensor_cores(
    size_in: int, size_out: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the results of the twin; Gluon has no interpreter."""
    from nanovllm.kernels.triton.linear import held_tiles

    used = can_hold_tiles(16, torch.zeros(size_out * (1 + gated), size_in, dtype=bf16), gated)
    launched = rows_of_launches(held_tiles, monkeypatch)
    for rows in (1, 2, 3, 8, 9, 16, 17):
        compare_with_twins(Shape(rows, size_in, size_out, bias=True, parts=3, seed=rows), gated)
    calls = 1 if gated else 3
    assert launched == [rows for rows in (1, 2, 3, 8, 9, 16) for _ in range(calls)] * used


@pytest.mark.cuda
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("size_in", "size_out"),
    [(1024, 256), (1024, 3072), (1024, 48), (2048, 64), (3072, 1024), (4096, 32)],
)
def test_up_to_32_rows_of_small_weights_share_memory(
    size_in: int, size_out: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the results of the twin, and zeros left behind; Gluon has no interpreter."""
    from nanovllm.kernels.triton.linear import shared_tiles

    used = can_share_tiles(32, torch.zeros(size_out * (1 + gated), size_in, dtype=bf16))
    launched = rows_of_launches(shared_tiles, monkeypatch)
    for rows in (16, 17, 24, 31, 32, 33):
        shape = Shape(rows, size_in, size_out, bias=rows > 17, parts=3, seed=rows)
        few = compare_with_twins(shape, gated)
        assert few.arrivals is not None and not few.arrivals.any()
    calls = 1 if gated else 3
    assert launched == [rows for rows in (17, 24, 31, 32) for _ in range(calls)] * used


def rows_of_launches(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each launch of a kernel's module, from now on."""
    launched: list[int] = []
    launch = kernel.launch
    monkeypatch.setattr(
        kernel, "launch", lambda rows, *rest: launched.append(len(rows.x)) or launch(rows, *rest)
    )
    return launched


def compare_with_twins(shape: Shape, gated: bool) -> FewRows:
    """Compute the gated layer, or the other three, on the GPU; what follows the rows is unused."""
    x = scaled_of(shape, "cuda")
    roomy = rows_with_room(shape.rows, shape.size_in, x.product)
    torch.as_strided(roomy, (ROOM, shape.size_in), (shape.size_in, 1)).fill_(math.nan)
    x = Scaled(roomy.copy_(x.product), x.squares, EPS)
    weight, bias = weight_of(shape, shape.size_out * (1 + gated), "cuda")
    few = made(weight[:64])  # four processors are too few for all of some weights
    if gated:
        assert_close(few.gated(x, weight, bias), scaled_gated(x, weight, bias))
        return few
    assert_close(few.linear(x, weight, bias), scaled_linear(x, weight, bias))
    product = F.linear(x.product.float(), weight.float(), None if bias is None else bias.float())
    assert_close(few.product(x.product, weight, bias), product.to(bf16))
    residual = random(1, shape.rows, shape.size_out).to(weight)
    norm = random(2, shape.size_out).to(weight)
    torch.cuda.synchronize()
    total, scaled = few.add(x.product, weight, bias, residual, norm, EPS)
    expected, _ = add_linear(x.product, weight, bias, residual, norm, EPS)
    assert_close(total, expected)
    assert torch.equal(scaled.product, total * norm)
    squares = scaled.squares.sum(dim=1)
    torch.testing.assert_close(squares, total.float().square().sum(dim=1))
    return few


@pytest.mark.parametrize(
    ("rows", "size_out", "size_in", "gated", "can"),
    [
        (1, 4096, 1024, False, True), (16, 4096, 1024, False, True), (17, 4096, 1024, False, False),
        (8, 6144, 1024, True, True), (8, 1024, 3072, False, True), (8, 1024, 4096, False, True),
        (8, 1024, 4096, True, False), (8, 1024, 8192, False, False), (8, 16, 896, False, False),
        (8, 24, 1024, False, False), (8, 16, 1024, True, False), (8, 4096, 4096, False, False),
    ],
)  # fmt: skip
def test_registers_hold_the_weights_that_they_have_room_for(
    rows: int, size_out: int, size_in: int, gated: bool, can: bool
) -> None:
    weight = torch.zeros(size_out, size_in, dtype=bf16, device="meta")
    assert can_hold_tiles(rows, weight, gated) == can


@pytest.mark.parametrize(
    ("rows", "size_out", "size_in", "can"),
    [
        (16, 4096, 1024, False), (17, 4096, 1024, True), (32, 6144, 1024, True),
        (33, 4096, 1024, False), (32, 1024, 3072, True), (32, 2048, 4096, True),
        (32, 4096, 4096, False), (32, 1024, 896, False), (32, 96, 1024, False),
    ],
)  # fmt: skip
def test_memory_is_shared_by_the_weights_that_it_has_room_for(
    rows: int, size_out: int, size_in: int, can: bool
) -> None:
    """With room for arrivals at each tile that several programs share."""
    weight = torch.zeros(size_out, size_in, dtype=bf16, device="meta")
    assert can_share_tiles(rows, weight) == can
    tiles = size_out // held_weights.SHARED_OUTPUTS
    assert not can or tiles * (size_in // held_weights.TILE_INPUTS) <= module.MOST_TILES


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
    """Rounded once, of sums in another order: off by one rounding, or by rounding of the terms."""
    assert out.dtype == expected.dtype and out.shape == expected.shape
    size = expected.float().abs()
    bound = 2.0**-7 * size + 2.0**-16 * (1 + size.amax(dim=-1, keepdim=True))
    assert bool(((out.float() - expected.float()).abs() <= bound).all())


@pytest.mark.slow
@kernel_settings(60)
@given(SHAPES)
@example(Shape(128, 1024, 256, bias=True, parts=40))
def test_normed_rows_equal_their_twin(kernel_device: str, shape: Shape) -> None:
    x = scaled_of(shape, kernel_device)
    weight, bias = weight_of(shape, shape.size_out, kernel_device)
    expected = scaled_linear(x, weight, bias)
    assert_close(made(weight).linear(x, weight, bias), expected)


@pytest.mark.slow
@kernel_settings(60)
@given(SHAPES)
@example(Shape(128, 1024, 256, bias=True, parts=40))
def test_gated_rows_equal_their_twin(kernel_device: str, shape: Shape) -> None:
    x = scaled_of(shape, kernel_device)
    weight, bias = weight_of(shape, 2 * shape.size_out, kernel_device)
    gate = "gelu" if shape.seed % 2 else "silu"
    expected = scaled_gated(x, weight, bias, gate)
    assert_close(made(weight).gated(x, weight, bias, gate), expected)


@pytest.mark.slow
@kernel_settings(60)
@given(SHAPES)
@example(Shape(1, 1024, 64, bias=True))
@example(Shape(128, 1024, 256))
def test_sums_equal_their_twin(kernel_device: str, shape: Shape) -> None:
    x = random(shape.seed, shape.rows, shape.size_in).to(kernel_device, bf16)
    residual = (random(shape.seed + 4, shape.rows, shape.size_out) * shape.scale).to(x)
    norm = (random(shape.seed + 3, shape.size_out) + 2).to(x)
    weight, bias = weight_of(shape, shape.size_out, kernel_device)
    before = residual.clone()
    expected, _ = add_linear(x, weight, bias, residual, norm, EPS)
    total, scaled = made(weight).add(x, weight, bias, residual, norm, EPS)
    assert_close(total, expected)
    assert torch.equal(scaled.product, total * norm) and scaled.eps == EPS
    squares = scaled.squares.sum(dim=1)
    torch.testing.assert_close(squares, total.float().square().sum(dim=1))
    assert torch.equal(residual, before)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_products_equal_their_twin(kernel_device: str, rows: int, bias: bool) -> None:
    shape = Shape(rows, 512, 128, bias=bias)
    x = random(shape.seed, rows, shape.size_in).to(kernel_device, bf16)
    weight, added = weight_of(shape, shape.size_out, kernel_device)
    expected = F.linear(x.float(), weight.float(), None if added is None else added.float())
    assert_close(made(weight).product(x, weight, added), expected.to(bf16))


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("rows", [1, 17])
def test_normed_rows_take_no_factor(kernel_device: str, rows: int, gate: str) -> None:
    shape = Shape(rows, 256, 64, bias=True)
    x = random(0, rows, shape.size_in).to(kernel_device, bf16)
    weight, bias = weight_of(shape, 2 * shape.size_out, kernel_device)
    few = made(weight)
    assert_close(few.gated(x, weight, bias, gate), scaled_gated(x, weight, bias, gate))
    assert torch.equal(few.linear(x, weight, bias), few.product(x, weight, bias))


@pytest.mark.parametrize(("rows", "whole"), [(1, 128), (17, 128), (65, 128), (129, 256)])
def test_memory_after_the_rows_changes_nothing(kernel_device: str, rows: int, whole: int) -> None:
    """Tiles are read whole if memory follows the rows; else up to the last row."""
    shape = Shape(rows, 256, 64)
    x, (weight, _) = scaled_of(shape, kernel_device), weight_of(shape, 64, kernel_device)
    roomy = rows_with_room(rows, 256, x.product)
    torch.as_strided(roomy, (whole, 256), (256, 1)).fill_(math.nan)
    roomy.copy_(x.product)
    found = [len(with_room(matrix, ROOM)) for matrix in (roomy, x.product)]
    assert found == [whole, rows]
    few = made(weight)
    out = few.linear(Scaled(roomy, x.squares, x.eps), weight)
    assert torch.equal(out, few.linear(x, weight)) and bool(out.isfinite().all())


def test_the_factor_is_that_of_the_norm(kernel_device: str) -> None:
    shape = Shape(5, 256, 64, scale=30.0)
    x = (random(0, 5, 256) * 30).to(kernel_device, bf16)
    norm = (random(3, 256) + 2).to(x)
    squares = x.float().square().sum(dim=1, keepdim=True)
    scaled = Scaled(x * norm, squares, EPS)
    weight, _ = weight_of(shape, 64, kernel_device)
    out = made(weight).linear(scaled, weight)
    expected = PLAIN.rms_norm(x.float(), norm.float(), EPS) @ weight.float().T
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
def test_layers_that_it_cannot_compute_are_refused(
    kernel_device: str, weights: list[torch.Tensor | None]
) -> None:
    weights = [None if weight is None else weight.to(kernel_device) for weight in weights]
    assert few_rows_for(weights) is None
    assert few_rows_for([torch.zeros(64, 64, dtype=bf16, device=kernel_device)]) is not None


def test_every_kind_of_tile_is_tested() -> None:
    """The shapes above test both kinds of tiles."""
    sizes = [(t, k, n) for t in (1, 17, 64, 256) for k in (16, 1024) for n in (16, 96, 256, 512)]
    made = [tiles_for(*size, gated, 4) for size in sizes for gated in (False, True)]
    assert {tiles.rows for tiles in made} == {16, 32, 64, 128}
    assert {tiles.outputs for tiles in made} == {16, 32, 64, 128}
    assert {tiles.inputs for tiles in made if tiles.outputs == 64} == {16, 64, 128, 256}
    assert all(3 <= tiles.stages <= 6 for tiles in made)


@pytest.mark.parametrize(("size", "most"), [(2048, 256), (65536, 128), (131072, 64)])
def test_large_layers_take_fewer_rows(
    size: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "can_copy_tiles", lambda _: True)
    assert few_rows_for([torch.zeros(1024, size, dtype=bf16, device="meta")]) == FewRows(most)


def test_all_tiles_run_at_once(kernel_device: str) -> None:
    """Except for two of gate and up on each of four processors."""
    sizes = (2 * 64 * 8, 2 * 64 * 8 + 16)
    found = [
        few_rows_for([torch.zeros(size, 64, dtype=bf16, device=kernel_device)]) for size in sizes
    ]
    assert found == [FewRows(256), None]


PROMPTS = [[3, 14, 15, 92, 65, 35], [89, 79, 32], list(range(100, 170))]
# The token is fixed, so that all compute the same; its logprobs come from before the choice.
PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=0, allowed_token_ids=[7])


def reported(path: Path, device: str, **options: Any) -> list[float]:
    """The logprobs that an engine reports for the tokens that it decodes."""
    with LLM(path, device=device, max_model_len=128, num_kvcache_blocks=40, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [entry[0]["logprob"] for out in outputs for entry in out["logprobs"][1:]]


HYBRID = dict(
    linear_num_key_heads=2, linear_num_value_heads=8, linear_key_head_dim=16,
    linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
SHARED = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True,
    shared_expert_intermediate_size=48,
)  # fmt: skip
BIASES = dict(attention_bias=True, mlp_bias=True)
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)


@pytest.mark.sampled(share=0.25)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Qwen3", {}), ("Llama", BIASES), ("Qwen2", {}), ("Qwen3Moe", EXPERTS), ("Gemma2", {}),
        ("Gemma3", {}), ("Qwen3_5", HYBRID), ("Qwen2Moe", SHARED), ("Lfm2", {}),
    ],
)  # fmt: skip
def test_a_model_computes_the_same(
    family: str,
    overrides: dict[str, Any],
    tmp_path: Path,
    kernel_device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compared with float32, which rounds far less than bfloat16."""
    path = make_model(tmp_path, family=family, **overrides)
    exact = reported(path, kernel_device, dtype="float32", attention_backend="torch")
    options: dict[str, Any] = dict(dtype="bfloat16", attention_backend="triton")
    calls: list[int] = []
    launch = FewRows._launch
    monkeypatch.setattr(
        FewRows,
        "_launch",
        lambda self, rows, *rest: calls.append(len(rows.x)) or launch(self, rows, *rest),
    )
    with_room, whole = module.with_room, []

    def note(x: torch.Tensor, rows: int) -> torch.Tensor:
        roomy = with_room(x, rows)
        whole.append(len(roomy) % rows == 0)
        return roomy

    monkeypatch.setattr(module, "with_room", note)
    few = reported(path, kernel_device, **options)
    assert max(calls[6:]) > 1, "not the probe alone"
    assert all(whole) or family == "Lfm2", "tiles extend over the end of memory"
    calls.clear()
    ordinary = reported(path, kernel_device, enforce_eager=True, **options)
    assert len(calls) <= 12 and set(calls) <= {1, 8}, "not the probes alone"
    assert 0 < math.dist(few, exact) < 1.3 * math.dist(ordinary, exact)


def test_only_decode_steps_of_few_rows_take_these_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not prompts, nor three rows where at most two count as few."""
    sizes: list[int] = []

    def compute(few_rows: FewRows, blocks: Any, x: torch.Tensor, *others: Any) -> Any:
        sizes.append(len(x))
        return x, []

    monkeypatch.setattr(layers_few_rows, "compute_few_rows", compute)
    with LLM(make_model(tmp_path), device="cpu", overlap=False, num_kvcache_blocks=10) as llm:
        llm.model_runner.shard.model.model.few_rows = FewRows(2)
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 2, 2)]
        llm.generate([[5], [6], [7]], params, use_tqdm=False)
        llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert sizes == [1, 1]


@pytest.mark.parametrize("why", ["two ranks", "no router"])
def test_experts_that_it_cannot_compute_do_not_take_these_kernels(
    why: str, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, each with a part of a sum; experts with a quantized router."""
    weight = torch.zeros(64, 64, dtype=bf16, device=kernel_device)

    def decoder(why: str) -> Any:
        ranks = SimpleNamespace(size=1 + (why == "two ranks"))
        routing = Routing(per_token=1, normalized=True)
        router = None if why == "no router" else Router.of(weight, bf16, routing)
        gate: Any = SimpleNamespace(kernel=router, routing=routing)
        experts: Any = SimpleNamespace(operands=(weight[None], weight[None]), ranks=ranks)
        operands = [weight, weight, expert_weights(gate, experts)]
        norm = SimpleNamespace(weight=weight[0], is_plain=True)
        parts = SimpleNamespace(feed_forward=None, after_feed_forward=None)
        return SimpleNamespace(layers=[SimpleNamespace(made=operands, parts=parts)], norm=norm)

    monkeypatch.setattr(layers_few_rows, "operands_of", lambda block: block.made)
    monkeypatch.setattr(layers_few_rows, "is_fused", lambda *_: True)
    for case in (why, "neither"):
        made = layers_few_rows.few_rows_of(SimpleNamespace(model=decoder(case)), triton_kernels())
        assert (made is None) == (case == why)


@pytest.mark.parametrize(
    ("most_rows", "others", "sums", "agreed"),
    [
        (64, 32, 99, 32),
        (64, 64, 48, 48),
        (64, 0, 99, None),
        (64, 64, 0, None),
        (None, 64, 99, None),
    ],
    ids=["others'", "sums'", "another cannot", "no kernels that sum", "this one cannot"],
)
def test_ranks_take_these_kernels_for_as_many_rows(
    most_rows: int | None, others: int, sums: int, agreed: int | None
) -> None:
    """Their sums would not fit together otherwise."""
    peer_kernels = SimpleNamespace(most_rows=lambda _: sums) if sums else None
    ranks: Any = SimpleNamespace(
        size=2, peer_kernels=peer_kernels, minimum=lambda number: min(number, others)
    )
    norm: Any = SimpleNamespace(weight=torch.zeros(64, dtype=bf16))
    few_rows: Any = most_rows and FewRows(most_rows)
    made = layers_few_rows.agreed_few_rows(few_rows, norm, ranks)
    assert (made and made.most_rows) == agreed


@pytest.mark.parametrize(("rows", "size_in", "size"), [(1, 2048, 512), (3, 80, 1100)])
def test_rows_are_multiplied_by_the_sigmoids_of_a_gate(
    kernel_device: str, rows: int, size_in: int, size: int
) -> None:
    """Of the finished norm; rows that do not fill a block, and more than one block."""
    x = torch.randn(rows, size_in).to(kernel_device, bf16)
    squares = x.float().square().view(rows, 2, -1).sum(2)
    scaled = Scaled(x * 3, squares, 1e-5)
    weight = torch.randn(1, size_in).to(kernel_device, bf16) / size_in**0.5
    numbers = torch.randn(rows, size).to(kernel_device, bf16)
    expected = plain_weigh(scaled, weight, numbers)
    found = FewRows(64).weigh(scaled, weight, numbers)
    assert found is numbers
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3)
