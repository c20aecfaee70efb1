"""Attention to latent rows in Triton, in C++ and in plain PyTorch, against its definition.

On a GPU, all sizes: `pytest --all tests/kernels/test_latent_attention.py`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from latents import BF16, FP16, Latents, Shape

from nanovllm.kernels.plain import decode_attention as plain_decode
from nanovllm.kernels.plain import prefill_attention as plain_prefill

pytestmark = pytest.mark.usefixtures("one_thread")
DEEPSEEK: dict[str, Any] = dict(rank=512, rotated=64, dtype=BF16, block_size=64)


@pytest.fixture(autouse=True, scope="module")
def uninitialized_memory_is_nan() -> Iterator[None]:
    """Else a result that was not written may look right."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def decoded(shape: Shape, device: str) -> torch.Tensor:
    """By Triton, in two layers with one plan."""
    from nanovllm.kernels.triton.attention import latent_decode

    latents = Latents(shape, device)
    with pytest.MonkeyPatch.context() as patch:
        parts = -(-shape.num_queries * shape.heads // 64)  # at most, without tensor cores more
        patch.setattr(latent_decode, "num_multiprocessors", lambda device: shape.programs * parts)
        patch.setattr(latent_decode, "MANY_ROWS", 40)
        plan = latent_decode.plan_latents(
            latents.lens, latents.tables, shape.sizes, shape.dtype, shape.num_queries
        )
        first, out = (latent_decode.latent_decode(latents.q, latents.layer(), plan) for _ in "12")
    assert torch.equal(first, out)
    latents.q[latents.lens == 0] = 0
    assert not out[latents.lens == 0].any(), "a row without keys is not zero"
    latents.check(out)
    return out


def prefilled(shape: Shape, device: str) -> None:
    """By Triton: from the cache, and if nothing was cached from the step's own rows."""
    from nanovllm.kernels.triton.attention.latent_prefill import latent_prefill
    from nanovllm.kernels.triton.attention.prefill_plan import plan_prefill

    latents = Latents(shape, device)
    assert latents.own is not None
    for cached in (True, False)[: 1 + (shape.queries == shape.contexts)]:
        tables, own = (latents.tables, latents.own * torch.nan) if cached else (None, latents.own)
        plan = plan_prefill(latents.cu_q, latents.cu_k, tables, len(latents.q))
        latents.check(latent_prefill(latents.q, own, own, latents.layer(cached), plan))


BATCHES = [
    Shape([0, 1, 63, 64, 65, 300], heads=1),
    Shape([130, 0, 5, 700], heads=17, rank=96, rotated=24, dtype=BF16, programs=13),
    Shape([130, 0, 500, 64], heads=4, rank=64, rotated=16, dtype=BF16, block_size=64),
    Shape([130, 0, 500, 64], heads=4, rank=64, rotated=16, block_size=64),
    Shape([200, 3], heads=5, rank=33, rotated=3, block_size=7),
    Shape([200, 3, 129], heads=2, rank=32, rotated=0, dtype=FP16),
    Shape([200, 3, 129], heads=2, rank=24, rotated=8, all_values=True, programs=2),
    Shape([70, 150], heads=128, rank=32, rotated=16, dtype=BF16, block_size=64, programs=3),
    Shape([700, 3, 64], rank=24, rotated=16, all_values=True, window=65, programs=13),
    Shape([150, 70, 2], heads=16, **DEEPSEEK),
    Shape([1] * 20 + [640, 0], heads=2, rank=16, rotated=4, programs=5),
    # Several queries of a sequence, and some that are not used.
    Shape([1, 5, 64, 65, 300, 4], num_queries=5, used=[1, 5, 5, 2, 0, 3], heads=7),
    Shape([70, 200], num_queries=9, used=[9, 3], heads=16, rank=64, dtype=BF16, block_size=64),
    Shape([66, 0, 300], num_queries=4, window=70, programs=13),
]


@pytest.mark.sampled(share=0.2)
@pytest.mark.parametrize("shape", BATCHES, ids=str)
def test_decode_in_triton_equals_its_definition(kernel_device: str, shape: Shape) -> None:
    decoded(shape, kernel_device)


@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize("programs", [1, 2, 5, 40])
def test_any_division_of_the_contexts_has_the_same_result(
    kernel_device: str, programs: int
) -> None:
    """Shares of one sequence, of many, and programs without a share."""
    shape = Shape([64, 1, 0, 640, 129], rank=16, rotated=4, heads=2, programs=programs)
    decoded(shape, kernel_device)


PREFILLS = [
    Shape([1, 70, 130, 5], [1, 70, 130, 5]),
    Shape([130, 64, 3], [130, 64, 3], rank=64, rotated=16, dtype=BF16, block_size=64, heads=17),
    Shape([300, 64, 66], [100, 1, 66], heads=16, rank=96, rotated=24, dtype=BF16),
    Shape([150, 70], [20, 70], heads=4, block_size=64, rank=64, rotated=16),
    Shape([40, 33], [7, 1], heads=128, rank=32, rotated=8, block_size=7),
    Shape([200, 100], [100, 100], rank=33, rotated=3, window=40, all_values=True),
    Shape([140, 9], [6, 9], heads=16, **DEEPSEEK),
]


@pytest.mark.sampled(share=0.2)
@pytest.mark.parametrize("shape", PREFILLS, ids=str)
def test_prefill_in_triton_equals_its_definition(kernel_device: str, shape: Shape) -> None:
    prefilled(shape, kernel_device)


@pytest.mark.sampled(share=0.2)
@pytest.mark.parametrize("shape", [*BATCHES, *PREFILLS], ids=str)
def test_plain_attention_equals_its_definition(shape: Shape) -> None:
    """Including columns of a row that are a part of the key alone."""
    if shape.dtype != torch.float32:
        shape = replace(shape, dtype=torch.float32)
    latents = Latents(shape, "cpu")
    size, kv = shape.block_size, latents.layer()
    if shape.queries:
        plan = plain_prefill.plan_prefill(latents.cu_q, latents.cu_k, latents.tables, size)
        out = plain_prefill.prefill_attention(latents.q, latents.q, latents.q, kv, plan)
    else:
        groups = plain_decode.plan_decode(latents.lens, latents.tables, size, shape.num_queries)
        out = plain_decode.decode_attention(latents.q, kv, groups)
    latents.q.nan_to_num_()
    latents.check(out)


ON_CPUS = [
    shape for shape in (*BATCHES, *PREFILLS) if shape.width % 8 == 0 and shape.dtype != FP16
] + [
    Shape([300, 70], heads=32, **DEEPSEEK),
    Shape([300, 70], heads=40, num_queries=2, used=[2, 1], rank=40, rotated=16),
]  # fmt: skip


@pytest.mark.sampled(share=0.15)
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("split", [32, 1024])
@pytest.mark.parametrize("shape", ON_CPUS, ids=str)
def test_attention_on_cpus_equals_its_definition(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, split: int
) -> None:
    """Few rows, tiles, and the parts of contexts that threads share."""
    from nanovllm.kernels.cpu import attention, decode_attention, prefill_attention

    monkeypatch.setattr(attention, "SPLIT_KEYS", split)
    latents = Latents(shape, "cpu")
    kv, sizes = latents.layer(), (shape.heads, shape.width)
    if not shape.queries:
        tables = latents.tables.repeat_interleave(shape.num_queries, dim=0)
        step = decode_attention.plan_decode(latents.lens, tables, *sizes)
        out = decode_attention.decode_attention(latents.q, kv, step)
        latents.q.nan_to_num_()
        latents.check(out)
        return
    for cached in (True, False)[: 1 + (shape.queries == shape.contexts)]:
        plan = prefill_attention.plan_prefill(
            latents.cu_q, latents.cu_k, latents.tables if cached else None, *sizes
        )
        own = latents.own
        assert own is not None
        latents.check(prefill_attention.prefill_attention(latents.q, own, own, kv, plan))


def large_batches() -> list[Shape]:
    """Of the sizes of DeepSeek's models, which take a device."""
    shapes = []
    for heads in (1, 16, 20, 32, 64, 128):
        for dtype in (BF16, FP16, torch.float32):
            options = DEEPSEEK | dict(heads=heads, dtype=dtype, programs=132)
            shapes += [
                Shape([5000, 1, 0, 64, 777], **options),
                Shape([1000] * 40, num_queries=3, **options),
                Shape([1100, 3], num_queries=5, used=[5, 2], **options),
            ]
    for rank, rotated in ((256, 32), (384, 64), (128, 16), (40, 8), (96, 24)):
        shapes.append(Shape([3000, 70], heads=40, rank=rank, rotated=rotated, dtype=BF16))
    return shapes


@pytest.mark.cuda
@pytest.mark.parametrize("shape", large_batches(), ids=str)
def test_large_batches_equal_their_definition(shape: Shape) -> None:
    """Decode, and the same contexts as a prefill of their last tokens."""
    decoded(shape, "cuda")
    contexts = [n for n in shape.contexts if n]
    queries = [min(n, 1 + 70 * (i % 2)) for i, n in enumerate(contexts)]
    prefilled(replace(shape, contexts=contexts, queries=queries, num_queries=1), "cuda")
    short = [n for n in contexts if n <= 1100][:3]
    prefilled(replace(shape, contexts=short, queries=short, num_queries=1), "cuda")


@pytest.mark.cuda
def test_a_graph_computes_other_lengths_than_it_was_captured_with() -> None:
    """The division is on the device, so it follows the lengths at each replay."""
    from nanovllm.kernels.triton.attention import latent_decode

    shape = Shape([1, 1, 1], heads=16, **DEEPSEEK)
    latents = Latents(replace(shape, contexts=[3000, 70, 700]), "cuda")
    lens, wanted = torch.ones_like(latents.lens), latents.lens.clone()

    def run() -> torch.Tensor:
        plan = latent_decode.plan_latents(lens, latents.tables, shape.sizes, shape.dtype)
        torch.zeros(1, device="cuda")
        return latent_decode.latent_decode(latents.q, latents.layer(), plan)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    lens.copy_(wanted)
    graph.replay()
    latents.check(out)
