"""Queries and keys in one order of sums, for any number of tokens."""

import torch

from nanovllm.kernels.kv_layer import KVLayer
from nanovllm.kernels.plain.norm_rope_store import Rope
from nanovllm.kernels.triton.attention.norm_rope_store import by_heads

HEADS = 8  # of a program: the sums of the heads' norms follow the shape of its tile


def norm_rope_store(
    qkv: torch.Tensor,
    num_kv_heads: int,
    rope: Rope,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    kv: KVLayer,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the kernel that divides the heads of a token by the number of tokens."""
    return by_heads(HEADS, qkv, num_kv_heads, rope, norms, eps, kv, slots)
