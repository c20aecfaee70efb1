"""Mamba 2 and Codestral Mamba: state spaces alone, without attention and feed-forward parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import Names
from nanovllm.layers.state_space import StateSpace
from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.shapes import LayerShape
from nanovllm.models.spellings import errors_spell, respelt
from nanovllm.models.state_spaces import (
    check_inner,
    space_matrices,
    space_mixer,
    space_sizes,
    time_limits,
)
from nanovllm.utils.checks import check_bool, shorten

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128,
    "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2,
    "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True, "hidden_act": "silu",
    "eos_token_id": 2, "time_step_limit": (0.0, float("inf")), "tie_word_embeddings": False,
}  # fmt: skip
SPELLING = {"layer_norm_epsilon": "rms_norm_eps"}
SIZES = {
    "num_heads": "num_heads", "head_dim": "head_dim", "num_groups": "n_groups",
    "state_size": "state_size", "width": "conv_kernel",
}  # fmt: skip
# Files do not limit positions, and the model has no table of them. This is far beyond training.
POSITIONS = 1 << 20
PREFIXES = {
    "backbone.embeddings.": "model.embed_tokens.", "backbone.embedding.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.", "backbone.": "model.",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(ModelConfig):
    """With the state space of all layers. The heads of attention have no meaning."""

    space: StateSpace

    def layer_shape(self, index: int) -> LayerShape:  # noqa: ARG002
        space, hidden = self.space, self.hidden_size
        return LayerShape(
            space.state, space_matrices(space, hidden, "mixer"),
            hidden + space.num_others(hidden), {"num_heads": space.num_heads},
        )  # fmt: skip


@errors_spell(SPELLING)
def read(file: Mapping[str, Any]) -> Mamba2Config:
    """Heads times their size is `expand` times the hidden size.

    Outputs have a norm after their gate. Published files say that the norm is before the gate,
    which neither transformers nor these models do: the field has no meaning.
    """
    file = respelt(file, SPELLING)
    fields = Fields(file, respelt(DEFAULTS, SPELLING), NO_WINDOW)
    check_activation(fields)
    check_bool("norm_before_gate", fields.get("norm_before_gate", True))
    if fields.get("rms_norm") not in (None, True):
        raise ValueError(f"rms_norm must be true, got {shorten(fields['rms_norm'])}")
    sizes = space_sizes(fields, SIZES)
    check_inner(fields, "expand", sizes, "num_heads")
    space = StateSpace(
        **sizes,
        **time_limits(fields["time_step_limit"]),
        in_bias=fields.flag("use_bias"),
        conv_bias=fields.flag("use_conv_bias"),
        out_bias=fields.flag("use_bias"),
    )
    # What attention and feed-forward parts would have.
    unused = dict(num_attention_heads=1, num_key_value_heads=1, head_dim=2)
    unused |= dict(intermediate_size=space.inner, max_position_embeddings=POSITIONS)
    usual = Fields({**file, **unused}, respelt(DEFAULTS, SPELLING), NO_WINDOW)
    return Mamba2Config(**decoder_fields(usual), space=space)


def build(config: Mamba2Config, make: "Build") -> "CausalLM":
    """A block has a norm and a state space."""
    from nanovllm.layers.one_part_block import OnePartBlock
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder

    def block(index: int, make: "Build") -> OnePartBlock:  # noqa: ARG001
        mixer = space_mixer(config, config.space, make.inside("mixer"))
        return OnePartBlock(("norm", parts.norm(config)), mixer)

    embedding = parts.embedding(config, make)
    blocks = parts.blocks(config, make, block)
    decoder = Decoder(make, embedding, blocks, parts.norm(config), {})
    return CausalLM(make, decoder, parts.head(config, make, embedding))


FAMILY = Family(read, build, Names(prefixes=PREFIXES))
