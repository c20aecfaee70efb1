"""Granite 4: layers of attention or of state spaces, dense or with experts beside a shared part."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import Names
from nanovllm.kernels.operands.routing import Routing
from nanovllm.layers.state_space import StateSpace
from nanovllm.models.experts import experts_per_token
from nanovllm.models.family import Family
from nanovllm.models.fields import NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.granite import GraniteConfig, factors
from nanovllm.models.granite_moe import PIECES as EXPERT_PIECES
from nanovllm.models.layer_kinds import LINEAR, layer_kinds, without_kinds
from nanovllm.models.shapes import (
    ExpertCount,
    LayerShape,
    MatrixShape,
    attention_matrices,
    gated_matrices,
)
from nanovllm.models.state_spaces import (
    MAMBA_SIZES,
    check_inner,
    head_size,
    space_matrices,
    space_mixer,
    space_sizes,
    time_limits,
)
from nanovllm.models.windows import FULL
from nanovllm.utils.checks import check_int, shorten

if TYPE_CHECKING:
    from nanovllm.layers.feed_forward import FeedForward
    from nanovllm.layers.layer import Build
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    "eos_token_id": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024, "position_embedding_type": None,
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
    "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
    "mamba_proj_bias": False, "time_step_limit": (0.0, float("inf")),
}  # fmt: skip
PIECES = EXPERT_PIECES | {
    "shared_mlp.input_linear": "mlp.shared_expert.gate_up_proj",
    "shared_mlp.output_linear": "mlp.shared_expert.down_proj", "shared_mlp": "mlp.shared_expert",
}  # fmt: skip
SHARED = "shared_expert"  # our name of the part that all tokens use


@dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(GraniteConfig):
    """With the kind of each layer, and the experts of all; without a `routing` there are none.

    All tokens use a part with `shared_size`.
    """

    kinds: tuple[str, ...]
    space: StateSpace
    shared_size: int
    num_experts: int
    routing: Routing | None

    def layer_shape(self, index: int) -> LayerShape:
        hidden, shape = self.hidden_size, self._mixer_shape(index)
        matrices = [*shape.matrices, *gated_matrices(hidden, self.shared_size, f"mlp.{SHARED}")]
        split = {**shape.split, "shared_intermediate_size": self.shared_size}
        shape = replace(shape, num_others=shape.num_others + 2 * hidden, split=split)
        if self.routing is None:
            return replace(shape, matrices=tuple(matrices))
        inner = self.intermediate_size
        matrices.append(MatrixShape("mlp.gate", self.num_experts, hidden))
        matrices += gated_matrices(hidden, inner, "mlp.experts.0", is_experts=True)
        return replace(
            shape, matrices=tuple(matrices), split_experts={"intermediate_size": inner},
            experts=ExpertCount(self.num_experts, self.routing.per_token),
        )  # fmt: skip

    def _mixer_shape(self, index: int) -> LayerShape:
        """The shape of attention, or of a state space."""
        hidden, space = self.hidden_size, self.space
        if self.kinds[index] == LINEAR:
            split = {"mamba_n_heads": space.num_heads}
            matrices = space_matrices(space, hidden, "mamba")
            return LayerShape(space.state, matrices, space.num_others(hidden), split)
        heads = self.heads(index)
        biases = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim + hidden
        return LayerShape(heads, attention_matrices(hidden, heads), biases * self.qkv_bias)


def read(file: Mapping[str, Any]) -> GraniteHybridConfig:
    """Without a list of kinds, all layers have state spaces. Biases are those of attention."""
    fields = Fields(without_kinds(file), DEFAULTS, NO_WINDOW)
    check_activation(fields)
    usual = decoder_fields(fields)
    num_layers, kind = usual["num_hidden_layers"], fields["position_embedding_type"]
    if kind not in (None, "nope", "rope"):
        raise ValueError(f"position_embedding_type must be 'rope' or 'nope', got {shorten(kind)}")
    usual |= dict(rotated_layers=(kind == "rope",) * num_layers)
    num_experts = check_int("num_local_experts", fields["num_local_experts"], 0)
    routing = None
    if num_experts:
        per_token = experts_per_token(fields, num_experts)
        routing = Routing(per_token=per_token, normalized=True, scores="softmax of chosen")
    return GraniteHybridConfig(
        **usual,
        **factors(fields),
        qkv_bias=fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        kinds=layer_kinds(file, (LINEAR, FULL), num_layers) or (LINEAR,) * num_layers,
        space=_space(fields),
        shared_size=fields.size("shared_intermediate_size"),
        num_experts=num_experts,
        routing=routing,
    )


def _space(fields: Fields) -> StateSpace:
    inner = int(fields.number("mamba_expand") * fields["hidden_size"])
    fields["mamba_d_head"] = head_size(fields, "mamba_d_head", "mamba_n_heads", inner)
    sizes = space_sizes(fields, MAMBA_SIZES)
    check_inner(fields, "mamba_expand", sizes, "mamba_d_head")
    return StateSpace(
        **sizes,
        **time_limits(fields["time_step_limit"]),
        in_bias=fields.flag("mamba_proj_bias"),
        conv_bias=fields.flag("mamba_conv_bias"),
        out_bias=fields.flag("mamba_proj_bias"),
    )


def build(config: GraniteHybridConfig, make: "Build") -> "CausalLM":
    """Granite's factors, with mixers of two kinds."""
    from nanovllm.layers.block import Block
    from nanovllm.layers.mixer import ROPE, Mixer
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder

    def block(index: int, make: "Build") -> Block:
        name = "mamba" if config.kinds[index] == LINEAR else "self_attn"
        inside, scale = make.inside(name), config.attention_scale
        mixer: Mixer
        if name == "mamba":
            mixer = space_mixer(config, config.space, inside)
        else:
            mixer = parts.attention(config, index, inside, scale=scale)
        return Block(
            make, parts.pre_norms(config), mixer, _feed_forward(config, make.inside("mlp")),
            residual_scale=config.residual_scale, mixer_name=name,
        )  # fmt: skip

    embedding = parts.embedding(config, make, config.embedding_scale)
    ropes = {ROPE: parts.rope(config, make)} if any(config.rotated_layers) else {}
    blocks = parts.blocks(config, make, block)
    decoder = Decoder(make, embedding, blocks, parts.norm(config), ropes)
    return CausalLM(make, decoder, parts.head(config, make, embedding, scale=config.logit_scale))


def _feed_forward(config: GraniteHybridConfig, make: "Build") -> "FeedForward":
    """Experts and a part that all tokens use, or this part alone."""
    hidden, shared_size = config.hidden_size, config.shared_size
    if config.routing is None:
        from nanovllm.layers.feed_forward import MLP
        from nanovllm.layers.nested_feed_forward import NestedFeedForward

        return NestedFeedForward(SHARED, MLP(make.inside(SHARED), hidden, shared_size))
    from nanovllm.layers.shared_experts import SharedSparseMLP

    sizes = hidden, config.intermediate_size, config.num_experts
    return SharedSparseMLP(make, *sizes, config.routing, shared_size=shared_size, name=SHARED)


class GraniteNames(Names):
    """The files have one layer for the gate and the rest of the part that all tokens use."""

    def theirs(self, name: str) -> str:
        """The name in files, and in rules of quantized files, for our module `name`."""
        name = super().theirs(name)
        above, _, last = name.rpartition(".")
        is_fused = above.endswith(".shared_mlp") and last in ("gate_proj", "up_proj")
        return f"{above}.input_linear" if is_fused else name


FAMILY = Family(read, build, GraniteNames(pieces=PIECES))
