"""Blocks of latent attention and shared experts by kernels for few rows, against their layers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.formats.format import PLAIN_FORMATS
from nanovllm.kernels.operands.routing import Routing
from nanovllm.kernels.plain import few_rows
from nanovllm.layers.backend import TorchBackend
from nanovllm.layers.block import Block, pre_norms
from nanovllm.layers.context import Context, attending
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.few_rows import compute_few_rows
from nanovllm.layers.few_rows_forms import operands_of
from nanovllm.layers.gated_latent_attention import GatedLatentAttention
from nanovllm.layers.latent_attention import GrowingLatentAttention, LatentAttention
from nanovllm.layers.latent_sizes import LatentSizes
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.mixer import ROPE
from nanovllm.layers.query_growth import GROWTH, QueryGrowth
from nanovllm.layers.ranks import ALONE
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.layers.rotary_embedding import get_rope
from nanovllm.layers.shared_experts import SharedSparseMLP
from nanovllm.models.decoder import Decoder

pytestmark = pytest.mark.usefixtures("one_thread")

EPS, TOKENS, HIDDEN = 1e-3, 5, 12
FEW: Any = SimpleNamespace(
    linear=few_rows.scaled_linear, gated=few_rows.scaled_gated, add=few_rows.add_linear,
    add_experts=few_rows.add_experts, weigh=few_rows.weigh,
)  # fmt: skip
ROUTING = Routing(per_token=2, normalized=True)


def block(kind: type[LatentAttention], query_rank: int | None, gated: bool = False) -> Block:
    sizes = LatentSizes(
        num_heads=4, query_rank=query_rank, rank=6, plain=8, rotated=4, value=10, has_bias=True,
        interleaved=True, scale=0.3,
    )  # fmt: skip
    make = Build(ALONE, PLAIN_FORMATS, 64)
    experts = SharedSparseMLP(make, HIDDEN, 6, 3, ROUTING, shared_size=7, is_gated=gated)
    norms = pre_norms(RMSNorm(HIDDEN, EPS), RMSNorm(HIDDEN, EPS))
    return Block(make, norms, kind(make, HIDDEN, sizes), experts)


@pytest.mark.parametrize("kind", [LatentAttention, GrowingLatentAttention, GatedLatentAttention])
@pytest.mark.parametrize("query_rank", [None, 5])
@pytest.mark.parametrize("gated", [False, True])
def test_kernels_for_few_rows_compute_what_the_layers_do(
    kind: type[LatentAttention], query_rank: int | None, gated: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With factors of queries, gates of heads, the shared layer and its gate, and biases."""
    make, embedding = Build(ALONE, PLAIN_FORMATS, 64), VocabParallelEmbedding(11, HIDDEN)
    rope = get_rope(4, 64, 64, {"rope_type": "default", "rope_theta": 100.0})
    blocks = [block(kind, query_rank, gated) for _ in range(2)]
    ropes = {ROPE: rope, GROWTH: QueryGrowth(0.5, 2, 64)}
    decoder = Decoder(make, embedding, blocks, RMSNorm(HIDDEN, EPS), ropes)
    for param in decoder.parameters():
        param.data.uniform_(-1.0, 1.0)
    ids, positions = torch.tensor([3, 1, 4, 1, 5]), torch.arange(TOKENS)
    ends = torch.tensor([0, TOKENS], dtype=torch.int32)
    context = Context(True, torch.full((TOKENS,), -1), cu_seqlens_q=ends, cu_seqlens_k=ends)
    operands = property(lambda linear: (linear.weight, linear.added_bias))
    with torch.inference_mode(), attending(context, TorchBackend(4)):
        expected, _ = decoder(ids, positions)
        monkeypatch.setattr(LinearBase, "operand_and_bias", operands)
        for each in blocks:
            gate, experts = each.parts.feed_forward.gate, each.parts.feed_forward.experts
            gate.kernel = gate.weight.detach()
            experts.operands = experts.gate_up_proj, experts.down_proj
            assert None not in operands_of(each)
        rotations, layers = decoder.rotations(positions), list(decoder.layers)
        computed = compute_few_rows(FEW, layers, embedding(ids), rotations, decoder.norm, ())
    assert computed is not None
    torch.testing.assert_close(computed[0], expected, rtol=1e-4, atol=1e-4)


def test_a_quantized_gate_of_the_shared_layer_is_not_left_out() -> None:
    """These kernels do not read it, so the feed-forward part is called as it is."""
    for kind, number in (("plain", 7), ("quantized", 4)):
        made = block(LatentAttention, 5, gated=True)
        made.parts.feed_forward.gate.kernel = torch.empty(0)
        for linear in made.modules():
            if isinstance(linear, LinearBase):
                linear.matrix = SimpleNamespace(operand=linear.weight)
        if kind == "quantized":
            made.parts.feed_forward.shared[1].matrix = SimpleNamespace(operand=object())
        assert len(operands_of(made)) == number
