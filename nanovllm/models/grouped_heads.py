"""Build models whose files have the fused projections in groups of heads."""

from typing import TYPE_CHECKING

from nanovllm.models.plain import PlainConfig

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.layers.mixer import Mixer
    from nanovllm.models.decoder import CausalLM


def grouped_model(config: PlainConfig, make: "Build") -> "CausalLM":
    """The model of a family, with the projections in the order of its files."""
    from nanovllm.layers.file_attention import GroupedAttention
    from nanovllm.layers.mixer import SelfAttention
    from nanovllm.models import parts, plain_parts

    def attention(config: PlainConfig, index: int, make: "Build") -> "Mixer":
        kind = SelfAttention if config.usual_order else GroupedAttention
        return parts.attention(config, index, make, kind)

    return plain_parts.build(config, make, attention)
