"""A family from outside of the package, of DeepSeek's attention: used by test_latents.py.

Keys and values are up-projections of a latent row, which are folded into queries and outputs. The
last columns of a row are rotated, and are a part of the keys alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.kernels.plain.norm_rope_store import rotate
from nanovllm.layers.attention import Attention
from nanovllm.layers.block import Block
from nanovllm.layers.latent import Latent
from nanovllm.layers.layer import Build, Layer
from nanovllm.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from nanovllm.layers.mixer import ROPE, Mixer, Ropes
from nanovllm.layers.rms_norm import RMSNorm
from nanovllm.models import parts
from nanovllm.models.config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.family import Family
from nanovllm.models.fields import Fields, decoder_fields
from nanovllm.models.shapes import LayerShape, MatrixShape, gated_matrices


@dataclass(frozen=True, kw_only=True)
class LatentConfig(ModelConfig):
    """`head_dim` is the size of the rotated part, `plain` that of the others and of values."""

    plain: int
    rank: int  # numbers of a row that are not rotated

    def layer_shape(self, index: int) -> LayerShape:
        hidden, inner, heads = self.hidden_size, self.intermediate_size, self.num_attention_heads
        width, size = self.rank + self.head_dim, heads * self.plain
        matrices = (
            MatrixShape("self_attn.q_proj", size + heads * self.head_dim, hidden),
            MatrixShape("self_attn.kv_a_proj", width, hidden),
            MatrixShape("self_attn.kv_b_proj", 2 * size, self.rank),
            MatrixShape("self_attn.o_proj", hidden, size), *gated_matrices(hidden, inner),
        )  # fmt: skip
        cache = Latent(heads, width, value_width=self.rank)
        others = 2 * hidden + self.rank
        return LayerShape(cache, matrices, others, {"intermediate_size": inner})


class KeptLinear(MergedColumnParallelLinear):
    bind = Layer.bind  # keeps the weight as it is stored, for the mixer to multiply by


class LatentAttention(Mixer):
    def __init__(self, c: LatentConfig, make: Build) -> None:
        super().__init__()
        self.plain, self.rank, self.rotated = c.plain, c.rank, c.head_dim
        hidden, ranks, heads, of = c.hidden_size, make.ranks, c.num_attention_heads, make.formats.of
        self.cache = Latent(heads, c.rank + c.head_dim, value_width=c.rank).part(ranks.size)
        size = heads * (c.plain + c.head_dim)
        self.q_proj = MergedColumnParallelLinear(hidden, [size], False, ranks, of("q_proj"))
        self.kv_a_proj = ReplicatedLinear(hidden, self.cache.width, False, of("kv_a_proj"))
        self.kv_a_layernorm = RMSNorm(c.rank, c.rms_norm_eps)
        self.kv_b_proj = KeptLinear(c.rank, [2 * heads * c.plain], False, ranks)
        self.o_proj = RowParallelLinear(heads * c.plain, hidden, False, ranks, of("o_proj"))
        self.attn = Attention(self.cache, score_scale=(c.plain + c.head_dim) ** -0.5)

    def mix(self, x: Any, ropes: Ropes) -> torch.Tensor:
        q = self.q_proj(x).unflatten(1, (-1, self.plain + self.rotated))
        latent, key = self.kv_a_proj(x).split([self.rank, self.rotated], -1)
        latent, key = self.kv_a_layernorm(latent.contiguous()), rotate(key[:, None], ropes[ROPE])
        to_keys, to_values = self.kv_b_proj.weight.view(-1, 2, self.plain, self.rank).unbind(1)
        plain, rotated = q.split([self.plain, self.rotated], -1)
        folded = torch.einsum("thd,hdr->thr", plain, to_keys), rotate(rotated, ropes[ROPE])
        rows = torch.cat([latent[:, None], key], -1)
        sums = self.attn.attend_latent(torch.cat(folded, -1), rows)
        return torch.einsum("thr,hdr->thd", sums, to_values).flatten(1)

    def project(self, mixed: torch.Tensor) -> torch.Tensor:
        return self.o_proj(mixed)


def build(config: LatentConfig, make: Build) -> CausalLM:
    def block(_: int, make: Build) -> Block:
        attention = LatentAttention(config, make.inside("self_attn"))
        mlp = parts.mlp(config, make.inside("mlp"))
        return Block(make, parts.pre_norms(config), attention, mlp)

    return parts.causal_lm(config, make, block)


def read(file: Mapping[str, Any]) -> LatentConfig:
    fields = Fields(file, {})
    plain, rank = fields.size("qk_nope_head_dim"), fields.size("kv_lora_rank")
    return LatentConfig(**decoder_fields(fields), plain=plain, rank=rank)


FAMILY = Family(read, build)
