"""Linear layers of few rows with adapters, against plain PyTorch.

On a device, or interpreted where there is none.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapter_files import make_adapter
from conftest import make_model

from nanovllm.adapters.peft import read_adapter
from nanovllm.adapters.slot_memory import AdapterSlots
from nanovllm.kernels.operands.low_rank import LowRank
from nanovllm.kernels.operands.scaled import Scaled
from nanovllm.kernels.plain.silu_and_mul import silu_and_mul
from nanovllm.kernels.table import PLAIN
from nanovllm.kernels.triton.linear import few_rows as module
from nanovllm.kernels.triton.lora import adapted_linear
from nanovllm.kernels.triton.lora.adapted_few_rows import AdaptedFewRows, with_counters
from nanovllm.kernels.triton.table import triton_kernels
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.layers.context import Context, attending
from nanovllm.layers.few_rows import compute_few_rows, with_adapters
from nanovllm.layers.lora import group_rows
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import load_model
from nanovllm.models.parts import build_model

pytestmark = [
    pytest.mark.usefixtures("one_thread", "four_processors"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="tiles are copied on Hopper GPUs alone",
    ),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS, HIDDEN, INNER = 1e-6, 64, 96
bf16 = torch.bfloat16
NEAR = 3e-2  # of the largest number: bfloat16 rounds several times, by up to 0.4%; 2e-2 was met


@pytest.fixture(scope="module")
def four_processors() -> Iterator[None]:
    """Four, and as many more as tiles of a weight leave to adapters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "num_multiprocessors", lambda device: 4)
        patch.setattr(adapted_linear, "num_multiprocessors", lambda device: 9)
        patch.setattr(adapted_linear, "SPARE", 5)
        yield


@pytest.fixture(params=["one kernel", "three kernels"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was launched as one kernel; in the second case nothing can be."""
    found: list[Any] = []
    launch = adapted_linear.launch

    def spy(*args: Any) -> torch.Tensor:
        found.append(args)
        return launch(*args)

    monkeypatch.setattr(adapted_linear, "launch", spy)
    if request.param == "three kernels":
        monkeypatch.setattr(adapted_linear, "divide", lambda *args: None)
    return found


def low_rank(size_in: int, sizes: tuple[int, ...], generator: torch.Generator) -> LowRank:
    """Two slots. The second one has no adapter for the last projection."""

    def randn(*size: int) -> torch.Tensor:
        return (0.2 * torch.randn(size, generator=generator)).to(bf16).to(DEVICE)

    ranks = torch.full((2, len(sizes)), 5, dtype=torch.int32, device=DEVICE)
    ranks[1, -1] = 0
    return LowRank(randn(2, len(sizes) * 6, size_in), randn(2, 6, sum(sizes)), ranks, sizes)


def added(x: torch.Tensor, weights: LowRank, slots: torch.Tensor) -> torch.Tensor:
    """What adapters add, by the plain kernels in float32."""
    wide = LowRank(weights.a.float(), weights.b.float(), weights.ranks, weights.sizes)
    out = torch.zeros(len(x), sum(weights.sizes), device=DEVICE)
    PLAIN.lora_up(PLAIN.lora_down(x.float(), wide, slots), wide, slots, out, None)
    return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 20, 33])
def test_layers_of_few_rows_have_their_adapters_additions(
    rows: int, bias: bool, launches: list[Any], request: pytest.FixtureRequest
) -> None:
    generator = torch.Generator().manual_seed(rows)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(bf16).to(DEVICE)

    scaled = Scaled(randn(rows, HIDDEN), HIDDEN * torch.rand(rows, 3).to(DEVICE) + 1, EPS)
    normed = scaled.normed()
    qkv, gate_up, down = randn(192, HIDDEN), randn(2 * INNER, HIDDEN), randn(HIDDEN, INNER)
    biases = [randn(192), randn(2 * INNER), randn(HIDDEN)] if bias else [None] * 3
    low_ranks = {
        id(qkv): low_rank(HIDDEN, (64, 64, 64), generator),
        id(gate_up): low_rank(HIDDEN, (INNER, INNER), generator),
        id(down): low_rank(INNER, (HIDDEN,), generator),
    }
    slots = torch.randint(-1, 2, (rows,), generator=generator).int().to(DEVICE)
    groups = triton_kernels().group_rows(slots, 2)

    def few() -> AdaptedFewRows:
        return AdaptedFewRows(most_rows=64, groups=groups, adapters=with_counters(low_ranks))

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return wide + added(x, low_ranks[id(weight)], slots)

    def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
        assert (found.float() - wanted).abs().amax() <= NEAR * wanted.abs().amax()

    near(few().linear(scaled, qkv, biases[0]), linear(normed, qkv, biases[0]))
    wanted = silu_and_mul(linear(normed, gate_up, biases[1]))
    near(few().gated(scaled, gate_up, biases[1]), wanted)
    x, residual, norm = randn(rows, INNER), randn(rows, HIDDEN), randn(HIDDEN)
    wanted = linear(x, down, biases[2])
    near(few().product(x, down, biases[2]), wanted)
    wanted += residual.float()
    total, after = few().add(x, down, biases[2], residual, norm, EPS)
    near(total, wanted)
    near(after.product, wanted * norm.float())
    assert len(launches) == (4 if "one kernel" in request.node.name else 0)


@pytest.mark.parametrize("rows", [3, 12])
def test_ranks_of_many_groups_are_added_in_steps(
    rows: int, launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group has its own rank, of the largest 70; one group has no rows, one no adapter."""
    monkeypatch.setattr(adapted_linear, "MOST_STEPS", 100)
    generator = torch.Generator().manual_seed(rows)

    def randn(*size: int) -> torch.Tensor:
        return (0.2 * torch.randn(size, generator=generator)).to(bf16).to(DEVICE)

    ranks = torch.tensor([[70, 5], [9, 33], [0, 0], [70, 70], [16, 1], [17, 64]]).int().to(DEVICE)
    low = LowRank(randn(6, 2 * 70, HIDDEN), randn(6, 70, 2 * INNER), ranks, (INNER, INNER))
    for group, of_group in enumerate(ranks.tolist()):
        for projection, rank in enumerate(of_group):  # nothing beyond a rank is read
            low.a[group, projection * 70 + rank : (projection + 1) * 70] = torch.nan
    slots = (torch.tensor([0, 5, 2, 3, 4]).repeat(3)[:rows]).int().to(DEVICE)
    groups = triton_kernels().group_rows(slots, 6)
    scaled = Scaled(randn(rows, HIDDEN), HIDDEN * torch.rand(rows, 3).to(DEVICE) + 1, EPS)
    weight = randn(2 * INNER, HIDDEN)
    adapters = with_counters({id(weight): low})
    few = AdaptedFewRows(most_rows=64, groups=groups, adapters=adapters)
    normed = scaled.normed().float()
    wide = normed @ weight.float().T
    for row, slot in enumerate(slots.tolist()):
        for projection, rank in enumerate(ranks[slot].tolist()):
            a = low.a[slot, projection * 70 : projection * 70 + rank].float()
            columns = slice(projection * INNER, (projection + 1) * INNER)
            wide[row, columns] += normed[row] @ a.T @ low.b[slot, :rank, columns].float()
    found, wanted = few.gated(scaled, weight), silu_and_mul(wide)
    assert (found.float() - wanted).abs().amax() <= NEAR * wanted.abs().amax()


def test_a_decoder_of_few_rows_equals_one_layer_after_the_other(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    adapters = [make_adapter(path, tmp_path / f"{i}", seed=i) for i in range(2)]
    kernels = triton_kernels()
    with torch.inference_mode(), torch.device(DEVICE):
        torch.set_default_dtype(bf16)
        try:
            model = build_model(ModelConfig.from_dir(path), 64)
        finally:
            torch.set_default_dtype(torch.float32)
        load_model(model, path)
        model.bind(Backend(TorchBackend(), kernels), few_rows=True)
        slots = AdapterSlots(model, 2, 8)
        for slot, adapter in enumerate(adapters):
            slots.place(slot, read_adapter(adapter, model, 8))
        ids, positions = torch.arange(5), torch.tensor([0, 1, 2, 0, 1])
        ends = torch.tensor([0, 3, 5], dtype=torch.int32)
        rows = group_rows(torch.tensor([1, 1, 1, 0, -1], dtype=torch.int32), 2, kernels)
        context = Context(True, torch.full((5,), -1), ends, ends, 3, 3)
        decoder: Any = model.model
        few = with_adapters(decoder.few_rows, decoder.layers, rows)
        assert isinstance(few, AdaptedFewRows) and len(few.adapters) == 2 * 4
        with attending(context, TorchBackend(), {"adapters": rows}):
            wanted, _ = model(ids, positions)
            ropes = decoder.rotations(positions)
            x, layers = decoder.embed_tokens(ids), [*decoder.layers]
            found, _ = compute_few_rows(few, layers, x, ropes, decoder.norm, decoder.taps)
        with attending(context, TorchBackend()):
            without, _ = model(ids, positions)
    scale = wanted.float().abs().amax()
    assert (found - wanted).float().abs().amax() <= 0.06 * scale
    assert (without - wanted).float().abs().amax() > 0.2 * scale
