"""The C++ library of this folder: its functions, which take tensors' addresses, and its constants.

The first call compiles it, or raises a RuntimeError that says why this is not possible. Functions
for a quantized KV cache, for latent rows, for linear layers, for weights in blocks, for adapters
and for layers with states are in libraries of their own.

All libraries share a pool of threads if our kernels multiply all matrices: those of any model on
this processor, or those of a model that calls `use_pool`. If oneDNN multiplies some, in
PyTorch's threads, these threads do everything, because two pools would compete for the cores.
"""

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanovllm.kernels.cpu import processor
from nanovllm.kernels.cpu.compile import load
from nanovllm.kernels.plain import noise

SOURCE = Path(__file__).with_name("kernels.cpp")
OTHER_SOURCES = {
    **dict.fromkeys(
        ("attention_codes", "norm_rope_store_codes", "norm_rope_store_codes_wide"),
        SOURCE.with_name("kv_codes.cpp"),
    ),
    **dict.fromkeys(
        ("attention_latents", "latent_state_bytes"), SOURCE.with_name("latents.cpp")
    ),
    **dict.fromkeys(
        ("tiled_linear", "heads_linear", "tile_outputs", "step_inputs", "max_depth", "e4m3_unit",
         "unit_size", "vector_unit_size"),
        SOURCE.with_name("tiled_linear.cpp"),
    ),
    **dict.fromkeys(
        ("lora_down", "lora_up", "group_rows", "block_rows"), SOURCE.with_name("lora.cpp")
    ),
    **dict.fromkeys(
        ("tile_bytes", "arrange_blocks", "block_linear", "byte_linear", "weights_of_rows",
         "outputs_of_tile", "inputs_of_chunk"),
        SOURCE.with_name("block_linear.cpp"),
    ),
    **dict.fromkeys(
        ("causal_conv", "channel_delta", "gated_delta", "gated_norm", "state_space", "most_taps"),
        SOURCE.with_name("states.cpp"),
    ),
    "whole_blocks": SOURCE.with_name("whole_blocks.cpp"),
}  # fmt: skip
MAX_HEAD_DIM, MAX_LATENT = 512, 1024  # MAX_HEAD_DIM of vector.h, and in latents.cpp
DTYPES = (torch.float32, torch.bfloat16)

# Arguments of each function: pointers, 64-bit integers, floats.
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
ARGUMENTS = {
    "rms_norm": "pipipppiifi",
    "silu_and_mul": "pipiii",
    "gelu_and_mul": "pipiii",
    "sigmoid_and_mul": "pipiiii",
    "norm_rope_store": "pippippfpppppiiiiii",
    "norm_rope_store_codes": "pippippfpppppppffipiiiiii",
    "rms_norm_wide": "pipipppiifi",
    "norm_rope_store_wide": "pippippfpppppiiiiii",
    "norm_rope_store_codes_wide": "pippippfpppppppffipiiiiii",
    "attention": "p",
    "attention_codes": "p",
    "attention_latents": "p",
    "mask": "pipiiii",
    "sample": "pippppipppiii",
    "read_table": "ppppppppppiiii",
    "tiled_linear": "ppippii",
    "heads_linear": "pipiipii",
    "group_rows": "piip",
    "lora_down": "piipppiiipi",
    "lora_up": "pppppiippiii",
    "tile_bytes": "iip",
    "arrange_blocks": "ppii",
    **dict.fromkeys(("block_linear", "byte_linear"), "ppippii"),
    "weights_of_rows": "ppipi",
    "causal_conv": "pippppipppiiiiii",
    **dict.fromkeys(("channel_delta", "gated_delta"), "pipipippfppipppiiiiiii"),
    "gated_norm": "pipipipiiifii",
    "state_space": "pipipppffppipppiiiiiii",
    "whole_blocks": "p",
}

# The constants of the random numbers have one source: `noise`.
DEFINITIONS = (
    *(f"-DNOISE_P{n}={p % 2**64:#x}ull" for n, p in enumerate(noise.PRIMES, start=1)),
    f"-DNOISE_TOP_BIT={noise.TOP_BIT % 2**64:#x}ull",
    f"-DNOISE_GOLDEN={noise.GOLDEN % 2**32:#x}u",
    *(f"-DNOISE_MIXER_{n}={m:#x}u" for n, m in enumerate(noise.MIXERS, start=1)),
    f"-DNOISE_SHRINK={noise.SHRINK.hex()}f",
    f"-DNOISE_SMALLEST={noise.SMALLEST.hex()}f",
)


_loaded: set[Path] = set()  # the sources of the libraries that are loaded
_pool_is_wanted = threading.Event()  # by some model


def library(source: Path = SOURCE) -> ctypes.CDLL:
    """Load the library on the first call, and compile it if the cache does not have it."""
    made = load(source, DEFINITIONS)
    _loaded.add(source)
    if (processor.tiled_types() or _pool_is_wanted.is_set()) and _may_use(torch.get_num_threads()):
        pool = ctypes.c_void_p.in_dll(load(SOURCE, DEFINITIONS), "pool")
        ctypes.c_void_p.in_dll(made, "shared_run").value = pool.value
    return made


def use_pool() -> None:
    """Let the pool's threads do the work of all libraries from now on, also for other models."""
    _pool_is_wanted.set()
    for source in [*_loaded]:
        library(source)


def prepare(name: str) -> None:
    """Load the library with a function now, so that no later call compiles it."""
    library(OTHER_SOURCES.get(name, SOURCE))


def _may_use(num_cores: int) -> bool:
    """Whether the pool's threads may run on `num_cores` cores; they inherit those of this thread.

    With OMP_PROC_BIND, each of OpenMP's threads is bound to one core, and so is this thread.
    """
    return not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) >= num_cores


@functools.cache
def function(name: str, dtype: torch.dtype | str = "any") -> Callable[..., None]:
    """A function of the library for tensors of `dtype`; "any" for one that has no tensor type."""
    symbol = f"{name}_{str(dtype).removeprefix('torch.')}"
    address = ctypes.c_void_p.in_dll(library(OTHER_SOURCES.get(name, SOURCE)), symbol).value
    assert address is not None
    return ctypes.CFUNCTYPE(None, *(TYPES[kind] for kind in ARGUMENTS[name]))(address)


@functools.cache
def constant(name: str) -> int:
    """The value of a size that a library exports."""
    return ctypes.c_int64.in_dll(library(OTHER_SOURCES.get(name, SOURCE)), name).value


def address(tensor: torch.Tensor | None) -> Any:
    """The address of a tensor's elements; for no tensor None, which C++ reads as null."""
    return None if tensor is None else tensor.data_ptr()
