"""Compile kernels for GPUs that are absent, as a launch on one of them would.

A case calls a kernel's wrapper with tensors as the engine makes them. Triton's own launcher
compiles it for the GPU that a driver of ours names, and stops before the launch. So types,
constants, alignment hints and options are those of the call. Only the tensors' types, strides and
alignment matter; they stay empty and on the CPU.

It runs in a process of its own, as Triton must be imported without TRITON_INTERPRET; one line of
JSON for each kernel: `python tests/kernels/ahead_of_time.py [part of a case's name]`. With
`--serve` it reads a case and a capability from each line, and writes a line with a list of kernels.
"""

import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from blocks import random_blocks
from quantized import Format, quantized

from nanovllm.kernels.kv_layer import CODES, SCALES, KVLayer

# Compute capabilities (A100, H100, RTX 50), and the shared memory that a block can have there.
CAPABILITIES = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}
HOPPER = 90  # where tiles are copied: for `few_rows`, and for a part of attention


@dataclass(frozen=True)
class Case:
    """A call that launches kernels, how many bytes they may spill, and where they are used."""

    call: Callable[[], object]
    max_spill: int
    capabilities: tuple[int, ...]


# The models' heads: query heads, KV heads, head_dim.
Heads = tuple[int, int, int]
QWEN3_SMALL, QWEN3_8B = (16, 8, 128), (32, 8, 128)  # Llama-3-8B's heads are Qwen3-8B's
HEADS = {
    "Qwen3-0.6B": QWEN3_SMALL,
    "Qwen3-8B and Llama-3-8B": QWEN3_8B,
    "head_dim 80": (32, 32, 80),
}
ATTENTION_HEADS = HEADS | {
    "head_dim 64": (32, 8, 64), "head_dim 256": (8, 4, 256), "head_dim 512": (16, 2, 512),
    "G 7": (28, 4, 128), "G 16": (64, 4, 128),
}  # fmt: skip
GPT_OSS = (64, 8, 64)
BLOCKS, BLOCK_SIZE, TOKENS, ROWS, EPS = 64, 16, 512, 64, 1e-6
bf16 = partial(torch.empty, dtype=torch.bfloat16)
int32 = partial(torch.zeros, dtype=torch.int32)  # zeros, as PyTorch computes with them


def projected(heads: Heads, tokens: int = TOKENS) -> list[torch.Tensor]:
    """Queries, keys and values: views into the fused projection, as the layer passes them."""
    num_heads, num_kv_heads, head_dim = heads
    qkv = bf16(tokens, num_heads + 2 * num_kv_heads, head_dim)
    return list(qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1))


def layer(
    heads: Heads, block_size: int = BLOCK_SIZE, window: int | None = None, codes: bool = False,
    soft_cap: float | None = None, sinks: bool = False,
) -> KVLayer:  # fmt: skip
    caches = torch.empty(
        2, BLOCKS, block_size, heads[1], heads[2], dtype=CODES if codes else torch.bfloat16
    )
    scales = torch.empty(2, BLOCKS, heads[1], block_size, dtype=SCALES) if codes else (None, None)
    of_heads = torch.empty(heads[0]) if sinks else None
    return KVLayer(*caches, 0.125, window, *scales, soft_cap=soft_cap, sinks=of_heads)


def store_kvcache(heads: Heads, codes: bool = False) -> None:
    from nanovllm.kernels.triton.attention.store_kvcache import store_kvcache

    _, k, v = projected(heads)
    store_kvcache(k, v, layer(heads, codes=codes), torch.empty(TOKENS, dtype=torch.long))


def table_state() -> Any:
    from nanovllm.kernels.plain.read_table import DraftState, TableState

    longs, words = torch.zeros(2, ROWS, dtype=torch.long), int32(ROWS)
    drafts = DraftState(int32(ROWS, 4), words, words, int32(ROWS, 5), int32(ROWS, 999), int32(1))
    return TableState(*longs, words, torch.zeros(ROWS), words, int32(ROWS, 640), drafts)


def read_table(rows: int, width: int, num_queries: int = 1) -> Any:
    from nanovllm.kernels.triton.step.read_table import read_table

    return read_table(table_state(), rows, width, BLOCK_SIZE, num_queries)


def drafts() -> None:
    from nanovllm.kernels.plain.guess_inputs import Kept
    from nanovllm.kernels.triton.step.accept import accept
    from nanovllm.kernels.triton.step.guess_inputs import guess_inputs
    from nanovllm.kernels.triton.step.guess_ngrams import guess_ngrams

    guess_ngrams(table_state(), 7, 4, 1, 4)
    kept = Kept(int32(ROWS), int32(ROWS), bf16(ROWS, 5, 64))
    for num_queries in (1, 5):
        guess_inputs(table_state(), kept, 7, num_queries, 16)
    guess_inputs(table_state(), None, 7, 5, 16)
    accept(table_state(), read_table(7, 640, 5), torch.zeros(35, dtype=torch.long), 5)


def write_table() -> None:
    from nanovllm.kernels.triton.step.write_table import write_table

    write_table(int32(ROWS), int32(2, 100), 7)


def rms_norm(size: int) -> None:
    from nanovllm.kernels.triton.linear.rms_norm import add_normed, add_rms_norm, rms_norm

    x, factors = bf16(TOKENS, size), torch.empty(size)
    rms_norm(x, bf16(size), EPS)
    add_rms_norm(x, x, bf16(size), EPS)
    add_normed(x, factors, EPS, x, factors, EPS)


def streams(size: int) -> None:
    from nanovllm.kernels.triton.ordered.mix_streams import mix_streams
    from nanovllm.kernels.triton.ordered.row_sums import row_sums

    mix_streams(bf16(TOKENS, 4, 4), bf16(4, TOKENS, size))
    row_sums(bf16(TOKENS, size))
    row_sums(torch.empty(TOKENS, 4 * size))


def sigmoid_and_mul(heads: int, size: int) -> None:
    from nanovllm.kernels.triton.linear.sigmoid_and_mul import sigmoid_and_mul

    gate = bf16(TOKENS, 3 * heads * size)[:, : heads * size]
    sigmoid_and_mul(bf16(TOKENS, heads * size), gate)


def all_reduce(size: int, ranks: int, rows: int) -> None:
    from nanovllm.kernels.triton.ranks.all_reduce import PeerKernels
    from nanovllm.kernels.triton.ranks.exchange import REGIONS

    places = torch.zeros(ranks + 1, dtype=torch.long)
    sums, x, norm = (
        PeerKernels(ranks - 1, ranks, places, int32(REGIONS)),
        bf16(rows, size),
        bf16(size),
    )
    sums.all_reduce(x)
    sums.embedding(torch.zeros(rows, dtype=torch.long), bf16(1000, size), 1000 * (ranks - 1))
    sums.add_rms_norm(x, x, norm, EPS)
    sums.add_scaled(x, x, norm, EPS)
    columns = -(-151936 // ranks)
    choices = torch.empty(rows), torch.empty(rows, dtype=torch.long)
    sums.sample(bf16(rows, columns), *choices, columns * (ranks - 1))


def silu_and_mul(size: int) -> None:
    from nanovllm.kernels.triton.linear.silu_and_mul import silu_and_mul

    silu_and_mul(bf16(TOKENS, 2 * size))


def gelu_and_mul(size: int) -> None:
    from nanovllm.kernels.triton.linear.gelu_and_mul import gelu_and_mul

    gelu_and_mul(bf16(TOKENS, 2 * size))


def experts(
    num_experts: int, per_token: int, hidden: int, inside: int, tokens: int, one_order: bool = False
) -> None:
    from nanovllm.kernels.triton.table import triton_kernels

    ids = torch.zeros(tokens, per_token, dtype=torch.long)
    weights = bf16(num_experts, 2 * inside, hidden), bf16(num_experts, hidden, inside)
    x, shares = bf16(tokens, hidden), torch.empty(tokens, per_token)
    triton_kernels(one_order).experts(x, *weights, ids, shares, num_experts)


def biased_experts(tokens: int) -> None:
    from nanovllm.kernels.operands.expert_biases import ExpertBiases
    from nanovllm.kernels.triton.experts.biased_experts import biased_experts

    ids, shares = torch.zeros(tokens, 4, dtype=torch.long), torch.empty(tokens, 4)
    weights = bf16(32, 5760, 2880), bf16(32, 2880, 2880)
    biases = ExpertBiases(bf16(32, 5760), bf16(32, 2880), 1.702, 7.0)
    biased_experts(bf16(tokens, 2880), *weights, ids, shares, 32, biases)


def mx_experts(
    tokens: int, dtype: torch.dtype = torch.bfloat16, is_wide: bool = False, one_order: bool = False
) -> None:
    from nanovllm.kernels.operands.expert_biases import ExpertBiases
    from nanovllm.kernels.triton.experts.mx_stack import MxStack
    from nanovllm.kernels.triton.table import triton_kernels

    def stack(size_out: int) -> MxStack:
        return MxStack(int32(32, 23, size_out, 16), int32(32, 23, size_out),
                       (32, size_out, 2880), is_wide, int32(1 << 14))  # fmt: skip

    ids, shares = torch.zeros(tokens, 4, dtype=torch.long), torch.empty(tokens, 4)
    of_type = partial(torch.empty, dtype=dtype)
    biases = ExpertBiases(of_type(32, 5760), of_type(32, 2880), 1.702, 7.0)
    operands = of_type(tokens, 2880), stack(5760), stack(2880)
    triton_kernels(one_order).biased_experts(*operands, ids, shares, 32, biases)


def quantized_experts(form: Format, tokens: int) -> None:
    from nanovllm.kernels.triton.experts.experts import experts
    from nanovllm.kernels.triton.linear.quantized_linear import arrange

    form = replace(form, stack=(32,))
    gate_up, down = quantized(1536, 2048, form), quantized(2048, 768, form)
    ids, shares = torch.zeros(tokens, 8, dtype=torch.long), torch.empty(tokens, 8)
    experts(bf16(tokens, 2048), arrange(gate_up), arrange(down), ids, shares, 32)


def router(
    weight: torch.Tensor, per_token: int, *biases: torch.Tensor | None, **choices: Any
) -> Any:
    from nanovllm.kernels.operands.routing import Routing
    from nanovllm.kernels.triton.experts.route import Router

    routing = Routing(per_token=per_token, normalized=True, **choices)
    return Router.of(weight, torch.bfloat16, routing, *biases)


def route(tokens: int, weight: torch.dtype = torch.bfloat16, num_experts: int = 128) -> None:
    value = 1.0 if weight == torch.bfloat16 else 1.0001
    stored = torch.full((num_experts, 2048), value, dtype=weight)
    router(stored, 8).route(bf16(tokens, 2048))


def route_with_bias(tokens: int) -> None:
    router(bf16(32, 2880), 4, torch.empty(32)).route(bf16(tokens, 2880))


def route_by_sigmoids(tokens: int, num_experts: int, per_token: int) -> None:
    biases = None, torch.empty(num_experts)
    choices: dict[str, Any] = dict(scores="sigmoid", has_bias=True, scale=2.5)
    router(bf16(num_experts, 2048), per_token, *biases, **choices).route(bf16(tokens, 2048))


def choose_experts(num_experts: int, per_token: int) -> None:
    from nanovllm.kernels.operands.routing import Routing
    from nanovllm.kernels.triton.experts.choose_experts import choose_experts

    routing = Routing(
        per_token=per_token, normalized=True, scores="sigmoid", has_bias=True, scale=2.5
    )
    choose_experts(torch.empty(TOKENS, num_experts), routing, torch.empty(num_experts))


def few_experts(rows: int, form: Format | None = None) -> None:
    from nanovllm.kernels.operands.scaled import ExpertWeights, Scaled
    from nanovllm.kernels.triton.experts.few_experts import add_experts
    from nanovllm.kernels.triton.linear.quantized_linear import arrange

    stacks: Any = bf16(128, 2 * 768, 2048), bf16(128, 2048, 768)
    if form:
        form = replace(form, stack=(128,))
        stacks = (arrange(quantized(*stack.shape[1:], form)) for stack in stacks)
    weights = ExpertWeights(router(bf16(128, 2048), 8), *stacks, per_token=8, normalized=True)
    x, residual, norm = bf16(rows, 2048), bf16(rows, 2048), bf16(2048)
    add_experts(Scaled(x, torch.empty(rows, 32), EPS), weights, residual, norm, EPS)


def few_rows(
    hidden: int, attended: int, inner: int, qkv: int, rows: int, bias: bool = False,
    gate: str = "silu",
) -> None:  # fmt: skip
    from nanovllm.kernels.triton.linear import few_rows

    def layer(size_out: int, size_in: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return bf16(size_out, size_in), bf16(size_out) if bias else None

    x, few = bf16(rows, hidden), few_rows.FewRows(rows)
    with mock.patch.object(few_rows, "num_multiprocessors", return_value=132):  # an H100's
        _, scaled = few.add(bf16(rows, attended), *layer(hidden, attended), x, bf16(hidden), EPS)
        few.linear(scaled, *layer(qkv, hidden))
        few.gated(scaled if gate == "silu" else x, *layer(2 * inner, hidden), gate)
        few.add(bf16(rows, inner), *layer(hidden, inner), x, bf16(hidden), EPS)


def chain(size_out: int, size_in: int, rows: int, dtype: torch.dtype) -> None:
    from nanovllm.kernels.triton.ordered.linear import OrderedWeight, ordered_linear

    weight, x = torch.empty(size_out, size_in, dtype=dtype), torch.empty(rows, size_in, dtype=dtype)
    for bias in (None, torch.empty(size_out, dtype=dtype)):
        ordered_linear(x, OrderedWeight(weight), bias)


of_zeros = partial(Format, seed=None)
FORMATS = {
    "int8": of_zeros(),
    "e4m3 rows": of_zeros("e4m3"),
    "e4m3 blocks": of_zeros("e4m3", (128, 128)),
    "int4, groups of 128": of_zeros("int4", (1, 128), scales=torch.bfloat16),
    "int4, groups of 32 with zeros": of_zeros("int4", (1, 32), zeros=True, scales=torch.float16),
}


def arranged(size_out: int, size_in: int, form: Format) -> Any:
    from nanovllm.kernels.triton.linear.quantized_linear import arrange

    return arrange(quantized(size_out, size_in, form, rounds_inputs=form.kind != "int4"))


def quantized_rows(
    size_out: int, size_in: int, form: Format, rows: int, dtype: torch.dtype, bias: bool = False
) -> None:
    from nanovllm.kernels.triton.linear.quantized_linear import arrange, quantized_linear

    x = torch.empty(rows, size_in, dtype=dtype)
    with mock.patch.object(row_tiles(), "num_multiprocessors", return_value=132):
        some = torch.empty(size_out, dtype=dtype) if bias else None
        quantized_linear(x, arrange(quantized(size_out, size_in, form)), some)


def quantized_many_rows(form: Format, rows: int) -> None:
    """Rows that are not rounded, whatever their number."""
    from nanovllm.kernels.triton.linear.quantized_linear import arrange, quantized_linear

    with mock.patch.object(row_tiles(), "num_multiprocessors", return_value=132):
        quantized_linear(bf16(rows, 4096), arrange(quantized(4096, 4096, form)))


def row_tiles() -> Any:
    from nanovllm.kernels.triton.linear import row_tiles

    return row_tiles


# One for each way to store codes and scales.
BLOCK_FORMS = ("Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4")


def block_products(name: str, rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Many rows as on a GPU with few processors, which takes large tiles of a small weight."""
    from nanovllm.kernels.triton.linear import block_linear, block_products

    weight = block_linear.arrange_blocks(random_blocks(name, 256, 2048))
    processors = 1 if rows > 64 else 132
    with mock.patch.object(block_products, "num_multiprocessors", return_value=processors):
        block_linear.block_linear(torch.empty(rows, 2048, dtype=dtype), weight)


def ordered_blocks(name: str, rows: int) -> None:
    """Few outputs, in parts that a program adds up alone."""
    from nanovllm.kernels.triton.linear import block_products
    from nanovllm.kernels.triton.ordered import block_linear

    with mock.patch.object(block_products, "num_multiprocessors", return_value=132):
        weight = block_linear.arrange_blocks(random_blocks(name, 256, 2048))
        assert block_linear.parts_of(weight) == 8
        block_linear.block_linear(bf16(rows, 2048), weight)


def block_dots(name: str, rows: int) -> None:
    """The product, and the three kernels that round rows for it."""
    from nanovllm.kernels.triton.linear import block_dots, block_linear
    from nanovllm.kernels.triton.linear.rounded_rows import WORD_ROUNDING

    weight = block_linear.arrange_blocks(random_blocks(name, 256, 2048))
    x, norm = bf16(rows, 2048), bf16(2048)
    with mock.patch.object(block_dots, "num_multiprocessors", return_value=132):
        block_linear.block_linear(x, weight)
    WORD_ROUNDING.add_rms_norm(x, x, norm, EPS)
    WORD_ROUNDING.silu_and_mul(bf16(rows, 4096))


def block_rows(name: str) -> None:
    from nanovllm.kernels.triton.linear import block_dequantize, block_linear

    weight = block_linear.arrange_blocks(random_blocks(name, 256, 2048))
    block_dequantize.dequantize_blocks(weight, torch.bfloat16)
    block_dequantize.block_rows(weight, torch.zeros(7, dtype=torch.long), torch.bfloat16)


def quantized_few_rows(hidden: int, inner: int, form: Format, rows: int) -> None:
    from nanovllm.kernels.triton.linear.few_rows import FewRows

    x, few = bf16(rows, hidden), FewRows(rows)
    with mock.patch.object(row_tiles(), "num_multiprocessors", return_value=132):
        down = arranged(hidden, inner, form)
        _, scaled = few.add(bf16(rows, inner), down, None, x, bf16(hidden), EPS)
        few.linear(scaled, arranged(hidden, hidden, form))
        few.gated(scaled, arranged(2 * inner, hidden, form))


def dequantize(form: Format) -> None:
    from nanovllm.kernels.triton.linear.dequantize import dequantize

    dequantize(arranged(4096, 4096, form), torch.bfloat16)


def rounded_linear(form: Format) -> None:
    from nanovllm.kernels.triton.linear.rounded_linear import rounded_linear, rounding_of

    weight = arranged(4096, 4096, form)
    rounding = rounding_of(weight, TOKENS)
    assert rounding is not None
    x, norm = bf16(TOKENS, 4096), bf16(4096)
    rounded_linear(rounding.rows(x), weight)
    rounding.rms_norm(x, norm, EPS)
    rounding.add_rms_norm(x, x, norm, EPS)
    rounding.silu_and_mul(bf16(TOKENS, 2 * 4096))


def norm_rope_store(
    heads: Heads, norm: bool, tokens: int, rotated: int | None = None, codes: bool = False
) -> None:
    from nanovllm.kernels.triton.attention.norm_rope_store import norm_rope_store

    num_heads, num_kv_heads, head_dim = heads
    qkv = bf16(tokens, num_heads + 2 * num_kv_heads, head_dim)
    cos, sin = torch.empty(tokens, 2, (rotated or head_dim) // 2).unsqueeze(2).unbind(1)
    norms = (bf16(head_dim), bf16(head_dim)) if norm else None
    slots = torch.empty(tokens, dtype=torch.long)
    kv = layer(heads, codes=codes)
    norm_rope_store(qkv, num_kv_heads, (cos, sin), norms, EPS, kv, slots)


def decode_attention(
    heads: Heads, block_size: int, window: int | None = None, eager: bool = False,
    codes: bool = False, queries: int = 1, soft_cap: float | None = None, sinks: bool = False,
) -> None:  # fmt: skip
    from nanovllm.kernels.triton.attention.decode_attention import decode_attention
    from nanovllm.kernels.triton.attention.decode_plan import plan_decode

    q, lens, tables = bf16(ROWS, heads[0], heads[2]), int32(ROWS), int32(ROWS // queries, BLOCKS)
    plan = plan_decode(lens, tables, heads[1], not eager, queries)
    decode_attention(q, layer(heads, block_size, window, codes, soft_cap, sinks), plan)


def prefill_attention(
    heads: Heads, block_size: int, window: int | None = None, tokens: int = TOKENS,
    codes: bool = False, sequences: int = ROWS, soft_cap: float | None = None, sinks: bool = False,
) -> None:  # fmt: skip
    """With block size 0, no part of a sequence is in the cache."""
    from nanovllm.kernels.triton.attention.prefill_attention import prefill_attention
    from nanovllm.kernels.triton.attention.prefill_plan import plan_prefill

    q, (_, k, v) = bf16(tokens, heads[0], heads[2]), projected(heads, tokens)
    tables = int32(sequences, BLOCKS) if block_size else None
    ends = int32(sequences + 1)
    plan = plan_prefill(ends, ends, tables, tokens)
    prefill_attention(q, k, v, layer(heads, block_size, window, codes, soft_cap, sinks), plan)


def ordered_decode(
    heads: Heads, block_size: int, eager: bool = False, queries: int = 1, **options: Any
) -> None:
    from nanovllm.kernels.triton.attention.ordered_decode import ordered_decode
    from nanovllm.kernels.triton.attention.ordered_plan import plan_ordered_decode

    q, lens, tables = bf16(ROWS, heads[0], heads[2]), int32(ROWS), int32(ROWS // queries, BLOCKS)
    plan = plan_ordered_decode(lens, tables, heads, block_size, not eager, queries)
    ordered_decode(q, layer(heads, block_size, **options), plan)


def ordered_prefill(heads: Heads, block_size: int, tokens: int = TOKENS, **options: Any) -> None:
    """With block size 0, no part of a sequence is in the cache."""
    from nanovllm.kernels.triton.attention.ordered_prefill import ordered_prefill
    from nanovllm.kernels.triton.attention.prefill_plan import plan_prefill

    q, (_, k, v) = bf16(tokens, heads[0], heads[2]), projected(heads, tokens)
    tables, ends = int32(ROWS, BLOCKS) if block_size else None, int32(ROWS + 1)
    plan = plan_prefill(ends, ends, tables, tokens)
    ordered_prefill(q, k, v, layer(heads, block_size, **options), plan)


def latent_layer(width: int, values: int, block_size: int, dtype: torch.dtype) -> KVLayer:
    cache = torch.empty(BLOCKS, block_size, 1, width, dtype=dtype)
    return KVLayer(cache, cache, 0.125, value_width=values)


def latent_decode(
    heads: int, width: int = 576, values: int = 512, queries: int = 1, block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    from nanovllm.kernels.triton.attention.latent_decode import latent_decode, plan_latents

    lens, tables = int32(ROWS), int32(ROWS // queries, BLOCKS)
    plan = plan_latents(lens, tables, (heads, width, values), dtype, queries)
    q = torch.empty(ROWS, heads, width, dtype=dtype)
    latent_decode(q, latent_layer(width, values, block_size, dtype), plan)


def ordered_latent_decode(
    heads: int, width: int = 576, values: int = 512, queries: int = 1, block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    from nanovllm.kernels.triton.attention import ordered_latent_decode as kernels

    lens, tables = int32(ROWS), int32(ROWS // queries, BLOCKS)
    sizes = heads, width, values
    plan = kernels.plan_ordered_latents(block_size, lens, tables, sizes, dtype, queries)
    q = torch.empty(ROWS, heads, width, dtype=dtype)
    kernels.ordered_latent_decode(q, latent_layer(width, values, block_size, dtype), plan)


def heads_linear(rows: int, heads: int, size_in: int, size_out: int) -> None:
    from nanovllm.kernels.triton.ordered.heads_linear import heads_linear

    x, out = bf16(rows, heads, size_in + 64), bf16(rows, heads, size_out + 64)
    heads_linear(x[..., :size_in], bf16(heads, size_in, size_out), out[..., :size_out])


def latent_prefill(
    heads: int, block_size: int, width: int = 576, values: int = 512, tokens: int = 8 * TOKENS,
    dtype: torch.dtype = torch.bfloat16, one_order: bool = False,
) -> None:  # fmt: skip
    """With block size 0, no part of a sequence is in the cache."""
    from nanovllm.kernels.triton.attention.latent_prefill import latent_prefill
    from nanovllm.kernels.triton.attention.prefill_plan import plan_prefill

    q, rows = (torch.empty(tokens, n, width, dtype=dtype) for n in (heads, 1))
    ends, tables = int32(ROWS + 1), int32(ROWS, BLOCKS) if block_size else None
    plan = plan_prefill(ends, ends, tables, tokens)
    kv = latent_layer(width, values, block_size or 64, dtype)
    latent_prefill(q, rows, rows, kv, plan, one_order)


def sample(race: bool, dtype: torch.dtype) -> None:
    from nanovllm.kernels.triton.sampling.sample import sample

    logits = torch.empty(ROWS, 151936, dtype=dtype)
    if race:
        sample(logits, torch.empty(ROWS), torch.empty(ROWS, dtype=torch.long))
    else:
        sample(logits, None, None)


def sample_masked(race: bool, dtype: torch.dtype, vocab_size: int = 151936) -> None:
    from nanovllm.kernels.triton.sampling.sample import sample_masked

    logits, bitmaps = torch.empty(ROWS, vocab_size, dtype=dtype), int32(7, -(-vocab_size // 32))
    longs = partial(torch.empty, dtype=torch.long)
    choices = (torch.empty(ROWS), longs(ROWS)) if race else (None, None)
    sample_masked(logits, *choices, longs(7), bitmaps, longs(ROWS))


def mask(vocab_size: int) -> None:
    from nanovllm.kernels.triton.sampling.mask import mask

    mask(torch.empty(ROWS, vocab_size), int32(ROWS, -(-vocab_size // 32)))


def draw(dtype: torch.dtype) -> None:
    from nanovllm.kernels.operands.cuts import Cuts
    from nanovllm.kernels.triton.sampling.draw import draw

    column = partial(torch.empty, ROWS, 1)
    inputs = torch.empty(ROWS, 151936, dtype=dtype), column(), column(dtype=torch.long)
    draw(*inputs, Cuts(min_p=column()))
    draw(*inputs, Cuts(top_k=column(dtype=torch.long), top_p=column()))


def lora(rows: int, dtype: torch.dtype = torch.bfloat16, max_rank: int = 64) -> None:
    from nanovllm.kernels.operands.low_rank import LowRank
    from nanovllm.kernels.triton.lora.lora import lora_down, lora_up
    from nanovllm.kernels.triton.lora.row_groups import group_rows

    sizes, size_in = (4096, 1024, 1024), 4096
    a, b = (torch.empty(8, *shape, dtype=dtype) for shape in (
        (3 * max_rank, size_in), (max_rank, sum(sizes))
    ))  # fmt: skip
    weights = LowRank(a, b, int32(8, 3), sizes)
    groups = group_rows(int32(rows), 8)
    down = lora_down(torch.empty(rows, size_in, dtype=dtype), weights, groups)
    lora_up(down, weights, groups, torch.empty(rows, sum(sizes), dtype=dtype))


def adapted_few_rows(hidden: int, inner: int, rows: int, max_rank: int, one: bool) -> None:
    """Layers of `one` kernel each, or of three."""
    from nanovllm.kernels.operands.low_rank import LowRank
    from nanovllm.kernels.operands.scaled import Scaled
    from nanovllm.kernels.triton.linear import few_rows
    from nanovllm.kernels.triton.lora import adapted_linear
    from nanovllm.kernels.triton.lora.adapted_few_rows import AdaptedFewRows, with_counters
    from nanovllm.kernels.triton.lora.row_groups import group_rows

    qkv, gate_up, down = bf16(2 * hidden, hidden), bf16(2 * inner, hidden), bf16(hidden, inner)
    sizes = {qkv: (hidden, hidden // 2, hidden // 2), gate_up: (inner, inner), down: (hidden,)}
    low_ranks = {
        id(weight): LowRank(
            bf16(8, max_rank * len(parts), weight.shape[1]), bf16(8, max_rank, sum(parts)),
            int32(8, len(parts)), parts,
        )
        for weight, parts in sizes.items()
    }  # fmt: skip
    few = AdaptedFewRows(rows, groups=group_rows(int32(rows), 8), adapters=with_counters(low_ranks))
    x, norm = bf16(rows, hidden), bf16(hidden)
    patch = partial(mock.patch.object, attribute="num_multiprocessors", return_value=132)
    with patch(few_rows), patch(adapted_linear):
        if not one:
            adapted_linear.divide = lambda *args: None  # type: ignore[assignment]
        scaled = Scaled(x, torch.empty(rows, hidden // 64), EPS)
        few.linear(scaled, qkv)
        few.gated(scaled, gate_up)
        few.add(bf16(rows, inner), down, None, x, norm, EPS)


def state_step(queries: int, sequences: int = 5) -> Any:
    """A decode step with `queries` of each sequence, or with 0 a prefill, long and short."""
    from nanovllm.kernels.operands.state_step import StateStep

    longs = partial(torch.zeros, dtype=torch.long)
    if queries:
        return StateStep(longs(sequences), longs(sequences * queries), num_queries=queries)
    ends = torch.tensor([0, 3, 203])
    return StateStep(longs(2), longs(203), ends.numpy())


def states_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """States in slots with those of other layers."""
    return torch.empty(8, 1 << 21, dtype=dtype)[:, : math.prod(shape)].view(8, *shape)


def causal_conv(
    queries: int, channels: int, width: int, bias: bool = False, sequences: int = 5
) -> None:
    from nanovllm.kernels.triton.state.causal_conv import causal_conv

    step, states = state_step(queries, sequences), states_of((width - 1, channels), torch.bfloat16)
    x, weight = bf16(len(step.after), channels), bf16(channels, width)
    causal_conv(x, weight, bf16(channels) if bias else None, states, step, True)


def gated_delta(
    queries: int, key_heads: int, heads: int, size: int, dtype: torch.dtype = torch.bfloat16,
    value_size: int | None = None,
) -> None:  # fmt: skip
    from nanovllm.kernels.operands.rates import DeltaRates
    from nanovllm.kernels.triton.state.gated_delta import gated_delta

    value_size = value_size or size
    step, states = state_step(queries), states_of((heads, size, value_size), torch.float32)
    tokens, rates = len(step.after), DeltaRates(torch.empty(heads), torch.empty(heads))
    qkv = torch.empty(tokens, 2 * key_heads * size + heads * value_size, dtype=dtype)
    b, a = torch.empty(tokens, 2 * heads, dtype=dtype).chunk(2, dim=1)
    gated_delta(qkv, a, b, rates, states, step)


def channel_delta(queries: int, heads: int, size: int, lowest: float | None = None) -> None:
    from nanovllm.kernels.operands.rates import ChannelRates
    from nanovllm.kernels.triton.state.channel_delta import channel_delta

    step, states = state_step(queries), states_of((heads, size, size), torch.float32)
    tokens, inner = len(step.after), heads * size
    rates = ChannelRates(torch.empty(heads), torch.empty(inner), lowest)
    channel_delta(bf16(tokens, 3 * inner), bf16(tokens, inner), bf16(tokens, heads), rates, states,
                  step)  # fmt: skip


def state_space(
    queries: int, groups: int, heads: int, head_dim: int, size: int,
    dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    from nanovllm.kernels.operands.rates import SpaceRates
    from nanovllm.kernels.triton.state.state_space import state_space

    step, states = state_step(queries), states_of((heads, head_dim, size), torch.float32)
    tokens, rates = len(step.after), SpaceRates(*(torch.empty(heads) for _ in range(3)))
    xbc = torch.empty(tokens, heads * head_dim + 2 * groups * size, dtype=dtype)
    state_space(xbc, torch.empty(tokens, heads, dtype=dtype), rates, states, step)


def gated_norm(groups: int, size: int, gate_first: bool) -> None:
    from nanovllm.kernels.triton.state.gated_norm import gated_norm

    x, gate = bf16(TOKENS, groups, size), bf16(TOKENS, groups, size)
    gated_norm(x, gate, bf16(size), EPS, gate_first)


def ordered_states(call: Callable[..., None], *sizes: Any) -> None:
    """Steps of all kinds, of a case above. Calls with 0 queries are prefills."""
    from nanovllm.kernels.triton.ordered import delta, space, states
    from nanovllm.kernels.triton.state import causal_conv, channel_delta, gated_delta, state_space

    with (
        mock.patch.object(gated_delta, "gated_delta", delta.gated_delta),
        mock.patch.object(channel_delta, "channel_delta", delta.channel_delta),
        mock.patch.object(state_space, "state_space", space.state_space),
        mock.patch.object(causal_conv, "causal_conv", states.causal_conv),
    ):
        for queries in (0, 1, 3, 16):
            call(queries, *sizes)


def ordered_norm(groups: int, size: int, others: int, gate_first: bool) -> None:
    """Of one row and of many, with gates before the other results of a projection."""
    from nanovllm.kernels.triton.ordered.states import gated_norm

    for rows in (1, 5, 16):
        gate = bf16(rows, groups * size + others)[:, : groups * size]
        parts = (each.view(rows, groups, size) for each in (bf16(rows, groups * size), gate))
        gated_norm(*parts, bf16(size), EPS, gate_first)


def latent_rows(heads: int, dtype: torch.dtype = torch.bfloat16) -> None:
    from nanovllm.kernels.triton.attention.latent_rows import latent_rows

    queries, whole = (torch.empty(TOKENS, heads, size, dtype=dtype) for size in (192, 576))
    row, weight = torch.empty(TOKENS, 576, dtype=dtype), torch.empty(512, dtype=dtype)
    cos, sin = torch.empty(TOKENS, 2, 32).unsqueeze(2).unbind(1)
    latent_rows(queries[..., 128:], row, weight, EPS, (cos, sin), True, whole[..., 512:])


# A case for each binary: sizes that make no new one are left out.
CALLS: dict[str, Callable[[], object]] = {
    **{f"store_kvcache, {name}": partial(store_kvcache, h) for name, h in HEADS.items()},
    "store_kvcache, Qwen3-0.6B, codes": partial(store_kvcache, QWEN3_SMALL, codes=True),
    **{
        f"norm_rope_store, Qwen3-8B, {tokens} tokens, codes": partial(
            norm_rope_store, QWEN3_8B, True, tokens, codes=True
        )
        for tokens in (ROWS, 8 * TOKENS)
    },
    **{
        f"{call.__name__}, {name}, codes, block size {size}": partial(
            call, ATTENTION_HEADS[name], size, codes=True
        )
        for name in (*HEADS, "head_dim 64", "head_dim 256", "head_dim 512", "G 16")
        for call in (decode_attention, prefill_attention)
        for size in (16, 64)
    },
    **{
        f"{call.__name__}, Mistral's window, codes, block size 64": partial(
            call, QWEN3_8B, 64, 4096, codes=True
        )
        for call in (decode_attention, prefill_attention)
    },
    "decode_attention, Qwen3-8B, codes, eager, block size 64": partial(
        decode_attention, QWEN3_8B, 64, eager=True, codes=True
    ),
    **{f"rms_norm, hidden {n}": partial(rms_norm, n) for n in (1024, 4096)},
    **{
        f"all_reduce, hidden {size}, {ranks} ranks, {rows} rows": partial(
            all_reduce, size, ranks, rows
        )
        for size, ranks, rows in ((1024, 2, 1), (4096, 2, 64), (8192, 8, 32))
    },
    "silu_and_mul": partial(silu_and_mul, 3072),
    "gelu_and_mul": partial(gelu_and_mul, 2048),
    "sigmoid_and_mul": partial(sigmoid_and_mul, 16, 256),
    "streams, one order": partial(streams, 2048),
    **{
        f"norm_rope_store, {name}, {tokens} tokens": partial(norm_rope_store, h, norm, tokens)
        for name, h, norm in (
            ("Qwen3-0.6B", QWEN3_SMALL, True),
            ("Qwen3-8B", QWEN3_8B, True),
            ("Llama-3-8B", QWEN3_8B, False),
        )
        for tokens in (ROWS, 8 * TOKENS)
    },
    "norm_rope_store, Phi-4-mini": partial(norm_rope_store, (24, 8, 128), False, ROWS, 96),
    **{
        f"experts, Qwen3-30B-A3B, {tokens} tokens": partial(experts, 128, 8, 2048, 768, tokens)
        for tokens in (16, ROWS, 8 * TOKENS - 95, 8 * TOKENS)
    },
    **{f"route, {tokens} tokens": partial(route, tokens) for tokens in (ROWS, 32 * TOKENS)},
    **{
        f"route, gpt-oss, {tokens} tokens": partial(route_with_bias, tokens)
        for tokens in (1, 8 * TOKENS)
    },
    **{
        f"route, {name}, {tokens} tokens": partial(route_by_sigmoids, tokens, *sizes)
        for name, sizes in (("GLM-4.7-Flash", (64, 4)), ("MiniMax-M2", (256, 8)))
        for tokens in (1, 32 * TOKENS)
    },
    "choose_experts, MiniMax-M2": partial(choose_experts, 256, 8),
    "route, float32": partial(route, ROWS, torch.float32),
    "biased_experts, gpt-oss": partial(biased_experts, 64),
    **{
        f"mx_experts, gpt-oss, {tokens} tokens": partial(mx_experts, tokens)
        for tokens in (32, 64, 200, 256, 8 * TOKENS - 95, 8 * TOKENS)
    },
    **{
        f"mx_experts, one order, {tokens} tokens": partial(mx_experts, tokens, one_order=True)
        for tokens in (1, 8 * TOKENS)
    },
    **{
        f"experts, one order, {tokens} tokens": partial(experts, *sizes, tokens, one_order=True)
        for sizes in ((128, 8, 2048, 768),)
        for tokens in (1, 8 * TOKENS)
    },
    "few_mx_experts, gpt-oss": partial(mx_experts, 1),
    "few_mx_experts, large scales": partial(mx_experts, 3, is_wide=True),
    "mx_experts, float32": partial(mx_experts, 3, torch.float32),
    "mx_experts, large scales": partial(mx_experts, 8, is_wide=True),
    "route, 256 experts": partial(route, 32 * TOKENS, num_experts=256),
    **{f"few_experts, {rows} rows": partial(few_experts, rows) for rows in (1, 64, 256)},
    "few_experts, e4m3 blocks": partial(few_experts, 64, FORMATS["e4m3 blocks"]),
    "experts, sizes that tiles do not divide": partial(experts, 60, 4, 2032, 1392, 8 * TOKENS),
    **{
        f"few_rows, {name}, {rows} rows": partial(few_rows, *sizes, rows)
        for name, sizes, some in (
            ("Qwen3-0.6B", (1024, 2048, 3072, 4096), (1, 8, 16, 32, 64, 128, 256)),
            ("Qwen3-4B", (2560, 4096, 9728, 6144), (128,)),
            ("Qwen3-8B", (4096, 4096, 12288, 6144), (8, 32, 64)),
            ("Qwen3-14B", (5120, 5120, 17408, 7168), (8, 32, 64)),
        )
        for rows in some
    },
    "ordered chain, one output": partial(chain, 1, 2048, 100, torch.bfloat16),
    **{
        f"few_rows, one order, float16, {rows} rows": partial(chain, 256, 512, rows, torch.float16)
        for rows in (7, 200)
    },
    "ordered chain, float32": partial(chain, 160, 200, 7, torch.float32),
    **{
        f"few_rows, Gemma-3-4B, {rows} rows": partial(
            few_rows, 2560, 2048, 10240, 4096, rows, gate="gelu"
        )
        for rows in (1, 32)
    },
    **{
        f"few_rows, Qwen2.5-0.5B, biases, {rows} rows": partial(
            few_rows, 896, 896, 4864, 1152, rows, bias=True
        )
        for rows in (1, 8)
    },
    **{
        f"quantized_rows, {name}, {rows} rows": partial(
            quantized_rows, 4096, 4096, form, rows, torch.bfloat16
        )
        for name, form in FORMATS.items()
        for rows in (1, 16, 32, 64)
    },
    **{
        f"quantized_rows, {name}, many tokens: {rows}": partial(quantized_many_rows, form, rows)
        for name, form in FORMATS.items()
        for rows in (128, 256)
    },
    **{
        f"quantized_rows, {name}, {dtype}": partial(
            quantized_rows, 1000, 1000, form, 3, dtype, bias=True
        )
        for name, form in FORMATS.items()
        for dtype in (torch.float16, torch.float32)
    },
    **{
        f"quantized_rows, of few_rows, {name}, {rows} rows": partial(
            quantized_few_rows, *sizes, FORMATS[name], rows
        )
        for name, *sizes in (("e4m3 blocks", 4096, 12288), ("int4, groups of 128", 1024, 3072))
        for rows in (1, 16, 64)
    },
    **{
        f"experts, {name}, {tokens} tokens": partial(quantized_experts, FORMATS[name], tokens)
        for name in ("e4m3 blocks", "int4, groups of 128")
        for tokens in (ROWS, TOKENS)
    },
    **{f"dequantize, {name}": partial(dequantize, form) for name, form in FORMATS.items()},
    **{
        f"block_products, {rows} rows, {name}": partial(block_products, name, rows)
        for rows in (16, 64, 256)
        for name in (BLOCK_FORMS if rows == 64 else ("Q4_K", "Q6_K", "Q8_0"))
    },
    **{  # small tiles, and large ones
        f"block_products, one order, {rows} rows, {name}": partial(ordered_blocks, name, rows)
        for rows in (70, TOKENS)
        for name in ("Q4_K", "Q6_K", "Q8_0")
    },
    **{f"few_block_dots, {name}": partial(block_dots, name, 1) for name in BLOCK_FORMS[:-1]},
    "few_block_dots, two rows": partial(block_dots, "Q5_0", 2),
    "block_products, float16": partial(block_products, "Q4_K", 3, torch.float16),
    **{f"block_rows, {name}": partial(block_rows, name) for name in ("Q4_K", "Q6_K")},
    **{
        f"rounded_linear, {name}": partial(rounded_linear, form)
        for name, form in FORMATS.items()
        if form.kind != "int4"
    },
    **{
        f"{call.__name__}, {name}, block size {size}": partial(call, h, size)
        for name, h in ATTENTION_HEADS.items()
        for call, sizes in ((decode_attention, (16, 64)), (prefill_attention, (0, 16, 64)))
        for size in (sizes if name in HEADS else sizes[:-1])
    },
    "decode_attention, G 16, block size 64": partial(decode_attention, ATTENTION_HEADS["G 16"], 64),
    **{
        f"decode_attention, {name}, eager, block size 64": partial(
            decode_attention, heads, 64, eager=True
        )
        for name, heads in (("Qwen3-0.6B", QWEN3_SMALL), ("Qwen3-8B", QWEN3_8B))
    },
    **{
        f"decode_attention, {name}, {queries} queries, block size 64": partial(
            decode_attention, heads, 64, queries=queries
        )
        for name, heads, queries in (
            ("Qwen3-0.6B", QWEN3_SMALL, 5),
            ("Qwen3-8B", QWEN3_8B, 5),
            ("G 7", (28, 4, 128), 8),
            ("head_dim 256", ATTENTION_HEADS["head_dim 256"], 5),
        )
    },
    "decode_attention, Qwen3-8B, 5 queries, codes": partial(
        decode_attention, QWEN3_8B, 64, codes=True, queries=5
    ),
    "decode_attention, Mistral's window, 5 queries": partial(
        decode_attention, QWEN3_8B, 64, 4096, queries=5
    ),
    **{
        f"prefill_attention, {name}, many tokens, block size 0": partial(
            prefill_attention, heads, 0, tokens=8 * TOKENS
        )
        for name, heads in ATTENTION_HEADS.items()
        if heads[2] != 80
    },
    **{
        f"hopper_prefill, {name}, block size {size}": partial(
            prefill_attention, heads, size, tokens=8 * TOKENS, sequences=2
        )
        for name, heads in (ATTENTION_HEADS | {"G 1": (8, 8, 128)}).items()
        for size in (0, 64)
        if heads[2] in (64, 128)
    },
    **{
        f"{call.__name__}, Mistral's window, block size {size}": partial(call, QWEN3_8B, size, 4096)
        for call, size in ((decode_attention, 64), (prefill_attention, 0), (prefill_attention, 64))
    },
    **{
        f"{call.__name__}, Gemma 2's cap, block size {size}": partial(
            call, (16, 8, 256), size, soft_cap=50.0
        )
        for call, size in ((decode_attention, 64), (prefill_attention, 0))
    },
    **{
        f"{call.__name__}, gpt-oss, {name}": partial(call, GPT_OSS, 64, sinks=True, **options)
        for call in (decode_attention, prefill_attention)
        for name, options in (("window", {"window": 128}), ("all", {}), ("codes", {"codes": True}))
    },
    "hopper_prefill, gpt-oss, sinks": partial(
        prefill_attention, GPT_OSS, 64, tokens=8 * TOKENS, sequences=2, sinks=True
    ),
    **{
        f"ordered_decode, {name}": partial(ordered_decode, heads, **options)
        for name, heads, options in (
            ("Qwen3-0.6B", QWEN3_SMALL, {"block_size": 64}),
            ("Qwen3-8B", QWEN3_8B, {"block_size": 64}),
            ("Qwen3-8B, eager", QWEN3_8B, {"block_size": 64, "eager": True}),
            ("Qwen3-8B, 5 queries", QWEN3_8B, {"block_size": 64, "queries": 5}),
            ("Qwen3-8B, codes", QWEN3_8B, {"block_size": 64, "codes": True}),
            ("Mistral's window, block size 16", QWEN3_8B, {"block_size": 16, "window": 4096}),
            ("head_dim 80", HEADS["head_dim 80"], {"block_size": 16}),
            ("Gemma 2's cap", (16, 8, 256), {"block_size": 64, "soft_cap": 50.0}),
            ("gpt-oss, codes", GPT_OSS, {"block_size": 64, "codes": True, "sinks": True}),
        )
    },
    **{
        f"ordered_prefill, {name}": partial(ordered_prefill, heads, **options)
        for name, heads, options in (
            ("Qwen3-0.6B", QWEN3_SMALL, {"block_size": 64}),
            ("Qwen3-8B, block size 0", QWEN3_8B, {"block_size": 0}),
            ("many tokens, block size 0", QWEN3_8B, {"block_size": 0, "tokens": 8 * TOKENS}),
            ("Qwen3-8B, codes", QWEN3_8B, {"block_size": 64, "codes": True}),
            ("Mistral's window, block size 16", QWEN3_8B, {"block_size": 16, "window": 4096}),
            ("head_dim 80", HEADS["head_dim 80"], {"block_size": 16}),
            ("Gemma 2's cap", (16, 8, 256), {"block_size": 64, "soft_cap": 50.0}),
            ("gpt-oss, codes", GPT_OSS, {"block_size": 64, "codes": True, "sinks": True}),
        )
    },
    **{
        f"latent_decode, DeepSeek, {heads} heads": partial(latent_decode, heads)
        for heads in (16, 32, 128)
    },
    **{
        f"ordered_latent_decode, {name}": partial(ordered_latent_decode, heads, **options)
        for name, heads, options in (
            ("DeepSeek, 16 heads", 16, {}),
            ("DeepSeek, 20 heads", 20, {}),
            ("MiniCPM3", 40, {"width": 288, "values": 256}),
            ("odd, float32", 5, {"width": 48, "values": 40, "dtype": torch.float32}),
        )
    },
    **{
        f"ordered_latent_prefill, {name}": partial(
            latent_prefill, heads, *sizes, tokens=tokens, one_order=True
        )
        for name, heads, sizes, tokens in (
            ("DeepSeek", 16, (64,), 8 * TOKENS),
            ("DeepSeek, one token", 16, (64,), 1),
            ("DeepSeek, block size 0", 128, (0,), 8 * TOKENS),
            ("MiniCPM3", 40, (64, 288, 256), 8 * TOKENS),
        )
    },
    **{
        f"heads_linear, {rows} rows, {name}": partial(heads_linear, rows, *sizes)
        for rows in (1, 4096)
        for name, sizes in (("fold", (16, 128, 512)), ("unfold", (16, 512, 128)))
    },
    "latent_decode, DeepSeek, 16 heads, 3 queries": partial(latent_decode, 16, queries=3),
    "latent_decode, MiniCPM3": partial(latent_decode, 40, 288, 256),
    "latent_decode, rank 384, blocks of 16": partial(latent_decode, 16, 448, 384, block_size=16),
    "latent_decode, DeepSeek, float32": partial(latent_decode, 16, dtype=torch.float32),
    "latent_prefill, DeepSeek, float32": partial(latent_prefill, 16, 64, dtype=torch.float32),
    "latent_decode, odd, float32": partial(latent_decode, 5, 48, 40, dtype=torch.float32),
    **{
        f"latent_prefill, {name}, {heads} heads, {kind}": partial(
            latent_prefill, heads, *sizes, tokens=tokens
        )
        for name, heads, width in (
            ("DeepSeek", 16, ()),
            ("DeepSeek", 128, ()),
            ("MiniCPM3", 40, (288, 256)),
        )
        for kind, sizes, tokens in (
            ("block size 0", (0, *width), 8 * TOKENS),
            ("block size 64", (64, *width), 8 * TOKENS),
            ("few tokens", (64, *width), TOKENS),
        )
    },
    **{
        f"sample, {name}, {dtype}": partial(sample, name == "race", dtype)
        for name in ("race", "greedy")
        for dtype in (torch.bfloat16, torch.float32)
    },
    **{
        f"sample_masked, {name}, {dtype}": partial(sample_masked, name == "race", dtype)
        for name in ("race", "greedy")
        for dtype in (torch.bfloat16, torch.float32)
    },
    "sample_masked, V 50257": partial(sample_masked, True, torch.bfloat16, 50257),
    **{f"mask, V {size}": partial(mask, size) for size in (151936, 50257)},
    "read_table, of a graph": partial(read_table, ROWS, 640),
    "read_table, as wide as it must be": partial(read_table, 7, 13),
    "write_table": write_table,
    "read_table, with drafts": partial(read_table, 7, 640, 5),
    "guess_ngrams, guess_inputs and accept": drafts,
    **{f"lora, {rows} rows": partial(lora, rows) for rows in (1, 64, 256, 8 * TOKENS)},
    **{
        f"few_adapted_rows, {hidden}, {rows} rows, max_rank {max_rank}": partial(
            adapted_few_rows, hidden, inner, rows, max_rank, True
        )
        for hidden, inner, some in (
            (1024, 3072, ((1, 16), (8, 16), (64, 16))),
            (4096, 12288, ((1, 16), (1, 64), (8, 8), (64, 16))),
        )
        for rows, max_rank in some
    },
    **{
        f"few_adapted_rows, {rows} rows, three kernels": partial(
            adapted_few_rows, 1024, 3072, rows, 16, False
        )
        for rows in (1, 32)
    },
    "lora, max_rank 8": partial(lora, 16, max_rank=8),
    **{f"lora, float32, {rows} rows": partial(lora, rows, torch.float32) for rows in (1, 256)},
    **{f"draw, {dtype}": partial(draw, dtype) for dtype in (torch.bfloat16, torch.float32)},
    **{
        f"{name}, {kind}": partial(call, queries, *sizes)
        for name, call, *sizes in (
            ("causal_conv, Qwen3-Next", causal_conv, 8192, 4),
            ("causal_conv, biases", causal_conv, 4352, 4, True),
            ("causal_conv, width 3", causal_conv, 2048, 3),
            ("gated_delta, Qwen3-Next", gated_delta, 16, 32, 128),
            ("gated_delta, few heads of 64", gated_delta, 4, 4, 64),
            ("gated_delta, keys of 96", gated_delta, 30, 30, 96, torch.bfloat16, 192),
            ("gated_delta, float32", gated_delta, 16, 32, 128, torch.float32),
            ("gated_delta, float16", gated_delta, 16, 32, 128, torch.float16),
            ("channel_delta, Kimi Linear", channel_delta, 32, 128),
            ("state_space, Mamba-2", state_space, 1, 80, 64, 128),
            ("state_space, states of 256", state_space, 1, 48, 64, 256),
            ("state_space, float32", state_space, 8, 128, 64, 128, torch.float32),
            ("state_space, float16", state_space, 8, 128, 64, 128, torch.float16),
        )
        for kind, queries in (("prefill", 0), ("decode", 1), ("3 queries", 3))
        if kind != "3 queries" or "Qwen3-Next" in name or "Mamba" in name
    },
    **{
        f"ordered_{name}": partial(ordered_states, call, *sizes)
        for name, call, *sizes in (
            ("gated_delta, Qwen3-Next", gated_delta, 16, 32, 128),
            ("gated_delta, keys of 96", gated_delta, 30, 30, 96, torch.bfloat16, 192),
            ("gated_delta, keys of 256", gated_delta, 4, 8, 256),
            ("channel_delta, Kimi Linear", channel_delta, 32, 128),
            ("state_space, Mamba-2", state_space, 1, 80, 64, 128),
            ("state_space, states of 256", state_space, 1, 48, 64, 256),
        )
    },
    "causal_conv, one order": partial(ordered_states, causal_conv, 8192, 4, True),
    "gated_norm, one order, 128": partial(ordered_norm, 32, 128, 64, False),
    "gated_norm, one order, Mamba-2": partial(ordered_norm, 1, 1536, 1816, True),
    "causal_conv, many sequences": partial(causal_conv, 1, 8192, 4, sequences=200),
    "latent_rows, DeepSeek-V3": partial(latent_rows, 128),
    "latent_rows, float32": partial(latent_rows, 5, torch.float32),
    **{
        f"gated_norm, {size}, {'gate first' if first else 'gate last'}": partial(
            gated_norm, 4096 // size, size, first
        )
        for size, first in ((128, False), (4096, True))
    },
}
# Prefill holds a large accumulator. In addition to 1,020 bytes in registers, a thread may keep
# numbers in memory: up to 112 bytes, and 224 for head_dim 256, by Triton's version. Decode with
# small heads and blocks, or with a group of two and tiles that are not copied, keeps four numbers
# there under Triton 3.6, and none under 3.7; with a window it keeps two. The draw keeps up to six
# outside its loops where registers are fewest.
SPILLS = {
    "all_reduce, hidden 4096": 16,
    "all_reduce, hidden 8192, 8 ranks": 144,  # of the longest rows, of all ranks
    "prefill_attention": 128,
    "prefill_attention, head_dim 256": 256,
    "decode_attention, head_dim 64, block size 16": 16,
    "decode_attention, Qwen3-0.6B, eager": 16,
    "decode_attention, Mistral's window": 16,
    # Many queries of a key head: outside of the loop over copied tiles.
    "decode_attention, Qwen3-0.6B, 5 queries": 16,
    "decode_attention, Qwen3-8B, 5 queries": 48,
    "decode_attention, G 7, 8 queries": 160,
    # Attention to latent rows holds sums of up to 512 columns, for 32 queries on Hopper GPUs. Those
    # of float32 do not fit registers.
    "latent_decode": 160,
    "latent_decode, MiniCPM3": 320,
    "latent_prefill": 144,
    "latent_prefill, DeepSeek": 208,
    **{f"latent_{kind}, DeepSeek, float32": 7168 for kind in ("decode", "prefill")},
    "draw": 32,
    **{f"decode_attention, {name}, codes": 16 for name in ("head_dim 256", "head_dim 512", "G 16")},
    # Where products are of one warp, prefill holds a tile of codes in registers, as float16.
    **{f"prefill_attention, {name}, codes": 224 for name in (*HEADS, "Mistral's window")},
    "prefill_attention, head_dim 256, codes": 512,
    "prefill_attention, Gemma 2's cap": 256,
    # The sums of a chunk, and those of the chunks before it.
    "ordered_decode, head_dim 80": 16,
    "ordered_prefill": 288,
    "ordered_latent_decode": 240,
    "ordered_latent_decode, MiniCPM3": 448,
    "ordered_latent_prefill": 16,
    "ordered_latent_prefill, MiniCPM3": 80,
    "experts, int4": 160,
    "mx_experts, float32": 448,  # tensor cores do not multiply them
    "mx_experts, gpt-oss, 64 tokens": 8,  # the grouping of 256 pairs, on an RTX 50
    "lora, 64 rows": 16,  # on an RTX 50
    "block_products, 256 rows, Q8_0": 16,  # not on Hopper, whose tiles are larger
    "few_adapted_rows, 1024, 64 rows": 16,
    # States of chunks: less on Hopper, where products read from shared memory.
    "gated_delta, Qwen3-Next, prefill": 240,
    "gated_delta, float16": 224,
    "gated_delta, keys of 96, prefill": 16,
    "state_space, Mamba-2, prefill": 16,  # on an RTX 50
    "quantized_rows": 96,  # those with 32 rows and more, and a few numbers of float32
}


def max_spill(name: str) -> int:
    """The bytes that a case may spill: 0, except in the table."""
    return max((n for prefix, n in SPILLS.items() if name.startswith(prefix)), default=0)


# Attention takes the longest to compile: these cases of it are for all GPUs.
COMMON_ATTENTION = ("Qwen3-8B", "head_dim 256", "head_dim 512", "window")
# Of quantized layers these are for one GPU: all have 1 and 64 rows, and float16.
RARER_ROWS = (" 16 rows", " 32 rows", "float32")


# The kernels of which one is compiled for all steps of a layer.
ORDERED_STATES = (
    "ordered_gated_delta", "ordered_channel_delta", "ordered_state_space", "gated_norm, one order",
)  # fmt: skip


def capabilities(name: str) -> tuple[int, ...]:
    """The GPUs where its kernels are used, and differ enough from those of another case."""
    parts = (
        "few_rows", "few_experts", "few_adapted", "hopper", "eager", "many tokens",
        "codes, block size 16",  # which must be asked for
        "one order",
    )  # fmt: skip
    alone = any(part in name for part in parts)
    alone |= "attention" in name and not any(part in name for part in COMMON_ATTENTION)
    alone |= name.startswith((*ORDERED_STATES, "ordered_latent", "heads_linear"))
    alone |= name.startswith("latent") and name.endswith(("few tokens", "float32"))
    states = name.startswith(("gated_delta", "channel_delta", "state_space"))
    alone |= states and "Qwen3-Next" not in name and "Mamba-2" not in name
    alone |= name.startswith("quantized_rows") and name.endswith(RARER_ROWS)
    if name.startswith("rounded_linear, e4m3"):
        return tuple(n for n in CAPABILITIES if n >= 89)
    return (HOPPER,) if alone else tuple(CAPABILITIES)


CASES = {name: Case(call, max_spill(name), capabilities(name)) for name, call in CALLS.items()}


class AbsentGPU:
    """The driver's part that a compilation asks; one device for each capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def _active_capability(device: object) -> int:
    """The active driver's capability. Modules that are imported meanwhile keep this function."""
    from triton.runtime import driver

    return int(driver.active.get_current_device())


def compile_case(name: str, capability: int) -> list[dict[str, Any]]:
    """The resources of each kernel of a case, or the error of its compilation."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from nanovllm.kernels.triton import common

    run, kernels = JITFunction.run, {}

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        kernel = run(self, *args, **kwargs | {"warmup": True})
        kernels[kernel.hash] = kernel

    driver.set_active(AbsentGPU(capability))
    known = mock.patch.object(common, "capability", _active_capability)
    place = {"case": name, "capability": capability}
    try:
        # Triton's error output must not mix with the lines of JSON.
        with (
            known,
            redirect_stdout(sys.stderr),
            mock.patch.object(JITFunction, "run", compile_only),
        ):
            CASES[name].call()
        assert kernels, "the call launches no kernel"
        return [place | resources(kernel) for kernel in kernels.values()]
    except Exception:
        return [place | {"error": traceback.format_exc()}]


def resources(kernel: Any) -> dict[str, Any]:
    """Read from the binary itself, so that no option of the assembler is guessed."""
    import triton
    from triton.runtime.cache import get_cache_manager

    with TemporaryDirectory() as folder:
        cubin = Path(folder) / "cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert used, usage
    registers, stack, local = map(int, used.groups())
    return {
        "kernel": kernel.name,
        "registers": registers,
        "spill_bytes": stack + local,  # kernels of Triton have nothing else on the stack
        "shared_bytes": kernel.metadata.shared,
        "folder": get_cache_manager(kernel.hash).cache_dir,  # of the kernel's .ttir and .ptx
    }


def compile_all(names: list[str]) -> Iterator[dict[str, Any]]:
    """Every case for all its capabilities, on all cores; Triton is imported once."""
    import triton.runtime.jit  # noqa: F401

    tasks = [(name, capability) for name in names for capability in CASES[name].capabilities]
    cores = min(len(os.sched_getaffinity(0)), len(tasks))
    with ProcessPoolExecutor(cores, multiprocessing.get_context("fork")) as pool:
        futures = {task: pool.submit(compile_case, *task) for task in tasks}
        for (name, capability), future in futures.items():
            try:
                yield from future.result()
            except Exception as error:  # the compiler took the process with it
                yield {"case": name, "capability": capability, "error": repr(error)}


def serve() -> None:
    """Compile what each line of stdin asks for, until there are no more."""
    for line in sys.stdin:
        name, capability = json.loads(line)
        sys.stdout.write(json.dumps(compile_case(name, capability)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
        sys.exit()
    part = " ".join(sys.argv[1:])
    for line in compile_all([name for name in CASES if part in name]):
        sys.stdout.write(json.dumps(line) + "\n")
