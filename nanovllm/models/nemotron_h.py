"""Nemotron-H and Nemotron 3: blocks of one part, a state space, attention, or without either."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.formats.names import FUSED, Names
from nanovllm.kernels.operands.routing import Routing
from nanovllm.layers.several_caches import NOTHING
from nanovllm.layers.state_space import StateSpace
from nanovllm.models.config import ModelConfig
from nanovllm.models.family import Family
from nanovllm.models.fields import MAX_LAYERS, NO_WINDOW, Fields, check_activation, decoder_fields
from nanovllm.models.layer_kinds import LINEAR, layer_kinds, without_kinds
from nanovllm.models.shapes import ExpertCount, LayerShape, MatrixShape, attention_matrices
from nanovllm.models.sigmoid_experts import sigmoid_routing
from nanovllm.models.spellings import errors_spell, respelt
from nanovllm.models.state_spaces import space_matrices, space_mixer, space_sizes, time_limits
from nanovllm.models.windows import FULL
from nanovllm.utils.checks import check_float, shorten

if TYPE_CHECKING:
    from nanovllm.layers.feed_forward import FeedForward
    from nanovllm.layers.layer import Build
    from nanovllm.layers.mixer import Mixer
    from nanovllm.layers.plain_experts import ExpertSizes
    from nanovllm.models.decoder import CausalLM

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 21_504,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 4096, "mlp_hidden_act": "relu2", "mlp_bias": False,
    "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
    "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001,
    "use_conv_bias": True, "use_bias": False, "layer_norm_epsilon": 1e-5, "eos_token_id": 2,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "moe_latent_size": None,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
SIZES = {
    "num_heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "num_groups": "n_groups",
    "state_size": "ssm_state_size", "width": "conv_kernel",
}  # fmt: skip
MLP, MOE = "mlp", "moe"
KINDS = (LINEAR, FULL, MLP, MOE)
NO_EXPERTS: Mapping[str, Any] = dict(
    num_experts=0, expert_size=0, shared_size=0, latent_size=None,
    routing=Routing(per_token=1, normalized=True),
)  # fmt: skip
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
PATTERN = "hybrid_override_pattern"
# Other names of fields, which transformers reads, too.
SPELLING = {
    "layer_norm_epsilon": "rms_norm_eps", "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_min": "time_step_min", "mamba_dt_limit": "time_step_limit",
}  # fmt: skip
NAMES = Names(
    fused={name: parts for name, parts in FUSED.items() if name == "qkv_proj"},
    experts={"gate_up_proj": ("up_proj",), "down_proj": ("down_proj",)},
    prefixes={
        "backbone.embeddings.": "model.embed_tokens.", "backbone.norm_f.": "model.norm.",
        "backbone.": "model.", "model.embeddings.": "model.embed_tokens.",
        "model.norm_f.": "model.norm.",
    },
    skipped=("mtp.",),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(ModelConfig):
    """With the kind of each layer, and the sizes of state spaces and experts.

    Experts have rows of `latent_size`, or of the hidden size.
    """

    kinds: tuple[str, ...]
    space: StateSpace
    num_experts: int
    expert_size: int
    shared_size: int
    latent_size: int | None
    routing: Routing

    @property
    def expert_sizes(self) -> "ExpertSizes":
        """The sizes of a layer's experts."""
        from nanovllm.layers.plain_experts import ExpertSizes

        return ExpertSizes(self.num_experts, self.expert_size, self.shared_size, self.latent_size)

    def layer_shape(self, index: int) -> LayerShape:
        """A norm, and the layer's part."""
        hidden, inner, kind, space = (
            self.hidden_size, self.intermediate_size, self.kinds[index], self.space,
        )  # fmt: skip
        if kind == LINEAR:
            matrices, split = space_matrices(space, hidden, "mixer"), space.num_heads
            others = hidden + space.num_others(hidden)
            return LayerShape(space.state, matrices, others, {"mamba_num_heads": split})
        if kind == FULL:
            heads = self.heads(index)
            return LayerShape(heads, attention_matrices(hidden, heads, "mixer"), hidden)
        if kind == MOE:
            return self._moe_shape()
        others = hidden + (inner + hidden) * self.mlp_bias
        split_sizes = {"intermediate_size": inner}
        return LayerShape(NOTHING, plain_matrices(hidden, inner, "mixer"), others, split_sizes)

    def _moe_shape(self) -> LayerShape:
        """The experts, with the router's biases, and the part that all tokens use."""
        hidden, shared, latent = self.hidden_size, self.shared_size, self.latent_size
        matrices = [
            MatrixShape("mixer.gate", self.num_experts, hidden),
            *plain_matrices(latent or hidden, self.expert_size, "mixer.experts.0", True),
            *plain_matrices(hidden, shared, "mixer.shared_experts"),
        ]
        biases = shared + hidden
        if latent is not None:
            matrices.append(MatrixShape("mixer.fc1_latent_proj", latent, hidden))
            matrices.append(MatrixShape("mixer.fc2_latent_proj", hidden, latent))
            biases += latent + hidden
        return LayerShape(
            NOTHING, tuple(matrices), hidden + self.num_experts + biases * self.mlp_bias,
            {"moe_shared_expert_intermediate_size": shared},
            {"moe_intermediate_size": self.expert_size},
            ExpertCount(self.num_experts, self.routing.per_token),
        )  # fmt: skip


def plain_matrices(
    size: int, inner: int, above: str, is_experts: bool = False
) -> tuple[MatrixShape, ...]:
    """The matrices of a part without a gate, or of each expert."""
    return (
        MatrixShape(f"{above}.up_proj", inner, size, is_experts),
        MatrixShape(f"{above}.down_proj", size, inner, is_experts),
    )


@errors_spell(SPELLING)
def read(file: Mapping[str, Any]) -> NemotronHConfig:
    """Attention has no biases and does not rotate, whatever the file says of that."""
    file, kinds = respelt(file, SPELLING, both=True), _kinds(file)
    defaults = respelt(DEFAULTS, SPELLING, both=True)
    usual = {**without_kinds(file), "num_hidden_layers": len(kinds)}
    fields = Fields(usual, defaults, NO_WINDOW)
    check_activation(fields, "relu2", "mlp_hidden_act")
    check_activation(fields, "silu", "mamba_hidden_act")
    return NemotronHConfig(
        **decoder_fields(fields) | dict(rotated_layers=(False,) * len(kinds)),
        mlp_bias=fields.flag("mlp_bias"),
        kinds=kinds,
        space=StateSpace(
            **space_sizes(fields, SIZES),
            in_bias=fields.flag("use_bias"),
            conv_bias=fields.flag("use_conv_bias"),
            out_bias=fields.flag("use_bias"),
            low=_shortest_step(fields),
        ),
        **(_experts(fields) if MOE in kinds else NO_EXPERTS),
    )


def _shortest_step(fields: Fields) -> float:
    """The least time step; `time_step_limit` may not limit steps further."""
    shortest = check_float("time_step_min", fields["time_step_min"], 0.0)
    if (given := fields.get("time_step_limit")) is None:
        return shortest
    limits = time_limits(given)
    if limits["low"] > shortest or "high" in limits:
        raise ValueError(
            f"time_step_limit={shorten(given)} is not supported: steps have no other limit than"
            f" time_step_min={shortest}"
        )
    return shortest


def _kinds(file: Mapping[str, Any]) -> tuple[str, ...]:
    """The kind of each layer, of a list or of a string with a letter for each."""
    listed, pattern = layer_kinds(file, KINDS), file.get(PATTERN)
    kinds = listed or (LINEAR, MOE, FULL, MLP)
    if pattern is not None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - LETTERS.keys():
            raise ValueError(f"{PATTERN} must have letters of M*-E, got {shorten(pattern)}")
        kinds = tuple(LETTERS[letter] for letter in pattern)
        if listed not in (None, kinds):
            raise ValueError(f"{PATTERN} {shorten(pattern)} contradicts the list of layer types")
    if len(kinds) > MAX_LAYERS or file.get("num_hidden_layers") not in (None, len(kinds)):
        number = shorten(file.get("num_hidden_layers"))
        raise ValueError(f"num_hidden_layers={number}, but there are {len(kinds)} layer types")
    return kinds


def _experts(fields: Fields) -> dict[str, Any]:
    """The fields of layers with experts. Without such layers they have no meaning."""
    num_experts, shared = fields.size("n_routed_experts"), fields.get("n_shared_experts", 1)
    if shared != 1:
        raise ValueError(f"n_shared_experts must be 1, got {shorten(shared)}")
    latent = None if fields["moe_latent_size"] is None else fields.size("moe_latent_size")
    return dict(
        num_experts=num_experts,
        expert_size=fields.size("moe_intermediate_size"),
        shared_size=fields.size("moe_shared_expert_intermediate_size"),
        latent_size=latent,
        routing=sigmoid_routing(fields, num_experts),
    )


def build(config: NemotronHConfig, make: "Build") -> "CausalLM":
    """Blocks of one part, without ropes."""
    from nanovllm.layers.one_part_block import OnePartBlock
    from nanovllm.models import parts
    from nanovllm.models.decoder import CausalLM, Decoder

    def block(index: int, make: "Build") -> OnePartBlock:
        return OnePartBlock(("norm", parts.norm(config)), _part(config, index, make))

    embedding, blocks = parts.embedding(config, make), parts.blocks(config, make, block)
    decoder = Decoder(make, embedding, blocks, parts.norm(config), {})
    return CausalLM(make, decoder, parts.head(config, make, embedding))


def _part(config: NemotronHConfig, index: int, make: "Build") -> "Mixer | FeedForward":
    """The part of a block."""
    from nanovllm.models import parts

    make, kind, hidden = make.inside("mixer"), config.kinds[index], config.hidden_size
    if kind == LINEAR:
        return space_mixer(config, config.space, make)
    if kind == FULL:
        return parts.attention(config, index, make)
    if kind == MOE:
        from nanovllm.layers.plain_experts import PlainSparseMLP

        sizes, routing = config.expert_sizes, config.routing
        return PlainSparseMLP(make, hidden, sizes, routing, bias=config.mlp_bias)
    from nanovllm.layers.activations import relu_squared
    from nanovllm.layers.plain_mlp import PlainMLP

    return PlainMLP(make, hidden, config.intermediate_size, relu_squared, bias=config.mlp_bias)


FAMILY = Family(read, build, NAMES)
