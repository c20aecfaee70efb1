"""AllFeatures: imports the room of each feature when an option or a request first asks for it."""

from typing import Any

from nanovllm.config import Config
from nanovllm.engine.features import Features, ShardParts
from nanovllm.models.config import ModelConfig


class AllFeatures(Features):
    """Every feature of the package."""

    def shard_parts(self, config: Config, model_config: ModelConfig, tokenizer: Any) -> ShardParts:
        """What the options ask for on every rank."""
        drafting = adapters = memory = None
        if config.speculative_config is not None:
            from nanovllm.drafting.source import find_source

            drafting = find_source(config, model_config, tokenizer)
        if config.enable_lora:
            from nanovllm.adapters.parts import adapter_parts

            adapters = adapter_parts
        if config.enable_sleep_mode:
            from nanovllm.weights.sleep_memory import sleep_memory

            memory = sleep_memory
        return ShardParts(drafting, adapters, memory)
