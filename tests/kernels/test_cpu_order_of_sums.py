"""One order of sums in the CPU's attention: a row has the same bits in any step.

softmax.h says which order this is.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from latents import Latents
from latents import Shape as LatentShape
from test_attention_kernels import BF16, FP32, Shape
from test_cpu_attention import Compiled

from nanovllm.kernels.cpu import attention, library, processor
from nanovllm.kernels.cpu import compile as compiling
from nanovllm.kernels.cpu.decode_attention import decode_attention, plan_decode
from nanovllm.kernels.cpu.prefill_attention import plan_prefill, prefill_attention
from nanovllm.kernels.kv_layer import KVLayer

pytestmark = pytest.mark.usefixtures("one_thread", "compiler")

LENGTH = 203  # more than six groups of 32 keys, and three parts of 64


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT_KEYS", 64)


class Prompt:
    """The keys and values of a prompt in the cache, and a query for each of its tokens."""

    def __init__(self, made: Compiled | Latents, kv: KVLayer, own: list[torch.Tensor]) -> None:
        self.kv, self.own, self.q, self.table = kv, own, made.q, made.tables
        self.sizes = self.q.shape[1] // self.kv.k_cache.shape[2], self.q.shape[2]

    def chunks(self, *parts: tuple[int, int]) -> torch.Tensor:
        """The rows of a step, each part of which is a sequence: the queries [start, end)."""
        lengths = torch.tensor([0, *(end - start for start, end in parts)], dtype=torch.int32)
        ends = torch.tensor([0, *(end for _, end in parts)], dtype=torch.int32)
        q = torch.cat([self.q[start:end] for start, end in parts])
        plan = plan_prefill(
            lengths.cumsum(0, dtype=torch.int32), ends.cumsum(0, dtype=torch.int32),
            self.table.repeat(len(parts), 1), *self.sizes,
        )  # fmt: skip
        return prefill_attention(q, q, q, self.kv, plan)

    def decodes(self, *positions: int) -> torch.Tensor:
        lens = torch.tensor([p + 1 for p in positions], dtype=torch.int32)
        plan = plan_decode(lens, self.table.repeat(len(lens), 1), *self.sizes)
        return decode_attention(self.q[list(positions)], self.kv, plan)

    def fresh(self) -> torch.Tensor:
        """All rows, from the step's own keys."""
        ends = torch.tensor([0, len(self.q)], dtype=torch.int32)
        return prefill_attention(
            self.q, *self.own, self.kv, plan_prefill(ends, ends, None, *self.sizes)
        )


def assert_one_order(prompt: Prompt) -> None:
    """Chunks, decodes and mixed steps, of one thread and of more, give the same bits."""
    whole = prompt.chunks((0, LENGTH))
    for size in (1, 2, 3, 7, 64, 100):
        starts = range(0, LENGTH, size)
        parts = [(start, min(start + size, LENGTH)) for start in starts]
        assert torch.equal(prompt.chunks(*parts), whole), f"chunks of {size} in one step"
        for part in parts[:: max(1, len(parts) // 7)]:
            assert torch.equal(prompt.chunks(part), whole[slice(*part)]), f"a chunk of {size}"
    everywhere = torch.randperm(LENGTH).tolist()
    assert torch.equal(prompt.decodes(*everywhere), whole[everywhere])
    for position in (0, 1, 31, 32, 63, 64, 65, 127, 128, 150, LENGTH - 1):
        assert torch.equal(prompt.decodes(position), whole[position : position + 1]), position
    mixed = prompt.chunks((150, 151), (20, 120), (LENGTH - 2, LENGTH), (0, 40))
    expected = [whole[150:151], whole[20:120], whole[-2:], whole[:40]]
    assert torch.equal(mixed, torch.cat(expected))
    torch.set_num_threads(2)
    assert torch.equal(prompt.chunks((0, LENGTH)), whole)
    assert torch.equal(prompt.decodes(*everywhere), whole[everywhere])
    torch.set_num_threads(1)


KINDS: dict[str, dict[str, Any]] = {
    "one query a key head": dict(group=1, head_dim=128),
    "groups of 2": dict(group=2, block_size=7),
    "groups of 3, narrow heads": dict(group=3, head_dim=48),
    "groups of 4, heads of 80": dict(group=4, head_dim=80, block_size=1),
    "groups of 16, wide heads": dict(group=16, head_dim=256, kv_heads=1),
    "groups of 24, heads of no vectors": dict(group=24, head_dim=40, kv_heads=1),
    "a window": dict(window=50, block_size=4),
    "a window of one token": dict(window=1, block_size=1, group=4),
    "a long window, and sinks": dict(window=130, sinks=True, group=8, head_dim=32),
    "a soft cap": dict(soft_cap=2.0, group=4),
    "codes": dict(quantized=True, group=4),
    "codes, a window and a soft cap": dict(quantized=True, head_dim=112, window=70, soft_cap=3.0),
    "codes of small blocks": dict(quantized=True, head_dim=16, block_size=5, sinks=True),
}


def make_prompt(kind: str, dtype: torch.dtype) -> Prompt:
    made = Compiled(Shape([LENGTH], [LENGTH], dtype=dtype, **KINDS[kind]), "cpu")
    return Prompt(made, made.kernel_layer(), [made.k, made.v])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_any_step(kind: str, dtype: torch.dtype) -> None:
    """Fails if few rows and tiles add up in another order, or parts depend on a step."""
    prompt = make_prompt(kind, dtype)
    assert_one_order(prompt)
    if not KINDS[kind].get("quantized"):
        assert torch.equal(prompt.fresh(), prompt.chunks((0, LENGTH)))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("sizes", [dict(), dict(heads=16, rank=512, rotated=64), dict(heads=4)])
def test_a_latent_row_is_the_same_in_any_step(sizes: dict[str, int], dtype: torch.dtype) -> None:
    made = Latents(LatentShape([LENGTH], [LENGTH], dtype=dtype, **sizes), "cpu")
    assert made.own is not None
    prompt = Prompt(made, made.layer(), [made.own, made.own])
    assert_one_order(prompt)
    assert torch.equal(prompt.fresh(), prompt.chunks((0, LENGTH)))


@pytest.fixture
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Libraries for other processors that this one can be."""
    asked = {"haswell": {"avx2", "fma"}, "skylake-avx512": {"avx512f", "avx512bw"}}
    missing = asked.get(request.param, set()) - set(processor.cpu_info().get("flags", "").split())
    if missing:
        pytest.skip(f"this processor has no {', '.join(missing)}")
    caches = library.function, library.constant, compiling.load
    for cached in caches:
        cached.cache_clear()
    flags = (*compiling.X86_FLAGS, f"-march={request.param}")
    monkeypatch.setattr(compiling, "X86_FLAGS", flags)
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", ["groups of 3, narrow heads", "codes, a window and a soft cap"])
@pytest.mark.parametrize("instructions", ["x86-64", "haswell", "skylake-avx512"], indirect=True)
def test_each_set_of_instructions_has_one_order(
    instructions: None, kind: str, dtype: torch.dtype
) -> None:
    assert_one_order(make_prompt(kind, dtype))
