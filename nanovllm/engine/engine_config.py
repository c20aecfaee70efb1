"""EngineConfig: the options of a running engine, all of them settled.

Startup makes it once, when the device, the model and the memory are known. `Config` has the user's
options; here every field has a value.
"""

from dataclasses import dataclass, fields
from typing import Any

from nanovllm.config import Config


@dataclass(frozen=True)
class EngineConfig:
    """The fields of `Config` that matter once the model is loaded, with the values in use."""

    model: str
    device: str
    dtype: str
    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_running: int  # sequences that can decode at once
    max_model_len: int
    tensor_parallel_size: int
    enable_expert_parallel: bool
    enforce_eager: bool
    kvcache_block_size: int
    num_kvcache_blocks: int
    kv_cache_dtype: str
    attention_backend: str
    enable_prefix_caching: bool
    scheduling: str
    long_prefill_token_threshold: int
    overlap: bool
    seed: int
    logprobs_mode: str
    scheduling_policy: str
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    lora_modules: tuple[str, ...]

    @classmethod
    def settle(
        cls, config: Config, num_kvcache_blocks: int, max_model_len: int, has_kv: bool = True
    ) -> "EngineConfig":
        """Complete a Config that lacks only the pool's size and the longest sequence."""
        names = [field.name for field in fields(cls)]
        values: dict[str, Any] = {name: getattr(config, name, None) for name in names}
        # Each sequence takes a token of a step's budget, and a block.
        running = min(most_running(config), num_kvcache_blocks) if has_kv else most_running(config)
        values["max_num_running"] = running
        values["scheduling"] = config.scheduling or "prefill-first"
        values |= dict(max_cpu_loras=most_kept(config), lora_modules=config.lora_modules or ())
        values |= dict(num_kvcache_blocks=num_kvcache_blocks, max_model_len=max_model_len)
        missing = [name for name, value in values.items() if value is None]
        assert not missing, missing
        return cls(**values)


def most_running(config: Config) -> int:
    """Sequences that can decode at once in a KV pool of any size."""
    assert config.max_num_seqs is not None, "the placement settles it"
    return min(config.max_num_seqs, most_tokens(config))


def most_tokens(config: Config) -> int:
    """Tokens in one step."""
    assert config.max_num_batched_tokens is not None, "the placement settles it"
    return config.max_num_batched_tokens


def most_kept(config: Config) -> int:
    """Adapters that the host's memory has room for."""
    return config.max_cpu_loras or 4 * config.max_loras
