"""The choice among the fast backends: what each one needs, and whether it works here.

A backend's module is loaded when the backend is tried.
"""

import logging
import re
import subprocess
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TypeVar

import torch

from nanovllm.kernels.cpu.table import cpu_kernels
from nanovllm.kernels.table import PLAIN, Kernels
from nanovllm.kernels.triton.table import triton_kernels
from nanovllm.layers.backend import AttentionBackend, AttentionSpec, Backend
from nanovllm.layers.backends.trials import try_attention, try_kernels
from nanovllm.layers.compiling import compile_in_threads

logger = logging.getLogger("nanovllm")

Specs = Sequence[AttentionSpec]
Built = TypeVar("Built")
# Compute capabilities (major) where our kernels were measured, and were ahead of flash-attn 2.
TRITON_FIRST = {9}
CLASSES = {
    "cpu": "cpu.CpuBackend",
    "triton": "triton.TritonBackend",
    "flash_attn": "flash_attn.FlashAttnBackend",
}
LATENT_CLASSES = {"triton": "triton_latents.TritonLatentBackend"}  # of latent rows, if others
ORDERED_CLASSES = {"triton": "triton_ordered.OrderedTritonBackend"}  # with one order of sums


def fastest_first(device: torch.device) -> tuple[str, ...]:
    """The backends that "auto" tries before plain PyTorch."""
    if device.type != "cuda":
        return ("cpu",)
    major, _ = torch.cuda.get_device_capability(device)
    return ("triton", "flash_attn") if major in TRITON_FIRST else ("flash_attn", "triton")


def fastest(*specs: AttentionSpec) -> Backend | None:
    """The fastest backend that works here; None if only plain PyTorch does, which is logged."""
    spec = specs[0]
    reasons, has_failed = [], False
    for fast in fastest_first(spec.device):
        try:
            return build_backend(fast, *specs)
        except ValueError as error:
            logger.info("auto skips a backend: %s", error)
            reasons.append(str(error))
            has_failed |= error.__cause__ is not None  # its check has passed
    if spec.one_order:
        raise ValueError(f"no kernels for batch_invariant=True work here: {'; '.join(reasons)}")
    is_slow = spec.device.type != "cpu" or spec.dtype == torch.float16  # which CPUs emulate
    level = logging.WARNING if is_slow or has_failed else logging.INFO
    logger.log(level, "auto selects plain PyTorch: %s", "; ".join(reasons))
    return None


def build_backend(name: str, *specs: AttentionSpec) -> Backend:
    """Build attention and kernels, and try both on one token; a ValueError says what fails."""
    try:
        return _built(name, *specs)
    except ValueError as error:
        if not specs[0].one_order:
            raise
        # Plain PyTorch has no order that holds.
        text = re.sub("[;,] 'torch' (works everywhere|needs none)", "", str(error))
        raise ValueError(text) from error.__cause__


def _built(name: str, *specs: AttentionSpec) -> Backend:
    for spec in specs:
        CHECKS[name](spec, f"attention_backend={name!r}")

    def build() -> Backend:
        kernels = KERNELS[name](specs)
        attention, *others = (_build_attention(name, spec) for spec in specs)
        return Backend(attention, kernels, tuple(others))

    return tried(name, build, specs[0].device)


def attention_class(
    name: str, of_latents: bool = False, one_order: bool = False
) -> type[AttentionBackend]:
    """The class of a backend, imported now."""
    places = CLASSES | (LATENT_CLASSES if of_latents else ORDERED_CLASSES if one_order else {})
    module, _, class_name = places[name].partition(".")
    found: type[AttentionBackend] = getattr(import_module(f"{__package__}.{module}"), class_name)
    return found


def _build_attention(name: str, spec: AttentionSpec) -> AttentionBackend:
    """Build a backend, and prefill and decode one token with it."""
    kind = attention_class(name, spec.value_width is not None, spec.one_order)
    backend: AttentionBackend = kind(spec)  # type: ignore[arg-type]
    try_attention(backend, spec)
    return backend


def tried(name: str, build: Callable[[], Built], device: torch.device) -> Built:
    """Return what `build` returns for backend `name`. Its kernels are compiled together first.

    Any error becomes a ValueError: what is installed may not work together.
    """
    try:
        compile_in_threads(build, device)
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
    from nanovllm.kernels.cpu.library import DTYPES, MAX_HEAD_DIM, MAX_LATENT

    instead = "'torch' works everywhere"
    device, dtype = spec.device.type, str(spec.dtype).removeprefix("torch.")
    if device != "cpu":
        raise ValueError(f"{refusal} needs device='cpu', got {device!r}; {instead}")
    if spec.dtype not in DTYPES:
        raise ValueError(f"{refusal} needs dtype 'float32' or 'bfloat16', got {dtype!r}; {instead}")
    most = MAX_HEAD_DIM if spec.value_width is None else MAX_LATENT
    if spec.head_dim % HEAD_DIM_STEP or spec.head_dim > most:
        raise ValueError(
            f"{refusal} needs a head_dim that is a multiple of {HEAD_DIM_STEP} and at most"
            f" {most}, got {spec.head_dim}; {instead}"
        )


def _check_triton(spec: AttentionSpec, refusal: str) -> None:
    try:
        from nanovllm.kernels.triton.common import INTERPRETED, MEASURED, capability
    except ImportError as error:
        raise ValueError(f"{refusal} cannot import Triton ({error}); 'torch' needs none") from error
    if spec.device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"{refusal} needs a CUDA device, got device={spec.device.type!r}; 'torch' works"
            " everywhere (and TRITON_INTERPRET=1, set before Python starts, interprets the kernels"
            " on the CPU, very slowly)"
        )
    if spec.one_order and not INTERPRETED and capability(spec.device) != MEASURED:
        raise ValueError("batch_invariant=True needs a Hopper GPU (H100, H200)")
    if spec.value_width is not None:
        from nanovllm.layers.backends.triton_latents import check_latents

        check_latents(spec, refusal)
    least = 16 if spec.kv_dtype == spec.dtype else 32  # pairs of codes fill a tile
    if spec.head_dim < least and not (INTERPRETED and spec.head_dim >= 16):
        raise ValueError(f"{refusal} needs a head_dim of {least} or more, got {spec.head_dim}")
    if "soft_cap" in spec.needs and spec.kv_dtype != spec.dtype:
        raise ValueError(
            f"{refusal} needs kv_cache_dtype='auto' for a model with soft caps on the scores of"
            " attention; 'torch' works everywhere"
        )


def _check_flash_attn(spec: AttentionSpec, refusal: str) -> None:
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
    if spec.one_order:
        raise ValueError(f"{refusal} cannot keep batch_invariant=True; {instead}")
    if "sinks" in spec.needs:
        raise ValueError(f"{refusal} cannot compute attention with sinks; {instead}")
    if spec.value_width is not None:
        raise ValueError(f"{refusal} cannot compute attention to latent rows; {instead}")
    if (
        spec.block_size is not None
        and spec.block_size % attention_class("flash_attn").preferred_block_size
    ):
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


def _cpu_kernels(specs: Specs) -> Kernels:
    """The C++ kernels, if all that the model and the options need are compiled: now, in no step."""
    from nanovllm.kernels.cpu.library import prepare

    spec = specs[0]
    needed = {
        "lora_down": spec.has_adapters, "tiled_linear": spec.is_quantized,
        "gated_delta": spec.has_states,
    }  # fmt: skip
    for name, is_needed in needed.items():
        if is_needed:
            prepare(name)
    return try_kernels(cpu_kernels(spec.one_order), specs)


def _triton_kernels(specs: Specs) -> Kernels:
    """The Triton kernels, if they are compiled for the device."""
    from nanovllm.kernels.triton.common import INTERPRETED

    if specs[0].device.type == "cuda" and INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set: kernels would be interpreted on the CPU")
    return try_kernels(triton_kernels(specs[0].one_order), specs)


def _triton_kernels_or_plain(specs: Specs) -> Kernels:
    """The Triton kernels, else plain PyTorch: for attention that works without Triton."""
    try:
        return _triton_kernels(specs)
    except Exception as error:
        logger.warning("Triton does not work, so there are no decode graphs: %s", in_short(error))
        return PLAIN


KERNELS: dict[str, Callable[[Specs], Kernels]] = {
    "cpu": _cpu_kernels,
    "triton": _triton_kernels,
    "flash_attn": _triton_kernels_or_plain,
}
