"""Models with adapters in their slots, compared with peft: several adapters in one step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import (
    EVERY_LINEAR,
    MOE,
    MOE_SHAPES,
    make_adapter,
    merge,
    peft_logits,
    write_adapter,
)
from conftest import make_model
from thread_ranks import on_ranks

from nanovllm.adapters.peft import read_adapter
from nanovllm.adapters.slot_memory import AdapterSlots
from nanovllm.formats.choice import QuantizedFormats
from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.kernels.triton.table import triton_kernels
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.layers.context import Context, attending, reading
from nanovllm.layers.lora import group_rows
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.loader import load_model
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")

ODD: dict[str, Any] = dict(
    hidden_size=52, intermediate_size=76, num_attention_heads=6, num_key_value_heads=2, head_dim=10
)
PROMPTS = [[1, 2, 3, 4, 5], [7], [8, 9, 10], [11, 12, 13, 14, 15, 16, 17], [3, 1]]
SLOTS = [1, -1, 0, 2, 1]  # of the prompts


@torch.inference_mode()
def load(
    path: Path, kernels: Kernels = PLAIN, ranks: Ranks = ALONE, whole_experts: bool = False
) -> CausalLM:
    model = build_model(ModelConfig.from_dir(path), 64, ranks, whole_experts)
    load_model(model, path)
    model.bind(Backend(TorchBackend(), kernels))
    return model.eval()


@torch.inference_mode()
def logits_of(
    model: CausalLM,
    num_slots: int,
    slots: list[int],
    rows: list[int] | None = None,
    kernels: Kernels = PLAIN,
) -> torch.Tensor:
    """The logits of all prompts' tokens, or only of those of some `rows`, in one step.

    With `num_slots` 0 it has no adapters.
    """
    lengths = torch.tensor(list(map(len, PROMPTS)))
    ends = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    of_rows = torch.tensor(slots, dtype=torch.int32).repeat_interleave(lengths)
    adapters = group_rows(of_rows, num_slots, kernels) if num_slots else None
    context = Context(
        is_prefill=True, slot_mapping=torch.full((len(of_rows),), -1), cu_seqlens_q=ends,
        cu_seqlens_k=ends, max_seqlen_q=int(lengths.max()), max_seqlen_k=int(lengths.max()),
    )  # fmt: skip
    ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
    positions = torch.cat([torch.arange(int(n)) for n in lengths])
    chosen = None if rows is None else torch.tensor(rows)
    with attending(context, TorchBackend(), {"adapters": adapters}):
        hidden, _ = model(ids, positions, chosen)
    if adapters and chosen is not None:
        adapters = adapters.at(chosen)
    with reading({"adapters": adapters}):
        return model.compute_logits(hidden)


def expected(path: Path, adapters: list[Path], slots: list[int]) -> torch.Tensor:
    chosen = [adapters[slot] if slot >= 0 else None for slot in slots]
    return torch.cat(
        [peft_logits(path, a, prompt) for a, prompt in zip(chosen, PROMPTS, strict=True)]
    )


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all linear layers": ({}, {}),
    "odd shapes": (ODD, dict(r=3, lora_alpha=5)),
    "biases": (dict(family="Qwen2"), {}),
    "all-linear": (dict(family="Llama"), dict(target_modules="all-linear")),
    "fused": (
        dict(family="Phi3", rope_scaling=None),
        dict(target_modules=["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]),
    ),
    "patterns": (
        ODD,
        dict(
            rank_pattern={
                "q_proj": 7, "layers.1.mlp.down_proj": 1, r"layers\.0\..*(k|gate)_proj": 5,
            },
            alpha_pattern={"v_proj": 3, "layers.0.self_attn.o_proj": 11},
        ),
    ),
    "rsLoRA": (ODD, dict(use_rslora=True)),
    "a regular expression": ({}, dict(target_modules=r".*layers\.1\..*(q|down)_proj")),
    "excluded modules": ({}, dict(exclude_modules=["o_proj", "model.layers.0.mlp.up_proj"])),
    "some layers": ({}, dict(layers_to_transform=[1], layers_pattern="layers")),
    "embedding and head": ({}, dict(target_modules=[*EVERY_LINEAR, "embed_tokens", "lm_head"])),
    "tied embedding": (
        dict(tie_word_embeddings=True), dict(target_modules=["embed_tokens", "q_proj"])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_with_several_adapters_equal_peft(name: str, tmp_path: Path) -> None:
    shape, options = CASES[name]
    path = make_model(tmp_path / "model", **shape)
    paths = [make_adapter(path, tmp_path / f"{i}", seed=i, **options) for i in range(3)]
    model = load(path)
    slots = AdapterSlots(model, 3, 8)
    for slot, adapter in enumerate(paths):
        slots.place(slot, read_adapter(adapter, model, 8))
    wanted = expected(path, paths, SLOTS)
    torch.testing.assert_close(logits_of(model, 3, SLOTS), wanted, rtol=1e-4, atol=1e-4)
    some = [0, 4, 5, 8, 15, 17]
    torch.testing.assert_close(logits_of(model, 3, SLOTS, some), wanted[some], rtol=1e-4, atol=1e-4)
    base = expected(path, paths, [-1] * 5)
    assert (wanted - base)[:5].abs().amax() > 0.05, "adapters without effect"


# Experts, compared with checkpoints that have the adapters merged: peft names them differently.

KERNELS = {"plain": PLAIN, "Triton": triton_kernels(), "C++": cpu_kernels()}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], torch.Tensor]:
    """A model of experts, adapters for it, and the logits with them in SLOTS."""
    folder = tmp_path_factory.mktemp("experts")
    path = make_model(folder / "model", **MOE)
    adapters = [write_adapter(folder / f"{i}", MOE_SHAPES, seed=i) for i in range(3)]
    merged = [merge(path, adapter, folder / f"merged {i}") for i, adapter in enumerate(adapters)]
    of_prompts = zip(SLOTS, PROMPTS, strict=True)
    logits = [peft_logits(merged[slot] if slot >= 0 else path, None, p) for slot, p in of_prompts]
    assert (logits[0] - peft_logits(path, None, PROMPTS[0])).abs().amax() > 0.05
    return path, adapters, torch.cat(logits)


def place_all(model: CausalLM, adapters: list[Path]) -> AdapterSlots:
    slots = AdapterSlots(model, len(adapters), 8)
    for slot, path in enumerate(adapters):
        slots.place(slot, read_adapter(path, model, 8))
    return slots


@pytest.mark.parametrize("name", KERNELS)
def test_experts_with_adapters_equal_merged_ones(
    name: str, experts: tuple[Path, list[Path], torch.Tensor]
) -> None:
    if name == "Triton" and torch.cuda.is_available():
        pytest.skip("tensors are on the CPU")
    path, adapters, wanted = experts
    model = load(path, KERNELS[name])
    place_all(model, adapters)
    logits = logits_of(model, 3, SLOTS, kernels=KERNELS[name])
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_rows_without_an_adapter_are_the_same_to_the_bit(
    family: str, experts: tuple[Path, list[Path], torch.Tensor], tmp_path: Path
) -> None:
    """Beside rows that have one, and in a model without room for any."""
    path, adapters, _ = experts
    if family == "Qwen3":
        path = make_model(tmp_path / "model")
        adapters = [make_adapter(path, tmp_path / f"{i}", seed=i) for i in range(3)]
    model = load(path)
    without = logits_of(model, 0, SLOTS)
    place_all(model, adapters)
    assert torch.equal(logits_of(model, 0, SLOTS), without)
    mixed = logits_of(model, 3, SLOTS)
    lengths = torch.tensor(list(map(len, PROMPTS)))
    of_rows = torch.tensor(SLOTS).repeat_interleave(lengths)
    assert torch.equal(mixed[of_rows < 0], without[of_rows < 0])
    assert not torch.equal(mixed[of_rows >= 0], without[of_rows >= 0])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_experts_on_ranks_add_up(
    size: int, whole: bool, experts: tuple[Path, list[Path], torch.Tensor]
) -> None:
    path, adapters, wanted = experts

    def logits(ranks: Ranks) -> torch.Tensor:
        model = load(path, ranks=ranks, whole_experts=whole)
        place_all(model, adapters)
        return logits_of(model, 3, SLOTS)

    torch.testing.assert_close(on_ranks(size, logits)[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("size", [2, 4])
def test_parts_on_ranks_add_up(size: int, heads: tuple[int, int], tmp_path: Path) -> None:
    """With fewer key heads than ranks, too; 259 tokens are not a multiple of the ranks."""
    shape = dict(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    path = make_model(tmp_path / "model", **shape)
    options = dict(target_modules=[*EVERY_LINEAR, "embed_tokens", "lm_head"])
    adapters = [make_adapter(path, tmp_path / f"{i}", seed=i, **options) for i in range(3)]

    def logits(ranks: Ranks) -> torch.Tensor:
        model = load(path, ranks=ranks)
        place_all(model, adapters)
        return logits_of(model, 3, SLOTS)

    wanted = expected(path, adapters, SLOTS)
    torch.testing.assert_close(on_ranks(size, logits)[0], wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_adapters_of_quantized_layers_multiply_rows_that_are_not_rounded(
    quantization: str, tmp_path: Path
) -> None:
    """Rows that the kernel before a layer would round stay as they are for its adapters."""
    if torch.cuda.is_available():
        pytest.skip("tensors are on the CPU")
    path = make_model(tmp_path / "model")
    adapter = make_adapter(path, tmp_path / "adapter")
    config, kernels = ModelConfig.from_dir(path, quantization), triton_kernels()
    model = build_model(config, 64, formats=QuantizedFormats(quantization=config.quantization))
    load_model(model, path)
    model.bind(Backend(TorchBackend(), kernels))
    read = read_adapter(adapter, model, 8)
    AdapterSlots(model, 1, 8).place(0, read)
    name = "model.layers.0.mlp.down_proj"
    layer, pair = model.get_submodule(name), read[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 96, generator=generator)
    assert (layer.rounding(x) is not None) == (quantization == "fp8")
    without = layer(x)
    rows = group_rows(torch.zeros(40, dtype=torch.int32), 1, kernels)
    context = Context(True, torch.full((40,), -1), torch.tensor([0, 40]), torch.tensor([0, 40]))
    with attending(context, TorchBackend(), {"adapters": rows}):
        assert layer.rounding(x) is None
        found = layer(x)
    torch.testing.assert_close(found - without, x @ pair.a.T @ pair.b, rtol=1e-3, atol=1e-4)
