"""Slots: what is placed and replaced; and the memory that they take."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import write_adapter
from conftest import make_model
from thread_ranks import Meeting, ThreadRanks

from nanovllm.adapters.peft import read_adapter
from nanovllm.adapters.slot_memory import AdapterSlots
from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.context import Context, adapter_rows, attending, keep_adapters_of
from nanovllm.layers.lora import group_rows
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_model
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
UP, K = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.k_proj"
LARGE = {Q: (64, 64), DOWN: (64, 96), UP: (96, 64)}
SMALL = {K: (32, 64), DOWN: (64, 96)}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@torch.inference_mode()
def load(path: Path, **options: Any) -> CausalLM:
    model = build_model(ModelConfig.from_dir(path), 64, **options)
    load_model(model, path)
    return model


def low_ranks(model: CausalLM) -> list[LowRank]:
    return [layer.low_rank for layer in model.modules() if getattr(layer, "low_rank", None)]


def add(model: CausalLM, name: str, x: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """What the adapters in the rows' slots add to the output of a layer."""
    low_rank = model.get_submodule(name).low_rank
    assert isinstance(low_rank, LowRank)
    rows = group_rows(torch.tensor(slots, dtype=torch.int32), len(low_rank.a), PLAIN)
    return rows.add(x, low_rank, lambda: torch.zeros(len(x), low_rank.b.shape[2]))


def test_a_slot_has_only_what_was_placed_last(model_path: Path, tmp_path: Path) -> None:
    """Of an adapter with a larger rank and other modules nothing remains."""
    model = load(model_path)
    slots = AdapterSlots(model, 2, 8)
    large = read_adapter(write_adapter(tmp_path / "large", LARGE, rank=7), model, 8)
    small = read_adapter(write_adapter(tmp_path / "small", SMALL, rank=2), model, 8)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    qkv, gate_up = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"
    assert not add(model, qkv, x, [0, 1]).any(), "slots are empty at first"
    slots.place(0, large)
    slots.place(1, large)
    slots.place(1, small)
    first, second = add(model, qkv, x, [0, 1])
    torch.testing.assert_close(first[:64], x[0] @ large[Q].a.T @ large[Q].b)
    torch.testing.assert_close(second[64:96], x[1] @ small[K].a.T @ small[K].b)
    assert not first[64:].any() and not second[:64].any() and not second[96:].any()
    assert add(model, gate_up, x, [0, 1])[0, 96:].any()
    assert not add(model, gate_up, x, [1, 1]).any()


def test_a_thousand_replacements_take_no_memory(model_path: Path, tmp_path: Path) -> None:
    """And leave the slots as a single one would."""
    model = load(model_path)
    slots = AdapterSlots(model, 3, 8)
    adapters = [
        read_adapter(write_adapter(tmp_path / f"{i}", shapes, rank=3 + i, seed=i), model, 8)
        for i, shapes in enumerate((LARGE, SMALL, LARGE))
    ]
    places = [[each.data_ptr() for each in (w.a, w.b, w.ranks)] for w in low_ranks(model)]
    for turn in range(1000):
        slots.place(turn % 3, adapters[turn % 2])
    for slot in range(3):
        slots.place(slot, adapters[slot])
    again = [[each.data_ptr() for each in (w.a, w.b, w.ranks)] for w in low_ranks(model)]
    assert again == places
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    out = add(model, DOWN, x, [0, 1, 2])
    for row, adapter in enumerate(adapters):
        pair = adapter[DOWN]
        torch.testing.assert_close(out[row], x[row] @ pair.a.T @ pair.b)


def num_bytes(path: Path, name: str, num_slots: int, **options: Any) -> int:
    """The memory of slots of rank 8 in a layer."""
    model = load(path, **options)
    AdapterSlots(model, num_slots, 8)
    low_rank = model.get_submodule(name).low_rank
    assert isinstance(low_rank, LowRank)
    return sum(each.nbytes for each in (low_rank.a, low_rank.b, low_rank.ranks))


def test_slots_take_the_memory_that_the_largest_rank_needs(model_path: Path) -> None:
    """A of three projections and B with 128 outputs, and three ranks."""
    qkv = "model.layers.0.self_attn.qkv_proj"
    for number in (1, 2, 4):
        assert num_bytes(model_path, qkv, number) == number * 4 * (24 * 64 + 8 * 128 + 3)


def test_ranks_share_what_their_layers_share(model_path: Path) -> None:
    """All of column-parallel A and row-parallel B is on every rank; of the rest each has a part."""
    whole = num_bytes(model_path, DOWN, 4)
    part = num_bytes(model_path, DOWN, 4, ranks=ThreadRanks(1, 2, Meeting(2)))
    assert whole == 4 * 4 * (8 * 96 + 8 * 64 + 1)
    assert part == 4 * 4 * (8 * 48 + 8 * 64 + 1)


def test_steps_without_adapters_call_no_kernel_of_theirs(model_path: Path) -> None:
    """Neither do those with some, in models without room: draft models share a step's context."""
    model = load(model_path)
    x = torch.randn(2, 96)
    plain = model.get_submodule(DOWN)(x)
    context = Context(True, torch.tensor([-1, -1]))
    with attending(context, _NoPlan()):
        assert adapter_rows() is None
    rows = group_rows(torch.tensor([0, -1], dtype=torch.int32), 2, PLAIN)
    with attending(context, _NoPlan(), {"adapters": rows}):
        assert torch.equal(model.get_submodule(DOWN)(x), plain)
        keep_adapters_of(torch.tensor([1]))
        kept = adapter_rows()
        assert kept is not None and kept.slots.tolist() == [-1]
    assert adapter_rows() is None


class _NoPlan:
    def plan(self, context: Context) -> None:
        pass
