"""What the metadata and tensors of a GGUF file say about fields that several families have."""

from typing import Any

from nanovllm.models.gguf.metadata import Metadata

Config = dict[str, Any]


def has(metadata: Metadata, tensor: str) -> bool:
    """Whether the first layer has a tensor."""
    return f"blk.0.{tensor}" in metadata.model.tensors


def attention_bias(metadata: Metadata) -> Config:
    """The field of families that may have biases of queries, keys and values."""
    return {"attention_bias": has(metadata, "attn_q.bias")}


def biases(metadata: Metadata) -> Config:
    """The fields of families that may have biases in all linear layers."""
    return {**attention_bias(metadata), "mlp_bias": has(metadata, "ffn_gate.bias")}


def window(metadata: Metadata) -> int | None:
    """The tokens that a token attends to, including itself; None for all."""
    value: int = metadata.get("attention.sliding_window", 0)
    return metadata.size("attention.sliding_window") if value else None


def no_window(metadata: Metadata) -> Config:
    """For families whose files do not say which layers have the window."""
    metadata.only("attention.sliding_window", (0,))
    return {"use_sliding_window": False}
