"""Copies that wait for each other: memory has the values that were given last."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file

from nanovllm import LLM
from nanovllm.weights.copies import MOST_WAITING, SMALL, Copies
from nanovllm.weights.places import Place, places_of

pytestmark = pytest.mark.usefixtures("one_thread")

ATTENTION = "model.layers.0.self_attn."
NORM = "model.norm.weight"


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_tensors_of_any_kind_are_copied() -> None:
    """Small and large ones, of several types, and parts whose rows are not beside each other."""
    generator = torch.Generator().manual_seed(0)
    large = SMALL // 2 // 64
    shapes = [(3, 5), (large, 64), (1,), (large + 1, 64), (0, 4), ()]
    copies, expected = Copies(), []
    for number, shape in enumerate(shapes):
        for dtype in (torch.bfloat16, torch.float32):
            memory = zeros(*shape)
            tensor = torch.randn(shape, generator=generator).to(dtype)
            copies.add([f"{number} {dtype}"], [Place(memory, ...)], tensor)
            expected.append((memory, tensor))
    columns, matrix = zeros(4, 3), torch.randn(4, 9, generator=generator)
    copies.add(["columns"], [Place(columns, (slice(0, 4), slice(3, 6)))], matrix)
    rows = zeros(4, 9).t()
    copies.add(["rows"], [Place(rows, ...)], matrix.t())
    copies.make()
    expected += [(columns, matrix[:, 3:6]), (rows, matrix.t())]
    assert all(torch.equal(memory, tensor.bfloat16()) for memory, tensor in expected)


def test_small_ones_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group has one type, or PyTorch would copy its tensors one by one."""
    calls: list[tuple[int, set[torch.dtype]]] = []
    copy = torch._foreach_copy_

    def count(targets: list[torch.Tensor], sources: list[torch.Tensor], **options: Any) -> None:
        calls.append((len(targets), {tensor.dtype for tensor in [*targets, *sources]}))
        copy(targets, sources, **options)

    monkeypatch.setattr(torch, "_foreach_copy_", count)
    copies = Copies()
    for number in range(100):
        dtype = torch.float32 if number % 4 == 0 else torch.bfloat16
        copies.add([str(number)], [Place(zeros(2, 3), ...)], zeros(2, 3, dtype=dtype))
    copies.make()
    mixed = {torch.bfloat16, torch.float32}
    assert sorted(calls, key=str) == [(25, mixed), (75, {torch.bfloat16})]
    calls.clear()
    half = torch.empty(SMALL // 2, dtype=torch.uint8)
    for number in range(2 * MOST_WAITING // len(half)):
        copies.add([str(number)], [Place(half, ...)], half)
    assert calls, "so many wait that the memory counts"


def test_what_is_given_last_stays() -> None:
    """In groups of two types, one after the other, and in one kernel at the same time."""
    copies, memory = Copies(), zeros(4)
    ones = torch.ones(4)
    copies.add(["other"], [Place(zeros(4), ...)], ones.bfloat16())
    copies.add(["q", "k"], [Place(memory, ...)], 2 * ones)
    copies.add(["k"], [Place(memory[2:], ...)], 3 * ones[2:].bfloat16())
    copies.make()
    assert memory.tolist() == [2, 2, 3, 3]


def test_a_whole_tensor_is_not_indexed() -> None:
    memory = zeros(4, 6)
    whole = places_of(lambda values: memory.copy_(values[0:4, 0:6]), (4, 6))
    part = places_of(lambda values: memory[:2].copy_(values[2:4, 0:6]), (4, 6))
    order = torch.tensor([1, 0, 2, 3])
    moved = places_of(lambda values: memory.copy_(values[order]), (4, 6))
    tensor = torch.arange(24).view(4, 6)
    assert whole[0].part(tensor) is tensor
    assert torch.equal(part[0].part(tensor), tensor[2:])
    assert torch.equal(moved[0].part(tensor), tensor[order])


@pytest.mark.parametrize("size", [1, 2])
def test_a_generator_may_have_a_tensor_twice(size: int, tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    fused = torch.cat([tensors[f"{ATTENTION}{each}_proj.weight"] for each in "qkv"])
    with LLM(
        path, device="cpu", dtype="bfloat16", cpu_kvcache_gib=0.02, max_model_len=64,
        attention_backend="torch", tensor_parallel_size=size,
    ) as llm:  # fmt: skip
        query = tensors[f"{ATTENTION}q_proj.weight"]
        given = [
            (NORM, torch.full((64,), 2.0)), (f"{ATTENTION}q_proj.weight", query),
            (f"{ATTENTION}qkv_proj.weight", 2 * fused.bfloat16()),
            (f"{ATTENTION}q_proj.weight", 3 * query), (NORM, torch.full((64,), 3.0).bfloat16()),
        ]  # fmt: skip
        llm.update_weights(iter(given))
        values = llm.get_weights([name for name, _ in given])
    assert values[NORM].tolist() == [3] * 64
    expected = 2 * fused.bfloat16()
    expected[: len(query)] = (3 * query).bfloat16()
    assert torch.equal(values[f"{ATTENTION}qkv_proj.weight"], expected)
