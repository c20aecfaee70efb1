"""LatentConfig: a model with DeepSeek's latent attention. No PyTorch here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.kernels.operands.routing import Routing
from nanovllm.layers.latent_sizes import LatentSizes
from nanovllm.models.experts import (
    ExpertsConfig,
    SharedExpert,
    SparseConfig,
    experts_per_token,
)
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.later_layers import LaterLayersConfig
from nanovllm.models.shapes import LayerShape, MatrixShape
from nanovllm.utils.checks import shorten

# The sizes that transformers' classes give to fields that a file leaves out.
SIZES: Mapping[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LatentConfig(LaterLayersConfig):
    """With the sizes of latent attention; `head_dim` is that of the rotated part."""

    latent: LatentSizes

    def layer_shape(self, index: int) -> LayerShape:
        shape, latent, hidden = super().layer_shape(index), self.latent, self.hidden_size
        others = (each for each in shape.matrices if not each.name.startswith("self_attn."))
        return replace(
            shape, cache=latent.cache, matrices=(*latent_matrices(latent, hidden), *others),
            num_others=shape.num_others + latent.num_others(hidden),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SparseLatentConfig(LatentConfig, SparseConfig):
    """With experts as well."""


def draft_layer(config: SparseLatentConfig) -> SparseLatentConfig:
    """With experts in layer 0, as in the draft head of the files."""
    return replace(config, experts=replace(config.experts, layers=frozenset({0})))


def latent_matrices(
    latent: LatentSizes, hidden_size: int, above: str = "self_attn"
) -> tuple[MatrixShape, ...]:
    """The matrices of latent attention."""
    rank, rows = latent.query_rank, latent.query_size
    queries = [MatrixShape(f"{above}.q_proj", rows, hidden_size)]
    if rank is not None:
        queries = [
            MatrixShape(f"{above}.q_a_proj", rank, hidden_size),
            MatrixShape(f"{above}.q_b_proj", rows, rank),
        ]
    return (
        *queries,
        MatrixShape(f"{above}.kv_a_proj_with_mqa", latent.rank + latent.rotated, hidden_size),
        MatrixShape(f"{above}.kv_b_proj", latent.expanded_size, latent.rank),
        MatrixShape(f"{above}.o_proj", hidden_size, latent.num_heads * latent.value),
    )


def latent_fields(file: Mapping[str, Any], defaults: Mapping[str, Any]) -> Fields:
    """The fields of a file, with the size of the rotated part as that of a head."""
    fields = Fields(file, defaults, NO_WINDOW)
    rotated, plain = (fields.size(name) for name in ("qk_rope_head_dim", "qk_nope_head_dim"))
    if rotated % 2:
        raise ValueError(f"qk_rope_head_dim must be even, got {rotated}")
    if (given := file.get("head_dim")) not in (None, rotated, rotated + plain):
        raise ValueError(f"head_dim={given} and qk_rope_head_dim={rotated} differ")
    heads = fields.size("num_attention_heads")
    if (given := file.get("num_key_value_heads")) not in (None, heads):
        raise ValueError(
            f"num_key_value_heads={given} must equal"
            f" num_attention_heads={heads}: all heads read one latent row"
        )
    fields["head_dim"], fields["num_key_value_heads"] = rotated, heads
    check_activation(fields)
    return fields


def latent_decoder(fields: Fields, *, interleaved: bool) -> dict[str, Any]:
    """The fields of a `LatentConfig`, of those that `latent_fields` returned."""
    decoder = decoder_fields(fields)
    has_rank = fields["q_lora_rank"] is not None
    latent = LatentSizes(
        num_heads=decoder["num_attention_heads"],
        query_rank=fields.size("q_lora_rank") if has_rank else None,
        rank=fields.size("kv_lora_rank"),
        plain=fields.size("qk_nope_head_dim"),
        rotated=decoder["head_dim"],
        value=fields.size("v_head_dim"),
        has_bias=fields.flag("attention_bias"),
        interleaved=interleaved,
        scale=1.0,
    )
    return decoder | {"latent": replace(latent, scale=_scale(latent, decoder["rope_parameters"]))}


def _scale(latent: LatentSizes, rope: Mapping[str, Any]) -> float:
    """The factor of scores, which yarn's `mscale_all_dim` enlarges."""
    scale, weight = float((latent.plain + latent.rotated) ** -0.5), rope.get("mscale_all_dim", 0)
    factor = rope.get("factor", 1.0)
    if rope["rope_type"] == "default" or not weight or factor <= 1:
        return scale
    larger: float = 0.1 * weight * math.log(factor) + 1.0
    return scale * larger**2


def check_only(fields: Fields, only: Mapping[str, Any]) -> None:
    """Raise a ValueError if a field that is there has another value than its `only` one."""
    for name, value in only.items():
        if fields.get(name) not in (None, value):
            raise ValueError(f"{name} must be {value!r}, got {shorten(fields[name])}")


def is_interleaved(fields: Fields) -> bool:
    """Whether the two numbers of a rotated pair are neighbours; null is false."""
    return fields["rope_interleave"] is not None and fields.flag("rope_interleave")


def latent_experts(fields: Fields, routing: Routing, layers: frozenset[int]) -> ExpertsConfig:
    """The experts of `layers`, with a layer that all tokens use, as large as some experts."""
    inner, shared = fields.size("moe_intermediate_size"), fields.size("n_shared_experts")
    number, _ = routed(fields)
    return ExpertsConfig(number, inner, routing, layers, SharedExpert(inner * shared))


def routed(fields: Fields) -> tuple[int, int]:
    """The number of experts, and of those of a token."""
    num_experts = fields.size("n_routed_experts")
    return num_experts, experts_per_token(fields, num_experts)
