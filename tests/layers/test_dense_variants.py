"""Parts of dense families that differ from Llama's, against their formulas."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_ranks import on_ranks

from nanovllm.formats.format import PLAIN_FORMATS
from nanovllm.kernels.plain import few_rows
from nanovllm.kernels.plain.norm_rope_store import Rope
from nanovllm.layers.backend import TorchBackend
from nanovllm.layers.block import Block, pre_norms
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.context import Context, attending
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.feed_forward import MLP
from nanovllm.layers.few_rows import compute_few_rows
from nanovllm.layers.few_rows_forms import operands_of
from nanovllm.layers.full_width_norm import full_width_norms
from nanovllm.layers.interleaved import InterleavedAttention
from nanovllm.layers.late_head_norms import LateHeadNorms
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.mixer import ROPE, SelfAttention
from nanovllm.layers.query_growth import GROWTH, GrowingQueries, QueryGrowth
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.rotary_embedding import get_rope
from nanovllm.models.decoder import Decoder

pytestmark = pytest.mark.usefixtures("one_thread")

EPS, TOKENS, HIDDEN = 1e-3, 5, 12
DEFAULT = {"rope_type": "default", "rope_theta": 100.0}


def build(ranks: Ranks = ALONE, max_positions: int = 64) -> Build:
    return Build(ranks, PLAIN_FORMATS, max_positions)


@pytest.mark.parametrize(("num_kv_heads", "size"), [(8, 1), (2, 2), (2, 4), (2, 8), (4, 8)])
def test_one_norm_spans_the_heads_of_all_ranks(num_kv_heads: int, size: int) -> None:
    """Key heads that several ranks have are counted once."""
    num_heads, dim = 8, 4
    weights = [torch.rand(n * dim) + 0.5 for n in (num_heads, num_kv_heads)]
    heads = [torch.randn(TOKENS, n, dim) for n in (num_heads, num_kv_heads)]

    def run(ranks: Ranks) -> list[torch.Tensor]:
        norms = full_width_norms(build(ranks), KeysAndValues(num_heads, num_kv_heads, dim), EPS)
        out = []
        for norm, weight, x in zip(norms, weights, heads, strict=True):
            norm.weight_loader(norm.weight, weight, None)
            first = norm.part.start // dim
            here = x[:, first : first + len(norm.weight) // dim]
            out.append(norm(here.reshape(-1, dim)).view(here.shape))
        return out

    expected = []
    for x, weight in zip(heads, weights, strict=True):
        rows = x.flatten(1)
        mean = rows.square().mean(1, keepdim=True)
        expected.append((rows * torch.rsqrt(mean + EPS) * weight).view(x.shape))
    results = on_ranks(size, run)
    for rank, (queries, keys) in enumerate(results):
        first = rank * num_kv_heads // size
        torch.testing.assert_close(keys, expected[1][:, first : first + keys.shape[1]])
        share = num_heads // size
        torch.testing.assert_close(queries, expected[0][:, rank * share : (rank + 1) * share])


def run_prefill(attention: SelfAttention, x: torch.Tensor, ropes: Any) -> torch.Tensor:
    ends = torch.tensor([0, len(x)], dtype=torch.int32)
    context = Context(True, torch.full((len(x),), -1), cu_seqlens_q=ends, cu_seqlens_k=ends)
    with torch.inference_mode(), attending(context, TorchBackend(4)):
        return attention.mix(x, ropes)


def interleaved(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate the pairs (2i, 2i + 1) of heads [T, H, D] as complex numbers."""
    cos, sin = rope
    rotated = 2 * cos.shape[-1]
    pairs = torch.view_as_complex(x[..., :rotated].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    return torch.cat([turned, x[..., rotated:]], dim=-1)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("part", [1.0, 0.5])
def test_neighbours_are_rotated_as_pairs(part: float, has_norms: bool) -> None:
    """Norms of heads come first, with weights in the order of the files."""
    heads, num_heads = KeysAndValues(4, 2, 8), 4
    rope = get_rope(8, 64, 64, {**DEFAULT, "partial_rotary_factor": part})
    norms = (RMSNorm(8, EPS), RMSNorm(8, EPS)) if has_norms else None
    attention = InterleavedAttention(
        build(), HIDDEN, heads, rotated=int(8 * part), head_norms=norms
    )
    attention.qkv_proj.weight.data.normal_()
    for norm in norms or ():
        norm.weight.data.uniform_(0.5, 1.5)
    x, positions = torch.randn(TOKENS, HIDDEN), torch.arange(3, 3 + TOKENS)
    out = run_prefill(attention, x, {ROPE: rope(positions)})
    qkv = (x @ attention.qkv_proj.weight.T).unflatten(-1, (-1, 8))
    q, k, v = qkv.split([num_heads, 2, 2], dim=1)
    if norms:
        q, k = norms[0](q.reshape(-1, 8)).view(q.shape), norms[1](k.reshape(-1, 8)).view(k.shape)
    q, k = interleaved(q, rope(positions)), interleaved(k, rope(positions))
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(2, 1)) * 8**-0.5
    scores += torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
    expected = torch.einsum("hts,shd->thd", scores.softmax(-1), v.repeat_interleave(2, 1))
    torch.testing.assert_close(out, expected.flatten(1))


def test_without_a_rope_nothing_is_reordered() -> None:
    heads = KeysAndValues(4, 2, 8)
    plain = SelfAttention(build(), HIDDEN, heads, rope=None)
    other = InterleavedAttention(build(), HIDDEN, heads, rotated=8, rope=None)
    plain.qkv_proj.weight.data.normal_()
    other.qkv_proj.weight.data.copy_(plain.qkv_proj.weight)
    x = torch.randn(TOKENS, HIDDEN)
    assert torch.equal(run_prefill(plain, x, {}), run_prefill(other, x, {}))


FEW: Any = SimpleNamespace(
    linear=few_rows.scaled_linear, gated=few_rows.scaled_gated, add=few_rows.add_linear
)
KINDS: dict[type[SelfAttention], dict[str, Any]] = {
    InterleavedAttention: dict(rotated=8), GrowingQueries: {}, LateHeadNorms: {},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_for_few_rows_call_what_a_kind_of_attention_does(
    kind: type[SelfAttention], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, decode steps on a GPU would leave it out."""
    make = build()

    def block() -> Block:
        norms = (RMSNorm(8, EPS), RMSNorm(8, EPS)) if kind is LateHeadNorms else None
        heads, options = KeysAndValues(4, 2, 8), KINDS[kind] | dict(head_norms=norms)
        mixer, mlp = kind(make, HIDDEN, heads, **options), MLP(make, HIDDEN, 2 * HIDDEN)
        return Block(make, pre_norms(RMSNorm(HIDDEN, EPS), RMSNorm(HIDDEN, EPS)), mixer, mlp)

    embedding = VocabParallelEmbedding(11, HIDDEN)
    ropes = {ROPE: get_rope(8, 64, 64, DEFAULT), GROWTH: QueryGrowth(0.5, 2, 64)}
    decoder = Decoder(make, embedding, [block(), block()], RMSNorm(HIDDEN, EPS), ropes)
    for param in decoder.parameters():
        param.data.uniform_(-1.0, 1.0)
    ids, positions = torch.tensor([3, 1, 4, 1, 5]), torch.arange(TOKENS)
    ends = torch.tensor([0, TOKENS], dtype=torch.int32)
    context = Context(True, torch.full((TOKENS,), -1), cu_seqlens_q=ends, cu_seqlens_k=ends)
    operands = property(lambda linear: (linear.weight, linear.added_bias))
    with torch.inference_mode(), attending(context, TorchBackend(4)):
        expected, _ = decoder(ids, positions)
        monkeypatch.setattr(LinearBase, "operand_and_bias", operands)
        blocks: list[Any] = [*decoder.layers]
        assert all(None not in operands_of(each) for each in blocks)
        rotations = decoder.rotations(positions)
        computed = compute_few_rows(FEW, blocks, embedding(ids), rotations, decoder.norm, ())
    assert computed is not None
    torch.testing.assert_close(computed[0], expected)
