"""The points that `kernels.py` measures: inputs, calls, bytes and FLOPs of each kernel."""

import contextlib
import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from nanovllm.kernels.kv_layer import CODES, KVLayer, head_bytes
from nanovllm.kernels.operands.quantized_matrix import QuantizedMatrix
from nanovllm.kernels.plain import decode_attention as plain_decode
from nanovllm.kernels.plain import prefill_attention as plain_prefill
from nanovllm.kernels.plain import store_kvcache as plain_store
from nanovllm.kernels.plain.kv_codes import quantize
from nanovllm.kernels.plain.norm_rope_store import rotate
from nanovllm.kernels.table import PLAIN
from nanovllm.kernels.triton.attention import decode_attention as decode
from nanovllm.kernels.triton.attention import prefill_attention as prefill
from nanovllm.kernels.triton.attention.decode_plan import plan_decode
from nanovllm.kernels.triton.attention.norm_rope_store import norm_rope_store
from nanovllm.kernels.triton.attention.prefill_plan import plan_prefill
from nanovllm.kernels.triton.attention.store_kvcache import store_kvcache
from nanovllm.kernels.triton.common import INTERPRETED, rows_with_room
from nanovllm.kernels.triton.experts.experts import experts
from nanovllm.kernels.triton.linear.dequantize import dequantize
from nanovllm.kernels.triton.linear.few_rows import few_rows_for
from nanovllm.kernels.triton.linear.quantized_linear import arrange, quantized_linear
from nanovllm.kernels.triton.linear.rms_norm import add_rms_norm, rms_norm
from nanovllm.kernels.triton.linear.silu_and_mul import silu_and_mul
from nanovllm.kernels.triton.sampling.sample import sample

DEVICE = "cpu" if INTERPRETED.value else "cuda"
DTYPE, ITEMSIZE = torch.bfloat16, 2
D, KVH = 128, 8  # of all points: head_dim, key heads
SCALE, EPS = D**-0.5, 1e-6
BLOCK_SIZE, FLASH_BLOCK_SIZE = 64, 256  # ours and flash-attn's, of one cache
KV_BYTES = 2 * KVH * D * ITEMSIZE  # of a token

Call = Callable[..., Any]
Calls = dict[str, Call]  # by implementation: "ours", "twin", "flash_attn"


@dataclass(frozen=True)
class Point:
    """A kernel at one size."""

    name: str
    make: Callable[[], Calls]  # makes inputs, and binds each implementation's call to them
    num_bytes: int
    flops: int = 0
    twin_syncs: bool = False


flash_attn: Any = None
if DEVICE == "cuda":
    with contextlib.suppress(ImportError):
        flash_attn = importlib.import_module("flash_attn")


def normal(*shape: int) -> torch.Tensor:
    """Random numbers on the device."""
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def int32(numbers: list[int]) -> torch.Tensor:
    """Lengths or offsets for a kernel."""
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


class PagedContexts:
    """Contexts in one cache, their blocks in random order, for both block sizes."""

    def __init__(self, lens: list[int]) -> None:
        counts = [-(-n // FLASH_BLOCK_SIZE) for n in lens]
        order = torch.randperm(sum(counts)).int().to(DEVICE)
        parts = FLASH_BLOCK_SIZE // BLOCK_SIZE
        self.flash_tables = pad_sequence(list(order.split(counts)), batch_first=True)
        split = self.flash_tables[:, :, None] * parts + int32(list(range(parts)))
        self.tables = split.flatten(1)
        self.lens = int32(lens)
        self.k, self.v = (normal(sum(counts) * parts, BLOCK_SIZE, KVH, D) for _ in range(2))
        shape = (-1, FLASH_BLOCK_SIZE, KVH, D)
        self.flash_k, self.flash_v = self.k.view(shape), self.v.view(shape)


def empty_caches(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V caches with room for `num_tokens` tokens, and a slot for each of them."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    k, v = torch.zeros(2, num_blocks, BLOCK_SIZE, KVH, D, dtype=DTYPE, device=DEVICE)
    return k, v, torch.randperm(num_blocks * BLOCK_SIZE)[:num_tokens].to(DEVICE)


def store_kvcache_point(num_tokens: int) -> Point:
    """Keys and values are views into a fused projection, as the layer passes them."""

    def make() -> Calls:
        k, v = normal(num_tokens, 4 * KVH, D)[:, 2 * KVH :].split(KVH, dim=1)
        k_cache, v_cache, slots = empty_caches(num_tokens)

        def stored(store: Callable[..., Any], *caches: torch.Tensor) -> Any:
            store(k, v, KVLayer(*caches, SCALE), slots)
            return caches

        twin = plain_store.store_kvcache
        return {
            "ours": partial(stored, store_kvcache, k_cache, v_cache),
            "twin": partial(stored, twin, k_cache.clone(), v_cache.clone()),
        }

    num_bytes = num_tokens * (2 * KV_BYTES + 8)
    return Point(f"{num_tokens} tokens", make, num_bytes, twin_syncs=True)


def context_lens(batch_size: int, context: int | None) -> list[int]:
    """One length for all rows; None mixes them."""
    rng = random.Random(0)
    return [context or rng.randint(100, 2048) for _ in range(batch_size)]


def plan_decode_point(batch_size: int, context: int | None) -> Point:
    """The plan that all layers of a step share.

    A call returns the attention with its plan as a function, so that its result is verified.
    """
    paged = PagedContexts(context_lens(batch_size, context))
    x = (normal(batch_size, 2 * KVH, D), KVLayer(paged.k, paged.v, SCALE))

    def ours() -> Call:
        plan = plan_decode(paged.lens, paged.tables, KVH, copies_tiles=True)
        return partial(decode.decode_attention, *x, plan)

    def twin() -> Call:
        plan = plain_decode.plan_decode(paged.lens, paged.tables, BLOCK_SIZE)
        return partial(plain_decode.decode_attention, *x, plan)

    name = f"{batch_size} x {context or 'mixed'}"
    return Point(name, lambda: {"ours": ours, "twin": twin}, 4 * batch_size, twin_syncs=True)


def codes_of(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a cache [blocks, block_size, KVH, D]."""
    codes, scales = quantize(cache.flatten(0, 1))
    return codes.view(cache.shape), scales.view(cache.shape[:3]).transpose(1, 2).contiguous()


def decode_attention_point(
    batch_size: int,
    context: int | None,
    num_heads: int,
    num_queries: int = 1,
    quantized: bool = False,
) -> Point:
    """The last queries of each context, which is in the cache; the plan is not timed."""
    lens = context_lens(batch_size, context)

    def make() -> Calls:
        q, paged = normal(batch_size * num_queries, num_heads, D), PagedContexts(lens)
        seen = int32([n - num_queries + 1 + i for n in lens for i in range(num_queries)])
        kv = KVLayer(paged.k, paged.v, SCALE)
        if quantized:
            (k, k_scales), (v, v_scales) = codes_of(paged.k), codes_of(paged.v)
            kv = KVLayer(k, v, SCALE, None, k_scales, v_scales)
        x = (q, kv)
        plan = plan_decode(seen, paged.tables, KVH, True, num_queries)
        twin_plan = plain_decode.plan_decode(seen, paged.tables, BLOCK_SIZE, num_queries)
        calls: Calls = {
            "ours": lambda: decode.decode_attention(*x, plan),
            "twin": lambda: plain_decode.decode_attention(*x, twin_plan),
        }
        if flash_attn and not quantized:
            calls["flash_attn"] = lambda: flash_attn.flash_attn_with_kvcache(
                q.unflatten(0, (-1, num_queries)), paged.flash_k, paged.flash_v,
                cache_seqlens=paged.lens, block_table=paged.flash_tables, softmax_scale=SCALE,
                causal=True,
            ).flatten(0, 1)  # fmt: skip
        return calls

    # Queries, outputs and lengths.
    rows = batch_size * num_queries * (2 * num_heads * D * ITEMSIZE + 4)
    tables = 4 * sum(-(-n // BLOCK_SIZE) for n in lens)
    name = f"{batch_size} x {context or 'mixed'}, heads {num_heads}/{KVH}"
    name += f", {num_queries} queries" if num_queries > 1 else ""
    kv_bytes = 2 * KVH * head_bytes(D, CODES) if quantized else KV_BYTES
    return Point(name, make, sum(lens) * kv_bytes + rows + tables)


def prefill_attention_point(num_seqs: int, queries: int, context: int, num_heads: int) -> Point:
    """Queries at the end of a context; if they are the whole context, no key is in the cache."""
    num_tokens, cached = num_seqs * queries, context - queries

    def make() -> Calls:
        heads = (num_heads, KVH, KVH)
        q, k, v = normal(num_tokens, sum(heads), D).split(heads, dim=1)
        paged = PagedContexts([context if cached else 1] * num_seqs)
        tables, flash_tables = (paged.tables, paged.flash_tables) if cached else (None, None)
        cu_q, cu_k = (int32([n * i for i in range(num_seqs + 1)]) for n in (queries, context))
        plan = plan_prefill(cu_q, cu_k, tables, num_tokens)
        twin_plan = plain_prefill.plan_prefill(cu_q, cu_k, tables, BLOCK_SIZE)
        x = (q, k, v, KVLayer(paged.k, paged.v, SCALE))
        keys, values = (paged.flash_k, paged.flash_v) if cached else (k, v)
        calls: Calls = {
            "ours": lambda: prefill.prefill_attention(*x, plan),
            "twin": lambda: plain_prefill.prefill_attention(*x, twin_plan),
        }
        if flash_attn:
            calls["flash_attn"] = lambda: flash_attn.flash_attn_varlen_func(
                q, keys, values, cu_q, cu_k, queries, context, softmax_scale=SCALE, causal=True,
                block_table=flash_tables,
            )  # fmt: skip
        return calls

    pairs = num_seqs * (queries * cached + queries * (queries + 1) // 2)
    num_bytes = 2 * num_tokens * num_heads * D * ITEMSIZE + num_seqs * context * KV_BYTES
    name = f"{num_seqs} x {queries}{f' + {cached} cached' if cached else ''}"
    name += f", heads {num_heads}/{KVH}"
    return Point(name, make, num_bytes, flops=4 * D * num_heads * pairs)


def norm_point(ours: Call, twin: Call, num_inputs: int, num_tokens: int, size: int) -> Point:
    """Writes as many rows as it reads."""

    def make() -> Calls:
        x = (*(normal(num_tokens, size) for _ in range(num_inputs)), normal(size), EPS)
        return {"ours": partial(ours, *x), "twin": partial(twin, *x)}

    num_bytes = (2 * num_inputs * num_tokens + 1) * size * ITEMSIZE
    return Point(f"{num_tokens} x {size}", make, num_bytes)


def silu_and_mul_point(num_tokens: int, size: int) -> Point:
    """Reads gate and up, writes one row."""

    def make() -> Calls:
        x = normal(num_tokens, 2 * size)
        return {"ours": partial(silu_and_mul, x), "twin": partial(PLAIN.silu_and_mul, x)}

    return Point(f"{num_tokens} x {size}", make, 3 * num_tokens * size * ITEMSIZE)


def few_rows_point(num_rows: int, hidden: int, attended: int, projected: int, inner: int) -> Point:
    """A layer without its attention. The twin is what it replaces: PyTorch's linear
    layers, the Triton kernels around them. Its first norm is made before, as its last is ours.
    """
    sizes = ((projected, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner))

    def make() -> Calls:
        qkv, o, gate_up, down = (normal(*size).mul_(size[1] ** -0.5) for size in sizes)
        x, attention = normal(num_rows, hidden), rows_with_room(num_rows, attended, qkv)
        attention.copy_(normal(num_rows, attended))
        norms = (normal(hidden), normal(hidden))
        few = few_rows_for([qkv, o, gate_up, down])
        assert few is not None
        above, scaled = few.add(attention, o, None, x, norms[1], EPS)
        normed = rms_norm(above, norms[1], EPS)

        def ours() -> Any:
            total, inside = few.add(attention, o, None, x, norms[0], EPS)
            out, _ = few.add(few.gated(inside, gate_up), down, None, total, norms[1], EPS)
            return few.linear(scaled, qkv), out

        def twin() -> Any:
            inside, total = add_rms_norm(F.linear(attention, o), x, norms[0], EPS)
            out = F.linear(silu_and_mul(F.linear(inside, gate_up)), down)
            return F.linear(normed, qkv), add_rms_norm(out, total, norms[1], EPS)[1]

        return {"ours": ours, "twin": twin}

    weights = sum(rows * columns for rows, columns in sizes)
    name = f"{num_rows} rows, hidden {hidden}"
    return Point(name, make, weights * ITEMSIZE, flops=2 * num_rows * weights)


def experts_point(
    num_tokens: int, num_here: int, num_experts: int, hidden: int, inside: int
) -> Point:
    """Each token takes a sixteenth of all experts; the first ones belong to this rank.

    Floor: the weights of those that are taken once, and a row in and out for each token.
    """
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(0))
    shares, ids = scores.softmax(-1).topk(num_experts // 16)
    here = ids[ids < num_here]

    def make() -> Calls:
        gate_up = normal(num_here, 2 * inside, hidden).mul_(hidden**-0.5)
        down = normal(num_here, hidden, inside).mul_(inside**-0.5)
        taken = (ids.to(DEVICE), shares.to(DEVICE), num_experts)
        x = (normal(num_tokens, hidden), gate_up, down, *taken)
        return {"ours": partial(experts, *x), "twin": partial(PLAIN.experts, *x)}

    weights = 3 * hidden * inside
    num_bytes = (len(here.unique()) * weights + 2 * num_tokens * hidden) * ITEMSIZE
    name = f"{num_tokens} tokens, {num_here} of {num_experts} here"
    return Point(name, make, num_bytes, flops=2 * len(here) * weights, twin_syncs=True)


def quantized_point(kind: str, num_rows: int, size_out: int, size_in: int) -> Point:
    """A linear layer with a weight of codes; the twin is PyTorch's, with a bf16 weight."""
    block = {"e4m3": (128, 128), "int4": (1, 128)}.get(kind, (1, size_in))
    blocks = (-(-size_out // block[0]), -(-size_in // block[1]))
    scales = torch.full(blocks, size_in**-0.5 / (4 if kind == "int4" else 64), device=DEVICE)

    def make() -> Calls:
        codes = torch.randint(-8, 8, (size_out, size_in), dtype=torch.int8, device=DEVICE)
        if kind != "int4":
            codes *= 15
        codes = codes.to(torch.float8_e4m3fn) if kind == "e4m3" else codes
        matrix = QuantizedMatrix(
            codes, scales, None, block, 4 if kind == "int4" else 8, rounds_inputs=kind == "e4m3"
        )
        x, arranged = normal(num_rows, size_in), arrange(matrix)
        weight = dequantize(arranged, DTYPE)
        return {
            "ours": partial(quantized_linear, x, arranged), "twin": partial(F.linear, x, weight),
        }  # fmt: skip

    weights = size_out * size_in
    num_bytes = weights // (2 if kind == "int4" else 1) + scales.nbytes
    num_bytes += num_rows * (size_in + size_out) * ITEMSIZE
    name = f"{kind}, {num_rows} rows, {size_out} x {size_in}"
    return Point(name, make, num_bytes, flops=2 * num_rows * weights)


def norm_rope_store_point(num_tokens: int, num_heads: int) -> Point:
    """The twin is what it replaces: PyTorch's norms and rotations, and the Triton store."""

    def make() -> Calls:
        qkv = normal(num_tokens, num_heads + 2 * KVH, D)
        angles = 6.28 * torch.rand(num_tokens, 1, D // 2, device=DEVICE)
        rope, norms = (angles.cos(), angles.sin()), (normal(D), normal(D))
        k_cache, v_cache, slots = empty_caches(num_tokens)
        kv = KVLayer(k_cache, v_cache, SCALE)
        twin_caches = (k_cache.clone(), v_cache.clone())

        def ours() -> Any:
            x = (qkv, KVH, rope, norms, EPS, kv, slots)
            return *norm_rope_store(*x), k_cache, v_cache

        def twin() -> Any:
            q, k, v = qkv.split((num_heads, KVH, KVH), dim=1)
            q, k = (F.rms_norm(x, (D,), w, EPS) for x, w in zip((q, k), norms, strict=True))
            q, k = rotate(q, rope), rotate(k, rope)
            store_kvcache(k, v, KVLayer(*twin_caches, SCALE), slots)
            return q, k, v, *twin_caches

        return {"ours": ours, "twin": twin}

    heads = 2 * num_heads + 3 * KVH + 2 * KVH  # queries in and out, keys in and twice out, values
    num_bytes = num_tokens * (heads * D * ITEMSIZE + 4 * D + 8)  # and the angles, and a slot
    return Point(f"{num_tokens} tokens, heads {num_heads}/{KVH}", make, num_bytes)


def sample_point(num_rows: int, vocab_size: int, temperature: float) -> Point:
    """All rows at one temperature; 0 as for a batch of greedy rows alone."""

    def make() -> Calls:
        temperatures = torch.full((num_rows,), temperature, device=DEVICE)
        keys = torch.randint(-(1 << 63), (1 << 63) - 1, (num_rows,), device=DEVICE)
        drawn = (temperatures, keys) if temperature else (None, None)
        x = (normal(num_rows, vocab_size).mul_(3), *drawn)
        return {"ours": partial(sample, *x), "twin": partial(PLAIN.sample, *x)}

    name = f"{num_rows} x {vocab_size}, {f'T = {temperature}' if temperature else 'greedy'}"
    return Point(name, make, num_rows * vocab_size * ITEMSIZE)


Sizes = list[tuple[Any, ...]]
HEADS = (16, 32)
TOKENS = (1, 64, 256, 16384)
DECODES = (  # rows, context; None mixes 100 to 2048
    (1, 1000), (8, 1000), (32, 1000), (64, 500), (64, 1000), (64, 2000), (64, None), (128, 1000),
    (256, 500), (256, 1000), (256, 2000), (256, None), (1, 131_072),
)  # fmt: skip
SPECULATING = [(n, 1000, heads, 5) for heads in HEADS for n in (1, 8, 32, 64)]  # 5 queries each
PREFILLS = (  # sequences, queries, context
    (16, 1024, 1024), (8, 2048, 2048), (4, 4096, 4096), (2, 8192, 8192), (16, 1024, 2048),
    (4, 1024, 4096), (2, 1024, 8192),
)  # fmt: skip
LOGITS = (
    (1, 151_936), (16, 151_936), (64, 151_936), (256, 151_936), (512, 151_936), (64, 262_144),
)  # fmt: skip
NORMS: Sizes = [(n, size) for size in (1024, 4096) for n in TOKENS]

# The function that makes a kernel's points, all sizes, and those of --quick for the interpreter.
KERNELS: dict[str, tuple[Callable[..., Point], Sizes, Sizes]] = {
    "store_kvcache": (store_kvcache_point, [(n,) for n in TOKENS], [(5,)]),
    "plan_decode": (
        plan_decode_point, [(1, 1000), (64, None), (256, None), (1, 131_072)], [(2, 70)],
    ),
    "decode_attention": (
        decode_attention_point, [(*size, n) for n in HEADS for size in DECODES] + SPECULATING,
        [(2, 70, 16), (2, 70, 16, 3)],
    ),
    "decode_attention_fp8": (
        partial(decode_attention_point, quantized=True),
        [(*size, n) for n in HEADS for size in DECODES] + SPECULATING,
        [(2, 70, 16), (2, 70, 16, 3)],
    ),
    "prefill_attention": (
        prefill_attention_point, [(*size, n) for n in HEADS for size in PREFILLS],
        [(2, 20, 20, 16), (1, 9, 70, 32)],
    ),
    "rms_norm": (partial(norm_point, rms_norm, PLAIN.rms_norm, 1), NORMS, [(3, 1024)]),
    "add_rms_norm": (partial(norm_point, add_rms_norm, PLAIN.add_rms_norm, 2), NORMS, [(3, 1024)]),
    "silu_and_mul": (
        silu_and_mul_point, [(n, size) for size in (3072, 12288) for n in TOKENS], [(3, 3072)],
    ),
    "few_rows": (  # of Qwen3-0.6B and 8B
        few_rows_point,
        [(n, 1024, 2048, 4096, 3072) for n in (1, 16, 32, 64, 128, 256)]
        + [(n, 4096, 4096, 6144, 12288) for n in (1, 16, 32, 64)],
        [(3, 64, 128, 256, 192)],
    ),
    "experts": (
        experts_point,
        [(n, here, 128, 2048, 768) for here in (128, 16) for n in (1, 64, 256, 1024, 4096, 16384)],
        [(5, 32, 32, 64, 32), (5, 20, 32, 64, 32)],
    ),
    "quantized_linear": (  # of Qwen3-0.6B and 8B
        quantized_point,
        [(kind, n, *size) for kind in ("int8", "e4m3", "int4")
         for size in ((4096, 1024), (1024, 3072), (4096, 4096), (24576, 4096))
         for n in (1, 8, 16, 32, 64, 256, 2048)],
        [("int8", 2, 64, 256), ("e4m3", 2, 128, 256), ("int4", 70, 64, 256)],
    ),
    "norm_rope_store": (
        norm_rope_store_point, [(n, heads) for heads in HEADS for n in TOKENS], [(2, 16)],
    ),
    "sample": (
        sample_point, [(*size, t) for t in (0.6, 0.0) for size in LOGITS],
        [(1, 151_936, 0.6), (1, 151_936, 0.0)],
    ),
}  # fmt: skip
if torch.cuda.is_available() and few_rows_for([normal(16, 16)]) is None:  # nor is it used there
    del KERNELS["few_rows"]
