"""A family from outside of the package with states, used by test_state_strangers.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.layers.block import Block
from nanovllm.layers.cache_spec import State, StateTensor
from nanovllm.layers.context import state_step
from nanovllm.layers.layer import Build
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.mixer import Ropes
from nanovllm.layers.split_tensor import SplitTensor
from nanovllm.layers.state_mixer import StateMixer
from nanovllm.models import parts
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, decoder_fields
from nanovllm.models.shapes import LayerShape, MatrixShape, gated_matrices

HEADS, DIM, WIDTH = 4, 8, 4
SIZE = HEADS * DIM


@dataclass(frozen=True, kw_only=True)
class MixedConfig(ModelConfig):
    kinds: tuple[str, ...]  # of each layer, "attention" or "linear"

    def layer_shape(self, index: int) -> LayerShape:
        if self.kinds[index] == "attention":
            return super().layer_shape(index)
        hidden, inner = self.hidden_size, self.intermediate_size
        rows = {"q_proj": SIZE, "k_proj": SIZE, "v_proj": SIZE, "gate": HEADS}
        matrices = [MatrixShape(f"linear.{name}", size, hidden) for name, size in rows.items()]
        matrices += [MatrixShape("linear.o_proj", hidden, SIZE), *gated_matrices(hidden, inner)]
        split = {"intermediate_size": inner, "linear_heads": HEADS}
        return LayerShape(state(HEADS), (*matrices,), 2 * hidden + 3 * SIZE * WIDTH, split)


def state(heads: int) -> State:
    """The last inputs of a convolution, and what the recurrence of each head remembers."""
    return State((StateTensor((WIDTH - 1, 3, heads, DIM)), StateTensor((heads, DIM, DIM), True)))


class Linear(StateMixer):
    def __init__(self, make: Build, hidden: int) -> None:
        super().__init__()
        self.qkv_proj = MergedColumnParallelLinear(hidden, [SIZE] * 3, ranks=make.ranks)
        self.gate = MergedColumnParallelLinear(hidden, [HEADS], ranks=make.ranks)
        self.o_proj = RowParallelLinear(SIZE, hidden, ranks=make.ranks)
        self.conv = SplitTensor((3, HEADS, DIM, WIDTH), 1, make.ranks)
        self.cache = state(self.conv.weight.shape[1])

    def mix(self, x: Any, ropes: Ropes) -> torch.Tensor:
        u, gate = self.qkv_proj(x).view(len(x), 3, -1, DIM), self.gate(x).sigmoid().float()
        out, (inputs, memories) = torch.empty_like(u[:, 0]), self.states
        for rows, before, after in state_step().batches:
            conv, memory = inputs[before], memories[before]
            for row, slot in zip(rows.unbind(1), after.unbind(1), strict=True):
                window = torch.cat([conv, u[row][:, None]], 1)
                mixed = F.silu(torch.einsum("nwphd,phdw->nphd", window, self.conv.weight))
                q, k, v = mixed.float().unbind(1)
                memory = gate[row][..., None, None] * memory + k[..., None] * v[..., None, :]
                out[row] = torch.einsum("nhd,nhde->nhe", q, memory).to(out.dtype)
                inputs[slot], memories[slot] = (conv := window[:, 1:]), memory
        return out.flatten(1)

    def project(self, mixed: torch.Tensor) -> torch.Tensor:
        return self.o_proj(mixed)


def read(file: Mapping[str, Any]) -> MixedConfig:
    return MixedConfig(**decoder_fields(Fields(file, {})), kinds=tuple(file["kinds"]))


def build(config: MixedConfig, make: Build) -> CausalLM:
    def block(index: int, make: Build) -> Block:
        mlp, norms = parts.mlp(config, make.inside("mlp")), parts.pre_norms(config)
        if config.kinds[index] == "attention":
            attention = parts.attention(config, index, make.inside("self_attn"))
            return Block(make, norms, attention, mlp)
        return Block(make, norms, Linear(make, config.hidden_size), mlp, mixer_name="linear")

    return parts.causal_lm(config, make, block)


FAMILY = Family(read, build)
