"""Placement: where one rank computes, in what type, and with which kernels."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from nanovllm.config import BATCHED_TOKENS, NUM_SEQS, Config
from nanovllm.kernels.kv_layer import CODES
from nanovllm.layers.backend import AttentionSpec, Backend
from nanovllm.layers.backends import choose_backend
from nanovllm.layers.cache_spec import State, TokenCache
from nanovllm.layers.ranks import ALONE, Ranks
from nanovllm.models.config import ModelConfig
from nanovllm.utils.resources import allowed_cores

UNUSED_HEADS = (1, 1, 64)  # to choose kernels for a model without attention


@dataclass(frozen=True)
class Placement:
    """Where and how a rank computes. `max_positions` is the length of the longest sequence."""

    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    backend: Backend
    max_positions: int
    uses_graphs: bool  # whether decode steps are CUDA graphs
    most_drafts: int = 0  # the most drafts that the device guesses for a sequence in a decode step
    most_rejected: int = 0  # the most drafts of a sequence in a step, which may be wrong
    caches_prefixes: bool = True
    num_seqs: int = 0  # the default of `max_num_seqs`

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return self.backend.attention.block_size

    def settle(self, config: Config) -> Config:
        """The options with this placement's choices, so that other ranks choose the same."""
        batched = config.max_num_batched_tokens or BATCHED_TOKENS[self.device.type]
        return replace(
            config, device=str(self.device), dtype=str(self.dtype),
            kvcache_block_size=self.block_size, attention_backend=self.backend.attention.name,
            max_num_batched_tokens=batched, max_num_seqs=config.max_num_seqs or self.num_seqs,
            overlap=self.device.type == "cuda" if config.overlap is None else config.overlap,
        )  # fmt: skip


def resolve_placement(config: Config, model_config: ModelConfig, ranks: Ranks) -> Placement:
    """Resolve device, type, backend and length; an option that does not fit is a ValueError."""
    device = resolve_device(config.device, ranks)
    dtype = resolve_dtype(config.dtype, model_config.dtype, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype)
    longest = model_config.max_context
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ValueError(
            f"max_model_len must be at most {longest}, the model's limit, got"
            f" {config.max_model_len}"
        )
    check_kv_dtype(model_config, kv_dtype)
    specs = attention_specs(config, model_config, device, dtype, kv_dtype, ranks.size)
    with computing_on(device):
        backend = choose_backend(config.attention_backend, *specs)
    uses_graphs = device.type == "cuda" and backend.graph_safe and not config.enforce_eager
    max_positions = config.max_model_len or longest
    asked = config.speculative_config
    most_rejected = asked.most_drafts if asked else 0
    on_host = {"grammar", "none"} | ({"ngram"} if backend.attention.packs_few_queries else set())
    most_drafts = most_rejected if asked and asked.method not in on_host else 0
    num_seqs = NUM_SEQS[device.type]
    if specs[0].has_states:
        from nanovllm.engine.start.running_states import num_sequences

        slots = 1 + most_rejected
        num_seqs = num_sequences(num_seqs, slots, config, model_config, ranks.size, device, dtype)
    return Placement(
        ranks, device, dtype, kv_dtype, backend, max_positions, uses_graphs, most_drafts,
        most_rejected, config.enable_prefix_caching, num_seqs,
    )  # fmt: skip


def check_kv_dtype(model_config: ModelConfig, kv_dtype: torch.dtype) -> None:
    """Raise a ValueError if a cache of this type cannot hold what layers keep."""
    if kv_dtype == CODES:
        from nanovllm.engine.cache.codes import check_codes

        check_codes(model_config)


def attention_specs(
    config: Config, model_config: ModelConfig, device: torch.device, dtype: torch.dtype,
    kv_dtype: torch.dtype, num_ranks: int = 1,
) -> list[AttentionSpec]:  # fmt: skip
    """The requirements on attention on a rank: one item for each kind of layers."""
    caches = [cache for layer in model_config.layers for cache in layer.cache.each]
    has_states = any(isinstance(cache, State) for cache in caches)
    kinds = [
        (cache.part(num_ranks).heads, layer.needs, cache.value_width)
        for layer in model_config.layers for cache in layer.cache.each
        if isinstance(cache, TokenCache)
    ]  # fmt: skip
    return [
        AttentionSpec(
            device, dtype, *heads, config.kvcache_block_size, not config.enforce_eager, kv_dtype,
            needs, config.enable_lora, model_config.quantization is not None, has_states, values,
            config.batch_invariant,
        )
        for heads, needs, values in dict.fromkeys(kinds or [(UNUSED_HEADS, frozenset[str](), None)])
    ]  # fmt: skip


def resolve_device(device: str, ranks: Ranks = ALONE) -> torch.device:
    """Resolve `Config.device` to an existing device. Ranks use consecutive GPUs."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not device.startswith("cuda"):
        return torch.device(device)
    if not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but PyTorch finds no CUDA device; use 'cpu'")
    index = int(device.partition(":")[2] or torch.cuda.current_device())
    last, num_devices = index + ranks.size - 1, torch.cuda.device_count()
    if last >= num_devices:
        raise ValueError(
            f"device={device!r} and tensor_parallel_size={ranks.size} need 'cuda:{last}', but there"
            f" are {num_devices} devices: from {index} on, {max(num_devices - index, 0)} ranks fit"
        )
    return torch.device("cuda", index + ranks.rank)


def resolve_dtype(dtype: str, model_dtype: str, device: torch.device) -> torch.dtype:
    """Resolve `Config.dtype`; "auto" is the model's type, or float32 if a CPU lacks that type."""
    resolved: torch.dtype = getattr(torch, model_dtype if dtype == "auto" else dtype)
    if dtype != "auto" or device.type != "cpu":
        return resolved
    from nanovllm.kernels.plain.packed_linear import computes

    return resolved if computes(resolved) else torch.float32


def resolve_kv_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Resolve `Config.kv_cache_dtype` for a model of type `dtype`."""
    return dtype if kv_cache_dtype == "auto" else CODES


def threads_of_rank(size: int) -> int:
    """The CPU threads of each of `size` ranks: together those of PyTorch, within the quota."""
    return max(1, min(torch.get_num_threads(), allowed_cores()) // size)


@contextmanager
def computing_on(device: torch.device, num_threads: int | None = None) -> Iterator[None]:
    """PyTorch's settings while the engine computes, independent of the caller's.

    No gradients and no autocast. `device` is the current device: Triton launches on that. With
    `num_threads`, PyTorch and our kernels use that many CPU threads.
    """
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    before = torch.get_num_threads()
    with torch.inference_mode(), torch.autocast(device.type, enabled=False), current:
        if num_threads is None or num_threads == before:
            yield
            return
        torch.set_num_threads(num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
