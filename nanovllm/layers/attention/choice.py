"""The choice among the attention backends: what each one needs, and whether it works here."""

import dataclasses
import subprocess
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import torch

from nanovllm.kernels.operands.kv_layer import CODES, SCALES, KVLayer
from nanovllm.layers.ahead import compile_ahead
from nanovllm.layers.attention.base import AttentionBackend, AttentionSpec
from nanovllm.layers.context import Context

Built = TypeVar("Built")
# Compute capabilities (major) where our kernels were measured, and were ahead of flash-attn 2.
TRITON_FIRST = {9}


def fastest_first(device: torch.device) -> tuple[str, ...]:
    """The backends that "auto" tries before plain PyTorch."""
    if device.type != "cuda":
        return ("cpu",)
    major, _ = torch.cuda.get_device_capability(device)
    return ("triton", "flash_attn") if major in TRITON_FIRST else ("flash_attn", "triton")


def check_needs(name: str, spec: AttentionSpec) -> None:
    """Raise a ValueError if the machine or the model lacks what backend `name` needs."""
    CHECKS[name](spec, f"attention_backend={name!r}")


def build_attention(name: str, spec: AttentionSpec) -> AttentionBackend:
    """Build a backend, and prefill and decode one token with it."""
    module = import_module(f"nanovllm.layers.attention.{name}_backend")
    backend: AttentionBackend = getattr(module, BACKENDS[name])(spec)
    _try_attention(backend, spec)
    return backend


def tried(name: str, build: Callable[[], Built], device: torch.device) -> Built:
    """What `build` returns for backend `name`. The kernels that it tries are compiled together.

    Any error becomes a ValueError: what is installed may not work together.
    """
    try:
        compile_ahead(build, device)
        return build()
    except Exception as error:
        raise ValueError(
            f"attention_backend={name!r} does not work here ({in_short(error)}); 'torch' works"
            " everywhere"
        ) from error


def in_short(error: Exception) -> str:
    """A compiler's error in one line: its first line says where it is, its last one what it is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " ... ".join(dict.fromkeys((lines[0], lines[-1])))
    if isinstance(error, subprocess.CalledProcessError):
        text += " (it takes a C compiler and Python's headers)"
    return f"{type(error).__name__}: {text}"


def _check_cpu(spec: AttentionSpec, refusal: str) -> None:
    from nanovllm.kernels.cpu.attention import HEAD_DIM_STEP
    from nanovllm.kernels.cpu.library import DTYPES, MAX_HEAD_DIM

    instead = "'torch' works everywhere"
    device, dtype = spec.device.type, str(spec.dtype).removeprefix("torch.")
    if device != "cpu":
        raise ValueError(f"{refusal} needs device='cpu', got {device!r}; {instead}")
    if spec.dtype not in DTYPES:
        raise ValueError(f"{refusal} needs dtype 'float32' or 'bfloat16', got {dtype!r}; {instead}")
    if spec.head_dim % HEAD_DIM_STEP or spec.head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"{refusal} needs a head_dim that is a multiple of {HEAD_DIM_STEP} and at most"
            f" {MAX_HEAD_DIM}, got {spec.head_dim}; {instead}"
        )


def _check_triton(spec: AttentionSpec, refusal: str) -> None:
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
    least = 16 if spec.kv_dtype == spec.dtype else 32  # pairs of codes fill a tile
    if spec.head_dim < least and not (INTERPRETED and spec.head_dim >= 16):
        raise ValueError(f"{refusal} needs a head_dim of {least} or more, got {spec.head_dim}")
    if spec.soft_cap and spec.kv_dtype != spec.dtype:
        raise ValueError(
            f"{refusal} needs kv_cache_dtype='auto' for a model with soft caps on the scores of"
            " attention; 'torch' works everywhere"
        )


def _check_flash_attn(spec: AttentionSpec, refusal: str) -> None:
    from nanovllm.layers.attention.flash_attn_backend import FlashAttnBackend

    instead = "'triton' needs nothing more, 'torch' works everywhere"
    device, dtype = spec.device.type, str(spec.dtype).removeprefix("torch.")
    if device != "cuda":
        raise ValueError(
            f"{refusal} needs a CUDA device, got device={device!r}; 'torch' works everywhere"
        )
    if spec.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{refusal} needs dtype 'float16' or 'bfloat16', got {dtype!r}; {instead}")
    if spec.kv_dtype != spec.dtype:
        raise ValueError(f"{refusal} needs kv_cache_dtype='auto', it cannot read 'fp8'; {instead}")
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


CHECKS: dict[str, Callable[[AttentionSpec, str], None]] = {
    "cpu": _check_cpu,
    "triton": _check_triton,
    "flash_attn": _check_flash_attn,
}
BACKENDS = {"cpu": "CpuBackend", "triton": "TritonBackend", "flash_attn": "FlashAttnBackend"}


def one_block(spec: AttentionSpec, block_size: int) -> KVLayer:
    """A layer with a cache of one block, to try kernels with."""
    options: dict[str, Any] = {"device": spec.device}
    cache = torch.zeros(
        1, block_size, spec.num_kv_heads, spec.head_dim, dtype=spec.kv_dtype, **options
    )
    scales = None
    if spec.kv_dtype == CODES:
        scales = torch.zeros(1, spec.num_kv_heads, block_size, dtype=SCALES, **options)
    cap = 1.0 if spec.soft_cap else None
    return KVLayer(cache, cache, 1.0, k_scales=scales, v_scales=scales, soft_cap=cap)


def _try_attention(backend: AttentionBackend, spec: AttentionSpec) -> None:
    """One token from the step's own keys, one from the cache, and one to decode. Syncs."""
    q, k = (
        torch.zeros(1, heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
        for heads in (spec.num_heads, spec.num_kv_heads)
    )
    kv = one_block(spec, backend.block_size)
    ends = torch.tensor([0, 1], dtype=torch.int32, device=spec.device)
    # As aligned as the engine's tensors, as kernels are compiled for an alignment.
    slots, tables, lens = ends[:1].long(), ends[None, :1].clone(), ends[1:].clone()
    prefill = Context(
        True, slots, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=1, max_seqlen_k=1
    )
    for context in (prefill, dataclasses.replace(prefill, block_tables=tables)):
        backend.plan(context)
        backend.prefill(q, k, k, kv, context)
    decode = Context(False, slots, context_lens=lens, block_tables=tables)
    backend.plan(decode)
    backend.decode(q, kv, decode)
    if spec.device.type == "cuda":
        torch.cuda.synchronize(spec.device)
