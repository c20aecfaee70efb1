"""The CPU's compiled kernels: `cpu_kernels.cpp`, called on tensors' addresses.

The twins are `plain` and `paged_attention`, for float32 and bfloat16. T tokens, B sequences, H
query heads, KVH key heads, D head dimension, V tokens of the vocabulary.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nanovllm.kernels.compiled import load
from nanovllm.kernels.plain import Decoding, Rope, RowState

SOURCE = Path(__file__).with_suffix(".cpp")
DTYPES = (torch.float32, torch.bfloat16)
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8  # a head dimension is a multiple of it
# Keys of a task, where a sequence has so few queries that they fit one: long contexts are shared
# out too, and by their own length alone, so that the sums are the same in any batch.
SPLIT_KEYS = 1024
NO_WINDOW = 2**31 - 1  # longer than any context

TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
ARGUMENTS = {
    "rms_norm": "pipipppiifi",
    "silu_and_mul": "pipiii",
    "norm_rope_store": "pippippfpppppiiiiii",
    "attention": "p",
    "sample": "pipppppiii",
    "read_rows": "ppppppppppiiii",
}
STEP_POINTERS = (
    "q", "k", "v", "out", "q_ends", "k_lens", "tables", "tasks", "merges", "partial",
)  # fmt: skip
STEP_INTEGERS = (
    "num_tasks", "num_merges", "q_stride", "k_stride", "v_stride", "table_stride", "block_size",
    "q_heads", "kv_heads", "head_dim", "window", "threads",
)  # fmt: skip


class Step(ctypes.Structure):
    """`Step` of the C++ source, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in STEP_POINTERS),
        *((name, ctypes.c_int64) for name in STEP_INTEGERS),
        ("scale", ctypes.c_float),
    )


@functools.cache
def _function(name: str, dtype: torch.dtype | str = "any") -> Callable[..., None]:
    """A function of the library, for tensors of `dtype`. The first call may compile it."""
    symbol = f"{name}_{str(dtype).removeprefix('torch.')}"
    address = ctypes.c_void_p.in_dll(load(SOURCE), symbol).value
    assert address is not None
    return ctypes.CFUNCTYPE(None, *(TYPES[kind] for kind in ARGUMENTS[name]))(address)


@functools.cache
def _constant(name: str) -> int:
    return ctypes.c_int64.in_dll(load(SOURCE), name).value


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of each row of x [T, N], in float32 inside. Reads x once, writes as much."""
    num_rows, size = x.shape
    assert x.dtype == weight.dtype and weight.shape == (size,)
    assert x.stride(1) == weight.stride(0) == 1
    out = x.new_empty(num_rows, size)
    _function("rms_norm", x.dtype)(
        x.data_ptr(), x.stride(0), None, 0, weight.data_ptr(), out.data_ptr(), None, num_rows, size,
        eps, torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of `x + residual`, and the sum as it was rounded. Two reads and two writes of [T, N]."""
    num_rows, size = x.shape
    assert x.dtype == residual.dtype == weight.dtype
    assert residual.shape == x.shape and weight.shape == (size,)
    assert x.stride(1) == residual.stride(1) == weight.stride(0) == 1
    out, total = x.new_empty(num_rows, size), x.new_empty(num_rows, size)
    _function("rms_norm", x.dtype)(
        x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), weight.data_ptr(),
        out.data_ptr(), total.data_ptr(), num_rows, size, eps, torch.get_num_threads(),
    )  # fmt: skip
    return out, total


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Of x [T, 2 * I], gate beside up, make [T, I]. Reads x once, writes half as much."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    out = x.new_empty(num_rows, size)
    _function("silu_and_mul", x.dtype)(
        x.data_ptr(), x.stride(0), out.data_ptr(), num_rows, size, torch.get_num_threads()
    )
    return out


def norm_rope_store(
    qkv: torch.Tensor,
    num_kv_heads: int,
    rope: Rope,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [T, H, D], keys and values [T, KVH, D] of qkv [T, H + 2 * KVH, D].

    As the twin does it. Reads qkv once; writes queries and values once, keys twice.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    cos, sin = rope
    assert 2 * cos.shape[2] <= head_dim
    assert qkv.dtype == k_cache.dtype == v_cache.dtype or not k_cache.numel()
    assert cos.dtype == sin.dtype == torch.float32 and slot_mapping.dtype == torch.int64
    assert qkv.stride(2) == 1 and qkv.stride(1) == head_dim
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and slot_mapping.is_contiguous()
    assert cos.stride() == sin.stride() and cos.stride(2) == 1
    num_q_heads = num_heads - 2 * num_kv_heads
    q = qkv.new_empty(num_tokens, num_q_heads, head_dim)
    k = qkv.new_empty(num_tokens, num_kv_heads, head_dim)
    q_weight, k_weight = norms if norms is not None else (None, None)
    assert norms is None or norms[0].dtype == norms[1].dtype == qkv.dtype
    stores = k_cache.numel() > 0  # or there is no cache yet
    _function("norm_rope_store", qkv.dtype)(
        qkv.data_ptr(), qkv.stride(0), cos.data_ptr(), sin.data_ptr(), cos.stride(0),
        _address(q_weight), _address(k_weight), eps, q.data_ptr(), k.data_ptr(),
        k_cache.data_ptr() if stores else None, v_cache.data_ptr(), slot_mapping.data_ptr(),
        num_tokens, num_q_heads, num_kv_heads, head_dim, cos.shape[2], torch.get_num_threads(),
    )  # fmt: skip
    return q, k, qkv[:, num_q_heads + num_kv_heads :]


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor | None, keys: torch.Tensor | None
) -> torch.Tensor:
    """Token ids [B] for logits [B, V], as `plain.sample` says. Reads the logits once."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    pieces = -(-vocab_size // _constant("piece"))
    best = logits.new_empty(num_rows, pieces, dtype=torch.float32)
    ids, out = (logits.new_empty(num_rows * n, dtype=torch.int64) for n in (pieces, 1))
    if temperatures is None or keys is None:
        temperatures = keys = None
    else:
        assert temperatures.dtype == torch.float32 and keys.dtype == torch.int64
        assert temperatures.is_contiguous() and keys.is_contiguous()
    _function("sample", logits.dtype)(
        logits.data_ptr(), logits.stride(0), _address(temperatures), _address(keys),
        out.data_ptr(), best.data_ptr(), ids.data_ptr(), num_rows, vocab_size,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def read_rows(state: RowState, num_rows: int, width: int, block_size: int) -> Decoding:
    """The step of the first `num_rows` of the batch, whose lengths go up by one.

    Block tables are filled up with block 0.
    """
    assert all(x.is_contiguous() for x in state) and num_rows <= len(state.batch)
    longs = state.tokens.new_empty(5, num_rows)
    context_lens = state.lengths.new_empty(num_rows)
    tables = state.block_tables.new_empty(num_rows, width)
    temperatures = state.temperatures.new_empty(num_rows)
    _function("read_rows")(
        *(x.data_ptr() for x in (*state, longs, context_lens, tables, temperatures)),
        num_rows, state.block_tables.stride(0), width, block_size,
    )  # fmt: skip
    rows, input_ids, positions, slot_mapping, keys = longs
    return Decoding(
        rows, input_ids, positions, slot_mapping, context_lens, tables, temperatures, keys
    )


@dataclass(slots=True)
class Tasks:
    """A layer's attention, cut up for threads that take one task after the other.

    Each row of `tasks` is a sequence, its first row (a query of a head), the first key, the end of
    the keys, and which of `num_slots` states it leaves for `merges`, or -1 if it is alone.
    """

    tasks: torch.Tensor  # [tasks, 5], the largest first
    merges: torch.Tensor  # [merges, 3]: a sequence, its first slot, and the end of its slots
    num_slots: int


@dataclass(slots=True)
class AttentionPlan:
    """A step's sequences, and the tasks of its layers: those of one window have the same."""

    q_ends: torch.Tensor  # [B + 1]
    k_lens: torch.Tensor  # [B]
    block_tables: torch.Tensor | None
    group: int
    few: int  # rows of a sequence that go without tiles
    tasks: dict[int, Tasks] = field(default_factory=dict)  # by window

    def tasks_of(self, window: int) -> Tasks:
        """The tasks of a layer, made for the first one that asks."""
        if window not in self.tasks:
            self.tasks[window] = _cut_up(self, window)
        return self.tasks[window]


def plan_attention(
    q_ends: torch.Tensor,
    k_lens: torch.Tensor,
    block_tables: torch.Tensor | None,
    group: int,
    head_dim: int,
) -> AttentionPlan:
    """The attention of sequences whose queries, `group` heads each, are their last keys."""
    assert q_ends.dtype == k_lens.dtype == torch.int32
    assert q_ends.is_contiguous() and k_lens.is_contiguous()
    if block_tables is not None:
        assert block_tables.dtype == torch.int32 and block_tables.stride(1) == 1
    few = _constant("few_rows") if head_dim % _constant("lanes") == 0 else 0
    return AttentionPlan(q_ends, k_lens, block_tables, group, few)


def _cut_up(plan: AttentionPlan, window: int) -> Tasks:
    """Of each sequence the keys that some query sees, and nothing before them."""
    ends, lens, group = plan.q_ends.tolist(), plan.k_lens.tolist(), plan.group
    tasks: list[tuple[int, int, int, int, int]] = []
    merges: list[tuple[int, int, int]] = []
    num_slots = 0
    for seq, num_keys in enumerate(lens):
        num_queries = ends[seq + 1] - ends[seq]
        first = max(0, num_keys - num_queries + 1 - window)
        if num_queries * group > plan.few:
            tasks += _tiles(seq, num_queries, num_keys, group, window)
        elif num_keys - first <= SPLIT_KEYS:
            tasks.append((seq, 0, first, num_keys, -1))
        else:
            starts = range(first, num_keys - num_queries + 1, SPLIT_KEYS)
            ends_of = [*starts[1:], num_keys]
            slots = range(num_slots, num_slots + len(starts))
            tasks += [(seq, 0, *part) for part in zip(starts, ends_of, slots, strict=True)]
            merges.append((seq, slots.start, slots.stop))
            num_slots = slots.stop
    tasks.sort(key=lambda task: task[2] - task[3])
    return Tasks(
        torch.tensor(tasks, dtype=torch.int32), torch.tensor(merges, dtype=torch.int32), num_slots
    )


def _tiles(
    seq: int, num_queries: int, num_keys: int, group: int, window: int
) -> list[tuple[int, int, int, int, int]]:
    """A sequence's tiles, each with the keys from its first query's to its last one's."""
    num_rows, tile_rows = num_queries * group, _constant("tile_rows")
    if num_keys == 0:
        return [(seq, row, 0, 0, -1) for row in range(0, num_rows, tile_rows)]
    last_rows = [min(row + tile_rows, num_rows) - 1 for row in range(0, num_rows, tile_rows)]
    seen = num_keys - num_queries + 1  # by the first query, without a window
    return [
        (seq, row, max(0, seen + row // group - window), seen + last // group, -1)
        for row, last in zip(range(0, num_rows, tile_rows), last_rows, strict=True)
    ]


def plan_prefill(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    block_tables: torch.Tensor | None,
    group: int,
    head_dim: int,
) -> AttentionPlan:
    """A prefill step's attention."""
    return plan_attention(cu_seqlens_q, cu_seqlens_k.diff(), block_tables, group, head_dim)


def plan_decode(
    context_lens: torch.Tensor, block_tables: torch.Tensor, group: int, head_dim: int
) -> AttentionPlan:
    """A decode step's attention; rows of length 0 give zeros."""
    q_ends = torch.arange(len(context_lens) + 1, dtype=torch.int32)
    return plan_attention(q_ends, context_lens, block_tables, group, head_dim)


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, H, D] to k, v [T, KVH, D], or to the cache if a part is there.

    With a window a query sees its own key and those right before it, so many in all. Scores and
    weights are float32. Keys and values are read once for the 16 or 32 rows of a tile.
    """
    if plan.block_tables is not None:
        return decode_attention(q, k_cache, v_cache, plan, scale, window)
    return _attention(q, k, v, plan, 1, scale, window)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of q [B, H, D], the last of each context; rows without one give zeros.

    Bytes moved: the KV of all contexts, or what the window shows of it, read in place and once.
    """
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    k, v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    return _attention(q, k, v, plan, k_cache.shape[1], scale, window)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, block_size: int,
    scale: float, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Of q [T, H, D]: k and v [tokens, KVH, D] are the step's own, or the cache's."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k.shape[1]
    for x in (q, k, v):
        assert x.dtype == q.dtype and x.stride(2) == 1 and x.stride(1) == head_dim
    tables, reach = plan.block_tables, NO_WINDOW if window is None else window
    cut = plan.tasks_of(reach)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    partial = torch.empty(
        cut.num_slots * num_kv_heads * _constant("state_bytes"), dtype=torch.uint8
    )
    step = Step(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), plan.q_ends.data_ptr(),
        plan.k_lens.data_ptr(), _address(tables), cut.tasks.data_ptr(), cut.merges.data_ptr(),
        partial.data_ptr(), len(cut.tasks), len(cut.merges), q.stride(0), k.stride(0), v.stride(0),
        0 if tables is None else tables.stride(0), block_size, num_heads, num_kv_heads, head_dim,
        reach, torch.get_num_threads(), scale,
    )  # fmt: skip
    _function("attention", q.dtype)(ctypes.addressof(step))
    return out


def _address(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.data_ptr()
