"""Layers divided among ranks: each rank's parameters, and what all ranks compute together."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from conftest import make_model
from heads import make_head
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from thread_ranks import Meeting, ThreadRanks, on_ranks
from torch import nn
from transformers import AutoModelForCausalLM

from nanovllm.drafting.eagle3_config import HeadConfig
from nanovllm.drafting.eagle3_files import load_head
from nanovllm.formats.choice import format_of
from nanovllm.formats.dummy_values import dummy_values
from nanovllm.formats.scheme import Scheme
from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.plain import all_reduce as plain_sums
from nanovllm.kernels.plain import few_rows as plain_few
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.kernels.triton.table import triton_kernels
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.layers.context import Context, attending
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.experts import near_equal_slice
from nanovllm.layers.few_rows import compute_few_rows
from nanovllm.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.dummy import load_dummy
from nanovllm.models.loader import InFile, load_model
from nanovllm.models.parts import build_model

pytestmark = pytest.mark.usefixtures("one_thread")

T = TypeVar("T")
SIZES = range(1, 9)


def load(layer: Any, shard_id: int | None = None, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        layer.weight_loader(getattr(layer, name), tensor, shard_id)


@pytest.mark.parametrize("total", [1, 7, 8, 60, 128])
@pytest.mark.parametrize("size", SIZES)
def test_near_equal_slices_give_every_item_to_one_rank_evenly(size: int, total: int) -> None:
    """The parts differ by one item at most."""
    parts = [range(total)[near_equal_slice(total, Ranks(rank, size))] for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(total))
    lengths = set(map(len, parts))
    assert max(lengths) - min(lengths) == (total % size > 0)


# The layers, one by one


@pytest.mark.parametrize("size", SIZES)
def test_column_parallel_outputs_join_to_the_whole(size: int) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(840, 12), torch.randn(840), torch.randn(5, 12)

    def run(ranks: Ranks) -> torch.Tensor:
        layer = MergedColumnParallelLinear(12, [840], bias=True, ranks=ranks)
        load(layer, weight=weight, bias=bias)
        assert layer.weight is not None and layer.weight.shape == (840 // size, 12)
        return layer(x)

    outs = torch.cat(on_ranks(size, run), dim=1)
    torch.testing.assert_close(outs, x @ weight.T + bias)


@pytest.mark.parametrize("size", SIZES)
def test_row_parallel_outputs_are_the_sum_with_one_bias(size: int) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(12, 840), torch.randn(12), torch.randn(5, 840)

    def run(ranks: Ranks) -> torch.Tensor:
        layer = RowParallelLinear(840, 12, bias=True, ranks=ranks)
        load(layer, weight=weight, bias=bias)
        return layer(x[:, ranks.equal_slice(840)])

    total = torch.stack(on_ranks(size, run)).sum(0)
    torch.testing.assert_close(total, x @ weight.T + bias, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_a_norm_adds_up_what_the_ranks_return(size: int) -> None:
    torch.manual_seed(0)
    parts, residual = torch.randn(size, 5, 12), torch.randn(5, 12)
    expected = parts.sum(0) + residual

    def run(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        return RMSNorm(12, 1e-6, ranks).add(parts[ranks.rank], residual)

    for normed, total in on_ranks(size, run):
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(normed, RMSNorm(12, 1e-6)(expected))


@pytest.mark.parametrize("size", SIZES)
def test_merged_projections_are_each_cut_by_rank(size: int) -> None:
    """A rank's parts of gate and up belong together."""
    torch.manual_seed(0)
    gate, up = torch.randn(840, 7), torch.randn(840, 7)

    def run(ranks: Ranks) -> torch.Tensor:
        layer = MergedColumnParallelLinear(7, [840, 840], ranks=ranks)
        load(layer, 1, weight=up)
        load(layer, 0, weight=gate)
        assert layer.weight is not None
        return layer.weight.data

    for rank, weight in enumerate(on_ranks(size, run)):
        rows = slice(rank * 840 // size, (rank + 1) * 840 // size)
        assert torch.equal(weight, torch.cat([gate[rows], up[rows]]))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "kv_of_rank"),
    [
        (8, 8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (8, 4, 4, [[0], [1], [2], [3]]),
        (8, 2, 4, [[0], [0], [1], [1]]),
        (8, 1, 8, [[0]] * 8),
        (6, 3, 3, [[0], [1], [2]]),
        (24, 2, 6, [[0], [0], [0], [1], [1], [1]]),
        (14, 2, 1, [[0, 1]]),
    ],
)
def test_each_rank_has_the_kv_heads_of_its_queries(
    heads: int, kv_heads: int, size: int, kv_of_rank: list[list[int]]
) -> None:
    """So that its queries attend to the same kv heads as with one rank."""
    torch.manual_seed(0)
    dim = 3
    q, k, v = (torch.randn(n * dim, 5) for n in (heads, kv_heads, kv_heads))
    bias = torch.randn(kv_heads * dim)

    def run(ranks: Ranks) -> QKVParallelLinear:
        layer = QKVParallelLinear(5, dim, heads, kv_heads, bias=True, ranks=ranks)
        for shard_id, weight in enumerate((q, k, v)):
            load(layer, shard_id, weight=weight)
        load(layer, 2, bias=bias)
        return layer

    for rank, layer in enumerate(on_ranks(size, run)):
        assert layer.num_heads == heads // size
        assert layer.num_kv_heads == len(kv_of_rank[rank])
        own = [head * dim + i for head in kv_of_rank[rank] for i in range(dim)]
        rows = slice(rank * heads // size * dim, (rank + 1) * heads // size * dim)
        assert layer.weight is not None and layer.bias is not None
        assert torch.equal(layer.weight, torch.cat([q[rows], k[own], v[own]]))
        assert torch.equal(layer.bias[-len(own) :], bias[own])
        for head in range(rank * heads // size, (rank + 1) * heads // size):
            assert head * kv_heads // heads in kv_of_rank[rank]


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 259])
@pytest.mark.parametrize("size", SIZES)
def test_padding_of_the_vocabulary_has_no_effect(size: int, vocab_size: int) -> None:
    """Every token's row is on one rank, and rows without a token have no logits."""
    torch.manual_seed(0)
    table, head = torch.randn(vocab_size, 6), torch.randn(vocab_size, 6)
    ids, x = torch.arange(vocab_size).flip(0), torch.randn(4, 6)

    def run(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        embedding = VocabParallelEmbedding(vocab_size, 6, ranks)
        lm_head = ParallelLMHead(vocab_size, 6, ranks)
        embedding.weight.fill_(torch.nan)  # what is not loaded is not zero by itself
        assert lm_head.weight is not None
        lm_head.weight.fill_(torch.nan)
        load(embedding, weight=table)
        load(lm_head, weight=head)
        return embedding(ids), lm_head(x)

    outs = on_ranks(size, run)
    for embedded, _ in outs:
        assert torch.equal(embedded, table[ids])
    torch.testing.assert_close(outs[0][1], x @ head.T)


QUANTIZED = {
    "fp8": Scheme("fp8", 8, rows=1, columns=None, inputs="dynamic"),
    "fp8, blocks": Scheme("fp8", 8, rows=16, columns=16, inputs="dynamic"),
    "fp8, a scale": Scheme("fp8", 8, rows=None, columns=None, inputs="static"),
    "int8": Scheme("int8", 8, rows=1, columns=None, inputs="dynamic"),
    "packed": Scheme("packed", 4, rows=1, columns=32, zeros=True),
    "awq": Scheme("awq", 4, rows=1, columns=32, zeros=True),
    "gptq": Scheme("gptq", 4, rows=1, columns=32, zeros=True, ordered=True),
}


@pytest.mark.parametrize(
    "kernels", [PLAIN, cpu_kernels(), triton_kernels()], ids=lambda each: each.name
)
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_rank_may_hold_no_rows_of_a_quantized_head(
    name: str, kernels: Kernels, kernel_device: str
) -> None:
    """Of 9 rows, the last of 5 ranks holds one; of 8 ranks, the last three hold none."""
    weight_format = format_of(QUANTIZED[name])
    whole = ParallelLMHead(9, 64, weight_format=weight_format)
    device = kernel_device if kernels.name == "Triton" else "cpu"
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(device)

    def logits(ranks: Ranks) -> torch.Tensor:
        with torch.device(device):
            head = ParallelLMHead(9, 64, ranks, weight_format)
        for param, all_of_it in zip(head.parameters(), whole.parameters(), strict=True):
            values = dummy_values(all_of_it, torch.Generator().manual_seed(0))
            head.weight_loader(param, values, None)
        head.bind(Backend(TorchBackend(), kernels))
        return head.linear(x, None)

    expected = logits(ALONE)
    assert expected.std() > 0.05
    for size in (5, 8):
        parts = [logits(Ranks(rank, size)) for rank in range(size)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected)


def test_layers_refuse_tensors_of_a_ranks_shape() -> None:
    """A checkpoint holds whole tensors."""
    ranks = ThreadRanks(1, 2, Meeting(2))
    layers: list[Any] = [
        MergedColumnParallelLinear(4, [8], ranks=ranks),
        RowParallelLinear(8, 4, ranks=ranks),
        VocabParallelEmbedding(8, 4, ranks),
        ParallelLMHead(8, 4, ranks),
    ]
    for layer in layers:
        with pytest.raises(ValueError, match="the model needs"):
            layer.weight_loader(layer.weight, torch.ones(layer.weight.shape), None)


# The whole model


def build(path: Path, ranks: Ranks, whole_experts: bool = False) -> CausalLM:
    model = build_model(ModelConfig.from_dir(path), 64, ranks, whole_experts)
    load_model(model, path)
    for module in model.modules():
        if hasattr(module, "backend"):
            module.attention_backend = TorchBackend()
    return model.eval()


def logits_of(model: CausalLM, prompts: list[list[int]]) -> torch.Tensor:
    """Logits of every token of a prefill, without a cache."""
    return model.compute_logits(states_of(model, prompts)[0])


def states_of(model: CausalLM, prompts: list[list[int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The hidden states of every token of a prefill, without a cache, and what is tapped."""
    return in_prefill(prompts, model)


def in_prefill(prompts: list[list[int]], run: Callable[[torch.Tensor, torch.Tensor], T]) -> T:
    """What `run` makes of the prompts' tokens and positions in a prefill without a cache."""
    lens = torch.tensor([0, *(len(p) for p in prompts)], dtype=torch.int32)
    ends = lens.cumsum(0, dtype=torch.int32)
    ids = torch.tensor([t for p in prompts for t in p])
    positions = torch.cat([torch.arange(len(p)) for p in prompts])
    nowhere = torch.full((len(ids),), -1)
    longest = int(lens.max())
    context = Context(
        True, nowhere, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest,
        max_seqlen_k=longest,
    )  # fmt: skip
    with attending(context, TorchBackend()):
        return run(ids, positions)


WHOLE_EXPERTS = "MoE, whole experts"  # 9, which no size divides, of width 30
MODELS: dict[str, dict[str, Any]] = {
    "grouped": dict(num_attention_heads=8, num_key_value_heads=2),
    "tied": dict(num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True),
    "biases": dict(num_attention_heads=8, num_key_value_heads=4, attention_bias=True),
    "Llama, biases": dict(
        family="Llama",
        num_attention_heads=8,
        num_key_value_heads=8,
        attention_bias=True,
        mlp_bias=True,
    ),
    "Mistral": dict(family="Mistral", num_attention_heads=8, num_key_value_heads=4),
    "Qwen2": dict(family="Qwen2", num_attention_heads=8, num_key_value_heads=2),
    "SmolLM3": dict(
        family="SmolLM3", num_attention_heads=8, num_key_value_heads=2, no_rope_layers=[0, 1]
    ),
    "Phi3": dict(family="Phi3", num_attention_heads=8, num_key_value_heads=2),
    "MoE": dict(
        family="Qwen3Moe",
        num_attention_heads=8,
        num_key_value_heads=4,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=2,
    ),
    WHOLE_EXPERTS: dict(
        family="Qwen3Moe",
        num_attention_heads=8,
        num_key_value_heads=4,
        num_experts=9,
        num_experts_per_tok=3,
        moe_intermediate_size=30,
        decoder_sparse_step=2,
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_logits_of_ranks_equal_those_of_one(name: str, size: int, tmp_path: Path) -> None:
    """Up to the order of float32 sums. No size divides the 259 tokens."""
    path = make_model(tmp_path, **MODELS[name])
    prompts = [[(7 * i) % 259 for i in range(20)], [258], [5, 6, 7]]
    with torch.inference_mode():
        expected = logits_of(build(path, ALONE), prompts)
    whole = name == WHOLE_EXPERTS
    outs = on_ranks(size, lambda ranks: logits_of(build(path, ranks, whole), prompts))
    assert outs[0].shape == expected.shape == (24, 259)
    torch.testing.assert_close(outs[0], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(outs[0].argmax(-1), expected.argmax(-1))


class PlainPeers:
    """What `PeerKernels` computes, by plain PyTorch, for threads."""

    def __init__(self, ranks: ThreadRanks) -> None:
        self.ranks = ranks

    def most_rows(self, like: torch.Tensor) -> int:
        return 99

    def embedding(self, ids: torch.Tensor, table: torch.Tensor, first: int) -> torch.Tensor:
        return plain_sums.embedding(ids, self.ranks.exchange(table))

    def add_rms_norm(self, x: torch.Tensor, *rest: Any) -> Any:
        return plain_sums.add_rms_norm(self.ranks.exchange(x), *rest)

    def add_scaled(self, x: torch.Tensor, *rest: Any) -> Any:
        return plain_sums.add_scaled(self.ranks.exchange(x), *rest)


PROMPT = [(7 * i) % 259 for i in range(20)]
PLAIN_FEW: Any = SimpleNamespace(
    linear=plain_few.scaled_linear, gated=plain_few.scaled_gated, product=F.linear, most_rows=99
)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("name", ["tied", "Llama, biases"])
def test_kernels_between_ranks_sum_what_one_rank_computes(
    name: str, few: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each bias is added once, and each sum is made, with the kernels for few rows and without."""
    path = make_model(tmp_path, **MODELS[name])
    prompts = [[(7 * i) % 259 for i in range(20)], [258], [5, 6, 7]]
    operands = property(lambda linear: (linear.weight, linear.added_bias))
    monkeypatch.setattr(LinearBase, "operand_and_bias", operands)

    def logits(ranks: Any) -> torch.Tensor:
        model = build(path, ranks)
        if ranks is not ALONE:
            ranks.peer_kernels = PlainPeers(ranks)
        if few and ranks is not ALONE:
            decoder = model.model
            decoder.forward = lambda ids, positions, rows=None: compute_few_rows(
                PLAIN_FEW, [*decoder.layers], decoder.embed_tokens(ids),
                decoder.rotations(positions), decoder.norm, decoder.taps,
            )  # fmt: skip
        return logits_of(model, prompts)

    with torch.inference_mode():
        expected = logits(ALONE)
    for out in on_ranks(2, logits)[:1]:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["grouped", "Llama, biases"])
def test_taps_are_the_residuals_before_layers(
    name: str, size: int, few: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers calls them hidden states. A rank has the sums over all ranks."""
    path = make_model(tmp_path, **MODELS[name] | {"num_hidden_layers": 4})
    operands = property(lambda linear: (linear.weight, linear.added_bias))
    monkeypatch.setattr(LinearBase, "operand_and_bias", operands)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        states = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states

    def taps(ranks: Ranks) -> list[torch.Tensor]:
        model = build(path, ranks)
        decoder: Any = model.model
        decoder.taps = (3, 0, 2)
        if size > 1:
            ranks.peer_kernels = PlainPeers(ranks)
        if few:
            kernels = SimpleNamespace(**vars(PLAIN_FEW), add=plain_few.add_linear)
            decoder.forward = lambda ids, positions, rows=None: compute_few_rows(
                kernels, [*decoder.layers], decoder.embed_tokens(ids),
                decoder.rotations(positions), decoder.norm, decoder.taps,
            )  # fmt: skip
        return states_of(model, [PROMPT])[1]

    for tapped in on_ranks(size, taps):
        for seen, layer in zip(tapped, (3, 0, 2), strict=True):
            torch.testing.assert_close(seen, states[layer][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [2, 4])
def test_an_eagle3_head_on_ranks_equals_that_of_one(size: int, tmp_path: Path) -> None:
    """All ranks have the states, rank 0 the logits. No size divides the 43 tokens it knows."""
    model_dir = make_model(tmp_path / "model", **MODELS["grouped"])
    path = make_head(tmp_path / "head", model_dir, draft_vocab_size=43, own=True)
    torch.manual_seed(0)
    residuals = list(torch.randn(3, 20, 64))

    def guess(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        head = load_head(path, HeadConfig.from_dir(path), 64, ranks)
        head.bind(Backend(TorchBackend(), PLAIN))
        assert head.embed_tokens is not None
        embedded = head.embed_tokens(torch.tensor(PROMPT))
        normed, states = in_prefill(
            [PROMPT], lambda _, positions: head.guess(embedded, positions, head.fuse(residuals))
        )
        return normed, states, head.compute_logits(normed)

    (expected,) = on_ranks(1, guess)
    outs = on_ranks(size, guess)
    for out in outs:
        for own, one in zip(out[:2], expected, strict=False):
            torch.testing.assert_close(own, one, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outs[0][2], expected[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["grouped", WHOLE_EXPERTS])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_only_its_part(
    name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the host would need memory for the whole model for each rank."""
    path = make_model(tmp_path, **MODELS[name])
    read: list[int] = []
    take = InFile.__getitem__

    def counting(self: InFile, index: Any) -> torch.Tensor:
        tensor = take(self, index)
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(InFile, "__getitem__", counting)
    model: nn.Module = build(path, ThreadRanks(1, size, Meeting(size)), name == WHOLE_EXPERTS)
    held = sum(param.numel() for param in model.parameters())
    with safe_open(path / "model.safetensors", "pt") as file:
        whole = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert held >= sum(read) >= held - 2 * 64 * size  # except rows that pad the vocabulary
    assert sum(read) < whole / size * 1.1


def test_every_rank_checks_the_shapes_of_all_experts(tmp_path: Path) -> None:
    """Ranks must agree about a damaged file, whichever experts they hold."""
    path = make_model(tmp_path, **MODELS[WHOLE_EXPERTS])
    files = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.8.up_proj.weight"
    save_file(files | {name: torch.ones(29, 64)}, path / "model.safetensors")
    for rank in range(2):
        with pytest.raises(ValueError, match=re.escape(f"{name!r} has shape (29, 64)")):
            build(path, ThreadRanks(rank, 2, Meeting(2)), whole_experts=True)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [2, 4])
def test_dummy_weights_are_parts_of_one_model(name: str, size: int, tmp_path: Path) -> None:
    """A random model must not depend on the number of ranks."""
    config = ModelConfig.from_dir(make_model(tmp_path, **MODELS[name]))
    prompts = [[(7 * i) % 259 for i in range(20)], [258], [5, 6, 7]]
    with torch.device("meta"):
        whole = build_model(config, max_positions=64)

    def logits(ranks: Ranks) -> torch.Tensor:
        model = build_model(config, 64, ranks, name == WHOLE_EXPERTS).eval()
        load_dummy(model, whole, seed=3)
        for param in model.parameters():
            param.data *= 10  # or every logit is almost zero
        return logits_of(model, prompts)

    with torch.inference_mode():
        expected = logits(ALONE)
    assert expected.std() > 0.5
    error = 1e-4 * max(1.0, float(expected.std()))  # the weights are large, and sums cancel
    torch.testing.assert_close(on_ranks(size, logits)[0], expected, rtol=1e-4, atol=error)


def expected_part(
    name: str, full: torch.Tensor, heads: tuple[int, int], ranks: Ranks, whole_experts: bool
) -> Any:
    """A rank's part of the full model's parameter, by definition; heads are 16 wide."""
    rank, size = ranks.rank, ranks.size
    if "norm" in name or name.endswith(("mlp.gate.weight", "down_proj.bias")):
        return full
    if whole_experts and ".experts." in name:
        return full[9 * rank // size : 9 * (rank + 1) // size]
    if name.endswith("experts.down_proj"):
        return full.chunk(size, dim=2)[rank]
    if name.endswith("experts.gate_up_proj"):
        return torch.cat([half.chunk(size, dim=1)[rank] for half in full.chunk(2, dim=1)], dim=1)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return full.chunk(size, dim=1)[rank]
    if name.endswith("o_proj.bias"):
        return full
    if "embed_tokens" in name or "lm_head" in name:
        num_rows = -(-259 // size)
        part = full[rank * num_rows : (rank + 1) * num_rows]
        if name == "lm_head.weight":
            return part
        return torch.cat([part, part.new_zeros(num_rows - len(part), part.shape[1])])
    if "gate_up" in name:
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    num_heads, num_kv_heads = heads
    q, k, v = full.split([16 * num_heads, 16 * num_kv_heads, 16 * num_kv_heads])
    mine = range(rank * num_heads // size, (rank + 1) * num_heads // size)
    kv = sorted({head * num_kv_heads // num_heads for head in mine})
    kv_rows = [16 * head + row for head in kv for row in range(16)]
    return torch.cat([q.chunk(size)[rank], k[kv_rows], v[kv_rows]])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_rank_loads_its_own_rows(name: str, size: int, tmp_path: Path) -> None:
    """Every parameter of every rank, element for element, from several files."""
    path = make_model(tmp_path, shards=True, **MODELS[name])
    heads = MODELS[name]["num_attention_heads"], MODELS[name]["num_key_value_heads"]
    full, whole = build(path, ALONE), name == WHOLE_EXPERTS
    for rank in range(size):
        ranks = ThreadRanks(rank, size, Meeting(size))
        for key, param in build(path, ranks, whole).named_parameters():
            expected = expected_part(key, full.get_parameter(key), heads, ranks, whole)
            assert torch.equal(param, expected), f"{key} of rank {rank}"
