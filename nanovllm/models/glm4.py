"""GLM 4 of 2025 (0414): four norms a block, an interleaved rope, a fused gate-and-up projection."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import FUSED, Names
from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.shapes import LayerShape, MatrixShape, attention_matrices
from nanovllm.models.spellings import partly_rotated

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696,
    "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131_072,
    "attention_bias": True,
}  # fmt: skip
ENDS = [151_329, 151_336, 151_338]  # of files that have no EOS ids
NAMES = Names(fused={"qkv_proj": FUSED["qkv_proj"]})


@dataclass(frozen=True, kw_only=True)
class Glm4Config(ModelConfig):
    """Blocks have four norms, and their files a fused projection."""

    def layer_shape(self, index: int) -> LayerShape:
        shape, hidden, inner = super().layer_shape(index), self.hidden_size, self.intermediate_size
        matrices = (
            *attention_matrices(hidden, self.heads(index)),
            MatrixShape("mlp.gate_up_proj", 2 * inner, hidden),
            MatrixShape("mlp.down_proj", hidden, inner),
        )
        return replace(shape, matrices=matrices, num_others=shape.num_others + 2 * hidden)


def read(file: Mapping[str, Any]) -> Glm4Config:
    """Half of each head is rotated, if the file does not say otherwise."""
    fields = Fields(partly_rotated(file, 0.5), DEFAULTS, NO_WINDOW)
    if fields["eos_token_id"] is None:
        fields["eos_token_id"] = ENDS
    check_activation(fields)
    return Glm4Config(
        **decoder_fields(fields, partial_rotary=True), qkv_bias=fields.flag("attention_bias")
    )


def build(config: Glm4Config, make: "Build") -> "CausalLM":
    """Compose the model."""
    from nanovllm.layers.block import Block, Norms
    from nanovllm.models import parts
    from nanovllm.models.interleaved import attention

    def block(index: int, make: "Build") -> Block:
        names = (
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
            "post_mlp_layernorm",
        )  # fmt: skip
        return Block(
            make,
            Norms(*((name, parts.norm(config)) for name in names)),
            attention(config, index, make.inside("self_attn")),
            parts.mlp(config, make.inside("mlp")),
        )

    return parts.causal_lm(config, make, block)


FAMILY = Family(read, build, NAMES)
