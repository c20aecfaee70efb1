"""Prefills with rows that belong to no sequence: their results are 0, and others do not change."""

from typing import Any

import pytest
import torch

from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.plain import prefill_attention as plain

BLOCK = 16
QUERIES = [1, 70, 0, 33]
CONTEXTS = [9, 70, 0, 130]  # the third sequence is unused, as is the last one of a padded step


def plans(tables: torch.Tensor, kind: str, num_rows: int, unused: int) -> Any:
    """A step of the sequences, and `unused` more without queries."""
    lengths = [torch.tensor([0, *x] + [0] * unused) for x in (QUERIES, CONTEXTS)]
    cu_q, cu_k = (x.cumsum(0, dtype=torch.int32).to(tables.device) for x in lengths)
    padded = torch.cat([tables, tables[:1].expand(unused, -1)])
    if kind == "plain":
        return plain.plan_prefill(cu_q, cu_k, padded, BLOCK)
    from nanovllm.kernels.triton.attention.prefill_plan import plan_prefill

    return plan_prefill(cu_q, cu_k, padded, num_rows)


@pytest.mark.parametrize("padding", [1, 64])
@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("kind", ["plain", "triton"])
def test_rows_of_no_sequence_are_zero(
    kind: str, group: int, padding: int, kernel_device: str
) -> None:
    torch.manual_seed(padding)
    blocks = [-(-n // BLOCK) for n in CONTEXTS]
    tables = torch.zeros(4, max(blocks), dtype=torch.int32, device=kernel_device)
    for row, number in enumerate(blocks):
        tables[row, :number] = torch.arange(number) + sum(blocks[:row])
    k, v = torch.randn(2, sum(blocks), BLOCK, 2, 64, device=kernel_device)
    kv, total = KVLayer(k, v, 0.125), sum(QUERIES)
    q = torch.randn(total + padding, 2 * group, 64, device=kernel_device)
    own = torch.full((len(q), 2, 64), torch.nan, device=kernel_device)
    if kind == "plain":
        attention: Any = plain.prefill_attention
    else:
        from nanovllm.kernels.triton.attention.prefill_attention import prefill_attention

        attention = prefill_attention
    alone = attention(q[:total], own[:total], own[:total], kv, plans(tables, kind, total, 0))
    out = attention(q, own, own, kv, plans(tables, kind, len(q), 1))
    assert torch.equal(out[:total], alone)
    assert out.shape == q.shape and not out[total:].any(), "NaN is not zero, too"


@pytest.mark.parametrize("padding", [1, 40])
@pytest.mark.parametrize("heads", [3, 40])
def test_latent_rows_of_no_sequence_are_zero(heads: int, padding: int, kernel_device: str) -> None:
    from nanovllm.kernels.triton.attention.latent_prefill import latent_prefill

    torch.manual_seed(padding)
    tables = torch.arange(4 * 9, dtype=torch.int32, device=kernel_device).view(4, 9)
    rows = torch.randn(36, BLOCK, 1, 80, device=kernel_device)
    kv, total = KVLayer(rows, rows, 0.125, value_width=64), sum(QUERIES)
    q = torch.randn(total + padding, heads, 80, device=kernel_device)
    own = torch.full((len(q), 1, 80), torch.nan, device=kernel_device)
    alone = latent_prefill(q[:total], own[:total], own[:total], kv, plans(tables, "t", total, 0))
    out = latent_prefill(q, own, own, kv, plans(tables, "t", len(q), 1))
    assert torch.equal(out[:total], alone)
    assert out.shape == (len(q), heads, 64) and not out[total:].any()
