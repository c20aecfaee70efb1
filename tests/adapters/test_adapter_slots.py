"""Slots: what is placed, cleared and replaced; and the memory that they take."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import write_adapter
from conftest import make_model
from thread_ranks import Meeting, ThreadRanks

from nanovllm.adapters.peft import read_adapter
from nanovllm.adapters.slots import AdapterSlots, adapter_bytes
from nanovllm.kernels.low_rank import LowRank
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.context import Context, adapter_rows, attending, keep_adapters_of
from nanovllm.layers.lora import group_rows
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_model

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
    model = CausalLM(ModelConfig.from_dir(path), 64, **options)
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
    torch.testing.assert_close(first[:64], x[0] @ large.pairs[Q].a.T @ large.pairs[Q].b)
    torch.testing.assert_close(second[64:96], x[1] @ small.pairs[K].a.T @ small.pairs[K].b)
    assert not first[64:].any() and not second[:64].any() and not second[96:].any()
    assert add(model, gate_up, x, [0, 1])[0, 96:].any()
    assert not add(model, gate_up, x, [1, 1]).any()
    slots.clear(0)
    assert not add(model, qkv, x, [0, 0]).any()


def test_a_thousand_replacements_take_no_memory(model_path: Path, tmp_path: Path) -> None:
    """And leave the slots as a single one would."""
    model = load(model_path)
    slots = AdapterSlots(model, 3, 8)
    adapters = [
        read_adapter(write_adapter(tmp_path / f"{i}", shapes, rank=3 + i, seed=i), model, 8)
        for i, shapes in enumerate((LARGE, SMALL, LARGE))
    ]
    places = [[each.data_ptr() for each in (w.a, w.b, w.ranks)] for w in low_ranks(model)]
    num_bytes = slots.num_bytes
    for turn in range(1000):
        if turn % 7 == 0:
            slots.clear(turn % 3)
        slots.place(turn % 3, adapters[turn % 2])
    for slot in range(3):
        slots.place(slot, adapters[slot])
    again = [[each.data_ptr() for each in (w.a, w.b, w.ranks)] for w in low_ranks(model)]
    assert again == places and slots.num_bytes == num_bytes
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    out = add(model, DOWN, x, [0, 1, 2])
    for row, adapter in enumerate(adapters):
        pair = adapter.pairs[DOWN]
        torch.testing.assert_close(out[row], x[row] @ pair.a.T @ pair.b)


def test_the_bytes_are_known_before_the_slots_exist(model_path: Path) -> None:
    model = load(model_path)
    sizes = [adapter_bytes(model, n, 8) for n in (1, 2, 4)]
    assert sizes[2] == 2 * sizes[1] == 4 * sizes[0]
    assert not low_ranks(model)
    assert AdapterSlots(model, 4, 8).num_bytes == sizes[2]
    some = adapter_bytes(model, 4, 8, ["q_proj"])
    # Two layers: A of three projections and B with 128 outputs, and three ranks.
    assert some == 2 * 4 * (4 * (24 * 64 + 8 * 128) + 4 * 3)


def test_ranks_share_what_their_layers_share(model_path: Path) -> None:
    """All of column-parallel A and row-parallel B is on every rank; of the rest each has a part."""
    whole = adapter_bytes(load(model_path), 4, 8, ["down_proj"])
    ranks = ThreadRanks(1, 2, Meeting(2))
    part = adapter_bytes(load(model_path, ranks=ranks), 4, 8, ["down_proj"])
    assert whole == 2 * 4 * (4 * (8 * 96 + 8 * 64) + 4)
    assert part == 2 * 4 * (4 * (8 * 48 + 8 * 64) + 4)


def test_only_layers_of_the_kinds_have_room(model_path: Path) -> None:
    model = load(model_path)
    AdapterSlots(model, 2, 8, ["q_proj", "lm_head"])
    names = [n for n, layer in model.named_modules() if getattr(layer, "low_rank", None)]
    assert names == [f"model.layers.{i}.self_attn.qkv_proj" for i in range(2)] + ["lm_head"]


def test_steps_without_adapters_call_no_kernel_of_theirs(model_path: Path) -> None:
    """Neither do those with some, in models without room: draft models share a step's context."""
    model = load(model_path)
    x = torch.randn(2, 96)
    plain = model.get_submodule(DOWN)(x)
    context = Context(True, torch.tensor([-1, -1]))
    with attending(context, _NoPlan()):
        assert adapter_rows() is None
    rows = group_rows(torch.tensor([0, -1], dtype=torch.int32), 2, PLAIN)
    with attending(Context(True, torch.tensor([-1, -1]), adapters=rows), _NoPlan()):
        assert torch.equal(model.get_submodule(DOWN)(x), plain)
        keep_adapters_of(torch.tensor([1]))
        kept = adapter_rows()
        assert kept is not None and kept.slots.tolist() == [-1]
    assert adapter_rows() is None


class _NoPlan:
    def plan(self, context: Context) -> None:
        pass
