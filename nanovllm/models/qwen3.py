"""Qwen3, dense: the common decoder with a norm on each query and key head.

nano-vllm's Qwen3Attention, Qwen3MLP and Qwen3DecoderLayer are in `decoder.py`; how Qwen3 differs
from other architectures is in `registry.py`.
"""

from nanovllm.models.decoder import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """The decoder, for a `ModelConfig` of Qwen3."""
