"""OLMoE: Llama with experts in all layers, and norms over all heads of a token together."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.kernels.operands.routing import Routing
from nanovllm.models.experts import (
    ExpertsConfig,
    SparseConfig,
    all_layers,
    experts_per_token,
    number_of_experts,
    sparse_model,
)
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.shapes import LayerShape

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50_304, "hidden_size": 2048, "intermediate_size": 2048,
    "num_hidden_layers": 16, "num_attention_heads": 16, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "eos_token_id": 50_279, "clip_qkv": None, "num_experts": 64,
    "num_experts_per_tok": 8, "norm_topk_prob": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(SparseConfig):
    """With the limit of queries, keys and values."""

    clip_qkv: float | None

    def layer_shape(self, index: int) -> LayerShape:
        """Two more norms, of all query heads and of all key heads."""
        shape, heads = super().layer_shape(index), self.heads(index)
        norms = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        return replace(shape, num_others=shape.num_others + norms)


def read(file: Mapping[str, Any]) -> OlmoeConfig:
    """The intermediate size is that of each expert."""
    fields = Fields(file, DEFAULTS, NO_WINDOW)
    check_activation(fields)
    num_experts = number_of_experts(fields)
    per_token = experts_per_token(fields, num_experts)
    return OlmoeConfig(
        **decoder_fields(fields),
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        clip_qkv=None if fields["clip_qkv"] is None else fields.number("clip_qkv"),
        experts=ExpertsConfig(
            num_experts,
            fields.size("intermediate_size"),
            Routing(per_token=per_token, normalized=fields.flag("norm_topk_prob")),
            all_layers(fields),
            size_name="intermediate_size",
        ),
    )


def build(config: OlmoeConfig, make: "Build") -> "CausalLM":
    """Compose the model."""
    from nanovllm.layers.full_width_norm import full_width_norms
    from nanovllm.layers.mixer import SelfAttention

    def attention(index: int, make: "Build") -> SelfAttention:
        heads = config.heads(index)
        options: dict[str, Any] = dict(
            qkv_bias=config.qkv_bias, o_bias=config.o_bias,
            head_norms=full_width_norms(make, heads, config.rms_norm_eps),
        )  # fmt: skip
        if config.clip_qkv is None:
            return SelfAttention(make, config.hidden_size, heads, **options)
        from nanovllm.layers.clipped_attention import ClippedAttention

        return ClippedAttention(make, config.hidden_size, heads, **options, limit=config.clip_qkv)

    return sparse_model(config, make, attention)


FAMILY = Family(read, build)
