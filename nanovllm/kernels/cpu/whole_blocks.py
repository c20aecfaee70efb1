"""All blocks of a decoder for few rows, in one call: the structures that C++ reads.

Those of blocks have addresses of weights and caches, and are made once; those of a step have its
rows, rotations, and block tables. Whoever makes them keeps the tensors.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.kernels.cpu import attention as attending
from nanovllm.kernels.cpu.attention import NO_WINDOW, AttentionPlan, Step, slot_bytes
from nanovllm.kernels.cpu.library import DTYPES, MAX_HEAD_DIM, address, function
from nanovllm.kernels.cpu.products import ProductStruct, function_address, products
from nanovllm.kernels.cpu.rms_norm import of_weight
from nanovllm.kernels.kv_layer import CODES, KVLayer
from nanovllm.kernels.plain.norm_rope_store import Rope

Heads = tuple[int, int, int]  # of queries, of keys, and the size of each
Array = Any  # of structures: ctypes.Array is not generic at run time


def _fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


class NormStruct(ctypes.Structure):
    """`Norm` of whole_blocks.cpp, field by field."""

    _fields_ = (*_fields(ctypes.c_void_p, "normalize weight"), ("eps", ctypes.c_float))


class LinearStruct(ctypes.Structure):
    """`Linear`, which has the products of one input."""

    _fields_ = (
        ("products", ctypes.POINTER(ProductStruct)),
        *_fields(ctypes.c_int64, "count outputs"),
    )


class BlockStruct(ctypes.Structure):
    """`WholeBlock`."""

    _fields_ = (
        *_fields(NormStruct, "before_mixer after_mixer before_feed_forward after_feed_forward"),
        *_fields(LinearStruct, "qkv project gate_up down"),
        *_fields(ctypes.c_void_p, "rotate q_norm k_norm attend gate"),
        *_fields(ctypes.c_void_p, "k_cache v_cache k_scales v_scales sinks"),
        *_fields(ctypes.c_float, "head_eps k_fixed v_fixed scale soft_cap"),
        *_fields(ctypes.c_int64, "rope context"),
    )


class RopeStruct(ctypes.Structure):
    """`Rope`."""

    _fields_ = (*_fields(ctypes.c_void_p, "cos sin"), *_fields(ctypes.c_int64, "stride half"))


class ContextStruct(ctypes.Structure):
    """`GroupContext`."""

    _fields_ = (("attention", Step), ("slots", ctypes.c_void_p))


class StepStruct(ctypes.Structure):
    """`WholeStep`."""

    _fields_ = (
        ("blocks", ctypes.c_void_p),
        ("last", NormStruct),
        *_fields(ctypes.c_void_p, "ropes contexts x out"),
        *_fields(ctypes.c_int64, "count rows hidden item threads"),
    )


@dataclass(frozen=True)
class LinearOperands:
    """A linear layer's matrices, one after the other, and its bias."""

    operands: Sequence[Any]
    bias: torch.Tensor | None


@dataclass(frozen=True)
class NormOperands:
    """A norm's factors, and what it adds to the mean square."""

    factors: torch.Tensor
    eps: float


@dataclass(frozen=True)
class BlockOperands:
    """What the functions of a block read, by its place. `rope` and `context` are a step's."""

    norms: tuple[NormOperands | None, ...]  # in the order of `BlockStruct`
    linears: tuple[LinearOperands, ...]
    head_norms: tuple[NormOperands, NormOperands] | None
    kv: KVLayer
    heads: Heads
    gate: str  # the kernel of the activation
    rope: int
    context: int


class NotCoveredError(Exception):
    """An operand has no function that C++ code can call."""


class WholeBlocks:
    """The structures of a decoder's blocks for rows of a type; a step has one call.

    NotCoveredError if an operand has no function for this. The library is compiled before.
    """

    def __init__(
        self, blocks: Sequence[BlockOperands], last: NormOperands, size: int, dtype: torch.dtype
    ) -> None:
        if dtype not in DTYPES:
            raise NotCoveredError
        self.size, self.dtype = size, dtype
        self._kept: list[Any] = []
        self._blocks = (BlockStruct * len(blocks))(*map(self._block, blocks))
        self._last = self._norm(last)
        self._run = function("whole_blocks")

    def __call__(self, x: torch.Tensor, ropes: Array, contexts: Array) -> torch.Tensor:
        """The last norm of the residual after all blocks, for x [T, hidden]."""
        x = x.contiguous()
        assert x.shape[1] == self.size and x.dtype == self.dtype
        out = torch.empty_like(x)
        step = StepStruct(
            ctypes.addressof(self._blocks), self._last, ctypes.addressof(ropes),
            ctypes.addressof(contexts), x.data_ptr(), out.data_ptr(), len(self._blocks), len(x),
            self.size, x.itemsize, torch.get_num_threads(),
        )  # fmt: skip
        self._run(ctypes.addressof(step))
        return out

    def _norm(self, norm: NormOperands | None) -> NormStruct:
        if norm is None:
            return NormStruct()
        if norm.factors.shape != (self.size,) or not norm.factors.is_contiguous():
            raise NotCoveredError
        like = torch.empty(0, dtype=self.dtype)
        name = of_weight("rms_norm", norm.factors, like)
        return NormStruct(function_address(name, self.dtype), norm.factors.data_ptr(), norm.eps)

    def _linear(self, linear: LinearOperands, size_in: int) -> LinearStruct:
        made = products(linear.operands, linear.bias, size_in, self.dtype)
        if made is None:
            raise NotCoveredError
        self._kept.append(made)
        return LinearStruct(made, len(made), sum(product.outputs for product in made))

    def _block(self, block: BlockOperands) -> BlockStruct:
        (num_heads, num_kv_heads, head_dim), kv = block.heads, block.kv
        qkv, project, gate_up, down = block.linears
        made = BlockStruct(*map(self._norm, block.norms))
        made.qkv = self._linear(qkv, self.size)
        made.project = self._linear(project, num_heads * head_dim)
        made.gate_up = self._linear(gate_up, self.size)
        made.down = self._linear(down, made.gate_up.outputs // 2)
        sizes = (made.qkv.outputs, made.project.outputs, made.down.outputs)
        if sizes != ((num_heads + 2 * num_kv_heads) * head_dim, self.size, self.size):
            raise NotCoveredError
        self._set_heads(made, block)
        self._set_cache(made, kv)
        made.gate = function_address(block.gate, self.dtype)
        made.rope, made.context = block.rope, block.context
        return made

    def _set_heads(self, made: BlockStruct, block: BlockOperands) -> None:
        """The function that normalizes, rotates and stores, and its weights."""
        weight, has_codes = None, block.kv.k_cache.dtype == CODES
        if block.head_norms is not None:
            q_norm, k_norm = block.head_norms
            weight = q_norm.factors
            made.q_norm, made.k_norm = weight.data_ptr(), k_norm.factors.data_ptr()
            made.head_eps = q_norm.eps
            if k_norm.factors.dtype != weight.dtype or not len(weight) == block.heads[2]:
                raise NotCoveredError
        name = "norm_rope_store_codes" if has_codes else "norm_rope_store"
        like = torch.empty(0, dtype=self.dtype)
        made.rotate = function_address(of_weight(name, weight, like), self.dtype)
        made.attend = function_address("attention_codes" if has_codes else "attention", self.dtype)

    def _set_cache(self, made: BlockStruct, kv: KVLayer) -> None:
        caches = kv.k_cache, kv.v_cache
        if kv.is_empty or not all(c.is_contiguous() for c in caches):
            raise NotCoveredError
        if kv.value_width is not None or kv.k_cache.dtype not in (self.dtype, CODES):
            raise NotCoveredError
        made.k_cache, made.v_cache = (cache.data_ptr() for cache in caches)
        made.k_scales, made.v_scales = address(kv.k_scales), address(kv.v_scales)
        made.k_fixed, made.v_fixed = kv.fixed_scales or (0.0, 0.0)
        made.sinks, made.scale, made.soft_cap = address(kv.sinks), kv.scale, kv.soft_cap or 0.0


def rope_struct(rope: Rope | None, head_dim: int) -> RopeStruct:
    """A step's cosines and sines; without any, nothing is rotated."""
    if rope is None:
        return RopeStruct()
    cos, sin = rope
    assert cos.dtype == sin.dtype == torch.float32 and 2 * cos.shape[2] <= head_dim
    assert cos.stride() == sin.stride() and cos.stride(2) == 1 and head_dim <= MAX_HEAD_DIM
    return RopeStruct(cos.data_ptr(), sin.data_ptr(), cos.stride(0), cos.shape[2])


def context_struct(
    plan: AttentionPlan, slots: torch.Tensor, heads: Heads, window: int | None, block_size: int
) -> tuple[ContextStruct, torch.Tensor]:
    """What layers with the same cache group and window share, and memory that is used by it."""
    num_heads, num_kv_heads, head_dim = heads
    reach = NO_WINDOW if window is None else window
    work, tables = plan.tasks_of(reach), plan.block_tables
    assert tables is not None and slots.dtype == torch.int64 and slots.is_contiguous()
    of_slot = slot_bytes(head_dim, is_latent=False)
    partial = torch.empty(work.num_slots * num_kv_heads * of_slot, dtype=torch.uint8)
    stride = num_kv_heads * head_dim
    attention = Step(
        q_ends=plan.q_ends.data_ptr(), k_lens=plan.k_lens.data_ptr(), tables=tables.data_ptr(),
        tasks=work.tasks.data_ptr(), merges=work.merges.data_ptr(), partial=partial.data_ptr(),
        num_tasks=len(work.tasks), num_merges=len(work.merges), q_stride=num_heads * head_dim,
        k_stride=stride, v_stride=stride, table_stride=tables.stride(0), block_size=block_size,
        q_heads=num_heads, kv_heads=num_kv_heads, head_dim=head_dim, value_dim=head_dim,
        window=reach, threads=torch.get_num_threads(), slot_bytes=of_slot,
        part_keys=attending.SPLIT_KEYS,
    )  # fmt: skip
    return ContextStruct(attention, slots.data_ptr()), partial
