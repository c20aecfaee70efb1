"""Adapters on a GPU: Triton's kernels, also in a CUDA graph, against peft and plain PyTorch."""

from pathlib import Path

import pytest
import torch
from adapter_files import EVERY_LINEAR, make_adapter, peft_logits
from conftest import make_model

from nanovllm.adapters.peft import read_adapter
from nanovllm.adapters.slot_memory import AdapterSlots
from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.table import PLAIN
from nanovllm.kernels.triton.table import triton_kernels
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.layers.context import Context, attending
from nanovllm.layers.lora import group_rows
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import load_model
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.cuda

PROMPTS = [[1, 2, 3, 4, 5], [7], [8, 9, 10], [11, 12, 13, 14, 15, 16, 17], [3, 1]]
SLOTS = [1, -1, 0, 2, 1]


def low_rank(dtype: torch.dtype, size_in: int = 4096, max_rank: int = 64) -> LowRank:
    sizes = (4096, 1024, 1024)
    torch.manual_seed(0)
    like = dict(dtype=dtype, device="cuda")
    a = torch.randn(8, 3 * max_rank, size_in, **like) * size_in**-0.5  # type: ignore[arg-type]
    b = torch.randn(8, max_rank, sum(sizes), **like)  # type: ignore[arg-type]
    ranks = torch.randint(0, max_rank + 1, (8, 3), dtype=torch.int32, device="cuda")
    return LowRank(a, b, ranks, sizes)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 16, 33, 256, 700, 3000])
def test_large_layers_equal_plain_pytorch(rows: int, dtype: torch.dtype) -> None:
    weights, kernels = low_rank(dtype), triton_kernels()
    x = torch.randn(rows, 4096, dtype=dtype, device="cuda")
    out = torch.randn(rows, 6144, dtype=dtype, device="cuda")
    ids = torch.randint(-1, 8, (rows,), dtype=torch.int32, device="cuda")
    twin, before = out.clone(), out.clone()
    groups = kernels.group_rows(ids, 8)
    kernels.lora_up(kernels.lora_down(x, weights, groups), weights, groups, out, None)
    PLAIN.lora_up(PLAIN.lora_down(x, weights, ids), weights, ids, twin, None)
    error = (out.float() - twin.float()).abs().amax() / twin.float().abs().amax()
    assert error <= (2e-2 if dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(out[ids < 0], before[ids < 0])


@torch.inference_mode()
def test_a_graph_follows_the_slots_of_its_rows_and_what_is_placed() -> None:
    """Rows change their slots, and slots their ranks, between two replays."""
    weights, kernels = low_rank(torch.bfloat16), triton_kernels()
    x = torch.randn(48, 4096, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(48, dtype=torch.int32, device="cuda")
    out = torch.zeros(48, 6144, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        rows = group_rows(ids, 8, kernels)
        rows.add(x, weights, lambda: out.zero_())

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(5):
        torch.manual_seed(seed)
        ids.copy_(torch.randint(-1, 8, (48,), dtype=torch.int32))
        weights.ranks.copy_(torch.randint(0, 65, (8, 3), dtype=torch.int32))
        graph.replay()
        twin = torch.zeros_like(out)
        PLAIN.lora_up(PLAIN.lora_down(x, weights, ids), weights, ids, twin, None)
        error = (out.float() - twin.float()).abs().amax() / twin.float().abs().amax()
        assert error <= 2e-2
        assert not out[ids < 0].any()


@torch.inference_mode()
def test_mixed_adapters_equal_peft(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", hidden_size=80, intermediate_size=112)
    modules = [*EVERY_LINEAR, "embed_tokens", "lm_head"]
    adapters = [
        make_adapter(path, tmp_path / f"{i}", seed=i, r=5, target_modules=modules) for i in range(3)
    ]
    kernels = triton_kernels()
    with torch.device("cuda"):
        model = build_model(ModelConfig.from_dir(path), 64)
        load_model(model, path)
        model.bind(Backend(TorchBackend(), kernels))
        slots = AdapterSlots(model, 3, 8)
        for slot, adapter in enumerate(adapters):
            slots.place(slot, read_adapter(adapter, model, 8))
        lengths = torch.tensor(list(map(len, PROMPTS)))
        ends = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
        of_rows = torch.tensor(SLOTS, dtype=torch.int32).repeat_interleave(lengths)
        rows = group_rows(of_rows, 3, kernels)
        nowhere = torch.full((len(of_rows),), -1)
        context = Context(True, nowhere, ends, ends, 7, 7)
        ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
        positions = torch.cat([torch.arange(len(prompt)) for prompt in PROMPTS])
        with attending(context, TorchBackend(), {"adapters": rows}):
            hidden, _ = model(ids, positions)
            logits = model.compute_logits(hidden).cpu()
    chosen = [adapters[slot] if slot >= 0 else None for slot in SLOTS]
    wanted = [peft_logits(path, a, p) for a, p in zip(chosen, PROMPTS, strict=True)]
    torch.testing.assert_close(logits, torch.cat(wanted), rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_replacements_take_no_memory_of_the_gpu(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    adapters = [make_adapter(path, tmp_path / f"{i}", seed=i, r=3 + i) for i in range(2)]
    with torch.device("cuda"):
        model = build_model(ModelConfig.from_dir(path), 64)
        load_model(model, path)
        before = torch.cuda.memory_allocated()
        slots = AdapterSlots(model, 4, 8)
    taken = torch.cuda.memory_allocated() - before
    read = [read_adapter(adapter, model, 8) for adapter in adapters]
    for turn in range(1000):
        slots.place(turn % 4, read[turn % 2])
    assert torch.cuda.memory_allocated() - before == taken


@torch.inference_mode()
@pytest.mark.parametrize("is_pinned", [True, False])
def test_placing_does_not_wait_for_the_gpu(is_pinned: bool, tmp_path: Path) -> None:
    """A step that was launched goes on; the next one finds the new adapter in the slot."""
    path = make_model(tmp_path / "model")
    with torch.device("cuda"):
        model = build_model(ModelConfig.from_dir(path), 64)
        load_model(model, path)
        slots = AdapterSlots(model, 2, 8)
    read = [read_adapter(make_adapter(path, tmp_path / f"{i}", seed=i), model, 8) for i in range(2)]
    if is_pinned:
        read = [{name: pair.pinned() for name, pair in each.items()} for each in read]
    for slot, each in enumerate(read):
        slots.place(slot, each)  # its memory is allocated
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # a second or so
    slots.place(0, read[1])
    assert not torch.cuda.current_stream().query(), "it has waited"
    for layer in model.modules():
        if isinstance(weights := getattr(layer, "low_rank", None), LowRank):
            assert torch.equal(weights.a[0], weights.a[1])
            assert torch.equal(weights.b[0], weights.b[1])
            assert torch.equal(weights.ranks[0], weights.ranks[1])
