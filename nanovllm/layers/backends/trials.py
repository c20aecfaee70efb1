"""Trials of a backend: run its attention and its kernels on one token, to see whether they work."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from nanovllm.kernels.kv_layer import CODES, SCALES, KVLayer
from nanovllm.kernels.plain.read_table import DraftState, TableState
from nanovllm.kernels.table import Kernels
from nanovllm.layers.backend import AttentionBackend, AttentionSpec
from nanovllm.layers.context import Context


def try_attention(backend: AttentionBackend, spec: AttentionSpec) -> None:
    """One token from the step's own keys, one from the cache, and one to decode. Syncs."""
    q, k = (
        torch.zeros(1, heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
        for heads in (spec.num_heads, spec.num_kv_heads)
    )
    kv = _one_block(spec, backend.block_size)
    ends = torch.tensor([0, 1], dtype=torch.int32, device=spec.device)
    # As aligned as the engine's tensors, as kernels are compiled for an alignment.
    slots, tables, lens = ends[:1].long(), ends[None, :1].clone(), ends[1:].clone()
    prefill = Context(
        True, slots, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=1, max_seqlen_k=1
    )
    prefills = [prefill, dataclasses.replace(prefill, block_tables=tables)]
    for context in prefills[backend.reads_cache :]:
        backend.plan(context)
        backend.prefill(q, k, k, kv, context)
    decode = Context(False, slots, context_lens=lens, block_tables=tables)
    backend.plan(decode)
    backend.decode(q, kv, decode)
    if spec.device.type == "cuda":
        torch.cuda.synchronize(spec.device)


def try_kernels(kernels: Kernels, specs: Sequence[AttentionSpec]) -> Kernels:
    """Run on one token the kernels that every model uses, to check that they compile here."""
    spec = specs[0]
    options: dict[str, Any] = {"dtype": spec.dtype, "device": spec.device}
    x = torch.zeros(1, 2 * spec.head_dim, **options)
    weight = torch.ones(2 * spec.head_dim, **options)
    kernels.rms_norm(x, weight, 1.0)
    kernels.add_rms_norm(x, x, weight, 1.0)
    kernels.silu_and_mul(x)
    ones = torch.ones(1, device=spec.device)
    kernels.sample(x, ones, ones.long())
    one, word = ones.long(), ones.int()
    no_drafts = DraftState(word[None], word, word, word[None], word[None], word)
    table = TableState(one, one, word, ones, word - 1, word[None], no_drafts)
    kernels.read_table(table, 1, 1, 2, 1)
    for each in specs:
        _try_attention_inputs(kernels, each)
    matrix = torch.zeros(64, 64, **options)
    if (arranged := kernels.arrange_plain(matrix)) is not None:
        kernels.arranged_linear(matrix, arranged, None)
    if few_rows := kernels.few_rows([matrix], spec.dtype):
        for rows in (matrix[:1], matrix[:8]):
            _, scaled = few_rows.add(rows, matrix, None, rows, matrix[0], 1.0)
            few_rows.linear(scaled, matrix)
            few_rows.gated(scaled, matrix)
    return kernels


def _try_attention_inputs(kernels: Kernels, spec: AttentionSpec) -> None:
    """Rotate a token, and store nothing."""
    options: dict[str, Any] = {"dtype": spec.dtype, "device": spec.device}
    qkv = torch.zeros(1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim, **options)
    angles = torch.zeros(1, 1, spec.head_dim // 2, device=spec.device)
    no_slot = torch.full((1,), -1, device=spec.device)
    kv = _one_block(spec, 1)
    if spec.value_width is not None:
        rows = qkv[:, :1]
        kernels.store_kvcache(rows, rows, kv, no_slot)
        return
    kernels.norm_rope_store(qkv, spec.num_kv_heads, (angles, angles), None, 0.0, kv, no_slot)


def _one_block(spec: AttentionSpec, block_size: int) -> KVLayer:
    """A layer with a cache of one block, to try kernels with."""
    options: dict[str, Any] = {"device": spec.device}
    cache = torch.zeros(
        1, block_size, spec.num_kv_heads, spec.head_dim, dtype=spec.kv_dtype, **options
    )
    scales = None
    if spec.kv_dtype == CODES:
        scales = torch.zeros(1, spec.num_kv_heads, block_size, dtype=SCALES, **options)
    return KVLayer(
        cache, cache, 1.0, k_scales=scales, v_scales=scales,
        soft_cap=1.0 if "soft_cap" in spec.needs else None,
        sinks=torch.zeros(spec.num_heads, **options) if "sinks" in spec.needs else None,
        value_width=spec.value_width,
    )  # fmt: skip
