"""Rows of projections whose heads differ in size, on several ranks; soft caps of routers."""

from typing import Any

import pytest
import torch
from transformers import LagunaConfig
from transformers.models.laguna.modeling_laguna import LagunaTopKRouter

from nanovllm.formats.format import DENSE, PLAIN_FORMATS
from nanovllm.kernels.operands.routing import Routing
from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.heads_linear import HeadsLinear
from nanovllm.layers.layer import Build
from nanovllm.layers.output_gate import OutputGate
from nanovllm.layers.ranks import Ranks
from nanovllm.layers.sparse_mlp import ExpertRouter

HIDDEN, HEADS = 5, KeysAndValues(4, 2, 6)
PARTS = {"q": 4 * 6, "k": 2 * 6, "v": 2 * 3, "g": 4 * 2}  # values of 3, two gates for each head


def of_rank(rank: int, size: int, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    make = Build(Ranks(rank, size), PLAIN_FORMATS, 16)
    layer = HeadsLinear(make, HIDDEN, HEADS, DENSE, value_dim=3, gates=2)
    weight: Any = layer.get_parameter("weight")
    for index, matrix in enumerate(matrices):
        layer.weight_loader(weight, matrix, index)
    parts = layer.num_heads * 6, layer.num_kv_heads * 6, layer.num_kv_heads * 3, layer.num_heads * 2
    return [*weight.detach().split(parts)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_have_the_rows_of_their_heads(size: int) -> None:
    """With four ranks, two have the same key head; a wrong size would shift all later rows."""
    matrices = [torch.randn(rows, HIDDEN) for rows in PARTS.values()]
    found = [of_rank(rank, size, matrices) for rank in range(size)]
    keys = [*range(0, size, max(1, size // 2))]  # one rank for each key head
    for index, matrix in enumerate(matrices):
        ranks = keys if index in (1, 2) else range(size)
        assert torch.equal(torch.cat([found[rank][index] for rank in ranks]), matrix)


def test_biases_next_to_gates_are_refused() -> None:
    """They would be made, and then dropped with the projections without gates."""
    make = Build(Ranks(0, 1), PLAIN_FORMATS, 16)
    with pytest.raises(ValueError, match="biases of queries, keys and values next to gates"):
        OutputGate(make, HIDDEN, HEADS, gates=1, qkv_bias=True)


@torch.inference_mode()
def test_a_soft_cap_of_router_outputs_is_that_of_transformers() -> None:
    """It changes the shares, and with biases the choice."""
    config = LagunaConfig(
        hidden_size=16, num_experts=8, num_experts_per_tok=3, moe_router_logit_softcapping=0.5
    )
    theirs = LagunaTopKRouter(config).eval()
    routing = Routing(
        per_token=3, normalized=True, scores="sigmoid", has_bias=True, soft_cap=0.5
    )  # fmt: skip
    ours = ExpertRouter(16, 8, routing)
    for name in ("weight", "e_score_correction_bias"):
        value = torch.randn(theirs.get_parameter(name).shape)
        theirs.get_parameter(name).copy_(value)
        ours.get_parameter(name).copy_(value)
    x = torch.randn(100, 16)
    (shares, ids), (_, their_shares, their_ids) = ours.select(x), theirs(x)
    zeros = torch.zeros(100, 8)
    torch.testing.assert_close(
        zeros.scatter(1, ids, shares), zeros.scatter(1, their_ids, their_shares)
    )


def test_a_soft_cap_is_not_left_to_the_fused_kernel() -> None:
    assert not Routing(per_token=2, normalized=True, soft_cap=30.0).is_fused
