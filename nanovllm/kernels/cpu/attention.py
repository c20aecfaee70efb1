"""Divide a layer's attention into tasks for threads, and call the C++ kernel.

T tokens, B sequences, H query heads, KVH key heads, D head dimension. A row is a query of one head.
A sequence's rows with the same key head are computed together, so that keys are read once for all
of them.
"""

import ctypes
from dataclasses import dataclass, field

import torch

from nanovllm.kernels.cpu.library import address, constant, function
from nanovllm.kernels.kv_layer import CODES, KVLayer

HEAD_DIM_STEP = 8  # a head dimension is a multiple of it
FEW_STEP = 16  # also of it, if few rows are computed without tiles
# Keys of a task if a sequence has few queries: threads share the parts of a long context.
# Every context is divided at multiples of this number, a multiple of KEYS of vector.h, and the sums
# of parts are added in order: also those that one thread computes.
SPLIT_KEYS = 1024
SPLIT_QUERIES = 8  # tiles of a sequence with up to this many queries are split, too
NO_WINDOW = 2**31 - 1  # longer than any context

STEP_POINTERS = (
    "q", "k", "v", "k_scales", "v_scales", "out", "q_ends", "k_lens", "tables", "tasks", "merges",
    "partial",
)  # fmt: skip
STEP_INTEGERS = (
    "num_tasks", "num_merges", "q_stride", "k_stride", "v_stride", "table_stride", "block_size",
    "q_heads", "kv_heads", "head_dim", "value_dim", "window", "threads", "slot_bytes", "part_keys",
)  # fmt: skip


class Step(ctypes.Structure):
    """`Step` of attention.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in STEP_POINTERS),
        *((name, ctypes.c_int64) for name in STEP_INTEGERS),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
    )


@dataclass(slots=True)
class Tasks:
    """A layer's attention, divided into tasks that threads take one after the other.

    An entry of `tasks` is a sequence, its first row, its first key, the end of its keys, and the
    slot (of `num_slots`) in which it leaves its state for a merge, or -1 without a merge.
    """

    tasks: torch.Tensor  # [tasks, 5], the largest first
    merges: torch.Tensor  # [merges, 4]: a sequence, its first row, its first slot, their end
    num_slots: int


@dataclass(slots=True)
class AttentionPlan:
    """A step's sequences, and the tasks of its layers; layers with the same window share tasks."""

    q_ends: torch.Tensor  # [B + 1]
    k_lens: torch.Tensor  # [B]
    block_tables: torch.Tensor | None
    group: int
    few: int  # a sequence of at most this many rows is computed without tiles
    tasks: dict[int, Tasks] = field(default_factory=dict)  # by window

    def tasks_of(self, window: int) -> Tasks:
        """The tasks of a layer; made for the first layer with this window."""
        if window not in self.tasks:
            self.tasks[window] = _make_tasks(self, window)
        return self.tasks[window]


def plan_attention(
    q_ends: torch.Tensor,
    k_lens: torch.Tensor,
    block_tables: torch.Tensor | None,
    group: int,
    head_dim: int,
) -> AttentionPlan:
    """Plan attention of each sequence's last tokens: they are queries of `group` heads each."""
    assert q_ends.dtype == k_lens.dtype == torch.int32
    assert q_ends.is_contiguous() and k_lens.is_contiguous()
    if block_tables is not None:
        assert block_tables.dtype == torch.int32 and block_tables.stride(1) == 1
    few = constant("few_rows") if head_dim % FEW_STEP == 0 else 0
    return AttentionPlan(q_ends, k_lens, block_tables, group, few)


def _make_tasks(plan: AttentionPlan, window: int) -> Tasks:
    """Divide all sequences into tasks, which read only keys that some query sees."""
    ends, lens, group = plan.q_ends.tolist(), plan.k_lens.tolist(), plan.group
    tasks: list[tuple[int, int, int, int, int]] = []
    merges: list[tuple[int, int, int, int]] = []
    num_slots = 0
    for seq, num_keys in enumerate(lens):
        num_queries = ends[seq + 1] - ends[seq]
        first = max(0, num_keys - num_queries + 1 - window)
        is_few = num_queries * group <= plan.few
        whole = [(seq, 0, first, num_keys, -1)]
        if not is_few:
            whole = _tiles(seq, num_queries, num_keys, group, window)
        if num_keys - first <= SPLIT_KEYS or not (is_few or num_queries <= SPLIT_QUERIES):
            tasks += whole
            continue
        for _, row, start, end, _ in whole:
            starts = [start, *range(start // SPLIT_KEYS * SPLIT_KEYS + SPLIT_KEYS, end, SPLIT_KEYS)]
            ends_of = [*starts[1:], end]
            slots = range(num_slots, num_slots + len(starts))
            tasks += [(seq, row, *part) for part in zip(starts, ends_of, slots, strict=True)]
            merges.append((seq, row, slots.start, slots.stop))
            num_slots = slots.stop
    tasks.sort(key=lambda task: task[2] - task[3])
    return Tasks(
        torch.tensor(tasks, dtype=torch.int32), torch.tensor(merges, dtype=torch.int32), num_slots
    )


def _tiles(
    seq: int, num_queries: int, num_keys: int, group: int, window: int
) -> list[tuple[int, int, int, int, int]]:
    """A sequence's tiles, each with the keys that some of its queries see."""
    num_rows, tile_rows = num_queries * group, constant("tile_rows")
    if num_keys == 0:
        return [(seq, row, 0, 0, -1) for row in range(0, num_rows, tile_rows)]
    last_rows = [min(row + tile_rows, num_rows) - 1 for row in range(0, num_rows, tile_rows)]
    seen = num_keys - num_queries + 1  # keys that the first query sees without a window
    return [
        (seq, row, max(0, seen + row // group - window), seen + last // group, -1)
        for row, last in zip(range(0, num_rows, tile_rows), last_rows, strict=True)
    ]


def slot_bytes(value_dim: int, is_latent: bool) -> int:
    """The bytes of a state that is left for a merge: of few rows, or of a tile.

    A tile's state has a line for its maxima, one for its sums, and one for each number of a value,
    rounded up to vectors.
    """
    lanes = constant("lanes")
    tile = (2 + -(-value_dim // lanes) * lanes) * constant("tile_rows") * 4
    return max(tile, constant("latent_state_bytes" if is_latent else "state_bytes"))


def attend_to_cache(q: torch.Tensor, kv: KVLayer, plan: AttentionPlan) -> torch.Tensor:
    """Attention of q [T, H, D] to the cached blocks of the plan, which are read in place."""
    assert kv.k_cache.is_contiguous() and kv.v_cache.is_contiguous()
    k, v = kv.k_cache.flatten(0, 1), kv.v_cache.flatten(0, 1)
    return attend(q, k, v, kv.k_cache.shape[1], kv, plan)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_size: int, kv: KVLayer,
    plan: AttentionPlan,
) -> torch.Tensor:  # fmt: skip
    """Attention of q [T, H, D] to k, v [tokens, KVH, D]: the step's own, or the cache's."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k.shape[1]
    for x in (q, k, v):
        assert x.stride(2) == 1 and x.stride(1) == head_dim
    codes = k.dtype == CODES
    assert k.dtype == v.dtype == q.dtype or (codes and v.dtype == CODES)
    assert kv.sinks is None or kv.sinks.dtype == torch.float32
    tables, reach = plan.block_tables, NO_WINDOW if kv.window is None else kv.window
    work = plan.tasks_of(reach)
    values = head_dim if kv.value_width is None else kv.value_width
    out = q.new_empty(*q.shape[:2], values)
    of_slot = slot_bytes(values, kv.value_width is not None)
    partial = torch.empty(work.num_slots * num_kv_heads * of_slot, dtype=torch.uint8)
    step = Step(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), address(kv.k_scales), address(kv.v_scales),
        out.data_ptr(), plan.q_ends.data_ptr(), plan.k_lens.data_ptr(), address(tables),
        work.tasks.data_ptr(), work.merges.data_ptr(), partial.data_ptr(), len(work.tasks),
        len(work.merges), q.stride(0), k.stride(0), v.stride(0),
        0 if tables is None else tables.stride(0), block_size, num_heads, num_kv_heads, head_dim,
        values, reach, torch.get_num_threads(), of_slot, SPLIT_KEYS, kv.scale, kv.soft_cap or 0.0,
        address(kv.sinks),
    )  # fmt: skip
    kind = "attention" if kv.value_width is None else "attention_latents"
    function("attention_codes" if codes else kind, q.dtype)(ctypes.addressof(step))
    return out
