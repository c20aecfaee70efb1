"""The attention backends, and the choice among them.

A backend reads and writes one cache layout, `[blocks, block_size, KVH, D]` per layer for K and for
V, so that backends can be swapped and compared on the same cache. It brings the kernels of the
other layers along: Triton's beside the fast ones of a GPU, where Triton works; compiled ones in the
cpu backend; the torch backend is plain PyTorch throughout, and syncs.
"""

import dataclasses
import logging
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.kernels.cpu import attention as cpu_attention
from nanovllm.kernels.cpu import decode_attention as cpu_decode
from nanovllm.kernels.cpu import prefill_attention as cpu_prefill
from nanovllm.kernels.cpu.library import DTYPES
from nanovllm.kernels.plain import decode_attention as plain_decode
from nanovllm.kernels.plain import prefill_attention as plain_prefill
from nanovllm.kernels.plain.read_table import TableState
from nanovllm.kernels.table import PLAIN, Kernels, cpu_kernels, triton_kernels
from nanovllm.layers.context import Context

logger = logging.getLogger("nanovllm")


@dataclass(frozen=True)
class AttentionSpec:
    """What a backend must be able to compute, and where."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int | None  # None: what the backend prefers
    in_graphs: bool  # whether decode steps are, which hide how long launches take


class AttentionBackend(ABC):
    """How attention is computed; the context says over what."""

    name: str
    preferred_block_size: int
    graph_safe: bool  # whether decode reads all that changes from device tensors
    copied_layers: int  # layers' worth of KV that a step may copy: memory the pool must leave
    kernels: Kernels

    def __init__(self, block_size: int | None = None) -> None:
        self.block_size = block_size or self.preferred_block_size

    def plan(self, context: Context) -> None:  # noqa: B027
        """Work out, once a step, what all layers share."""

    @abstractmethod
    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context, scale: float,
        window: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Causal attention of q [T, H, D], several tokens for each sequence.

        With a window a query sees its own key and those right before it, so many in all.
        """

    @abstractmethod
    def decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context,
        scale: float, window: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of q [B, H, D], one token for each sequence."""


class PlannedBackend(AttentionBackend):
    """A backend of ours: its functions read the step's lengths and blocks from the plan."""

    prefill_attention: Callable[..., torch.Tensor]
    decode_attention: Callable[..., torch.Tensor]

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context, scale: float,
        window: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return self.prefill_attention(q, k, v, k_cache, v_cache, ctx.plan, scale, window)

    def decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context,
        scale: float, window: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return self.decode_attention(q, k_cache, v_cache, ctx.plan, scale, window)


class TorchBackend(PlannedBackend):
    """Plain PyTorch on any device: the definition of the others."""

    name = "torch"
    preferred_block_size = 16
    graph_safe = False
    copied_layers = 2  # one, gathered and padded
    kernels = PLAIN
    prefill_attention = staticmethod(plain_prefill.prefill_attention)
    decode_attention = staticmethod(plain_decode.decode_attention)

    def plan(self, context: Context) -> None:
        """Group the sequences by length. Syncs where the device is not the CPU."""
        if context.is_prefill:
            assert context.cu_seqlens_q is not None and context.cu_seqlens_k is not None
            context.plan = plain_prefill.plan_prefill(
                context.cu_seqlens_q, context.cu_seqlens_k, context.block_tables, self.block_size
            )
        else:
            assert context.context_lens is not None and context.block_tables is not None
            context.plan = plain_decode.plan_decode(
                context.context_lens, context.block_tables, self.block_size
            )


class CpuBackend(PlannedBackend):
    """Our own kernels for the CPU, compiled here: float32 and bfloat16, any block size."""

    name = "cpu"
    preferred_block_size = 16
    graph_safe = False
    copied_layers = 0
    prefill_attention = staticmethod(cpu_prefill.prefill_attention)
    decode_attention = staticmethod(cpu_decode.decode_attention)

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec.block_size)
        self.kernels = _tried(cpu_kernels(), spec)
        self.heads = (spec.num_heads // spec.num_kv_heads, spec.head_dim)

    def plan(self, context: Context) -> None:
        """Cut the work of a layer up into tasks for the threads."""
        if context.is_prefill:
            assert context.cu_seqlens_q is not None and context.cu_seqlens_k is not None
            context.plan = cpu_prefill.plan_prefill(
                context.cu_seqlens_q, context.cu_seqlens_k, context.block_tables, *self.heads
            )
        else:
            assert context.context_lens is not None and context.block_tables is not None
            context.plan = cpu_decode.plan_decode(
                context.context_lens, context.block_tables, *self.heads
            )


class TritonBackend(PlannedBackend):
    """Our own kernels: CUDA, any type and block size; on the CPU under Triton's interpreter."""

    name = "triton"
    preferred_block_size = 64
    graph_safe = True
    copied_layers = 0

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec.block_size)
        from nanovllm.kernels.triton import decode_attention, prefill_attention

        self.kernels = _tried(_triton_kernels(spec), spec)
        self.num_kv_heads = spec.num_kv_heads
        self.copies_tiles = spec.in_graphs
        self.tile_queries = prefill_attention.tile_queries(
            spec.num_heads // spec.num_kv_heads, spec.head_dim, spec.dtype
        )
        self._plan_prefill = prefill_attention.plan_prefill
        self._plan_decode = decode_attention.plan_decode
        self.prefill_attention = prefill_attention.prefill_attention
        self.decode_attention = decode_attention.decode_attention

    def plan(self, context: Context) -> None:
        """Deal the work of a layer out over its programs, on the device."""
        if context.is_prefill:
            assert context.cu_seqlens_q is not None and context.cu_seqlens_k is not None
            context.plan = self._plan_prefill(
                context.cu_seqlens_q, context.cu_seqlens_k, context.block_tables,
                len(context.slot_mapping), self.tile_queries,
            )  # fmt: skip
        else:
            assert context.context_lens is not None and context.block_tables is not None
            context.plan = self._plan_decode(
                context.context_lens, context.block_tables, self.num_kv_heads, self.copies_tiles
            )


class FlashAttnBackend(AttentionBackend):
    """flash-attn 2: CUDA, 16-bit types, blocks that are a multiple of 256 tokens."""

    name = "flash_attn"
    preferred_block_size = 256
    copied_layers = 0

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec.block_size)
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen_func: Any = flash_attn_varlen_func
        self.kvcache_func: Any = flash_attn_with_kvcache
        try:
            self.kernels = _tried(_triton_kernels(spec), spec)
        except Exception as error:
            logger.warning("no Triton, and so no decode graphs: %s", _in_short(error))
            self.kernels = PLAIN
        self.graph_safe = self.kernels is not PLAIN  # whose store syncs

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context, scale: float,
        window: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if ctx.block_tables is not None:  # a part of some sequence is in the cache
            k, v = k_cache, v_cache
        out: torch.Tensor = self.varlen_func(
            q, k, v, ctx.cu_seqlens_q, ctx.cu_seqlens_k, ctx.max_seqlen_q, ctx.max_seqlen_k,
            softmax_scale=scale, causal=True, block_table=ctx.block_tables,
            window_size=_to_the_left(window),
        )  # fmt: skip
        return out

    def decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: Context,
        scale: float, window: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        out: torch.Tensor = self.kvcache_func(
            q.unsqueeze(1), k_cache, v_cache, cache_seqlens=ctx.context_lens,
            block_table=ctx.block_tables, softmax_scale=scale, causal=True,
            window_size=_to_the_left(window),
        )  # fmt: skip
        return out.squeeze(1)


def _to_the_left(window: int | None) -> tuple[int, int]:
    """How many keys flash-attn shows a query before and behind its own; -1 is all."""
    return (-1, -1) if window is None else (window - 1, 0)


def get_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """Build the backend `name`; "auto" is the fastest that works there."""
    if name == "torch":
        return TorchBackend(spec.block_size)
    if name != "auto":
        return BUILDERS[name](spec)
    reasons = []
    for fast in fastest_first(spec.device):
        try:
            return BUILDERS[fast](spec)
        except ValueError as error:
            logger.info("auto passes on: %s", error)
            reasons.append(str(error))
    if reasons:
        level = logging.INFO if spec.device.type == "cpu" else logging.WARNING  # where it is slow
        logger.log(level, "auto: all in plain PyTorch; %s", "; ".join(reasons))
    return TorchBackend(spec.block_size)


def fastest_first(device: torch.device) -> tuple[str, ...]:
    """What "auto" tries before plain PyTorch."""
    if device.type != "cuda":
        return ("cpu",)
    major, _ = torch.cuda.get_device_capability(device)
    return ("triton", "flash_attn") if major in TRITON_FIRST else ("flash_attn", "triton")


def _build_cpu(spec: AttentionSpec) -> AttentionBackend:
    refusal, instead = "attention_backend='cpu'", "'torch' works everywhere"
    device, dtype = spec.device.type, str(spec.dtype).removeprefix("torch.")
    if device != "cpu":
        raise ValueError(f"{refusal} needs device='cpu', got {device!r}; {instead}")
    if spec.dtype not in DTYPES:
        raise ValueError(f"{refusal} needs dtype 'float32' or 'bfloat16', got {dtype!r}; {instead}")
    step, most = cpu_attention.HEAD_DIM_STEP, cpu_attention.MAX_HEAD_DIM
    if spec.head_dim % step or spec.head_dim > most:
        raise ValueError(
            f"{refusal} needs a head_dim that is a multiple of {step} and at most {most}, got"
            f" {spec.head_dim}; {instead}"
        )
    return _probed("cpu", CpuBackend, spec)


def _build_triton(spec: AttentionSpec) -> AttentionBackend:
    refusal = "attention_backend='triton'"
    try:
        from nanovllm.kernels.triton.common import INTERPRETED
    except ImportError as error:
        raise ValueError(f"{refusal} cannot import Triton ({error}); 'torch' needs none") from error
    if spec.device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"{refusal} needs a CUDA device, got device={spec.device.type!r}; 'torch' works"
            " everywhere (and TRITON_INTERPRET=1, set before Python starts, interprets the kernels"
            " on the CPU, very slowly)"
        )
    if spec.head_dim < 16:
        raise ValueError(f"{refusal} needs a head_dim of 16 or more, got {spec.head_dim}")
    return _probed("triton", TritonBackend, spec)


def _build_flash_attn(spec: AttentionSpec) -> AttentionBackend:
    refusal = "attention_backend='flash_attn'"
    instead = "'triton' needs nothing more, 'torch' works everywhere"
    device = spec.device.type
    if device != "cuda":
        raise ValueError(
            f"{refusal} needs a CUDA device, got device={device!r}; 'torch' works everywhere"
        )
    if spec.dtype not in (torch.float16, torch.bfloat16):
        dtype = str(spec.dtype).removeprefix("torch.")
        raise ValueError(f"{refusal} needs dtype 'float16' or 'bfloat16', got {dtype!r}; {instead}")
    if spec.block_size is not None and spec.block_size % FlashAttnBackend.preferred_block_size:
        raise ValueError(
            f"{refusal} needs kvcache_block_size to be a multiple of 256, got {spec.block_size};"
            f" {instead}"
        )
    try:
        import flash_attn  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{refusal} cannot import flash-attn ({error}): pip install flash-attn"
            f" --no-build-isolation; {instead}"
        ) from error
    return _probed("flash_attn", FlashAttnBackend, spec)


BUILDERS: dict[str, Callable[[AttentionSpec], AttentionBackend]] = {
    "cpu": _build_cpu,
    "triton": _build_triton,
    "flash_attn": _build_flash_attn,
}
# Compute capabilities (major) where our kernels were measured, and were ahead of flash-attn 2.
TRITON_FIRST = {9}


def _probed(
    name: str, build: Callable[[AttentionSpec], AttentionBackend], spec: AttentionSpec
) -> AttentionBackend:
    """Build, prefill and decode one token: what is installed may not work together."""
    try:
        backend = build(spec)
        _try_attention(backend, spec)
        if spec.device.type == "cuda":
            torch.cuda.synchronize(spec.device)
    except Exception as error:
        raise ValueError(
            f"attention_backend={name!r} does not work here ({_in_short(error)}); 'torch' works"
            " everywhere"
        ) from error
    return backend


def _try_attention(backend: AttentionBackend, spec: AttentionSpec) -> None:
    """One token from the step's own keys, one from the cache, and one to decode."""
    q, k = (
        torch.zeros(1, heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
        for heads in (spec.num_heads, spec.num_kv_heads)
    )
    cache = k.new_zeros(1, backend.block_size, spec.num_kv_heads, spec.head_dim)
    ends = torch.tensor([0, 1], dtype=torch.int32, device=spec.device)
    # As aligned as the engine's, as that is what kernels are compiled for.
    slots, tables, lens = ends[:1].long(), ends[None, :1].clone(), ends[1:].clone()
    prefill = Context(
        True, slots, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=1, max_seqlen_k=1
    )
    for context in (prefill, dataclasses.replace(prefill, block_tables=tables)):
        backend.plan(context)
        backend.prefill(q, k, k, cache, cache, context, 1.0)
    decode = Context(False, slots, context_lens=lens, block_tables=tables)
    backend.plan(decode)
    backend.decode(q, cache, cache, decode, 1.0)


def _triton_kernels(spec: AttentionSpec) -> Kernels:
    """Triton's kernels, if they are compiled for the device."""
    from nanovllm.kernels.triton.common import INTERPRETED

    if spec.device.type == "cuda" and INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set, and kernels are interpreted on the CPU")
    return triton_kernels()


def _tried(kernels: Kernels, spec: AttentionSpec) -> Kernels:
    """Run each of the layers' kernels on a token, to see that they compile here."""
    options: dict[str, Any] = {"dtype": spec.dtype, "device": spec.device}
    x = torch.zeros(1, 2 * spec.head_dim, **options)
    weight = torch.ones(2 * spec.head_dim, **options)
    kernels.rms_norm(x, weight, 1.0)
    kernels.add_rms_norm(x, x, weight, 1.0)
    kernels.silu_and_mul(x)
    ones = torch.ones(1, device=spec.device)
    kernels.sample(x, ones, ones.long())
    one, word = ones.long(), ones.int()
    kernels.read_table(TableState(one, one, word, ones, word - 1, word[None]), 1, 1, 2)
    qkv = torch.zeros(1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim, **options)
    angles = torch.zeros(1, 1, spec.head_dim // 2, device=spec.device)
    nowhere = torch.full((1,), -1, device=spec.device)
    empty = qkv.new_empty(0)
    kernels.norm_rope_store(
        qkv, spec.num_kv_heads, (angles, angles), None, 0.0, empty, empty, nowhere
    )
    matrix = torch.zeros(64, 64, **options)
    if few_rows := kernels.few_rows([matrix]):
        _, scaled = few_rows.add(matrix[:1], matrix, None, matrix[:1], matrix[0], 1.0)
        few_rows.linear(scaled, matrix)
        few_rows.gated(scaled, matrix)
    return kernels


def _in_short(error: Exception) -> str:
    """A compiler's error goes on for pages: where it is stands first, and what it is last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ... ".join(dict.fromkeys((lines[0], lines[-1])))
    if isinstance(error, subprocess.CalledProcessError):
        text += " (it takes a C compiler and Python's headers)"
    return f"{type(error).__name__}: {text}"
