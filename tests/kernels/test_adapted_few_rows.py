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
from nanovllm.adapters.slots import AdapterSlots
from nanovllm.kernels.low_rank import LowRank
from nanovllm.kernels.plain.few_rows import Scaled
from nanovllm.kernels.plain.silu_and_mul import silu_and_mul
from nanovllm.kernels.table import PLAIN, triton_kernels
from nanovllm.kernels.triton import few_rows as module
from nanovllm.kernels.triton.adapted_few_rows import AdaptedFewRows
from nanovllm.layers.attention.torch_backend import TorchBackend
from nanovllm.layers.backend import Backend
from nanovllm.layers.context import Context, attending
from nanovllm.layers.lora import group_rows
from nanovllm.models.adapted import with_adapters
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_model

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


@pytest.fixture(scope="module")
def four_processors() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "num_multiprocessors", lambda device: 4)
        yield


def low_rank(size_in: int, sizes: tuple[int, ...], generator: torch.Generator) -> LowRank:
    """Two slots, the second of which has no adapter for the last projection."""

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
def test_layers_of_few_rows_have_their_adapters_additions(rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(bf16).to(DEVICE)

    scaled = Scaled(randn(rows, HIDDEN), HIDDEN * torch.rand(rows, 3).to(DEVICE) + 1, EPS)
    normed = scaled.normed()
    qkv, gate_up, down = randn(128, HIDDEN), randn(2 * INNER, HIDDEN), randn(HIDDEN, INNER)
    biases = [randn(128), randn(2 * INNER), randn(HIDDEN)] if bias else [None] * 3
    low_ranks = {
        id(qkv): low_rank(HIDDEN, (64, 32, 32), generator),
        id(gate_up): low_rank(HIDDEN, (INNER, INNER), generator),
        id(down): low_rank(INNER, (HIDDEN,), generator),
    }
    slots = torch.randint(-1, 2, (rows,), generator=generator).int().to(DEVICE)
    groups = triton_kernels().group_rows(slots, 2)
    few = AdaptedFewRows(most_rows=64, groups=groups, low_ranks=low_ranks)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return wide + added(x, low_ranks[id(weight)], slots)

    def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
        assert (found.float() - wanted).abs().amax() <= 2e-2 * wanted.abs().amax()

    near(few.linear(scaled, qkv, biases[0]), linear(normed, qkv, biases[0]))
    wanted = silu_and_mul(linear(normed, gate_up, biases[1]))
    near(few.gated(scaled, gate_up, biases[1]), wanted)
    x, residual, norm = randn(rows, INNER), randn(rows, HIDDEN), randn(HIDDEN)
    wanted = linear(x, down, biases[2])
    near(few.product(x, down, biases[2]), wanted)
    wanted += residual.float()
    total, after = few.add(x, down, biases[2], residual, norm, EPS)
    near(total, wanted)
    near(after.product, wanted * norm.float())


def test_a_decoder_of_few_rows_equals_one_layer_after_the_other(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    adapters = [make_adapter(path, tmp_path / f"{i}", seed=i) for i in range(2)]
    kernels = triton_kernels()
    with torch.inference_mode(), torch.device(DEVICE):
        torch.set_default_dtype(bf16)
        try:
            model = CausalLM(ModelConfig.from_dir(path), 64)
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
        context = Context(True, torch.full((5,), -1), ends, ends, 3, 3, adapters=rows)
        decoder: Any = model.model
        few = with_adapters(decoder.few_rows, decoder.layers, rows)
        assert isinstance(few, AdaptedFewRows) and len(few.low_ranks) == 2 * 4
        with attending(context, TorchBackend()):
            wanted, _ = model(ids, positions)
            rope = decoder.rotary_emb(positions)
            found, _ = decoder._forward_few(few, decoder.embed_tokens(ids), rope)
        base = Context(True, torch.full((5,), -1), ends, ends, 3, 3)
        with attending(base, TorchBackend()):
            without, _ = model(ids, positions)
    scale = wanted.float().abs().amax()
    assert (found - wanted).float().abs().amax() <= 0.06 * scale
    assert (without - wanted).float().abs().amax() > 0.2 * scale
