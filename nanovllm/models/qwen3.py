"""Qwen3, dense: the common decoder with a norm on each query and key head.

What readers of nano-vllm know as Qwen3Attention, Qwen3MLP and Qwen3DecoderLayer is in
`decoder.py`; how Qwen3 differs from its relatives is in `registry.py`.
"""

from nanovllm.models.decoder import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """The decoder, for a `ModelConfig` of Qwen3."""
