"""Config: what the user asked for, validated, and never changed afterwards.

It knows nothing about models or devices: what only the checkpoint or the machine can tell (the
model's length, the pool's size) is settled by the engine, in a copy.
"""

import dataclasses
import math
import os
import re
from dataclasses import dataclass
from typing import Any

from nanovllm.utils.checks import check_bool, check_choice, check_float, check_int, did_you_mean

DTYPES = ("auto", "float32", "float16", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
ATTENTION_BACKENDS = ("auto", "flash_attn", "triton", "cpu", "torch")
SCHEDULINGS = ("prefill-first", "mixed")
MAX_RANKS = 8
INT_RANGES = {
    "max_num_batched_tokens": (1, None),
    "max_num_seqs": (1, None),
    "max_model_len": (2, None),
    "tensor_parallel_size": (1, MAX_RANKS),
    "kvcache_block_size": (1, None),
    "num_kvcache_blocks": (1, None),
    "seed": (0, 2**63 - 1),
}
NONE_FITS = ("max_model_len", "kvcache_block_size", "num_kvcache_blocks")
FLOAT_RANGES = {"gpu_memory_utilization": (0.01, 1.0), "cpu_kvcache_gib": (0.0, math.inf)}


@dataclass(frozen=True)
class Config:
    """Options of an engine; see the table in the README.

    `None` stands for "what fits": the model's own length, the backend's block size, as many KV
    blocks as the memory holds, overlapping steps where a device computes beside the host.
    """

    model: str
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_kvcache_gib: float = 4.0
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enforce_eager: bool = False
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int | None = None
    attention_backend: str = "auto"
    enable_prefix_caching: bool = True
    scheduling: str = "prefill-first"
    overlap: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._normalize()
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_choice("scheduling", self.scheduling, SCHEDULINGS)
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        check_bool("enable_expert_parallel", self.enable_expert_parallel)
        check_bool("enforce_eager", self.enforce_eager)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        if self.overlap is not None:
            check_bool("overlap", self.overlap)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(
                f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {self.device!r}"
            )

    def _normalize(self) -> None:
        """Accept paths for names, torch's objects for `device` and `dtype`, NumPy's numbers."""
        for name in ("model", "tokenizer"):
            value = getattr(self, name)
            if value is None and name == "tokenizer":
                continue
            if not isinstance(value, str | os.PathLike) or not os.fspath(value):
                raise TypeError(f"{name} must be a path or a hub id, got {value!r}")
            object.__setattr__(self, name, str(os.fspath(value)))
        object.__setattr__(self, "device", str(self.device))
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        for name, (low, high) in INT_RANGES.items():
            if getattr(self, name) is not None or name not in NONE_FITS:
                object.__setattr__(self, name, check_int(name, getattr(self, name), low, high))
        for name, bounds in FLOAT_RANGES.items():
            object.__setattr__(self, name, check_float(name, getattr(self, name), *bounds))

    @property
    def max_num_running(self) -> int:
        """Sequences that can decode at once: each takes a token of a step's budget, and a block."""
        least = min(self.max_num_seqs, self.max_num_batched_tokens)
        return least if self.num_kvcache_blocks is None else min(least, self.num_kvcache_blocks)

    @classmethod
    def from_options(cls, model: str | os.PathLike[str], options: dict[str, Any]) -> "Config":
        """Build a Config from keyword options; an unknown one is a TypeError with a suggestion."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
                raise TypeError(f"unknown option {name!r}{hint}")
        return cls(model=model, **options)  # type: ignore[arg-type]
