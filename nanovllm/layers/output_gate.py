"""Self-attention whose output is multiplied by gates, which a projection of their own computes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.layers.cache_spec import KeysAndValues
from nanovllm.layers.heads_linear import HeadsLinear
from nanovllm.layers.layer import Build
from nanovllm.layers.mixer import Ropes, SelfAttention


class OutputGate(SelfAttention):
    """The outputs of the heads are multiplied by the sigmoid of a gate for each element.

    The projection of the gates is the last part of `qkv_proj`, without a bias: `Names.fused` of the
    family must say so.
    """

    def __init__(
        self, make: Build, hidden_size: int, heads: KeysAndValues, *,
        gates: int, qkv_bias: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        """`gates`: how many there are for each head, one or `head_dim`."""
        if qkv_bias:
            raise ValueError("biases of queries, keys and values next to gates are not supported")
        super().__init__(make, hidden_size, heads, **options)
        stored = make.formats.of("qkv_proj")
        self.qkv_proj = HeadsLinear(
            make, hidden_size, heads, stored, value_dim=heads.head_dim, gates=gates
        )
        self.num_gates = self.cache.num_heads * gates

    def attend(self, projected: torch.Tensor, ropes: Ropes) -> torch.Tensor:
        attended = super().attend(projected[:, : -self.num_gates], ropes)
        return self.gated(attended, projected[:, -self.num_gates :])

    def gated(self, attended: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """The outputs [T, H * D], which may be overwritten, times their gates."""
        return self.attn.kernels.sigmoid_and_mul(attended, gates)


class SoftplusGate(OutputGate):
    """The same with softplus, in float32, of a gate for each element or for each head."""

    def gated(self, attended: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        softplus: Callable[[torch.Tensor], torch.Tensor] = F.softplus
        if self.attn.kernels.avoids_pytorch:
            from nanovllm.kernels.cpu.activations import softplus
        factors = softplus(gates.float()).to(attended.dtype)
        heads = attended.view(len(attended), factors.shape[1], -1)
        return (heads * factors.unsqueeze(-1)).view(attended.shape)
