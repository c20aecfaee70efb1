"""Texts about an engine that are rarely needed: what it is, and what cannot be done with it."""

from typing import Any

COPIED = (
    "an LLM cannot be copied or pickled: it has a device's memory, and processes; pass the model's"
    " name and the options, and make an LLM in each process"
)
FORKED = (
    "an LLM cannot be used in a process forked from the one that made it; start that process with"
    ' multiprocessing\'s "spawn" method, and make an LLM in it'
)


def text_of(engine: Any) -> str:
    """The model, device and memory of an LLMEngine, in one line."""
    config, caches = engine.config, engine.scheduler.caches
    ranks = f" {config.tensor_parallel_size} ranks," if config.tensor_parallel_size > 1 else ""
    states = f", {caches.states.num_slots} slots for states" if caches.states else ""
    return (
        f"{type(engine).__name__}({config.model!r}, device={config.device!r},"
        f" dtype={config.dtype!r}, attention_backend={config.attention_backend!r},{ranks}"
        f" {caches.blocks.num_blocks} KV blocks of {config.kvcache_block_size} tokens{states})"
    )
